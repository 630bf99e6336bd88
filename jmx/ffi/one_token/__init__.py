"""A token's way from one sum of experts to the next router by one kernel in C++, for Hopper GPUs."""
