"""Fields of requests: each has a check, which returns the value as the server uses it. Unknown ones are errors."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jmx.serving.api.errors import ApiError
from jmx.util.checks import check_bool, check_finite, check_int, check_str

# (name, value) -> the value to use; TypeError or ValueError, which name the field, the value and the rule.
Check = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Field:
    """A field: its check, and its value where a body lacks it. A null is as if it were not there."""

    check: Check
    default: Any = None


def read(body: Mapping[str, Any], fields: Mapping[str, Field], *, required: Sequence[str] = ()) -> dict[str, Any]:
    """The values of all fields. ApiError 400 for an unknown, a wrong or a missing one."""
    for name, given in body.items():
        if name not in fields and given is not None:
            near = difflib.get_close_matches(_short(name), fields, n=1)
            meant = f"; did you mean `{near[0]}`?" if near else ""
            raise ApiError(400, f"`{_short(name)}` is not a field of this request{meant}", _short(name))
    for name in required:
        if body.get(name) is None:
            raise ApiError(400, f"`{name}` must be given", name)
    values = {}
    for name, field in fields.items():
        given = body.get(name)
        try:
            values[name] = field.default if given is None else field.check(name, given)
        except (TypeError, ValueError, OverflowError) as error:
            raise ApiError(400, str(error), name) from error
    return values


def _short(name: str) -> str:
    return name if len(name) <= 50 else f"{name[:50]}..."


def text(name: str, value: Any) -> str:
    """A string that UTF-8 can hold: JSON's escapes can make half of a surrogate pair."""
    try:
        check_str(name, value).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"`{name}` must be text: {error.reason} at character {error.start}") from error
    return value


def flag(name: str, value: Any) -> bool:
    """A boolean."""
    return check_bool(name, value)


def integer(least: int, most: int) -> Check:
    """An integer of a range."""
    return lambda name, value: check_int(name, value, least=least, most=most)


def number(least: float, most: float) -> Check:
    """A number of a range."""

    def check(name: str, value: Any) -> float:
        found = check_finite(name, value)
        if not least <= found <= most:
            raise ValueError(f"`{name}` (={found:g}) must be in {least:g}..{most:g}")
        return found

    return check


def only(*allowed: Any, why: str = "") -> Check:
    """One of some values: the server has no others."""

    def check(name: str, value: Any) -> Any:
        if not any(type(value) is type(one) and value == one for one in allowed):
            listed = " or ".join(repr(one) for one in allowed)
            raise ValueError(f"`{name}` (={_short(repr(value))}) must be {listed}{why and ': '}{why}")
        return value

    return check


def list_of(check_item: Check, most: int) -> Check:
    """A list of at most so many items."""

    def check(name: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise TypeError(f"`{name}` (a {type(value).__name__}) must be a list")
        if len(value) > most:
            raise ValueError(f"`{name}` (of {len(value)} items) must have at most {most}")
        return [check_item(f"{name}[{number}]", item) for number, item in enumerate(value)]

    return check


def text_or_list(most: int, most_characters: int) -> Check:
    """A string, or a list of at most so many, each of 1 to `most_characters`, as a tuple."""
    check_list = list_of(text, most)

    def check(name: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, str | list):
            raise TypeError(f"`{name}` (={_short(repr(value))}) must be a string, or a list of strings")
        found = tuple(check_list(name, [value] if isinstance(value, str) else value))
        if not all(found):
            raise ValueError(f"`{name}` must have no empty string")
        if (longest := max(map(len, found), default=0)) > most_characters:
            raise ValueError(f"`{name}` (of {longest} characters) must have strings of at most {most_characters}")
        return found

    return check


def record(fields: Mapping[str, Field], required: Sequence[str] = ()) -> Check:
    """An object with these fields only."""

    def check(name: str, value: Any) -> dict[str, Any]:
        try:
            return read(json_object(name, value), fields, required=required)
        except ApiError as error:
            raise ValueError(f"`{name}`: {error.message}") from error

    return check


def json_object(name: str, value: Any) -> dict[str, Any]:
    """Any object."""
    if not isinstance(value, dict):
        raise TypeError(f"`{name}` (a {type(value).__name__}) must be an object")
    return value
