"""Backend `mosaic_fp8`: the whole layer on Hopper's FP8 tensor cores, by the kernel of `kernel`.

Inputs are rounded to e4m3, grouped by expert and multiplied; h is rounded anew and multiplied. Rounding, each token
once and to the rows of all its experts, is a kernel of its own (`quantize`), or, where rows are few, a part of that
which multiplies (`fused_quantize`). Each token's results are summed with its routing weights in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jmx import grouping
from jmx.experts import Experts
from jmx.numerics import formats, input_formats
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.pallas.activations import in_kernel
from jmx.pallas.mosaic_sm90_fp8.config import Config, Shape, candidates, heuristic
from jmx.pallas.mosaic_sm90_fp8.layout import LAYOUT, UNIT_COLUMNS, unit_bytes
from jmx.pallas.sm90.config import FEW_TOKENS
from jmx.pallas.sm90.tiles import GATED_ROWS, TILE, alike
from jmx.routing import Routing
from jmx.selection import tuning
from jmx.selection.backend import Reason, Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import Computation, Problem
from jmx.selection.requirements import refusal

COLUMN_ALIGNMENT = 8  # of inputs, which are read by so many
ROW_ALIGNMENT = 8  # rows of wgmma's B that lie together
INPUTS = (input_formats.FP8_STATIC.name, input_formats.FP8_TOKEN.name, input_formats.FP8_BLOCK.name)


@dataclass(frozen=True)
class MosaicSm90Fp8:
    """The engine for compute capability 9.0 (H100, H200, GH200) and inputs in FP8."""

    @property
    def name(self) -> str:
        return "mosaic_fp8"

    @property
    def summary(self) -> str:
        return "Pallas Mosaic GPU kernels for Hopper's FP8 tensor cores: FP8 and MXFP4 weights, inputs in FP8"

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
        block = INPUT_FORMATS[problem.input_format].block_size if problem.input_format in INPUTS else None
        whole = block if isinstance(block, int) else COLUMN_ALIGNMENT
        whose = f" for {problem.input_format} inputs" if isinstance(block, int) else ""
        for name in ("hidden_size", "intermediate_size"):
            if (size := getattr(problem, name)) % whole:
                rule = f"must be a multiple of {whole}{whose}"
                return Rejection(Reason.SHAPE, f"{name} {size} {rule}", "backend='xla', or leave inputs as they are")
        return refusal(problem, LAYOUT.name, LAYOUT.formats, INPUTS)

    def heuristic(self, problem: Problem, environment: Environment) -> Config:
        return heuristic(_shape(problem, environment))

    def candidates(self, problem: Problem, environment: Environment) -> Sequence[Config]:
        return candidates(_shape(problem, environment))

    def check(self, config: Config, problem: Problem, environment: Environment) -> None:
        config.check(_shape(problem, environment))

    def apply(
        self,
        computation: Computation,
        x: jax.Array,
        routing: Routing,
        experts: Experts,
        environment: Environment,
    ) -> jax.Array:
        # These take a second to import.
        from jmx.pallas.mosaic_sm90_fp8.grouped_gemm import Product
        from jmx.pallas.mosaic_sm90_fp8.kernel import grouped_products
        from jmx.pallas.mosaic_sm90_fp8.quantize import quantize
        from jmx.pallas.mosaic_sm90_fp8.rows import UnquantizedRows
        from jmx.pallas.sm90.gemm import Rows

        num_tokens, top_k = routing.expert_ids.shape
        if num_tokens * top_k == 0:
            return jnp.zeros_like(x)
        assert computation.input_format is not None
        format = INPUT_FORMATS[computation.input_format]
        problem = Problem.of(x, top_k, experts, computation.activation, computation.weights_on, format.name)
        config = tuning.config(self, problem, environment).config
        on_input = computation.weights_on == "input"
        if num_tokens <= min(FEW_TOKENS, config.block_n) and not on_input:
            work = grouping.unsorted(routing.expert_ids, experts.num_experts, ROW_ALIGNMENT)
            rows = UnquantizedRows(x, x.shape[-1], format, _scale(experts, "gate_up"), None, num_tokens)
            num_rows = work.blocks.experts.size * work.blocks.out_rows
        else:
            whole = _shape(problem, environment).tokens_as_a and config.tokens_may_be_a
            work = grouping.many(routing.expert_ids, experts.num_experts, config.block_n, ROW_ALIGNMENT, whole=whole)
            assert work.token_of_row is not None
            num_rows = work.token_of_row.size
            rows = UnquantizedRows(x, x.shape[-1], format, _scale(experts, "gate_up"), work.row_of, num_rows)
            if on_input:  # an expert's inputs are then its own
                weighed = grouping.weigh(x[work.token_of_row], work, routing.weights)
                rows = rows._replace(x=weighed, row_of=None)
        every = experts.merged()
        weights = every.gate_up, every.down
        if config.one_launch:
            weights = alike(*weights, experts.format)
        blocks = work.blocks.of_layer(experts.first_expert)
        products = partial(
            grouped_products, blocks=blocks, config=config, num_rows=num_rows, num_cores=environment.core_count or 1
        )
        dtype = jnp.float32 if x.dtype == jnp.float16 else x.dtype  # as the reference rounds h
        gate_up = Product(
            weights[0],
            experts.format,
            every.gate_up_bias,
            Rows(experts.spec("gate_up").shape[0], experts.gate_up_order),
            dtype,
            in_kernel(computation.activation),
        )
        summed = jnp.float32 if config.split_k > 1 else dtype
        down = Product(weights[1], experts.format, every.down_bias, Rows(experts.hidden_size, None), summed)
        h = jax.ShapeDtypeStruct((num_rows, gate_up.rows.num_outputs), dtype)
        h = UnquantizedRows(h, experts.intermediate_size, format, _scale(experts, "down"), None, num_rows)
        if config.one_launch:
            out = products([gate_up.times(rows), down.times(h, inputs_are_results=True, split_k=config.split_k)])
        else:
            h = h._replace(x=products([gate_up.times(quantize(rows))]))
            out = products([down.times(quantize(h), inputs_are_results=True, split_k=config.split_k)])
        out = out.reshape(config.split_k, num_rows, -1)[..., : x.shape[-1]]
        return grouping.combine(out, work, None if on_input else routing.weights).astype(x.dtype)


def _scale(experts: Experts, role: str) -> jax.Array | None:
    scale = experts.input_scale(role)
    return None if scale is None else scale.reshape(1)


def _shape(problem: Problem, environment: Environment) -> Shape:
    decoded, blocks_of_inputs = (
        problem.format == formats.MXFP4.name,
        problem.input_format == input_formats.FP8_BLOCK.name,
    )
    by_block = blocks_of_inputs or problem.format == formats.FP8_BLOCK.name
    sizes = problem.num_tokens or 1, problem.top_k, problem.num_experts
    outputs = TILE if problem.gate_up_order is None else GATED_ROWS  # of a tile
    tiles = -(-problem.intermediate_size // outputs), -(-problem.hidden_size // TILE)
    units = -(-problem.hidden_size // UNIT_COLUMNS), -(-problem.intermediate_size // UNIT_COLUMNS)
    scales = by_block, blocks_of_inputs and not decoded
    weighted, num_cores = problem.weights_on == "input", environment.core_count or 1
    return Shape(_unit_bytes(problem), decoded, *scales, *sizes, tiles, units, num_cores, weighted)


def _unit_bytes(problem: Problem) -> int:
    return unit_bytes(formats.FORMATS[problem.format])
