"""Scale codes of a byte each, read by aligned words of four.

Triton's pipeline from global to shared memory takes 4 bytes or more at a time, from an address that 4 divides. Rows of
codes need not begin at one: those of gpt-oss are 90 bytes long. Read byte by byte, codes come when a step asks for
them, and the step waits. So a row reads the aligned words that its codes of a step lie in, shifts them into place, and
picks a byte for each block. What that takes beside words comes out of small tables, even numbers that are known while
tracing: Triton moves layouts over loads alone.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plgpu

from jmx.formats import MXFP4, Format
from jmx.pallas.triton_decode import pairs
from jmx.pallas.triton_elements import PICKED_FACTORS, SHIFTED

Array = jax.Array

_WORD = 4  # bytes
_TOPS = -0x7F7F7F80  # the top bits of a word's bytes


class Codes(NamedTuple):
    """What the kernel reads: arrays, or their refs.

    `words` int32 (E, n): the codes of an expert, one row behind the other.
    `shifts` int32 (4,): bits before each byte of a word.
    `picks` int32 (g,), g codes a step: the byte of its word, and three that are zero, as `prmt` counts them.
    `second` int32 (g,): whether it is in the second word.
    """

    words: Any
    shifts: Any
    picks: Any
    second: Any

    @classmethod
    def of(cls, scales: Array, format: Format, block_k: int) -> "Codes | None":
        """Of `scales` (E, N, groups) in steps of `block_k` columns; None where they are to be read as they are."""
        num_experts, num_rows, groups = scales.shape
        number = block_k // format.block_size if format == MXFP4 else 0
        if scales.dtype != jnp.uint8 or number not in (_WORD, 2 * _WORD) or num_rows * groups % _WORD:
            return None
        words = lax.bitcast_convert_type(scales.reshape(num_experts, -1, _WORD), jnp.int32)
        index = np.arange(number, dtype=np.int32)
        return cls(words, np.arange(_WORD, dtype=np.int32) * 8, 0x4440 + index % _WORD, index // _WORD)


def reader(
    codes: Codes, expert: Array, row: Array, here: Array, groups: int, num_threads: int, interpret: bool
) -> Callable[[Array], tuple[Array, Array]]:
    """What reads a step: the factors of its blocks, bfloat16 (N, g), and int32 (N,) or (N, n), not 0 in rows where one
    of the codes is NaN, whose factor may be anything. Interpreted, there are codes instead of factors.

    Args:
        codes: refs.
        expert: whose they are.
        row: int32 (N,), of the expert; those that are not `here` have any factors.
        groups: codes of a row.
        num_threads: of the block of threads.
        interpret: whether to say it in jnp.
    """
    (number,), num_words = codes.picks.shape, codes.words.shape[1]
    # Where rows are fewer than threads each is read several times, see `of_groups` in triton_kernel.
    times = min(max(1, num_threads // row.size), number)
    if times > 1:
        row, here = (jnp.broadcast_to(a[:, None], (a.size, times)) for a in (row, here))
    starts_with_a_word = groups % _WORD == 0
    shift = None if starts_with_a_word else plgpu.load(codes.shifts.at[row * groups & _WORD - 1])
    picks, second = (plgpu.load(table.at[jnp.arange(number)]) for table in (codes.picks, codes.second))
    shape = row.shape[0], number

    def spread(array: Array) -> Array:
        array = array.reshape(shape[0], times, 1)
        return jnp.broadcast_to(array, (*array.shape[:2], number // times)).reshape(shape)

    def read(step: Array) -> tuple[Array, Array]:
        first = row * groups + step * number >> 2
        words = []
        for nth in range(number // _WORD + (shift is not None)):
            words.append(plgpu.load(codes.words.at[expert, first + nth], mask=here & (first + nth < num_words), other=0))
        if shift is not None:
            words = [_shifted(low, high, shift, interpret) for low, high in pairwise(words)]
        bad = jnp.zeros(row.shape, jnp.int32)
        for nth, word in enumerate(words):
            beyond = _beyond(groups - step * number - nth * _WORD)
            bad |= _nans(word, beyond)
            if interpret:
                words[nth] = word & ~beyond
        found = spread(words[0])
        if number > _WORD:
            found = jnp.where(jnp.broadcast_to(second, shape) == 0, found, spread(words[1]))
        return _picked(found, jnp.broadcast_to(picks, shape), interpret), bad

    return read


def _beyond(count: Array) -> Array:
    """Ones in the bytes of a word from the `count`th on."""
    count = jnp.clip(count, 0, _WORD)
    return jnp.where(count == _WORD, 0, jnp.int32(-1) << 8 * (count & _WORD - 1))


def _nans(word: Array, beyond: Array) -> Array:
    """Not 0 where a byte of each word, but those beyond, is 255: in its complement one is 0, and borrows."""
    rest = ~word | beyond
    return (rest - 0x01010101) & ~rest & _TOPS


def _shifted(low: Array, high: Array, shift: Array, interpret: bool) -> Array:
    """The word that begins `shift` bits, fewer than 32, behind low."""
    if interpret:
        low, high, shift = (a.astype(jnp.uint32) for a in (low, high, shift))
        return (low >> shift | jnp.where(shift == 0, 0, high << (32 - shift) % 32)).astype(jnp.int32)
    (result,) = plgpu.elementwise_inline_asm(
        SHIFTED,
        args=[low, high, shift],
        constraints="=r,r,r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(low.shape, jnp.int32)],
    )
    return result


def _picked(words: Array, picks: Array, interpret: bool) -> Array:
    if interpret:
        return (words.astype(jnp.uint32) >> (picks % _WORD * 8).astype(jnp.uint32)).astype(jnp.uint8)
    return pairs(PICKED_FACTORS, words, picks)
