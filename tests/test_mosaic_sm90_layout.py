"""The layout `mosaic_sm90`: the place of each code, by its docstring, and how the kernel's own PTX decodes it."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dequantized import KINDS
from memory import compile_here, temporary_bytes
from ptx import halves, run_ptx

import jmx
from jmx.experts.creation import ORDERS
from jmx.numerics import formats
from jmx.numerics.formats import FORMATS, BlockScaled
from jmx.numerics.layouts import WeightSpec
from jmx.pallas.mosaic_sm90 import dequantize
from jmx.pallas.mosaic_sm90.layout import LAYOUT
from jmx.pallas.sm90.tiles import TILE, num_tiles

pytestmark = pytest.mark.sampled(3)

SCALE_BYTES = 128  # of a tile of MXFP4

SPECS = [
    *(WeightSpec("down", shape, "interleaved", jmx.MXFP4) for shape in [(64, 64), (32, 32), (96, 160), (160, 96)]),
    *(
        WeightSpec("gate_up", shape, order, jmx.MXFP4)
        for order in ("interleaved", "concatenated")
        for shape in [(64, 64), (64, 32), (192, 96), (320, 160)]
    ),
    WeightSpec("gate_up", (192, 96), "interleaved_up_first", jmx.MXFP4),
    WeightSpec("gate_up", (320, 160), "concatenated_up_first", jmx.MXFP4),
    WeightSpec("gate_up", (160, 96), None, jmx.MXFP4),
]
SPEC_IDS = [f"{spec.role}-{spec.shape[0]}x{spec.shape[1]}-{spec.gate_up_order}" for spec in SPECS]

forward = jax.jit(LAYOUT.forward, static_argnums=1)
inverse = jax.jit(LAYOUT.inverse, static_argnums=1)


def packed(codes, scales):
    codes = codes.astype(np.uint8)
    return BlockScaled(jnp.asarray(codes[..., ::2] | codes[..., 1::2] << 4), jnp.asarray(scales.astype(np.uint8)))


def draw_scales(rng, *shape):
    return rng.integers(0, 255, shape, np.uint8)


def as_bits(array):
    return np.asarray(array).view(f"u{array.dtype.itemsize}")


def assert_same(a, b):
    for x, y in zip(formats.pack(a), formats.pack(b), strict=True):
        if x is None or y is None:
            assert x is y
        else:
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


def row_of(spec, tile, warp, lane, below):
    """The weight's row that a thread holds, as the docstring has it; one past the end is padding."""
    if spec.role == "down" or spec.gate_up_order is None:
        return 64 * tile + 16 * warp + lane // 4 + 8 * below
    half = spec.shape[0] // 2
    nth = 32 * tile + 8 * warp + lane // 4  # gate above, up below
    if nth >= half:
        return spec.shape[0]
    if spec.gate_up_order.endswith("up_first"):
        below = 1 - below
    return 2 * nth + below if spec.gate_up_order.startswith("interleaved") else half * below + nth


# How the kernel's PTX decodes it


def dequantized(words, pair, factors):
    """Pair 0 to 7 of two words, (..., 2) in uint32, as the kernel makes it of them."""
    first, second = words[..., 0], words[..., 1]
    source = (first, second, run_ptx(dequantize._MIX, first, second), run_ptx(dequantize._MIX, second, first))[
        pair // 2
    ]
    return halves(run_ptx(dequantize._MULTIPLY, run_ptx(dequantize._E2M1[pair], source), factors))


def multiplier(codes, byte, shift):
    """What byte `byte` of the words `codes` becomes, in both halves of a word, where scales are lowered by `shift`."""
    text = dequantize._EXPONENT.format(select=0x4040 + 0x101 * byte)
    return run_ptx(text, codes, (126 - np.asarray(shift, np.int64)) * 0x00800080 & 0xFFFFFFFF)


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_IDS)
def test_each_thread_finds_its_codes_and_scales_where_the_docstring_says(spec, rng):
    """From bytes alone, thread by thread, through the kernel's PTX: every code of the weight, each once."""
    rows, columns = spec.shape
    codes, scales = rng.integers(0, 16, (1, rows, columns)), draw_scales(rng, 1, rows, columns // 32)
    held = forward(packed(codes, scales), spec)
    row_tiles, column_tiles = num_tiles(spec)
    words = np.asarray(held.values).reshape(row_tiles, column_tiles, 128, 16).view("<u4")
    chunks = np.asarray(held.scales)[0]
    assert chunks.shape == (row_tiles, column_tiles + 1, SCALE_BYTES)
    # With padding, by row and column; past the end of the weight a row is the last one here.
    padded_codes = np.zeros((rows + 1, column_tiles * 64), np.uint8)
    padded_codes[:rows, :columns] = codes[0]
    padded_scales = np.full((rows + 1, column_tiles * 2), 127)
    padded_scales[:rows, : columns // 32] = scales[0]
    elements = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    seen = np.zeros(padded_codes.shape, int)
    one = np.full(words.shape[:2], 0x3F803F80, np.uint32)
    for thread, piece, pair in np.ndindex(128, 4, 4):
        warp, lane = divmod(thread, 32)
        eight, below = divmod(pair, 2)
        two = words[:, :, thread, piece // 2 * 2 : piece // 2 * 2 + 2]
        values = dequantized(two, piece % 2 * 4 + pair, one) * 2.0**126
        row = np.array([min(rows, row_of(spec, i, warp, lane, below)) for i in range(row_tiles)])[:, None, None]
        column = 64 * np.arange(column_tiles)[:, None] + 16 * piece + 2 * (lane % 4) + 8 * eight + np.arange(2)
        expected = elements[padded_codes[row, column]]
        np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(np.signbit(values), np.signbit(expected))
        byte = 4 * (thread // 4) + 2 * below + piece // 2
        np.testing.assert_array_equal(chunks[:, :-1, byte], padded_scales[row, column // 32][:, :, 0])
        seen[row, column] += 1
    assert (seen[:rows] == 1).all()


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_IDS)
def test_every_code_at_every_position_comes_back(spec, rng):
    position = np.arange(np.prod(spec.shape)).reshape(spec.shape)
    codes = (position + np.arange(16)[:, None, None]) % 16  # 16 experts: each position has each code once
    q = packed(codes, draw_scales(rng, 16, spec.shape[0], spec.shape[1] // 32))
    assert_same(inverse(forward(q, spec), spec), q)


@pytest.mark.parametrize("name", [name for name in KINDS if not FORMATS[name].is_float])
def test_every_format_comes_back(name):
    """Whatever the bytes: zero points that do not fit their elements, orders without a pattern, codes of NaN (but no
    NaN in scales of 16 and 32 bits, whose payload XLA need not keep)."""
    format = FORMATS[name]
    for role, shape, order in (("down", (96, 384), None), ("gate_up", (320, 256), "interleaved")):
        spec = WeightSpec(role, shape, order, format)
        rng = np.random.default_rng(1)

        def drawn(array, rng=rng):
            bits = np.frombuffer(rng.bytes(array.size * array.dtype.itemsize), array.dtype)
            if jnp.issubdtype(array.dtype, jnp.floating):
                bits = np.where(np.isfinite(bits), bits, np.ones((), array.dtype))
            return jnp.asarray(bits.reshape(array.shape))

        q = jax.tree.map(drawn, format.abstract((2, *shape), packed=True))
        if q.order is not None:
            q = q._replace(
                order=jnp.asarray(rng.permuted(np.tile(np.arange(shape[1], dtype=np.int32), (2, 1)), axis=1))
            )
        back = jax.jit(lambda q, spec: LAYOUT.inverse(LAYOUT.forward(q, spec), spec), static_argnums=1)(q, spec)
        assert_same(jax.tree.map(as_bits, formats.pack(back)), jax.tree.map(as_bits, q))


def test_every_scale_code_comes_back():
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None, None], (256, 64, 2))  # NaN's, too
    q = packed(np.zeros((256, 64, 64)), scales)
    spec = SPECS[0]
    held = forward(q, spec)
    assert_same(inverse(held, spec), q)
    np.testing.assert_array_equal(held.scales[:, :, -1], np.maximum(scales[:, :1, :1] - np.int32(128), 0) + [0] * 128)


@pytest.mark.parametrize("spec", SPECS, ids=SPEC_IDS)
def test_the_shift_is_that_of_the_largest_scale_in_a_row_of_tiles(spec, rng):
    scales = rng.integers(100, 200, (3, spec.shape[0], spec.shape[1] // 32))
    scales[0], scales[1, -1, -1] = 128, 254
    shifts = np.asarray(forward(packed(np.zeros((3, *spec.shape)), scales), spec).scales)[:, :, -1]
    largest = np.full(shifts.shape[:2], 127)
    for tile, warp, lane, below in np.ndindex(shifts.shape[1], 4, 32, 2):
        row = row_of(spec, tile, warp, lane, below)
        if row < spec.shape[0]:
            largest[:, tile] = np.maximum(largest[:, tile], scales[:, row].max(axis=-1))
    np.testing.assert_array_equal(shifts, np.repeat(np.maximum(largest - 128, 0)[..., None], SCALE_BYTES, axis=-1))
    assert shifts.max() == 126


def test_every_code_times_every_scale_at_every_shift_is_exact_or_below_what_bfloat16_holds():
    """All that a thread may meet: 16 codes by 255 scales by 127 shifts, at each byte and each pair of two words."""
    scale, shift = (array.reshape(-1) for array in np.mgrid[:255, :127])
    meets = scale - shift <= 128  # the layout sees to it
    scale, shift = scale[meets], shift[meets]
    holds = scale - shift >= -5  # 0.5 times the scale is 2^-133, the least that there is
    codes = np.arange(16, dtype=np.uint8)
    elements = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    # Two words of 16 codes, as a tile of two slices has them: the code and, in the other halves and pairs, others.
    spec = SPECS[0]
    tile = (np.arange(16)[:, None, None] + np.zeros((64, 64), int) + np.arange(64)) % 16
    words = np.asarray(forward(packed(tile, np.full((16, 64, 2), 127)), spec).values).reshape(16, 128, 16).view("<u4")
    for byte in range(4):
        others = np.uint32(0xA5C3F00F) & ~np.uint32(0xFF << 8 * byte)
        factors = multiplier(others | scale.astype(np.uint32) << 8 * byte, byte, shift)
        assert (factors & 0xFFFF == factors >> 16).all()
        for code in codes:
            for pair in range(8) if byte == 0 else (byte,):
                two = np.broadcast_to(words[code, 0, :2], (*factors.shape, 2))
                got = dequantized(two, pair, factors)
                for half in range(2):
                    element = elements[tile[code, 0, half + 8 * (pair // 2 % 2) + 16 * (pair // 4)]]
                    value = element * 2.0 ** (scale - 127 - shift)
                    error = np.abs(got[..., half] - value)
                    assert not error[holds].any()
                    assert (error <= 2.0**-133).all()


# As weights of a model


def draw_experts(rng, num_experts, hidden, intermediate, order="interleaved"):
    key = jax.random.key(int(rng.integers(2**31)))
    return jmx.Experts.random(key, num_experts, hidden, intermediate, gate_up_order=order)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "order"),
    [(64, 64, "interleaved"), (96, 160, "concatenated"), (160, 32, "interleaved"), (288, 96, None)],
)
def test_one_expert_taken_and_all_of_a_stack(hidden, intermediate, order, rng):
    layers = [draw_experts(rng, 5, hidden, intermediate, order) for _ in range(2)]
    stack = jmx.Experts.stack([experts.prepare(LAYOUT.name) for experts in layers])
    again = jmx.Experts.stack(layers).prepare(LAYOUT.name)
    for a, b in zip(jax.tree.leaves(stack), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    for role in ("gate_up", "down"):
        expected = getattr(layers[1], role)
        taken = jax.jit(lambda stack, i, role=role: stack.layer(1).take(role, i))(stack, jnp.int32(3))
        for a, b in zip(taken[:2], expected[:2], strict=True):
            np.testing.assert_array_equal(a, b[3])
        assert_same(getattr(stack.canonical(), role), getattr(jmx.Experts.stack(layers), role))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["int4_g32_order", "int8_g64_asym_order"])
def test_rows_of_gate_up_lie_in_the_order_of_the_columns_of_down(name, order, rng):
    key = jax.random.key(int(rng.integers(2**31)))
    experts = jmx.Experts.random(key, 3, 128, 192, gate_up_order=order, format=FORMATS[name])
    places = rng.permuted(np.tile(np.arange(192, dtype=np.int32), (3, 1)), axis=1)
    experts = dataclasses.replace(experts, down=experts.down._replace(order=jnp.asarray(places)))
    moved = experts.prepare(LAYOUT.name)
    as_they_lie = formats.pack(LAYOUT.inverse(moved.gate_up, moved.spec("gate_up")))
    for expert, at in enumerate(places):
        rows = {
            "interleaved": np.stack([2 * at, 2 * at + 1], axis=1).ravel(),
            "concatenated": np.concatenate([at, at + 192]),
            None: at,
        }[order and order.removesuffix("_up_first")]
        np.testing.assert_array_equal(as_they_lie.values[expert], experts.gate_up.values[expert][rows])
        np.testing.assert_array_equal(as_they_lie.scales[expert], experts.gate_up.scales[expert][rows])
    back, chosen = moved.prepare("packed"), jnp.array([[2], [0]])
    for role in ("gate_up", "down"):
        expected = getattr(experts, role)
        assert_same(jax.tree.map(as_bits, getattr(back, role)), jax.tree.map(as_bits, expected))
        taken = jax.jit(lambda experts, i, role=role: experts.take(role, i))(moved, chosen)
        expected = jax.tree.map(lambda array: array[chosen], expected)
        assert_same(jax.tree.map(as_bits, taken), jax.tree.map(as_bits, expected))


def test_preparing_may_donate(rng):
    experts = draw_experts(rng, 3, 96, 160)
    expected = jax.tree.map(np.array, experts)
    moved = experts.prepare(LAYOUT.name, donate=True)
    assert all(array.is_deleted() for array in jax.tree.leaves((experts.gate_up, experts.down)))
    back = moved.prepare("packed", donate=True)
    assert all(array.is_deleted() for array in jax.tree.leaves((moved.gate_up, moved.down)))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, back), expected)


@pytest.mark.parametrize("target", [LAYOUT.name, "packed"])
def test_preparing_holds_one_expert_in_between(target):
    """Beside old and new weights: temporaries of an expert or two, however many there are."""
    size = 512

    def temporaries(num_experts):
        key = jax.random.key(0)
        source = "packed" if target == LAYOUT.name else LAYOUT.name
        experts = jax.eval_shape(
            lambda: jmx.Experts.random(key, num_experts, size, size, gate_up_order="interleaved").prepare(source)
        )
        return temporary_bytes(compile_here(lambda experts: experts.prepare(target).gate_up, experts))

    few, many = temporaries(8), temporaries(64)
    assert many - few < 64 * 8  # bytes
    assert many < 24 * size * size  # an expert's codes, a byte each, are 2 * size * size


@pytest.mark.parametrize(
    ("hidden", "intermediate"),
    [(2880, 2880), (7168, 2048), (4096, 14336), (2048, 768), (96, 160)],
)
@pytest.mark.parametrize("order", ["interleaved", None])
def test_it_takes_the_bytes_of_a_checkpoint_and_its_padding(hidden, intermediate, order):
    experts = jax.eval_shape(
        lambda: jmx.Experts.random(jax.random.key(0), 2, hidden, intermediate, gate_up_order=order, bias=False)
    )
    moved = jax.eval_shape(lambda experts: experts.prepare(LAYOUT.name), experts)
    for role in ("gate_up", "down"):
        row_tiles, column_tiles = num_tiles(experts.spec(role))
        padded = 2 * jmx.MXFP4.bytes((row_tiles * TILE, column_tiles * TILE))
        bytes_held = sum(array.size for array in jax.tree.leaves(getattr(moved, role)))
        assert padded < bytes_held <= padded + 2 * row_tiles * SCALE_BYTES
        if hidden >= 1024:
            checkpoint = sum(array.size for array in jax.tree.leaves(getattr(experts, role)))
            assert bytes_held <= 1.01 * checkpoint
