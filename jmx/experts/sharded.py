"""Experts divided along their intermediate axis: each shard is experts of its own, and results of all are added.

Rows of gate and of up are divided each by themselves, since a half of "concatenated" rows is all gates; a shard's rows
have the order of the whole. Shards are padded where the axis does not divide into blocks, with values of 0, whose
results are 0 whatever the activation returns for them. Where columns of "down" have an order ("act-order"), it is
the rows of gate and up that take it, so that a shard's columns are in the order of its rows.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jmx import meshes
from jmx.experts.experts import Experts
from jmx.experts.padding import halves_of, unit_of
from jmx.numerics.formats import WHOLE_ROW, BlockScaled, Format
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.numerics.layouts import rows_in_order
from jmx.util import pytrees
from jmx.util.checks import check_instance, check_int, check_one_of
from jmx.util.typing import Array, Float, Shaped


@pytrees.register(data=["shards", "down_bias"], static=["intermediate_size"])
@dataclass(frozen=True)
class ShardedExperts:
    """Experts of one layer in S shards along their intermediate axis. Created by `of`.

    Args:
        shards: a stack, arrays (S, E, ...): `shards.layer(s)` is the s-th shard, without a `down_bias`.
        down_bias: (E, H) or None, of the sum of all shards: it is added once.
        intermediate_size: of all shards together, without padding.
    """

    shards: Experts
    down_bias: Float[Any, "E H"] | None
    intermediate_size: int

    @classmethod
    def of(cls, experts: Experts, num_shards: int, input_format: str | None = None) -> "ShardedExperts":
        """`experts`, divided into shards of equal size, in the layout "packed".

        Args:
            experts: of one layer, in any layout.
            num_shards: S. Shards are of `shard_size`.
            input_format: that of the calls, whose blocks divide a shard; None: the one that `experts` declare.

        Raises:
            ValueError, TypeError: experts of a stack, a number that is not an integer of at least 1, or an unknown
                format; experts with padding (see `Experts.pad`) without which blocks would not fit.
        """
        check_instance("experts", experts, Experts, "jmx.Experts")
        num_shards = check_int("num_shards", num_shards, least=1)
        check_one_of("input_format", input_format, (*INPUT_FORMATS, None))
        experts.check(bias=experts.down_bias is not None)
        experts = experts if experts.padded_to is None else experts.unpad()
        size = shard_size(experts.intermediate_size, experts.format, input_format or experts.input_format, num_shards)
        return meshes.on_auto_axes(lambda its: cls._divided(its, num_shards, size), experts)

    @classmethod
    def _divided(cls, experts: Experts, num_shards: int, size: int) -> "ShardedExperts":
        whole = experts.pad(experts.hidden_size, size * num_shards).as_padded()
        gate_up, down, gate_up_bias = whole.gate_up, whole.down, whole.gate_up_bias
        if down.order is not None:
            rows = rows_in_order(down.order, whole.gate_up_order)
            gate_up = gate_up._replace(**{name: _ordered(getattr(gate_up, name), rows) for name in _of_rows(gate_up)})
            gate_up_bias = None if gate_up_bias is None else jnp.take_along_axis(gate_up_bias, rows, axis=1)
        split = partial(_split_rows, order=whole.gate_up_order, count=num_shards)
        shards = dataclasses.replace(
            whole,
            gate_up=gate_up._replace(
                **{name: split(getattr(gate_up, name)) for name in _of_rows(gate_up)},
                order=_repeated(gate_up.order, num_shards),
            ),
            down=_split_columns(down, whole.format, num_shards),
            gate_up_bias=None if gate_up_bias is None else split(gate_up_bias),
            down_bias=None,
            gate_up_input_scale=_repeated(whole.gate_up_input_scale, num_shards),
            down_input_scale=_repeated(whole.down_input_scale, num_shards),
            intermediate_size=size,
        )
        return cls(shards, experts.down_bias, experts.intermediate_size)

    @property
    def num_shards(self) -> int:
        return self.shards.gate_up.values.shape[0]

    @property
    def num_experts(self) -> int:
        return self.shards.gate_up.values.shape[1]

    @property
    def layout(self) -> str:
        return self.shards.layout

    def arrays(self) -> dict[str, Shaped[Any, "..."]]:
        """The arrays by name: those of the shards, as `Experts.arrays` names them, and `down_bias` if present."""
        bias = {} if self.down_bias is None else {"down_bias": self.down_bias}
        return self.shards.arrays() | bias

    def with_arrays(self, arrays: Mapping[str, Any]) -> "ShardedExperts":
        """The same with other arrays, by the names of `arrays`; see `Experts.with_arrays`."""
        check_instance("arrays", arrays, Mapping, "a mapping of names to arrays")
        shards = self.shards.with_arrays({name: array for name, array in arrays.items() if name != "down_bias"})
        return dataclasses.replace(self, shards=shards, down_bias=arrays.get("down_bias"))

    def shard(self, index: int) -> Experts:
        """One shard as experts of its own, the first one with the bias of the sum.

        Raises:
            ValueError, TypeError: `index` is not an integer in 0..S-1.
        """
        return self.part(check_int("index", index, least=0, most=self.num_shards - 1), index)

    def part(self, index: int, number: Any) -> Experts:
        """The shard at `index` of these, which has `number` among the shards of all devices: the bias is that of 0."""
        bias = self.down_bias
        if isinstance(number, int):
            bias = bias if number == 0 else None
        elif bias is not None:
            bias = jnp.where(number == 0, bias, 0)
        return dataclasses.replace(jax.tree.map(lambda array: array[index], self.shards), down_bias=bias)

    def prepare(self, layout: str, *, donate: bool = False) -> "ShardedExperts":
        """The same weights in another layout; see `Experts.prepare`."""
        return dataclasses.replace(self, shards=self.shards.prepare(layout, donate=donate))

    def whole(self) -> Experts:
        """The experts that were divided, in the layout "packed", bit for bit.

        Except that where columns of "down" had an order, that order is now the one of the rows of gate and up.
        """
        shards = self.shards.prepare("packed")
        join = partial(_join_rows, order=shards.gate_up_order)
        gate_up, down = shards.gate_up, shards.down
        padded = dataclasses.replace(
            shards,
            gate_up=gate_up._replace(
                **{name: join(getattr(gate_up, name)) for name in _of_rows(gate_up)},
                order=None if gate_up.order is None else gate_up.order[0],
            ),
            down=_join_columns(down, shards.format),
            gate_up_bias=None if shards.gate_up_bias is None else join(shards.gate_up_bias),
            down_bias=self.down_bias,
            gate_up_input_scale=None if shards.gate_up_input_scale is None else shards.gate_up_input_scale[0],
            down_input_scale=None if shards.down_input_scale is None else shards.down_input_scale[0],
            intermediate_size=shards.intermediate_size * self.num_shards,
        )
        sizes = {"intermediate_size": self.intermediate_size, "padded_to": padded.array_sizes}
        return dataclasses.replace(padded, **sizes).unpad()


def shard_size(intermediate_size: int, format: Format, input_format: str | None, num_shards: int) -> int:
    """The intermediate size of one of `num_shards` shards: the smallest that blocks of weights and of inputs divide."""
    unit = unit_of(format, input_format)
    return -(-intermediate_size // (unit * num_shards)) * unit


def _of_rows(q: BlockScaled) -> list[str]:
    """Names of the arrays of a weight that have an axis of rows."""
    return [name for name, array in q._asdict().items() if name != "order" and array is not None]


def _ordered(array: Shaped[Array, "E N *rest"], rows: Shaped[Array, "E N"]) -> Shaped[Array, "E N *rest"]:
    return jax.vmap(lambda its, order: its[order])(array, rows)


def _repeated(array: Any, count: int) -> Any:
    """A new leading axis of `count`, over which the array is the same."""
    return None if array is None else jnp.broadcast_to(array, (count, *array.shape))


def _split_rows(array: Shaped[Array, "E N *rest"], *, order: str | None, count: int) -> Shaped[Array, "S E n *rest"]:
    """Rows of an un-gated or a gated weight, (E, N, ...) -> (S, E, N / S, ...)."""
    num_experts, rows, *rest = array.shape
    halves = halves_of(order)
    shards = jnp.moveaxis(array.reshape(num_experts, halves, count, rows // (halves * count), *rest), 2, 0)
    return shards.reshape(count, num_experts, rows // count, *rest)


def _join_rows(array: Shaped[Array, "S E n *rest"], *, order: str | None) -> Shaped[Array, "E N *rest"]:
    """The inverse of `_split_rows`."""
    count, num_experts, rows, *rest = array.shape
    halves = halves_of(order)
    whole = jnp.moveaxis(array.reshape(count, num_experts, halves, rows // halves, *rest), 0, 2)
    return whole.reshape(num_experts, rows * count, *rest)


def _split_columns(q: BlockScaled, format: Format, count: int) -> BlockScaled:
    """Columns of "down": packed (E, H, I) -> (S, E, H, I / S). What belongs to whole rows is repeated."""

    def split(array: Any) -> Any:
        return jnp.moveaxis(array.reshape(*array.shape[:-1], count, array.shape[-1] // count), -2, 0)

    by_block = partial(_repeated, count=count) if format.block_size == WHOLE_ROW else split
    order = None
    if q.order is not None:  # rows of gate and up have it
        size = q.order.shape[-1] // count
        order = jnp.broadcast_to(jnp.arange(size, dtype=q.order.dtype), (count, *q.order.shape[:-1], size))
    return BlockScaled(
        values=split(q.values),
        scales=by_block(q.scales),
        global_scales=_repeated(q.global_scales, count),
        zero_points=None if q.zero_points is None else by_block(q.zero_points),
        order=order,
    )


def _join_columns(q: BlockScaled, format: Format) -> BlockScaled:
    """The inverse of `_split_columns`."""

    def join(array: Any) -> Any:
        whole = jnp.moveaxis(array, 0, -2)
        return whole.reshape(*whole.shape[:-2], -1)

    def by_block(array: Any) -> Any:
        if array is None:
            return None
        return array[0] if format.block_size == WHOLE_ROW else join(array)

    order = None
    if q.order is not None:
        count, *lead, size = q.order.shape
        order = jnp.broadcast_to(jnp.arange(count * size, dtype=q.order.dtype), (*lead, count * size))
    return BlockScaled(
        values=join(q.values),
        scales=by_block(q.scales),
        global_scales=None if q.global_scales is None else q.global_scales[0],
        zero_points=by_block(q.zero_points),
        order=order,
    )
