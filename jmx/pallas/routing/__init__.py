"""Routing and grouping by one kernel, of many tokens by two, for NVIDIA GPUs."""
