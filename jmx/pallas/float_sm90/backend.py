"""Backend `mosaic_float`: float weights on Hopper, whose products `product` and `outer` compute one by one.

Products are of 16-bit floats in the dtype of x, to which weights of another dtype are rounded at each call; sums are
float32. Between both products activations are rounded to that dtype: float16 ones beyond 65504 become infinite.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jmx.engines import by_products
from jmx.experts import Experts
from jmx.numerics.formats import FLOATS
from jmx.numerics.gate_up import split_gate_up
from jmx.numerics.layouts import PACKED
from jmx.pallas.sm90.tiles import TILE
from jmx.routing import Routing
from jmx.selection.backend import ExpertProduct, Reason, Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.selection.requirements import LimitedBackend, Limits, hidden_and_intermediate, indivisible
from jmx.util.typing import Array, Float


def _whole_tiles(problem: Problem) -> Rejection | None:
    return indivisible(hidden_and_intermediate(problem), TILE, "a tile", "use xla, or experts.pad")


def _same_range(problem: Problem) -> Rejection | None:
    """float16 has less range than the other dtypes."""
    fits = problem.dtype != "float16" or problem.format == "float16"
    detail = f"activations are float16, whose range is too small for weights in {problem.format!r}"
    return None if fits else Rejection(Reason.DTYPE, detail, "cast x to bfloat16")


@dataclass(frozen=True)
class MosaicFloat(LimitedBackend):
    """The backend of float weights for compute capability 9.0 (H100, H200, GH200)."""

    name = "mosaic_float"
    summary = "Pallas Mosaic GPU kernels for Hopper: weights of 16 and 32 bits that are not quantized, trainable"
    limits = Limits.hopper(
        PACKED.name,
        tuple(format.name for format in FLOATS),
        activations_per_expert=True,
        checks=(_whole_tiles, _same_range),
    )

    def apply(
        self, problem: Problem, x: Float[Array, "T H"], routing: Routing, experts: Experts, environment: Environment
    ) -> Float[Array, "T H"]:
        engine = by_products.engine_of(self, problem, environment, self)
        return by_products.forward(problem, x, routing, experts, engine)

    def product(self, product: ExpertProduct, rows: Float[Array, "R K"], dtype: Any) -> Float[Array, "R N"]:
        return _product(product, rows, dtype, transposed=False)

    def transposed_product(self, product: ExpertProduct, rows: Float[Array, "R N"]) -> Float[Array, "R K"]:
        dtype = jnp.bfloat16 if product.problem.dtype == "bfloat16" else jnp.float32
        return _product(product, rows, dtype, transposed=True)

    def weight_product(
        self, product: ExpertProduct, dresult: Float[Array, "R N"], rows: Float[Array, "R K"]
    ) -> Float[Array, "E N K"]:
        # Importing Pallas takes a second.
        from jmx.pallas.float_sm90.blocks import Groups
        from jmx.pallas.float_sm90.config import Launch
        from jmx.pallas.float_sm90.outer import outer

        its = jnp.dtype(product.problem.dtype)
        groups = Groups.at(product.sorted.starts, product.sorted.sizes)
        found = getattr(product.experts, product.role).values.dtype
        sizes = groups.starts.size, dresult.shape[1], rows.shape[1]
        launch = Launch.of_groups(*sizes, found, product.environment.core_count or 1)
        return outer(dresult.astype(its), rows.astype(its), groups, launch)

    def outputs(self, problem: Problem, role: str, result: Float[Array, "*lead N"]) -> tuple[Float[Array, "..."], ...]:
        if role == "down" or problem.gate_up_order is None:
            return (result,)
        return split_gate_up(result, problem.gate_up_order)


def _product(product: ExpertProduct, rows: Float[Array, "R C"], dtype: Any, *, transposed: bool) -> Float[Array, "R W"]:
    # Importing Pallas takes a second.
    from jmx.pallas.float_sm90.blocks import Groups
    from jmx.pallas.float_sm90.config import Launch
    from jmx.pallas.float_sm90.product import product as multiply

    its, experts = jnp.dtype(product.problem.dtype), product.experts
    weights, first = getattr(experts, product.role).values, 0
    if experts.index is not None and weights.dtype == its:
        weights, first = getattr(experts.merged(), product.role).values, experts.first_expert
    elif experts.index is not None:
        weights = weights[experts.index]  # else those of all layers would be rounded
    groups = Groups.at(product.sorted.starts, product.sorted.sizes)
    sizes = len(rows), groups.starts.size, weights.shape[2 if transposed else 1]
    launch = Launch.of_rows(*sizes, dtype, product.environment.core_count or 1)
    return multiply(rows.astype(its), weights.astype(its), groups, launch, transposed=transposed, first=first)
