"""The layouts for Blackwell: against FlashInfer's own on a CPU, and the place of each byte, by their docstring."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from memory import compile_here, temporary_bytes

import jmx
from jmx import backends
from jmx.activations import GATE_UP_ORDERS
from jmx.ffi import blackwell_layouts as blackwell
from jmx.ffi.blackwell_layouts import CUTLASS, CUTLASS_LAYOUT, TRTLLM, TRTLLM_LAYOUT
from jmx.numerics import formats
from jmx.numerics.formats import BlockScaled
from jmx.numerics.layouts import LAYOUTS, WeightSpec
from jmx.numerics.mxfp8 import quantize
from jmx.selection.environment import known_devices

pytestmark = pytest.mark.sampled(3)

ARRANGEMENTS = [CUTLASS, TRTLLM]
NAMED = {"cutlass": CUTLASS, "trtllm": TRTLLM}
GOLDEN = np.load(Path(__file__).parent / "data" / "blackwell.npz")  # see data/make_blackwell.py
SPECS = {
    "gate_up": WeightSpec("gate_up", (192, 160), "interleaved", jmx.MXFP4),
    "down": WeightSpec("down", (160, 96), "interleaved", jmx.MXFP4),
}
SHAPES = [
    *(("down", shape, "concatenated") for shape in [(32, 32), (128, 128), (160, 288), (544, 96)]),
    *(("gate_up", shape, "interleaved") for shape in [(64, 32), (256, 512), (320, 544)]),
    *(("gate_up", shape, "concatenated") for shape in [(64, 32), (256, 512), (320, 544)]),
    *(("gate_up", shape, None) for shape in [(32, 64), (160, 96)]),
]
ONE = 127


def draw(rng, spec, *lead):
    """Packed numpy weight with every code, and every scale but 1.0, which is the padding's, and NaN."""
    rows, columns = spec.shape
    scales = rng.integers(0, 254, (*lead, rows, columns // 32), np.uint8)
    values = rng.integers(0, 256, (*lead, rows, columns // 2), np.uint8)
    return BlockScaled(values, scales + (scales >= ONE).astype(np.uint8))


def logical_row(arrangement, spec, row):
    """The logical row that is stored in `row` of one expert's weight, or None for padding."""
    if arrangement is TRTLLM:
        block, place = divmod(row, 32)
        row = 32 * block + 4 * (place % 8) + place // 8
    if spec.role == "down" or spec.gate_up_order is None:
        return row if row < spec.shape[0] else None
    half = spec.shape[0] // 2
    whole = -(-half // 128) * 128
    nth, is_gate = (row // 2, row % 2) if arrangement is TRTLLM else (row % whole, row // whole)
    if nth >= half:
        return None
    is_up = 1 - is_gate
    return 2 * nth + is_up if spec.gate_up_order == "interleaved" else half * is_up + nth


@pytest.mark.parametrize("engine", NAMED)
@pytest.mark.parametrize("role", SPECS)
def test_the_bytes_are_those_of_flashinfer(engine, role):
    given = BlockScaled(*(jnp.asarray(GOLDEN[f"{role}_{name}"]) for name in ("codes", "scales")))
    made = NAMED[engine].forward(given, SPECS[role])
    np.testing.assert_array_equal(made.values, GOLDEN[f"{engine}_{role}_codes"])
    np.testing.assert_array_equal(made.scales.ravel(), GOLDEN[f"{engine}_{role}_scales"])


@pytest.mark.parametrize("role", SPECS)
def test_biases_lie_as_flashinfer_puts_them(role):
    bias = TRTLLM.bias(jnp.asarray(GOLDEN[f"{role}_bias"]), SPECS[role])
    np.testing.assert_array_equal(bias, GOLDEN[f"trtllm_{role}_bias"])


def test_scales_of_activations_lie_as_flashinfer_puts_them():
    scales = jax.lax.bitcast_convert_type(quantize(GOLDEN["x"]).scales, jnp.uint8)
    np.testing.assert_array_equal(blackwell.tile_scales(scales).ravel(), GOLDEN["mxfp8_tiled_scales"])


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda a: a.name)
@pytest.mark.parametrize(("role", "shape", "order"), SHAPES)
def test_where_each_byte_lies(rng, arrangement, role, shape, order):
    spec = WeightSpec(role, shape, order, jmx.MXFP4)
    q = draw(rng, spec)
    bias = rng.standard_normal(shape[0]).astype(np.float32)
    made, moved_bias = arrangement.forward(q, spec), arrangement.bias(jnp.asarray(bias), spec)
    rows, columns = arrangement.shape(spec)
    halves = 2 if role == "gate_up" and order else 1
    multiple = 512 if role == "gate_up" and arrangement is TRTLLM else 128
    assert rows == halves * -(-shape[0] // halves // 128) * 128
    assert columns == -(-shape[1] // multiple) * multiple
    assert made.values.shape == (rows, columns // 2)
    assert moved_bias.shape == (rows,)
    assert made.scales.size == rows * columns // 32
    values, scales = np.zeros((rows, columns // 2), np.uint8), np.full((rows, columns // 32), ONE, np.uint8)
    flat, seen = {}, []
    for row in range(rows):
        source = logical_row(arrangement, spec, row)
        if source is not None:
            seen.append(source)
            values[row, : shape[1] // 2], scales[row, : shape[1] // 32] = q.values[source], q.scales[source]
        assert moved_bias[row] == (0 if source is None else bias[source])
        for block in range(columns // 32):
            tile = row // 128 * (columns // 128) + block // 4
            flat[512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + block % 4] = scales[row, block]
    assert sorted(seen) == [*range(shape[0])]
    np.testing.assert_array_equal(made.values, values)
    np.testing.assert_array_equal(made.scales.ravel(), [flat[i] for i in range(made.scales.size)])


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda a: a.name)
@pytest.mark.parametrize(("role", "shape", "order"), SHAPES)
def test_inverse_and_take_undo_it(rng, arrangement, role, shape, order):
    spec = WeightSpec(role, shape, order, jmx.MXFP4)
    q = draw(rng, spec, 2, 3)
    moved = jax.jit(arrangement.forward, static_argnums=1)(jax.tree.map(jnp.asarray, q), spec)
    back = formats.pack(jax.jit(arrangement.inverse, static_argnums=1)(moved, spec))
    one = jax.jit(lambda held, e: arrangement.take(held, spec, (jnp.int32(1), e)))(moved, jnp.array([2, 0]))
    for got, taken, expected in zip(back[:2], one[:2], q[:2], strict=True):
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(taken, expected[1, [2, 0]])


def test_sizes_of_gpt_oss():
    """2880 becomes 2944, a multiple of 128, but 3072 where TensorRT-LLM wants one of 512."""
    gate_up = WeightSpec("gate_up", (5760, 2880), "interleaved", jmx.MXFP4)
    down = WeightSpec("down", (2880, 2880), "interleaved", jmx.MXFP4)
    assert [CUTLASS.shape(spec) for spec in (gate_up, down)] == [(5888, 2944), (2944, 2944)]
    assert [TRTLLM.shape(spec) for spec in (gate_up, down)] == [(5888, 3072), (2944, 2944)]


@pytest.mark.parametrize("layout", [CUTLASS_LAYOUT, TRTLLM_LAYOUT], ids=lambda layout: layout.name)
@pytest.mark.parametrize("order", GATE_UP_ORDERS)
def test_converting_all_experts_at_once_holds_no_weight_in_between(layout, order):
    """Scales, a seventeenth of a weight, may be held once more."""
    spec = WeightSpec("gate_up", (1024, 1024), order, jmx.MXFP4)
    one = jmx.MXFP4.abstract(spec.shape, packed=True)
    packed = jax.tree.map(lambda array: jax.ShapeDtypeStruct((16, *array.shape), array.dtype), one)
    held = jax.eval_shape(lambda q: layout.forward(q, spec), packed)
    for convert, given in (
        (lambda q: layout.forward(q, spec), packed),
        (lambda q: formats.pack(layout.inverse(q, spec)), held),
    ):
        assert temporary_bytes(compile_here(convert, given)) < 0.1 * 16 * jmx.MXFP4.bytes(spec.shape)


def test_both_are_registered_and_no_device_gets_them_unasked():
    for layout in (CUTLASS_LAYOUT, TRTLLM_LAYOUT):
        assert LAYOUTS[layout.name] is layout
    for environment in known_devices().values():
        assert backends.resolve_layout("auto", environment) in ("packed", "mosaic_sm90")
