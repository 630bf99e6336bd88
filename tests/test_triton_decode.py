"""How `triton` decodes every format: interpreted, as PTX run in numpy, and on a GPU."""

import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from ptx import halves, run_ptx

from jmx.numerics.formats import FORMATS, MXFP4, NVFP4, WHOLE_ROW
from jmx.pallas.triton import decode as decoding
from jmx.pallas.triton import ptx as kernel_ptx
from jmx.pallas.triton.decode import GroupParams

CODES = np.arange(256, dtype=np.uint8)
# Of either dtype that is two factors, and of the one that is one.
INTEGERS = [
    (name, dtype) for name in ("int4_g32", "int4_g32_asym") for dtype in (ml_dtypes.bfloat16, np.float16, np.float32)
] + [("int4_channel", np.float32), ("int4_channel_asym", np.float32)]


def every_code():
    """int16 (256, 16): of each row, words with every code at every position, among others at the other positions."""
    positions = (np.arange(16)[:, None] + [0, 5, 10, 15]) % 16
    word = np.bitwise_or.reduce(positions << np.arange(0, 16, 4), axis=1)
    return np.broadcast_to(word.astype(np.uint16).view(np.int16), (256, 16))


def codes_at(words, position):
    return (words.view(np.uint16) >> 4 * position & 15).astype(np.uint8)


def weights_of(words, codes, position, format=MXFP4):
    """Elements times their scales, rounded to bfloat16, which makes infinities of what it does not hold."""
    elements = codes_at(words, position).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    exact = elements * codes.view(format.scale_dtype).astype(np.float64)
    return np.where(np.abs(exact) < 2.0**128, exact, np.copysign(np.inf, exact)) + 0 * exact


def integers_of(words, position, zero_points, scales):
    """In float64, not rounded."""
    elements = (codes_at(words, position) ^ 8).astype(np.float64) - 8
    elements -= 0 if zero_points is None else zero_points
    return elements if scales is None else elements * scales.astype(np.float64)


def draw_blocks(rng, name, dtype, shape):
    """Scales of any size but the extreme, and zero points of every value, or None."""
    format = FORMATS[name]
    by_block = format.block_size != WHOLE_ROW
    scales = rng.normal(0, 1, shape) * 2.0 ** rng.integers(-10, 10, shape)
    zero_points = rng.integers(-8, 8, shape).astype(np.int8) if "zero_points" in format.arrays else None
    return scales.astype(dtype) if by_block else None, zero_points


def assert_rounded_once(found, expected):
    """To bfloat16. Splitting a scale into two factors may change how a tie is rounded."""
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2.0**-8 + 2.0**-15, atol=0)


def decoded(words, groups, format):
    decode = jax.jit(decoding.decode_by_position, static_argnums=(2, 3))
    return [np.asarray(found, np.float64) for found in decode(words, groups, format, True)]


def test_every_code_under_every_scale_interpreted():
    """Exact as far as bfloat16 holds it, but that XLA on a CPU makes zeros of subnormal results."""
    words = every_code()
    normal = []
    for position, found in enumerate(decoded(words, GroupParams(CODES[:, None], None), MXFP4)):
        expected = weights_of(words, CODES[:, None], position)
        assert np.isnan(found[255]).all()
        normal.append(~(np.abs(expected) < 2.0**-126))
        np.testing.assert_array_equal(found[normal[-1]], expected[normal[-1]])
        assert ((found == expected) | (found == 0))[~normal[-1]].all()
    assert np.mean(normal) > 0.85


def test_every_code_under_every_scale_of_nvfp4_interpreted():
    words = every_code()
    for position, found in enumerate(decoded(words, GroupParams(CODES[:, None], None), NVFP4)):
        np.testing.assert_array_equal(found, weights_of(words, CODES[:, None], position, NVFP4))


@pytest.mark.parametrize(("name", "dtype"), INTEGERS)
def test_integers_interpreted(name, dtype, rng):
    words = every_code()
    scales, zero_points = draw_blocks(rng, name, dtype, (256, 2))
    spread = [None if a is None else np.repeat(a, 8, axis=1) for a in (zero_points, scales)]
    for position, found in enumerate(decoded(words, GroupParams(scales, zero_points), FORMATS[name])):
        assert_rounded_once(found, integers_of(words, position, *spread))


def registers(pairs):
    """uint32 (...) of 16 bits (..., 2), the first one in the lower half."""
    pairs = np.ascontiguousarray(pairs).view(np.uint16).astype(np.uint32)
    return pairs[..., 0] | pairs[..., 1] << 16


def run_at(position, decoder, words, *factors):
    """float64 (..., 2) of the kernel's PTX, from words of 16 bits (..., 2) and 32 bits of factors."""
    return halves(run_ptx(decoder[position], registers(words), *factors))


def run_codes(position, format, words, codes):
    factor = run_ptx(kernel_ptx.FACTORS[format.scale_dtype], registers(codes.astype(np.uint16)))
    return run_at(position, decoding.packed_decoder(format, jnp.uint8), words, factor)


@pytest.mark.parametrize("format", [MXFP4, NVFP4], ids=lambda format: format.name)
@pytest.mark.parametrize("position", range(4))
def test_the_ptx_of_every_word_beside_every_other(position, format, rng):
    """All words in either half of a register, next to one of each other's, under scales that differ."""
    words = np.stack([np.arange(1 << 16, dtype=np.uint16), rng.permutation(1 << 16).astype(np.uint16)], axis=1)
    codes = rng.integers(0, 255 if format == MXFP4 else 127, words.shape, np.uint8)
    np.testing.assert_array_equal(run_codes(position, format, words, codes), weights_of(words, codes, position, format))


@pytest.mark.parametrize("format", [MXFP4, NVFP4], ids=lambda format: format.name)
@pytest.mark.parametrize("position", range(4))
def test_the_ptx_of_every_code_under_every_scale(position, format):
    finite = CODES[~np.asarray(decoding.are_nan(CODES, format))]
    assert len(finite) == (255 if format == MXFP4 else 254)
    words = np.repeat(every_code()[: len(finite), :, None], 2, axis=2).view(np.uint16)
    codes = np.broadcast_to(finite[:, None, None], words.shape)
    np.testing.assert_array_equal(run_codes(position, format, words, codes), weights_of(words, codes, position, format))


@pytest.mark.parametrize(("name", "dtype"), INTEGERS)
@pytest.mark.parametrize("position", range(4))
def test_the_ptx_of_integers(position, name, dtype, rng):
    """All words in either half of a register, next to one of each other's, under blocks that differ."""
    words = np.stack([np.arange(1 << 16, dtype=np.uint16), rng.permutation(1 << 16).astype(np.uint16)], axis=1)
    scales, zero_points = draw_blocks(rng, name, dtype, words.shape)
    factors = [] if zero_points is None else [decoding.zero_point_offsets(jnp.asarray(zero_points))]
    if scales is not None and dtype == ml_dtypes.bfloat16:
        factors.append(scales)
    elif scales is not None:
        factors += decoding.split_scales(jnp.asarray(scales))
    decoder = decoding.packed_decoder(FORMATS[name], np.dtype(dtype))
    found = run_at(position, decoder, words, *(registers(np.asarray(factor)) for factor in factors))
    expected = integers_of(words, position, zero_points, scales)
    if scales is None:
        np.testing.assert_array_equal(found, expected)
    else:
        assert_rounded_once(found, expected)


def test_halves_of_the_largest_scale_are_finite():
    most = np.finfo(np.float32).max
    largest = np.array([most, -most, 2.0**-100, 0], np.float32)
    high, low = (np.asarray(half, np.float64) for half in decoding.split_scales(jnp.asarray(largest)))
    np.testing.assert_allclose(high + low, largest.astype(np.float64), rtol=2.0**-15)


def test_the_permuted_order(rng):
    for columns in (64, 96, 320):
        x = rng.standard_normal((3, columns)).astype(np.float32)
        found = np.asarray(decoding.permute_columns(jnp.asarray(x)))
        column = decoding.column_at(np.arange(found.shape[1]))
        np.testing.assert_array_equal(found[:, column < columns], x[:, column[column < columns]])
        assert (found[:, column >= columns] == 0).all()
        for position in range(4):
            word = np.arange(columns // 4)
            np.testing.assert_array_equal(column[decoding.permuted_index(position, word)], 4 * word + position)


def test_weights_of_all_positions_are_in_the_permuted_order(rng):
    words, codes = rng.integers(-(2**15), 2**15, (16, 32), np.int16), rng.integers(100, 140, (16, 4), np.uint8)
    arguments = jnp.asarray(words), GroupParams(jnp.asarray(codes), None), MXFP4, True
    whole = jnp.stack(decoding.decode_by_position(*arguments), axis=2).reshape(16, 128)
    np.testing.assert_array_equal(decoding.decode_permuted(*arguments), decoding.permute_columns(whole))


def decode_on_gpu(words, groups, format, products):
    """float64 (N, 4 n), in the permuted order."""
    arrays, structure = jax.tree.flatten((words, groups))
    rows, size = words.shape

    def kernel(*refs):
        words, groups = structure.unflatten([ref[...] for ref in refs[:-1]])
        out = refs[-1]
        if products == 1:
            plgpu.store(out.at[...], decoding.decode_permuted(words, groups, format, False))
            return
        for position, weights in enumerate(decoding.decode_by_position(words, groups, format, False)):
            at = decoding.permuted_index(position, jnp.arange(size))[None, :]
            plgpu.store(out.at[jnp.arange(rows)[:, None], at], weights)

    shape = jax.ShapeDtypeStruct((rows, 4 * size), jnp.bfloat16)
    call = pl.pallas_call(kernel, out_shape=shape, compiler_params=plgpu.CompilerParams(num_warps=16))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return np.asarray(jax.jit(call)(*arrays), np.float64)


def in_permuted_order(by_position):
    whole = np.stack(by_position, axis=2).reshape(len(by_position[0]), -1)
    return whole[:, decoding.column_at(np.arange(whole.shape[1]))]


def every_word():
    return np.arange(1 << 16, dtype=np.uint16).view(np.int16).reshape(256, 256)


@pytest.mark.gpu
@pytest.mark.parametrize("format", [MXFP4, NVFP4], ids=lambda format: format.name)
@pytest.mark.parametrize("products", [1, 4])
def test_every_code_under_every_scale_on_a_gpu(products, format):
    """Every word under several scales of its group; the groups of a row differ."""
    words, size = every_word(), format.block_size // 4
    for turn in range(0, 256, 32):
        codes = np.roll(CODES, turn)[:, None] ^ np.arange(256 // size, dtype=np.uint8)
        codes = np.where(np.asarray(decoding.are_nan(codes, format)), codes & 0x7E, codes)
        expected = [weights_of(words, np.repeat(codes, size, axis=1), position, format) for position in range(4)]
        found = decode_on_gpu(words, GroupParams(codes, None), format, products)
        np.testing.assert_array_equal(found, in_permuted_order(expected))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), INTEGERS)
@pytest.mark.parametrize("products", [1, 4])
def test_integers_of_every_format_on_a_gpu(products, name, dtype, rng):
    words, format = every_word(), FORMATS[name]
    scales, zero_points = draw_blocks(rng, name, dtype, (256, 32))
    spread = [None if a is None else np.repeat(a, 8, axis=1) for a in (zero_points, scales)]
    expected = in_permuted_order([integers_of(words, position, *spread) for position in range(4)])
    assert_rounded_once(decode_on_gpu(words, GroupParams(scales, zero_points), format, products), expected)
