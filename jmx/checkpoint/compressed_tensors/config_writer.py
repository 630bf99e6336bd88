"""Writing a `quantization_config` for given schemes: the inverse of `parse_quantization`."""

from collections.abc import Mapping, Sequence
from typing import Any

from jmx.checkpoint.compressed_tensors.config import INPUTS, METHOD, MIXED, STORAGES, Scheme
from jmx.numerics.formats import FORMATS

_FLOATS: dict[str, dict[str, Any]] = {
    "nvfp4": {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
    "mxfp4": {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    "mxfp8": {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
}


def entries(groups: Mapping[str, tuple[Sequence[str], Scheme]], ignore: Sequence[str] = ()) -> dict[str, Any]:
    """The contents of a `quantization_config`, as the compressed-tensors package writes it.

    Args:
        groups: by name, the targets of each (names of modules, their classes, or "re:" and a pattern), and its scheme.
        ignore: targets of modules that are not quantized.

    Raises:
        ValueError: there is no group, or compressed-tensors has no such storage or inputs.
    """
    if not groups:
        raise ValueError("`groups` must hold a group")
    for name, (_, scheme) in groups.items():
        if scheme.storage not in STORAGES:
            raise ValueError(f"storage of group {name!r} (={scheme.storage!r}) must be one of {list(STORAGES)}")
        if scheme.inputs not in (None, *INPUTS.values()):
            raise ValueError(f"inputs of group {name!r} (={scheme.inputs!r}) must be one of {[*INPUTS.values()]}")
    storages = {scheme.storage for _, scheme in groups.values()}
    return {
        "quant_method": METHOD,
        "format": storages.pop() if len(storages) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": {
            name: {
                "targets": [*targets],
                "weights": _weights(scheme.weights),
                "input_activations": None if scheme.inputs is None else _inputs(scheme.inputs),
                "output_activations": None,
                "format": scheme.storage,
            }
            for name, (targets, scheme) in groups.items()
        },
        "ignore": [*ignore],
        "kv_cache_scheme": None,
    }


def _weights(format: str) -> dict[str, Any]:
    if format in _FLOATS:
        return {"type": "float", "num_bits": 4, "symmetric": True, "dynamic": False, **_FLOATS[format]}
    kind, blocks, *suffixes = format.split("_")
    found = {"type": "float", "num_bits": 8, "symmetric": "asym" not in suffixes, "dynamic": False}
    if kind.startswith("int"):
        found |= {"type": "int", "num_bits": int(kind.removeprefix("int"))}
    if blocks.startswith("g"):
        found |= {"strategy": "group", "group_size": int(blocks.removeprefix("g"))}
    else:
        found |= {"strategy": blocks}
    if blocks == "block":
        found |= {"block_structure": [FORMATS[format].block_rows, FORMATS[format].block_size]}
    return found | ({"actorder": "group"} if "order" in suffixes else {})


def _inputs(format: str) -> dict[str, Any]:
    key = next(key for key, name in INPUTS.items() if name == format)
    names = ("type", "num_bits", "strategy", "group_size", "dynamic", "scale_dtype")
    return {"symmetric": True} | {name: value for name, value in zip(names, key, strict=True) if value is not None}
