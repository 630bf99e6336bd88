"""A routing with its blocks: what a kernel that routes and groups at once returns."""

from collections.abc import Hashable
from typing import Any, Protocol, runtime_checkable

import jax

from jmx.grouping import Work
from jmx.routing import Routing
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.util.typing import Array, Float


@jax.tree_util.register_pytree_node_class
class GroupedRouting(Routing):
    """A `Routing` whose blocks are known, for one way to group it; a pytree in which ints of the blocks are static.

    `_replace` gives a routing without blocks: they would be of other ids or other tokens.
    """

    _arrays: tuple[Any, ...] = ()
    _static: Any = None  # how rows were grouped; and of the blocks the structure, and the leaves that are ints

    @classmethod
    def of(cls, routing: Routing, grouping: Hashable, work: Work) -> "GroupedRouting":
        """`grouping`: how the rows of `work` were grouped."""
        leaves, structure = jax.tree.flatten(work)
        ints = tuple(leaf if isinstance(leaf, int) else None for leaf in leaves)
        arrays = tuple(leaf for leaf in leaves if not isinstance(leaf, int))
        return cls._made(routing, arrays, (grouping, structure, ints))

    @classmethod
    def _made(cls, routing: Routing, arrays: Any, static: Any) -> "GroupedRouting":
        made = cls(*routing)
        made._arrays, made._static = arrays, static
        return made

    def work(self, grouping: Hashable) -> Work | None:
        """The blocks, if rows were grouped so."""
        if self._static is None or self._static[0] != grouping:
            return None
        _, structure, ints = self._static
        arrays = iter(self._arrays)
        return jax.tree.unflatten(structure, [next(arrays) if n is None else n for n in ints])

    def tree_flatten(self) -> tuple[tuple[Any, Any, Any], Any]:
        return (*self, self._arrays), self._static

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> "GroupedRouting":
        ids, weights, arrays = children
        return cls._made(Routing(ids, weights), arrays, static)

    def cotangent(self, weights: Float[Array, "..."]) -> "GroupedRouting":
        return self._made(Routing(None, weights), (None,) * len(self._arrays), self._static)


def alone(routing: Routing) -> Routing:
    """The ids and the weights, without blocks."""
    return Routing(routing.expert_ids, routing.weights)


def cotangent(routing: Routing, weights: Float[Array, "..."]) -> Routing:
    """The cotangent of a routing, as rules of `jax.custom_vjp` return it: that of the weights, and none of the rest."""
    return routing.cotangent(weights) if isinstance(routing, GroupedRouting) else Routing(None, weights)


@runtime_checkable
class Groups(Protocol):
    """What a backend has whose rows are grouped by a `jmx.engines.grouped.Tiling`."""

    def tiling(self, problem: Problem, environment: Environment) -> Any:
        """The `Tiling` of a call that it supports, which has tokens and slots."""
        ...
