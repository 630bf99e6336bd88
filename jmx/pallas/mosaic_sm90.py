"""Backend `mosaic`: the whole layer over 4-bit weights on Hopper, by the kernel of `mosaic_sm90_kernel`.

Two grouped products, the activation in the first one's epilogue. Around them plain jnp: rows are gathered by expert
(not for a few tokens: there every active expert sees them all), and each token's results are summed with its routing
weights in float32. Products take bfloat16 and add up in float32; float16 activations are rounded to bfloat16, whose
range float16 does not exceed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jmx import grouping, tuning
from jmx.experts import Experts
from jmx.formats import BlockScaled
from jmx.grouping import Blocks, Work
from jmx.pallas import mosaic_sm90_config
from jmx.pallas.mosaic_sm90_activations import in_kernel
from jmx.pallas.mosaic_sm90_config import FEW_TOKENS, Config
from jmx.pallas.mosaic_sm90_layout import LAYOUT, TILE
from jmx.routing import Routing
from jmx.selection import Computation, Environment, Problem, Reason, Rejection

ROW_ALIGNMENT = 8  # rows of wgmma's B that lie together


@dataclass(frozen=True)
class MosaicSm90:
    """The engine for compute capability 9.0 (H100, H200, GH200)."""

    @property
    def name(self) -> str:
        return "mosaic"

    @property
    def summary(self) -> str:
        return "Pallas Mosaic GPU kernels for Hopper: MXFP4 weights dequantised in registers"

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
        if problem.format != "mxfp4":
            return Rejection(Reason.FORMAT, f"weights are {problem.format!r}, not 'mxfp4'", "quantise to MXFP4")
        if problem.input_format is not None:
            return Rejection(
                Reason.INPUT_FORMAT, f"inputs are {problem.input_format!r}, not of 16 bits", "leave inputs as they are"
            )
        if problem.dtype not in ("bfloat16", "float16"):
            return Rejection(
                Reason.DTYPE, f"activations are {problem.dtype}, not bfloat16 or float16", "cast x to bfloat16"
            )
        if problem.layout != LAYOUT.name:
            return Rejection(
                Reason.LAYOUT,
                f"weights lie in {problem.layout!r}, not in {LAYOUT.name!r}",
                f"experts.prepare({LAYOUT.name!r})",
            )
        if problem.num_tokens is None:
            return Rejection(
                Reason.SYMBOLIC_TOKENS, "the number of tokens is symbolic", "export with a fixed number of tokens"
            )
        return None

    def heuristic(self, problem: Problem, environment: Environment) -> Config:
        del environment
        return mosaic_sm90_config.heuristic(problem.num_tokens or 1, problem.top_k, problem.num_experts)

    def candidates(self, problem: Problem, environment: Environment) -> Sequence[Config]:
        del environment
        return mosaic_sm90_config.candidates(problem.num_tokens or 1, problem.top_k, problem.num_experts)

    def check(self, config: Config, problem: Problem, environment: Environment) -> None:
        del config, problem, environment  # a Config that can be made runs every problem

    def apply(
        self,
        computation: Computation,
        x: jax.Array,
        routing: Routing,
        experts: Experts,
        environment: Environment,
    ) -> jax.Array:
        from jmx.pallas.mosaic_sm90_kernel import Product, Rows, expert_products  # takes a second to import

        num_tokens, top_k = routing.expert_ids.shape
        if num_tokens * top_k == 0:
            return jnp.zeros_like(x)
        problem = Problem.of(x, top_k, experts, computation.activation, computation.weights_on)
        config = tuning.config(self, problem, environment).config
        on_input = computation.weights_on == "input"
        if num_tokens <= min(FEW_TOKENS, config.block_n) and not on_input:
            grouped = grouping.single if num_tokens == 1 else grouping.few
            work = grouped(routing.expert_ids, experts.num_experts)
            rows, num_rows = x, work.blocks.experts.shape[0] * -(-num_tokens // ROW_ALIGNMENT) * ROW_ALIGNMENT
        else:
            work = grouping.many(routing.expert_ids, experts.num_experts, config.block_n, ROW_ALIGNMENT)
            assert work.token_of_row is not None
            rows = _gather(x, work.token_of_row)
            num_rows = rows.shape[0]
            if on_input:
                rows = (rows * _by_row(routing.weights, work, num_rows)[:, None]).astype(x.dtype)
        out = expert_products(
            jnp.pad(rows.astype(jnp.bfloat16), ((0, 0), (0, -rows.shape[1] % TILE))),
            Product(
                _flat(experts.gate_up, experts),
                _flat_bias(experts.gate_up_bias, experts),
                Rows(experts.spec("gate_up").shape[0], experts.gate_up_order),
                jnp.bfloat16,
                in_kernel(computation.activation),
            ),
            Product(
                _flat(experts.down, experts),
                _flat_bias(experts.down_bias, experts),
                Rows(experts.hidden_size, None),
                jnp.float32,
            ),
            _blocks(work.blocks, experts),
            config=config,
            num_rows=num_rows,
            num_cores=environment.core_count or 1,
        )
        out = out.reshape(config.split_k, num_rows, -1)[..., : x.shape[-1]]
        return _combine(out, routing, work, on_input).astype(x.dtype)


def _gather(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of x (T, H), H even and of 16 bits: by twos, which takes two thirds of the time of a gather by ones."""
    words = lax.bitcast_convert_type(x.reshape(x.shape[0], -1, 2), jnp.uint32)
    rows = lax.bitcast_convert_type(words.at[index].get(mode="promise_in_bounds"), x.dtype)
    return rows.reshape(index.size, x.shape[1])


def _flat(weight: BlockScaled, experts: Experts) -> BlockScaled:
    """All layers' experts in one axis, so that no layer is cut out of a stack."""
    lead = 1 if experts.index is None else 2
    return BlockScaled(*(array.reshape(-1, *array.shape[lead:]) for array in weight))


def _flat_bias(bias: jax.Array | None, experts: Experts) -> jax.Array | None:
    return bias if bias is None or experts.index is None else bias.reshape(-1, bias.shape[-1])


def _blocks(blocks: Blocks, experts: Experts) -> Blocks:
    """`blocks` as the kernel takes them: experts of all layers, and no scalar, which would cost a kernel of its own."""
    ids = blocks.experts if experts.index is None else blocks.experts + experts.index * experts.num_experts
    number = blocks.num_blocks
    return blocks._replace(
        experts=ids, num_blocks=number if isinstance(number, int) else jnp.broadcast_to(number, ids.shape)
    )


def _by_row(weights: jax.Array, work: Work, num_rows: int) -> jax.Array:
    """Routing weights (T, k) in the order of rows; 0 for rows that are padding."""
    rows = jnp.where(work.row_of < 0, num_rows, work.row_of).reshape(-1)
    zeros = jnp.zeros(num_rows, jnp.float32)
    return zeros.at[rows].set(weights.astype(jnp.float32).reshape(-1), mode="drop")


def _combine(out: jax.Array, routing: Routing, work: Work, weighted: bool) -> jax.Array:
    """Parts of rows (split_k, R, H) -> each token's sum (T, H), float32, always in the same order."""
    total = jnp.zeros((work.row_of.shape[0], out.shape[-1]), jnp.float32)
    for slot in range(work.row_of.shape[1]):
        row = work.row_of[:, slot]
        parts = [part.at[jnp.maximum(row, 0)].get(mode="promise_in_bounds") for part in out]
        term = sum(parts[1:], parts[0])
        if not weighted:
            term *= routing.weights[:, slot, None].astype(jnp.float32)
        total += jnp.where(row[:, None] >= 0, term, 0)
    return total
