"""What a grouped GEMM computes and the arrays that it takes, for both Hopper kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jmx.numerics.formats import WHOLE_ROW, BlockScaled, Format
from jmx.numerics.gate_up import is_interleaved, is_up_first
from jmx.pallas.sm90.mlir import constant, less, thread_index
from jmx.pallas.sm90.operation import Ref
from jmx.pallas.sm90.tiles import GATED_ROWS, TILE
from jmx.util.typing import Array, Num


@dataclass(frozen=True)
class Rows:
    """Maps a thread's two rows of a tile to rows of the weight and of the output.

    Args:
        num_rows: rows of the weight, without padding.
        gate_up_order: one of `GATE_UP_ORDERS` if tiles hold gate and up; None if they do not.
        computed: how many outputs are needed, the first ones, if weights have more; None: all.
    """

    num_rows: int
    gate_up_order: str | None
    computed: int | None = None

    @property
    def num_outputs(self) -> int:
        """Columns of the result, padded to whole tiles."""
        return -(-(self.computed or self.outputs) // TILE) * TILE

    @property
    def outputs(self) -> int:
        """Columns of a result of all rows, without padding to tiles."""
        return self.num_rows if self.gate_up_order is None else self.num_rows // 2

    def output(self, tile: ir.Value) -> ir.Value:
        """The output of the thread's first row; without a gate, that of its second row is 8 further."""
        warp, lane = arith.divui(thread_index(), constant(32)), arith.remui(thread_index(), constant(32))
        return self.output_of(tile, warp, arith.divui(lane, constant(4)))

    def output_of(self, tile: ir.Value, sixteen: ir.Value, eighth: ir.Value) -> ir.Value:
        """The output of one of the first eight rows (`eighth`) of 16 rows (`sixteen`) of a tile."""
        tile_rows, rows = (TILE, 16) if self.gate_up_order is None else (GATED_ROWS, 8)
        row = arith.addi(arith.muli(tile, constant(tile_rows)), arith.muli(sixteen, constant(rows)))
        return arith.addi(row, eighth)

    def weight(
        self, row: ir.Value, of_output: Callable[[ir.Value], ir.Value] = lambda row: row
    ) -> tuple[ir.Value, ir.Value]:
        """The weight's rows for an output, as `output` gives it: the thread's first and second row of the tile.

        With a gate, the first is its row and the second that of up. Rows in the padding are at or past `num_rows`.

        `of_output`: maps an output to the one whose place it takes in a weight with a column order.
        """
        if self.gate_up_order is None:
            return of_output(row), of_output(arith.addi(row, constant(8)))
        row = of_output(row)
        if is_interleaved(self.gate_up_order):
            first = arith.muli(row, constant(2))
            second = arith.addi(first, constant(1))
        else:
            padding = arith.select(less(row, constant(self.outputs)), constant(0), constant(self.num_rows))
            first, second = arith.addi(row, padding), arith.addi(row, constant(self.outputs))
        return (second, first) if is_up_first(self.gate_up_order) else (first, second)


@dataclass(frozen=True)
class BaseProduct:
    """activation(rows @ weight[expert].T + bias[expert]).

    Args:
        weight: in the layout that the kernel reads, with one leading axis of experts.
        format: of the weight.
        bias: one per row of the weight, or None.
        rows: the order of the weight's rows.
        dtype: of the result.
        activation: a function of float32 (gate, up), or of (x,) without a gate; None for none.
    """

    weight: BlockScaled
    format: Format
    bias: Num[Array, "E N"] | None
    rows: Rows
    dtype: Any
    activation: Callable[..., Array] | None = None


class Operands(NamedTuple):
    """A product's arrays, which are a kernel's operands, or references to them. Those that it lacks are None.

    Args:
        values, zero_points: of the weight.
        scales: of blocks, which are copied with the tiles.
        channel_scales: (E, N) or (E, N, 1), by which the epilogue multiplies.
        bias: as in `BaseProduct`.
        order, row_scales, shifts, added: as in `mosaic_sm90`'s products; `order` only if there is `bias` or
            `channel_scales`.
    """

    values: Ref
    scales: Ref
    zero_points: Ref
    channel_scales: Ref
    bias: Ref
    order: Ref = None
    row_scales: Ref = None
    shifts: Ref = None
    added: Any = None

    @classmethod
    def of(cls, product: BaseProduct) -> "Operands":
        """Those that products of both kernels have."""
        q = product.weight
        scales, channel_scales = (
            (None, q.scales) if product.format.block_size == WHOLE_ROW else (q.scales, q.global_scales)
        )
        return cls(q.values, scales, q.zero_points, channel_scales, product.bias)
