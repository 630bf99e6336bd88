"""The handlers of the kernels in C++: any array in the place of any argument gives a right result, or an error that
names it."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dequantized import dequantized

from jmx import ffi
from jmx.formats import FORMATS, BlockScaled, unpack

pytestmark = pytest.mark.usefixtures("on_cpu")
built = pytest.mark.skipif(ffi.library().fault is not None, reason=str(ffi.library().fault))

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
E, N, K = 3, 8, 64  # experts, rows of a weight, columns
BLOCKS = {"experts": [2, 0, 1], "x_rows": [0, 1, 4], "out_rows": [0, 2, 4], "counts": [2, 2, 1]}
ROWS = 5  # of x, and of the result, as many as the blocks need


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


def blocks():
    return {name: np.array(numbers, np.int32) for name, numbers in BLOCKS.items()}


def in_blocks(f):
    """Rows of a result whose block b has f(expert, x's rows)."""
    made = [f(expert, slice(row, row + count)) for expert, row, _, count in zip(*BLOCKS.values(), strict=True)]
    return np.concatenate(made)


def grouped_product(name, dtype: Any = np.float32):
    rng, format = np.random.default_rng(0), FORMATS[name]
    groups, integers = K // format.block_size, format.element_dtype == jnp.int4
    values = rng.integers(0, 256, (E, N, K // 2), np.uint8)
    powers = rng.integers(-2, 3, (E, N, groups))
    empty = np.zeros(0, np.float32)
    if integers:
        scales = (2.0**powers).astype(np.float32)
    else:
        scales = (127 + powers if name == "mxfp4" else 7 + powers << 3).astype(np.uint8)
    q = BlockScaled(
        values,
        scales,
        2.0 ** rng.integers(-2, 3, (E, N)).astype(np.float32) if name == "nvfp4" else None,
        rng.integers(-8, 8, (E, N, groups)).astype(np.int8) if integers else None,
    )
    x = rng.integers(-8, 9, (ROWS, K)).astype(dtype)
    x_scales = 2.0 ** rng.integers(-2, 3, (ROWS, 1)).astype(np.float32) if dtype == np.int8 else empty
    bias = rng.integers(-8, 9, (len(BLOCKS["counts"]), N)).astype(np.float32)
    weight = dequantized(jax.tree.map(np.asarray, unpack(jax.tree.map(jnp.asarray, q), format)), format)
    rows = x.astype(np.float64) * (x_scales if x_scales.size else 1)
    products = in_blocks(lambda expert, those: rows[those] @ weight[expert].T)
    arrays = {
        "x": x,
        "x_scales": x_scales,
        "values": values,
        "scales": scales,
        "zero_points": np.zeros(0, np.int8) if q.zero_points is None else q.zero_points,
        "global_scales": empty if q.global_scales is None else q.global_scales,
        "bias": bias,
        **blocks(),
    }
    floats = [ml_dtypes.bfloat16] if dtype == np.float32 else []
    return Call(
        ffi.TARGET,
        arrays,
        {"out": jax.ShapeDtypeStruct((ROWS, N), jnp.float32)},
        {
            "instructions": "best",
            "format": "int4" if integers else name,
            "group": np.int64(format.block_size),
            "few": False,
        },
        [products + np.repeat(bias, BLOCKS["counts"], axis=0)],
        {"x": floats, "scales": [ml_dtypes.bfloat16, np.float16] if integers else []},
        {("out", 0)} if dtype == np.int8 else {("x", 0), ("out", 0)},
        {"x": "x_scales"} if integers else {},
    )


def round_rows():
    x = np.random.default_rng(0).integers(-127, 128, (ROWS, K)).astype(np.float32)
    x[:, 0] = 127
    results = {
        "values": jax.ShapeDtypeStruct((ROWS, K), jnp.int8),
        "scales": jax.ShapeDtypeStruct((ROWS, 1), jnp.float32),
    }
    expected = [x, np.ones((ROWS, 1))]
    return Call(ffi.ROUND_ROWS, {"x": x}, results, {}, expected, {"x": [ml_dtypes.bfloat16]}, set(), {})


def order_columns(dtype: Any = np.float32):
    rng = np.random.default_rng(0)
    x = rng.integers(-100, 101, (ROWS, K)).astype(dtype)
    order = np.stack([rng.permutation(K) for _ in range(E)]).astype(np.int32)
    return Call(
        ffi.ORDER_COLUMNS,
        {"x": x, "order": order, **blocks()},
        {"out": jax.ShapeDtypeStruct((ROWS, K), dtype)},
        {},
        [in_blocks(lambda expert, those: x[those][:, order[expert]])],
        {},
        {("x", 0), ("order", 0), ("out", 0)},
        {"x": "out"},
    )


CALLS = {
    "mxfp4": grouped_product("mxfp4"),
    "nvfp4": grouped_product("nvfp4"),
    "int4": grouped_product("int4_g32_asym"),
    "int4 x int8": grouped_product("int4_g32_asym", np.int8),
    "round": round_rows(),
    "order": order_columns(),
}
PLACES = [(call, name) for call, made in CALLS.items() for name in (*made.arrays, *made.results)]


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
        found = np.asarray(result).astype(np.float64)
        np.testing.assert_array_equal(found[: len(expected)], expected.astype(np.float64))


@built
@pytest.mark.parametrize("call", CALLS)
def test_calls_are_right(call):
    assert_right(CALLS[call], run(CALLS[call]))


@built
@pytest.mark.sampled(12)
@pytest.mark.parametrize(("call", "name"), PLACES)
def test_every_element_type_in_every_place(call, name):
    call = CALLS[call]
    array = (call.arrays | call.results)[name]
    with jax.enable_x64(True):
        for dtype in DTYPES:
            if dtype in (array.dtype, *map(np.dtype, call.takes.get(name, []))):
                changed = with_one(call, name, lambda array, dtype=dtype: array.astype(dtype))
                assert_right(changed, run(changed))
            elif dtype.name not in ABORTING_XLA or array.size:
                changed = with_one(call, name, lambda array, dtype=dtype: np.ones(array.shape).astype(dtype))
                assert_names((name, call.settles.get(name)), changed, dtype)


@built
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_of_every_element_type(dtype):
    """Elements of 4 bits and less are not bytes, though XLA's FFI counts a byte for each."""
    if dtype in map(np.dtype, (np.float32, ml_dtypes.bfloat16, np.int8)):
        assert_right(order_columns(dtype), run(order_columns(dtype)))
    else:
        with jax.enable_x64(True):
            assert_names(("x",), order_columns(dtype), dtype)


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


@built
@pytest.mark.sampled(16)
@pytest.mark.parametrize(("call", "name"), PLACES)
def test_every_place_with_wrong_sizes(call, name):
    call = CALLS[call]
    array = call.arrays[name] if name in call.arrays else np.zeros(call.results[name].shape, call.results[name].dtype)
    for longer, other in other_shapes(array):
        changed = with_one(call, name, lambda _, other=other: other)
        if (name, longer) in call.free:
            assert_right(call, run(changed))
        elif array.size or other.size:
            with pytest.raises(jax.errors.JaxRuntimeError, match=f"{call.target}: (`\\w+` \\(|block \\d \\()"):
                run(changed)


def assert_names(names, call, dtype=None):
    """`call` is an error that names one of `names`, with its value."""
    refusals = (jax.errors.JaxRuntimeError, ValueError) if dtype in REFUSED_BY_XLA else jax.errors.JaxRuntimeError
    with pytest.raises(refusals) as raised:
        run(call)
    if dtype not in REFUSED_BY_XLA:
        found = re.search(rf"INVALID_ARGUMENT: {call.target}: `(\w+)` \(\w+ \(.*?\)\) must ", str(raised.value))
        assert found is not None, raised.value
        assert found[1] in names
