"""Other systems' MXFP4 layers, timed on the same card as jmx, in one process per system.

    problem.py          one layer's shape, weights, tokens and reference, in PyTorch
    timing.py           CUDA graphs, timed as `jmx.perf.bench` times
    run.py              one system at every token count: a JSON line each
    triton_kernels.py   OpenAI's Triton kernels        } a module a system, whose `prepare(shape, weights)`
    marlin.py           Marlin, out of vLLM's library  } gives `bind(case)`, which gives a call without
    humming.py          Humming                        } arguments that returns y (T, H), bfloat16
    vllm_library.py     vLLM's operators: Marlin's products, and the grouping of rows that Humming uses too
    elementwise.py      the two small kernels that stand around those systems' products
    fetch.py            brings the systems from the package index
    deepgemm_sm90.cu    a program of its own: DeepGEMM's products in FP8

They need PyTorch 2.11, Triton and a CUDA GPU; nothing here imports jax.
"""
