"""Modules that a tool left in floats where others are quantized: rounded to the format of their layer on reading.

`jmx.Experts` has one format for a layer, and no format of fewer bits holds floats. `Reader.experts` names these modules
and their errors in a warning.
"""

from functools import cached_property
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jmx.checkpoint.compressed_tensors import common_format
from jmx.checkpoint.compressed_tensors.module import FloatModule, Module, Piece, Shape
from jmx.checkpoint.shards import DTYPES
from jmx.numerics.formats import FORMATS, BlockScaled, Format, pack
from jmx.numerics.quantization import dequantize, quantize
from jmx.util.typing import Int32, Shaped

_NAMED = 3  # modules in a message


class _Rounded(NamedTuple):
    weight: BlockScaled
    error: float


class RoundedModule(FloatModule):
    """A module of floats as one of a quantized format, which takes the place of a `Module` in a layer.

    Args:
        floats: the module.
        format: of its layer.
        sibling: a quantized module with the same inputs, whose order of columns it takes; None: columns stay in order.

    Raises:
        CheckpointError: the format does not hold as many columns.
    """

    scale_dtype = None  # of the files

    def __init__(self, floats: FloatModule, format: Format, sibling: Module | None = None):
        super().__init__(floats.name, floats.pieces)
        self.format, self._sibling = format, sibling
        try:
            format.check_size("columns", self.shape[1])
        except ValueError as error:
            raise self.pieces["weight"].error(f"cannot be rounded to its layer's format: {error}") from error

    @property
    def error(self) -> float | None:
        """||rounded - weight|| / ||weight||; None if it has not been read, or `forget` was called since."""
        found = self.__dict__.get("_rounded")
        return None if found is None else found.error

    def forget(self) -> None:
        """Frees what was read."""
        self.__dict__.pop("_rounded", None)

    def array(self, name: str) -> Shaped[np.ndarray, "..."]:
        """One of the arrays, as `Module.array` gives them.

        Raises:
            CheckpointError: a weight or bias is not finite.
        """
        if name == "bias":
            bias = self.pieces["bias"].view()
            if not np.isfinite(bias.astype(np.float32)).all():
                raise self.pieces["bias"].error("must hold finite numbers")
            return bias
        if name == "order":
            return self._order
        return np.asarray(getattr(self._rounded.weight, name))

    def abstract(self, name: str) -> tuple[Shape, np.dtype]:
        """Shape and dtype of one of the arrays, or of "bias"."""
        if name == "bias":
            return self.pieces[name].shape, DTYPES[self.pieces[name].dtype]
        found = getattr(self.format.abstract(self.shape, packed=True), name)
        return found.shape, np.dtype(found.dtype)

    def sources(self, name: str) -> list[Piece]:
        """The tensors that one of the arrays, or "bias", is made of."""
        if name == "order":
            sibling = self._sibling  # which has columns in order where the layer's format is that of others
            return [] if sibling is None or name not in sibling.format.arrays else sibling.sources(name)
        return [self.pieces["bias" if name == "bias" else "weight"]]

    def static_scale(self) -> None:
        """CheckpointError: floats have no scale of inputs."""
        raise self.pieces["weight"].error("is in floats: it has no static scale of inputs, as other experts have")

    @property
    def _order(self) -> Int32[np.ndarray, " K"]:
        if self._sibling is None:
            return np.arange(self.shape[1], dtype=np.int32)
        return common_format.array(self._sibling, "order", self.format)

    @cached_property
    def _rounded(self) -> _Rounded:
        weight = np.ascontiguousarray(self.pieces["weight"].view())
        if not np.isfinite(weight.astype(np.float32)).all():
            raise self.pieces["weight"].error("must hold finite numbers")
        format = FORMATS[self.format.name.removesuffix("_order")]
        if format != self.format:
            weight = weight[:, self._order]
        found = quantize(weight, format=format)
        exact = weight.astype(np.float64)
        error = np.linalg.norm(np.asarray(dequantize(found, jnp.float32, format)) - exact)
        return _Rounded(pack(found), float(error / (np.linalg.norm(exact) or 1)))


def described(layer: str, modules: list[RoundedModule], inputs: str | None) -> str:
    """A message on modules of a layer that were read: that they were rounded, and by how much.

    `inputs`: the format that the layer's inputs have, if they are quantized.
    """
    names = ", ".join(repr(module.name.removeprefix(f"{layer}.")) for module in modules[:_NAMED])
    names += f" and {len(modules) - _NAMED} others" if len(modules) > _NAMED else ""
    worst = max(modules, key=lambda module: module.error or 0)
    message = (
        f"experts {layer!r}: {names} are floats in the files, and were rounded to {worst.format.name} as the others, "
        f"with a relative error of {worst.error or 0:.2g} at most ({worst.name.removeprefix(f'{layer}.')!r})"
    )
    return message if inputs is None else f"{message}; with `inputs`, theirs are {inputs} as the others'"
