"""What jmx must know of a family of models: its configurations, its module, and the tensors of its checkpoints."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jmx.models.config import Config, expert_layers
from jmx.models.decoder import Model
from jmx.models.sources.protocol import Shape, Source


def _none(config: Config) -> Sequence[str]:
    return ()


def _no_reader(path: Path) -> Source | None:
    return None


@dataclass(frozen=True)
class Family:
    """A family of models, as `load` and the command line use it.

    Args:
        name: of the family.
        architectures: those of config.json that it reads, with the values of `model_type` that belong to each.
        config: the class of its configurations.
        model: of a config.
        published: configurations of published models, by short names.
        read_config: the config of a checkpoint's directory.
        shapes: of a config -> shapes of the tensors outside the experts, by neutral name.
        file_name: neutral name -> name in files of the Hugging Face form.
        expert_module: name of a layer's experts in files, with {} for the layer's number.
        renamed: part of a name in files -> what transformers 5 writes for it without `save_original_format`.
        gate_up_order: the order of gate and up rows in one tensor, which files do not record; None where files hold
            them apart.
        expert_bias: whether experts have biases.
        unused: of a config -> modules that files may hold and the model does not run.
        reader: makes a source of a directory in a form of the family's own; None of it is in the Hugging Face form.
    """

    name: str
    architectures: Mapping[str, tuple[str, ...]]
    config: type
    model: type[Model]
    published: Mapping[str, Any]
    read_config: Callable[[str | os.PathLike[str]], Any]
    shapes: Callable[[Any], dict[str, Shape]]
    file_name: Callable[[str], str]
    expert_module: str = "model.layers.{}.mlp.experts"
    renamed: Mapping[str, str] = MappingProxyType({})
    gate_up_order: str | None = None
    expert_bias: bool = False
    unused: Callable[[Any], Sequence[str]] = _none
    reader: Callable[[Path], Source | None] = _no_reader

    def stored_name(self, name: str, stored: Collection[str]) -> str:
        """A name in files, as it is in files with tensors of the names `stored`."""
        for part, other in self.renamed.items():
            if not any(f".{part}." in its for its in stored):
                name = name.replace(f".{part}.", f".{other}.")
        return name

    def experts(self, config: Config) -> dict[int, str]:
        """Names in files of the experts of each layer that has some."""
        return {layer: self.expert_module.format(layer) for layer in expert_layers(config)}
