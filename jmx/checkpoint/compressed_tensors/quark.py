"""What configs of AMD's Quark say of each module: MXFP4 weights alone.

See https://quark.docs.amd.com. One config is for all linear modules but those that are excluded.
"""

from pathlib import Path
from typing import Any

from jmx.checkpoint.compressed_tensors.config import QUARK, Group, Quantization, Scheme
from jmx.checkpoint.compressed_tensors.entries import Entries, targets_of
from jmx.checkpoint.compressed_tensors.targets import PATTERN, Target, parse_glob, parse_target
from jmx.checkpoint.shards import CheckpointError

METHOD = "quark"

# (dtype, qscheme, group_size, scale_format, is_dynamic) of inputs.
_INPUTS: dict[tuple[Any, ...], str] = {
    ("fp8_e4m3", "per_tensor", None, None, False): "fp8_static",
    ("fp8_e4m3", "per_group", 32, "e8m0", True): "mxfp8",
    ("fp4", "per_group", 32, "e8m0", True): "mxfp4",
}
_WEIGHTS = ("fp4", "per_group", 32, "e8m0", False)

# How scales were found; nothing of what they mean.
_CALIBRATION = (
    "block_size",
    "ch_axis",
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
# How files came about, and what else of the model is quantised; each must be empty where it would change experts.
_ELSEWHERE = ("kv_cache_post_rope", "version")
_EMPTY = ("layer_quant_config", "layer_type_quant_config", "softmax_quant_spec")
# Algorithms that leave nothing to be done when the model runs: they chose the weights.
_ALGORITHMS = ("awq", "gptq", "gptaq", "qronos", "smooth", "smoothquant", "autosmoothquant")
_MODES = ("eager_mode", "fx_graph_mode")
_EXPORT = {"weight_format": ("real_quantized", None), "pack_method": ("reorder", "order", None)}


def parse_quark(file: Path, place: str, value: Any) -> Quantization:
    """The quantisation that the object at `place` of config.json says.

    Raises:
        CheckpointError: a key that is unknown, missing, of another kind, or of a meaning that is not run here.
    """
    top = Entries(file, place, value)
    top.one_of("quant_method", (METHOD,))
    for key in _ELSEWHERE:
        top.check(key, lambda _: True, "", None)
    top.one_of("quant_mode", (*_MODES, None), None)
    top.check("algo_config", _is_past, f"must be of algorithms that are done: {', '.join(_ALGORITHMS)}", None)
    if top.object_or_none("export") is not None:
        export = top.object("export")
        for key, known in _EXPORT.items():
            export.one_of(key, known, None)
    for key in _EMPTY:
        top.check(key, lambda value: value in (None, {}), "must be empty: all modules must be quantised alike", None)
    kv_cache = top.object_or_none("kv_cache_quant_config")
    ignore = targets_of(top, "exclude", top.strings("exclude", []), _parse_excluded)
    whole = top.object("global_quant_config")
    top.close()
    weights = whole.object("weight")
    if _spec(weights) != _WEIGHTS:
        raise CheckpointError(file, f"`{weights.place}` (={_spec(weights)}) must be {_WEIGHTS}: MXFP4")
    inputs = None
    if whole.object_or_none("input_tensors") is not None:
        given = whole.object("input_tensors")
        spec = _spec(given)
        if spec not in _INPUTS:
            raise CheckpointError(file, f"`{given.place}` (={spec}) must be one of {[*_INPUTS]}")
        inputs = _INPUTS[spec]
    for key in ("bias", "output_tensors", "target_device"):
        whole.one_of(key, (None,), None)
    whole.close()
    group = Group("global", (parse_target("Linear"),), Scheme("mxfp4", inputs, QUARK))
    return Quantization(file, (group,), ignore, bool(kv_cache))


def _is_past(value: Any) -> bool:
    algorithms = value if isinstance(value, list) else [value] if value else []
    return all(isinstance(one, dict) and one.get("name") in _ALGORITHMS for one in algorithms)


def _parse_excluded(text: str) -> Target:
    return parse_target(text) if text.startswith(PATTERN) else parse_glob(text)


def _spec(entries: Entries) -> tuple[Any, ...]:
    for key in _CALIBRATION:
        entries.check(key, lambda value: not isinstance(value, dict | list), "must be a number or a string", None)

    def text(key: str) -> Any:
        return entries.check(key, lambda value: value is None or isinstance(value, str), "must be a string", None)

    size = entries.check("group_size", lambda v: v is None or type(v) is int, "must be a whole number", None)
    entries.one_of("symmetric", (True, None), None)
    found = text("dtype"), text("qscheme"), size, text("scale_format"), entries.one_of("is_dynamic", (True, False))
    entries.close()
    return found
