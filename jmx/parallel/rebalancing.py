"""Rebalancing: the weights of experts that are split over ranks move from the slots of one placement to another's."""

from collections.abc import Callable, MutableSequence

import jax
import numpy as np

from jmx.parallel.moves import schedule, sources
from jmx.parallel.placed_experts import PlacedExperts, by_slot
from jmx.parallel.placement import Placement, check_alike, check_placement
from jmx.parallel.transfer import transfer
from jmx.util.checks import check_bool, check_callable, check_finite, check_instance, shown

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
    moved = transfer([*arrays.values()], schedule(source, after.num_ranks), mesh, axes, timeout_s)
    new = dict(zip(arrays, moved, strict=True))
    return PlacedExperts(placed.experts.with_arrays(placed.experts.arrays() | new), after.on(mesh))


def rebalance(
    layers: MutableSequence[PlacedExperts],
    after: Placement,
    *,
    donate: bool = False,
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Moves the experts of each layer to the slots of a new placement, and replaces the elements of `layers`.

    One layer after the other, and each at once: an element is replaced by new weights with their placement, when they
    are complete. Whatever stops this, an exception or an interrupt, every element is valid: those of the layers before
    have the new placement, the others the old one. A second call with the same arguments moves the rest.

    Args:
        layers: a list of the experts of each layer, see `move`.
        after: the placement of as many layers, as `balance` returns it.
        donate: whether a layer's old arrays are deleted when it is replaced, also if they are in use elsewhere. Peak
            memory is one layer more either way, if they are not.
        timeout_s: how long to wait for the transfer of one layer, in seconds.
        progress: called with the number of layers done and that of all, after each one.

    Raises:
        as `move`, for the first layer at fault; wrong arguments before the first layer moves.
    """
    _check_layers(layers, after)
    check_bool("donate", donate)
    timeout_s = _check_timeout(timeout_s)
    if progress is not None:
        check_callable("progress", progress)
    for i in range(len(layers)):
        old = layers[i]
        layers[i] = move(old, after.layer(i), timeout_s=timeout_s)
        if donate:
            _delete(old, layers[i])
        del old  # or its arrays would stay until the next layer is complete
        if progress is not None:
            progress(i + 1, len(layers))


def _check_layers(layers: MutableSequence[PlacedExperts], after: Placement) -> None:
    if not isinstance(layers, MutableSequence):
        raise TypeError(f"`layers` ({shown(layers)}) must be a list of jmx.parallel.PlacedExperts")
    check_placement("after", after, layers=(len(layers),))
    for i, placed in enumerate(layers):
        try:
            _check_move(f"layers[{i}]", placed, after.layer(i))
            placed.mesh_axes()
        except (TypeError, ValueError) as error:
            error.add_note(f"This is about layers[{i}]; no layer was moved.")
            raise


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
