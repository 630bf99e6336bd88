"""Pictures: of loads of experts and ranks, of quantization errors, benchmarks, a server, a training, and profiles.

Each function returns a matplotlib `Figure`, which a notebook shows and `Figure.savefig` writes. They need matplotlib:
`pip install 'jmx-moe[bench]'`.
"""

from jmx.plot.loads import expert_load, rank_load
from jmx.plot.quantization import quantization_error
from jmx.plot.serving import serving
from jmx.plot.speed import kernels, roofline
from jmx.plot.training import training_loss

__all__ = ["expert_load", "kernels", "quantization_error", "rank_load", "roofline", "serving", "training_loss"]
