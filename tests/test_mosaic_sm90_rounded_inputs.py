"""Rounded inputs as bfloat16: exact for every code of elements and scales, and the bits of `input_formats`."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ptx import run_ptx

import jmx
from jmx.backends import resolve_layout
from jmx.numerics.formats import FORMATS
from jmx.numerics.input_formats import INPUT_FORMATS, dequantize, quantize
from jmx.pallas.mosaic_sm90 import fused_rounding, rounded_tiles
from jmx.pallas.mosaic_sm90 import round_rows as by_kernel
from jmx.pallas.mosaic_sm90.rounded_inputs import INPUTS, round_rows
from jmx.routing import Routing
from jmx.selection.environment import Environment

E8M0, E4M3 = np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(ml_dtypes.float8_e4m3fn)
HOPPER = Environment.named("h200")
SCALE = jnp.float32(0.0123)


def every(dtype) -> np.ndarray:
    """All finite numbers of a dtype of at most 8 bits, in float64."""
    bits = 4 if dtype == ml_dtypes.float4_e2m1fn else 8
    numbers = np.arange(1 << bits, dtype=np.uint8).view(dtype).astype(np.float64)
    return numbers[np.isfinite(numbers)]


def in_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Which of these bfloat16 holds exactly, subnormal ones included."""
    with np.errstate(over="ignore"):
        return numbers.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64) == numbers


@pytest.mark.parametrize("name", INPUTS)
def test_bfloat16_holds_every_element_times_the_scale_of_its_block(name):
    format = INPUT_FORMATS[name]
    elements = every(format.element_dtype)
    assert in_bfloat16(elements).all()
    if not isinstance(format.block_size, int):
        return  # the scale is applied to the sums
    scales = every(format.scale_dtype)
    products = elements[:, None] * scales
    if format.scale_dtype == E8M0:  # beyond, products are no numbers of bfloat16, and inputs were less than 2^-115
        lowest, highest = (-127, 125) if format.element_dtype == ml_dtypes.float4_e2m1fn else (-124, 119)
        inside = (scales >= 2.0**lowest) & (scales <= 2.0**highest)
        assert inside.sum() == highest - lowest + 1
        assert not in_bfloat16(products[:, ~inside]).all(axis=0).any()
        products = products[:, inside]
    assert in_bfloat16(products).all()


def test_no_other_format_fits():
    """Of `fp8_block` scales are float32: an element times such a one has more bits."""
    assert {*INPUT_FORMATS} - {*INPUTS} == {"fp8_block", "fp8_tensor"}  # the latter's scale is not known in time
    assert not in_bfloat16(every(E4M3) * np.float64(np.float32(0.1))).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("name", INPUTS)
def test_values_times_scales_are_what_the_format_represents(name, dtype, rng):
    format = INPUT_FORMATS[name]
    x = rng.standard_normal((9, 160)) * np.exp2(rng.integers(-12, 12, (9, 160)))
    x[0], x[1, :32], x[2, 5] = 0, 0, np.nan
    x = jnp.asarray(x).astype(dtype)
    static = SCALE if format.static else None
    values, scales = jax.jit(round_rows, static_argnums=1)(x, format, static)
    assert values.dtype == jnp.bfloat16
    assert scales is None or (scales.dtype, scales.shape) == (jnp.float32, (9,))
    found = np.asarray(values, np.float64) * (1 if scales is None else np.asarray(scales, np.float64)[:, None])
    expected = np.asarray(dequantize(quantize(x, format, static), format))
    np.testing.assert_array_equal(found.astype(np.float32), expected)
    assert np.isnan(expected[2]).any()
    assert np.isfinite(np.delete(expected, 2, axis=0)).all()


@pytest.mark.parametrize(
    ("format", "inputs", "layout"),
    [
        ("mxfp4", None, "mosaic_sm90"),
        ("mxfp4", "fp8_token", "mosaic_sm90_fp8"),
        ("mxfp4", "fp8_block", "mosaic_sm90_fp8"),
        ("mxfp4", "mxfp8", "mosaic_sm90"),
        ("mxfp8", None, "mosaic_sm90"),
        ("mxfp8", "mxfp8", "mosaic_sm90"),
        ("mxfp8", "fp8_token", "mosaic_sm90"),
        ("nvfp4", "nvfp4", "mosaic_sm90"),
        ("nvfp4", "fp8_block", "packed"),
        ("int4_g128", "fp8_token", "mosaic_sm90_fp8"),
        ("int4_g256", "int8_token", "mosaic_sm90_fp8"),
        ("int4_g64", "fp8_token", "mosaic_sm90"),
        ("int8_channel", "int8_token", "mosaic_sm90_fp8"),
        ("int8_channel", "fp8_token", "mosaic_sm90"),
        ("int8_g128", "fp8_block", "packed"),
        ("int4_g128_order", "int8_token", "mosaic_sm90"),
        ("int4_g128_order", "mxfp8", "packed"),
    ],
)
def test_the_auto_layout_is_that_of_the_backend_that_takes_the_pair(format, inputs, layout):
    assert resolve_layout("auto", HOPPER, FORMATS[format], inputs) == layout


# The kernel


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn])
def test_its_ptx_rounds_to_the_nearest_element(dtype, rng):
    """Every float of 12 bits, with all ties, and random ones up to 512; zeros keep their sign."""
    numbers = np.arange(1 << 16, dtype=np.uint32) << 16
    numbers = np.concatenate([numbers, rng.uniform(-512, 512, 9999).astype(np.float32).view(np.uint32)])
    numbers = numbers[~(np.abs(numbers.view(np.float32)) > 512)]  # the kernel's quotients, and NaN
    with np.errstate(invalid="ignore"):
        found = run_ptx(by_kernel.minifloat_ptx(dtype), numbers).view(np.float32)
    most = np.float32(ml_dtypes.finfo(dtype).max)
    given = numbers.view(np.float32)
    is_nan = np.isnan(given)
    assert is_nan.sum() > 100
    assert np.isnan(found[is_nan]).all()
    expected = np.clip(given[~is_nan], -most, most).astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(found[~is_nan].view(np.uint32), expected.view(np.uint32))


def test_its_ptx_rounds_to_the_nearest_integer(rng):
    numbers = np.concatenate([np.arange(-254, 255) / 2, rng.uniform(-127.4, 127.4, 9999)]).astype(np.float32)
    found = run_ptx(by_kernel.INTEGER, numbers.view(np.uint32)).view(np.float32)
    np.testing.assert_array_equal(found, np.rint(numbers))


@pytest.mark.gpu
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("name", INPUTS)
def test_it_has_the_bits_of_the_definition(name, dtype, placed, rng):
    format, (num_rows, columns, width) = INPUT_FORMATS[name], (77, 1120, 1152)
    x = rng.standard_normal((num_rows, 1128)) * np.exp2(rng.uniform(-30, 10, (num_rows, 1)))
    x[0], x[1, :64], x[2, 5], x[3, 6] = 0, 0, np.nan, np.inf
    x[4] = rng.integers(-(2**8), 2**8, 1128) / 32  # half way between two, often
    x[5], x[6, ::2] = float(jnp.finfo(dtype).max), -0.0
    x[7] *= np.exp2(rng.integers(-60, 60, 1128))
    x = jnp.asarray(x, jnp.float32).astype(dtype)
    row_of = rng.permutation(3 * num_rows).astype(np.int32).reshape(num_rows, 3)
    row_of[::5, 1] = -1
    for static in [0.01, 2.0**-60, 7.0] if format.static else [None]:
        scale = None if static is None else jnp.float32(static)
        wanted = jax.jit(round_rows, static_argnums=1)(x[:, :columns], format, scale)

        def kernel(x, scale, row_of):
            rows = None if row_of is None else 3 * num_rows
            return by_kernel.round_rows(x, format, scale, columns=columns, width=width, row_of=row_of, num_rows=rows)

        found = jax.jit(kernel)(x, scale, jnp.asarray(row_of) if placed else None)
        at, of = np.arange(num_rows), np.arange(num_rows)
        if placed:
            at, of = row_of[row_of >= 0], np.nonzero(row_of >= 0)[0]
        assert found.values.dtype == jnp.bfloat16
        rows, expected = (np.asarray(v).astype(np.float32) for v in (found.values, wanted.values[of]))
        rows, sound = rows[at], np.ones(at.size, bool)
        if wanted.scales is not None:
            scales = np.asarray(wanted.scales)[of]
            np.testing.assert_array_equal(np.asarray(found.scales)[at], scales)
            sound = np.isfinite(scales)
        np.testing.assert_array_equal(rows[sound, :columns], expected[sound])
        assert (np.signbit(rows[:, :columns]) == np.signbit(expected))[np.isfinite(expected) & sound[:, None]].all()
        assert not np.any(rows[np.isfinite(expected).all(axis=1) & sound, columns:])


# h rounded in the launch of both products


@pytest.mark.parametrize("name", INPUTS)
def test_what_a_launch_writes_of_rounded_rows_and_which_scales_are_known_before(name):
    """Each row's scale is written where rows have one; that of nvfp4's tensor is known; other formats have none."""
    format = INPUT_FORMATS[name]
    static = SCALE if format.static else None
    rounding = fused_rounding.Rounding(format=format, static_scale=static, columns=200, by_tile=False)
    values, *scales = rounding.shapes(5)
    assert (values.shape, values.dtype) == ((5, 256), jnp.bfloat16)
    known = rounding.given_scales(5)
    by_row = name in ("fp8_static", "fp8_token", "int8_token")
    assert [(one.shape, one.dtype) for one in scales] == [((5,), jnp.float32)] * by_row
    assert (known is not None) == (name == "nvfp4")
    if known is not None:
        np.testing.assert_array_equal(known, np.full(5, SCALE))
    assert dataclasses.replace(rounding, by_tile=True).shapes(5) == []  # the epilogue rounds h where it is


@pytest.mark.parametrize("name", INPUTS)
def test_epilogues_round_blocks_that_are_parts_of_a_tile(name):
    format = INPUT_FORMATS[name]
    assert rounded_tiles.has_blocks_of_tiles(format, 2880) == (name in ("mxfp8", "mxfp4", "nvfp4"))
    assert not rounded_tiles.has_blocks_of_tiles(format, 2888)  # the last block is not whole


@pytest.mark.parametrize(("num_rows", "few"), [(1, True), (2 * 3 * 132, True), (2 * 3 * 132 + 1, False)])
def test_rows_are_few_while_a_warpgroup_rounds_up_to_three(num_rows, few):
    assert fused_rounding.pays(num_rows, 2, 132) is few


FUSED = [  # weights, inputs, tokens, experts, slots, sizes, dtype
    ("mxfp4", "mxfp8", 1, 32, 4, (2880, 2880), jnp.bfloat16),
    ("mxfp4", "mxfp4", 64, 32, 4, (2880, 2880), jnp.bfloat16),
    ("mxfp4", "nvfp4", 3, 8, 2, (512, 256), jnp.float16),
    ("nvfp4", "nvfp4", 20, 8, 3, (1024, 768), jnp.bfloat16),
    ("mxfp8", "mxfp8", 20, 8, 3, (1024, 768), jnp.bfloat16),
    ("mxint4", "mxfp4", 300, 16, 4, (512, 256), jnp.float16),
    ("int8_channel", "fp8_token", 64, 32, 4, (2880, 2880), jnp.bfloat16),
    ("int4_g64", "int8_token", 33, 8, 2, (512, 320), jnp.bfloat16),
    ("int4_g32", "fp8_static", 1, 8, 2, (512, 256), jnp.float16),
    ("nvfp4", "fp8_block_ue8m0", 130, 8, 2, (512, 384), jnp.bfloat16),
    ("int4_g128_order", "int8_token", 40, 8, 2, (512, 256), jnp.bfloat16),
    ("int4_g128_order", "fp8_token", 2, 8, 2, (512, 256), jnp.bfloat16),
    ("fp8_channel", "mxfp8", 12, 16, 4, (1024, 512), jnp.bfloat16),
]


@pytest.mark.gpu
@pytest.mark.parametrize("routed", ["all", "two_thirds", "one_expert"])
@pytest.mark.parametrize(("weights", "inputs", "tokens", "num", "slots", "sizes", "dtype"), FUSED)
def test_one_launch_gives_the_bits_of_two(weights, inputs, tokens, num, slots, sizes, dtype, routed, rng, monkeypatch):
    key = jax.random.key(int(rng.integers(1 << 30)))
    experts = jmx.Experts.random(key, num, *sizes, gate_up_order="interleaved", format=FORMATS[weights])
    static = (jnp.float32(0.02), jnp.float32(0.013)) if INPUT_FORMATS[inputs].static else ()
    experts = experts.with_inputs(inputs, *static).prepare("mosaic_sm90")
    x = jnp.asarray(rng.standard_normal((tokens, sizes[0])), jnp.float32).astype(dtype)
    ids = np.stack([rng.permutation(num)[:slots] for _ in range(tokens)]).astype(np.int32)
    if routed == "two_thirds":
        ids[::3] = -1
    if routed == "one_expert":
        ids[:], ids[:, 0] = -1, 1
    routing = Routing(ids, rng.uniform(0.2, 1, ids.shape).astype(np.float32))

    def found() -> np.ndarray:
        call = jax.jit(lambda x, *of: jmx.moe(x, Routing(*of[:2]), of[2], activation="swiglu", backend="mosaic"))
        return np.asarray(call(x, *routing, experts).astype(jnp.float32))

    one = [found() for _ in range(3)]
    monkeypatch.setattr(fused_rounding, "pays", lambda *_: False)
    two = found()
    assert np.abs(two).max() > 0 or (routed == "two_thirds" and tokens == 1)
    for y in one:
        np.testing.assert_array_equal(y, two)
