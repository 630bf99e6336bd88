"""MXFP4 against ml_dtypes in float64, against a brute-force quantizer, and as properties. The other formats against
their definition in numpy."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_same_bits, bits
from dequantized import by_column, dequantized, with_odd_scales
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax import lax

from jmx.numerics import quantization
from jmx.numerics.formats import (
    FLOATS,
    FORMATS,
    FP8_BLOCK,
    MXFP4,
    NVFP4,
    WHOLE_ROW,
    BlockScaled,
    is_packed,
    logical_shape,
    pack,
    unpack,
)
from jmx.numerics.quantization import SCALE_RULES, dequantize, quantize, random
from jmx.numerics.resizing import pad

BLOCK = MXFP4.block_size
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SHAPE = (3, 2 * BLOCK)  # one shape for all hypothesis examples: one compilation

no_deadline = settings(deadline=None)  # the first example compiles
finite_arrays = hnp.arrays(np.float32, SHAPE, elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
modest_arrays = hnp.arrays(np.float32, SHAPE, elements=st.floats(-(2.0**127), 2.0**127, width=32))
seeds = st.integers(0, 2**32 - 1)


def from_codes(codes, scale_codes):
    """Canonical numpy weight of uint8 codes."""
    return BlockScaled(codes.view(MXFP4.element_dtype), scale_codes.view(MXFP4.scale_dtype))


def random_codes(seed, shape=SHAPE, num_scales=256):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, shape, dtype=np.uint8)
    scale_codes = rng.integers(0, num_scales, (*shape[:-1], shape[-1] // BLOCK)).astype(np.uint8)
    return codes, scale_codes


def every_code_and_scale():
    """(256, 32): row s holds each of the 16 codes twice under scale code s."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, BLOCK // 16))
    return from_codes(codes, np.arange(256, dtype=np.uint8)[:, None])


def exact(q, dtype):
    """Values in float64, where each is exact, rounded to `dtype`, which then only overflows."""
    values = q.values.astype(np.float64)
    scales = np.repeat(q.scales.astype(np.float64), BLOCK, axis=-1)
    with np.errstate(over="ignore"):
        return (values * scales).astype(np.float32).astype(dtype)


def reference_quantize(x, scale_rule):
    """Codes and scale codes of float64 `x`, by search over the eight magnitudes."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    mantissa, exponent = np.frexp(amax)  # amax = (2 * mantissa) * 2^(exponent - 1)
    if scale_rule == "ocp":
        scale = exponent - 1 - 2
    elif scale_rule == "round_up":
        scale = exponent - 1 - 2 + (amax > 6 * np.ldexp(1.0, exponent - 3))
    else:
        scale = exponent - 1 - 2 + (2 * mantissa >= 1.75)
    scale = np.where(amax == 0, 0, np.clip(scale, -127, 127))
    distance = np.abs(np.abs(np.ldexp(blocks, -scale))[..., None] - MAGNITUDES)
    tied = distance == distance.min(axis=-1, keepdims=True)
    preference = [0, 2, 4, 6, 1, 3, 5, 7]  # even codes first
    codes = np.take(preference, tied[..., preference].argmax(axis=-1))
    codes = np.where(np.signbit(blocks), codes + 8, codes)
    return codes.reshape(x.shape).astype(np.uint8), (scale[..., 0] + 127).astype(np.uint8)


def assert_quantizes_as_reference(x, scale_rule):
    codes, scale_codes = reference_quantize(np.asarray(x).astype(np.float64), scale_rule)
    q = quantize(x, scale_rule=scale_rule)
    np.testing.assert_array_equal(bits(q.scales), scale_codes)
    np.testing.assert_array_equal(bits(q.values) & 15, codes)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("on_host", [False, True])
def test_dequantize_every_code_times_every_scale(dtype, jit, packed, on_host):
    q = every_code_and_scale()
    expected = exact(q, dtype)
    given_q = q if on_host else jax.tree.map(jnp.asarray, q)
    function = jax.jit(dequantize, static_argnums=1) if jit else dequantize
    result = np.asarray(function(pack(given_q) if packed else given_q, dtype))
    assert result.dtype == dtype
    is_nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(result.astype(np.float32)), is_nan)
    np.testing.assert_array_equal(bits(result)[~is_nan], bits(expected)[~is_nan])
    assert is_nan[255].all()
    assert not is_nan[:255].any()


def test_the_sweep_holds_subnormals_and_infinities():
    values = np.abs(exact(every_code_and_scale(), np.float32))
    assert ((values > 0) & (values < np.finfo(np.float32).tiny)).any()
    assert np.isinf(values).any()


def test_dequantize_in_a_loop_needs_memory_for_one_expert():
    def total(q):
        def add(e, y):
            one = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, e, keepdims=False), q)
            return y + dequantize(one).sum(axis=0)

        return lax.fori_loop(0, q.values.shape[0], add, jnp.zeros(256, jnp.bfloat16))

    def temporary_bytes(num_experts):
        shapes = MXFP4.abstract((num_experts, 256, 256), packed=True)
        analysis = jax.jit(total).lower(shapes).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary_bytes(64) == temporary_bytes(4)


@pytest.mark.parametrize("scale_rule", SCALE_RULES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_quantize_matches_search(scale_rule, dtype):
    rng = np.random.default_rng()
    spread = 2.0 ** rng.integers(-20, 10, (64, 1))
    assert_quantizes_as_reference((rng.standard_normal((64, 4 * BLOCK)) * spread).astype(dtype), scale_rule)


@pytest.mark.parametrize("scale_rule", SCALE_RULES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_quantize_matches_search_on_all_bit_patterns_of_one_octave(scale_rule, dtype):
    """Each block holds near and exact powers of two and ties; blocks walk over every exponent, subnormals included."""
    rng = np.random.default_rng()
    uint = {2: np.uint16, 4: np.uint32}[jnp.dtype(dtype).itemsize]
    mantissa_bits, exponents = {"float32": (23, 255), "bfloat16": (7, 255), "float16": (10, 31)}[jnp.dtype(dtype).name]
    top = np.arange(exponents, dtype=uint)[:, None]
    drop = rng.integers(0, 5, (exponents, BLOCK)).astype(uint)
    eighths = rng.integers(0, 8, (exponents, BLOCK)).astype(uint) << mantissa_bits - 3  # powers of two and all ties
    nudge = rng.integers(-1, 2, (exponents, BLOCK))  # and their neighbours
    magnitudes = (((np.maximum(top, drop) - drop) << mantissa_bits) + eighths).astype(np.int64) + nudge
    magnitudes = np.clip(magnitudes, 0, (exponents << mantissa_bits) - 1).astype(uint)
    signs = rng.integers(0, 2, (exponents, BLOCK)).astype(uint) << 8 * uint().itemsize - 1
    assert_quantizes_as_reference((magnitudes | signs).view(dtype), scale_rule)


@no_deadline
@given(finite_arrays, st.sampled_from(sorted(SCALE_RULES)))
def test_quantize_matches_search_on_any_floats(x, scale_rule):
    assert_quantizes_as_reference(x, scale_rule)


def test_quantize_gives_the_same_bits_under_jit():
    x = np.random.default_rng().standard_normal((8, 4 * BLOCK)).astype(np.float32)
    assert_same_bits(jax.jit(lambda x: quantize(x, nonfinite="nan_block"))(x), quantize(x))


def test_zeros_keep_their_sign_and_get_scale_one():
    x = np.zeros((1, 2 * BLOCK), np.float32)
    x[0, 1::3] = -0.0
    q = quantize(x)
    np.testing.assert_array_equal(bits(q.scales), 127)
    np.testing.assert_array_equal(bits(dequantize(q, jnp.float32)), bits(x))


@pytest.mark.parametrize("shape", [(0, 2 * BLOCK), (3, 0)])
def test_empty_weights_pass_through(shape):
    q = quantize(np.ones(shape, np.float32))
    for weight in (q, pack(q), unpack(pack(q)), unpack(pack(jax.tree.map(np.asarray, q)))):
        assert logical_shape(weight) == dequantize(weight).shape == shape
    assert logical_shape(pad(q, (3, 2 * BLOCK))) == (3, 2 * BLOCK)


@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if "order" not in format.arrays])
@pytest.mark.parametrize("shape", [(0, 256), (3, 0), (2, 0, 256), (0, 3, 256)])
def test_empty_weights_of_every_format_pass_through(name, shape):
    q = quantize(np.ones(shape, np.float32), FORMATS[name])
    assert dequantize(q, jnp.float32, FORMATS[name]).shape == shape


def test_scale_rules_differ_where_they_should():
    def scale(amax, rule):
        return int(bits(quantize(np.full(BLOCK, amax, np.float32), scale_rule=rule).scales)[0]) - 127

    assert [scale(4.0, rule) for rule in ("ocp", "round_up", "round_even")] == [0, 0, 0]
    assert [scale(6.0, rule) for rule in ("ocp", "round_up", "round_even")] == [0, 0, 0]
    assert [scale(6.5, rule) for rule in ("ocp", "round_up", "round_even")] == [0, 1, 0]
    assert [scale(7.0, rule) for rule in ("ocp", "round_up", "round_even")] == [0, 1, 1]


@no_deadline
@given(seeds)
def test_quantize_undoes_dequantize(seed):
    """Under "ocp" a block whose largest magnitude is 4 or 6 keeps its scale."""
    codes, scale_codes = random_codes(seed, num_scales=253)
    codes[:, ::BLOCK] |= 6
    q = from_codes(codes, scale_codes)
    assert_same_bits(quantize(dequantize(q, jnp.float32)), q)
    assert_same_bits(quantize(dequantize(q, jnp.bfloat16)), q)


@no_deadline
@given(seeds, st.integers(-100, 100), st.sampled_from(sorted(SCALE_RULES)))
def test_powers_of_two_move_only_the_scale(seed, power, scale_rule):
    x = np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)
    q, moved = quantize(x, scale_rule=scale_rule), quantize(np.ldexp(x, power), scale_rule=scale_rule)
    np.testing.assert_array_equal(bits(moved.values), bits(q.values))
    np.testing.assert_array_equal(bits(moved.scales).astype(int), bits(q.scales).astype(int) + power)


@no_deadline
@given(modest_arrays)  # above 1.75 * 2^127 the nearest element overflows float32
def test_error_is_at_most_half_a_step(x):
    """With "round_up" nothing saturates: the step is 0.5 below 2, 1 below 4, 2 below 6, in units of the scale."""
    q = quantize(x, scale_rule="round_up")
    scale = np.repeat(np.asarray(q.scales).astype(np.float64), BLOCK, axis=-1)
    units = np.abs(x.astype(np.float64) / scale)
    error = np.abs(np.asarray(dequantize(q, jnp.float32)).astype(np.float64) - x) / scale
    assert units.max() <= 6
    assert (error <= np.select([units < 2, units < 4], [0.25, 0.5], 1.0)).all()


@pytest.mark.parametrize("size", [2 * BLOCK, 90 * BLOCK])
def test_random_weights_use_every_code_and_keep_the_size_of_activations(size):
    seed = np.random.default_rng().integers(2**31)
    q = random(jax.random.key(seed), (3, 256, size))
    assert logical_shape(q) == (3, 256, size)
    assert is_packed(q)
    assert len(np.unique(bits(unpack(q).values))) == 16
    assert len(np.unique(q.scales)) == 2
    assert 0.5 < np.asarray(dequantize(q, jnp.float32)).std() * size**0.5 < 2
    assert_same_bits(q, random(jax.random.key(seed), (3, 256, size)))
    assert (np.asarray(q.values) != random(jax.random.key(seed + 1), (3, 256, size)).values).any()


def test_sizes_that_are_not_whole_blocks_are_refused():
    with pytest.raises(ValueError, match=r"`x.shape\[-1\]` \(=33\) must be a multiple of 32"):
        quantize(np.ones(33, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_nonfinite_values_are_refused_or_make_their_block_nan(bad, dtype):
    x = np.random.default_rng().standard_normal((3, 4 * BLOCK)).astype(dtype)
    clean = quantize(x)
    x[1, BLOCK + 3] = x[2, 7] = bad
    with pytest.raises(ValueError, match=r"`x` holds 2 NaN or infinite values, the first \(=.*\) at \(1, 35\)"):
        quantize(x)
    q = quantize(x, nonfinite="nan_block")
    expected_scales, expected_values = bits(clean.scales).copy(), bits(clean.values).copy()
    expected_scales[1, 1] = expected_scales[2, 0] = 255
    expected_values[1, BLOCK : 2 * BLOCK] = expected_values[2, :BLOCK] = 0
    np.testing.assert_array_equal(bits(q.scales), expected_scales)
    np.testing.assert_array_equal(bits(q.values), expected_values)


def test_refusing_what_is_traced_is_an_error_with_that_reason():
    x = np.ones(BLOCK, np.float32)
    with pytest.raises(ValueError, match=r"traced.*nonfinite='nan_block'"):
        jax.jit(quantize)(x)


@pytest.mark.parametrize("x", [np.ones(BLOCK), np.ones(BLOCK, np.int32), jnp.ones(BLOCK, jnp.float8_e4m3fn)])
def test_quantize_refuses_other_dtypes(x):
    with pytest.raises(TypeError, match=f"`x` .dtype {x.dtype}. must be float32"):
        quantize(x)


def test_bad_arguments_are_refused():
    x = np.ones(BLOCK, np.float32)
    q = quantize(x[None])
    with pytest.raises(ValueError, match=r"`scale_rule` \(='floor'\) must be one of"):
        quantize(x, scale_rule="floor")
    with pytest.raises(ValueError, match=r"`nonfinite` \(='ignore'\) must be"):
        quantize(x, nonfinite="ignore")
    with pytest.raises(ValueError, match="scalar"):
        quantize(cast(Any, np.float32(1.0)))
    with pytest.raises(TypeError, match=r"`dtype` \(=float16\) must be bfloat16 or float32"):
        dequantize(q, jnp.float16)
    with pytest.raises(TypeError, match=r"`scales` \(dtype uint8\) must be float8_e8m0fnu for canonical MXFP4"):
        dequantize(BlockScaled(q.values, pack(q).scales))
    with pytest.raises(TypeError, match=r"`values` \(dtype float32\) must be float4_e2m1fn"):
        dequantize(BlockScaled(x, q.scales))
    with pytest.raises(ValueError, match=r"`scales` \(shape \(1, 1\)\) must be \(1, 2\)"):
        dequantize(BlockScaled(jnp.concatenate([q.values, q.values], axis=-1), q.scales))


# Formats beyond MXFP4

OTHERS = {name: format for name, format in FORMATS.items() if name != "mxfp4" and not format.is_float}
E4M3 = np.dtype(jnp.float8_e4m3fn)
other_formats = pytest.mark.parametrize("format", OTHERS.values(), ids=OTHERS)
quantized_formats = pytest.mark.parametrize(
    "format", [f for f in OTHERS.values() if "order" not in f.arrays], ids=[n for n in OTHERS if "order" not in n]
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("format", FLOATS, ids=lambda format: format.name)
def test_floats_are_rounded_and_saturate_and_nan_stays(format, dtype, rng):
    most = float(jnp.finfo(dtype).max)
    x = jnp.asarray([*rng.standard_normal(13), 0.0, -0.0, most, -most, 1e-6], dtype)
    q = quantize(x, format)
    its = jnp.finfo(format.element_dtype)
    wanted = np.clip(np.asarray(x, np.float64), float(its.min), float(its.max)).astype(format.element_dtype)
    np.testing.assert_array_equal(bits(q.values), bits(jnp.asarray(wanted)))
    for result in (jnp.float32, jnp.bfloat16):
        np.testing.assert_array_equal(dequantize(q, result, format), q.values.astype(result))
    bad = x.at[:2].set(jnp.asarray([jnp.nan, jnp.inf], dtype))
    with pytest.raises(ValueError, match="2 NaN or infinite values"):
        quantize(bad, format)
    kept = np.asarray(quantize(bad, format, nonfinite="nan_block").values, np.float64)
    assert np.isnan(kept[0])
    assert np.isposinf(kept[1])
    np.testing.assert_array_equal(kept[2:], np.asarray(q.values, np.float64)[2:])


@other_formats
def test_dequantize_is_the_definition(format, rng):
    q = with_odd_scales(rng, random(jax.random.key(rng.integers(2**31)), (3, 8, 256), format))
    canonical = unpack(q, format)
    exact = dequantized(jax.tree.map(np.asarray, canonical), format)
    single = np.asarray(dequantize(q, jnp.float32, format))
    np.testing.assert_allclose(single, exact, rtol=2**-23, atol=0)  # at most one product that rounds, then another
    half = np.asarray(dequantize(canonical, jnp.bfloat16, format))
    np.testing.assert_array_equal(half, single.astype(jnp.bfloat16))


def test_dequantize_every_code_times_every_e4m3_scale():
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 1)).view(np.uint8)
    scales = np.arange(256, dtype=np.uint8).view(E4M3)[:, None]
    q = BlockScaled(codes.view(NVFP4.element_dtype), scales, np.ones(256, np.float32))
    for dtype in (jnp.float32, jnp.bfloat16):  # a product of six bits is exact in either
        result = np.asarray(dequantize(q, dtype, NVFP4)).astype(np.float64)
        np.testing.assert_array_equal(result, dequantized(q, NVFP4))


@pytest.mark.parametrize("name", ["int8_g32", "int4_channel_asym", "fp8_channel"])
def test_dequantize_every_code(name):
    format = FORMATS[name]
    codes = np.arange(1 << format.element_bits, dtype=np.uint8)[None].repeat(2, axis=0)
    if name.startswith("int4"):
        values = ((codes ^ 8) - np.uint8(8)).view(np.int8).astype(format.element_dtype)
    else:
        values = codes.view(format.element_dtype)
    blocks = format.num_blocks(codes.shape[-1], "K")
    zero_points = np.array([[-8], [7]], np.int8) if "asym" in name else None
    q = BlockScaled(values, np.full((2, blocks), 0.375, format.scale_dtype), None, zero_points)
    for weight in (q, pack(q)):
        np.testing.assert_array_equal(np.asarray(dequantize(weight, jnp.float32, format)), dequantized(q, format))


@other_formats
def test_what_is_expanded_times_the_factors_of_rows_is_the_weight(format, rng):
    q = random(jax.random.key(rng.integers(2**31)), (3, 8, 256), format)
    weights, factors = quantization.expand(q, jnp.float32, format)
    whole = np.array(weights) if factors is None else np.asarray(weights) * np.asarray(factors)[..., None]
    expected = np.asarray(dequantize(q, jnp.float32, format))
    if q.order is not None:
        expected = np.take_along_axis(expected, np.broadcast_to(q.order[:, None], expected.shape), axis=-1)
    np.testing.assert_array_equal(expected, whole)
    if format.name in ("nvfp4", "fp8_tensor", "fp8_channel", "int8_channel_asym"):
        np.testing.assert_array_equal(quantization.expand(q, jnp.bfloat16, format)[0].astype(np.float32), weights)


def nearest(quotients, format):
    """Elements by search, ties to the even code; float64."""
    if format.element_dtype in (jnp.int4, jnp.int8):
        low = -(2 ** (format.element_bits - 1))
        return np.clip(np.rint(quotients), low, -low - 1)
    codes = np.arange(1 << format.element_bits - 1, dtype=np.uint8).view(format.element_dtype).astype(np.float64)
    codes = codes[np.isfinite(codes)]
    middles = (codes[:-1] + codes[1:]) / 2
    below, above = (np.searchsorted(middles, np.abs(quotients), side) for side in ("left", "right"))
    return np.copysign(codes[np.where(below % 2 == 0, below, above)], quotients)


def reference_scales(x, format):
    """Scales in float32, before they are rounded to the format's dtype, and NVFP4's global scale; x (N, K) float32."""
    size = x.shape[1] if format.block_size == WHOLE_ROW else format.block_size
    blocks = np.pad(x, [(0, 0), (0, -x.shape[1] % size)]).reshape(len(x), -1, size)
    amax = np.abs(blocks).max(axis=-1)
    if format.name == "fp8_tensor":
        amax[:] = amax.max()
    if format is FP8_BLOCK:
        for first in range(0, len(x), 128):
            amax[first : first + 128] = amax[first : first + 128].max(axis=0)
    if format is NVFP4:
        total = np.float32(1) / (np.float32(448 * 6) / amax.max())
        return amax / np.float32(6) / total, total
    if "zero_points" in format.arrays:
        span = np.maximum(blocks.max(axis=-1), 0) - np.minimum(blocks.min(axis=-1), 0)
        return span / np.float32(2**format.element_bits - 1), None
    limit = 448 if format.element_dtype == E4M3 else (2**format.element_bits - 1) / 2
    if format.name == "mxfp8":
        return np.exp2(np.ceil(np.log2(amax / np.float64(limit)))), None
    return amax / np.float32(limit), None


@quantized_formats
@pytest.mark.parametrize(("shape", "dtype"), [((130, 256), jnp.float32), ((4, 128), jnp.bfloat16)])
def test_quantize_is_the_definition(format, shape, dtype, rng):
    x = (rng.standard_t(3, shape) * 2.0 ** rng.integers(-6, 6, (shape[0], 1))).astype(dtype)
    q = jax.tree.map(np.asarray, quantize(x, format))
    x = x.astype(np.float32)
    scales, total = reference_scales(x, format)
    np.testing.assert_array_equal(q.scales, scales.astype(format.scale_dtype))
    step = q.scales.astype(np.float32)
    if total is not None:
        np.testing.assert_array_equal(q.global_scales, np.full(shape[0], total))
        step = step * total
    quotients = x / by_column(step, format, shape[1])
    if "zero_points" in format.arrays:
        size = shape[1] if format.block_size == WHOLE_ROW else format.block_size
        least = np.minimum(x.reshape(shape[0], -1, size).min(axis=-1), 0)
        low = -(2 ** (format.element_bits - 1))
        np.testing.assert_array_equal(q.zero_points, np.clip(np.rint(low - least / step), low, -low - 1))
        quotients += by_column(q.zero_points.astype(np.float32), format, shape[1])
    np.testing.assert_array_equal(q.values.astype(np.float64), nearest(quotients.astype(np.float64), format))


@quantized_formats
@no_deadline
@given(seed=seeds)
def test_error_of_other_formats_is_bounded(format, seed):
    """Half a step of the coarsest elements, or what saturates: at 7.5 steps of which there are 7, and where a zero
    point and a scale of eight bits were rounded, at twice that."""
    x = np.random.default_rng(seed).standard_normal((4, 256)).astype(np.float32)
    q = quantize(x, format)
    step = np.asarray(q.scales).astype(np.float64)
    if q.global_scales is not None:
        step = step * np.asarray(q.global_scales)[:, None]
    error = np.abs(np.asarray(dequantize(q, jnp.float32, format)).astype(np.float64) - x)
    widest = {"fp8": 16, "mxfp8": 16, "nvfp4": 1.3, "int4": 0.55, "int8": 1.1, "mxint4": 0.55}
    widest = widest[format.name.split("_")[0]]
    widest *= 2 if "zero_points" in format.arrays else 1
    assert (error <= widest * by_column(step, format, 256)).all()


@quantized_formats
def test_blocks_of_zeros_get_scale_one(format):
    """But for MXFP8, where they get the least, as in `jmx.numerics.mxfp8`."""
    q = quantize(np.zeros((3, 256), np.float32), format)
    expected = 2.0**-127 if format.name == "mxfp8" else 1
    np.testing.assert_array_equal(np.asarray(q.scales).astype(np.float64), expected)
    assert not np.asarray(dequantize(q, jnp.float32, format)).any()


@quantized_formats
@pytest.mark.parametrize("size", [1e-38, 1e38])
def test_scales_are_neither_zero_nor_infinite(format, size, rng):
    x = (rng.uniform(-1, 1, (3, 256)) * size).astype(np.float32)
    q = quantize(x, format)
    scales = np.asarray(q.scales).astype(np.float32)
    assert (scales > 0).all()
    assert np.isfinite(scales).all()


@quantized_formats
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_values_make_their_block_nan_in_other_formats(format, bad, rng):
    x = rng.standard_normal((3, 256)).astype(np.float32)
    x[1, 7] = bad
    with pytest.raises(ValueError, match=r"`x` holds 1 NaN or infinite values"):
        quantize(x, format)
    result = np.isnan(np.asarray(dequantize(quantize(x, format, nonfinite="nan_block"), jnp.float32, format)))
    assert result[1, :16].all()
    whole = format.name in ("fp8_tensor", "fp8_block")
    assert result[0, :16].any() == whole
    size = 256 if format.block_size == WHOLE_ROW else format.block_size
    assert result.sum() == (3 if whole else 1) * size


def test_what_quantize_refuses_of_other_formats():
    x = np.ones((2, 128), np.float32)
    with pytest.raises(ValueError, match=r"`scale_rule` \(='round_up'\) must be 'ocp': other rules are for MXFP4 only"):
        quantize(x, NVFP4, scale_rule="round_up")
    with pytest.raises(ValueError, match=r"`format` \(='int4_g128_order'\) must have no order"):
        quantize(x, FORMATS["int4_g128_order"])
    with pytest.raises(ValueError, match=r"`x` \(shape \(128,\)\) must be \(..., N, K\) for NVFP4"):
        quantize(x[0], NVFP4)


@pytest.mark.parametrize("format", [FP8_BLOCK, FORMATS["int8_channel"]], ids=["fp8_block", "int8_channel"])
def test_odd_sizes(format, rng):
    x = rng.standard_normal((130, 131)).astype(np.float32)
    y = np.asarray(dequantize(quantize(x, format), jnp.float32, format))
    assert np.linalg.norm(y - x) < 0.03 * np.linalg.norm(x)
