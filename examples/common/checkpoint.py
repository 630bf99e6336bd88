"""A checkpoint in the Hugging Face form, quantised by any tool that jmx reads or in floats, tensor by tensor."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from examples.common.float_moe import FloatExperts
from jmx.checkpoint import CheckpointError, compressed_tensors, shards
from jmx.checkpoint.compressed_tensors.config import FILE
from jmx.checkpoint.compressed_tensors.modelopt import FILE as MODELOPT_FILE
from jmx.checkpoint.compressed_tensors.places import find_quantization
from jmx.checkpoint.placement import place
from jmx.checkpoint.quantizing import experts as float_experts
from jmx.experts import Experts
from jmx.numerics import quantization
from jmx.numerics.formats import Format

_CHUNK = 1 << 24  # bytes compared at a time
_CACHE_SCALES = ("k_scale", "v_scale")  # of keys and values that are cached


class Checkpoint:
    """Tensors by the names that files give them.

    Experts stay as they are: quantised, or floats, which `format` has rounded to it as they are read. Other modules
    that are quantised are expanded, and a UserWarning says so.

    Args:
        path: a directory of safetensors files.
        format: of experts that files hold as floats; None: they stay floats.
        gate_up_order: how rows of gate and up lie where files hold them in one tensor, which files do not say.
        declared_inputs: whether experts round their inputs to the format that the checkpoint declares.

    Raises:
        CheckpointError: files that are wrong or broken; a `format` for experts that are quantised already.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: Format | None = None,
        gate_up_order: str | None = None,
        declared_inputs: bool = True,
    ):
        self.path = Path(path)
        self._format = format
        self._declared_inputs = declared_inputs
        self._advance: Callable[[int], object] = lambda _: None
        contents = shards.read_object(self.path / FILE)
        found = find_quantization(self.path / FILE, contents)
        quantised = found is not None or (self.path / MODELOPT_FILE).exists()
        if quantised and format is not None:
            raise CheckpointError(self.path / FILE, f"experts are quantised already, and not to {format.name}")
        self.reader = compressed_tensors.Reader(path, gate_up_order) if quantised else None
        self.tensors = shards.read_headers(self.path) if self.reader is None else self.reader.tensors
        self._floats: Mapping[str, float_experts.Layer] = {}
        if self.reader is None:
            found = float_experts.find(self.path, self.tensors, contents)
            self._floats = {layer.name: layer for layer in found}

    def check(self, shapes: Mapping[str, tuple[int, ...]], experts: Mapping[str, tuple[int, int, int]]) -> None:
        """CheckpointError unless there are tensors of such `shapes`, `experts` of such E, H, I, and nothing else.

        UserWarnings tell what is not run as the checkpoint has it.
        """
        expanded = [name for name in shapes if self._module_of(name) is not None]
        for name, shape in shapes.items():
            self._check_tensor(name, shape)
        for name, sizes in experts.items():
            its = self._expert_sizes(name)
            if its != sizes:
                raise CheckpointError(self.path, f"experts {name!r} are E, H, I = {its}, but must be {sizes}")
        parts = {name.rpartition(".")[0] for name in expanded}
        cache = self.reader is not None and self.reader.quantization.kv_cache
        for name, tensor in self.tensors.items():
            module, _, last = name.rpartition(".")
            known = name in shapes or module in parts or (cache and last in _CACHE_SCALES)
            if not known and not name.startswith(tuple(f"{its}." for its in experts)):
                raise CheckpointError(tensor.file, f"tensor {name!r} is not one that this model's config calls for")
        if expanded:
            _warn(
                f"{self.path}: {len(expanded)} modules outside experts are quantised, such as {expanded[0]!r}: they "
                "are expanded, and their inputs stay as they are"
            )
        if cache:
            _warn(f"{self.path}: keys and values are to be quantised as they are cached; here they stay as they are")

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        module = self._module_of(name)
        if module is None and name not in self.tensors:
            raise CheckpointError(self.path, f"tensor {name!r} is missing; it must be of shape {shape}")
        its = self.tensors[name].shape if module is None else module.shape
        if its != shape:
            raise CheckpointError(self.path, f"tensor {name!r} has shape {its}, but must have {shape}")
        if module is None and self.tensors[name].dtype not in float_experts.FLOATS:
            rule = f"must be {' or '.join(float_experts.FLOATS)}"
            raise CheckpointError(self.path, f"tensor {name!r} is {self.tensors[name].dtype}, but {rule}")

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of that name, or a quantized module whose weight it is."""
        return name in self.tensors or self._module_of(name) is not None

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same bits. A quantized one is equal to none."""
        if not all(its in self.tensors and self._module_of(its) is None for its in (name, other)):
            return False
        one, two = self.tensors[name], self.tensors[other]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        first, second = (tensor.view().reshape(-1).view(np.uint8) for tensor in (one, two))
        return all(
            np.array_equal(first[at : at + _CHUNK], second[at : at + _CHUNK]) for at in range(0, first.size, _CHUNK)
        )

    def dense(self, name: str) -> jax.Array:
        """A tensor outside experts, expanded to float32 if it is quantised."""
        if (module := self._module_of(name)) is not None:
            self._advance(sum(piece.tensor.nbytes for piece in module.pieces.values()))
            weight = jax.tree.map(jnp.asarray, module.weight())
            return quantization.dequantize(weight, jnp.float32, module.format)
        self._advance(self.tensors[name].nbytes)
        return place(name, self.tensors[name].view(), None)

    def experts(self, name: str) -> Experts | FloatExperts:
        """The experts of the module of that name, on the device."""
        self._advance(sum(t.nbytes for its, t in self.tensors.items() if its.startswith(f"{name}.")))
        if self.reader is not None:
            return self.reader.experts(name, inputs=self._declared_inputs)
        layer = self._floats[name]

        def stacked(*parts: str) -> jax.Array:
            rows = ([matrices[part].read() for part in parts] for matrices in layer.experts)
            return place(name, np.stack([np.concatenate(its) for its in rows]), None)

        def biases(*parts: str) -> jax.Array | None:
            rows = [[matrices[part].read_bias() for part in parts] for matrices in layer.experts]
            found = [np.concatenate([row for row in its if row is not None]) for its in rows if its[0] is not None]
            return place(name, np.stack(found), None) if found else None

        gate_up, down = stacked("gate", "up"), stacked("down")
        gate_up_bias, down_bias = biases("gate", "up"), biases("down")
        if self._format is not None:
            return Experts.quantize(
                gate_up, down, gate_up_bias, down_bias, gate_up_order="concatenated", format=self._format
            )
        if gate_up_bias is not None:
            raise CheckpointError(self.path, f"experts {name!r} are floats with biases: name a format to round them to")
        return FloatExperts(gate_up, down)

    @contextlib.contextmanager
    def progress(self, enabled: bool) -> Iterator[None]:
        """Within it, a bar on stderr (where that is a terminal) counts the bytes that are read."""
        total = sum(tensor.nbytes for tensor in self.tensors.values())
        with shards.progress_bar("reading", total, enabled) as self._advance:
            try:
                yield
            finally:
                self._advance = lambda _: None

    def _module_of(self, name: str) -> compressed_tensors.Module | None:
        """The quantised module whose weight a tensor is, if it is one: by what files hold, as a config may mean modules
        that are none, such as embeddings."""
        module, _, last = name.rpartition(".")
        scaled = any(f"{module}.{scale}" in self.tensors for scale in ("weight_scale", "weight_scale_inv"))
        if self.reader is None or last != "weight" or not scaled:
            return None
        return self.reader.module(module)

    def _expert_sizes(self, name: str) -> tuple[int, int, int]:
        if self.reader is not None and name in self.reader.layers:
            layer = self.reader.layer(name)
            return layer.num_experts, layer.hidden_size, layer.intermediate_size
        if name in self._floats:
            experts = self._floats[name].experts
            return len(experts), *experts[0]["down"].shape
        raise CheckpointError(self.path, f"experts {name!r} are missing, or not quantised as others are")


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=5)  # where a model is loaded
