"""Checkpoints: one module a family, each reading quantised experts as they are."""

from jmx.checkpoint import compressed_tensors, gpt_oss, orbax, quantizing
from jmx.checkpoint.shards import CheckpointError

__all__ = ["CheckpointError", "compressed_tensors", "gpt_oss", "orbax", "quantizing"]
