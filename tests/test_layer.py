"""The layer as a function: its errors, and how it combines routing, backends and jit."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend_cases import Case, draw_routing, draw_weights, draw_x, reference

import jmx
import jmx.backends
from jmx import Experts, Logits, NoBackendError, Routing, SiLU, SwiGLU, TopKSoftmax

CASE = Case(tokens=6, top_k=2, activation=SwiGLU())
T, H, K, E = CASE.tokens, CASE.hidden, CASE.top_k, CASE.num_experts


@pytest.fixture
def inputs(rng):
    return draw_x(rng, CASE), draw_routing(rng, CASE), draw_weights(rng, CASE).experts(CASE)


def ones(*shape, dtype: Any = np.float32):
    return np.ones(shape, dtype)


def routing_of(ids=None, weights=None):
    return Routing(ones(T, K, dtype=np.int32) if ids is None else ids, ones(T, K) if weights is None else weights)


WRONG = [
    ({"x": ones(T, H + 1)}, ValueError, ["`x`", str((T, H + 1)), f"(..., {H})"]),
    ({"x": np.float32(1)}, ValueError, ["`x`", "()", f"(..., {H})"]),
    ({"x": ones(T, H, dtype=np.int32)}, TypeError, ["`x`", "int32", "floating"]),
    ({"x": ones(T, H).astype(jnp.float8_e5m2)}, NoBackendError, ["float8_e5m2", "cast x", "bfloat16"]),
    ({"routing": routing_of(ids=ones(T, K))}, TypeError, ["`expert_ids`", "float32", "integer"]),
    ({"routing": routing_of(ids=ones(T, K, dtype=bool))}, TypeError, ["`expert_ids`", "bool", "integer"]),
    ({"routing": routing_of(weights=ones(T, K, dtype=np.int32))}, TypeError, ["`weights`", "int32", "floating"]),
    ({"routing": routing_of(ids=ones(T + 1, K, dtype=np.int32))}, ValueError, ["`expert_ids`", "(7, 2)", "(6,)"]),
    ({"routing": routing_of(weights=ones(T, K + 1))}, ValueError, ["`weights`", "(6, 3)", "(6, 2)"]),
    ({"routing": routing_of(weights=ones(T - 1, K))}, ValueError, ["`weights`", "(5, 2)", "(6,)"]),
    ({"routing": routing_of(ids=ones(T, dtype=np.int32))}, ValueError, ["`expert_ids`", "(6,)"]),
    ({"routing": Logits(ones(T, E + 1), TopKSoftmax(K))}, ValueError, ["`values`", "(6, 9)", "(..., 8)"]),
    ({"routing": Logits(ones(T + 1, E), TopKSoftmax(K))}, ValueError, ["`values`", "(7, 8)", "(6,)"]),
    ({"routing": Logits(ones(T, E, dtype=np.int32), TopKSoftmax(K))}, TypeError, ["`values`", "int32", "floating"]),
    ({"routing": Logits(ones(T, E), TopKSoftmax(E + 1))}, ValueError, ["`top_k`", "(=9)", "(=8)"]),
    ({"routing": Logits(ones(T, E), None)}, TypeError, ["`method`", "None", "routing method"]),
    ({"routing": Logits(ones(T, E), "top_k_softmax")}, TypeError, ["`method`", "'top_k_softmax'", "routing method"]),
    ({"routing": ones(T, E)}, TypeError, ["`routing`", "ndarray", "Routing", "Logits"]),
    ({"routing": (ones(T, K, dtype=np.int32), ones(T, K))}, TypeError, ["`routing`", "tuple", "Routing"]),
    ({"experts": ones(E, H, H)}, TypeError, ["`experts`", "ndarray", "Experts"]),
    ({"activation": "silu"}, ValueError, ["`activation`", "SiLU()", "un-gated", "interleaved"]),
    (
        {"activation": "swiglo"},
        ValueError,
        ["`activation` (='swiglo') must be one of ['swiglu', ", "did you mean 'swiglu'?"],
    ),
    ({"activation": jax.nn.silu}, TypeError, ["`activation`", "must be a jmx.Activation, or one of ['swiglu', "]),
    ({"activation": SiLU}, TypeError, ["`activation`", "type", "Activation"]),
    ({"activation": SiLU()}, ValueError, ["`activation`", "SiLU()", "un-gated", "interleaved"]),
    ({"weights_on": "both"}, ValueError, ["`weights_on`", "'both'", "output", "input"]),
    ({"mask": ones(T)}, TypeError, ["`mask`", "float32", "bool"]),
    ({"mask": ones(T + 1, dtype=bool)}, ValueError, ["`mask`", "(7,)", "(6,)"]),
    ({"backend": "cublas"}, ValueError, ["`backend`", "'cublas'", "xla"]),
]


@pytest.mark.parametrize(("wrong", "error", "parts"), WRONG)
@pytest.mark.parametrize("jit", [False, True])
def test_wrong_arguments_are_named(wrong, error, parts, jit, inputs):
    x, routing, experts = inputs
    arguments = {"x": x, "routing": routing, "experts": experts, "activation": CASE.activation} | wrong
    call = jax.jit(lambda: jmx.moe(**arguments)) if jit else lambda: jmx.moe(**arguments)
    with pytest.raises(error) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


def test_weights_are_not_read_in_another_order_of_axes(inputs):
    """(3, 2) tokens' weights are as many as (2, 3) tokens', but not the same tokens'."""
    x, routing, experts = inputs
    shaped = Routing(routing.expert_ids.reshape(2, 3, K), routing.weights.reshape(3, 2, K))
    with pytest.raises(ValueError, match=r"`weights` .*\(3, 2, 2\).*\(2, 3\)"):
        jmx.moe(x.reshape(2, 3, H), shaped, experts, activation=CASE.activation)


def test_no_slots_give_zeros(inputs):
    x, _, experts = inputs
    y = jmx.moe(x, Routing(ones(T, 0, dtype=np.int32), ones(T, 0)), experts, activation=CASE.activation)
    assert y.shape == x.shape
    assert not y.any()


@pytest.mark.parametrize("leading", [(6,), (2, 3), ()], ids=str)
def test_logits_are_routed(leading, rng):
    case = Case(tokens=int(np.prod(leading)), activation=SwiGLU())
    weights, x = draw_weights(rng, case), draw_x(rng, case)
    logits = Logits(rng.standard_normal((case.tokens, E)).astype(np.float32), TopKSoftmax(K))
    mask = np.arange(case.tokens) % 3 != 1
    shaped = Logits(logits.values.reshape((*leading, E)), logits.method)
    y = jmx.moe(
        x.reshape((*leading, H)), shaped, weights.experts(case), activation=case.activation, mask=mask.reshape(leading)
    )
    chosen = jax.tree.map(np.asarray, jmx.route(logits))
    expected = reference(case, weights, x, chosen, mask)
    np.testing.assert_allclose(np.asarray(y).reshape(x.shape), expected, atol=1e-5)


def test_eager_and_jitted_calls_agree_bit_for_bit(inputs):
    def call(x, routing, experts):
        return jmx.moe(x, routing, experts, activation=CASE.activation)

    np.testing.assert_array_equal(call(*inputs), jax.jit(call)(*inputs))


def test_a_second_call_is_not_traced_again(inputs, monkeypatch):
    traces = []
    engine = next(b for b in jmx.backends.registered_backends() if b.name == "xla")
    apply = type(engine).apply
    monkeypatch.setattr(type(engine), "apply", lambda self, *args: traces.append(1) or apply(self, *args))
    x, routing, experts = inputs
    activation = SwiGLU(alpha=1.25)  # no other test's, whose trace would serve here

    def call(x):
        return jmx.moe(x, routing, experts, activation=activation, backend=engine.name)

    for function in (call, jax.jit(call)):
        function(x)
        first = len(traces)
        function(2 * x)
        function(jnp.asarray(x))
        assert len(traces) == first
    assert len(traces) >= 1


def test_the_requested_backend_is_asked_anew_in_each_context(inputs):
    x, routing, experts = inputs
    call = jax.jit(lambda x: jmx.moe(x, routing, experts, activation=CASE.activation))
    first = call(x)
    with jmx.use_backend("none such"), pytest.raises(ValueError, match="none such"):
        call(x)
    with jmx.use_backend("xla"):
        np.testing.assert_allclose(call(x), first, rtol=1e-4, atol=1e-4)


def test_donated_input(inputs):
    x, routing, experts = inputs
    call = jax.jit(lambda x, r, e: x + jmx.moe(x, r, e, activation=CASE.activation), donate_argnums=0)
    expected = np.asarray(call(jnp.asarray(x), routing, experts))
    given = jnp.asarray(x)
    np.testing.assert_array_equal(call(given, routing, experts), expected)
    assert given.is_deleted()


def step(weights, x):
    """A step over a pure dict of arrays, as jax.export takes it: on the backend that makes no calls of its own."""
    q = jmx.BlockScaled
    experts = Experts.of(
        q(weights["gate_up"], weights["gate_up_scales"]),
        q(weights["down"], weights["down_scales"]),
        weights["gate_up_bias"],
        weights["down_bias"],
        gate_up_order=CASE.order,
    )
    logits = Logits(x @ weights["router"], TopKSoftmax(K))
    return jmx.moe(x, logits, experts, activation=CASE.activation, backend="xla")


@pytest.mark.parametrize("layout", ["packed", "canonical"])
def test_export_round_trips(layout, rng):
    experts = draw_weights(rng, CASE).experts(CASE).prepare(layout)
    weights = {
        "gate_up": experts.gate_up.values,
        "gate_up_scales": experts.gate_up.scales,
        "down": experts.down.values,
        "down_scales": experts.down.scales,
        "gate_up_bias": experts.gate_up_bias,
        "down_bias": experts.down_bias,
        "router": jnp.asarray(rng.standard_normal((H, E)), jnp.float32),
    }
    x = jnp.asarray(draw_x(rng, CASE))
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (weights, x))
    stored = jax.export.export(jax.jit(step))(*abstract).serialize()
    y = jax.export.deserialize(bytearray(stored)).call(weights, x)
    np.testing.assert_array_equal(y, jax.jit(step)(weights, x))


def test_a_symbolic_token_count_is_rejected_with_its_reason(inputs):
    _, _, experts = inputs
    (tokens,) = jax.export.symbolic_shape("tokens")
    x = jax.ShapeDtypeStruct((tokens, H), jnp.float32)
    routing = Routing(jax.ShapeDtypeStruct((tokens, K), jnp.int32), jax.ShapeDtypeStruct((tokens, K), jnp.float32))
    logits = Logits(jax.ShapeDtypeStruct((tokens, E), jnp.float32), TopKSoftmax(K))
    for given in (routing, logits):
        leaves, tree = jax.tree.flatten(given)

        def call(x, *leaves, tree=tree):
            return jmx.moe(x, jax.tree.unflatten(tree, leaves), experts, activation=CASE.activation)

        with pytest.raises(NoBackendError, match="symbolic token count"):
            jax.export.export(jax.jit(call))(x, *leaves)


def test_a_stack_of_layers_is_refused_by_name():
    experts = jmx.Experts.random(jax.random.key(0), 3, 32, 64, gate_up_order="interleaved")
    x, routing = jnp.ones((2, 32)), jmx.Routing(jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1)))
    run = partial(jmx.moe, x, routing, activation=jmx.SwiGLU())
    with pytest.raises(ValueError, match=r"`experts` .* must be those of one layer: pass `experts.layer\(i\)`"):
        run(jmx.Experts.stack([experts, experts]))


def test_an_x_that_jax_would_narrow_is_refused(inputs):
    x, routing, experts = inputs
    with pytest.raises(TypeError, match=r"`x` \(dtype float64\)"):
        jmx.moe(x.astype(np.float64), routing, experts, activation=CASE.activation)
