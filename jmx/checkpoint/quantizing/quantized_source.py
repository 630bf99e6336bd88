"""Checkpoints whose weights are quantized already, as sources of `convert`: their experts as floats, and what is kept.

Experts are dequantized to float32, which is exact for FP8 up to the rounding of a product with its scale. Quantized
modules outside experts keep their bits, under the names of compressed-tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmx.checkpoint import compressed_tensors
from jmx.checkpoint.compressed_tensors import Module
from jmx.checkpoint.compressed_tensors.config import GLOBAL, INPUTS, Scheme
from jmx.checkpoint.compressed_tensors.layers import find_modules
from jmx.checkpoint.compressed_tensors.module import FloatModule
from jmx.checkpoint.compressed_tensors.module_writer import module_tensors
from jmx.checkpoint.quantizing.float_experts import PARTS, FusedLayout, Layer, Matrix, fused_layout
from jmx.checkpoint.quantizing.output_forms import storage_of
from jmx.checkpoint.shards import DTYPES, CheckpointError, Output, Tensor
from jmx.numerics.quantization import dequantize
from jmx.util.typing import Float, Shaped

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class QuantizedMatrix(Matrix):
    """A projection of an expert that files hold quantized, in `source`.

    Args:
        source: a Module; as a dataclass's field after others that have defaults.
        together: whether that has the rows of gate and up, in the order of `layout`.
    """

    source: Any = None
    together: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.source.shape
        return rows // (2 if self.together else 1), columns

    def read(self) -> Float[np.ndarray, "N K"]:
        """The weight, dequantized to float32."""
        weight = jax.tree.map(jnp.asarray, self.source.weight())
        return self._mine(np.asarray(dequantize(weight, jnp.float32, self.source.format)))

    def read_bias(self) -> Float[np.ndarray, " N"] | None:
        return self._mine(self.source.array("bias")) if "bias" in self.source.pieces else None

    def _mine(self, rows: Shaped[np.ndarray, "rows ..."]) -> Shaped[np.ndarray, "N ..."]:
        return np.ascontiguousarray(rows[self.rows]) if self.together else rows

    def tensors(self) -> list[Tensor]:
        return [piece.tensor for piece in self.source.pieces.values()]


class Source(compressed_tensors.Reader):
    """A reader whose layers may have experts in several formats, also in floats, which need none in common."""

    _find = staticmethod(find_modules)


def find_layers(reader: Source, model_type: Any) -> list[Layer]:
    """The layers of quantized experts as those of float ones. `model_type`: the config's.

    Raises:
        CheckpointError: tensors hold gate and up together, in an order that is not known for that model.
    """
    layers = []
    for name, layer in reader.layers.items():
        parts = PARTS if layer.gate_up_order is not None else PARTS[1:]
        experts = []
        for nth, (gate_up, down) in enumerate(zip(layer.modules["gate_up"], layer.modules["down"], strict=True)):
            modules = (*gate_up, *down)
            if len(modules) == len(parts):
                experts.append({p: _matrix(m, name, p) for p, m in zip(parts, modules, strict=True)})
                continue
            layout = fused_layout(_weight(gate_up[0]), "gate and up", model_type)
            of_part = {"gate": gate_up[0], "up": gate_up[0], "down": down[0]}
            matrices = {part: _matrix(module, name, part) for part, module in of_part.items()}
            experts.append({p: _part_of(m, f"{name}.{nth}.{p}_proj", layout) for p, m in matrices.items()})
        layers.append(Layer(name, tuple(experts), fused=False))
    return layers


def _matrix(module: Module | FloatModule, layer: str, part: str) -> Matrix:
    bias = module.pieces["bias"].tensor if "bias" in module.pieces else None
    if isinstance(module, FloatModule):
        return Matrix(module.name, layer, part, _weight(module), bias)
    return QuantizedMatrix(module.name, layer, part, _weight(module), bias, source=module)


def _part_of(matrix: Matrix, name: str, layout: FusedLayout) -> Matrix:
    """`matrix`, of which gate and up are together in a tensor, under the name of its own part."""
    if not isinstance(matrix, QuantizedMatrix):
        raise CheckpointError(
            matrix.weight.file, f"tensor {matrix.weight.name!r} is in floats, among quantized ones of gate and up"
        )
    return replace(matrix, module=name, layout=layout, together=matrix.part != "down")


def _weight(module: Module | FloatModule) -> Tensor:
    return module.pieces["weight"].tensor if isinstance(module, FloatModule) else module.sources("values")[0].tensor


def kept_modules(reader: compressed_tensors.Reader) -> dict[str, Module]:
    """The quantized modules outside experts, by name.

    Raises:
        CheckpointError: one in a format, or with inputs, that compressed-tensors' files cannot hold.
    """
    held = {tensor.name for layer in reader.layers.values() for tensor in layer.tensors()}
    found = {}
    for name in dict.fromkeys(tensor.rpartition(".")[0] for tensor in reader.tensors if tensor not in held):
        module = reader.module_of(f"{name}.weight")
        if module is None:
            continue
        scheme = module.scheme
        if storage_of(module.format) is None or scheme.inputs not in (None, *INPUTS.values()):
            raise CheckpointError(
                module.file, f"module {name!r} ({scheme}) is outside the experts, and no file of the result can hold it"
            )
        found[name] = module
    return found


def kept_scheme(module: Module) -> Scheme:
    """The scheme of a kept module in compressed-tensors' files."""
    storage = storage_of(module.format)
    assert storage is not None, "checked by `kept_modules`"
    return Scheme(module.scheme.weights, module.scheme.inputs, storage)


def kept_outputs(module: Module) -> Iterator[Output]:
    """The tensors of a kept module, by the names of compressed-tensors. They are made when they are written."""
    made = partial(_kept_tensors, module)
    for last, array in made().items():
        yield Output(f"{module.name}.{last}", _NAMES[array.dtype], array.shape, partial(_one, made, last))


def _kept_tensors(module: Module) -> Mapping[str, Shaped[np.ndarray, "..."]]:
    kept = {}
    if "bias" in module.pieces:
        kept["bias"] = module.array("bias")
    scale = module.static_scale()
    if scale is not None:
        name = module.scheme.static_scale
        assert name is not None
        kept[name] = np.atleast_1d(np.float32(1) / scale if name == GLOBAL else scale)
    return module_tensors(kept_scheme(module), module.weight(), kept)


def _one(made: partial[Mapping[str, Shaped[np.ndarray, "..."]]], last: str) -> Iterator[Shaped[np.ndarray, "..."]]:
    yield np.ascontiguousarray(made()[last])
