"""Modules that hold shards, slots or parts along the hidden axis on a mesh, beside one device."""

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from model_steps import relative_error
from module_forms import KINDS, MASK, MODULES, NAMES, E, H, K, Kind, T, X, loss, made, mesh_of, whole

import jmx
import jmx.nnx
from jmx.checkpoint import orbax
from jmx.parallel.experts_form import whole_experts

pytestmark = [pytest.mark.costly, pytest.mark.devices(8), pytest.mark.sampled(2)]

# What mesh axes divide, beside the axes of tokens, "dp" and "ep"; and spare experts.
FORMS: dict[str, tuple[dict[str, Any], int]] = {
    "shards": ({"intermediate": "ep"}, 0),
    "slots": ({"expert": "ep"}, 3),
    "hidden": ({"hidden": "ep"}, 0),
    "hidden over the axes of tokens": ({"hidden": ("dp", "ep")}, 0),
    "experts and shards": ({"expert": "ep", "intermediate": "dp"}, 0),
    "slots of shards": ({"expert": "ep", "intermediate": "dp"}, 5),
    "experts and hidden": ({"expert": "ep", "hidden": "dp"}, 0),
    "shards and hidden": ({"intermediate": "ep", "hidden": "dp"}, 0),
    "slots and hidden": ({"expert": "dp", "hidden": "ep"}, 2),
}
MESHES = ((1, 8), (2, 4), (4, 2), (8, 1))
TOKENS = {"both": ("dp", "ep"), "dp": "dp", "none": None}
WEIGHTS = {
    "mxfp4": Kind(),
    "mxfp4 interleaved": Kind(order="interleaved"),
    "un-gated": Kind(order=None, bias=False),
    "padded": Kind(size=160),  # 5 blocks: not a multiple of any mesh
    "canonical": Kind(layout="canonical"),
    "act-order": Kind(format="int4_g32_asym_order", size=256),
    "nvfp4": Kind(format="nvfp4", size=128),
    "a scale an expert": Kind(format="fp8_tensor", size=128),
    "rows share a scale": Kind(format="int8_channel", size=128),
    "fp8 inputs": Kind(format="fp8_block", size=256, inputs="fp8_token"),
    "mxfp8 inputs": Kind(inputs="mxfp8"),
    "a kernel's layout": Kind(layout="mosaic_sm90"),
}


@pytest.fixture(scope="module", autouse=True)
def _made_on_one_device() -> None:
    """Before any test has a mesh in scope, of which they would be then."""
    Kind().experts()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("axis_kind", KINDS)
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("form", FORMS)
def test_calls_and_gradients_are_those_of_one_device(
    form: str, module: str, axis_kind: str, shape: Any, tokens: str
) -> None:
    kind, (axes, spare) = Kind(), FORMS[form]
    y, dx = whole(kind, module)
    mesh = mesh_of(axis_kind, shape)
    function, weights = made(kind, module, {**axes, "token": TOKENS[tokens]}, mesh, spare)
    x = jax.device_put(X, NamedSharding(mesh, P(TOKENS[tokens])))
    with jax.set_mesh(mesh):
        assert relative_error(jax.jit(function)(weights, x, MASK), y) <= 1e-5
        assert relative_error(jax.jit(jax.grad(loss(function)))(x, weights), dx) <= 1e-5


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("form", ["hidden", "slots and hidden"])
def test_an_axis_of_one_device_may_divide_the_hidden_axis(form: str, module: str) -> None:
    """Of tokens that are the same along it, whose results have to be of a type that does not vary."""
    kind, (axes, spare) = Kind(), FORMS[form]
    mesh = mesh_of("auto", (8, 1))
    function, weights = made(kind, module, {**axes, "token": None}, mesh, spare)
    with jax.set_mesh(mesh):
        assert relative_error(jax.jit(function)(weights, X, MASK), whole(kind, module)[0]) <= 1e-5
        assert relative_error(jax.jit(jax.grad(loss(function)))(X, weights), whole(kind, module)[1]) <= 1e-5


@pytest.mark.parametrize("form", ["experts and shards", "slots of shards", "experts and hidden"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("axis_kind", KINDS)
def test_formats_layouts_and_inputs(form: str, weights: str, axis_kind: str) -> None:
    """Rows that are quantized between the products have scales of a shard's columns: a tolerance of their rounding."""
    kind, (axes, spare) = WEIGHTS[weights], FORMS[form]
    try:
        y, dx = whole(kind, "nnx")
    except (jmx.NoBackendError, ValueError) as e:
        pytest.skip(str(e).splitlines()[0])
    mesh = mesh_of(axis_kind)
    function, its = made(kind, "nnx", {**axes, "token": ("dp", "ep")}, mesh, spare)
    tolerance = 0.05 if kind.inputs and "intermediate" in axes else 1e-5
    with jax.set_mesh(mesh):
        assert relative_error(jax.jit(function)(its, X, MASK), y) <= tolerance
        assert relative_error(jax.jit(jax.grad(loss(function)))(X, its), dx) <= tolerance


@pytest.mark.parametrize("form", ["shards", "slots of shards", "experts and hidden"])
@pytest.mark.parametrize("axis_kind", KINDS)
def test_gradients_of_biases_and_of_the_router(form: str, axis_kind: str) -> None:
    (axes, spare), kind = FORMS[form], Kind()
    of_layer = nnx.grad(lambda layer: (layer(X) ** 2).sum())
    alone = kind.module("nnx")
    expected = nnx.jit(of_layer)(alone)
    with jax.set_mesh(mesh_of(axis_kind)):
        layer = kind.module("nnx", {**axes, "token": ("dp", "ep")}, spare)
        found = nnx.jit(of_layer)(layer)
        names = ("gate_up_bias", "down_bias")
        # As experts: shards joined, and gradients of copies in the first slot, as there is one of each.
        arrays = {n: getattr(found, n)[...] for n in names}
        joined = whole_experts(layer.held.with_arrays({**layer.held.arrays(), **arrays}))
    for name in names:
        assert relative_error(getattr(joined, name), getattr(expected, name)[...]) <= 1e-5, name
    for name in ("kernel", "bias"):
        assert relative_error(getattr(found.router, name)[...], getattr(expected.router, name)[...]) <= 1e-5, name


@pytest.mark.parametrize("transformation", ["remat", "vmap", "scan over tokens", "export", "eager", "without a mask"])
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("form", ["experts and shards", "slots of shards", "hidden", "experts and hidden"])
def test_transformations(form: str, module: str, transformation: str) -> None:
    kind, (axes, spare) = Kind(), FORMS[form]
    y, dx = whole(kind, module)
    mesh = mesh_of()
    function, weights = made(kind, module, {**axes, "token": ("dp", "ep")}, mesh, spare)
    two, masks = X.reshape(2, T // 2, H), MASK.reshape(2, T // 2)

    def exported() -> Any:
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=getattr(a, "sharding", None)), (weights, X, MASK)
        )
        put = jax.device_put((X, MASK), NamedSharding(mesh, P()))
        return jax.jit(export.export(jax.jit(function))(*shapes).call)(weights, *put)

    with jax.set_mesh(mesh):
        got, expected = {
            "remat": lambda: (jax.jit(jax.grad(jax.checkpoint(loss(function))))(X, weights), dx),
            "vmap": lambda: (jax.jit(jax.vmap(function, (None, 0, 0)))(weights, two, masks), y),
            "scan over tokens": lambda: (
                jax.lax.scan(lambda _, its: (None, function(weights, *its)), None, (two, masks))[1],
                y,
            ),
            "export": lambda: (exported(), y),
            "eager": lambda: (function(weights, X, MASK), y),
            "without a mask": lambda: (jnp.where(MASK[:, None], jax.jit(function)(weights, X), 0), y),
        }[transformation]()
    assert relative_error(np.asarray(got).reshape(T, H), expected) <= 1e-5


@pytest.mark.parametrize("axis_kind", KINDS)
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("form", FORMS)
def test_scan_over_stacked_layers(form: str, module: str, axis_kind: str) -> None:
    kind, (axes, spare) = Kind(), FORMS[form]
    mesh = mesh_of(axis_kind)
    alone, its = made(kind, module)
    function, weights = made(kind, module, {**axes, "token": ("dp", "ep")}, mesh, spare)

    def forward(function: Any, weights: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, its: (x + function(its, x), None), x, weights)[0]

    def stacked(array: Any) -> Any:
        return np.stack([np.asarray(array)] * 2)

    def stacked_on_mesh(array: Any) -> Any:
        return jax.device_put(stacked(array), NamedSharding(mesh, P(None, *array.sharding.spec)))

    expected = jax.jit(partial(forward, alone))(jax.tree.map(stacked, its), X)
    x = jax.device_put(X, NamedSharding(mesh, P(("dp", "ep"))))
    with jax.set_mesh(mesh):
        y = jax.jit(partial(forward, function))(jax.tree.map(stacked_on_mesh, weights), x)
    assert relative_error(y, expected) <= 1e-5


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("form", ["experts and shards", "slots of shards", "experts and hidden"])
def test_inside_shard_map_arrays_are_those_of_one_device(form: str, module: str) -> None:
    kind, (axes, spare) = Kind(), FORMS[form]
    mesh = mesh_of()
    function, weights = made(kind, module, {**axes, "token": ("dp", "ep")}, mesh, spare)
    specs, tokens = jax.tree.map(lambda array: array.sharding.spec, weights), P(("dp", "ep"))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(specs, tokens, tokens), out_specs=tokens)
    assert relative_error(jax.jit(mapped)(weights, X, MASK), whole(kind, module)[0]) <= 1e-5
    grad = jax.jit(jax.grad(lambda x, weights: (mapped(weights, x, MASK) ** 2).sum()))
    assert relative_error(grad(X, weights), whole(kind, module)[1]) <= 1e-5
    some = jax.shard_map(
        function, mesh=mesh, in_specs=(P(), P("ep"), P("ep")), out_specs=P("ep"), axis_names={"ep"}, check_vma=False
    )
    with pytest.raises(ValueError, match=r"must name Manual mesh axes only, or none|must be uint8"):
        jax.jit(some)(weights, X, MASK)


@pytest.mark.parametrize("form", ["experts and shards", "slots of shards", "experts and hidden", "hidden"])
@pytest.mark.parametrize("explicit", NAMES)
@pytest.mark.parametrize("module", MODULES)
def test_some_axes_explicit_and_some_auto(form: str, explicit: str, module: str) -> None:
    kind, (axes, spare) = Kind(), FORMS[form]
    y, dx = whole(kind, module)
    types = tuple(KINDS["explicit" if name == explicit else "auto"] for name in NAMES)
    mesh = jax.make_mesh((2, 4), NAMES, axis_types=types)
    function, weights = made(kind, module, {**axes, "token": ("dp", "ep")}, mesh, spare)
    with jax.set_mesh(mesh):
        for spec in (P(), P(explicit)):
            x = jax.device_put(X, NamedSharding(mesh, spec))
            assert relative_error(jax.jit(function)(weights, x, MASK), y) <= 1e-5
            assert relative_error(jax.jit(jax.grad(loss(function)))(x, weights), dx) <= 1e-5


# Idle devices, and rows that are not finite


@pytest.mark.parametrize("form", ["experts and shards", "slots of shards", "experts and hidden"])
@pytest.mark.parametrize("case", ["all on one", "masked on one", "all masked", "no tokens", "a row of nan"])
def test_idle_devices(form: str, case: str) -> None:
    """Right numbers, by a program that does not depend on which device gets the tokens, nor does its memory."""
    kind, (axes, spare) = Kind(), FORMS[form]
    mesh, x, mask = mesh_of(), X, np.ones(T, bool)
    logits = np.asarray(jax.random.normal(jax.random.key(3), (T, E)))
    if case == "all on one":
        logits = logits + 50 * (np.arange(E) < K)
    if case == "masked on one":
        mask[: T // 8] = False  # all tokens of the first device
    if case == "all masked":
        mask[:] = False
    if case == "no tokens":
        x, logits, mask = x[:0], logits[:0], mask[:0]
    if case == "a row of nan":
        x = x.copy()
        x[5] = np.nan

    def call(state: Any, x: Any, logits: Any, mask: Any) -> Any:
        return nnx.merge(graph, state)(x, logits, mask=mask)

    graph, state = nnx.split(kind.module("nnx"))
    expected = np.asarray(jax.jit(call)(state, x, logits, mask))
    with jax.set_mesh(mesh):
        graph, state = nnx.split(kind.module("nnx", {**axes, "token": ("dp", "ep")}, spare))
        compiled = jax.jit(call).lower(state, x, logits, mask).compile()
        y = np.asarray(compiled(state, x, logits, mask))
    rows = np.arange(len(x)) != (5 if case == "a row of nan" else -1)
    assert np.isnan(y[~rows]).all()
    assert np.isfinite(y[rows]).all()
    if expected[rows].any():
        assert relative_error(y[rows], expected[rows]) <= 1e-5
    else:
        assert not y[rows].any()


# Memory and collectives of weights along the hidden axis


def stacked_layers(axes: Any, num_layers: int, mesh: Any) -> tuple[Any, Any, Any]:
    """A function (stacked state, x) -> y of layers in a scan, its arguments, and bytes of one layer's weights."""
    kind = Kind(size=512)
    graph, state = nnx.split(kind.module("nnx", axes))

    def forward(states: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, state: (x + nnx.merge(graph, state)(x), None), x, states)[0]

    def stack(array: Any) -> Any:
        return jax.device_put(
            np.stack([np.asarray(array)] * num_layers), NamedSharding(mesh, P(None, *array.sharding.spec))
        )

    layer = sum(array.nbytes for array in nnx.merge(graph, state).experts.arrays().values())
    return forward, jax.tree.map(stack, state), layer


def squares(forward: Any, states: Any, x: Any) -> jax.Array:
    return (forward(states, x) ** 2).sum()


@pytest.mark.parametrize("what", ["forward", "backward"])
@pytest.mark.parametrize("axis_kind", KINDS)
def test_one_layer_is_whole_at_once(axis_kind: str, what: str) -> None:
    """By the compiler's analysis: more layers need no more temporary memory than their parts and activations."""
    temporary = {}
    for num_layers in (2, 8):
        with jax.set_mesh(mesh := mesh_of(axis_kind)):
            axes = {"hidden": ("dp", "ep"), "token": ("dp", "ep")}
            forward, states, layer = stacked_layers(axes, num_layers, mesh)
            x = jax.device_put(X, NamedSharding(mesh, P(("dp", "ep"))))
            run = forward if what == "forward" else jax.grad(partial(squares, forward), argnums=1)
            compiled = jax.jit(run).lower(states, x).compile()
            memory = compiled.memory_analysis()
            assert memory is not None
            temporary[num_layers] = memory.temp_size_in_bytes
            text = compiled.as_text() or ""
            assert f"u8[{E},1024,{H // 2}]" in text  # the codes of one layer, whole
            assert f"u8[{num_layers},{E},1024,{H // 2}]" not in text
            assert f"f32[{E},1024,{H}]" not in text
    assert temporary[8] - temporary[2] < layer, temporary


def test_explain_states_what_is_gathered() -> None:
    x = jax.ShapeDtypeStruct((T, H), jnp.float32)
    with jax.set_mesh(mesh_of()):
        layer = Kind().module("nnx", {"hidden": "ep", "token": ("dp", "ep")})
        found = jmx.explain(layer, x)
        weights = sum(a.nbytes for n, a in layer.experts.arrays().items() if not n.endswith("bias"))
    assert found.division is not None
    assert found.division.gathered == ("ep",)
    assert found.division.bytes_gathered == weights * 3 // 4
    assert "weights are gathered over ep at each call" in str(found)
    assert jmx.explain(Kind().module("nnx"), x).division is None


def test_weights_divided_along_hidden_without_its_axis_are_an_error() -> None:
    """The guard: nothing is gathered that was not asked for."""
    mesh = mesh_of()
    function, weights = made(Kind(), "nnx", {"hidden": "ep", "token": ("dp", "ep")}, mesh)
    graph, _ = nnx.split(Kind().module("nnx"))
    del function
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="must not be divided along axis"):
        jax.jit(lambda state, x: nnx.merge(graph, state)(x))(nnx.State(weights), X)


# Weights in and out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("axis_kind", KINDS)
def test_experts_of_any_form_are_those_given(form: str, axis_kind: str) -> None:
    kind, (axes, spare) = Kind(), FORMS[form]
    new = jmx.Experts.random(
        jax.random.key(9), E, H, kind.size, gate_up_order=kind.order, bias_dtype=jnp.float32
    ).prepare("packed")
    with jax.set_mesh(mesh_of(axis_kind)):
        layer = kind.module("nnx", axes, spare)
        assert alike(layer.experts, kind.experts())
        shardings = {name: array.sharding for name, array in layer.held.arrays().items()}
        layer.update(new)
        assert alike(layer.experts, new)
        assert {name: array.sharding for name, array in layer.held.arrays().items()} == shardings
        layer.prepare("canonical")
        assert alike(layer.experts.prepare("packed"), new)
        layer.prepare("packed")
        assert {name: array.sharding for name, array in layer.held.arrays().items()} == shardings


def alike(experts: jmx.Experts, others: jmx.Experts) -> bool:
    pairs = itertools.zip_longest(experts.arrays().items(), others.arrays().items())
    return all(a[0] == b[0] and np.array_equal(np.asarray(a[1]), np.asarray(b[1])) for a, b in pairs)


@pytest.mark.parametrize("source", [None, *FORMS])
@pytest.mark.parametrize("target", [None, *FORMS])
def test_checkpoints_are_restored_in_any_form(tmp_path: Any, source: str | None, target: str | None) -> None:
    """Saved on one mesh, restored on another, or on one device."""

    kind = Kind()

    def make(form: str | None, mesh: Any) -> Any:
        axes, spare = FORMS[form] if form else (None, 0)
        with jax.set_mesh(mesh):
            return kind.module("nnx", axes, spare)

    wide, tall = mesh_of("auto", (2, 4)), mesh_of("explicit", (4, 2))
    saved = make(source, wide) if source else kind.module("nnx")
    orbax.save(tmp_path / "saved", saved)
    if target is None:
        restored = orbax.restore(tmp_path / "saved", nnx.eval_shape(lambda: kind.module("nnx")))
    else:
        like = make(target, tall)
        with jax.set_mesh(tall):
            restored = orbax.restore(tmp_path / "saved", like)
        shardings = {name: array.sharding for name, array in like.held.arrays().items()}
        assert {name: array.sharding for name, array in restored.held.arrays().items()} == shardings
    assert alike(restored.experts, kind.experts())


def test_a_linen_layers_weights_go_from_one_mesh_to_another() -> None:
    kind, axes = Kind(), {"expert": "ep", "intermediate": "dp", "token": ("dp", "ep")}
    _, weights = made(kind, "linen", axes, mesh_of("auto", (2, 4)), 3)
    on_host = kind.module("linen", axes, 3).experts_of(weights)
    assert alike(on_host, kind.experts())
    function, others = made(kind, "linen", axes, mesh := mesh_of("explicit", (4, 2)))
    with jax.set_mesh(mesh):
        layer = kind.module("linen", axes)
        others = layer.update(others, dataclasses.replace(on_host))
        assert relative_error(jax.jit(function)(others, X, MASK), whole(kind, "linen")[0]) <= 1e-5


def test_a_layer_in_shards_computes_on_one_device() -> None:
    """Its variables without their mesh."""
    kind = Kind()
    for module in MODULES:
        function, weights = made(kind, module, {"intermediate": "ep", "token": "dp"}, mesh_of())
        alone = jax.device_put(jax.tree.map(np.asarray, weights), jax.devices()[0])
        assert relative_error(jax.jit(partial(function))(alone, X, MASK), whole(kind, module)[0]) <= 1e-5
