"""One format for the weights of a layer whose files have several, where that changes no weight.

`jmx.Experts` has one format for a layer. Files may have others for `down` than for gate and up, or for single experts.
Their weights are the same numbers in a format with

* of integers: the largest of their widths, zero points if one has them, and groups of the greatest common divisor of
  their groups;
* of FP8 with float scales: scales of each row, and blocks of columns likewise;
* of MXFP4 and MXFP8: MXFP8.

Scales are repeated for the smaller groups. Other formats, such as NVFP4 and FP8, have none in common.
"""

import math
from collections.abc import Iterable

import numpy as np

from jmx.checkpoint.compressed_tensors import packing
from jmx.checkpoint.compressed_tensors.module import Module, Shape
from jmx.numerics.formats import (
    FORMATS,
    FP8_BLOCK,
    FP8_CHANNEL,
    MXFP4,
    MXFP8,
    WHOLE_ROW,
    Format,
    fp8_in_blocks,
)
from jmx.util.typing import Shaped, UInt8


def common_format(formats: Iterable[Format]) -> Format | None:
    """The format in which weights of all `formats` are the same numbers; None if there is none."""
    found = [*dict.fromkeys(formats)]
    if len(found) == 1:
        return found[0]
    if {*found} == {MXFP4, MXFP8}:
        return MXFP8
    size = math.gcd(*(format.block_size for format in found if format.block_size != WHOLE_ROW)) or WHOLE_ROW
    if all(_is_integer(format) for format in found):
        bits = max(format.element_bits for format in found)
        blocks = "channel" if size == WHOLE_ROW else f"g{size}"
        kinds = {"asym": "zero_points", "order": "order"}
        kinds = [kind for kind, array in kinds.items() if any(array in format.arrays for format in found)]
        return FORMATS["_".join([f"int{bits}", blocks, *kinds])]
    if all(format.name.startswith("fp8") for format in found):
        return FP8_CHANNEL if size == WHOLE_ROW else fp8_in_blocks(FP8_BLOCK.block_rows, size)
    return None


def _is_integer(format: Format) -> bool:
    return format.name.startswith(("int4", "int8"))


def abstract(module: Module, name: str, format: Format) -> tuple[Shape, np.dtype]:
    """Shape and dtype of an array of a module, or its "bias", in a common format."""
    if name in ("values", "zero_points", "order", "scales") and module.format != format:
        rows, columns = module.shape
        shapes: dict[str, tuple[Shape, np.dtype]] = {
            "values": ((rows, columns * format.element_bits // 8), np.dtype(np.uint8)),
            "scales": ((rows, format.num_blocks(columns, "columns")), module.abstract("scales")[1]),
            "zero_points": ((rows, format.num_blocks(columns, "columns")), np.dtype(np.int8)),
            "order": ((columns,), np.dtype(np.int32)),
        }
        return shapes[name]
    return module.abstract(name)


def array(module: Module, name: str, format: Format) -> Shaped[np.ndarray, "..."]:
    """One of a module's arrays in a common format, as `Module.array` has those of its own.

    Raises:
        CheckpointError: as `Module.array`.
    """
    if module.format == format or name == "bias":
        return module.array(name)
    (shape, _), is_there = abstract(module, name, format), name in module.format.arrays
    if name == "values":
        return _widened(module.array(name), module.format, format, module.shape[1])
    if name == "order":
        return module.array(name) if is_there else np.arange(shape[0], dtype=np.int32)
    if not is_there:
        return np.zeros(shape, np.int8)  # zero points of weights without them
    return _repeated(module.array(name), module.format, format, shape[1])


def _widened(
    packed: UInt8[np.ndarray, "N bytes"], its: Format, wanted: Format, columns: int
) -> UInt8[np.ndarray, "N widened"]:
    """Packed elements in the element type of another format, which has all their values."""
    if its.element_dtype == wanted.element_dtype:
        return packed
    if _is_integer(its):
        return packing.bytes_of_elements(
            packing.elements_of_bytes(packed, its.element_bits, columns), wanted.element_bits
        )
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), columns)
    return its.elements().astype(wanted.element_dtype).view(np.uint8)[codes]


def _repeated(blocks: Shaped[np.ndarray, "N b"], its: Format, wanted: Format, count: int) -> Shaped[np.ndarray, "N B"]:
    """Scales or zero points of blocks for the `count` smaller ones of another format."""
    if wanted.block_size == its.block_size:
        return blocks
    times = count if its.block_size == WHOLE_ROW else its.block_size // wanted.block_size
    return np.repeat(blocks, times, axis=1)[:, :count]
