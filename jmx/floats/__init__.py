"""Products of rows with their experts' float weights: kernels where they run, else XLA."""

from jmx.floats.grouped_dot import grouped_dot
from jmx.floats.kernels import NAME, rejection

__all__ = ["NAME", "grouped_dot", "rejection"]
