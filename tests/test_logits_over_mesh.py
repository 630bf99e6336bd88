"""Divided layers whose devices route the tokens of all, by the kernel that also groups rows of their own experts."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blockwise import Blockwise
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from model_steps import relative_error

import jmx
from jmx.backends import registered_backends
from jmx.layer import moe_of_some
from jmx.pallas.routing import call as routing_kernel
from jmx.parallel import PlacedExperts, Placement, gather
from jmx.selection.problem import Some
from jmx.selection.registry import Registry

pytestmark = [pytest.mark.costly, pytest.mark.devices(8), pytest.mark.usefixtures("on_cpu", "peer_by_collectives")]

E, H, INTERMEDIATE, K = 16, 64, 32, 3
MESHES = (1, 2), (2, 4), (4, 2), (8, 1), (1, 8)  # of dp and ep
METHODS = {
    "softmax": (jmx.TopKSoftmax(K), False),
    "sigmoid and bias": (jmx.SigmoidTopK(K, True, 2.5), True),
    "groups": (jmx.GroupedTopK(K, 4, 2, "sigmoid", True, 2.5), True),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel is used on CPUs, too, interpreted; the problems of the calls that were made."""
    made = []

    def recorded(logits: Any, mask: Any, call: Any, first: Any = None) -> Any:
        made.append(call.problem)
        return kernel(logits, mask, call, first)

    kernel = routing_kernel.route_and_group
    monkeypatch.setattr("jmx.backends.REGISTRY", Registry((Blockwise(), *registered_backends())))
    monkeypatch.setattr(routing_kernel, "applies", lambda *_, **__: True)
    monkeypatch.setattr(routing_kernel, "Call", partial(routing_kernel.Call, interpret=True))
    monkeypatch.setattr(routing_kernel, "route_and_group", recorded)
    yield made
    jax.clear_caches()


def mesh_of(dp: int, ep: int) -> Any:
    return jax.make_mesh((dp, ep), ("dp", "ep"), (AxisType.Auto,) * 2, devices=jax.devices("cpu")[: dp * ep])


def draw(rng: Any, num_tokens: int, dtype: str = "float32") -> Any:
    x = jnp.asarray(rng.normal(size=(num_tokens, H)), dtype)
    logits = jnp.asarray(rng.normal(size=(num_tokens, E)), jnp.float32)
    key = jax.random.key(rng.integers(1 << 31))
    return x, logits, jmx.Experts.random(key, E, H, INTERMEDIATE, gate_up_order=None)


def layer(x: Any, logits: Any, experts: Any, method: Any, bias: Any = None, **options: Any) -> jax.Array:
    routing = jmx.Logits(logits, method, bias)
    return jmx.moe(x, routing, experts, activation=jmx.ReLU(), backend="blockwise", **options)


def unfused(x: Any, logits: Any, experts: Any, method: Any, bias: Any = None, mask: Any = None) -> jax.Array:
    """On one device, routed before."""
    routing = jmx.route(jmx.Logits(logits, method, bias), mask)
    return jmx.moe(x, routing, experts, activation=jmx.ReLU(), backend="blockwise")


@pytest.mark.parametrize("tokens", [("dp", "ep"), "dp", ()], ids=str)
@pytest.mark.parametrize("exchange", ["gather", "peer", "peer_lines"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.sampled(3)
def test_values_and_gradients_are_those_of_one_device(
    rng: Any, calls: Any, each: int, sizes: Any, method: str, masked: bool, exchange: str, tokens: Any
) -> None:
    mesh, (how, biased) = mesh_of(*sizes), METHODS[method]
    devices = {"dp": sizes[0], "ep": sizes[1]}
    num_tokens = each * int(np.prod([devices[name] for name in np.atleast_1d(tokens)])) if tokens else each
    x, logits, experts = draw(rng, num_tokens)
    bias = jnp.asarray(rng.normal(size=E), jnp.float32) if biased else None
    mask = jnp.asarray(rng.random(num_tokens) < 0.7).at[0].set(True) if masked else None  # else all of it is 0
    split = jmx.Split(expert="ep", tokens=tokens, exchange=exchange if "ep" in tokens else None, mesh=mesh)

    def loss(call: Any, x: Any, logits: Any) -> Any:
        y = call(x, logits, experts, how, bias, mask=mask)
        return (y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum(), y

    expected, wanted = jax.grad(partial(loss, unfused), (0, 1), has_aux=True)(x, logits)
    assert not calls
    divided = jax.jit(jax.grad(partial(loss, partial(layer, split=split)), (0, 1), has_aux=True))
    gradients, got = divided(x, logits)
    if sizes[1] == 1:  # experts are not divided
        assert not calls
    else:
        assert {its.num_routed for its in calls} == {E}
        assert {its.num_tokens for its in calls} == {each * (sizes[1] if "ep" in tokens else 1)}
    assert relative_error(got, wanted) <= 1e-5
    for a, b in zip(gradients, expected, strict=True):
        assert relative_error(a, b) <= 2e-5


@pytest.mark.usefixtures("calls")
def test_a_collective_has_tokens_and_logits(rng: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    monkeypatch.setattr(gather, "together", lambda move, arrays: sent.append(arrays) or [move(its) for its in arrays])
    x, logits, experts = draw(rng, 4)
    split = jmx.Split(expert="ep", tokens="ep", exchange="gather", mesh=mesh_of(1, 2))
    jax.jit(lambda x, logits: layer(x, logits, experts, jmx.TopKSoftmax(K), split=split))(x, logits)
    assert [[its.shape for its in arrays] for arrays in sent] == [[(2, H), (2, E)]]


@pytest.mark.parametrize("options", [{"exchange": "rows"}, {"capacity": 4.0}, {"chunks": 2}], ids=str)
def test_exchanges_of_single_tokens_send_their_routing(rng: Any, calls: Any, options: Any) -> None:
    x, logits, experts = draw(rng, 8)
    split = jmx.Split(expert="ep", tokens="ep", mesh=mesh_of(1, 2), **options)
    y = jax.jit(lambda x, logits: layer(x, logits, experts, jmx.TopKSoftmax(K), split=split))(x, logits)
    assert not calls
    assert relative_error(y, unfused(x, logits, experts, jmx.TopKSoftmax(K))) <= 1e-5


@pytest.mark.parametrize("form", ["slots", "shards", "routing"])
def test_other_forms_are_routed_by_their_device(rng: Any, calls: Any, form: str) -> None:
    x, logits, experts = draw(rng, 8)
    mesh, method = mesh_of(1, 2), jmx.TopKSoftmax(K)
    expected = unfused(x, logits, experts, method)
    split, held, routing = jmx.Split(expert="ep", tokens="ep", mesh=mesh), experts, jmx.Logits(logits, method)
    if form == "slots":
        held = PlacedExperts.of(experts, Placement.identity(E, 2, 2)).split(mesh, "ep")
    elif form == "shards":
        held, split = jmx.ShardedExperts.of(experts, 2), dataclasses.replace(split, expert=None, intermediate="ep")
    else:
        routing = jmx.route(routing)
    run = partial(jmx.moe, activation=jmx.ReLU(), backend="blockwise", split=split)
    assert relative_error(jax.jit(run)(x, routing, held), expected) <= 1e-5
    assert not calls


def test_inside_shard_map_scan_and_vmap(rng: Any, calls: Any) -> None:
    mesh, method = mesh_of(2, 2), jmx.TopKSoftmax(K)
    x, logits, experts = draw(rng, 8)
    split = jmx.Split(expert="ep", tokens=("dp", "ep"))
    divided = jax.device_put(experts, NamedSharding(mesh, P("ep")))

    def body(x: Any, logits: Any, experts: Any) -> Any:
        def step(x: Any, logits: Any) -> Any:
            return x + layer(x, logits, experts, method, split=split), None

        return lax.scan(step, x, jnp.stack([logits, -logits]))[0]

    tokens = P(("dp", "ep"))
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(tokens, tokens, P("ep")), out_specs=tokens))
    first = x + unfused(x, logits, experts, method)
    second = first + unfused(first, -logits, experts, method)
    assert relative_error(run(x, logits, divided), second) <= 1e-5
    assert calls
    whole = partial(layer, experts=experts, method=method, split=dataclasses.replace(split, mesh=mesh))
    mapped = jax.jit(jax.vmap(lambda x, logits: whole(x, logits)))(jnp.stack([x, first]), jnp.stack([logits, -logits]))
    assert relative_error(mapped[1], second - first) <= 1e-5


@pytest.mark.parametrize("backend", ["xla", "cpu"])
def test_a_single_token_of_which_a_device_has_some_experts_or_none(rng: Any, backend: str) -> None:
    x, _, experts = draw(rng, 1)
    run = jax.jit(partial(moe_of_some, some=Some(2 * E), activation=jmx.ReLU(), backend=backend))
    for own in range(K + 1):
        ids = np.concatenate([rng.permutation(E)[:own], E + rng.permutation(E)[: K - own]])[rng.permutation(K)]
        routing = jmx.Routing(jnp.asarray(ids[None], jnp.int32), jnp.asarray(rng.random((1, K)), jnp.float32))
        expected = jmx.moe(x, routing, experts, activation=jmx.ReLU(), backend="xla")
        got = run(x, routing, experts)
        assert relative_error(got, expected) <= 1e-5 if own else not jnp.any(got)
