"""Adapters of low rank for the experts of one layer, as a pytree: what is trained beside frozen weights."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jmx.experts import Experts, padding
from jmx.experts.creation import resolve_bias_dtype
from jmx.util import pytrees
from jmx.util.checks import (
    check_array,
    check_bool,
    check_finite,
    check_instance,
    check_int,
    check_key,
    check_one_of,
    shown,
)
from jmx.util.typing import AnyArray, Array, Float, Key, UInt32

# The products that may have an adapter: `gate_up` has one for both halves, `gate` and `up` one each.
TARGETS = ("gate_up", "gate", "up", "down")
MATRICES = ("a", "b")


@pytrees.register(data=["a", "b"], static=["scale"])
@dataclass(frozen=True)
class Adapter:
    """What is added to one product of every expert: scale * b @ (a @ input).

    Args:
        a: floating (E, r, K), or (r, K) shared by all experts; K is the size of the product's input.
        b: floating (E, N, r), or (N, r) shared by all experts; N is the number of the product's outputs.
        scale: a finite number. Static.
    """

    a: Float[Any, "*lead r K"]
    b: Float[Any, "*lead_b N r"]
    scale: float

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[-2]


@pytrees.register(data=TARGETS)
@dataclass(frozen=True)
class Adapters:
    """The adapters of a layer's experts (LoRA, Hu et al. 2021), by the product that each is added to.

    The ones of gate and up enter before the activation. Outputs of `gate_up` are in the experts'
    `gate_up_order`.

    Args:
        gate_up: for the experts' first weight as a whole, N = 2I, or I without a gate. None: none.
        gate, up: for its halves, N = I each, instead of `gate_up`.
        down: for the second weight, K = I and N = H.
    """

    gate_up: Adapter | None = None
    gate: Adapter | None = None
    up: Adapter | None = None
    down: Adapter | None = None

    def by_target(self) -> dict[str, Adapter]:
        """Those that there are, by name."""
        return {name: found for name in TARGETS if (found := getattr(self, name)) is not None}

    def arrays(self) -> dict[str, Float[Any, "..."]]:
        """The arrays by name, such as `gate_up_a` and `down_b`."""
        return {f"{name}_{m}": getattr(each, m) for name, each in self.by_target().items() for m in MATRICES}

    def check(self, experts: Experts) -> None:
        """Checks that these are adapters of `experts`, which may be abstract.

        Raises:
            ValueError: no adapter at all, `gate_up` beside `gate` or `up`, or a shape that does not fit.
            TypeError: matrices that are not floating, of 16 bits or more.
        """
        check_instance("experts", experts, Experts, "jmx.Experts")
        given = self.by_target()
        if not given:
            raise ValueError(f"`adapters` (={self}) must have one of {TARGETS}")
        check_targets("adapters", tuple(given), experts.gated)
        for name, adapter in given.items():
            check_instance(f"adapters.{name}", adapter, Adapter, "a jmx.lora.Adapter, or None")
            outputs, inputs = sizes_of(name, experts)
            for matrix in MATRICES:
                _check_matrix(f"adapters.{name}.{matrix}", getattr(adapter, matrix), experts.num_experts)
            a, b = adapter.a, adapter.b
            if a.shape[-1] != inputs or a.shape[-2] < 1:
                raise ValueError(f"`adapters.{name}.a` (shape {a.shape}) must be (..., r, {inputs}), r of 1 or more")
            if b.shape[-2:] != (outputs, adapter.rank):
                raise ValueError(
                    f"`adapters.{name}.b` (shape {b.shape}) must be (..., {outputs}, {adapter.rank}), r as of `a`"
                )
            check_finite(f"adapters.{name}.scale", adapter.scale)

    def padded(self, experts: Experts) -> "Adapters":
        """These adapters with zeros for the padding of `experts`, whose sizes are then those of its arrays."""
        if experts.padded_to is None:
            return self
        hidden, intermediate = experts.padded_to
        order = experts.gate_up_order

        def rows(name: str, b: Float[Array, "*lead N r"]) -> Float[Array, "*lead N2 r"]:
            if name == "gate_up":
                return padding.resize_rows(b, b.ndim - 2, order, intermediate)
            return padding.resize_axis(b, b.ndim - 2, hidden if name == "down" else intermediate)

        changed = {
            name: dataclasses.replace(
                each,
                a=padding.resize_axis(each.a, each.a.ndim - 1, intermediate if name == "down" else hidden),
                b=rows(name, each.b),
            )
            for name, each in self.by_target().items()
        }
        return dataclasses.replace(self, **changed)


@dataclass(frozen=True)
class Skeleton:
    """Adapters without their arrays, which has a hash: the scale of each, by the product."""

    scales: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, adapters: Adapters) -> "Skeleton":
        """That of `adapters`."""
        return cls(tuple((name, each.scale) for name, each in adapters.by_target().items()))

    @property
    def names(self) -> list[str]:
        """The names of the arrays."""
        return [f"{name}_{matrix}" for name, _ in self.scales for matrix in MATRICES]

    def with_arrays(self, arrays: Mapping[str, Any]) -> Adapters:
        """The adapters with these arrays, by name."""
        return Adapters(
            **{name: Adapter(arrays[f"{name}_a"], arrays[f"{name}_b"], scale) for name, scale in self.scales}
        )


@dataclass(frozen=True)
class LoRA:
    """Which adapters a layer has: the argument `lora` of modules. Hashable.

    Args:
        rank: r, at least 1.
        alpha: adapters are scaled by alpha / r; None: by 1.
        targets: names among "gate_up", "gate", "up" and "down", without "gate_up" beside one of its halves.
        shared: which matrices all experts share: "a", "b", both or none.
        rank_stabilized: whether adapters are scaled by alpha / sqrt(r) instead (rsLoRA, Kalajdzievski 2023).
        dtype: of the matrices: bfloat16, float16, float32 or float64.

    Raises:
        ValueError, TypeError: arguments that are not as above.
    """

    rank: int
    alpha: float | None = None
    targets: tuple[str, ...] = ("gate_up", "down")
    shared: tuple[str, ...] = ()
    rank_stabilized: bool = False
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", check_int("rank", self.rank, least=1))
        if self.alpha is not None:
            object.__setattr__(self, "alpha", check_finite("alpha", self.alpha))
        for field, choices in (("targets", TARGETS), ("shared", MATRICES)):
            given = getattr(self, field)
            if not isinstance(given, tuple | list):
                raise TypeError(f"`{field}` ({shown(given)}) must be a tuple of names among {choices}")
            for i, name in enumerate(given):
                check_one_of(f"{field}[{i}]", name, choices)
            if len({*given}) < len(given):
                raise ValueError(f"`{field}` (={given}) must not have a name twice")
            object.__setattr__(self, field, tuple(given))
        if not self.targets:
            raise ValueError(f"`targets` (={self.targets}) must have one of {TARGETS}")
        check_targets("targets", self.targets, gated=True)
        check_bool("rank_stabilized", self.rank_stabilized)
        object.__setattr__(self, "dtype", resolve_bias_dtype("dtype", self.dtype))

    @property
    def scale(self) -> float:
        """What every adapter is multiplied by."""
        if self.alpha is None:
            return 1.0
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)

    def random(self, key: Key[Array, ""] | UInt32[AnyArray, "2"], experts: Experts) -> Adapters:
        """Adapters of `experts` to train from: A uniform within K ** -0.5, as PEFT has it, and B zero.

        Args:
            key: of jax's random numbers.
            experts: whose sizes they have; these may be abstract.

        Raises:
            ValueError, TypeError: targets that these experts do not have, or arguments of a wrong type.
        """
        check_key("key", key)
        check_instance("experts", experts, Experts, "jmx.Experts")
        check_targets("targets", self.targets, experts.gated)
        made = {}
        for target, each in zip(self.targets, jax.random.split(key, len(self.targets)), strict=True):
            outputs, inputs = sizes_of(target, experts)
            lead = {name: () if name in self.shared else (experts.num_experts,) for name in MATRICES}
            limit = inputs**-0.5
            a = jax.random.uniform(each, (*lead["a"], self.rank, inputs), self.dtype, -limit, limit)
            made[target] = Adapter(a, jnp.zeros((*lead["b"], outputs, self.rank), self.dtype), self.scale)
        return Adapters(**made)


def sizes_of(target: str, experts: Experts) -> tuple[int, int]:
    """Outputs and inputs (N, K) of the product that has an adapter."""
    hidden, intermediate = experts.hidden_size, experts.intermediate_size
    if target == "down":
        return hidden, intermediate
    return intermediate * (2 if target == "gate_up" and experts.gated else 1), hidden


def check_targets(name: str, targets: tuple[str, ...], gated: bool) -> None:
    """Raises ValueError for adapters of halves that un-gated experts lack, or of a half and the whole."""
    halves = [target for target in targets if target in ("gate", "up")]
    if halves and "gate_up" in targets:
        raise ValueError(f"`{name}` (={targets}) must have 'gate_up', or its halves 'gate' and 'up', not both")
    if halves and not gated:
        raise ValueError(f"`{name}` (={targets}) must have 'gate_up' instead of {halves}: these experts have no gate")


def _check_matrix(name: str, matrix: Any, num_experts: int) -> None:
    check_array(name, matrix, jnp.floating, abstract=True)
    if jnp.dtype(matrix.dtype).itemsize < 2:
        raise TypeError(f"`{name}` (dtype {matrix.dtype}) must be floating, of 16 bits or more")
    lead = tuple(matrix.shape[:-2])
    if len(matrix.shape) < 2 or lead not in ((), (num_experts,)):
        raise ValueError(
            f"`{name}` (shape {matrix.shape}) must have two axes, after that of {num_experts} experts if any"
        )
