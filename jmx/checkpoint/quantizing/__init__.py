"""Quantizing a checkpoint's float experts: from files to files, with one matrix in memory."""

from jmx.checkpoint.quantizing.float_experts import Layer
from jmx.checkpoint.quantizing.output_forms import WRITABLE
from jmx.checkpoint.quantizing.reader import FloatExperts, Reader
from jmx.checkpoint.quantizing.report import Errors, Report
from jmx.checkpoint.quantizing.writer import convert
from jmx.checkpoint.shards import CheckpointError

__all__ = [
    "WRITABLE",
    "CheckpointError",
    "Errors",
    "FloatExperts",
    "Layer",
    "Reader",
    "Report",
    "convert",
]
