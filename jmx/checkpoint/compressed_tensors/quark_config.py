"""Configs of AMD's Quark: weights in MXFP4, and in FP8 by tensor or by channel.

See https://quark.docs.amd.com. `global_quant_config` applies to all linear modules except those that are excluded, and
those that a pattern of `layer_quant_config` matches, which have its own.
"""

from pathlib import Path
from typing import Any

from jmx.checkpoint.compressed_tensors.config import FLOAT_QUANTIZED, QUARK, Group, Quantization, Scheme
from jmx.checkpoint.compressed_tensors.targets import PATTERN, Target, parse_glob, parse_target, targets_of
from jmx.checkpoint.config_object import ConfigObject
from jmx.checkpoint.shards import CheckpointError

METHOD = "quark"

# (dtype, qscheme, group_size, scale_format, is_dynamic, ch_axis if by channel) of weights -> format and storage, which
# for FP8 is that of compressed-tensors; and of inputs -> format. Axis 1 of inputs is that of tokens.
_WEIGHTS: dict[tuple[Any, ...], tuple[str, str]] = {
    ("fp4", "per_group", 32, "e8m0", False, None): ("mxfp4", QUARK),
    ("fp8_e4m3", "per_tensor", None, None, False, None): ("fp8_tensor", FLOAT_QUANTIZED),
    ("fp8_e4m3", "per_channel", None, None, False, 0): ("fp8_channel", FLOAT_QUANTIZED),
}
_INPUTS: dict[tuple[Any, ...], str] = {
    ("fp8_e4m3", "per_tensor", None, None, False, None): "fp8_static",
    ("fp8_e4m3", "per_tensor", None, None, True, None): "fp8_tensor",
    ("fp8_e4m3", "per_channel", None, None, True, 1): "fp8_token",
    ("fp8_e4m3", "per_group", 32, "e8m0", True, None): "mxfp8",
    ("fp4", "per_group", 32, "e8m0", True, None): "mxfp4",
}

# How scales were calibrated. It does not change their meaning.
_CALIBRATION = (
    "block_size",
    "enable_buffer_reuse",
    "is_scale_quant",
    "max_input_numel",
    "mx_element_dtype",
    "observer_cls",
    "round_method",
    "scale_calculation_mode",
    "scale_type",
    "zero_point_type",
)
# Keys that do not concern experts; and keys that would change them, which must be empty.
_ELSEWHERE = ("kv_cache_post_rope", "version")
_EMPTY = ("layer_type_quant_config", "softmax_quant_spec")
# Algorithms that only changed the weights, and do nothing when the model runs.
_ALGORITHMS = ("awq", "gptq", "gptaq", "qronos", "smooth", "smoothquant", "autosmoothquant")
_MODES = ("eager_mode", "fx_graph_mode")
_EXPORT = {"weight_format": ("real_quantized", None), "pack_method": ("reorder", "order", None)}
_SHARED_SCALES = (
    "kv_cache_group",
    "min_kv_scale",
    "weight_merge_groups",
)  # of calibration alone


def parse_quark(file: Path, place: str, value: Any) -> Quantization:
    """The quantization of the object at `place` of config.json. Raises `CheckpointError`: see `of_method`."""
    top = ConfigObject.of_method(file, place, value, METHOD, _ELSEWHERE)
    top.one_of("quant_mode", (*_MODES, None), None)
    top.check("algo_config", _is_past, f"must be of algorithms that are done: {', '.join(_ALGORITHMS)}", None)
    if top.object_or_none("export") is not None:
        export = top.object("export")
        for key, known in _EXPORT.items():
            export.one_of(key, known, None)
        export.ignore(*_SHARED_SCALES)
        export.close()
    for key in _EMPTY:
        top.check(key, lambda value: value in (None, {}), "must be empty: all modules must be quantized alike", None)
    kv_cache = top.object_or_none("kv_cache_quant_config")
    ignore = targets_of(top, "exclude", top.strings("exclude", []), _parse_excluded)
    scheme = _scheme(top.object("global_quant_config"))
    if scheme is None:
        raise CheckpointError(file, f"`{place}.global_quant_config.weight` must not be null: weights must be quantized")
    groups = [Group("global", (parse_target("Linear"),), scheme)]
    if top.object_or_none("layer_quant_config") is not None:
        layers = top.object("layer_quant_config")
        for pattern in layers.entries:
            targets, its = targets_of(top, "layer_quant_config", [pattern], parse_glob), _scheme(layers.object(pattern))
            if its is None:
                ignore += targets
            else:
                groups.append(Group(pattern, targets, its))
    top.close()
    return Quantization(file, tuple(groups), ignore, bool(kv_cache))


def _scheme(entries: ConfigObject) -> Scheme | None:
    """The scheme of modules from their entry; None if it leaves weights as they are."""
    given = entries.object_or_none("weight")
    spec = None if entries.object_or_none("input_tensors") is None else _spec(entries.object("input_tensors"))
    for key in ("bias", "output_tensors", "target_device"):
        entries.one_of(key, (None,), None)
    entries.close()
    if given is None:
        if spec is not None:
            raise entries.error("input_tensors", "must be null where weights are not quantized")
        return None
    weights, storage = _weights(entries.object("weight"))
    inputs = None if spec is None else _INPUTS.get(spec, str(spec))  # the config's own words, if it is no known format
    return Scheme(weights, inputs, storage)


def _is_past(value: Any) -> bool:
    algorithms = value if isinstance(value, list) else [value] if value else []
    return all(isinstance(one, dict) and one.get("name") in _ALGORITHMS for one in algorithms)


def _parse_excluded(text: str) -> Target:
    return parse_target(text) if text.startswith(PATTERN) else parse_glob(text)


def _weights(entries: ConfigObject) -> tuple[str, str]:
    spec = _spec(entries)
    if spec not in _WEIGHTS:
        raise CheckpointError(entries.file, f"`{entries.place}` (={spec}) must be one of {[*_WEIGHTS]}")
    return _WEIGHTS[spec]


def _spec(entries: ConfigObject) -> tuple[Any, ...]:
    for key in _CALIBRATION:
        entries.check(key, lambda value: not isinstance(value, dict | list), "must be a number or a string", None)

    def text(key: str) -> Any:
        return entries.check(key, lambda value: value is None or isinstance(value, str), "must be a string", None)

    size = entries.check("group_size", lambda v: v is None or type(v) is int, "must be a whole number", None)
    axis = entries.check("ch_axis", lambda v: v is None or type(v) is int, "must be a whole number", None)
    entries.one_of("symmetric", (True, None), None)
    found = text("dtype"), text("qscheme"), size, text("scale_format"), entries.one_of("is_dynamic", (True, False))
    entries.close()
    return *found, axis if found[1] == "per_channel" else None
