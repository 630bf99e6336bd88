"""The experts' two products on Hopper, in one persistent Pallas Mosaic GPU kernel: from 1 row to many thousands.

For each block of rows of one expert it computes h = activation(gate_up @ x + bias) and then down @ h + bias. Results
are computed transposed: tiles of weight rows are the tensor cores' A, dequantized into registers on the way, and a
block of at most 256 rows is their B. So ragged groups meet the axis that is tiled by 8. Blocks of up to 32 rows are
multiplied by mma.sync, larger ones by wgmma.

The kernel is persistent: one CTA per SM strides over work items, each a block of rows by `warpgroups_m` tiles of weight
rows. One producer warp copies weights and another one rows (TMA) into the pipeline's stages, across work items;
consumer warpgroups wait for a stage, dequantize, multiply, and release it.

    weights    | W0 | W1 | W2 | ...                             full_barriers[slot] -->
    rows       | X0 | X1 | X2 | ...                             full_barriers[slot] -->
    consumers  | wait 0 | dequantize 0 | wgmma 0 | wait 1 | dequantize 1 (under wgmma 0) | wgmma 1 | ...
                                                                empty_barriers[slot] -->

The second product of a block needs all of the first one's rows of h. Counters in global memory signal when these are
written: only the warp that copies rows waits for that, while stages fill with weights. So memory is never idle in
between.

See docs/mosaic_sm90.md for a drawing and for what bounds it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax

from jmx.grouping import Blocks
from jmx.pallas.mosaic_sm90.config import Config
from jmx.pallas.mosaic_sm90.consumer import consume
from jmx.pallas.mosaic_sm90.dequantize import decoder_of
from jmx.pallas.mosaic_sm90.grouped_gemm import Cta, Gemm, Operands, Product, SharedMemory
from jmx.pallas.mosaic_sm90.layout import Tile
from jmx.pallas.mosaic_sm90.producer import copy_rows, copy_weights
from jmx.pallas.mosaic_sm90.scheduler import schedules
from jmx.pallas.sm90.launch import launch, persistent_kernel, specialize
from jmx.pallas.sm90.scheduler import Share
from jmx.pallas.sm90.tiles import GATED_ROWS, TILE

Array = Any


def expert_products(
    x: Array,
    gate_up: Product,
    down: Product,
    blocks: Blocks,
    *,
    config: Config,
    num_rows: int,
    num_cores: int,
) -> jax.Array:
    """Both products of each block of rows.

    Args:
        x: bfloat16 (X, K), K the columns of `gate_up` and a multiple of 64; blocks may read past its end.
        gate_up, down: see `Product`. What the first one gives has as many columns as the second one's weight.
        blocks: `x_rows` are multiples of 8. All blocks must name an expert that there is; only the first `num_blocks`,
            an int or here (B,), the same number throughout, are computed.
        num_rows: R, rows of the result. Rows that no block names are left as they are: they may hold anything.
        num_cores: SMs to run on, all of them at once: CTAs wait for what others have written of h.

    Returns:
        (config.split_k * R, down.rows.num_outputs): the parts' sums one below the other.
    """
    products = (gate_up, down)
    tile, decoder = Tile.of(gate_up.format), decoder_of(gate_up.format, gate_up.weight.scales.dtype)
    tiles = [
        (values.shape[1], values.shape[2] // tile.value_rows) for values in (gate_up.weight.values, down.weight.values)
    ]
    tile_columns = TILE if gate_up.rows.gate_up_order is None else GATED_ROWS
    both = schedules(config, tiles[0], tiles[1], tile_columns, blocks.experts.size)
    outputs = [
        jax.ShapeDtypeStruct((schedule.num_parts * num_rows, product.rows.num_outputs), product.dtype)
        for product, schedule in zip(products, both, strict=True)
    ]

    def body(
        x: Any, operands: tuple[Operands, ...], given: Blocks, written: Any, h: Any, out: Any, *, shared: SharedMemory
    ) -> None:
        work = blocks.with_refs(given)
        warpgroup, core = lax.axis_index("warpgroup"), lax.axis_index("core")
        cta = Cta(config, decoder, num_rows, tile.value_rows, work, work.number, written, shared, warpgroup)

        def gemms() -> Iterator[Gemm]:
            start, before = Share.begin(core), None
            x_rows = (work.x_rows, work.out_rows)
            for nth, (product, schedule) in enumerate(zip(products, both, strict=True)):
                share = Share.of(start, schedule.num_items(cta.num_blocks), schedule.k_steps, num_cores)
                refs = operands[nth], (x, h)[nth], (h, out)[nth], x_rows[nth]
                yield Gemm(cta, product, schedule, *refs, before, share)
                start, before = share.end(overrun_first=True), schedule

        def each(function: Callable[[Gemm], None]) -> None:
            for name, gemm in zip(("gate_up", "down"), gemms(), strict=True):
                with jax.named_scope(name):
                    function(gemm)

        specialize(warpgroup, config, lambda: each(consume), lambda: each(copy_weights), lambda: each(copy_rows))

    operands = tuple(map(Operands.of, products))
    shared = SharedMemory.of(config, operands[0], tile.value_rows, x.dtype)
    kernel = persistent_kernel(body, "mosaic", config, num_cores, outputs, shared)
    written = jax.new_ref(blocks.experts >> 30)  # zeros, which XLA makes in the kernel that makes `experts`
    return launch(kernel, x, operands, blocks.arrays, written)[1]
