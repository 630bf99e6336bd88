"""A grouped product with 4-bit weights in Pallas Triton: each block's rows times the weight of its expert.

A tile is some rows of the weight by a block of rows of x, computed transposed: the weight is the left operand, so that
few rows of x meet the axis that tensor cores cut finest. Weights are read as words of 16 bits, four elements each. The
kernel never interleaves the four: element p of each word meets every fourth column of x, from column p on, so a step
of the loop is four products. x comes, and what the first product gives goes, in this order: (rows, 4, columns / 4).

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
from jmx.formats import BlockScaled
from jmx.grouping import Blocks
from jmx.pallas.activations import in_kernel
from jmx.pallas.triton_config import Config
from jmx.pallas.triton_decode import PHASES, decoded

Array = jax.Array

_GROUP = 8  # words that share a scale
_NAN = 255  # scale code
_INT32 = 1 << 31  # Pallas counts offsets in 32 bits, signed, in arrays of up to twice as many bytes


@dataclass(frozen=True)
class Product:
    """One of the layer's two products; static.

    Args:
        config: how it is cut.
        num_rows: rows of the result.
        activation: what follows on the product plus bias; None: nothing, and then columns are split `config.split_k`
            times.
        order: of gated activations, how gate and up stand in the weight's rows.
        interpret: whether Pallas interprets the kernel, on any platform, rather than compile it.
    """

    config: Config
    num_rows: int
    activation: Activation | None = None
    order: str | None = None
    interpret: bool = False

    @property
    def sides(self) -> int:
        """2 for gate and up, else 1."""
        return 1 if self.order is None else 2

    def out(self, num_weight_rows: int) -> jax.ShapeDtypeStruct:
        """(parts, rows, phases, columns): parts are to be added up; column c of phase p is column phases * c + p."""
        if self.activation is None:
            return jax.ShapeDtypeStruct((self.config.split_k, self.num_rows, 1, num_weight_rows), jnp.float32)
        columns = num_weight_rows // self.sides // PHASES
        return jax.ShapeDtypeStruct((1, self.num_rows, PHASES, columns), jnp.bfloat16)


class _Operands(NamedTuple):
    """Of `grouped_product`, as the kernel takes them. `places` (B,): where each block's scales stand in `scales`."""

    blocks: Blocks
    x: Any
    row_of: Any
    values: Any
    scales: Any
    places: Any
    bias: Any


def grouped_product(
    x: Array, row_of: Array | None, weight: BlockScaled, bias: Array | None, blocks: Blocks, product: Product
) -> Array:
    """x times each block's weight, plus its bias; rows of the result that are in no block may hold anything.

    Args:
        x: bfloat16 (rows, PHASES, K / PHASES), column c of phase p being column PHASES * c + p.
        row_of: int32, the row of x that is read for each row that `blocks` name; None: that row itself.
        weight: packed (E, N, K / 2) and (E, N, K / 32).
        bias: (E, N), floating, or None.
        blocks: arrays, see `Blocks.as_arrays`; at most `product.config.block_m` rows each.

    Returns:
        `product.out(N)`.
    """
    scales, places = weight.scales, None
    if scales.size > _INT32:  # words of values keep within it for as long as Pallas counts so; bytes of scales do not
        scales, places = scales[blocks.experts], jnp.arange(blocks.experts.size, dtype=jnp.int32)
    operands = _Operands(blocks._replace(num_blocks=None), x, row_of, _words(weight.values), scales, places, bias)
    arrays, structure = jax.tree.flatten(operands)
    return _product.bind(*arrays, structure=structure, product=product)


def _words(array: Array) -> Array:
    """uint8 (..., n) -> int16 (..., n / 2), by a bitcast."""
    return lax.bitcast_convert_type(array.reshape(*array.shape[:-1], -1, 2), jnp.int16)


def _kernel(*refs: Any, structure: Any, product: Product) -> None:
    out = refs[-1]
    (experts, x_rows, out_rows, counts, _), x, row_of, values, scales, places, bias = structure.unflatten(refs[:-1])
    config, sides = product.config, product.sides
    (_, num_rows, groups), (parts, _, phases, width) = scales.shape, out.shape
    tile_n, step_groups = config.block_n // sides, config.block_k // (PHASES * _GROUP)
    steps = pl.cdiv(pl.cdiv(groups, step_groups), parts)
    tile, block, part = (pl.program_id(axis) for axis in range(3))
    expert, count = experts[block], counts[block]
    place = expert if places is None else places[block]
    side_step, row_step = (1, 2) if product.order == "interleaved" else (num_rows // sides, 1)

    def columns(nth: Array) -> tuple[Array, Array, Array]:
        """Of the tile's columns: their phases, where they stand in those, and the columns themselves."""
        run = tile_n // phases
        phase, index = nth // run, tile * run + nth % run
        return phase, index, phases * index + phase

    @pl.when(count > 0)
    def _() -> None:
        row, nth = jnp.arange(config.block_m), jnp.arange(config.block_n)
        # Gate and up of a column are eight rows apart: tensor cores leave such rows' sums in one thread.
        side, nth = (nth >> 3 & 1, nth >> 4 << 3 | nth & 7) if sides == 2 else (0, nth)
        column = columns(nth)[2]
        here, inside = row < count, column < phases * width
        weight_row = side * side_step + row_step * column
        x_row = x_rows[block] + row
        if row_of is not None:
            x_row = plgpu.load(row_of.at[x_row], mask=here, other=0)

        def codes(first: Array) -> Array:
            """Scale codes of the groups from `first` on."""
            group = first + jnp.arange(step_groups)
            mask = inside[:, None] & (group < groups)[None, :]
            return plgpu.load(scales.at[place, weight_row[:, None], group[None, :]], mask=mask, other=0)

        def step(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            sums, worst, ahead = state
            first = (part * steps + index) * step_groups
            word = first * _GROUP + jnp.arange(step_groups * _GROUP)
            within = word < groups * _GROUP
            mask = within[:, None] & here[None, :]
            xs = [plgpu.load(x.at[x_row[None, :], p, word[:, None]], mask=mask, other=0) for p in range(PHASES)]
            mask = inside[:, None] & within[None, :]
            words = plgpu.load(values.at[expert, weight_row[:, None], word[None, :]], mask=mask, other=0)
            for weight, columns_of_x in zip(decoded(words, codes(first), product.interpret), xs, strict=True):
                sums += jnp.dot(weight, columns_of_x, preferred_element_type=jnp.float32)
            # The next step's codes are asked for now, to be in the cache by then; they are too narrow for the pipeline.
            return sums, jnp.maximum(worst, ahead.astype(jnp.int32)), codes(first + step_groups)

        sums = jnp.zeros((config.block_n, config.block_m), jnp.float32)
        ahead = codes(part * steps * step_groups)
        sums, worst, _ = lax.fori_loop(0, steps, step, (sums, jnp.zeros(ahead.shape, jnp.int32), ahead))
        if bias is not None:
            term = plgpu.load(bias.at[expert, weight_row], mask=inside, other=0)
            sums += jnp.where(part == 0, term.astype(jnp.float32), 0)[:, None]
        bad = jnp.max(worst, axis=1) == _NAN
        sums = jnp.where(bad[:, None], jnp.nan, sums)
        y = sums
        if product.activation is not None:
            terms = [sums]
            if sides == 2:
                pairs = sums.reshape(-1, 2, 8, config.block_m).transpose(0, 2, 3, 1)
                terms = [half.reshape(tile_n, config.block_m) for half in lax.split(pairs, (1, 1), 3)]
            y = in_kernel(product.activation)(*terms)
            for term in terms:  # of a NaN and a number Triton's minimum and maximum are the number
                y = jnp.where(term == term, y, jnp.nan)
        phase, index, column = columns(jnp.arange(tile_n))
        at = (part, out_rows[block] + row[:, None], phase[None, :], index[None, :])
        plgpu.store(out.at[at], y.T.astype(out.dtype), mask=here[:, None] & (column < phases * width)[None, :])


def _call(*arrays: Array, structure: Any, product: Product) -> Array:
    config, operands = product.config, structure.unflatten(arrays)
    out = product.out(operands.values.shape[1])
    parts, _, phases, width = out.shape
    tiles = pl.cdiv(phases * width, config.block_n // product.sides)
    return pl.pallas_call(
        partial(_kernel, structure=structure, product=product),
        out_shape=out,
        grid=(tiles, operands.blocks.experts.size, parts),  # the first one runs fastest: a block's rows stay in L2
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=product.interpret,
        name="jmx_grouped_product",
    )(*arrays)


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
