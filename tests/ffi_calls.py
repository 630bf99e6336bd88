"""Calls of C++ handlers by name, with any array in the place of any argument."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# Every element type of jax; those that only newer versions have, where they are.
DTYPES = [
    np.dtype(getattr(jnp, name))
    for name in (
        *("bool_", "int1", "int2", "int4", "int8", "int16", "int32", "int64"),
        *("uint1", "uint2", "uint4", "uint8", "uint16", "uint32", "uint64"),
        *("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e8m0fnu", "float8_e3m4", "float8_e4m3"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
    )
    if hasattr(jnp, name)
]
# Of these XLA's CPU holds no arrays: the first two are bool to it, or in newer versions no type of a custom call; at an
# empty array of the others its compiler aborts, and to a handler they are "INVALID".
REFUSED_BY_XLA = [np.dtype(getattr(jnp, name)) for name in ("int1", "uint1") if hasattr(jnp, name)]
ABORTING_XLA = {"float6_e2m3fn", "float6_e3m2fn"}


class Call(NamedTuple):
    """A call that is right. `result` has the values of `results`, exact in every type that is taken.

    `takes` are types beside those of the arrays, by argument; `free` are axes that may be longer. Where the type of an
    argument settles that of another one, `settles` has the other's name.
    """

    target: str
    arrays: dict[str, np.ndarray]
    results: dict[str, jax.ShapeDtypeStruct]
    attributes: dict[str, Any]
    expected: list[np.ndarray]
    takes: dict[str, list[Any]]
    free: set[tuple[str, int]]
    settles: dict[str, str]


def run(call):
    function = jax.ffi.ffi_call(call.target, tuple(call.results.values()))
    return jax.block_until_ready(function(*call.arrays.values(), **call.attributes))


def with_one(call, name, change):
    """`call` with another array, or another result, in the place of `name`."""
    if name in call.arrays:
        return call._replace(arrays=call.arrays | {name: change(call.arrays[name])})
    result = call.results[name]
    changed = change(np.zeros(result.shape, result.dtype))
    return call._replace(results=call.results | {name: jax.ShapeDtypeStruct(changed.shape, changed.dtype)})


def assert_right(call, results):
    for result, expected in zip(results, call.expected, strict=True):
        found = np.asarray(result)[: len(expected)]
        np.testing.assert_array_equal(found.astype(np.float64), expected.astype(np.float64))


def assert_every_element_type(call, name):
    """In the place of `name`: a right result, or an error that names it."""
    array = (call.arrays | call.results)[name]
    with jax.enable_x64(True):
        for dtype in DTYPES:
            if dtype in (array.dtype, *map(np.dtype, call.takes.get(name, []))):
                changed = with_one(call, name, lambda array, dtype=dtype: array.astype(dtype))
                assert_right(changed, run(changed))
            elif dtype.name not in ABORTING_XLA or 0 not in array.shape:
                changed = with_one(call, name, lambda array, dtype=dtype: np.ones(array.shape).astype(dtype))
                assert_names((name, call.settles.get(name)), changed, dtype)


def assert_every_size(call, name):
    """The same of axes: one more, one less, longer and shorter ones. What no longer fits may be named instead."""
    array = call.arrays[name] if name in call.arrays else np.zeros(call.results[name].shape, call.results[name].dtype)
    for longer, other in other_shapes(array):
        changed = with_one(call, name, lambda _, other=other: other)
        if (name, longer) in call.free:
            assert_right(call, run(changed))
        elif array.size or other.size:
            with pytest.raises(jax.errors.JaxRuntimeError, match=f"{call.target}: (`\\w+` \\(|block \\d \\()"):
                run(changed)


def other_shapes(array):
    """Arrays of an axis more or less, of each axis longer or shorter; before each, the axis that is longer, or None."""
    yield None, array[None]
    if array.ndim:
        yield None, array.reshape(array.shape[1:] if array.shape[0] == 1 else -1) if array.ndim > 1 else array.sum()
    for axis, size in enumerate(array.shape):
        more = np.ones((*array.shape[:axis], 1, *array.shape[axis + 1 :]), array.dtype)
        yield axis, np.concatenate([array, more], axis)
        if size:
            yield None, array.take(range(size - 1), axis)


def assert_names(names, call, dtype=None):
    """`call` is an error that names one of `names`, with its value."""
    refusals = (jax.errors.JaxRuntimeError, ValueError) if dtype in REFUSED_BY_XLA else jax.errors.JaxRuntimeError
    with pytest.raises(refusals) as raised:
        run(call)
    if dtype not in REFUSED_BY_XLA:
        found = re.search(rf"INVALID_ARGUMENT: {call.target}: `(\w+)` \(\w+ \(.*?\)\) must ", str(raised.value))
        assert found is not None, raised.value
        assert found[1] in names
