"""Tensors by neutral names, from safetensors files of a published form or from Orbax checkpoints.

The Orbax form is a directory of config.json (in the Hugging Face spelling), `top` and `layers/0`, `layers/1` ..., each
an Orbax checkpoint: a flat dict by neutral names, experts in canonical dtypes. There is one checkpoint per layer, so
that only one layer is in memory while it is written. Its custom metadata state which part of the model it is.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jmx.checkpoint import orbax_arrays, shards
from jmx.checkpoint.gpt_oss import tensor_names
from jmx.checkpoint.gpt_oss.tensor_names import Shape
from jmx.checkpoint.model_configs.gpt_oss import Config
from jmx.checkpoint.shards import Tensor
from jmx.numerics import formats
from jmx.numerics.formats import MXFP4, BlockScaled
from jmx.util.checks import check_path
from jmx.util.typing import Shaped

ORBAX = "orbax"
KEY, VERSION = "jmx_gpt_oss", 1  # of the note in the custom metadata of each Orbax checkpoint
TOP = "top"  # the Orbax checkpoint of the tensors outside layers


class TensorStore(Protocol):
    """Neutral tensors by their name in the model, such as "layers.0.q_weight"."""

    form: str

    def view(self, name: str) -> Shaped[np.ndarray, "..."]:
        """The tensor, in its neutral shape."""
        ...

    def dtype(self, name: str) -> str:
        """Its dtype, in safetensors' spelling."""
        ...

    def where(self, name: str) -> tuple[Path, str]:
        """The file that holds it, and its name there, for errors."""
        ...

    def stored(self, name: str) -> Tensor | None:
        """The tensor of a file that holds it; None if it cannot be read ahead."""
        ...


def open_store(directory: Path, config: Config) -> TensorStore:
    """The tensors in `directory`. CheckpointError unless they are exactly those of a model with this `config`."""
    return (OrbaxStore if os.path.lexists(directory / TOP) else SafetensorsStore)(directory, config)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether the directory `path` holds experts as OpenAI published them, in any form that `Reader` reads.

    False for experts of gpt-oss that another tool quantized, or that are floats.

    Raises:
        CheckpointError: there are neither an Orbax checkpoint nor safetensors files, or these are broken.
    """
    directory = check_path("path", path)
    if os.path.lexists(directory / TOP):
        return True
    return any(name.endswith(("_proj_blocks", "_weight.blocks")) for name in shards.read_headers(directory))


class SafetensorsStore:
    """A checkpoint in the Hugging Face or the original form. Views are memory maps of the files."""

    def __init__(self, directory: Path, config: Config):
        found = shards.read_headers(directory)
        form = tensor_names.detect(directory, found)
        tensor_names.check_layers(directory, found, config)
        expected = tensor_names.file_tensors(form, config)
        tensor_names.check(directory, found, expected)
        self.form = form.name
        self._places = {member.name: (found[t.name], member) for t in expected for member in t.members}

    def view(self, name: str) -> Shaped[np.ndarray, "..."]:
        tensor, member = self._places[name]
        return tensor.view()[member.start : member.start + member.shape[0]].reshape(member.shape)

    def dtype(self, name: str) -> str:
        return self._places[name][0].dtype

    def where(self, name: str) -> tuple[Path, str]:
        tensor = self.stored(name)
        return tensor.file, tensor.name

    def stored(self, name: str) -> Tensor:
        return self._places[name][0]


class OrbaxStore:
    """A checkpoint in the Orbax form. A view is a copy of the tensor in host memory."""

    form = ORBAX

    def __init__(self, directory: Path, config: Config):
        self._places: dict[str, tuple[Path, str]] = {}
        self._dtypes: dict[str, str] = {}
        for place, prefix, names in orbax_groups(directory, config):
            stored = orbax_arrays.describe(place)
            note = orbax_arrays.note(place, stored, KEY)
            note.equal(_note(directory, place), "which is what this jmx reads and writes here")
            note.close()
            wanted = {}
            for name, shape in names.items():
                there = stored.arrays[name].dtype if name in stored.arrays else None
                dtype = next((d for d in tensor_names.dtypes(name) if _canonical(name, shape, d).dtype == there), None)
                dtype = dtype or tensor_names.dtypes(name)[0]
                wanted[name] = _canonical(name, shape, dtype)
                self._dtypes[prefix + name] = dtype
                self._places[prefix + name] = place, name
            orbax_arrays.check(place, stored.arrays, wanted)

    def view(self, name: str) -> Shaped[np.ndarray, "..."]:
        place, short_name = self._places[name]
        array = orbax_arrays.read_one(place, short_name)
        no_scales = np.empty(0, MXFP4.scale_dtype)
        if array.dtype == MXFP4.element_dtype:
            return formats.pack(BlockScaled(array, no_scales)).values
        return array.view(np.uint8) if array.dtype == MXFP4.scale_dtype else array

    def dtype(self, name: str) -> str:
        return self._dtypes[name]

    def where(self, name: str) -> tuple[Path, str]:
        return self._places[name]

    def stored(self, name: str) -> None:
        """None: tensorstore has threads of its own."""


def orbax_groups(directory: Path, config: Config) -> Iterator[tuple[Path, str, Mapping[str, Shape]]]:
    """Path of each Orbax checkpoint, the prefix of its tensors' names in the model, and their neutral shapes."""
    yield directory / TOP, "", tensor_names.top_shapes(config)
    shapes = tensor_names.layer_shapes(config)
    for layer in range(config.num_hidden_layers):
        yield directory / "layers" / str(layer), tensor_names.layer_name(layer, ""), shapes


def _note(directory: Path, place: Path) -> dict[str, Any]:
    """The custom metadata of the form's Orbax checkpoint at `place`: which part of the model it is."""
    return {"version": VERSION, "part": place.relative_to(directory).as_posix()}


def _canonical(name: str, shape: Shape, dtype: str) -> jax.ShapeDtypeStruct:
    """Shape and dtype in the Orbax form of the tensor with this neutral name and shape."""
    if name.endswith("_values"):
        return jax.ShapeDtypeStruct((*shape[:-1], shape[-1] * 8 // MXFP4.element_bits), MXFP4.element_dtype)
    if name.endswith("_scales"):
        return jax.ShapeDtypeStruct(shape, MXFP4.scale_dtype)
    return jax.ShapeDtypeStruct(shape, shards.DTYPES[dtype])


def write_orbax(
    directory: Path, config: Config, view: Callable[[str], Shaped[np.ndarray, "..."]], advance: Callable[[int], object]
) -> None:
    """Writes the Orbax form of the tensors that `view` returns by neutral name, with one layer in memory at a time."""
    for place, prefix, names in orbax_groups(directory, config):
        arrays: dict[str, Any] = {name: view(prefix + name) for name in names}
        done = sum(array.nbytes for array in arrays.values())
        for role in ("gate_up", "down"):
            if f"{role}_values" in arrays:
                canonical = formats.unpack(BlockScaled(arrays[f"{role}_values"], arrays[f"{role}_scales"]))
                arrays |= {f"{role}_{name}": getattr(canonical, name) for name in MXFP4.arrays}
        place.parent.mkdir(exist_ok=True)
        orbax_arrays.write(place, arrays, {KEY: _note(directory, place)})
        advance(done)
