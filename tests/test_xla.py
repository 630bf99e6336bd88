"""What the reference backend promises beyond its results: memory that does not grow with the number of experts."""

import dataclasses
import itertools
import re
from functools import partial

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend_cases import (
    NEITHER,
    Case,
    activated,
    assert_agrees,
    assert_rejects,
    call,
    draw_routing,
    draw_weights,
    draw_x,
    reference,
)
from input_formats import worth
from memory import abstract_step, compile_here, expert_bytes, temporary_bytes

import jmx
from jmx import Environment, Problem, Reason, SwiGLU
from jmx.experts import check_sizes
from jmx.numerics import input_formats
from jmx.numerics.formats import FORMATS
from jmx.selection.problem import resolve_input_format
from jmx.xla import backend as xla
from jmx.xla.backend import Xla

pytestmark = [pytest.mark.costly, pytest.mark.sampled(3)]

SIZE = 1024
# One token of stacked arrays is all that XLA can slice without a copy; see `Experts.layer`.
STEPS = [
    *((form, tokens) for form in ("forward", "backward", "views") for tokens in (1, 64, 4096)),
    *(("backward views", tokens) for tokens in (1, 4096)),
    ("arrays", 1),
]
ON_AN_H200 = [(form, tokens) for form in ("forward", "backward", "views") for tokens in (1, 64, 4096)] + [("arrays", 1)]
ON_AN_H200 = [step for step in ON_AN_H200 if step not in (("views", 4096), ("backward", 64))]  # each takes seconds


def assert_memory_does_not_grow_with_experts(compile_step, form, tokens, layout, workspace=0):
    few, many = (
        temporary_bytes(compile_step(step, *arguments))
        for step, arguments in (abstract_step(tokens, n, SIZE, layout, form) for n in (8, 128))
    )
    expert = expert_bytes(SIZE)
    # Not to the byte: blocks are chosen by an expert's usual share of the tokens.
    assert many - few < expert + workspace
    activations = tokens * SIZE * 4
    assert max(few, many) < 14 * expert + 4 * activations + workspace


@pytest.mark.parametrize(("form", "tokens"), STEPS)
def test_memory_does_not_grow_with_experts(form, tokens):
    # A GPU's autotuner may give cuBLAS a product, and 32 MiB of workspace with it, in one program and not in another.
    workspace = 32 << 20 if Environment.probe().platform == "gpu" else 0
    with jmx.use_backend("xla"):
        assert_memory_does_not_grow_with_experts(compile_here, form, tokens, "packed", workspace)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("form", "tokens", "layout"), [*((*step, "packed") for step in ON_AN_H200), ("arrays", 1, "canonical")]
)
def test_memory_does_not_grow_with_experts_on_an_h200(form, tokens, layout):
    with jmx.use_backend("xla"):
        assert_memory_does_not_grow_with_experts(aot.compile_for_h200, form, tokens, layout)


@pytest.mark.parametrize("tokens", [1, 64])
def test_canonical_weights_are_not_widened(tokens):
    """On a CPU, packing copies them once, in 4 bits: less than a quarter of their size in bfloat16."""
    step, arguments = abstract_step(tokens, 128, SIZE, "canonical", "forward")
    assert temporary_bytes(compile_here(step, *arguments)) < 128 * expert_bytes(SIZE) * 0.35 + 14 * expert_bytes(SIZE)


def problem(dtype):
    experts = abstract_step(4, 8, 64, "packed", "forward")[1][3]
    x = jax.ShapeDtypeStruct((4, 64), dtype)
    return Problem.of(x, 2, experts, SwiGLU())


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_dtypes_that_are_refused(dtype):
    assert_rejects(Xla(), problem(dtype), Environment.named("cpu"), Reason.DTYPE, jnp.dtype(dtype).name)


@pytest.mark.parametrize("device", ["cpu", "a100", "h200", "b200"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_it_runs_everywhere(device, dtype):
    assert jmx.select(problem(dtype), Environment.named(device), None, [Xla()]).backend == Xla()


# Input formats


BY_TOKEN = [name for name, format in input_formats.INPUT_FORMATS.items() if format.by_token]


def rounded(a, name, scale):
    return worth(np.asarray(a, np.float32), input_formats.INPUT_FORMATS[name], scale)


def nearly(rng, a, error):
    """`a`, and 16 of the ways that float32 sums may leave it, a row each."""
    signs = np.concatenate([np.zeros((1, a.size)), rng.choice([-1, 1], (16, a.size))])
    return a + max(3e-6 * np.abs(a).max(), error) * signs


def static_scales(name):
    """Under which a few elements saturate."""
    format = input_formats.INPUT_FORMATS[name]
    return [jnp.float32(2.5 / format.largest) for _ in "12"] if format.static else [None, None]


def assert_inputs_are_rounded(rng, name, **sizes):
    """Before each product, as numpy has it. What the layer then gives, and what it gives without."""
    case = Case(top_k=2, num_experts=4, bias=NEITHER, **sizes)
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    scales = static_scales(name)
    experts = weights.experts(case)
    gate_up, down = weights.floats(case)
    expected, bound = np.zeros(x.shape), np.zeros(x.shape)
    for token, (ids, shares) in enumerate(zip(*routing, strict=True)):
        for expert, share in zip(ids, shares, strict=True):
            given = rounded(x[token], name, scales[0])
            both = gate_up[expert] @ given
            a = activated(case, both)
            # Of the activation, whose slope is at most that in gate and in up. It may be small beside its terms.
            error = 2.0**-24 * (np.abs(gate_up[expert]) @ np.abs(given)).max() * (np.abs(both).max() + 2)
            h, *others = rounded(nearly(rng, a, error), name, scales[1])
            expected[token] += share * (down[expert] @ h)
            # A value half way between two neighbors may round to either.
            bound[token] += np.abs(share * down[expert]) @ (np.abs(others - h).max(axis=0) + 1e-5 * np.abs(h))

    def layer(experts, **options):
        y = jmx.moe(x, routing, experts, activation=case.activation, backend="xla", **options)
        return np.asarray(y, np.float64)

    y = layer(experts.with_inputs(name, *scales))
    np.testing.assert_array_less(np.abs(y - expected), bound + 1e-30)
    if scales[0] is None:
        np.testing.assert_array_equal(layer(experts, input_format=name), y)
    return y, layer(experts)


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("name", BY_TOKEN)
def test_inputs_are_rounded_before_each_product(name, tokens, rng):
    y, plain = assert_inputs_are_rounded(rng, name, tokens=tokens, hidden=128, intermediate=128, format="nvfp4")
    assert np.linalg.norm(y - plain) > 5e-3 * np.linalg.norm(y)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("weights_on", ["output", "input"])
@pytest.mark.parametrize("ids", ["anywhere", "one_expert"])
def test_one_scale_for_all_tokens(tokens, weights_on, ids, rng):
    """Of those that experts multiply, and no others; a token's result then depends on them."""
    sizes = {"tokens": tokens, "hidden": 96, "intermediate": 160, "num_experts": 5, "format": "fp8_tensor"}
    case = Case(top_k=3, input_format="fp8_tensor", weights_on=weights_on, ids=ids, **sizes)
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    x *= np.exp2(rng.integers(-3, 3, (tokens, 1)))
    nowhere = ((routing.expert_ids < 0) | (routing.expert_ids >= 5)).all(axis=1)
    x[nowhere] *= 1e6
    y = call("xla", case, weights.experts(case), x, routing)
    assert_agrees("xla", case, y, reference(case, weights, x, routing))
    x[np.argmax(~nowhere)] *= np.where(nowhere.all(), 1, np.nan)
    assert np.isnan(call("xla", case, weights.experts(case), x, routing))[~nowhere].all()


def test_no_split_has_one_scale_for_all_tokens(rng):
    case = Case(num_experts=4)
    experts, x, routing = draw_weights(rng, case).experts(case), draw_x(rng, case), draw_routing(rng, case)
    split = jmx.Split(expert="ep", mesh=jax.make_mesh((1,), ("ep",), devices=jax.devices()[:1]))
    for given, asked in ((experts, "fp8_tensor"), (experts.with_inputs("fp8_tensor"), None)):
        with pytest.raises(ValueError, match=r"`input_format` \(='fp8_tensor'\) must be one of .* several devices"):
            jmx.moe(jnp.asarray(x), routing, given, activation=case.activation, split=split, input_format=asked)


def test_gradients_pass_the_rounding_to_one_scale(rng):
    """As those of a layer with static scales of the same size."""
    case = Case(tokens=20, hidden=96, intermediate=64, input_format="fp8_tensor", format="int8_channel")
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts = weights.experts(case)
    problem = Problem.of(jnp.asarray(x), 2, experts, case.activation, "output", "fp8_tensor")
    own = jmx.Routing(jnp.asarray(routing.expert_ids), jnp.asarray(routing.weights))
    static = xla._with_static_scales(problem, jnp.asarray(x), own, experts)[-1]
    assert static.gate_up_input_scale == np.abs(x).max() / np.float32(448)

    def gradients(experts, name):
        def loss(x, shares):
            given = jmx.Routing(jnp.asarray(routing.expert_ids), shares)
            y = jmx.moe(x, given, experts, activation=case.activation, input_format=name, backend="xla")
            return (y**2).sum()

        return jax.grad(loss, (0, 1))(jnp.asarray(x), jnp.asarray(routing.weights))

    jax.tree.map(np.testing.assert_array_equal, gradients(experts, "fp8_tensor"), gradients(static, "fp8_static"))


SIZES = {256: 160, 160: 1, 96: 256, 100: 96, 1: 100}  # each as H, and as I
PAIRS = [*itertools.product(BY_TOKEN, SIZES)]


def whole_block(name):
    """What sizes must be a multiple of."""
    format = input_formats.INPUT_FORMATS[name]
    return format.block_size if isinstance(format.block_size, int) and not format.short_block else 1


def refused(name, hidden):
    return any(size % whole_block(name) for size in (hidden, SIZES[hidden]))


@pytest.mark.parametrize(("name", "hidden"), [pair for pair in PAIRS if not refused(*pair)])
def test_inputs_of_any_size_are_rounded(name, hidden, rng):
    sizes = {"hidden": hidden, "intermediate": SIZES[hidden]}
    tokens, weights = int(rng.choice([1, 20])), str(rng.choice(["fp8_channel", "fp8_block"]))
    check_sizes(4, *sizes.values(), format=FORMATS[weights], input_format=name)
    assert_inputs_are_rounded(rng, name, tokens=tokens, format=weights, **sizes)


@pytest.mark.parametrize(("name", "hidden"), [pair for pair in PAIRS if refused(*pair)])
def test_inputs_of_part_of_a_block_are_refused(name, hidden):
    sizes = {"hidden_size": hidden, "intermediate_size": SIZES[hidden]}
    format, whole = FORMATS["fp8_channel"], whole_block(name)
    experts = jmx.Experts.random(jax.random.key(0), 4, **sizes, gate_up_order="concatenated", format=format)
    argument, size = next((key, size) for key, size in sizes.items() if size % whole)
    message = re.escape(f"`{argument}` (={size}) must be a multiple of {whole} for {name} inputs")
    with pytest.raises(ValueError, match=message):
        check_sizes(4, **sizes, format=format, input_format=name)
    with pytest.raises(ValueError, match=message):
        resolve_input_format(experts, name)
    with pytest.raises(ValueError, match=message):
        experts.with_inputs(name, *static_scales(name))


def test_gradients_pass_the_rounding_of_inputs(rng):
    """To an activation without a limit, on whose two sides gradients would differ by themselves."""
    case = Case(tokens=40, num_experts=4, hidden=128, intermediate=128, activation=jmx.SiLUAndMul(), dtype="bfloat16")
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts, x = weights.experts(case), jnp.asarray(x)

    def gradients(input_format):
        def loss(x, shares):
            given = jmx.Routing(jnp.asarray(routing.expert_ids), shares)
            y = jmx.moe(x, given, experts, activation=case.activation, input_format=input_format)
            return (y.astype(jnp.float32) ** 2).sum()

        return jax.tree.map(
            lambda g: np.asarray(g, np.float64), jax.grad(loss, (0, 1))(x, jnp.asarray(routing.weights))
        )

    for ours, theirs in zip(gradients("int8_token"), gradients(None), strict=True):
        assert 0 < np.linalg.norm(ours - theirs) < 0.05 * np.linalg.norm(theirs)


@pytest.mark.parametrize("name", [name for name, format in input_formats.INPUT_FORMATS.items() if format.short_block])
def test_gradients_pass_the_rounding_of_short_blocks(name, rng):
    """They are those of a layer in floats whose gradients pass straight through the rounding."""
    case = Case(tokens=20, num_experts=4, hidden=160, intermediate=100, activation=jmx.SiLUAndMul(), bias=NEITHER)
    case = dataclasses.replace(case, format="fp8_channel", order="concatenated")
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts, format = weights.experts(case), input_formats.INPUT_FORMATS[name]
    gate_up, down = (jnp.asarray(each, jnp.float32) for each in weights.floats(case))
    dot = partial(jnp.einsum, precision="highest")

    def straight_through(x):
        return x + jax.lax.stop_gradient(input_formats.dequantize(input_formats.quantize(x, format), format) - x)

    def plain(x, shares):
        gate, up = jnp.split(dot("tkrh,th->tkr", gate_up[routing.expert_ids], straight_through(x)), 2, axis=-1)
        h = straight_through(jax.nn.silu(gate) * up)
        return dot("tkhi,tki,tk->th", down[routing.expert_ids], h, shares)

    def layer(x, shares):
        given = jmx.Routing(jnp.asarray(routing.expert_ids), shares)
        return jmx.moe(x, given, experts, activation=case.activation, input_format=name, backend="xla")

    dy = rng.standard_normal(x.shape).astype(np.float32)
    ours, theirs = (
        jax.jit(lambda x, shares, f=f: jax.vjp(f, x, shares)[1](dy))(jnp.asarray(x), jnp.asarray(routing.weights))
        for f in (layer, plain)
    )
    for our, their in zip(ours, theirs, strict=True):  # an h between two elements may go to either
        assert np.linalg.norm(our - their) <= 2e-3 * np.linalg.norm(their)


def test_which_inputs_a_layer_takes(rng):
    case = Case(num_experts=4, hidden=128, intermediate=96)
    experts = draw_weights(rng, case).experts(case)
    scale = jnp.float32(0.01)
    declared = experts.with_inputs("nvfp4", scale, scale)
    assert resolve_input_format(experts, None) is None
    assert resolve_input_format(experts, "fp8") == "fp8_token"
    assert resolve_input_format(declared, None) == resolve_input_format(declared, "fp4") == "nvfp4"
    with pytest.raises(ValueError, match=r"`input_format` .='fp8'. must be 'nvfp4', which the checkpoint declares"):
        resolve_input_format(declared, "fp8")
    assert resolve_input_format(experts, "fp8_block") == "fp8_block"
    with pytest.raises(ValueError, match=r"`input_format` \(='nvfp4'\) is static, and `experts` have no scales for it"):
        resolve_input_format(experts, "nvfp4")
    with pytest.raises(ValueError, match=r"`gate_up_scale` \(=None\) must be float32 \(\) for nvfp4 inputs"):
        experts.with_inputs("nvfp4")
    with pytest.raises(ValueError, match=r"`down_scale` \(=0.0.*\) must be None for fp8_token inputs"):
        experts.with_inputs("fp8_token", None, scale)
    with pytest.raises(TypeError, match=r"`down_scale` \(float32 \(1,\)\) must be float32 \(\)"):
        experts.with_inputs("nvfp4", scale, scale[None])
    for bad in (0, -1, 1e-39, 1e37, np.inf, np.nan):
        with pytest.raises(ValueError, match=r"`down_scale` \(=.*\) must lie between .* for fp8_static inputs"):
            experts.with_inputs("fp8_static", scale, jnp.float32(bad))
    with pytest.raises(ValueError, match=r"`format` \(='fp7'\) must be one of"):
        experts.with_inputs("fp7")


def test_static_scales_of_a_stack_are_each_layers_own(rng):
    case = Case(tokens=3, num_experts=4, hidden=64, intermediate=64)
    x, routing = jnp.asarray(draw_x(rng, case)), jax.tree.map(jnp.asarray, draw_routing(rng, case))
    layers = [
        draw_weights(rng, case).experts(case).with_inputs("fp8_static", jnp.float32(s), jnp.float32(2 * s))
        for s in (0.002, 0.01)
    ]
    stack = jmx.Experts.stack(layers)
    for i, experts in enumerate(layers):
        ys = [jmx.moe(x, routing, e, activation=case.activation) for e in (stack.layer(i), experts)]
        np.testing.assert_array_equal(ys[0], ys[1])
