"""Backend `mosaic_fp8`: inputs of 8 bits on Hopper's 8-bit tensor cores, in Pallas Mosaic GPU.

    backend         what it supports
    layer           the layer around the launches
    kernel          the persistent kernel: start here
    producer        producer warps: what is copied into a stage
    consumer        consumer warpgroups: waits for stages, their release, and the epilogue
    gemm            a GEMM as a thread knows it, and the shared memory
    grouped_gemm    the products of a launch, and their arrays
    elements        what is multiplied, for each pair of a weight format and an input format
    wgmma, tokens_as_a, integer_sums   products of a unit for one thread
    decode          operand A of 4-bit elements
    row_scales, staging  scales and biases; results in shared memory
    quantize, quantize_row, fused_quantize   quantization of rows: separate, of one row, within the kernel
    rows            rows in FP8, or not quantized yet
    layout          the order of weights in memory
    config          tunable sizes, and the heuristic

The pipeline, with the barriers of its stages, is in `jmx.pallas.sm90.pipeline`.
"""
