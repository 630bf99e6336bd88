"""What the kernel for Hopper makes of weights in its layout: its own PTX, run in numpy, against ml_dtypes' numbers."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dequantized import dequantized, with_odd_scales
from ptx import halves, run_ptx

from jmx.numerics import formats
from jmx.numerics.formats import FORMATS, BlockScaled
from jmx.numerics.layouts import WeightSpec
from jmx.numerics.quantization import random
from jmx.pallas.mosaic_sm90.dequantize import Decoder, decoder_of
from jmx.pallas.mosaic_sm90.layout import LAYOUT, is_shifted
from jmx.pallas.sm90.tiles import TILE, num_tiles

pytestmark = pytest.mark.sampled(3)

_HALF_UNIT = 2.0**-8  # of bfloat16, relative to the least number of an octave

forward = jax.jit(LAYOUT.forward, static_argnums=1)


def words_of(array: np.ndarray, *shape: int) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint32).reshape(shape)


def exponent_of(held: BlockScaled, decoder: Decoder) -> np.ndarray | None:
    """`Decoder.pairs`' argument: of each row of tiles."""
    if not is_shifted(decoder.format):
        return None
    return (decoder.tile.elements.unit - held.scales[:, -1:, :1].astype(np.uint32)) * np.uint32(0x00800080)


def as_the_kernel_has_it(held: BlockScaled, decoder: Decoder, spec: WeightSpec) -> np.ndarray:
    """One expert's weight by the kernel's instructions, float64 (N, K) padded to tiles, scales of rows not in it."""
    tiles, columns = num_tiles(spec)
    values = words_of(held.values, tiles, columns, -1, 128, 4)
    words = [values[:, :, load, :, nth] for load in range(values.shape[2]) for nth in range(4)]

    def of_groups(array, count):
        found = words_of(array, tiles, -1, 32, count)[:, :columns] if count else np.zeros((1, 1, 32, 0), np.uint32)
        return [np.repeat(found[..., nth], 4, axis=-1) for nth in range(count)]

    exponent = exponent_of(held, decoder)
    scales = of_groups(held.scales, decoder.scale_words)
    zero_points = of_groups(held.zero_points, decoder.zero_point_words)
    pairs = decoder.pairs(words, scales, zero_points, exponent, run_ptx)
    assert pairs.shape == (8, 2)
    out = np.full((tiles, TILE, columns, TILE), np.nan)
    thread = np.arange(128)
    warp, lane = np.divmod(thread, 32)
    for eight, below in np.ndindex(8, 2):
        pair = halves(np.broadcast_to(pairs[eight, below], (tiles, columns, 128)))
        for even in range(2):
            rows, column = 16 * warp + lane // 4 + 8 * below, 8 * eight + 2 * (lane % 4) + even
            out[:, rows, :, column] = pair[..., even].transpose(2, 0, 1)
    return out.reshape(tiles * TILE, columns * TILE) * 2.0**decoder.rescale_exponent


def by_slices(held: BlockScaled, decoder: Decoder, spec: WeightSpec) -> np.ndarray:
    """The same by the instructions for transposed tiles: each warp has 16 columns, of all rows."""
    tiles, columns = num_tiles(spec)
    out, lane, tile = np.full((tiles, TILE, columns, TILE), np.nan), np.arange(32), decoder.tile
    values = words_of(held.values, tiles, columns, -1, 128, 4).swapaxes(2, 3).reshape(tiles, columns, 128, -1)
    exponent = exponent_of(held, decoder)

    def of_row(array, per_row, rows, warp, row):
        """A value for each lane, as a word."""
        size = array.dtype.itemsize
        each = np.ascontiguousarray(array).view(f"u{size}").reshape(tiles, -1, 32, 2, per_row)[:, :columns]
        return each[:, :, 8 * rows + lane // 4, row, warp * per_row // 4].astype(np.uint32)

    for warp, rows in np.ndindex(4, 4):
        mine = values[:, :, 32 * rows + lane]
        first = {1: warp, 2: 2 * (warp // 2 if values.shape[-1] == 4 else warp)}[decoder.slice_words]
        words = [mine[..., first + nth] for nth in range(decoder.slice_words)]
        scales = [of_row(held.scales, tile.scales, rows, warp, row) for row in range(2)] if tile.scales else []
        zeros = tile.zero_points
        zeros = [of_row(held.zero_points, zeros, rows, warp, row) for row in range(2)] if zeros else []
        pairs = decoder.slice_pairs(words, np.uint32(warp % 2), scales, zeros, exponent, run_ptx)
        for eight, row in np.ndindex(2, 2):
            pair = halves(np.broadcast_to(pairs[eight, row], (tiles, columns, 32)))
            for even in range(2):
                column = 16 * warp + 8 * eight + 2 * (lane % 4) + even
                out[:, 16 * rows + lane // 4 + 8 * row, :, column] = pair[..., even].transpose(2, 0, 1)
    return out.reshape(tiles * TILE, columns * TILE) * 2.0**decoder.rescale_exponent


def draw(key: int, format: formats.Format, shape: tuple[int, int], scale_dtype: str | None) -> BlockScaled:
    """Packed, numpy. Every code is in it, and scales are as odd as their dtype has them."""
    rng = np.random.default_rng(key)
    q = jax.tree.map(np.asarray, random(jax.random.key(key), (1, *shape), format))
    q = with_odd_scales(rng, q)
    if q.values.dtype == np.uint8:
        q = q._replace(values=rng.integers(0, 256, q.values.shape, np.uint8))
    if format.element_dtype == jnp.float8_e4m3fn:  # without its NaN
        q = q._replace(values=np.where(q.values & 0x7F == 0x7F, np.uint8(0x3A), q.values))
    if scale_dtype is not None:
        scales = q.scales.astype(np.float32) * rng.uniform(0.5, 1, q.scales.shape).astype(np.float32)
        q = q._replace(scales=scales.astype(ml_dtypes.bfloat16 if scale_dtype == "bfloat16" else scale_dtype))
    if q.zero_points is not None:
        low, high = (-128, 128) if format.element_bits == 8 else (-8, 8)
        q = q._replace(zero_points=rng.integers(low, high, q.zero_points.shape, np.int8))
    return q


# One of each kind of elements, of scales, and of zero points a tile.
CASES = [
    *(
        (name, None)
        for name in ("mxfp4", "mxfp8", "nvfp4", "mxint4", "int4_g64", "int4_channel_asym", "int8_g128", "fp8_channel")
    ),
    ("int4_g32_asym", "float16"),
    ("int4_g128_asym", "bfloat16"),
    ("int4_g64_asym", "float32"),
    ("int8_channel", "float16"),
    ("int8_g32", "float32"),
    ("fp8_block", "float32"),
    ("fp8_block", "bfloat16"),
]


@pytest.mark.parametrize(("name", "scale_dtype"), CASES)
def test_every_weight_is_what_it_should_be_rounded_once(name, scale_dtype):
    """Exact under scales of 8 bits and where the epilogue scales; else the nearest bfloat16, or nearly so where a scale
    is two of them."""
    format = FORMATS[name]
    spec = WeightSpec("down", (96, 384), None, format)
    q = draw(3, format, spec.shape, scale_dtype)
    held = jax.tree.map(np.asarray, forward(jax.tree.map(jnp.asarray, q), spec))
    held = jax.tree.map(lambda array: array[0], held)
    decoder = decoder_of(format, held.scales.dtype)
    got = as_the_kernel_has_it(held, decoder, spec)
    np.testing.assert_array_equal(by_slices(held, decoder, spec), got)
    got = got[:96, :384]
    plain = formats.unpack(q, format)._replace(global_scales=None)
    if not decoder.tile.scales:
        plain = plain._replace(scales=np.ones_like(plain.scales))
    expected = dequantized(plain, format)[0]
    assert len(np.unique(expected)) > 100 or format.element_bits == 4
    if not decoder.tile.scales or decoder.scale_dtype.itemsize == 1:
        np.testing.assert_array_equal(got, expected)
        if format.element_dtype not in (jnp.int4, jnp.int8):
            np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))
        return
    nearest = expected.astype(ml_dtypes.bfloat16).astype(np.float64)
    if decoder.scale_dtype == ml_dtypes.bfloat16:
        np.testing.assert_array_equal(got, nearest)
    else:
        assert (got != nearest).mean() < 0.02
        np.testing.assert_allclose(got, expected, rtol=_HALF_UNIT * 1.01, atol=0)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "int4_g32", "int8_g32_asym", "fp8_block"])
def test_every_scale_and_zero_point_is_read_where_it_is(name):
    """All codes of a scale, zero and subnormal ones too, at every row and block of a tile."""
    format = FORMATS[name]
    spec = WeightSpec("gate_up", (320, 256), "interleaved", format)
    q = draw(5, format, spec.shape, None)
    rng = np.random.default_rng(5)
    if q.scales.dtype == np.uint8:
        least = 4 if name == "mxfp8" else 0  # below, weights have more bits than subnormal numbers of bfloat16
        q = q._replace(scales=rng.integers(least, 127, q.scales.shape, np.uint8))
    else:
        exponents = rng.integers(-60, 30, q.scales.shape)
        drawn = rng.uniform(-1, 1, q.scales.shape) * 2.0**exponents * (rng.random(q.scales.shape) < 0.9)
        q = q._replace(scales=drawn.astype(q.scales.dtype))
    held = jax.tree.map(np.asarray, forward(jax.tree.map(jnp.asarray, q), spec))
    held = jax.tree.map(lambda array: array[0], held)
    decoder = decoder_of(format, held.scales.dtype)
    got = as_the_kernel_has_it(held, decoder, spec)
    np.testing.assert_array_equal(by_slices(held, decoder, spec), got)
    expected = dequantized(formats.unpack(q, format)._replace(global_scales=None), format)[0]
    # Of each warp's 16 rows the upper 8 are gates, the lower 8 their ups.
    gates = got.reshape(-1, 4, 2, 8, 256).swapaxes(2, 3).reshape(-1, 256)[:320]
    bound = 0 if name in ("mxfp8", "nvfp4") else _HALF_UNIT * 1.01
    np.testing.assert_allclose(gates, expected, rtol=bound, atol=0)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("largest", [127, 129, 134, 135, 200, 254])
def test_weights_under_large_scales_are_shifted(name, largest):
    """Every code up to the largest: weights are numbers of bfloat16 times a power of two of their row of tiles."""
    format = FORMATS[name]
    spec = WeightSpec("down", (128, 256), None, format)
    q = draw(7, format, spec.shape, None)
    codes = np.random.default_rng(7).integers(0, largest + 1, q.scales.shape, np.uint8)
    codes[:, :64, 3] = largest  # of the first row of tiles; the second one has a shift of its own
    codes[:, 64:] = np.minimum(codes[:, 64:], 120)
    q = q._replace(scales=codes)
    held = jax.tree.map(lambda array: np.asarray(array)[0], forward(jax.tree.map(jnp.asarray, q), spec))
    decoder = decoder_of(format, held.scales.dtype)
    shifts = held.scales[:, -1, 0].astype(int)
    assert shifts.tolist() == [max(0, largest - {"mxfp4": 128, "mxfp8": 134}[name]), 0]
    got = as_the_kernel_has_it(held, decoder, spec)
    np.testing.assert_array_equal(by_slices(held, decoder, spec), got)
    expected = dequantized(formats.unpack(q, format), format)[0] / 2.0 ** np.repeat(shifts, TILE)[:, None]
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, expected, rtol=0, atol=2.0**-126)  # below, multipliers are zero, or subnormal
    large = np.abs(expected) >= 2.0**-118  # their multipliers are normal numbers
    assert large.mean() > 0.5
    np.testing.assert_array_equal(got[large], expected[large])
