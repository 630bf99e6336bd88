"""The backward pass of the backend `mosaic`: around its kernels on any machine, and all of it on a Hopper GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_mosaic_sm90 as emulated
from backend_cases import NEITHER, Case, draw_routing, draw_weights, draw_x, poison_memory, suited

import jmx
from jmx import GELU, Environment, ReLU2, SiLUAndMul, SwiGLU, grouping
from jmx.backends import registered_backends
from jmx.engines.gradients import Gradients, Primals, Wanted, has_gradients
from jmx.numerics.formats import FORMATS
from jmx.numerics.gate_up import join_gate_up, split_gate_up
from jmx.pallas.mosaic_sm90 import act_order, kernel, round_rows, weight_gradients
from jmx.pallas.mosaic_sm90.backend import MosaicSm90
from jmx.pallas.mosaic_sm90.layout import LAYOUT
from jmx.selection.backend import ExpertProduct
from jmx.xla import backend as xla

HOPPER = Environment.named("h200")
SMOOTH = SwiGLU(alpha=1.702, beta=1.0)  # its derivative has no jumps, which rounded values may be beyond
# h, da, dh, and inputs that the reference does not round: each a rounding to bfloat16, and sums that cancel.
TOLERANCE = 1.2e-2
CASES = [
    *(Case(tokens=tokens, activation=SMOOTH) for tokens in (1, 9, 64)),
    Case(tokens=40),
    Case(tokens=5, ids="anywhere", top_k=4, activation=SMOOTH),
    Case(tokens=9, ids="nowhere"),
    Case(tokens=300, ids="every_third", hidden=96, intermediate=160, bias=NEITHER, order="concatenated"),
    Case(tokens=40, weights_on="input", bias=(False, True), hidden=160, activation=SMOOTH),
    Case(tokens=7, activation=GELU(approximate=False), order=None, dtype="float16"),
    Case(tokens=7, activation=ReLU2(), order=None, format="int8_channel", ids="repeated"),
    Case(tokens=40, hidden=128, format="nvfp4", activation=SiLUAndMul(), order="concatenated_up_first"),
    Case(tokens=40, hidden=128, format="int4_channel_asym", activation=SMOOTH, order="interleaved_up_first"),
    Case(tokens=40, hidden=128, intermediate=192, format="int8_channel", order="concatenated", activation=SMOOTH),
    Case(tokens=40, hidden=128, intermediate=192, format="int8_g64_asym_order", weights_on="input", activation=SMOOTH),
    Case(tokens=9, hidden=64, intermediate=192, format="int4_g64_order", order="concatenated", activation=SMOOTH),
    Case(tokens=40, format="fp8_block", activation=SMOOTH),
    Case(tokens=40, format="mxfp8", hidden=96, intermediate=160, activation=SMOOTH, order="concatenated"),
    Case(tokens=40, input_format="int8_token", format="int4_g32", hidden=128, activation=SMOOTH),
    Case(tokens=9, input_format="mxfp8", hidden=96, intermediate=160, activation=SMOOTH, weights_on="input"),
]


sort = jax.jit(grouping.many, static_argnums=(1, 2))
reference = jax.jit(xla.backward, static_argnums=(0, 3))
forward = jax.jit(xla.forward, static_argnums=0)


def drawn(case, rng, layers=None):
    """Arguments of a backward pass, without x's dtype in that of the layer's products."""
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts = weights.experts(case)
    if layers is not None:
        others = [draw_weights(rng, case).experts(case) for _ in range(layers - 1)]
        experts = jmx.Experts.stack([*others, experts]).layer(layers - 1)
    dy = jnp.asarray(rng.normal(size=x.shape), x.dtype)
    return jnp.asarray(x), jax.tree.map(jnp.asarray, routing), experts, dy


def check(case, gradients, x, routing, experts, dy, wanted=None):
    """Against the reference in float32, in which it computes with an input format at any dtype of x."""
    problem = case.problem()
    if case.input_format is None:
        x, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
        problem = dataclasses.replace(problem, dtype="float32")
    expected = reference(problem, Primals(x, routing, experts), dy, wanted or Wanted(*case.bias))
    for name, got, wanted in zip(expected._fields, gradients, expected, strict=True):
        assert (got is None) == (wanted is None), name
        if wanted is not None:
            got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
            assert got.shape == wanted.shape, name
            error, norm = np.linalg.norm(got - wanted), np.linalg.norm(wanted)
            assert error <= TOLERANCE * norm, f"{name}: relative error {error / norm:.2g}"


@pytest.mark.costly
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "layers"), [*((case, None) for case in CASES), (CASES[1], 3), (CASES[12], 3), (CASES[13], 3)], ids=str
)
def test_what_is_around_the_kernels(case, layers, rng, monkeypatch):
    monkeypatch.setattr(kernel, "one_product", emulated.one_product)
    monkeypatch.setattr(grouping, "many", sort)
    monkeypatch.setattr(act_order, "ordered_rows", emulated.ordered_rows)
    monkeypatch.setattr(round_rows, "round_rows", emulated.rounded_rows)
    dtype = "bfloat16" if case.dtype == "float32" else case.dtype
    case = dataclasses.replace(case, dtype=dtype, layout=LAYOUT.name)
    arguments = x, routing, experts, dy = drawn(case, rng, layers)
    backend, problem, primals = MosaicSm90(), case.problem(), Primals(x, routing, experts)
    gradients = backward(problem, primals, dy, case)
    assert (gradients.x.dtype, gradients.weights.dtype) == (x.dtype, routing.weights.dtype)
    check(case, gradients, *arguments)

    y, saved = backend.apply_saving(problem, x, routing, experts, HOPPER)
    assert (y.dtype, saved.dtype) == (x.dtype, jnp.float32)
    of_x = x if case.input_format else x.astype(jnp.float32)  # rows are rounded from those of x's dtype
    expected = forward(problem, of_x, routing, experts)
    assert np.linalg.norm(y.astype(jnp.float32) - expected) <= TOLERANCE * np.linalg.norm(expected)
    of_saved = backward(problem, primals._replace(saved=saved), dy, case)
    jax.tree.map(np.testing.assert_array_equal, of_saved, gradients)
    other = backward(problem, primals._replace(saved=-saved), dy, case)
    assert "nowhere" in str(case.ids) or not np.array_equal(other.x, gradients.x)  # it is not computed again


def backward(problem, primals, dy, case):
    return MosaicSm90().backward(problem, primals, HOPPER, dy, Wanted(*case.bias))


def outer(d, rows, groups, its):
    """As `float_sm90.outer.outer` says."""
    assert its.num_cores == HOPPER.core_count
    assert d.dtype == rows.dtype == jnp.bfloat16
    d, rows = (np.asarray(array, np.float32) for array in (d, rows))
    mine = [slice(int(start), int(end)) for start, end in zip(groups.starts, groups.ends, strict=True)]
    return jnp.asarray(np.stack([d[each].T @ rows[each] for each in mine]), its.dtype)


WITH_WEIGHTS = [  # of which there are gradients of weights
    Case(tokens=40, hidden=64, intermediate=128, activation=SMOOTH),
    Case(tokens=9, hidden=128, intermediate=64, activation=SMOOTH, ids="nowhere"),
    Case(tokens=40, hidden=128, intermediate=64, order="concatenated_up_first", weights_on="input", activation=SMOOTH),
    Case(tokens=300, hidden=64, intermediate=64, order=None, activation=ReLU2(), format="int8_channel", bias=NEITHER),
    Case(tokens=5, hidden=128, intermediate=64, ids="anywhere", top_k=4, format="nvfp4", activation=SiLUAndMul()),
    Case(tokens=7, hidden=128, intermediate=128, dtype="float16", format="fp8_block", activation=SMOOTH),
    Case(tokens=40, hidden=96, intermediate=160, activation=SMOOTH),
    Case(tokens=40, hidden=192, intermediate=96, order="concatenated", activation=SMOOTH),
]


@pytest.mark.costly
@pytest.mark.parametrize("case", WITH_WEIGHTS, ids=str)
def test_gradients_of_weights_around_the_kernels(case, rng, monkeypatch):
    monkeypatch.setattr(kernel, "one_product", emulated.one_product)
    monkeypatch.setattr(grouping, "many", sort)
    monkeypatch.setattr(weight_gradients, "outer", outer)
    dtype = "bfloat16" if case.dtype == "float32" else case.dtype
    case = dataclasses.replace(case, dtype=dtype, layout=LAYOUT.name)
    arguments = x, routing, experts, dy = drawn(case, rng)
    problem, backend = case.problem(), MosaicSm90()
    assert has_gradients(backend, problem, weights=True)
    both = Wanted(*case.bias)._replace(gate_up=True, down=True)
    for wanted in (both, both._replace(gate_up=False)):
        gradients = backend.backward(problem, Primals(x, routing, experts), HOPPER, dy, wanted)
        check(case, gradients, *arguments, wanted=wanted)


@pytest.mark.parametrize("change", [{"input_format": "mxfp8"}, {"backend": "triton"}])
def test_the_reference_has_the_other_gradients_of_weights(change):
    backend = {backend.name: backend for backend in registered_backends()}[change.pop("backend", "mosaic")]
    problem = dataclasses.replace(Case(hidden=128, intermediate=128).problem(), **change)
    assert not has_gradients(backend, problem, weights=True)


ALONE = [
    Case(tokens=40, hidden=96, intermediate=160),
    Case(tokens=9, hidden=128, intermediate=160, format="nvfp4", order="concatenated", ids="anywhere", top_k=4),
    Case(tokens=40, hidden=128, format="int8_channel", order="concatenated_up_first"),
    Case(tokens=40, hidden=128, format="fp8_tensor", order=None, activation=ReLU2()),
]


@pytest.mark.costly
@pytest.mark.parametrize("role", ["gate_up", "down"])
@pytest.mark.parametrize(("case", "layers"), [*((case, None) for case in ALONE), (ALONE[2], 3)], ids=str)
def test_one_product_and_its_transpose(case, layers, role, rng, monkeypatch):
    """As layers with adapters use them, against the reference's."""
    monkeypatch.setattr(kernel, "one_product", emulated.one_product)
    case = dataclasses.replace(case, dtype="bfloat16", layout=LAYOUT.name, bias=NEITHER)
    _, routing, experts, _ = drawn(case, rng, layers)
    problem, backend = case.problem(), MosaicSm90()
    sorted = grouping.sort_rows(routing.expert_ids, problem.num_experts, 8)
    assigned = np.asarray(sorted.assignment_of_row)[:, None] >= 0

    def near(got, expected):
        got, expected = (np.where(assigned, np.asarray(each, np.float64), 0) for each in (got, expected))
        assert got.shape == expected.shape
        assert np.linalg.norm(got - expected) <= TOLERANCE * np.linalg.norm(expected)

    def random(columns):
        return jnp.asarray(np.where(assigned, rng.normal(size=(assigned.size, columns)), 0), jnp.bfloat16)

    rows = random(experts.spec(role).shape[1])
    product = ExpertProduct(problem, role, sorted, experts, HOPPER)
    result = backend.product(product, rows, jnp.float32)
    expected = xla.product_of_rows(product, rows.astype(jnp.float32), jnp.float32)
    parts = (expected,)
    if role == "gate_up" and experts.gated:
        parts = split_gate_up(expected, experts.gate_up_order)
    for got, wanted in zip(backend.outputs(problem, role, result), parts, strict=True):
        near(got, wanted)

    given = random(result.shape[1])
    outputs = backend.outputs(problem, role, given)
    if role == "gate_up":  # nothing adds to the padding of tiles
        given = gate_and_up_in_tiles(outputs)
    joined = join_gate_up(*outputs, experts.gate_up_order) if len(outputs) == 2 else outputs[0]
    wanted = xla.product_of_rows(product, joined.astype(jnp.float32), jnp.float32, transposed=True)
    near(backend.transposed_product(product, given), wanted)


def gate_and_up_in_tiles(parts):
    """The inverse of `rows.gate_and_up`, with zeros in padding."""
    if len(parts) == 1:
        return parts[0]
    halves = [jnp.pad(part, ((0, 0), (0, -part.shape[1] % 64))).reshape(len(part), -1, 8) for part in parts]
    return jnp.stack(halves, axis=2).reshape(len(parts[0]), -1)


QUANTIZED = [name for name, format in FORMATS.items() if not format.is_float]
ON_A_GPU = [
    *CASES,
    *(Case(tokens=tokens, hidden=96, intermediate=160, activation=SMOOTH) for tokens in (2, 17, 2000)),
    Case(tokens=300, hidden=2880, intermediate=2880, num_experts=3),
    *(Case(tokens=40, hidden=256, intermediate=384, format=name, activation=SMOOTH) for name in QUANTIZED),
    *(Case(tokens=600, hidden=256, intermediate=384, format=name, activation=SMOOTH) for name in QUANTIZED),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_A_GPU, ids=str)
def test_gradients_on_a_gpu(case, rng):
    case = suited("mosaic", case)
    arguments = x, routing, experts, dy = drawn(case, rng)
    poison_memory()

    @jax.jit
    def gradients(x, weights, biases, dy):
        def layer(x, weights, biases):
            with_biases = dataclasses.replace(experts, gate_up_bias=biases[0], down_bias=biases[1])
            options = {"activation": case.activation, "weights_on": case.weights_on, "backend": "mosaic"}
            return jmx.moe(x, routing._replace(weights=weights), with_biases, **options)

        dx, dweights, dbiases = jax.vjp(layer, x, weights, biases)[1](dy)
        return Gradients(dx, dweights, *dbiases)

    biases = experts.gate_up_bias, experts.down_bias
    found, again = (gradients(x, routing.weights, biases, dy) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, found, again)
    check(case, found, *arguments)
