"""Arguments of a forward rule of `jax.custom_vjp` with `symbolic_zeros`: their values, and which are differentiated.

And such rules by the derivatives of another function, which computes the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


def _is_primal(leaf: Any) -> bool:
    return hasattr(leaf, "perturbed")


def values_of(primals: Any) -> Any:
    """The pytree of the arrays that such arguments hold."""
    return jax.tree.map(lambda primal: primal.value, primals, is_leaf=_is_primal)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Perturbed:
    """Of which leaves of a pytree gradients are asked for; static.

    A quantized weight has none, and to differentiate it is an error, so only leaves that a caller differentiates are
    arguments of `jax.vjp` in a backward rule.

    Args:
        flags: one a leaf: whether it is differentiated.
        tree: the structure of the pytree, which both parts are joined to again. It has no leaf where the pytree has
            None.
    """

    flags: tuple[bool, ...]
    tree: Any

    @classmethod
    def of(cls, primals: Any) -> "Perturbed":
        """Of arguments of a forward rule, whose leaves state it."""
        leaves, tree = jax.tree.flatten(primals, is_leaf=_is_primal)
        return cls(tuple(leaf.perturbed for leaf in leaves), tree)

    def split(self, arrays: Any) -> tuple[list[Any], list[Any]]:
        """The leaves that are differentiated, and the others."""
        leaves = list(zip(jax.tree.leaves(arrays), self.flags, strict=True))
        return [leaf for leaf, flag in leaves if flag], [leaf for leaf, flag in leaves if not flag]

    def joined(self, wanted: list[Any], rest: list[Any]) -> Any:
        """The pytree of both, the inverse of `split`; None among them is a leaf without a cotangent."""
        of_wanted, others = iter(wanted), iter(rest)
        return jax.tree.unflatten(self.tree, [next(of_wanted if flag else others) for flag in self.flags])


def differentiate_as(rule: Any, function: Callable[..., Any]) -> None:
    """Gives a `jax.custom_vjp` the derivatives of another function, which computes the same of the same arguments.

    Gradients of arguments that are not differentiated are None.

    Args:
        rule: the first two of its arguments are static, its `nondiff_argnums`.
        function: is differentiable.
    """

    def forward(first: Any, second: Any, *primals: Any) -> tuple[Any, Any]:
        perturbed = Perturbed.of(primals)
        wanted, rest = perturbed.split(values_of(primals))
        y, transpose = jax.vjp(lambda wanted: function(first, second, *perturbed.joined(wanted, rest)), wanted)
        return y, (transpose, perturbed)

    def backward(first: Any, second: Any, residuals: Any, dy: Any) -> Any:
        del first, second
        transpose, perturbed = residuals
        wanted, rest = ([None] * perturbed.flags.count(flag) for flag in (True, False))
        if not isinstance(dy, jax.custom_derivatives.SymbolicZero):
            (wanted,) = transpose(dy)
        return perturbed.joined(wanted, rest)

    rule.defvjp(forward, backward, symbolic_zeros=True)
