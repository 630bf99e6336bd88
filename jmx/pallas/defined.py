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
    """What is static of a call: hashable, and equal for calls of the same program."""

    @property
    def interpret(self) -> bool:
        """Whether the kernel runs interpreted wherever the call is lowered, for tests."""
        ...

    def shapes(self, *given: Any) -> list[jax.ShapeDtypeStruct]:
        """Those of the results."""
        ...

    def define(self, *given: Shaped[Array, "..."]) -> list[Shaped[Array, "..."]]:
        """The results in plain jnp."""
        ...

    def launch(self, *given: Shaped[Array, "..."]) -> list[Shaped[Array, "..."]]:
        """The results by the kernel, while tracing."""
        ...


def primitive(name: str) -> Callable[..., list[Shaped[Array, "..."]]]:
    """A primitive as a function of arrays and, by keyword, their `call`."""
    its = Primitive(name)
    its.multiple_results = True
    its.def_abstract_eval(lambda *given, call: [ShapedArray(its.shape, its.dtype) for its in call.shapes(*given)])
    its.def_impl(lambda *given, call: call.define(*given))
    mlir.register_lowering(its, _lower)
    mlir.register_lowering(its, _lower_for_gpu, platform="cuda")
    batching.primitive_batchers[its] = _batch

    @partial(jax.jit, static_argnames="call")  # so that no call is evaluated outside of a program
    def bind(*given: Shaped[Array, "..."], call: Call) -> list[Shaped[Array, "..."]]:
        return its.bind(*given, call=call)

    return bind


def _lower(context: Any, *given: Any, call: Call) -> Any:
    if call.interpret:
        return mlir.lower_fun(_launched(call))(context, *given)
    return mlir.lower_fun(call.define)(context, *given)


def _lower_for_gpu(context: Any, *given: Any, call: Call) -> Any:
    if context.module_context.lowering_parameters.for_export:
        return _lower(context, *given, call=call)
    return lower_quietly(_launched(call), context, *given, multiple_results=True)


def _launched(call: Call) -> Callable[..., list[Shaped[Array, "..."]]]:
    def launched(*given: Shaped[Array, "..."]) -> list[Shaped[Array, "..."]]:
        with jax.enable_x64(False):
            return call.launch(*given)

    return launched


def _batch(given: Any, axes: Any, *, call: Call) -> Any:
    results = jax.vmap(call.define, axes)(*given)
    return results, [0] * len(results)
