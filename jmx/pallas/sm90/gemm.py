"""Operands and epilogue of one grouped GEMM, whichever tensor cores it runs on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jmx.numerics.formats import BlockScaled, Format
from jmx.pallas.sm90.mlir import constant, less, thread_index
from jmx.pallas.sm90.tiles import GATED_ROWS, TILE

Array = Any


@dataclass(frozen=True)
class Rows:
    """Which rows of a weight a thread's two rows of a tile are.

    Args:
        num_rows: rows of the weight, without padding.
        gate_up_order: "interleaved" or "concatenated" where a tile holds gate and up; None where it does not.
    """

    num_rows: int
    gate_up_order: str | None

    @property
    def num_outputs(self) -> int:
        """Rows of what comes out of the epilogue, with padding to whole tiles."""
        return -(-self.outputs // TILE) * TILE

    @property
    def outputs(self) -> int:
        return self.num_rows if self.gate_up_order is None else self.num_rows // 2

    def output(self, tile: ir.Value) -> ir.Value:
        """The thread's first row of the output; where there is no gate, its second is 8 below."""
        warp, lane = arith.divui(thread_index(), constant(32)), arith.remui(thread_index(), constant(32))
        return self.output_of(tile, warp, arith.divui(lane, constant(4)))

    def output_of(self, tile: ir.Value, sixteen: ir.Value, eighth: ir.Value) -> ir.Value:
        """The row of the output for one of the first eight of some 16 rows of a tile."""
        tile_rows, rows = (TILE, 16) if self.gate_up_order is None else (GATED_ROWS, 8)
        row = arith.addi(arith.muli(tile, constant(tile_rows)), arith.muli(sixteen, constant(rows)))
        return arith.addi(row, eighth)

    def weight(
        self, row: ir.Value, of_output: Callable[[ir.Value], ir.Value] = lambda row: row
    ) -> tuple[ir.Value, ir.Value]:
        """The weight's rows of `output_of`, and 8 below in the tile; past the end where the tile is padding.

        `of_output`: the output in whose place each one stands.
        """
        if self.gate_up_order is None:
            return of_output(row), of_output(arith.addi(row, constant(8)))
        row = of_output(row)
        if self.gate_up_order == "interleaved":
            return arith.muli(row, constant(2)), arith.addi(arith.muli(row, constant(2)), constant(1))
        padding = arith.select(less(row, constant(self.outputs)), constant(0), constant(self.num_rows))
        return arith.addi(row, padding), arith.addi(row, constant(self.outputs))


@dataclass(frozen=True)
class BaseProduct:
    """rows @ weight[expert].T + bias[expert], and what becomes of it.

    Args:
        weight: in the layout that the kernel reads, with one leading axis of experts.
        format: of the weight.
        bias: (E, N) or None.
        rows: what the weight's rows are.
        dtype: of the result.
        activation: of float32 (gate, up), or (x,) where there is no gate; None for none.
    """

    weight: BlockScaled
    format: Format
    bias: Array | None
    rows: Rows
    dtype: Any
    activation: Callable[..., Array] | None = None
