"""How the kernels of this package are called.

A call is one of `jmx.pallas.defined`. Derivatives are those of its definition.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax

from jmx import meshes
from jmx.pallas import defined
from jmx.pallas.few_rows.choice import Tile
from jmx.util.typing import Array, Shaped


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


def _bind(call: Call, given: NamedTuple) -> list[Shaped[Array, "..."]]:
    return _few_rows(given, call=_Launched(call))


@dataclass(frozen=True)
class _Launched:
    """A call as `jmx.pallas.defined` has it."""

    call: Call

    @property
    def interpret(self) -> bool:
        return self.call.interpret

    def shapes(self, given: Any) -> list[jax.ShapeDtypeStruct]:
        return self.call.shapes(given)

    def define(self, given: Any) -> list[Shaped[Array, "..."]]:
        return self.call.define(given)

    def launch(self, given: Any) -> list[Shaped[Array, "..."]]:
        # Importing Pallas takes a second.
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import triton as plgpu

        call = self.call
        names = [name for name, array in given._asdict().items() if array is not None]
        return pl.pallas_call(
            call.kernel,
            grid=(call.num_ctas(given),),
            out_shape=call.shapes(given),
            input_output_aliases={names.index(name): result for name, result in call.in_place(given).items()},
            compiler_params=plgpu.CompilerParams(num_warps=call.tile.num_warps, num_stages=call.tile.num_stages),
            interpret=call.interpret,
            name=call.name,
        )(given)


_few_rows = defined.primitive("jmx_few_rows")
