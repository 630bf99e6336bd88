"""Reading a checkpoint whose experts are floats: unchanged, or quantized on reading."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jmx.backends import resolve_layout
from jmx.checkpoint import shards
from jmx.checkpoint.assembly import put
from jmx.checkpoint.compressed_tensors.config import FILE
from jmx.checkpoint.host_arrays import stacked
from jmx.checkpoint.placement import ShardingLike, place
from jmx.checkpoint.quantizing import float_experts
from jmx.checkpoint.quantizing.float_experts import PARTS, Layer, Matrix
from jmx.checkpoint.safetensors_reader import SafetensorsReader
from jmx.checkpoint.shards import DTYPES, Tensor
from jmx.experts import Experts
from jmx.numerics import formats
from jmx.numerics.formats import Format
from jmx.selection.environment import Environment
from jmx.util.checks import check_one_of, check_path
from jmx.util.typing import Array, Float

_ROLES = (PARTS[:2], PARTS[2:])  # gate and up, and down


class FloatExperts(NamedTuple):
    """One layer's experts in their files' dtype, bfloat16, float16 or float32.

    Attributes:
        gate_up: N = 2 I rows, gate rows above up rows, the contracted axis last.
        down: the contracted axis last.
        gate_up_bias, down_bias: None if files have no biases.
    """

    gate_up: Float[Array, "E N H"]
    down: Float[Array, "E H I"]
    gate_up_bias: Float[Array, "E N"] | None = None
    down_bias: Float[Array, "E H"] | None = None


class Reader(SafetensorsReader):
    """A `jmx.checkpoint.Reader` of files whose experts are floats, of any model that `convert` supports.

    The constructor reads config.json and the headers of the files, and checks the experts' tensors.

    Args:
        path: a directory of safetensors files.
        format: what `experts` quantizes to, or its name. None: experts can only be read by `floats`.

    Attributes:
        config: the contents of config.json.
        layers: `Layer` by the name of the module that holds the experts, such as "model.layers.0.mlp.experts".
        tensors: where each tensor of the checkpoint is stored, by name.

    Raises:
        CheckpointError: files that are wrong or broken. It names the file, the tensor or key, and the expectation.
        ValueError: an unknown `format`.
    """

    def __init__(self, path: str | os.PathLike[str], format: Format | str | None = None):
        self.format = None if format is None else formats.get(format)
        self.path = check_path("path", path)
        self.config = shards.read_object(self.path / FILE)
        self.tensors = shards.read_headers(self.path)
        found = float_experts.find(self.path, self.tensors, self.config)
        self.layers = {layer.name: dataclasses.replace(layer, format=self.format) for layer in found}

    def _stored(self, item: int | str) -> list[Tensor]:
        if item not in self.layers:
            return [self._tensor(str(item))]
        experts = self.layers[str(item)].experts
        weights = [matrices[part].weight for parts in _ROLES for matrices in experts for part in parts]
        biases = [matrices[part].bias for parts in _ROLES for matrices in experts for part in parts]
        return weights + [bias for bias in biases if bias is not None]

    def floats(self, layer: str) -> FloatExperts:
        """A layer's experts, unchanged, on the default device. ValueError unless `layer` is a key of `layers`."""
        found = self.layers[check_one_of("layer", layer, self.layers)]
        self._advance(sum(self.tensors[name].nbytes for name in found.tensors()))
        return FloatExperts(
            *(_weights(found, parts) for parts in _ROLES),
            *(_biases(found, parts) for parts in _ROLES),
        )

    def experts(self, layer: str, layout: str = "auto", sharding: ShardingLike = None) -> Experts:
        """A layer's experts, quantized to the reader's format by `jmx.Experts.quantize`, rows concatenated.

        Args:
            layer: a key of `layers`.
            layout, sharding: as in `jmx.checkpoint.Reader.experts`; the floats are read onto the default device first.

        Raises:
            ValueError: the reader has no format, an unknown `layer`, numbers that are not finite, an unknown
                `layout` or one that does not support the format, a `sharding` that cannot split an array.
        """
        check_one_of("layer", layer, self.layers)
        if self.format is None:
            raise ValueError("`format` (=None) of the reader must be a format, to quantize experts that are floats")
        resolve_layout(layout, Environment.probe(), self.format)  # rejects an unknown one before anything is read
        experts = Experts.quantize(*self.floats(layer), gate_up_order="concatenated", format=self.format)
        layout = resolve_layout(layout, Environment.probe(experts), self.format)
        return put(experts.prepare(layout, donate=True), sharding)


def _weights(layer: Layer, parts: Sequence[str]) -> Float[Array, "E N K"]:
    def rows(matrices: Mapping[str, Matrix]) -> Float[np.ndarray, "N K"]:
        return np.concatenate([matrices[part].read() for part in parts])

    first = layer.experts[0][parts[0]].weight
    held = first.view() if layer.fused else None  # used again for each expert
    weights = stacked(layer.experts, rows, DTYPES[first.dtype])
    del held
    return place(layer.name, weights, None)


def _biases(layer: Layer, parts: Sequence[str]) -> Float[Array, "E N"] | None:
    if not layer.has_bias:
        return None
    rows = [[matrices[part].read_bias() for part in parts] for matrices in layer.experts]
    return place(layer.name, np.stack([np.concatenate([b for b in biases if b is not None]) for biases in rows]), None)
