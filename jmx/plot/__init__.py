"""Pictures: of the load of experts and ranks, of quantization errors, of benchmarks, of a server and of profiles.

Each function returns a matplotlib `Figure`, which a notebook shows and `Figure.savefig` writes. They need matplotlib:
`pip install 'jmx-moe[bench]'`.
"""

from jmx.plot.loads import expert_load, rank_load
from jmx.plot.quantization import quantization_error
from jmx.plot.serving import serving
from jmx.plot.speed import kernels, roofline

__all__ = ["expert_load", "kernels", "quantization_error", "rank_load", "roofline", "serving"]
