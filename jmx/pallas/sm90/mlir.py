"""Short names for the MLIR that the Hopper kernels write for one thread."""

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.sm90.tiles import THREADS

utils = mgpu.utils


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
    """The 32-bit result of PTX without side effects."""
    return utils.inline_ptx(text, *operands, result_types=i32())


def pair(*values: ir.Value) -> ir.Value:
    """A vector of two values: a register of an array holds two columns of a row."""
    two = llvm.mlir_undef(ir.VectorType.get((2,), values[0].type))
    for i, value in enumerate(values):
        two = llvm.insertelement(two, value, constant(i))
    return two


def thread_index() -> ir.Value:
    """The thread's index in its warpgroup."""
    return arith.remui(utils.thread_idx(), constant(THREADS))


def address_of(ref: ir.Value, index: ir.Value, element: ir.Type) -> ir.Value:
    """The address of the `index`th element of a contiguous reference."""
    return utils.getelementptr(utils.memref_ptr(ref), [index], element)
