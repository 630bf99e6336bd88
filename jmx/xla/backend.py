"""The reference backend: plain jnp, exact semantics, every platform. All other backends are tested against it.

Few assignments: each (token, expert) pair is computed separately, directly from the bytes of its expert's weights.
Many: rows are sorted by expert and split into blocks, and a loop over the blocks dequantizes the weights of the experts
of each step. In both cases work is proportional to the experts that tokens use, and memory depends neither on E nor on
the number of those in use.

If there is an input format, inputs of a product are quantized to it, dequantized, and multiplied in float32. Gradients
pass that rounding straight through.

Products: other bfloat16 activations are multiplied by weights dequantized to bfloat16; float32 and float16 ones by
float32 weights at `Precision.HIGHEST`; sums are float32. Between the two products the activation is rounded to x's
dtype (float16 stays float32, because its range is too small). A token's result does not depend on other tokens: it is
summed in the order of its slots (few) or of its experts' ids (many). Only if a token names one expert twice may a GPU
add those two terms in either order.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmx import activations
from jmx.engines import by_products
from jmx.engines.gradients import Gradients, Primals, Wanted
from jmx.experts import ROLES, Experts, padding
from jmx.grouping import weighted
from jmx.numerics import input_formats
from jmx.numerics.formats import MXFP4
from jmx.numerics.gate_up import split_gate_up
from jmx.numerics.tensor_scales import largest_of_rows
from jmx.routing import Routing
from jmx.selection.backend import ExpertProduct
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.selection.requirements import LimitedBackend, Limits
from jmx.util.typing import Array, Float, Float32, Int32, Shaped
from jmx.xla import dot, tensor_scales
from jmx.xla.grouped_dot import grouped_dot
from jmx.xla.steps import (
    Step,
    StepWeights,
    activation_dtype,
    block_sizes,
    compute_dtype,
    inputs_of_down,
    loop,
    packed_for_loop,
    round_inputs,
    scatter_add,
)

_MAX_COPIED = 8  # assignments whose weights may be copied at a time

NAME = "xla"


@dataclass(frozen=True)
class Xla(LimitedBackend):
    """The reference, as a backend; see `jmx.selection.backend.Backend`."""

    name: str = NAME
    summary = "reference in plain jnp, any platform"
    limits = Limits(input_formats=None, activations_per_expert=True)
    skips_padding = True  # experts are taken one by one, without theirs

    def apply(
        self, problem: Problem, x: Float[Array, "T H"], routing: Routing, experts: Experts, environment: Environment
    ) -> Float[Array, "T H"]:
        problem = problem.without_padding()
        if experts.format.is_float:
            engine = by_products.engine_of(self, problem, environment, self)
            return by_products.forward(problem, x, routing, experts, engine)
        return forward(problem, x, routing, experts)

    def product(self, product: ExpertProduct, rows: Float[Array, "R K"], dtype: Any) -> Float[Array, "R W"]:
        if product.experts.format.is_float:
            return _float_product(product, rows)[0].astype(dtype)
        return product_of_rows(product, rows, dtype)

    def transposed_product(self, product: ExpertProduct, rows: Float[Array, "R N"]) -> Float[Array, "R K"]:
        if not product.experts.format.is_float:
            rows = rows.astype(compute_dtype(product.problem))
            return product_of_rows(product, rows, jnp.float32, transposed=True)
        zeros = jnp.zeros((rows.shape[0], product.experts.spec(product.role).shape[1]), jnp.float32)
        return _float_product(product, zeros)[1](rows.astype(jnp.float32))[0]

    def weight_product(
        self, product: ExpertProduct, dresult: Float[Array, "R N"], rows: Float[Array, "R K"]
    ) -> Float[Array, "E N K"]:
        return _float_product(product, rows)[1](dresult.astype(jnp.float32))[1]

    def outputs(self, problem: Problem, role: str, result: Float[Array, "*lead W"]) -> tuple[Float[Array, "..."], ...]:
        if role == "down" or problem.gate_up_order is None:
            return (result,)
        return split_gate_up(result, problem.gate_up_order)


def _is_few(num_tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether each assignment reads its expert's weights separately.

    On an H200 (sizes of gpt-oss) that takes 7 us per assignment, and a step of the loop 38 us per expert.
    """
    return num_tokens * top_k <= 4 * num_experts


def forward(problem: Problem, x: Float[Array, "T H"], routing: Routing, experts: Experts) -> Float[Array, "T H"]:
    """x (T, H), routing (T, k) -> y (T, H) of x's dtype. Ids outside 0..E-1 contribute nothing."""
    if routing.expert_ids.size == 0:
        return jnp.zeros_like(x)
    if tensor_scales.of_tensor(problem):
        return forward(*_with_static_scales(problem, x, routing, experts))
    num_tokens, top_k = routing.expert_ids.shape
    if num_tokens * top_k <= _MAX_COPIED:
        return _forward_few(problem, x, routing, experts)
    experts = packed_for_loop(experts)
    few = _is_few(num_tokens, top_k, experts.num_experts)
    if not few or experts.layout != "packed" or experts.format != MXFP4:
        return _forward_many(problem, x, routing, experts)
    return lax.platform_dependent(
        x,
        routing,
        experts,
        cuda=partial(_forward_few, problem, words=experts.padded_to is None),
        default=partial(_forward_few, problem, max_copied=_MAX_COPIED),
    )


def _forward_few(
    problem: Problem,
    x: Float[Array, "T H"],
    routing: Routing,
    experts: Experts,
    *,
    max_copied: int | None = None,
    words: bool = False,
) -> Float[Array, "T H"]:
    """The layer, one assignment at a time.

    Args:
        max_copied: where XLA copies the weights of assignments, how many are computed at a time; None: all.
        words: whether to read weights as 16-bit words, which is faster, except in a scan over stacked layers: there
            XLA fuses the slice of a layer with the gather of its bytes, but not through the change of dtype.
    """
    inside = (routing.expert_ids >= 0) & (routing.expert_ids < experts.num_experts)
    weights = routing.weights.astype(jnp.float32)
    rows = x[:, None]
    if problem.on_input:
        rows = weighted(rows, weights[..., None])
    rows = jnp.broadcast_to(rows, (*inside.shape, x.shape[-1])).reshape(-1, x.shape[-1])
    if words:
        gate_up, down = dot.as_words(experts.gate_up), dot.as_words(experts.down)
        experts = dataclasses.replace(experts, gate_up=gate_up, down=down)

    def product(role: str, chosen: Int32[Array, " n"], a: Float[Array, "n K"]) -> Float32[Array, "n N"]:
        a, q = round_inputs(problem, experts, role, a), experts.take(role, chosen)
        if experts.format == MXFP4:
            y = dot.fused_dot(a, q)
        else:
            y = dot.dequantized_dot(a[:, None], q, experts.format, compute_dtype(problem))[:, 0]
        bias = experts.take_bias(role, chosen)
        return y if bias is None else y + bias.astype(jnp.float32)

    def compute(assignments: tuple[Int32[Array, " n"], Float[Array, "n H"]]) -> Float32[Array, "n H"]:
        chosen, rows = assignments
        h = product("gate_up", chosen, rows)
        a = activations.apply(problem.activation, h, experts.gate_up_order, chosen).astype(activation_dtype(x))
        return product("down", chosen, a)

    chosen = jnp.where(inside, routing.expert_ids, 0).astype(jnp.int32).reshape(-1)
    out = compute((chosen, rows)) if max_copied is None else _map_in_chunks(compute, max_copied, (chosen, rows))
    out = out.reshape(*inside.shape, -1)
    if not problem.on_input:
        out *= weights[..., None]
    return jnp.where(inside[..., None], out, 0).sum(axis=1).astype(x.dtype)


def _map_in_chunks(
    function: Callable[[Any], Float32[Array, "n H"]], size: int, arrays: tuple[Shaped[Array, "n ..."], ...]
) -> Float32[Array, "n H"]:
    """`function` of arrays (n, ...), `size` of their first axis at a time."""
    (n, *_) = arrays[0].shape
    padding = -n % size

    def split(array: Shaped[Array, "n ..."]) -> Shaped[Array, "chunks size ..."]:
        padded = jnp.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1), mode="edge")
        return padded.reshape(-1, size, *array.shape[1:])

    out = lax.map(function, jax.tree.map(split, arrays))
    return out.reshape(-1, *out.shape[2:])[:n]


def _forward_many(problem: Problem, x: Float[Array, "T H"], routing: Routing, experts: Experts) -> Float[Array, "T H"]:
    """The layer, one step of blocks at a time."""
    dtype = compute_dtype(problem)
    weights = routing.weights.astype(jnp.float32).reshape(-1)

    def body(step: Step, y: Float32[Array, "T H"]) -> Float32[Array, "T H"]:
        step_weights = StepWeights(experts, step.experts, dtype)
        weight = weights.at[step.assignments].get(mode="fill", fill_value=0)[..., None]
        a = inputs_of_down(problem, x, weight, experts, step=step, step_weights=step_weights)
        out = step_weights.product("down", round_inputs(problem, experts, "down", a))
        if not problem.on_input:
            out *= weight
        return scatter_add(y, step.tokens, out)

    return loop(routing, experts.num_experts, body, jnp.zeros(x.shape, jnp.float32)).astype(x.dtype)


def _with_static_scales(
    problem: Problem, x: Float[Array, "T H"], routing: Routing, experts: Experts
) -> tuple[Problem, Float[Array, "T H"], Routing, Experts]:
    """A layer whose inputs have one dynamic scale, as one with static scales."""
    experts = packed_for_loop(experts)
    weights = routing.weights.astype(jnp.float32).reshape(-1)

    def largest_activation(problem: Problem, experts: Experts) -> Float32[Array, ""]:
        def body(step: Step, most: Float32[Array, ""]) -> Float32[Array, ""]:
            step_weights = StepWeights(experts, step.experts, compute_dtype(problem))
            weight = weights.at[step.assignments].get(mode="fill", fill_value=0)[..., None]
            a = inputs_of_down(problem, x, weight, experts, step=step, step_weights=step_weights)
            valid = step.assignments.reshape(-1) < weights.size
            return jnp.maximum(most, largest_of_rows(a.reshape(valid.size, -1), valid))

        return loop(routing, experts.num_experts, body, jnp.float32(0))

    largest = (lambda problem, _: tensor_scales.largest_token(problem, x, routing)), largest_activation
    problem, experts = tensor_scales.with_static_scales(problem, experts, largest)
    return problem, x, routing, experts


def product_of_rows(
    product: ExpertProduct, rows: Float[Array, "R _"], dtype: Any, *, transposed: bool = False
) -> Float[Array, "R _"]:
    """Rows times their experts' weight, or the transposed one, without the bias, of `dtype`; 0 for all other rows."""
    problem, role, sorted = product.problem, product.role, product.sorted
    experts = packed_for_loop(product.experts)
    num_assignments, num_rows = sorted.row_of.size, rows.shape[0]
    if tensor_scales.of_tensor(problem) and not transposed:
        problem, experts = _with_static_scale(product, rows, experts)
    block_m, num_blocks = block_sizes(sorted.row_of.shape[0], sorted.row_of.shape[1], experts.num_experts)
    blocks = sorted.blocks(block_m, 1)
    width = experts.spec(role).shape[1 if transposed else 0]

    def step(state: tuple[Any, Any]) -> tuple[Any, Any]:
        first, out = state
        index = first + jnp.arange(num_blocks)
        inside = index < blocks.num_blocks
        index = jnp.minimum(index, blocks.experts.size - 1)
        at = blocks.x_rows[index][:, None] + jnp.arange(block_m)[None]
        inside = inside[:, None] & (jnp.arange(block_m)[None] < blocks.counts[index][:, None])
        at = jnp.where(inside, at, num_rows)
        taken = rows.at[at].get(mode="fill", fill_value=0)
        weights = StepWeights(experts, blocks.experts[index], compute_dtype(problem))
        if transposed:
            y = weights.transposed(role, taken)
        else:
            y = weights.unbiased(role, round_inputs(problem, experts, role, taken))
        return first + num_blocks, out.at[at].set(y.astype(dtype), mode="drop", unique_indices=True)

    zeros = jnp.zeros((num_rows, width), dtype)
    if num_assignments == 0:
        return zeros
    return lax.while_loop(lambda state: state[0] < blocks.num_blocks, step, (jnp.int32(0), zeros))[1]


def _with_static_scale(product: ExpertProduct, rows: Float[Array, "R K"], experts: Experts) -> tuple[Problem, Experts]:
    """One product whose inputs have one dynamic scale, as one with a static scale."""
    largest = largest_of_rows(rows, product.sorted.assignment_of_row >= 0)
    static = dataclasses.replace(product.problem, input_format=input_formats.FP8_STATIC.name)
    return static, tensor_scales.with_scale(experts, product.role, largest)


def _float_product(
    product: ExpertProduct, rows: Float[Array, "R K"]
) -> tuple[Float32[Array, "R N"], Callable[[Float32[Array, "R N"]], tuple[Float[Array, "R K"], Float[Array, "E N K"]]]]:
    """Rows times their experts' float weights, and the gradients of rows and weights, as functions of the result's.

    Gradients pass the rounding of rows to an input format straight through.
    """
    problem, role, experts, starts = product.problem, product.role, product.experts, product.sorted.starts
    if tensor_scales.of_tensor(problem):
        problem, experts = _with_static_scale(product, rows, experts)
    weights = getattr(experts, role).values
    if experts.index is not None:
        weights = weights[experts.index]
    rows = round_inputs(problem, experts, role, rows).astype(compute_dtype(problem))
    # With the rows between those of experts, which have results that are not read.
    sizes = jnp.diff(starts, append=starts[-1:] + product.sorted.sizes[-1:])
    return jax.vjp(lambda rows, weights: grouped_dot(rows, weights, sizes), rows, weights)


def _bias_rows(experts: Experts) -> tuple[int, int]:
    """Rows of both biases, without padding."""
    return experts.intermediate_size * (2 if experts.gated else 1), experts.hidden_size


def _with_padding(gradients: Gradients, experts: Experts) -> Gradients:
    """Gradients of biases, with zeros for their padding."""
    if experts.padded_to is None:
        return gradients
    (hidden, intermediate), (gate_up, down) = experts.padded_to, gradients[2:4]
    if gate_up is not None:
        gate_up = padding.resize_rows(gate_up, gate_up.ndim - 1, experts.gate_up_order, intermediate)
    if down is not None:
        down = padding.resize_axis(down, down.ndim - 1, hidden)
    return gradients._replace(gate_up_bias=gate_up, down_bias=down)


def backward(problem: Problem, primals: Primals, dy: Float[Array, "T H"], wanted: Wanted) -> Gradients:
    """Gradients of `forward` at `primals`, given dy (T, H). Recomputes the forward pass, a few experts at a time.

    `wanted`: those of weights only of experts without padding, order of columns and index.
    """
    x, routing, experts, _ = primals
    if tensor_scales.of_tensor(problem) and routing.expert_ids.size:
        problem, x, routing, experts = _with_static_scales(problem, x, routing, experts)
    dtype, num_experts, order = compute_dtype(problem), experts.num_experts, experts.gate_up_order
    bias_gradients = tuple(
        jnp.zeros((*bias.shape[:-1], rows), jnp.float32) if asked and bias is not None else None
        for bias, asked, rows in zip(
            (experts.gate_up_bias, experts.down_bias), wanted.biases, _bias_rows(experts), strict=True
        )
    )
    weight_gradients = tuple(
        jnp.zeros((num_experts, *experts.spec(role).shape), jnp.float32) if getattr(wanted, role) else None
        for role in ROLES
    )
    experts = packed_for_loop(experts)
    weights = routing.weights.astype(jnp.float32).reshape(-1)
    on_input = problem.on_input

    def accumulate(
        total: Float32[Array, "..."] | None, step: Step, rows: Float32[Array, "C M N"]
    ) -> Float32[Array, "..."] | None:
        if total is None:
            return None
        layer = total if experts.index is None else total[experts.index]
        layer = scatter_add(layer, step.experts, rows.sum(axis=1))
        return layer if experts.index is None else total.at[experts.index].set(layer)

    def accumulate_products(
        total: Float32[Array, "E N K"] | None, step: Step, dout: Float32[Array, "C M N"], inputs: Float[Array, "C M K"]
    ) -> Float32[Array, "E N K"] | None:
        return None if total is None else scatter_add(total, step.experts, dot.outer(dout, inputs, dtype))

    def body(step: Step, sums: Gradients) -> Gradients:
        step_weights = StepWeights(experts, step.experts, dtype)
        weight = weights.at[step.assignments].get(mode="fill", fill_value=0)[..., None]
        rows = x.at[step.tokens].get(mode="fill", fill_value=0)
        rows_in = weighted(rows, weight) if on_input else rows
        rows_in = round_inputs(problem, experts, "gate_up", rows_in)
        h = step_weights.product("gate_up", rows_in)
        a, activation_vjp = jax.vjp(lambda h: activations.apply(problem.activation, h, order, step.experts), h)
        dout = dy.at[step.tokens].get(mode="fill", fill_value=0).astype(jnp.float32)
        da = step_weights.transposed("down", dout)  # without the routing weight, which is linear and applied below
        a = round_inputs(problem, experts, "down", a)
        if on_input:
            (dh,) = activation_vjp(da)
            drows = step_weights.transposed("gate_up", dh)
            dweight = (drows * rows.astype(jnp.float32)).sum(-1)
            drows *= weight
        else:
            (dh,) = activation_vjp(da * weight)
            drows = step_weights.transposed("gate_up", dh)
            dweight = (da * a).sum(-1)
            bias = experts.take_bias("down", step.experts)
            if bias is not None:
                dweight += (dout * bias[:, None].astype(jnp.float32)).sum(-1)
            dout *= weight
        return Gradients(
            scatter_add(sums.x, step.tokens, drows),
            sums.weights.at[step.assignments].set(dweight, mode="drop", unique_indices=True),
            accumulate(sums.gate_up_bias, step, dh),
            accumulate(sums.down_bias, step, dout),
            accumulate_products(sums.gate_up, step, dh, rows_in),
            accumulate_products(sums.down, step, dout, a),
        )

    zeros = (jnp.zeros(shape, jnp.float32) for shape in (x.shape, weights.shape))
    zeros = Gradients(*zeros, *bias_gradients, *weight_gradients)
    sums = zeros if weights.size == 0 else loop(routing, num_experts, body, zeros)
    return _with_padding(sums, experts)._replace(
        x=sums.x.astype(x.dtype),
        weights=sums.weights.reshape(routing.weights.shape).astype(routing.weights.dtype),
    )
