"""Formats of weights and of inputs, rounding, and the layouts of weights in memory."""
