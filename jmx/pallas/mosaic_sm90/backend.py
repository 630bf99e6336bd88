"""Backend `mosaic`: the whole layer over quantized weights on Hopper, in one persistent kernel (`kernel`).

It has two grouped GEMMs, with the activation in the epilogue of the first. If weights have a column order, `act_order`
gathers the rows first. Products take bfloat16 and accumulate in float32; float16 activations are rounded to bfloat16,
which has a larger range.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmx import grouping
from jmx.engines import grouped
from jmx.engines.grouped import Tiling
from jmx.experts import Experts
from jmx.grouping import Blocks, Work
from jmx.numerics.formats import FORMATS
from jmx.pallas.activations import in_kernel
from jmx.pallas.mosaic_sm90.config import Config, candidates, heuristic
from jmx.pallas.mosaic_sm90.layout import LAYOUT, Tile
from jmx.pallas.sm90.config import FEW_TOKENS
from jmx.pallas.sm90.tiles import TILE, alike
from jmx.routing import Routing
from jmx.selection import tuning
from jmx.selection.backend import Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.selection.requirements import Limits
from jmx.util.typing import Array, Float, Integer, Shaped

ROW_ALIGNMENT = 8  # rows of wgmma's operand B in one swizzled tile
_EIGHT = np.arange(ROW_ALIGNMENT, dtype=np.int32)

LIMITS = Limits(
    platform="gpu",
    capabilities=((9, 0),),
    machine="a Hopper GPU (H100, H200, GH200)",
    formats=LAYOUT.formats,
    dtypes=("bfloat16", "float16"),
    layout=LAYOUT.name,
)


@dataclass(frozen=True)
class MosaicSm90:
    """The backend for compute capability 9.0 (H100, H200, GH200)."""

    name: str = "mosaic"
    summary: str = "Pallas Mosaic GPU kernels for Hopper: weights of 4 and 8 bits dequantized in registers"

    @property
    def config_type(self) -> type[Config]:
        return Config

    def supports(self, problem: Problem, environment: Environment) -> Rejection | None:
        return LIMITS.rejection(problem, environment)

    def heuristic(self, problem: Problem, environment: Environment) -> Config:
        del environment
        sizes = problem.num_tokens or 1, problem.top_k, problem.num_experts
        return heuristic(_tile_bytes(problem), *sizes)

    def candidates(self, problem: Problem, environment: Environment) -> Sequence[Config]:
        del environment
        sizes = problem.num_tokens or 1, problem.top_k, problem.num_experts
        return candidates(_tile_bytes(problem), *sizes)

    def check(self, config: Config, problem: Problem, environment: Environment) -> None:
        del environment
        config.check(_tile_bytes(problem), -(-problem.intermediate_size // TILE))

    def apply(
        self, problem: Problem, x: Float[Array, "T H"], routing: Routing, experts: Experts, environment: Environment
    ) -> Float[Array, "T H"]:
        # Importing Pallas takes a second.
        from jmx.pallas.mosaic_sm90.act_order import ordered_rows
        from jmx.pallas.mosaic_sm90.grouped_gemm import Product
        from jmx.pallas.mosaic_sm90.kernel import expert_products
        from jmx.pallas.sm90.gemm import Rows

        config = tuning.config(self, problem, environment).config
        every = experts.merged()
        gate_up, down = alike(every.gate_up, every.down, experts.format)
        order = every.gate_up.order

        def rows_and_blocks(work: Work) -> tuple[Float[Array, "X H"], Blocks]:
            blocks = work.blocks
            if work.token_of_row is None:  # few tokens, all of which every block reads
                if order is None:
                    return x, blocks
                tokens = np.tile(np.minimum(_EIGHT, x.shape[0] - 1), blocks.experts.size)
                rows = ordered_rows(x, tokens, order, blocks.experts + experts.first_expert)
                return rows, blocks._replace(x_rows=ROW_ALIGNMENT)
            if order is None:
                return grouped.gather(problem, x, routing, work, _take_pairs), blocks
            users = grouping.expert_of_row(work, routing.expert_ids, work.num_rows)[::ROW_ALIGNMENT]
            rows = ordered_rows(x, work.token_of_row, order, users + experts.first_expert)
            return grouped.weigh(problem, rows, routing, work), blocks

        def products(work: Work) -> Float[Array, "P R H"]:
            rows, blocks = rows_and_blocks(work)
            out = expert_products(
                jnp.pad(rows.astype(jnp.bfloat16), ((0, 0), (0, -rows.shape[1] % TILE))),
                Product(
                    gate_up,
                    experts.format,
                    every.gate_up_bias,
                    Rows(experts.spec("gate_up").shape[0], experts.gate_up_order),
                    jnp.bfloat16,
                    in_kernel(problem.activation),
                    down.order,
                ),
                Product(down, experts.format, every.down_bias, Rows(experts.hidden_size, None), jnp.float32),
                blocks.of_layer(experts.first_expert),
                config=config,
                num_rows=work.num_rows,
                num_cores=environment.core_count or 1,
            )
            return out.reshape(config.split_k, work.num_rows, -1)[..., : x.shape[-1]]

        tiling = Tiling(config.block_n, min(FEW_TOKENS, config.block_n), ROW_ALIGNMENT)
        return grouped.run(problem, x, routing, tiling, products)


def _take_pairs(x: Shaped[Array, "T H"], index: Integer[Array, " R"]) -> Shaped[Array, "R H"]:
    """Rows of x, H even and 16 bits an element. Gathering pairs of columns takes two thirds of the time."""
    words = lax.bitcast_convert_type(x.reshape(x.shape[0], -1, 2), jnp.uint32)
    rows = lax.bitcast_convert_type(words.at[index].get(mode="promise_in_bounds"), x.dtype)
    return rows.reshape(index.size, x.shape[1])


def _tile_bytes(problem: Problem) -> int:
    return Tile.of(FORMATS[problem.format]).bytes
