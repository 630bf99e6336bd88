"""Configs of AutoRound, `quant_method` "auto-round", of integers in words as GPTQ and AWQ store them.

`extra_config` overrides the scheme of modules, by name or by a regular expression; of 16 bits or more they are not
quantized. See https://github.com/intel/auto-round (its `save_quantized_as_autoround`).
"""

import re
from pathlib import Path
from typing import Any

from jmx.checkpoint.compressed_tensors.config import (
    AUTO_ROUND,
    AUTO_ROUND_V2,
    AWQ,
    GPTQ_V2,
    Group,
    Quantization,
    Scheme,
)
from jmx.checkpoint.compressed_tensors.gptq_config import FLOAT_BITS, INPUTS, OF_AUTO_ROUND, check_inputs, group_size
from jmx.checkpoint.compressed_tensors.targets import PATTERN, Target, parse_target, targets_of
from jmx.checkpoint.config_object import ConfigObject

METHOD = "auto-round"

_STORAGES = {  # by `packing_format`
    "auto_round:auto_gptq": AUTO_ROUND,
    "auto_round": AUTO_ROUND_V2,
    "auto_round:gptqmodel": GPTQ_V2,
    "auto_round:auto_awq": AWQ,
}
_SCHEME = ("bits", "group_size", "sym")
_ELSEWHERE = ("backend", "batch_size", "block_name_to_quantize", "dataset", *OF_AUTO_ROUND)
_NAME = re.compile(r"[\w.-]+")


def parse_auto_round(file: Path, place: str, value: Any) -> Quantization:
    """The quantization of the object at `place` of config.json. Raises `CheckpointError`: see `of_method`."""
    top = ConfigObject.of_method(file, place, value, METHOD, _ELSEWHERE)
    storage = _STORAGES[top.one_of("packing_format", (*_STORAGES,))]
    scheme = _scheme(top, storage)
    check_inputs(top)
    top.one_of("rotation_config", (None, {}), None)  # would change the model
    groups, ignore = [Group(METHOD, (parse_target("Linear"),), scheme)], list[Target]()
    if top.object_or_none("extra_config") is not None:
        overrides = top.object("extra_config")
        for name in overrides.entries:
            whole = name if _NAME.fullmatch(name) else f"{PATTERN}{name}"
            targets = targets_of(top, "extra_config", [whole])
            entry = overrides.object(name)
            entry.ignore(*_ELSEWHERE)
            if entry.entries.get("bits") in FLOAT_BITS:
                entry.ignore("act_bits", "bits", "data_type", *INPUTS, *_SCHEME)
                entry.close()
                ignore += targets
                continue
            merged = {key: top.entries[key] for key in _SCHEME if key in top.entries} | dict(entry.entries)
            its = ConfigObject(file, overrides.place + f".{name}", merged)
            its.ignore(*_ELSEWHERE)
            groups.append(Group(name, targets, _scheme(its, storage)))
            check_inputs(its)
            its.close()
    top.close()
    return Quantization(file, tuple(groups), tuple(ignore))


def _scheme(entries: ConfigObject, storage: str) -> Scheme:
    bits = entries.one_of("bits", (4,) if storage == AWQ else (4, 8))
    size = group_size(entries, "group_size")
    symmetric = entries.one_of("sym", (True, False), True)
    blocks = "channel" if size is None else f"g{size}"
    return Scheme("_".join([f"int{bits}", blocks, *["asym"] * (not symmetric or storage == AWQ)]), None, storage)
