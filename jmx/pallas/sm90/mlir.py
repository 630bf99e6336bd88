"""Short names for the MLIR that the Hopper kernels write for one thread, beside Pallas' arrays."""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.sm90.tiles import THREADS

Fragment = mgpu.FragmentedArray
SCALAR = plgpu.Layout.WG_SPLAT
utils = mgpu.utils
operation: Any = plgpu.inline_mgpu  # what it makes of a function takes arrays and refs, not what the function takes
result: Any = plgpu.ShapeDtypeStruct


def i8() -> ir.Type:
    return ir.IntegerType.get_signless(8)


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def f32() -> ir.Type:
    return ir.F32Type.get()


def constant(value: int, type_: ir.Type | None = None) -> ir.Value:
    return utils.c(value, type_ or i32())


def wide(value: ir.Value) -> ir.Value:
    return arith.extsi(i64(), value)


def less(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)


def run(text: str, *operands: ir.Value) -> ir.Value:
    """The 32 bits that a piece of PTX without side effects makes of its operands."""
    return utils.inline_ptx(text, *operands, result_types=i32())


def pair(*values: ir.Value) -> ir.Value:
    """A vector of two values: what an array's registers hold of a row's two columns."""
    two = llvm.mlir_undef(ir.VectorType.get((2,), values[0].type))
    for i, value in enumerate(values):
        two = llvm.insertelement(two, value, constant(i))
    return two


def thread_index() -> ir.Value:
    """The thread's index in its warpgroup."""
    return arith.remui(utils.thread_idx(), constant(THREADS))


def address_of(ref: ir.Value, index: ir.Value, element: ir.Type) -> ir.Value:
    return utils.getelementptr(utils.memref_ptr(ref), [index], element)
