"""The choice of a family, by a checkpoint's config.json or a configuration."""

import os
from pathlib import Path

from jmx.checkpoint import CheckpointError
from jmx.checkpoint.shards import read_object
from jmx.models.config import Config, check_config
from jmx.models.families import FAMILIES
from jmx.models.families.family import Family
from jmx.util.checks import check_path

_FILE = "config.json"

# By architecture: the family, and the values of `model_type` that belong to it.
_ARCHITECTURES = {name: (family, types) for family in FAMILIES.values() for name, types in family.architectures.items()}
_MODEL_TYPES = {its: family for family, types in _ARCHITECTURES.values() for its in types}


def family_of(path: str | os.PathLike[str]) -> Family:
    """The family of a checkpoint, by the `architectures` of its config.json, or without these by its `model_type`.

    Raises:
        CheckpointError: config.json is missing or broken, names none of those that jmx has, or architectures and a
            `model_type` that are not of one model.
    """
    file = check_path("path", path) / _FILE
    entries = read_object(file)
    named, model_type = entries.get("architectures") or None, entries.get("model_type")
    if named is not None:
        return _of_architectures(file, named, model_type)
    if model_type is None:  # the original form of gpt-oss has neither
        return FAMILIES["gpt_oss"]
    if not isinstance(model_type, str) or model_type not in _MODEL_TYPES:
        raise CheckpointError(file, f"`model_type` (={model_type!r}) must be one of {', '.join(_MODEL_TYPES)}")
    return _MODEL_TYPES[model_type]


def family_with(config: Config) -> Family:
    """The family of a configuration. TypeError if it is of none."""
    check_config("config", config)
    for family in FAMILIES.values():
        if isinstance(config, family.config):
            return family
    raise TypeError(f"`config` (a {type(config).__name__}) must be of a family of {[*FAMILIES]}")


def _of_architectures(file: Path, named: object, model_type: object) -> Family:
    names = named if isinstance(named, list) else []
    found = {name: _ARCHITECTURES[name] for name in names if isinstance(name, str) and name in _ARCHITECTURES}
    if not found:
        raise CheckpointError(file, f"`architectures` (={named!r}) must be one of {', '.join(_ARCHITECTURES)}")
    families = {family.name: family for family, _ in found.values()}
    if len(families) > 1:
        raise CheckpointError(file, f"`architectures` (={named!r}) must be of one family, and not of {[*families]}")
    for name, (_, types) in found.items():
        if model_type is not None and model_type not in types:
            rule = f"must be {' or '.join(map(repr, types))}, as `architectures` (={named!r}) has {name!r}"
            raise CheckpointError(file, f"`model_type` (={model_type!r}) {rule}")
    return next(iter(families.values()))
