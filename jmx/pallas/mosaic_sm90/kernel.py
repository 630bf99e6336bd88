"""Both grouped GEMMs of the experts on Hopper, in one persistent Pallas Mosaic GPU kernel.

For each block of rows of one expert it computes h = activation(gate_up @ x + bias) and then down @ h + bias. Results
are computed transposed: tiles of the weight are the tensor cores' operand A, dequantized in registers, and a block of
at most 256 rows is operand B. So ragged groups are on the axis that is tiled by 8. Blocks of up to 32 rows are
multiplied by mma.sync, larger ones by wgmma.

The kernel is persistent: one CTA per SM strides over work items, each a block of rows by `warpgroups_m` tiles of weight
rows. One producer warp copies weights and another one rows (TMA) into the pipeline's stages, across work items;
consumer warpgroups wait for a stage, dequantize, multiply, and release it. `sm90.pipeline` has the waits and releases,
`producer` what is copied into a stage, `consumer` what is done with it, and `scheduler` the work items.

    weights    | W0 | W1 | W2 | ...                             full_barriers[slot] -->
    rows       | X0 | X1 | X2 | ...                             full_barriers[slot] -->
    consumers  | wait 0 | dequantize 0 | wgmma 0 | wait 1 | dequantize 1 (under wgmma 0) | wgmma 1 | ...
                                                                empty_barriers[slot] -->

The second GEMM of a block needs all of its rows of h from the first. Counters in global memory signal when these are
written: only the warp that copies rows waits for them, while stages are filled with weights. So memory is never idle in
between.

docs/internals/mosaic_sm90.md has a drawing, and what bounds the kernel.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmx.grouping import Blocks
from jmx.pallas.mosaic_sm90.config import Config
from jmx.pallas.mosaic_sm90.consumer import consume
from jmx.pallas.mosaic_sm90.dequantize import decoder_of
from jmx.pallas.mosaic_sm90.fused_rounding import COUNTERS, Rounding, RowRounder
from jmx.pallas.mosaic_sm90.grouped_gemm import Gemm, Product, SharedMemory, operands_of
from jmx.pallas.mosaic_sm90.layout import Tile
from jmx.pallas.mosaic_sm90.producer import copy_rows, copy_weights
from jmx.pallas.mosaic_sm90.rounded_tiles import TileRounder
from jmx.pallas.mosaic_sm90.scheduler import Schedule, schedules
from jmx.pallas.sm90.gemm import Operands
from jmx.pallas.sm90.launch import launch, persistent_kernel, specialize
from jmx.pallas.sm90.operation import Ref
from jmx.pallas.sm90.scheduler import Share
from jmx.pallas.sm90.tiles import GATED_ROWS, TILE
from jmx.util.typing import Array, Float


def expert_products(
    x: Float[Array, "X K"],
    gate_up: Product,
    down: Product,
    blocks: Blocks,
    *,
    config: Config,
    num_rows: int,
    num_cores: int,
    rounding: Rounding | None = None,
) -> Float[Array, "parts_rows N"]:
    """Both products of each block of rows.

    Args:
        x: bfloat16. K is the number of columns of `gate_up`, a multiple of 64. Blocks may read past its end.
        gate_up, down: see `Product`. The result of `gate_up` has as many columns as the weight of `down`.
        blocks: `x_rows` are multiples of 8. All blocks must have a valid expert id; only the first `num_blocks`, an int
            or here an array (B,) of equal numbers, are computed.
        num_rows: R, rows of the result. Rows that belong to no block are not written: their contents are undefined.
        num_cores: CTAs, at most the number of SMs: all of them must be resident, since they wait for each other's h.
        rounding: how h is rounded in between; None: not.

    Returns:
        (config.split_k * R, down.rows.num_outputs) of down's dtype: the parts, one below the other.
    """
    tile_columns = TILE if gate_up.rows.gate_up_order is None else GATED_ROWS
    both = schedules(config, _tiles(gate_up), _tiles(down), tile_columns, blocks.experts.size, num_cores)
    return _products(x, (gate_up, down), both, blocks, config, num_rows, num_cores, rounding)


def one_product(
    x: Float[Array, "X K"],
    product: Product,
    blocks: Blocks,
    *,
    split_k: int,
    config: Config,
    num_rows: int,
    num_cores: int,
) -> Float[Array, "parts_rows N"]:
    """One product alone, in `split_k` parts; the arguments and the result are otherwise those of `expert_products`."""
    m_tiles, k_tiles = _tiles(product)
    schedule = Schedule(config, m_tiles, k_tiles, split_k, -(-m_tiles // config.warpgroups_m))
    return _products(x, (product,), (schedule,), blocks, config, num_rows, num_cores)


def _tiles(product: Product) -> tuple[int, int]:
    """Tiles along the rows and the columns of a product's weight, or of its transpose."""
    values = product.weight.values
    tiles = values.shape[1], values.shape[2] // Tile.of(product.format).value_rows
    return tiles[::-1] if product.transposed else tiles


def _products(
    x: Float[Array, "X K"],
    products: tuple[Product, ...],
    all_schedules: tuple[Schedule, ...],
    blocks: Blocks,
    config: Config,
    num_rows: int,
    num_cores: int,
    rounding: Rounding | None = None,
) -> Float[Array, "parts_rows N"]:
    """The last of one or two products, of which the second one reads the result of the first."""
    first = products[0]
    decoder = decoder_of(first.format, first.weight.scales.dtype)

    def body(
        x: Ref,
        operands: tuple[Operands, ...],
        block_refs: Blocks,
        written: Ref,
        static: Ref,
        outs: Sequence[Ref],
        rounded: Sequence[Ref],
        *,
        shared: SharedMemory,
    ) -> None:
        work = blocks.with_refs(block_refs)
        warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("core")
        num_blocks = work.number
        row_rounder = tile_rounder = None
        if rounding is not None and rounding.by_tile:
            maxima = shared.warp_maxima.at[warpgroup]
            tile_rounder = TileRounder(format=rounding.format, static=static, maxima=maxima)
        elif rounding is not None:
            row_rounder = RowRounder.of(rounding, outs[0], rounded, static=static, counted=written)
            if row_rounder.scales is not None:
                operands = operands[0], operands[1]._replace(row_scales=row_rounder.scales)

        def gemms() -> Iterator[Gemm]:
            """Each role of a warp computes the scalars of its GEMMs itself, in its own branch."""
            start, before, rows, x_rows = Share.begin(cta), None, x, work.x_rows
            for nth, (product, schedule) in enumerate(zip(products, all_schedules, strict=True)):
                share = Share.of(start, schedule.num_items(num_blocks), schedule.item_stages, num_cores)
                is_read = nth + 1 < len(products)
                yield Gemm(
                    product=product,
                    schedule=schedule,
                    share=share,
                    operands=operands[nth],
                    x=rows,
                    out=outs[nth],
                    x_rows=x_rows,
                    before=before,
                    is_read=is_read,
                    row_rounder=row_rounder,
                    tile_rounder=tile_rounder if is_read else None,
                    config=config,
                    decoder=decoder,
                    blocks=work,
                    num_blocks=num_blocks,
                    num_rows=num_rows,
                    written=written,
                    shared=shared,
                    warpgroup=warpgroup,
                )
                if is_read:
                    start, before, x_rows = share.end(overrun_first=True), schedule, work.out_rows
                    rows = outs[nth] if row_rounder is None else row_rounder.values

        def each(function: Callable[[Gemm], None]) -> None:
            for gemm in gemms():
                with jax.named_scope(_scope(gemm.product)):
                    function(gemm)

        specialize(warpgroup, config, lambda: each(consume), lambda: each(copy_weights), lambda: each(copy_rows))

    operands = tuple(map(operands_of, products))
    words = 0 if rounding is None else rounding.words(config.block_n)
    shared = SharedMemory.of(config, operands[0], decoder.tile, x.dtype, transposed=first.transposed, words=words)
    name = "mosaic_transposed" if first.transposed else "mosaic"
    outputs = [
        jax.ShapeDtypeStruct((schedule.num_parts * num_rows, product.stored.num_outputs), product.dtype)
        for product, schedule in zip(products, all_schedules, strict=True)
    ]
    kernel = persistent_kernel(body, name, config, num_cores, _with_rounded(outputs, rounding, num_rows), shared)
    zeros, static = blocks.zeros, None
    if rounding is not None:
        zeros = jnp.pad(zeros, (0, max(0, COUNTERS - zeros.size)))
        static = None if rounding.static_scale is None else rounding.static_scale.reshape(1)
    results, _ = launch(kernel, x, operands, blocks.arrays, jax.new_ref(zeros), static)
    return results[-1]


def _with_rounded(outputs: list[Any], rounding: Rounding | None, num_rows: int) -> list[list[Any]]:
    """Shapes of the products' results, and of what h is rounded to where that is not h itself."""
    if rounding is None:
        return [outputs, []]
    if rounding.by_tile:
        h, *others = outputs
        return [[jax.ShapeDtypeStruct(h.shape, jnp.bfloat16), *others], []]
    return [outputs, rounding.shapes(num_rows)]


def _scope(product: Product) -> str:
    """The name of a product in profiles of the kernel."""
    if product.transposed:
        return "transposed"
    return "down" if product.activation is None and product.rows.gate_up_order is None else "gate_up"
