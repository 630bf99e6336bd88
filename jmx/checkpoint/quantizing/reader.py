"""Reading a checkpoint whose experts are floats: unchanged, or quantized on reading."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from jax.sharding import Sharding

from jmx.backends import resolve_layout
from jmx.checkpoint import shards
from jmx.checkpoint.assembly import mesh_of_experts, per_device, put
from jmx.checkpoint.compressed_tensors.config import FILE
from jmx.checkpoint.host_arrays import stacked
from jmx.checkpoint.placement import Index, ShardingLike, place
from jmx.checkpoint.quantizing import float_experts
from jmx.checkpoint.quantizing.float_experts import Layer, Matrix
from jmx.checkpoint.safetensors_reader import SafetensorsReader
from jmx.checkpoint.shards import DTYPES, Tensor
from jmx.experts import Experts
from jmx.numerics import formats
from jmx.numerics.formats import Format
from jmx.selection.environment import Environment
from jmx.util.checks import check_one_of, check_path
from jmx.util.typing import Array, Float


class FloatExperts(NamedTuple):
    """One layer's experts in their files' dtype, bfloat16, float16 or float32.

    Attributes:
        gate_up: N = 2 I rows, gate rows above up rows, or I of experts without a gate; the contracted axis last.
        down: the contracted axis last.
        gate_up_bias: None if files have no biases.
        down_bias: likewise.
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
        found = float_experts.find_layers(self.path, self.tensors, self.config)
        self.layers = {layer.name: dataclasses.replace(layer, format=self.format) for layer in found}

    def _stored(self, item: int | str) -> list[Tensor]:
        if item not in self.layers:
            return [self._tensor(str(item))]
        found = self.layers[str(item)]
        matrices = [its[part] for parts in found.roles for its in found.experts for part in parts]
        weights, biases = [matrix.weight for matrix in matrices], [matrix.bias for matrix in matrices]
        return weights + [bias for bias in biases if bias is not None]

    def floats(self, layer: str, sharding: Sharding | None = None) -> FloatExperts:
        """A layer's experts, unchanged. ValueError unless `layer` is a key of `layers`.

        `sharding`: of all arrays; only the experts that the devices need are read. None is the default device.
        """
        found = self.layers[check_one_of("layer", layer, self.layers)]
        self._advance(sum(self.tensors[name].nbytes for name in found.tensors()))
        return FloatExperts(
            *(place(layer, _Stacked(found, parts), sharding) for parts in found.roles),
            *(place(layer, _Biases(found, parts), sharding) if found.has_bias else None for parts in found.roles),
        )

    def experts(self, layer: str, layout: str = "auto", sharding: ShardingLike = None) -> Experts:
        """A layer's experts, quantized to the reader's format by `jmx.Experts.quantize`, rows concatenated.

        Sizes that whole blocks of the format do not divide are padded; see `jmx.Experts.pad`.

        Args:
            layer: a key of `layers`.
            layout: as in `jmx.checkpoint.Reader.experts`.
            sharding: likewise. If it divides experts alone, each device reads and quantizes its own; else the floats
                are read onto the default device first.

        Raises:
            ValueError: the reader has no format, an unknown `layer`, numbers that are not finite, an unknown
                `layout` or one that does not support the format, a `sharding` that cannot split an array.
        """
        check_one_of("layer", layer, self.layers)
        if self.format is None:
            raise ValueError("`format` (=None) of the reader must be a format, to quantize experts that are floats")
        resolve_layout(layout, Environment.probe(), self.format)  # rejects an unknown one before anything is read
        make = partial(self._quantized, order=self.layers[layer].gate_up_order, layout=layout)
        if isinstance(sharding, Sharding) and mesh_of_experts([sharding]) is not None:
            return per_device(self.floats(layer, sharding), sharding, make)
        return put(make(self.floats(layer)), sharding)

    def _quantized(self, floats: FloatExperts, order: str | None, layout: str) -> Experts:
        assert self.format is not None
        experts = Experts.quantize(*floats, gate_up_order=order, format=self.format, pad=True)
        layout = resolve_layout(layout, Environment.probe(experts), self.format)
        return experts.prepare(layout, donate=True)


class _Stacked:
    """The weights of a layer's experts, rows of all `parts`: (E, N, K), read when sliced."""

    def __init__(self, layer: Layer, parts: Sequence[str]):
        self._layer, self._parts = layer, parts
        shapes = [layer.experts[0][part].shape for part in parts]
        self.shape = (layer.num_experts, sum(rows for rows, _ in shapes), shapes[0][1])
        self.ndim = 3

    def __getitem__(self, index: Index) -> Float[np.ndarray, "e n k"]:
        def rows(matrices: Mapping[str, Matrix]) -> Float[np.ndarray, "n k"]:
            return np.concatenate([matrices[part].read() for part in self._parts])[index[1:]]

        first = self._layer.experts[0][self._parts[0]].weight
        held = first.view() if self._layer.fused else None  # used again for each expert
        weights = stacked(self._layer.experts[index[0]], rows, DTYPES[first.dtype])
        del held
        return weights


class _Biases:
    """The biases of a layer's experts, rows of all `parts`: (E, N), read when sliced."""

    def __init__(self, layer: Layer, parts: Sequence[str]):
        self._layer, self._parts = layer, parts
        self.shape = (layer.num_experts, sum(layer.experts[0][part].shape[0] for part in parts))
        self.ndim = 2

    def __getitem__(self, index: Index) -> Float[np.ndarray, "e n"]:
        found = [[its[part].read_bias() for part in self._parts] for its in self._layer.experts[index[0]]]
        return np.stack([np.concatenate([b for b in biases if b is not None]) for biases in found])[:, *index[1:]]
