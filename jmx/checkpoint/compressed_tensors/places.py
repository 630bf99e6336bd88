"""Where config.json says how weights are quantized, whichever tool wrote that."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jmx.checkpoint.shards import CheckpointError

PLACES = ("quantization_config", "compression_config")  # as newer and older files have it
INNER = "text_config"  # which may hold them instead, in models that take more than text


def find_quantization(file: Path, contents: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Where config.json's contents say how weights are quantized, and the entry itself; None if nowhere.

    Raises:
        CheckpointError: several places that differ, or one that is not known.
    """
    found = dict(_said(contents))
    if not found:
        other = next(_elsewhere(contents, ""), None)
        if other is not None:
            known = [*PLACES, *(f"{INNER}.{place}" for place in PLACES)]
            raise CheckpointError(file, f"`{other}` must be in a place that is known: one of {known}")
        return None
    (first, value), *others = found.items()
    for other, said in others:
        if said != value:
            raise CheckpointError(file, f"`{other}` must say the same as `{first}`, but {_difference(value, said)}")
    return first, value


def _said(contents: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    inner = contents.get(INNER)
    for prefix, entries in (("", contents), (f"{INNER}.", inner if isinstance(inner, dict) else {})):
        yield from ((f"{prefix}{place}", entries[place]) for place in PLACES if entries.get(place) is not None)


def _elsewhere(contents: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in contents.items():
        if key in PLACES and value is not None:
            yield f"{prefix}{key}"
        elif isinstance(value, dict):
            yield from _elsewhere(value, f"{prefix}{key}.")


def _difference(first: Any, other: Any) -> str:
    if not isinstance(first, dict) or not isinstance(other, dict):
        return "differs"
    keys = (key for key in (*first, *other) if (key in first, first.get(key)) != (key in other, other.get(key)))
    return f"differs in {next(keys)!r}"
