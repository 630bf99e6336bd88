"""Routing and grouping at once, of router logits on an NVIDIA GPU: when it is used, and its definition in plain jnp.

The call is a primitive. Lowered for a GPU it is the kernel; for other platforms, in exported programs, of which Triton
kernels are no stable part, and under vmap it is what it is defined as: the routing, then its grouping. Derivatives are
those of the definition.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jmx import meshes
from jmx.engines.grouped import Tiling
from jmx.engines.routed import GroupedRouting, Groups
from jmx.grouping import Blocks, Work
from jmx.pallas.quiet import lower_quietly
from jmx.pallas.routing.choice import MOST_SLOTS, Choice
from jmx.pallas.routing.sizes import Results, Sizes, power_of_two
from jmx.routing import GroupedTopK, Logits, Method, Routing, SigmoidTopK, SqrtSoftplusTopK
from jmx.routing.logits import route_checked
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.util.typing import AnyArray, Array, Bool, Float, Float32, Shaped

LEAST_CAPABILITY = (8, 0)
MOST_ELEMENTS = 1 << 13  # of tokens by experts, both rounded up to powers of two: with more, XLA's kernels take less
LOADED = ("float32", "bfloat16", "float16")  # dtypes of logits that the kernel converts itself

# Methods whose weights are computed from the ids beside the products, in plain jnp.
Weighed = SigmoidTopK | SqrtSoftplusTopK | GroupedTopK


@dataclass(frozen=True)
class Call:
    """What is static of a call.

    Args:
        method: the routing method.
        problem: the layer's call, of which blocks depend on the number of experts and on where weights are multiplied.
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
        choice = Choice.of(self.method, self.biased, self.problem.num_experts)
        assert choice is not None
        sizes = self.num_tokens, self.problem.num_experts, self.method.top_k, choice
        if self.tiling is None:
            return Sizes(*sizes, None, interpret=self.interpret)
        if self.tiling.sorts(self.problem, self.num_tokens):
            cut = self.tiling.block_m, self.tiling.align, self.tiling.whole
            return Sizes(*sizes, "many", *cut, interpret=self.interpret)
        form = "single" if self.num_tokens == 1 else "few"
        return Sizes(*sizes, form, align=self.tiling.align, interpret=self.interpret)


def applies(logits: Logits, num_tokens: Any, environment: Environment) -> bool:
    """Whether the kernel is used for checked logits of `num_tokens` tokens, an int or symbolic, on a machine."""
    num_experts, biased = logits.values.shape[-1], logits.correction_bias is not None
    has = Choice.of(logits.method, biased, num_experts) is not None
    return has and takes(logits.method.top_k, num_tokens, num_experts, environment)


def takes(top_k: int, num_tokens: Any, num_experts: int, environment: Environment) -> bool:
    """Whether it is used for so many slots, of a method that it has."""
    if environment.platform != "gpu" or (environment.compute_capability or (0, 0)) < LEAST_CAPABILITY:
        return False
    if not isinstance(num_tokens, int) or num_tokens == 0 or not 1 <= top_k <= MOST_SLOTS:
        return False
    return power_of_two(num_tokens) * power_of_two(num_experts) <= MOST_ELEMENTS


def notes(problem: Problem, environment: Environment, *, divided: bool) -> list[str]:
    """What `jmx.explain` prints of it. `divided`: whether experts are on several devices, so that ids change."""
    if divided or not takes(problem.top_k, problem.num_tokens, problem.num_experts, environment):
        return []
    return ["logits, by most routing methods: routed and grouped by one kernel, jmx_route"]


def route_and_group(logits: Logits, mask: Bool[AnyArray, " T"] | None, call: Call) -> Routing:
    """The routing of checked logits (T, E), with its blocks if the call has a tiling."""
    values, bias = logits.values, logits.correction_bias
    if values.dtype not in LOADED:
        values = values.astype(jnp.float32)
    bias = None if bias is None else jax.lax.stop_gradient(jnp.asarray(bias, jnp.float32))
    results = routed(values, mask, bias, call)
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


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def routed(
    values: Float[AnyArray, "T E"], mask: Bool[AnyArray, " T"] | None, bias: Float32[AnyArray, " E"] | None, call: Call
) -> Results:
    """The kernel's results, with the weights."""
    results = meshes.unchecked(partial(_bind, call=call))(values, mask, bias)
    if results.weights is not None:
        return results
    assert isinstance(call.method, Weighed)
    return results._replace(weights=call.method.weigh(jnp.asarray(values, jnp.float32), results.expert_ids))


@routed.defjvp
def _derivative(call: Call, primals: Any, tangents: Any) -> tuple[Results, Results]:
    values, mask, bias = primals
    _, of_results = jax.jvp(lambda values: definition(values, mask, bias, call), (values,), tangents[:1])
    return routed(values, mask, bias, call), of_results


@partial(jax.jit, static_argnames="call")  # so that no call is evaluated outside of a program
def _bind(
    values: Float[AnyArray, "T E"],
    mask: Bool[AnyArray, " T"] | None,
    bias: Float32[AnyArray, " E"] | None,
    *,
    call: Call,
) -> Results:
    given = jax.tree.leaves((values, mask, bias))
    results = _route_p.bind(*given, masked=mask is not None, call=call)
    return jax.tree.unflatten(jax.tree.structure(Results.shapes(call.sizes)), results)


def definition(
    values: Float[AnyArray, "T E"], mask: Bool[AnyArray, " T"] | None, bias: Float32[AnyArray, " E"] | None, call: Call
) -> Results:
    """The results in plain jnp; rows of blocks after the last real one differ from the kernel's."""
    by_token = {"values": values} if mask is None else {"values": values, "mask": mask}
    ids, weights = route_checked(by_token, bias, call.method)
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


_route_p = Primitive("jmx_route_and_group")
_route_p.multiple_results = True


@_route_p.def_abstract_eval
def _abstract(*given: Any, masked: bool, call: Call) -> list[ShapedArray]:
    del given, masked
    return [ShapedArray(shape.shape, shape.dtype) for shape in jax.tree.leaves(Results.shapes(call.sizes))]


def _parts(given: Any, masked: bool) -> tuple[Any, Any, Any]:
    """Values, mask and bias, the last two of which may be None."""
    values, *rest = given
    mask = rest.pop(0) if masked else None
    return values, mask, rest[0] if rest else None


def _defined(*given: Shaped[Array, "..."], masked: bool, call: Call) -> list[Shaped[Array, "..."]]:
    results = definition(*_parts(given, masked), call)
    if Results.shapes(call.sizes).weights is None:
        results = results._replace(weights=None)
    return jax.tree.leaves(results)


def _launched(*given: Shaped[Array, "..."], masked: bool, call: Call) -> list[Shaped[Array, "..."]]:
    # Importing Pallas takes a second.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    from jmx.pallas.routing.kernel import kernel

    sizes = call.sizes

    def body(*refs: Any) -> None:
        kernel(*_parts(refs[: len(given)], masked), *refs[len(given) :], sizes=sizes)

    with jax.enable_x64(False):
        return pl.pallas_call(
            body,
            out_shape=jax.tree.leaves(Results.shapes(sizes)),
            compiler_params=plgpu.CompilerParams(num_warps=sizes.num_warps, num_stages=1),
            interpret=sizes.interpret,
            name="jmx_route",
        )(*given)


def _lower(context: Any, *given: Any, **static: Any) -> Any:
    function = _launched if static["call"].interpret else _defined
    return mlir.lower_fun(partial(function, **static))(context, *given)


def _lower_for_gpu(context: Any, *given: Any, **static: Any) -> Any:
    if context.module_context.lowering_parameters.for_export:
        return _lower(context, *given, **static)
    return lower_quietly(partial(_launched, **static), context, *given, multiple_results=True)


def _batch(given: Any, axes: Any, **static: Any) -> Any:
    results = jax.vmap(partial(_defined, **static), axes)(*given)
    return results, [0] * len(results)


mlir.register_lowering(_route_p, _lower)
mlir.register_lowering(_route_p, _lower_for_gpu, platform="cuda")
batching.primitive_batchers[_route_p] = _batch
_route_p.def_impl(_defined)


def tiling_of(backend: Any, problem: Problem, environment: Environment) -> Tiling | None:
    """How a backend's rows are grouped; None if it groups them itself, or one product at a time, as adapters need."""
    grouped = isinstance(backend, Groups) and not problem.adapters
    return backend.tiling(problem, environment) if grouped else None
