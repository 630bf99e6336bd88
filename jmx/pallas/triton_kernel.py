"""A grouped product with 4-bit weights in Pallas Triton: each block's rows times the weight of its expert.

A tile is some rows of the weight by a block of rows of x, computed transposed: the weight is the left operand, so that
few rows of x meet the axis that tensor cores cut finest. Weights are read as words of 16 bits, four elements each. The
kernel never interleaves the four: element p of each word meets every fourth column of x, from column p on, so a step
of the loop is four products. x comes, and what the first product gives goes, in this order: (rows, 4, columns / 4).
"""

import threading
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

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

Array = jax.Array

PHASES = 4  # elements of a word
_GROUP = 8  # words that share a scale
_NAN = 255  # scale code
# The bits of an element, where float16 has its sign, the end of its exponent, and the beginning of its mantissa. Read
# as float16 they are 2^-14 times the element, subnormal where the element is, and float32 holds all of them as normal.
_BITS = 0x8E00 - 0x10000
_EXPONENT = 127 - 14


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


def grouped_product(x: Array, weight: BlockScaled, bias: Array | None, blocks: Blocks, product: Product) -> Array:
    """x times each block's weight, plus its bias; rows of the result that are in no block may hold anything.

    Args:
        x: bfloat16 (rows, PHASES, K / PHASES), column c of phase p being column PHASES * c + p.
        weight: packed (E, N, K / 2) and (E, N, K / 32).
        bias: (E, N), floating, or None.
        blocks: arrays, see `Blocks.as_arrays`; at most `product.config.block_m` rows each.

    Returns:
        `product.out(N)`.
    """
    num_experts, n, _ = weight.scales.shape
    # Words also keep offsets within 32 bits up to 4 GiB, from where on Pallas takes 64: those of bytes would not be.
    values = _words(weight.values).reshape(num_experts, n, -1, _GROUP)
    scales = _words(weight.scales.reshape(num_experts, -1))
    biases = () if bias is None else (bias,)
    return _product.bind(*blocks[:4], x, values, scales, *biases, product=product)


def _words(array: Array) -> Array:
    """uint8 (..., n) -> int16 (..., n / 2), by a bitcast."""
    return lax.bitcast_convert_type(array.reshape(*array.shape[:-1], -1, 2), jnp.int16)


def _kernel(experts: Any, x_rows: Any, out_rows: Any, counts: Any, x: Any, values: Any, scales: Any, *rest: Any,
            product: Product) -> None:  # fmt: skip
    *biases, out = rest
    config, sides = product.config, product.sides
    (_, num_rows, groups, _), (parts, _, phases, columns) = values.shape, out.shape
    tile_n, step_groups = config.block_n // sides, config.block_k // (PHASES * _GROUP)
    steps = pl.cdiv(pl.cdiv(groups, step_groups), parts)
    part, block, tile = (pl.program_id(axis) for axis in range(3))
    tiles = pl.cdiv(columns, tile_n)
    phase = lax.div(tile, tiles)
    expert, count = experts[block], counts[block]
    side_step, row_step = (1, 2) if product.order == "interleaved" else (num_rows // sides, 1)

    @pl.when(count > 0)
    def _() -> None:
        row = jnp.arange(config.block_m)
        column = lax.rem(tile, tiles) * tile_n + jnp.arange(tile_n)
        here, inside = row < count, column < columns
        weight_rows = [side * side_step + row_step * (column * phases + phase) for side in range(sides)]

        def codes(first: Array) -> tuple[Array, ...]:
            """Scale codes of the groups from `first` on."""
            group = first + jnp.arange(step_groups)
            mask = inside[:, None] & (group < groups)[None, :]
            place = [rows[:, None] * groups + group[None, :] for rows in weight_rows]
            pairs = [plgpu.load(scales.at[expert, at >> 1], mask=mask, other=0).astype(jnp.int32) for at in place]
            return tuple((pair >> 8 * (at & 1)) & 0xFF for pair, at in zip(pairs, place, strict=True))

        def step(index: Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
            first = (part * steps + index) * step_groups
            sums, here_codes = state
            next_codes = codes(first + step_groups)  # too narrow for the pipeline: asked for a step ahead instead
            group, word = first + jnp.arange(step_groups), jnp.arange(_GROUP)
            k = first * _GROUP + jnp.arange(step_groups * _GROUP)
            mask = here[:, None] & (k < groups * _GROUP)[None, :]
            at = x_rows[block] + row[:, None]
            xs = [plgpu.load(x.at[at, p, k[None, :]], mask=mask, other=0).T for p in range(PHASES)]
            mask = inside[:, None, None] & (group < groups)[None, :, None]
            sums = list(sums)
            for side, rows in enumerate(weight_rows):
                at = (expert, rows[:, None, None], group[None, :, None], word[None, None, :])
                words = plgpu.load(values.at[at], mask=mask, other=0).astype(jnp.int32)
                for p in range(PHASES):
                    weight = _decoded(words, p, here_codes[side][:, :, None]).reshape(tile_n, -1)
                    sums[side] += jnp.dot(weight, xs[p], preferred_element_type=jnp.float32)
            return tuple(sums), next_codes

        zeros = (jnp.zeros((tile_n, config.block_m), jnp.float32),) * sides
        sums, _ = lax.fori_loop(0, steps, step, (zeros, codes(part * steps * step_groups)))
        if biases:
            terms = [plgpu.load(biases[0].at[expert, rows], mask=inside, other=0) for rows in weight_rows]
            terms = [jnp.where(part == 0, term.astype(jnp.float32), 0) for term in terms]
            sums = [total + term[:, None] for total, term in zip(sums, terms, strict=True)]
        if product.activation is None:
            (y,) = sums
        else:
            y = in_kernel(product.activation)(*sums)
            for total in sums:  # of a NaN and a number Triton's minimum and maximum are the number
                y = jnp.where(total == total, y, jnp.nan)
        at = (part, out_rows[block] + row[:, None], phase, column[None, :])
        plgpu.store(out.at[at], y.T.astype(out.dtype), mask=here[:, None] & inside[None, :])


def _decoded(words: Array, place: int, code: Array) -> Array:
    """The element at `place` of each word times 2^(code - 127), NaN for code 255: bfloat16, exact where it has it.

    The power is two factors, neither of which nor their products with an element leave the normal numbers before the
    result does.
    """
    bits = (((words << 28 - 4 * place) >> 19) & _BITS).astype(jnp.int16)
    element = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
    half = (code - _EXPONENT) >> 1
    low, high = (lax.bitcast_convert_type(power + 127 << 23, jnp.float32) for power in (half, code - _EXPONENT - half))
    return (element * low * jnp.where(code == _NAN, jnp.nan, high)).astype(jnp.bfloat16)


def _call(*arrays: Array, product: Product) -> Array:
    config, num_blocks = product.config, arrays[0].size
    out = product.out(arrays[5].shape[1])
    parts, _, phases, columns = out.shape
    tiles = pl.cdiv(columns, config.block_n // product.sides)
    return pl.pallas_call(
        partial(_kernel, product=product),
        out_shape=out,
        grid=(parts, num_blocks, phases * tiles),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=product.interpret,
        name="jmx_grouped_product",
    )(*arrays)


# A primitive of its own, since it is on lowering that Pallas warns, long after a trace has left this file; and only
# here is it known that the kernel is ours. Filters are the process's: threads take turns.
_product = Primitive("jmx_triton_grouped_product")
_turn = threading.Lock()


@_product.def_abstract_eval
def _shape(*arrays: Any, product: Product) -> Any:
    out = product.out(arrays[5].shape[1])
    return ShapedArray(out.shape, out.dtype)


def _lower(context: Any, *arrays: Any, product: Product) -> Any:
    with _turn, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return mlir.lower_fun(partial(_call, product=product), multiple_results=False)(context, *arrays)


mlir.register_lowering(_product, _lower)
