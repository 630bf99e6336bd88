"""Adapters in the files of PEFT: `adapter_model.safetensors` and `adapter_config.json`."""

from jmx.checkpoint.peft.reader import Reader, load
from jmx.checkpoint.peft.writer import save

__all__ = ["Reader", "load", "save"]
