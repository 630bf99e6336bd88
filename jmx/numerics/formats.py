"""Weight formats: the arrays of quantized weights, their shapes and dtypes, packing and padding.

A format splits the last (contracted) axis of a weight into blocks that share one scale:

    weight[n, k] = (values[n, k] - zero_points[n, b]) * scales[n, b] * global_scales[n],  b = k // block_size

where zero points and global scales are 0 and 1 in formats without them. Floats are formats, too: weights that are not
quantized, which have values alone, and one form of them. In MXFP4 a block is 32 e2m1 elements with one
e8m0 scale, as in the OCP Microscaling Formats (MX) Specification v1.0, section 5. See `quantization` for conversions.

Weights have two forms. *Canonical* arrays have one element of the format's dtype for each weight; *packed* arrays are
the uint8 bytes of checkpoints: two 4-bit elements in a byte, the even one of the contracted axis in the low nibble.
"""

import itertools
import re
from dataclasses import dataclass
from functools import lru_cache
from math import lcm, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmx.util import pytrees
from jmx.util.checks import check_array, check_bool, check_dtype, check_instance, check_int, check_named, check_shape
from jmx.util.typing import AnyArray, Float32, Int8, Int32, Shaped, UInt8

WHOLE_ROW = -1  # a block size, as in GPTQ's configs


@pytrees.register_namedtuple
class BlockScaled(NamedTuple):
    """A weight of logical shape (..., N, K) in a block format; a pytree. Arrays that its format lacks are None.

    values: canonical elements (..., N, K), or packed uint8 (..., N, K * bits / 8).
    scales: (..., N, blocks); packed: scales of one byte as uint8. None for floats.
    global_scales: float32 (..., N), which multiply whole rows. The single one of a checkpoint's tensor is repeated for
        its rows, so that gate and up may have different ones.
    zero_points: int8 (..., N, blocks).
    order: int32 (..., K): column j of the arrays multiplies input order[j] ("act-order": columns are sorted by group,
        and activations permuted likewise).
    """

    values: Shaped[Any, "*lead columns"]
    scales: Shaped[Any, "*lead b"] = None
    global_scales: Float32[Any, "*lead"] | None = None
    zero_points: Int8[Any, "*lead b"] | None = None
    order: Int32[Any, "..."] | None = None


@dataclass(frozen=True)
class Format:
    """A block format: element dtype, block size, scale dtypes, and the arrays of a weight.

    Args:
        name: key in `FORMATS`.
        element_dtype: dtype of canonical values.
        element_bits: bits of one value in memory.
        block_size: elements that share a scale, along the last axis; `WHOLE_ROW`: all of it.
        scale_dtypes: dtypes that canonical scales may have, the usual one first; of floats, which have none, any.
        arrays: names of the arrays of a weight, among those of `BlockScaled`.
        short_block: whether the last block may be shorter.
        block_rows: rows of a weight that share their scales in files and as `quantize` makes them; `WHOLE_ROW`: all.
            In memory each row has its own.
    """

    name: str
    element_dtype: np.dtype
    element_bits: int
    block_size: int
    scale_dtypes: tuple[np.dtype, ...]
    arrays: tuple[str, ...] = ("values", "scales")
    short_block: bool = False
    block_rows: int = 1

    @property
    def is_float(self) -> bool:
        """Whether weights are not quantized: floats, without scales, which may be trained."""
        return "scales" not in self.arrays

    @property
    def elements_in_a_byte(self) -> int:
        """How many elements packed bytes hold each; 1 for those of one byte or more."""
        return max(1, 8 // self.element_bits)

    @property
    def scale_dtype(self) -> np.dtype:
        """The usual dtype of canonical scales."""
        return self.scale_dtypes[0]

    def elements(self) -> np.ndarray:
        """The value of each element code, of at most 8 bits: float64 (2 ** element_bits,)."""
        if self.is_float:
            raise ValueError(f"`format` (={self.name!r}) must have elements of at most 8 bits")
        codes = np.arange(1 << self.element_bits, dtype=np.uint8)
        return _host_elements(codes, self).astype(np.float64)

    def check_size(self, name: str, size: int) -> None:
        """Raises ValueError, naming the argument `name`, unless `size` is a whole number of blocks and of bytes."""
        check_int(name, size, least=0)
        a_byte = self.elements_in_a_byte
        whole = a_byte if self.block_size == WHOLE_ROW or self.short_block else lcm(a_byte, self.block_size)
        if size % whole:
            raise ValueError(f"`{name}` (={size}) must be a multiple of {whole} for {self.name.upper()}")

    def whole_size(self, size: int) -> int:
        """The least size of at least `size` that is a whole number of bytes, and of blocks if kernels need these."""
        check_int("size", size, least=0)
        unit = lcm(self.elements_in_a_byte, self.block_size if self.needs_whole_blocks else 1)
        return -(-size // unit) * unit

    @property
    def needs_whole_blocks(self) -> bool:
        """Whether kernels take rows of whole blocks alone.

        Not those of FP8 with float scales, where padding is 0 whatever the scale, nor those of a scale a row.
        """
        short_fp8 = self.short_block and self.element_dtype == _E4M3
        return self.block_size != WHOLE_ROW and not short_fp8

    def num_blocks(self, size: int, what: str) -> int:
        """The number of blocks along an axis of `size` elements; ValueError naming `what` unless they are whole."""
        self.check_size(what, size)
        return 1 if self.block_size == WHOLE_ROW else -(-size // self.block_size)

    def abstract(self, shape: tuple[int, ...], *, packed: bool = False, scale_dtype: Any = None) -> BlockScaled:
        """Shapes and dtypes (`jax.ShapeDtypeStruct`) of the arrays of a weight of logical `shape` (..., N, K).

        `scale_dtype`: one of `scale_dtypes`; None: the first.
        """
        shape = check_shape("shape", shape)
        check_bool("packed", packed)
        *rows, size = shape
        blocks = (*rows, self.num_blocks(size, "shape[-1]"))
        scale = self.scale_dtype if scale_dtype is None else check_dtype("scale_dtype", scale_dtype, *self.scale_dtypes)
        arrays = BlockScaled(
            values=jax.ShapeDtypeStruct(shape, self.element_dtype),
            scales=jax.ShapeDtypeStruct(blocks, scale),
            global_scales=jax.ShapeDtypeStruct(tuple(rows), jnp.float32),
            zero_points=jax.ShapeDtypeStruct(blocks, jnp.int8),
            order=jax.ShapeDtypeStruct((*rows[:-1], size), jnp.int32),
        )
        if packed and not self.is_float:
            arrays = arrays._replace(
                values=jax.ShapeDtypeStruct((*rows, size * self.element_bits // 8), jnp.uint8),
                scales=jax.ShapeDtypeStruct(blocks, jnp.uint8 if scale.itemsize == 1 else scale),
            )
        return arrays._replace(**{name: None for name in BlockScaled._fields if name not in self.arrays})

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes in memory of a weight of logical `shape`: packed values, scales and all else."""
        return sum(
            prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(self.abstract(shape, packed=True))
        )


_E2M1, _E4M3, _E8M0 = (np.dtype(d) for d in (jnp.float4_e2m1fn, jnp.float8_e4m3fn, jnp.float8_e8m0fnu))
_INT4, _INT8 = np.dtype(jnp.int4), np.dtype(np.int8)
_FLOATS = tuple(np.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32))

MXFP4 = Format("mxfp4", _E2M1, 4, 32, (_E8M0,))
# Scales have 4 bits of precision; a global scale brings them into their range.
NVFP4 = Format("nvfp4", _E2M1, 4, 16, (_E4M3,), ("values", "scales", "global_scales"))
MXINT4 = Format("mxint4", _INT4, 4, 32, _FLOATS[:1])
# One scale for a tensor, a row ("channel"), or 128 x 128 weights. All are stored for each row, so that rows of gate and
# up may be from different tensors, in any order, and end within a block.
FP8_TENSOR = Format("fp8_tensor", _E4M3, 8, WHOLE_ROW, _FLOATS[::-1], block_rows=WHOLE_ROW)
FP8_CHANNEL = Format("fp8_channel", _E4M3, 8, WHOLE_ROW, _FLOATS[::-1])
FP8_BLOCK = Format("fp8_block", _E4M3, 8, 128, _FLOATS[::-1], short_block=True, block_rows=128)
# Of activations, too, for block-scaled products with MXFP4 weights. See `jmx.numerics.mxfp8`.
MXFP8 = Format("mxfp8", _E4M3, 8, 32, (_E8M0,))
# Weights that are not quantized.
FLOATS = tuple(Format(d.name, d, 8 * d.itemsize, WHOLE_ROW, _FLOATS[-1:], ("values",)) for d in _FLOATS)


_GROUP_SIZES = (32, 64, 128)  # of the formats that tables list
_MORE = {"": (), "_asym": ("zero_points",), "_order": ("order",), "_asym_order": ("zero_points", "order")}


def _integers(bits: int, block_size: int, kind: str) -> Format:
    """INT4 or INT8 in groups or by rows, with or without zero points ("asym"), with or without activation order."""
    blocks = "channel" if block_size == WHOLE_ROW else f"g{block_size}"
    arrays = ("values", "scales", *_MORE[kind])
    element_dtype, is_short = {4: _INT4, 8: _INT8}[bits], block_size != WHOLE_ROW
    return Format(f"int{bits}_{blocks}{kind}", element_dtype, bits, block_size, _FLOATS, arrays, short_block=is_short)


def fp8_in_blocks(rows: int, columns: int) -> Format:
    """FP8 with one scale for blocks of `rows` x `columns` weights, of which the last may be short: `FP8_BLOCK` if 128 x
    128, else of a name such as "fp8_block_64x256"."""
    if (rows, columns) == (FP8_BLOCK.block_rows, FP8_BLOCK.block_size):
        return FP8_BLOCK
    name = f"fp8_block_{rows}x{columns}"
    return Format(name, _E4M3, 8, columns, _FLOATS[::-1], short_block=True, block_rows=rows)


_SIZE = "([1-9][0-9]{0,8})"
_INTEGERS = re.compile(f"int(4|8)_g{_SIZE}({'|'.join(_MORE)})")
_BLOCKS = re.compile(f"fp8_block_{_SIZE}x{_SIZE}")


@lru_cache(1024)
def _parametrised(name: str) -> Format | None:
    """The format of a name that has sizes in it; None for other names, and those that have a shorter one."""
    if (match := _INTEGERS.fullmatch(name)) is not None:
        return _integers(int(match[1]), int(match[2]), match[3])
    match = _BLOCKS.fullmatch(name)
    format = None if match is None else fp8_in_blocks(int(match[1]), int(match[2]))
    return format if format is not None and format.name == name else None


class FormatTable(dict[str, Format]):
    """Formats by name. Beside those that it lists, it has those of any size, which `also` describes."""

    also = (
        "int4_gN or int8_gN (also _asym, _order) for groups of any N, or fp8_block_RxC for blocks of R rows, C columns"
    )

    def __missing__(self, name: str) -> Format:
        format = _parametrised(name) if isinstance(name, str) else None
        if format is None:
            raise KeyError(name)
        return format

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and _parametrised(name) is not None)


# Of weights.
FORMATS = FormatTable(
    (format.name, format)
    for format in (
        *(MXFP4, NVFP4, MXINT4, MXFP8),
        *(
            _integers(bits, size, kind)
            for bits, size, kind in itertools.product((4, 8), (*_GROUP_SIZES, WHOLE_ROW), _MORE)
            if not (size == WHOLE_ROW and "order" in _MORE[kind])  # one group has no order
        ),
        *(FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK),
        *FLOATS,
    )
)

_ELEMENTS = {format.element_dtype: None for format in FORMATS.values()}  # in that order, each once
_SCALE_BYTES = {_E8M0: 127, _E4M3: 0x38}  # of 1.0


def get(format: Format | str) -> Format:
    """A format of weights, or the one of that name in `FORMATS`. ValueError, naming those, for other names."""
    return check_named("format", format, Format, FORMATS)


def _name(format: Format) -> str:
    if format.name not in FORMATS or FORMATS[format.name] != format:
        raise ValueError(f"`format` (={format}) must be one of jmx.FORMATS to be serialized")
    return format.name


CODEC: pytrees.Codec = (_name, get)


def with_float_scales(*element_dtypes: Any) -> tuple[str, ...]:
    """Names of the formats of these element types that kernels decode alike, whatever the format.

    Their scales are floats of 16 or 32 bits, for whole rows or blocks of 32, 64 or 128 columns, without global scales.
    A kernel has code for each format with other scales, and names it.
    """
    return tuple(
        format.name
        for format in FORMATS.values()
        if any(format.element_dtype == dtype for dtype in element_dtypes)
        and {*format.scale_dtypes} <= {*_FLOATS}
        and format.block_size in (WHOLE_ROW, 32, 64, 128)
        and "global_scales" not in format.arrays
    )


def decoded_alike(format: Format) -> str:
    """The name of the listed format whose arrays kernels decode by the same code; the format's own if there is none.

    Integers in larger groups of a power of two are decoded as those in groups of 128; how many rows of a block share
    its scale in files does not matter in memory.
    """
    size = format.block_size
    if size < _GROUP_SIZES[-1] or size & (size - 1):
        return format.name
    if format.element_dtype == _E4M3:
        return FP8_BLOCK.name if size == FP8_BLOCK.block_size else format.name
    return format.name.replace(f"_g{size}", f"_g{_GROUP_SIZES[-1]}")


def is_packed(q: BlockScaled) -> bool:
    """Whether the values of `q` are uint8 bytes."""
    return q.values.dtype == jnp.uint8


def check_weight(q: BlockScaled, name: str = "q") -> None:
    """Raises TypeError or ValueError, naming the array, unless the weight called `name` is a BlockScaled of arrays."""
    check_instance(name, q, BlockScaled, "a jmx.BlockScaled")
    needed = ("values",) if getattr(q.values, "dtype", None) in _FLOATS else ("values", "scales")
    for field, array in q._asdict().items():
        if array is not None or field in needed:
            check_array(f"{name}.{field}", array, abstract=True)
    for field in needed:
        if not getattr(q, field).shape:
            raise ValueError(f"`{name}.{field}` (a scalar) must have a last axis, of blocks")


def logical_shape(q: BlockScaled, format: Format | str = MXFP4, name: str = "q") -> tuple[int, ...]:
    """Logical shape (..., N, K) of the weight `q`, canonical or packed.

    Raises:
        TypeError: dtypes that are neither the format's nor uint8, values and scales of which only one is packed, or an
            array that the format does not have.
        ValueError: arrays that are missing, or do not fit the values.
    """
    format = get(format)
    check_weight(q, name)
    packed = is_packed(q)
    *lead, size = q.values.shape
    shape = (*lead, size * 8 // format.element_bits if packed else size)
    of = f"{'packed' if packed else 'canonical'} {format.name.upper()}"
    scale_dtype = q.scales.dtype if q.scales is not None and q.scales.dtype in format.scale_dtypes else None
    for name, array, expected in zip(
        BlockScaled._fields, q, format.abstract(shape, packed=packed, scale_dtype=scale_dtype), strict=True
    ):
        if expected is None:
            if array is not None:
                raise TypeError(f"`{name}` (dtype {array.dtype}) must be None for {of}")
            continue
        if array is None:
            raise ValueError(f"`{name}` (=None) must be {expected.dtype} {expected.shape} for {of}")
        if array.dtype != expected.dtype:
            raise TypeError(f"`{name}` (dtype {array.dtype}) must be {expected.dtype} for {of}")
        if array.shape != expected.shape:
            raise ValueError(
                f"`{name}` (shape {array.shape}) must be {expected.shape} for {format.name.upper()} of shape {shape}"
            )
    return shape


def pack(q: BlockScaled) -> BlockScaled:
    """Canonical to packed: uint8 values (..., K * bits / 8), even elements in the low nibbles, and bytes as uint8.

    numpy arrays (of ml_dtypes) stay in numpy, others are bitcast by XLA. Floats and packed `q` are returned unchanged.

    Raises:
        TypeError: values that are of no format.
        ValueError: an odd number of 4-bit values.
    """
    check_weight(q)
    if is_packed(q):
        return q
    if q.values.dtype not in _ELEMENTS:
        raise TypeError(f"`q.values` (dtype {q.values.dtype}) must be {' or '.join(d.name for d in _ELEMENTS)}")
    if q.values.dtype in _FLOATS:
        return q
    scales = _bytes(q.scales) if q.scales.dtype.itemsize == 1 else q.scales
    if q.values.dtype in (_E4M3, _INT8):
        return q._replace(values=_bytes(q.values), scales=scales)
    if q.values.shape[-1] % 2:
        raise ValueError(f"`q.values` (shape {q.values.shape}) must have an even last axis: two 4-bit values a byte")
    pairs = q.values.reshape(*q.values.shape[:-1], q.values.shape[-1] // 2, 2)
    if isinstance(q.values, np.ndarray):
        nibbles = pairs.view(np.uint8) & 15
        return q._replace(values=nibbles[..., 0] | nibbles[..., 1] << 4, scales=scales)
    return q._replace(values=lax.bitcast_convert_type(pairs, jnp.uint8), scales=scales)


def from_offset_binary(q: BlockScaled, format: Format | str) -> BlockScaled:
    """Converts codes c that represent c - 8, or c - 128 for 8 bits, to two's complement, which jmx uses.

    Some checkpoints store integers in this offset binary, for example of MXINT4.

    Args:
        q: uint4 values (..., K), or uint8 codes (..., K * bits / 8), packed as by `pack`.
        format: of integers without zero points, which would be codes too.

    Raises:
        ValueError: another format.
        TypeError: other values.
    """
    format = get(format)
    check_weight(q)
    bits = format.element_bits
    if format.element_dtype not in (_INT4, _INT8) or "zero_points" in format.arrays:
        raise ValueError(f"`format` (={format.name}) must be one of integers without zero points")
    if is_packed(q):
        return q._replace(values=q.values ^ np.uint8(0x88 if bits == 4 else 0x80))
    if q.values.dtype != jnp.uint4 or bits != 4:
        raise TypeError(f"`q.values` (dtype {q.values.dtype}) must be {'uint4 or ' * (bits == 4)}uint8")
    return q._replace(values=(q.values.astype(np.int8) - np.int8(8)).astype(_INT4))


def _bytes(array: Shaped[AnyArray, "*shape"]) -> UInt8[AnyArray, "*shape"]:
    return array.view(np.uint8) if isinstance(array, np.ndarray) else lax.bitcast_convert_type(array, jnp.uint8)


def unpack(q: BlockScaled, format: Format | str = MXFP4) -> BlockScaled:
    """Packed to canonical, the inverse of `pack`. A canonical `q` is returned unchanged.

    Raises:
        ValueError, TypeError: packed arrays that do not fit each other or `format`.
    """
    format = get(format)
    check_weight(q)
    if not is_packed(q):
        return q
    shape = logical_shape(q, format)
    scales = q.scales if q.scales.dtype.itemsize > 1 else _of_bytes(q.scales, format.scale_dtype)
    if format.element_bits == 8:
        return q._replace(values=_of_bytes(q.values, format.element_dtype), scales=scales)
    if isinstance(q.values, np.ndarray):
        nibbles = np.stack([q.values & 15, q.values >> 4], axis=-1).reshape(shape)
        return q._replace(values=_host_elements(nibbles, format), scales=scales)
    values = lax.bitcast_convert_type(q.values, format.element_dtype).reshape(shape)
    return q._replace(values=values, scales=scales)


def _host_elements(codes: np.ndarray, format: Format) -> np.ndarray:
    if format.element_dtype == jnp.int4:  # numpy stores int4 sign-extended to eight bits
        return ((codes ^ 8) - np.uint8(8)).view(np.int8).astype(format.element_dtype)
    return codes.view(format.element_dtype)


def _of_bytes(array: UInt8[AnyArray, "*shape"], dtype: np.dtype) -> Shaped[AnyArray, "*shape"]:
    return array.view(dtype) if isinstance(array, np.ndarray) else lax.bitcast_convert_type(array, dtype)


def one(format: Format, dtype: Any) -> float:
    """The value of an array of scales of that dtype that represents 1.0."""
    return _SCALE_BYTES[format.scale_dtype] if dtype == jnp.uint8 else 1.0


def precision(dtype: jax.typing.DTypeLike) -> lax.Precision | None:
    """Precision of products of `dtype`: by default, GPUs round float32 operands to TF32."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None
