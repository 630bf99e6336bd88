"""Runs PTX in numpy on uint32: the instructions that kernels use to dequantize."""

import ml_dtypes
import numpy as np


def run_ptx(text, *operands):
    """The value of $0. Operands $1, $2, ... are uint32 arrays."""
    registers = {f"${i}": np.asarray(value, np.uint32) for i, value in enumerate(operands, 1)}

    def value(name):
        if name in registers:
            return registers[name]
        return np.uint32(int(name[2:], 16) if name.startswith("0f") else int(name, 0))

    for line in text.strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *names = (part.strip() for part in rest.split(","))
        registers[target] = _OPERATIONS[name](*map(value, names)).astype(np.uint32)
    return registers["$0"]


def halves(word):
    """uint32 (...) -> float64 (..., 2), the two bfloat16 of each, the lower one first."""
    return np.stack([word & 0xFFFF, word >> 16], axis=-1).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)


def _rounded(values):
    """`halves` undone: each once to nearest even, subnormals kept."""
    with np.errstate(over="ignore"):
        words = values.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    return words[..., 0] | words[..., 1] << 16


def _prmt(a, b, selector):
    pool = [(source >> 8 * i) & 0xFF for source in (a, b) for i in range(4)]
    places = [int(selector) >> 4 * i & 15 for i in range(4)]
    signs = [(pool[place & 7] >> 7) * 0xFF for place in places]  # which the upper bit of a place asks for
    return sum((signs[i] if place & 8 else pool[place]) << 8 * i for i, place in enumerate(places))


def _lop3(a, b, c, table):
    tables = {
        (0xF0 & 0xAA) | (0xCC & ~0xAA & 0xFF): a & c | b & ~c,
        (0xF0 & 0xCC) | (0xAA & ~0xCC & 0xFF): a & b | c & ~b,
        (0xF0 & 0xCC) | 0xAA: a & b | c,
        (0xF0 & 0xCC) ^ 0xAA: a & b ^ c,
    }
    return tables[int(table)]


def _float(word):
    return np.asarray(word, np.uint32).view(np.float32)


def _bits(value):
    return np.asarray(value, np.float32).view(np.uint32)


def _to_bfloat16(high, low):
    high, low = (
        np.asarray(_float(x).astype(ml_dtypes.bfloat16)).view(np.uint16).astype(np.uint32) for x in (high, low)
    )
    return high << 16 | low


def _shf(low, high, left):
    """A funnel shift, here always of a word and itself."""
    assert (low == high).all()
    return low << left | low >> (32 - left)


_OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "shr.u32": lambda a, b: a >> b,
    "shf.l.wrap.b32": _shf,
    "shf.r.wrap.b32": lambda low, high, right: (high.astype(np.uint64) << 32 | low) >> (right & 31),
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "add.u32": lambda a, b: a + b,
    "mad.lo.u32": lambda a, b, c: np.atleast_1d(a) * b + c,
    "mul.bf16x2": lambda a, b: _rounded(halves(a) * halves(b)),
    "max.bf16x2": lambda a, b: _rounded(np.maximum(halves(a), halves(b))),
    "sub.bf16x2": lambda a, b: _rounded(halves(a) - halves(b)),
    "max.u32": np.maximum,
    "add.rn.f32": lambda a, b: _bits(_float(a) + _float(b)),
    "sub.rn.f32": lambda a, b: _bits(_float(a) - _float(b)),
    "mul.rn.f32": lambda a, b: _bits(_float(a) * _float(b)),
    "min.NaN.f32": lambda a, b: _bits(np.minimum(_float(a), _float(b))),
    "max.NaN.f32": lambda a, b: _bits(np.maximum(_float(a), _float(b))),
    "neg.f32": lambda a: a ^ np.uint32(1 << 31),
    "mul.f32": lambda a, b: _bits(_float(a) * _float(b)),
    "sub.f32": lambda a, b: _bits(_float(a) - _float(b)),
    "cvt.u16.u32": lambda a: a & 0xFFFF,
    "cvt.f32.f16": lambda a: _bits(np.asarray(a).astype(np.uint16).view(np.float16)),
    "cvt.rn.bf16x2.f32": _to_bfloat16,
    "fma.rn.bf16x2": lambda a, b, c: _rounded(halves(a) * halves(b) + halves(c)),
}
