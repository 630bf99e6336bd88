"""Checkpoints: one module a family, each reading 4-bit experts as they are."""

from jmx.checkpoint import gpt_oss, orbax
from jmx.checkpoint.shards import CheckpointError

__all__ = ["CheckpointError", "gpt_oss", "orbax"]
