"""Where config.json states how weights are quantized, and which tool's config that is."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jmx.checkpoint.compressed_tensors import (
    auto_round_config,
    awq_config,
    config,
    fp8_config,
    gptq_config,
    modelopt_config,
    quark_config,
)
from jmx.checkpoint.compressed_tensors.config import FILE, Quantization
from jmx.checkpoint.shards import CheckpointError, read_json, read_object
from jmx.util.checks import check_path

_OTHERS = (quark_config, fp8_config, gptq_config, awq_config, auto_round_config)

KEYS = ("quantization_config", "compression_config")  # in newer and in older files
# Files of the tools' own beside config.json, which may have nothing of them: AutoGPTQ's, AutoAWQ's and AutoRound's.
FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json")
TEXT_CONFIG = "text_config"  # may hold them instead, in models with other inputs than text


def read_quantization(path: str | os.PathLike[str]) -> Quantization:
    """The scheme of each module, from the configs in the directory `path`, whichever known tool wrote them.

    Raises:
        CheckpointError: there is no config, it has no quantization, it has two that differ, or it names an unknown
            tool; and the errors of the tool's parser.
    """
    file = check_path("path", path) / FILE
    return quantization_of(file, read_object(file))


def is_quantized(path: str | os.PathLike[str]) -> bool:
    """Whether the configs in the directory `path` state that weights are quantized, by any tool.

    Raises:
        CheckpointError: there is no config, or has two that differ, or one under an unknown key.
    """
    file = check_path("path", path) / FILE
    if find_quantization(file, read_object(file)) is not None:
        return True
    return any(os.path.lexists(file.parent / name) for name in (modelopt_config.FILE, *FILES))


def quantization_of(file: Path, contents: Mapping[str, Any]) -> Quantization:
    """`read_quantization` from the contents of a config.json, which is `file`."""
    beside, found = file.parent / modelopt_config.FILE, find_quantization(file, contents)
    if found is None and os.path.lexists(beside):
        whole = read_json(beside)
        inner = whole.get("quantization") if isinstance(whole, dict) else None
        return modelopt_config.parse_modelopt(beside, "quantization", inner)
    own = next((file.parent / name for name in FILES if os.path.lexists(file.parent / name)), None)
    if found is None and own is not None:
        entries = read_object(own)
        method = awq_config.METHOD if "w_bit" in entries else gptq_config.METHOD  # older files do not name theirs
        return _parsed(own, "", {"quant_method": method} | entries, contents)
    if found is None:
        raise CheckpointError(
            file,
            f"has no `{KEYS[0]}`, so weights are not quantized; `jmx convert IN OUT --quantize FORMAT` "
            "quantizes experts",
        )
    return _parsed(file, *found, contents)


def _parsed(file: Path, place: str, value: Any, contents: Mapping[str, Any]) -> Quantization:
    """The quantization of the object at `place` of `file`, "" for all of it; `contents`: of config.json."""
    method = value.get("quant_method") if isinstance(value, dict) else None
    if method in modelopt_config.METHODS:
        return modelopt_config.parse_modelopt(file, place, value)
    if method == quark_config.METHOD:
        return quark_config.parse_quark(file, place, value)
    if method == fp8_config.METHOD:
        return fp8_config.parse_fp8(file, place, value, contents.get("expert_dtype"))
    if method == gptq_config.METHOD:
        return gptq_config.parse_gptq(file, place, value)
    if method == awq_config.METHOD:
        return awq_config.parse_awq(file, place, value)
    if method == auto_round_config.METHOD:
        return auto_round_config.parse_auto_round(file, place, value)
    known = [config.METHOD, *modelopt_config.METHODS, *(m.METHOD for m in _OTHERS)]
    if method is not None and method != config.METHOD:
        hint = "; of gpt-oss alone `jmx.checkpoint.gpt_oss` reads mxfp4" if method == "mxfp4" else ""
        prefix = f"{place}." if place else ""
        raise CheckpointError(file, f"`{prefix}quant_method` (={method!r}) must be one of {known}{hint}")
    return config.parse_quantization(file, place, value)


def find_quantization(file: Path, contents: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The key of config.json that states how weights are quantized, and its value; None if there is none.

    Raises:
        CheckpointError: there are several that differ, or one under an unknown key.
    """
    found = dict(_stated(contents))
    if not found:
        other = next(_elsewhere(contents, ""), None)
        if other is not None:
            known = [*KEYS, *(f"{TEXT_CONFIG}.{place}" for place in KEYS)]
            raise CheckpointError(file, f"`{other}` must be in a place that is known: one of {known}")
        return None
    (first, value), *others = found.items()
    for other, its_value in others:
        if its_value != value:
            raise CheckpointError(file, f"`{other}` must equal `{first}`, but {_difference(value, its_value)}")
    return first, value


def _stated(contents: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    inner = contents.get(TEXT_CONFIG)
    for prefix, entries in (("", contents), (f"{TEXT_CONFIG}.", inner if isinstance(inner, dict) else {})):
        yield from ((f"{prefix}{place}", entries[place]) for place in KEYS if entries.get(place) is not None)


def _elsewhere(contents: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in contents.items():
        if key in KEYS and value is not None:
            yield f"{prefix}{key}"
        elif isinstance(value, dict):
            yield from _elsewhere(value, f"{prefix}{key}.")


def _difference(first: Any, other: Any) -> str:
    if not isinstance(first, dict) or not isinstance(other, dict):
        return "differs"
    keys = (key for key in (*first, *other) if (key in first, first.get(key)) != (key in other, other.get(key)))
    return f"differs in {next(keys)!r}"
