"""Backend `triton`: the whole layer over packed 4-bit weights on Ampere and Ada, by the kernel of `kernel`.

Two grouped products, the activation in the first one's epilogue. Around them plain jnp: rows are gathered by expert
(not for a few tokens: there every active expert picks its own), and each token's results are summed with its routing
weights in float32. Products take bfloat16 and add up in float32; float16 activations are rounded to bfloat16, whose
range float16 does not exceed. Where weights have an order, rows are brought into their expert's before each product.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jmx import grouping
from jmx.experts import Experts
from jmx.numerics import formats
from jmx.pallas.triton.config import FEW_TOKENS, SHARED_MEMORY, Config, candidates, check, heuristic
from jmx.pallas.triton.elements import NAMES, PLACES
from jmx.routing import Routing
from jmx.selection import tuning
from jmx.selection.backend import Reason, Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import Computation, Problem
from jmx.selection.requirements import refusal

_INTERPRETED = (8, 0)  # the compute capability that stands for a machine where the kernel is interpreted


@dataclass(frozen=True)
class Triton:
    """The engine for compute capability 8.0 to 9.0 (A100, A10, L4, L40S, RTX 30 and 40; H100, H200).

    Args:
        interpret: whether Pallas interprets the kernel on a CPU, slowly: for tests, under a name of its own.
    """

    interpret: bool = False

    @property
    def name(self) -> str:
        return "triton_interpreted" if self.interpret else "triton"

    @property
    def summary(self) -> str:
        return "Pallas Triton kernels for Ampere and Ada: 4-bit weights dequantised in registers"

    @property
    def config_type(self) -> type[Config]:
        return Config

    def supports(self, problem: Problem, environment: Environment) -> Rejection | None:
        platform = "cpu" if self.interpret else "gpu"
        if environment.platform != platform:
            return Rejection(
                Reason.PLATFORM,
                f"platform is {environment.platform!r}, not {platform!r}",
                f"run on a {platform.upper()}",
            )
        found = environment.compute_capability
        if not self.interpret and found not in SHARED_MEMORY:
            known = ", ".join(map(str, SHARED_MEMORY))
            return Rejection(
                Reason.COMPUTE_CAPABILITY, f"{found} is none of {known}", "run on an Ampere, Ada or Hopper GPU"
            )
        if problem.format not in NAMES:
            known = formats.FORMATS.get(problem.format)
            bits = "" if known is None else f", of {known.element_bits} bits, not of 4"
            return Rejection(
                Reason.FORMAT,
                f"weights are {problem.format!r}{bits}",
                f"use xla, or quantise to one of {', '.join(NAMES)}",
            )
        for name in ("hidden_size", "intermediate_size"):
            size = getattr(problem, name)
            if size % PLACES:
                detail = f"{name} (={size}) must be a multiple of {PLACES}, elements that are read together"
                return Rejection(Reason.SHAPE, detail, "use xla")
        return refusal(problem, "packed", NAMES)

    def heuristic(self, problem: Problem, environment: Environment) -> Config:
        return heuristic(*_sizes(problem), environment.compute_capability or _INTERPRETED)

    def candidates(self, problem: Problem, environment: Environment) -> Sequence[Config]:
        return candidates(*_sizes(problem), environment.compute_capability or _INTERPRETED)

    def check(self, config: Config, problem: Problem, environment: Environment) -> None:
        del problem  # sizes are no matter: what tiles do not divide is masked
        check(config, environment.compute_capability or _INTERPRETED)

    def apply(
        self,
        computation: Computation,
        x: jax.Array,
        routing: Routing,
        experts: Experts,
        environment: Environment,
    ) -> jax.Array:
        from jmx.pallas.triton.decode import index_of, turned
        from jmx.pallas.triton.kernel import Product, grouped_product

        num_tokens, top_k = routing.expert_ids.shape
        if num_tokens * top_k == 0:
            return jnp.zeros_like(x)
        problem = Problem.of(x, top_k, experts, computation.activation, computation.weights_on)
        config = tuning.config(self, problem, environment).config
        on_input = computation.weights_on == "input"
        every = experts.merged()
        order, down_order = every.gate_up.order, every.down.order
        rows, row_of, users, expert_of_row = x, None, None, None
        if num_tokens <= min(FEW_TOKENS, config.block_m) and not on_input and order is None:
            work = grouping.unsorted(routing.expert_ids, experts.num_experts)
            num_rows = work.blocks.experts.size * num_tokens
            users = None if num_tokens == 1 else (routing.expert_ids.astype(jnp.int32), work.blocks.experts)
        else:
            work = grouping.many(routing.expert_ids, experts.num_experts, config.block_m)
            assert work.token_of_row is not None
            num_rows = work.token_of_row.size
            if order is not None:
                expert_of_row = grouping.expert_of_row(work, routing.expert_ids, num_rows) + experts.first_expert
                rows = x.at[work.token_of_row[:, None], order[expert_of_row]].get(mode="promise_in_bounds")
            elif on_input:
                rows = x.at[work.token_of_row].get(mode="promise_in_bounds")
            else:
                row_of = work.token_of_row
            if on_input:
                rows = grouping.weigh(rows, work, routing.weights)
        blocks = work.blocks.as_arrays()
        blocks = blocks._replace(experts=blocks.experts + experts.first_expert)
        gate_up = Product(
            config, experts.format, num_rows, computation.activation, experts.gate_up_order, self.interpret
        )
        rows = turned(rows.astype(jnp.bfloat16))
        (h,) = grouped_product(rows, row_of, users, every.gate_up, every.gate_up_bias, blocks, gate_up)
        if down_order is not None:
            places = index_of(*reversed(jnp.divmod(down_order[expert_of_row], PLACES)))
            h = turned(jnp.take_along_axis(h, places, axis=1, mode="promise_in_bounds"))
        down = Product(config, experts.format, num_rows, interpret=self.interpret)
        blocks = blocks._replace(x_rows=blocks.out_rows)
        out = grouped_product(h, None, users, every.down, every.down_bias, blocks, down)
        return grouping.combine(out, work, None if on_input else routing.weights).astype(x.dtype)


def _sizes(problem: Problem) -> tuple[int, int, int]:
    return problem.num_tokens or 1, problem.top_k, problem.num_experts
