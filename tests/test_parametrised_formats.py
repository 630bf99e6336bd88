"""Formats of any group and block size: their names, what they mean, and which backends run them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend_cases import TOLERANCE
from dequantized import dequantized, with_odd_scales

import jmx
from jmx.explain import explain_problem
from jmx.numerics import layouts
from jmx.numerics.formats import FORMATS, decoded_alike, fp8_in_blocks, unpack
from jmx.numerics.quantization import quantize, random
from jmx.perf import shapes
from jmx.selection.backend import Reason
from jmx.selection.environment import Environment

ANY = ["int4_g16", "int4_g256_asym", "int4_g48_asym_order", "int8_g6", "int8_g512_order", "fp8_block_7x96"]
KINDS = [*ANY, "mxfp8"]
LARGER = ["int4_g256", "int4_g512_asym_order", "int8_g256_order"]  # which kernels decode


def columns_of(name: str) -> int:
    size = FORMATS[name].block_size
    return size * max(1, 192 // size)


@pytest.fixture
def key(rng):
    return jax.random.key(rng.integers(2**31))


def test_names_give_the_same_format_each_time():
    for name in ANY:
        format = FORMATS[name]
        assert format.name == name
        assert name in FORMATS
        assert name not in [*FORMATS]
        assert FORMATS[name] == jmx.FORMATS[name]
    assert FORMATS["int4_g16_asym"].arrays == ("values", "scales", "zero_points")
    assert FORMATS["int8_g48_asym_order"].arrays == ("values", "scales", "zero_points", "order")
    block = FORMATS["fp8_block_64x256"]
    assert (block.block_rows, block.block_size, block.short_block) == (64, 256, True)
    assert fp8_in_blocks(128, 128) is FORMATS["fp8_block"]


@pytest.mark.parametrize(
    "name",
    ["int4_g0", "int4_g016", "int5_g16", "int4_g16_sym", "int4_g", "fp8_block_128x128", "fp8_block_64", "int4_g1e3"],
)
def test_other_names_are_refused_with_those_that_exist(name):
    assert name not in FORMATS
    with pytest.raises(ValueError, match=rf"`format` \(='{name}'\) must be one of \['mxfp4'.*, or int4_gN or int8_gN"):
        jmx.Experts.random(jax.random.key(0), 2, 64, 64, gate_up_order=None, format=name)
    with pytest.raises(KeyError):
        FORMATS[name]


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_what_the_definition_gives(name, key, rng):
    format, columns = FORMATS[name], columns_of(name)
    q = with_odd_scales(rng, jax.tree.map(np.asarray, random(key, (2, 8, columns), format)))
    want = dequantized(unpack(q, format), format)
    np.testing.assert_allclose(jmx.dequantize(q, jnp.float32, format), want, rtol=3e-7)


@pytest.mark.parametrize("name", [name for name in KINDS if "order" not in name])
def test_each_weight_is_rounded_by_half_a_step_at_most(name, rng):
    format, columns = FORMATS[name], columns_of(name)
    x = rng.normal(size=(2, 20, columns)).astype(np.float32)
    q = jax.tree.map(np.asarray, quantize(x, format))
    got = dequantized(unpack(q, format), format)
    size, rows = format.block_size, format.block_rows
    for e, n, k in np.ndindex(x.shape):
        first = n - n % rows
        block = x[e, first : first + rows, k - k % size : k - k % size + size]
        if format.element_bits == 8 and "int" not in name:  # e4m3 keeps three bits
            step = max(abs(x[e, n, k]) / 8, np.abs(block).max() / 224 / 512) / 2 * 1.01
        else:
            asymmetric = "zero_points" in format.arrays
            whole = np.ptp(np.append(block, 0)) if asymmetric else 2 * np.abs(block).max()
            step = (
                whole / (2**format.element_bits - 1) * (1.1 if asymmetric else 0.51)
            )  # the zero point is rounded, too
            step += np.abs(block).max() / 256  # scales are bfloat16
        assert abs(got[e, n, k] - x[e, n, k]) <= step, (e, n, k)


@pytest.mark.parametrize(
    ("name", "size", "groups"), [("int4_g48", 200, 5), ("int4_g5", 36, 8), ("int8_g5", 33, 7), ("int8_g48_asym", 96, 2)]
)
def test_the_last_group_may_be_short(name, size, groups):
    experts = jmx.Experts.random(jax.random.key(0), 2, size, 96, gate_up_order=None, format=name)
    assert experts.gate_up.scales.shape == (2, 96, groups)


@pytest.mark.parametrize(("name", "size", "unit"), [("int4_g5", 35, 2), ("mxfp4", 200, 32), ("mxint4", 40, 32)])
def test_a_size_must_be_whole_bytes_and_blocks(name, size, unit):
    rule = rf"`hidden_size` \(={size}\) must be a multiple of {unit} for {name.upper()}"
    with pytest.raises(ValueError, match=rule):
        jmx.Experts.random(jax.random.key(0), 2, size, 96, gate_up_order=None, format=name)


@pytest.mark.parametrize("name", ["int4_g16", "int8_g48_asym_order", "fp8_block_96x32"])
def test_a_layer_is_what_float64_gives(name, key, rng):
    experts = jmx.Experts.random(key, 4, 96, 48, gate_up_order="concatenated", format=name, bias=False)
    x, ids = rng.normal(size=(5, 96)).astype(np.float32), rng.integers(0, 4, (5, 2)).astype(np.int32)
    weights = rng.uniform(0.1, 1, (5, 2)).astype(np.float32)
    got = jmx.moe(x, jmx.Routing(ids, weights), experts, activation="silu_and_mul", backend="xla")
    gate_up, down = (
        dequantized(unpack(jax.tree.map(np.asarray, q), experts.format), experts.format)
        for q in (experts.gate_up, experts.down)
    )
    want = np.zeros(x.shape)
    for t, s in np.ndindex(ids.shape):
        h = gate_up[ids[t, s]] @ x[t].astype(np.float64)
        gate, up = np.split(h, 2)
        want[t] += weights[t, s] * (down[ids[t, s]] @ (gate / (1 + np.exp(-gate)) * up))
    assert np.linalg.norm(got - want) < TOLERANCE["float32"] * np.linalg.norm(want)


@pytest.mark.parametrize("backend", ["cpu"])
@pytest.mark.parametrize("name", ["int4_g256", "int4_g512_asym_order"])
def test_kernels_take_groups_of_larger_powers_of_two(backend, name, key, rng):
    experts = jmx.Experts.random(key, 4, 512, 512, gate_up_order="interleaved", format=name)
    x = rng.normal(size=(6, 512)).astype(np.float32)
    routing = jmx.Routing(rng.integers(0, 4, (6, 2)).astype(np.int32), rng.uniform(0.1, 1, (6, 2)).astype(np.float32))
    want, got = (np.asarray(jmx.moe(x, routing, experts, activation=jmx.SwiGLU(), backend=b)) for b in ("xla", backend))
    assert np.linalg.norm(got - want) < TOLERANCE["float32"] * np.linalg.norm(want)


@pytest.mark.parametrize("name", ["fp8_block", "fp8_block_1x128", "fp8_block_64x128", "int4_g128"])
def test_kernels_take_rows_whose_last_block_of_fp8_is_short(name, key):
    """Whatever the number of rows that share a scale."""
    problem = dataclasses.replace(shapes.MODELS["deepseek-v3"].problem(64, "mosaic_sm90"), format=name, hidden_size=160)
    trail = {backend: no for backend, _, no in explain_problem(problem, Environment.named("h200")).trail}
    is_fp8 = name.startswith("fp8")
    assert (trail["mosaic"] is None) == is_fp8
    assert is_fp8 == (FORMATS[name].whole_size(160) == 160)
    if is_fp8:
        experts = jmx.Experts.random(key, 2, 160, 96, gate_up_order="interleaved", format=name)
        back = experts.prepare("mosaic_sm90").prepare("packed")
        jax.tree.map(np.testing.assert_array_equal, back.arrays(), experts.arrays())


@pytest.mark.parametrize("name", [*LARGER, "fp8_block_64x128"])
def test_the_layout_of_mosaic_keeps_them(name, key):
    assert decoded_alike(FORMATS[name]) in [*FORMATS]
    experts = jmx.Experts.random(key, 2, 512, 512, gate_up_order="interleaved", format=name, bias=False)
    back = experts.prepare("mosaic_sm90").prepare("packed")
    jax.tree.map(np.testing.assert_array_equal, back.arrays(), experts.arrays())


@pytest.mark.parametrize("name", ["int4_g48", "int8_g384", "fp8_block_64x96"])
def test_layouts_of_kernels_do_not_hold_other_sizes(name):
    assert decoded_alike(FORMATS[name]) == name
    assert not any(layouts.get(layout).holds(FORMATS[name]) for layout in ("mosaic_sm90", "mosaic_sm90_fp8"))


@pytest.mark.parametrize("device", ["h200", "cpu"])
@pytest.mark.parametrize("name", ["int4_g16", "int8_g16", "fp8_block_128x256"])
def test_kernels_refuse_what_they_have_no_code_for(name, device):
    problem = shapes.MODELS["deepseek-v3"].problem(64, "packed")
    for backend, _, no in explain_problem(dataclasses.replace(problem, format=name), Environment.named(device)).trail:
        assert (no is None) == (backend == "xla")
        assert no is None or no.reason in (Reason.FORMAT, Reason.PLATFORM, Reason.COMPUTE_CAPABILITY)
