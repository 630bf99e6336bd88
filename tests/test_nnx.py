"""The NNX module: under every transformation of jax and nnx, on meshes, with routing of all kinds, and its errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmx
import jmx.nnx
from jmx.backends import resolve_layout
from jmx.nnx import CorrectionBias, MoE, Quantized

pytestmark = [pytest.mark.costly, pytest.mark.sampled(3)]

H, I, E, K = 64, 96, 8, 2  # noqa: E741
GPT_OSS = jmx.SwiGLU(alpha=1.702, beta=1.0, limit=7.0)
LAYOUTS = ("packed", "canonical")


def make(seed=0, **options):
    return MoE(H, I, E, K, **({"activation": GPT_OSS, "bias": True, "rngs": nnx.Rngs(seed)} | options))


@pytest.fixture(scope="module", params=LAYOUTS)
def layer(request):
    return make(layout=request.param)


@pytest.fixture(scope="module")
def packed():
    return make(layout="packed")


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.normal(size=(3, 5, H)), jnp.float32)


def seed(rng):
    return int(rng.integers(2**31))


def close(a, b, bound=1e-5):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)
    return True


def expected(layer, x, routing=None):
    """The layer in numpy, in float64, by its definition: every expert on every token."""
    gate_up, down = (np.asarray(w, np.float64) for w in layer.experts.dequantize(jnp.float32))
    tokens = np.asarray(x, np.float64).reshape(-1, H)
    if routing is None:
        kernel, bias = (np.asarray(v.get_value(), np.float64) for v in (layer.router.kernel, layer.router.bias))
        logits = tokens @ kernel + bias
        ids = np.argsort(-logits, axis=1)[:, :K]
        powers = np.exp(np.take_along_axis(logits, ids, 1))
        routing = ids, powers / powers.sum(1, keepdims=True)
    h = np.einsum("th,enh->ten", tokens, gate_up) + np.asarray(layer.gate_up_bias.get_value(), np.float64)
    gate, up = (np.split(h, 2, -1)) if layer.skeleton.gate_up_order == "concatenated" else (h[..., ::2], h[..., 1::2])
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    a = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
    out = np.einsum("ten,ehn->teh", a, down) + np.asarray(layer.down_bias.get_value(), np.float64)
    picked = np.take_along_axis(out, np.asarray(routing[0])[..., None], 1)
    return (picked * np.asarray(routing[1], np.float64)[..., None]).sum(1).reshape(x.shape)


# What it computes


def test_it_computes_its_definition_for_any_leading_axes(layer, x):
    close(layer(x), expected(layer, x))
    for shape in ((15, H), (1, 3, 5, H), (5, 3, H)):
        np.testing.assert_array_equal(layer(x.reshape(shape)).reshape(x.shape), layer(x))
    close(layer(x[0, 0]), expected(layer, x[0, 0]))
    assert layer(x[:, :0]).shape == (3, 0, H)
    assert layer(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_logits_and_routing_given(layer, x):
    logits = layer.router(x)
    np.testing.assert_array_equal(layer(x, logits), layer(x))
    np.testing.assert_array_equal(layer(x, jmx.Logits(logits, jmx.TopKSoftmax(K))), layer(x))
    routing = layer.route(x)
    assert routing.expert_ids.shape == routing.weights.shape == (3, 5, K)
    close(layer(x, routing), layer(x))
    one = jmx.Routing(jnp.full((3, 5, 1), 6), jnp.full((3, 5, 1), 0.5))
    close(layer(x, one), expected(layer, x, (np.full((15, 1), 6), np.full((15, 1), 0.5))))


def test_masked_tokens_route_nowhere(packed, x, rng):
    mask = jnp.asarray(rng.random((3, 5)) < 0.5).at[0, 0].set(False).at[0, 1].set(True)
    y = packed(x.at[0, 0].set(jnp.nan), mask=mask)
    np.testing.assert_array_equal(np.asarray(y)[~np.asarray(mask)], 0)
    close(y[mask], packed(x)[mask])
    counts = jmx.token_counts(packed.route(x, mask), E)
    assert int(counts.sum()) == K * int(mask.sum())
    np.testing.assert_array_equal(
        counts, np.bincount(np.asarray(packed.route(x[mask]).expert_ids).ravel(), minlength=E)
    )
    with pytest.raises(ValueError, match=re.escape("`mask` (shape (3,)) must be (3, 5)")):
        packed(x, mask=mask[:, 0])


def test_a_layer_without_router(x):
    layer = make(router=False)
    assert layer.router is None
    for call in (layer, layer.route):
        with pytest.raises(
            ValueError, match=re.escape("`routing` must be given: this layer was made with router=False")
        ):
            call(x)
    assert layer(x, jnp.ones((3, 5, E))).shape == x.shape


@pytest.mark.parametrize(
    "method",
    [
        jmx.SigmoidTopK(K, renormalize=True, routed_scaling_factor=2.5),
        jmx.GroupedTopK(K, 4, 2, scoring="sigmoid", renormalize=True, routed_scaling_factor=2.5),
    ],
    ids=["sigmoid", "grouped"],
)
def test_a_correction_bias_steers_the_choice_and_is_no_param(method, x):
    layer = make(routing=method, correction_bias=True, activation=jmx.SiLUAndMul())
    before = layer(x)
    busiest = int(jmx.token_counts(layer.route(x), E).argmax())
    layer.correction_bias.set_value(jnp.zeros(E).at[busiest].set(-10.0))
    assert int(jmx.token_counts(layer.route(x), E)[busiest]) == 0
    assert not np.array_equal(layer(x), before)
    assert isinstance(layer.correction_bias, CorrectionBias)
    grads = nnx.grad(lambda m: (m(x) ** 2).sum())(layer)
    assert "correction_bias" not in grads
    bias = jnp.zeros(E).at[busiest].set(-10.0)
    np.testing.assert_array_equal(layer(x), layer(x, jmx.Logits(layer.router(x), method, bias)))


def test_custom_routing(x):
    def last(logits):
        ids = jnp.broadcast_to(jnp.array([E - 1, 0]), (logits.shape[0], 2))
        return ids, jnp.full(ids.shape, 0.25)

    layer = make(routing=jmx.Custom(K, last))
    close(layer(x), expected(layer, x, (np.tile([E - 1, 0], (15, 1)), np.full((15, 2), 0.25))))


def test_weights_on_the_input(x):
    layer = make(weights_on="input", activation=jmx.ReLU(), bias=False)
    output = make(weights_on="output", activation=jmx.ReLU(), bias=False, experts=layer.experts)
    routing = jmx.Routing(jnp.full((3, 5, 1), 2), jnp.full((3, 5, 1), 0.5))
    close(layer(x, routing), output(x, routing))  # relu is positively homogeneous
    layer, output = make(weights_on="input"), make(weights_on="output")
    assert not np.allclose(layer(x, routing), output(x, routing), rtol=1e-2)
    assert layer.problem(x).weights_on == "input"


# Transformations


def test_jit_in_all_its_forms_traces_once(layer, x):
    traces = []

    def call(layer, x):
        traces.append(1)
        return layer(x)

    for jitted in (jax.jit(call), nnx.jit(call)):
        for _ in range(2):
            close(jitted(layer, x), layer(x))
    graph, state = nnx.split(layer)
    close(jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x), layer(x))
    assert len(traces) == 2


def test_vmap_over_the_batch(packed, x):
    close(jax.vmap(packed)(x), packed(x))
    close(nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(packed, x), packed(x))
    close(jax.jit(jax.vmap(lambda x: jax.vmap(packed)(x)))(x), packed(x))


def test_grad_with_respect_to_x_by_finite_differences(packed, x, rng):
    layer = packed
    direction = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    cotangent = rng.normal(size=x.shape)
    routing = layer.route(x)
    grad = jax.jit(jax.grad(lambda x: (layer(x, routing) * cotangent).sum()))(x)

    def at(step):
        moved = np.asarray(x, np.float64) + step * np.asarray(direction)
        return (expected(layer, moved, [a.reshape(15, K) for a in routing]) * cotangent).sum()

    numeric = (at(1e-5) - at(-1e-5)) / 2e-5
    assert float((grad * direction).sum()) == pytest.approx(numeric, rel=1e-3, abs=1e-2)
    grad = jax.grad(lambda x: (layer(x) ** 2).sum())
    close(jax.jit(jax.vmap(grad))(x), jax.jit(grad)(x))


def test_checkpoint_gives_the_same_gradient(packed, x):
    def grad(call):
        return jax.jit(jax.grad(lambda x: (call(x) ** 2).sum()))(x)

    close(grad(jax.checkpoint(packed)), grad(packed))
    close(grad(nnx.remat(lambda x: packed(x))), grad(packed))


def test_grad_and_optimizer_pass_quantized_weights_by(x, rng):
    layer = make(seed(rng))
    before = jax.tree.map(np.array, layer.experts)
    grads = nnx.grad(lambda m: (m(x) ** 2).sum())(layer)
    assert {name for name, _ in nnx.to_flat_state(grads)} == {
        ("down_bias",),
        ("gate_up_bias",),
        ("router", "bias"),
        ("router", "kernel"),
    }
    assert all(float(jnp.abs(g.astype(jnp.float32)).max()) > 0 for g in jax.tree.leaves(grads))
    optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: ((m(x) - 1) ** 2).mean())(layer)
        optimizer.update(layer, grads)
        return loss

    losses = [float(step(layer, optimizer, x)) for _ in range(5)]
    assert losses[-1] < losses[0]
    for role in ("gate_up", "down"):
        for a, b in zip(getattr(before, role), getattr(layer.experts, role), strict=True):
            np.testing.assert_array_equal(a, b)
    assert not np.array_equal(before.gate_up_bias, layer.gate_up_bias.get_value())


@pytest.mark.parametrize(
    ("layout", "message"),
    [("canonical", "`gate_up.values` (float4_e2m1fn): quantized weights have none"), ("packed", "but got uint8")],
)
def test_a_gradient_of_quantized_weights_is_an_error_that_names_them(layout, message, x):
    layer = make(layout=layout)

    def loss(layer):
        return (layer(x) ** 2).sum()

    for grad in (nnx.grad(loss, argnums=nnx.DiffState(0, Quantized)), nnx.grad(loss, argnums=nnx.DiffState(0, ...))):
        with pytest.raises(TypeError, match=re.escape(message)):
            grad(layer)
    with pytest.raises(TypeError, match=re.escape(message)):
        jax.grad(loss)(layer)


def test_scan_over_stacked_layers(x):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
    def create(rngs):
        return make(rngs=rngs, axes={"expert": "x"})

    stack = create(nnx.Rngs(0))
    assert stack.gate_up_values.get_value().shape[:2] == (3, E)
    assert stack.gate_up_values.get_metadata()["out_sharding"] == ("layers", "x", None, None)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
        return x + layer(x)

    graph, state = nnx.split(stack)
    plain, _ = jax.lax.scan(lambda x, s: (x + nnx.merge(graph, s)(x), None), x, state)
    unrolled = x
    for i in range(3):
        unrolled = unrolled + nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], state))(unrolled)
    close(forward(x, stack), unrolled)
    close(plain, unrolled)
    grad = jax.grad(lambda x: (jax.lax.scan(lambda x, s: (x + nnx.merge(graph, s)(x), None), x, state)[0] ** 2).sum())(
        x
    )
    assert bool(jnp.isfinite(grad).all())
    assert float(jnp.abs(grad).max()) > 0


def test_split_and_merge(layer, x):
    graph, quantized, params, rest = nnx.split(layer, Quantized, nnx.Param, ...)
    assert {path[0] for path, _ in nnx.to_flat_state(quantized)} == {
        "gate_up_values",
        "gate_up_scales",
        "down_values",
        "down_scales",
    }
    assert not jax.tree.leaves(rest)
    np.testing.assert_array_equal(nnx.merge(graph, quantized, params, rest)(x), layer(x))
    assert hash(graph) == hash(nnx.split(layer)[0])


def test_a_120b_sized_module_in_eval_shape_allocates_nothing():
    before = {id(a) for a in jax.live_arrays()}
    for layout in LAYOUTS:
        shapes = nnx.eval_shape(
            lambda layout=layout: MoE(
                2880, 2880, 128, 4, activation=GPT_OSS, bias=True, layout=layout, rngs=nnx.Rngs(0)
            )
        )
        assert shapes.experts.layout == layout
        assert shapes.experts.num_experts == 128
        y = jax.eval_shape(lambda m, x: m(x), shapes, jax.ShapeDtypeStruct((7, 2880), jnp.bfloat16))
        assert y.shape == (7, 2880)
    assert {id(a) for a in jax.live_arrays()} <= before


def test_export_of_a_step_over_a_pure_dict(x):
    layer = make()
    graph, state = nnx.split(layer)
    arrays = nnx.to_pure_dict(state)

    def step(arrays, x):
        restored = jax.tree.map(lambda a: a, state)
        nnx.replace_by_pure_dict(restored, arrays)
        return nnx.merge(graph, restored)(x)

    checks = [export.DisabledSafetyCheck.custom_call("jmx_cpu_grouped_product")]
    exported = export.export(jax.jit(step), disabled_checks=checks)(arrays, x)
    again = export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(arrays, x), jax.jit(step)(arrays, x))
    (tokens,) = export.symbolic_shape("t")
    with pytest.raises(jmx.NoBackendError, match=r"symbolic token count: .*; trace or export with a concrete"):
        export.export(jax.jit(step))(arrays, jax.ShapeDtypeStruct((tokens, H), jnp.float32))


# Updating and moving weights


def test_update_and_prepare_of_a_running_layer(x, rng):
    layer, new = make(seed(rng)), make(seed(rng))
    own = layer.experts.layout
    traces = []

    @nnx.jit
    def call(layer, x):
        traces.append(1)
        return layer(x, jmx.Routing(jnp.full((3, 5, 1), 3), jnp.ones((3, 5, 1))))

    first, wanted = call(layer, x), call(new, x)
    assert len(traces) == 1
    layer.update(new.experts.canonical())
    np.testing.assert_array_equal(call(layer, x), wanted)
    assert len(traces) == 1
    assert not np.array_equal(first, wanted)
    layer.prepare("canonical")
    assert layer.experts.layout == layer.problem(x).layout == "canonical"
    close(call(layer, x), wanted)
    assert len(traces) == 2
    layer.prepare(own)
    np.testing.assert_array_equal(call(layer, x), wanted)
    assert len(traces) == 2
    with pytest.raises(ValueError, match=re.escape("`new.num_experts` (=4) must be 8")):
        layer.update(jax.eval_shape(lambda: MoE(H, I, 4, K, activation=GPT_OSS, bias=True, rngs=nnx.Rngs(0)).experts))


def test_update_inside_a_jitted_step(x, rng):
    layer, new = make(seed(rng)), make(seed(rng))
    nnx.jit(lambda layer, experts: layer.update(experts))(layer, new.experts)
    np.testing.assert_array_equal(layer.gate_up_values.get_value(), new.gate_up_values.get_value())


@pytest.mark.parametrize("order", ["interleaved", "concatenated"])
def test_given_experts_are_the_weights(x, rng, order):
    experts = jmx.Experts.random(jax.random.key(seed(rng)), E, H, I, gate_up_order=order)
    layer = make(experts=experts)
    close(layer(x), expected(layer, x))
    assert layer.experts.gate_up_order == order
    jax.tree.map(np.testing.assert_array_equal, layer.experts.prepare("packed").gate_up, experts.gate_up)


def test_a_float_moe_becomes_a_quantized_one(x, rng):
    class FloatMoE(nnx.Module):
        """Experts as kernels (E, in, out), as Flax has them."""

        def __init__(self, rngs):
            draw = lambda *shape: nnx.Param(0.1 * jax.random.normal(rngs.params(), shape))  # noqa: E731
            self.gate_up, self.down = draw(E, H, 2 * I), draw(E, I, H)

        def __call__(self, x, ids):
            gate, up = jnp.split(jnp.einsum("th,thn->tn", x, self.gate_up.get_value()[ids]), 2, axis=-1)
            return jnp.einsum("tn,tnh->th", nnx.silu(gate) * up, self.down.get_value()[ids])

    model = FloatMoE(nnx.Rngs(seed(rng)))
    experts = jmx.Experts.quantize(
        model.gate_up.get_value().swapaxes(1, 2), model.down.get_value().swapaxes(1, 2), gate_up_order="concatenated"
    )
    layer = make(experts=experts, bias=False, activation=jmx.SiLUAndMul(), router=False)
    ids = jnp.asarray(rng.integers(0, E, 15))
    tokens = x.reshape(15, H)
    got = layer(tokens, jmx.Routing(ids[:, None], jnp.ones((15, 1))))
    close(got, model(tokens, ids), 0.35)  # what 4 bits cost twice over; a wrong transpose or order costs 1.4
    gate_up, down = experts.dequantize(jnp.float32)
    model.gate_up.set_value(gate_up.swapaxes(1, 2))
    model.down.set_value(down.swapaxes(1, 2))
    close(got, model(tokens, ids))


def test_layout_auto_is_the_platforms_own():
    assert make().experts.layout == resolve_layout("auto", jmx.Environment.probe())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": (4, H, I)}, "`num_experts` (=8) must be 4, as `experts` have it"),
        ({"experts": (E, 96, I)}, "`hidden_size` (=64) must be 96, as `experts` have it"),
        ({"experts": (E, H, 64)}, "`intermediate_size` (=96) must be 64, as `experts` have it"),
        ({"experts": (E, H, I), "bias": False}, "`bias` (=False) must be True: `experts` have a `gate_up_bias`"),
        ({"experts": (E, H, I), "gate_up_order": "concatenated"}, "`gate_up_order` (='concatenated') must be 'interl"),
        ({"experts": (E, H, I), "activation": jmx.ReLU()}, "`gate_up_order` (='interleaved') must be None for `activ"),
        ({"gate_up_order": None}, "`gate_up_order` (=None) must be given for `activation` (=SwiGLU("),
        ({"gate_up_order": "mixed"}, "`gate_up_order` (='mixed') must be one of ('auto', "),
        ({"routing": jmx.TopKSoftmax(3)}, "`top_k` (=2) must be that of `routing` (=TopKSoftmax(top_k=3))"),
        ({"correction_bias": True}, "`correction_bias` (=True) must be False for `routing` (=TopKSoftmax(top_k=2))"),
        ({"weights_on": "both"}, "`weights_on` (='both') must be one of ('output', 'input')"),
        ({"axes": {"expert": ("x", None)}}, "`axes['expert']` (=None, a NoneType) must be the name of a mesh axis"),
        ({"axes": {"experts": "x"}}, "must name logical axes among ('expert', 'intermediate', 'hidden', 'token')"),
        ({"layout": "fast"}, "`layout` (='fast') must be one of"),
    ],
)
def test_arguments_that_contradict_are_named(options, message):
    if "experts" in options:
        sizes = options["experts"]
        options = options | {
            "experts": jax.eval_shape(
                lambda: jmx.Experts.random(jax.random.key(0), *sizes, gate_up_order="interleaved")
            )
        }
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make(**options)


def test_sizes_that_cannot_be_are_named():
    with pytest.raises(ValueError, match=re.escape("`hidden_size` (=2870) must be a multiple of 32 for MXFP4")):
        MoE(2870, I, E, K, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=re.escape("`top_k` (=9) must be at most the number of experts (=8)")):
        MoE(H, I, E, 9, rngs=nnx.Rngs(0))


def test_a_backend_that_is_not_there_is_refused_when_the_layer_is_made():
    with pytest.raises(ValueError, match=re.escape("`backend` (='fastest') must be one of")):
        make(backend="fastest")


@pytest.mark.parametrize(
    ("named", "meant"),
    [
        ({"format": "nvfp4"}, {"format": jmx.NVFP4}),
        ({"activation": "gelu_tanh_and_mul"}, {"activation": jmx.GELUAndMul(approximate=True)}),
        ({"routing": "sigmoid_top_k_renormalized"}, {"routing": jmx.SigmoidTopK(K, renormalize=True)}),
        ({"routing": "softmax_top_k", "top_k": np.int64(K)}, {"routing": jmx.SoftmaxTopK(K, renormalize=False)}),
    ],
    ids=lambda options: str(options),
)
def test_names_mean_what_their_tables_have(named, meant, x):
    sizes = {"hidden_size": H, "intermediate_size": np.int64(I), "num_experts": E, "top_k": K}
    layers = [MoE(**{**sizes, **options}, rngs=nnx.Rngs(0)) for options in (named, meant)]
    assert layers[0].problem(x) == layers[1].problem(x)
    assert layers[0].routing == layers[1].routing
    np.testing.assert_array_equal(layers[0](x), layers[1](x))


def test_route_gives_what_the_layer_takes(x, rng):
    layer = make(layout="packed")
    for shape in ((3, 5), (15,), (), (1, 3, 5), (0, 2)):
        here = jnp.asarray(rng.normal(size=(*shape, H)), jnp.float32)
        mask = jnp.asarray(rng.random(shape) < 0.6)
        routing = layer.route(here, mask)
        assert routing.expert_ids.shape == routing.weights.shape == (*shape, K)
        close(layer(here, routing), layer(here, mask=mask))


# Meshes


def test_every_weight_has_partition_metadata():
    axes = {"expert": "x", "intermediate": "y", "hidden": "z"}
    assert nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(make(axes=axes)))) == {
        "gate_up_values": P("x", "y", "z"),
        "gate_up_scales": P("x", "y", "z"),
        "gate_up_bias": P("x", "y"),
        "down_values": P("x", "z", "y"),
        "down_scales": P("x", "z", "y"),
        "down_bias": P("x", "z"),
        "router": {"kernel": P(None, None), "bias": P(None)},
    }


@pytest.mark.devices(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh_weights_are_placed_split(kind, layout, x):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    plain = make(layout=layout)
    with jax.set_mesh(mesh):
        layer = make(layout=layout, axes={"expert": "x"})
        for name, array in layer.experts.arrays().items():
            wanted = NamedSharding(mesh, P("x", *(None,) * (array.ndim - 1)))
            assert array.sharding.is_equivalent_to(wanted, array.ndim), name
            assert array.addressable_shards[0].data.shape[0] == E // 4
            np.testing.assert_array_equal(np.asarray(array), np.asarray(plain.experts.arrays()[name]))
        assert layer.router.kernel.get_value().is_fully_replicated
        layer.update(plain.experts)
        layer.prepare("canonical" if layout == "packed" else "packed")
        assert layer.gate_up_values.get_value().addressable_shards[0].data.shape[0] == E // 4
        close(jax.jit(lambda m, x: m(x))(layer, x), plain(x))


def test_cast_weights_are_refused_by_a_call_and_by_explain(x):
    layer = make(layout="packed")
    nnx.update(layer, jax.tree.map(lambda a: a.astype(jnp.float32), nnx.state(layer)))
    message = re.escape("`experts.gate_up_values` (dtype float32) must be uint8 for mxfp4 weights in 'packed'")
    for call in (layer, layer.problem, lambda x: jmx.explain(layer, x)):
        with pytest.raises(TypeError, match=message):
            call(x)
