"""The layouts for Blackwell: against FlashInfer's own on a CPU, and the place of each byte, by their docstring."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from memory import compile_here, temporary_bytes

import jmx
from jmx import backends
from jmx.numerics import blackwell_layouts as blackwell
from jmx.numerics import formats
from jmx.numerics.blackwell_layouts import ARRANGEMENTS, CUTLASS, TRTLLM, TRTLLM_VLLM
from jmx.numerics.formats import FORMATS, BlockScaled
from jmx.numerics.gate_up import GATE_UP_ORDERS
from jmx.numerics.layouts import LAYOUTS, WeightSpec
from jmx.numerics.mxfp8 import quantize
from jmx.selection.environment import known_devices

pytestmark = pytest.mark.sampled(3)

GOLDEN = np.load(Path(__file__).parent / "data" / "blackwell.npz")  # see data/make_blackwell.py
INT4_G32 = FORMATS["int4_g32"]
# Each arrangement with each of its formats; and FlashInfer's results, by the prefixes of what was given and made.
CASES = [(arrangement, FORMATS[name]) for arrangement in ARRANGEMENTS for name in arrangement.formats]
GOLDENS = [
    (CUTLASS, jmx.MXFP4, "", "cutlass_"),
    (TRTLLM, jmx.MXFP4, "", "trtllm_"),
    (TRTLLM_VLLM, jmx.MXFP4, "", "trtllm_vllm_"),
    (CUTLASS, jmx.NVFP4, "nvfp4_", "nvfp4_cutlass_"),
    (TRTLLM, jmx.NVFP4, "nvfp4_", "nvfp4_trtllm_"),
    (TRTLLM, jmx.MXINT4, "int4_", "int4_trtllm_"),
    (TRTLLM, INT4_G32, "int4_", "int4_trtllm_"),
]
ROLES = ("gate_up", "down")
SHAPES = [
    *(("down", shape, "concatenated") for shape in [(32, 32), (128, 128), (160, 288), (544, 96)]),
    *(("gate_up", shape, "interleaved") for shape in [(64, 32), (256, 512), (320, 544)]),
    *(("gate_up", shape, "concatenated") for shape in [(64, 32), (256, 512), (320, 544)]),
    *(("gate_up", (320, 544), f"{order}_up_first") for order in ("interleaved", "concatenated")),
    *(("gate_up", shape, None) for shape in [(32, 64), (160, 96)]),
]


def named(case):
    return getattr(case, "name", None)


def draw(rng, spec, *lead):
    """Packed numpy weight with every code, and every scale but 1.0, which is the padding's, and NaN."""
    rows, columns = spec.shape
    shape = (*lead, rows, columns // spec.format.block_size)
    values = rng.integers(0, 256, (*lead, rows, columns // 2), np.uint8)
    if spec.format.element_dtype == jnp.int4:
        return BlockScaled(values, (1 + rng.uniform(0.01, 3, shape)).astype(jnp.bfloat16))
    one = formats.one(spec.format, np.dtype(np.uint8))
    scales = rng.integers(0, 254 if spec.format == jmx.MXFP4 else 0x7E, shape, np.uint8)
    global_scales = rng.uniform(0.1, 3, (*lead, rows)).astype(np.float32) if spec.format == jmx.NVFP4 else None
    return BlockScaled(values, scales + (scales >= one).astype(np.uint8), global_scales)


def multiples(arrangement, spec):
    """What rows, or each half of them, and columns are padded to, as the page says."""
    if spec.format.element_dtype == jnp.int4 or arrangement is TRTLLM_VLLM:
        return 256, 256
    return 128, 512 if (arrangement, spec.role, spec.format) == (TRTLLM, "gate_up", jmx.MXFP4) else 128


def logical_row(arrangement, spec, row):
    """The logical row that is stored in `row` of one expert's weight, or None for padding."""
    alternate = arrangement is not CUTLASS
    if alternate:
        block, place = divmod(row, 32)
        row = 32 * block + 4 * (place % 8) + place // 8
    if spec.role == "down" or spec.gate_up_order is None:
        return row if row < spec.shape[0] else None
    half, multiple = spec.shape[0] // 2, multiples(arrangement, spec)[0]
    whole = -(-half // multiple) * multiple
    nth, is_gate = (row // 2, row % 2) if alternate else (row % whole, row // whole)
    if nth >= half:
        return None
    second = is_gate if spec.gate_up_order.endswith("up_first") else 1 - is_gate
    return 2 * nth + second if spec.gate_up_order.startswith("interleaved") else half * second + nth


@pytest.mark.parametrize(("arrangement", "format", "given", "made"), GOLDENS, ids=named)
@pytest.mark.parametrize("role", ROLES)
def test_the_bytes_are_those_of_flashinfer(arrangement, format, given, made, role):
    values, scales = (GOLDEN[f"{given}{role}_{name}"] for name in ("codes", "scales"))
    scales = scales.view(jnp.bfloat16) if scales.dtype == np.int16 else scales
    global_scales = np.ones(len(values), np.float32) if format == jmx.NVFP4 else None
    spec = WeightSpec(role, (len(values), 2 * values.shape[1]), "interleaved", format)
    found = arrangement.forward(jax.tree.map(jnp.asarray, BlockScaled(values, scales, global_scales)), spec)
    np.testing.assert_array_equal(found.values, GOLDEN[f"{made}{role}_codes"])
    bits = np.asarray(found.scales).view(GOLDEN[f"{made}{role}_scales"].dtype)
    np.testing.assert_array_equal(bits.ravel(), GOLDEN[f"{made}{role}_scales"])


@pytest.mark.parametrize("role", ROLES)
def test_biases_lie_as_flashinfer_puts_them(role):
    bias = GOLDEN[f"{role}_bias"]
    spec = WeightSpec(role, (len(bias), 160 if role == "gate_up" else 96), "interleaved", jmx.MXFP4)
    np.testing.assert_array_equal(TRTLLM.bias(jnp.asarray(bias), spec), GOLDEN[f"trtllm_{role}_bias"])


def test_scales_of_activations_lie_as_flashinfer_puts_them():
    scales = jax.lax.bitcast_convert_type(quantize(GOLDEN["x"]).scales, jnp.uint8)
    np.testing.assert_array_equal(blackwell.tile_scales(scales).ravel(), GOLDEN["mxfp8_tiled_scales"])


@pytest.mark.parametrize(("arrangement", "format"), CASES, ids=named)
@pytest.mark.parametrize(("role", "shape", "order"), SHAPES)
def test_where_each_byte_is(rng, arrangement, format, role, shape, order):
    spec, block = WeightSpec(role, shape, order, format), format.block_size
    q = draw(rng, spec)
    bias = rng.standard_normal(shape[0]).astype(np.float32)
    made, moved_bias = arrangement.forward(q, spec), arrangement.bias(jnp.asarray(bias), spec)
    rows, columns = arrangement.shape(spec)
    halves = 2 if role == "gate_up" and order else 1
    row_multiple, column_multiple = multiples(arrangement, spec)
    assert rows == halves * -(-shape[0] // halves // row_multiple) * row_multiple
    assert columns == -(-shape[1] // column_multiple) * column_multiple
    assert moved_bias.shape == (rows,)
    assert made.scales.size == rows * columns // block
    one = formats.one(format, q.scales.dtype)
    values, scales = np.zeros((rows, columns // 2), np.uint8), np.full((rows, columns // block), one, q.scales.dtype)
    flat, seen = {}, []
    for row in range(rows):
        source = logical_row(arrangement, spec, row)
        if source is not None:
            seen.append(source)
            values[row, : shape[1] // 2], scales[row, : shape[1] // block] = q.values[source], q.scales[source]
        assert moved_bias[row] == (0 if source is None else bias[source])
        for group in range(columns // block):
            tile = row // 128 * (columns // block // 4) + group // 4
            flat[512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + group % 4] = scales[row, group]
    assert sorted(seen) == [*range(shape[0])]
    if format.element_dtype == jnp.int4:
        values = np.stack([values[:, 128 * i : 128 * (i + 1)] for i in range(columns // 256)])
    np.testing.assert_array_equal(made.values, values)
    np.testing.assert_array_equal(np.asarray(made.scales).ravel(), [flat[i] for i in range(made.scales.size)])
    assert (made.global_scales is None) == (q.global_scales is None)
    if q.global_scales is not None:
        np.testing.assert_array_equal(made.global_scales, q.global_scales)


@pytest.mark.parametrize(("arrangement", "format"), CASES, ids=named)
@pytest.mark.parametrize(("role", "shape", "order"), SHAPES)
def test_inverse_and_take_undo_it(rng, arrangement, format, role, shape, order):
    spec = WeightSpec(role, shape, order, format)
    q = draw(rng, spec, 2, 3)
    moved = jax.jit(arrangement.forward, static_argnums=1)(jax.tree.map(jnp.asarray, q), spec)
    back = formats.pack(jax.jit(arrangement.inverse, static_argnums=1)(moved, spec))
    one = jax.jit(lambda held, e: arrangement.take(held, spec, (jnp.int32(1), e)))(moved, jnp.array([2, 0]))
    for got, taken, expected in zip(back[:3], one[:3], q[:3], strict=True):
        if expected is None:
            assert got is taken is None
            continue
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(taken, expected[1, [2, 0]])


def test_sizes_of_gpt_oss():
    """2880 becomes 2944, a multiple of 128, but 3072 where TensorRT-LLM wants one of 512, or vLLM one of 256."""
    gate_up = WeightSpec("gate_up", (5760, 2880), "interleaved", jmx.MXFP4)
    down = WeightSpec("down", (2880, 2880), "interleaved", jmx.MXFP4)
    assert [CUTLASS.shape(spec) for spec in (gate_up, down)] == [(5888, 2944), (2944, 2944)]
    assert [TRTLLM.shape(spec) for spec in (gate_up, down)] == [(5888, 3072), (2944, 2944)]
    assert [TRTLLM_VLLM.shape(spec) for spec in (gate_up, down)] == [(6144, 3072), (3072, 3072)]


@pytest.mark.parametrize(("arrangement", "format"), CASES, ids=named)
@pytest.mark.parametrize("order", GATE_UP_ORDERS)
def test_converting_all_experts_at_once_holds_no_weight_in_between(arrangement, format, order):
    """Scales, a ninth of a weight or less, may be held once more."""
    spec, layout = WeightSpec("gate_up", (1024, 1024), order, format), LAYOUTS[arrangement.name]
    one = format.abstract(spec.shape, packed=True)
    packed = jax.tree.map(lambda array: jax.ShapeDtypeStruct((16, *array.shape), array.dtype), one)
    held = jax.eval_shape(lambda q: layout.forward(q, spec), packed)
    for convert, given in (
        (lambda q: layout.forward(q, spec), packed),
        (lambda q: formats.pack(layout.inverse(q, spec)), held),
    ):
        assert temporary_bytes(compile_here(convert, given)) < 0.15 * 16 * format.bytes(spec.shape)


def test_they_are_registered_and_no_device_gets_them_unasked():
    assert [LAYOUTS[layout.name] for layout in blackwell.LAYOUTS] == [*blackwell.LAYOUTS]
    assert [(layout.name, layout.formats) for layout in blackwell.LAYOUTS] == [
        (a.name, a.formats) for a in ARRANGEMENTS
    ]
    for environment in known_devices().values():
        assert backends.resolve_layout("auto", environment) in ("packed", "mosaic_sm90")
