"""A grouped product with 4-bit weights in Pallas Triton: each block's rows times the weight of its expert.

A tile is some rows of the weight by a block of rows of x, computed transposed: the weight is the left operand, so that
few rows of x meet the axis that tensor cores cut finest. Weights are read as words of 16 bits, four elements each. The
kernel never interleaves the four: x comes, and what the first product gives goes, in the order of columns that
`decode` calls turned. A step of the loop is four products, of one element of each word, or one of all four.

What is between a load and a product is elementwise, or only names elements anew. So Triton reads words from shared
memory as tensor cores take their left operand, and a thread decodes what it multiplies: no decoded weight is moved.
"""

import threading
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jmx.activations import Activation
from jmx.grouping import Blocks
from jmx.numerics.formats import WHOLE_ROW, BlockScaled, Format
from jmx.pallas.activations import in_kernel
from jmx.pallas.triton.config import Config
from jmx.pallas.triton.decode import (
    CHUNK,
    RUN,
    Groups,
    are_nan,
    column_at,
    elements,
    index_of,
    weights_by_place,
    weights_turned,
)
from jmx.pallas.triton.elements import PLACES
from jmx.pallas.triton.scale_codes import ScaleCodes, any_large, reader

Array = jax.Array

_APART = 8  # rows of a tile between gate and up of a column: tensor cores leave the sums of such rows in one thread
_INT32 = 1 << 31  # Pallas counts offsets in 32 bits, signed, in arrays of up to twice as many bytes


@dataclass(frozen=True)
class Product:
    """One of the layer's two products; static.

    Args:
        config: how it is cut.
        format: of the weight, with elements of 4 bits.
        num_rows: rows of the result.
        activation: what follows on the product plus bias; None: nothing, and then columns are split `config.split_k`
            times.
        order: of gated activations, how gate and up stand in the weight's rows.
        interpret: whether Pallas interprets the kernel, on any platform, rather than compile it.
    """

    config: Config
    format: Format
    num_rows: int
    activation: Activation | None = None
    order: str | None = None
    interpret: bool = False

    @property
    def sides(self) -> int:
        """2 for gate and up, else 1."""
        return 1 if self.order is None else 2

    @property
    def turned(self) -> bool:
        """Whether the result's columns go in the turned order: those of what is between the two products do."""
        return self.activation is not None

    @property
    def kernel_name(self) -> str:
        """As a profile shows it: block_m x block_n x block_k, warps, stages, products and parts."""
        c = self.config
        sizes = f"{c.block_m}x{c.block_n}x{c.block_k}"
        return f"jmx_grouped_product_{sizes}_warps{c.num_warps}_stages{c.num_stages}_products{c.products}_k{c.split_k}"

    def out(self, num_weight_rows: int) -> jax.ShapeDtypeStruct:
        """(parts, rows, columns): parts are to be added up; turned, columns are some more, which hold zeros."""
        if not self.turned:
            return jax.ShapeDtypeStruct((self.config.split_k, self.num_rows, num_weight_rows), jnp.float32)
        columns = pl.cdiv(num_weight_rows // self.sides, CHUNK) * CHUNK
        return jax.ShapeDtypeStruct((1, self.num_rows, columns), jnp.bfloat16)


class _Operands(NamedTuple):
    """Of `grouped_product`, as the kernel takes them.

    `scales` and `zero_points` are those of groups, `row_scales` (E, N) those of whole rows. `groups_of` (B,) says where
    each block's stand in the former two; None: where its expert does. `codes` are `scales`, as words, or None.
    """

    blocks: Blocks
    x: Any
    row_of: Any
    ids: Any
    ids_of: Any
    values: Any
    codes: ScaleCodes | None
    scales: Any
    zero_points: Any
    groups_of: Any
    row_scales: Any
    bias: Any
    tables: tuple[Any, ...]


def grouped_product(
    x: Array,
    row_of: Array | None,
    users: tuple[Array, Array] | None,
    weight: BlockScaled,
    bias: Array | None,
    blocks: Blocks,
    product: Product,
) -> Array:
    """x times each block's weight, plus its bias; rows of the result that no block computes may hold anything.

    Args:
        x: bfloat16 (rows, K rounded up), `turned`.
        row_of: int32, the row of x that is read for each row that `blocks` name; None: that row itself.
        users: where a block's rows are all tokens, the ids (T, k) that they name, and the id (B,) that each block is
            for: rows that do not name it are neither read nor computed. None: all of a block's rows are.
        weight: packed, K a multiple of 4; its order, if any, is that of x's columns already.
        bias: (E, N), floating, or None.
        blocks: arrays, see `Blocks.as_arrays`; at most `product.config.block_m` rows each.

    Returns:
        `product.out(N)`.
    """
    format, scales, zero_points, groups_of = product.format, weight.scales, weight.zero_points, None
    tables = elements(format, scales.dtype).tables if product.config.products == 1 else ()
    row_scales = weight.global_scales
    if format.block_size == WHOLE_ROW:
        scales, row_scales = None, scales[..., 0]
    codes = None if scales is None else ScaleCodes.of(scales, format, product.config.block_k)
    # Words keep within it for as long as Pallas counts so, as scales of two bytes do; single bytes do not.
    if any(array is not None and array.dtype.itemsize == 1 and array.size > _INT32 for array in (scales, zero_points)):
        scales, zero_points = (None if a is None else a[blocks.experts] for a in (scales, zero_points))
        groups_of = jnp.arange(blocks.experts.size, dtype=jnp.int32)
    blocks = blocks._replace(num_blocks=None)
    values = _words(weight.values)
    ids, ids_of = (None, None) if users is None else users
    operands = _Operands(
        blocks, x, row_of, ids, ids_of, values, codes, scales, zero_points, groups_of, row_scales, bias, tables
    )
    arrays, structure = jax.tree.flatten(operands)
    return _product.bind(*arrays, structure=structure, product=product)


class Rows(NamedTuple):
    """Of a tile: its rows of the weight (block_n,) and of x (block_m,), the part of the columns, and whether each of
    the former is inside the weight."""

    weight: Array
    x: Array
    part: Array
    inside: Array


def _words(array: Array) -> Array:
    """uint8 (..., n) -> int16 (..., n / 2), by a bitcast."""
    return lax.bitcast_convert_type(array.reshape(*array.shape[:-1], -1, 2), jnp.int16)


def _kernel(of: _Operands, out: Any, *, product: Product) -> None:
    """One tile of one block: `of` has references to the operands, by their names."""
    experts, x_rows, out_rows, counts, _ = of.blocks
    x, row_of, values = of.x, of.row_of, of.values
    config, sides, format = product.config, product.sides, product.format
    (_, num_rows, num_words), (parts, _, width) = values.shape, out.shape
    tile_n, step_words, num_threads = config.block_n // sides, config.block_k // PLACES, 32 * config.num_warps
    steps = pl.cdiv(pl.cdiv(num_words, step_words), parts)
    tile, block, part = (pl.program_id(axis) for axis in range(3))
    expert, count = experts[block], counts[block]
    groups_row = expert if of.groups_of is None else of.groups_of[block]
    side_step, row_step = (1, 2) if product.order == "interleaved" else (num_rows // sides, 1)

    def columns(nth: Array) -> Array:
        """The tile's columns, of the weight's rows; those from num_rows / sides on are not there."""
        index = tile * tile_n + nth
        return column_at(index) if product.turned else index

    @pl.when(count > 0)
    def _() -> None:
        row, nth = jnp.arange(config.block_m), jnp.arange(config.block_n)
        side = 0
        if sides == 2:
            side, nth = nth // _APART % 2, nth // (2 * _APART) * _APART + nth % _APART
        column = columns(nth)
        here, inside = row < count, column < num_rows // sides
        weight_row = side * side_step + row_step * column
        if of.ids is not None:
            here &= _names(of.ids, row, of.ids_of[block])
        x_row = x_rows[block] + row
        if row_of is not None:
            x_row = plgpu.load(row_of.at[x_row], mask=here, other=0)
        entries = [plgpu.load(table.at[jnp.arange(table.size)]) for table in of.tables]

        def of_groups(rows: Rows, array: Any, step: Array, later: int = 0) -> Array:
            """(block_n, groups) of an array (E, N, groups): those of the words of a step, or of a later one."""
            first, number = _groups_of_step(step, later, step_words, format)
            # Of one group Triton moves a column to the threads that need it where it has but one dimension. One that
            # has less than an element a thread it may have all of them load over and over, and so it comes repeated.
            times = num_threads // config.block_n
            if number == 1 and times <= 1:
                mask = rows.inside & (first < array.shape[2])
                return plgpu.load(array.at[groups_row, rows.weight, first], mask=mask, other=0)[:, None]
            group = first + (jnp.arange(number) if number > 1 else jnp.zeros(times, jnp.int32))
            mask = rows.inside[:, None] & (group < array.shape[2])[None, :]
            return plgpu.load(array.at[groups_row, rows.weight[:, None], group[None, :]], mask=mask, other=0)

        def multiplied(sums: Array, rows: Rows, step: Array, groups: Groups) -> Array:
            """Sums and a step's products."""
            word = step * step_words + jnp.arange(step_words)
            mask = rows.inside[:, None] & (word < num_words)[None, :]
            words = plgpu.load(values.at[expert, rows.weight[:, None], word[None, :]], mask=mask, other=0)
            if config.products == 1:
                weights = [weights_turned(words, groups, format, product.interpret, entries)]
                indices = [step * config.block_k + jnp.arange(config.block_k)]
            else:
                weights = weights_by_place(words, groups, format, product.interpret)
                indices = [plgpu.max_contiguous(pl.multiple_of(index_of(p, word), RUN), RUN) for p in range(PLACES)]
            for weight, index in zip(weights, indices, strict=True):
                mask = (index < x.shape[1])[:, None] & here[None, :]
                tokens = plgpu.load(x.at[rows.x[None, :], index[:, None]], mask=mask, other=0)
                sums += jnp.dot(weight, tokens, preferred_element_type=jnp.float32)
            return sums

        def by_blocks(rows: Rows, loop: Any) -> Array:
            """The tile's sums, whatever its blocks' scales."""

            def step(index: Array, state: tuple[Array, Any]) -> tuple[Array, Any]:
                sums, look_ahead = state
                step = rows.part * steps + index
                groups = (None if a is None else of_groups(rows, a, step) for a in (of.scales, of.zero_points))
                sums = multiplied(sums, rows, step, Groups(*groups))
                if look_ahead is None:
                    return sums, None
                # The next step's are asked for now, to be in the cache by then; they may be too narrow for pipelines.
                bad, ahead = look_ahead
                return sums, (bad | are_nan(ahead, format), of_groups(rows, of.scales, step, later=1))

            look_ahead = None
            if of.scales is not None and of.scales.dtype == jnp.uint8:
                codes = of_groups(rows, of.scales, rows.part * steps)
                look_ahead = jnp.zeros(codes.shape, jnp.bool_), codes
            sums, look_ahead = loop(steps, step, (zeros, look_ahead))
            if look_ahead is not None:
                sums = jnp.where(jnp.max(look_ahead[0].astype(jnp.int32), axis=1)[:, None] > 0, jnp.nan, sums)
            return sums

        def by_words(rows: Rows, codes: ScaleCodes) -> Array:
            """As `by_blocks`, by words of codes, and by blocks where these do not suffice."""
            groups = num_words * PLACES // format.block_size
            read = reader(codes, expert, rows.weight, groups, num_threads, product.interpret)

            def step(index: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
                sums, every = state
                step = rows.part * steps + index
                factors, words = read(step)
                return multiplied(sums, rows, step, Groups(factors, None)), every | words

            every = jnp.zeros_like(jax.eval_shape(read, jnp.int32(0))[1])
            sums, every = lax.fori_loop(0, steps, step, (zeros, every))
            # 0, which is not known to compilers: what both loops compute of the same rows would stay in registers.
            zero = codes.shifts[jnp.int32(0)]
            again = Rows(rows.weight + zero, rows.x + zero, rows.part + zero, column + zero < num_rows // sides)
            return lax.cond(any_large(every), lambda: by_blocks(again, _counted_down), lambda: sums)

        zeros = jnp.zeros((config.block_n, config.block_m), jnp.float32)
        rows = Rows(weight_row, x_row, part, inside)
        with jax.named_scope("mainloop"):
            sums = by_blocks(rows, partial(lax.fori_loop, 0)) if of.codes is None else by_words(rows, of.codes)

        def of_rows(array: Any) -> Array:
            return plgpu.load(array.at[expert, weight_row], mask=inside, other=0).astype(jnp.float32)

        with jax.named_scope("epilogue"):
            if of.row_scales is not None:
                sums *= of_rows(of.row_scales)[:, None]
            if of.bias is not None:
                sums += jnp.where(part == 0, of_rows(of.bias), 0)[:, None]
            y = _activated(sums, product)
            nth = jnp.arange(tile_n)
            y = jnp.where(columns(nth)[:, None] < num_rows // sides, y, 0)
            index = tile * tile_n + nth
            at = (part, out_rows[block] + row[:, None], index[None, :])
            plgpu.store(out.at[at], y.T.astype(out.dtype), mask=here[:, None] & (index < width)[None, :])


def _names(ids: Any, row: Array, id: Array) -> Array:
    """Which rows of `ids` (T, k), from `row` (N,), have `id`, bool (N,)."""
    num_tokens, top_k = ids.shape
    named = jnp.zeros(row.shape, jnp.bool_)
    for slot in range(top_k):
        named |= plgpu.load(ids.at[row, slot], mask=row < num_tokens, other=-1) == id
    return named


def _counted_down(steps: int, step: Any, state: Any) -> Any:
    """`lax.fori_loop` from 0, in a form that Triton does not pipeline, and so neither unrolls nor gives memory."""

    def body(counted: tuple[Array, Any]) -> tuple[Array, Any]:
        left, state = counted
        return left - 1, step(steps - left, state)

    return lax.while_loop(lambda counted: counted[0] > 0, body, (jnp.int32(steps), state))[1]


def _groups_of_step(step: Array, later: int, step_words: int, format: Format) -> tuple[Array, int]:
    """The first of the groups that step + later has words of, and how many it has."""
    if format.block_size == WHOLE_ROW:
        return jnp.int32(0), 1
    group_words = format.block_size // PLACES
    if group_words > step_words:
        return lax.div(step + later, jnp.int32(group_words // step_words)), 1
    number = step_words // group_words
    return step * number + later * number, number  # so that it takes no counter of its own


def _activated(sums: Array, product: Product) -> Array:
    """The product's activation of the sums of a tile (block_n, block_m), one row a column."""
    if product.activation is None:
        return sums
    terms = [sums]
    if product.sides == 2:
        pairs = sums.reshape(-1, 2, _APART, sums.shape[1]).transpose(0, 2, 3, 1)
        terms = [half.reshape(-1, sums.shape[1]) for half in lax.split(pairs, (1, 1), 3)]
    y = in_kernel(product.activation)(*terms)
    for term in terms:  # of a NaN and a number Triton's minimum and maximum are the number
        y = jnp.where(term == term, y, jnp.nan)
    return y


def _call(*arrays: Array, structure: Any, product: Product) -> Array:
    config, operands = product.config, structure.unflatten(arrays)
    out = product.out(operands.values.shape[1])
    parts, _, width = out.shape
    tiles = pl.cdiv(width, config.block_n // product.sides)
    return pl.pallas_call(
        partial(_kernel, product=product),
        out_shape=out,
        grid=(tiles, operands.blocks.experts.size, parts),  # the first one runs fastest: a block's rows stay in L2
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=product.interpret,
        name=product.kernel_name,
    )(operands)


# A primitive of its own, since it is on lowering that Pallas warns, long after a trace has left this file; and only
# here is it known that the kernel is ours. Filters are the process's: threads take turns.
_product = Primitive("jmx_triton_grouped_product")
_turn = threading.Lock()


@_product.def_abstract_eval
def _shape(*arrays: Any, structure: Any, product: Product) -> Any:
    out = product.out(structure.unflatten(arrays).values.shape[1])
    return ShapedArray(out.shape, out.dtype)


def _lower(context: Any, *arrays: Any, **static: Any) -> Any:
    with _turn, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return mlir.lower_fun(partial(_call, **static), multiple_results=False)(context, *arrays)


mlir.register_lowering(_product, _lower)
