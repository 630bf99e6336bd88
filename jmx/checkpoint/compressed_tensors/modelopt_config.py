"""Configs of NVIDIA's ModelOpt: NVFP4, MXFP8, and FP8 by tensor or by channel.

The config is in config.json, or in older checkpoints only in hf_quant_config.json. It names the modules that are not
quantized; all other linear modules are. See https://github.com/NVIDIA/Model-Optimizer (its `export_hf_checkpoint`).
"""

from pathlib import Path
from typing import Any

from jmx.checkpoint.compressed_tensors.config import (
    FLOAT_QUANTIZED,
    MODELOPT,
    MXFP8_QUANTIZED,
    Group,
    Quantization,
    Scheme,
)
from jmx.checkpoint.compressed_tensors.targets import parse_glob, parse_target, targets_of
from jmx.checkpoint.config_object import ConfigObject
from jmx.checkpoint.shards import CheckpointError

FILE = "hf_quant_config.json"
METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed")
MIXED_PRECISION = "MIXED_PRECISION"  # instead of one algorithm: each module names its own

IGNORE = ("ignore", "exclude_modules")  # in config.json and hf_quant_config.json

_KV_CACHES = ("FP8", "FP8_AFFINE", "INT8", "NVFP4", "NVFP4_AFFINE", None)
_SCHEMES = {  # by algorithm; FP8 is stored as in compressed-tensors
    "NVFP4": Scheme("nvfp4", "nvfp4", MODELOPT),
    "W4A16_NVFP4": Scheme("nvfp4", None, MODELOPT),
    "FP8": Scheme("fp8_tensor", "fp8_static", FLOAT_QUANTIZED),
    "MXFP8": Scheme("mxfp8", "mxfp8", MXFP8_QUANTIZED),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8_channel", "fp8_token", FLOAT_QUANTIZED),
}
_ARGUMENTS: dict[str, dict[str, Any]] = {  # of groups, by the weights' storage
    MODELOPT: {"num_bits": 4, "group_size": 16},
    FLOAT_QUANTIZED: {"num_bits": 8, "group_size": None},
    MXFP8_QUANTIZED: {"num_bits": 8, "group_size": 32},
}


def parse_modelopt(file: Path, place: str, value: Any) -> Quantization:
    """The quantization of the object at `place` of config.json or hf_quant_config.json.

    Raises:
        CheckpointError: a key is unknown or missing, or has a value of another type; another algorithm.
    """
    top = ConfigObject(file, place, value)
    top.one_of("quant_method", METHODS, None)
    top.object_or_none("producer")
    algorithm = top.one_of("quant_algo", (*_SCHEMES, MIXED_PRECISION))
    # Of the cache, in config.json and in hf_quant_config.json.
    kv_cache = top.object_or_none("kv_cache_scheme"), top.one_of("kv_cache_quant_algo", _KV_CACHES, None)
    ignore = [t for key in IGNORE for t in targets_of(top, key, top.strings(key, []), parse_glob)]
    if algorithm == MIXED_PRECISION:
        top.one_of("group_size", (16, None), None)
        groups = _groups_by_module(top.object("quantized_layers"))
    else:
        scheme = _SCHEMES[algorithm]
        top.one_of("group_size", (_ARGUMENTS[scheme.storage]["group_size"], None), None)
        if "config_groups" in top.entries:
            _check_groups(top.object("config_groups"), scheme)
        groups = (Group(algorithm, (parse_target("Linear"),), scheme),)
    top.close()
    return Quantization(file, groups, tuple(ignore), any(kv_cache))


def _groups_by_module(modules: ConfigObject) -> tuple[Group, ...]:
    """A group for each algorithm of `quantized_layers`, an object with an entry for each module.

    Raises:
        CheckpointError: there is no module; an unknown algorithm, or arguments that do not fit it.
    """
    names: dict[str, list[str]] = {}
    for name in modules.entries:
        entry = modules.object(name)
        algorithm = entry.one_of("quant_algo", tuple(_SCHEMES))
        entry.one_of("group_size", (_ARGUMENTS[_SCHEMES[algorithm].storage]["group_size"], None), None)
        for key in ("has_zero_point", "pre_quant_scale"):  # of AWQ, which these are not
            entry.one_of(key, (False, None), None)
        entry.close()
        names.setdefault(algorithm, []).append(name)
    if not names:
        raise CheckpointError(modules.file, f"`{modules.place}` must hold a module, but is empty")
    return tuple(Group(its, (), _SCHEMES[its], frozenset(found)) for its, found in names.items())


def _check_groups(groups: ConfigObject, scheme: Scheme) -> None:
    """CheckpointError unless the groups of newer files agree with the algorithm."""
    if len(groups.entries) != 1:
        raise CheckpointError(groups.file, f"`{groups.place}` must hold one group, but holds {len(groups.entries)}")
    group = groups.object(*groups.entries)
    group.one_of("targets", (["Linear"],), ["Linear"])
    for key in ("weights", *["input_activations"] * (scheme.inputs is not None)):
        args = group.object(key)
        for name, wanted in {"dynamic": False, "type": "float", **_ARGUMENTS[scheme.storage]}.items():
            args.one_of(name, (wanted,), *[None] * (wanted is None))
        args.close()
    if scheme.inputs is None:
        group.one_of("input_activations", (None,), None)
    group.close()
