"""Configs of FP8, `quant_method` "fp8": in blocks, as in the checkpoints of DeepSeek, MiniMax and Qwen, or by tensor.

Weights are e4m3 with one scale per 128 x 128 block, `weight_scale_inv`, which multiplies despite its name. Inputs are
quantized per token in groups of 128; with `scale_fmt` "ue8m0" their scales are powers of two. See transformers'
FineGrainedFP8Config, and `act_quant` in the inference code of DeepSeek-V3.2. Without `weight_block_size` a tensor has
one scale, `weight_scale`, and with `activation_scheme` "static" its inputs one, `input_scale`, as in AutoFP8's files.

In DeepSeek-V4's checkpoints `expert_dtype` "fp4", beside the quantization or in it, makes the experts MXFP4: two e2m1
elements a byte, the even one low, and e8m0 scales of 32 columns in a tensor called "scale" (`Linear` in its inference
code). The shared experts and all other weights stay FP8, and inputs are quantized as theirs.
"""

from pathlib import Path
from typing import Any

from jmx.checkpoint.compressed_tensors.config import (
    DEEPSEEK_FP4,
    FLOAT_QUANTIZED,
    FP8,
    FP8_UE8M0,
    Group,
    Quantization,
    Scheme,
    block_of,
)
from jmx.checkpoint.compressed_tensors.targets import parse_module, parse_target, targets_of
from jmx.checkpoint.config_object import ConfigObject
from jmx.checkpoint.shards import CheckpointError
from jmx.numerics.formats import fp8_in_blocks
from jmx.numerics.input_formats import INPUT_FORMATS

METHOD = "fp8"

# `scale_fmt` -> the inputs' format and the weights' storage.
_BY_SCALES = {
    "ue8m0": ("fp8_block_ue8m0", FP8_UE8M0),
    "float": ("fp8_block", FP8),
    None: ("fp8_block", FP8),
}
_EXPERTS = r"re:(.*\.)?experts\.[0-9]+\."  # not those of a module called "shared_experts"
_IGNORE = ("modules_to_not_convert", "ignored_layers")


def parse_fp8(file: Path, place: str, value: Any, expert_dtype: Any = None) -> Quantization:
    """The quantization of the object at `place` of config.json; `expert_dtype`: that key of the config around it.

    Raises `CheckpointError`: see `of_method`.
    """
    top = ConfigObject.of_method(file, place, value, METHOD)
    dynamic = top.one_of("activation_scheme", ("dynamic", "static"), "dynamic") == "dynamic"
    top.one_of("fmt", ("e4m3", "float8_e4m3fn", None), None)  # two names of one type
    inputs, storage = _BY_SCALES[top.one_of("scale_fmt", (*_BY_SCALES,), None)]
    inner = top.one_of("expert_dtype", ("fp8", "fp4", None), None)
    if expert_dtype not in ("fp8", "fp4", None) or (None not in (inner, expert_dtype) and inner != expert_dtype):
        known = f"must be 'fp8' or 'fp4', as `{place}.expert_dtype` (={inner!r}) if that is given"
        raise CheckpointError(file, f"`expert_dtype` (={expert_dtype!r}) {known}")
    top.one_of("modules_to_convert", ([], None), None)
    top.one_of("dequantize", (False, None), None)
    kv_cache = top.one_of("kv_cache_scheme", ("static", None), None)  # AutoFP8's
    block = block_of(top, "weight_block_size", None)
    ignore = [t for key in _IGNORE for t in targets_of(top, key, top.strings(key, []), parse_module)]
    top.close()
    if block is None:
        scheme = Scheme("fp8_tensor", "fp8_tensor" if dynamic else "fp8_static", FLOAT_QUANTIZED)
    else:
        columns = block[1]
        if not dynamic:
            inputs = "static e4m3"
        elif columns != INPUT_FORMATS[inputs].block_size:
            inputs = f"dynamic e4m3 by group of {columns}"
        scheme = Scheme(fp8_in_blocks(*block).name, inputs, storage)
    groups = [Group(METHOD, (parse_target("Linear"),), scheme)]
    if "fp4" in (inner, expert_dtype):
        groups.append(Group("experts", (parse_target(_EXPERTS),), Scheme("mxfp4", scheme.inputs, DEEPSEEK_FP4)))
    return Quantization(file, tuple(groups), tuple(ignore), kv_cache is not None)
