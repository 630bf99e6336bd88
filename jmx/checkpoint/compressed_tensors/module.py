"""Reading one module, quantized or of floats: its tensors, checked by shape and dtype, and the arrays in them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np

from jmx.checkpoint.compressed_tensors import fnuz, packing
from jmx.checkpoint.compressed_tensors.config import DEEPSEEK_FP4, FP8, FP8_UE8M0, GLOBAL, MODELOPT, Scheme
from jmx.checkpoint.compressed_tensors.tensor_names import FLOATS, KEPT, PACKED, is_packed, names_of
from jmx.checkpoint.shards import DTYPES, CheckpointError, Tensor
from jmx.numerics.formats import FORMATS, BlockScaled
from jmx.numerics.input_formats import INPUT_FORMATS, static_limits
from jmx.util.typing import Float, Float32, Int8, Int32, Shaped, UInt8

Shape = tuple[int, ...]

_CODES = ("U8", "F8_E8M0")  # e8m0 as compressed-tensors writes it, and by the name that safetensors has for it
# Dtypes of scales that are e8m0, beside those of all files. Bytes of FP8 are e8m0 only if the config declares it.
_EXPONENTS: dict[str, tuple[str, ...]] = {FP8: ("F8_E8M0",), FP8_UE8M0: ("F8_E8M0", "U8"), DEEPSEEK_FP4: ("F8_E8M0",)}
_OF_INPUTS = ("input_", "activation_scale")  # prefixes of the tensors of inputs
_E8M0, _E4M3 = np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(ml_dtypes.float8_e4m3fn)

_ONE = ((1,), (), (1, 1))
_LEAST_NORMAL = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class Piece:
    """A tensor of a file, or one expert's slice of a tensor that holds all experts along its first axis.

    `transposed`: rows are the last axis, as in files whose weights are the right operand of a product, x @ w.
    """

    tensor: Tensor
    expert: int | None = None
    transposed: bool = False

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    @property
    def shape(self) -> Shape:
        shape = self.tensor.shape if self.expert is None else self.tensor.shape[1:]
        return shape[::-1] if self.transposed else shape

    def view(self) -> Shaped[np.ndarray, "..."]:
        whole = self.tensor.view()
        part = whole if self.expert is None else whole[self.expert]
        return part.T if self.transposed else part

    def error(self, rule: str) -> CheckpointError:
        whose = "" if self.expert is None else f" (expert {self.expert})"
        return CheckpointError(self.tensor.file, f"tensor {self.tensor.name!r}{whose} {rule}")


class Module:
    """A quantized module: its tensors, checked by shape and dtype, and its arrays, read on demand.

    Args:
        name: in the checkpoint.
        pieces: its tensors, by their name after the module's.
        scheme: how it is quantized.

    Attributes:
        pieces: its tensors by compressed-tensors' names, whichever tool wrote them.
        shape: (N, K), the contracted axis last.
        format: the weights' `jmx.numerics.formats.Format`.

    Raises:
        CheckpointError: a tensor is missing, is not one of its scheme's, or has another shape or dtype; the number of
            columns is not a multiple of the group size.
    """

    def __init__(self, name: str, pieces: Mapping[str, Piece], scheme: Scheme):
        if not pieces:
            raise ValueError(f"`pieces` of {name!r} must hold a tensor")
        self.name, self.scheme = name, scheme
        self._names = names_of(scheme.storage, pieces)
        neutral = {theirs: ours for ours, theirs in self._names.items()}
        self.pieces = {neutral.get(its, its): piece for its, piece in pieces.items() if its not in self._names}
        self.format = FORMATS[scheme.weights]
        first = next(iter(pieces.values()))
        self.file, self._are_parameters = first.tensor.file, first.transposed
        for its, piece in pieces.items():
            if its in self._names:
                raise self._unknown(piece)
        self._values_name = "weight_packed" if is_packed(scheme) else "weight"
        self.shape = self._shape()
        rows, columns = self.shape
        try:
            if not self._may_be_short and columns != self.format.whole_size(columns):
                unit, name = self.format.whole_size(1), self.format.name.upper()
                raise ValueError(f"`columns` (={columns}) must be a multiple of {unit} for {name}")
            self.format.check_size("columns", columns)
        except ValueError as error:
            raise self.pieces[self._values_name].error(f"does not fit its scheme: {error}") from error
        self._check_headers(rows, columns)

    @property
    def _may_be_short(self) -> bool:
        """Whether the tool's files may hold a short last group of integers."""
        return False

    @property
    def scale_dtype(self) -> str | None:
        """safetensors' name of the dtype of scales in the files."""
        return self.pieces["weight_scale"].dtype

    # Required tensors

    def _piece(self, tensor: str) -> Piece:
        if tensor not in self.pieces:
            its, joint = self._names.get(tensor, tensor), "_" if self._are_parameters else "."
            raise CheckpointError(self.file, f"tensor '{self.name}{joint}{its}' is missing, for {self.scheme.weights}")
        return self.pieces[tensor]

    def _unknown(self, piece: Piece) -> CheckpointError:
        return piece.error(f"is not one of {self.format.name} as {self.scheme.storage!r} stores it")

    def _shape(self) -> tuple[int, int]:
        values = self._piece(self._values_name)
        if len(values.shape) != 2 or 0 in values.shape:
            raise values.error(f"has shape {values.shape}, but must have rows and columns")
        rows, columns = values.shape
        if self.scheme.storage != PACKED:
            return rows, columns * (2 if self._values_name == "weight_packed" else 1)
        piece = self._piece("weight_shape")
        if piece.dtype not in ("I64", "I32") or piece.tensor.shape not in ((2,), (3,)):
            raise piece.error(f"is {piece.dtype} {piece.tensor.shape}, but must be two or three I64")
        stated = [int(size) for size in piece.tensor.view()]  # of a tensor with all experts, the whole's
        words = packing.num_words(stated[-1], self.format.element_bits)
        if stated[-2] != rows or words != columns or stated[-1] < 1 or len(stated) != len(values.tensor.shape):
            whole = [*values.tensor.shape]
            raise piece.error(f"(={stated}) must fit {values.tensor.name!r}, of {whole} words")
        return rows, stated[-1]

    def _expected(self, rows: int, columns: int) -> Iterator[tuple[str, tuple[str, ...], tuple[Shape, ...]]]:
        """Name, dtypes and shapes of each required tensor."""
        format, storage = self.format, self.scheme.storage
        bits, blocks = format.element_bits, format.num_blocks(columns, "columns")
        if storage == PACKED:
            yield "weight_packed", ("I32",), ((rows, packing.num_words(columns, bits)),)
        elif self._values_name == "weight_packed":
            yield "weight_packed", ("I8",) if storage == DEEPSEEK_FP4 else ("U8",), ((rows, columns // 2),)
        else:
            dtypes = ("F8_E4M3",) if format.element_dtype == _E4M3 else ("I8",)
            dtypes += (fnuz.DTYPE,) if format.name.startswith("fp8") else ()
            yield "weight", dtypes, ((rows, columns),)
        scale_dtypes = {"nvfp4": ("F8_E4M3",), "mxfp4": _CODES, "mxfp8": _CODES}.get(format.name, FLOATS)
        scale_dtypes = tuple(dict.fromkeys((*scale_dtypes, *_EXPONENTS.get(storage, ()))))
        if format.name == "fp8_tensor":
            yield "weight_scale", scale_dtypes, _ONE
        else:
            scale_rows = -(-rows // format.block_rows)
            yield "weight_scale", scale_dtypes, ((scale_rows, blocks), *[(rows,)] * (format.name == "fp8_channel"))
        if "global_scales" in format.arrays:
            yield "weight_global_scale", ("F32",), _ONE
        if "zero_points" in format.arrays:
            packed = storage == PACKED
            shape = (packing.num_words(rows, bits) if packed else rows, blocks)
            yield "weight_zero_point", ("I32",) if packed else ("I8",), (shape,)
        if "order" in format.arrays:
            yield "weight_g_idx", ("I32",), ((columns,),)
        if self.scheme.static_scale is not None:
            yield self.scheme.static_scale, ("F32",) if self.scheme.static_scale == GLOBAL else FLOATS, _ONE
        if "bias" in self.pieces:
            yield "bias", FLOATS, ((rows,),)

    def _check_headers(self, rows: int, columns: int) -> None:
        known = {*["weight_shape"] * (self.scheme.storage == PACKED), *self._unread}
        for name, dtypes, shapes in self._expected(rows, columns):
            known.add(name)
            piece = self._piece(name)
            if piece.dtype not in dtypes or piece.shape not in shapes:
                raise piece.error(
                    f"is {piece.dtype} {piece.shape}, but must be {' or '.join(dtypes)} {shapes[0]} "
                    f"for {self.format.name} of {self.shape}"
                )
        for name, piece in self.pieces.items():
            if name not in known:
                raise self._unknown(piece)

    # Arrays

    def array(self, name: str) -> Shaped[np.ndarray, "..."]:
        """One of the module's arrays, by its name in `BlockScaled`, packed; or "bias", (N,).

        Raises:
            CheckpointError: a scale is not finite and positive (NVFP4's block scales may be 0), a value is NaN, an
                integer has too many bits, or a group has another size than the scheme's.
        """
        return getattr(self, f"_{name}")()

    def sources(self, name: str) -> list[Piece]:
        """The tensors that one of the arrays, or "bias", is made of."""
        names = {
            "values": (
                self._values_name,
                *["weight_g_idx"] * ("order" in self.format.arrays),
                *["weight_scale"] * self._is_fnuz,
            ),
            "scales": ("weight_scale", *[self._values_name] * self._is_fnuz),
            "global_scales": ("weight_global_scale",),
            "zero_points": ("weight_zero_point",),
            "order": ("weight_g_idx",),
            "bias": ("bias",),
        }
        return [self.pieces[its] for its in names[name]]

    def abstract(self, name: str) -> tuple[Shape, np.dtype]:
        """Shape and dtype of one of the arrays, or of "bias"."""
        (rows, columns), blocks = self.shape, self.format.num_blocks(self.shape[1], "columns")
        scales = np.dtype(np.float32) if self._scales_are_e8m0 else DTYPES[self.pieces["weight_scale"].dtype]
        shapes: dict[str, tuple[Shape, np.dtype]] = {
            "values": ((rows, columns * self.format.element_bits // 8), np.dtype(np.uint8)),
            "scales": ((rows, blocks), np.dtype(np.uint8) if scales.itemsize == 1 else scales),
            "global_scales": ((rows,), np.dtype(np.float32)),
            "zero_points": ((rows, blocks), np.dtype(np.int8)),
            "order": ((columns,), np.dtype(np.int32)),
        }
        return shapes[name] if name != "bias" else ((rows,), DTYPES[self.pieces["bias"].dtype])

    def weight(self) -> BlockScaled:
        """All arrays of the weight. CheckpointError as in `array`."""
        return BlockScaled(**{name: self.array(name) for name in self.format.arrays})

    def static_scale(self) -> Float32[np.ndarray, ""] | None:
        """The static scale of the inputs, a factor of their quantized values; None if there is none.

        Raises:
            CheckpointError: it is not finite and positive, or so large or small that inputs would not be.
        """
        if self.scheme.static_scale is None:
            return None
        piece = self.pieces[self.scheme.static_scale]
        scale = self._factor(piece) if self.scheme.static_scale == GLOBAL else self._number(piece)
        assert self.scheme.inputs is not None
        least, most = static_limits(INPUT_FORMATS[self.scheme.inputs])
        if not least <= scale <= most:
            raise piece.error(f"(={scale}, as a factor) must be between {least} and {most} for {self.scheme.inputs}")
        return scale

    def _number(self, piece: Piece) -> Float32[np.ndarray, ""]:
        return self._positive(piece).astype(np.float32).reshape(())

    def _factor(self, piece: Piece) -> Float32[np.ndarray, ""]:
        """A global scale as a factor. In ModelOpt's files it is one; in compressed-tensors' files it divides."""
        number = self._number(piece)
        with np.errstate(over="ignore", under="ignore"):
            factor = number if self.scheme.storage == MODELOPT else np.float32(1) / number
        if not _LEAST_NORMAL <= factor < math.inf:
            raise piece.error(f"(={number}) must give a factor that is a normal float32, but gives {factor}")
        return np.asarray(factor, np.float32)

    def kept(self) -> dict[str, Shaped[np.ndarray, "..."]]:
        """The tensors that `module_tensors` needs, beside the arrays, to write the same bytes."""
        is_other_shape = self.format.name == "fp8_tensor" or len(self.pieces["weight_scale"].shape) == 1
        # Scales of MX formats are written as U8.
        is_other_dtype = self._scales_are_e8m0 or self.pieces["weight_scale"].dtype == "F8_E8M0"
        is_other = is_other_shape or is_other_dtype or self._is_fnuz
        names = (*KEPT, *self._unread, *["weight_scale"] * is_other, *["weight"] * self._is_fnuz)
        return {name: self.pieces[name].view() for name in names if name in self.pieces}

    @property
    def _unread(self) -> list[str]:
        """Tensors of inputs whose format is unknown, which are not read."""
        return [] if self.scheme.reads_inputs else [name for name in self.pieces if name.startswith(_OF_INPUTS)]

    @property
    def _scales_are_e8m0(self) -> bool:
        """Whether files hold the scales of FP8 weights as e8m0. They become float32, exactly."""
        stored = self.pieces["weight_scale"].dtype
        return self.format.name.startswith("fp8") and stored in _EXPONENTS.get(self.scheme.storage, ())

    @property
    def _is_fnuz(self) -> bool:
        """Whether files hold FP8 weights as e4m3fnuz. They become e4m3fn, exactly."""
        return self.pieces[self._values_name].dtype == fnuz.DTYPE

    def _of_fnuz(self) -> tuple[UInt8[np.ndarray, "N K"], Shaped[np.ndarray, "N b"]]:
        """Values and scales in e4m3fn of weights that files hold as e4m3fnuz. Not cached: they are large."""
        piece = self.pieces[self._values_name]
        try:
            return fnuz.to_e4m3fn(piece.view().view(np.uint8), self._file_scales(), self.format.block_size)
        except ValueError as error:
            raise piece.error(str(error)) from error

    def _positive(self, piece: Piece, *, or_zero: bool = False) -> Shaped[np.ndarray, "..."]:
        scales = piece.view()
        scales = scales.view(_E8M0).astype(np.float32) if scales.dtype in (np.uint8, _E8M0) else scales
        wide = scales.astype(np.float32)
        good = np.isfinite(wide) & ((wide > 0) | (or_zero & (wide == 0) & ~np.signbit(wide)))
        if not good.all():
            place = tuple(int(i) for i in np.argwhere(~good)[0])
            rule = "of 0 or more" if or_zero else "above 0"
            raise piece.error(f"must hold finite scales {rule}, but has {wide[place]} at {place}")
        return scales

    def _values(self) -> UInt8[np.ndarray, "N bytes"]:
        if self._is_fnuz:
            return self._of_fnuz()[0]
        piece = self.pieces[self._values_name]
        stored = piece.view()
        bits, columns = self.format.element_bits, self.shape[1]
        if self.scheme.storage == PACKED:
            try:
                packed = packing.bytes_of_words(stored, bits, columns)
            except ValueError as error:
                raise piece.error(str(error)) from error
        elif stored.dtype == np.int8 and not is_packed(self.scheme):
            self._check_bits(piece, stored)
            packed = packing.bytes_of_elements(stored, bits)
        else:
            packed = stored.view(np.uint8)
            if self.format.element_dtype == _E4M3 and ((packed & 0x7F) == 0x7F).any():
                raise piece.error("must hold no NaN")
        if "order" not in self.format.arrays:
            return packed
        return packing.columns(packed, bits, self._sorted)

    def _check_bits(self, piece: Piece, integers: Int8[np.ndarray, "N K"]) -> None:
        limit = 1 << self.format.element_bits - 1
        if integers.size and not -limit <= int(integers.min()) <= int(integers.max()) < limit:
            raise piece.error(f"must hold integers of {self.format.element_bits} bits, {-limit} to {limit - 1}")

    def _scales(self) -> Shaped[np.ndarray, "N b"]:
        return self._of_fnuz()[1] if self._is_fnuz else self._file_scales()

    def _file_scales(self) -> Shaped[np.ndarray, "N b"]:
        """Those of the file, one for each row and block."""
        piece = self.pieces["weight_scale"]
        rows, _ = self.shape
        if self.format.name in ("mxfp4", "mxfp8"):
            codes = piece.view().view(np.uint8)
            if codes.max() == 255:
                place = tuple(int(i) for i in np.argwhere(codes == 255)[0])
                raise piece.error(f"must have no scale of 255 (NaN), but has one at {place}")
            return codes
        if self.format.name == "nvfp4":  # ModelOpt rounds scales to 0 in blocks much smaller than the largest
            return self._positive(piece, or_zero=True).view(np.uint8)
        scales = self._positive(piece)
        if self.format.name == "fp8_tensor":
            return np.broadcast_to(scales.reshape(1, 1), (rows, 1))
        if self.format.block_rows > 1:
            return np.repeat(scales, self.format.block_rows, axis=0)[:rows]
        return scales.reshape(rows, -1)

    def _global_scales(self) -> Float32[np.ndarray, " N"]:
        return np.full(self.shape[0], self._factor(self.pieces["weight_global_scale"]), np.float32)

    def _zero_points(self) -> Int8[np.ndarray, "N b"]:
        piece = self.pieces["weight_zero_point"]
        stored = piece.view()
        bits, rows = self.format.element_bits, self.shape[0]
        if self.scheme.storage != PACKED:
            self._check_bits(piece, stored)
            return stored
        try:
            packed = packing.bytes_of_words(stored.T, bits, rows)
        except ValueError as error:
            raise piece.error(str(error)) from error
        return np.ascontiguousarray(packing.elements_of_bytes(packed, bits, rows).T)

    def _bias(self) -> Float[np.ndarray, " N"]:
        piece = self.pieces["bias"]
        bias = piece.view()
        if not np.isfinite(bias.astype(np.float32)).all():
            raise piece.error("must hold finite numbers")
        return bias

    def _order(self) -> Int32[np.ndarray, " K"]:
        return self._sorted

    @cached_property
    def _sorted(self) -> Int32[np.ndarray, " K"]:
        """The columns sorted by group; within a group they keep their order."""
        piece = self.pieces["weight_g_idx"]
        groups = piece.view()
        size = self.format.block_size
        order = np.argsort(groups, kind="stable").astype(np.int32)
        if not np.array_equal(groups[order], np.arange(groups.size, dtype=np.int32) // size):
            raise piece.error(f"must put {size} columns into each of the groups 0 to {groups.size // size - 1}")
        return order


class FloatModule:
    """A module of floats among quantized ones: an expert, or a projection of one, that a tool left as it was.

    Args:
        name: in the checkpoint.
        pieces: its tensors, by their name after the module's: a weight, and perhaps a bias.

    Raises:
        CheckpointError: the weight is missing, or a tensor has another dtype or shape.
    """

    scheme = None

    def __init__(self, name: str, pieces: Mapping[str, Piece]):
        self.name, self.pieces = name, pieces
        self.file = next(iter(pieces.values())).tensor.file
        if "weight" not in pieces:
            raise CheckpointError(self.file, f"tensor '{name}.weight' is missing")
        shape = pieces["weight"].shape
        for last, piece in pieces.items():
            if piece.dtype not in FLOATS:
                raise piece.error(f"is {piece.dtype}, but must be {' or '.join(FLOATS)}")
            if len(piece.shape) != (2 if last == "weight" else 1) or piece.shape[0] != shape[0] or 0 in piece.shape:
                raise piece.error(f"has shape {piece.shape}, but must be a matrix, or a bias of its rows")

    @property
    def shape(self) -> Shape:
        """(N, K), the contracted axis last."""
        return self.pieces["weight"].shape
