"""Modules of GPTQ, AWQ and AutoRound: integers in words of 32 bits, the contracted axis first.

The tensors of a weight of N rows and K columns:

    GPTQ  qweight  int32 (K bits / 32, N): a word holds consecutive columns of a row, from the least significant bit up
          qzeros   int32 (groups, N bits / 32): along rows likewise, each one less than the zero point ("gptq_v2": the
                   zero point itself). Symmetric weights have 2^(bits - 1) everywhere.
          scales   floats (groups, N)
          g_idx    int32 (K,): each column's group; where groups are in order, as AutoRound's are, it may be missing
    AWQ   qweight  int32 (K, N / 8): a word holds 8 rows in the order 0, 2, 4, 6, 1, 3, 5, 7
          qzeros   int32 (groups, N / 8), in the same order
          scales   floats (groups, N)

    weight[n, k] = (q[n, k] - zero_points[n, b]) * scales[n, b], q and zero points of 0 to 2^bits - 1

Here q and zero points are less 2^(bits - 1). See `pack` of TorchLinear in https://github.com/ModelCloud/GPTQModel, and
WQLinear_GEMM in https://github.com/casper-hansen/AutoAWQ.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from jmx.checkpoint.compressed_tensors import packing
from jmx.checkpoint.compressed_tensors.config import AUTO_ROUND, AUTO_ROUND_V2, AWQ, GPTQ, GPTQ_V2, Scheme
from jmx.checkpoint.compressed_tensors.module import Module, Piece, Shape
from jmx.checkpoint.compressed_tensors.tensor_names import FLOATS
from jmx.numerics.formats import FORMATS, WHOLE_ROW, BlockScaled, Format
from jmx.util.typing import Int8, Int32, Shaped, UInt8

STORAGES = (GPTQ, GPTQ_V2, AWQ, AUTO_ROUND, AUTO_ROUND_V2)
_INDEXED = (GPTQ, GPTQ_V2)  # may have g_idx
_LESS_ONE = (GPTQ, AUTO_ROUND)  # store zero points less one
_AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # the row, of 8, of each nibble of a word


def module_of(name: str, pieces: Mapping[str, Piece], scheme: Scheme) -> Module:
    """The module of a scheme, whichever tool wrote it; see `Module`."""
    return (GptqModule if scheme.storage in STORAGES else Module)(name, pieces, scheme)


class GptqModule(Module):
    """A module of GPTQ, AWQ or AutoRound; see `Module`, and this file for its tensors."""

    @property
    def _packs_rows(self) -> bool:
        """Whether a word of the values holds rows, as in AWQ, not columns."""
        return self.scheme.storage == AWQ

    @property
    def _is_indexed(self) -> bool:
        needed = "order" in self.format.arrays
        return self.scheme.storage in _INDEXED and (needed or "weight_g_idx" in self.pieces)

    @property
    def _may_be_short(self) -> bool:
        return not self._packs_rows  # AWQ's groups are whole

    def _shape(self) -> tuple[int, int]:
        values, per_word = self._piece("weight_packed"), 32 // FORMATS[self.scheme.weights].element_bits
        if len(values.shape) != 2 or 0 in values.shape:
            raise values.error(f"has shape {values.shape}, but must have rows and columns")
        first, second = values.shape
        rows, columns = (second * per_word, first) if self._packs_rows else (second, first * per_word)
        if rows % per_word:
            raise values.error(f"has {rows} rows, but must have a multiple of {per_word}, which a word of qzeros holds")
        return rows, columns

    def _expected(self, rows: int, columns: int) -> Iterator[tuple[str, tuple[str, ...], tuple[Shape, ...]]]:
        per_word, blocks = 32 // self.format.element_bits, self.format.num_blocks(columns, "columns")
        values = (columns, rows // per_word) if self._packs_rows else (columns // per_word, rows)
        yield "weight_packed", ("I32",), (values,)
        yield "weight_scale", FLOATS, ((blocks, rows),)
        yield "weight_zero_point", ("I32",), ((blocks, rows // per_word),)
        if self._is_indexed:
            yield "weight_g_idx", ("I32",), ((columns,),)
        if "bias" in self.pieces:
            yield "bias", FLOATS, ((rows,),)

    def sources(self, name: str) -> list[Piece]:
        if name != "values":
            return super().sources(name)
        # Both say that values are what their format makes of them, where it has no zero points or no order.
        checked = ["weight_zero_point"] * ("zero_points" not in self.format.arrays)
        checked += ["weight_g_idx"] * self._is_indexed
        return [self.pieces[its] for its in ("weight_packed", *checked)]

    def kept(self) -> dict[str, Shaped[np.ndarray, "..."]]:
        return {name: self.pieces[name].view() for name in ("bias",) if name in self.pieces}

    def _values(self) -> UInt8[np.ndarray, "N bytes"]:
        stored, bits = self.pieces["weight_packed"].view(), self.format.element_bits
        if "zero_points" not in self.format.arrays:
            self._check_symmetric()
        if self._packs_rows:
            elements = _rows_of_words(stored, self.shape[0])
            return packing.bytes_of_elements(np.ascontiguousarray(elements.T), bits)
        packed = packing.bytes_of_words(np.ascontiguousarray(stored.T), bits, self.shape[1])
        if "order" in self.format.arrays:
            return packing.columns(packed, bits, self._sorted)
        if self._is_indexed:
            self._check_in_order()
        return packed

    def _check_symmetric(self) -> None:
        found = self._zero_points()
        if found.any():
            half = 1 << self.format.element_bits - 1
            row, block = (int(i) for i in np.argwhere(found)[0])
            raise self.pieces["weight_zero_point"].error(
                f"must hold zero points of {half} for symmetric weights, but has {int(found[row, block]) + half} for "
                f"row {row}, group {block}"
            )

    def _check_in_order(self) -> None:
        groups = self.pieces["weight_g_idx"].view()
        if not np.array_equal(groups, _groups(self.format, groups.size)):
            raise self.pieces["weight_g_idx"].error("must hold groups in order, as the config's `desc_act` is false")

    def _scales(self) -> Shaped[np.ndarray, "N b"]:
        return np.ascontiguousarray(self._positive(self.pieces["weight_scale"]).T)

    def _zero_points(self) -> Int8[np.ndarray, "N b"]:
        stored, bits = self.pieces["weight_zero_point"].view(), self.format.element_bits
        if self._packs_rows:
            return np.ascontiguousarray(_rows_of_words(stored, self.shape[0]).T)
        found = packing.elements_of_bytes(packing.bytes_of_words(stored, bits, self.shape[0]), bits, self.shape[0])
        if self.scheme.storage in _LESS_ONE:
            most = (1 << bits - 1) - 1
            if (found == most).any():
                block, row = (int(i) for i in np.argwhere(found == most)[0])
                raise self.pieces["weight_zero_point"].error(
                    f"must hold zero points less one below {2 * most + 1}, which some tools read as 0 and others as "
                    f"{2 * most + 2}, but has one for row {row}, group {block}"
                )
            found = found + np.int8(1)
        return np.ascontiguousarray(found.T)


def gptq_tensors(
    scheme: Scheme, weight: BlockScaled, kept: Mapping[str, Shaped[np.ndarray, "..."]]
) -> dict[str, Shaped[np.ndarray, "..."]]:
    """The tensors of such a module, by compressed-tensors' names: see `module_writer.module_tensors`."""
    format = FORMATS[scheme.weights]
    bits, packed, scales = format.element_bits, np.asarray(weight.values), np.asarray(weight.scales)
    rows, columns = packed.shape[0], packed.shape[1] * 8 // bits
    found: dict[str, np.ndarray] = {}
    if scheme.storage in _INDEXED:
        found["weight_g_idx"] = _groups(format, columns)
    if "order" in format.arrays:
        order = np.asarray(weight.order)
        packed = packing.columns(packed, bits, np.argsort(order))
        found["weight_g_idx"][order] = _groups(format, columns)
    points = np.zeros(scales.shape, np.int8) if weight.zero_points is None else np.asarray(weight.zero_points)
    points = np.ascontiguousarray(points.T)
    if scheme.storage == AWQ:
        elements = np.ascontiguousarray(packing.elements_of_bytes(packed, bits, columns).T)
        found["weight_packed"], found["weight_zero_point"] = _words_of_rows(elements), _words_of_rows(points)
    else:
        found["weight_packed"] = np.ascontiguousarray(packing.words_of_bytes(packed, bits, columns).T)
        points = points - np.int8(scheme.storage in _LESS_ONE)
        found["weight_zero_point"] = packing.words_of_bytes(packing.bytes_of_elements(points, bits), bits, rows)
    found["weight_scale"] = np.ascontiguousarray(scales.T)
    return found | dict(kept)


def _groups(format: Format, columns: int) -> Int32[np.ndarray, " K"]:
    """The group of each column, in their order."""
    size = columns if format.block_size == WHOLE_ROW else format.block_size
    return np.arange(columns, dtype=np.int32) // np.int32(size)


def _rows_of_words(words: Int32[np.ndarray, "R words"], rows: int) -> Int8[np.ndarray, "R N"]:
    """Integers of 4 bits from words in AWQ's order."""
    stored = packing.elements_of_bytes(packing.bytes_of_words(words, 4, rows), 4, rows).reshape(len(words), -1, 8)
    found = np.empty_like(stored)
    found[..., _AWQ_ORDER] = stored
    return found.reshape(len(words), rows)


def _words_of_rows(values: Int8[np.ndarray, "R N"]) -> Int32[np.ndarray, "R words"]:
    """The inverse of `_rows_of_words`."""
    stored = np.ascontiguousarray(values.reshape(len(values), -1, 8)[..., _AWQ_ORDER]).reshape(values.shape)
    return packing.words_of_bytes(packing.bytes_of_elements(stored, 4), 4, values.shape[1])
