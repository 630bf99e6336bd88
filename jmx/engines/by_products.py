"""The layer as two products that are computed one by one, and between them everything else.

Of experts with adapters, which add to both, and of float experts, whose weights may be trained. All but the
products is plain jnp, of which jax takes derivatives; the outputs of the first product are written and read before the
activation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jmx.engines import products
from jmx.engines.block_products import Factors, joined, multiply
from jmx.engines.expert_rows import Rows, combine, dispatch
from jmx.experts import Experts
from jmx.grouping import SortedRows, weighted
from jmx.numerics.gate_up import join_gate_up, split_gate_up
from jmx.routing import Routing
from jmx.selection.backend import ActivatedProduct, ExpertProduct, ProductBackend, TransposedProduct, WeightProduct
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.util.typing import Array, Float, Float32


class Inputs(NamedTuple):
    """Those of the first product.

    Args:
        tokens: x, of which `rows_of` are copies; None if they are products with routing weights.
        of_rows: rows that the experts' weights are multiplied with.
        rows: where each is.
    """

    tokens: Float[Array, "T H"] | None
    of_rows: Float[Array, "R H"]
    rows: Rows


class Added(Protocol):
    """What adapters add to both products; `dtype` is that of the products' inputs."""

    def to_outputs(self, target: str, inputs: Inputs, dtype: Any) -> Factors | None:
        """To those of the first product: for `gate_up`, `gate` and `up`, see `jmx.lora.adapters.TARGETS`."""
        ...

    def to_result(
        self, a: Float[Array, "n M I"], rows: Rows, weights: Float32[Array, "R 1"] | None, dtype: Any
    ) -> Float32[Array, "T H"] | None:
        """To the layer's result. `weights`: of the second product's outputs, or None for ones."""
        ...


AllFactors = Sequence[Factors | None]  # of what is added to all outputs of the first product, to gate, and to up
AtOnce = Callable[[Float[Array, "R H"], AllFactors, SortedRows, Experts], Float[Array, "R I"]]


class Reference(TransposedProduct, WeightProduct, Protocol):
    """A backend whose gradients take the place of those that another one lacks; results have the order of rows."""


@dataclass(frozen=True)
class Engine:
    """How products with the experts' weights are computed.

    Args:
        product: a role, rows (R, K), how they are sorted, experts, and the dtype of the result -> (R, W), without a
            bias.
        outputs: a role and such a result (..., W) -> gate and up (..., I), or all outputs alone.
        activated: the first product with its activation, before which the products of these factors are added, where
            the backend has it: rows (R, H), the factors, how rows are sorted, experts -> (R, I).
    """

    product: Callable[[str, Float[Array, "R K"], SortedRows, Experts, Any], Float[Array, "R W"]]
    outputs: Callable[[str, Float[Array, "*lead W"]], tuple[Float[Array, "..."], ...]]
    activated: Callable[[AllFactors], AtOnce | None]


def forward(
    problem: Problem,
    x: Float[Array, "T H"],
    routing: Routing,
    experts: Experts,
    engine: Engine,
    *,
    added: Added | None = None,
) -> Float[Array, "T H"]:
    """The layer, y (T, H) of x's dtype.

    Inputs of products are bfloat16 for bfloat16 tokens, else float32, and outputs of the first product likewise. Sums
    are float32.
    """
    rows = Rows.of(routing.expert_ids, problem.num_experts)
    weights = rows.weights(routing.weights)[:, None]
    inputs = Inputs(x, dispatch(x, rows), rows)
    if problem.on_input:
        inputs = Inputs(None, weighted(inputs.of_rows, weights), rows)
    dtype = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32

    with jax.named_scope("gate_up"):
        targets = ("gate_up", "gate", "up")
        factors = [None if added is None else added.to_outputs(target, inputs, dtype) for target in targets]
        bias = experts.take_bias("gate_up", rows.expert_of_block)
        at_once = engine.activated(factors) if any(factors) else None
        run = partial(_first, problem, engine, dtype)
        if at_once is not None:
            run = products.with_derivative_of(at_once, run)
        a = run(inputs.of_rows, factors, bias, rows, experts)
    with jax.named_scope("down"):
        out = engine.product("down", a.reshape(-1, a.shape[-1]), rows.sorted, experts, jnp.float32)
        (out,) = engine.outputs("down", rows.blocked(out))
        bias = experts.take_bias("down", rows.expert_of_block)
        if bias is not None:
            out += bias[:, None].astype(jnp.float32)
    with jax.named_scope("combine"):
        flat: Float32[Array, "R H"] = out.reshape(-1, out.shape[-1])
        y = combine(flat if problem.on_input else flat * weights, rows)
        more = None if added is None else added.to_result(a, rows, None if problem.on_input else weights, dtype)
        return (y if more is None else y + more).astype(x.dtype)


def _first(
    problem: Problem,
    engine: Engine,
    dtype: Any,
    of_rows: Float[Array, "R H"],
    factors: AllFactors,
    bias: Float[Array, "n N"] | None,
    rows: Rows,
    experts: Experts,
) -> Float[Array, "n M I"]:
    """The activation of the first product's outputs, their bias, and what is added to both, to gate and to up."""

    def apart(h: Float[Array, "*lead N"]) -> tuple[Float[Array, "..."], ...]:
        return (h,) if problem.gate_up_order is None else split_gate_up(h, problem.gate_up_order)

    @jax.checkpoint  # else the backward pass would save several float32 arrays of the size of h
    def activated(h: Float[Array, "n M W"], bias: Any, both: Any, *halves: Any) -> Float[Array, "n M I"]:
        parts = [part.astype(jnp.float32) for part in engine.outputs("gate_up", h)]
        for each in (bias, both):
            if each is not None:
                parts = [part + its.astype(jnp.float32) for part, its in zip(parts, apart(each), strict=True)]
        for i, half in enumerate(halves):
            if half is not None:
                parts[i] += half
        ids = () if problem.activation.num_experts is None else (rows.expert_of_block,)
        return problem.activation(*parts, *ids).astype(dtype)

    h = rows.blocked(engine.product("gate_up", of_rows, rows.sorted, experts, dtype))
    more = (None if its is None else multiply(its, rows, dtype) for its in factors)
    return activated(h, None if bias is None else bias[:, None].astype(jnp.float32), *more)


def engine_of(backend: ProductBackend, problem: Problem, environment: Environment, reference: Reference) -> Engine:
    """The products of a backend. Their cotangents are those of `reference` where it has none."""

    def product(
        role: str, rows: Float[Array, "R K"], sorted: SortedRows, experts: Experts, dtype: Any
    ) -> Float[Array, "R W"]:
        like = rows.dtype

        def of(sorted: SortedRows, experts: Experts) -> ExpertProduct:
            return ExpertProduct(problem, role, sorted, experts, environment)

        def in_order(dresult: Float[Array, "R W"]) -> Float[Array, "R N"]:
            parts = backend.outputs(problem, role, dresult)
            dy = join_gate_up(*parts, str(problem.gate_up_order)) if len(parts) == 2 else parts[0]
            return dy.astype(jnp.bfloat16 if like == jnp.bfloat16 else jnp.float32)

        def run(rows: Float[Array, "R K"], sorted: SortedRows, experts: Experts) -> Float[Array, "R W"]:
            return backend.product(of(sorted, experts), rows, dtype)

        def transposed(dresult: Float[Array, "R W"], sorted: SortedRows, experts: Experts) -> Float[Array, "R K"]:
            if isinstance(backend, TransposedProduct):
                return backend.transposed_product(of(sorted, experts), dresult)
            return reference.transposed_product(of(sorted, experts), in_order(dresult))

        def outer(
            dresult: Float[Array, "R W"], rows: Float[Array, "R K"], sorted: SortedRows, experts: Experts
        ) -> Float[Array, "E N K"]:
            if isinstance(backend, WeightProduct):
                return backend.weight_product(of(sorted, experts), dresult, rows)
            return reference.weight_product(of(sorted, experts), in_order(dresult), rows)

        return products.differentiable(role, run, transposed, outer)(rows, sorted, experts)

    def activated(factors: AllFactors) -> AtOnce | None:
        engine: Any = backend  # a type checker would take it for one or the other protocol
        given = [its for its in factors if its is not None]
        if not isinstance(engine, ActivatedProduct) or given[0].inner.dtype != jnp.bfloat16:
            return None
        if not engine.takes_added(problem, sum(its.inner.shape[1] for its in given)):
            return None

        def at_once(
            rows: Float[Array, "R H"], factors: AllFactors, sorted: SortedRows, experts: Experts
        ) -> Float[Array, "R I"]:
            both, gate, up = factors
            one = joined(both, gate, up, problem.gate_up_order)
            assert one is not None
            return engine.activated(ExpertProduct(problem, "gate_up", sorted, experts, environment), rows, *one)

        return at_once

    return Engine(product, lambda role, result: backend.outputs(problem, role, result), activated)
