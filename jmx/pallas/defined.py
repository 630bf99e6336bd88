"""Triton kernels with a definition in plain jnp, as primitives: which of the two runs is decided at lowering.

Lowered for an NVIDIA GPU it is the kernel. For other platforms, in exported programs, of which Triton kernels are no
stable part, and under vmap it is the definition. Derivatives are the caller's to define.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jmx.pallas.quiet import lower_quietly
from jmx.util.typing import Array, Shaped


class Call(Protocol):
    """What is static of a call: hashable, and equal for calls of the same program.

    `given` are its operands: arrays, or pytrees of them, such as a NamedTuple in which some are None.
    """

    @property
    def interpret(self) -> bool:
        """Whether the kernel runs interpreted wherever the call is lowered, for tests."""
        ...

    def shapes(self, *given: Any) -> list[jax.ShapeDtypeStruct]:
        """Those of the results."""
        ...

    def define(self, *given: Any) -> list[Shaped[Array, "..."]]:
        """The results in plain jnp."""
        ...

    def launch(self, *given: Any) -> list[Shaped[Array, "..."]]:
        """The results by the kernel, while tracing."""
        ...


def primitive(name: str) -> Callable[..., list[Shaped[Array, "..."]]]:
    """A primitive as a function of operands and, by keyword, their `call`."""
    its = Primitive(name)
    its.multiple_results = True
    its.def_abstract_eval(_shapes)
    its.def_impl(lambda *arrays, call, structure: _of_arrays(call.define, structure)(*arrays))
    mlir.register_lowering(its, _lower)
    mlir.register_lowering(its, _lower_for_gpu, platform="cuda")
    batching.primitive_batchers[its] = _batch

    @partial(jax.jit, static_argnames="call")  # so that no call is evaluated outside of a program
    def bind(*given: Any, call: Call) -> list[Shaped[Array, "..."]]:
        arrays, structure = jax.tree.flatten(given)
        return its.bind(*arrays, call=call, structure=structure)

    return bind


def _of_arrays(function: Callable[..., Any], structure: Any) -> Callable[..., Any]:
    """A function of operands as one of their arrays."""
    return lambda *arrays: function(*jax.tree.unflatten(structure, arrays))


def _shapes(*arrays: Any, call: Call, structure: Any) -> list[ShapedArray]:
    return [ShapedArray(its.shape, its.dtype) for its in _of_arrays(call.shapes, structure)(*arrays)]


def _lower(context: Any, *arrays: Any, call: Call, structure: Any) -> Any:
    function = _launched(call, structure) if call.interpret else _of_arrays(call.define, structure)
    return mlir.lower_fun(function)(context, *arrays)


def _lower_for_gpu(context: Any, *arrays: Any, call: Call, structure: Any) -> Any:
    if context.module_context.lowering_parameters.for_export:
        return _lower(context, *arrays, call=call, structure=structure)
    return lower_quietly(_launched(call, structure), context, *arrays, multiple_results=True)


def _launched(call: Call, structure: Any) -> Callable[..., list[Shaped[Array, "..."]]]:
    def launched(*arrays: Shaped[Array, "..."]) -> list[Shaped[Array, "..."]]:
        with jax.enable_x64(False):
            return _of_arrays(call.launch, structure)(*arrays)

    return launched


def _batch(arrays: Any, axes: Any, *, call: Call, structure: Any) -> Any:
    results = jax.vmap(_of_arrays(call.define, structure), axes)(*arrays)
    return results, [0] * len(results)
