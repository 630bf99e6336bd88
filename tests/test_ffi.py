"""The handlers of the kernels in C++: any array in the place of any argument gives a right result, or an error that
names it."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dequantized import dequantized
from ffi_calls import DTYPES, Call, assert_every_element_type, assert_every_size, assert_names, assert_right, run

from jmx.ffi.cpu import library as ffi
from jmx.numerics.formats import FORMATS, BlockScaled

pytestmark = pytest.mark.usefixtures("on_cpu")
built = pytest.mark.skipif(ffi.library().fault is not None, reason=str(ffi.library().fault))

E, N, K = 3, 8, 64  # experts, rows of a weight, columns
BLOCKS = {"experts": [2, 0, 1], "x_rows": [0, 1, 4], "out_rows": [0, 2, 4], "counts": [2, 2, 1]}
ROWS = 5  # of x, and of the result, as many as the blocks need


def blocks():
    return {name: np.array(numbers, np.int32) for name, numbers in BLOCKS.items()}


def in_blocks(f):
    """Rows of a result whose block b has f(expert, x's rows)."""
    made = [f(expert, slice(row, row + count)) for expert, row, _, count in zip(*BLOCKS.values(), strict=True)]
    return np.concatenate(made)


def canonical(q, format):
    codes = np.stack([q.values & 0xF, q.values >> 4], axis=-1).reshape(E, N, K)
    values = (codes ^ 8).astype(np.int8) - 8 if format.element_dtype == jnp.int4 else codes.view(format.element_dtype)
    return q._replace(
        values=values, scales=q.scales.view(format.scale_dtypes[0]) if q.scales.itemsize == 1 else q.scales
    )


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
    weight = dequantized(canonical(q, format), format)
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
        ffi.GROUPED_PRODUCT,
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


@built
@pytest.mark.parametrize("call", CALLS)
def test_calls_are_right(call):
    assert_right(CALLS[call], run(CALLS[call]))


@built
@pytest.mark.sampled(12)
@pytest.mark.parametrize(("call", "name"), PLACES)
def test_every_element_type_in_every_place(call, name):
    assert_every_element_type(CALLS[call], name)


@built
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_of_every_element_type(dtype):
    """Elements of 4 bits and less are not bytes, though XLA's FFI counts a byte for each."""
    if dtype in map(np.dtype, (np.float32, ml_dtypes.bfloat16, np.int8)):
        assert_right(order_columns(dtype), run(order_columns(dtype)))
    else:
        with jax.enable_x64(True):
            assert_names(("x",), order_columns(dtype), dtype)


@built
@pytest.mark.sampled(16)
@pytest.mark.parametrize(("call", "name"), PLACES)
def test_every_place_with_wrong_sizes(call, name):
    assert_every_size(CALLS[call], name)
