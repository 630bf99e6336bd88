"""The layer around the launches of `mosaic_fp8`, on any machine: its kernels are replaced by what they promise.

What a kernel leaves undefined is filled with numbers that would show: rows of no block, and columns of the padding.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend_cases import Case, assert_agrees, draw_routing, draw_weights, draw_x, reference

import jmx
from jmx.grouping import Blocks
from jmx.numerics import formats, input_formats
from jmx.numerics.formats import FORMATS, WHOLE_ROW
from jmx.numerics.gate_up import split_gate_up
from jmx.numerics.input_formats import QuantizedInputs
from jmx.numerics.layouts import WeightSpec
from jmx.numerics.quantization import dequantize
from jmx.pallas.mosaic_sm90_fp8 import kernel, quantize
from jmx.pallas.mosaic_sm90_fp8.backend import MosaicSm90Fp8
from jmx.pallas.mosaic_sm90_fp8.grouped_gemm import Product
from jmx.pallas.mosaic_sm90_fp8.layout import LAYOUT
from jmx.pallas.mosaic_sm90_fp8.rows import InputRows
from jmx.selection.problem import Problem

H200 = jmx.Environment.named("h200")
UNDEFINED = 1e9

pytestmark = [pytest.mark.costly, pytest.mark.sampled(3)]


def quantized(rows: InputRows) -> InputRows:
    """As the separate launch quantizes them: each row to all places that it has."""
    x = jnp.asarray(rows.values)[:, : rows.columns]
    static = None if rows.static_scale is None else rows.static_scale[0]
    q = input_formats.quantize(x, rows.format, static)
    scales = np.asarray(q.scales)
    scales = np.broadcast_to(scales, (len(x), 1)) if scales.ndim == 0 else scales
    shapes = rows.quantized_shapes
    values = np.full(shapes[0].shape, 1, np.float32).astype(rows.format.element_dtype)
    all_scales = np.full((rows.num_rows, scales.shape[1]), UNDEFINED, np.float32)
    places = np.arange(len(x))[:, None] if rows.row_of is None else np.asarray(rows.row_of)
    for row, its in enumerate(places):
        for place in its[its >= 0]:
            values[place] = 0  # of padding, too
            values[place, : rows.columns] = np.asarray(q.values)[row]
            all_scales[place] = scales[row]
    return rows.with_quantized(values, all_scales if rows.by_block else all_scales[:, 0])


def products(given: Sequence[Product], blocks: Blocks, *, config: Any, num_rows: int, num_cores: int) -> jax.Array:
    """As the persistent kernel computes them, one block after the other."""
    out: Any = None
    for product in given:
        rows = product.inputs
        assert rows is not None
        rows = dataclasses.replace(rows, values=out) if rows.values is None else rows
        rows = rows if rows.quantized else quantized(rows)
        out = np.full((product.split_k * num_rows, product.rows.num_outputs), UNDEFINED, np.float32)
        role = "down" if product.rows.gate_up_order is None else "gate_up"
        columns = max(rows.columns, rows.weight_columns)
        spec = WeightSpec(role, (product.rows.num_rows, columns), product.rows.gate_up_order, product.format)
        weight = np.asarray(dequantize(formats.pack(LAYOUT.inverse(product.weight, spec)), jnp.float32, product.format))
        starts = blocks.out_rows if product.inputs_are_results else blocks.x_rows
        number = int(np.max(blocks.num_blocks))
        for block in range(number):
            count, expert = int(blocks.count_of(block)), int(blocks.experts[block])
            first, to = (int(blocks.first_row(its, block)) for its in (starts, blocks.out_rows))
            scales = np.asarray(rows.scales)[first : first + count].reshape(count, -1)
            q = QuantizedInputs(np.asarray(rows.values)[first : first + count, :columns], scales)
            by_row = input_formats.FP8_BLOCK if rows.by_block else input_formats.FP8_TOKEN
            by_row = input_formats.INT8_TOKEN if rows.format == input_formats.INT8_TOKEN else by_row
            y = np.asarray(input_formats.dequantize(q, by_row)) @ weight[expert].T
            y = y if product.bias is None else y + np.asarray(product.bias[expert], np.float32)
            if product.activation is not None:
                y = product.activation(*split_gate_up(jnp.asarray(y), str(product.rows.gate_up_order)))
            for part in range(product.split_k):
                computed = product.rows.computed or product.rows.outputs
                its = out[part * num_rows + to : part * num_rows + to + count, :computed]
                its[...] = 0 if part else np.asarray(y)[:, :computed]
        out = jnp.asarray(out).astype(product.dtype)
    return out


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(kernel, "grouped_products", products)
    monkeypatch.setattr(quantize, "quantize", quantized)


@pytest.mark.parametrize("tokens", [2, 60])
@pytest.mark.parametrize("weights_on", ["output", "input"])
@pytest.mark.parametrize(
    ("format", "inputs"),
    [
        *(("fp8_tensor", "fp8_tensor"), ("mxfp4", "fp8_tensor"), ("int4_channel", "fp8_tensor")),
        *(("int4_g128", "fp8_token"), ("int4_channel", "int8_token"), ("int8_g128", "int8_token")),
        *(("int8_channel", "int8_token"), ("int4_g256", "fp8_block"), ("fp8_block", "fp8_token")),
    ],
)
def test_the_layer_is_the_reference(format, inputs, weights_on, tokens, rng):
    whole = {"hidden": 256, "intermediate": 256}  # of groups, and of blocks of inputs
    sizes: dict[str, Any] = {"hidden": 128, "intermediate": 160} if FORMATS[format].block_size == WHOLE_ROW else whole
    case = Case(tokens=tokens, num_experts=5, top_k=3, dtype="bfloat16", format=format, input_format=inputs, **sizes)
    case = dataclasses.replace(case, weights_on=weights_on, ids="anywhere", layout=LAYOUT.name)
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    nowhere = ((routing.expert_ids < 0) | (routing.expert_ids >= 5)).all(axis=1)
    x[nowhere] *= 1000  # no scale of others' may see them
    experts = weights.experts(case).with_inputs(inputs).prepare(LAYOUT.name)
    given, own = jnp.asarray(x), jmx.Routing(jnp.asarray(routing.expert_ids), jnp.asarray(routing.weights))
    problem = Problem.of(given, 3, experts, case.activation, weights_on, inputs)
    assert MosaicSm90Fp8().supports(problem, H200) is None
    y = MosaicSm90Fp8().apply(problem, given, own, experts, H200)
    assert_agrees("mosaic_fp8", case, y, reference(case, weights, x, routing))


@pytest.mark.parametrize("tokens", [2, 60])
@pytest.mark.parametrize(
    ("format", "inputs", "sizes"),
    [
        ("int4_g128", "fp8_token", {"hidden": 200, "intermediate": 72}),
        ("int4_g128", "fp8_tensor", {"hidden": 72, "intermediate": 200}),
        ("int8_channel", "int8_token", {"hidden": 132, "intermediate": 72}),  # 132 columns are padded: no eights
    ],
)
def test_padding_is_neither_read_nor_computed(format, inputs, sizes, tokens, rng):
    case = Case(tokens=tokens, num_experts=5, top_k=3, dtype="bfloat16", format=format, input_format=inputs, **sizes)
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts = weights.experts(case).pad(384, 256).with_inputs(inputs).prepare(LAYOUT.name)
    given, own = jnp.asarray(x), jmx.Routing(jnp.asarray(routing.expert_ids), jnp.asarray(routing.weights))
    problem = Problem.of(given, 3, experts, case.activation, "output", inputs)
    y = MosaicSm90Fp8().apply(problem, given, own, experts, H200)
    assert y.shape == x.shape
    assert_agrees("mosaic_fp8", case, y, reference(case, weights, x, routing))
