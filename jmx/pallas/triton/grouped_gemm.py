"""Grouped GEMM with 4-bit weights in Pallas Triton: each block's rows times the weight of its expert.

This module has the call: operands, configuration, launch. `kernel` computes one tile.
"""

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

from jmx.grouping import Blocks
from jmx.numerics.formats import WHOLE_ROW, BlockScaled
from jmx.pallas.quiet import lower_quietly
from jmx.pallas.triton.kernel import kernel
from jmx.pallas.triton.product import Operands, Product
from jmx.pallas.triton.scale_codes import ScaleCodes
from jmx.util.typing import AnyArray, Array, Float, Int16, Int32, UInt8

_MAX_INT32_BYTES = 1 << 31  # Pallas has signed 32-bit offsets for arrays of up to twice as many bytes


def grouped_product(
    x: Float[Array, "rows K"],
    row_of: Int32[Array, " R"] | None,
    users: tuple[Int32[AnyArray, "T k"], Int32[Array, " B"]] | None,
    weight: BlockScaled,
    bias: Float[AnyArray, "E N"] | None,
    blocks: Blocks,
    product: Product,
) -> Float[Array, "P out_rows columns"]:
    """x times each block's weight, plus its bias. Rows of the result that are in no block are undefined.

    Args:
        x: bfloat16 (rows, K rounded up), columns permuted (`decode.permute_columns`).
        row_of: int32, the row of x for each row of blocks; None: that row itself.
        users: for blocks whose rows are all tokens: the tokens' expert ids (T, k) and each block's expert id (B,). Only
            tokens with the block's id are read and computed. None: all rows of each block are.
        weight: packed, K a multiple of 4. If it has a column order, x is in that order already.
        bias: (E, N), floating, or None.
        blocks: as arrays (`Blocks.as_arrays`), of at most `product.config.block_m` rows each.

    Returns:
        `product.out(N)`.
    """
    format, config = product.format, product.config
    scales, zero_points, params_of = weight.scales, weight.zero_points, None
    row_scales = weight.global_scales
    if format.block_size == WHOLE_ROW:
        scales, row_scales = None, scales[..., 0]
    codes = None if scales is None else ScaleCodes.of(scales, format, config.block_k)
    # Arrays of two-byte elements never overflow Pallas's offsets; single bytes do, so those of blocks are copied.
    if any(a is not None and a.dtype.itemsize == 1 and a.size > _MAX_INT32_BYTES for a in (scales, zero_points)):
        scales, zero_points = (None if a is None else a[blocks.experts] for a in (scales, zero_points))
        params_of = jnp.arange(blocks.experts.size, dtype=jnp.int32)
    ids, block_ids = (None, None) if users is None else users
    operands = Operands(
        blocks=blocks._replace(num_blocks=None),
        x=x,
        row_of=row_of,
        ids=ids,
        block_ids=block_ids,
        num_whole=(blocks.counts >= config.block_m).sum(dtype=jnp.int32)[None] if config.narrow_m else None,
        values=_as_words(weight.values),
        codes=codes,
        scales=scales,
        zero_points=zero_points,
        params_of=params_of,
        row_scales=row_scales,
        bias=bias,
    )
    arrays, structure = jax.tree.flatten(operands)
    return _product.bind(*arrays, structure=structure, product=product)


def _as_words(values: UInt8[Array, "E N n"]) -> Int16[Array, "E N words"]:
    return lax.bitcast_convert_type(values.reshape(*values.shape[:-1], -1, 2), jnp.int16)


def _call(*arrays: Array, structure: Any, product: Product) -> Float[Array, "P R columns"]:
    operands = structure.unflatten(arrays)
    tiles, out = product.tiles, None
    for each, smaller in zip(tiles, [*tiles[1:], None], strict=True):
        out = _launch(operands, out, each, 0 if smaller is None else smaller.config.block_m)
    assert out is not None
    return out


def _launch(
    operands: Operands, before: Float[Array, "P R columns"] | None, product: Product, more_than: int
) -> Float[Array, "P R columns"]:
    """The tiles of blocks of more than `more_than` rows, beside those that are there `before`.

    The first launch has a CTA for a tile of every block, if only to find that there is none; others, whose blocks are
    the last ones of experts, for as many blocks as there are experts.
    """
    config = product.config
    out = product.out(operands.values.shape[1])
    parts, _, width = out.shape
    tiles, blocks = pl.cdiv(width, config.block_n // product.halves), operands.blocks.experts.size
    if before is not None:
        blocks = min(blocks, product.num_experts)
    return pl.pallas_call(
        partial(kernel, product=product, more_than=more_than, after_whole=before is not None),
        out_shape=out,
        grid=(tiles, blocks, parts),  # the first varies fastest: a block's rows stay in L2
        input_output_aliases={} if before is None else {len(jax.tree.leaves(operands)): 0},
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=product.interpret,
        name=product.kernel_name,
    )(operands, before)


# A primitive, so that it is lowered without Pallas' warning.
_product = Primitive("jmx_triton_grouped_product")


@_product.def_abstract_eval
def _abstract_product(*arrays: Any, structure: Any, product: Product) -> Any:
    out = product.out(structure.unflatten(arrays).values.shape[1])
    return ShapedArray(out.shape, out.dtype)


def _lower(context: Any, *arrays: Any, **static: Any) -> Any:
    return lower_quietly(partial(_call, **static), context, *arrays)


mlir.register_lowering(_product, _lower)
