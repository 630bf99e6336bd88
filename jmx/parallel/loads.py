"""Loads: how many tokens each rank computes under a placement, and a comparison of two placements."""

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmx.parallel.moves import sources
from jmx.parallel.placement import Placement, check_alike, check_placement
from jmx.util import html
from jmx.util.checks import check_array, shown
from jmx.util.tables import numbers
from jmx.util.typing import AnyArray, Array, Float, Num

_COLUMNS = "rank", "before", "after"
_ENTRY = "token_counts"  # as modules record it


def check_counts(counts: Any) -> Float[np.ndarray, "*layers E"]:
    """Tokens of each expert, (E,) or (L, E), as float64.

    Raises:
        TypeError, ValueError: no numbers, of other axes, or any that are negative or not finite, as their sum.
    """
    check_array("counts", counts)
    if not np.issubdtype(counts.dtype, np.number) or np.issubdtype(counts.dtype, np.complexfloating):
        raise TypeError(f"`counts` (dtype {counts.dtype}) must be numbers")
    loads = np.asarray(counts, np.float64)
    if loads.ndim not in (1, 2) or not loads.size:
        raise ValueError(f"`counts` (shape {loads.shape}) must be (experts,) or (layers, experts)")
    wrong = ~(np.isfinite(loads) & (loads >= 0))
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(f"`counts[{', '.join(map(str, where))}]` (={loads[where]:g}) must be finite and at least 0")
    with np.errstate(over="ignore"):
        if not np.isfinite(loads.sum()):
            raise ValueError(f"`counts` (up to {loads.max():g}) must have a finite sum")
    return loads


def layer_counts(intermediates: Any) -> Num[Array, "L E"]:
    """The tokens of each expert that layers recorded: (L, E), in the order of the layers' names and numbers.

    Args:
        intermediates: what `nnx.capture` returned, or the Linen collection "intermediates": a pytree with an entry
            `token_counts` for each layer, (E,), or (L, E) of layers that a scan stacks.

    Raises:
        ValueError: no such entries, or those of layers that differ in their number of experts.
    """
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(intermediates)[0]:
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        if _ENTRY in names:
            check_array(_ENTRY, leaf, jnp.number)
            found.append((_in_order(".".join(names)), leaf.reshape(-1, leaf.shape[-1])))
    if not found:
        raise ValueError(f"`intermediates` (={shown(intermediates)}) must have entries {_ENTRY!r} of layers")
    counts = [leaf for _, leaf in sorted(found, key=lambda each: each[0])]
    if len({leaf.shape[-1] for leaf in counts}) > 1:
        sizes = [leaf.shape[-1] for leaf in counts]
        raise ValueError(f"`intermediates` (layers of {sizes} experts) must be of layers with equal numbers of experts")
    return jnp.concatenate(counts)


def _in_order(name: str) -> list[tuple[str, int]]:
    """A name with its numbers as numbers, so that layer 2 comes before layer 10."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name)]


def rank_loads(counts: Num[AnyArray, "*layers E"], placement: Placement) -> Float[np.ndarray, "*layers ranks"]:
    """The tokens that each rank computes: float64 (ranks,), or (L, ranks) of L layers.

    The tokens of an expert are divided equally among its copies, as `Placement.slot_ids` does up to the discrepancy of
    its hash.

    Args:
        counts: tokens of each expert, (E,), or (L, E) for a placement of L layers; finite, 0 or more.
        placement: of the same layers and experts.

    Raises:
        TypeError, ValueError: counts that are no such numbers, or not those of the placement's layers and experts.
    """
    loads = check_counts(counts)
    check_placement("placement", placement, layers=loads.shape[:-1])
    if loads.shape[-1] != placement.num_experts:
        raise ValueError(f"`counts` (of {loads.shape[-1]} experts) must be of {placement.num_experts}, the placement's")
    experts = np.asarray(placement.expert_of_slot)
    shares = np.take_along_axis(loads / np.asarray(placement.copies), np.maximum(experts, 0), axis=-1)
    by_slot = np.where(experts < 0, 0, shares)
    return by_slot.reshape(*loads.shape[:-1], placement.num_ranks, -1).sum(-1)


def imbalance(loads: Float[np.ndarray, "*layers ranks"]) -> float:
    """The load of the fullest rank over that of the average one, 1 if all are equal: the mean of the layers."""
    means = loads.mean(-1)
    return float(np.mean(np.where(means > 0, loads.max(-1) / np.where(means > 0, means, 1), 1)))


@dataclass(frozen=True)
class Comparison:
    """Loads of ranks under two placements; prints as a table, and is one in notebooks.

    before, after: float64 (ranks,) or (L, ranks), see `rank_loads`.
    moved: how many slots get the weights of another slot.
    sent: how many of these come from another rank.
    num_slots: how many slots there are, of all layers.
    """

    before: Float[np.ndarray, "*layers ranks"]
    after: Float[np.ndarray, "*layers ranks"]
    moved: int
    sent: int
    num_slots: int

    def __str__(self) -> str:
        lines = [f"{rank:>5} {before:>12} {after:>12}" for rank, before, after in [_COLUMNS, *self._rows()]]
        return "\n".join([*lines, *self._lines()])

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{line}</p>" for line in self._lines())
        return html.table(numbers(*_COLUMNS), self._rows()) + lines

    def _rows(self) -> list[tuple[str, str, str]]:
        """The loads of each rank, of all layers together."""
        loads = (its.reshape(-1, its.shape[-1]).sum(0) for its in (self.before, self.after))
        return [(str(rank), f"{old:.1f}", f"{new:.1f}") for rank, (old, new) in enumerate(zip(*loads, strict=True))]

    def _lines(self) -> list[str]:
        return [
            f"fullest over average: {imbalance(self.before):.3f} before, {imbalance(self.after):.3f} after",
            f"slots moved: {self.moved} of {self.num_slots}, {self.sent} to another rank",
        ]


def compare(counts: Num[AnyArray, "*layers E"], before: Placement, after: Placement) -> Comparison:
    """The loads of ranks under `before` and `after`, placements of equal sizes, for `counts` as in `rank_loads`.

    Raises:
        TypeError, ValueError: as `rank_loads`, and placements that differ in a size.
    """
    old, new = rank_loads(counts, before), rank_loads(counts, after)
    check_alike("after", after, before)
    pairs = [(before, after)]
    if before.layers:
        pairs = [(before.layer(i), after.layer(i)) for i in range(before.layers[0])]
    source = np.stack([sources(*pair) for pair in pairs])
    slots = np.arange(before.num_slots)
    sent = source // before.slots_per_rank != slots // before.slots_per_rank
    return Comparison(old, new, int((source != slots).sum()), int(sent.sum()), source.size)
