"""The reference backend: plain jnp, exact semantics, every platform. All other backends are tested against it.

Few assignments: each (token, expert) pair is computed by itself, straight from the bytes of its expert's weights.
Many: rows are sorted by expert and cut into blocks, and a loop over the blocks that exist expands the weights of the
experts at hand. Either way work grows with the experts that tokens use, and memory neither with E nor with those used.

Inputs of a product are rounded to their format first, where there is one, and multiplied in float32 as what they are
then worth. Gradients pass that rounding straight through.

Products: other bfloat16 activations meet weights expanded to bfloat16; float32 and float16 ones meet float32 weights at
`Precision.HIGHEST`; sums are float32. Between the two products the activation is rounded to x's dtype (float16 stays
float32, which its range would not hold). A token's result does not depend on its neighbours: it is summed in the order
of its slots (few) or of its experts' ids (many). Only a token that names one expert twice may find those two sums in
either order on a GPU.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmx import activations, grouping
from jmx.experts import Experts
from jmx.numerics import input_formats
from jmx.numerics.formats import MXFP4
from jmx.routing import Routing
from jmx.selection.backend import Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.selection.requirements import Limits
from jmx.xla import dot

Array = jax.Array

_TURN = 8  # assignments whose bytes may be copied at a time

LIMITS = Limits(input_formats=None)


@dataclass(frozen=True)
class Xla:
    """The backend object of this file; see `jmx.selection.backend.Backend`."""

    name: str = "xla"
    summary: str = "reference in plain jnp, any platform"

    def supports(self, problem: Problem, environment: Environment) -> Rejection | None:
        return LIMITS.rejection(problem, environment)

    def apply(self, problem: Problem, x: Array, routing: Routing, experts: Experts, environment: Environment) -> Array:
        del environment
        return forward(problem, x, routing, experts)


class _Step(NamedTuple):
    """C blocks of M rows that one turn of the loop works on."""

    experts: Array  # (C,) int32
    assignments: Array  # (C, M) int32, R where there is no row
    tokens: Array  # (C, M) int32, T where there is no row


def _few(num_tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether each assignment reads its expert's weights by itself.

    On an H200 (gpt-oss's sizes) that takes 7 us an assignment, and a turn of the loop 38 us an expert.
    """
    return num_tokens * top_k <= 4 * num_experts


def _block_sizes(num_tokens: int, top_k: int, num_experts: int) -> tuple[int, int]:
    """Rows of a block (M), and blocks a turn (C).

    A block expands its expert once, so blocks hold an expert's usual share of rows and some more. Few rows make the
    product cheap beside the turn itself, so several blocks share a turn; but one turn's weights are all that is ever
    expanded.
    """
    share = -(-num_tokens * top_k // num_experts)
    block_m = min(1024, max(8, 1 << (2 * share - 1).bit_length()))
    return block_m, 4 if block_m <= 64 else 2 if block_m <= 256 else 1


def _loop(routing: Routing, num_experts: int, body: Callable[[_Step, Any], Any], init: Any) -> Any:
    """Folds `body` over the blocks of a routing (T, k), C at a time."""
    num_tokens, top_k = routing.expert_ids.shape
    num_assignments = num_tokens * top_k
    block_m, num_blocks = _block_sizes(num_tokens, top_k, num_experts)
    groups = grouping.group(routing.expert_ids, num_experts)
    blocks = grouping.split_groups(groups.sizes, num_assignments, block_m)
    bound = blocks.experts.size

    def step(first: Array, carry: Any) -> Any:
        index = first + jnp.arange(num_blocks)
        inside = (index < blocks.num_blocks)[:, None]
        index = jnp.minimum(index, bound - 1)  # past the end: the last block's expert again, without its rows
        rows = blocks.x_rows[index][:, None] + jnp.arange(block_m)
        inside &= jnp.arange(block_m) < blocks.counts[index][:, None]
        assignments = jnp.where(inside, groups.order[jnp.where(inside, rows, 0)], num_assignments)
        return body(_Step(blocks.experts[index], assignments, assignments // top_k), carry)

    _, carry = lax.while_loop(
        lambda state: state[0] < blocks.num_blocks,
        lambda state: (state[0] + num_blocks, step(*state)),
        (jnp.int32(0), init),
    )
    return carry


def _compute_dtype(problem: Problem, x: Array) -> Any:
    return jnp.bfloat16 if x.dtype == jnp.bfloat16 and problem.input_format is None else jnp.float32


def _rounded(problem: Problem, experts: Experts, role: str, a: Array) -> Array:
    """The inputs of a product as their format has them: what they are worth, in float32."""
    if problem.input_format is None:
        return a
    format = input_formats.INPUT_FORMATS[problem.input_format]
    return input_formats.dequantize(input_formats.quantize(a, format, experts.input_scale(role)), format)


class _Chosen:
    """The weights of a turn's experts, expanded where they are used."""

    def __init__(self, experts: Experts, chosen: Array, dtype: Any):
        self._experts, self._chosen, self._dtype = experts, chosen, dtype

    def product(self, role: str, a: Array) -> Array:
        """a (C, M, K) times the role's weight, plus its bias -> float32 (C, M, N)."""
        y = self._dot(role, a)
        bias = self._experts.take_bias(role, self._chosen)
        return y if bias is None else y + bias[:, None].astype(jnp.float32)

    def transposed(self, role: str, dy: Array) -> Array:
        """dy (C, M, N) back through the role's weight -> float32 (C, M, K)."""
        return self._dot(role, dy, transposed=True)

    def _dot(self, role: str, a: Array, transposed: bool = False) -> Array:
        q = self._experts.take(role, self._chosen)
        return dot.expanded(a, q, self._experts.format, self._dtype, transposed=transposed)


def _in_loop(experts: Experts) -> Experts:
    # On a GPU packing is a bitcast. On a CPU it copies, once: a float4 array sliced inside a loop would be widened.
    return experts.prepare("packed") if experts.layout == "canonical" else experts


def forward(problem: Problem, x: Array, routing: Routing, experts: Experts) -> Array:
    """x (T, H), routing (T, k) -> y (T, H) of x's dtype. Ids outside 0..E-1 contribute nothing."""
    if routing.expert_ids.size == 0:
        return jnp.zeros_like(x)
    num_tokens, top_k = routing.expert_ids.shape
    if num_tokens * top_k <= _TURN:
        return _forward_few(problem, x, routing, experts)
    experts = _in_loop(experts)
    few = _few(num_tokens, top_k, experts.num_experts)
    if not few or experts.layout != "packed" or experts.format != MXFP4:
        return _forward_many(problem, x, routing, experts)
    return lax.platform_dependent(
        x,
        routing,
        experts,
        cuda=partial(_forward_few, problem, words=True),
        default=partial(_forward_few, problem, turn=_TURN),
    )


def _forward_few(
    problem: Problem,
    x: Array,
    routing: Routing,
    experts: Experts,
    *,
    turn: int | None = None,
    words: bool = False,
) -> Array:
    """`turn`: assignments that are computed at a time, where XLA copies their weights; None: all.

    `words`: whether to read weights as 16-bit words, which is faster. Not so in a scan over stacked layers: there XLA
    fuses a layer's slice into what gathers its bytes, but not through the change of type.
    """
    inside = (routing.expert_ids >= 0) & (routing.expert_ids < experts.num_experts)
    weights = routing.weights.astype(jnp.float32)
    rows = x[:, None]
    if problem.on_input:
        rows = (rows * weights[..., None]).astype(x.dtype)
    rows = jnp.broadcast_to(rows, (*inside.shape, x.shape[-1])).reshape(-1, x.shape[-1])
    if words:
        gate_up, down = dot.words(experts.gate_up), dot.words(experts.down)
        experts = dataclasses.replace(experts, gate_up=gate_up, down=down)

    def product(role: str, chosen: Array, a: Array) -> Array:
        a, q = _rounded(problem, experts, role, a), experts.take(role, chosen)
        if experts.format == MXFP4:
            y = dot.fused(a, q)
        else:
            y = dot.expanded(a[:, None], q, experts.format, _compute_dtype(problem, x))[:, 0]
        bias = experts.take_bias(role, chosen)
        return y if bias is None else y + bias.astype(jnp.float32)

    def compute(assignments: tuple[Array, Array]) -> Array:
        chosen, rows = assignments
        h = product("gate_up", chosen, rows)
        a = activations.apply(problem.activation, h, experts.gate_up_order).astype(_between(x))
        return product("down", chosen, a)

    chosen = jnp.where(inside, routing.expert_ids, 0).astype(jnp.int32).reshape(-1)
    out = compute((chosen, rows)) if turn is None else _in_turns(compute, turn, (chosen, rows))
    out = out.reshape(*inside.shape, -1)
    if not problem.on_input:
        out *= weights[..., None]
    return jnp.where(inside[..., None], out, 0).sum(axis=1).astype(x.dtype)


def _in_turns(function: Callable[[Any], Array], turn: int, arrays: tuple[Array, ...]) -> Array:
    """`function` of arrays (n, ...), `turn` of their first axis at a time."""
    (n, *_) = arrays[0].shape
    widths = -n % turn

    def split(array: Array) -> Array:  # the last one again where they do not divide
        padded = jnp.pad(array, [(0, widths)] + [(0, 0)] * (array.ndim - 1), mode="edge")
        return padded.reshape(-1, turn, *array.shape[1:])

    out = lax.map(function, jax.tree.map(split, arrays))
    return out.reshape(-1, *out.shape[2:])[:n]


def _add(total: Array, index: Array, rows: Array) -> Array:
    """Adds rows (C, ...) at index (C, ...), one block after the other; indices past the end are dropped.

    A block has a token once, but a turn may have it more often: in one scatter, the order of its sums would be any.
    """
    for i, row in zip(index, rows, strict=True):
        total = total.at[i].add(row, mode="drop")
    return total


def _forward_many(problem: Problem, x: Array, routing: Routing, experts: Experts) -> Array:
    dtype = _compute_dtype(problem, x)
    weights = routing.weights.astype(jnp.float32).reshape(-1)

    def body(step: _Step, y: Array) -> Array:
        chosen = _Chosen(experts, step.experts, dtype)
        weight = weights.at[step.assignments].get(mode="fill", fill_value=0)[..., None]
        rows = x.at[step.tokens].get(mode="fill", fill_value=0)
        if problem.on_input:
            rows = (rows * weight).astype(x.dtype)
        h = chosen.product("gate_up", _rounded(problem, experts, "gate_up", rows))
        a = activations.apply(problem.activation, h, experts.gate_up_order).astype(_between(x))
        out = chosen.product("down", _rounded(problem, experts, "down", a))
        if not problem.on_input:
            out *= weight
        return _add(y, step.tokens, out)

    return _loop(routing, experts.num_experts, body, jnp.zeros(x.shape, jnp.float32)).astype(x.dtype)


def _between(x: Array) -> Any:
    return jnp.float32 if x.dtype == jnp.float16 else x.dtype


class Gradients(NamedTuple):
    """Cotangents of the layer: x (T, H), weights (T, k), and float32 biases where they were asked for, else None."""

    x: Array
    weights: Array
    gate_up_bias: Array | None
    down_bias: Array | None


def backward(
    problem: Problem, x: Array, routing: Routing, experts: Experts, dy: Array, *, biases: tuple[bool, bool]
) -> Gradients:
    """Gradients of `forward` at x, given dy (T, H). Recomputes the forward pass, a few experts at a time.

    `biases`: whether the cotangents of (gate_up_bias, down_bias) are wanted.
    """
    dtype, num_experts, order = _compute_dtype(problem, x), experts.num_experts, experts.gate_up_order
    bias_gradients = tuple(
        jnp.zeros(bias.shape, jnp.float32) if wanted and bias is not None else None
        for bias, wanted in zip((experts.gate_up_bias, experts.down_bias), biases, strict=True)
    )
    experts = _in_loop(experts)
    weights = routing.weights.astype(jnp.float32).reshape(-1)
    on_input = problem.on_input

    def accumulate(total: Array | None, step: _Step, rows: Array) -> Array | None:
        if total is None:
            return None
        layer = total if experts.index is None else total[experts.index]
        layer = _add(layer, step.experts, rows.sum(axis=1))
        return layer if experts.index is None else total.at[experts.index].set(layer)

    def body(step: _Step, sums: Gradients) -> Gradients:
        chosen = _Chosen(experts, step.experts, dtype)
        weight = weights.at[step.assignments].get(mode="fill", fill_value=0)[..., None]
        rows = x.at[step.tokens].get(mode="fill", fill_value=0)
        rows_in = (rows * weight).astype(x.dtype) if on_input else rows
        h = chosen.product("gate_up", _rounded(problem, experts, "gate_up", rows_in))
        a, activation_vjp = jax.vjp(lambda h: activations.apply(problem.activation, h, order), h)
        dout = dy.at[step.tokens].get(mode="fill", fill_value=0).astype(jnp.float32)
        da = chosen.transposed("down", dout)  # without the routing weight, which is linear and comes after
        if on_input:
            (dh,) = activation_vjp(da)
            drows = chosen.transposed("gate_up", dh)
            dweight = (drows * rows.astype(jnp.float32)).sum(-1)
            drows *= weight
        else:
            (dh,) = activation_vjp(da * weight)
            drows = chosen.transposed("gate_up", dh)
            dweight = (da * _rounded(problem, experts, "down", a)).sum(-1)
            bias = experts.take_bias("down", step.experts)
            if bias is not None:
                dweight += (dout * bias[:, None].astype(jnp.float32)).sum(-1)
            dout *= weight
        return Gradients(
            _add(sums.x, step.tokens, drows),
            sums.weights.at[step.assignments].set(dweight, mode="drop", unique_indices=True),
            accumulate(sums.gate_up_bias, step, dh),
            accumulate(sums.down_bias, step, dout),
        )

    zeros = Gradients(jnp.zeros(x.shape, jnp.float32), jnp.zeros(weights.shape, jnp.float32), *bias_gradients)
    sums = zeros if weights.size == 0 else _loop(routing, num_experts, body, zeros)
    return sums._replace(
        x=sums.x.astype(x.dtype),
        weights=sums.weights.reshape(routing.weights.shape).astype(routing.weights.dtype),
    )
