"""Rebalancing: the weights of experts that are split over ranks move from the slots of one placement to another's."""

from collections.abc import Callable, MutableSequence, Sequence
from typing import Any, Protocol, cast

import jax
import numpy as np

from jmx.parallel.balancer import balance
from jmx.parallel.loads import check_counts
from jmx.parallel.moves import schedule, sources
from jmx.parallel.placed_experts import PlacedExperts, by_slot, slot_axis
from jmx.parallel.placement import Placement, check_alike, check_placement
from jmx.parallel.transfer import transfer
from jmx.util.checks import check_bool, check_callable, check_finite, check_instance, is_array, shown
from jmx.util.typing import AnyArray, Num

TIMEOUT_S = 60.0


def move(placed: PlacedExperts, after: Placement, *, timeout_s: float = TIMEOUT_S) -> PlacedExperts:
    """The experts of one layer in the slots of another placement, complete on return. `placed` is not changed.

    Only slots whose expert changes are sent, each from one rank to another, and nothing is gathered. A program that
    was compiled for one placement moves to any other. In several processes each must call this with the same one. The
    placement of the result is on all devices of the mesh.

    Args:
        placed: experts whose arrays are split along slots over the ranks of the placement, by a `NamedSharding`; other
            mesh axes may split other axes.
        after: a placement of one layer, of the same sizes.
        timeout_s: how long to wait for the transfer, in seconds.

    Raises:
        ValueError, TypeError: arguments that are wrong or do not fit each other, before anything moves.
        RuntimeError: processes passed different placements.
        TimeoutError: the transfer is not complete in time, for example because another process does not call this.
    """
    timeout_s = _check_timeout(timeout_s)
    _check_move("placed", placed, after)
    mesh, axes = placed.mesh_axes()
    source = sources(placed.placement, after)
    # One process of several may not leave out a transfer that another one takes part in.
    if jax.process_count() == 1 and np.array_equal(source, np.arange(len(source))):
        return PlacedExperts(placed.experts, after.on(mesh))
    arrays = by_slot(placed.experts)
    slot_axes = tuple(slot_axis(placed.experts, name) for name in arrays)
    moved = transfer([*arrays.values()], schedule(source, after.num_ranks), mesh, axes, timeout_s, slot_axes)
    new = dict(zip(arrays, moved, strict=True))
    return PlacedExperts(placed.experts.with_arrays(placed.experts.arrays() | new), after.on(mesh))


class Layer(Protocol):
    """A module with spare experts, such as `jmx.nnx.MoE`: it holds `PlacedExperts`."""

    @property
    def held(self) -> Any: ...

    def hold(self, held: Any) -> None:
        """Replaces the weights and their placement, both or neither."""
        ...


def rebalance(
    layers: MutableSequence[Any] | Layer,
    after: Placement | Num[AnyArray, "*layers E"],
    *,
    ranks_per_host: int | None = None,
    groups: int | None = None,
    policy: str = "auto",
    donate: bool = False,
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Moves the experts of each layer to the slots of a new placement, and replaces the elements of `layers`.

    One layer after the other, and each at once: an element is replaced by new weights with their placement, when they
    are complete. Whatever stops this, an exception or an interrupt, every element is valid: those of the layers before
    have the new placement, the others the old one. A second call with the same arguments moves the rest.

    Args:
        layers: a list of the experts of each layer, see `move`; or modules with spare experts, such as `jmx.nnx.MoE`, a
            list of them or one. Modules keep their place in the list, and hold the new weights.
        after: the placement of as many layers, as `balance` returns it; or the tokens of each expert, from which it is
            computed here, on the host: (L, E) of L layers, (E,) of a module that is no list.
        ranks_per_host, groups, policy: as in `balance`, for counts.
        donate: whether a layer's old arrays are deleted when it is replaced, also if they are in use elsewhere, but not
            by another one of `layers`. Peak memory is one layer more either way, if they are not.
        timeout_s: how long to wait for the transfer of one layer, in seconds.
        progress: called with the number of layers done and that of all, after each one.

    Raises:
        RuntimeError, TimeoutError, ValueError, TypeError: as `move`, for the first layer at fault, and as `balance` for
            counts; wrong arguments before the first layer moves.
    """
    alone = hasattr(layers, "held") and not isinstance(layers, MutableSequence)
    every: MutableSequence[Any] = [layers] if alone else cast(MutableSequence[Any], layers)
    _check_sequence(every)
    if isinstance(after, Placement):
        after = after if after.layers or not alone else Placement.stack([after])
    else:
        if not is_array(after):
            raise TypeError(f"`after` ({shown(after)}) must be a jmx.parallel.Placement, or an array of counts")
        after = _balanced(every, after, alone, ranks_per_host=ranks_per_host, groups=groups, policy=policy)
    _check_layers(every, after)
    if check_bool("donate", donate):
        _check_not_shared(every)
    timeout_s = _check_timeout(timeout_s)
    if progress is not None:
        check_callable("progress", progress)
    for i in range(len(every)):
        old = _placed(every[i])
        new = move(old, after.layer(i), timeout_s=timeout_s)
        if isinstance(every[i], PlacedExperts):
            every[i] = new
        else:
            every[i].hold(new)
        if donate:
            _delete(old, new)
        del old, new  # or their arrays would stay until the next layer is complete
        if progress is not None:
            progress(i + 1, len(every))


def _placed(layer: Any) -> Any:
    return getattr(layer, "held", layer)


def _check_sequence(layers: Any) -> None:
    if not isinstance(layers, MutableSequence):
        raise TypeError(
            f"`layers` ({shown(layers)}) must be a list of jmx.parallel.PlacedExperts, or of modules, or one module"
        )
    for i, layer in enumerate(layers):
        name = f"layers[{i}]"
        if hasattr(layer, "held") and not isinstance(layer.held, PlacedExperts):
            raise ValueError(f"`{name}` (a {type(layer).__name__}) must have spare experts: `spare_experts` is 0")
        check_instance(name, _placed(layer), PlacedExperts, "a jmx.parallel.PlacedExperts, or a module with such")


def _balanced(layers: Sequence[Any], counts: Any, alone: bool, **options: Any) -> Placement:
    """The placement for the tokens of each expert."""
    loads = check_counts(counts)
    loads = loads[None] if alone and loads.ndim == 1 else loads
    if loads.shape[:-1] != (len(layers),):
        raise ValueError(f"`after` (shape {loads.shape}) must be tokens of {len(layers)} layers, (layers, experts)")
    try:
        before = Placement.stack([_on_host(_placed(layer).placement) for layer in layers])
    except ValueError as error:
        error.add_note("All layers of one call of jmx.parallel.rebalance need placements of the same sizes.")
        raise
    if loads.shape[-1] != before.num_experts:
        raise ValueError(f"`after` (of {loads.shape[-1]} experts) must be tokens of {before.num_experts} experts")
    return balance(loads, before.num_ranks, before.spare_experts, before=before, **options)


def _on_host(placement: Placement) -> Placement:
    return jax.tree.map(np.asarray, placement)


def _check_layers(layers: Sequence[Any], after: Placement) -> None:
    check_placement("after", after, layers=(len(layers),))
    for i, layer in enumerate(layers):
        try:
            _check_move(f"layers[{i}]", _placed(layer), after.layer(i))
            _placed(layer).mesh_axes()
        except (TypeError, ValueError) as error:
            error.add_note(f"This is about layers[{i}]; no layer was moved.")
            raise


def _check_not_shared(layers: Sequence[Any]) -> None:
    """Raises ValueError if two layers have an array in common: the second one would be left with a deleted one."""
    first: dict[int, int] = {}
    for i, layer in enumerate(layers):
        for name, array in by_slot(_placed(layer).experts).items():
            other = first.setdefault(id(array), i)
            if other != i:
                has = f"`layers[{i}]` has the array {name!r} of layers[{other}]"
                raise ValueError(f"`donate` must be False where {has}")


def _check_timeout(timeout_s: float) -> float:
    timeout_s = check_finite("timeout_s", timeout_s)
    if timeout_s <= 0:
        raise ValueError(f"`timeout_s` (={timeout_s:g}) must be positive")
    return timeout_s


def _check_move(name: str, placed: PlacedExperts, after: Placement) -> None:
    check_instance(name, placed, PlacedExperts, "a jmx.parallel.PlacedExperts")
    placed.check()
    check_placement("after", after, layers=())
    check_alike("after", after, placed.placement)


def _delete(old: PlacedExperts, new: PlacedExperts) -> None:
    """Deletes the arrays of `old` that `new` does not share."""
    kept = [*new.experts.arrays().values()]
    for array in old.experts.arrays().values():
        if not any(array is other for other in kept):
            array.delete()
