"""Backend `triton`: the whole layer over packed 4-bit weights on Ampere and Ada, by the kernel of `grouped_gemm`.

Two grouped GEMMs, with the activation in the epilogue of the first. The kernel gathers the rows of sorted tokens; of a
few unsorted tokens, each block selects its own. Products take bfloat16 and accumulate in float32; float16 activations
are rounded to bfloat16, whose range includes float16's. For weights with a column order, rows are gathered in the order
of their expert before each product.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from jmx import grouping
from jmx.engines import grouped
from jmx.engines.grouped import Tiling
from jmx.experts import Experts
from jmx.grouping import Work
from jmx.numerics.formats import FORMATS
from jmx.pallas.triton.config import FEW_TOKENS, SHARED_MEMORY, Config, candidates, check, heuristic
from jmx.pallas.triton.ptx import FORMAT_NAMES, WORD_ELEMENTS
from jmx.routing import Routing
from jmx.selection import tuning
from jmx.selection.backend import Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.selection.requirements import Limits, hidden_and_intermediate, indivisible
from jmx.util.typing import Array, Float

_INTERPRETED = (8, 0)  # the compute capability assumed where the kernel is interpreted

LIMITS = Limits(
    platform="gpu",
    capabilities=tuple(SHARED_MEMORY),
    machine="an Ampere, Ada or Hopper GPU",
    formats=FORMAT_NAMES,
    dtypes=("bfloat16", "float16"),
    layout="packed",
)
INTERPRETED_LIMITS = dataclasses.replace(LIMITS, platform="cpu", capabilities=None, machine="")


@dataclass(frozen=True)
class Triton:
    """The backend for compute capability 8.0 to 9.0 (A100, A10, L4, L40S, RTX 30 and 40; H100, H200).

    Args:
        interpret: whether Pallas interprets the kernel on a CPU, slowly; for tests. It has another name.
    """

    interpret: bool = False
    summary: str = "Pallas Triton kernels for Ampere and Ada: 4-bit weights dequantized in registers"
    config_type: type[Config] = Config

    @property
    def name(self) -> str:
        return "triton_interpreted" if self.interpret else "triton"

    def supports(self, problem: Problem, environment: Environment) -> Rejection | None:
        limits = INTERPRETED_LIMITS if self.interpret else LIMITS
        return limits.rejection(problem, environment, _sizes_fit)

    def heuristic(self, problem: Problem, environment: Environment) -> Config:
        return heuristic(*_sizes(problem), environment.compute_capability or _INTERPRETED)

    def candidates(self, problem: Problem, environment: Environment) -> Sequence[Config]:
        return candidates(*_sizes(problem), environment.compute_capability or _INTERPRETED)

    def check(self, config: Config, problem: Problem, environment: Environment) -> None:
        del problem  # any size fits: elements outside of it are masked
        check(config, environment.compute_capability or _INTERPRETED)

    def tiling(self, problem: Problem, environment: Environment) -> Tiling:
        config = tuning.config(self, problem, environment).config
        block_m, narrows = config.block_m, config.narrow_m > 0
        ordered = "order" in FORMATS[problem.format].arrays
        return Tiling(block_m, 0 if ordered else min(FEW_TOKENS, block_m), whole=narrows, largest_first=narrows)

    def apply(
        self, problem: Problem, x: Float[Array, "T H"], routing: Routing, experts: Experts, environment: Environment
    ) -> Float[Array, "T H"]:
        # Pallas takes a second to import.
        from jmx.pallas.triton.decode import permute_columns, permuted_index
        from jmx.pallas.triton.grouped_gemm import grouped_product
        from jmx.pallas.triton.product import Product

        config = tuning.config(self, problem, environment).config
        merged = experts.merged()
        order, down_order = merged.gate_up.order, merged.down.order

        def products(work: Work) -> Float[Array, "P R H"]:
            rows, row_of, users, expert_of_row = x, None, None, None
            if work.token_of_row is None:  # a few tokens, from which each block selects its own
                if x.shape[0] > 1:
                    users = routing.expert_ids.astype(jnp.int32), work.blocks.experts
            elif order is not None:
                expert_of_row = grouping.expert_of_row(work, routing.expert_ids, work.num_rows) + experts.first_expert
                rows = x.at[work.token_of_row[:, None], order[expert_of_row]].get(mode="promise_in_bounds")
                rows = grouped.weigh(problem, rows, routing, work)
            elif problem.on_input:
                rows = grouped.gather(problem, x, routing, work, grouped.take)
            else:  # the kernel gathers
                row_of = work.token_of_row
            blocks = grouped.of_stack(work.blocks, experts)
            gate_up = Product(
                *(config, experts.format, work.num_rows, problem.activation),
                *(problem.num_experts, experts.gate_up_order, self.interpret),
            )
            rows = permute_columns(rows.astype(jnp.bfloat16))
            (h,) = grouped_product(rows, row_of, users, merged.gate_up, merged.gate_up_bias, blocks, gate_up)
            if down_order is not None:
                word, position = jnp.divmod(down_order[expert_of_row], WORD_ELEMENTS)
                index = permuted_index(position, word)
                h = permute_columns(jnp.take_along_axis(h, index, axis=1, mode="promise_in_bounds"))
            down = dataclasses.replace(gate_up, activation=None, gate_up_order=None)
            blocks = blocks._replace(x_rows=blocks.out_rows)
            return grouped_product(h, None, users, merged.down, merged.down_bias, blocks, down)

        return grouped.run(problem, x, routing, self.tiling(problem, environment), products)


def _sizes_fit(problem: Problem) -> Rejection | None:
    return indivisible(hidden_and_intermediate(problem), WORD_ELEMENTS, "elements that are read together")


def _sizes(problem: Problem) -> tuple[int, int, int]:
    return problem.num_tokens or 1, problem.top_k, problem.num_choices
