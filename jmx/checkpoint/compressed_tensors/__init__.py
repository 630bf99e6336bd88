"""compressed-tensors checkpoints, and those of ModelOpt, Quark, DeepSeek, Qwen, GPTQ, AWQ and AutoRound.

They hold the same bits under other names.
"""

from jmx.checkpoint.compressed_tensors.config import Quantization, Scheme
from jmx.checkpoint.compressed_tensors.layers import Layer
from jmx.checkpoint.compressed_tensors.module import Module
from jmx.checkpoint.compressed_tensors.quantization_config import is_quantized, read_quantization
from jmx.checkpoint.compressed_tensors.reader import Reader
from jmx.checkpoint.compressed_tensors.writer import convert
from jmx.checkpoint.shards import CheckpointError

__all__ = [
    "CheckpointError",
    "Layer",
    "Module",
    "Quantization",
    "Reader",
    "Scheme",
    "convert",
    "is_quantized",
    "read_quantization",
]
