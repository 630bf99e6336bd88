"""Layouts: how an engine family holds expert weights in memory.

A layout is a pair of inverse maps between canonical arrays and its own, plus `take`, which undoes chosen experts inside
a trace: the reference backend and every backward pass use that, so that prepared weights always have a fallback and a
gradient. Leading axes are kept by every layout; the expert axis is the last of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from jmx.numerics import formats
from jmx.numerics.formats import BlockScaled, Format
from jmx.util.checks import check_one_of
from jmx.util.typing import Array, Int32

Index = Array | tuple[Array, ...]


@dataclass(frozen=True)
class WeightSpec:
    """What a layout may need to know of a weight beside its arrays.

    Args:
        role: "gate_up" or "down".
        shape: (N, K), the logical rows and columns of one expert, K contracted.
        gate_up_order: how gate and up rows stand in a "gate_up" weight; None where there is no gate.
        format: the block format.
    """

    role: str
    shape: tuple[int, int]
    gate_up_order: str | None
    format: Format


def rows_in_order(order: Int32[Array, "*lead I"], gate_up_order: str | None) -> Int32[Array, "*lead N"]:
    """(..., I), the order of the columns of "down" -> int32 (..., N): the row of "gate_up" that each place is to hold.

    What comes out of the rows in this order needs none to meet those columns.
    """
    if gate_up_order is None:
        return order
    if gate_up_order == "interleaved":
        return (2 * order[..., None] + jnp.arange(2, dtype=order.dtype)).reshape(*order.shape[:-1], -1)
    return jnp.concatenate([order, order + order.shape[-1]], axis=-1)


@dataclass(frozen=True)
class Layout:
    """A named way to hold a weight.

    Args:
        name: key in `LAYOUTS`.
        forward: canonical (..., N, K) -> this layout's arrays.
        inverse: this layout's arrays -> canonical, bit for bit.
        take: (arrays, spec, index into the leading axes) -> packed bytes of the chosen experts, (*index.shape, N, K).
        formats: names of the formats whose weights it holds; None: of all.
        rounds: this layout's arrays -> () int32, how many blocks of values the kernels that read it round; None: they
            round none.
        orders_rows: where the columns of "down" have an order, rows of "gate_up" lie as `rows_in_order` has them, which
            `forward`, `inverse` and `take` (of the chosen experts) then are given as one more argument.
    """

    name: str
    forward: Callable[..., BlockScaled]
    inverse: Callable[..., BlockScaled]
    take: Callable[..., BlockScaled]
    formats: tuple[str, ...] | None = None
    rounds: Callable[[BlockScaled, WeightSpec], Int32[Array, ""]] | None = None
    orders_rows: bool = False

    def holds(self, format: Format) -> bool:
        return self.formats is None or format.name in self.formats

    def rows(self, order: Int32[Array, "*lead I"] | None, spec: WeightSpec) -> tuple[Int32[Array, "*lead N"], ...]:
        """That one more argument, or none: of a weight `spec`, where `order` is that of the columns of "down"."""
        if not self.orders_rows or order is None or spec.role == "down":
            return ()
        return (rows_in_order(order, spec.gate_up_order),)


def gather(q: BlockScaled, index: Index) -> BlockScaled:
    """The arrays at an index into their leading axes, which must be within them."""
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
    """Makes a layout known by its name. ValueError if another one has that name."""
    if LAYOUTS.setdefault(layout.name, layout) is not layout:
        raise ValueError(f"`layout.name` (={layout.name!r}) is taken by another layout")


def on_unknown_name(load: Callable[[], Any]) -> None:
    """Has `load` called before a name is said to be unknown: it may register layouts of other packages."""
    _LOADS.append(load)


def get(name: str) -> Layout:
    """The layout called `name`. ValueError, naming those that exist, if there is none."""
    if isinstance(name, str) and name not in LAYOUTS:
        for load in _LOADS:
            load()
    return LAYOUTS[check_one_of("layout", name, sorted(LAYOUTS))]


@lru_cache(1024)
def abstract(name: str, spec: WeightSpec, scale_dtype: Any = None) -> BlockScaled:
    """Shapes and dtypes of one expert's weight in the layout called `name`, with an expert axis in front.

    `scale_dtype`: see `Format.abstract`.
    """
    canonical = spec.format.abstract((1, *spec.shape), scale_dtype=scale_dtype)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # whichever is in scope at the first call
        return jax.eval_shape(lambda q: get(name).forward(q, spec), canonical)


register(CANONICAL)
register(PACKED)
