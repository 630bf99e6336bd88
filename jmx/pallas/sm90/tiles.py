"""How both Hopper layouts tile a weight: 64 rows per tile, with a gate row and its up row in the same thread."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jmx.experts import Experts
from jmx.numerics.formats import WHOLE_ROW, BlockScaled
from jmx.numerics.gate_up import is_interleaved, is_up_first
from jmx.numerics.layouts import WeightSpec
from jmx.util.typing import Array, Int32, Shaped

TILE = 64  # rows and columns of a tile
GATED_ROWS = TILE // 2  # rows of gate in a tile, and as many of up
THREADS = 128  # of a warpgroup
ROW_ALIGNMENT = 8  # rows of a swizzled tile of inputs in shared memory, where TMA copies begin and end
VECTOR = 8  # elements of a row of inputs that a thread loads together
VALUE_COLUMNS = 256  # of a tile's values as an array: no axis of a TMA box exceeds 256


def weights_alike(experts: Experts) -> tuple[BlockScaled, BlockScaled]:
    """Both weights with block scales of one dtype, as one kernel's stages require: float32 if theirs differ."""
    gate_up, down = experts.gate_up, experts.down
    if experts.format.block_size == WHOLE_ROW or gate_up.scales.dtype == down.scales.dtype:
        return gate_up, down
    gate_up, down = (q._replace(scales=q.scales.astype(jnp.float32)) for q in (gate_up, down))
    return gate_up, down


def aligned_row(row: Int32[Array, ""]) -> Int32[Array, ""]:
    """`row`, a multiple of `ROW_ALIGNMENT`, in a form in which Pallas sees that it is one, as TMA copies require."""
    return lax.div(row, ROW_ALIGNMENT) * ROW_ALIGNMENT


def num_tiles(spec: WeightSpec) -> tuple[int, int]:
    """Tiles of a weight along its rows and its columns."""
    rows, columns = spec.shape
    halves = 2 if _gated(spec) else 1
    return halves * -(-rows // halves // TILE), -(-columns // TILE)


def _gated(spec: WeightSpec) -> bool:
    return spec.role == "gate_up" and spec.gate_up_order is not None


def pad(array: Shaped[Array, "..."], axis: int, size: int, fill: Any) -> Shaped[Array, "..."]:
    """`array` with `fill` appended up to `size` along `axis`."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return jnp.pad(array, widths, constant_values=fill)


def tile_rows(array: Shaped[Array, "N C"], spec: WeightSpec, fill: Any) -> Shaped[Array, "tiles 4 2 8 C"]:
    """Rows by tile and warp: of 8 groups of 4 threads each the first rows, then the second rows."""
    tiles, _ = num_tiles(spec)
    if not _gated(spec):
        return pad(array, 0, tiles * TILE, fill).reshape(tiles, 4, 2, 8, -1)
    halves = (-1, 2) if is_interleaved(spec.gate_up_order) else (2, -1)
    array = array.reshape(*halves, array.shape[-1])
    array = array if is_interleaved(spec.gate_up_order) else array.swapaxes(0, 1)
    array = array[:, ::-1] if is_up_first(spec.gate_up_order) else array  # tiles have gate first
    return pad(array, 0, tiles * GATED_ROWS, fill).reshape(tiles, 4, 8, 2, -1).swapaxes(2, 3)


def untile_rows(array: Shaped[Array, "tiles 4 2 8 C"], spec: WeightSpec) -> Shaped[Array, "N C"]:
    """The inverse of `tile_rows`."""
    rows, tiles = spec.shape[0], array.shape[0]
    if not _gated(spec):
        return array.reshape(tiles * TILE, -1)[:rows]
    array = array.swapaxes(2, 3).reshape(tiles * GATED_ROWS, 2, -1)[: rows // 2]
    array = array[:, ::-1] if is_up_first(spec.gate_up_order) else array
    array = array if is_interleaved(spec.gate_up_order) else array.swapaxes(0, 1)
    return array.reshape(rows, -1)
