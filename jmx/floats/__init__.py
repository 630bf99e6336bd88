"""Products of rows with their experts' float weights: kernels where they run, else XLA."""

from jmx.floats.products import NAME, grouped_dot, rejection

__all__ = ["NAME", "grouped_dot", "rejection"]
