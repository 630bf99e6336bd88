"""Operand A of elements of 4 bits, for one thread: four registers of 8-bit elements for each slice of 32 columns.

`layout` has the order of a thread's words. Of 8 weights in a word e5m2 of e2m1 takes 11 instructions, with the scales
of their blocks; e4m3 of int4 takes 6, and int8 of it 5.
"""

from collections.abc import Callable, Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jmx.pallas.mosaic_sm90_fp8.elements import E4M3, E5M2, Elements
from jmx.pallas.mosaic_sm90_fp8.layout import EXACT_BELOW, magnitudes
from jmx.pallas.sm90.accumulator import load_words
from jmx.pallas.sm90.mlir import constant, run, thread_index
from jmx.pallas.sm90.tiles import THREADS

SLICES = 4  # of 32 columns in a unit
_FAR = (  # sets the upper bit of each byte that is EXACT_BELOW or more
    f"{{ .reg .b32 t; and.b32 t, $1, 0x7f7f7f7f; add.u32 t, t, {(128 - EXACT_BELOW) * 0x01010101:#x}; "
    "or.b32 $0, t, $1; }"
)
_OF_BYTE = "prmt.b32 $0, $1, 0, {:#x};"
_TABLE = tuple(  # the magnitudes at a distance, four per word
    f"mad.lo.u32 $0, $1, {-int(step) & 0xFFFFFFFF:#x}, {int(largest):#x};"
    for largest, step in zip(*magnitudes(), strict=True)
)
_MAGNITUDES = "lop3.b32 $0, $1, 0x77777777, $2, 0x40;"  # a & b & ~c
_LOOK_UP = ("prmt.b32 $0, $1, $2, $3;", "{ .reg .b32 t; shr.u32 t, $3, 16; prmt.b32 $0, $1, $2, t; }")
_SIGNS = (
    "lop3.b32 $0, $1, 0x80808080, $2, 0xEA;",  # (a & b) | c
    "{ .reg .b32 t; shl.b32 t, $1, 4; lop3.b32 $0, t, 0x80808080, $2, 0xEA; }",
)
_ROTATED = "shf.l.wrap.b32 $0, $1, $1, 4;"  # codes 4..7 of int4 to where codes 0..3 were
_SIGNS_OF_INT4, _MAGNITUDES_OF_INT4 = ("and.b32 $0, $1, 0x88888888;", "and.b32 $0, $1, 0x77777777;")
# A code is -1 - magnitude if its sign is set: one more in magnitude, which at 8 carries into e4m3's exponent. Each
# sign, rotated to the right by 7, is where the nibble of its magnitude begins.
_ONE_MORE = "{ .reg .b32 t; shf.l.wrap.b32 t, $1, $1, 25; add.u32 $0, $2, t; }"
_LOWER = "lop3.b32 $0, $1, 0x0f0f0f0f, $2, 0xe2;"  # (a & b) | (c & ~b), of magnitudes and signs: codes 0..3
_HIGHER = "lop3.b32 $0, $1, 0xf0f0f0f0, $2, 0xe2;"  # the same of codes 4..7, which are to be rotated
_S8_OF_INT4 = "{ .reg .b32 s; prmt.b32 s, $1, 0, 0xba98; lop3.b32 $0, $1, 0x07070707, s, 0x6a; }"  # (a & b) ^ c


def decoded(elements: Elements, values: ir.Value, scales: ir.Value) -> list[list[ir.Value]]:
    """A unit's elements, of `elements.a`: for each slice the registers of operand A.

    Args:
        values: a reference uint8 (16, 256) to the unit.
        scales: of MXFP4 a reference uint8 (256,) to the distances of its scale codes. Others are not used.
    """
    if elements.a == E5M2:
        return _e2m1_slices(values, scales)
    return int4_slices(elements.a, _words(values), run)


def int4_slices[T](kind: str, words: Sequence[T], run: Callable[..., T]) -> list[list[T]]:
    """Registers of operand A, of `kind`, for the words of a unit. `run` runs PTX on them."""
    halves = [(_e4m3_of_int4 if kind == E4M3 else _s8_of_int4)(word, run) for word in words]
    return [[halves[2 * nth + row][half] for half in range(2) for row in range(2)] for nth in range(SLICES)]


def _e4m3_of_int4[T](word: T, run: Callable[..., T]) -> tuple[T, T]:
    """Codes 0..3 and 4..7 of a word, each a sign and three bits of the magnitude of its one's complement."""
    signs = run(_SIGNS_OF_INT4, word)
    magnitudes = run(_ONE_MORE, signs, run(_MAGNITUDES_OF_INT4, word))
    return run(_LOWER, magnitudes, signs), run(_ROTATED, run(_HIGHER, magnitudes, signs))


def _s8_of_int4[T](word: T, run: Callable[..., T]) -> tuple[T, T]:
    """The same as int8."""
    return run(_S8_OF_INT4, word), run(_S8_OF_INT4, run(_ROTATED, word))


def _piece(values: ir.Value, nth: int) -> list[ir.Value]:
    mine = arith.addi(arith.muli(thread_index(), constant(4)), constant(nth * THREADS * 4))
    return load_words(values, mine, 4)


def _words(values: ir.Value) -> list[ir.Value]:
    """The thread's words of a unit: for each slice that of its first row and that of its second."""
    return [word for nth in range(SLICES // 2) for word in _piece(values, nth)]


def _row_bytes(scales: ir.Value) -> list[ir.Value]:
    """Scale distances of the thread's two rows, a byte for each slice."""
    group = arith.shrui(thread_index(), constant(2))
    return load_words(scales, arith.muli(group, constant(2)), 2)


def _e2m1_slices(values: ir.Value, scales: ir.Value) -> list[list[ir.Value]]:
    """A unit's elements as e5m2; zeros in blocks whose scale is too far below the row's largest."""
    distances = _row_bytes(scales)
    far = [run(_FAR, word) for word in distances]
    words = _words(values)
    out = []
    for slice_ in range(SLICES):
        halves = []
        for row in range(2):
            word = words[2 * slice_ + row]
            distance = run(_OF_BYTE.format(0x4440 | slice_), distances[row])
            zeroed = run(_OF_BYTE.format(0x1111 * (8 | slice_)), far[row])  # all ones or all zeros
            table = [run(text, distance) for text in _TABLE]
            selectors = run(_MAGNITUDES, word, zeroed)
            found = [run(text, *table, selectors) for text in _LOOK_UP]
            halves.append([run(text, word, magnitude) for text, magnitude in zip(_SIGNS, found, strict=True)])
        out.append([halves[row][half] for half in range(2) for row in range(2)])
    return out
