"""`save_gate_up`: what the forward pass keeps reaches the backward pass, in all transformations, and nothing else does.

The backend here keeps an array of another shape than tokens, and its gradients are NaN unless they get that back.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmx
import jmx.linen
import jmx.nnx
from jmx import training
from jmx.backends import registered_backends
from jmx.engines.gradients import Differentiable, SavesGateUp
from jmx.pallas.mosaic_sm90.backend import MosaicSm90
from jmx.selection.registry import Registry
from jmx.xla import backend as xla

pytestmark = [pytest.mark.costly, pytest.mark.usefixtures("on_cpu")]

T, H, WIDTH, E, K = 6, 64, 32, 4, 2
NAME = "keeping"


@dataclass(frozen=True)
class Keeping:
    """The reference, which counts its passes while they are traced."""

    passes: dict[str, int]
    name: str = NAME
    summary: str = "for tests"

    def __hash__(self) -> int:
        return hash(self.name)

    def supports(self, problem: Any, environment: Any) -> None:
        return None

    def apply(self, problem: Any, x: Any, routing: Any, experts: Any, environment: Any) -> Any:
        self.passes["apply"] += 1
        return xla.Xla().apply(problem, x, routing, experts, environment)

    def apply_saving(self, problem: Any, x: Any, routing: Any, experts: Any, environment: Any) -> Any:
        self.passes["apply_saving"] += 1
        return xla.Xla().apply(problem, x, routing, experts, environment), kept(x)

    def backward(self, problem: Any, primals: Any, environment: Any, dy: Any, wanted: Any) -> Any:
        saved = primals.saved
        self.passes["backward" if saved is None else "backward of saved"] += 1
        found = xla.backward(problem, primals, dy, wanted)
        if saved is None:
            return found
        right = (saved == kept(primals.x)).all()
        return jax.tree.map(lambda d: jnp.where(right, d, jnp.nan), found)


def kept(x: jax.Array) -> jax.Array:
    return jnp.tile(jnp.sin(x.astype(jnp.float32)).sum(0), (T + 3, 1))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    found: dict[str, int] = dict.fromkeys(("apply", "apply_saving", "backward", "backward of saved"), 0)
    registry = Registry(registered_backends())
    registry.register(Keeping(found), before="xla")
    monkeypatch.setattr("jmx.backends.REGISTRY", registry)
    yield found
    jax.clear_caches()


def arguments(rng: np.random.Generator, *lead: int) -> tuple[jax.Array, jmx.Routing, jmx.Experts]:
    x = jnp.asarray(rng.normal(size=(*lead, T, H)), jnp.float32)
    ids = jnp.asarray(rng.integers(E, size=(*lead, T, K)), jnp.int32)
    routing = jmx.Routing(ids, jnp.asarray(rng.random((*lead, T, K)), jnp.float32))
    key = jax.random.key(int(rng.integers(100)))
    return x, routing, jmx.Experts.random(key, E, H, WIDTH, gate_up_order="interleaved", bias=True)


def loss(x: jax.Array, routing: jmx.Routing, experts: jmx.Experts, save: bool, **options: Any) -> jax.Array:
    y = jmx.moe(x, routing, experts, activation="swiglu", backend=NAME, save_gate_up=save, **options)
    return jnp.square(y).sum()


def close(got: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, expected)


def gradients(function: Any, *given: Any) -> Any:
    return jax.jit(jax.grad(function))(*given)


def test_both_choices_have_the_same_gradients_by_other_passes(passes, rng):
    assert isinstance(Keeping(passes), SavesGateUp)
    x, routing, experts = arguments(rng)
    expected = gradients(lambda x: loss(x, routing, experts, False), x)
    assert {name for name, count in passes.items() if count} == {"apply", "backward"}
    close(gradients(lambda x: loss(x, routing, experts, True), x), expected)
    assert (passes["backward"], passes["apply_saving"], passes["backward of saved"]) == (1, 1, 1)
    loss(x[:3], part(routing, slice(3)), experts, True)  # which is not differentiated
    assert passes["apply_saving"] == 1


TRANSFORMED: dict[str, Any] = {
    "vmap": lambda f: lambda x, routing: jax.vmap(f)(x, routing).sum(),
    "vmap of the gradient": None,
    "scan": lambda f: lambda x, routing: jax.lax.scan(lambda sum, row: (sum + f(*row), None), 0.0, (x, routing))[0],
    "checkpoint": lambda f: lambda x, routing: sum(jax.checkpoint(f)(x[i], part(routing, i)) for i in range(2)),
    "shard_map": None,
}


def part(routing: jmx.Routing, i: int | slice) -> jmx.Routing:
    return jax.tree.map(lambda a: a[i], routing)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.devices(2 if kind == "shard_map" else 1)) for kind in TRANSFORMED]
)
def test_each_call_gets_what_it_saved(kind, passes, rng):
    x, routing, experts = arguments(rng, 2)
    of_each = [gradients(lambda x, i=i: loss(x, part(routing, i), experts, False), x[i]) for i in range(2)]

    def one(x: jax.Array, routing: jmx.Routing) -> jax.Array:
        return loss(x, routing, experts, True)

    if kind == "vmap of the gradient":
        got = jax.jit(jax.vmap(jax.grad(one)))(x, routing)
    elif kind == "shard_map":
        mesh = jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Auto,))
        body = jax.shard_map(lambda x, r: one(x[0], part(r, 0))[None], mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
        got = gradients(lambda x: body(x, routing).sum(), x)
    else:
        got = gradients(TRANSFORMED[kind](one), x, routing)
    close(got, jnp.stack(of_each))
    assert passes["backward of saved"] > 0


@pytest.mark.parametrize("policy", [None, "saved"])
def test_policies_of_checkpoint_keep_it_by_name(policy, passes, rng):
    x, routing, experts = arguments(rng)
    named = None if policy is None else jax.checkpoint_policies.save_only_these_names(training.GATE_UP)
    run = jax.checkpoint(lambda x: loss(x, routing, experts, True), policy=named)
    kinds = [leaf.shape for leaf in jax.tree.leaves(jax.vjp(run, x)[1]) if hasattr(leaf, "shape")]
    assert (kept(x).shape in kinds) == (policy is not None)
    close(gradients(run, x), gradients(lambda x: loss(x, routing, experts, False), x))


@pytest.mark.devices(2)
@pytest.mark.parametrize("split", [None, jmx.Split(expert="dp"), jmx.Split(tokens="dp")], ids=str)
def test_over_a_mesh(split, passes, rng):
    x, routing, experts = arguments(rng)
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Auto,))
    expected = gradients(lambda x: loss(x, routing, experts, False), x)
    with jax.set_mesh(mesh):
        close(gradients(lambda x: loss(x, routing, experts, True, split=split), x), expected)
    assert passes["backward of saved"] > 0


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_modules_have_the_choice(kind, passes, rng):
    x = jnp.asarray(rng.normal(size=(T, H)), jnp.float32)
    options = {"backend": NAME, "save_gate_up": True}
    if kind == "nnx":
        layer = jmx.nnx.MoE(H, WIDTH, E, K, **options, rngs=nnx.Rngs(0))
        gradients(lambda x: jnp.square(layer(x)).sum(), x)
        layer.save_gate_up = False
        gradients(lambda x: jnp.square(layer(x)).sum(), x)
        assert passes["backward"] == 1
    else:
        module = jmx.linen.MoE(H, WIDTH, E, K, **options)
        variables = module.init(jax.random.key(0), x)
        gradients(lambda x: jnp.square(jnp.asarray(module.apply(variables, x))).sum(), x)
    assert passes["backward of saved"] == 1


def test_backends_and_gradients_that_cannot_use_it_leave_it_out(passes, rng):
    x, routing, experts = arguments(rng)
    assert isinstance(MosaicSm90(), SavesGateUp)
    assert not isinstance(xla.Xla(), Differentiable)
    with jmx.use_backend("xla"):
        call = {"activation": "swiglu", "save_gate_up": True}
        got = gradients(lambda x: jnp.square(jmx.moe(x, routing, experts, **call)).sum(), x)
    close(got, gradients(lambda x: loss(x, routing, experts, False), x))
    layer = jmx.nnx.MoE(H, WIDTH, E, K, backend=NAME, save_gate_up=True, qat=training.QAT(), rngs=nnx.Rngs(0))
    nnx.grad(lambda layer: jnp.square(layer(x)).sum())(layer)  # of master weights, which are the reference's
    empty = gradients(lambda x: loss(x, part(routing, slice(0)), experts, True), x[:0])
    assert empty.shape == (0, H)
    assert passes["apply_saving"] == passes["backward of saved"] == 0
