"""What all engines with grouped products do around them: group, multiply, combine.

A call becomes `Work`, blocks of rows that each belong to one expert. An engine multiplies the rows of each block by its
expert's two weights, with the activation between, in whatever way its kernels want; then each token's rows are summed
with its routing weights. Grouping and combining are plain jnp, and the same for every engine.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jmx import grouping
from jmx.experts import Experts
from jmx.grouping import Blocks, Work
from jmx.routing import Routing
from jmx.selection.problem import Problem

Array = jax.Array


@dataclass(frozen=True)
class Tiling:
    """How an engine wants its rows grouped.

    Args:
        block_m: most rows of a block.
        few_tokens: up to so many tokens nothing is sorted: every expert in use is one block that reads all tokens.
            Not so where routing weights multiply the input, since an expert's rows are then its own.
        align: each block's rows begin at a multiple of it, a power of two.
        whole: whether all blocks of an expert but its last one have `block_m` rows; else they are about equal.
    """

    block_m: int
    few_tokens: int
    align: int = 1
    whole: bool = False

    def group(self, problem: Problem, routing: Routing) -> Work:
        """The blocks of a routing (T, k)."""
        ids, num_experts = routing.expert_ids, problem.num_experts
        if ids.shape[0] <= self.few_tokens and not problem.on_input:
            return grouping.unsorted(ids, num_experts, self.align)
        return grouping.many(ids, num_experts, self.block_m, self.align, whole=self.whole)


def run(problem: Problem, x: Array, routing: Routing, tiling: Tiling, products: Callable[[Work], Array]) -> Array:
    """The layer, y (T, H) of x's dtype.

    `products`: makes floats (P, R, H), whose sum over P is what experts return for the R rows of the blocks.
    """
    with jax.named_scope("grouping"):
        work = tiling.group(problem, routing)
    with jax.named_scope("products"):
        parts = products(work)
    with jax.named_scope("combine"):
        weights = None if problem.on_input else routing.weights
        return grouping.combine(parts, work, weights).astype(x.dtype)


def take(array: Array, rows: Array) -> Array:
    """Rows (R, ...) of an array (T, ...), by numbers that are within it."""
    return array.at[rows].get(mode="promise_in_bounds")


def gather(problem: Problem, x: Array, routing: Routing, work: Work, take: Callable[[Array, Array], Array]) -> Array:
    """The rows (R, H) that sorted blocks read: tokens of x, times their routing weights if on the input."""
    assert work.token_of_row is not None
    return weigh(problem, take(x, work.token_of_row), routing, work)


def weigh(problem: Problem, rows: Array, routing: Routing, work: Work) -> Array:
    """Rows (R, H), times the routing weights of their assignments where these are on the input."""
    return grouping.weigh(rows, work, routing.weights) if problem.on_input else rows


def of_stack(blocks: Blocks, experts: Experts) -> Blocks:
    """Blocks as arrays, with experts numbered in a stack of layers' weights (`experts.merged`)."""
    blocks = blocks.as_arrays()
    return blocks._replace(experts=blocks.experts + experts.first_expert)
