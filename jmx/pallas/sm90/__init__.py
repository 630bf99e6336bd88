"""What the Pallas Mosaic GPU kernels for Hopper (compute capability 9.0) share.

launch       the persistent kernel: producer warps and consumer warpgroups of one CTA per SM
scheduler    the work items of a CTA
pipeline     the stages in shared memory: where producers and consumers wait for them and release them
tiles        how weights are tiled
accumulator  what a thread holds of an accumulator
reduction    partial sums of warpgroups that share columns
epilogue     scales, biases and stores of a tile
row          a row of inputs in the registers of a warpgroup: its largest magnitudes, scales, quotients
gemm         operands and epilogue of a grouped GEMM
counters     signals between CTAs
config       what configurations have in common
operation    operations that are written for one thread, and the types of references
mlir         short names for MLIR
layout_inference  lowering in half the time with jax 0.11
"""
