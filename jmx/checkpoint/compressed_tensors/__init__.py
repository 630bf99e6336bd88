"""compressed-tensors checkpoints: experts of any scheme that the package of that name writes."""

from jmx.checkpoint.compressed_tensors.config import Quantization, Scheme, read_quantization
from jmx.checkpoint.shards import CheckpointError

__all__ = ["CheckpointError", "Quantization", "Scheme", "read_quantization"]
