"""A checkpoint in the Hugging Face form as a source of weights."""

import contextlib
import warnings
from collections.abc import Collection, Mapping, Sequence

import jax

import jmx
from jmx.checkpoint.quantizing import FloatExperts
from jmx.models.checkpoint import Checkpoint
from jmx.models.config import Config
from jmx.models.quantized_weights import QuantizedWeights
from jmx.models.sources.protocol import Shape


class FileSource[C: Config]:
    """The weights of a checkpoint whose tensors have the names of the Hugging Face form.

    Args:
        checkpoint: the files.
        config: of the model.
        shapes: of the tensors outside the experts, by neutral name.
        names: neutral names -> names in the files, with the same keys.
        experts: numbers of the layers with experts -> names of the modules that hold them.
        sizes: E, H, I of each of those.
        more: shapes of further tensors that files may hold, by their names in the files.
        unused: modules that files may hold and the model does not run.

    Attributes:
        formats: of the tensors outside the experts that are quantized, by neutral name.

    Raises:
        CheckpointError: files that do not hold all of these, or hold others.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: C,
        shapes: Mapping[str, Shape],
        names: Mapping[str, str],
        experts: Mapping[int, str],
        sizes: tuple[int, int, int],
        more: Mapping[str, Shape] | None = None,
        unused: Sequence[str] = (),
    ):
        self.config = config
        self._checkpoint, self._names, self._experts = checkpoint, names, experts
        expected = {names[name]: shape for name, shape in shapes.items()}
        checkpoint.check(expected | {**(more or {})}, dict.fromkeys(experts.values(), sizes), unused)
        self.layers = {number: checkpoint.reader.layers[name] for number, name in experts.items()}
        found = ((name, checkpoint.format_of(its)) for name, its in names.items())
        self.formats = {name: format for name, format in found if format is not None}

    def dense(self, name: str, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
        """A tensor outside the experts; a quantized one is dequantized to float32."""
        return self._checkpoint.dense(self._names[name], sharding)

    def quantized(self, name: str) -> QuantizedWeights:
        """A quantized tensor outside the experts, as it is stored."""
        return self._checkpoint.quantized(self._names[name])

    def report(self, kept: Collection[str]) -> None:
        """UserWarnings name what is quantized outside the experts: what the model keeps, and what it dequantizes."""
        for stay, what in ((True, "they stay so, but"), (False, "they are dequantized, and")):
            names = [self._names[name] for name in self.formats if (name in kept) is stay]
            if names:
                warnings.warn(
                    f"{self._checkpoint.path}: {len(names)} modules outside experts are quantized, such as "
                    f"{names[0]!r}: {what} their inputs are not quantized",
                    stacklevel=5,  # where a model is loaded
                )

    def experts(self, layer: int, *, sharding: jax.sharding.Sharding | None = None) -> jmx.Experts | FloatExperts:
        return self._checkpoint.experts(self._experts[layer], sharding)

    def read_ahead(self, order: Sequence[int | str]) -> contextlib.AbstractContextManager[None]:
        """A context in which the experts of layers, and tensors by neutral name, are read ahead in this order."""
        names = [self._experts[item] if isinstance(item, int) else self._names[item] for item in order]
        return self._checkpoint.read_ahead(names)

    def progress(self, enabled: bool) -> contextlib.AbstractContextManager[None]:
        return self._checkpoint.progress(enabled)
