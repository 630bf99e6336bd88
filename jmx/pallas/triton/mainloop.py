"""The main loop of the kernel: the float32 sums of a tile over its part of K.

A step multiplies `block_k` columns: by four products, each of the elements at one position of the words, or by one
product of all four. Between loads and products there are only elementwise operations, reshapes and broadcasts. So
Triton loads words from shared memory in the layout of the tensor cores' left operand, a thread decodes what it
multiplies, and no decoded weight is moved.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jmx.numerics.formats import WHOLE_ROW
from jmx.pallas.triton.decode import RUN, GroupParams, are_nan, decode_by_position, decode_permuted, permuted_index
from jmx.pallas.triton.product import Operands, Product
from jmx.pallas.triton.ptx import WORD_ELEMENTS
from jmx.pallas.triton.scale_codes import any_large, reader
from jmx.pallas.triton.tile import TileRows, WorkItem
from jmx.util.typing import Array, Float32, Int32, Shaped

# Tiles of so many rows read x without a mask of rows, which takes three instructions for every 16 bytes. Smaller ones
# are those of last rows, most of which are not there.
_LARGE_ROWS = 256

# (steps, step(index, state) -> state, state) -> state
Loop = Callable[[int, Callable[[Int32[Array, ""], Any], Any], Any], Any]


@dataclass(frozen=True)
class Mainloop:
    """The main loop of one work item.

    Args:
        operands: references.
        product: static.
        item: the work item.
    """

    operands: Operands
    product: Product
    item: WorkItem

    @property
    def step_words(self) -> int:
        """Words of a weight row in one step."""
        return self.product.config.block_k // WORD_ELEMENTS

    @property
    def steps(self) -> int:
        """Steps of each part of K."""
        num_words = self.operands.values.shape[2]
        return pl.cdiv(pl.cdiv(num_words, self.step_words), self.product.num_parts)

    @property
    def num_threads(self) -> int:
        return 32 * self.product.config.num_warps

    def run(self, rows: TileRows) -> Float32[Array, "block_n block_m"]:
        """The sums of the tile."""
        config = self.product.config
        zeros = jnp.zeros((config.block_n, config.block_m), jnp.float32)
        if self.operands.codes is not None:
            return self.with_scale_words(rows, zeros)
        return self.with_any_scales(rows, zeros, partial(lax.fori_loop, 0))

    def with_any_scales(
        self, rows: TileRows, zeros: Float32[Array, "block_n block_m"], loop: Loop
    ) -> Float32[Array, "block_n block_m"]:
        """The sums, with scales of any value, read group by group."""
        operands, format = self.operands, self.product.format

        def step(index: Int32[Array, ""], state: tuple[Array, Any]) -> tuple[Array, Any]:
            sums, look_ahead = state
            step = rows.part * self.steps + index
            params = (operands.scales, operands.zero_points)
            groups = GroupParams(*(None if a is None else self.load_groups(rows, a, step) for a in params))
            sums = self.accumulate(sums, rows, step, groups)
            if look_ahead is None:
                return sums, None
            # Loads of few codes are not pipelined. Loading those of the next step now brings them into the cache.
            bad, ahead = look_ahead
            return sums, (bad | are_nan(ahead, format), self.load_groups(rows, operands.scales, step, later=1))

        look_ahead = None
        if operands.scales is not None and operands.scales.dtype == jnp.uint8:
            codes = self.load_groups(rows, operands.scales, rows.part * self.steps)
            look_ahead = jnp.zeros(codes.shape, jnp.bool_), codes
        sums, look_ahead = loop(self.steps, step, (zeros, look_ahead))
        if look_ahead is not None:
            sums = jnp.where(jnp.max(look_ahead[0].astype(jnp.int32), axis=1)[:, None] > 0, jnp.nan, sums)
        return sums

    def with_scale_words(
        self, rows: TileRows, zeros: Float32[Array, "block_n block_m"]
    ) -> Float32[Array, "block_n block_m"]:
        """The sums, with scale codes read as words; if some scale is too large for that, by `with_any_scales`."""
        codes, values, product = self.operands.codes, self.operands.values, self.product
        assert codes is not None
        groups = values.shape[2] * WORD_ELEMENTS // product.format.block_size
        read = reader(codes, self.item.expert, rows.weight, groups, self.num_threads, product.interpret)

        def step(index: Int32[Array, ""], state: tuple[Array, Array]) -> tuple[Array, Array]:
            sums, words_or = state
            step = rows.part * self.steps + index
            factors, words = read(step)
            return self.accumulate(sums, rows, step, GroupParams(factors, None)), words_or | words

        words_or = jnp.zeros_like(jax.eval_shape(read, jnp.int32(0))[1])
        sums, words_or = lax.fori_loop(0, self.steps, step, (zeros, words_or))
        # A zero that compilers do not know: otherwise both loops share values of rows, which then stay in registers.
        zero = codes.shifts[jnp.int32(0)]
        again = rows._replace(
            weight=rows.weight + zero,
            x=rows.x + zero,
            part=rows.part + zero,
            weight_mask=rows.column + zero < values.shape[1] // product.halves,
        )
        return lax.cond(
            any_large(words_or), lambda: self.with_any_scales(again, zeros, _unpipelined_loop), lambda: sums
        )

    def accumulate(
        self, sums: Float32[Array, "block_n block_m"], rows: TileRows, step: Int32[Array, ""], groups: GroupParams
    ) -> Float32[Array, "block_n block_m"]:
        """Sums plus the products of one step."""
        config, format, interpret = self.product.config, self.product.format, self.product.interpret
        values, x = self.operands.values, self.operands.x
        word = step * self.step_words + jnp.arange(self.step_words)
        mask = rows.weight_mask[:, None] & (word < values.shape[2])[None, :]
        words = plgpu.load(values.at[self.item.expert, rows.weight[:, None], word[None, :]], mask=mask, other=0)
        if config.products == 1:
            weights = [decode_permuted(words, groups, format, interpret)]
            indices = [step * config.block_k + jnp.arange(config.block_k)]
        else:
            weights = decode_by_position(words, groups, format, interpret)
            indices = [
                plgpu.max_contiguous(pl.multiple_of(permuted_index(position, word), RUN), RUN)
                for position in range(WORD_ELEMENTS)
            ]
        masks_rows = self.operands.ids is not None or config.block_m < _LARGE_ROWS
        for weight, index in zip(weights, indices, strict=True):
            mask = jnp.broadcast_to((index < x.shape[1])[:, None], (index.size, rows.x.size))
            if masks_rows:
                mask &= rows.x_mask[None, :]
            tokens = plgpu.load(x.at[rows.x[None, :], index[:, None]], mask=mask, other=0)
            sums += jnp.dot(weight, tokens, preferred_element_type=jnp.float32)
        return sums

    def load_groups(
        self, rows: TileRows, array: Shaped[Any, "E N g"], step: Int32[Array, ""], later: int = 0
    ) -> Shaped[Array, "block_n n"]:
        """(block_n, groups) of `array` (E, N, groups), a reference: for the words of step + later."""
        first, number = self.groups_of_step(step, later)
        # Triton moves one group's column to the threads that need it only if it has a single dimension. If a load has
        # fewer elements than threads, Triton may repeat it in every thread, so here it has one for each thread.
        times = self.num_threads // self.product.config.block_n
        if number == 1 and times <= 1:
            mask = rows.weight_mask & (first < array.shape[2])
            return plgpu.load(array.at[self.item.params_index, rows.weight, first], mask=mask, other=0)[:, None]
        group = first + (jnp.arange(number) if number > 1 else jnp.zeros(times, jnp.int32))
        mask = rows.weight_mask[:, None] & (group < array.shape[2])[None, :]
        index = array.at[self.item.params_index, rows.weight[:, None], group[None, :]]
        return plgpu.load(index, mask=mask, other=0)

    def groups_of_step(self, step: Int32[Array, ""], later: int) -> tuple[Int32[Array, ""], int]:
        """The first group that step + later has words of, and the number of them."""
        block_size = self.product.format.block_size
        if block_size == WHOLE_ROW:
            return jnp.int32(0), 1
        group_words = block_size // WORD_ELEMENTS
        if group_words > self.step_words:
            return lax.div(step + later, jnp.int32(group_words // self.step_words)), 1
        number = self.step_words // group_words
        return step * number + later * number, number  # expanded, so that it needs no loop counter of its own


def _unpipelined_loop(steps: int, step: Callable[[Int32[Array, ""], Any], Any], state: Any) -> Any:
    """`lax.fori_loop` from 0, in a form that Triton does not pipeline: it takes no shared memory for its stages."""

    def body(counted: tuple[Array, Any]) -> tuple[Array, Any]:
        left, state = counted
        return left - 1, step(steps - left, state)

    return lax.while_loop(lambda counted: counted[0] > 0, body, (jnp.int32(steps), state))[1]
