"""h rounded to an input format between both GEMMs of one launch.

A row of h is complete when many CTAs have written their columns of it. For few rows all consumer warpgroups signal what
they have written, each rounds a share of the rows when all others have, signals that, and waits for the others again.
Weights of the second GEMM fill the pipeline's stages meanwhile. For many rows, rounding needs more warps than products
leave registers for: then it is a kernel of its own (`round_rows`) between two launches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jmx.numerics.input_formats import InputFormat
from jmx.pallas.mosaic_sm90 import rounded_tiles
from jmx.pallas.mosaic_sm90.round_rows import round_row
from jmx.pallas.sm90 import counters, row
from jmx.pallas.sm90.operation import Ref
from jmx.pallas.sm90.tiles import TILE
from jmx.util.typing import Array, Float32, Int32

_MAX_ROWS = 3  # rows that a warpgroup rounds in the time of a separate launch
_WRITTEN, _ROUNDED = 0, 1  # counters of warpgroups that have written their results, and that have rounded their rows
COUNTERS = 2


def pays(num_rows: int, num_warpgroups: int, num_cores: int) -> bool:
    """Whether `num_rows` are few enough, for so many consumer warpgroups on each of so many SMs."""
    return num_rows <= _MAX_ROWS * num_warpgroups * num_cores


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """How h is rounded.

    Args:
        format: one of `rounded_inputs.INPUTS`.
        static_scale: of a format that has one.
        columns: of h, a multiple of 8, without padding.
        by_tile: whether the epilogue rounds it (`rounded_tiles`), which must have been checked; else it is rounded when
            all rows are written.
    """

    format: InputFormat
    static_scale: Float32[Array, ""] | None
    columns: int
    by_tile: bool

    def words(self, block_n: int) -> int:
        """Words of shared memory that a warpgroup needs for the largest magnitudes."""
        return rounded_tiles.words(block_n) if self.by_tile else row.WORDS

    def shapes(self, num_rows: int) -> list[jax.ShapeDtypeStruct]:
        """Of the rounded rows, with zeros up to whole tiles, and of their scales, if each row has one; none if the
        epilogue rounds h where it is."""
        if self.by_tile:
            return []
        values = jax.ShapeDtypeStruct((num_rows, -(-self.columns // TILE) * TILE), jnp.bfloat16)
        if isinstance(self.format.block_size, int):
            return [values]
        return [values, jax.ShapeDtypeStruct((num_rows,), jnp.float32)]

    def given_scales(self, num_rows: int) -> Float32[Array, " R"] | None:
        """Scales of rows that are known before; None if each row has its own, or none."""
        if self.static_scale is None or not isinstance(self.format.block_size, int):
            return None
        return jnp.broadcast_to(self.static_scale, (num_rows,))


@dataclass(frozen=True, kw_only=True)
class RowRounder:
    """How a thread of the kernel rounds rows of h, once all of them are written: with references to global memory.

    Args:
        rounding: the format, its static scale, and the columns.
        h: what is rounded.
        values, scales: what it becomes; see `Rounding.shapes`.
        static: the static scale (1,), or None.
        counted: the launch's counters, `COUNTERS` or more.
    """

    rounding: Rounding
    h: Ref
    values: Ref
    scales: Ref
    static: Ref
    counted: Ref

    @classmethod
    def of(cls, rounding: Rounding, h: Ref, rounded: Sequence[Ref], *, static: Ref, counted: Ref) -> "RowRounder":
        """`rounded`: references of the shapes `rounding.shapes`."""
        values, *scales = rounded
        scales = scales[0] if scales else None
        return cls(rounding=rounding, h=h, values=values, scales=scales, static=static, counted=counted)

    def signal_written(self) -> None:
        """Signals that this warpgroup has written all of its results of the first GEMM."""
        counters.signal(self.counted, jnp.int32(_WRITTEN))

    def round_share(self, warpgroup: Int32[Array, ""], num_warpgroups: int, num_ctas: int, warp_maxima: Ref) -> None:
        """Rounds this warpgroup's share of the rows when all results are written; returns when all others have, too.

        Args:
            warpgroup: this one's number among the CTA's `num_warpgroups` consumers.
            warp_maxima: int32 (`row.WORDS`,) of shared memory, which other warpgroups do not use.
        """
        num_rows, step = self.values.shape[0], num_ctas * num_warpgroups
        first = lax.axis_index("core") + num_ctas * warpgroup

        @pl.when(first < num_rows)
        @jax.named_scope("round")
        def _() -> None:
            counters.wait(self.counted, jnp.int32(_WRITTEN), jnp.int32(step), warpgroup=True)

            @pl.loop(0, lax.div(num_rows - first + (step - 1), step))
            def _(nth: Array) -> None:
                refs: Any = (self.h, None, self.static, self.values, self.scales, warp_maxima)
                round_row(first + nth * step, self.rounding.format, self.rounding.columns, *refs)

            counters.signal(self.counted, jnp.int32(_ROUNDED))

        self.wait(num_warpgroups, num_ctas, warpgroup=True)

    def wait(self, num_warpgroups: int, num_ctas: int, *, warpgroup: bool = False) -> None:
        """A warp waits until it may copy rounded rows, or a warpgroup until it may read their scales."""
        rounding = min(self.values.shape[0], num_ctas * num_warpgroups)
        with jax.named_scope("wait_for_rows"):
            counters.wait(self.counted, jnp.int32(_ROUNDED), jnp.int32(rounding), warpgroup=warpgroup)
