"""Modules with spare experts: counts of all devices, moves of weights by one program, what an interrupt leaves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from model_steps import relative_error
from module_forms import KINDS, MASK, E, K, Kind, X, made, mesh_of, whole
from test_rebalancing import Compilations

import jmx
from jmx.parallel import Placement, rebalance, rebalancing

pytestmark = [pytest.mark.costly, pytest.mark.devices(8)]

AXES = {"expert": "ep", "token": ("dp", "ep")}
SHARDED = {"expert": "ep", "intermediate": "dp", "token": "ep"}
COUNTS = np.arange(E)[::-1] ** 2


@pytest.fixture(scope="module", autouse=True)
def _made_on_one_device() -> None:
    """Before any test has a mesh in scope, of which they would be then."""
    Kind().experts()


def layer_of(axes: Any = None, spare: int = 4) -> jmx.nnx.MoE:
    return Kind().module("nnx", AXES if axes is None else axes, spare)


def table(layer: jmx.nnx.MoE) -> list[int]:
    return np.asarray(layer.placement().expert_of_slot).tolist()


@pytest.mark.parametrize("axes", [AXES, SHARDED], ids=["slots", "slots of shards"])
@pytest.mark.parametrize("axis_kind", KINDS)
def test_nothing_is_compiled_for_a_second_placement(axis_kind: str, axes: Any) -> None:
    y, _ = whole(Kind(), "nnx")
    with jax.set_mesh(mesh_of(axis_kind)):
        layer = layer_of(axes)
        call = jax.jit(lambda layer, x: layer(x, mask=MASK))
        done: list[Any] = []
        tables = [table(layer)]
        for counts in (COUNTS, COUNTS[::-1]):
            rebalance(layer, counts, progress=lambda *its: done.append(its))
            tables.append(table(layer))
            assert relative_error(call(layer, X), y) <= 1e-5
        with Compilations() as compilations:
            rebalance(layer, jnp.asarray(np.roll(COUNTS, 3)))
            third = call(layer, X)
        assert compilations.count == 0
        assert done == [(1, 1)] * 2
        assert relative_error(third, y) <= 1e-5
        assert call._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]
        assert len({tuple(its) for its in [*tables, table(layer)]}) == 4
        assert max(layer.placement().copies.tolist()) > 1
        before = layer.held.arrays()
        rebalance(layer, np.roll(COUNTS, 3))  # balanced already: nothing moves
        assert all(a is b for a, b in zip(layer.held.experts.arrays().values(), before.values(), strict=False))


@pytest.mark.parametrize("axes", [AXES, SHARDED], ids=["slots", "slots of shards"])
def test_experts_of_an_axis_of_one_device_move_too(axes: Any) -> None:
    y, _ = whole(Kind(), "nnx")
    with jax.set_mesh(mesh_of("auto", (8, 1))):
        layer = layer_of(axes)
        reverse = table(layer)[::-1]
        rebalance(layer, Placement.of(np.asarray(reverse), num_experts=E, num_ranks=1))
        assert table(layer) == reverse != reverse[::-1]
        assert relative_error(layer(X, mask=MASK), y) <= 1e-5
        rebalance(layer, COUNTS)  # no copy is on another rank: any placement is as good
        assert relative_error(layer(X, mask=MASK), y) <= 1e-5


def test_a_layer_that_was_made_for_another_mesh_names_the_remedy() -> None:
    with jax.set_mesh(mesh_of("auto", (8, 1))):
        layer = layer_of(spare=3)
    with jax.set_mesh(mesh_of()), pytest.raises(ValueError, match=r"the 11 slots evenly, over 4 .* mesh in scope"):
        layer(X)


@pytest.mark.parametrize("axis_kind", KINDS)
def test_counts_are_those_of_all_devices(axis_kind: str) -> None:
    alone = Kind().module("nnx")
    expected = jmx.token_counts(alone.route(X, MASK), E)
    mesh = mesh_of(axis_kind)
    with jax.set_mesh(mesh):
        layer = layer_of()
        x = jax.device_put(X, NamedSharding(mesh, P(("dp", "ep"))))
        counts = jax.jit(lambda layer, x: layer.token_counts(layer.route(x, MASK)))(layer, x)
    assert counts.tolist() == expected.tolist()
    assert counts.sum() == MASK.sum() * K


def test_counts_inside_shard_map() -> None:
    expected = jmx.token_counts(Kind().module("nnx").route(X), E)
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        graph, state = nnx.split(layer_of())

    def count(state: Any, x: Any) -> Any:
        layer = nnx.merge(graph, state)
        return layer.token_counts(layer.route(x))

    specs = jax.tree.map(lambda array: array.sharding.spec, state)
    mapped = jax.shard_map(count, mesh=mesh, in_specs=(specs, P(("dp", "ep"))), out_specs=P())
    assert jax.jit(mapped)(state, X).tolist() == expected.tolist()


def test_an_interrupted_move_leaves_every_layer_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    y, _ = whole(Kind(), "nnx")
    counts = np.stack([COUNTS] * 3)
    with jax.set_mesh(mesh_of()):
        layers = [layer_of() for _ in range(3)]
        old, moves, real = table(layers[0]), [], rebalancing.transfer

        def stopped(*arguments: Any) -> Any:
            moves.append(1)
            if len(moves) == 2:
                raise KeyboardInterrupt
            return real(*arguments)

        monkeypatch.setattr(rebalancing, "transfer", stopped)
        with pytest.raises(KeyboardInterrupt):
            rebalance(layers, counts)
        assert [table(layer) == old for layer in layers] == [False, True, True]
        for layer in layers:
            assert relative_error(layer(X, mask=MASK), y) <= 1e-5
        rebalance(layers, counts)
        assert len({tuple(table(layer)) for layer in layers}) == 1
        assert relative_error(layers[2](X, mask=MASK), y) <= 1e-5


def test_weights_and_placement_are_replaced_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt between two variables of one layer."""
    y, _ = whole(Kind(), "nnx")
    with jax.set_mesh(mesh_of()):
        layer = layer_of()
        before, calls, real = layer.held.arrays(), [], nnx.Variable.set_value

        def stopped(self: Any, value: Any, **options: Any) -> None:
            calls.append(1)
            if len(calls) == 4:
                raise KeyboardInterrupt
            real(self, value, **options)

        monkeypatch.setattr(nnx.Variable, "set_value", stopped)
        with pytest.raises(KeyboardInterrupt):
            rebalance(layer, COUNTS)
        assert len(calls) > 4
        assert all(a is before[name] for name, a in layer.held.arrays().items())
        assert relative_error(layer(X, mask=MASK), y) <= 1e-5


def test_a_linen_layer_is_balanced_in_its_variables() -> None:
    kind = Kind()
    function, weights = made(kind, "linen", AXES, mesh := mesh_of(), 4)
    layer = kind.module("linen", AXES, 4)
    with jax.set_mesh(mesh):
        placed = [layer.held(weights)]
        rebalance(placed, COUNTS[None])
        moved = layer.hold(weights, placed[0])
        assert max(placed[0].placement.copies.tolist()) > 1
        assert jax.tree.structure(moved) == jax.tree.structure(weights)
        assert relative_error(jax.jit(function)(moved, X, MASK), whole(kind, "linen")[0]) <= 1e-5
        routing = layer.apply(moved, X, MASK, method="route")
        counts = layer.apply(moved, routing, method="token_counts")
    assert counts.sum() == MASK.sum() * K


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (COUNTS[:4], r"`after` \(of 4 experts\) must be tokens of 8 experts"),
        (np.stack([COUNTS] * 2), r"`after` \(shape \(2, 8\)\) must be tokens of 1 layers"),
        (-COUNTS, r"`counts\[0\]` \(=-49\) must be finite and at least 0"),
        (Placement.identity(E, 4), r"`after.num_slots` \(=8\) must be 12"),
        (3, r"`after` \(=3, an int\)"),
    ],
)
def test_wrong_counts_move_nothing(counts: Any, message: str) -> None:
    with jax.set_mesh(mesh_of()):
        layer = layer_of()
        before = layer.held.arrays()
        with pytest.raises((TypeError, ValueError), match=message):
            rebalance(layer, counts)
        assert all(a is before[name] for name, a in layer.held.arrays().items())


def test_a_layer_without_spare_experts_is_not_balanced() -> None:
    with jax.set_mesh(mesh_of()), pytest.raises(ValueError, match=r"`layers\[0\]` \(a MoE\) must have spare experts"):
        rebalance(layer_of(spare=0), COUNTS)
    with pytest.raises(ValueError, match=r"`spare_experts` \(=0\) must be positive for a layer with a placement"):
        layer_of(spare=0).placement()
    with pytest.raises(TypeError, match=r"`layers` \(=3, an int\) must be a list of jmx.parallel.PlacedExperts"):
        rebalance(3, COUNTS)  # pyright: ignore[reportArgumentType]


def test_another_form_is_not_held() -> None:
    with jax.set_mesh(mesh_of()):
        layer, other = layer_of(), layer_of(spare=8)
        with pytest.raises(ValueError, match=r"`held.down_bias` \(=float32\[16, 64\]\) must be float32\[12, 64\]"):
            layer.hold(other.held)
        with pytest.raises(TypeError, match=r"`held` .* must be a PlacedExperts, as the layer holds"):
            layer.hold(layer.experts)
        with pytest.raises(ValueError, match=r"must divide `gate_up_values` .* evenly, over 8 devices: experts that"):
            jmx.nnx.MoE(64, 96, 12, K, axes={"expert": ("dp", "ep")}, rngs=nnx.Rngs(0))
