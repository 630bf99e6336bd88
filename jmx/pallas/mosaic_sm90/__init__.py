"""Backend `mosaic`: weights dequantized in registers for Hopper's 16-bit tensor cores, in Pallas Mosaic GPU.

    backend       what it supports, and the layer around the kernel
    kernel        the persistent kernel: start here
    scheduler     its work items
    producer      producer warps: what is copied into a stage
    consumer      consumer warpgroups: what is done with a stage, and the epilogue
    grouped_gemm  one of its two GEMMs, and the shared memory
    tile_mma      products of a tile for one thread: wgmma and mma.sync
    dequantize, elements  how words become bfloat16
    layout        the order of weights in memory
    config        tunable sizes, and the heuristic
    rows, act_order   rows of tokens; in a column order, by a kernel that gathers them
    round_rows, rounded_inputs, rounded_tiles, fused_rounding   inputs that are rounded: by a kernel, or as h is written
    alone, added      one of both products by itself; with a product of few columns in its sums
    backward, transposed, weight_gradients   gradients: their products, by transposed weights, and those of weights

The pipeline, with all waits for stages and their releases, is in `jmx.pallas.sm90.pipeline`.
"""
