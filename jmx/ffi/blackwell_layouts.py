"""The weight layouts of two sets of kernels for Blackwell: `cutlass_sm100` and `trtllm_sm100`.

Both have values as packed bytes, in rows that are contiguous for the kernel, and scales in the order in which the
tensor cores read them (PTX ISA, "tcgen05.mma scale factor layout"; CUTLASS, `Sm1xxBlockScaledConfig`): tiles of 128
rows by 4 blocks, 512 bytes each, in row-major order. Within a tile, for r < 32, q < 4, s < 4,

    byte 16 r + 4 q + s     the scale of row 32 q + r, block s

They differ in the order of rows. Gate and up are first separated, and each is padded.

* `cutlass_sm100`: all of up, then all of gate. (FlashInfer's CUTLASS fused MoE, MXFP4 x MXFP8.)
* `trtllm_sm100`: up and gate alternate, up first. Then the rows of both weights are shuffled in blocks of 32, for an
  epilogue tile of 128: row 4 a + b of a block, for a < 8, b < 4, moves to row 8 b + a. (TensorRT-LLM's MXFP4 kernels.)

The source is flashinfer-python 0.7.2.post1, and TensorRT-LLM for the padding of H in `trtllm_sm100`: see
docs/blackwell.md. Padding is zeros in values, 1.0 in scales.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jmx.numerics import formats, layouts
from jmx.numerics.formats import BlockScaled
from jmx.numerics.layouts import Index, Layout, WeightSpec
from jmx.util.typing import Array, Shaped

SCALE_ROWS = 128  # of a scale tile
SCALE_BLOCKS = 4  # of a scale tile, along the contracted axis
SHUFFLED_ROWS = 32
_GROUP = 8  # consecutive rows after the shuffle
_ONE = 127  # the code of scale 1.0


def tile_scales(scales: Shaped[Array, "*lead N C"]) -> Shaped[Array, "*lead R B 32 4 4"]:
    """Scales in the tensor cores' order, of weights, or of activations with tokens as rows.

    Args:
        scales: (..., N, C) of one byte, N a multiple of 128, C of 4.

    Returns:
        (..., N / 128, C / 4, 32, 4, 4): its bytes in order are the kernels' flat buffer.
    """
    *lead, rows, blocks = scales.shape
    tiles = scales.reshape(*lead, rows // SCALE_ROWS, 4, SCALE_ROWS // 4, blocks // SCALE_BLOCKS, SCALE_BLOCKS)
    return _permuted(tiles, (0, 3, 2, 1, 4))


def untile_scales(tiles: Shaped[Array, "*lead R B 32 4 4"]) -> Shaped[Array, "*lead N C"]:
    """The inverse of `tile_scales`."""
    *lead, row_tiles, block_tiles, _, _, _ = tiles.shape
    return _permuted(tiles, (0, 3, 2, 1, 4)).reshape(*lead, row_tiles * SCALE_ROWS, block_tiles * SCALE_BLOCKS)


def _permuted(array: Shaped[Array, "..."], last_axes: tuple[int, ...]) -> Shaped[Array, "..."]:
    """The last axes in another order."""
    lead = array.ndim - len(last_axes)
    return array.transpose(*range(lead), *(lead + axis for axis in last_axes))


@dataclass(frozen=True)
class Arrangement:
    """The order of rows of a layout, and its padding.

    Args:
        name: of the layout.
        alternate: whether rows of up and gate alternate; otherwise all of up come before all of gate.
        shuffle: whether rows are shuffled in blocks of 32.
        hidden_multiple: gate_up's columns are padded to a multiple of it; all other sizes to one of 128.
    """

    name: str
    alternate: bool
    shuffle: bool
    hidden_multiple: int = SCALE_ROWS

    def shape(self, spec: WeightSpec) -> tuple[int, int]:
        """The padded (N, K) of one expert's weight."""
        halves, columns = _halves(spec), self.hidden_multiple if spec.role == "gate_up" else SCALE_ROWS
        return halves * _round_up(spec.shape[0] // halves, SCALE_ROWS), _round_up(spec.shape[1], columns)

    def rows(
        self, array: Shaped[Array, "*lead N C"], spec: WeightSpec, fill: int = 0
    ) -> Shaped[Array, "*lead padded C"]:
        """(..., N, C) in the experts' order -> (..., padded N, C) in the kernel's."""
        *lead, _, columns = array.shape
        rows, halves = self.shape(spec)[0], _halves(spec)
        if halves == 2:
            alternate = spec.gate_up_order == "interleaved"
            array = array.reshape(*lead, *((-1, 2) if alternate else (2, -1)), columns)
            array = array[..., ::-1, :] if alternate else array[..., ::-1, :, :].swapaxes(-3, -2)  # (I, 2: up first)
        else:
            array = array[..., None, :]
        widths = [(0, 0, 0)] * len(lead) + [(0, rows // halves - array.shape[-3], 0), (0, 0, 0), (0, 0, 0)]
        array = lax.pad(array, jnp.array(fill, array.dtype), widths)
        array = (array if self.alternate else array.swapaxes(-3, -2)).reshape(*lead, rows, columns)
        return _swapped_blocks(array, SHUFFLED_ROWS // _GROUP) if self.shuffle else array

    def original_rows(self, array: Shaped[Array, "*lead padded C"], spec: WeightSpec) -> Shaped[Array, "*lead N C"]:
        """The inverse of `rows`."""
        *lead, _, columns = array.shape
        halves = _halves(spec)
        array = _swapped_blocks(array, _GROUP) if self.shuffle else array
        array = array.reshape(*lead, *((-1, halves) if self.alternate else (halves, -1)), columns)
        array = (array if self.alternate else array.swapaxes(-3, -2))[..., : spec.shape[0] // halves, ::-1, :]
        if spec.gate_up_order != "interleaved":
            array = array.swapaxes(-3, -2)
        return array.reshape(*lead, spec.shape[0], columns)

    def bias(self, bias: Shaped[Array, "*lead N"], spec: WeightSpec) -> Shaped[Array, "*lead padded"]:
        """(..., N) in the experts' order -> (..., padded N) in that of the weight's rows, padded with zeros."""
        return self.rows(bias[..., None], spec)[..., 0]

    def forward(self, q: BlockScaled, spec: WeightSpec) -> BlockScaled:
        """Values uint8 (..., N, K / 2) and scales uint8 (..., N / 128, K / 128, 32, 4, 4), N and K padded."""
        q = formats.pad(formats.pack(q), (spec.shape[0], self.shape(spec)[1]), spec.format)
        return BlockScaled(self.rows(q.values, spec), tile_scales(self.rows(q.scales, spec, _ONE)))

    def inverse(self, q: BlockScaled, spec: WeightSpec) -> BlockScaled:
        return formats.unpack(self._packed(q, spec), spec.format)

    def take(self, q: BlockScaled, spec: WeightSpec, index: Index) -> BlockScaled:
        return self._packed(layouts.gather(q, index), spec)

    def _packed(self, q: BlockScaled, spec: WeightSpec) -> BlockScaled:
        rows = BlockScaled(q.values, untile_scales(q.scales))
        rows = jax.tree.map(partial(self.original_rows, spec=spec), rows)
        return formats.unpad(rows, spec.shape, spec.format)


def _halves(spec: WeightSpec) -> int:
    return 2 if spec.role == "gate_up" and spec.gate_up_order is not None else 1


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _swapped_blocks(array: Shaped[Array, "*lead R C"], inner: int) -> Shaped[Array, "*lead R C"]:
    """Row inner * a + b of each block of 32 moves to row (32 / inner) * b + a."""
    blocks = array.reshape(*array.shape[:-2], -1, SHUFFLED_ROWS // inner, inner, array.shape[-1])
    return blocks.swapaxes(-3, -2).reshape(array.shape)


CUTLASS = Arrangement("cutlass_sm100", alternate=False, shuffle=False)
TRTLLM = Arrangement("trtllm_sm100", alternate=True, shuffle=True, hidden_multiple=512)


def _layout(arrangement: Arrangement) -> Layout:
    return Layout(arrangement.name, arrangement.forward, arrangement.inverse, arrangement.take, (formats.MXFP4.name,))


CUTLASS_LAYOUT = _layout(CUTLASS)
TRTLLM_LAYOUT = _layout(TRTLLM)
