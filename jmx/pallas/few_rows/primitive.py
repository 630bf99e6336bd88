"""How the kernels of this package are called.

A call is a primitive. Lowered for a GPU it is the kernel; for other platforms, in exported programs, of which Triton
kernels are no stable part, and under vmap it is its definition in plain jnp. Derivatives are those of the definition.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jmx import meshes
from jmx.pallas.few_rows.choice import Tile
from jmx.pallas.quiet import lower_quietly
from jmx.util.typing import Array, Shaped

Arrays = Sequence[Shaped[Array, "..."]]


class Call(Protocol):
    """What is static of a call of a kernel. `given`: its operands, a NamedTuple in which some may be None."""

    @property
    def name(self) -> str:
        """The kernel's, in profiles."""
        ...

    @property
    def tile(self) -> Tile: ...

    @property
    def interpret(self) -> bool:
        """Whether Pallas interprets the kernel wherever the call is lowered, for tests."""
        ...

    def num_ctas(self, given: Any) -> int: ...

    def shapes(self, given: Any) -> list[jax.ShapeDtypeStruct]:
        """Of the results."""
        ...

    def in_place(self, given: Any) -> dict[str, int]:
        """Names of operands that are results too, with the result's number."""
        ...

    def define(self, given: Any) -> list[Shaped[Array, "..."]]:
        """The results in plain jnp."""
        ...

    def kernel(self, given: Any, *results: Any) -> None:
        """Computes one CTA's part; operands and results are references."""
        ...


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def run(call: Call, given: NamedTuple) -> list[Shaped[Array, "..."]]:
    """The results of a call."""
    return meshes.unchecked(partial(_bind, call))(given)


@run.defjvp
def _derivative(call: Call, primals: Any, tangents: Any) -> tuple[Any, Any]:
    _, of_results = jax.jvp(call.define, primals, tangents)
    return run(call, *primals), of_results


@partial(jax.jit, static_argnums=0)  # so that no call is evaluated outside of a program
def _bind(call: Call, given: NamedTuple) -> list[Shaped[Array, "..."]]:
    arrays, treedef = jax.tree.flatten(given)
    return _few_rows_p.bind(*arrays, call=call, treedef=treedef)


_few_rows_p = Primitive("jmx_few_rows")
_few_rows_p.multiple_results = True


@_few_rows_p.def_abstract_eval
def _abstract(*arrays: Any, call: Call, treedef: Any) -> list[ShapedArray]:
    return [ShapedArray(its.shape, its.dtype) for its in call.shapes(jax.tree.unflatten(treedef, arrays))]


def _defined(*arrays: Any, call: Call, treedef: Any) -> Arrays:
    return call.define(jax.tree.unflatten(treedef, arrays))


def _launched(*arrays: Any, call: Call, treedef: Any) -> Arrays:
    # Importing Pallas takes a second.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    given = jax.tree.unflatten(treedef, arrays)
    names = [name for name, array in given._asdict().items() if array is not None]

    def body(*refs: Any) -> None:
        call.kernel(jax.tree.unflatten(treedef, refs[: len(arrays)]), *refs[len(arrays) :])

    with jax.enable_x64(False):
        return pl.pallas_call(
            body,
            grid=(call.num_ctas(given),),
            out_shape=call.shapes(given),
            input_output_aliases={names.index(name): result for name, result in call.in_place(given).items()},
            compiler_params=plgpu.CompilerParams(num_warps=call.tile.num_warps, num_stages=call.tile.num_stages),
            interpret=call.interpret,
            name=call.name,
        )(*arrays)


def _lower(context: Any, *arrays: Any, call: Call, treedef: Any) -> Any:
    function = _launched if call.interpret else _defined
    return mlir.lower_fun(partial(function, call=call, treedef=treedef))(context, *arrays)


def _lower_for_gpu(context: Any, *arrays: Any, call: Call, treedef: Any) -> Any:
    if context.module_context.lowering_parameters.for_export:
        return _lower(context, *arrays, call=call, treedef=treedef)
    launched = partial(_launched, call=call, treedef=treedef)
    return lower_quietly(launched, context, *arrays, multiple_results=True)


def _batch(arrays: Any, axes: Any, *, call: Call, treedef: Any) -> Any:
    results = jax.vmap(partial(_defined, call=call, treedef=treedef), axes)(*arrays)
    return results, [0] * len(results)


mlir.register_lowering(_few_rows_p, _lower)
mlir.register_lowering(_few_rows_p, _lower_for_gpu, platform="cuda")
batching.primitive_batchers[_few_rows_p] = _batch
