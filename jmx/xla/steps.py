"""The loop over blocks of rows that are sorted by expert, and what one step of it computes.

A step dequantizes the weights of its blocks' experts, so memory depends neither on E nor on the number of experts in
use.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jmx import activations, grouping
from jmx.experts import Experts
from jmx.numerics import input_formats
from jmx.routing import Routing
from jmx.selection.problem import Problem
from jmx.util.typing import Array, Float, Float32, Int32
from jmx.xla import dot


class Step(NamedTuple):
    """C blocks of M rows, which one step of the loop computes. Rows past the end of a block have number R, or T."""

    experts: Int32[Array, " C"]
    assignments: Int32[Array, "C M"]
    tokens: Int32[Array, "C M"]


def block_sizes(num_tokens: int, top_k: int, num_experts: int) -> tuple[int, int]:
    """Rows per block (M), and blocks per step (C).

    A block dequantizes its expert once, so blocks can hold somewhat more than an expert's average rows. With few
    rows a step costs more than its products, so several blocks share a step; memory holds the weights of one step.
    """
    share = -(-num_tokens * top_k // num_experts)
    block_m = min(1024, max(8, 1 << (2 * share - 1).bit_length()))
    return block_m, 4 if block_m <= 64 else 2 if block_m <= 256 else 1


def loop(routing: Routing, num_experts: int, body: Callable[[Step, Any], Any], init: Any) -> Any:
    """Folds `body` over the blocks of a routing (T, k), C blocks per step."""
    num_tokens, top_k = routing.expert_ids.shape
    num_assignments = num_tokens * top_k
    block_m, num_blocks = block_sizes(num_tokens, top_k, num_experts)
    groups = grouping.group(routing.expert_ids, num_experts)
    blocks = grouping.split_groups(groups.sizes, num_assignments, block_m)
    bound = blocks.experts.size

    def step(first: Int32[Array, ""], carry: Any) -> Any:
        index = first + jnp.arange(num_blocks)
        inside = (index < blocks.num_blocks)[:, None]
        index = jnp.minimum(index, bound - 1)  # past the end: the last block's expert, without rows
        rows = blocks.x_rows[index][:, None] + jnp.arange(block_m)[None]
        inside &= jnp.arange(block_m)[None] < blocks.counts[index][:, None]
        assignments = jnp.where(inside, groups.order[jnp.where(inside, rows, 0)], num_assignments)
        return body(Step(blocks.experts[index], assignments, assignments // top_k), carry)

    _, carry = lax.while_loop(
        lambda state: state[0] < blocks.num_blocks,
        lambda state: (state[0] + num_blocks, step(*state)),
        (jnp.int32(0), init),
    )
    return carry


def compute_dtype(problem: Problem) -> Any:
    return jnp.bfloat16 if problem.dtype == "bfloat16" and problem.input_format is None else jnp.float32


def round_inputs(problem: Problem, experts: Experts, role: str, a: Float[Array, "*rows K"]) -> Float[Array, "*rows K"]:
    """The inputs of a product, rounded to the input format if there is one; then float32."""
    if problem.input_format is None:
        return a
    format = input_formats.INPUT_FORMATS[problem.input_format]
    return input_formats.dequantize(input_formats.quantize(a, format, experts.input_scale(role)), format)


def activation_dtype(x: Float[Array, "..."]) -> Any:
    """The dtype of activations between the two products."""
    return jnp.float32 if x.dtype == jnp.float16 else x.dtype


class StepWeights:
    """The weights of the experts of one step, dequantized where they are used."""

    def __init__(self, experts: Experts, chosen: Int32[Array, " C"], dtype: Any):
        self._experts, self._chosen, self._dtype = experts, chosen, dtype

    def product(self, role: str, a: Float[Array, "C M K"]) -> Float32[Array, "C M N"]:
        """a (C, M, K) times the role's weight, plus its bias -> float32 (C, M, N)."""
        y = self.unbiased(role, a)
        bias = self._experts.take_bias(role, self._chosen)
        return y if bias is None else y + bias[:, None].astype(jnp.float32)

    def unbiased(self, role: str, a: Float[Array, "C M K"]) -> Float32[Array, "C M N"]:
        """`product` without the bias."""
        return self._dot(role, a)

    def transposed(self, role: str, dy: Float[Array, "C M N"]) -> Float32[Array, "C M K"]:
        """dy (C, M, N) times the transposed weight of the role -> float32 (C, M, K)."""
        return self._dot(role, dy, transposed=True)

    def _dot(self, role: str, a: Float[Array, "C M in"], transposed: bool = False) -> Float32[Array, "C M out"]:
        q = self._experts.take(role, self._chosen)
        return dot.dequantized_dot(a, q, self._experts.format, self._dtype, transposed=transposed)


def packed_for_loop(experts: Experts) -> Experts:
    """Experts in a layout whose slices are cheap inside a loop."""
    # On a GPU packing is a bitcast. On a CPU it copies once; float4 arrays would be widened by each slice in the loop.
    return experts.prepare("packed") if experts.layout == "canonical" else experts


def inputs_of_down(
    problem: Problem,
    x: Float[Array, "T H"],
    weight: Float32[Array, "C M 1"],
    experts: Experts,
    *,
    step: Step,
    step_weights: StepWeights,
) -> Float[Array, "C M I"]:
    """The inputs of the second product, not rounded yet, in one step; `weight`: the routing weights of its rows."""
    rows = x.at[step.tokens].get(mode="fill", fill_value=0)
    if problem.on_input:
        rows = grouping.weighted(rows, weight)
    h = step_weights.product("gate_up", round_inputs(problem, experts, "gate_up", rows))
    a = activations.apply(problem.activation, h, experts.gate_up_order, step.experts)
    return a.astype(activation_dtype(x))


def scatter_add(
    total: Float32[Array, "..."], index: Int32[Array, "C ..."], rows: Float32[Array, "C ..."]
) -> Float32[Array, "..."]:
    """Adds rows (C, ...) at index (C, ...), block after block; indices past the end are dropped.

    A token occurs once in a block, but possibly in several blocks of a step, which one scatter would add in any order.
    """
    for i, row in zip(index, rows, strict=True):
        total = total.at[i].add(row, mode="drop")
    return total
