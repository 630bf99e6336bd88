"""Integers of 4 and 8 bits: packed into 32-bit words by compressed-tensors, and into bytes by `jmx.numerics.formats`.

A word holds the elements of a row from the least significant bit up, each in offset binary: q + 2^(bits - 1). A byte
holds two's complement, the even element in the low nibble. On a little-endian machine only the sign bits differ.
"""

import numpy as np

from jmx.util.typing import Int8, Int32, Integer, UInt8

_SIGNS = {4: np.uint8(0x88), 8: np.uint8(0x80)}  # of all elements in a byte


def num_words(elements: int, bits: int) -> int:
    """The number of words that hold a row of `elements`."""
    return -(-elements * bits // 32)


def bytes_of_words(words: Int32[np.ndarray, "R words"], bits: int, elements: int) -> UInt8[np.ndarray, "R bytes"]:
    """The bytes of packed words, ceil(elements * bits / 8) a row, in two's complement.

    Raises:
        ValueError: a bit after the last element of a row is not 0.
    """
    used = elements * bits
    raw = np.ascontiguousarray(words, "<i4").view(np.uint8)
    whole, rest = divmod(used, 8)
    unused = raw[:, whole:].copy()
    if rest:
        unused[:, 0] >>= rest
    if unused.any():
        row = int(np.flatnonzero(unused.any(axis=1))[0])
        raise ValueError(f"must have no bit after the {elements} elements of a row, but has one in row {row}")
    signed = raw[:, : whole + bool(rest)] ^ _SIGNS[bits]
    if rest:
        signed[:, -1] &= (1 << rest) - 1
    return signed


def words_of_bytes(packed: UInt8[np.ndarray, "R bytes"], bits: int, elements: int) -> Int32[np.ndarray, "R words"]:
    """The inverse of `bytes_of_words`."""
    raw = np.zeros((packed.shape[0], 4 * num_words(elements, bits)), np.uint8)
    raw[:, : packed.shape[1]] = packed ^ _SIGNS[bits]
    if elements * bits % 8:
        raw[:, packed.shape[1] - 1] &= (1 << elements * bits % 8) - 1
    return raw.view("<i4")


def elements_of_bytes(packed: UInt8[np.ndarray, "R bytes"], bits: int, elements: int) -> Int8[np.ndarray, "R K"]:
    """The first `elements` integers of each row of packed bytes."""
    if bits == 8:
        return packed[:, :elements].view(np.int8)
    return ((_nibbles(packed)[:, :elements] ^ 8) - np.uint8(8)).view(np.int8)


def bytes_of_elements(values: Int8[np.ndarray, "R K"], bits: int) -> UInt8[np.ndarray, "R bytes"]:
    """The bytes of integers that fit into `bits`, ceil(K * bits / 8) a row."""
    if bits == 8:
        return np.ascontiguousarray(values).view(np.uint8)
    return _pairs(np.pad(values.view(np.uint8) & 15, [(0, 0), (0, values.shape[1] % 2)]))


def columns(
    packed: UInt8[np.ndarray, "R bytes"], bits: int, order: Integer[np.ndarray, " K"]
) -> UInt8[np.ndarray, "R bytes"]:
    """The same bytes with the elements of each row in another order. No byte may be half full."""
    # np.take, not an index: the result of an index is in column order, and takes three times as long
    return np.take(packed, order, 1) if bits == 8 else _pairs(np.take(_nibbles(packed), order, 1))


# Through words of 16 bits, two nibbles each: many times faster than strided halves.


def _nibbles(packed: UInt8[np.ndarray, "R bytes"]) -> UInt8[np.ndarray, "R K"]:
    wide = packed.astype("<u2")
    return ((wide | wide << 4) & 0x0F0F).view(np.uint8)


def _pairs(nibbles: UInt8[np.ndarray, "R K"]) -> UInt8[np.ndarray, "R bytes"]:
    wide = np.ascontiguousarray(nibbles).view("<u2")
    return (wide | wide >> 4).astype(np.uint8)
