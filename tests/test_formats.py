"""MXFP4 against ml_dtypes in float64, against a brute-force quantiser, and as properties."""

from dataclasses import FrozenInstanceError

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax import lax

from jmx.formats import (
    FORMATS,
    MXFP4,
    SCALE_RULES,
    BlockScaled,
    dequantize,
    is_packed,
    logical_shape,
    pack,
    pad,
    quantize,
    random,
    unpack,
    unpad,
)

BLOCK = MXFP4.block_size
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SHAPE = (3, 2 * BLOCK)  # one shape for all hypothesis examples: one compilation

no_deadline = settings(deadline=None)  # the first example compiles
finite_arrays = hnp.arrays(np.float32, SHAPE, elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
modest_arrays = hnp.arrays(np.float32, SHAPE, elements=st.floats(-(2.0**127), 2.0**127, width=32))
seeds = st.integers(0, 2**32 - 1)

jitted_pad, jitted_unpad = (jax.jit(function, static_argnums=1) for function in (pad, unpad))


def bits(array):
    array = np.asarray(array)
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.itemsize])


def assert_same_bits(a, b):
    for left, right in zip(a, b, strict=True):
        np.testing.assert_array_equal(bits(left), bits(right))


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


@no_deadline
@given(seeds)
def test_pack_and_unpack_are_inverse(seed):
    q = from_codes(*random_codes(seed, (2, 3, BLOCK)))
    device_q = jax.tree.map(jnp.asarray, q)
    for packed in (pack(q), pack(device_q), jax.jit(pack)(device_q)):
        assert is_packed(packed)
        assert packed.values.dtype == packed.scales.dtype == np.uint8
        nibbles = np.asarray(packed.values)
        np.testing.assert_array_equal(nibbles & 15, bits(q.values)[..., 0::2])
        np.testing.assert_array_equal(nibbles >> 4, bits(q.values)[..., 1::2])
        for unpacked in (unpack(packed), jax.jit(unpack)(packed), unpack(jax.tree.map(np.asarray, packed))):
            assert not is_packed(unpacked)
            assert_same_bits(unpacked, q)


def test_pack_keeps_host_arrays_on_the_host_and_packed_ones_as_they_are():
    q = from_codes(*random_codes(0))
    packed = pack(q)
    assert all(isinstance(array, np.ndarray) for array in (*packed, *unpack(packed)))
    assert pack(packed) is packed
    assert unpack(q) is q


@no_deadline
@given(seeds, st.integers(0, 2), st.integers(0, 2), st.booleans())
def test_pad_and_unpad_are_inverse(seed, more_rows, more_blocks, packed):
    codes, scale_codes = random_codes(seed, (2, 3, 2 * BLOCK), num_scales=255)
    q = from_codes(codes, scale_codes)
    q = pack(q) if packed else q
    shape = (3 + more_rows, (2 + more_blocks) * BLOCK)
    padded = pad(q, shape)
    assert is_packed(padded) == packed
    assert logical_shape(padded) == (2, *shape)
    values = np.array(dequantize(padded, jnp.float32))
    np.testing.assert_array_equal(values[:, :3, : 2 * BLOCK], dequantize(q, jnp.float32))
    values[:, :3, : 2 * BLOCK] = 0
    assert not bits(values).any()
    scale_bits = bits(padded.scales).copy()
    scale_bits[:, :3, :2] = 127
    assert (scale_bits == 127).all()
    assert_same_bits(unpad(padded, (3, 2 * BLOCK)), q)
    assert_same_bits(jitted_unpad(jitted_pad(q, shape), (3, 2 * BLOCK)), q)


def test_format_describes_its_arrays():
    assert FORMATS["mxfp4"] is MXFP4
    q = from_codes(*random_codes(0, (5, 6, 3 * BLOCK)))
    for weight, packed in ((q, False), (pack(q), True)):
        abstract = MXFP4.abstract((5, 6, 3 * BLOCK), packed=packed)
        assert [(a.shape, a.dtype) for a in abstract] == [(a.shape, a.dtype) for a in weight]
        assert logical_shape(weight) == (5, 6, 3 * BLOCK)
    assert MXFP4.bytes((5, 6, 3 * BLOCK)) == sum(array.nbytes for array in pack(q))
    assert MXFP4.num_blocks(2880, "hidden_size") == 90
    assert hash(MXFP4) == hash(FORMATS["mxfp4"])
    with pytest.raises(FrozenInstanceError):
        MXFP4.block_size = 16  # pyright: ignore[reportAttributeAccessIssue]


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
    with pytest.raises(ValueError, match=r"`hidden_size` \(=2870\) must be a multiple of 32 for MXFP4"):
        MXFP4.check_size("hidden_size", 2870)
    with pytest.raises(ValueError, match=r"`x.shape\[-1\]` \(=33\) must be a multiple of 32"):
        quantize(np.ones(33, np.float32))
    q = from_codes(*random_codes(0))
    with pytest.raises(ValueError, match=r"\(=80\) must be a multiple of 32"):
        pad(q, (3, 80))
    with pytest.raises(ValueError, match=r"\(=8\) must be a multiple of 32"):
        unpad(q, (3, 8))


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


def test_refusing_what_is_traced_is_an_error_that_says_so():
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
        quantize(np.float32(1.0))
    with pytest.raises(TypeError, match=r"`dtype` \(=float16\) must be bfloat16 or float32"):
        dequantize(q, jnp.float16)
    with pytest.raises(TypeError, match=r"`scales` \(dtype uint8\) must be float8_e8m0fnu for canonical MXFP4"):
        dequantize(BlockScaled(q.values, pack(q).scales))
    with pytest.raises(TypeError, match=r"`values` \(dtype float32\) must be float4_e2m1fn"):
        dequantize(BlockScaled(x, q.scales))
    with pytest.raises(ValueError, match=r"`scales` \(shape \(1, 1\)\) must be \(1, 2\)"):
        dequantize(BlockScaled(jnp.concatenate([q.values, q.values], axis=-1), q.scales))
    with pytest.raises(ValueError, match=r"`shape` \(=\(0, 32\)\) must be at least \(1, 32\)"):
        pad(q, (0, BLOCK))
    with pytest.raises(ValueError, match=r"`shape` \(=\(2, 32\)\) must be at most \(1, 32\)"):
        unpad(q, (2, BLOCK))
