"""Routing and grouping at once, of router logits on an NVIDIA GPU: when it is used, and its definition in plain jnp.

The definition is the routing, then its grouping. Derivatives are those of the definition.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmx import meshes
from jmx.engines.grouped import Tiling
from jmx.engines.routed import GroupedRouting, Groups
from jmx.grouping import Blocks, Work
from jmx.pallas import defined
from jmx.pallas.routing.choice import MOST_SLOTS, Choice
from jmx.pallas.routing.sizes import (
    MOST_ELEMENTS,
    MOST_EXPERTS_OF_CHUNKS,
    MOST_OF_CHUNKS,
    Results,
    Sizes,
    power_of_two,
)
from jmx.routing import GroupedTopK, Logits, Method, Routing, SigmoidTopK, SqrtSoftplusTopK
from jmx.routing.logits import route_checked
from jmx.routing.top_k import weigh
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.util.typing import AnyArray, Array, Bool, Float, Float32, Int32, Shaped

LEAST_CAPABILITY = (8, 0)
LOADED = ("float32", "bfloat16", "float16")  # dtypes of logits that the kernel converts itself

# Methods whose weights are computed from the ids beside the products, in plain jnp.
Weighed = SigmoidTopK | SqrtSoftplusTopK | GroupedTopK


class Given(NamedTuple):
    """The arrays of a call, or references to them. Those that it lacks are None.

    Args:
        values: the logits.
        mask: which tokens are routed; the others get no expert.
        bias: the correction bias of the choice.
        first: the first of the experts of the call, if these are some of those among which tokens are routed.
    """

    values: Float[Any, "T E"]
    mask: Bool[Any, " T"] | None = None
    bias: Float32[Any, " E"] | None = None
    first: Int32[Any, " 1"] | None = None


@dataclass(frozen=True)
class Call:
    """What is static of a call.

    Args:
        method: the routing method.
        problem: the layer's call, of which blocks depend on the number of experts and on where weights are multiplied.
            If its experts are some of those among which tokens are routed, rows of others have no blocks.
        tiling: how rows are grouped; None: not at all.
        num_tokens: T.
        biased: whether the choice has a correction bias.
        interpret: whether the kernel runs interpreted wherever the call is lowered, for tests.
    """

    method: Method
    problem: Problem
    tiling: Tiling | None
    num_tokens: int
    biased: bool = False
    interpret: bool = False

    @property
    def sizes(self) -> Sizes:
        """The kernel's."""
        number = self.problem.num_choices
        choice = Choice.of(self.method, self.biased, number)
        assert choice is not None
        grouped = number if self.tiling is None else self.problem.num_experts
        of_form = partial(Sizes, self.num_tokens, number, grouped, self.method.top_k, choice, interpret=self.interpret)
        if self.tiling is None:
            return of_form(None)
        if self.tiling.sorts(self.problem, self.num_tokens):
            return of_form("many", *self.tiling.cut)
        return of_form("few" if self.num_tokens > 1 or self.some else "single", align=self.tiling.align)

    @property
    def some(self) -> bool:
        """Whether the experts are some of those among which tokens are routed."""
        return self.problem.num_routed is not None

    # As `jmx.pallas.defined` has it: results are the leaves of `Results`.

    def shapes(self, given: Given) -> list[jax.ShapeDtypeStruct]:
        del given
        return jax.tree.leaves(Results.shapes(self.sizes))

    def define(self, given: Given) -> list[Shaped[Array, "..."]]:
        results = definition(given, self)
        if Results.shapes(self.sizes).weights is None:
            results = results._replace(weights=None)
        return jax.tree.leaves(results)

    def launch(self, given: Given) -> list[Shaped[Array, "..."]]:
        # Importing Pallas takes a second.
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import triton as plgpu

        from jmx.pallas.routing import chunks
        from jmx.pallas.routing.kernel import kernel

        sizes = self.sizes
        if sizes.chunk is not None:
            return jax.tree.leaves(chunks.launch(*given, sizes))
        return pl.pallas_call(
            partial(kernel, sizes=sizes),
            out_shape=self.shapes(given),
            compiler_params=plgpu.CompilerParams(num_warps=sizes.num_warps, num_stages=1),
            interpret=sizes.interpret,
            name="jmx_route",
        )(*given)


def applies(
    method: Method,
    biased: bool,
    num_tokens: Any,
    num_experts: int,
    environment: Environment,
) -> bool:
    """Whether the kernel is used for `num_tokens` tokens, an int or symbolic, on a machine.

    `biased`: whether the choice has a correction bias.
    """
    has = Choice.of(method, biased, num_experts) is not None
    return has and takes(method.top_k, num_tokens, num_experts, environment)


def takes(top_k: int, num_tokens: Any, num_experts: int, environment: Environment) -> bool:
    """Whether it is used for so many slots, of a method that it has."""
    if environment.platform != "gpu" or (environment.compute_capability or (0, 0)) < LEAST_CAPABILITY:
        return False
    if not isinstance(num_tokens, int) or num_tokens == 0 or not 1 <= top_k <= MOST_SLOTS:
        return False
    elements = power_of_two(num_tokens) * power_of_two(num_experts)
    return elements <= (MOST_OF_CHUNKS if num_experts <= MOST_EXPERTS_OF_CHUNKS else MOST_ELEMENTS)


def notes(problem: Problem, environment: Environment, routed: Method | Routing | None) -> tuple[str, ...]:
    """What `jmx.explain` prints of it, for a call on one device that gets logits with the method `routed`.

    A call that gets a `Routing` has no use for the kernel; None: the method is not known. Where the kernel is used only
    with or only without a correction bias, which is not known here, nothing is printed.
    """
    sizes = problem.num_tokens, problem.num_choices, environment
    if isinstance(routed, Method):
        which, used = "", all(applies(routed, biased, *sizes) for biased in {False, routed.takes_bias})
    else:
        which, used = " with softmax routing", routed is None and takes(problem.top_k, *sizes)
    elements = power_of_two(problem.num_tokens or 1) * power_of_two(problem.num_choices)
    kernels = "one kernel, jmx_route" if elements <= MOST_ELEMENTS else "two kernels, jmx_route and jmx_group"
    return (f"logits{which}: routed and grouped by {kernels}",) if used else ()


def route_and_group(
    logits: Logits, mask: Bool[AnyArray, " T"] | None, call: Call, first: Int32[Array, ""] | None = None
) -> Routing:
    """The routing of checked logits (T, E), with its blocks if the call has a tiling.

    `first`: the first of the experts of the call, if these are some, from which ids of the routing count then.
    """
    values, bias = logits.values, logits.correction_bias
    if values.dtype not in LOADED:
        values = values.astype(jnp.float32)
    bias = None if bias is None else jax.lax.stop_gradient(jnp.asarray(bias, jnp.float32))
    start = None if first is None else jnp.asarray(first, jnp.int32).reshape(1)
    results = routed(Given(values, mask, bias, start), call)
    routing = Routing(results.expert_ids if first is None else results.expert_ids - first, results.weights)
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


def routed(given: Given, call: Call) -> Results:
    """The kernel's results, with the weights; ids are those of all experts among which tokens are routed."""
    values, mask, bias, _ = given = Given(*meshes.varying_alike(*given))
    results = meshes.unchecked(partial(_bind, call=call))(jax.lax.stop_gradient(given))
    if results.weights is not None:
        return results._replace(weights=_differentiable(values, mask, bias, results.weights, call.method))
    method = call.method
    assert isinstance(method, Weighed)
    logits = jnp.asarray(values, jnp.float32)
    weights = weigh(logits, results.expert_ids, method.scoring, renormalize=method.renormalize)
    return results._replace(weights=weights * method.routed_scaling_factor)


@partial(jax.custom_jvp, nondiff_argnums=(4,))
def _differentiable(values: Any, mask: Any, bias: Any, weights: Float32[Array, "T k"], method: Method) -> Any:
    """The weights, with the derivatives of their definition by the logits."""
    del values, mask, bias, method
    return weights


@_differentiable.defjvp
def _derivative(method: Method, primals: Any, tangents: Any) -> tuple[Any, Any]:
    values, mask, bias, _ = primals
    by_token = {} if mask is None else {"mask": mask}

    def defined(values: Any) -> Any:
        return route_checked(by_token | {"values": values}, bias, method).weights

    return _differentiable(*primals, method), jax.jvp(defined, (values,), tangents[:1])[1]


def _bind(given: Given, call: Call) -> Results:
    results = _route_and_group(given, call=call)
    return jax.tree.unflatten(jax.tree.structure(Results.shapes(call.sizes)), results)


def definition(given: Given, call: Call) -> Results:
    """The results in plain jnp; rows of blocks after the last real one differ from the kernel's."""
    values, mask, bias, first = given
    by_token = {"values": values} if mask is None else {"values": values, "mask": mask}
    ids, weights = route_checked(by_token, bias, call.method)
    sizes = call.sizes
    shapes = Results.shapes(sizes)
    if call.tiling is None:
        return shapes._replace(expert_ids=ids, weights=weights)
    work = call.tiling.group(call.problem, Routing(ids if first is None else ids - first, weights))
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
