"""Quantization-aware training: master weights in floats, which each call rounds to a format that it computes with."""

from jmx.qat.masters import QAT, MasterExperts
from jmx.qat.rounding import GRADIENTS, rounded

__all__ = ["GRADIENTS", "QAT", "MasterExperts", "rounded"]
