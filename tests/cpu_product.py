"""One piece of the kernels for CPUs, called without XLA: every argument ends where memory does."""

import ctypes
import mmap
from typing import Any

import ml_dtypes
import numpy as np

from jmx.ffi.cpu import library as ffi
from jmx.numerics.formats import MXFP4, NVFP4, BlockScaled, Format

FLOAT32, BFLOAT16, FEW_BFLOAT16, INT8 = range(4)  # ways through the weights, as `Input` of product.h numbers them


class Guarded:
    """Memory that ends where a page begins that may not be touched."""

    def __init__(self, array: np.ndarray, before: int = 0):
        """`before`: bytes between the array's end and that page."""
        size = -(-(array.nbytes + before) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.map = mmap.mmap(-1, size + mmap.PAGESIZE)
        whole = np.frombuffer(self.map, np.uint8)
        assert protect(whole.ctypes.data + size, mmap.PAGESIZE, 0) == 0
        start = size - array.nbytes - before
        self.array = whole[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        self.array[...] = array


def protect(address: int, size: int, protection: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), protection)


def product(
    instructions: str,
    x: np.ndarray,
    weight: BlockScaled,
    bias: np.ndarray,
    format: Format = MXFP4,
    *,
    few: bool = False,
    x_scales: np.ndarray | None = None,
    before: int = 0,
) -> np.ndarray:
    """x (M, K) times a packed weight (N, K) of numpy by one kernel; `before` shifts what may be."""
    way = {4: FLOAT32, 2: FEW_BFLOAT16 if few else BFLOAT16, 1: INT8}[x.itemsize]
    kind = {MXFP4: 0, NVFP4: 1}.get(format)
    if kind is None:
        kind = [np.dtype(d) for d in (ml_dtypes.bfloat16, np.float16, np.float32)].index(weight.scales.dtype) + 2
    columns = len(weight.values)
    given = [x, x_scales, weight.values, weight.scales, weight.zero_points, weight.global_scales, bias]
    given.append(np.full((len(x), columns), np.nan, np.float32))
    held = [None if a is None else Guarded(np.ascontiguousarray(a), before * a.itemsize) for a in given]
    addresses = [None if g is None else ctypes.c_void_p(g.array.ctypes.data) for g in held]
    sizes = [ctypes.c_int64(n) for n in (len(x), columns, x.shape[1], format.block_size)]
    library: Any = ctypes.CDLL(str(ffi._PATH))
    assert library.jmx_cpu_product(instructions.encode(), kind, way, *addresses, *sizes) == 0
    assert held[-1] is not None
    return held[-1].array.copy()
