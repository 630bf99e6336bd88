"""Attention on Hopper GPUs, in Pallas Mosaic GPU: whole prompts (`prefill`) and one new token a row (`decode`)."""
