"""The rows that the kernel reads: rounded inputs, gathered by expert, in the order of their expert's columns."""

import jax.numpy as jnp

from jmx import grouping
from jmx.engines import grouped
from jmx.experts import Experts
from jmx.grouping import Work
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.pallas import own_rows
from jmx.pallas.activation.columns import EIGHTS, Order, split
from jmx.pallas.mosaic_sm90 import rounded_inputs
from jmx.pallas.mosaic_sm90.rounded_inputs import RoundedRows
from jmx.pallas.sm90.tiles import ROW_ALIGNMENT, TILE, VECTOR
from jmx.routing import Routing
from jmx.selection.problem import Problem
from jmx.util.typing import Array, Float, Int32


def rounded(
    problem: Problem, experts: Experts, role: str, rows: Float[Array, "R C"], work: Work | None = None
) -> RoundedRows:
    """The inputs of a product, as they are if they have no format: those of the first columns that it has.

    `work`: each row is written to those of all its assignments. Values may have more columns, of zeros.
    """
    # Importing Pallas takes a second.
    from jmx.pallas.mosaic_sm90 import round_rows

    columns = experts.spec(role).shape[1]
    if problem.input_format is None:
        assert work is None
        return RoundedRows(rows[:, :columns], None)
    format, scale = INPUT_FORMATS[problem.input_format], experts.input_scale(role)
    if columns % VECTOR == rows.shape[1] % VECTOR == 0 and rows.size:
        placed = {} if work is None else {"row_of": work.row_of, "num_rows": work.num_rows}
        width = -(-columns // TILE) * TILE
        return round_rows.round_rows(rows, format, scale, columns=columns, width=width, **placed)
    given = rounded_inputs.round_rows(rows[:, :columns], format, scale)
    if work is None:
        return given
    assert work.token_of_row is not None
    return RoundedRows(grouped.take(given.values, work.token_of_row), given.take(work.token_of_row))


def gate_and_up(h: Float[Array, "*lead tile_rows"], experts: Experts | Problem) -> tuple[Float[Array, "*lead I"], ...]:
    """Gate and up of outputs of `gate_up` in the order of tiles, 8 gates and then their 8 ups; or all without a gate.

    `experts`: these or a problem give the number of outputs, and whether there is a gate.
    """
    return split(h, tile_order(experts), experts.intermediate_size)


def tile_order(experts: Experts | Problem) -> Order:
    """The order of outputs of `gate_up` in tiles."""
    return None if experts.gate_up_order is None else EIGHTS


def sorted_rows(
    problem: Problem,
    x: Float[Array, "T H"],
    routing: Routing,
    experts: Experts,
    work: Work,
    take: grouped.Take = own_rows.take,
) -> RoundedRows:
    """The rows of `gate_up` for sorted `work`. `experts`: of which `merged` are read. `take`: makes rows of tokens."""
    # Importing Pallas takes a second.
    from jmx.pallas.mosaic_sm90.act_order import ordered_rows

    assert work.token_of_row is not None
    order = experts.merged().gate_up.order
    if problem.input_format is not None and not problem.on_input and order is None and problem.num_routed is None:
        return rounded(problem, experts, "gate_up", x, work)
    # Each token is rounded once, not each of its rows, unless these have their routing weights.
    given = RoundedRows(x, None) if problem.on_input else rounded(problem, experts, "gate_up", x)
    if order is None:
        rows = take(problem, given.values, work)
        rows = grouped.weigh(problem, rows, routing, work)
    else:
        users = expert_of_eight(routing, experts, work)
        rows = ordered_rows(given.values[:, : x.shape[1]], work.token_of_row, order, users)
        rows = grouped.weigh(problem, rows, routing, work)
    if problem.on_input:
        return rounded(problem, experts, "gate_up", rows)
    return RoundedRows(rows, given.take(work.token_of_row))


def expert_of_eight(routing: Routing, experts: Experts, work: Work) -> Int32[Array, " n"]:
    """The expert, of those of all layers, of each eight rows of sorted `work`."""
    users = grouping.expert_of_row(work, routing.expert_ids, work.num_rows)[::ROW_ALIGNMENT]
    return users + experts.first_expert


def padded(rows: Float[Array, "R K"]) -> Float[Array, "R k"]:
    """Rows in bfloat16, with zeros up to whole tiles of columns."""
    return jnp.pad(rows.astype(jnp.bfloat16), ((0, 0), (0, -rows.shape[1] % TILE)))
