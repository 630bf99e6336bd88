"""Rows of token ids, such as prompts: checks, and one array of rows of different lengths."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from jmx.models.cache import bucket
from jmx.util.checks import check_int, is_array, shown

TokenIds = Sequence[Sequence[int]]  # of several rows: a list of token ids each


def check_tokens(name: str, rows: TokenIds, vocab_size: int) -> None:
    """Checks that there is a row, and that each has a token, all of the vocabulary.

    Raises:
        TypeError: not lists of integers, naming the argument `name` and the row.
        ValueError: no row, an empty one, or ids outside the vocabulary.
    """
    _check_list(name, rows, "lists of token ids")
    if not len(rows):
        raise ValueError(f"`{name}` (={rows!r}) must be at least one")
    for number, row in enumerate(rows):
        its = f"{name}[{number}]"
        _check_list(its, row, "a list of token ids")
        if not len(row):
            raise ValueError(f"`{its}` (={row!r}) must have at least one token")
        for token in row:
            if type(token) is not int:
                check_int(its, token)
            if not 0 <= token < vocab_size:
                raise ValueError(f"`{its}` has the id {token}, which must be in 0..{vocab_size - 1}")


def _check_list(name: str, value: Any, what: str) -> None:
    is_list = len(value.shape) > 0 if is_array(value) else isinstance(value, Sequence)
    if not is_list or isinstance(value, str | bytes):
        raise TypeError(f"`{name}` ({shown(value)}) must be {what}")


def padded_rows(rows: TokenIds) -> tuple[np.ndarray, np.ndarray]:
    """The rows as int32 (B, bucket of the longest), and their lengths, int32 (B,)."""
    lengths = np.array([len(row) for row in rows], np.int32)
    padded = np.zeros((len(rows), bucket(int(lengths.max()))), np.int32)
    for filled, row in zip(padded, rows, strict=True):
        filled[: len(row)] = row if is_array(row) else array("i", row)  # numpy takes four times as long for a list
    return padded, lengths
