"""What the tensor cores multiply, for each pair of a weight format and an input format.

    weights   inputs   operand A          operand B   sums
    e4m3      e4m3     as in memory       as rounded  float32, of some 14 bits
    e2m1      e4m3     e5m2, times 2^13   as rounded  the same
    int4      e4m3     e4m3, times 2^-9   as rounded  the same
    int4      int8     int8               as rounded  int32, exact
    int8      int8     as in memory       as rounded  the same

No other pair is an exact product of 8-bit elements: an integer of 8 bits has more significant bits than e4m3, and the
range of e4m3 more than int8.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jmx.numerics.formats import WHOLE_ROW, Format
from jmx.numerics.input_formats import InputFormat

E2M1_EXPONENT = 13  # elements of a row's largest block of MXFP4 are multiplied by 2 to this power
INT4_EXPONENT = -9  # e4m3's smallest numbers are the integers times 2 to this power
E4M3, E5M2, S8 = "e4m3", "e5m2", "s8"
_E2M1, _E4M3, _INT4, _INT8 = (
    np.dtype(d) for d in (jnp.float4_e2m1fn, jnp.float8_e4m3fn, jnp.int4, jnp.int8)
)  # fmt: skip


@dataclass(frozen=True)
class Elements:
    """The operands of `wgmma`, and what the epilogue has to revert.

    Args:
        a, b: PTX's types of the weight's elements and of the inputs'.
        exponent: the weight's elements are multiplied by 2 to this power.
        decoded: whether these are made in registers of elements of 4 bits; if not, they are read from shared memory.
        coded: whether a weight's scales are folded into its elements, as those of MXFP4 are.
        by_block: whether scales of the weight belong to 128 columns.
    """

    a: str
    b: str
    exponent: int
    decoded: bool
    coded: bool
    by_block: bool

    @property
    def exact(self) -> bool:
        """Whether sums are int32."""
        return self.b == S8


_OPERANDS = {
    (_E4M3, _E4M3): (E4M3, E4M3, 0),
    (_E2M1, _E4M3): (E5M2, E4M3, E2M1_EXPONENT),
    (_INT4, _E4M3): (E4M3, E4M3, INT4_EXPONENT),
    (_INT4, _INT8): (S8, S8, 0),
    (_INT8, _INT8): (S8, S8, 0),
}


def elements_of(weights: Format, inputs: InputFormat) -> Elements | None:
    """What is multiplied for weights of one of the layout's formats; None if no product of 8-bit elements is exact."""
    operands = _OPERANDS.get((weights.element_dtype, inputs.element_dtype))
    if operands is None:
        return None
    coded = weights.element_dtype == _E2M1
    by_block = not coded and weights.block_size != WHOLE_ROW
    return Elements(*operands, weights.element_bits == 4, coded, by_block)
