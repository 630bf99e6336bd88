"""Other systems, timed on the same machine as jmx.

MXFP4 layers on an NVIDIA GPU, one process per system, for layer.py and layer_turns.py:

    problem.py          one layer's shape, weights, tokens and reference, in PyTorch
    timing.py           CUDA graphs, timed as `jmx.perf.bench` times
    run.py              one system at every token count: a JSON line each
    triton_kernels.py   OpenAI's Triton kernels        } a module a system, whose `prepare(shape, weights)`
    marlin.py           Marlin, out of vLLM's library  } gives `bind(case)`, which gives a call without
    humming.py          Humming                        } arguments that returns y (T, H), bfloat16
    vllm_library.py     vLLM's operators: Marlin's products, and the grouping of rows that Humming uses too
    elementwise.py      two small kernels: between the products of these systems, and after them
    fetch.py            brings the systems from the package index

They need PyTorch 2.11, Triton and a CUDA GPU; but for fetch.py, none imports jax. And:

    grouped_mm.py       a layer of bfloat16 weights by torch's grouped products, with gradients, for training.py
    deepgemm_sm90.cu    a program of its own: DeepGEMM's products in FP8
    llama_cpp.py        an MXFP4 layer on a CPU by llama.cpp's library, for cpu.py
"""
