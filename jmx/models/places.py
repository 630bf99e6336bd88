"""The variables of a model outside its experts, and the tensors of a source that each consists of."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from flax import nnx

from jmx.models.layers import Linear


class Place(NamedTuple):
    """A variable of a model, and where its rows come from.

    Args:
        names: neutral names of tensors.
        variable: of the model.
        groups: the variable has as many groups of rows, each of as many rows of every tensor.
        linear: whose weights it is, or None.
    """

    names: tuple[str, ...]
    variable: nnx.Variable
    groups: int
    linear: Linear | None


def places(module: Any, prefix: str) -> Iterator[Place]:
    """The variables of a module, whose names in the model begin with `prefix`."""
    linears = [its for _, its in nnx.iter_modules(module) if isinstance(its, Linear)]
    weights = {id(its.weights): its for its in linears}
    groups = {id(variable): its.groups for its in linears for variable in (its.weights, its.bias)}
    for names, variable in module.variables().items():
        its = id(variable)
        yield Place(tuple(prefix + name for name in names), variable, groups.get(its, 1), weights.get(its))
