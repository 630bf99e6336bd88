"""Placements: which slots of a layer's ranks hold each expert, and how many copies of it there are."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmx import meshes
from jmx.routing.routing import NOWHERE, as_int32
from jmx.util import pytrees
from jmx.util.checks import check_array, check_instance, check_int, is_array, shown
from jmx.util.typing import AnyArray, Array, Int32, Integer, UInt32

EMPTY = -1  # the expert of an empty slot, and the slot of a copy that an expert does not have

# 2^32 over the golden ratio. Its multiples modulo 2^32 are as evenly spaced as those of any number, however many are
# taken: Knuth, The Art of Computer Programming, volume 3, section 6.4, theorem S.
_GOLDEN = np.uint32(2654435769)


@pytrees.register(data=["slots_of_expert", "copies", "expert_of_slot"], static=["num_ranks"])
@dataclass(frozen=True)
class Placement:
    """Where the E experts of a layer are: in S slots, the same number of consecutive ones on each rank.

    A slot holds the weights of one expert, or none. An expert is in one slot or, with spare slots, in several, its
    copies, each on another rank. Only the number of ranks is static: a function compiled for one placement runs with
    any other of the same sizes. Made by `identity`, `of` and `jmx.parallel.balance`, which check it, with arrays of
    numpy; `on` puts them on devices. In a placement of several layers all arrays have a leading axis (L,).

    Attributes:
        slots_of_expert: (E, C) int32, the slots of each expert in ascending order, then -1. C is min(ranks, 1 + S - E),
            the most copies that there can be.
        copies: (E,) int32, the number of slots of each expert, 1 or more.
        expert_of_slot: (S,) int32, the expert in each slot, -1 in an empty one.
        num_ranks: the number of ranks. Rank r has the slots from r S / ranks on.
    """

    slots_of_expert: Int32[Any, "*layers E C"]
    copies: Int32[Any, "*layers E"]
    expert_of_slot: Int32[Any, "*layers S"]
    num_ranks: int

    # Construction

    @classmethod
    def identity(cls, num_experts: int, num_ranks: int, spare_experts: int = 0) -> "Placement":
        """Expert e in slot e, and every other slot empty.

        Args:
            num_experts, num_ranks: E and the number of ranks, 1 or more.
            spare_experts: slots beside those E, 0 or more. As many more are added as make each rank's slots equal.

        Raises:
            ValueError, TypeError: sizes that are no integers, or too small.
        """
        num_slots = slots_needed(num_experts, num_ranks, spare_experts)
        slots = np.arange(num_slots, dtype=np.int32)
        return cls.of(np.where(slots < num_experts, slots, EMPTY), num_experts=num_experts, num_ranks=num_ranks)

    @classmethod
    def of(cls, expert_of_slot: Integer[AnyArray, "*layers S"], *, num_experts: int, num_ranks: int) -> "Placement":
        """The placement with these experts in its slots: (S,) integers, -1 for an empty slot, or (L, S) of L layers.

        Raises:
            TypeError: no array of integers.
            ValueError: a number of slots that ranks do not divide, an expert outside 0..E-1, in no slot, or in two of
                one rank.
        """
        num_experts = check_int("num_experts", num_experts, least=1)
        num_ranks = check_int("num_ranks", num_ranks, least=1)
        table = np.asarray(check_array("expert_of_slot", expert_of_slot, np.integer))
        if table.ndim not in (1, 2) or not table.size:
            raise ValueError(f"`expert_of_slot` (shape {table.shape}) must be (slots,) or (layers, slots)")
        if table.shape[-1] % num_ranks:
            raise ValueError(
                f"`expert_of_slot` (shape {table.shape}) must have a number of slots that is a multiple of "
                f"`num_ranks` (={num_ranks})"
            )
        layers = [_of_layer(layer, num_experts, num_ranks) for layer in table.reshape(-1, table.shape[-1])]
        return layers[0] if table.ndim == 1 else cls.stack(layers)

    @classmethod
    def stack(cls, placements: Sequence["Placement"]) -> "Placement":
        """The placements of several layers, of equal sizes, as one.

        Raises:
            TypeError, ValueError: no placements, or some that are not of one layer or differ in a size.
        """
        if not isinstance(placements, Sequence) or isinstance(placements, str):
            raise TypeError(f"`placements` ({shown(placements)}) must be a sequence of jmx.parallel.Placement")
        if not placements:
            raise ValueError("`placements` (=[]) must hold that of one layer at least")
        for i, placement in enumerate(placements):
            check_placement(f"placements[{i}]", placement, layers=())
            check_alike(f"placements[{i}]", placement, placements[0])
        return jax.tree.map(lambda *arrays: np.stack(arrays), *placements)

    def layer(self, index: int) -> "Placement":
        """The placement of one layer of several: a view. `index` may be negative, as in a list.

        Raises:
            TypeError, ValueError: no integer, no such layer, or a placement of one layer.
        """
        if not self.layers:
            raise ValueError("`layer` must be called on a placement of several layers; this one is of one layer")
        index = check_int("index", index, least=-self.layers[0], most=self.layers[0] - 1)
        return jax.tree.map(lambda array: array[index], self)

    def on(self, mesh: Mesh) -> "Placement":
        """The same with its arrays whole on every device of a mesh, so that calls do not copy them there."""
        check_instance("mesh", mesh, Mesh, "a jax.sharding.Mesh")
        everywhere = NamedSharding(mesh, P())

        def put(array: Int32[AnyArray, "..."]) -> Int32[Array, "..."]:
            values = np.asarray(array)
            return jax.make_array_from_callback(values.shape, everywhere, lambda part: values[part])

        return jax.tree.map(put, self)

    # Sizes

    @property
    def layers(self) -> tuple[int, ...]:
        """(L,) of L layers, () of one."""
        return tuple(self.copies.shape[:-1])

    @property
    def num_experts(self) -> int:
        return self.copies.shape[-1]

    @property
    def num_slots(self) -> int:
        return self.expert_of_slot.shape[-1]

    @property
    def spare_experts(self) -> int:
        """The number of slots beyond one an expert, which hold copies or nothing."""
        return self.num_slots - self.num_experts

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.num_ranks

    # Checks

    def check(self) -> None:
        """Checks arrays that did not come from `of`, such as those of a checkpoint; they must not be traced.

        Raises:
            ValueError, TypeError: as `of`, or maps that do not agree with each other, naming the expert.
        """
        check_array("slots_of_expert", self.slots_of_expert, np.integer)
        check_array("copies", self.copies, np.integer)
        right = Placement.of(self.expert_of_slot, num_experts=self.num_experts, num_ranks=self.num_ranks)
        for name in ("copies", "slots_of_expert"):
            given, wanted = np.asarray(getattr(self, name)), getattr(right, name)
            if given.shape != wanted.shape:
                raise ValueError(f"`{name}` (shape {given.shape}) must be {wanted.shape}")
            if (given != wanted).any():
                where = tuple(int(i) for i in np.argwhere(given != wanted)[0][: right.copies.ndim])
                raise ValueError(
                    f"`{name}[{', '.join(map(str, where))}]` (={given[where].tolist()}) must be "
                    f"{wanted[where].tolist()}, as `expert_of_slot` has expert {where[-1]}"
                )

    # Routing

    def slot_ids(
        self,
        expert_ids: Integer[AnyArray, "*tokens k"],
        first_token: Integer[AnyArray, ""] | np.integer | int = 0,
    ) -> Int32[Array, "*tokens k"]:
        """The slots (..., k) int32 that compute tokens routed to `expert_ids` (..., k), computed on the device.

        Of an expert with copies, a hash of the token's index chooses one: the same for the same index, and each as
        often as the others. Ids outside 0..E-1 become `jmx.NOWHERE`.

        Args:
            expert_ids: integers (..., k), on one device, inside `jax.shard_map`, or with their tokens split over
                Explicit mesh axes.
            first_token: the index of the first token. Where each device has tokens of its own, give each another one,
                or a batch of one token a device uses the first copies only.

        Raises:
            TypeError, ValueError: no integers, or a placement of several layers.
        """
        check_array("expert_ids", expert_ids, jnp.integer)
        check_placement("placement", self, layers=())
        if is_array(first_token):
            check_array("first_token", first_token, jnp.integer, ())
        else:
            first_token = check_int("first_token", first_token, least=0, most=2**31 - 1)
        if not expert_ids.ndim:
            raise ValueError("`expert_ids` (shape ()) must be (..., k)")
        return _slot_ids(as_int32(expert_ids), jnp.asarray(first_token), self)


def slots_needed(num_experts: int, num_ranks: int, spare_experts: int = 0) -> int:
    """The number of slots for experts and spare ones, rounded up so that each rank has the same number."""
    num_experts = check_int("num_experts", num_experts, least=1)
    num_ranks = check_int("num_ranks", num_ranks, least=1)
    wanted = num_experts + check_int("spare_experts", spare_experts, least=0)
    return -(-wanted // num_ranks) * num_ranks


def most_copies(num_experts: int, num_slots: int, num_ranks: int) -> int:
    """How many slots one expert can have at most: one a rank, while each other expert has one."""
    return min(num_ranks, num_slots - num_experts + 1)


def check_placement(name: str, placement: Any, layers: tuple[int, ...] | None = None) -> Placement:
    """A `Placement`, of so many layers: () is one layer, None any number."""
    check_instance(name, placement, Placement, "a jmx.parallel.Placement")
    if layers is not None and placement.layers != layers:
        wanted = f"that of {layers[0]} layers" if layers else "that of one layer, as `layer(i)` gives it"
        raise ValueError(f"`{name}` (of layers {placement.layers}) must be {wanted}")
    return placement


def check_alike(name: str, placement: Placement, other: Placement) -> None:
    """Raises ValueError, naming the size, unless both placements have the same sizes."""
    for size in ("num_experts", "num_slots", "num_ranks"):
        if getattr(placement, size) != getattr(other, size):
            raise ValueError(f"`{name}.{size}` (={getattr(placement, size)}) must be {getattr(other, size)}")


def _of_layer(table: Integer[np.ndarray, " S"], num_experts: int, num_ranks: int) -> Placement:
    """`Placement.of` one layer."""
    num_slots = len(table)
    if num_slots < num_experts:
        raise ValueError(f"`expert_of_slot` (of {num_slots} slots) must have a slot for each of {num_experts} experts")
    if outside := sorted({*table.tolist()} - {EMPTY, *range(num_experts)}):
        raise ValueError(f"`expert_of_slot` has expert {outside[0]}: it must be in 0..{num_experts - 1}, or {EMPTY}")
    copies = np.bincount(table[table != EMPTY], minlength=num_experts).astype(np.int32)
    if not copies.all():
        raise ValueError(f"`expert_of_slot` has no slot of expert {int(np.argmin(copies))}: each expert must have one")
    for rank, row in enumerate(table.reshape(num_ranks, -1)):
        experts, times = np.unique(row[row != EMPTY], return_counts=True)
        if (times > 1).any():
            raise ValueError(
                f"`expert_of_slot` has expert {int(experts[np.argmax(times)])} twice on rank {rank}: copies must be on "
                "different ranks"
            )
    slots = np.full((num_experts, most_copies(num_experts, num_slots, num_ranks)), EMPTY, np.int32)
    found: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(table.tolist()):
        if expert != EMPTY:
            found[expert].append(slot)
    for expert, its in enumerate(found):
        slots[expert, : len(its)] = its
    return Placement(slots, copies, table.astype(np.int32), num_ranks)


@jax.jit
def _slot_ids(
    expert_ids: Int32[Array, "*tokens k"], first_token: Integer[Array, ""], placement: Placement
) -> Int32[Array, "*tokens k"]:
    leading = expert_ids.shape[:-1]
    tokens = first_token.astype(jnp.uint32) + jnp.arange(prod(leading), dtype=jnp.uint32).reshape(leading)
    whole = {"slots_of_expert": placement.slots_of_expert, "copies": placement.copies}
    split = meshes.leading_split(len(leading), {"expert_ids": expert_ids}, whole)
    by_token = (expert_ids, tokens)
    return (
        _local_slot_ids(by_token, whole)
        if split is None
        else meshes.over_devices(split, _local_slot_ids, by_token, whole)
    )


def _local_slot_ids(
    by_token: tuple[Int32[Array, "*tokens k"], UInt32[Array, "*tokens"]], maps: dict[str, Int32[Array, "..."]]
) -> Int32[Array, "*tokens k"]:
    """The slots of `by_token`, expert ids and indices of tokens, on one device."""
    ids, tokens = by_token
    num_experts, most = maps["slots_of_expert"].shape
    inside = (ids >= 0) & (ids < num_experts)
    ids = jnp.where(inside, ids, 0)
    part = (tokens * _GOLDEN >> 16)[..., None]  # of 2^16
    copy = part * maps["copies"].astype(jnp.uint32)[ids] >> 16
    slots = maps["slots_of_expert"].reshape(-1)[ids * most + copy.astype(jnp.int32)]
    return jnp.where(inside, slots, NOWHERE)
