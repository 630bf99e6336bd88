"""A checkpoint in the Hugging Face form, in floats or quantized by any tool that jmx supports, tensor by tensor."""

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

import jmx
from jmx.checkpoint import CheckpointError, compressed_tensors, quantizing
from jmx.checkpoint.quantizing import FloatExperts
from jmx.models.quantized_weights import QuantizedWeights

_FLOATS = ("BF16", "F16", "F32")
_CHUNK = 1 << 24  # bytes compared at a time
_CACHE_SCALES = ("k_scale", "v_scale")  # of keys and values that are cached
_COMPUTED = ".rotary_emb.inv_freq"  # what older files repeat of the config: rotary frequencies


class Checkpoint:
    """Tensors by their names in the files.

    Quantized experts stay quantized; float experts stay floats, or are quantized to `format` on reading. Other
    quantized modules can be read as they are, or dequantized.

    Args:
        path: a directory of safetensors files.
        format: what float experts are quantized to; None: they stay floats.
        gate_up_order: the order of gate and up rows in one tensor, which files do not record.
        declared_inputs: whether experts quantize their inputs to the format that the checkpoint declares.
        pad_experts: whether quantized experts are padded to whole blocks; see `compressed_tensors.Reader.experts`.

    Raises:
        CheckpointError: files that are wrong or broken; a `format` for experts that are quantized already.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: jmx.Format | None = None,
        gate_up_order: str | None = None,
        declared_inputs: bool = True,
        pad_experts: bool = False,
    ):
        self.path = Path(path)
        self._inputs, self._pad = declared_inputs, pad_experts
        quantized = compressed_tensors.is_quantized(path)
        if quantized and format is not None:
            raise CheckpointError(self.path / "config.json", f"experts are quantized already, and not to {format.name}")
        self.reader = compressed_tensors.Reader(path, gate_up_order) if quantized else quantizing.Reader(path, format)
        self.tensors = self.reader.tensors

    def check(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        experts: Mapping[str, tuple[int, int, int]],
        unused: Sequence[str] = (),
    ) -> None:
        """CheckpointError unless there are tensors of such `shapes`, `experts` of such E, H, I, and nothing else.

        Modules in `unused` may be there. UserWarnings name what is not run, or not as the checkpoint has it.
        """
        for name, shape in shapes.items():
            self._check_tensor(name, shape)
        for name, sizes in experts.items():
            its = self._expert_sizes(name)
            if its != sizes:
                raise CheckpointError(self.path, f"experts {name!r} are E, H, I = {its}, but must be {sizes}")
        parts = {name.rpartition(".")[0] for name in shapes if self._module_of(name) is not None}
        cache = isinstance(self.reader, compressed_tensors.Reader) and self.reader.quantization.kv_cache
        skipped = dict.fromkeys(name for name in self.tensors if name.startswith(tuple(f"{its}." for its in unused)))
        for name, tensor in self.tensors.items():
            module, _, last = name.rpartition(".")
            known = name in shapes or module in parts or name in skipped or (cache and last in _CACHE_SCALES)
            known = known or name.endswith(_COMPUTED)
            if not known and not name.startswith(tuple(f"{its}." for its in experts)):
                raise CheckpointError(tensor.file, f"tensor {name!r} is not one of a model with this config")
        if skipped:
            _warn(f"{self.path}: {len(skipped)} tensors, such as {min(skipped)!r}, are of modules that are not run")
        if cache:
            _warn(f"{self.path}: the checkpoint declares quantized keys and values in the cache; here they are not")

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        module = self._module_of(name)
        if module is None and name not in self.tensors:
            raise CheckpointError(self.path, f"tensor {name!r} is missing; it must be of shape {shape}")
        its = self.tensors[name].shape if module is None else module.shape
        if its != shape:
            raise CheckpointError(self.path, f"tensor {name!r} has shape {its}, but must have {shape}")
        if module is None and self.tensors[name].dtype not in _FLOATS:
            rule = f"must be {' or '.join(_FLOATS)}"
            raise CheckpointError(self.path, f"tensor {name!r} is {self.tensors[name].dtype}, but {rule}")

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of that name, or a quantized module whose weight has that name."""
        return name in self.tensors or self._module_of(name) is not None

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same bits. A quantized one equals no other."""
        if not all(its in self.tensors and self._module_of(its) is None for its in (name, other)):
            return False
        one, two = self.tensors[name], self.tensors[other]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        first, second = (tensor.view().reshape(-1).view(np.uint8) for tensor in (one, two))
        return all(
            np.array_equal(first[at : at + _CHUNK], second[at : at + _CHUNK]) for at in range(0, first.size, _CHUNK)
        )

    def format_of(self, name: str) -> jmx.Format | None:
        """The format of a tensor outside experts; None: floats."""
        module = self._module_of(name)
        return None if module is None else module.format

    def dense(self, name: str, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
        """A tensor outside experts. A quantized one is dequantized to float32."""
        return self.reader.dense(name, sharding)

    def quantized(self, name: str) -> QuantizedWeights:
        """A tensor outside experts that is quantized, as it is. ValueError if it is not quantized."""
        module = self._module_of(name)
        if module is None or not isinstance(self.reader, compressed_tensors.Reader):
            raise ValueError(f"`name` (={name!r}) must be the name of a quantized tensor")
        return QuantizedWeights(self.reader.weight(module.name), module.format)

    def experts(self, name: str, sharding: jax.sharding.Sharding | None = None) -> jmx.Experts | FloatExperts:
        """The experts of the module of that name, all arrays with that sharding; None: on the default device."""
        if isinstance(self.reader, compressed_tensors.Reader):
            return self.reader.experts(name, sharding=sharding, inputs=self._inputs, pad=self._pad)
        if self.reader.format is not None:
            return self.reader.experts(name, sharding=sharding)
        return self.reader.floats(name, sharding)

    def read_ahead(self, order: Sequence[str]) -> contextlib.AbstractContextManager[None]:
        """A context in which experts, by their modules' names, and other tensors are read ahead in this order."""
        return self.reader.read_ahead(order)

    def progress(self, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """A context in which a bar on stderr (if that is a terminal) counts the bytes that are read."""
        return self.reader.progress(enabled)

    def _module_of(self, name: str) -> compressed_tensors.Module | None:
        """The quantized module whose weight has that name, or None."""
        return self.reader.module_of(name) if isinstance(self.reader, compressed_tensors.Reader) else None

    def _expert_sizes(self, name: str) -> tuple[int, int, int]:
        if name not in self.reader.layers:
            raise CheckpointError(self.path, f"experts {name!r} are missing, or not quantized as others are")
        layer = self.reader.layers[name]
        return layer.num_experts, layer.hidden_size, layer.intermediate_size


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=6)  # where a model is loaded
