"""The backend `mosaic_fp8`: what it refuses, where its layout puts what, how it is cut, and on a Hopper GPU the battery
under inputs in FP8, which is its own concern."""

import dataclasses
import itertools
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from backend_cases import (
    ACTIVATIONS,
    GPT_OSS,
    IDS,
    NEITHER,
    Case,
    assert_agrees,
    assert_rejects,
    call,
    draw_routing,
    draw_weights,
    draw_x,
    poison_memory,
    reference,
    suited,
)
from ptx import run_ptx
from test_backends import check

import jmx
from jmx import Environment, Experts, Reason, ReLU2, Routing, SiLU, SiLUAndMul
from jmx.backends import registered_backends, resolve_layout
from jmx.numerics import formats, input_formats
from jmx.numerics.formats import FORMATS, MXFP4, BlockScaled
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.numerics.layouts import WeightSpec, abstract
from jmx.numerics.quantization import random
from jmx.pallas.mosaic_sm90_fp8 import integer_sums, wgmma
from jmx.pallas.mosaic_sm90_fp8.backend import INPUTS, MosaicSm90Fp8, multiplies
from jmx.pallas.mosaic_sm90_fp8.config import Config, Shape, candidates, heuristic
from jmx.pallas.mosaic_sm90_fp8.decode import int4_slices
from jmx.pallas.mosaic_sm90_fp8.elements import E2M1_EXPONENT, elements_of
from jmx.pallas.mosaic_sm90_fp8.fused_quantize import _early_blocks
from jmx.pallas.mosaic_sm90_fp8.grouped_gemm import Product
from jmx.pallas.mosaic_sm90_fp8.layout import EXACT_BELOW, LAYOUT, magnitudes, unit_bytes
from jmx.pallas.sm90.config import SHARED_MEMORY
from jmx.pallas.sm90.gemm import Rows
from jmx.pallas.sm90.scheduler import Share
from jmx.selection import tuning
from jmx.selection.problem import Problem

HOPPER = Environment.named("h200")
PROBLEM = Case(dtype="bfloat16", layout=LAYOUT.name, input_format="fp8_token").problem()
BLOCKS: dict[str, Any] = {"hidden": 256, "intermediate": 384}  # whole blocks of 128
ODD: dict[str, Any] = {"hidden": 160, "intermediate": 224}
HALVES: dict[str, Any] = {"hidden": 320, "intermediate": 160}  # half of each row's last unit is stored
TAKEN = LAYOUT.formats or ()
MULTIPLIED = [(name, inputs) for name in TAKEN for inputs in INPUTS if multiplies(FORMATS[name], inputs)]
PAIRS = [
    ("mxfp4", "fp8_token", HALVES),
    ("mxfp4", "fp8_static", ODD),
    ("mxfp4", "fp8_block", BLOCKS),
    ("fp8_tensor", "fp8_static", ODD),
    ("fp8_tensor", "fp8_tensor", ODD),
    ("fp8_channel", "fp8_token", HALVES),
    ("fp8_block", "fp8_block", BLOCKS),
    ("fp8_block", "fp8_token", ODD),
    ("int4_channel", "fp8_static", ODD),
    ("int4_channel", "int8_token", HALVES),
    ("int4_g128", "fp8_token", BLOCKS),
    ("int4_g128", "fp8_block", BLOCKS),
    ("int4_g256", "int8_token", {"hidden": 256, "intermediate": 512}),
    ("int8_channel", "int8_token", HALVES),
    ("int8_g128", "int8_token", BLOCKS),
]


# What it rejects


@pytest.mark.parametrize(
    ("change", "reason", "message"),
    [
        ({"input_format": None}, Reason.INPUT_FORMAT, "of 16 or 32 bits"),
        ({"input_format": "mxfp8"}, Reason.INPUT_FORMAT, "'mxfp8'"),
        ({"format": "int4_g32"}, Reason.FORMAT, "'int4_g32'"),
        ({"format": "int8_channel"}, Reason.INPUT_FORMAT, "'int8_channel' weights and 'fp8_token' inputs are no"),
        ({"input_format": "int8_token"}, Reason.INPUT_FORMAT, "'mxfp4' weights and 'int8_token' inputs are no"),
        ({"format": "int4_g128"}, Reason.SHAPE, "hidden_size (=64) must be a multiple of 128"),
        ({"layout": "packed"}, Reason.LAYOUT, "'packed'"),
        ({"dtype": "float32"}, Reason.DTYPE, "float32"),
        ({"hidden_size": 100}, Reason.SHAPE, "hidden_size (=100)"),
        (
            {"input_format": "fp8_block"},
            Reason.SHAPE,
            "hidden_size (=64) must be a multiple of 128, the columns of a scale",
        ),
        ({"num_tokens": None}, Reason.SYMBOLIC_TOKENS, "symbolic"),
    ],
)
def test_rejected_problems(change, reason, message):
    assert_rejects(MosaicSm90Fp8(), dataclasses.replace(PROBLEM, **change), HOPPER, reason, message)


@pytest.mark.parametrize("sizes", [(160, 256), (256, 136), (100, 1)])
def test_short_blocks_of_inputs_are_left_to_the_reference(sizes, rng):
    """Which reads the kernel's layout, too."""
    problem = dataclasses.replace(PROBLEM, format="fp8_block", input_format="fp8_block")
    problem = dataclasses.replace(problem, hidden_size=sizes[0], intermediate_size=sizes[1])
    selection = jmx.select(problem, HOPPER, None, registered_backends())
    assert selection.backend.name == "xla"
    message = next(str(no) for name, no in selection.trail if name == "mosaic_fp8")
    assert "must be a multiple of 128, the columns of a scale of fp8_block inputs" in message
    assert "backend='xla', or leave inputs as they are" in message
    case = Case(hidden=sizes[0], intermediate=sizes[1], num_experts=2, format="fp8_block", input_format="fp8_block")
    experts = draw_weights(rng, case).experts(case)
    x, routing = draw_x(rng, case), draw_routing(rng, case)
    packed, laid = (
        jmx.moe(x, routing, experts.prepare(layout), activation=case.activation, backend="xla")
        for layout in ("packed", LAYOUT.name)
    )
    np.testing.assert_array_equal(packed, laid)


@pytest.mark.parametrize(("device", "reason"), [("cpu", Reason.PLATFORM), ("b200", Reason.COMPUTE_CAPABILITY)])
def test_rejected_machines(device, reason):
    assert_rejects(MosaicSm90Fp8(), PROBLEM, Environment.named(device), reason)


@pytest.mark.every_case
def test_the_remedy_for_a_pair_that_is_no_product_is_one():
    """Inputs that are multiplied with those weights; or "auto", which is then another layout."""
    for name, inputs in itertools.product(TAKEN, INPUTS):
        changed = dataclasses.replace(PROBLEM, format=name, input_format=inputs, hidden_size=256, intermediate_size=256)
        rejection = MosaicSm90Fp8().supports(changed, HOPPER)
        assert (rejection is None) == multiplies(FORMATS[name], inputs)
        if rejection is not None:
            asked = rejection.remedy.split("'")[1]
            assert multiplies(FORMATS[name], asked)
            assert resolve_layout("auto", HOPPER, FORMATS[name], inputs) != LAYOUT.name


def test_what_it_runs_is_what_auto_lays_out_for_it():
    assert MosaicSm90Fp8().supports(PROBLEM, HOPPER) is None
    for name, format in FORMATS.items():
        for input_format in (None, *INPUT_FORMATS):
            layout = resolve_layout("auto", HOPPER, format, input_format)
            assert (layout == LAYOUT.name) == (name in TAKEN and multiplies(format, input_format))
            if input_format is None:
                assert (layout == "mosaic_sm90") == (not format.is_float)


# The layout


def weight(rng, name, shape, num_experts=2):
    q = formats.pack(random(jax.random.key(rng.integers(2**31)), (num_experts, *shape), FORMATS[name]))
    if name == MXFP4.name:
        q = q._replace(scales=jnp.asarray(rng.integers(0, 255, q.scales.shape, np.uint8)))
    return q


@pytest.mark.parametrize("name", [*TAKEN, "int4_g256", "int8_g512"])
@pytest.mark.parametrize(
    ("role", "shape", "order"),
    [("gate_up", (192, 288), "interleaved"), ("gate_up", (320, 256), "concatenated"), ("down", (96, 160), None)],
)
def test_every_bit_comes_back(name, role, shape, order, rng):
    q, spec = weight(rng, name, shape), WeightSpec(role, shape, order, FORMATS[name])
    back = formats.pack(LAYOUT.inverse(LAYOUT.forward(q, spec), spec))
    for one, other in zip(q, back, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
    taken = LAYOUT.take(LAYOUT.forward(q, spec), spec, jnp.array([1]))
    np.testing.assert_array_equal(taken.values[0], q.values[1])


def test_scales_at_both_ends_come_back():
    shape, codes = (64, 256), np.array([0, 1, 7, 127, 248, 254, 255], np.uint8)
    scales = jnp.asarray(np.broadcast_to(codes[np.arange(64) % 7][:, None], (64, 8))[None].copy())
    q = BlockScaled(jnp.zeros((1, 64, 128), jnp.uint8), scales)
    spec = WeightSpec("down", shape, None, MXFP4)
    np.testing.assert_array_equal(LAYOUT.inverse(LAYOUT.forward(q, spec), spec).scales.view(jnp.uint8), scales)


@pytest.mark.parametrize("name", ["mxfp4", "int4_channel"])
def test_each_thread_finds_its_codes_where_the_docstring_says(name, rng):
    """From bytes alone, as PTX defines the operand A of wgmma.m64nNk32: every element of the weight, each once."""
    shape = (64, 160)
    q, spec = weight(rng, name, shape, 1), WeightSpec("down", shape, None, FORMATS[name])
    q = q._replace(values=jnp.asarray(rng.integers(0, 256, q.values.shape, np.uint8)))
    held = np.asarray(LAYOUT.forward(q, spec).values)[0]
    assert held.shape == (1, 16 + 8, 256)  # 32 columns of the second unit are the weight's: half of it
    held = np.pad(held, ((0, 0), (0, 8), (0, 0)))  # by TMA
    codes = np.asarray(q.values)[0]
    codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(shape)
    codes = np.pad(codes, ((0, 0), (0, 96)))
    seen = np.zeros(codes.shape, int)
    for unit, slice_, thread, register, byte in np.ndindex(2, 4, 128, 4, 4):
        below, half = register % 2, register // 2
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * below
        column = 128 * unit + 32 * slice_ + 16 * half + 4 * (thread % 4) + byte
        words = held.reshape(2, 2, 128, 2, 2, 4).view("<u4")[..., 0]
        word = int(words[unit, slice_ // 2, thread, slice_ % 2, below])
        sign = word >> (8 * byte + (3 if half else 7)) & 1
        if name == "mxfp4":
            found = word >> 4 * (4 * half + byte) & 7 | sign << 3
        else:
            nibble = [7, 1, 3, 5][byte] if half else 2 * byte
            magnitude = word >> 4 * nibble & 7
            found = (-1 - magnitude if sign else magnitude) & 15
        assert found == codes[row, column]
        seen[row, column] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("name", ["int4_channel", "int4_g128"])
@pytest.mark.parametrize("inputs", ["fp8_token", "int8_token"])
def test_what_the_tensor_cores_get_of_int4_is_the_weight(name, inputs, rng):
    """The kernel's PTX, run in numpy, on every code."""
    shape = (64, 256)
    q, spec = weight(rng, name, shape, 1), WeightSpec("down", shape, None, FORMATS[name])
    q = q._replace(values=jnp.asarray(rng.permutation(np.tile(np.arange(256, dtype=np.uint8), 32)).reshape(1, 64, 128)))
    elements = elements_of(FORMATS[name], INPUT_FORMATS[inputs])
    assert elements is not None
    held = np.asarray(LAYOUT.forward(q, spec).values)[0].reshape(2, 2, 128, 4, 4).view("<u4")[..., 0]
    words = [held[:, half, :, nth] for half in range(2) for nth in range(4)]
    registers = np.array(int4_slices(elements.a, words, run_ptx))  # slice, register, unit, thread
    values = registers.astype("<u4")[..., None].view(np.uint8 if elements.exact else ml_dtypes.float8_e4m3fn)
    values = values.view(np.int8) if elements.exact else values
    found = np.zeros(shape)
    for slice_, register, unit, thread, byte in np.ndindex(values.shape):
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register % 2)
        column = 128 * unit + 32 * slice_ + 16 * (register // 2) + 4 * (thread % 4) + byte
        found[row, column] = values[slice_, register, unit, thread, byte]
    weights = np.asarray(formats.unpack(q, FORMATS[name]).values)[0].astype(np.float64)
    np.testing.assert_array_equal(found * 2.0**-elements.exponent, weights)


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_channel", "fp8_block", "int8_channel", "int8_g128"])
def test_units_of_8_bits_are_rows_as_they_are_gate_and_up_in_turns(name, rng):
    gated, plain = (192, 224), (96, 224)
    q, spec = weight(rng, name, gated, 1), WeightSpec("gate_up", gated, "concatenated", FORMATS[name])
    values = np.pad(np.asarray(q.values)[0], ((0, 0), (0, 32)))
    held = np.asarray(LAYOUT.forward(q, spec).values)[0].reshape(4, 2, 64, 128)  # 96 gates are padded to 128
    for tile, unit, row in np.ndindex(3, 2, 64):
        of_both = 32 * tile + 8 * (row // 16) + row % 8
        whole = values[of_both + (96 if row // 8 % 2 else 0)]
        np.testing.assert_array_equal(held[tile, unit, row], whole[128 * unit :][:128])
    assert not held[3].any()
    q, spec = weight(rng, name, plain, 1), WeightSpec("down", plain, None, FORMATS[name])
    held = np.asarray(LAYOUT.forward(q, spec).values)[0].reshape(2, 2, 64, 128).swapaxes(1, 2).reshape(128, 256)
    np.testing.assert_array_equal(held, np.pad(np.asarray(q.values)[0], ((0, 32), (0, 32))))


@pytest.mark.parametrize("columns", [129, 160, 192])
@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_channel", "int8_channel"])
def test_a_half_of_a_unit_is_what_wgmma_reads_with_its_own_swizzle(name, columns, rng):
    """From bytes alone, as PTX defines both swizzles: TMA's of 128 bytes on the way in, the descriptor's of 64."""
    q, spec = weight(rng, name, (64, columns), 1), WeightSpec("down", (64, columns), None, FORMATS[name])
    memory = np.asarray(LAYOUT.forward(q, spec).values)[0, 0]
    assert memory.shape == (64 + 32, 128)
    box = np.pad(memory[64:], ((0, 32), (0, 0))).reshape(-1)  # past the end of the array TMA writes zeros
    place = np.arange(box.size)
    shared = np.empty_like(box)
    shared[place ^ (place >> 7 & 7) << 4] = box
    upper = wgmma._HALF_UNIT & 0xFFFFFFFF
    assert upper >> 30 == 2  # of 64 bytes
    eight_rows, second = (upper & 0x3FFF) << 4, wgmma._HALF_BYTES << 4
    row, column = np.ogrid[:64, :64]
    place = row // 8 * eight_rows + row % 8 * 64 + column
    halves = [shared[first + (place ^ (place >> 7 & 3) << 4)] for first in (0, second)]
    expected = np.pad(np.asarray(q.values)[0, :, 128:], ((0, 0), (0, 256 - columns)))
    np.testing.assert_array_equal(np.concatenate(halves, axis=1), expected)


@pytest.mark.parametrize("name", TAKEN)
def test_columns_that_no_weight_has_are_not_stored_by_the_half(name):
    """Up to 64 of 128; but not of the only unit, nor where scales belong to units."""
    format = FORMATS[name]
    halved = format.block_size < 128
    for columns, units in ((32, 1), (128, 1), (192, 1.5), (224, 2), (256, 2), (2880, 22.5), (2944, 23)):
        one = abstract(LAYOUT.name, WeightSpec("down", (64, columns), None, format)).values
        assert one.shape[2] * one.shape[3] == 64 * 128 * format.element_bits / 8 * (units if halved else np.ceil(units))


def test_each_four_lanes_find_their_rows_scales_where_the_docstring_says(rng):
    shape = (128, 160)
    q, spec = weight(rng, "mxfp4", shape, 1), WeightSpec("down", shape, None, MXFP4)
    codes = np.asarray(q.scales)[0]
    held = np.asarray(LAYOUT.forward(q, spec).scales)[0]
    assert held.shape == (2, 3, 256)  # row tiles, two units and the rows' own, 32 fours by 2 rows by 4 slices
    for tile, four, below in np.ndindex(2, 32, 2):
        row = codes[64 * tile + 16 * (four // 8) + four % 8 + 8 * below]
        chunks = held[tile].reshape(3, 32, 2, 4)[:, four, below]
        np.testing.assert_array_equal(chunks[:2].reshape(-1)[:5], row.max() - row)  # no block is all zeros
        np.testing.assert_array_equal(chunks[2], row.max())


@pytest.mark.parametrize("name", ["int4_g128", "int4_g256", "int8_g128", "int8_g384"])
def test_each_unit_has_the_scale_of_its_group(name, rng):
    format = FORMATS[name]
    shape = (64, 640)
    q, spec = weight(rng, name, shape, 1), WeightSpec("down", shape, None, format)
    q = q._replace(scales=jnp.asarray(rng.uniform(0.5, 2, q.scales.shape), jnp.float32))
    held = np.asarray(LAYOUT.forward(q, spec).scales)[0, 0, :-1].reshape(5, 4, 8, 2).swapaxes(2, 3).reshape(5, 64)
    for unit in range(5):
        np.testing.assert_array_equal(held[unit], q.scales[0, :, 128 * unit // format.block_size])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("role", "shape", "order"),
    [
        ("gate_up", (512, 384), "interleaved"),
        ("gate_up", (768, 256), "concatenated"),
        ("down", (384, 256), None),
        ("down", (160, 256), None),
    ],
)
def test_the_chunk_after_a_tiles_scales_is_whether_its_rows_share_them(role, shape, order, dtype, rng):
    """First rows theirs and second rows theirs, in every unit; a tile that the weight's end cuts does not."""
    q, spec = weight(rng, "fp8_block", shape, 1), WeightSpec(role, shape, order, FORMATS["fp8_block"])
    q = q._replace(scales=shared(rng, q.scales).astype(dtype))
    whole = np.ones((shape[0] + 63) // 64, bool)
    whole[-1] = shape[0] % 64 == 0

    def flags(scales):
        held = LAYOUT.forward(q._replace(scales=scales), spec).scales[0]
        assert held.dtype == dtype
        assert held.shape == (len(whole), -(-shape[1] // 128) + 1, 64)
        assert (held[:, -1:] == held[:, -1:, :1]).all()
        return np.asarray(held[:, -1, 0], np.float32)

    np.testing.assert_array_equal(flags(q.scales), whole)
    row, unit = int(rng.integers(shape[0])), int(rng.integers(shape[1] // 128))
    rows = np.arange(shape[0]).reshape({"interleaved": (-1, 2), "concatenated": (2, -1), None: (1, -1)}[order])
    output = np.argwhere(rows == row)[0][0 if order == "interleaved" else 1]
    whole[output // (64 if order is None else 32)] = False
    np.testing.assert_array_equal(flags(q.scales.at[0, row, unit].mul(1.5)), whole)


def shared(rng, scales):
    """Scales (E, N, blocks) of some like these, each of 128 rows."""
    odd = rng.uniform(0.5, 1, scales.shape)[:, np.arange(scales.shape[1]) // 128 * 128]
    return (scales[:, np.arange(scales.shape[1]) // 128 * 128] * odd).astype(scales.dtype)


def test_magnitudes_are_exact_as_far_as_it_says():
    elements = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    largest, step = magnitudes()
    for distance in range(EXACT_BELOW + 1):
        found = (largest - np.uint32(distance) * step).view(ml_dtypes.float8_e5m2).astype(np.float64)
        exact = (found == elements * 2.0 ** (E2M1_EXPONENT - distance)).all()
        assert exact == (distance < EXACT_BELOW)


@pytest.mark.parametrize("far", [0, 26, 27, 200])
def test_prepare_warns_of_blocks_that_kernels_round(far, rng):
    q = weight(rng, "mxfp4", (64, 128))
    scales = np.full(q.scales.shape, 240, np.uint8)
    scales[1, 3, 2] = 240 - far
    scales[0, 5, 1], scales[0, 6, 1] = 0, 255  # a block of zeros, which loses nothing; a row that is NaN
    scales[0, 7], scales[0, 7, 3] = 100, 254  # a block of zeros with a large scale, which nothing is measured by
    values = np.asarray(q.values).copy() | 1
    values[0, 5, 16:32] = 0x08
    values[0, 7, 48:64] = 0x80
    q = BlockScaled(jnp.asarray(values), jnp.asarray(scales))
    down = weight(rng, "mxfp4", (128, 64))._replace(scales=jnp.full((2, 128, 2), 127, jnp.uint8))
    experts = Experts.of(q, down, gate_up_order=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        experts.prepare(LAYOUT.name)
    assert [str(w.message).split(",")[0] for w in caught] == (
        ["kernels that read 'mosaic_sm90_fp8' round 1 blocks of gate_up"] if far >= EXACT_BELOW else []
    )


# Tiles and splits


@pytest.mark.parametrize(("name", "inputs"), MULTIPLIED)
def test_configurations_fit(name, inputs):
    for tokens, units in itertools.product((1, 4, 6, 16, 64, 256, 512, 1024, 8192), ((23, 23), (23, 1), (1, 23))):
        shape = shape_of(tokens, name, inputs)._replace(units=units)
        for config in candidates(shape):
            config.check(shape)
            assert config.shared_memory(shape.unit_bytes, max(shape.units)) <= SHARED_MEMORY


def test_rows_are_resident_where_a_warpgroup_has_one():
    """All units of it, beside at least half the stages that there would be."""
    kept = [tokens for tokens in (1, 2, 3, 4, 5, 6, 8, 16) if heuristic(shape_of(tokens)).resident_rows]
    assert kept == [1, 2, 3, 4]
    assert not heuristic(shape_of(1)._replace(weighted=True)).resident_rows
    few = Config(8, 3, 2, 8, fuse_quantize=True, resident_rows=True)
    size, stage, scales = 4352, 8 * 128 + 32 * 4, 1024
    needed = [dataclasses.replace(few, resident_rows=keeps).shared_memory(size, 23) for keeps in (False, True)]
    assert needed[1] - needed[0] == (23 - 8) * stage + scales
    assert few.shared_memory(size, 8) == few.shared_memory(size, 1)  # there are as many stages of rows anyway
    for units in (23, 56, 100, 128, 132, 256):
        wide = shape_of(2)._replace(units=(units, 16))
        config = heuristic(wide)
        config.check(wide)
        assert config.resident_rows == (units <= 128)
    wide = shape_of(2)._replace(units=(128, 16))
    with pytest.raises(ValueError, match="num_stages"):
        dataclasses.replace(heuristic(wide), num_stages=heuristic(wide).num_stages + 1).check(wide)
    with pytest.raises(
        ValueError, match=r"`resident_rows` \(=True\) must be False for more tokens than `warpgroups_m`"
    ):
        few.check(shape_of(4))
    with pytest.raises(ValueError, match=r"`resident_rows` \(=True\) must be False where inputs differ by expert"):
        few.check(shape_of(3)._replace(weighted=True))
    with pytest.raises(ValueError, match=r"`resident_rows` \(=True\) must be False without `fuse_quantize`"):
        dataclasses.replace(few, fuse_quantize=False)
    with pytest.raises(ValueError, match=r"`resident_rows` \(=True\) must be False with `warpgroups_k` above 1"):
        dataclasses.replace(few, warpgroups_m=1, warpgroups_k=3)


@pytest.mark.parametrize("tokens", [4, 8])
def test_a_configuration_for_some_tokens_fits_fewer(tokens):
    """As a table's entries serve them."""
    for name, inputs in MULTIPLIED:
        config = heuristic(shape_of(tokens, name, inputs))
        for fewer in range(1, tokens):
            config.check(shape_of(fewer, name, inputs))


def shape_of(tokens, name="mxfp4", inputs=None, num_cores=132):
    """gpt-oss-20b's. `inputs`: None for those in blocks with weights in blocks, else by token."""
    format = FORMATS[name]
    inputs = inputs or ("fp8_block" if name == "fp8_block" else "int8_token" if name[:4] == "int8" else "fp8_token")
    kind = elements_of(format, INPUT_FORMATS[inputs])
    assert kind is not None
    blocks = inputs == "fp8_block"
    numbers = kind.decoded, kind.exact, kind.coded, blocks or kind.by_block, blocks
    return Shape(
        unit_bytes(format), *numbers, tokens, 4, 32, (90, 45), (23, 23), num_cores, False, inputs == "fp8_tensor"
    )


@pytest.mark.parametrize(
    ("tokens", "block_n", "warpgroups_m", "split_k"),
    [(1, 8, 3, 2), (4, 8, 5, 1), (64, 16, 4, 1), (256, 40, 4, 1), (1024, 176, 2, 1), (8192, 256, 2, 1)],
)
def test_the_heuristic_takes_what_was_measured_to_be_fastest(tokens, block_n, warpgroups_m, split_k):
    config = heuristic(shape_of(tokens))
    assert (config.block_n, config.warpgroups_m, config.split_k) == (block_n, warpgroups_m, split_k)


@pytest.mark.parametrize("name", ["int8_channel", "fp8_channel"])
def test_two_warpgroups_take_elements_of_8_bits_that_many_tokens_share(name):
    found = {tokens: heuristic(shape_of(tokens, name)).warpgroups_m for tokens in (1, 17, 64, 256)}
    assert found == {1: 3, 17: 2, 64: 2, 256: 2}
    config = heuristic(shape_of(64, name))
    assert (config.block_n, config.num_stages, config.fuse_quantize) == (16, 10, True)
    assert heuristic(shape_of(64, "fp8_block", "fp8_token")).warpgroups_m == 4
    assert {config.warpgroups_m for config in candidates(shape_of(64, name))} >= {2, 3, 4, 5}


def test_the_pipeline_of_a_launch_that_quantizes_is_limited():
    """136 KiB, where items are of two tiles 160, or 112 where rows are kept, or 120 where columns are shared; but three
    steps of every warpgroup in any case."""
    found = {(tokens, name): heuristic(shape_of(tokens, name)) for tokens in (1, 4, 16, 64) for name in TAKEN}
    for (tokens, name), config in found.items():
        size = config.num_warpgroups * unit_bytes(FORMATS[name])
        most = 112 if config.resident_rows else 120 if config.warpgroups_k > 1 else 136
        most = 160 if shape_of(tokens, name).takes_pairs_of_tiles else most
        assert config.num_stages <= max(3 * config.units, most * 1024 // size)
    assert [found[tokens, "mxfp4"].num_stages for tokens in (1, 4, 16, 64)] == [8, 6, 7, 8]


def test_warpgroups_share_columns_of_few_rows_where_there_are_many():
    found = {tokens: heuristic(shape_of(tokens)).warpgroups_k for tokens in (1, 4, 6, 16, 17, 64)}
    assert found == {1: 1, 4: 1, 6: 4, 16: 4, 17: 1, 64: 1}
    assert heuristic(shape_of(16)._replace(units=(16, 16))).warpgroups_k == 4
    assert heuristic(shape_of(16)._replace(units=(16, 15))).warpgroups_k == 1
    assert heuristic(shape_of(16, "fp8_block")).warpgroups_k == 1
    assert {heuristic(shape_of(n)._replace(weighted=True)).warpgroups_k for n in (1, 2, 4, 5)} == {1}
    many = [shape_of(n)._replace(top_k=8, num_experts=256, tiles=(64, 112), units=(56, 16)) for n in range(1, 65)]
    found = [config for config in map(heuristic, many) if config.warpgroups_k > 1]
    assert len(found) == 11
    assert all(config.fuse_quantize for config in found)


@pytest.mark.parametrize(("num_ctas", "items_of_block"), [(132, 45), (132, 23), (8, 3), (5, 7)])
def test_no_item_of_early_rows_is_among_the_last_two_of_a_cta(num_ctas, items_of_block):
    for blocks in (0, 1, 2, 5, 12, 32):
        shares = [Share.of(Share.begin(jnp.int32(c)), blocks * items_of_block, 1, num_ctas) for c in range(num_ctas)]
        before: Any = SimpleNamespace(share=shares[0], items_of_block=items_of_block)
        early = int(_early_blocks(SimpleNamespace(before=before)))  # pyright: ignore[reportArgumentType]
        late = [min(int(s.item(s.num_items - 2)), int(s.item(s.num_items - 1))) for s in shares if s.num_items > 1]
        late += [int(s.first_item) for s in shares if s.num_items == 1]
        assert 0 <= early <= blocks
        assert all(item >= early * items_of_block for item in late)
        if early:  # all CTAs take part: each signals, and each quantizes a share
            assert all(s.num_items > 2 for s in shares)
    assert early > 0
    assert _early_blocks(SimpleNamespace(before=None)) == 0  # pyright: ignore[reportArgumentType]


def test_few_rows_are_quantized_in_the_launch_that_multiplies_them():
    found = {tokens: heuristic(shape_of(tokens)).fuse_quantize for tokens in (1, 8, 64, 256, 1024, 8192)}
    assert found == {1: True, 8: True, 64: True, 256: True, 1024: False, 8192: False}


def test_the_heuristic_fills_all_sms():
    assert heuristic(shape_of(1, num_cores=132)).warpgroups_m == 3  # 4 experts of 30 items
    assert heuristic(shape_of(1, num_cores=78)).warpgroups_m == 5  # of 18


@pytest.mark.parametrize("block_n", [16, 64, 96, 128, 176, 208, 256])
def test_every_block_has_a_width_that_holds_it_and_that_tensor_cores_offer(block_n):
    config = Config(block_n, 2, 1, 4)
    widths = config.widths(exact=False)
    assert list(widths) == sorted(set(widths))
    assert widths[-1] == config.widths(exact=True)[-1] == block_n
    assert {*config.widths(exact=True)} == {width for width in widths if width % 16 == 0 or width <= 32}
    for width in widths:
        parts = config.parts_of(width, decoded=False)
        assert width % (8 * parts) == 0
        assert width // parts <= 128
        assert dataclasses.replace(config, own_sums=True).parts_of(width, decoded=False) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((12, 2, 1, 4), "`block_n` (=12)"),
        ((264, 2, 1, 4), "`block_n` (=264)"),
        ((136, 2, 1, 4), "`block_n` (=136)"),
        ((8, 6, 1, 4), "`warpgroups_m * warpgroups_k` (=6)"),
        ((8, 2, 1, 4, 1, 3), "`warpgroups_m * warpgroups_k` (=6)"),
        ((8, 0, 1, 4), "`warpgroups_m` (=0)"),
        ((8, 1, 1, 4, 1, 0), "`warpgroups_k` (=0)"),
        ((144, 1, 1, 4, 1, 2), "`warpgroups_k` (=2) must be 1 above 128"),
        ((72, 4, 1, 4), "`block_n` (=72) must be at most 56,"),
        ((16, 5, 3, 4), "`block_n` (=16) must be at most 8,"),
        ((8, 2, 1, 4, 0), "`split_k` (=0)"),
        ((8, 2, 5, 8), "`units` (=5)"),
        ((8, 2, 2, 1), "`num_stages` (=1)"),
    ],
)
def test_impossible_configurations_are_refused(fields, message):
    with pytest.raises(ValueError, match="must be") as error:
        Config(*fields)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "name", "columns", "message"),
    [
        ((128, 2, 1, 8), "fp8_block", 2880, "`num_stages` (=8) must be such that"),
        ((128, 2, 1, 4, 1, 1, True), "fp8_block", 2880, "`own_sums` (=True) must be False where scales"),
        ((256, 2, 1, 4, 1, 1, True), "mxfp4", 4097, "`own_sums` (=True) must be False for more than 4096"),
        ((208, 2, 1, 4), "mxfp4", 2880, "`block_n` (=208) must be at most 192 for 4-bit weights"),
        (
            (64, 2, 1, 4),
            "int4_channel",
            2880,
            "`own_sums` (=False) must be True for integers with scales of whole rows",
        ),
        ((40, 2, 1, 4, 1, 1, True), "int8_channel", 2880, "`block_n` (=40) must be a multiple of 16 above 32"),
        ((64, 2, 1, 4, 1, 1, True), "int8_channel", 2**17 + 1, "`own_sums` (=True) must be False for more than 131072"),
        ((8, 2, 1, 4, 2), "mxfp4", 2880, "`split_k` (=2) must be 1 where a row of `down` has one unit"),
        ((8, 1, 2, 4, 1, 2), "mxfp4", 2880, "`warpgroups_k` (=2) must be 1 where a row has one unit"),
    ],
)
def test_a_configuration_that_a_shape_does_not_allow_is_refused(fields, name, columns, message):
    inputs = "int8_token" if name.startswith("int") else None
    shape = shape_of(8192, name, inputs)._replace(units=(-(-columns // 128), 1))
    with pytest.raises(ValueError, match="must be") as error:
        Config(*fields).check(shape)
    assert str(error.value).startswith(message)


def test_many_columns_are_added_up_in_float32():
    shape = shape_of(8192)
    assert heuristic(shape).own_sums
    many = heuristic(shape._replace(units=(33, 23)))
    assert (many.own_sums, many.block_n) == (False, 176)
    many.check(shape._replace(units=(33, 23)))
    assert not heuristic(shape_of(8192, "fp8_channel")).own_sums


@pytest.mark.parametrize(
    ("format", "input_format", "tokens", "whole"),
    [
        ("int4_g128", "fp8_token", 8192, True),
        ("int4_g256", "int8_token", 8192, True),
        ("int8_g256", "int8_token", 8192, False),
        ("int4_g128", "fp8_token", 1024, False),  # an expert has one block
        ("int4_channel", "int8_token", 8192, False),
        ("fp8_block", "fp8_token", 8192, False),
        ("fp8_block", "fp8_block", 8192, True),  # tokens are operand A
    ],
)
def test_large_blocks_of_int4_in_groups_are_whole_but_the_last(format, input_format, tokens, whole):
    sizes = {"num_tokens": tokens, "hidden_size": 3072, "intermediate_size": 3072, "num_experts": 32, "top_k": 4}
    problem = dataclasses.replace(PROBLEM, **sizes, format=format, input_format=input_format)
    assert MosaicSm90Fp8().tiling(problem, HOPPER).whole == whole


def test_tiles_of_padding_are_none_of_a_product():
    experts = jax.eval_shape(lambda: Experts.random(jax.random.key(0), 2, 384, 256, gate_up_order="interleaved"))
    weight = jax.eval_shape(lambda q: LAYOUT.forward(q, experts.spec("gate_up")), experts.gate_up)
    for computed, tiles, outputs in ((None, 8, 256), (256, 8, 256), (224, 7, 256), (200, 7, 256), (128, 4, 128)):
        product = Product(weight, MXFP4, None, Rows(512, "interleaved", computed), jnp.bfloat16)
        assert (product.m_tiles, product.rows.num_outputs, product.rows.outputs) == (tiles, outputs, 256)


def test_integers_are_added_up_exactly_whatever_the_tokens():
    for tokens, name in itertools.product((1, 4, 8, 16, 64, 256, 1024, 8192), ("int4_channel", "int8_channel")):
        shape = shape_of(tokens, name, "int8_token")
        assert all(config.own_sums for config in candidates(shape))
        assert all(width <= 32 or width % 16 == 0 for width in heuristic(shape).widths(exact=True))
    for tokens in (64, 8192):
        assert not heuristic(shape_of(tokens, "int4_channel")).own_sums  # float32 totals: elements are e4m3
        assert not heuristic(shape_of(tokens, "int4_g128", "int8_token")).own_sums  # scales belong to 128 columns


def test_rows_that_share_one_scale_are_quantized_in_launches_of_their_own():
    for tokens in (1, 4, 16, 64, 8192):
        shape = shape_of(tokens, "fp8_tensor", "fp8_tensor")
        assert not any(config.fuse_quantize for config in candidates(shape))
        with pytest.raises(ValueError, match=r"`fuse_quantize` \(=True\) must be False where all rows share a scale"):
            dataclasses.replace(Config(8, 2, 2, 4), fuse_quantize=True).check(shape)


# Integers under scales of 128 columns


@pytest.mark.parametrize("bits", [4, 8])
def test_sums_of_the_longest_run_are_floats_by_their_bits(bits):
    longest = integer_sums.longest_run(bits, 128)
    assert longest == {4: 32, 8: 2}[bits]
    largest = longest * 128 * 2 ** (bits - 1) * 128
    sums = np.array([-largest, -1, 0, 1, largest], np.int32)
    read = (np.int32(0x4B400000) + sums).view(np.float32)
    np.testing.assert_array_equal(read.astype(np.float64) - 1.5 * 2**23, sums)


@pytest.mark.parametrize(("bits", "run", "units"), [(4, 32, 23), (4, 32, 56), (8, 2, 23), (8, 1, 56)])
def test_differences_of_scales_add_up_to_what_scales_of_units_do(bits, run, units, rng):
    """As `integer_sums` computes them, in float32, beside what rounding inputs to 8 bits changes."""
    rows, goes_on = 1000, bits == 4
    weights = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, units, 128))
    x = rng.standard_normal((units, 128)) * 36
    scales = (1 + rng.random((rows, units)) / 4).astype(np.float32)
    sums = (weights * np.rint(x)).sum(axis=2)
    total, offset = np.zeros(rows, np.float32), np.zeros(rows, np.float32)

    def plus(total, sums, scales):
        read = (np.int32(0x4B400000) + sums.astype(np.int32)).view(np.float32)
        return (scales.astype(np.float64) * read + total).astype(np.float32)

    for first in range(0, units, run):
        running = np.zeros(rows, int)
        if goes_on:
            total = plus(total, running, -scales[:, first])
        else:
            offset += scales[:, first] * np.float32(1.5 * 2**23)
        last = min(first + run, units) - 1
        for unit in range(first, last + 1):
            running = running + sums[:, unit]
            after = scales[:, unit + 1] if unit < last else np.zeros(rows, np.float32)
            total = plus(total, running, scales[:, unit] - after)
    exact = (sums * scales.astype(np.float64)).sum(axis=1)
    rounding = ((weights * (np.rint(x) - x)).sum(axis=2) * scales).sum(axis=1)
    assert (total - offset - exact).std() < 0.1 * rounding.std()


# On a GPU


def allowed(config, format, input_format):
    """The configuration nearest to `config` that a pair allows."""
    elements = elements_of(FORMATS[format], INPUT_FORMATS[input_format])
    assert elements is not None
    by_block = elements.by_block or input_format == "fp8_block"
    if input_format == "fp8_tensor":
        config = dataclasses.replace(config, fuse_quantize=False, resident_rows=False)
    if elements.exact:
        rows = config.block_n if config.block_n <= 32 else config.block_n // 16 * 16
        config = dataclasses.replace(config, block_n=rows, own_sums=not by_block)
    if elements.decoded and by_block:
        config = dataclasses.replace(config, block_n=min(config.block_n, 192), own_sums=False)
    return dataclasses.replace(config, own_sums=False) if by_block else config


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [5, 200])
def test_integers_of_more_columns_than_a_run_has(tokens, rng):
    sizes: dict[str, Any] = {"tokens": tokens, "hidden": 4352, "intermediate": 256}  # 34 units
    check("mosaic_fp8", Case(format="int4_g128", input_format="int8_token", **sizes), rng)


SPLIT = {
    ("mxfp4", "fp8_token"),
    ("fp8_channel", "fp8_token"),
    ("fp8_block", "fp8_block"),
    ("int4_channel", "int8_token"),
    ("int4_g128", "fp8_token"),
    ("int4_g256", "int8_token"),
    ("int8_g128", "int8_token"),
}
SHARED_COLUMNS = [(8, 1, 2, 1, 2), (16, 2, 1, 1, 2), (24, 1, 3, 2, 3), (24, 1, 1, 1, 4), (8, 1, 2, 3, 5)]


@pytest.mark.gpu
@pytest.mark.parametrize(("format", "input_format", "sizes"), PAIRS)
@pytest.mark.parametrize("tokens", [1, 5, 40, 600])
def test_every_pair(tokens, format, input_format, sizes, rng):
    order = "concatenated" if tokens == 5 else "interleaved"
    check("mosaic_fp8", Case(tokens=tokens, format=format, input_format=input_format, order=order, **sizes), rng)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        *({"activation": one, "order": "interleaved" if one.gated else None} for one in ACTIVATIONS),
        {"dtype": "float16"},
        {"weights_on": "input"},
        {"bias": NEITHER},
        {"top_k": 1},
        *({"ids": ids} for ids in IDS),
        {"num_experts": 200, "top_k": 8, "hidden": 64, "intermediate": 64},
        *({"tokens": tokens, "ids": ids} for tokens in (1, 3) for ids in IDS),
        {"tokens": 3, "num_experts": 200, "top_k": 8, "dtype": "float16"},
        {"tokens": 3, "weights_on": "input"},
    ],
    ids=str,
)  # fmt: skip
def test_computations(change, rng):
    case = Case(tokens=70, input_format="fp8_token", dtype="bfloat16", hidden=160, intermediate=224)
    check("mosaic_fp8", dataclasses.replace(case, **change), rng)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        *(Config(n, m, u, 4) for n in (8, 40, 128) for m in (1, 2) for u in (1, 3)),
        *(
            Config(n, m, u, 4, own_sums=own)
            for n, own in ((176, False), (208, True))
            for m in (1, 2)
            for u in (1, 2, 4)
        ),
        *(Config(n, m, u, 4) for n, m, u in ((64, 3, 2), (24, 3, 4), (40, 4, 2), (8, 4, 3), (24, 5, 2))),
        *(Config(16, m, 2, 4, split) for m in (1, 3, 5) for split in (2, 3)),
        *(Config(n, m, u, 4, split, k) for n, m, u, split, k in SHARED_COLUMNS),
        Config(32, 1, 2, 2, warpgroups_k=4, own_sums=True),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("format", "input_format", "sizes"),
    [pair for pair in PAIRS if pair[:2] in SPLIT],
)
def test_every_split(format, input_format, sizes, config, rng):
    config = allowed(config, format, input_format)
    case = suited("mosaic_fp8", Case(tokens=200, format=format, input_format=input_format, dtype="bfloat16", **sizes))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    with tuning.override("mosaic_fp8", config):
        y, again = (call("mosaic_fp8", case, weights.experts(case), x, routing) for _ in range(2))
    np.testing.assert_array_equal(again, y)
    assert_agrees("mosaic_fp8", case, y, reference(case, weights, x, routing))


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["mxfp4", "fp8_channel"])
def test_tokens_have_the_same_bits_alone_in_few_and_in_many(format, rng):
    case = Case(tokens=40, format=format, input_format="fp8_token", dtype="bfloat16", hidden=160, intermediate=224)
    case = suited("mosaic_fp8", case)
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts = weights.experts(case)
    with tuning.override("mosaic_fp8", Config(16, 3, 2, 4, 2)):
        whole = call("mosaic_fp8", case, experts, x, routing)
        for tokens in (1, 5, 9):
            some = dataclasses.replace(case, tokens=tokens)
            own = jax.tree.map(lambda array, n=tokens: array[:n], routing)
            np.testing.assert_array_equal(call("mosaic_fp8", some, experts, x[:tokens], own), whole[:tokens])


@pytest.mark.gpu
@pytest.mark.parametrize("warpgroups_m", [1, 2, 3, 5])
@pytest.mark.parametrize(("format", "dtype"), [("mxfp4", "bfloat16"), ("fp8_channel", "float16")])
def test_warpgroups_that_have_no_tile_write_none(format, dtype, warpgroups_m, rng):
    """Each weight is one tile, and outputs are one: the other warpgroups' tiles are zeros."""
    ungated = Case(tokens=300, input_format="fp8_token", hidden=64, intermediate=64, activation=SiLU(), order=None)
    case = suited("mosaic_fp8", dataclasses.replace(ungated, format=format, dtype=dtype))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    expected = reference(case, weights, x, routing)
    for fuse_quantize in (False, True):
        with tuning.override("mosaic_fp8", Config(8, warpgroups_m, 2, 4, fuse_quantize=fuse_quantize)):
            for _ in range(5):
                assert_agrees("mosaic_fp8", case, call("mosaic_fp8", case, weights.experts(case), x, routing), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 6, 40, 300])
@pytest.mark.parametrize(("format", "input_format", "sizes"), PAIRS)
def test_fused_quantization_gives_the_bits_of_four(tokens, format, input_format, sizes, rng):
    case = suited(
        "mosaic_fp8", Case(tokens=tokens, format=format, input_format=input_format, dtype="bfloat16", **sizes)
    )
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts, found = weights.experts(case), []
    for config in (Config(16, 3, 2, 4), Config(40, 2, 1, 4), Config(16, 4, 2, 4, 2), Config(8, 1, 2, 4, 2, 3)):
        keeps = [{"resident_rows": True}] if tokens <= config.warpgroups_m and config.warpgroups_k == 1 else []
        for how in (
            {},
            {"fuse_quantize": True},
            {"fuse_quantize": True},
            *({"fuse_quantize": True} | one for one in keeps),
        ):
            with tuning.override("mosaic_fp8", allowed(dataclasses.replace(config, **how), format, input_format)):
                found.append(call("mosaic_fp8", case, experts, x, routing))
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0])
        found.clear()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "config"),
    [
        (1, Config(8, 1, 2, 4)),
        (2, Config(8, 2, 2, 4, 3)),
        (4, Config(16, 4, 2, 4, 2)),
        (4, Config(8, 5, 2, 4)),
        (4, Config(8, 1, 2, 4, 2, 3)),
        (7, Config(8, 2, 1, 4, 1, 2)),
        (20, Config(24, 1, 2, 4, 1, 4)),
        (60, Config(16, 1, 1, 3, 1, 5)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("format", "input_format"),
    [
        *itertools.product(["mxfp4"], ["fp8_static", "fp8_token", "fp8_block"]),
        *(("fp8_channel", "fp8_token"), ("fp8_block", "fp8_block")),
        *(("int4_channel", "int8_token"), ("int4_g128", "fp8_token"), ("int8_g128", "int8_token")),
    ],
)
def test_few_tokens_with_several_items_for_an_sm(format, input_format, tokens, config, rng):
    case = Case(tokens=tokens, num_experts=40, top_k=30, hidden=1280, intermediate=640, dtype="bfloat16")
    case = suited("mosaic_fp8", dataclasses.replace(case, format=format, input_format=input_format))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    found = []
    for how in ({}, {"fuse_quantize": True, "resident_rows": config.warpgroups_k == 1}):
        with tuning.override("mosaic_fp8", allowed(dataclasses.replace(config, **how), format, input_format)):
            found.append(call("mosaic_fp8", case, weights.experts(case), x, routing))
    np.testing.assert_array_equal(found[1], found[0])
    assert_agrees("mosaic_fp8", case, found[1], reference(case, weights, x, routing))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "config"),
    [(2, Config(16, 3, 2, 4, resident_rows=True, fuse_quantize=True))]
    + [(n, Config(16, m, 2, 4, warpgroups_k=k, fuse_quantize=True)) for n in (6, 20) for m, k in ((3, 1), (1, 3))],
)
def test_fused_quantization_counts_anew_in_every_turn_of_a_loop(tokens, config, rng):
    """Also where routing, and all that is made of it, stays the same."""
    case = Case(tokens=tokens, num_experts=1, top_k=1, input_format="fp8_token", dtype="bfloat16", **ODD)
    case = suited("mosaic_fp8", case)
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts = weights.experts(case)

    @partial(jax.jit, static_argnums=1)
    def layers(x, turns):
        def layer(_, x):
            return jmx.moe(x, routing, experts, activation=case.activation, backend="mosaic_fp8")

        return jax.lax.fori_loop(0, turns, layer, x)

    expected = x
    with tuning.override("mosaic_fp8", config):
        found = layers(x, 4)
        for _ in range(4):
            expected = layers(expected, 1)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [("float16", "float16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("tokens", [2, 64, 700])
def test_scales_of_any_dtype(tokens, dtypes, rng):
    case = Case(tokens=tokens, format="fp8_block", input_format="fp8_token", dtype="bfloat16", **BLOCKS)
    case = suited("mosaic_fp8", case)
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    weights = weights.with_scales_of(rng, *dtypes)
    y = call("mosaic_fp8", case, weights.experts(case), x, routing)
    assert_agrees("mosaic_fp8", case, y, reference(case, weights, x, routing))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "config"),
    [
        ({}, Config(128, 2, 2, 4)),
        ({}, Config(256, 2, 1, 4)),
        ({"order": "concatenated", "bias": NEITHER}, Config(128, 2, 1, 4)),
        ({"order": "concatenated", "bias": NEITHER}, Config(256, 2, 1, 3)),
        ({"activation": ReLU2(), "order": None}, Config(256, 2, 2, 4)),
        ({"dtype": "float16", "activation": SiLUAndMul(), "hidden": 256}, Config(128, 2, 3, 4)),
        ({"dtype": "float16", "activation": SiLUAndMul(), "hidden": 256}, Config(256, 2, 1, 4)),
        ({"format": "fp8_channel"}, Config(128, 2, 2, 4)),
        ({"format": "fp8_channel"}, Config(256, 2, 1, 4)),
        ({"format": "fp8_tensor", "bias": NEITHER}, Config(256, 2, 1, 4)),
    ],
    ids=str,
)
def test_blocks_with_tokens_as_the_operand_a(change, config, rng):
    """Those of more than 96 rows, where tiles' rows share scales, and beside them all others."""
    case = Case(tokens=500, format="fp8_block", input_format="fp8_block", dtype="bfloat16", num_experts=4, top_k=1)
    case = suited("mosaic_fp8", dataclasses.replace(case, **{"hidden": 384, "intermediate": 384, **change}))
    weights, x = draw_weights(rng, case), draw_x(rng, case)
    given = [weights]
    if case.format == "fp8_block":  # of all experts, of none, and of some
        given += [shared_by(rng, weights, slice(0, last)) for last in (4, 2)]
    for weights in given:
        experts = weights.experts(case)
        for counts in [(97, 128, 65, 110), (129, 1, 96, 256), (0, 300, 104, 96)]:
            ids = np.repeat([0, 1, 2, 3, -1], [*counts, case.tokens - sum(counts)])
            routing = Routing(rng.permutation(ids)[:, None].astype(np.int32), np.ones((case.tokens, 1), np.float32))
            with tuning.override("mosaic_fp8", config):
                y, again = (call("mosaic_fp8", case, experts, x, routing) for _ in range(2))
            np.testing.assert_array_equal(again, y)
            assert_agrees("mosaic_fp8", case, y, reference(case, weights, x, routing))


def shared_by(rng, weights, experts):
    """`weights` in "fp8_block", whose scales some experts' rows share as others do in checkpoints."""

    def role(q):
        scales = np.array(q.scales)
        scales[experts] = shared(rng, scales[experts])
        return q._replace(scales=scales)

    return weights._replace(gate_up=role(weights.gate_up), down=role(weights.down))


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["fp8_block", "fp8_channel"])
def test_tokens_have_the_same_bits_whichever_operand_they_are(format, rng):
    case = Case(tokens=400, format=format, input_format="fp8_block", dtype="bfloat16", num_experts=2, top_k=1)
    case = suited("mosaic_fp8", dataclasses.replace(case, hidden=384, intermediate=384))
    weights, x = draw_weights(rng, case), draw_x(rng, case)
    if format == "fp8_block":
        weights = shared_by(rng, weights, slice(0, 2))
    for most in (128, 256):
        found = []
        for count in (40, 120, 250):  # of the first expert: transposed, and in one part and in two of them not
            ids = (np.arange(case.tokens) >= count).astype(np.int32)[:, None]
            routing = Routing(ids, np.ones((case.tokens, 1), np.float32))
            with tuning.override("mosaic_fp8", Config(most, 2, 1, 4)):
                found.append(call("mosaic_fp8", case, weights.experts(case), x, routing)[:40])
        np.testing.assert_array_equal(found[1], found[0])
        np.testing.assert_array_equal(found[2], found[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "other"), [(96, False), (97, True)])
def test_the_layouts_flag_of_shared_scales_decides(count, other, rng):
    """A wrong flag gives other results, so both paths are taken where they should be."""
    case = Case(tokens=count, format="fp8_block", input_format="fp8_block", dtype="bfloat16", num_experts=1, top_k=1)
    case = suited("mosaic_fp8", dataclasses.replace(case, **BLOCKS))
    experts, x, routing = draw_weights(rng, case).experts(case), draw_x(rng, case), draw_routing(rng, case)
    scales = experts.gate_up.scales.at[:, :, -1].set(1)
    wrong = dataclasses.replace(experts, gate_up=experts.gate_up._replace(scales=scales))
    with tuning.override("mosaic_fp8", Config(128, 2, 2, 4)):
        y, found = (call("mosaic_fp8", case, given, x, routing) for given in (experts, wrong))
    assert (np.linalg.norm(found - y) > 0.1 * np.linalg.norm(y)) == other


@pytest.mark.gpu
def test_a_token_that_is_not_a_number_spoils_itself_alone(rng):
    case = suited("mosaic_fp8", Case(tokens=40, input_format="fp8_token", dtype="bfloat16", activation=SiLUAndMul()))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    bad = x.copy()
    bad[7, 3] = np.nan
    good, y = (call("mosaic_fp8", case, weights.experts(case), given, routing) for given in (x, bad))
    assert np.isnan(y[7]).all()
    np.testing.assert_array_equal(np.delete(y, 7, 0), np.delete(good, 7, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("name", [name for name in INPUTS if name != "fp8_tensor"])  # for kernels it is static
def test_rows_are_rounded_to_the_bits_of_the_definition(name, dtype, rng):
    from jmx.pallas.mosaic_sm90_fp8.quantize import quantize
    from jmx.pallas.mosaic_sm90_fp8.rows import InputRows

    format, columns = INPUT_FORMATS[name], 640
    x = rng.standard_normal((77, columns)) * 2.0 ** rng.uniform(-40, 4, (77, 1))
    x[5], x[8], x[9] = 0, x[8] * 1e-30, x[9] * 1e-38
    x[10] = rng.integers(-(2**8), 2**8, columns) / 2.0 ** rng.integers(0, 10, columns)  # half way between two, often
    x[10, :2] = 448, -0.0
    x[11, :2] = float(jnp.finfo(dtype).max), -float(jnp.finfo(dtype).max)
    x[6, 3], x[7, -1] = np.nan, -np.inf
    x = jnp.asarray(x, jnp.float32).astype(dtype)
    row_of = rng.permutation(3 * 77).astype(np.int32).reshape(77, 3)
    source = np.zeros(3 * 77, int)
    source[row_of] = np.arange(77)[:, None]
    nowhere = np.arange(0, 77, 5)
    row_of[nowhere, 1] = -1
    below = np.nextafter(np.float32(2.0**-64), np.float32(0))  # which is raised, as the next one is not
    static = [jnp.full(1, one, jnp.float32) for one in (0.01, 2.0**-126, 3e-30, below, 2.0**-64, 7e35)]
    static = static if format.static else [None]

    def bits(rows, there):
        elements = np.where(there, np.asarray(rows.values).view(np.uint8), 0)
        nan = (elements & 0x7F == 0x7F) & (format.element_dtype != np.int8)
        return np.where(nan, 0x7F, elements)  # a NaN has no sign

    for given, places in itertools.product(static, (None, row_of)):
        wanted = input_formats.quantize(x, format, None if given is None else given[0])
        num_rows = 77 if places is None else 3 * 77
        found = jax.jit(lambda x, s, to, n=num_rows: quantize(InputRows(x, to, s, columns, format, n)))(
            x, given, places
        )
        rows = np.arange(77) if places is None else source
        there = np.arange(77) if places is None else np.sort(row_of[row_of >= 0])
        scales = np.asarray(found.scales)
        scales = scales[:, : rows.size].T if format.name == "fp8_block" else scales[:, None]
        expected = np.broadcast_to(np.asarray(wanted.scales).reshape(-1, scales.shape[1]), (77, scales.shape[1]))[rows]
        np.testing.assert_array_equal(scales[there], expected[there])
        finite = np.repeat(np.isfinite(expected), columns // scales.shape[1], axis=1)
        wanted = wanted._replace(values=wanted.values[rows])
        np.testing.assert_array_equal(bits(found, finite)[there], bits(wanted, finite)[there])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(328, 200), (132, 260)])  # the last are padded: no multiples of 8
@pytest.mark.parametrize(
    ("format", "input_format"),
    [
        ("int4_g128", "fp8_token"),
        ("int4_g128", "fp8_tensor"),
        ("int4_g256", "int8_token"),
        ("int8_g128", "int8_token"),
        ("mxfp4", "fp8_token"),
    ],
)
@pytest.mark.parametrize("tokens", [1, 5, 40, 600])
def test_padding_changes_no_bit(tokens, format, input_format, sizes, rng):
    """Padding is computed only if it is passed as if it were weights."""
    block = 32 if format == "mxfp4" else 2
    hidden, intermediate = (-(-size // block) * block for size in sizes)
    experts = Experts.random(
        jax.random.key(rng.integers(2**31)), 8, hidden, intermediate, gate_up_order="interleaved", format=format
    )
    experts = experts.pad(*(-(-size // 256) * 256 for size in sizes)).with_inputs(input_format)
    x = jnp.asarray(rng.standard_normal((tokens, hidden)), jnp.bfloat16)
    wide = jnp.pad(x, ((0, 0), (0, experts.array_sizes[0] - hidden)))
    ids = np.argsort(rng.random((tokens, 8)))[:, :2].astype(np.int32)
    routing = Routing(ids, rng.uniform(0.1, 1, (tokens, 2)).astype(np.float32))

    def layer(x: Any, experts: Experts, backend: str) -> np.ndarray:
        poison_memory()
        return np.asarray(jmx.moe(x, routing, experts, activation=GPT_OSS, backend=backend), np.float32)

    prepared = experts.prepare(LAYOUT.name)
    found = layer(x, prepared, "mosaic_fp8")
    config = tuning.config(MosaicSm90Fp8(), Problem.of(x, 2, prepared, GPT_OSS), HOPPER).config
    with tuning.override("mosaic_fp8", config):  # on which the order of sums depends
        np.testing.assert_array_equal(found, layer(wide, prepared.as_padded(), "mosaic_fp8")[:, :hidden])
    case = Case(tokens, hidden, intermediate, dtype="bfloat16", format=format, input_format=input_format)
    assert_agrees("mosaic_fp8", case, found, layer(x, experts, "xla"))
