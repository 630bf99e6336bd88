"""Array types with shapes, as jaxtyping writes them: `Float[Array, "T H"]` is a floating array of two axes.

The first part is the kind of dtype, the second the classes of arrays, the third the axes:

    Float[Array, "T H"]          two axes; every T in one signature is the same size
    Float[AnyArray, "*tokens H"] any leading axes, then H
    Integer[Array, "..."]        any shape at all
    Float32[Array, ""]           a scalar
    UInt8[Array, " K"]           one axis: the space keeps linters from reading a name in it
    Shaped[AnyArray, "E N K"]    any dtype: float8_e8m0fnu, that of scales, is in none of the other kinds
    Shaped[Any, "E N K"]         anything with a dtype and a shape, such as a `jax.ShapeDtypeStruct`
    list[Float[Array, "E _"]]    the size of an axis `_` may differ from array to array

Names of axes, in every signature of jmx:

    T  tokens                     tokens  any number of leading axes of tokens
    k  slots of a token (top_k)   R       rows: assignments in the order of their experts, padding included
    E  experts                    L       layers of a stack
    H  hidden size                I       intermediate size
    N  rows of a weight           K       its columns, the contracted axis
    b  blocks along K             B       blocks of rows (work items)
    G  groups of experts          P       parts to be added up
    lead  leading axes of weights: (E,), (L, E) or none

A type describes what a function accepts; dtypes that it rejects are in its docstring. Pyright reads
`Float[Array, "T H"]` as `Array`. Tests check shapes and dtypes at run time, see tests/shapes.py: there a call may break
its signature only if the function rejects it. In a NamedTuple or a dataclass that is a pytree the types describe its
arrays in a call; elsewhere, as in `jax.tree.map`, its fields may hold anything, and are not checked.
"""

import jax
import numpy as np
from jaxtyping import Bool as Bool
from jaxtyping import Float as Float
from jaxtyping import Float32 as Float32
from jaxtyping import Int as Int
from jaxtyping import Int8 as Int8
from jaxtyping import Int16 as Int16
from jaxtyping import Int32 as Int32
from jaxtyping import Integer as Integer
from jaxtyping import Key as Key
from jaxtyping import Num as Num
from jaxtyping import Shaped as Shaped
from jaxtyping import UInt as UInt
from jaxtyping import UInt8 as UInt8
from jaxtyping import UInt16 as UInt16
from jaxtyping import UInt32 as UInt32

Array = jax.Array  # of jax, or a tracer
AnyArray = jax.Array | np.ndarray  # of jax or numpy, or a tracer
AbstractArray = jax.Array | np.ndarray | jax.ShapeDtypeStruct  # or a description, with a shape and a dtype
