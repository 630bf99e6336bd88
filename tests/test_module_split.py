"""Calls of the modules that `axes` divide over a mesh, beside one device: both kinds, and every transformation."""

import functools
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from model_steps import relative_error

import jmx
import jmx.linen
import jmx.nnx

pytestmark = [pytest.mark.costly, pytest.mark.devices(8)]

T, H, INTERMEDIATE, E, K = 16, 32, 32, 8, 2
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
TOKENS = {"both": ("dp", "ep"), "dp": "dp", "ep": "ep", "none": None}
AXES = {"expert": "ep", "intermediate": None, "token": ("dp", "ep")}
OPTIONS: dict[str, Any] = {"bias": True, "param_dtype": jnp.float32, "backend": "xla", "layout": "packed"}
X = np.asarray(jax.random.normal(jax.random.key(1), (T, H), jnp.float32))
MASK = np.arange(T) % 3 > 0


def mesh_of(kind: str = "auto", shape: tuple[int, int] = (2, 4)) -> Any:
    return jax.make_mesh(shape, ("dp", "ep"), axis_types=(KINDS[kind],) * 2)


@functools.cache
def experts() -> jmx.Experts:
    key = jax.random.key(0)
    kind: dict[str, Any] = {"gate_up_order": "concatenated", "bias": True, "bias_dtype": jnp.float32}
    return jmx.Experts.random(key, E, H, INTERMEDIATE, **kind).prepare("packed")


def module_of(module: str, axes: Any = None) -> Any:
    """An NNX module with weights, or a Linen one."""
    if module == "linen":
        return jmx.linen.MoE(H, INTERMEDIATE, E, K, axes=axes, experts=experts(), **OPTIONS)
    return jmx.nnx.MoE(H, INTERMEDIATE, E, K, axes=axes, experts=experts(), rngs=nnx.Rngs(0), **OPTIONS)


def made(module: str, axes: Any = None, mesh: Any = None) -> tuple[Any, Any]:
    """A function (weights, x, mask) -> y of a module, and its weights: of either the same, in parts on a mesh."""
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        layer = module_of(module, axes)
        if module == "nnx":
            graph, state = nnx.split(layer)
            return lambda state, x, mask=None: nnx.merge(graph, state)(x, mask=mask), state
        boxes = jax.eval_shape(layer.init, jax.random.key(0), X)
    return partial(called, layer), placed(linen_weights(), boxes, mesh)


@functools.cache
def linen_weights() -> Any:
    return module_of("linen").init(jax.random.key(0), X)


@pytest.fixture(scope="module", autouse=True)
def _made_on_one_device() -> None:
    """Before any test has a mesh in scope, of which they would be then."""
    experts()
    linen_weights()


def called(layer: jmx.linen.MoE, variables: Any, x: Any, mask: Any = None) -> Any:
    return layer.apply(variables, x, mask=mask)


def placed(weights: Any, boxes: Any, mesh: Any) -> Any:
    """Linen's variables in boxes, and on a mesh as these state."""
    if mesh is not None:
        weights = jax.tree.map(jax.device_put, weights, nn.get_sharding(boxes, mesh))
    return jax.tree.unflatten(jax.tree.structure(boxes), jax.tree.leaves(weights))


@functools.cache
def whole(module: str) -> tuple[Any, Any]:
    """On one device: y, and the gradient of x."""
    function, weights = made(module)
    return jax.jit(function)(weights, X, MASK), jax.jit(jax.grad(loss(function)))(X, weights)


def loss(function: Any) -> Any:
    return lambda x, weights: (function(weights, x, MASK) ** 2).sum()


def divided(module: str, kind: str, axes: Any = None) -> tuple[Any, Any, Any]:
    """A mesh, a function, and weights on the mesh."""
    mesh = mesh_of(kind)
    return mesh, *made(module, AXES if axes is None else axes, mesh)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", ["nnx", "linen"])
def test_calls_and_gradients_are_those_of_one_device(module: str, kind: str, tokens: str) -> None:
    """And no weight moves."""
    y, dx = whole(module)
    mesh, function, weights = divided(module, kind, {"expert": "ep", "token": TOKENS[tokens]})
    x = jax.device_put(X, NamedSharding(mesh, P(TOKENS[tokens])))
    with jax.set_mesh(mesh):
        compiled = jax.jit(function).lower(weights, x, MASK).compile()
        assert relative_error(compiled(weights, x, MASK), y) <= 1e-5
        assert relative_error(jax.jit(jax.grad(loss(function)))(x, weights), dx) <= 1e-5
    text = compiled.as_text() or ""
    assert "u8[8," not in text  # packed values of all experts
    assert ("u8[2," in text) or ("u8[1," in text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", ["nnx", "linen"])
def test_weights_are_placed_and_the_router_is_whole(module: str, kind: str) -> None:
    _, _, weights = divided(module, kind)
    for path, array in jax.tree_util.tree_leaves_with_path(weights):
        parts = 1 if "router" in jax.tree_util.keystr(path) else 4
        assert array.addressable_shards[0].data.shape[0] * parts == array.shape[0], path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", ["nnx", "linen"])
def test_explicit_axes_of_tokens_are_read_off_the_types(module: str, kind: str) -> None:
    mesh, function, weights = divided(module, kind, {"expert": "ep"})
    x = jax.device_put(X, NamedSharding(mesh, P("dp")))
    with jax.set_mesh(mesh):
        y = jax.jit(function)(weights, x, MASK)
    assert relative_error(y, whole(module)[0]) <= 1e-5
    if kind == "explicit":
        assert jax.typeof(y).sharding.spec == P("dp", None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transformation", ["remat", "vmap", "scan over tokens", "eager"])
@pytest.mark.parametrize("module", ["nnx", "linen"])
def test_transformations(module: str, transformation: str, kind: str) -> None:
    y, dx = whole(module)
    mesh, function, weights = divided(module, kind)
    two, masks = X.reshape(2, T // 2, H), MASK.reshape(2, T // 2)
    with jax.set_mesh(mesh):
        got, expected = {
            "remat": lambda: (jax.jit(jax.grad(jax.checkpoint(loss(function))))(X, weights), dx),
            "vmap": lambda: (jax.jit(jax.vmap(function, (None, 0, 0)))(weights, two, masks), y),
            "scan over tokens": lambda: (
                jax.lax.scan(lambda _, its: (None, function(weights, *its)), None, (two, masks))[1],
                y,
            ),
            "eager": lambda: (function(weights, X, MASK), y),
        }[transformation]()
    assert relative_error(np.asarray(got).reshape(T, H), expected) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", ["nnx", "linen"])
def test_scan_over_stacked_layers(module: str, kind: str) -> None:
    mesh, function, weights = divided(module, kind)

    def forward(function: Any, weights: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, its: (x + function(its, x), None), x, weights)[0]

    def stacked(array: Any) -> Any:
        return np.stack([np.asarray(array), np.asarray(array)[::-1]])

    def stacked_on_mesh(array: Any) -> Any:
        return jax.device_put(stacked(array), NamedSharding(mesh, P(None, *array.sharding.spec)))

    alone, its = made(module)
    expected = jax.jit(partial(forward, alone))(jax.tree.map(stacked, its), X)
    x = jax.device_put(X, NamedSharding(mesh, P(("dp", "ep"))))
    with jax.set_mesh(mesh):
        y = jax.jit(partial(forward, function))(jax.tree.map(stacked_on_mesh, weights), x)
    assert relative_error(y, expected) <= 1e-5


@pytest.mark.parametrize("module", ["nnx", "linen"])
def test_inside_shard_map_arrays_are_those_of_one_device(module: str) -> None:
    mesh, function, weights = divided(module, "auto")
    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: P() if "router" in jax.tree_util.keystr(path) else P("ep"), weights
    )
    tokens = P(("dp", "ep"))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(specs, tokens, tokens), out_specs=tokens)
    assert relative_error(jax.jit(mapped)(weights, X, MASK), whole(module)[0]) <= 1e-5


@pytest.mark.parametrize("module", ["nnx", "linen"])
def test_without_a_mesh_in_scope(module: str) -> None:
    """The mesh is that of the weights; on one device, the layer is that of one device."""
    mesh, function, weights = divided(module, "auto")
    x, mask = (jax.device_put(array, NamedSharding(mesh, P(("dp", "ep")))) for array in (X, MASK))
    assert relative_error(jax.jit(function)(weights, x, mask), whole(module)[0]) <= 1e-5
    alone, its = made(module, AXES)
    assert relative_error(jax.jit(alone)(its, X, MASK), whole(module)[0]) <= 1e-6
    assert "shard_map" not in str(jax.make_jaxpr(alone)(its, X, MASK))


@pytest.mark.parametrize("call", ["eager", "jit"])
@pytest.mark.parametrize("made_on", ["one device", "another mesh"])
@pytest.mark.parametrize("module", ["nnx", "linen"])
def test_weights_that_are_elsewhere_are_moved_to_the_mesh_in_scope(module: str, made_on: str, call: str) -> None:
    function, weights = divided(module, "auto")[1:] if made_on == "another mesh" else made(module, AXES)
    with jax.set_mesh(mesh_of(shape=(4, 2))):
        y = (jax.jit(function) if call == "jit" else function)(weights, X, MASK)
    assert relative_error(y, whole(module)[0]) <= 1e-5


@pytest.mark.parametrize("made_on", ["one device", "another mesh"])
@pytest.mark.parametrize("module", ["nnx", "linen"])
def test_gradients_of_weights_that_are_elsewhere_outside_of_any_jit(module: str, made_on: str) -> None:
    def gradients(function: Any, weights: Any) -> list[jax.Array]:
        """Of the router and the biases."""
        leaves, tree = jax.tree.flatten(weights)
        floats = [leaf if leaf.dtype == jnp.float32 else None for leaf in leaves]

        def loss_of(floats: list[Any]) -> jax.Array:
            its = [leaf if value is None else value for leaf, value in zip(leaves, floats, strict=True)]
            return loss(function)(X, jax.tree.unflatten(tree, its))

        return jax.tree.leaves(jax.grad(loss_of)(floats))

    function, weights = divided(module, "auto")[1:] if made_on == "another mesh" else made(module, AXES)
    with jax.set_mesh(mesh_of(shape=(4, 2))):
        found = gradients(function, weights)
    expected = gradients(*made(module))
    assert len(found) >= 3
    assert all(relative_error(its, wanted) <= 1e-5 for its, wanted in zip(found, expected, strict=True))


def test_the_layer_itself_is_an_argument_of_jit() -> None:
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        layer = module_of("nnx", AXES)
        y = jax.jit(lambda layer, x: layer(x, mask=MASK))(layer, X)
        gradient = nnx.jit(nnx.grad(lambda layer, x: (layer(x) ** 2).sum()))(layer, X)
    assert relative_error(y, whole("nnx")[0]) <= 1e-5
    assert {array.sharding.spec[0] for array in (gradient.gate_up_bias[...], gradient.down_bias[...])} == {"ep"}


# Refused


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", ["nnx", "linen"])
@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"expert": "ep", "intermediate": "dp"},
            r"must be axes of 1 device for weights that are not in shards|must be uint8\[2, 8.*`axes`.* and the mesh",
        ),
        ({"expert": "ep", "token": "zz"}, r"must name axes of the mesh, \('dp', 'ep'\), not 'zz'"),
    ],
)
def test_axes_that_cannot_divide_a_call(axes: Any, message: str, module: str, kind: str) -> None:
    function, weights = made(module, axes)
    with jax.set_mesh(mesh_of(kind)), pytest.raises(ValueError, match=message):
        jax.eval_shape(function, jax.eval_shape(lambda its: its, weights), X)


@pytest.mark.parametrize("module", ["nnx", "linen"])
def test_tokens_that_the_mesh_does_not_divide(module: str) -> None:
    mesh, function, weights = divided(module, "auto")
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"must divide axis 0 of x, of size 12, evenly over 8"):
        jax.jit(function)(weights, X[:12])


# explain


@pytest.mark.parametrize("module", ["nnx", "linen"])
def test_explain_states_how_a_call_is_divided(module: str) -> None:
    layer = module_of(module, AXES)
    x = jax.ShapeDtypeStruct((T, H), jnp.float32)
    assert jmx.explain(layer, x).division is None
    with jax.set_mesh(mesh_of()):
        found = jmx.explain(layer, x).division
    assert found is not None
    assert (found.num_tokens, found.local.num_experts, found.chosen) == (T // 8, E // 4, "gather")
    other = jmx.Split(expert="ep", mesh=AbstractMesh((2,), ("ep",)))
    found = jmx.explain(layer, x, split=other).division
    assert found is not None
    assert found.local.num_experts == E // 2
