"""What kernels for Hopper are told of a product, whichever tensor cores they use."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jmx.numerics.formats import BlockScaled, Format
from jmx.pallas.mosaic_sm90.fragments import Rows

Array = Any


@dataclass(frozen=True)
class BaseProduct:
    """rows @ weight[expert].T + bias[expert], and what becomes of it.

    Args:
        weight: in the layout that the kernel reads, with one leading axis of experts.
        format: of the weight.
        bias: (E, N) or None.
        rows: what the weight's rows are.
        dtype: of the result.
        activation: of float32 (gate, up), or (x,) where there is no gate; None for none.
    """

    weight: BlockScaled
    format: Format
    bias: Array | None
    rows: Rows
    dtype: Any
    activation: Callable[..., Array] | None = None
