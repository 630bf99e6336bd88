"""Gradients of the values that both weights were rounded from, by the kernel for float weights.

For each expert the sum over its rows of the gradient of a product's results times its inputs, both in bfloat16, in
float32. The kernel reads the rows of the backward pass as they are: each expert's begin at a multiple of 8. Columns are
widened with zeros to whole tiles where they are not, and the results' padding is left out.
"""

import jax.numpy as jnp

from jmx import grouping
from jmx.numerics.gate_up import join_gate_up
from jmx.pallas.float_sm90.blocks import Groups
from jmx.pallas.float_sm90.config import Launch
from jmx.pallas.float_sm90.outer import outer
from jmx.pallas.mosaic_sm90.rows import padded
from jmx.pallas.sm90.tiles import ROW_ALIGNMENT
from jmx.routing import Routing
from jmx.selection.problem import Problem
from jmx.util.typing import Array, Float, Float32


def supports(problem: Problem) -> bool:
    """Whether there are such gradients: with inputs in bfloat16."""
    return problem.input_format is None


def of_weight(
    problem: Problem,
    routing: Routing,
    parts: tuple[Float[Array, "R _"], ...],
    rows: Float[Array, "R K"],
    num_cores: int,
) -> Float32[Array, "E N K"]:
    """The gradient of one weight.

    Args:
        parts: gradients of its results, of gate and up or of all; anything in rows of no assignment.
        rows: its inputs.
        num_cores: SMs.
    """
    d = parts[0]
    if len(parts) == 2:
        d = join_gate_up(*parts, problem.gate_up_order)
    sorted = grouping.sort_rows(routing.expert_ids, problem.num_experts, ROW_ALIGNMENT)
    groups = Groups.at(sorted.starts, sorted.sizes)
    outputs, inputs = d.shape[1], rows.shape[1]
    d, rows = padded(d), padded(rows)
    sizes = groups.starts.size, d.shape[1], rows.shape[1]
    return outer(d, rows, groups, Launch.of_groups(*sizes, jnp.float32, num_cores))[:, :outputs, :inputs]
