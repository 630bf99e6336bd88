"""A decoder's layer of one token up to its router by four kernels that overlap, on Hopper GPUs."""
