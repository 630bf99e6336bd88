"""What numbers are: formats of weights and of inputs, rounding, and the layouts in which weights lie."""
