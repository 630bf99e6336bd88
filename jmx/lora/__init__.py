"""Low-rank adapters on experts, trained beside frozen quantized weights: LoRA."""

from jmx.lora.adapters import Adapter, Adapters, LoRA
from jmx.lora.merging import Requantized, merge, requantize

__all__ = ["Adapter", "Adapters", "LoRA", "Requantized", "merge", "requantize"]
