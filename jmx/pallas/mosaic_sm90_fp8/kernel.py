"""Grouped GEMMs on Hopper's 8-bit tensor cores, in one persistent Pallas Mosaic GPU kernel: rows @ weight[expert].T.

As in `mosaic_sm90.kernel`, results are computed transposed: 64 rows of the weight are operand A, and a block of at most
256 rows of one expert is operand B, in parts if registers do not hold all of its sums. Weights of 8 bits are read from
shared memory; those of 4 bits become 8 in registers. Large blocks with scales of 128 columns may be operand A; see
`tokens_as_a`. One CTA per SM strides over work items. One producer warp copies weights and another one rows
(`producer`) into the pipeline's stages of 128 columns (but see `fused_quantize` for resident rows); one to five
consumer warpgroups compute (`consumer`). `sm90.pipeline` has the waits for stages and their releases.

    weights    | W0 | W1 | W2 | ...                             full_barriers[slot] -->
    rows       | X0 | X1 | X2 | ...                             full_barriers[slot] -->
    consumers  | wait 0 | elements 0 | wgmma 0 | totals += sums * scales | wait 1 | ...   --> empty_barriers[slot]

Warpgroups may also share the columns of an item, with one unit of each stage for each, and reduce their partial sums at
its end.

Results are written to shared memory and copied from there while the next item is computed.

Between the products rows of h are quantized, for which all of a token's h must be complete. For few rows this, and the
quantization of x before, are part of one launch with both products; see `fused_quantize`. Weights are copied meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.grouping import Blocks
from jmx.pallas.mosaic_sm90_fp8.config import Config
from jmx.pallas.mosaic_sm90_fp8.consumer import consume
from jmx.pallas.mosaic_sm90_fp8.fused_quantize import new_counters
from jmx.pallas.mosaic_sm90_fp8.gemm import Gemm, SharedMemory
from jmx.pallas.mosaic_sm90_fp8.grouped_gemm import Product
from jmx.pallas.mosaic_sm90_fp8.producer import copy_rows, copy_weights
from jmx.pallas.mosaic_sm90_fp8.rows import InputRows
from jmx.pallas.sm90.gemm import Operands
from jmx.pallas.sm90.launch import launch, persistent_kernel, specialize
from jmx.pallas.sm90.operation import Ref
from jmx.pallas.sm90.scheduler import Share
from jmx.util.typing import Array, Num

Refs = Sequence[Ref]


def grouped_products(
    products: Sequence[Product], blocks: Blocks, *, config: Config, num_rows: int, num_cores: int
) -> Num[Array, "parts_rows N"]:
    """The products of blocks of rows, one GEMM after the other in one launch.

    Args:
        products: with `inputs`. All weights are of one format.
        blocks: `x_rows` and `out_rows` are multiples of 8. All blocks must have a valid expert id; only the first
            `num_blocks`, an int or here an array (B,) of equal numbers, are computed. They may read past the end of the
            rows.
        num_rows: R, rows of the results, a multiple of 8. A block writes its rows and those up to the next multiple of
            8. Rows that belong to no block have undefined contents.
        num_cores: CTAs, at most the number of SMs. If rows are quantized in the launch, all of them must be resident,
            since they wait for each other.

    Returns:
        (split_k * R, rows.num_outputs) of the last product's dtype: the parts, one below the other.
    """
    operands = [(product.inputs, Operands.of(product)) for product in products]
    fused = products[0].quantizes
    early = fused and _quantizes_early(products[0], config)
    assert all(product.quantizes == fused for product in products)
    assert not config.resident_rows or (fused and isinstance(blocks.counts, int))  # all blocks have the same rows
    outputs = [
        jax.ShapeDtypeStruct((product.split_k * num_rows, product.rows.num_outputs), product.dtype)
        for product in products
    ]
    quantized_shapes = []  # values and scales of each product's inputs, if they are stored in global memory
    if fused and not config.resident_rows:
        quantized_shapes = [product.inputs.quantized_shapes for product in products if product.inputs is not None]

    def body(
        operands: Sequence[tuple[InputRows, Operands]],
        block_refs: Blocks,
        counters: Ref,
        outs: Refs,
        quantized: Sequence[Refs],
        *,
        shared: SharedMemory,
    ) -> None:
        work = blocks.with_refs(block_refs)
        cta, warpgroup = lax.axis_index("core"), lax.axis_index("warpgroup")
        start, gemms = Share.begin(cta), []
        for index, (product, (x, refs)) in enumerate(zip(products, operands, strict=True)):
            unquantized = None
            if fused:
                unquantized = replace(x, values=outs[index - 1]) if x.values is None else x
                scales = shared.stages.x_scales if shared.resident_row_scales is None else shared.resident_row_scales
                x = x.with_quantized(*((shared.stages.x, scales) if config.resident_rows else quantized[index]))
            gemm_blocks = work._replace(x_rows=work.out_rows) if product.inputs_are_results else work
            gemm = Gemm(
                product=product,
                share=Gemm.share_of(start, product, gemm_blocks, config, num_cores),
                operands=refs,
                out=outs[index],
                x=x,
                unquantized=unquantized,
                blocks=gemm_blocks,
                shared=shared,
                counters=counters,
                index=index,
                last=index + 1 == len(products),
                before=gemms[-1] if gemms and early else None,
                cta=cta,
                warpgroup=warpgroup,
                config=config,
                num_rows=num_rows,
            )
            gemms.append(gemm)
            start = gemm.share.end(overrun_first=False)

        def each(function: Callable[[Gemm], None]) -> None:
            for gemm in gemms:
                with jax.named_scope(f"gemm{gemm.index}"):
                    function(gemm)

        def consume_all() -> None:
            pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(shared.turn_barriers.at[0]))
            each(lambda gemm: consume(gemm, None if gemm.last else gemms[gemm.index + 1]))

        specialize(warpgroup, config, consume_all, lambda: each(copy_weights), lambda: each(copy_rows))

    shared = SharedMemory.of(products, config)
    kernel = persistent_kernel(body, "mosaic_fp8", config, num_cores, [outputs, quantized_shapes], shared)
    counters = jax.new_ref(new_counters(blocks)) if fused else None
    results, _ = launch(kernel, operands, blocks.arrays, counters)
    return results[-1]


def _quantizes_early(first: Product, config: Config) -> bool:
    """Whether most rows of h are quantized before the end of the first product; see `fused_quantize`.

    Warpgroups that decode weights have less time: there it costs more than it saves. The rest was not measured.
    """
    decodes = first.elements.decoded or first.scales_units
    return not (decodes or config.resident_rows or config.warpgroups_k > 1)
