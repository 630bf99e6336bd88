"""First-order reverse mode alone: marks that make every other derivative an error of jmx's own, which says the way out.

`jax.custom_vjp` refuses forward mode in words of jax, and leaves second derivatives to whatever runs inside: an error
of XLA's calls, an assertion, or numbers that nothing tested.
"""

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def _refuse_forward_mode(*_: Any, **__: Any) -> NoReturn:
    raise TypeError(
        "forward-mode derivatives of `jmx.moe` (jax.jvp, jax.jacfwd, jax.linearize) are not implemented: use reverse "
        "mode, which is jax.grad, jax.vjp and jax.jacrev"
    )


def _refuse_second(*_: Any) -> NoReturn:
    raise TypeError(
        "second derivatives of `jmx.moe` (jax.hessian, a gradient of a gradient) are not implemented: take the inner "
        "gradient at jax.lax.stop_gradient of its argument, or compute with the floats of `experts.dequantize()`"
    )


# The identity of tangents. Reverse mode transposes it; what evaluates, compiles or batches it is forward mode.
_tangent_p = Primitive("jmx_reverse_mode_tangent")
_tangent_p.def_abstract_eval(lambda aval: aval)
_tangent_p.def_impl(_refuse_forward_mode)
mlir.register_lowering(_tangent_p, _refuse_forward_mode)
batching.primitive_batchers[_tangent_p] = _refuse_forward_mode
ad.deflinear2(_tangent_p, lambda cotangent, _: [cotangent])

# The identity, of such tangents. (As a custom_jvp its rule would be batched where a vmapped call is differentiated.)
_reverse_mode_only_p = Primitive("jmx_reverse_mode_only")
_reverse_mode_only_p.def_abstract_eval(lambda aval: aval)
_reverse_mode_only_p.def_impl(lambda x: x)
mlir.register_lowering(_reverse_mode_only_p, lambda _, x: [x])
batching.defvectorized(_reverse_mode_only_p)
ad.defjvp2(_reverse_mode_only_p, lambda tangent, *_: _tangent_p.bind(tangent))


@jax.custom_jvp
def _not_differentiable(x: jax.Array) -> jax.Array:
    return x


_not_differentiable.defjvp(_refuse_second)


def _of_floats(mark: Any, tree: Any) -> Any:
    """`tree` with `mark` on each array of floats."""
    return jax.tree.map(lambda a: mark(a) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)


def reverse_mode_only(tree: Any) -> Any:
    """`tree` as it is; forward-mode derivatives with respect to its floats are a TypeError."""
    return _of_floats(_reverse_mode_only_p.bind, tree)


def not_differentiable(tree: Any) -> Any:
    """`tree` as it is; derivatives of what is computed of its floats are a TypeError, which calls them second ones."""
    return _of_floats(_not_differentiable, tree)
