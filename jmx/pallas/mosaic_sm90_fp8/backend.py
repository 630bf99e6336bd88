"""Backend `mosaic_fp8`: the whole layer on Hopper's 8-bit tensor cores, by the persistent kernel in `kernel`.

Inputs are quantized to e4m3 or int8, grouped by expert and multiplied; h is quantized again and multiplied. Each token
is quantized once and written to the rows of all its experts: by a separate kernel (`quantize`), or for few rows within
the kernel that multiplies (`fused_quantize`). The combine step sums each token's results with its routing weights in
float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp

from jmx.engines import grouped
from jmx.engines.grouped import Tiling
from jmx.experts import ROLES, Experts, padding
from jmx.grouping import Work
from jmx.numerics import input_formats
from jmx.numerics.formats import FORMATS, Format
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.numerics.tensor_scales import scale_of_rows
from jmx.pallas.activation.functions import in_kernel
from jmx.pallas.mosaic_sm90_fp8.config import Config, Shape, candidates, heuristic
from jmx.pallas.mosaic_sm90_fp8.elements import elements_of
from jmx.pallas.mosaic_sm90_fp8.layout import LAYOUT, UNIT_COLUMNS, unit_bytes
from jmx.pallas.sm90.config import FEW_TOKENS
from jmx.pallas.sm90.tiles import GATED_ROWS, ROW_ALIGNMENT, TILE, VECTOR, weights_alike
from jmx.routing import Routing
from jmx.selection import tuning
from jmx.selection.backend import Reason, Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.selection.requirements import LimitedBackend, Limits, hidden_and_intermediate, indivisible
from jmx.util.typing import Array, Bool, Float, Float32

INPUTS = tuple(
    format.name
    for format in (
        input_formats.FP8_STATIC,
        input_formats.FP8_TOKEN,
        input_formats.FP8_BLOCK,
        input_formats.FP8_TENSOR,
        input_formats.INT8_TOKEN,
    )
)


def multiplies(format: Format, input_format: str | None) -> bool:
    """Whether weights of `format`, one of the layout's, are multiplied with inputs of `input_format`."""
    return input_format in INPUTS and elements_of(format, INPUT_FORMATS[input_format]) is not None


def _pair(problem: Problem) -> Rejection | None:
    format = FORMATS[problem.format]
    if multiplies(format, problem.input_format):
        return None
    by_token = next(n for n in INPUTS if INPUT_FORMATS[n].block_size == "row" and multiplies(format, n))
    detail = f"{problem.format!r} weights and {problem.input_format!r} inputs are no operands of one 8-bit product"
    return Rejection(Reason.INPUT_FORMAT, detail, f"input_format={by_token!r}, or prepare them in layout 'auto'")


def _sizes(problem: Problem) -> Rejection | None:
    assert problem.input_format is not None
    block = INPUT_FORMATS[problem.input_format].block_size
    multiple, why = (
        (block, f"the columns of a scale of {problem.input_format} inputs")
        if isinstance(block, int)
        else (VECTOR, "columns that are read together")
    )
    return indivisible(
        hidden_and_intermediate(problem), multiple, why, "use backend='xla', or leave inputs as they are"
    )


@dataclass(frozen=True)
class MosaicSm90Fp8(LimitedBackend):
    """The backend for compute capability 9.0 (H100, H200, GH200) and inputs of 8 bits."""

    name = "mosaic_fp8"
    summary = (
        "Pallas Mosaic GPU kernels for Hopper's 8-bit tensor cores: FP8, MXFP4 and integers, inputs in FP8 or INT8"
    )
    limits = Limits.hopper(LAYOUT.name, LAYOUT.formats, INPUTS, checks=(_pair, _sizes))
    config_type = Config
    skips_padding = True

    def heuristic(self, problem: Problem, environment: Environment) -> Config:
        return heuristic(_shape(problem, environment))

    def candidates(self, problem: Problem, environment: Environment) -> Sequence[Config]:
        return candidates(_shape(problem, environment))

    def check(self, config: Config, problem: Problem, environment: Environment) -> None:
        config.check(_shape(problem, environment))

    def tiling(self, problem: Problem, environment: Environment) -> Tiling:
        config = tuning.config(self, problem, environment).config
        shape = _shape(problem, environment)
        whole = shape.whole_blocks or (config.tokens_may_be_a and shape.tokens_as_a)
        return Tiling(config.block_n, min(FEW_TOKENS, config.block_n), ROW_ALIGNMENT, whole)

    def apply(
        self, problem: Problem, x: Float[Array, "T H"], routing: Routing, experts: Experts, environment: Environment
    ) -> Float[Array, "T H"]:
        # Importing these takes a second.
        from jmx.pallas.mosaic_sm90_fp8.grouped_gemm import Product
        from jmx.pallas.mosaic_sm90_fp8.kernel import grouped_products
        from jmx.pallas.mosaic_sm90_fp8.quantize import quantize
        from jmx.pallas.mosaic_sm90_fp8.rows import InputRows
        from jmx.pallas.sm90.gemm import Rows

        assert problem.input_format is not None
        wide = x.shape[-1]
        if any(size % VECTOR for size in (experts.hidden_size, experts.intermediate_size)):
            x, experts = padding.widened(x, experts), experts.as_padded()
        skips = experts.padded_to is not None
        columns, h_columns = (experts.spec(role).shape[1] for role in ROLES)
        format, one_scale = INPUT_FORMATS[problem.input_format], not INPUT_FORMATS[problem.input_format].by_token
        format = input_formats.FP8_STATIC if one_scale else format  # once the scale is known
        config = tuning.config(self, problem, environment).config
        dtype = jnp.float32 if x.dtype == jnp.float16 else x.dtype  # as in the reference

        def scaled(rows: InputRows, valid: Callable[[], Bool[Array, " R"]]) -> InputRows:
            """The rows with the one scale of those that are valid, if they share one."""
            if not one_scale:
                return rows
            return replace(rows, static_scale=scale_of_rows(rows.values[:, : rows.columns], valid())[None])

        def unquantized(work: Work) -> InputRows:
            rows = InputRows(x, work.row_of, _scale(experts, "gate_up"), x.shape[-1], format, work.num_rows, columns)
            rows = rows if problem.on_input else scaled(rows, lambda: (work.row_of >= 0).any(axis=1))
            if work.token_of_row is None:  # few tokens, all of which every block reads
                return replace(rows, row_of=None, num_rows=x.shape[0])
            if problem.on_input:  # then inputs differ by expert
                values = grouped.gather(problem, x, routing, work, lambda x, rows: x[rows])
                return scaled(replace(rows, values=values, row_of=None), lambda: _used(work))
            return rows

        def both(work: Work) -> Float[Array, "P R H"]:
            rows, num_rows = unquantized(work), work.num_rows
            every = experts.merged()
            weights = weights_alike(every) if config.fuse_quantize else (every.gate_up, every.down)
            products = partial(
                grouped_products,
                blocks=work.blocks.of_layer(experts.first_expert),
                config=config,
                num_rows=num_rows,
                num_cores=environment.core_count or 1,
            )
            gate_up = Product(
                weights[0],
                experts.format,
                every.gate_up_bias,
                Rows(
                    experts.spec("gate_up").shape[0],
                    experts.gate_up_order,
                    experts.intermediate_size if skips else None,
                ),
                dtype,
                in_kernel(problem.activation),
            )
            summed = jnp.float32 if config.split_k > 1 else dtype
            down = Product(
                weights[1], experts.format, every.down_bias, Rows(columns, None, x.shape[-1] if skips else None), summed
            )
            scale = _scale(experts, "down")
            h = InputRows(None, None, scale, experts.intermediate_size, format, num_rows, h_columns)
            if config.fuse_quantize:
                out = products([gate_up.times(rows), down.times(h, inputs_are_results=True, split_k=config.split_k)])
            else:
                h = scaled(replace(h, values=products([gate_up.times(quantize(rows))])), lambda: _used(work))
                out = products([down.times(quantize(h), inputs_are_results=True, split_k=config.split_k)])
            return out.reshape(config.split_k, num_rows, -1)[..., : x.shape[-1]]

        return grouped.run(problem, x, routing, self.tiling(problem, environment), both)[:, :wide]


def _used(work: Work) -> Bool[Array, " R"]:
    """Whether each row of the results belongs to an assignment."""
    rows = jnp.where(work.row_of < 0, work.num_rows, work.row_of).reshape(-1)
    return jnp.zeros(work.num_rows, bool).at[rows].set(True, mode="drop")


def _scale(experts: Experts, role: str) -> Float32[Array, "1"] | None:
    scale = experts.input_scale(role)
    return None if scale is None else scale.reshape(1)


def _shape(problem: Problem, environment: Environment) -> Shape:
    assert problem.input_format is not None
    format, inputs = FORMATS[problem.format], INPUT_FORMATS[problem.input_format]
    elements = elements_of(format, inputs)
    assert elements is not None
    blocks_of_inputs = isinstance(inputs.block_size, int)
    by_block = blocks_of_inputs or elements.by_block
    sizes = problem.num_tokens or 1, problem.top_k, problem.num_choices
    outputs = TILE if problem.gate_up_order is None else GATED_ROWS  # of a tile
    hidden, intermediate = problem.padded_from or (problem.hidden_size, problem.intermediate_size)
    tiles = -(-intermediate // outputs), -(-hidden // TILE)
    units = -(-problem.hidden_size // UNIT_COLUMNS), -(-problem.intermediate_size // UNIT_COLUMNS)
    kind = elements.decoded, elements.exact, elements.coded, by_block, blocks_of_inputs
    weighted, num_cores = problem.weights_on == "input", environment.core_count or 1
    return Shape(unit_bytes(format), *kind, *sizes, tiles, units, num_cores, weighted, not inputs.by_token)
