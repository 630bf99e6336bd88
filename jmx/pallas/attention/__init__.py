"""Attention on Hopper GPUs, in Pallas Mosaic GPU: whole prompts, and one new token a row over a cache."""
