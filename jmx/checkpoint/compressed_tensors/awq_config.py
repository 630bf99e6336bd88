"""Configs of AWQ, `quant_method` "awq", as AutoAWQ and transformers write them.

Weights are 4-bit integers in groups with zero points. See https://github.com/casper-hansen/AutoAWQ (its AwqConfig) and
transformers' AwqConfig; vLLM's "moe_wna16" reads the same files.
"""

from pathlib import Path
from typing import Any

from jmx.checkpoint.compressed_tensors.config import AWQ, Group, Quantization, Scheme
from jmx.checkpoint.compressed_tensors.gptq_config import OF_AUTO_ROUND, check_inputs, group_size
from jmx.checkpoint.compressed_tensors.targets import parse_module, parse_target, targets_of
from jmx.checkpoint.config_object import ConfigObject

METHOD = "awq"

# What fuses modules or picks kernels in other packages; no weight depends on it.
_ELSEWHERE = (
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "dataset",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "modules_to_fuse",
)
_SPELLINGS = ("bits", "w_bit"), ("group_size", "q_group_size")  # in config.json, and in AutoAWQ's own file


def parse_awq(file: Path, place: str, value: Any) -> Quantization:
    """The quantization of the object at `place` of config.json. Raises `CheckpointError`: see `of_method`."""
    top = ConfigObject.of_method(file, place, value, METHOD, (*_ELSEWHERE, *OF_AUTO_ROUND))
    bits, of_group = (next((key for key in keys if key in top.entries), keys[0]) for keys in _SPELLINGS)
    top.one_of(bits, (4,))
    size = group_size(top, of_group)
    top.one_of("zero_point", (True,))  # the package packs no weights without them
    top.one_of("version", ("gemm", "GEMM", None), None)  # others pack words along the other axis
    ignore = targets_of(top, "modules_to_not_convert", top.strings("modules_to_not_convert", []), parse_module)
    check_inputs(top)
    top.close()
    scheme = Scheme("int4_channel_asym" if size is None else f"int4_g{size}_asym", None, AWQ)
    return Quantization(file, (Group(METHOD, (parse_target("Linear"),), scheme),), ignore)
