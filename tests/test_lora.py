"""Adapters on experts, beside a dense layer of the sum of both weights: forward, gradients, transformations, meshes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmx
import jmx.linen
import jmx.nnx
from jmx import activations, lora, training
from jmx.lora import Adapter, Adapters, LoRA
from jmx.lora.products import TOGETHER
from jmx.numerics.gate_up import join_gate_up, split_gate_up
from jmx.xla.backend import Xla

E, H, I, K, T, R = 4, 64, 96, 2, 13, 3  # noqa: E741
ORDERS = ("interleaved", "concatenated", "interleaved_up_first", "concatenated_up_first")
FORMS = {
    "both": ("gate_up", "down"),
    "apart": ("gate", "up", "down"),
    "up alone": ("up",),
    "down alone": ("down",),
}
# With a limit that no value reaches: at one the derivative jumps, and a value may be on its other side by rounding.
GATED, PLAIN = jmx.SwiGLU(1.702, 1.0, 1e9), jmx.GELU(approximate=False)


def experts_of(rng, order: str | None = "interleaved", format="mxfp4", bias=True):
    key = jax.random.key(int(rng.integers(2**31)))
    return jmx.Experts.random(key, E, H, I, gate_up_order=order, format=format, bias=bias)


def adapters_of(rng, experts, targets=FORMS["both"], shared=(), dtype=jnp.float32, rank=R):
    """Both matrices random: of those to train from, B is zero."""
    like = LoRA(rank, 6, targets, shared, dtype=dtype).random(jax.random.key(0), experts)
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) * a.shape[-1] ** -0.5, a.dtype), like)


def routing_of(rng, tokens=T):
    ids = np.stack([rng.permutation(E + 1)[:K] for _ in range(tokens)]) - 1  # -1: nowhere
    return jmx.Routing(jnp.asarray(ids, jnp.int32), jnp.asarray(rng.uniform(0.1, 1, ids.shape), jnp.float32))


def dense(x, routing, experts, adapters, activation, weights_on="output"):
    """The layer with every expert's weights as float32, and the adapters' products added to them."""
    highest = jax.lax.Precision.HIGHEST
    gate_up, down = experts.dequantize(jnp.float32)
    more = {name: jnp.matmul(a.b, a.a, precision=highest) * a.scale for name, a in adapters.by_target().items()}
    more = {name: jnp.broadcast_to(each, (E, *each.shape[-2:])).astype(jnp.float32) for name, each in more.items()}
    gate_up += more.get("gate_up", 0)
    if "gate" in more or "up" in more:
        zeros = jnp.zeros((E, I, H))
        both = more.get("gate", zeros).mT, more.get("up", zeros).mT
        gate_up += join_gate_up(*both, experts.gate_up_order).mT
    down += more.get("down", 0)
    chosen = (routing.expert_ids[..., None] == jnp.arange(E)).astype(jnp.float32)
    weights = jnp.einsum("tk,tke->te", routing.weights, chosen, precision=highest)
    rows = x.astype(jnp.float32)[:, None] * (weights[..., None] if weights_on == "input" else 1)
    biases = (
        jnp.zeros((E, 1)) if bias is None else bias.astype(jnp.float32)
        for bias in (experts.gate_up_bias, experts.down_bias)
    )
    gate_up_bias, down_bias = biases
    rows = jnp.broadcast_to(rows, (x.shape[0], E, H))
    h = jnp.einsum("teh,enh->ten", rows, gate_up, precision=highest) + gate_up_bias
    a = activations.apply(activation, h, experts.gate_up_order)
    out = jnp.einsum("tei,ehi->teh", a, down, precision=highest) + down_bias
    scale = chosen.sum(1) if weights_on == "input" else weights
    return jnp.einsum("teh,te->th", out, scale, precision=highest)


def error(got, expected):
    return float(jnp.linalg.norm((got - expected).astype(jnp.float32)) / (jnp.linalg.norm(expected) + 1e-30))


def assert_alike(got, expected, most=1e-5):
    found = jax.tree.map(error, got, expected)
    assert max(jax.tree.leaves(found)) < most, found


def moe(x, routing, experts, adapters, **options):
    activation = GATED if experts.gated else PLAIN
    return jmx.moe(x, routing, experts, activation=activation, adapters=adapters, **options)


def both(rng, experts, adapters, *, tokens=T, **options):
    """The layer and its reference as functions of x, weights and adapters, and arguments."""
    routing = routing_of(rng, tokens)
    x = jnp.asarray(rng.normal(size=(tokens, H)), jnp.float32)
    activation = GATED if experts.gated else PLAIN

    def layer(x, weights, adapters):
        return moe(x, routing._replace(weights=weights), experts, adapters, **options)

    def reference(x, weights, adapters):
        where = options.get("weights_on", "output")
        return dense(x, routing._replace(weights=weights), experts, adapters, activation, where)

    return layer, reference, (x, routing.weights, adapters)


def assert_gradients_alike(rng, layer, reference, arguments, most=1e-5):
    dy = jnp.asarray(rng.normal(size=jax.eval_shape(layer, *arguments).shape), jnp.float32)
    got, expected = with_gradients(layer, dy, arguments), with_gradients(reference, dy, arguments)
    # A weight's gradient is a product of two rows, whose terms may cancel: its error is relative to these rows.
    y, (_, of_weights, _) = expected
    rows = jnp.linalg.norm(jnp.linalg.norm(dy, axis=-1) * jnp.linalg.norm(y.astype(jnp.float32), axis=-1))
    assert jnp.linalg.norm(got[1][1] - of_weights) < most * (rows + jnp.linalg.norm(of_weights))
    rest, expected_rest = ((y, (dx, dadapters)) for y, (dx, _, dadapters) in (got, expected))
    assert_alike(rest, expected_rest, most)


def with_gradients(function, dy, arguments):
    """Results and all gradients, in one compilation."""

    @jax.jit
    def run(dy, *arguments):
        y, vjp = jax.vjp(function, *arguments)
        return y, vjp(dy.astype(y.dtype))

    return run(dy, *arguments)


@pytest.mark.parametrize("weights_on", ["output", "input"])
@pytest.mark.parametrize("shared", [(), ("a",), ("b",), ("a", "b")])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rank", [R, TOGETHER * K // E + 1])  # all experts' matrices at once, or those of each block
def test_forward_and_gradients_are_those_of_a_dense_layer(rank, form, shared, weights_on, rng):
    experts = experts_of(rng, ORDERS[rng.integers(4)])
    adapters = adapters_of(rng, experts, FORMS[form], shared, rank=rank)
    assert_gradients_alike(rng, *both(rng, experts, adapters, weights_on=weights_on))


@pytest.mark.parametrize("tokens", [1, 3, 300])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int8_channel", "fp8_tensor", "int4_g32_asym_order"])
def test_any_frozen_format_and_number_of_tokens(format, tokens, rng):
    experts = experts_of(rng, format=format)
    assert_gradients_alike(rng, *both(rng, experts, adapters_of(rng, experts), tokens=tokens))


@pytest.mark.costly
def test_experts_without_a_gate(rng):
    experts = experts_of(rng, None, bias=False)
    assert_gradients_alike(rng, *both(rng, experts, adapters_of(rng, experts)))


@pytest.mark.costly
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_tokens_of_16_bits(dtype, rng):
    experts = experts_of(rng)
    layer, reference, (x, weights, adapters) = both(rng, experts, adapters_of(rng, experts))
    x, dy = x.astype(dtype), rng.normal(size=x.shape).astype(np.float32)
    y, (dx, _, gradients) = got = with_gradients(layer, dy, (x, weights, adapters))
    assert y.dtype == dx.dtype == dtype
    assert {a.dtype for a in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.float32)}
    assert_alike(got, with_gradients(reference, dy, (x, weights, adapters)), 3e-2)


@pytest.mark.parametrize("sizes", [(128, 128), (64, 128)])
def test_padding_of_the_weights(sizes, rng):
    experts = experts_of(rng, ORDERS[rng.integers(4)])
    adapters, padded = adapters_of(rng, experts, FORMS["apart"]), experts.pad(*sizes)
    routing, x = routing_of(rng), jnp.asarray(rng.normal(size=(T, H)), jnp.float32)
    assert_alike(moe(x, routing, padded, adapters), moe(x, routing, experts, adapters))


@pytest.mark.costly
@pytest.mark.parametrize("transformation", ["jit", "remat", "scan", "vmap", "vmap of adapters"])
def test_transformations(transformation, rng):
    experts = experts_of(rng)
    layer, _, (x, weights, adapters) = both(rng, experts, adapters_of(rng, experts))
    xs, more = jnp.stack([x, x[::-1], 2 * x]), jax.tree.map(lambda a: jnp.stack([a, -a, 2 * a]), adapters)
    runs: dict[str, Any] = {
        "jit": (jax.jit(layer), layer),
        "remat": (jax.checkpoint(layer), layer),
        "scan": (
            lambda x, w, a: jax.lax.scan(lambda x, _: (layer(x, w, a), None), x, length=2)[0],
            lambda x, w, a: layer(layer(x, w, a), w, a),
        ),
        "vmap": (
            lambda x, w, a: jax.vmap(layer, (0, None, None))(xs * x, w, a),
            lambda x, w, a: jnp.stack([layer(each * x, w, a) for each in xs]),
        ),
        "vmap of adapters": (
            lambda x, w, a: jax.vmap(layer, (None, None, 0))(x, w, jax.tree.map(jnp.multiply, more, a)),
            lambda x, w, a: jnp.stack(
                [layer(x, w, jax.tree.map(lambda m, a, i=i: m[i] * a, more, a)) for i in range(3)]
            ),
        ),
    }
    given, expected = runs[transformation]
    assert_gradients_alike(rng, given, expected, (x, weights, adapters))


@pytest.mark.costly
def test_a_scan_over_stacked_layers(rng):
    layers = [experts_of(rng) for _ in range(3)]
    stack, adapters = jmx.Experts.stack(layers), [adapters_of(rng, experts) for experts in layers]
    routing, x = routing_of(rng), jnp.asarray(rng.normal(size=(T, H)), jnp.float32)
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *adapters)

    def scanned(x, stacked):
        def body(x, its):
            return x + moe(x, routing, stack.layer(its[0]), its[1]), None

        return jax.lax.scan(body, x, (jnp.arange(3), stacked))[0]

    def in_turn(x, stacked):
        for i, experts in enumerate(layers):
            x = x + moe(x, routing, experts, jax.tree.map(lambda a, i=i: a[i], stacked))
        return x

    dy = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    assert_alike(*(with_gradients(function, dy, (x, stacked)) for function in (scanned, in_turn)))


@pytest.mark.costly
@pytest.mark.devices(4)
@pytest.mark.parametrize("kind", ["Auto", "Explicit", "Manual"])
@pytest.mark.parametrize("tokens", [None, "x"])
@pytest.mark.parametrize("shared", [(), ("a",)])
def test_a_mesh_that_divides_the_experts(shared, tokens, kind, rng):
    experts = experts_of(rng)
    _, _, arguments = both(rng, experts, adapters_of(rng, experts, shared=shared), tokens=16)
    routing = routing_of(rng, 16)
    types = (AxisType.Explicit if kind == "Explicit" else AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("x",), types, devices=jax.devices()[:4])
    split = jmx.Split(expert="x", tokens=tokens, mesh=None if kind == "Manual" else mesh)

    def divided(x, weights, adapters):
        its = routing._replace(weights=weights)
        if kind != "Manual":
            return moe(x, its, experts, adapters, split=split)
        of_adapters = jax.tree.map(lambda a: P("x") if a.ndim == 3 else P(), adapters)
        specs = P(tokens), P(tokens), jax.tree.map(lambda _: P("x"), experts), of_adapters
        run = jax.shard_map(
            lambda x, routing, experts, adapters: moe(x, routing, experts, adapters, split=split),
            mesh=mesh,
            in_specs=specs,
            out_specs=P(tokens),
        )
        return run(x, its, experts, adapters)

    def whole(x, weights, adapters):
        return moe(x, routing._replace(weights=weights), experts, adapters)

    dy = rng.normal(size=(16, H)).astype(np.float32)
    expected = jax.device_get(with_gradients(whole, dy, arguments))
    with jax.set_mesh(mesh):
        if kind == "Explicit" and tokens:
            dy = jax.reshard(dy, P(tokens))
        got = jax.device_get(with_gradients(divided, dy, arguments))
    assert_alike(got, expected)


@pytest.mark.costly
@pytest.mark.devices(4)
def test_modules_over_a_mesh(rng):
    mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,), devices=jax.devices()[:4])
    x = jnp.asarray(rng.normal(size=(16, H)), jnp.float32)
    layer = jmx.nnx.MoE(H, I, E, K, lora=LoRA(R), rngs=nnx.Rngs(0))
    layer.adapt(adapters := adapters_of(rng, layer.experts))
    with jax.set_mesh(mesh):
        divided = jmx.nnx.MoE(
            H, I, E, K, experts=layer.experts, lora=LoRA(R), axes={"expert": "x", "token": "x"}, rngs=nnx.Rngs(0)
        )
        divided.adapt(adapters)
        assert vars(divided)["lora_down_a"].get_value().sharding.spec[0] == "x"
        divided.router.kernel.set_value(layer.router.kernel[...])
        got = jax.device_get(divided(x))
    assert_alike(jnp.asarray(got), layer(x))


@pytest.mark.costly
def test_modules_train_adapters_alone(rng):
    x, target = jnp.asarray(rng.normal(size=(2, T, H)), jnp.float32)
    layer = jmx.nnx.MoE(H, I, E, K, bias=True, lora=LoRA(R, 6), rngs=nnx.Rngs(0))
    frozen = jax.tree.map(np.asarray, layer.experts)
    optimizer = nnx.Optimizer(layer, training.refuse_frozen(optax.adam(1e-2)), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(layer, optimizer):
        def loss_of(layer):
            return jnp.square(layer(x) - target).mean()

        loss, gradients = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, nnx.LoRAParam))(layer)
        optimizer.update(layer, gradients)
        return loss

    losses = [step(layer, optimizer) for _ in range(4)]
    assert losses[-1] < losses[0]
    jax.tree.map(np.testing.assert_array_equal, frozen, layer.experts)
    trained = sum(a.size for a in jax.tree.leaves(nnx.state(layer, nnx.LoRAParam)))
    assert sum(a.size for a in jax.tree.leaves(nnx.state(optimizer.opt_state))) == 2 * trained + 1


@pytest.mark.costly
def test_linen_modules_have_adapters_in_a_collection_of_their_own(rng):
    x = jnp.asarray(rng.normal(size=(T, H)), jnp.float32)
    module = jmx.linen.MoE(H, I, E, K, lora=LoRA(R, 6, ("gate", "up", "down"), ("b",)))
    variables = module.init(jax.random.key(0), x)
    assert {*variables} == {"params", "quantized", "lora"}
    adapters = adapters_of(rng, module.experts_of(variables), FORMS["apart"], ("b",))
    variables = module.adapt(variables, adapters)
    jax.tree.map(np.testing.assert_array_equal, module.adapters_of(variables), adapters)
    routing = module.apply(variables, x, method="route")
    expected = dense(x, routing, module.experts_of(variables), adapters, jmx.SwiGLU())
    assert_alike(module.apply(variables, x), expected)
    frozen = {name: each for name, each in variables.items() if name != "lora"}

    def loss(its):
        y: Any = module.apply(frozen | {"lora": its}, x)
        return jnp.square(y).sum()

    optimizer = training.refuse_frozen(optax.sgd(1e-6))
    gradients = jax.grad(loss)(variables["lora"])
    updates, _ = optimizer.update(gradients, optimizer.init(variables["lora"]))
    assert loss(optax.apply_updates(variables["lora"], updates)) < loss(variables["lora"])


def test_new_adapters_change_nothing(rng):
    x = jnp.asarray(rng.normal(size=(T, H)), jnp.float32)
    layer = jmx.nnx.MoE(H, I, E, K, lora=LoRA(R), rngs=nnx.Rngs(0))
    with_them = layer(x)
    layer.adapt(None)
    assert layer.adapters is None
    assert_alike(with_them, layer(x))
    assert not [name for name in vars(layer) if name.startswith("lora_")]


def test_a_state_of_an_optimizer_over_frozen_weights_is_an_error(rng):
    optimizer = training.refuse_frozen(optax.adam(1e-3))
    layer = jmx.nnx.MoE(H, I, E, K, lora=LoRA(R), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"`params` \(with .*down_values.*gate_up_scales.* must not"):
        nnx.Optimizer(layer, optimizer, wrt=nnx.Variable)
    with pytest.raises(TypeError, match=r"gate_up.values"):
        optimizer.init({"moe": experts_of(rng), "lora": {"a": jnp.ones(3)}})
    module = jmx.linen.MoE(H, I, E, K, lora=LoRA(R))
    variables = module.init(jax.random.key(0), jnp.ones((T, H)))
    with pytest.raises(TypeError, match="down_scales"):
        optimizer.init(variables)
    optimizer.init({"params": variables["params"], "lora": variables["lora"]})


def test_frozen_weights_have_no_gradients(rng):
    experts = experts_of(rng, format="int8_channel")
    adapters, x = adapters_of(rng, experts), jnp.ones((T, H))
    with pytest.raises(TypeError, match=r"no gradient of `gate_up.scales`"):
        jax.grad(lambda e: moe(x, routing_of(rng), e, adapters).sum(), allow_int=True)(experts)


@pytest.mark.costly
def test_gradients_of_biases_beside_adapters(rng):
    experts = experts_of(rng)
    adapters, routing, x = adapters_of(rng, experts), routing_of(rng), jnp.asarray(rng.normal(size=(T, H)), jnp.float32)
    given = {"gate_up_bias": experts.gate_up_bias, "down_bias": experts.down_bias}

    def total(function, biases):
        its = experts.with_arrays(experts.arrays() | biases)
        return jnp.square(function(x, routing, its, adapters)).sum()

    def reference(x, routing, experts, adapters):
        return dense(x, routing, experts, adapters, GATED)

    got, expected = (jax.grad(total, argnums=1)(f, given) for f in (moe, reference))
    assert_alike(jax.tree.map(jnp.float32, got), jax.tree.map(jnp.float32, expected), 2e-2)


@pytest.mark.parametrize("shared", [(), ("b",)])
@pytest.mark.parametrize("form", FORMS)
def test_merged_weights_compute_the_same(form, shared, rng):
    experts = experts_of(rng, ORDERS[rng.integers(4)])
    adapters = adapters_of(rng, experts, FORMS[form], shared)
    routing, x = routing_of(rng), jnp.asarray(rng.normal(size=(T, H)), jnp.float32)
    gate_up, down = lora.merge(experts, adapters, dtype=jnp.float32)
    plain, more = experts.dequantize(jnp.float32), dense(x, routing, experts, adapters, GATED)
    assert error(gate_up, plain[0]) > 0.01 or error(down, plain[1]) > 0.01
    order = experts.gate_up_order
    fine = jmx.Experts.quantize(
        gate_up, down, experts.gate_up_bias, experts.down_bias, gate_up_order=order, format="int8_channel"
    )
    assert error(jmx.moe(x, routing, fine, activation=GATED), more) < 3e-2
    rounded = lora.merge(experts, adapters)
    assert {a.dtype for a in rounded} == {jnp.dtype(jnp.bfloat16)}
    assert_alike(rounded, (gate_up, down), 4e-3)


def test_requantizing_reports_what_it_loses(rng):
    experts = experts_of(rng)
    adapters = adapters_of(rng, experts, ("down",))
    coarse, fine = (lora.requantize(experts, adapters, format=format) for format in (None, "int8_channel"))
    assert coarse.experts.format == experts.format
    assert coarse.experts.layout == experts.layout
    assert np.isnan(coarse.errors["gate_up"]).all()
    assert (coarse.relative_errors["gate_up"] == 0).all()
    merged = lora.merge(experts, adapters, dtype=jnp.float32)[1]
    before, after = (each.dequantize(jnp.float32)[1] for each in (experts, coarse.experts))
    for e in range(E):
        lost, changed = (float(jnp.linalg.norm(d[e])) for d in (after - merged, merged - before))
        np.testing.assert_allclose(coarse.errors["down"][e], lost / changed, rtol=1e-4)
    assert (fine.errors["down"] < coarse.errors["down"]).all()


def wrong(experts):
    good: Any = LoRA(R).random(jax.random.key(0), experts)
    a, b = good.down.a, good.down.b

    def down(a, b, scale=1.0):
        return Adapters(down=Adapter(a, b, scale))

    return {
        "none": (Adapters(), "`adapters` .* must have one of"),
        "a half and both": (Adapters(gate_up=good.gate_up, up=good.gate_up), "'gate_up', or its halves"),
        "rank 0": (down(a[:, :0], b[..., :0]), r"`adapters.down.a` \(shape \(4, 0, 96\)\) must be .* r of 1 or more"),
        "other ranks": (down(a, b[..., :1]), r"`adapters.down.b` .* must be \(..., 64, 3\)"),
        "other sizes": (down(a[..., 1:], b), r"`adapters.down.a` .* must be \(..., r, 96\)"),
        "other experts": (down(a[1:], b), r"`adapters.down.a` .* 4 experts"),
        "integers": (down(a.astype(jnp.int32), b), r"`adapters.down.a` \(dtype int32\)"),
        "8 bits": (down(a, b.astype(jnp.float8_e4m3fn)), r"`adapters.down.b` \(dtype float8_e4m3fn\)"),
        "no array": (down(a, "x"), "`adapters.down.b`"),
        "scale": (down(a, b, float("nan")), "`adapters.down.scale`"),
        "no adapter": (dataclasses.replace(good, down=(a, b)), "`adapters.down`"),
    }


@pytest.mark.parametrize("case", sorted(wrong(jmx.Experts.random(jax.random.key(0), E, H, I, gate_up_order=None))))
def test_adapters_that_do_not_fit_are_named(case, rng):
    experts = experts_of(rng)
    adapters, message = wrong(experts)[case]
    with pytest.raises((ValueError, TypeError), match=message):
        moe(jnp.ones((T, H)), routing_of(rng), experts, adapters)


@pytest.mark.usefixtures("on_cpu")  # for `cpu`
def test_what_cannot_have_adapters(rng):
    experts, x, routing = experts_of(rng), jnp.ones((T, H)), routing_of(rng)
    adapters = adapters_of(rng, experts)
    with pytest.raises(ValueError, match=r"`adapters` .* must be None for ShardedExperts"):
        jmx.moe(x, routing, jmx.ShardedExperts.of(experts, 2), activation=GATED, adapters=adapters)
    with pytest.raises(ValueError, match="`spare_experts`"):
        jmx.nnx.MoE(H, I, E, K, lora=LoRA(R), spare_experts=2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="`axes`"):
        jmx.linen.MoE(H, I, E, K, lora=LoRA(R), axes={"intermediate": "x"})
    with pytest.raises(ValueError, match=r"`lora.targets`"):
        jmx.nnx.MoE(H, I, E, K, activation="relu", lora=LoRA(R, targets=("up",)), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"adapters: .* computes both products at once"):
        moe(x, routing, experts, adapters, backend="cpu")


def test_explain_says_which_backends_take_adapters():
    layer = jmx.nnx.MoE(H, I, E, K, lora=LoRA(R), backend="xla", rngs=nnx.Rngs(0))
    explanation = str(jmx.explain(layer, jnp.ones((T, H))))
    assert "with adapters" in explanation


@pytest.mark.costly
@pytest.mark.parametrize("form", ["both", "apart", "up alone"])
def test_a_backend_may_add_before_the_activation(form, rng, monkeypatch):
    """Where nothing is differentiated; gradients are those of the layer without it."""
    experts = experts_of(rng, ORDERS[rng.integers(4)])
    adapters, routing = (
        adapters_of(rng, experts, FORMS[form], [(), ("b",)][rng.integers(2)], jnp.bfloat16),
        routing_of(rng),
    )
    x = jnp.asarray(rng.normal(size=(T, H)), jnp.bfloat16)
    calls = []

    def activated(self, product, of_rows, inner, b):
        calls.append(of_rows.shape)
        h = self.product(product, of_rows, jnp.float32)
        ids = jnp.minimum(product.sorted.expert_of(jnp.arange(len(h), dtype=jnp.int32)), E - 1)
        b = b.astype(jnp.float32)
        more = jnp.einsum("rk,rnk->rn", inner.astype(jnp.float32), b[ids] if b.ndim == 3 else b[None].repeat(len(h), 0))
        more += product.experts.take_bias("gate_up", ids).astype(jnp.float32)
        parts = split_gate_up(h + more, product.experts.gate_up_order)
        return product.problem.activation(*parts).astype(jnp.bfloat16)

    def run():
        jax.clear_caches()
        y, vjp = jax.vjp(lambda x, adapters: moe(x, routing, experts, adapters, backend="xla"), x, adapters)
        return (y, vjp(y)), moe(x, routing, experts, adapters, backend="xla")

    trained, y = run()
    monkeypatch.setattr(Xla, "takes_added", lambda self, problem, rank: rank in (R, 2 * R), raising=False)
    monkeypatch.setattr(Xla, "activated", activated, raising=False)
    again, at_once = run()
    assert calls
    assert not jnp.array_equal(at_once, y)
    jax.tree.map(np.testing.assert_array_equal, again, trained)
    assert_alike(at_once.astype(jnp.float32), y.astype(jnp.float32), most=2e-2)
    with_scales = experts_of(rng, format="int8_channel")
    with pytest.raises(TypeError, match=r"no gradient of `gate_up.scales`"):
        jax.grad(lambda e: moe(x, routing, e, adapters, backend="xla").sum(), allow_int=True)(with_scales)
