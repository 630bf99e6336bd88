"""Tokens per expert that modules record: intermediates of NNX and Linen, under transformations and over meshes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from model_steps import relative_error

import jmx
import jmx.linen
import jmx.nnx
from jmx import parallel, plot

E, H, I, K, T = 4, 32, 32, 2, 12  # noqa: E741
ENTRY = "token_counts"


def module(**options: Any) -> jmx.nnx.MoE:
    return jmx.nnx.MoE(H, I, E, K, rngs=nnx.Rngs(0), **options)


@pytest.fixture
def x(rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(rng.normal(size=(T, H)), jnp.float32)


def counted(routing: jmx.Routing) -> np.ndarray:
    """Slots of each expert, one by one."""
    ids = np.asarray(routing.expert_ids).reshape(-1)
    return np.array([(ids == expert).sum() for expert in range(E)])


def arguments_of(kind: str, layer: jmx.nnx.MoE, x: jax.Array, rng: np.random.Generator) -> tuple[Any, jmx.Routing]:
    """The argument `routing` of a call, and the routing that it has."""
    logits = jnp.asarray(rng.normal(size=(T, E)), jnp.float32)
    if kind == "router":
        return None, layer.route(x)
    if kind == "values":
        return logits, jmx.route(jmx.Logits(logits, layer.routing))
    if kind == "logits":
        its = jmx.Logits(logits, jmx.SoftmaxTopK(K, renormalize=True))
        return its, jmx.route(its)
    ids = jnp.asarray(rng.integers(-1, E + 1, (T, K)), jnp.int16)  # some outside 0..E-1
    routing = jmx.Routing(ids, jnp.ones((T, K)))
    return routing, routing


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["router", "values", "logits", "routing"])
def test_a_captured_call_records_the_slots_of_each_expert(kind, masked, x, rng):
    layer = module()
    given, routing = arguments_of(kind, layer, x, rng)
    mask = jnp.asarray(rng.random(T) < 0.5) if masked else None

    @jax.jit
    def run(layer: jmx.nnx.MoE, x: jax.Array) -> Any:
        return nnx.capture(lambda layer: layer(x, given, mask=mask), nnx.Intermediate)(layer)

    y, found = run(layer, x)
    kept = routing if mask is None else routing._replace(expert_ids=jnp.where(mask[:, None], routing.expert_ids, -1))
    assert found[ENTRY].get_value().dtype == jnp.int32
    np.testing.assert_array_equal(found[ENTRY][...], counted(kept))
    assert relative_error(y, layer(x, given, mask=mask)) <= 1e-5
    assert not nnx.state(layer, nnx.Intermediate)  # neither after capturing, nor after a call without
    linen, variables = linen_of(layer)
    apply = jax.jit(lambda variables, x: linen.apply(variables, x, given, mask=mask, mutable=["intermediates"]))
    y, found = apply(variables, x)
    np.testing.assert_array_equal(found["intermediates"][ENTRY], counted(kept))
    alone: Any = linen.apply(variables, x, given, mask=mask)
    assert relative_error(y, alone) <= 1e-5


def linen_of(layer: jmx.nnx.MoE) -> tuple[jmx.linen.MoE, Any]:
    """The same layer in Linen, whose `init` makes no intermediates."""
    linen = jmx.linen.MoE(H, I, E, K, experts=layer.experts)
    variables = linen.init(jax.random.key(0), jnp.zeros((1, H)))
    assert "intermediates" not in variables
    variables["params"]["router_dense"]["kernel"] = layer.router.kernel[...]
    return linen, variables


def test_calls_add_up_and_other_captures_record_nothing(x):
    layer = module()

    def run(layer: jmx.nnx.MoE) -> jax.Array:
        return layer(layer(x))

    _, found = nnx.capture(run, nnx.Intermediate)(layer)
    np.testing.assert_array_equal(found[ENTRY][...], counted(layer.route(x)) + counted(layer.route(layer(x))))
    _, found = nnx.capture(run, nnx.Perturbation)(layer)
    assert not found


class Model(nnx.Module):
    """Layers in a residual stream."""

    def __init__(self, number: int):
        self.layers = nnx.List([module() for _ in range(number)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_gradients_with_remat(x):
    model = Model(2)

    def loss(x: jax.Array, model: Model) -> Any:
        found = []
        for layer in model.layers:
            run = jax.checkpoint(lambda layer, x: nnx.capture(lambda layer: layer(x), nnx.Intermediate)(layer))
            y, its = run(layer, x)
            x = x + y
            found.append(its)
        return jnp.square(x).sum(), found

    dx, found = jax.jit(jax.grad(loss, has_aux=True))(x, model)
    assert jnp.isfinite(dx).all()
    expected = []
    for layer in model.layers:
        expected.append(counted(layer.route(x)))
        x = x + layer(x)
    np.testing.assert_array_equal(parallel.layer_counts(found), expected)


@pytest.mark.parametrize("trained", [0, 1], ids=["parameters", "x"])
def test_a_capture_around_remat(trained, x):
    """The counts leave `nnx.remat`, in whose function the layers are called, and are those of one of its two calls."""
    model = Model(2)

    def whole(model: Model, x: jax.Array) -> jax.Array:
        for layer in model.layers:
            x = x + nnx.remat(lambda layer, x: layer(x))(layer, x)
        return x

    def loss(model: Model, x: jax.Array) -> Any:
        y, found = nnx.capture(lambda model: whole(model, x), nnx.Intermediate)(model)
        return jnp.square(y).sum(), found

    gradients, found = nnx.jit(nnx.grad(loss, argnums=trained, has_aux=True))(model, x)
    expected = nnx.jit(nnx.grad(lambda model, x: jnp.square(model(x)).sum(), argnums=trained))(model, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradients, expected)
    counts = []
    for layer in model.layers:
        counts.append(counted(layer.route(x)))
        x = x + layer(x)
    np.testing.assert_array_equal(parallel.layer_counts(found), counts)


def test_a_scan_over_layers(x):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> jmx.nnx.MoE:
        return jmx.nnx.MoE(H, I, E, K, rngs=rngs)

    layers = make(nnx.Rngs(0))
    graph, state = nnx.split(layers)

    def body(x: jax.Array, state: Any) -> Any:
        y, found = nnx.capture(lambda layer: layer(x), nnx.Intermediate)(nnx.merge(graph, state))
        return x + y, found

    _, found = jax.jit(lambda x: jax.lax.scan(body, x, state))(x)
    expected = []
    for number in range(3):
        layer = nnx.merge(graph, jax.tree.map(lambda a, n=number: a[n], state))
        expected.append(counted(layer.route(x)))
        x = x + layer(x)
    np.testing.assert_array_equal(parallel.layer_counts(found), expected)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> Any:
        return x + jmx.linen.MoE(H, I, E, K, name="moe")(x), None


def test_linen_scans_and_remat(x):
    scanned = nn.scan(
        nn.remat(Layer),
        variable_axes={"params": 0, "quantized": 0, "intermediates": 0},
        split_rngs={"params": True},
        length=3,
    )()
    variables = scanned.init(jax.random.key(0), x)

    def loss(x: jax.Array) -> Any:
        (y, _), found = scanned.apply(variables, x, mutable=["intermediates"])
        return jnp.square(y).sum(), found

    dx, found = jax.jit(jax.grad(loss, has_aux=True))(x)
    assert jnp.isfinite(dx).all()
    assert found["intermediates"]["moe"][ENTRY].shape == (3, E)
    expected = []
    for number in range(3):
        its = jax.tree.map(lambda a, n=number: a[n], {kind: v["moe"] for kind, v in variables.items()})
        layer = jmx.linen.MoE(H, I, E, K)
        routing: Any = layer.apply(its, x, method="route")
        expected.append(counted(routing))
        x = x + layer.apply(its, x)
    np.testing.assert_array_equal(parallel.layer_counts(found["intermediates"]), expected)


@pytest.mark.devices(4)
@pytest.mark.parametrize("kind", ["Auto", "Explicit", "shard_map"])
@pytest.mark.parametrize("flax", ["nnx", "linen"])
def test_counts_are_of_the_tokens_of_all_devices(flax, kind, x):
    mesh = jax.make_mesh(
        (2, 2),
        ("dp", "ep"),
        devices=jax.devices()[:4],
        axis_types=(jax.sharding.AxisType.Explicit if kind == "Explicit" else jax.sharding.AxisType.Auto,) * 2,
    )
    layer = module()
    expected = counted(layer.route(x))
    axes = {"token": "dp"} if kind != "Auto" else {"token": ("dp", "ep"), "expert": "ep"}
    divided = module(axes=axes, experts=layer.experts)
    divided.router.kernel.set_value(layer.router.kernel[...])
    graph, state = nnx.split(divided)
    linen, variables = linen_of(layer)
    linen = linen.clone(axes=axes)

    def run(x: jax.Array) -> Any:
        if flax == "nnx":
            layer = nnx.merge(graph, state)  # Flax captures calls of modules of the trace alone
            captured: Any = nnx.capture(lambda layer: layer(x), nnx.Intermediate)(layer)
            return captured[1][ENTRY].get_value()
        return linen.apply(variables, x, mutable=["intermediates"])[1]["intermediates"][ENTRY]

    with jax.set_mesh(mesh):
        spec = P(axes["token"])
        split = jax.device_put(x, NamedSharding(mesh, spec))
        if kind == "shard_map":
            run = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
        np.testing.assert_array_equal(jax.jit(run)(split), expected)


def test_pictures_take_intermediates(x, tmp_path):
    model = Model(11)
    found: Any = nnx.capture(lambda model: model(x), nnx.Intermediate)(model)[1]
    counts = parallel.layer_counts(found)
    expected = []
    for layer in model.layers:
        expected.append(counted(layer.route(x)))
        x = x + layer(x)
    np.testing.assert_array_equal(counts, expected)
    named = {f"layers_{number}": {"moe": {ENTRY: np.asarray(row)}} for number, row in enumerate(expected)}
    np.testing.assert_array_equal(parallel.layer_counts(named), expected)  # layers_10 after layers_9
    pytest.importorskip("matplotlib")
    pictures = [plot.expert_load(its).axes[0].get_images()[0].get_array() for its in (found, named, counts)]
    for picture in pictures:
        np.testing.assert_array_equal(picture, pictures[0])


def test_what_is_no_counts_is_named():
    for wrong in ({}, {"other": np.ones(3)}, None, 3):
        with pytest.raises(ValueError, match=r"`intermediates` \(=.*\) must have entries 'token_counts'"):
            parallel.layer_counts(wrong)
    with pytest.raises(ValueError, match=r"layers of \[3, 4\] experts.* must be of layers with equal numbers"):
        parallel.layer_counts([{ENTRY: np.ones(3)}, {ENTRY: np.ones(4)}])
    with pytest.raises(TypeError, match="`token_counts`"):
        parallel.layer_counts({ENTRY: "x"})
