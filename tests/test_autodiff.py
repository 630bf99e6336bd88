"""Derivatives and transformations of the layer, against jax's own on dense float weights and against differences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend_cases import (
    BOTH,
    GPT_OSS,
    NAN,
    Case,
    activated,
    assert_agrees,
    assert_close,
    draw_routing,
    draw_weights,
    draw_x,
    reference,
    suited,
)

import jmx
from jmx import (
    Experts,
    GELUAndMul,
    GroupedTopK,
    Logits,
    ReLU2,
    Routing,
    SiLUAndMul,
    SoftmaxTopK,
    SwiGLU,
    TopKSoftmax,
    activations,
    route,
)
from jmx.backends import registered_backends

pytestmark = pytest.mark.costly

# A gradient passes one product more than the result does, and its sums cancel.
FACTOR = 3
FEW = 16


@pytest.fixture(params=[b.name for b in registered_backends()])
def backend(request):
    """Every layer of the test runs forward on it."""
    with jmx.use_backend(request.param):
        yield request.param


def moe(case, x, routing, experts, mask=None):
    return jmx.moe(x, routing, experts, activation=case.activation, weights_on=case.weights_on, mask=mask)


def dense(case, x, routing, weights, biases):
    """The layer in plain jnp, float32 at the highest precision, every token through every expert."""
    with jax.default_matmul_precision("highest"):
        gate_up, down = (jnp.asarray(floats, jnp.float32) for floats in weights.floats(case))
        ids = jnp.arange(case.num_experts)
        shares = jnp.where(routing.expert_ids[..., None] == ids, routing.weights[..., None], 0)  # (T, k, E)
        x = x.astype(jnp.float32)
        if case.weights_on == "input":
            rows = x[:, None, None] * shares[..., None]  # (T, k, E, H)
        else:
            rows = jnp.broadcast_to(x[:, None, None], (*shares.shape, x.shape[-1]))
        h = jnp.einsum("tkeh,enh->tken", rows, gate_up)
        if biases[0] is not None:
            h += biases[0]
        out = jnp.einsum("tkei,ehi->tkeh", activations.apply(case.activation, h, case.order or "interleaved"), down)
        if biases[1] is not None:
            out += biases[1]
        on = shares if case.weights_on == "output" else (routing.expert_ids[..., None] == ids).astype(jnp.float32)
        return jnp.einsum("tkeh,tke->th", out, on)


SMOOTH = SwiGLU(alpha=1.702, beta=1.0)
CASES = [
    Case(tokens=12, top_k=3, num_experts=4),
    # Smooth: rounding x times the weight would carry some values over a clamp, where the derivative jumps.
    Case(tokens=12, top_k=3, num_experts=4, weights_on="input", activation=SMOOTH),
    Case(tokens=12, top_k=2, num_experts=4, activation=SiLUAndMul(), order="concatenated", ids="anywhere"),
    Case(tokens=12, top_k=2, num_experts=4, activation=ReLU2(), order=None, ids="repeated", layout="canonical"),
    Case(tokens=1, top_k=4, num_experts=8, activation=GELUAndMul(approximate=False), weights_on="input"),
    Case(tokens=1, top_k=2, num_experts=8, layout="canonical", bias=(False, True)),
    Case(tokens=40, top_k=2, num_experts=3, bias=(True, False), ids="one_expert"),
    Case(tokens=40, top_k=2, num_experts=8, dtype="bfloat16"),
    Case(tokens=40, dtype="bfloat16", weights_on="input", ids="every_third", activation=SMOOTH),
    Case(tokens=12, top_k=2, num_experts=4, dtype="float16"),
    Case(tokens=5, ids="nowhere"),
    Case(tokens=0),
]


EACH = [pytest.param(b.name, case, id=f"{b.name}-{case}") for b in registered_backends() for case in CASES]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("backend", "case"), EACH, indirect=["backend"])
def test_gradients_match_dense(backend, case, rng):
    check_against_dense(backend, case, rng)


@pytest.mark.parametrize(
    ("format", "tokens"),
    [("nvfp4", 40), ("int8_channel_asym", 40), ("int8_g64_asym_order", 40), ("int8_g64_asym_order", 1)],
)
def test_gradients_through_other_formats(format, tokens, rng):
    case = Case(tokens=tokens, top_k=2, num_experts=4, hidden=128, intermediate=128, format=format)
    with jmx.use_backend("xla"):
        check_against_dense("xla", case, rng)


def check_against_dense(backend, case, rng):
    case = suited(backend, case)
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts = weights.experts(case)
    x, routing = jnp.asarray(x), jax.tree.map(jnp.asarray, routing)
    cotangent = rng.standard_normal(x.shape).astype(np.float32)

    def loss(x, w, biases):
        given = experts.with_arrays({**experts.arrays(), **biases})
        return (moe(case, x, routing._replace(weights=w), given).astype(jnp.float32) * cotangent).sum()

    def dense_loss(x, w, biases):
        both = biases.get("gate_up_bias"), biases.get("down_bias")
        return (dense(case, x, routing._replace(weights=w), weights, both) * cotangent).sum()

    biases = {name: a for name, a in experts.arrays().items() if name.endswith("bias")}
    arguments = (x, routing.weights, biases)
    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arguments)
    expected = jax.jit(jax.grad(dense_loss, argnums=(0, 1, 2)))(*arguments)
    assert got[0].dtype == x.dtype
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        few = b.size < FEW  # sums that cancel have no others beside them
        assert_agrees(backend, case, a, b, FACTOR * (4 if few else 1))


def test_gradients_match_differences_of_the_float64_reference(rng):
    case = Case(tokens=3, top_k=2, num_experts=4, hidden=32, intermediate=32, activation=SwiGLU(alpha=1.702, beta=1.0))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    cotangent = rng.standard_normal(x.shape).astype(np.float32)
    experts = weights.experts(case)
    dx, dw = jax.grad(
        lambda x, w: (moe(case, x, Routing(routing.expert_ids, w), experts) * cotangent).sum(), argnums=(0, 1)
    )(jnp.asarray(x), jnp.asarray(routing.weights))
    step = 1e-6
    for got, origin in ((dx, x), (dw, routing.weights)):
        expected = np.zeros(origin.shape)
        for index in np.ndindex(origin.shape):
            sides = []
            for sign in (1, -1):
                moved = origin.astype(np.float64)
                moved[index] += sign * step
                args = (moved, routing) if origin is x else (x, routing._replace(weights=moved))
                sides.append((reference(case, weights, *args) * cotangent).sum())
            expected[index] = (sides[0] - sides[1]) / (2 * step)
        assert_close(np.asarray(got, np.float64), expected, "float32", FACTOR)


@pytest.mark.parametrize(
    "method",
    [TopKSoftmax(2), SoftmaxTopK(2, renormalize=False), GroupedTopK(2, 4, 2, "sigmoid", True, 2.5)],
    ids=lambda method: type(method).__name__,
)
def test_gradients_reach_the_router(method, rng):
    case = Case(tokens=12, dtype="float32", weights_on="output")
    weights, x = draw_weights(rng, case), jnp.asarray(draw_x(rng, case))
    router = jnp.asarray(rng.standard_normal((case.hidden, case.num_experts)), jnp.float32) / 8
    experts, cotangent = weights.experts(case), draw_x(rng, case)
    biases = (experts.gate_up_bias, experts.down_bias)

    def logits(x, router):
        return Logits(jnp.dot(x, router, precision="highest"), method)

    def loss(x, router):
        return (moe(case, x, logits(x, router), experts) * cotangent).sum()

    def dense_loss(x, router):
        return (dense(case, x, route(logits(x, router)), weights, biases) * cotangent).sum()

    got = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, router)
    expected = jax.jit(jax.grad(dense_loss, argnums=(0, 1)))(x, router)
    for a, b in zip(got, expected, strict=True):
        assert_close(np.asarray(a), np.asarray(b), "float32", 5)


def test_masked_and_lost_tokens_have_no_gradient(backend, rng):
    case = suited(backend, Case(tokens=9, top_k=2, ids="anywhere"))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    mask = np.arange(9) % 3 != 0
    x[~mask] = np.nan
    experts = weights.experts(case)
    dx, dw = jax.jit(
        jax.grad(lambda x, w: moe(case, x, Routing(routing.expert_ids, w), experts, mask).sum(), argnums=(0, 1))
    )(x, routing.weights)
    lost = (routing.expert_ids < 0) | (routing.expert_ids >= case.num_experts) | ~mask[:, None]
    assert not np.asarray(dx)[lost.all(axis=1)].any()
    assert not np.asarray(dw)[lost].any()
    assert np.asarray(dw)[~lost].all()


@pytest.mark.parametrize("tokens", [1, 9])
def test_unused_experts_that_hold_nan_leave_gradients_alone(backend, tokens, rng):
    case = suited(backend, Case(tokens=tokens, ids="every_third"))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    routing.expert_ids[0] = -1
    unused = np.setdiff1d(np.arange(case.num_experts), routing.expert_ids)

    def loss(x, w, biases, experts):
        given = experts.with_arrays({**experts.arrays(), **biases})
        return moe(case, x, Routing(routing.expert_ids, w), given).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))

    def gradients():
        experts = weights.experts(case)
        biases = {"gate_up_bias": experts.gate_up_bias, "down_bias": experts.down_bias}
        return compiled(x, routing.weights, biases, experts)

    clean = gradients()
    for array in (weights.gate_up[1], weights.down[1]):
        array[unused] = NAN
    for a, b in zip(jax.tree.leaves(gradients()), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_token_that_is_nan_keeps_its_gradient_to_itself(backend, rng):
    case = suited(backend, Case(tokens=20, top_k=3, activation=SiLUAndMul()))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts = weights.experts(case)
    gradients = jax.jit(
        jax.grad(lambda x, w: moe(case, x, Routing(routing.expert_ids, w), experts).sum(), argnums=(0, 1))
    )
    clean = gradients(x, routing.weights)
    x[11, 3] = np.nan
    others = np.arange(case.tokens) != 11
    for a, b in zip(gradients(x, routing.weights), clean, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])


def test_gradients_repeat_and_do_not_depend_on_neighbours(backend, rng):
    case = suited(backend, Case(tokens=40, top_k=4, dtype="bfloat16"))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts, dy = weights.experts(case), draw_x(rng, case)

    @jax.jit
    def gradients(x, routing, dy):
        _, vjp = jax.vjp(lambda x, w: moe(case, x, Routing(routing.expert_ids, w), experts), x, routing.weights)
        return vjp(dy)

    first = gradients(x, routing, dy)
    for a, b in zip(gradients(x, routing, dy), first, strict=True):
        np.testing.assert_array_equal(a, b)
    kept = rng.random(case.tokens) < 0.5
    others = draw_x(rng, case), draw_routing(rng, case), draw_x(rng, case)
    mixed = jax.tree.map(lambda a, b: np.where(kept[:, None], a, b), (x, routing, dy), others)
    for a, b in zip(gradients(*mixed), first, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[kept], np.asarray(b)[kept])


BATCH = 3
SMALL = Case(tokens=4, num_experts=4, hidden=32, intermediate=64)


def draw_batch(rng, case=SMALL):
    xs = np.stack([draw_x(rng, case) for _ in range(BATCH)])
    routings = [draw_routing(rng, case) for _ in range(BATCH)]
    return xs, Routing(*(np.stack(arrays) for arrays in zip(*routings, strict=True)))


@pytest.mark.parametrize("over", [(0, 0), (0, None), (None, 0)], ids=["both", "x", "routing"])
@pytest.mark.parametrize("tokens", [4, 0])
def test_vmap_over_tokens(backend, over, tokens, rng):
    case = suited(backend, dataclasses.replace(SMALL, tokens=tokens))
    weights = draw_weights(rng, case)
    xs, routings = draw_batch(rng, case)
    experts = weights.experts(case)
    x = xs if over[0] == 0 else xs[0]
    routing = routings if over[1] == 0 else jax.tree.map(lambda a: a[0], routings)
    ys = jax.vmap(lambda x, r: moe(case, x, r, experts), in_axes=over)(x, routing)
    for i, y in enumerate(ys):
        picked = jax.tree.map(lambda array, i=i: array[i], routings) if over[1] == 0 else routing
        expected = reference(case, weights, xs[i if over[0] == 0 else 0], picked)
        assert_agrees(backend, case, y, expected)


def test_vmap_over_experts_and_nested(backend, rng):
    case = suited(backend, SMALL)
    layers = [draw_weights(rng, case) for _ in range(BATCH)]
    stack = Experts.stack([weights.experts(case) for weights in layers])
    xs, routings = draw_batch(rng, case)
    over_all = jax.vmap(lambda x, r, e: moe(case, x, r, e))(xs, routings, stack)
    nested = jax.jit(
        jax.vmap(lambda e: jax.vmap(lambda x, r: moe(case, x, r, e))(xs, routings))  # (experts, batch, T, H)
    )(stack)
    over_views = jax.vmap(lambda i: moe(case, xs[0], jax.tree.map(lambda a: a[0], routings), stack.layer(i)))(
        jnp.arange(BATCH)
    )
    for i, weights in enumerate(layers):
        for j in range(BATCH):
            expected = reference(case, weights, xs[j], jax.tree.map(lambda a, j=j: a[j], routings))
            assert_agrees(backend, case, nested[i, j], expected)
            if i == j:
                assert_agrees(backend, case, over_all[i], expected)
            if j == 0:
                assert_agrees(backend, case, over_views[i], expected)


def test_grad_and_vmap_commute(backend, rng):
    case = suited(backend, SMALL)
    weights = draw_weights(rng, case)
    experts = weights.experts(case)
    xs, routings = draw_batch(rng, case)
    cotangents = np.stack([draw_x(rng, case) for _ in range(BATCH)])

    def loss(x, w, bias, ids, cotangent):
        given = experts.with_arrays({**experts.arrays(), "down_bias": bias})
        return (moe(case, x, Routing(ids, w), given) * cotangent).sum()

    def batched(x, w, bias):
        return jax.vmap(loss, in_axes=(0, 0, None, 0, 0))(x, w, bias, routings.expert_ids, cotangents).sum()

    bias = experts.down_bias
    one = jax.grad(loss, argnums=(0, 1, 2))
    alone = jax.jit(one)
    each = [alone(xs[i], routings.weights[i], bias, routings.expert_ids[i], cotangents[i]) for i in range(BATCH)]
    expected = [np.stack(arrays) for arrays in zip(*each, strict=True)]
    vmapped = jax.jit(jax.vmap(one, in_axes=(0, 0, None, 0, 0)))(
        xs, routings.weights, bias, routings.expert_ids, cotangents
    )
    for a, b in zip(vmapped, expected, strict=True):
        assert_agrees(backend, case, a, b, FACTOR)
    of_vmap = jax.jit(jax.grad(batched, argnums=(0, 1, 2)))(xs, routings.weights, bias)
    for a, b in zip(of_vmap, (*expected[:2], expected[2].sum(axis=0)), strict=True):
        assert_agrees(backend, case, a, b, FACTOR)


def test_scan_over_tokens_and_checkpoint(backend, rng):
    case = suited(backend, dataclasses.replace(SMALL, tokens=6))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts = weights.experts(case)
    y = reference(case, weights, x, routing)
    x = jnp.asarray(x)

    def scanned(x):
        return jax.lax.scan(lambda _, row: (None, moe(case, row[0], row[1], experts)), None, (x, routing))[1]

    def whole(x):
        return moe(case, x, routing, experts)

    assert_agrees(backend, case, scanned(x), y)
    expected = jax.grad(lambda x: (whole(x) ** 2).sum())(x)
    for function in (jax.checkpoint(whole), jax.checkpoint(scanned)):
        got = jax.jit(jax.grad(lambda x, f=function: (f(x) ** 2).sum()))(x)
        assert_agrees(backend, case, got, expected, FACTOR)


@pytest.mark.parametrize("form", ["views", "arrays"])
def test_gradients_through_a_scan_over_layers(backend, form, rng):
    case = suited(backend, SMALL)
    all_experts = [draw_weights(rng, case).experts(case) for _ in range(BATCH)]
    stack = Experts.stack(all_experts)
    x, routing = jnp.asarray(draw_x(rng, case)), draw_routing(rng, case)
    names = ("gate_up_bias", "down_bias")

    def step(x, experts):
        # Small beside what it is added to: a chain of bare layers would magnify what two programs round differently.
        return x + moe(case, x, routing, experts) / 16

    def scanned(x, biases):
        given = stack.with_arrays({**stack.arrays(), **biases})
        if form == "views":
            return jax.lax.scan(lambda x, i: (step(x, given.layer(i)), None), x, jnp.arange(BATCH))[0].sum()
        return jax.lax.scan(lambda x, experts: (step(x, experts), None), x, given)[0].sum()

    def unrolled(x, biases):
        for i, experts in enumerate(all_experts):
            x = step(x, experts.with_arrays({**experts.arrays(), **{n: biases[n][i] for n in names}}))
        return x.sum()

    biases = {name: getattr(stack, name) for name in names}
    got, expected = (jax.jit(jax.grad(f, argnums=(0, 1)))(x, biases) for f in (scanned, unrolled))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_agrees(backend, case, a, b, 5)


@pytest.mark.parametrize("bias", [BOTH, (False, False)], ids=["bias", "no bias"])
@pytest.mark.parametrize("role", ["gate_up", "down"])
@pytest.mark.parametrize("jit", [False, True])
def test_a_gradient_of_a_quantized_weight_is_refused_by_name(role, bias, jit, rng):
    case = Case(layout="canonical", bias=bias, num_experts=4)
    x, routing, experts = draw_x(rng, case), draw_routing(rng, case), draw_weights(rng, case).experts(case)

    def loss(values):
        arrays = {**experts.arrays(), f"{role}_values": values}
        return moe(case, x, routing, experts.with_arrays(arrays)).sum()

    gradient = jax.grad(jax.jit(loss) if jit else loss)
    with pytest.raises(TypeError, match=rf"`{role}.values` \(float4_e2m1fn\)"):
        gradient(getattr(experts, role).values)


FORWARD = {
    "jvp": lambda f, a: jax.jvp(f, (a,), (a,)),
    "jvp in jit": lambda f, a: jax.jit(lambda a: jax.jvp(f, (a,), (a,)))(a),
    "jvp of jit": lambda f, a: jax.jvp(jax.jit(f), (a,), (a,)),
    "jvp of vmap": lambda f, a: jax.jvp(jax.vmap(f), (a[None],), (a[None],)),
    "jvp of scan": lambda f, a: jax.jvp(lambda a: jax.lax.map(lambda _: f(a), jnp.arange(2)), (a,), (a,)),
    "jvp of checkpoint": lambda f, a: jax.jvp(jax.checkpoint(f), (a,), (a,)),
    "jacfwd": lambda f, a: jax.jacfwd(f)(a),
    "linearize": lambda f, a: jax.linearize(f, a)[1](a),
}
SECOND = {
    "hessian": lambda f, a: jax.hessian(f)(a),
    "grad of grad": lambda f, a: jax.grad(lambda a: (jax.grad(f)(a) ** 2).sum())(a),
    "grad of grad in jit": lambda f, a: jax.jit(jax.grad(lambda a: (jax.grad(f)(a) ** 2).sum()))(a),
    "grad of jit of grad": lambda f, a: jax.grad(lambda a: (jax.jit(jax.grad(f))(a) ** 2).sum())(a),
    "grad of a value beside its grad": lambda f, a: jax.grad(lambda a: jax.value_and_grad(f)(a)[0])(a),
    "jacrev of jacrev": lambda f, a: jax.jacrev(jax.jacrev(f))(a),
    "jvp of grad": lambda f, a: jax.jvp(jax.grad(f), (a,), (a,)),
    "grad of vmap of grad": lambda f, a: jax.grad(lambda a: (jax.vmap(jax.grad(f))(a[None]) ** 2).sum())(a),
}


def scalar_of(argument, rng):
    """The layer as a function of one of its arguments, to a scalar, and that argument."""
    x, routing, experts = draw_x(rng, SMALL), draw_routing(rng, SMALL), draw_weights(rng, SMALL).experts(SMALL)

    def function(value):
        if argument == "x":
            return (moe(SMALL, value, routing, experts) ** 2).sum()
        if argument == "weights":
            return (moe(SMALL, x, routing._replace(weights=value), experts) ** 2).sum()
        return (moe(SMALL, x, routing, experts.with_arrays({**experts.arrays(), argument: value})) ** 2).sum()

    arrays = {"x": x, "weights": routing.weights} | experts.arrays()
    return function, jnp.asarray(arrays[argument])


@pytest.mark.parametrize("argument", ["x", "weights", "gate_up_bias", "down_bias"])
@pytest.mark.parametrize("how", FORWARD)
def test_forward_mode_is_refused(how, argument, rng):
    with pytest.raises(TypeError, match=r"^forward-mode derivatives of `jmx.moe` .* use reverse mode"):
        FORWARD[how](*scalar_of(argument, rng))


@pytest.mark.parametrize("argument", ["x", "weights", "gate_up_bias", "down_bias"])
@pytest.mark.parametrize("how", SECOND)
def test_second_derivatives_are_refused(how, argument, rng):
    """Also where jax could compute some, by differentiating the backward pass that jmx chose."""
    with pytest.raises(TypeError, match=r"^second derivatives of `jmx.moe` .* `experts.dequantize"):
        SECOND[how](*scalar_of(argument, rng))


def test_a_gradient_at_a_constant_can_be_part_of_a_loss(rng):
    function, x = scalar_of("x", rng)

    def loss(x):
        return function(x) + (jax.grad(function)(jax.lax.stop_gradient(x)) ** 2).sum()

    np.testing.assert_allclose(jax.grad(loss)(x), jax.grad(function)(x), rtol=1e-5)


def test_integers_that_jax_is_asked_to_differentiate_have_no_gradient(rng):
    x, routing, experts = draw_x(rng, SMALL), draw_routing(rng, SMALL), draw_weights(rng, SMALL).experts(SMALL)
    packed = experts.prepare("packed")
    with pytest.raises(TypeError, match="but got uint8"):  # jax's own, before jmx is called
        jax.grad(lambda experts: moe(SMALL, x, routing, experts).sum())(packed)
    found = jax.grad(lambda experts: moe(SMALL, x, routing, experts).sum(), allow_int=True)(packed)
    assert found.gate_up.values.dtype == jax.dtypes.float0
    assert np.abs(np.asarray(found.down_bias, np.float32)).max() > 0


def test_the_reference_knows_what_it_clamps(rng):
    """The dense reference is jax's, the layer's is numpy's: both must mean the same activation."""
    case = Case(activation=GPT_OSS)
    h = 8 * rng.standard_normal(2 * case.intermediate)
    ours = activations.apply(case.activation, jnp.asarray(h, jnp.float32), case.order)
    np.testing.assert_allclose(ours, activated(case, h), rtol=1e-5, atol=1e-6)


def test_vmap_over_an_empty_batch(rng):
    experts = jmx.Experts.random(jax.random.key(0), 3, 32, 64, gate_up_order="interleaved")
    routing = jmx.Routing(jnp.zeros((0, 5, 2), jnp.int32), jnp.ones((0, 5, 2)))
    y = jax.vmap(lambda x, r: jmx.moe(x, r, experts, activation=jmx.SwiGLU()))(jnp.ones((0, 5, 32)), routing)
    assert y.shape == (0, 5, 32)
