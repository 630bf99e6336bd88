"""Exchange `rows`: a token is sent once to each rank that has experts of it, in a buffer of fixed size, by all-to-all.

The buffer is bounded, and there are as many rounds as the rows of any rank need, so no row is dropped unless a capacity
is asked for. Gradients take the same rounds: the transpose of sending a row is adding what comes back for it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmx import meshes
from jmx.parallel.exchange import Call, Here, Local
from jmx.parallel.packed_rows import together
from jmx.parallel.row_plan import RowPlan, most_rounds, plan_rows, rounds_needed, rows_of_a_round
from jmx.routing import NOWHERE, Routing
from jmx.util.primals import Perturbed, values_of
from jmx.util.typing import Array, Float, Float32, Int32, Shaped


class Rows:
    """Two all-to-alls a round, of rows with their routing and of results.

    It sends less than `gather` where tokens have no expert on most ranks, and its temporary memory is that of a round.
    """

    name = "rows"
    summary = "all-to-all of one row a (token, rank), in rounds of a bounded buffer, and of the results"

    def supports(self, call: Call) -> str | None:
        """It needs experts that are divided over ranks."""
        if call.num_ranks > 1 and call.experts_per_rank == call.num_experts:
            return "each device has all experts, so every token would be sent to every device: use `gather`"
        if call.chunks > 1:
            return "it has rounds instead of chunks: use `gather`, or leave `chunks` out"
        return None

    def bytes_sent(self, call: Call) -> tuple[int, int]:
        """Bytes that a device sends to others in one round, enough with even routing: buffers are sent whole."""
        rows = (call.num_ranks - 1) * rows_of_a_round(call)
        return rows * call.token_bytes, rows * call.result_bytes

    def apply(self, call: Call, x: Float[Array, "T H"], routing: Any, here: Here) -> Float[Array, "T H"]:
        """See `jmx.parallel.exchange.Exchange`."""
        if not x.size or not call.top_k:
            return jnp.zeros_like(x)
        return _exchanged(call, here.local, *meshes.varying_alike(x, routing, here.arrays, here.first_experts))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _exchanged(
    call: Call, local: Local, x: Float[Array, "T H"], routing: Routing, arrays: Any, first_experts: Int32[Array, " R"]
) -> Float[Array, "T H"]:
    plan = plan_rows(call, routing, first_experts)
    sent = _encoded(call, x)

    def one_round(index: Any, total: Float32[Array, "T H"]) -> Float32[Array, "T H"]:
        rows, ids, weights = _send(call, plan, index, (sent, routing.expert_ids, routing.weights))
        rows = _decoded(call, rows, x)
        results = local(arrays, rows, Routing(ids, weights))
        return _add_returned(call, plan, index, total, _all_to_all(call, results))

    return _rounds(call, plan, one_round, jnp.zeros(x.shape, jnp.float32), x).astype(x.dtype)


def _exchanged_fwd(
    call: Call, local: Local, x: Any, routing: Any, arrays: Any, first_experts: Any
) -> tuple[Float[Array, "T H"], Any]:
    perturbed = Perturbed.of(arrays)
    values = values_of((x, routing, arrays, first_experts))
    return _exchanged(call, local, *values), (*values, perturbed)


def _exchanged_bwd(call: Call, local: Local, residuals: Any, dy: Any) -> tuple[Any, Any, Any, Any]:
    """Each round sends rows again, with the gradients of results: keeping them would take the memory of all rounds."""
    x, routing, arrays, first_experts, perturbed = residuals
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        return None, None, None, None
    plan = plan_rows(call, routing, first_experts)
    wanted, rest = perturbed.split(arrays)
    sent = _encoded(call, x)

    def one_round(index: Any, totals: Any) -> Any:
        dx, dweights, dwanted = totals
        rows, ids, weights, drows = _send(call, plan, index, (sent, routing.expert_ids, routing.weights, dy))
        rows = _decoded(call, rows, x)

        def results(rows: Any, weights: Any, wanted: Any) -> Float[Array, "n H"]:
            return local(perturbed.joined(wanted, rest), rows, Routing(ids, weights))

        gradients = jax.vjp(results, rows, weights, wanted)[1](drows)
        dx = _add_returned(call, plan, index, dx, _all_to_all(call, gradients[0]))
        dweights = _add_returned(call, plan, index, dweights, _all_to_all(call, gradients[1]))
        return dx, dweights, [total + d.astype(jnp.float32) for total, d in zip(dwanted, gradients[2], strict=True)]

    like = (x, routing.weights, wanted)
    zeros = jax.tree.map(lambda array: jnp.zeros(array.shape, jnp.float32), like)
    totals = _rounds(call, plan, one_round, zeros, x)
    dx, dweights, dwanted = jax.tree.map(lambda total, array: total.astype(array.dtype), totals, like)
    return dx, Routing(None, dweights), perturbed.joined(dwanted, [None] * len(rest)), None


_exchanged.defvjp(_exchanged_fwd, _exchanged_bwd, symbolic_zeros=True)


def _encoded(call: Call, x: Float[Array, "T H"]) -> Shaped[Array, "T _"]:
    """x as it is sent."""
    return x if call.wire is None else call.wire.encode(x)


def _decoded(call: Call, rows: Shaped[Array, "n _"], x: Float[Array, "T H"]) -> Float[Array, "n H"]:
    """Rows of x as they are computed with; of an empty row 0."""
    return rows if call.wire is None else call.wire.decode(rows, x.dtype)


def _rounds(call: Call, plan: RowPlan, one_round: Any, zeros: Any, x: Shaped[Array, "..."]) -> Any:
    """`one_round` (its index, totals) -> totals, as often as the rows of all ranks need, starting from zeros.

    Where one round is enough for any routing, no counts are exchanged.
    """
    totals = jax.tree.map(lambda zero: meshes.varying_alike(zero, x)[0], zeros)
    if most_rounds(call) == 1:
        return one_round(0, totals)
    return lax.fori_loop(0, rounds_needed(call, plan), one_round, totals)


def _send(
    call: Call, plan: RowPlan, index: Any, by_token: tuple[Shaped[Array, "T _"], ...]
) -> list[Shaped[Array, "Rn _"]]:
    """The rows that this device receives in a round, those of rank 0 first; empty ones are 0, and their ids NOWHERE."""
    size = rows_of_a_round(call)
    tokens = lax.dynamic_slice_in_dim(plan.tokens, index * size, size, axis=1).reshape(-1)

    def rows(array: Shaped[Array, "T _"]) -> Shaped[Array, "Rn _"]:
        fill = NOWHERE if jnp.issubdtype(array.dtype, jnp.integer) else 0
        return jnp.take(array, tokens, axis=0, mode="fill", fill_value=fill)

    return together(partial(_all_to_all, call), [rows(array) for array in by_token])


def _all_to_all(call: Call, rows: Shaped[Array, "Rn _"]) -> Shaped[Array, "Rn _"]:
    """Rows (R * n, ...), n for each rank, and those of this rank from each."""
    return lax.all_to_all(rows, call.axes, split_axis=0, concat_axis=0, tiled=True)


def _add_returned(
    call: Call, plan: RowPlan, index: Any, total: Float32[Array, "T _"], returned: Float[Array, "Rn _"]
) -> Float32[Array, "T _"]:
    """`total` and, in float32 and in the order of the ranks, what they returned for the rows of each token."""
    size = rows_of_a_round(call)
    for rank in range(call.num_ranks):
        row = plan.position[:, rank] - index * size
        in_round = plan.needed[:, rank] & (row >= 0) & (row < size)
        row = jnp.clip(row, 0, size - 1) + rank * size
        total += jnp.where(in_round[:, None], returned[row].astype(jnp.float32), 0)
    return total
