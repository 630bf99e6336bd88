"""Scale codes of a byte each, read by aligned words of four.

Triton's pipeline from global to shared memory takes 4 bytes or more at a time, from an address that 4 divides. Rows of
codes need not begin at one: those of gpt-oss are 90 bytes long. Read byte by byte, codes come when a step asks for
them, and the step waits. So a row reads the aligned words that its codes of a step lie in, shifts them into place, and
picks a byte for each block. What that takes beside words comes out of small tables, even numbers that are known while
tracing: Triton moves layouts over loads alone.

Scales below 2 alone are read so, which those of trained weights are: they leave room in bfloat16 for a factor by which
all others would have to be multiplied apart. What else is among a tile's words is told, and its codes read again.
"""

from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plgpu

from jmx.numerics.formats import MXFP4, Format
from jmx.pallas.triton.decode import pairs
from jmx.pallas.triton.elements import SCALED_FACTORS, SHIFTED

Array = jax.Array

_WORD = 4  # bytes
_TOPS = -0x7F7F7F80  # the top bits of a word's bytes


class ScaleCodes(NamedTuple):
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
    def of(cls, scales: Array, format: Format, block_k: int) -> "ScaleCodes | None":
        """Of `scales` (E, N, groups) in steps of `block_k` columns; None where they are to be read as they are."""
        num_experts, num_rows, groups = scales.shape
        number = block_k // format.block_size if format == MXFP4 else 0
        if scales.dtype != jnp.uint8 or number not in (_WORD, 2 * _WORD) or num_rows * groups % _WORD:
            return None
        words = lax.bitcast_convert_type(scales.reshape(num_experts, -1, _WORD), jnp.int32)
        index = np.arange(number, dtype=np.int32)
        return cls(words, np.arange(_WORD, dtype=np.int32) * 8, 0x4440 + index % _WORD, index // _WORD)


def reader(
    codes: ScaleCodes, expert: Array, row: Array, groups: int, num_threads: int, interpret: bool
) -> Callable[[Array], tuple[Array, Array]]:
    """What reads a step: the scaled factors of its blocks, bfloat16 (N, g), and the words themselves, or'ed into one a
    row, int32 (N,) or (N, n). Where `any_large` of these, factors may be anything. Interpreted, they are codes.

    Args:
        codes: refs.
        expert: whose they are.
        row: int32 (N,), of the expert; those that there are not have any factors.
        groups: codes of a row. Of those from there on a factor is finite, unless `any_large`.
        num_threads: threads of the CTA.
        interpret: whether to compute it in jnp, for a CPU.
    """
    (number,), last = codes.picks.shape, codes.words.shape[1] - 1
    # Where rows are fewer than threads each is read several times, see `of_groups` in `kernel`.
    times = min(max(1, num_threads // row.size), number)
    if times > 1:
        row = jnp.broadcast_to(row[:, None], (row.size, times))
    begins_with_a_word = groups % _WORD == 0
    shift = None if begins_with_a_word else plgpu.load(codes.shifts.at[row * groups & _WORD - 1])
    picks, second = (plgpu.load(table.at[jnp.arange(number)]) for table in (codes.picks, codes.second))
    shape = row.shape[0], number

    def spread(array: Array) -> Array:
        array = array.reshape(shape[0], times, 1)
        return jnp.broadcast_to(array, (*array.shape[:2], number // times)).reshape(shape)

    def read(step: Array) -> tuple[Array, Array]:
        first = row * groups + step * number >> 2
        indices = [jnp.minimum(first + nth, last) for nth in range(number // _WORD + (shift is not None))]
        words = [plgpu.load(codes.words.at[expert, index]) for index in indices]
        every = reduce(jnp.bitwise_or, words)
        if shift is not None:
            words = [_shifted(low, high, shift, interpret) for low, high in pairwise(words)]
        found = spread(words[0])
        if number > _WORD:
            found = jnp.where(jnp.broadcast_to(second, shape) == 0, found, spread(words[1]))
        return _picked(found, jnp.broadcast_to(picks, shape), interpret), every

    return read


def any_large(words: Array) -> Array:
    """Whether any of words has a code of 128 or more: a scale of 2 or more, or NaN."""
    return jnp.max((words & _TOPS != 0).astype(jnp.int32)) > 0


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
    return pairs(SCALED_FACTORS, words, picks)
