"""Routing and grouping at once, of router logits on an NVIDIA GPU: when it is used, and its definition in plain jnp.

The definition is the routing, then its grouping. Derivatives are those of the definition.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jmx import meshes
from jmx.engines.grouped import Tiling
from jmx.engines.routed import GroupedRouting, Groups
from jmx.grouping import Blocks, Work
from jmx.pallas import defined
from jmx.pallas.routing.sizes import Results, Sizes
from jmx.routing import Method, Routing, SoftmaxTopK, TopKSoftmax
from jmx.routing.logits import route_checked
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.util.typing import AnyArray, Array, Bool, Float, Shaped

LEAST_CAPABILITY = (8, 0)
MOST_ELEMENTS = 1 << 13  # of tokens by experts, both rounded up to powers of two: with more, XLA's kernels take less
LOADED = ("float32", "bfloat16", "float16")  # dtypes of logits that the kernel converts itself
MOST_SLOTS = 8  # each is a pass; and sums of more weights have no order that is defined


@dataclass(frozen=True)
class Call:
    """What is static of a call.

    Args:
        method: the routing method.
        problem: the layer's call, of which blocks depend on the number of experts and on where weights are multiplied.
        tiling: how rows are grouped; None: not at all.
        num_tokens: T.
        interpret: whether the kernel runs interpreted wherever the call is lowered, for tests.
    """

    method: Method
    problem: Problem
    tiling: Tiling | None
    num_tokens: int
    interpret: bool = False

    @property
    def sizes(self) -> Sizes:
        """The kernel's."""
        assert isinstance(self.method, TopKSoftmax | SoftmaxTopK)
        renormalize = isinstance(self.method, TopKSoftmax) or self.method.renormalize
        sizes = self.num_tokens, self.problem.num_experts, self.method.top_k, renormalize
        if self.tiling is None:
            return Sizes(*sizes, None, interpret=self.interpret)
        if self.tiling.sorts(self.problem, self.num_tokens):
            cut = self.tiling.block_m, self.tiling.align, self.tiling.whole
            return Sizes(*sizes, "many", *cut, interpret=self.interpret)
        form = "single" if self.num_tokens == 1 else "few"
        return Sizes(*sizes, form, align=self.tiling.align, interpret=self.interpret)

    # As `jmx.pallas.defined` has it: operands are logits and perhaps a mask, results the leaves of `Results`.

    def shapes(self, *_: Any) -> list[jax.ShapeDtypeStruct]:
        return jax.tree.leaves(Results.shapes(self.sizes))

    def define(self, values: Float[Array, "T E"], *mask: Bool[Array, " T"]) -> list[Shaped[Array, "..."]]:
        return jax.tree.leaves(definition(values, mask[0] if mask else None, self))

    def launch(self, values: Float[Array, "T E"], *mask: Bool[Array, " T"]) -> list[Shaped[Array, "..."]]:
        # Importing Pallas takes a second.
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import triton as plgpu

        from jmx.pallas.routing.kernel import kernel

        sizes = self.sizes

        def body(values: Any, *refs: Any) -> None:
            its, outs = (refs[0], refs[1:]) if mask else (None, refs)
            kernel(values, its, *outs, sizes=sizes)

        return pl.pallas_call(
            body,
            out_shape=self.shapes(),
            compiler_params=plgpu.CompilerParams(num_warps=sizes.num_warps, num_stages=1),
            interpret=sizes.interpret,
            name="jmx_route",
        )(values, *mask)


def applies(method: Method, num_tokens: Any, num_experts: int, environment: Environment) -> bool:
    """Whether the kernel is used for `num_tokens` tokens, an int or symbolic, on a machine."""
    softmax = type(method) in (TopKSoftmax, SoftmaxTopK)  # a subclass may route in another way
    return softmax and takes(method.top_k, num_tokens, num_experts, environment)


def takes(top_k: int, num_tokens: Any, num_experts: int, environment: Environment) -> bool:
    """Whether it is used for a softmax and so many slots."""
    if environment.platform != "gpu" or (environment.compute_capability or (0, 0)) < LEAST_CAPABILITY:
        return False
    if not isinstance(num_tokens, int) or num_tokens == 0 or not 1 <= top_k <= MOST_SLOTS:
        return False
    tokens, experts = Sizes(num_tokens, num_experts, top_k, True, None).tile
    return tokens * experts <= MOST_ELEMENTS


def notes(problem: Problem, environment: Environment, routed: Method | Routing | None) -> tuple[str, ...]:
    """What `jmx.explain` prints of it, for a call on one device that gets logits with the method `routed`.

    A call that gets a `Routing` has no use for the kernel; None: the method is not known.
    """
    sizes = problem.num_tokens, problem.num_experts, environment
    if isinstance(routed, Method):
        which, used = "", applies(routed, *sizes)
    else:
        which, used = " with softmax routing", routed is None and takes(problem.top_k, *sizes)
    return (f"logits{which}: routed and grouped by one kernel, jmx_route",) if used else ()


def route_and_group(values: Float[AnyArray, "T E"], mask: Bool[AnyArray, " T"] | None, call: Call) -> Routing:
    """The routing of checked logits, with its blocks if the call has a tiling."""
    if values.dtype not in LOADED:
        values = values.astype(jnp.float32)
    results = routed(values, mask, call)
    routing = Routing(results.expert_ids, results.weights)
    if call.tiling is None:
        return routing
    return GroupedRouting.of(routing, call.tiling.of(call.problem), _work(results, call))


def _work(results: Results, call: Call) -> Work:
    sizes = call.sizes
    if sizes.form == "many":
        blocks = Blocks(results.experts, results.rows, results.rows, results.counts, results.num_blocks)
    else:
        number = sizes.num_blocks if sizes.form == "single" else results.num_blocks
        blocks = Blocks(results.experts, 0, sizes.stride, sizes.num_tokens, number)
    return Work(blocks._replace(counters=results.counters), results.row_of, results.token_of_row)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def routed(values: Float[AnyArray, "T E"], mask: Bool[AnyArray, " T"] | None, call: Call) -> Results:
    return meshes.unchecked(partial(_bind, call=call))(values, mask)


@routed.defjvp
def _derivative(call: Call, primals: Any, tangents: Any) -> tuple[Results, Results]:
    values, mask = primals
    _, of_results = jax.jvp(lambda values: definition(values, mask, call), (values,), tangents[:1])
    return routed(values, mask, call), of_results


def _bind(values: Float[AnyArray, "T E"], mask: Bool[AnyArray, " T"] | None, *, call: Call) -> Results:
    given = (values,) if mask is None else (values, mask)
    return jax.tree.unflatten(jax.tree.structure(Results.shapes(call.sizes)), _route_and_group(*given, call=call))


def definition(values: Float[AnyArray, "T E"], mask: Bool[AnyArray, " T"] | None, call: Call) -> Results:
    """The results in plain jnp; rows of blocks after the last real one differ from the kernel's."""
    by_token = {"values": values} if mask is None else {"values": values, "mask": mask}
    ids, weights = route_checked(by_token, None, call.method)
    sizes = call.sizes
    shapes = Results.shapes(sizes)
    if call.tiling is None:
        return shapes._replace(expert_ids=ids, weights=weights)
    work = call.tiling.group(call.problem, Routing(ids, weights))
    blocks = work.blocks
    return Results(
        expert_ids=ids,
        weights=weights,
        row_of=work.row_of,
        experts=blocks.experts,
        counters=jnp.zeros(shapes.counters.shape, jnp.int32),
        num_blocks=None if shapes.num_blocks is None else jnp.broadcast_to(blocks.num_blocks, blocks.experts.shape),
        rows=None if shapes.rows is None else blocks.x_rows,
        counts=None if shapes.counts is None else blocks.counts,
        token_of_row=work.token_of_row,
    )


_route_and_group = defined.primitive("jmx_route_and_group")


def tiling_of(backend: Any, problem: Problem, environment: Environment) -> Tiling | None:
    """How a backend's rows are grouped; None if it groups them itself, or one product at a time, as adapters need."""
    grouped = isinstance(backend, Groups) and not problem.adapters
    return backend.tiling(problem, environment) if grouped else None
