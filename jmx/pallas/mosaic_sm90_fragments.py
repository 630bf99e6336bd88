"""What one thread of a warpgroup does in the kernel of `mosaic_sm90_kernel`: pieces of code below Pallas' arrays.

Pallas Mosaic GPU moves arrays that a whole warpgroup holds, but cannot say which thread holds what, nor convert e2m1
and e8m0 on Hopper. These functions can: each is a Pallas operation whose body is written for one thread, in MLIR and
PTX. `wgmma` leaves a thread of warp `w` and lane `l`, of an accumulator (64, n), row `16 * w + l // 4` and the row 8
below it, of both the columns `8 * i + 2 * (l % 4) + {0, 1}`. Here these two rows are the thread's *first* and *second*;
of a gated weight in the layout `mosaic_sm90` they are a gate and its up.

A thread's own elements of one row travel in arrays (32 * n,), whose order means nothing: they only go through
elementwise operations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.mosaic_sm90_layout import EVEN, GATED_ROWS, PLACE, ROTATIONS, SCALE_BYTES, TILE, VALUE_BYTES

WARPGROUP = 128  # threads
_Fragment = mgpu.FragmentedArray
_SCALAR = plgpu.Layout.WG_SPLAT
_utils = mgpu.utils
_operation: Any = plgpu.inline_mgpu  # what it makes of a function takes arrays and refs, not what the function takes
_result: Any = plgpu.ShapeDtypeStruct

_ORDER_COPIES = "fence.proxy.async.global;"
# Even bits of $1, odd bits of $2. lop3's table is that of (a & c) | (b & ~c).
_MIX = f"lop3.b32 $0, $1, $2, {EVEN:#x}, 0xE4;"
# A pair of the word $1, rotated, masked, and times the multiplier $2. Up to 6 nothing wraps around: a shift will do.
_PAIR = "{{ .reg .b32 t; {turn} and.b32 t, t, {place:#x}; mul.bf16x2 $0, t, $2; }}"
_TURNS = tuple(f"shl.b32 t, $1, {left};" if left <= 6 else f"shf.l.wrap.b32 t, $1, $1, {left};" for left in ROTATIONS)
_PAIRS = tuple(_PAIR.format(turn=turn, place=PLACE) for turn in _TURNS)
# Byte {byte} of $1, twice, as the exponents of two bfloat16; $2 is added to both.
_MULTIPLIER = "{{ .reg .b32 t; prmt.b32 t, $1, 0, {select}; mad.lo.u32 $0, t, 0x80, $2; }}"


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _f32() -> ir.Type:
    return ir.F32Type.get()


def _int(value: int, type_: ir.Type | None = None) -> ir.Value:
    return _utils.c(value, type_ or _i32())


def _wide(value: ir.Value) -> ir.Value:
    return arith.extsi(_i64(), value)


def _less(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)


def _thread() -> ir.Value:
    """The thread's index in its warpgroup."""
    return arith.remui(_utils.thread_idx(), _int(WARPGROUP))


def _address(ref: ir.Value, index: ir.Value, element: ir.Type) -> ir.Value:
    return _utils.getelementptr(_utils.memref_ptr(ref), [index], element)


def _row_array(size: int) -> Any:
    return _result((size,), jnp.float32, _own(size))


def _own(size: int) -> Any:
    return plgpu.Layout.WG_STRIDED((size,), vec_size=2)


def _of_registers(registers: Any, size: int) -> _Fragment:
    layout = mgpu.WGStridedFragLayout((size,), 2)
    registers = np.array(registers, dtype=object).reshape(layout.registers_shape((size,)))
    return _Fragment(_registers=registers, _layout=layout, _is_signed=None)


def row_size(n: int) -> int:
    """Size of the array of a thread's own elements of one row, where the accumulator has n columns."""
    return TILE // 2 * n


def _pairs_of_tile(values: ir.Value, scales: ir.Value, exponent: _Fragment, tile: int) -> np.ndarray:
    """The thread's share of a tile as 32-bit registers of two bfloat16: (8 groups of 8 columns, its 2 rows)."""
    thread = _thread()
    mine = arith.addi(arith.muli(thread, _int(4)), _int(tile * VALUE_BYTES // 4))
    words = llvm.load(ir.VectorType.get((4,), _i32()), _address(values, mine, _i32()), alignment=16)
    mine = arith.addi(arith.shrui(thread, _int(2)), _int(tile * SCALE_BYTES // 4))
    codes = llvm.load(_i32(), _address(scales, mine, _i32()), alignment=4)

    def multiplier(byte: int) -> ir.Value:
        text = _MULTIPLIER.format(select=f"{0x4040 + 0x101 * byte:#x}")
        return _utils.inline_ptx(text, codes, exponent.registers.item(), result_types=_i32())

    multipliers = [[multiplier(2 * row + half) for half in range(2)] for row in range(2)]
    registers = np.empty((TILE // 8, 2), dtype=object)
    for two in range(TILE // 32):
        first, second = (llvm.extractelement(words, _int(2 * two + i)) for i in range(2))
        mixed = [_utils.inline_ptx(_MIX, *of, result_types=_i32()) for of in ((first, second), (second, first))]
        for pair, text in enumerate(_PAIRS):
            eight, row = divmod(pair, 2)
            source = (first, second, *mixed)[pair // 2]
            placed = _utils.inline_ptx(text, source, multipliers[row][two], result_types=_i32())
            registers[4 * two + eight, row] = placed
    return registers


def dequantize(values: Any, scales: Any, exponent: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
    """A tile's bytes in shared memory -> its two halves, bfloat16 (64, 32), as wgmma takes A.

    Args:
        values, scales: refs of tiles along the columns.
        exponent: int32, from `tile_scalars`.
        tile: which of them. That it is static makes it a part of the instructions, here and below.
    """

    half = _result((TILE, TILE // 2), jnp.bfloat16, plgpu.Layout.WGMMA)

    @_operation(arg_types=(plgpu.RefType(), plgpu.RefType(), _SCALAR), return_type=(half, half))
    def body(_: Any, values: ir.Value, scales: ir.Value, exponent: _Fragment) -> tuple[_Fragment, ...]:
        two = ir.VectorType.get((2,), ir.BF16Type.get())
        layout = mgpu.WGMMA_LAYOUT
        halves = np.split(_pairs_of_tile(values, scales, exponent, tile), 2)
        return tuple(
            _Fragment(
                _registers=np.array([_utils.bitcast(pair, two) for pair in registers.flat], dtype=object).reshape(
                    layout.registers_shape((TILE, TILE // 2))
                ),
                _layout=layout,
                _is_signed=None,
            )
            for registers in halves
        )

    return body(values, scales, exponent)


def _sums(acc: _Fragment) -> list[ir.Value]:
    """The thread's elements of an accumulator, in the order of the instructions that add to it."""
    return [llvm.extractelement(two, _int(i)) for two in acc.registers.flat for i in range(2)]


def _accumulator(acc: _Fragment, sums: Sequence[ir.Value]) -> _Fragment:
    """`acc` with other elements, in the order of `_sums`."""
    registers = np.empty(len(sums) // 2, dtype=object)
    for i in range(len(registers)):
        two = llvm.mlir_undef(ir.VectorType.get((2,), _f32()))
        for j in range(2):
            two = llvm.insertelement(two, sums[2 * i + j], _int(j))
        registers[i] = two
    return _Fragment(_registers=registers.reshape(acc.registers.shape), _layout=acc.layout, _is_signed=None)


# How rows lie in shared memory: tiles of 8 rows by 64 columns, as wgmma and ldmatrix read them without conflicts.
SWIZZLED: Any = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
_SWIZZLE_128_BYTES = 1 << 30  # in the upper half of a descriptor


def multiply(acc: jax.Array, a: jax.Array, x: Any, tile: int, half: int) -> jax.Array:
    """acc (64, n) plus a (64, 32) times 32 columns of x, transposed, by `wgmma`; `wait_for_product` before it is used.

    `plgpu.wgmma` does the same with 5 instructions more a tile: its descriptors of x are sums of 64 bits each, where
    here all of a stage are one and a constant.

    Args:
        acc: float32, n a multiple of 8.
        a: bfloat16, from `dequantize`.
        x: ref (n, columns) in shared memory, in tiles of 8 rows by 64 columns swizzled by 128 bytes.
        tile, half: which columns.
    """
    n = acc.shape[1]
    size = n // 2
    operands = [f"${i}" for i in range(2 * size, 2 * size + 5)]  # behind the sums, which are outputs and inputs
    sums = ", ".join(f"${i}" for i in range(size))
    constraints = ",".join(["=f"] * size + [str(i) for i in range(size)] + ["r"] * 4 + ["l"])

    @_operation(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, plgpu.RefType(SWIZZLED)),
        return_type=_result((TILE, n), jnp.float32, plgpu.Layout.WGMMA),
    )
    def body(_: Any, acc: _Fragment, a: _Fragment, x: ir.Value) -> _Fragment:
        (eight_stride, tile_stride, *_), _ = ir.MemRefType(x.type).get_strides_and_offset()
        upper = _SWIZZLE_128_BYTES | 2 * eight_stride >> 4
        lower = arith.shrui(llvm.ptrtoint(_i32(), _utils.memref_ptr(x)), _int(4))
        descriptor = _utils.inline_ptx(f"mov.b64 $0, {{$1, {upper:#x}}};", lower, result_types=_i64())
        pieces = np.array([_utils.bitcast(two, _i32()) for two in a.registers.flat], dtype=object).reshape(-1, 4)
        values = _sums(acc)
        out = llvm.StructType.get_literal([_f32()] * size)
        _utils.inline_ptx("wgmma.fence.sync.aligned;", has_side_effects=True)
        for piece, mine in enumerate(pieces):
            offset = 2 * (tile * tile_stride + half * TILE // 2 + piece * 16) >> 4
            text = (
                f"{{ .reg .b64 d; add.s64 d, {operands[4]}, {offset}; "
                f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{sums}}}, "
                f"{{{', '.join(operands[:4])}}}, d, 1, 1, 1, 0; }}"
            )
            made = llvm.inline_asm(
                out, [*values, *mine, descriptor], text, constraints, has_side_effects=True, asm_dialect=0
            )
            values = [llvm.extractvalue(_f32(), made, [i]) for i in range(size)]
        _utils.inline_ptx("wgmma.commit_group.sync.aligned;", has_side_effects=True)
        return _accumulator(acc, values)

    return body(acc, a, x)


def wait_for_product(acc: jax.Array) -> jax.Array:
    """What `multiply` returned, once it is there."""

    @_operation(arg_types=(plgpu.Layout.WGMMA,), return_type=_result(acc.shape, jnp.float32, plgpu.Layout.WGMMA))
    def body(_: Any, acc: _Fragment) -> _Fragment:
        values = _sums(acc)
        tied = ",".join(["=f"] * len(values) + [str(i) for i in range(len(values))])
        out = llvm.StructType.get_literal([_f32()] * len(values))
        text = "wgmma.wait_group.sync.aligned 0;"
        made = llvm.inline_asm(out, values, text, tied, has_side_effects=True, asm_dialect=0)
        return _accumulator(acc, [llvm.extractvalue(_f32(), made, [i]) for i in range(len(values))])

    return body(acc)


def wait_for_earlier_products() -> None:
    """Until all but the last `multiply` is done, so that their `a` are free."""

    @_operation()
    def body(_: Any) -> None:
        _utils.inline_ptx("wgmma.wait_group.sync.aligned 1;", has_side_effects=True)

    body()


_LOAD_MATRICES = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
_MULTIPLY = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)


def multiply_few(acc: jax.Array, values: Any, scales: Any, exponent: jax.Array, x: Any, tile: int) -> jax.Array:
    """acc (64, n) plus a tile times 64 columns of x, transposed, by `mma.sync`, each warp 16 of the rows.

    wgmma keeps four warps in step, cannot be awaited but as a whole, and at 8 columns takes twice as long.

    Args:
        acc: float32, n a multiple of 8.
        values, scales, exponent, tile: as for `dequantize`.
        x: as for `multiply`.
    """
    n = acc.shape[1]

    @_operation(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType(), _SCALAR, plgpu.RefType(SWIZZLED)),
        return_type=_result((TILE, n), jnp.float32, plgpu.Layout.WGMMA),
    )
    def body(_: Any, acc: _Fragment, values: ir.Value, scales: ir.Value, exponent: _Fragment, x: ir.Value) -> _Fragment:
        a = _pairs_of_tile(values, scales, exponent, tile)
        sums, out = _sums(acc), []
        (eight_stride, tile_stride, *_), _ = ir.MemRefType(x.type).get_strides_and_offset()
        base = llvm.ptrtoint(_i32(), _utils.memref_ptr(x))
        lane = arith.remui(_thread(), _int(32))
        row, chunk = arith.remui(lane, _int(8)), arith.divui(lane, _int(8))
        for eight in range(n // 8):
            b = []
            for half in range(2):  # ldmatrix takes 32 of the 64 columns: 4 chunks of 16 bytes, where swizzling has them
                at = arith.xori(arith.addi(chunk, _int(4 * half)), row)
                at = arith.addi(arith.muli(row, _int(2 * TILE)), arith.muli(at, _int(16)))
                at = arith.addi(base, arith.addi(at, _int(2 * (eight * eight_stride + tile * tile_stride))))
                b += _utils.inline_ptx(_LOAD_MATRICES, at, result_types=[_i32()] * 4, has_side_effects=True)
            c = sums[4 * eight : 4 * eight + 4]
            for piece in range(TILE // 16):
                mine = [a[2 * piece + eights, r] for eights in range(2) for r in range(2)]
                c = _utils.inline_ptx(_MULTIPLY, *mine, *b[2 * piece : 2 * piece + 2], *c, result_types=[_f32()] * 4)
            out += c
        return _accumulator(acc, out)

    return body(acc, values, scales, exponent, x)


def signal(counters: Any, index: jax.Array) -> None:
    """Adds 1 to counters[index], int32 in global memory, once all that the warpgroup has written there is seen by all.

    By copies by TMA, too, for which such writes are of another kind (PTX: the generic and the asynchronous proxy).
    """

    @_operation(arg_types=(plgpu.RefType(), _SCALAR))
    def body(_: Any, counters: ir.Value, index: _Fragment) -> None:
        _utils.inline_ptx(_ORDER_COPIES, has_side_effects=True)
        _utils.warpgroup_barrier()
        address = _address(counters, index.registers.item(), _i32())
        _utils.SemaphoreRef(address).signal(1, memory_scope="gpu")

    body(counters, index)


def wait(counters: Any, index: jax.Array, value: jax.Array) -> None:
    """A warp waits until counters[index] is `value` or more; then its copies by TMA see what was signalled."""

    @_operation(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR))
    def body(_: Any, counters: ir.Value, index: _Fragment, value: _Fragment) -> None:
        semaphore = _utils.SemaphoreRef(_address(counters, index.registers.item(), _i32()))
        scope: Any = {"scope": _utils.ThreadSubset.WARP, "memory_scope": "gpu"}
        semaphore.wait(value.registers.item(), decrement=False, **scope)
        _utils.inline_ptx(_ORDER_COPIES, has_side_effects=True)

    body(counters, index, value)


def split_rows(acc: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An accumulator (64, n) -> each thread's own elements of its first and its second row."""
    size = row_size(acc.shape[1])

    @_operation(arg_types=(plgpu.Layout.WGMMA,), return_type=(_row_array(size), _row_array(size)))
    def body(_: Any, acc: _Fragment) -> tuple[_Fragment, ...]:
        registers = acc.registers.reshape(-1, 2)
        return tuple(_of_registers(registers[:, row], size) for row in range(2))

    return body(acc)


def load_rows(ref: Any, size: int) -> jax.Array:
    """What was stored in a ref (size,) of shared memory as an array of a thread's own elements."""
    return plgpu.load(ref, layout=_own(size), optimized=False)


def tile_scalars(scales: Any, expert: jax.Array, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of one row of tiles: what `dequantize` wants as `exponent`, and the float32 by which results are raised.

    A scale code s becomes the multiplier 2^(s - 1 - shift), whose bfloat16 exponent is s + 126 - shift. A shift of 127
    tells of a code 255, NaN, which no multiplier is: results are then raised by NaN.
    """
    returns = tuple(_result((), dtype, _SCALAR) for dtype in (jnp.int32, jnp.float32))

    @_operation(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR), return_type=returns)
    def body(_: Any, scales: ir.Value, expert: _Fragment, tile: _Fragment) -> tuple[_Fragment, ...]:
        i8 = ir.IntegerType.get_signless(8)
        _, tiles, chunks, _ = ir.MemRefType(scales.type).shape
        row = arith.addi(arith.muli(expert.registers.item(), _int(tiles)), tile.registers.item())
        last = arith.addi(arith.muli(_wide(row), _int(chunks, _i64())), _int(chunks - 1, _i64()))
        at = _address(scales, arith.muli(last, _int(SCALE_BYTES, _i64())), i8)
        shift = arith.extui(_i32(), llvm.load(i8, at))
        exponent = arith.muli(arith.subi(_int(126), shift), _int(0x00800080))
        raised = llvm.bitcast(_f32(), arith.shli(arith.addi(shift, _int(127)), _int(23)))
        raised = arith.select(_less(shift, _int(127)), raised, _utils.c(float("nan"), _f32()))
        splat = partial(_Fragment.splat, shape=())
        return splat(exponent, is_signed=True), splat(raised)

    return body(scales, expert, tile)


@dataclass(frozen=True)
class Rows:
    """Which rows of a weight a thread's two rows of a tile are.

    Args:
        num_rows: rows of the weight, without padding.
        gate_up_order: "interleaved" or "concatenated" where a tile holds gate and up; None where it does not.
    """

    num_rows: int
    gate_up_order: str | None

    @property
    def num_outputs(self) -> int:
        """Rows of what comes out of the epilogue, with padding to whole tiles."""
        return -(-self._outputs // TILE) * TILE

    @property
    def _outputs(self) -> int:
        return self.num_rows if self.gate_up_order is None else self.num_rows // 2

    def output(self, tile: ir.Value) -> ir.Value:
        """The thread's first row of the output; where there is no gate, its second is 8 below."""
        warp, lane = arith.divui(_thread(), _int(32)), arith.remui(_thread(), _int(32))
        tile_rows, warp_rows = (TILE, 16) if self.gate_up_order is None else (GATED_ROWS, 8)
        row = arith.addi(arith.muli(tile, _int(tile_rows)), arith.muli(warp, _int(warp_rows)))
        return arith.addi(row, arith.divui(lane, _int(4)))

    def weight(self, tile: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The thread's two rows of the weight; past the end where the tile is padding."""
        row = self.output(tile)
        if self.gate_up_order is None:
            return row, arith.addi(row, _int(8))
        if self.gate_up_order == "interleaved":
            return arith.muli(row, _int(2)), arith.addi(arith.muli(row, _int(2)), _int(1))
        padding = arith.select(_less(row, _int(self._outputs)), _int(0), _int(self.num_rows))
        return arith.addi(row, padding), arith.addi(row, _int(self._outputs))


def load_bias(bias: Any, rows: Rows, expert: jax.Array, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bias (E, N) of the thread's first and second row of a tile, float32 (256,) arrays; 0 in the padding."""
    size = row_size(8)

    @_operation(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR), return_type=(_row_array(size), _row_array(size)))
    def body(_: Any, bias: ir.Value, expert: _Fragment, tile: _Fragment) -> tuple[_Fragment, ...]:
        element = ir.MemRefType(bias.type).element_type
        base = arith.muli(expert.registers.item(), _int(rows.num_rows))
        out = []
        for row in rows.weight(tile.registers.item()):
            inside = _less(row, _int(rows.num_rows))
            row = arith.select(inside, row, _int(0))
            value = llvm.load(element, _address(bias, _wide(arith.addi(base, row)), element))
            value = value if element == _f32() else arith.extf(_f32(), value)
            value = arith.select(inside, value, _utils.c(0.0, _f32()))
            two = llvm.mlir_undef(ir.VectorType.get((2,), _f32()))
            for i in range(2):
                two = llvm.insertelement(two, value, _int(i))
            out.append(_of_registers([two], size))
        return tuple(out)

    return body(bias, expert, tile)


def repeat(row: jax.Array, n: int) -> jax.Array:
    """One value a row, as `load_bias` has it, for each of the thread's n / 4 own elements."""

    @_operation(arg_types=(_own(row_size(8)),), return_type=_row_array(row_size(n)))
    def body(_: Any, row: _Fragment) -> _Fragment:
        return _of_registers([row.registers.item()] * (n // 8), row_size(n))

    return body(row)


def store(
    out: Any, arrays: Sequence[jax.Array], rows: Rows, tile: jax.Array, first: jax.Array, count: jax.Array
) -> None:
    """Writes a tile's outputs, transposed, to out (R, num_outputs) in global memory.

    Args:
        arrays: own elements of the thread's first row, and of its second where there is no gate; out's dtype.
        first: the row of `out` that takes the accumulator's first column.
        count: columns that there are; others are not written.
    """
    num_outputs = rows.num_outputs
    own = [_own(array.shape[0]) for array in arrays]

    @_operation(arg_types=(plgpu.RefType(), *own, *[_SCALAR] * 3))
    def body(_: Any, out: ir.Value, *args: _Fragment) -> None:
        tile, first, count = (scalar.registers.item() for scalar in args[-3:])
        element = ir.MemRefType(out.type).element_type
        bits = _utils.bitwidth(element)
        row = rows.output(tile)
        column = arith.muli(arith.remui(_thread(), _int(4)), _int(2))
        line = arith.muli(_wide(arith.addi(first, column)), _int(num_outputs, _i64()))
        address = _address(out, arith.addi(line, _wide(row)), element)
        for second, array in enumerate(args[:-3]):
            inside = _less(arith.addi(row, _int(8 * second)), _int(num_outputs))
            left = arith.select(inside, arith.subi(count, column), _int(0))  # of the columns from the thread's first on
            for eight, two in enumerate(array.registers.flat):
                for i in range(2):
                    there = arith.cmpi(arith.CmpIPredicate.slt, _int(8 * eight + i), left)
                    value = llvm.extractelement(two, _int(i))
                    value = _utils.bitcast(value, ir.IntegerType.get_signless(bits))
                    offset = ((8 * eight + i) * num_outputs + 8 * second) * bits // 8
                    text = f"@$2 st.global.b{bits} [$0 + {offset}], $1;"
                    _utils.inline_ptx(text, address, value, there, has_side_effects=True)

    body(out, *arrays, tile, first, count)
