"""Master weights, beside the experts that they are rounded to: results, gradients, transformations, meshes."""

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
from jmx.numerics import input_formats
from jmx.training import QAT, MasterExperts

E, H, I, K, T = 4, 64, 96, 2, 13  # noqa: E741
FORMATS = (
    *("mxfp4", "nvfp4", "mxint4", "mxfp8", "fp8_tensor", "fp8_channel", "fp8_block"),
    *("int8_channel", "int8_g32", "int4_g32", "int4_g32_asym", "int8_channel_asym"),
)
GRADIENTS = ("straight_through", "clipped")
ORDERS = ("interleaved", "concatenated", "interleaved_up_first", None)


def normal(rng, *shape, dtype: Any = jnp.float32):
    return jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, dtype)


def masters_of(rng, format="mxfp4", gradients="straight_through", order: str | None = "interleaved", bias=True, **more):
    dtype = more.pop("dtype", jnp.float32)
    rows = I if order is None else 2 * I
    weights = normal(rng, E, rows, H, dtype=dtype), normal(rng, E, H, I, dtype=dtype)
    biases = (normal(rng, E, rows), normal(rng, E, H)) if bias else ()
    return MasterExperts.of(*weights, *biases, gate_up_order=order, format=format, gradients=gradients, **more)


def routing_of(rng, tokens=T):
    ids = np.stack([rng.permutation(E + 1)[:K] for _ in range(tokens)]) - 1  # -1: nowhere
    return jmx.Routing(jnp.asarray(ids, jnp.int32), jnp.asarray(rng.uniform(0.1, 1, ids.shape), jnp.float32))


def activation_of(experts):
    return jmx.SwiGLU(1.702, 1.0, 7.0) if experts.gate_up_order is not None else jmx.GELU(approximate=False)


def quantized(masters, **options):
    named = masters.arrays()
    return jmx.Experts.quantize(
        *(named.get(name) for name in ("gate_up", "down", "gate_up_bias", "down_bias")),
        gate_up_order=masters.gate_up_order,
        format=masters.format,
        **options,
    )


def moe(x, routing, experts, **options):
    return jmx.moe(x, routing, experts, activation=activation_of(experts), **options)


def dense(x, routing, masters, gate_up, down, weights_on="output", inputs=None):
    """The layer of float weights; `inputs`: the format that they are rounded to, straight through."""
    highest = jax.lax.Precision.HIGHEST

    def rounded(a):
        if inputs is None:
            return a
        format = input_formats.INPUT_FORMATS[inputs]
        return a + jax.lax.stop_gradient(input_formats.dequantize(input_formats.quantize(a, format), format) - a)

    chosen = (routing.expert_ids[..., None] == jnp.arange(E)).astype(jnp.float32)
    weights = jnp.einsum("tk,tke->te", routing.weights, chosen, precision=highest)
    rows = x[:, None] * (weights[..., None] if weights_on == "input" else jnp.ones((E, 1)))
    h = jnp.einsum("teh,enh->ten", rounded(rows), gate_up, precision=highest) + masters.gate_up_bias
    a = activations.apply(activation_of(masters), h, masters.gate_up_order)
    out = jnp.einsum("tei,ehi->teh", rounded(a), down, precision=highest) + masters.down_bias
    return jnp.einsum("teh,te->th", out, chosen.sum(1) if weights_on == "input" else weights, precision=highest)


def error(got, expected):
    return float(jnp.linalg.norm((got - expected).astype(jnp.float32)) / (jnp.linalg.norm(expected) + 1e-30))


def assert_alike(got, expected, most=1e-5):
    found = jax.tree.map(error, got, expected)
    assert max(jax.tree.leaves(found)) < most, found


def assert_equal(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def limits(experts):
    """The least and the largest value of each weight's block: those of its dequantized elements' least and largest."""
    found = []
    for q in (experts.gate_up, experts.down):
        canonical = jmx.unpack(q, experts.format)
        kind = canonical.values.dtype
        integer = jnp.issubdtype(kind, jnp.integer)
        info = jnp.iinfo(kind) if integer else jnp.finfo(kind)
        ends = [np.full(canonical.values.shape, float(end), np.float32).astype(kind) for end in (info.min, info.max)]
        both = [canonical._replace(values=jnp.asarray(end)) for end in ends]
        found.append([np.asarray(jmx.dequantize(each, jnp.float32, experts.format)) for each in both])
    return found


# Rounding


@pytest.mark.sampled(4)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("order", ORDERS)
def test_rounded_weights_have_the_bits_of_quantized_ones(format, order, rng):
    masters = masters_of(rng, format, order=order, dtype=jnp.bfloat16 if rng.integers(2) else jnp.float32)
    expected = quantized(masters)
    assert_equal(masters.quantize(), expected)
    assert_equal(jax.jit(lambda masters: masters.quantize())(masters), expected)


@pytest.mark.parametrize("rule", ["round_up", "round_even"])
def test_scale_rules_of_mxfp4(rule, rng):
    masters = masters_of(rng, scale_rule=rule)
    assert_equal(masters.quantize(), quantized(masters, scale_rule=rule))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("gradients", GRADIENTS)
def test_rounded_floats_have_gradients(gradients, format, rng):
    weights, d = normal(rng, 3, 32, 128), normal(rng, 3, 32, 128)
    got, vjp = jax.vjp(lambda w: training.rounded(w, format, gradients=gradients), weights)
    q = jmx.quantize(weights, format)
    assert_equal(got, jmx.dequantize(q, jnp.float32, format))
    (found,) = vjp(d)
    saturated = np.abs(np.asarray(weights)) > np.abs(np.asarray(got))  # those outside are rounded towards zero
    kept = np.asarray(found) == np.asarray(d)
    assert kept.all() if gradients == "straight_through" else (kept | ((np.asarray(found) == 0) & saturated)).all()
    if gradients == "clipped" and format in ("mxfp4", "mxint4", "int4_g32"):
        assert not kept.all()


def test_a_block_with_nan_is_nan_and_has_no_clipped_gradient(rng):
    weights = normal(rng, 4, 64).at[1, 3].set(jnp.nan)
    got, vjp = jax.vjp(lambda w: training.rounded(w, gradients="clipped"), weights)
    block = np.zeros((4, 64), bool)
    block[1, :32] = True
    np.testing.assert_array_equal(np.isnan(got), block)
    (found,) = vjp(jnp.ones_like(weights))
    assert not np.asarray(found)[block].any()


# The layer


@pytest.mark.costly
@pytest.mark.sampled(6)
@pytest.mark.parametrize("format", [name for name in FORMATS if name != "fp8_block"])
@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("weights_on", ["output", "input"])
@pytest.mark.parametrize("inputs", [None, "mxfp8", "fp8_token"])
def test_results_are_those_of_quantized_experts_and_gradients_those_of_floats(
    inputs, weights_on, order, gradients, format, rng
):
    masters, routing = masters_of(rng, format, gradients, order), routing_of(rng)
    x, dy = normal(rng, T, H), normal(rng, T, H)
    experts = quantized(masters)
    options = {"weights_on": weights_on, "input_format": inputs}
    assert_equal(moe(x, routing, masters, **options), moe(x, routing, experts, **options))

    @jax.jit
    def of_layer(x, weights, masters):
        its = routing._replace(weights=weights)
        return jax.vjp(lambda *a: moe(a[0], its._replace(weights=a[1]), a[2], **options), x, weights, masters)[1](dy)

    dx, dweights, found = of_layer(x, routing.weights, masters)

    def of_floats(x, weights, masters, gate_up, down):
        its = routing._replace(weights=weights)
        return dense(x, its, masters, gate_up, down, weights_on, inputs)

    arguments = x, routing.weights, masters, *experts.dequantize(jnp.float32)
    dx2, dweights2, biases, *expected = jax.jit(lambda *a: jax.vjp(of_floats, *a)[1](dy))(*arguments)
    if gradients == "clipped":
        for i, (weight, (least, most)) in enumerate(
            zip((masters.gate_up, masters.down), limits(masters.quantize()), strict=True)
        ):
            expected[i] = jnp.where((least <= weight) & (weight <= most), expected[i], 0)
    got = dx, dweights, found.gate_up_bias, found.down_bias, found.gate_up, found.down
    close = 1e-5 if inputs is None else 2e-2  # a sum in another order may be rounded to another input
    assert_alike(got, (dx2, dweights2, biases.gate_up_bias, biases.down_bias, *expected), close)


@pytest.mark.costly
def test_bfloat16_tokens_and_masters(rng):
    masters, routing = masters_of(rng, dtype=jnp.bfloat16, bias=False), routing_of(rng, 300)
    x, dy = (normal(rng, 300, H, dtype=jnp.bfloat16) for _ in range(2))
    y, vjp = jax.vjp(lambda masters: moe(x, routing, masters), masters)
    assert_equal(y, moe(x, routing, quantized(masters)))
    (got,) = vjp(dy)
    assert got.gate_up.dtype == got.down.dtype == jnp.bfloat16
    floats = MasterExperts.of(
        *quantized(masters).dequantize(jnp.float32),
        jnp.zeros((E, 2 * I)),
        jnp.zeros((E, H)),
        gate_up_order="interleaved",
    )
    wide = x.astype(jnp.float32)
    _, of_floats = jax.vjp(lambda *both: dense(wide, routing, floats, *both), floats.gate_up, floats.down)
    assert_alike((got.gate_up, got.down), of_floats(dy.astype(jnp.float32)), 2e-2)


@pytest.mark.costly
@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize("how", ["jit", "remat", "scan", "vmap x", "vmap masters"])
def test_transformations(how, gradients, rng):
    masters, routing = masters_of(rng, gradients=gradients), routing_of(rng)
    x, dy = normal(rng, 2, T, H), normal(rng, 2, T, H)

    def one(x, masters):
        return moe(x, routing, masters)

    stacked = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a[::-1]]), masters)

    def of(how, x, masters, stacked):
        if how == "vmap x":
            return jax.vmap(one, (0, None))(x, masters)
        if how == "vmap masters":
            return jax.vmap(one)(x, stacked)
        if how == "scan":
            return jax.lax.scan(lambda x, its: (x + one(x, its), None), x[0], stacked)[0][None]
        return jax.checkpoint(one)(x[0], masters)[None] if how == "remat" else one(x[0], masters)[None]

    def plain(x, masters, stacked):
        layers = [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(2)]
        if how == "vmap x":
            return jnp.stack([one(each, masters) for each in x])
        if how == "vmap masters":
            return jnp.stack([one(each, its) for each, its in zip(x, layers, strict=True)])
        if how == "scan":
            y = x[0] + one(x[0], layers[0])
            return (y + one(y, layers[1]))[None]
        return one(x[0], masters)[None]

    def with_gradients(function):
        def run(*arguments):
            y, vjp = jax.vjp(function, *arguments)
            return y, vjp(dy[: y.shape[0]])

        return run

    arguments = x, masters, stacked
    got = jax.jit(with_gradients(lambda *a: of(how, *a)))(*arguments)
    assert_alike(got, with_gradients(plain)(*arguments))


@pytest.mark.costly
@pytest.mark.devices(4)
@pytest.mark.parametrize("kind", ["Auto", "Explicit", "Manual"])
@pytest.mark.parametrize("tokens", [None, "x"])
def test_a_mesh_that_divides_the_experts(tokens, kind, rng):
    masters, routing = masters_of(rng, gradients="clipped"), routing_of(rng, 16)
    x, dy = normal(rng, 16, H), normal(rng, 16, H)
    types = (AxisType.Explicit if kind == "Explicit" else AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("x",), types, devices=jax.devices()[:4])
    split = jmx.Split(expert="x", tokens=tokens, mesh=None if kind == "Manual" else mesh)

    def divided(x, routing, masters):
        if kind != "Manual":
            return moe(x, routing, masters, split=split)
        specs = P(tokens), P(tokens), jax.tree.map(lambda _: P("x"), masters)
        run = jax.shard_map(
            lambda *a: moe(*a, split=split), mesh=mesh, in_specs=specs, out_specs=P(tokens), check_vma=True
        )
        return run(x, routing, masters)

    def with_gradients(function, dy):
        def run(x, weights, masters, dy):
            its = (x, weights, masters)
            y, vjp = jax.vjp(lambda x, w, m: function(x, routing._replace(weights=w), m), *its)
            return y, vjp(dy)

        return jax.device_get(jax.jit(run)(x, routing.weights, masters, dy))

    expected = with_gradients(moe, dy)
    with jax.set_mesh(mesh):
        got = with_gradients(divided, jax.reshard(dy, P(tokens)) if kind == "Explicit" and tokens else dy)
    assert_alike(got, expected)


# Modules


@pytest.mark.costly
@pytest.mark.sampled(3)
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int8_channel", "int4_g32_asym", "fp8_tensor"])
@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_modules_train(kind, gradients, format, rng):
    x, target = normal(rng, 2, T, H), normal(rng, 2, T, H)
    qat = QAT(gradients, dtype=jnp.bfloat16 if rng.integers(2) else jnp.float32)
    optimizer = optax.adam(1e-2)
    if kind == "nnx":
        layer = jmx.nnx.MoE(H, I, E, K, format=format, bias=True, qat=qat, rngs=nnx.Rngs(0))
        state, graph = nnx.state(layer, nnx.Param), layer
        assert {"gate_up", "down", "gate_up_bias", "down_bias", "router"} == {*state}
        trained = nnx.Optimizer(layer, optimizer, wrt=nnx.Param)

        @nnx.jit
        def step(layer, trained):
            loss, gradients = nnx.value_and_grad(lambda layer: jnp.square(layer(x) - target).mean())(layer)
            trained.update(layer, gradients)
            return loss

        losses = [step(layer, trained) for _ in range(4)]
        experts, routing = layer.experts, layer.route(x)
        assert_equal(layer(x, routing), jmx.moe(x, routing, experts, activation=layer.activation))
        assert vars(graph)["gate_up"].get_value().dtype == qat.dtype
    else:
        module = jmx.linen.MoE(H, I, E, K, format=format, bias=True, qat=qat)
        variables = module.init(jax.random.key(0), x)
        assert {*variables} == {"params"}
        state = optimizer.init(variables)

        @jax.jit
        def update(variables, state):
            def loss_of(variables):
                return jnp.square(jnp.asarray(module.apply(variables, x)) - target).mean()

            loss, gradients = jax.value_and_grad(loss_of)(variables)
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(variables, updates), state, loss

        losses = []
        for _ in range(4):
            variables, state, loss = update(variables, state)
            losses.append(loss)
        experts = module.experts_of(variables)
        routing: Any = module.apply(variables, x, method="route")
        assert_equal(module.apply(variables, x, routing), jmx.moe(x, routing, experts, activation=jmx.SwiGLU()))
    assert experts.format.name == format
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_modules_start_from_quantized_experts(kind, rng):
    experts = quantized(masters_of(rng))
    x, routing = normal(rng, T, H), routing_of(rng)
    given = {"bias": True, "experts": experts, "qat": QAT(), "router": False}
    if kind == "nnx":
        layer = jmx.nnx.MoE(H, I, E, K, **given, rngs=nnx.Rngs(0))
        y, its = layer(x, routing), layer.experts
    else:
        module = jmx.linen.MoE(H, I, E, K, **given)
        variables = module.init(jax.random.key(0), x, routing)
        y, its = module.apply(variables, x, routing), module.experts_of(variables)
    assert_equal(its.dequantize(jnp.float32), experts.dequantize(jnp.float32))
    assert_alike(y, jmx.moe(x, routing, experts, activation=jmx.SwiGLU()))


@pytest.mark.costly
@pytest.mark.devices(4)
def test_a_module_over_a_mesh(rng):
    mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,), devices=jax.devices()[:4])
    x = normal(rng, 16, H)
    layer = jmx.nnx.MoE(H, I, E, K, qat=QAT(), rngs=nnx.Rngs(0))
    held: Any = layer.held
    axes = {"expert": "x", "token": "x"}
    with jax.set_mesh(mesh):
        divided = jmx.nnx.MoE(H, I, E, K, experts=held, qat=QAT(), axes=axes, rngs=nnx.Rngs(0))
        assert vars(divided)["gate_up"].get_value().sharding.spec[0] == "x"
        divided.router.kernel.set_value(layer.router.kernel[...])
        got, gradients = nnx.jit(nnx.value_and_grad(lambda layer: jnp.square(layer(x)).sum()))(divided)
    expected, whole = nnx.jit(nnx.value_and_grad(lambda layer: jnp.square(layer(x)).sum()))(layer)
    assert_alike(jax.device_get((got, gradients["gate_up"][...])), jax.device_get((expected, whole["gate_up"][...])))


def test_orbax_keeps_master_weights(rng, tmp_path):
    layer = jmx.nnx.MoE(H, I, E, K, qat=QAT("clipped"), rngs=nnx.Rngs(int(rng.integers(99))))
    jmx.checkpoint.orbax.save(tmp_path / "saved", layer)
    like = nnx.eval_shape(lambda: jmx.nnx.MoE(H, I, E, K, qat=QAT("clipped"), rngs=nnx.Rngs(0)))
    assert_equal(jmx.checkpoint.orbax.restore(tmp_path / "saved", like).held, layer.held)


def test_a_layer_of_shapes_is_explained_as_one_of_arrays():
    def make():
        return jmx.nnx.MoE(H, I, E, K, bias=True, qat=QAT(), rngs=nnx.Rngs(0))

    x = jax.ShapeDtypeStruct((T, H), jnp.float32)
    layer, shapes = make(), nnx.eval_shape(make)
    assert shapes.problem(x) == layer.problem(x)
    assert jmx.explain(shapes, x).chosen == jmx.explain(layer, x).chosen
    masters = shapes.held
    assert isinstance(masters, MasterExperts)
    with pytest.raises(TypeError, match=r"`experts` \(a ShapeDtypeStruct .*\) must have values"):
        masters.quantize()


# Errors


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "int4_g32_order"}, r"`format` \(='int4_g32_order'\) must have no order"),
        ({"format": "int8_channel", "scale_rule": "round_up"}, r"`scale_rule` \(='round_up'\) must be 'ocp'"),
        ({"gradients": "none"}, r"`gradients` \(='none'\) must be one of"),
        ({"down": np.ones((E, H, I), np.float16)}, r"`down` \(dtype float16\) must be float32 or bfloat16"),
        ({"down": np.ones((E, H, I + 32), np.float32)}, r"`gate_up` \(shape .*\) must be \(4, 256, 64\)"),
        (
            {"down": np.ones((E, H, I), jnp.bfloat16)},
            r"`down` \(dtype bfloat16\) must be float32, as `gate_up`",
        ),
        ({"down_bias": np.ones((E, I), np.float32)}, r"`down_bias` \(shape \(4, 96\)\) must be \(4, 64\)"),
        (
            {"gate_up": np.ones((E, 80, H), np.float32), "down": np.ones((E, H, 40), np.float32)},
            r"`intermediate_size` \(=40\) must be a multiple of 32",
        ),
    ],
)
def test_wrong_master_weights(changed, message):
    given = {
        "gate_up": np.ones((E, 2 * I, H), np.float32),
        "down": np.ones((E, H, I), np.float32),
        "gate_up_order": "interleaved",
    }
    with pytest.raises((ValueError, TypeError), match=message):
        MasterExperts.of(**given | changed)


def test_layers_that_cannot_have_master_weights(rng):
    masters, adapters = masters_of(rng), lora.LoRA(2)
    layer = jmx.nnx.MoE(
        H, I, E, K, bias=True, qat=QAT(), experts=masters, gate_up_order="interleaved", rngs=nnx.Rngs(0)
    )
    for given, message in (
        ({"lora": adapters}, "`lora`"),
        ({"spare_experts": 2}, r"`spare_experts` \(=2\) must be 0 for master weights"),
        ({"axes": {"hidden": "x"}}, "`axes`"),
        ({"experts": masters, "bias": True, "qat": None}, "`experts`"),
        ({"experts": masters, "bias": False}, r"`bias` \(=False\)"),
        ({"experts": masters, "bias": True, "format": "int8_channel"}, "`format`"),
        ({"experts": masters, "bias": True, "qat": QAT("clipped")}, "`gradients`"),
        ({"experts": masters, "bias": True, "qat": QAT(dtype=jnp.bfloat16)}, "`experts.gate_up`"),
    ):
        options: dict[str, Any] = {"qat": QAT(), "gate_up_order": "interleaved"} | given
        with pytest.raises((ValueError, TypeError), match=message):
            jmx.nnx.MoE(H, I, E, K, **options, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="`layout` must not be given to a layer of master weights"):
        layer.prepare("canonical")
    with pytest.raises(ValueError, match="`new` must not be given to a layer of master weights"):
        layer.update(layer.experts)
    with pytest.raises(ValueError, match="`adapters` must be None for a layer with `qat`"):
        layer.adapt(adapters.random(jax.random.key(0), layer.experts))
    with pytest.raises(ValueError, match="`split`"):
        moe(normal(rng, T, H), routing_of(rng), masters, split=jmx.Split(hidden="x"))
    with pytest.raises(ValueError, match="padding"):
        QAT().masters(layer.experts.pad(intermediate_size=I + 32))
    with pytest.raises(ValueError, match="declare no input format"):
        QAT().masters(layer.experts.with_inputs("mxfp8"))


def test_a_loss_or_weight_that_is_not_finite_stops_training(rng):
    good = {"loss": 1.5, "weights": normal(rng, 4, 4), "ids": jnp.arange(3)}
    training.check_finite(good, step=7)
    bad = good | {"weights": good["weights"].at[1, 2].set(jnp.nan).at[0, 0].set(jnp.inf)}
    with pytest.raises(FloatingPointError, match=r"step 8: `tree\['weights'\]` has 2 NaN or .* of 16; .* is /good/7"):
        training.check_finite(bad, step=8, kept="/good/7")
    with pytest.raises(FloatingPointError, match=r"step 9: `tree\['loss'\]`"):
        training.check_finite(bad | {"loss": float("nan")}, step=9)
    with pytest.raises(ValueError, match="is traced"):
        jax.jit(lambda loss: training.check_finite(loss, step=0))(1.0)
