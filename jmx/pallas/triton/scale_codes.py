"""Scale codes of one byte, read as aligned words of four.

Triton's pipeline from global to shared memory copies at least 4 bytes at a time, from addresses that are multiples of
4. Rows of codes need not begin at one: those of gpt-oss have 90 bytes. Read as bytes, codes are loaded when a step
needs them, and the step waits. So a row reads the aligned words that contain its codes of a step, shifts them into
place, and selects a byte for each group. The indices for that come from small tables, although they are known while
tracing: Triton moves changes of layout up to loads only.

Only scales below 2, which trained weights have, are read this way: bfloat16 then holds the scale times the 2^126 that
elements lack, which other scales are multiplied by in a second instruction. A tile whose words have other codes is
computed again, with codes read as bytes.
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
from jmx.pallas.triton.decode import apply_ptx
from jmx.pallas.triton.ptx import FUNNEL_SHIFT, SCALED_FACTORS
from jmx.util.typing import Array, Bool, Int32, Shaped

_WORD = 4  # bytes
_SIGN_BITS = -0x7F7F7F80  # the highest bit of each byte of a word

# Of one step: the groups' scaled factors (bfloat16; codes, if interpreted), and the bitwise or of the words read.
StepScales = tuple[Shaped[Array, "N g"], Int32[Array, "N ..."]]


class ScaleCodes(NamedTuple):
    """What the kernel reads: arrays, or references to them.

    `words` int32 (E, n): the codes of an expert, row after row.
    `shifts` int32 (4,): bits before each byte of a word.
    `selectors` int32 (g,), for g codes a step: `prmt` selectors of each code's byte and three zero bytes.
    `in_second` int32 (g,): whether the code is in the second word.
    """

    words: Int32[Any, "E n"]
    shifts: Int32[Any, "4"]
    selectors: Int32[Any, " g"]
    in_second: Int32[Any, " g"]

    @classmethod
    def of(cls, scales: Shaped[Array, "E N g"], format: Format, block_k: int) -> "ScaleCodes | None":
        """Those of `scales` (E, N, groups) in steps of `block_k` columns; None where they have to be read as bytes."""
        num_experts, num_rows, groups = scales.shape
        step_codes = block_k // format.block_size if format == MXFP4 else 0
        if scales.dtype != jnp.uint8 or step_codes not in (_WORD, 2 * _WORD) or num_rows * groups % _WORD:
            return None
        words = lax.bitcast_convert_type(scales.reshape(num_experts, -1, _WORD), jnp.int32)
        index = np.arange(step_codes, dtype=np.int32)
        return cls(words, np.arange(_WORD, dtype=np.int32) * 8, 0x4440 + index % _WORD, index // _WORD)


def reader(
    codes: ScaleCodes, expert: Int32[Array, ""], row: Int32[Array, " N"], groups: int, num_threads: int, interpret: bool
) -> Callable[[Int32[Array, ""]], StepScales]:
    """A function that reads the codes of one step of the main loop, see `StepScales`.

    If `any_large` of the words that it returns, its factors are undefined.

    Args:
        codes: references.
        expert: the expert whose codes are read.
        row: int32 (N,), rows of the expert's weight; those past its end have undefined factors.
        groups: codes per row. Factors of groups past the last one are finite, unless `any_large`.
        num_threads: threads of the CTA.
        interpret: whether to compute in jnp, for a CPU.
    """
    (number,), last = codes.selectors.shape, codes.words.shape[1] - 1
    # If rows are fewer than threads each row is loaded several times, see `Mainloop.load_groups`.
    times = min(max(1, num_threads // row.size), number)
    if times > 1:
        row = jnp.broadcast_to(row[:, None], (row.size, times))
    rows_are_aligned = groups % _WORD == 0
    shift = None if rows_are_aligned else plgpu.load(codes.shifts.at[row * groups & _WORD - 1])
    selectors, in_second = (plgpu.load(table.at[jnp.arange(number)]) for table in (codes.selectors, codes.in_second))
    shape = row.shape[0], number

    def spread(array: Int32[Array, "N ..."]) -> Int32[Array, "N g"]:
        array = array.reshape(shape[0], times, 1)
        return jnp.broadcast_to(array, (*array.shape[:2], number // times)).reshape(shape)

    def read(step: Int32[Array, ""]) -> StepScales:
        first = row * groups + step * number >> 2
        indices = [jnp.minimum(first + nth, last) for nth in range(number // _WORD + (shift is not None))]
        words = [plgpu.load(codes.words.at[expert, index]) for index in indices]
        words_or = reduce(jnp.bitwise_or, words)
        if shift is not None:
            words = [_funnel_shift(low, high, shift, interpret) for low, high in pairwise(words)]
        word = spread(words[0])
        if number > _WORD:
            word = jnp.where(jnp.broadcast_to(in_second, shape) == 0, word, spread(words[1]))
        return _scaled_factors(word, jnp.broadcast_to(selectors, shape), interpret), words_or

    return read


def any_large(words: Int32[Array, "..."]) -> Bool[Array, ""]:
    """Whether any word has a code of 128 or more: a scale of 2 or more, or NaN."""
    return jnp.max((words & _SIGN_BITS != 0).astype(jnp.int32)) > 0


def _funnel_shift(
    low: Int32[Array, "*shape"], high: Int32[Array, "*shape"], shift: Int32[Array, "*shape"], interpret: bool
) -> Int32[Array, "*shape"]:
    """The 32 bits of (low, high) from bit `shift` on, 0 to 31."""
    if interpret:
        low, high, shift = (a.astype(jnp.uint32) for a in (low, high, shift))
        return (low >> shift | jnp.where(shift == 0, 0, high << (32 - shift) % 32)).astype(jnp.int32)
    (result,) = plgpu.elementwise_inline_asm(
        FUNNEL_SHIFT,
        args=[low, high, shift],
        constraints="=r,r,r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(low.shape, jnp.int32)],
    )
    return result


def _scaled_factors(
    words: Int32[Array, "*shape"], selectors: Int32[Array, "*shape"], interpret: bool
) -> Shaped[Array, "*shape"]:
    """The factors of the selected bytes, bfloat16; interpreted, the bytes."""
    if interpret:
        return (words.astype(jnp.uint32) >> (selectors % _WORD * 8).astype(jnp.uint32)).astype(jnp.uint8)
    return apply_ptx(SCALED_FACTORS, words, selectors)
