"""Grouped GEMMs on Hopper's FP8 tensor cores, in one persistent Pallas Mosaic GPU kernel: rows @ weight[expert].T.

As in `mosaic_sm90.kernel`, results are computed transposed: 64 rows of the weight are the operand A, and a block of
rows of one expert, at most 256, is B, in parts where registers do not hold its sums at once. E4M3 weights are read from
shared memory; MXFP4 ones become e5m2 in registers. Large blocks whose scales belong to 128 columns are A themselves,
where that costs less: see `tokens_as_a`. One CTA per SM strides over work items. One producer warp copies weights and
another one rows (`producer`) into the pipeline's stages, 128 columns each (but see `fused_quantize` for rows that are
kept); one to five consumer warpgroups compute (`consumer`):

    weights    | W0 | W1 | W2 | ...                             full_barriers[slot] -->
    rows       | X0 | X1 | X2 | ...                             full_barriers[slot] -->
    consumers  | wait 0 | elements 0 | wgmma 0 | totals += sums * scales | wait 1 | ...   --> empty_barriers[slot]

Or warpgroups share the columns of an item, a unit of each stage each, and add up their partial sums at its end.

Results leave by way of shared memory, and are on their way while the next item is computed.

Between the products rows of h are quantized anew, for which a token's h has to be there as a whole. Where rows are few,
that and the quantization of x before are part of one launch with both products; see `fused_quantize`. Weights are on
their way meanwhile.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.grouping import Blocks
from jmx.pallas.mosaic_sm90_fp8.config import Config
from jmx.pallas.mosaic_sm90_fp8.consumer import consume
from jmx.pallas.mosaic_sm90_fp8.fused_quantize import new_counters
from jmx.pallas.mosaic_sm90_fp8.gemm import Gemm, SharedMemory
from jmx.pallas.mosaic_sm90_fp8.grouped_gemm import Operands, Product
from jmx.pallas.mosaic_sm90_fp8.producer import copy_rows, copy_weights
from jmx.pallas.mosaic_sm90_fp8.rows import UnquantizedRows
from jmx.pallas.sm90.launch import launch, persistent_kernel, specialize
from jmx.pallas.sm90.scheduler import Share

Array = Any
Refs = Sequence[Any]


def grouped_products(
    products: Sequence[Product], blocks: Blocks, *, config: Config, num_rows: int, num_cores: int
) -> jax.Array:
    """The products of blocks of rows, one GEMM after the other in one launch.

    Args:
        products: with `inputs`. All weights are of one format.
        blocks: `x_rows` and `out_rows` are multiples of 8. All blocks must name an expert that there is; only the first
            `num_blocks`, an int or here (B,), the same number throughout, are computed. They may read past the end of
            the rows.
        num_rows: R, rows of the results, a multiple of 8. Rows that no block names may hold anything: a block writes
            its own and those up to the next multiple of 8.
        num_cores: SMs to run on; all of them at once, where rows are still to be quantized: else it does not end.

    Returns:
        (split_k * R, rows.num_outputs) of the last product: the parts' sums one below the other.
    """
    operands = tuple(map(Operands.of, products))
    fused = isinstance(products[0].inputs, UnquantizedRows)
    assert all(isinstance(product.inputs, UnquantizedRows) == fused for product in products)
    assert not config.keeps_rows or (fused and isinstance(blocks.counts, int))  # all blocks have all tokens
    outputs = [
        jax.ShapeDtypeStruct((product.split_k * num_rows, product.rows.num_outputs), product.dtype)
        for product in products
    ]
    quantized = []  # values and scales of each product's inputs, where they pass through global memory
    if fused and not config.keeps_rows:
        quantized = [product.inputs.quantized for product in products if isinstance(product.inputs, UnquantizedRows)]

    def body(
        operands: Sequence[Operands], given: Blocks, counters: Any, outs: Refs, of_inputs: Refs, *, shared: SharedMemory
    ) -> None:
        work = blocks.with_refs(given)
        cta, warpgroup = lax.axis_index("core"), lax.axis_index("warpgroup")
        start, gemms = Share.begin(cta), []
        for index, (product, refs) in enumerate(zip(products, operands, strict=True)):
            inputs = None
            if isinstance(product.inputs, UnquantizedRows):
                x = outs[index - 1] if refs.unquantized is None else refs.unquantized
                inputs = product.inputs._replace(x=x, row_of=refs.row_of, static_scale=refs.static_scale)
                kept = shared.stages.x_scales if shared.row_scales is None else shared.row_scales
                refs = refs.with_quantized(*((shared.stages.x, kept) if config.keeps_rows else of_inputs[index]))
            its_blocks = work._replace(x_rows=work.out_rows) if product.inputs_are_results else work
            gemm = Gemm(
                product,
                refs,
                outs[index],
                its_blocks,
                shared,
                inputs,
                counters,
                index,
                index + 1 == len(products),
                cta,
                warpgroup,
                config,
                num_rows,
                Gemm.share_of(start, product, its_blocks, config, num_cores),
            )
            gemms.append(gemm)
            start = gemm.share.end(overrun_first=False)

        def each(function: Any) -> None:
            for gemm in gemms:
                with jax.named_scope(f"gemm{gemm.index}"):
                    function(gemm)

        def consume_all() -> None:
            pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(shared.turns.at[0]))
            each(consume)

        specialize(warpgroup, config, consume_all, lambda: each(copy_weights), lambda: each(copy_rows))

    shared = SharedMemory.of(products, operands, config)
    kernel = persistent_kernel(body, "mosaic_fp8", config, num_cores, [outputs, quantized], shared)
    counters = jax.new_ref(new_counters(blocks.experts)) if fused else None
    results, _ = launch(kernel, operands, blocks.arrays, counters)
    return results[-1]
