"""The files of quantized experts: compressed-tensors, or for MXFP4 the Hugging Face form of gpt-oss."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from jmx.checkpoint.compressed_tensors import config_writer
from jmx.checkpoint.compressed_tensors.config import METHOD, STORAGES, Scheme
from jmx.checkpoint.compressed_tensors.module_writer import module_tensors
from jmx.checkpoint.model_configs.gpt_oss import QUANTIZATION
from jmx.checkpoint.quantizing.float_experts import Layer, Matrix
from jmx.checkpoint.shards import DTYPES, CheckpointError, Output, Tensor
from jmx.numerics.formats import FORMATS, MXFP4, BlockScaled, Format
from jmx.util.typing import Shaped

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Quantizes a matrix: packed arrays (N, K).
Quantize = Callable[[Matrix], BlockScaled]


def _kind(format: Format) -> str:
    """The kind in `STORAGES`; for other formats their name."""
    return next((kind for kind in ("int", "fp8") if format.name.startswith(kind)), format.name)


def storage_of(format: Format) -> str | None:
    """How compressed-tensors stores weights of a format; None if it cannot. Those with "order" need calibration."""
    if "order" in format.arrays:
        return None
    return next((storage for storage, kinds in STORAGES.items() if _kind(format) in kinds), None)


# Format -> its storage in compressed-tensors, of those that `FORMATS` lists.
WRITABLE: dict[str, str] = {name: found for name, format in FORMATS.items() if (found := storage_of(format))}


class Form(Protocol):
    """A form of files with quantized experts."""

    name: str

    def outputs(self, layer: Layer, quantize: Quantize) -> Iterator[Output]:
        """The tensors of a layer's experts. Reading their parts in this order calls `quantize` once per matrix."""
        ...

    def config(self, linear: list[str], kept: Mapping[str, Scheme]) -> Mapping[str, Any]:
        """`quantization_config`.

        `linear`: names of the other modules that have a matrix of floats. `kept`: the schemes of those that are
        quantized, by name.
        """
        ...


def check_columns(format: Format, columns: int) -> None:
    """ValueError unless files of a format can hold rows of so many columns: of integers, whole groups alone."""
    format.check_size("columns", columns)
    if format.whole_size(columns) != columns:
        name = format.name.upper()
        raise ValueError(f"`columns` (={columns}) must be a multiple of {format.block_size} for {name} in files")


def check_writable(format: Format) -> None:
    """ValueError, naming the formats that can be written, unless `format` is one of them."""
    if storage_of(format) is None:
        why = "only calibration finds its order of columns" if "order" in format.arrays else "no file form holds it"
        if format.is_float:
            why = "it is not quantized, and only quantized experts are written"
        raise ValueError(f"`format` (={format.name!r}) cannot be written: {why}; what can: {', '.join(WRITABLE)}")


def form_of(format: Format, model_type: str | None) -> Form:
    """The form in which a model's experts are written in a format that can be written."""
    if model_type == "gpt_oss" and format == MXFP4:
        return GptOss()
    return CompressedTensors(format)


class CompressedTensors:
    """Every projection of every expert in separate tensors."""

    name = METHOD

    def __init__(self, format: Format):
        self.format = format
        storage = storage_of(format)
        assert storage is not None, "checked by `check_writable`"
        self.scheme = Scheme(format.name, None, storage)

    def outputs(self, layer: Layer, quantize: Quantize) -> Iterator[Output]:
        expected = {part: self._expected(matrix.shape) for part, matrix in layer.experts[0].items()}
        for matrices in layer.experts:
            for matrix in matrices.values():
                made = _Once(partial(self._tensors, matrix, quantize))
                for last, array in expected[matrix.part].items():
                    name = f"{matrix.module}.{last}"
                    yield Output(name, _NAMES[array.dtype], array.shape, partial(_take, made, last))
                if matrix.bias is not None:
                    shape = (matrix.shape[0],)
                    yield Output(f"{matrix.module}.bias", matrix.bias.dtype, shape, partial(_bias, matrix))

    def config(self, linear: list[str], kept: Mapping[str, Scheme]) -> Mapping[str, Any]:
        groups = {"group_0": (["Linear"], self.scheme)}
        for scheme in dict.fromkeys(kept.values()):
            groups[f"group_{len(groups)}"] = [name for name, its in kept.items() if its == scheme], scheme
        return config_writer.entries(groups, linear)

    def _tensors(self, matrix: Matrix, quantize: Quantize) -> dict[str, Shaped[np.ndarray, "..."]]:
        return module_tensors(self.scheme, quantize(matrix), {})

    def _expected(self, shape: tuple[int, int]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the tensors of a matrix, found by writing one of ones."""
        arrays = (None if a is None else np.ones(a.shape, a.dtype) for a in self.format.abstract(shape, packed=True))
        made = module_tensors(self.scheme, BlockScaled(*arrays), {})
        return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in made.items()}


class _Once:
    """The tensors of one matrix, made when the first is taken and freed with the last."""

    def __init__(self, make: Callable[[], dict[str, Shaped[np.ndarray, "..."]]]):
        self._make, self._left = make, {}

    def take(self, name: str) -> Shaped[np.ndarray, "..."]:
        if not self._left:
            self._left = self._make()
        return self._left.pop(name)


def _take(made: _Once, name: str) -> Iterator[Shaped[np.ndarray, "..."]]:
    yield made.take(name)


def _bias(matrix: Matrix) -> Iterator[Shaped[np.ndarray, "..."]]:
    bias = matrix.read_bias()
    assert bias is not None
    yield bias


class GptOss:
    """All experts in one tensor of blocks and one of scales, rows of gate and up interleaved: MXFP4."""

    name = "gpt-oss"

    def outputs(self, layer: Layer, quantize: Quantize) -> Iterator[Output]:
        if not layer.fused:
            tensor: Tensor = layer.experts[0]["gate"].weight
            raise CheckpointError(tensor.file, f"tensor {tensor.name!r} must hold all experts, as gpt-oss does")
        for role, parts in {"gate_up": ("gate", "up"), "down": ("down",)}.items():
            first = layer.experts[0][parts[0]]
            shape = (len(layer.experts), len(parts) * first.shape[0], first.shape[1])
            packed = MXFP4.abstract(shape, packed=True)
            blocks = (*packed.scales.shape, MXFP4.block_size * MXFP4.element_bits // 8)
            name = f"{layer.name}.{role}_proj"
            scales: list[Shaped[np.ndarray, "rows b"]] = []

            def values(parts: tuple[str, ...] = parts, scales: list[np.ndarray] = scales) -> Iterator[np.ndarray]:
                for matrices in layer.experts:
                    made = [quantize(matrices[part]) for part in parts]
                    scales.append(_interleaved([np.asarray(q.scales) for q in made]))
                    yield _interleaved([np.asarray(q.values) for q in made])

            yield Output(f"{name}_blocks", "U8", blocks, values)
            yield Output(f"{name}_scales", "U8", packed.scales.shape, partial(_drain, scales))
            if (bias := first.bias) is not None:
                yield Output(f"{name}_bias", bias.dtype, bias.shape, lambda bias=bias: [bias.view()])

    def config(self, linear: list[str], kept: Mapping[str, Scheme]) -> Mapping[str, Any]:
        assert not kept
        return QUANTIZATION


def _interleaved(arrays: list[Shaped[np.ndarray, "N b"]]) -> Shaped[np.ndarray, "rows b"]:
    """Rows of one array, or of two interleaved."""
    return np.stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:])


def _drain(arrays: list[Shaped[np.ndarray, "rows b"]]) -> Iterator[Shaped[np.ndarray, "..."]]:
    while arrays:
        yield arrays.pop(0)
