"""Backend `mosaic`: the whole layer over quantized weights on Hopper, in one persistent kernel (`kernel`).

It has two grouped GEMMs, with the activation in the epilogue of the first. If weights have a column order, `act_order`
gathers the rows first. Products take bfloat16 and accumulate in float32; float16 activations are rounded to bfloat16,
which has a larger range.

Inputs in a format are rounded to it by a kernel (`round_rows`) and multiplied as bfloat16, which holds them
(`rounded_inputs`). Of few rows h is rounded within the same kernel (`rounded_tiles`, `fused_rounding`); of many each
GEMM is a kernel of its own, with that rounding between them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import jax.numpy as jnp
import numpy as np

from jmx.engines import grouped
from jmx.engines.gradients import Gradients, Primals, Wanted
from jmx.engines.grouped import Tiling
from jmx.experts import Experts
from jmx.grouping import Blocks, Work
from jmx.numerics.formats import FORMATS, Format
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.pallas import own_rows
from jmx.pallas.activation.functions import in_kernel
from jmx.pallas.mosaic_sm90.config import Config, backward_config, candidates, heuristic, with_whole_stages
from jmx.pallas.mosaic_sm90.layout import LAYOUT, Tile
from jmx.pallas.mosaic_sm90.rounded_inputs import INPUTS, RoundedRows
from jmx.pallas.mosaic_sm90.rows import gate_and_up, padded, rounded, sorted_rows
from jmx.pallas.sm90.config import FEW_TOKENS, SHARED_MEMORY
from jmx.pallas.sm90.tiles import ROW_ALIGNMENT, TILE, VECTOR, weights_alike
from jmx.routing import Routing
from jmx.selection import tuning
from jmx.selection.backend import ExpertProduct, Reason, Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.selection.requirements import LimitedBackend, Limits
from jmx.util.typing import Array, Float, Float32, Int32

if TYPE_CHECKING:
    from jmx.pallas.mosaic_sm90.grouped_gemm import Product


class Launched(TypedDict):
    """What both kernels are launched with; see `kernel.expert_products`."""

    config: Config
    num_rows: int
    num_cores: int


_EIGHT = np.arange(ROW_ALIGNMENT, dtype=np.int32)
_MOST_ADDED = 64  # columns of what an epilogue adds: its time grows by 16 of them


def takes_inputs(format: Format, input_format: str | None) -> bool:
    """Whether weights of `format` are multiplied with inputs of `input_format`.

    If weights have a column order, scales must not change within a row of inputs: their blocks are of other columns.
    """
    if input_format is None or "order" not in format.arrays:
        return input_format in (None, *INPUTS)
    return input_format in INPUTS and not isinstance(INPUT_FORMATS[input_format].block_size, int)


def _column_order(problem: Problem) -> Rejection | None:
    if problem.adapters and "order" in FORMATS[problem.format].arrays:
        detail = f"rows and columns of {problem.format!r} weights are in an order of their own"
        return Rejection(Reason.ADAPTERS, detail, "use xla, or merge the adapters")
    if takes_inputs(FORMATS[problem.format], problem.input_format):
        return None
    detail = f"columns of {problem.format!r} weights are in another order than the blocks of {problem.input_format!r}"
    return Rejection(Reason.INPUT_FORMAT, detail, "use xla, or leave inputs as they are")


@dataclass(frozen=True)
class MosaicSm90(LimitedBackend):
    """The backend for compute capability 9.0 (H100, H200, GH200)."""

    name = "mosaic"
    summary = "Pallas Mosaic GPU kernels for Hopper: weights of 4 and 8 bits dequantized in registers"
    limits = Limits.hopper(LAYOUT.name, LAYOUT.formats, (None, *INPUTS), checks=(_column_order,))
    config_type = Config

    def heuristic(self, problem: Problem, environment: Environment) -> Config:
        del environment
        sizes = problem.num_tokens or 1, problem.top_k, problem.num_choices
        tiles = -(-problem.hidden_size // TILE), -(-problem.intermediate_size // TILE)
        return with_whole_stages(heuristic(_tile_bytes(problem), *sizes), _tile_bytes(problem), tiles)

    def candidates(self, problem: Problem, environment: Environment) -> Sequence[Config]:
        sizes = problem.num_tokens or 1, problem.top_k, problem.num_choices
        return [*dict.fromkeys([self.heuristic(problem, environment), *candidates(_tile_bytes(problem), *sizes)])]

    def check(self, config: Config, problem: Problem, environment: Environment) -> None:
        del environment
        config.check(_tile_bytes(problem), -(-problem.intermediate_size // TILE))

    def tiling(self, problem: Problem, environment: Environment) -> Tiling:
        block_n = tuning.config(self, problem, environment).config.block_n
        # If blocks have different widths, the largest come first: neighboring ones, which different SMs compute at a
        # time, take equally long then, and the last ones are short.
        return Tiling(block_n, min(FEW_TOKENS, block_n), ROW_ALIGNMENT, largest_first=block_n > ROW_ALIGNMENT)

    def apply(
        self, problem: Problem, x: Float[Array, "T H"], routing: Routing, experts: Experts, environment: Environment
    ) -> Float[Array, "T H"]:
        of_work = self._products(problem, x, routing, experts, environment)

        def products(work: Work) -> Float[Array, "P R H"]:
            return of_work(work)[..., : x.shape[-1]]

        tiling = self.tiling(problem, environment)
        return grouped.run(problem, x, routing, tiling, products, own_rows.combine_of(problem, x.dtype))

    def takes_rows(self, problem: Problem, experts: Experts, environment: Environment) -> bool:
        sorts = self.tiling(problem, environment).sorts(problem, problem.num_tokens or 1)
        return sorts and problem.input_format is None and experts.gate_up.order is None

    def terms(
        self,
        problem: Problem,
        x: Float[Array, "T H"],
        routing: Routing,
        experts: Experts,
        environment: Environment,
        take: grouped.Take | None = None,
    ) -> grouped.Terms:
        products = self._products(problem, x, routing, experts, environment, take or own_rows.take)
        return grouped.terms(problem, routing, self.tiling(problem, environment), products)

    def _products(
        self,
        problem: Problem,
        x: Float[Array, "T H"],
        routing: Routing,
        experts: Experts,
        environment: Environment,
        take: grouped.Take = own_rows.take,
    ) -> Callable[[Work], Float[Array, "P R W"]]:
        """Computes the results of blocks' rows, with padding after their columns."""
        # Importing Pallas takes a second.
        from jmx.pallas.mosaic_sm90.act_order import ordered_rows
        from jmx.pallas.mosaic_sm90.grouped_gemm import Product
        from jmx.pallas.mosaic_sm90.kernel import expert_products
        from jmx.pallas.sm90.gemm import Rows

        config = tuning.config(self, problem, environment).config
        every = experts.merged()
        gate_up, down = weights_alike(every)
        order = every.gate_up.order

        def rows_and_blocks(work: Work) -> tuple[RoundedRows, Blocks]:
            blocks = work.blocks
            if work.token_of_row is not None:
                return sorted_rows(problem, x, routing, experts, work, take), blocks
            given = rounded(problem, experts, "gate_up", x)  # few tokens, all of which every block reads
            if order is None:
                return given, blocks
            tokens = np.tile(np.minimum(_EIGHT, x.shape[0] - 1), blocks.experts.size)
            of_experts = blocks.experts + experts.first_expert
            rows = ordered_rows(given.values[:, : x.shape[1]], tokens, order, of_experts)
            return RoundedRows(rows, given.take(tokens)), blocks._replace(x_rows=ROW_ALIGNMENT)

        def products(work: Work) -> Float[Array, "P R W"]:
            rows, blocks = rows_and_blocks(work)
            first = Product(
                gate_up,
                experts.format,
                every.gate_up_bias,
                Rows(experts.spec("gate_up").shape[0], experts.gate_up_order),
                jnp.bfloat16,
                in_kernel(problem.activation),
                down.order,
                rows.scales,
            )
            second = Product(down, experts.format, every.down_bias, Rows(experts.hidden_size, None), jnp.float32)
            launched: Launched = {
                "config": config,
                "num_rows": work.num_rows,
                "num_cores": environment.core_count or 1,
            }
            blocks = blocks.of_layer(experts.first_expert)
            if problem.input_format is None:
                out = expert_products(padded(rows.values), first, second, blocks, **launched)
            else:
                dtype = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32  # as in the reference
                both = dataclasses.replace(first, dtype=dtype), second
                out = _rounded_products(problem, experts, rows.values, both, blocks, launched)
            return out.reshape(config.split_k, work.num_rows, -1)

        return products

    def apply_saving(
        self, problem: Problem, x: Float[Array, "T H"], routing: Routing, experts: Experts, environment: Environment
    ) -> tuple[Float[Array, "T H"], Float32[Array, "R tile_rows"]]:
        # Importing Pallas takes a second.
        from jmx.pallas.mosaic_sm90.backward import forward

        config = backward_config(_tile_bytes(problem), routing.expert_ids.size, problem.num_choices)
        return forward(problem, Primals(x, routing, experts), config, environment.core_count or 1)

    def backward(
        self, problem: Problem, primals: Primals, environment: Environment, dy: Float[Array, "T H"], wanted: Wanted
    ) -> Gradients:
        # Importing Pallas takes a second.
        from jmx.pallas.mosaic_sm90.backward import backward

        config = backward_config(_tile_bytes(problem), primals.routing.expert_ids.size, problem.num_choices)
        return backward(problem, primals, dy, wanted, config, environment.core_count or 1)

    def has_weight_gradients(self, problem: Problem) -> bool:
        # Importing Pallas takes a second.
        from jmx.pallas.mosaic_sm90 import weight_gradients

        return weight_gradients.supports(problem)

    def product(self, product: ExpertProduct, rows: Float[Array, "R K"], dtype: Any) -> Float[Array, "R W"]:
        from jmx.pallas.mosaic_sm90.alone import product_alone

        return self._one_product(
            product, rows, lambda scales, groups: product_alone(product.role, product.experts, dtype, scales)
        )

    def _one_product(
        self,
        product: ExpertProduct,
        rows: Float[Array, "R K"],
        made: "Callable[[Float32[Array, ' R'] | None, Int32[Array, ' B']], Product]",
    ) -> Float[Array, "R W"]:
        """What `made` returns for the scales of rows and the expert of each block, as a kernel of its own."""
        from jmx.pallas.mosaic_sm90.kernel import one_product

        problem, experts, environment = product.problem, product.experts, product.environment
        config = tuning.config(self, problem, environment).config
        given = rounded(problem, experts, product.role, rows)
        blocks = product.sorted.blocks(config.block_n, ROW_ALIGNMENT)
        return one_product(
            padded(given.values),
            made(given.scales, blocks.experts),
            blocks.of_layer(experts.first_expert),
            split_k=1,
            config=config,
            num_rows=rows.shape[0],
            num_cores=environment.core_count or 1,
        )

    def takes_added(self, problem: Problem, rank: int) -> bool:
        return problem.activation.num_experts is None and rank <= _MOST_ADDED

    def activated(
        self,
        product: ExpertProduct,
        rows: Float[Array, "R H"],
        inner: Float[Array, "R r"],
        b: Float[Array, "*experts N r"],
    ) -> Float[Array, "R I"]:
        # Importing Pallas takes a second.
        from jmx.pallas.mosaic_sm90.added import Added
        from jmx.pallas.mosaic_sm90.alone import activated

        experts, activation = product.experts, in_kernel(product.problem.activation)

        def made(scales: Float32[Array, " R"] | None, groups: Int32[Array, " B"]) -> "Product":
            added = Added.of(inner, b, groups) if b.ndim == 3 else Added.of(inner, b[None], jnp.zeros_like(groups))
            return activated(experts, activation, scales, added)

        return self._one_product(product, rows, made)[:, : experts.intermediate_size]

    def transposed_product(self, product: ExpertProduct, rows: Float[Array, "R W"]) -> Float32[Array, "R K"]:
        from jmx.pallas.mosaic_sm90 import alone, kernel

        problem, role, sorted, experts = product.problem, product.role, product.sorted, product.experts
        scales = alone.row_scales(alone.product_alone(role, experts, rows.dtype, None).weight, experts.format)
        if scales is not None:
            expert = sorted.expert_of(jnp.arange(rows.shape[0], dtype=jnp.int32))
            rows = rows * scales.at[expert + experts.first_expert].get(mode="promise_in_bounds")
        config = backward_config(_tile_bytes(problem), sorted.row_of.size, problem.num_choices)
        blocks = sorted.blocks(config.block_n, ROW_ALIGNMENT).of_layer(experts.first_expert)
        result = kernel.one_product(
            padded(rows),
            alone.transposed(role, experts, blocks.experts),
            blocks,
            split_k=1,
            config=config,
            num_rows=rows.shape[0],
            num_cores=product.environment.core_count or 1,
        )
        return result[:, : experts.spec(role).shape[1]]

    def outputs(self, problem: Problem, role: str, result: Float[Array, "*lead W"]) -> tuple[Float[Array, "..."], ...]:
        if role == "down":
            return (result[..., : problem.hidden_size],)
        return gate_and_up(result, problem)


def _rounded_products(
    problem: Problem,
    experts: Experts,
    rows: Float[Array, "X K"],
    products: "tuple[Product, Product]",
    blocks: Blocks,
    launched: "Launched",
) -> Float[Array, "parts_rows N"]:
    """Both products, h rounded in between: in the same launch where rows are few, else by a kernel between two."""
    # Importing Pallas takes a second.
    from jmx.pallas.mosaic_sm90 import fused_rounding, rounded_tiles
    from jmx.pallas.mosaic_sm90.kernel import expert_products, one_product

    first, second = products
    config, num_rows, columns = launched["config"], launched["num_rows"], experts.spec("down").shape[1]
    few = fused_rounding.pays(num_rows, config.num_warpgroups, launched["num_cores"])
    if few and num_rows and columns % VECTOR == 0:
        assert problem.input_format is not None
        format, maxima = INPUT_FORMATS[problem.input_format], 4 * rounded_tiles.words(config.block_n)
        fits = config.shared_memory(_tile_bytes(problem)) + config.num_warpgroups * maxima <= SHARED_MEMORY
        rounding = fused_rounding.Rounding(
            format=format,
            static_scale=experts.input_scale("down"),
            columns=columns,
            by_tile=fits and rounded_tiles.has_blocks_of_tiles(format, columns),
        )
        second = dataclasses.replace(second, row_scales=rounding.given_scales(num_rows))
        return expert_products(padded(rows), first, second, blocks, rounding=rounding, **launched)
    h = one_product(padded(rows), first, blocks, split_k=1, **launched)
    h = rounded(problem, experts, "down", h)
    second = dataclasses.replace(second, row_scales=h.scales)
    blocks = blocks._replace(x_rows=blocks.out_rows)
    return one_product(padded(h.values), second, blocks, split_k=config.split_k, **launched)


def _tile_bytes(problem: Problem) -> int:
    return Tile.of(FORMATS[problem.format]).bytes
