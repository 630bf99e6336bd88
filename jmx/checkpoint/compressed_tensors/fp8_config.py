"""Configs of FP8 in blocks, `quant_method` "fp8", as in the checkpoints of DeepSeek, MiniMax and Qwen.

Weights are e4m3 with one scale per 128 x 128 block, `weight_scale_inv`, which multiplies despite its name. Inputs are
quantized per token in groups of 128; with `scale_fmt` "ue8m0" their scales are powers of two. See transformers'
FineGrainedFP8Config, and `act_quant` in the inference code of DeepSeek-V3.2.
"""

import re
from pathlib import Path
from typing import Any

from jmx.checkpoint.compressed_tensors.config import BLOCK, FP8, FP8_UE8M0, Group, Quantization, Scheme
from jmx.checkpoint.compressed_tensors.targets import LONGEST, Target, parse_target, targets_of
from jmx.checkpoint.config_object import ConfigObject

METHOD = "fp8"

# `scale_fmt` -> the inputs' format and the weights' storage.
_BY_SCALES = {
    "ue8m0": ("fp8_block_ue8m0", FP8_UE8M0),
    "float": ("fp8_block", FP8),
    None: ("fp8_block", FP8),
}
_IGNORE = ("modules_to_not_convert", "ignored_layers")


def parse_fp8(file: Path, place: str, value: Any) -> Quantization:
    """The quantization of the object at `place` of config.json.

    Raises:
        CheckpointError: a key is unknown or missing, or has a value of another type or one that jmx does not support.
    """
    top = ConfigObject(file, place, value)
    top.one_of("quant_method", (METHOD,))
    dynamic = top.one_of("activation_scheme", ("dynamic", "static"), "dynamic") == "dynamic"
    top.one_of("fmt", ("e4m3", "float8_e4m3fn", None), None)  # two names of one type
    inputs, storage = _BY_SCALES[top.one_of("scale_fmt", (*_BY_SCALES,), None)]
    top.one_of("expert_dtype", ("fp8", None), None)
    top.one_of("modules_to_convert", ([], None), None)
    top.one_of("dequantize", (False, None), None)
    top.one_of("weight_block_size", (BLOCK,))
    ignore = [t for key in _IGNORE for t in targets_of(top, key, top.strings(key, []), _parse_module)]
    top.close()
    scheme = Scheme("fp8_block", inputs if dynamic else "static e4m3", storage)
    return Quantization(file, (Group(METHOD, (parse_target("Linear"),), scheme),), tuple(ignore))


def _parse_module(text: str) -> Target:
    """The target of a module and all modules inside it, by its full name or the end of it after a dot."""
    if not 0 < len(text) <= LONGEST:
        raise ValueError(f"a target must have 1 to {LONGEST} characters, not {len(text)}")
    return Target(text, re.compile(rf"(?:.*\.)?{re.escape(text)}(?:\..*)?$", re.DOTALL))
