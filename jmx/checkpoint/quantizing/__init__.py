"""Quantising the experts of a checkpoint that holds them as floats: from files to files, one matrix in memory."""

from jmx.checkpoint.quantizing.forms import WRITABLE
from jmx.checkpoint.quantizing.report import Errors, Report
from jmx.checkpoint.quantizing.writer import convert
from jmx.checkpoint.shards import CheckpointError

__all__ = ["WRITABLE", "CheckpointError", "Errors", "Report", "convert"]
