"""A decoder's layer of one to eight tokens up to its router by four kernels that overlap, on Hopper GPUs."""
