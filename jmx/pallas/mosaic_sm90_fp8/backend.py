"""Backend `mosaic_fp8`: the whole layer on Hopper's 8-bit tensor cores, by the persistent kernel in `kernel`.

Inputs are quantized to e4m3 or int8, grouped by expert and multiplied; h is quantized again and multiplied. Each token
is quantized once and written to the rows of all its experts: by a separate kernel (`quantize`), or for few rows within
the kernel that multiplies (`fused_quantize`). The combine step sums each token's results with its routing weights in
float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jmx.engines import grouped
from jmx.engines.grouped import Tiling
from jmx.experts import Experts, padding
from jmx.numerics import input_formats
from jmx.numerics.formats import FORMATS, Format
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.pallas.mosaic_sm90_fp8.config import Config, Shape, candidates, heuristic
from jmx.pallas.mosaic_sm90_fp8.elements import elements_of
from jmx.pallas.mosaic_sm90_fp8.layout import LAYOUT, UNIT_COLUMNS, unit_bytes
from jmx.pallas.sm90.config import FEW_TOKENS
from jmx.pallas.sm90.tiles import GATED_ROWS, ROW_ALIGNMENT, TILE, VECTOR
from jmx.routing import Routing
from jmx.selection import tuning
from jmx.selection.backend import Reason, Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.selection.requirements import LimitedBackend, Limits, hidden_and_intermediate, indivisible
from jmx.util.typing import Array, Float

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
        # Importing Pallas takes a second.
        from jmx.pallas.mosaic_sm90_fp8.layer import Layer

        width = x.shape[-1]
        if any(size % VECTOR for size in (experts.hidden_size, experts.intermediate_size)):
            x, experts = padding.widened(x, experts), experts.as_padded()
        config = tuning.config(self, problem, environment).config
        layer = Layer(problem, x, routing, experts, config, environment.core_count or 1)
        return grouped.run(problem, x, routing, self.tiling(problem, environment), layer.results)[:, :width]


def _shape(problem: Problem, environment: Environment) -> Shape:
    assert problem.input_format is not None
    format, inputs = FORMATS[problem.format], INPUT_FORMATS[problem.input_format]
    elements = elements_of(format, inputs)
    assert elements is not None
    inputs_by_block = isinstance(inputs.block_size, int)
    outputs = TILE if problem.gate_up_order is None else GATED_ROWS  # of a tile
    hidden, intermediate = problem.padded_from or (problem.hidden_size, problem.intermediate_size)
    return Shape(
        unit_bytes=unit_bytes(format),
        decoded=elements.decoded,
        exact=elements.exact,
        fast=elements.coded,
        by_block=inputs_by_block or elements.by_block,
        inputs_by_block=inputs_by_block,
        num_tokens=problem.num_tokens or 1,
        top_k=problem.top_k,
        num_experts=problem.num_choices,
        tiles=(-(-intermediate // outputs), -(-hidden // TILE)),
        units=(-(-problem.hidden_size // UNIT_COLUMNS), -(-problem.intermediate_size // UNIT_COLUMNS)),
        num_cores=environment.core_count or 1,
        weighted=problem.weights_on == "input",
        one_scale=not inputs.by_token,
    )
