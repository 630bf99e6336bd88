"""Backend `mosaic`: the whole layer over quantised weights on Hopper, by the kernel of `kernel`.

Two grouped products, the activation in the first one's epilogue. Around them plain jnp: rows are gathered by expert
(not for a few tokens: there every active expert sees them all), by `act_order` where columns have an order, and each
token's results are summed with its routing weights in float32. Products take bfloat16 and add up in float32; float16
activations are rounded to bfloat16, whose range float16 does not exceed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmx import grouping
from jmx.experts import Experts
from jmx.numerics.formats import FORMATS
from jmx.pallas.activations import in_kernel
from jmx.pallas.mosaic_sm90.config import Config, candidates, heuristic
from jmx.pallas.mosaic_sm90.layout import LAYOUT, Tile
from jmx.pallas.sm90.config import FEW_TOKENS
from jmx.pallas.sm90.tiles import TILE, alike
from jmx.routing import Routing
from jmx.selection import tuning
from jmx.selection.backend import Reason, Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import Computation, Problem
from jmx.selection.requirements import refusal

ROW_ALIGNMENT = 8  # rows of wgmma's B that lie together
_EIGHT = np.arange(ROW_ALIGNMENT, dtype=np.int32)


@dataclass(frozen=True)
class MosaicSm90:
    """The engine for compute capability 9.0 (H100, H200, GH200)."""

    @property
    def name(self) -> str:
        return "mosaic"

    @property
    def summary(self) -> str:
        return "Pallas Mosaic GPU kernels for Hopper: weights of 4 and 8 bits dequantised in registers"

    @property
    def config_type(self) -> type[Config]:
        return Config

    def supports(self, problem: Problem, environment: Environment) -> Rejection | None:
        if environment.platform != "gpu":
            return Rejection(Reason.PLATFORM, f"platform is {environment.platform!r}, not 'gpu'", "run on a Hopper GPU")
        if environment.compute_capability != (9, 0):
            found = environment.compute_capability
            return Rejection(
                Reason.COMPUTE_CAPABILITY, f"{found} is not (9, 0)", "run on a Hopper GPU (H100, H200, GH200)"
            )
        return refusal(problem, LAYOUT.name, LAYOUT.formats)

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
        self,
        computation: Computation,
        x: jax.Array,
        routing: Routing,
        experts: Experts,
        environment: Environment,
    ) -> jax.Array:
        from jmx.pallas.mosaic_sm90.act_order import ordered_rows
        from jmx.pallas.mosaic_sm90.grouped_gemm import Product
        from jmx.pallas.mosaic_sm90.kernel import expert_products
        from jmx.pallas.sm90.gemm import Rows

        num_tokens, top_k = routing.expert_ids.shape
        if num_tokens * top_k == 0:
            return jnp.zeros_like(x)
        problem = Problem.of(x, top_k, experts, computation.activation, computation.weights_on)
        config = tuning.config(self, problem, environment).config
        on_input = computation.weights_on == "input"
        every = experts.merged()
        gate_up, down = alike(every.gate_up, every.down, experts.format)
        order = every.gate_up.order
        if num_tokens <= min(FEW_TOKENS, config.block_n) and not on_input:
            work = grouping.unsorted(routing.expert_ids, experts.num_experts, ROW_ALIGNMENT)
            rows, num_rows = x, work.blocks.experts.size * ROW_ALIGNMENT
            if order is not None:
                tokens = np.tile(np.minimum(_EIGHT, num_tokens - 1), work.blocks.experts.size)
                rows = ordered_rows(x, tokens, order, work.blocks.experts + experts.first_expert)
                work = work._replace(blocks=work.blocks._replace(x_rows=ROW_ALIGNMENT))
        else:
            work = grouping.many(routing.expert_ids, experts.num_experts, config.block_n, ROW_ALIGNMENT)
            assert work.token_of_row is not None
            num_rows = work.token_of_row.size
            if order is not None:
                users = grouping.expert_of_row(work, routing.expert_ids, num_rows)[::ROW_ALIGNMENT]
                rows = ordered_rows(x, work.token_of_row, order, users + experts.first_expert)
            else:
                rows = _gather(x, work.token_of_row)
            if on_input:
                rows = grouping.weigh(rows, work, routing.weights)
        out = expert_products(
            jnp.pad(rows.astype(jnp.bfloat16), ((0, 0), (0, -rows.shape[1] % TILE))),
            Product(
                gate_up,
                experts.format,
                every.gate_up_bias,
                Rows(experts.spec("gate_up").shape[0], experts.gate_up_order),
                jnp.bfloat16,
                in_kernel(computation.activation),
                down.order,
            ),
            Product(down, experts.format, every.down_bias, Rows(experts.hidden_size, None), jnp.float32),
            work.blocks.of_layer(experts.first_expert),
            config=config,
            num_rows=num_rows,
            num_cores=environment.core_count or 1,
        )
        out = out.reshape(config.split_k, num_rows, -1)[..., : x.shape[-1]]
        return grouping.combine(out, work, None if on_input else routing.weights).astype(x.dtype)


def _gather(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of x (T, H), H even and of 16 bits: by twos, which takes two thirds of the time of a gather by ones."""
    words = lax.bitcast_convert_type(x.reshape(x.shape[0], -1, 2), jnp.uint32)
    rows = lax.bitcast_convert_type(words.at[index].get(mode="promise_in_bounds"), x.dtype)
    return rows.reshape(index.size, x.shape[1])


def _tile_bytes(problem: Problem) -> int:
    return Tile.of(FORMATS[problem.format]).bytes
