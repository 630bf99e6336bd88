"""gpt-oss checkpoints, in the Hugging Face, the original and the Orbax form."""

from jmx.checkpoint.gpt_oss.reader import Layer, Reader, load
from jmx.checkpoint.gpt_oss.storage import is_checkpoint
from jmx.checkpoint.gpt_oss.tensor_names import file_name, tensor_shapes
from jmx.checkpoint.gpt_oss.writer import convert
from jmx.checkpoint.model_configs.gpt_oss import Config, read_config
from jmx.checkpoint.shards import CheckpointError

__all__ = [
    "CheckpointError",
    "Config",
    "Layer",
    "Reader",
    "convert",
    "file_name",
    "is_checkpoint",
    "load",
    "read_config",
    "tensor_shapes",
]
