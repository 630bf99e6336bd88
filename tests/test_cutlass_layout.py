"""The layout `cutlass_sm90` against FlashInfer's own interleaving: stated in numpy, bit by bit, and run on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmx
from jmx.experts.creation import ORDERS
from jmx.ffi.cutlass import library as cutlass_library
from jmx.ffi.cutlass.layout import LAYOUT
from jmx.numerics import formats
from jmx.numerics.formats import BlockScaled
from jmx.numerics.layouts import WeightSpec

FOUND = cutlass_library.library()

# Bits of a word of eight codes, low first, as FlashInfer's kernel moves them: from where each bit of the result comes.
# Its own masks and shifts, one line for each of the four bytes: (mask, places to the left).
MOVES = (
    (0x00000080, 24), (0x00000070, 18), (0x00000008, 12), (0x00000007, 6),
    (0x00008000, 13), (0x00007000, 7), (0x00000800, 1), (0x00000700, -5),
    (0x00800000, 2), (0x00700000, -4), (0x00080000, -10), (0x00070000, -16),
    (0x80000000, -1), (0x10000000, 1), (0x60000000, -3), (0x08000000, -13), (0x01000000, -11), (0x06000000, -15),
)  # fmt: skip


def interleaved(values):
    """One expert's bytes (N, K / 2), N % 16 = K % 64 = 0, as FlashInfer's kernel writes them: its loops, in numpy."""
    rows, size = values.shape
    out = np.zeros_like(values)
    for block in range(rows // 2):
        for part in range(size // 32):
            for lane in range(16):
                row, mma = block // 8 * 16 + block % 8, lane // 4
                column = part * 32 + mma * 8 + lane % 4
                four = [
                    values[row, column],
                    values[row + 8, column],
                    values[row, column + 4],
                    values[row + 8, column + 4],
                ]
                word = sum(int(byte) << 8 * i for i, byte in enumerate(four))
                moved = sum((word & mask) << by if by > 0 else (word & mask) >> -by for mask, by in MOVES)
                to = part * 32 + lane // 8 * 16 + lane % 4 * 4
                out[row + mma % 2 * 8, to : to + 4] = [moved >> 8 * i & 0xFF for i in range(4)]
    return out


def folded(scales):
    """One expert's scales (N, K / 32) as FlashInfer's `interleave_moe_scales_for_sm90_mixed_gemm` orders them."""
    rows, blocks = scales.shape
    out = np.zeros((rows // 64, blocks // 4, 16, 16), np.uint8)
    for row in range(rows):
        for block in range(blocks):
            out[row // 64, block // 4, row % 16, row % 64 // 16 * 4 + block % 4] = scales[row, block]
    return out


def stacked_and_padded(array, spec, size, fill):
    """Rows of up, then of gate, each padded to a multiple of 128, and columns padded to `size`."""
    if spec.role == "down" or spec.gate_up_order is None:
        halves = [array]
    elif spec.gate_up_order.startswith("interleaved"):
        halves = [array[1::2], array[0::2]]
    else:
        halves = [array[len(array) // 2 :], array[: len(array) // 2]]
    if (spec.gate_up_order or "").endswith("up_first"):
        halves = halves[::-1]
    out = []
    for half in halves:
        full = np.full((-(-len(half) // 128) * 128, size), fill, np.uint8)
        full[: len(half), : half.shape[1]] = half
        out.append(full)
    return np.concatenate(out)


def draw(rng, experts, spec):
    rows, columns = spec.shape
    values = rng.integers(0, 256, (experts, rows, columns // 2), np.uint8)
    return values, rng.integers(0, 256, (experts, rows, columns // 32), np.uint8)


SPECS = [
    WeightSpec("gate_up", (192, 64), "interleaved", jmx.MXFP4),
    WeightSpec("gate_up", (512, 160), "concatenated", jmx.MXFP4),
    WeightSpec("gate_up", (192, 64), "interleaved_up_first", jmx.MXFP4),
    WeightSpec("gate_up", (512, 160), "concatenated_up_first", jmx.MXFP4),
    WeightSpec("gate_up", (96, 288), None, jmx.MXFP4),
    WeightSpec("down", (160, 96), "interleaved", jmx.MXFP4),
    WeightSpec("down", (128, 128), None, jmx.MXFP4),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.role}-{spec.shape}-{spec.gate_up_order}")
def test_it_is_flashinfers_interleaving_of_padded_weights(rng, spec):
    values, scales = draw(rng, 2, spec)
    held = LAYOUT.forward(BlockScaled(jnp.asarray(values), jnp.asarray(scales)), spec)
    columns = -(-spec.shape[1] // 128) * 128
    for expert in range(2):
        whole = stacked_and_padded(values[expert], spec, columns // 2, 0)
        np.testing.assert_array_equal(held.values[expert], interleaved(whole))
        np.testing.assert_array_equal(
            held.scales[expert], folded(stacked_and_padded(scales[expert], spec, columns // 32, 127))
        )


def test_every_bit_of_a_word_has_one_place():
    moved = sum((0xFFFFFFFF & mask) << by if by > 0 else (0xFFFFFFFF & mask) >> -by for mask, by in MOVES)
    assert sum(mask for mask, _ in MOVES) == moved == 0xFFFFFFFF


def test_a_mask_of_bfloat16_leaves_three_of_four_codes():
    """Its purpose: sign, exponent and mantissa are where a bfloat16 of 2^-126 times the value has them."""
    codes = np.random.default_rng(0).integers(0, 16, (16, 64), dtype=np.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    spec = WeightSpec("down", (16, 64), None, jmx.MXFP4)
    held = LAYOUT.forward(BlockScaled(jnp.asarray(packed)[None], jnp.full((1, 16, 2), 127, jnp.uint8)), spec)
    word = np.asarray(held.values)[0, 0, :4].view("<u4")[0]
    sources = [(0, 0), (8, 0), (0, 8), (8, 8)]  # row and column of each pair of codes in the first word
    for (row, column), left in zip(sources[:3], (0, 3, 6), strict=True):
        masked = np.uint32(word << np.uint32(left)) & np.uint32(0x81C081C0)
        floats = np.array([masked & 0xFFFF, masked >> 16], np.uint32) << 16
        expected = codes[row, column : column + 2].view(jnp.float4_e2m1fn).astype(np.float64)
        np.testing.assert_array_equal(floats.view(np.float32).astype(np.float64) * 2.0**126, expected)


def test_sizes_of_gpt_oss_are_padded_to_2944():
    experts = jax.eval_shape(
        lambda key: jmx.Experts.random(key, 4, 2880, 2880, gate_up_order="interleaved").prepare(LAYOUT.name),
        jax.random.key(0),
    )
    assert experts.gate_up.values.shape == (4, 5888, 1472)
    assert experts.gate_up.scales.shape == (4, 92, 23, 16, 16)
    assert experts.down.values.shape == (4, 2944, 1472)
    assert experts.canonical_shape() == (4, 5760, 2880)


@pytest.mark.parametrize("order", ORDERS)
def test_it_comes_back_bit_for_bit(rng, order):
    """With every scale code, NaN's too, and out of a stack of layers."""
    spec = WeightSpec("gate_up", (192, 96), order, jmx.MXFP4)
    values, scales = draw(rng, 6, spec)
    packed = BlockScaled(
        jnp.asarray(values).reshape(2, 3, *values.shape[1:]), jnp.asarray(scales).reshape(2, 3, *scales.shape[1:])
    )
    held = LAYOUT.forward(packed, spec)
    back = formats.pack(LAYOUT.inverse(held, spec))
    jax.tree.map(np.testing.assert_array_equal, back, packed)
    taken = jax.jit(lambda held, i: LAYOUT.take(held, spec, (i, jnp.array([2, 0]))))(held, jnp.int32(1))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[1, np.array([2, 0])]), taken, packed)


@pytest.mark.gpu
@pytest.mark.skipif(FOUND.fault is not None, reason=str(FOUND.fault))
def test_flashinfers_own_kernel_interleaves_alike(rng):
    for shape in ((256, 128), (5888, 2944), (2944, 2944)):
        values = jnp.asarray(rng.integers(0, 256, (3, shape[0], shape[1] // 2), np.uint8))
        spec = WeightSpec("down", shape, None, jmx.MXFP4)
        ones = jnp.full((3, shape[0], shape[1] // 32), 127, jnp.uint8)
        call = jax.ffi.ffi_call(cutlass_library.INTERLEAVE, jax.ShapeDtypeStruct(values.shape, jnp.uint8))
        np.testing.assert_array_equal(jax.jit(call)(values), LAYOUT.forward(BlockScaled(values, ones), spec).values)
