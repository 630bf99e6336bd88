"""Integers of 4 and 8 bits in 32-bit words, as compressed-tensors packs them, and in bytes, as `formats` does.

Words hold elements of a row from the least significant bit up, each as offset binary: q + 2^(bits - 1). Bytes hold
two's complement, the even element of two in the low nibble. On a little-endian machine only the sign bit differs.
"""

import numpy as np

_SIGNS = {4: np.uint8(0x88), 8: np.uint8(0x80)}  # of all elements in a byte


def num_words(elements: int, bits: int) -> int:
    """Words that hold a row of so many elements."""
    return -(-elements * bits // 32)


def bytes_of_words(words: np.ndarray, bits: int, elements: int) -> np.ndarray:
    """uint8 (R, ceil(elements * bits / 8)) of int32 (R, words): two's complement.

    Raises:
        ValueError: bits after the last element of a row that are not 0.
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


def words_of_bytes(packed: np.ndarray, bits: int, elements: int) -> np.ndarray:
    """The inverse of `bytes_of_words`."""
    raw = np.zeros((packed.shape[0], 4 * num_words(elements, bits)), np.uint8)
    raw[:, : packed.shape[1]] = packed ^ _SIGNS[bits]
    if elements * bits % 8:
        raw[:, packed.shape[1] - 1] &= (1 << elements * bits % 8) - 1
    return raw.view("<i4")


def elements_of_bytes(packed: np.ndarray, bits: int, elements: int) -> np.ndarray:
    """int8 (R, elements) of uint8 (R, bytes)."""
    if bits == 8:
        return packed[:, :elements].view(np.int8)
    return ((_nibbles(packed)[:, :elements] ^ 8) - np.uint8(8)).view(np.int8)


def bytes_of_elements(values: np.ndarray, bits: int) -> np.ndarray:
    """uint8 (R, ceil(elements * bits / 8)) of int8 (R, elements), which fit in so many bits."""
    if bits == 8:
        return np.ascontiguousarray(values).view(np.uint8)
    return _pairs(np.pad(values.view(np.uint8) & 15, [(0, 0), (0, values.shape[1] % 2)]))


def columns(packed: np.ndarray, bits: int, order: np.ndarray) -> np.ndarray:
    """uint8 (R, bytes) with the elements of each row, of which no byte is half full, in another order."""
    # np.take, and not an index, whose result lies column by column and takes three times as long
    return np.take(packed, order, 1) if bits == 8 else _pairs(np.take(_nibbles(packed), order, 1))


# As words of 16 bits, two nibbles each: many times faster than strided halves.


def _nibbles(packed: np.ndarray) -> np.ndarray:
    wide = packed.astype("<u2")
    return ((wide | wide << 4) & 0x0F0F).view(np.uint8)


def _pairs(nibbles: np.ndarray) -> np.ndarray:
    wide = np.ascontiguousarray(nibbles).view("<u2")
    return (wide | wide >> 4).astype(np.uint8)
