"""What configs of block-quantised FP8 checkpoints say, as DeepSeek and Qwen publish them: `quant_method` "fp8".

Weights are e4m3 with one scale to 128 x 128 of them, `weight_scale_inv`, which multiplies whatever its name says.
Inputs are rounded at each token in groups of 128. See transformers' FineGrainedFP8Config.
"""

import re
from pathlib import Path
from typing import Any

from jmx.checkpoint.compressed_tensors.config import BLOCK, FP8, Group, Quantization, Scheme
from jmx.checkpoint.compressed_tensors.targets import LONGEST, Target, parse_target, targets_of
from jmx.checkpoint.entries import Entries

METHOD = "fp8"

_IGNORE = ("modules_to_not_convert", "ignored_layers")


def parse_fp8(file: Path, place: str, value: Any) -> Quantization:
    """The quantisation that the object at `place` of config.json says.

    Raises:
        CheckpointError: a key that is unknown, missing, of another kind, or of a meaning that is not run here.
    """
    top = Entries(file, place, value)
    top.one_of("quant_method", (METHOD,))
    top.one_of("activation_scheme", ("dynamic",))
    top.one_of("fmt", ("e4m3", None), None)
    top.one_of("scale_fmt", (None,), None)  # "ue8m0" rounds inputs' scales to powers of two
    top.one_of("dequantize", (False, None), None)
    top.one_of("weight_block_size", (BLOCK,))
    ignore = [t for key in _IGNORE for t in targets_of(top, key, top.strings(key, []), _parse_module)]
    top.close()
    scheme = Scheme("fp8_block", "fp8_block", FP8)
    return Quantization(file, (Group(METHOD, (parse_target("Linear"),), scheme),), tuple(ignore))


def _parse_module(text: str) -> Target:
    """A module and all inside it, its name whole or cut off in front at a dot."""
    if not 0 < len(text) <= LONGEST:
        raise ValueError(f"a target must have 1 to {LONGEST} characters, not {len(text)}")
    return Target(text, re.compile(rf"(?:.*\.)?{re.escape(text)}(?:\..*)?$", re.DOTALL))
