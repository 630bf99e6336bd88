"""The weight layouts of two sets of kernels for Blackwell: `cutlass_sm100`, `trtllm_sm100` and `trtllm_sm100_vllm`.

They hold MXFP4, NVFP4 and, for TensorRT-LLM's kernels, INT4 in groups of 32; `trtllm_sm100_vllm` holds MXFP4 alone. All
have values as packed bytes, and scales in the order in which the tensor cores read those of one byte (PTX ISA,
"tcgen05.mma scale factor layout"; CUTLASS, `Sm1xxBlockScaledConfig`): tiles of 128 rows by 4 blocks, 512 scales each,
in row-major order. Within a tile, for r < 32, q < 4, s < 4,

    scale 16 r + 4 q + s     that of row 32 q + r, block s

Scales of INT4, in bfloat16, have the same order. NVFP4's global scales stay as they are, one a row: kernels take them
as arguments of their own.

They differ in the order of rows. Gate and up are first separated, and each is padded.

* `cutlass_sm100`: all of up, then all of gate. (FlashInfer's CUTLASS fused MoE, MXFP4 x MXFP8 and NVFP4 x NVFP4.)
* `trtllm_sm100`: up and gate alternate, up first. Then the rows of both weights are shuffled in blocks of 32, for an
  epilogue tile of 128: row 4 a + b of a block, for a < 8, b < 4, moves to row 8 b + a. (TensorRT-LLM's kernels.) The
  values of INT4 are in slices of 128 bytes (256 columns), all rows of one slice before those of the next:
  "BlockMajorK", with block_k = 128.
* `trtllm_sm100_vllm`: the same for MXFP4, but padded as vLLM does, to 256.

The source is flashinfer-python 0.7.2.post1, and TensorRT-LLM for the padding of H in `trtllm_sm100`: see
docs/blackwell.md. Padding is zeros in values, 1.0 in scales.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jmx.numerics import formats, layouts
from jmx.numerics.formats import MXFP4, MXINT4, NVFP4, BlockScaled, Format
from jmx.numerics.gate_up import is_interleaved, is_up_first
from jmx.numerics.layouts import Index, Layout, WeightSpec
from jmx.util.typing import Array, Shaped

SCALE_ROWS = 128  # of a scale tile
SCALE_BLOCKS = 4  # of a scale tile, along the contracted axis
SHUFFLED_ROWS = 32
BLOCK_K = 128  # bytes of a row in one slice of INT4 values
_GROUP = 8  # consecutive rows after the shuffle


def tile_scales(scales: Shaped[Array, "*lead N C"]) -> Shaped[Array, "*lead R B 32 4 4"]:
    """Scales in the tensor cores' order, of weights, or of activations with tokens as rows.

    Args:
        scales: (..., N, C), N a multiple of 128, C of 4.

    Returns:
        (..., N / 128, C / 4, 32, 4, 4): in memory order it is the kernels' flat buffer.
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
        formats: names of the weight formats.
        alternate: whether rows of up and gate alternate; otherwise all of up come before all of gate.
        shuffle: whether rows are shuffled in blocks of 32.
        multiple: sizes are padded to a multiple of it, but those of INT4 to one of 256.
        mxfp4_hidden_multiple: of MXFP4, gate_up's columns are padded to a multiple of it; None: of `multiple`.
    """

    name: str
    formats: tuple[str, ...]
    alternate: bool
    shuffle: bool
    multiple: int = SCALE_ROWS
    mxfp4_hidden_multiple: int | None = None

    def shape(self, spec: WeightSpec) -> tuple[int, int]:
        """The padded (N, K) of one expert's weight."""
        halves = _halves(spec)
        rows = columns = 2 * BLOCK_K if _is_int4(spec.format) else self.multiple
        if spec.role == "gate_up" and spec.format == MXFP4:
            columns = self.mxfp4_hidden_multiple or columns
        return halves * _round_up(spec.shape[0] // halves, rows), _round_up(spec.shape[1], columns)

    def rows(
        self, array: Shaped[Array, "*lead N C"], spec: WeightSpec, fill: float = 0
    ) -> Shaped[Array, "*lead padded C"]:
        """(..., N, C) in the experts' order -> (..., padded N, C) in the kernel's."""
        *lead, _, columns = array.shape
        rows, halves = self.shape(spec)[0], _halves(spec)
        if halves == 2:
            alternate = is_interleaved(spec.gate_up_order)
            array = array.reshape(*lead, *((-1, 2) if alternate else (2, -1)), columns)
            array = array if alternate else array.swapaxes(-3, -2)
            array = array if is_up_first(spec.gate_up_order) else array[..., ::-1, :]  # (I, 2: up first)
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
        array = (array if self.alternate else array.swapaxes(-3, -2))[..., : spec.shape[0] // halves, :, :]
        array = array if is_up_first(spec.gate_up_order) else array[..., ::-1, :]
        array = array if is_interleaved(spec.gate_up_order) else array.swapaxes(-3, -2)
        return array.reshape(*lead, spec.shape[0], columns)

    def bias(self, bias: Shaped[Array, "*lead N"], spec: WeightSpec) -> Shaped[Array, "*lead padded"]:
        """(..., N) in the experts' order -> (..., padded N) in that of the weight's rows, padded with zeros."""
        return self.rows(bias[..., None], spec)[..., 0]

    def forward(self, q: BlockScaled, spec: WeightSpec) -> BlockScaled:
        """N and K padded: values uint8 (..., N, K / 2), of INT4 (..., K / 256, N, 128); scales (..., N / 128,
        blocks / 4, 32, 4, 4)."""
        packed = formats.pack(q)._replace(global_scales=None)
        packed = _columns(packed, self.shape(spec)[1], spec.format)
        values = packed.values
        if _is_int4(spec.format):  # before rows are moved: as the last step XLA would make a copy of it
            values = values.reshape(*values.shape[:-1], -1, BLOCK_K).swapaxes(-3, -2)
        one = formats.one(spec.format, packed.scales.dtype)
        return BlockScaled(self.rows(values, spec), tile_scales(self.rows(packed.scales, spec, one)), q.global_scales)

    def inverse(self, q: BlockScaled, spec: WeightSpec) -> BlockScaled:
        return formats.unpack(self._packed(q, spec), spec.format)

    def take(self, q: BlockScaled, spec: WeightSpec, index: Index) -> BlockScaled:
        return self._packed(layouts.gather(q, index), spec)

    def _packed(self, q: BlockScaled, spec: WeightSpec) -> BlockScaled:
        values = q.values
        if _is_int4(spec.format):
            values = values.swapaxes(-3, -2).reshape(*values.shape[:-3], values.shape[-2], -1)
        rows = BlockScaled(values, untile_scales(q.scales))
        rows = jax.tree.map(partial(self.original_rows, spec=spec), rows)
        return _columns(rows, spec.shape[1], spec.format)._replace(global_scales=q.global_scales)


def _columns(q: BlockScaled, size: int, format: Format) -> BlockScaled:
    """Packed values and scales with `size` columns: padded with zeros and ones, or sliced."""
    counts = {"values": size * format.element_bits // 8, "scales": size // format.block_size}
    fills = {"values": 0, "scales": formats.one(format, q.scales.dtype)}
    resized = {}
    for name, count in counts.items():
        array = getattr(q, name)
        widths = [(0, 0, 0)] * (array.ndim - 1) + [(0, count - array.shape[-1], 0)]
        resized[name] = lax.pad(array, jnp.array(fills[name], array.dtype), widths)  # a negative width slices
    return q._replace(**resized)


def _is_int4(format: Format) -> bool:
    return format.element_dtype == jnp.int4


def _halves(spec: WeightSpec) -> int:
    return 2 if spec.role == "gate_up" and spec.gate_up_order is not None else 1


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _swapped_blocks(array: Shaped[Array, "*lead R C"], inner: int) -> Shaped[Array, "*lead R C"]:
    """Row inner * a + b of each block of 32 moves to row (32 / inner) * b + a."""
    blocks = array.reshape(*array.shape[:-2], -1, SHUFFLED_ROWS // inner, inner, array.shape[-1])
    return blocks.swapaxes(-3, -2).reshape(array.shape)


CUTLASS = Arrangement("cutlass_sm100", (MXFP4.name, NVFP4.name), alternate=False, shuffle=False)
TRTLLM = Arrangement(
    "trtllm_sm100",
    (MXFP4.name, NVFP4.name, MXINT4.name, "int4_g32"),
    alternate=True,
    shuffle=True,
    mxfp4_hidden_multiple=512,
)
TRTLLM_VLLM = Arrangement("trtllm_sm100_vllm", (MXFP4.name,), alternate=True, shuffle=True, multiple=256)
ARRANGEMENTS = (CUTLASS, TRTLLM, TRTLLM_VLLM)

LAYOUTS = tuple(Layout(a.name, a.forward, a.inverse, a.take, a.formats) for a in ARRANGEMENTS)
