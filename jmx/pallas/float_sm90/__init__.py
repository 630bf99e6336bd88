"""Grouped products of 16-bit floats on Hopper, in Pallas Mosaic GPU: rows of groups times their group's weights.

    backend   the backend, by whose products layers are computed: start here
    product   the kernel that multiplies rows with weights, or with transposed ones
    fitted    the same for groups of many rows, with results in 16 bits
    outer     the kernel of the weights' gradients: the sums of rows times rows over each group
    rows_kernel  what `product` and `fitted` share: their launch, work items, and copies of rows
    blocks    groups of rows as blocks, which begin where TMA can read
    tile      a warpgroup's tile: its products, and how it is stored
    config    tile sizes, and how they are chosen

The pipeline, with all waits for stages and their releases, is in `jmx.pallas.sm90.pipeline`.
"""
