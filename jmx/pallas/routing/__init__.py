"""Routing and grouping of few tokens by one kernel for NVIDIA GPUs."""
