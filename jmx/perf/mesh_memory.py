"""The memory that timing a divided layer takes on each device, from compiled programs, before arrays are made."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jmx.perf.divided import Case, Layers, temporary_bytes
from jmx.perf.machine import memory_limit


@dataclass(frozen=True)
class MeshMemory:
    """Bytes on the first device, which has the whole layers too; the others have less.

    Args:
        whole, divided: weights of all layers: whole, and this device's part; with these as they are gathered along the
            hidden axis, where the mesh divides that.
        tokens: x and logits of the case that needs most, of every call; results of two calls.
        temporary: of the call that needs most.
        limit: what the device has; None: not known. On CPUs it is that of all devices together.
        num_devices: those of the mesh.
        is_shared: whether all devices have their memory together.
    """

    whole: int
    divided: int
    tokens: int
    temporary: int
    limit: int | None
    num_devices: int
    is_shared: bool

    @classmethod
    def of(cls, layers: Layers, cases: Sequence[Case]) -> "MeshMemory":
        """That of the cases one after the other. It waits for their programs to be compiled."""
        weights, device = layers.described(), layers.mesh.devices.flat[0]
        programs = [call.result() for case in cases for call in case.calls.values()]
        return cls(
            whole=_bytes(weights.whole),
            divided=_bytes(weights.divided) + (_bytes(weights.gathered) if layers.split.names("hidden") else 0),
            tokens=max(map(_tokens, cases)),
            temporary=max(temporary_bytes(program) or 0 for program in programs),
            limit=memory_limit(device),
            num_devices=layers.mesh.size,
            is_shared=device.platform == "cpu",
        )

    @property
    def needed(self) -> int:
        """Bytes together, of a device, or of all devices where they share memory."""
        others = self.num_devices - 1 if self.is_shared else 0
        each = self.divided + self.tokens + self.temporary
        return self.whole + each * (1 + others)

    def check(self, num_layers: int) -> None:
        """Raises ValueError where a device has less memory."""
        if self.limit is not None and self.needed > self.limit:
            raise ValueError(
                f"`layers` (={num_layers}) must be fewer, or `tokens` smaller, for the memory of a device: {self}"
            )

    def __str__(self) -> str:
        parts = (
            (self.whole, "whole weights"),
            (self.divided, "divided weights"),
            (self.tokens, "tokens"),
            (self.temporary, "temporary"),
        )
        listed = ", ".join(f"{size / 1e9:.2f} GB {what}" for size, what in parts)
        has = "memory not known" if self.limit is None else f"{self.limit / 1e9:.1f} GB there"
        together = f" with those of {self.num_devices - 1} others" if self.is_shared else ""
        return f"memory of the first device: {listed}{together}: {self.needed / 1e9:.2f} GB needed, {has}"


def _tokens(case: Case) -> int:
    described = case.arguments(case.layers.described(), *case.described_tokens())
    arguments = [*described.values()]
    each_once = {id(array): _bytes(array) for its in arguments for array in jax.tree.leaves(its[:2])}
    results = [_bytes(its[0]) for its in arguments]
    return sum(each_once.values()) + 2 * max(results) + 2 * results[-1]  # float32 ones for the relative error


def _bytes(described: Any) -> int:
    """Of arrays on one of their devices."""
    arrays = jax.tree.leaves(described)
    return sum(jnp.dtype(a.dtype).itemsize * prod(a.sharding.shard_shape(a.shape)) for a in arrays)
