"""Tokens and results of `peer` in one part, where the kernel that sends results also sums each token's rows."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jmx import meshes
from jmx.backends import registered_backends
from jmx.engines.grouped import Take, Terms, Unsummed
from jmx.experts import Experts
from jmx.ffi.peer import collectives, terms
from jmx.guard import guarded
from jmx.parallel import arriving, needed
from jmx.parallel.exchange import Call, Local
from jmx.parallel.gather import gathered
from jmx.parallel.scatter import scattered
from jmx.parallel.wire import Coded
from jmx.routing import Logits, Routing
from jmx.selection.backend import GivesTerms
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.selection.select import select
from jmx.util.primals import differentiate_as
from jmx.util.typing import Array, Float, Int32, UInt32


def terms_of(
    problem: Problem,
    x: Float[Array, "T H"],
    routing: Routing,
    experts: Experts,
    environment: Environment,
    backend: str | None,
    unsummed: Unsummed,
) -> Terms | None:
    """The layer on one device up to the sum over a token's rows, as `unsummed` asks for it.

    None where that is not apart, or cuts padding off. It has no derivative, and cannot be vmapped. `backend`: the name
    of the one that must run; None: any.
    """
    chosen = select(problem, environment, backend, registered_backends()).backend
    whole = experts.padded_to is None and not experts.format.is_float
    if not isinstance(chosen, GivesTerms) or not whole or not problem.top_k:
        return None
    if unsummed.take is not None and not chosen.takes_rows(problem, experts, environment):
        return None

    def run(x: Float[Array, "T H"], routing: Routing, experts: Experts, take: Take | None) -> Terms:
        return chosen.terms(problem, x, routing, experts.prepare(problem.layout), environment, take)

    experts = experts.with_arrays(guarded(experts.arrays()))
    return meshes.unchecked(run)(*meshes.varying_alike(x, routing, experts, unsummed.take))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def summed(
    call: Call,
    local: Local,
    x: Float[Array, "T H"],
    routing: Routing | Logits,
    arrays: Any,
    firsts: Int32[Array, " R"],
) -> Float[Array, "T H"]:
    """The results of this device's tokens, inside `jax.shard_map`. `firsts`: the first expert of each device.

    Where it is differentiated, or vmapped, sums over a token's rows are a step of their own.
    """

    @custom_vmap
    def at_once(x: Any, routing: Any, arrays: Any, firsts: Any) -> Float[Array, "T H"]:
        apart = call.result_bytes % terms.UNIT_BYTES == 0
        if apart and arriving.applies(call):
            return _returned(call, arriving.computed(call, local, arrays, x, routing), None, x.dtype)
        rows, everyones, ranks = _sent(call, firsts, x, routing)
        results = local(arrays, rows, everyones, Unsummed()) if apart else None
        return _returned(call, local(arrays, rows, everyones) if results is None else results, ranks, x.dtype)

    @at_once.def_vmap
    def of_batch(axis_size: int, in_batched: Any, *arguments: Any) -> tuple[Float[Array, "B T H"], bool]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(in_batched))
        return jax.vmap(partial(_in_steps, call, local), axes, axis_size=axis_size)(*arguments), True

    return at_once(x, routing, arrays, firsts)


def _in_steps(call: Call, local: Local, x: Any, routing: Any, arrays: Any, firsts: Any) -> Float[Array, "T H"]:
    """`summed`, differentiable."""
    rows, everyones, ranks = _sent(call, firsts, x, routing)
    return _returned(call, local(arrays, rows, everyones), ranks, x.dtype)


def _sent(
    call: Call, firsts: Int32[Array, " R"], x: Float[Array, "T H"], routing: Routing | Logits
) -> tuple[Float[Array, "nT H"], Routing | Logits, UInt32[Array, " nT"] | None]:
    """Tokens and routing of all devices, and the devices that need each token, if others do not get it."""
    if needed.applies(call):
        return needed.gathered(call, firsts, x, routing)
    return *gathered(Coded(call.wire, collectives.all_gather), call.axes, x, routing), None


def _returned(call: Call, results: Any, ranks: UInt32[Array, " nT"] | None, dtype: Any) -> Float[Array, "T H"]:
    """This device's tokens' sums over all devices, of results (nT, H) or of `Terms`."""
    if isinstance(results, Terms):
        rows, row_of, weights = results
        weights = jnp.ones(row_of.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)
        return terms.reduce_scatter(rows, row_of, weights, ranks, call.axes, call.hidden_size, dtype)
    if ranks is None:
        return scattered(call.axes, False, results)
    return needed.scattered(call.axes, results, ranks)


differentiate_as(summed, _in_steps)
