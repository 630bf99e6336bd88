"""Weights that mesh axes divide in a call without a split are an error, and nothing else is."""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from model_steps import relative_error

import jmx
from jmx import autodiff, guard

pytestmark = [pytest.mark.costly, pytest.mark.devices(4)]

E, H, INTERMEDIATE, T, K = 4, 32, 32, 16, 2
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
DIVIDED = r"`experts\.gate_up_values` \(shape \(4, 64, 16\)\) must not be divided along axis 0 over mesh axis 'ep' \(2"


def mesh_of(kind: str = "auto", shape: tuple[int, ...] = (2, 2)) -> Any:
    return jax.make_mesh(shape, ("dp", "ep"), axis_types=(KINDS[kind],) * 2)


def put(tree: Any, mesh: Any, *spec: Any) -> Any:
    return jax.tree.map(lambda array: jax.device_put(array, NamedSharding(mesh, P(*spec))), tree)


def run(x: Any, logits: Any, experts: Any, split: jmx.Split | None = None) -> jax.Array:
    routing = jmx.Logits(logits, jmx.TopKSoftmax(K))
    return jmx.moe(x, routing, experts, activation="swiglu", backend="xla", split=split)


def weighted(x: Any, logits: Any, experts: Any) -> jax.Array:
    """A loss whose gradient does not need y."""
    return (run(x, logits, experts) * np.sin(np.arange(T * H, dtype=np.float32)).reshape(T, H)).sum()


def by_fours(call: Callable[..., Any], x: Any, logits: Any, experts: Any) -> jax.Array:
    """`call` of (four, T / 4, ...) tokens."""
    return call(partial(run, experts=experts), (x.reshape(4, -1, H), logits.reshape(4, -1, E))).reshape(T, H)


def bias_gradient(x: Any, logits: Any, experts: jmx.Experts) -> jax.Array:
    return jax.grad(lambda bias: weighted(x, logits, dataclasses.replace(experts, down_bias=bias)))(experts.down_bias)


TRANSFORMED = {
    "jit": run,
    "grad": jax.grad(weighted),
    "grad of biases": bias_gradient,
    "vmap": partial(by_fours, lambda call, tokens: jax.vmap(call)(*tokens)),
    "scan": partial(by_fours, lambda call, tokens: jax.lax.scan(lambda _, its: (None, call(*its)), None, tokens)[1]),
    "remat": jax.grad(jax.checkpoint(weighted)),
}


@pytest.fixture(scope="module")
def arguments() -> tuple[jax.Array, jax.Array, jmx.Experts]:
    key = jax.random.key(0)
    experts = jmx.Experts.random(key, E, H, INTERMEDIATE, gate_up_order="interleaved", bias_dtype=jnp.float32)
    x = jax.random.normal(jax.random.key(1), (T, H), jnp.float32)
    return x, jax.random.normal(jax.random.key(2), (T, E), jnp.float32), experts


def place(arguments: Any, mesh: Any, case: str) -> Any:
    x, logits, experts = arguments
    tokens = ("dp",) if case == "tokens" else ()
    weights = ("ep",) if case == "weights" else ()
    return *put((x, logits), mesh, *tokens), put(experts, mesh, *weights)


# The product of transformations, kinds of axes, and arrays that are divided


# Transformed calls of tokens that Explicit axes divide are in tests/test_meshes.py.
PRODUCT = [
    (name, kind, case)
    for name in TRANSFORMED
    for kind in KINDS
    for case in ("weights", "tokens", "replicated")
    if (kind, case) != ("explicit", "tokens") or name == "jit"
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("name", "kind", "case"), PRODUCT)
def test_weights_that_are_divided_are_refused_and_nothing_else(arguments: Any, name: str, kind: str, case: str) -> None:
    function = jax.jit(TRANSFORMED[name])
    mesh = mesh_of(kind)
    placed = place(arguments, mesh, case)
    if kind == "auto" and case == "weights":
        with pytest.raises(jax.errors.JaxRuntimeError, match=DIVIDED):
            function.lower(*placed).compile()
        return
    with jax.set_mesh(mesh):
        found = function(*placed)
    assert relative_error(found, jax.jit(TRANSFORMED[name])(*arguments)) <= 1e-5


@pytest.mark.parametrize("case", ["weights", "tokens", "replicated"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_program_has_no_guard(arguments: Any, kind: str, case: str) -> None:
    """It would be a call of a function of this process, which jax does not export."""
    mesh = mesh_of(kind)
    placed = place(arguments, mesh, case)
    described = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), placed)
    with jax.set_mesh(mesh):
        exported = export.export(jax.jit(run))(*described)
        found = jax.jit(exported.call)(*placed)
    assert relative_error(found, jax.jit(run)(*arguments)) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_without_devices(arguments: Any, kind: str) -> None:
    mesh = AbstractMesh((2, 2), ("dp", "ep"), axis_types=(KINDS[kind],) * 2)
    x, logits, experts = arguments
    tokens, whole = NamedSharding(mesh, P("dp")), NamedSharding(mesh, P())
    described = jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        (x, logits, experts),
        (tokens, tokens, jax.tree.map(lambda _: whole, experts)),
    )
    exported = export.export(jax.jit(run), platforms=["cpu"])(*described)
    assert exported.nr_devices == 4


# What is divided, and where


@pytest.mark.parametrize("axis", range(3))
def test_each_axis_of_a_weight(arguments: Any, axis: int) -> None:
    x, logits, experts = arguments
    values = put(experts.down.values, mesh_of(), *(None,) * axis, ("dp", "ep"))
    divided = dataclasses.replace(experts, down=experts.down._replace(values=values))
    message = rf"`experts\.down_values` .*along axis {axis} over mesh axis 'dp', 'ep' \(4 devices\).*jmx\.Split\(\.\.\."
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.jit(run).lower(x, logits, divided).compile()


def test_arrays_that_are_not_traced_are_refused_before_a_trace(arguments: Any) -> None:
    x, logits, experts = arguments
    divided = put(experts, mesh_of(), "ep")
    with pytest.raises(ValueError, match=DIVIDED):
        run(x, logits, divided)
    with pytest.raises(ValueError, match=DIVIDED):
        jax.jit(lambda x: run(x, logits, divided))(x)


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.sampled(2)
def test_without_jit(arguments: Any, name: str) -> None:
    expected = jax.jit(TRANSFORMED[name])(*arguments)
    with jax.disable_jit():
        found = TRANSFORMED[name](*arguments)
        with pytest.raises(ValueError, match=DIVIDED):
            TRANSFORMED[name](*place(arguments, mesh_of(), "weights"))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_weights_that_jit_divides(arguments: Any) -> None:
    x, logits, experts = arguments
    mesh = mesh_of()
    shardings = NamedSharding(mesh, P()), NamedSharding(mesh, P()), NamedSharding(mesh, P("ep"))
    with pytest.raises(jax.errors.JaxRuntimeError, match=DIVIDED):
        jax.jit(run, in_shardings=shardings).lower(x, logits, jax.tree.map(np.asarray, experts)).compile()

    def inside(x: Any, logits: Any, experts: Any) -> jax.Array:
        return run(x, logits, jax.lax.with_sharding_constraint(experts, shardings[2]))

    with pytest.raises(jax.errors.JaxRuntimeError, match=DIVIDED):
        jax.jit(inside).lower(*put((x, logits, experts), mesh)).compile()


def test_a_stack_of_layers(arguments: Any) -> None:
    x, logits, experts = arguments
    stack = jmx.Experts.stack([experts, experts])

    def layer(stack: jmx.Experts, index: Any) -> jax.Array:
        return run(x, logits, stack.layer(index))

    for spec, axis in ((("ep",), 0), ((None, "ep"), 1)):
        with pytest.raises(jax.errors.JaxRuntimeError, match=rf"`experts\.gate_up_values` .* along axis {axis} over"):
            jax.jit(layer).lower(put(stack, mesh_of(), *spec), 1).compile()
    assert relative_error(jax.jit(layer)(put(stack, mesh_of()), 1), run(x, logits, experts)) <= 1e-6


# What is not divided


@pytest.mark.parametrize("manual", [{"dp"}, {"dp", "ep"}], ids=["some", "all"])
def test_inside_shard_map(arguments: Any, manual: set[str]) -> None:
    """Axes that are not Manual there stay guarded."""
    mesh, expected = mesh_of(), jax.jit(run)(*arguments)
    specs = {"mesh": mesh, "in_specs": (P("dp"), P("dp"), P()), "out_specs": P("dp"), "axis_names": manual}
    mapped = jax.jit(jax.shard_map(run, **specs))
    assert relative_error(mapped(*place(arguments, mesh, "tokens")), expected) <= 1e-6
    if manual == {"dp"}:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"`experts\.gate_up_values` .* axis 0 over 2 devices"):
            mapped.lower(*place(arguments, mesh, "weights")).compile()


def test_a_split_has_no_guard(arguments: Any) -> None:
    mesh = mesh_of()
    split = jmx.Split(expert="ep", tokens=("dp", "ep"))
    with jax.set_mesh(mesh):
        lowered = jax.jit(partial(run, split=split)).lower(*place(arguments, mesh, "weights"))
    assert "CustomSPMDPartitioning" not in lowered.as_text()


def test_an_axis_of_one_device_divides_nothing(arguments: Any) -> None:
    placed = place(arguments, mesh_of(shape=(4, 1)), "weights")
    assert relative_error(jax.jit(run)(*placed), jax.jit(run)(*arguments)) <= 1e-6


def program(function: Any, *arguments: Any) -> tuple[str, str]:
    """The program before and after compilation, without names of source files."""
    jax.clear_caches()
    lowered = jax.jit(function).lower(*arguments)
    names = r"metadata=\{[^}]*\}|loc\(.*\)|#loc.*|(?s:FileNames.*?(?=\n\n%|\nENTRY))"
    return re.sub(names, "", lowered.as_text()), re.sub(names, "", lowered.compile().as_text() or "")


@pytest.mark.parametrize("name", ["jit", "grad"])
def test_it_adds_nothing_to_a_program(arguments: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device before and after compilation; on several ones after it."""
    several = place(arguments, mesh_of(), "tokens")
    with_guard = [program(TRANSFORMED[name], *its) for its in (arguments, several)]
    monkeypatch.setattr(autodiff, "guarded", lambda arrays: arrays)
    without = [program(TRANSFORMED[name], *its) for its in (arguments, several)]
    assert with_guard[0] == without[0]
    assert "CustomSPMDPartitioning" in with_guard[1][0]
    assert operations(with_guard[1][1]) == operations(without[1][1])


def operations(program: str) -> list[str]:
    """The operations of a compiled program, sorted, without the numbers in their names."""
    return sorted(re.sub(r"%[\w.-]+", "%", line) for line in program.splitlines() if " = " in line)


def test_a_process_with_one_device_traces_nothing_more(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    arrays = arguments[2].arrays()
    assert guard.guarded(arrays) is arrays


@pytest.mark.aot
@pytest.mark.parametrize("case", ["weights", "tokens"])
def test_compiled_for_two_h200s(case: str) -> None:
    """By the CUDA plugin, in front of a kernel: nothing but the kernel is left."""
    mesh = aot.mesh_of("h200", 2)
    experts = jax.eval_shape(
        lambda key: jmx.Experts.random(key, 8, 256, 256, gate_up_order="interleaved").prepare("mosaic_sm90"),
        jax.random.key(0),
    )
    tokens, weights = (P("device"), P()) if case == "tokens" else (P(), P("device"))
    x = jax.ShapeDtypeStruct((32, 256), jnp.bfloat16, sharding=NamedSharding(mesh, tokens))
    logits = jax.ShapeDtypeStruct((32, 8), jnp.float32, sharding=NamedSharding(mesh, tokens))
    placed = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, weights)), experts
    )

    def layer(x: Any, logits: Any, experts: Any) -> jax.Array:
        return jmx.moe(x, jmx.Logits(logits, jmx.TopKSoftmax(2)), experts, activation="swiglu", backend="mosaic")

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(layer).lower(x, logits, placed)
        assert "CustomSPMDPartitioning" in lowered.as_text()
        if case == "weights":
            with pytest.raises(
                jax.errors.JaxRuntimeError, match=r"`experts\.gate_up_values` .* over mesh axis 'device'"
            ):
                lowered.compile()
            return
        targets = re.findall(r'custom_call_target="([^"]*)"', lowered.compile().as_text() or "")
    assert targets == [*["__gpu$xla.gpu.triton"] * 2, "mosaic_gpu_v2"]  # of routing, of sorted rows, of products
