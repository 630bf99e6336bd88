"""Derivatives and batching of the layer: custom_vjp around it, custom_vmap inside.

The backward pass is given with the forward pass. A vmapped call becomes one call on all tokens together.

First-order reverse mode only. Primitives on the arguments make every other derivative an error that names the
alternative. `jax.custom_vjp` alone would reject forward mode with an error that does not name `jmx.moe`, and would
differentiate whatever runs inside a second time: an error of an XLA call, an assertion, or untested numbers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jmx import meshes
from jmx.engines.gradients import SAVED, Gradients, Primals, Wanted, refuse_weight_gradients
from jmx.engines.routed import alone, cotangent
from jmx.experts import Experts
from jmx.guard import guarded
from jmx.routing import Routing
from jmx.util.primals import values_of
from jmx.util.typing import Array, Float, Shaped

Run = Callable[[Float[Array, "T H"], Routing, Experts], Float[Array, "T H"]]
Saving = Callable[[Float[Array, "T H"], Routing, Experts], tuple[Float[Array, "T H"], Any]]
Backward = Callable[[Primals, Float[Array, "T H"], Wanted], Gradients]

# Floats that the weights of experts were rounded from: gate_up (E, N, H) and down (E, H, I).
Sources = tuple[Float[Array, "E N H"], Float[Array, "E H I"]]


class Layer(Protocol):
    """x (T, H), routing (T, k), experts, and the sources of their weights or None -> y (T, H)."""

    def __call__(
        self, x: Float[Array, "T H"], routing: Routing, experts: Experts, sources: Sources | None, /
    ) -> Float[Array, "T H"]: ...


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Residual:
    """What the backward pass knows of the forward pass beside arrays.

    Args:
        wanted: the gradients that are requested.
        dtypes: of the sources.
    """

    wanted: Wanted
    dtypes: tuple[Any, ...]


def differentiable(run: Run, backward_of: Backward, saving: Saving | None = None) -> Layer:
    """`run` (x (T, H), routing (T, k), experts) -> y (T, H), made differentiable and batchable.

    Gradients flow to x, routing weights and biases, and those of weights to the sources, if there are some: floats that
    the weights were rounded from. The gradient of a quantized weight itself is a TypeError that names it.

    Args:
        backward_of: (primals, dy, wanted) -> `Gradients`, with arguments as of `Differentiable.backward`.
        saving: as `run`, in place of which a call that is differentiated takes it, but returns also what is `saved` for
            the backward pass, or None. Policies of `jax.checkpoint` know that by the name `SAVED`.
    """

    @jax.custom_vjp
    def call(
        x: Float[Array, "T H"], routing: Routing, experts: Experts, sources: Sources | None
    ) -> Float[Array, "T H"]:
        del sources  # they have the same values, before rounding
        return _batchable(run)(x, routing, experts)

    def call_fwd(x: Any, routing: Any, experts: Any, sources: Any) -> tuple[Float[Array, "T H"], Any]:
        refuse_weight_gradients(experts)
        of_arrays = (experts.gate_up_bias, experts.down_bias, *(sources or (None, None)))
        wanted = Wanted(*(array is not None and array.perturbed for array in of_arrays))
        dtypes = tuple(source.value.dtype for source in sources or ())
        x, routing, experts = _no_second_order(values_of((x, routing, experts)))
        if saving is None or wanted.weights:
            y, saved = _batchable(run)(x, routing, experts), None
        else:
            y, saved = _batchable(saving, together=False)(x, routing, experts)
        return y, (x, routing, experts, checkpoint_name(saved, SAVED), _Residual(wanted, dtypes))

    def call_bwd(residuals: Any, dy: Any) -> tuple[Any, Any, Any, Any]:
        x, routing, experts, saved, static = residuals
        wanted = static.wanted
        if isinstance(dy, SymbolicZero):
            return None, None, None, None
        x, routing, experts, dy = _no_second_order((x, routing, experts, dy))

        def backward(
            x: Float[Array, "T H"], routing: Routing, experts: Experts, dy: Float[Array, "T H"], saved: Any
        ) -> Gradients:
            return backward_of(Primals(x, routing, experts, saved), dy, wanted)

        # Each element of a batch has its gradients of biases and weights, which one call on all tokens would sum, and
        # what it saved.
        together = not any(wanted) and saved is None
        found = _batchable(backward, together)(x, routing, experts, dy, saved)
        biases = [
            d if d is None else d.astype(bias.dtype)
            for d, bias in zip(found[2:4], (experts.gate_up_bias, experts.down_bias), strict=True)
        ]
        dexperts = dataclasses.replace(
            experts,
            **dict.fromkeys(("gate_up", "down", "index", "gate_up_input_scale", "down_input_scale")),
            gate_up_bias=biases[0],
            down_bias=biases[1],
        )
        dsources = None
        if static.dtypes:
            dsources = tuple(
                d if d is None else d.astype(dtype) for d, dtype in zip(found[4:], static.dtypes, strict=True)
            )
        return found.x, cotangent(routing, found.weights), dexperts, dsources

    call.defvjp(call_fwd, call_bwd, symbolic_zeros=True)
    return lambda *arguments: call(*_reverse_mode_only(arguments))


def _batchable(function: Callable[..., Any], together: bool = True) -> Callable[..., Any]:
    """`function` (x (T, H), routing, experts, *more arrays (T, ...), or any unless `together`) with its own vmap rule.

    `together`: whether the elements of a batch may become one call on all tokens if they share their experts.
    Otherwise they run one after the other.
    """

    @custom_vmap
    def call(x: Float[Array, "T H"], routing: Routing, experts: Experts, *more: Any) -> Any:
        whole = experts.with_arrays(guarded(experts.arrays()))
        return meshes.unchecked(function)(x, routing, whole, *more)

    @call.def_vmap
    def rule(axis_size: int, in_batched: Any, *arguments: Any) -> tuple[Any, Any]:
        del axis_size  # each device of a mesh may have a part of the batch
        flatten = together and not any(jax.tree.leaves(in_batched[2]))
        leaves, tree = jax.tree.flatten(arguments)
        batched = jax.tree.leaves(in_batched)

        def batch(mapped: list[Shaped[Array, "..."]], whole: list[Shaped[Array, "..."]]) -> Any:
            if flatten:
                return _flattened(call, mapped[0].shape[0], in_batched, _joined(tree, batched, mapped, whole))
            return jax.lax.map(lambda element: call(*_joined(tree, batched, element, whole)), mapped)

        out = meshes.over_batch(batch, *_split_by(leaves, batched))
        return out, jax.tree.map(lambda _: True, out)

    return call


def _flattened(call: Callable[..., Any], axis_size: int, in_batched: Any, arguments: Any) -> Any:
    def flat(array: Shaped[Array, "..."], batched: bool) -> Shaped[Array, "..."]:
        array = array if batched else jnp.broadcast_to(array, (axis_size, *array.shape))
        return array.reshape(axis_size * array.shape[1], *array.shape[2:])

    x, routing, experts, *more = arguments
    routing, of_routing = alone(routing), alone(in_batched[1])  # blocks are of an element's tokens, not of all
    num_tokens = x.shape[1 if in_batched[0] else 0]
    by_token = (x, routing, more)
    x, routing, more = jax.tree.map(flat, by_token, (in_batched[0], of_routing, list(in_batched[3:])))
    out = call(x, routing, experts, *more)
    return jax.tree.map(lambda array: array.reshape(axis_size, num_tokens, *array.shape[1:]), out)


def _split_by(
    leaves: list[Shaped[Array, "..."]], batched: list[bool]
) -> tuple[list[Shaped[Array, "..."]], list[Shaped[Array, "..."]]]:
    """The leaves that are batched, and the others."""
    pairs = list(zip(leaves, batched, strict=True))
    return [leaf for leaf, of_batch in pairs if of_batch], [leaf for leaf, of_batch in pairs if not of_batch]


def _joined(
    tree: Any, batched: list[bool], mapped: list[Shaped[Array, "..."]], whole: list[Shaped[Array, "..."]]
) -> Any:
    """The pytree whose leaves `_split_by` separated."""
    of_batch, others = iter(mapped), iter(whole)
    return jax.tree.unflatten(tree, [next(of_batch if b else others) for b in batched])


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


# The identity, for tangents. Reverse mode transposes it; only forward mode evaluates, compiles or batches it.
_tangent_p = Primitive("jmx_reverse_mode_tangent")
_tangent_p.def_abstract_eval(lambda aval: aval)
_tangent_p.def_impl(_refuse_forward_mode)
mlir.register_lowering(_tangent_p, _refuse_forward_mode)
batching.primitive_batchers[_tangent_p] = _refuse_forward_mode
ad.deflinear2(_tangent_p, lambda cotangent, _: [cotangent])

# The identity, with such tangents. (The rule of a custom_jvp would be batched where a vmapped call is differentiated.)
_reverse_mode_only_p = Primitive("jmx_reverse_mode_only")
_reverse_mode_only_p.def_abstract_eval(lambda aval: aval)
_reverse_mode_only_p.def_impl(lambda x: x)
mlir.register_lowering(_reverse_mode_only_p, lambda _, x: [x])
batching.defvectorized(_reverse_mode_only_p)
ad.defjvp2(_reverse_mode_only_p, lambda tangent, *_: _tangent_p.bind(tangent))


@jax.custom_jvp
def _once_differentiable(x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    return x


_once_differentiable.defjvp(_refuse_second)


def _of_floats(mark: Any, tree: Any) -> Any:
    """`tree` with `mark` applied to each floating array."""
    return jax.tree.map(lambda a: mark(a) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)


def _reverse_mode_only(tree: Any) -> Any:
    """`tree` unchanged; forward-mode derivatives with respect to its floating arrays raise TypeError."""
    return _of_floats(_reverse_mode_only_p.bind, tree)


def _no_second_order(tree: Any) -> Any:
    """`tree` unchanged; derivatives of what is computed from its floating arrays raise TypeError."""
    return _of_floats(_once_differentiable, tree)
