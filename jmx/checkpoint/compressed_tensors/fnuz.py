"""FP8 weights in e4m3fnuz, AMD's type of the MI300 (safetensors' F8_E4M3FNUZ), read exactly as e4m3fn.

A code of e4m3fnuz is half of what e4m3fn represents by it, with two exceptions: 0x80, which is NaN and not -0; and
0x7F and 0xFF, which are 240 and -240 and not NaN. So the weights of a block are either

* the same codes under half of the scale, if none of them is 240 or -240; or
* the codes of e4m3fn with the same values under the same scale, if e4m3fn has all of them: it has no odd multiples of
  2^-10 below 2^-6.

A block with weights of both kinds has no equal in e4m3fn, and is an error. Quantizers that map the largest weight to
224, as vLLM's do, leave no such block. The type is that of Noune et al., "8-bit Numerical Formats for Deep Neural
Networks" (2022), as ml_dtypes and LLVM define it.
"""

import ml_dtypes
import numpy as np

from jmx.numerics.formats import WHOLE_ROW
from jmx.util.typing import Shaped, UInt8

DTYPE = "F8_E4M3FNUZ"  # of safetensors
_NAN = 0x80
_LARGEST = 0x7F  # 240, or with the sign -240

_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fnuz).astype(np.float32)
_SAME_VALUES = _VALUES.astype(ml_dtypes.float8_e4m3fn)
_HAS_SAME_VALUE = _SAME_VALUES.astype(np.float32) == _VALUES


def to_e4m3fn(
    codes: UInt8[np.ndarray, "N K"], scales: Shaped[np.ndarray, "N b"], block_size: int
) -> tuple[UInt8[np.ndarray, "N K"], Shaped[np.ndarray, "N b"]]:
    """Codes of e4m3fn and scales that represent the same weights as codes of e4m3fnuz and `scales`, of any float dtype.

    Args:
        block_size: columns that share a scale; the last block of a row may be short. `WHOLE_ROW`: all.

    Raises:
        ValueError: a weight is NaN; a block has no equal in e4m3fn, or half of its scale none in the scale's dtype. The
            message has the place.
    """
    columns = codes.shape[1]
    starts = np.arange(0, columns, columns if block_size == WHOLE_ROW else block_size)
    if (codes == _NAN).any():
        raise ValueError(f"must hold no NaN, but has one at {_first(codes == _NAN)}")
    has_largest = np.bitwise_or.reduceat((codes & _LARGEST) == _LARGEST, starts, axis=1)
    has_odd = np.bitwise_or.reduceat(~_HAS_SAME_VALUE[codes], starts, axis=1)
    if (has_largest & has_odd).any():
        row, block = _first(has_largest & has_odd)
        raise ValueError(
            f"must be exact in e4m3fn, but block {block} of row {row} has weights of 240 and odd multiples of 2^-10, "
            "times its scale"
        )
    half = (scales / 2).astype(scales.dtype)
    if (~has_largest & (half * 2 != scales)).any():
        row, block = _first(~has_largest & (half * 2 != scales))
        raise ValueError(f"must have a scale in block {block} of row {row} whose half is exact in {scales.dtype}")
    by_value = np.repeat(has_largest, np.diff(starts, append=columns), axis=1)
    return np.where(by_value, _SAME_VALUES.view(np.uint8)[codes], codes), np.where(has_largest, scales, half)


def _first(wrong: Shaped[np.ndarray, "N b"]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(wrong)[0])
