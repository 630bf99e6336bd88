"""Input formats against a statement of their rules in numpy's floats and ml_dtypes, and as properties."""

import warnings
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_same_bits, bits
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from input_formats import SINGLE, TINY, as_element, reference, shared, worth
from safetensors.numpy import load_file

from jmx.numerics.input_formats import (
    FAMILIES,
    FP8_BLOCK_UE8M0,
    FP8_STATIC,
    FP8_TENSOR,
    INPUT_FORMATS,
    INT8_TOKEN,
    MXFP8,
    NVFP4,
    InputFormat,
    QuantizedInputs,
    dequantize,
    quantize,
    reduce_static_scales,
    resolve,
)

pytestmark = pytest.mark.sampled(3)

DATA = Path(__file__).parent / "data"

ALL = [*INPUT_FORMATS.values()]
DYNAMIC = [format for format in ALL if format.dynamic]
K = 256  # whole blocks of every format
SHAPE = (3, K)  # one shape for all hypothesis examples: one compilation a format
LARGEST = np.finfo(np.float32).max

formats = pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)
dynamic = pytest.mark.parametrize("format", DYNAMIC, ids=lambda format: format.name)
any_floats = hnp.arrays(SINGLE, SHAPE, elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
modest_floats = hnp.arrays(SINGLE, SHAPE, elements=st.floats(-(2.0**100), 2.0**100, width=32))
static_scales = st.floats(float(TINY), 2.0**110, width=32).map(SINGLE)


def static_for(format, scale=0.01):
    return SINGLE(scale) if format.static else None


def assert_as_reference(x, format, static=None):
    static = static_for(format) if static is None else static
    q = quantize(x, format, static)
    values, scales = reference(x, format, static)
    assert (q.values.dtype, q.scales.dtype) == (format.element_dtype, format.scale_dtype)
    assert q.scales.shape == format.scales_shape(x.shape)
    np.testing.assert_array_equal(bits(q.scales), bits(scales))
    np.testing.assert_array_equal(bits(q.values), bits(values))
    return q


def every_finite(dtype):
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    return values[np.isfinite(values.astype(np.float32))]


@formats
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_every_16_bit_value_as_the_largest_of_its_block(rng, format, dtype):
    largest = every_finite(dtype)
    size = min(shared(format, 32), 32) if format.block_size != 128 else 128
    part = rng.uniform(-1, 1, (len(largest), size)) * rng.choice([1, 1 / 16, 1 / 512], (len(largest), size))
    x = (part * np.abs(largest.astype(np.float64))[:, None]).astype(dtype)
    x[np.arange(len(x)), rng.integers(0, size, len(x))] = largest
    assert_as_reference(x, format)


@formats
@pytest.mark.parametrize("amax", [500.0, 2.0**-100, 2.0**-124, 2.0**-130])
def test_every_bfloat16_below_some_largest(format, amax):
    values = every_finite(jnp.bfloat16)
    values = values[np.abs(values.astype(np.float64)) <= amax]
    size = shared(format, K) - 1
    blocks = np.resize(values, (-(-len(values) // size), size))
    x = np.column_stack([np.full(len(blocks), amax, jnp.bfloat16), blocks])
    for static in (1.0, 2.0**-100, float(TINY)) if format.static else (None,):
        assert_as_reference(x, format, None if static is None else SINGLE(static))


@pytest.mark.parametrize("static", [1.0, 0.1, 3e-5, 2.0**-126, 1e30])
def test_every_scale_of_nvfp4(rng, static):
    """amax at each e4m3, between two, next to that, below and above all."""
    scales = np.arange(1, 0x7F, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)
    between = (scales[:-1] + scales[1:]) / 2
    wanted = np.concatenate(
        [scales, between, between * (1 + 2.0**-20), between * (1 - 2.0**-20), [1e-9, 1e-3, 449, 1e4]]
    )
    x = (rng.uniform(-1, 1, (len(wanted), 16)) * wanted[:, None] * 6 * static).astype(SINGLE)
    x[:, 3] = wanted * 6 * static
    q = assert_as_reference(x, NVFP4, SINGLE(static))
    np.testing.assert_array_equal(np.unique(bits(q.scales)), np.arange(1, 0x7F))


def by_deepseeks_bits(x, divided):
    """values and scales as DeepSeek and DeepGEMM find them, of x (..., 128): `divided` is amax / 448 in float32."""
    word = divided(np.maximum(np.abs(x).max(-1), SINGLE(1e-4))).view(np.int32)
    scale = np.clip((word >> 23) + (word & 0x7FFFFF != 0), 1, 254).astype(np.int32) << 23
    scale = scale.view(SINGLE)[..., None]
    return np.clip(x / scale, -448, 448).astype(jnp.float8_e4m3fn), scale[..., 0]


@pytest.mark.parametrize(
    "divided", [lambda amax: amax / SINGLE(448), lambda amax: amax * SINGLE(1 / 448)], ids=["DeepGEMM", "DeepSeek"]
)
def test_ue8m0_is_what_deepseek_computes(rng, divided):
    """Where amax is 1e-4 or more, at and beside each power of two, too."""
    steps = 448 * np.ldexp(1.0, np.arange(-21, 119)).astype(SINGLE)
    beside = [np.nextafter(steps, SINGLE(0)), steps, np.nextafter(steps, SINGLE(np.inf))]
    largest = np.concatenate([*beside, (2.0 ** rng.uniform(-13, 127, 400)).astype(SINGLE)])
    x = (rng.uniform(-1, 1, (len(largest), 128)) * largest[:, None]).astype(SINGLE)
    x[:, 7] = largest
    values, scales = by_deepseeks_bits(x, divided)
    q = quantize(x, FP8_BLOCK_UE8M0)
    np.testing.assert_array_equal(bits(q.values), bits(values))
    np.testing.assert_array_equal(np.asarray(q.scales)[..., 0].astype(SINGLE), scales)


def test_a_static_scale_saturates_and_keeps_its_bits():
    static = SINGLE(0.37)
    edge = 448 * static
    x = np.array([[edge, np.nextafter(edge, SINGLE(np.inf)), -100 * edge, LARGEST, -LARGEST, edge / 2]], SINGLE)
    q = assert_as_reference(x, FP8_STATIC, static)
    np.testing.assert_array_equal(np.asarray(q.values).astype(SINGLE), [[448, 448, -448, 448, -448, 224]])
    assert bits(q.scales) == bits(static)


@formats
@given(x=any_floats, static=static_scales)
def test_any_floats(format, x, static):
    assert_as_reference(x, format, static if format.static else None)


@formats
@given(x=modest_floats, static=static_scales)
def test_what_is_quantized_stays_under_the_same_scale(format, x, static):
    """A value divided by its own scale once more is the same element."""
    q = quantize(x, format, static if format.static else None)
    worth = np.asarray(dequantize(q, format)).astype(np.float64).reshape(*SHAPE[:-1], -1, shared(format, K))
    scale = np.asarray(q.scales).astype(np.float64)
    scale = np.broadcast_to(scale, worth.shape[:-1] if scale.ndim else ())
    if q.global_scale is not None:
        scale = scale * np.float64(q.global_scale)
    normal = scale >= TINY  # below, the product itself has lost bits
    again = as_element((worth / scale[..., None]).astype(SINGLE), format.element_dtype)
    values = np.asarray(q.values).reshape(worth.shape)
    np.testing.assert_array_equal(bits(again)[normal], bits(values)[normal])


@formats
@given(x=any_floats, static=static_scales)
def test_order_is_preserved(format, x, static):
    x = np.sort(x, axis=-1)  # within each block, too
    worth = np.asarray(dequantize(quantize(x, format, static if format.static else None), format))
    blocks = worth.reshape(*SHAPE[:-1], -1, shared(format, K))
    assert (blocks[..., :-1] <= blocks[..., 1:]).all()


# Half a step of the element, relative to the value, and half its least step, in scales.
BOUNDS = {
    "fp8_static": (2.0**-4, 2.0**-10),
    "fp8_tensor": (2.0**-4, 2.0**-10),
    "fp8_token": (2.0**-4, 2.0**-10),
    "fp8_block": (2.0**-4, 2.0**-10),
    "fp8_block_ue8m0": (2.0**-4, 2.0**-10),
    "mxfp8": (2.0**-4, 2.0**-10),
    "mxfp4": (0.25, 0.25),
    "nvfp4": (0.25, 0.25),
    "int8_token": (0, 0.5),
}


@formats
def test_the_error_is_at_most_half_a_step(rng, format):
    x = (rng.standard_normal((64, 8 * K)) * np.exp(rng.normal(0, 2, (64, 8 * K)))).astype(SINGLE)
    static = SINGLE(np.abs(x).max() / format.largest) if format.static else None
    q = quantize(x, format, static)
    scale = np.asarray(q.scales).astype(np.float64) * (1 if q.global_scale is None else np.float64(q.global_scale))
    scale = np.repeat(scale, 8 * K // scale.shape[-1], axis=-1) if scale.ndim else scale
    relative, least = BOUNDS[format.name]
    error = np.abs(np.asarray(dequantize(q, format)).astype(np.float64) - x)
    allowed = np.maximum(relative * np.abs(x), least * scale) * (1 + 2.0**-20)
    element = 127 if format == INT8_TOKEN else float(jnp.finfo(format.element_dtype).max)
    inside = np.abs(x) <= element * scale
    assert (error <= allowed)[inside].all()
    # Beyond that an element saturates: where scales are rounded down, and by as much.
    outside = {"mxfp4": 7 / 6, "nvfp4": 1 + 2.0**-4}.get(format.name, 1 + 2.0**-20)
    assert (np.abs(x) <= outside * element * scale).all()
    assert inside.mean() > 0.9


@formats
def test_zeros_get_the_least_scale_and_keep_their_sign(format):
    x = np.zeros(SHAPE, SINGLE)
    x[1] = -0.0
    q = assert_as_reference(x, format)
    if format.dynamic:
        least = {"nvfp4": 2.0**-9, "mxfp4": 1.0, "mxfp8": 2.0**-127, "fp8_block_ue8m0": 2.0**-127}
        least = least.get(format.name, TINY)
        assert (np.asarray(q.scales).astype(np.float64) == least).all()
    worth = np.asarray(dequantize(q, format))
    assert (worth == 0).all()
    assert not np.signbit(worth)[[0, 2]].any()
    assert np.signbit(worth)[1].all() == (format != INT8_TOKEN)


@formats
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_and_its_neighbours_stay(rng, format, bad):
    x = rng.standard_normal((3, 2 * K)).astype(SINGLE)
    expected = np.asarray(dequantize(quantize(x, format, static_for(format)), format)).copy()
    size = shared(format, 2 * K) if format.dynamic else 1
    first = 37 // size * size
    x[1, 37] = bad
    q = quantize(x, format, static_for(format))
    if not format.by_token:
        assert np.isnan(dequantize(q, format)).all()
        assert np.isnan(q.scales)
        assert not np.asarray(q.values).astype(SINGLE).any()
        return
    assert np.isnan(dequantize(q, format))[1, first : first + size].all()
    if format.dynamic:
        assert np.isnan(np.asarray(q.scales).astype(SINGLE)).sum() == 1
        assert (np.asarray(q.values)[1, first : first + size].astype(SINGLE) == 0).all()
    expected[1, first : first + size] = np.nan
    np.testing.assert_array_equal(dequantize(q, format), expected)


@formats
def test_a_tensor_with_nothing_finite(format):
    for bad in (np.nan, np.inf):
        x = np.full(SHAPE, bad, SINGLE)
        assert np.isnan(dequantize(quantize(x, format, static_for(format)), format)).all()


@formats
@pytest.mark.parametrize("dtype", [SINGLE, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_subnormals(rng, format, dtype):
    count = np.dtype(dtype).itemsize * 8
    word = {16: np.uint16, 32: np.uint32}[count]
    codes = rng.integers(0, 1 << (count - 9), SHAPE).astype(word)
    x = (codes | rng.integers(0, 2, SHAPE).astype(word) << word(count - 1)).view(dtype)
    assert (np.abs(x.astype(np.float64)) < TINY).all()
    assert_as_reference(x, format, SINGLE(TINY) if format.static else None)
    q = quantize(x, format, static_for(format, float(TINY)))
    if format.name in (
        "fp8_token",
        "fp8_block",
        "fp8_block_ue8m0",
        "mxfp8",
    ):  # the floor costs rows this small no more than some bits
        error = np.asarray(dequantize(q, format)).astype(np.float64) - x.astype(np.float64)
        assert np.abs(error).max() <= 2.0**-4 * np.abs(x.astype(np.float64)).max()


@formats
def test_the_same_bits_under_jit_vmap_and_in_any_shape(rng, format):
    x = rng.standard_normal((2, 3, 5, K)).astype(jnp.bfloat16)
    static = static_for(format)
    q = quantize(x, format, static)
    assert_same_bits(jax.jit(quantize, static_argnums=1)(x, format, static), q)
    assert_same_bits(quantize(jnp.asarray(x), format, None if static is None else jnp.asarray(static)), q)
    mapped = jax.vmap(lambda row: quantize(row, format, static))(x)
    if format.by_token:
        np.testing.assert_array_equal(bits(mapped.values), bits(q.values))
    else:
        np.testing.assert_array_equal(bits(mapped.values[1]), bits(quantize(x[1], format, static).values))
    flat = quantize(x.reshape(-1, K), format, static)
    np.testing.assert_array_equal(bits(flat.values).ravel(), bits(q.values).ravel())
    np.testing.assert_array_equal(bits(flat.scales).ravel(), bits(q.scales).ravel())
    worth = np.asarray(dequantize(q, format))
    np.testing.assert_array_equal(bits(jax.jit(dequantize, static_argnums=1)(q, format)), bits(worth))
    np.testing.assert_array_equal(
        bits(jax.jit(lambda x: dequantize(quantize(x, format, static), format))(x)), bits(worth)
    )
    # A sum next to the product would be fused with it, if the product were one of floats.
    added = jax.jit(lambda x: dequantize(quantize(x, format, static), format) + SINGLE(0.1))(x)
    np.testing.assert_array_equal(bits(added), bits(worth + SINGLE(0.1)))


def test_a_tensor_has_one_scale_which_all_its_tokens_share(rng):
    x = rng.standard_normal((5, 3, 40)).astype(jnp.bfloat16)
    x[3, 1, 7] = -9.5
    q = quantize(x, FP8_TENSOR)
    assert q.scales.shape == ()
    assert q.scales == SINGLE(9.5 / 448)
    assert_same_bits(q, quantize(x, FP8_STATIC, np.asarray(q.scales)))


def test_one_scale_is_what_compressed_tensors_computes():
    """Scales and elements of `make_inputs.py`, which that package made."""
    golden = load_file(DATA / "inputs.safetensors")
    for i in range(len(golden) // 3):
        q = quantize(golden[f"{i}.x"], FP8_TENSOR)
        np.testing.assert_array_equal(q.scales, golden[f"{i}.scale"])
        np.testing.assert_array_equal(np.asarray(q.values).view(np.uint8), golden[f"{i}.values"])


@pytest.mark.parametrize("format", [f for f in ALL if f.by_token], ids=lambda format: format.name)
def test_a_token_does_not_depend_on_the_others(rng, format):
    x = (rng.standard_normal((64, K)) * np.exp(rng.normal(0, 5, (64, 1)))).astype(jnp.bfloat16)
    order = rng.permutation(64)
    q, turned = (quantize(part, format, static_for(format)) for part in (x, x[order]))
    np.testing.assert_array_equal(bits(turned.values), bits(q.values)[order])
    if format.dynamic:
        np.testing.assert_array_equal(bits(turned.scales), bits(q.scales)[order])


@formats
def test_odd_sizes_and_empty_arrays(rng, format):
    size = format.block_size if isinstance(format.block_size, int) else 1
    for shape in [(1, size), (5, 3 * size), (7 * size,), (2, 3, 37 * size)]:
        assert_as_reference(rng.standard_normal(shape).astype(SINGLE), format)
    for shape in [(0, 2 * size), (3, 0), (0,), (2, 0, size)]:
        q = quantize(np.zeros(shape, SINGLE), format, static_for(format))
        assert (q.values.shape, q.scales.shape) == (shape, format.scales_shape(shape))
        assert dequantize(q, format).shape == shape


@formats
def test_every_element_under_scales_of_every_size(rng, format):
    """Products are exact in float64, so rounding that to float32 is what `dequantize` promises."""
    if format == INT8_TOKEN:
        elements = np.arange(-128, 128).astype(np.int8)
    else:
        elements = np.arange(
            256 if format.element_dtype.itemsize == 1 and format.largest == 448 else 16, dtype=np.uint8
        )
        elements = elements.view(format.element_dtype)
    count = 4096
    size = shared(format, 64)
    values = rng.choice(elements, (count, size)).astype(format.element_dtype)
    global_scale = None
    if format.scale_dtype == np.float32:
        scales = rng.integers(1, 0x7F800000, (count, 1), np.uint32).view(SINGLE)
    else:
        scales = rng.integers(0, 0x7F if format == NVFP4 else 255, (count, 1), np.uint8).view(format.scale_dtype)
    if format == NVFP4:
        global_scale = rng.integers(1, 0x7F800000, (), np.uint32).view(SINGLE)
    if format in (FP8_STATIC, FP8_TENSOR):
        cases = [QuantizedInputs(values, scale[0]) for scale in scales[:64]]
    else:
        cases = [QuantizedInputs(values, scales, global_scale)]
    for q in cases:
        exact = q.values.astype(np.float64) * q.scales.astype(np.float64)
        exact = exact if global_scale is None else exact * np.float64(global_scale)
        with np.errstate(over="ignore", under="ignore"):
            expected = exact.astype(SINGLE)
        got = np.asarray(dequantize(QuantizedInputs(*(None if a is None else jnp.asarray(a) for a in q)), format))
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
        np.testing.assert_array_equal(bits(got)[~np.isnan(got)], bits(expected)[~np.isnan(got)])


SHORT = [format for format in ALL if format.short_block]


@pytest.mark.parametrize("format", SHORT, ids=lambda format: format.name)
@pytest.mark.parametrize("size", [1, 2, 5, 32, 100, 127, 128, 129, 160, 192, 255, 257, 300, 416])
def test_the_last_block_may_be_short(rng, format, size):
    """It has its own scale, and blocks do not depend on each other."""
    x = (rng.standard_normal((2, 3, size)) * np.exp(rng.normal(0, 3, (2, 3, size)))).astype(SINGLE)
    q = assert_as_reference(x, format)
    assert q.scales.shape == (2, 3, -(-size // format.block_size))
    values = np.asarray(q.values).astype(np.float64)
    scales = np.asarray(q.scales).astype(np.float64)
    for block in range(scales.shape[-1]):
        columns = slice(block * format.block_size, (block + 1) * format.block_size)
        alone = quantize(x[..., columns], format)
        np.testing.assert_array_equal(bits(alone.values), bits(q.values)[..., columns])
        np.testing.assert_array_equal(bits(alone.scales)[..., 0], bits(q.scales)[..., block])
        exact = (values[..., columns] * scales[..., block, None]).astype(SINGLE)
        np.testing.assert_array_equal(bits(dequantize(q, format))[..., columns], bits(exact))
    np.testing.assert_array_equal(bits(dequantize(q, format)), bits(worth(x, format).astype(SINGLE)))


@pytest.mark.parametrize("format", SHORT, ids=lambda format: format.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_short_block(rng, format, bad):
    x = rng.standard_normal((3, 160)).astype(SINGLE)
    expected = np.asarray(dequantize(quantize(x, format), format)).copy()
    x[1, 159], expected[1, 128:] = bad, np.nan
    np.testing.assert_array_equal(dequantize(quantize(x, format), format), expected)


@formats
def test_scales_that_do_not_fit_are_refused(format):
    q = quantize(np.ones((3, 2 * K), SINGLE), format, static_for(format))
    assert dequantize(q, format).shape == (3, 2 * K)
    for scales in (jnp.ones((2, *q.scales.shape[1:])), jnp.ones((3, 7)), jnp.ones((3, 1, 1)), jnp.ones(3)):
        with pytest.raises(ValueError, match=rf"`q.scales` \(shape .* must be .* for {format.name} inputs of shape"):
            dequantize(q._replace(scales=scales.astype(q.scales.dtype)), format)


WHOLE = [format for format in ALL if isinstance(format.block_size, int) and not format.short_block]


@pytest.mark.parametrize("format", WHOLE, ids=lambda format: format.name)
def test_part_of_a_block_is_refused(format):
    message = rf"`x.shape\[-1\]` \(=33\) must be a multiple of {format.block_size}"
    with pytest.raises(ValueError, match=message):
        quantize(np.ones((2, 33), SINGLE), format, static_for(format))


@formats
def test_what_cannot_be_quantized_is_refused(format):
    with pytest.raises(ValueError, match="scalar"):
        quantize(cast(Any, SINGLE(1)), format, static_for(format))
    for x in (np.ones(K), np.ones(K, np.int32), np.ones(K, jnp.float8_e4m3fn)):
        with pytest.raises(TypeError, match=f"`x` .dtype {x.dtype}. must be float32"):
            quantize(x, format, static_for(format))


@pytest.mark.parametrize("bad", [None, [[1.0]], "x", 3, 2.5], ids=repr)
def test_what_is_no_array_is_refused(bad):
    for name, call in (
        ("x", lambda: quantize(bad, INT8_TOKEN)),
        ("scales", lambda: reduce_static_scales(bad)),
        ("q", lambda: dequantize(bad, INT8_TOKEN)),
    ):
        with pytest.raises(TypeError, match=rf"`{name}` \(.*{type(bad).__name__}\) must be an? "):
            call()


def test_formats_of_no_table_are_refused():
    for format in ("mxfp8", replace(NVFP4, block_size=32), replace(MXFP8, name="mine")):
        with pytest.raises(ValueError, match=r"`format` \(=.*\) must be one of `INPUT_FORMATS`"):
            quantize(np.ones(SHAPE, SINGLE), format)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match=r"`format` \(=.*\) must be one of `INPUT_FORMATS`"):
            dequantize(quantize(np.ones(SHAPE, SINGLE), MXFP8), format)  # pyright: ignore[reportArgumentType]


@formats
def test_static_scales_are_given_where_they_belong(format):
    x = np.ones(SHAPE, SINGLE)
    if not format.static:
        with pytest.raises(ValueError, match=rf"`static_scale` \(=1.0\) must be None for {format.name}"):
            quantize(x, format, SINGLE(1))
        return
    with pytest.raises(ValueError, match=rf"`static_scale` \(=None\) must be given for {format.name}"):
        quantize(x, format)
    for scale in (0.5, np.float64(0.5), np.ones((), jnp.bfloat16)):
        with pytest.raises(TypeError, match=r"`static_scale` \(.*\) must be a float32 scalar"):
            quantize(x, format, cast(Any, scale))
    with pytest.raises(ValueError, match=r"`static_scale` \(shape \(3,\)\) must be a scalar"):
        quantize(x, format, np.ones(3, SINGLE))


@pytest.mark.parametrize("format", [f for f in ALL if f.static], ids=lambda format: format.name)
@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, -np.inf, 2.0**-127, 2.0**127])
def test_a_static_scale_out_of_range_is_refused_or_nan(format, bad):
    x, bad = np.ones(SHAPE, SINGLE), SINGLE(bad)
    for scale in (bad, jnp.asarray(bad)):
        with pytest.raises(ValueError, match=r"`static_scale` \(=.*\) must lie between 1.17.*e-38 and .*e\+35"):
            quantize(x, format, scale)
    q = jax.jit(quantize, static_argnums=1)(x, format, bad)
    assert np.isnan(dequantize(q, format)).all()


@pytest.mark.parametrize("format", [f for f in ALL if f.static], ids=lambda format: format.name)
def test_static_scales_reach_as_far_as_they_may(format):
    x = np.full(SHAPE, LARGEST, SINGLE)
    most = SINGLE(np.nextafter(LARGEST / SINGLE(format.largest), SINGLE(0)))
    q = quantize(x, format, most)
    assert np.isfinite(dequantize(q, format)).all()
    with pytest.raises(ValueError, match="must lie between"):
        quantize(x, format, SINGLE(most * 1.001))
    assert np.isfinite(dequantize(quantize(x, format, TINY), format)).all()


def test_the_table_and_what_its_formats_say():
    assert [*INPUT_FORMATS] == [
        *(
            "fp8_static",
            "fp8_tensor",
            "fp8_token",
            "fp8_block",
            "fp8_block_ue8m0",
            "mxfp8",
            "mxfp4",
            "nvfp4",
            "int8_token",
        )
    ]
    assert all(format.name == name for name, format in INPUT_FORMATS.items())
    assert [format.largest for format in ALL] == [448, 448, 448, 448, 448, 448, 6, 2688, 127]
    assert [format.name for format in ALL if format.static] == ["fp8_static", "nvfp4"]
    assert [format.name for format in ALL if not format.dynamic] == ["fp8_static"]
    assert [format.name for format in ALL if not format.by_token] == ["fp8_tensor"]
    assert len({*ALL}) == len(ALL)  # hashable, as jit's static arguments must be
    with pytest.raises(FrozenInstanceError):
        ALL[0].name = "other"  # pyright: ignore[reportAttributeAccessIssue]
    assert {name for names in FAMILIES.values() for name in names} <= {*INPUT_FORMATS}
    assert not {*FAMILIES} & {*INPUT_FORMATS}
    assert isinstance(ALL[0], InputFormat)


def test_static_scales_of_experts_become_the_largest():
    scales = np.array([0.5, 0.25, 0.5, 0.125], SINGLE)
    with pytest.warns(UserWarning, match=r"2 of 4 experts' are below the largest, 0.5, .* the least is 0.125"):
        most = reduce_static_scales(scales)
    assert (most.dtype, most.shape, most) == (np.float32, (), 0.5)
    with pytest.warns(UserWarning, match=r"1 of 2 experts' are below the largest, 0.5, .* the least is 0.125"):
        assert reduce_static_scales(np.array([[0.25, 0.125], [0.5, 0.5]], SINGLE)) == 0.5  # of gate and up
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reduce_static_scales(np.full(7, 0.3, SINGLE)) == SINGLE(0.3)
        assert reduce_static_scales(jnp.full(1, 0.3, jnp.bfloat16)) == np.float32(jnp.bfloat16(0.3))
    quantize(np.ones(SHAPE, SINGLE), FP8_STATIC, most)


@pytest.mark.parametrize("bad", [0.0, -0.5, np.nan, np.inf])
def test_static_scales_that_cannot_be_are_refused(bad):
    with pytest.raises(ValueError, match=r"`scales\[2\]` \(=.*\) must be positive and finite, as all 4 must"):
        reduce_static_scales(np.array([1, 2, bad, 3], SINGLE))
    with pytest.raises(ValueError, match=r"must be \(E,\) or \(E, P\)"):
        reduce_static_scales(np.ones((2, 2, 2), SINGLE))
    with pytest.raises(ValueError, match=r"`scales\[1, 0\]` \(=.*\) must be positive and finite, as all 4 must"):
        reduce_static_scales(np.array([[1, 2], [bad, 3]], SINGLE))
    with pytest.raises(ValueError, match=r"must be \(E,\) or \(E, P\)"):
        reduce_static_scales(np.ones(0, SINGLE))
    with pytest.raises(TypeError, match="must be float32"):
        reduce_static_scales(np.ones(2, np.int32))
    with pytest.raises(ValueError, match="traced"):
        jax.jit(reduce_static_scales)(np.ones(2, SINGLE))


@pytest.mark.parametrize(
    ("checkpoint", "user", "supported", "expected"),
    [
        (None, None, (None, "fp8_token"), None),
        (None, None, ("fp8_token", None), None),  # 16 bits are preferred, in any position
        (None, None, ("mxfp8", "fp8_token"), "mxfp8"),
        ("mxfp8", None, (None, "mxfp8"), "mxfp8"),
        ("mxfp8", "mxfp8", (None, "mxfp8"), "mxfp8"),
        (None, "int8", (None, "int8_token"), "int8_token"),
        ("fp8_static", "fp8", (None, "fp8_token", "fp8_static"), "fp8_static"),
        (None, "fp8", (None, "fp8_static", "fp8_block"), "fp8_block"),  # the family's order, not that of `supported`
        (None, "fp8", (None, "fp8_block", "fp8_token"), "fp8_token"),
        (None, "fp8", (None, "fp8_static", "fp8_block_ue8m0"), "fp8_block_ue8m0"),
        ("fp8_block_ue8m0", "fp8", (None, "fp8_block", "fp8_block_ue8m0"), "fp8_block_ue8m0"),
        (None, "fp4", ("nvfp4",), "nvfp4"),
    ],
)
def test_which_format_a_layer_takes(checkpoint, user, supported, expected):
    assert resolve(checkpoint, user, supported) == expected


@pytest.mark.parametrize(
    ("checkpoint", "user", "supported", "message"),
    [
        ("mxfp8", "fp8", (None, "mxfp8"), "`input_format` .='fp8'. must be 'mxfp8', which the checkpoint"),
        (
            "fp8_block",
            "fp8_token",
            ("fp8_block", "fp8_token"),
            "`input_format` .='fp8_token'. must be 'fp8_block', which",
        ),
        ("nvfp4", None, (None, "mxfp8"), r"'nvfp4' inputs are not supported; supported: \[None, 'mxfp8'\]"),
        (None, "fp8", (None, "mxfp8"), "'fp8' inputs are not supported"),
        (None, None, (), "any inputs are not supported"),
        (None, "e5m2", (None,), r"`input_format` \(='e5m2'\) must be one of .*'fp8_static'.*'fp8'"),
        ("fp8", None, (None,), r"`checkpoint` \(='fp8'\) must be one of"),  # a file says exactly what it has
    ],
)
def test_formats_that_a_layer_cannot_take(checkpoint, user, supported, message):
    with pytest.raises(ValueError, match=message):
        resolve(checkpoint, user, supported)
