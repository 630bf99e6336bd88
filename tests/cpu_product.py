"""One GEMM of the kernels for CPUs, called without XLA. Every array ends where readable memory ends."""

import ctypes
import mmap
from typing import Any

import ml_dtypes
import numpy as np

from jmx.ffi.cpu import library as ffi
from jmx.numerics.formats import MXFP4, NVFP4, BlockScaled, Format

FLOAT32, BFLOAT16, FEW_BFLOAT16, ONE_BFLOAT16, INT8 = range(5)  # `Input` of product.h

POINTERS = ("x", "x_scales", "values", "scales", "zero_points", "global_scales", "bias", "out")
SIZES = ("rows", "columns", "k", "group", "out_stride")


class Gemm(ctypes.Structure):
    """`Gemm` of product.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in SIZES),
        ("scratch", ctypes.c_void_p),
    )


class Guarded:
    """A copy of an array that ends just before an inaccessible page."""

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
    few: int = 0,
    x_scales: np.ndarray | None = None,
    before: int = 0,
) -> np.ndarray:
    """x (M, K) times a packed weight (N, K) of numpy by one instruction set, `before` elements ahead of the page.

    `few`: by the kernel for calls of at most so many bfloat16 rows an expert, 1 or 4; 0: of any number.
    """
    input_type = {4: FLOAT32, 2: {0: BFLOAT16, 1: ONE_BFLOAT16, 4: FEW_BFLOAT16}[few], 1: INT8}[x.itemsize]
    kind = {MXFP4: 0, NVFP4: 1}.get(format)
    if kind is None:
        kind = [np.dtype(d) for d in (ml_dtypes.bfloat16, np.float16, np.float32)].index(weight.scales.dtype) + 2
    columns = len(weight.values)
    arrays = {
        "x": x,
        "x_scales": x_scales,
        "values": weight.values,
        "scales": weight.scales,
        "zero_points": weight.zero_points,
        "global_scales": weight.global_scales,
        "bias": bias,
        "out": np.full((len(x), columns), np.nan, np.float32),
    }
    held = {
        name: Guarded(np.ascontiguousarray(array), before * array.itemsize)
        for name, array in arrays.items()
        if array is not None
    }
    gemm = Gemm(
        **{name: guarded.array.ctypes.data for name, guarded in held.items()},
        rows=len(x),
        columns=columns,
        k=x.shape[1],
        group=format.block_size,
        out_stride=columns,
    )
    library: Any = ctypes.CDLL(str(ffi._PATH))
    assert library.jmx_cpu_product(instructions.encode(), kind, input_type, ctypes.byref(gemm)) == 0
    return held["out"].array.copy()
