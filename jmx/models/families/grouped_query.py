"""Families with grouped-query attention, whose checkpoints have the tensors and names of most."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from jmx.models.decoder import Model
from jmx.models.families import tensors
from jmx.models.families.family import Family
from jmx.models.sources.protocol import Shape


class ConfigModule(Protocol):
    """A module of `jmx.checkpoint.model_configs`."""

    Config: type
    PUBLISHED: dict[str, Any]

    @property
    def MODEL_TYPE(self) -> str: ...

    def read_config(self, path: str | os.PathLike[str]) -> Any: ...


def _nothing(config: Any) -> dict[str, Any]:
    return {}


def grouped_query_family(
    configs: ConfigModule,
    architecture: str,
    model: type[Model],
    *,
    attention: Callable[[Any], dict[str, Any]] = _nothing,
    beside_experts: Callable[[Any], Mapping[str, Shape]] = _nothing,
    layer_names: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> Family:
    """A family that is named as its `model_type`.

    Args:
        configs: the module of its configurations.
        architecture: that of config.json.
        model: of a config.
        attention: of a config -> arguments of `tensors.attention_shapes`.
        beside_experts: of a config -> shapes of what a layer has beside its experts and router, by neutral name.
        layer_names: neutral name -> name in files, of tensors in a layer that `tensors.LAYER_NAMES` lacks, or that
            files of this family name in another way.
        options: other fields of `Family`.
    """

    def shapes(config: Any) -> dict[str, Shape]:
        return tensors.whole_model(
            config, tensors.attention_shapes(config, **attention(config)), beside_experts(config)
        )

    return Family(
        name=configs.MODEL_TYPE,
        architectures={architecture: (configs.MODEL_TYPE,)},
        config=configs.Config,
        model=model,
        published=configs.PUBLISHED,
        read_config=configs.read_config,
        shapes=shapes,
        file_name=partial(tensors.file_name, layer_names=tensors.LAYER_NAMES | {**layer_names}),
        **options,
    )
