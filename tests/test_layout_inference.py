"""Groups of values that need the same layout, as Mosaic GPU of jax finds them."""

from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import pytest

constraints = pytest.importorskip("jax.experimental.mosaic.gpu.constraints")

from jmx.pallas.sm90.layout_inference import equal_variables  # noqa: E402


class Site(NamedTuple):
    """A value of a kernel."""

    number: int
    shape: tuple[int, ...] = (128,)


pairs = st.tuples(st.integers(0, 11), st.integers(0, 11))


@hypothesis.given(st.lists(st.tuples(pairs, st.booleans()), max_size=20))
def test_groups_are_those_of_walks_along_equalities(its):
    """Each variable has all others that equalities lead to, once; constraints of other kinds count for nothing."""
    variables = [constraints.Variable(Site(number)) for number in range(12)]
    made, edges = [], []
    for (a, b), is_equal in its:
        if is_equal:
            made.append(constraints.Equals(variables[a], variables[b]))
            edges.append((a, b))
        else:
            made.append(constraints.Divides(variables[a], (b + 1,)))
    found = equal_variables(constraints.ConstraintSystem(constraints=made))
    reached = {number: {number} for edge in edges for number in edge}
    for _ in reached:
        for a, b in edges:
            reached[a] = reached[b] = reached[a] | reached[b]
    assert {its.key.number: sorted(other.key.number for other in others) for its, others in found.items()} == {
        number: sorted(others - {number}) for number, others in reached.items()
    }


def test_order_is_that_of_constraints():
    """So that lowering again gives the same program, which compilation caches are keyed by."""
    a, b, c, d = (constraints.Variable(Site(number)) for number in (3, 0, 2, 1))
    equal = [constraints.Equals(a, b), constraints.Equals(c, d), constraints.Equals(d, a)]
    assert equal_variables(constraints.ConstraintSystem(constraints=equal))[b] == [c, d, a]
