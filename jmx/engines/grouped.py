"""What all backends with grouped GEMMs do around them: group, multiply, combine.

A call becomes `Work`: blocks of rows, each of one expert. A backend multiplies the rows of each block by its expert's
two weights, with the activation in between, as suits its kernels; then each token's rows are summed with its routing
weights. Grouping and combining are plain jnp, the same for every backend.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmx import grouping
from jmx.engines.routed import GroupedRouting
from jmx.experts import Experts
from jmx.grouping import Blocks, Cut, Work
from jmx.routing import Routing
from jmx.selection.problem import Problem
from jmx.util.typing import Array, Float, Int32, Integer, Shaped

# The rows (R, H) that sorted work reads, of a problem, tokens x (T, H) and the work; those of no assignment hold
# anything. It is a pytree of the arrays that it closes over, as `jax.tree_util.Partial`.
Take = Callable[[Problem, Float[Array, "T H"], Work], Float[Array, "R H"]]


@dataclass(frozen=True)
class Tiling:
    """How a backend's rows are grouped.

    Args:
        block_m: the most rows of a block.
        few_tokens: up to so many tokens are not sorted: each expert in use is one block, which reads all tokens. Not if
            routing weights multiply the input, because rows then differ between experts.
        align: each block's rows begin at a multiple of this power of two.
        whole, largest_first: as in `jmx.grouping.Cut`.
    """

    block_m: int
    few_tokens: int
    align: int = 1
    whole: bool = False
    largest_first: bool = False

    @property
    def cut(self) -> Cut:
        """How sorted rows are split."""
        return Cut(self.block_m, self.align, self.whole, self.largest_first)

    def of(self, problem: Problem) -> tuple["Tiling", int, bool]:
        """All that blocks depend on beside the ids."""
        return self, problem.num_experts, problem.on_input

    def sorts(self, problem: Problem, num_tokens: int) -> bool:
        """Whether rows of so many tokens are sorted by expert."""
        return num_tokens > self.few_tokens or problem.on_input

    def group(self, problem: Problem, routing: Routing) -> Work:
        """The blocks of a routing (T, k): those that it has, if they are of this tiling."""
        known = routing.work(self.of(problem)) if isinstance(routing, GroupedRouting) else None
        if known is not None:
            return known
        ids, num_experts = routing.expert_ids, problem.num_experts
        if not self.sorts(problem, ids.shape[0]):
            # Of a single token every slot would be a block, and slots of other devices' experts read weights, too.
            unsorted = grouping.unsorted if problem.num_routed is None else grouping.few
            return unsorted(ids, num_experts, self.align)
        return grouping.many(ids, num_experts, self.cut)


class Terms(NamedTuple):
    """Results whose tokens' rows are not summed yet, in the order of the blocks.

    Args:
        rows: (P, R, W), whose sum over P are the rows, in their first H columns; rows of no assignment hold anything.
        row_of: the row of each assignment, -1 where another device has its expert.
        weights: what rows are multiplied with; None: they are products already.
    """

    rows: Float[Array, "P R W"]
    row_of: Int32[Array, "T k"]
    weights: Float[Array, "T k"] | None


class Unsummed(NamedTuple):
    """Asks for a call without the sum over a token's rows, which has no derivative then.

    It returns `Terms`, or None where that sum is no step of its own, or where x would be read otherwise than by `take`.

    take: reads x, which gets its values later; None: x has them.
    """

    take: Take | None = None


def terms(
    problem: Problem, routing: Routing, tiling: Tiling, products: Callable[[Work], Float[Array, "P R W"]]
) -> Terms:
    """The layer up to its last step; `products`: as of `run`, but with any columns after the H of results."""
    with jax.named_scope("grouping"):
        work = tiling.group(problem, routing)
    with jax.named_scope("products"):
        return Terms(products(work), work.row_of, None if problem.on_input else routing.weights)


def run(
    problem: Problem,
    x: Float[Array, "T H"],
    routing: Routing,
    tiling: Tiling,
    products: Callable[[Work], Float[Array, "P R H"]],
    combine: Callable[..., Float[Array, "T H"]] = grouping.combine,
) -> Float[Array, "T H"]:
    """The layer, y (T, H) of x's dtype.

    `products`: computes floats (P, R, H), whose sum over P is the experts' result for the R rows of the blocks.
    `combine`: as `grouping.combine`; its result may be of x's dtype.
    """
    with jax.named_scope("grouping"):
        work = tiling.group(problem, routing)
    with jax.named_scope("products"):
        parts = products(work)
    with jax.named_scope("combine"):
        weights = None if problem.on_input else routing.weights
        return combine(parts, work, weights).astype(x.dtype)


def take(x: Shaped[Array, "T ..."], rows: Int32[Array, " R"]) -> Shaped[Array, "R ..."]:
    """Rows (R, ...) of x (T, ...); all indices must be in range."""
    return x.at[rows].get(mode="promise_in_bounds")


def take_rows(x: Shaped[Array, "T H"], index: Integer[Array, " R"]) -> Shaped[Array, "R H"]:
    """`take`, by pairs of columns where these are 32 bits."""
    return take_pairs(x, index) if x.dtype.itemsize == 2 and x.shape[1] % 2 == 0 else take(x, index)


def take_pairs(x: Shaped[Array, "T H"], index: Integer[Array, " R"]) -> Shaped[Array, "R H"]:
    """Rows of x, H even and 16 bits an element. Gathering pairs of columns takes two thirds of the time."""
    words = lax.bitcast_convert_type(x.reshape(x.shape[0], -1, 2), jnp.uint32)
    rows = lax.bitcast_convert_type(words.at[index].get(mode="promise_in_bounds"), x.dtype)
    return rows.reshape(index.size, x.shape[1])


def gather(
    problem: Problem,
    x: Float[Array, "T H"],
    routing: Routing,
    work: Work,
    take: Callable[[Float[Array, "T H"], Int32[Array, " R"]], Float[Array, "R H"]],
) -> Float[Array, "R H"]:
    """The rows (R, H) that sorted blocks read: tokens of x, times their routing weights if these are on the input."""
    assert work.token_of_row is not None
    return weigh(problem, take(x, work.token_of_row), routing, work)


def weigh(problem: Problem, rows: Float[Array, "R H"], routing: Routing, work: Work) -> Float[Array, "R H"]:
    """Rows (R, H), times the routing weights of their assignments if these are on the input."""
    return grouping.weigh(rows, work, routing.weights) if problem.on_input else rows


def of_stack(blocks: Blocks, experts: Experts) -> Blocks:
    """Blocks as arrays, with experts numbered among those of all layers of a stack (`experts.merged`)."""
    blocks = blocks.as_arrays()
    return blocks._replace(experts=blocks.experts + experts.first_expert)
