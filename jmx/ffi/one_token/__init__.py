"""A token's way from one sum of experts to the next router by four kernels in C++ that overlap, for Hopper GPUs."""
