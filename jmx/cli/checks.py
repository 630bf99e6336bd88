"""Checks of names in arguments, which must be known: of backends, formats and others. They raise ValueError."""

import difflib
from collections.abc import Callable, Collection, Sequence


def check_known(
    flag: str,
    value: str,
    known: Collection[str],
    *,
    any_case: bool = False,
    meant: Callable[[str, Collection[str]], str] | None = None,
) -> str:
    """The name in `known` that equals `value`; with `any_case`, ignoring case. ValueError, listing all, if none.

    `meant`: the end of its message, from the value and the known names; None: a similar name.
    """
    if value in known:
        return value
    names = sorted(known)
    lower = {name.lower(): name for name in names}
    if any_case and value.lower() in lower:
        return lower[value.lower()]
    near = difflib.get_close_matches(value.lower(), lower, n=1)
    similar = f"; did you mean {lower[near[0]]!r}?" if near else ""
    also = f", or {more}" if (more := getattr(known, "also", "")) else ""
    end = similar if meant is None else meant(value, names)
    raise ValueError(f"`{flag}` (={value!r}) must be one of {', '.join(names)}{also}{end}")


def check_backend(flag: str, value: str, more: Sequence[str] = ()) -> str:
    """The name of a registered backend, or one of `more`. ValueError, listing all, with what a name of vLLM's means."""
    from jmx.backends import registered_backends
    from jmx.selection.vllm_names import meant

    return check_known(flag, value, [*(backend.name for backend in registered_backends()), *more], meant=meant)


def check_pair(pair: str) -> tuple[str, str | None]:
    """The names in --format, WEIGHTS or WEIGHTS:INPUTS; inputs are None for 16 bits. ValueError for unknown names.

    A family of input formats becomes its first variant, as in a call of a layer.
    """
    from jmx.numerics.formats import FORMATS
    from jmx.numerics.input_formats import FAMILIES, INPUT_FORMATS, resolve
    from jmx.perf.shapes import split_formats

    weights, inputs = split_formats(pair)
    check_known("--format", weights, FORMATS)
    if inputs is not None:
        check_known("--format", inputs, [*INPUT_FORMATS, *FAMILIES])
        inputs = resolve(None, inputs, [*INPUT_FORMATS])
    return weights, inputs


def resolved_pair(pair: str) -> str:
    """--format with a family of input formats resolved to one format. ValueError as in `check_pair`."""
    return ":".join(filter(None, check_pair(pair)))
