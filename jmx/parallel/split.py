"""How the arrays of a layer are divided over the axes of a mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jmx.experts import check_mesh_axes
from jmx.meshes import MeshAxes, Names, names_of
from jmx.parallel.exchange import Call
from jmx.parallel.exchanges import EXCHANGES
from jmx.util.checks import check_finite, check_instance, check_int, check_one_of

AnyMesh = Mesh | AbstractMesh

# The fields of `Split` that name mesh axes.
LOGICAL_AXES = ("expert", "tokens", "intermediate", "hidden")


# What mesh axes divide: by which field of `Split`, and what to do where they do not divide it evenly.
_DIVIDED = {
    "experts": (
        "expert",
        "place them in slots, of which there may be more than experts: jmx.parallel.PlacedExperts",
    ),
    "slots": ("expert", "make the placement for as many ranks, or the module with the mesh in scope (jax.set_mesh)"),
    "shards": ("intermediate", "make as many shards, or a multiple: jmx.ShardedExperts.of(experts, num_shards)"),
}


@dataclass(frozen=True)
class Split:
    """Which mesh axes divide the experts, the tokens and the experts' intermediate axis of a call. Static.

    Args:
        expert: a mesh axis, or several, the major one first: each device along them has a part of the experts.
        tokens: likewise, for the first axis of x, routing and mask. Along axes that are not among these, every device
            has the same tokens.
        intermediate: likewise, for `jmx.ShardedExperts`: each device has a shard of its experts (tensor parallelism).
        hidden: likewise: each device has a part of the weights that it computes with, and gathers the others at each
            call, as they are in memory (fully sharded data parallelism). Calls recompute them in the backward pass.
        exchange: the name of the exchange that must run; None: the first of `jmx.parallel.EXCHANGES` that can.
        capacity: rows that a device accepts from each, itself included, in units of the average with even routing,
            rounded up; a token beyond these gets nothing from that device's experts. None: none is dropped.
        chunks: into how many parts the tokens of a device are split, for the exchanges `peer`, which sends one part
            while the experts compute another, and `gather`. Each part reads the weights again.
        mesh: the mesh; None: the one in scope (`jax.set_mesh`), else that of the arrays.

    Raises:
        TypeError: axes that are not names.
        ValueError: an axis that is named twice in one field, or divides two axes of the weights; or a
            capacity that is not positive and finite, or of a split that exchanges no rows; or chunks of such a split.
    """

    expert: MeshAxes = None
    tokens: MeshAxes = None
    intermediate: MeshAxes = None
    hidden: MeshAxes = None
    exchange: str | None = None
    capacity: float | None = None
    chunks: int = 1
    mesh: AnyMesh | None = None

    def __post_init__(self) -> None:
        for field in LOGICAL_AXES:
            given = getattr(self, field)
            check_mesh_axes(field, given)
            names = self.names(field)
            if len({*names}) < len(names):
                raise ValueError(f"`{field}` (={given!r}) must not name a mesh axis twice")
        for field, other in (("intermediate", "expert"), ("hidden", "expert"), ("hidden", "intermediate")):
            if both := {*self.names(field)} & {*self.names(other)}:
                raise ValueError(
                    f"`{field}` (={getattr(self, field)!r}) must not name {_quoted(both)}, as `{other}` does"
                )
        check_one_of("exchange", self.exchange, (*EXCHANGES, None))
        if self.capacity is not None:
            if check_finite("capacity", self.capacity) <= 0:
                raise ValueError(f"`capacity` (={self.capacity!r}) must be positive")
            if not self.exchanged:
                raise ValueError(
                    f"`capacity` (={self.capacity!r}) must be None where no rows are exchanged: no axis of `tokens` "
                    f"(={self.tokens!r}) divides the experts, too"
                )
        if check_int("chunks", self.chunks, least=1) > 1 and not self.exchanged:
            raise ValueError(
                f"`chunks` (={self.chunks!r}) must be 1 where no rows are exchanged: no axis of `tokens` "
                f"(={self.tokens!r}) divides the experts, too"
            )
        check_instance("mesh", self.mesh, AnyMesh | None, "a jax.sharding.Mesh, or None")

    def names(self, field: str) -> Names:
        """The mesh axes of a field that names some, the major one first."""
        return names_of(getattr(self, field))

    @property
    def all_names(self) -> Names:
        """All mesh axes, each once."""
        return tuple(dict.fromkeys(name for field in LOGICAL_AXES for name in self.names(field)))

    @property
    def exchanged(self) -> Names:
        """Axes along which devices have other experts, or shards, and other tokens."""
        return tuple(name for name in self.names("tokens") if name in self._of_weights)

    @property
    def summed(self) -> Names:
        """Axes along which devices have other experts, or shards, and the same tokens."""
        return tuple(name for name in self._of_weights if name not in self.names("tokens"))

    @property
    def _of_weights(self) -> Names:
        return (*self.names("expert"), *self.names("intermediate"))

    def is_manual(self) -> bool:
        """Whether the call is inside `jax.shard_map` over these axes: arrays are those of one device.

        Raises:
            ValueError: only some of the axes are Manual.
        """
        manual = {*jax.sharding.get_abstract_mesh().manual_axes}
        inside = [name for name in self.all_names if name in manual]
        if inside and len(inside) < len(self.all_names):
            others = [name for name in self.all_names if name not in manual]
            raise ValueError(
                f"`split` (={self}) must name Manual mesh axes only, or none: {_quoted(inside)} are, {_quoted(others)} "
                "are not. Name all of them in jax.shard_map"
            )
        return bool(inside)

    @property
    def sends_logits(self) -> bool:
        """Whether devices may exchange router logits instead of ids and weights: all get all tokens, at once."""
        return self.chunks == 1 and self.capacity is None and self.exchange != "rows"

    def mesh_of(self, arrays: Sequence[Any]) -> AnyMesh:
        """The mesh of a call that is not inside `jax.shard_map`.

        Raises:
            ValueError: there is none, or it lacks an axis.
        """
        mesh = self.mesh
        if mesh is None and not jax.sharding.get_abstract_mesh().empty:
            mesh = jax.sharding.get_abstract_mesh()
        if mesh is None:
            found = (jax.typeof(array).sharding.mesh for array in arrays)
            mesh = next((mesh for mesh in found if not mesh.empty), None)
        if mesh is None:
            raise ValueError(
                f"`split` (={self}) must have a mesh: call within `jax.set_mesh(mesh)`, or pass jmx.Split(mesh=...)"
            )
        if missing := [name for name in self.all_names if name not in mesh.axis_names]:
            raise ValueError(f"`split` (={self}) must name axes of the mesh, {mesh.axis_names}, not {_quoted(missing)}")
        return mesh

    def check_sizes(self, mesh: AnyMesh, sizes: Mapping[str, int]) -> None:
        """Raises ValueError unless the mesh divides sizes, by "experts", "slots" or "shards", evenly."""
        for what, size in sizes.items():
            field, remedy = _DIVIDED[what]
            devices = prod(mesh.shape[name] for name in self.names(field))
            if size % devices:
                raise ValueError(
                    f"`{field}` (={getattr(self, field)!r}) must divide the {size} {what} evenly, over {devices} "
                    f"devices: {remedy}"
                )

    def __repr__(self) -> str:
        given = ((field, getattr(self, field.name)) for field in fields(self) if field.name != "mesh")
        others = ((field, value) for field, value in given if value not in (field.default, ()))
        return f"Split({', '.join(f'{field.name}={value!r}' for field, value in others)})"


def _quoted(names: Sequence[str] | set[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))


def exchange_call(split: Split, sizes: Mapping[str, int], *, experts_per_rank: int, **of_tokens: Any) -> Call:
    """What is static of the exchange of a split.

    Args:
        split: of experts and tokens.
        sizes: of the mesh axes that it names.
        experts_per_rank: the experts of one device.
        of_tokens: the other fields of `Call`.
    """
    axes = split.exchanged
    return Call(
        axes=axes,
        num_ranks=prod(sizes[axis] for axis in axes),
        whole_experts=not {*axes} & {*split.names("intermediate")},
        num_experts=experts_per_rank * prod(sizes[axis] for axis in split.names("expert")),
        experts_per_rank=experts_per_rank,
        capacity=split.capacity,
        chunks=split.chunks,
        **of_tokens,
    )
