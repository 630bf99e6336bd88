"""Checks of arguments: each returns the value as jmx uses it, or raises an error that names argument, value and rule.

A wrong type is a TypeError, a wrong value of the right type a ValueError. Integers, numbers and booleans of numpy and
jax are accepted like Python's; a boolean is not an integer.
"""

import difflib
import math
import operator
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue

_LONGEST = 100  # characters of a value in a message


def shown(value: Any) -> str:
    """A value as shown in messages, in parentheses: an array by dtype and shape, a long value by its type."""
    article = "an" if type(value).__name__[0] in "aeiouAEIOU" else "a"
    named = f"{article} {type(value).__name__}"
    if is_array(value) and len(value.shape) > 0:
        return f"{named} of dtype {value.dtype} and shape {tuple(value.shape)}"
    text = repr(value)
    return named if len(text) > _LONGEST or "\n" in text or "object at 0x" in text else f"={text}, {named}"


def is_array(value: Any) -> bool:
    """Whether `value` is an array of numpy or jax, a tracer, or a description such as `jax.ShapeDtypeStruct`."""
    return isinstance(getattr(value, "dtype", None), np.dtype) and isinstance(getattr(value, "shape", None), tuple)


def nearest(value: str, names: Collection[str]) -> str:
    """ "; did you mean 'x'?" for the name that `value` may misspell, else ""."""
    near = difflib.get_close_matches(value.lower(), names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_int(name: str, value: Any, *, least: int | None = None, most: int | None = None) -> int:
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` ({shown(value)}) must be an integer") from None
    if least is not None and number < least:
        raise ValueError(f"`{name}` (={number}) must be at least {least}")
    if most is not None and number > most:
        raise ValueError(f"`{name}` (={number}) must be at most {most}")
    return number


def check_finite(name: str, value: Any) -> float:
    """A finite number, as Python's float: a numpy scalar would promote bfloat16 to float32."""
    try:
        if isinstance(value, bool | np.bool_ | str) or np.ndim(value) or np.iscomplexobj(value):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"`{name}` ({shown(value)}) must be a number") from None
    except OverflowError:  # an int beyond all floats
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"`{name}` (={number}) must be finite")
    return number


def is_finite_number(value: Any) -> bool:
    """Whether a value of JSON is a number that a float holds: neither true or false, nor an int beyond all floats."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def check_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` ({shown(value)}) must be True or False")
    return bool(value)


def check_str(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"`{name}` ({shown(value)}) must be a string")
    return value


def check_instance(name: str, value: Any, kind: Any, what: str | None = None) -> Any:
    """`kind`: a type or a union of types; `what`: their description in the message; None: their names."""
    if not isinstance(value, kind):
        raise TypeError(f"`{name}` ({shown(value)}) must be {what or f'a {_type_name(kind)}'}")
    return value


def _type_name(kind: Any) -> str:
    return getattr(kind, "__name__", None) or str(kind)


def check_one_of(
    name: str,
    value: Any,
    choices: Collection[str | None],
    meant: Callable[[str, Collection[str]], str] = nearest,
) -> Any:
    """One of the names of a table, or of a tuple, which may hold None.

    `meant`: the end of the message about another name, from that name and the known ones.
    The attribute `also` of a table describes names that it has but does not list.
    """
    listed = choices if isinstance(choices, tuple) else [*choices]
    if value is None and None in listed:
        return None
    if not isinstance(value, str):
        raise TypeError(f"`{name}` ({shown(value)}) must be one of {listed}")
    if value not in choices:
        names = [choice for choice in listed if choice is not None]
        also = f", or {more}" if (more := getattr(choices, "also", "")) else ""
        raise ValueError(f"`{name}` (={value!r}) must be one of {listed}{also}{meant(value, names)}")
    return value


def check_named[T](name: str, value: T | str, kind: type[T], table: Mapping[str, T]) -> T:
    """A `kind`, or the entry of `table` under a name given instead."""
    if isinstance(value, str):
        return table[check_one_of(name, value, table)]
    if not isinstance(value, kind):
        raise TypeError(f"`{name}` ({shown(value)}) must be a jmx.{kind.__name__}, or one of {[*table]}")
    return value


def check_array(
    name: str, value: Any, kind: Any = None, shape: tuple[int | None, ...] | None = None, *, abstract: bool = False
) -> Any:
    """An array, of a `kind` of dtypes such as `jnp.floating`, and of a shape, in which None is any size.

    `abstract`: whether it may be a description of an array, without values.
    """
    if not is_array(value):
        raise TypeError(f"`{name}` ({shown(value)}) must be an array")
    if not abstract:
        check_values({name: value})
    if kind is not None and not jnp.issubdtype(value.dtype, kind):
        raise TypeError(f"`{name}` (dtype {value.dtype}) must be {kind.__name__}")
    if shape is not None and not _fits(value.shape, shape):
        sizes = ", ".join("..." if size is None else str(size) for size in shape)
        raise ValueError(f"`{name}` (shape {tuple(value.shape)}) must be of shape ({sizes})")
    return value


def check_values(arguments: Mapping[str, Any]) -> None:
    """Raises TypeError for the first of `arguments`, pytrees by name, of which an array is only described."""
    for name, argument in arguments.items():
        for array in jax.tree.leaves(argument):
            if isinstance(array, jax.ShapeDtypeStruct | AbstractValue):
                rule = "must have values: descriptions of arrays are for `jax.eval_shape` and `jmx.explain`"
                raise TypeError(f"`{name}` ({shown(array)}) {rule}")


def _fits(shape: tuple[Any, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(w is None or s == w for s, w in zip(shape, wanted, strict=True))


def check_dtype(name: str, value: Any, *allowed: Any) -> np.dtype:
    """A dtype, or what numpy converts to one, among those `allowed`, which may be kinds such as `jnp.floating`."""
    try:
        dtype = None if value is None else jnp.dtype(value)  # numpy takes None for float64
    except TypeError:
        dtype = None
    if dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in allowed):
        given = shown(value) if dtype is None else f"={dtype.name}"
        names = (kind.name if isinstance(kind, np.dtype) else kind.__name__ for kind in allowed)
        raise TypeError(f"`{name}` ({given}) must be {' or '.join(names)}")
    return dtype


def check_shape(name: str, value: Any, ndim: int | None = None) -> tuple[int, ...]:
    """`ndim` sizes (None: one or more), of 0 or more each."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != (ndim or max(1, len(value))):
        raise TypeError(f"`{name}` ({shown(value)}) must be a tuple of {ndim or 'all'} sizes")
    return tuple(check_int(f"{name}[{i}]", size, least=0) for i, size in enumerate(value))


def check_key(name: str, value: Any) -> Any:
    """A key of jax's random numbers, of `jax.random.key` or `jax.random.PRNGKey`."""
    dtype: Any = getattr(value, "dtype", None)
    typed = isinstance(value, jax.Array) and jnp.issubdtype(dtype, jax.dtypes.prng_key) and value.ndim == 0
    if not typed and not (is_array(value) and dtype == np.uint32 and len(value.shape) == 1):
        raise TypeError(f"`{name}` ({shown(value)}) must be one key, as jax.random.key(0) gives it")
    return value


def check_callable(name: str, value: Any) -> Callable[..., Any]:
    if not callable(value):
        raise TypeError(f"`{name}` ({shown(value)}) must be callable")
    return value


def check_path(name: str, value: Any) -> Path:
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes):
        raise TypeError(f"`{name}` ({shown(value)}) must be a path: a str or a pathlib.Path")
    return Path(value)
