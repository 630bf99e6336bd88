"""gpt-oss checkpoints, in the Hugging Face form and the original form."""

from jmx.checkpoint.gpt_oss.config import Config, read_config
from jmx.checkpoint.gpt_oss.reader import Reader, load
from jmx.checkpoint.gpt_oss.writer import convert
from jmx.checkpoint.shards import CheckpointError

__all__ = ["CheckpointError", "Config", "Reader", "convert", "load", "read_config"]
