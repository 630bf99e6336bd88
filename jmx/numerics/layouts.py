"""Layouts: how the weights of experts are arranged in memory for a backend.

A layout is a pair of inverse maps between canonical arrays and its own, and `take`, which returns chosen experts as
packed bytes while tracing: the reference backend and every backward pass use it, so all layouts have a fallback and
gradients. Every layout keeps leading axes; the expert axis is the last of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmx.numerics import formats
from jmx.numerics.formats import BlockScaled, Format
from jmx.numerics.gate_up import is_interleaved
from jmx.util.checks import check_one_of
from jmx.util.typing import Array, Int32

Index = Array | tuple[Array, ...]


@dataclass(frozen=True)
class WeightSpec:
    """The static properties of a weight that a layout may need.

    Args:
        role: "gate_up" or "down".
        shape: (N, K), the logical rows and columns of one expert, K contracted.
        gate_up_order: the order of gate and up rows in a "gate_up" weight; None without a gate.
        format: the block format.
    """

    role: str
    shape: tuple[int, int]
    gate_up_order: str | None
    format: Format


def rows_in_order(order: Int32[Array, "*lead I"], gate_up_order: str | None) -> Int32[Array, "*lead N"]:
    """The order (..., I) of the columns of "down" -> int32 (..., N): the row of "gate_up" for each new row.

    The outputs of rows in this order are inputs of those columns without a permutation.
    """
    if gate_up_order is None:
        return order
    if is_interleaved(gate_up_order):
        both = lax.broadcast_to_rank(jnp.arange(2, dtype=order.dtype), order.ndim + 1)
        return (2 * order[..., None] + both).reshape(*order.shape[:-1], -1)
    return jnp.concatenate([order, order + order.shape[-1]], axis=-1)


@dataclass(frozen=True)
class Layout:
    """A named arrangement of a weight's arrays.

    Args:
        name: key in `LAYOUTS`.
        forward: canonical (..., N, K) -> this layout's arrays.
        inverse: this layout's arrays -> canonical, bit for bit.
        take: (arrays, spec, index into the leading axes) -> packed bytes of the chosen experts, (*index.shape, N, K).
        formats: names of the formats that it supports; None: all.
        rounds: this layout's arrays -> () int32, the number of blocks that kernels which read it round; None: they
            round none.
        orders_rows: whether rows of "gate_up" follow the order of the columns of "down". If these have one, `forward`,
            `inverse` and `take` get `rows_in_order` (of the chosen experts) as one more argument.
    """

    name: str
    forward: Callable[..., BlockScaled]
    inverse: Callable[..., BlockScaled]
    take: Callable[..., BlockScaled]
    formats: tuple[str, ...] | None = None
    rounds: Callable[[BlockScaled, WeightSpec], Int32[Array, ""]] | None = None
    orders_rows: bool = False

    def holds(self, format: Format) -> bool:
        return self.formats is None or formats.decoded_alike(format) in self.formats

    def rows(self, order: Int32[Array, "*lead I"] | None, spec: WeightSpec) -> tuple[Int32[Array, "*lead N"], ...]:
        """The additional argument of `orders_rows`, or none; `order`: that of the columns of "down"."""
        if not self.orders_rows or order is None or spec.role == "down":
            return ()
        return (rows_in_order(order, spec.gate_up_order),)


def gather(q: BlockScaled, index: Index) -> BlockScaled:
    """The arrays at an index into their leading axes, which must be in range."""
    return jax.tree.map(lambda array: array.at[index].get(mode="promise_in_bounds"), q)


CANONICAL = Layout(
    "canonical",
    forward=lambda q, spec: q,
    inverse=lambda q, spec: q,
    take=lambda q, spec, index: formats.pack(gather(q, index)),
)
PACKED = Layout(
    "packed",
    forward=lambda q, spec: formats.pack(q),
    inverse=lambda q, spec: formats.unpack(q, spec.format),
    take=lambda q, spec, index: gather(q, index),
)

LAYOUTS: dict[str, Layout] = {}
_LOADS: list[Callable[[], Any]] = []


def register(layout: Layout) -> None:
    """Registers a layout by its name. ValueError if another one has that name."""
    if LAYOUTS.setdefault(layout.name, layout) is not layout:
        raise ValueError(f"`layout.name` (={layout.name!r}) is taken by another layout")


def on_unknown_name(load: Callable[[], Any]) -> None:
    """Registers a function that `get` calls before it rejects a name; it may register layouts of other packages."""
    _LOADS.append(load)


def get(name: str) -> Layout:
    """The layout called `name`. ValueError, naming those that exist, if there is none."""
    if isinstance(name, str) and name not in LAYOUTS:
        for load in _LOADS:
            load()
    return LAYOUTS[check_one_of("layout", name, sorted(LAYOUTS))]


@lru_cache(1024)
def abstract(name: str, spec: WeightSpec, scale_dtype: Any = None) -> BlockScaled:
    """Shapes and dtypes of one expert's weight in the layout called `name`, with a leading expert axis.

    `scale_dtype`: see `Format.abstract`.
    """
    canonical = spec.format.abstract((1, *spec.shape), scale_dtype=scale_dtype)
    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((), ())
    ):  # the result must not depend on the mesh in scope
        return jax.eval_shape(lambda q: get(name).forward(q, spec), canonical)


register(CANONICAL)
register(PACKED)
