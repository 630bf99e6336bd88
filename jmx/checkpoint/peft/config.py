"""`adapter_config.json`: what is adapted, ranks and scales; features of PEFT that jmx does not have are errors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jmx.checkpoint.patterns import compiled
from jmx.checkpoint.shards import CheckpointError, read_object
from jmx.util.checks import is_finite_number

# Entries that change nothing about results, or only how adapters were trained and initialized.
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_version"),
    *("layers_pattern", "init_lora_weights", "lora_dropout", "runtime_config", "ensure_weight_tying"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_config", "megatron_core"),
    *("monteclora_config", "qalora_group_size"),
}
_TARGETS = ("target_modules", "target_parameters", "exclude_modules")
_READ = {"peft_type", "r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "bias", "layers_to_transform"}
_END = r"(.*\.)?({})$"  # what PEFT matches with names, a pattern of theirs in it


@dataclass(frozen=True)
class Config:
    """What a config says about adapters.

    Args:
        file: that it was read from.
        rank, alpha: r and lora_alpha.
        rank_pattern, alpha_pattern: others, by a pattern of names of modules or parameters.
        rank_stabilized: whether alpha is divided by sqrt(r).
        targets: which modules and parameters have adapters, or have none, by the key in the config: a list of ends of
            their names, or a regular expression.
        layers: numbers of the layers whose modules have some; None: all.
    """

    file: Path
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool
    targets: Mapping[str, list[str] | str]
    layers: list[int] | None

    @classmethod
    def read(cls, file: Path) -> "Config":
        """The config in a file.

        Raises:
            CheckpointError: the file is missing or no config of LoRA, or it has a feature that jmx does not have.
        """
        entries = read_object(file)
        if entries.get("peft_type") != "LORA":
            raise CheckpointError(file, f"`peft_type` (={entries.get('peft_type')!r}) must be 'LORA'")
        if (bias := entries.get("bias", "none")) != "none":
            raise CheckpointError(file, f"`bias` (={bias!r}) must be 'none'")
        for key in sorted(entries.keys() - _HARMLESS - _READ - {*_TARGETS}):
            if entries[key] not in (None, False, [], {}):
                raise CheckpointError(file, f"`{key}` (={entries[key]!r}) must be null: jmx does not have it")
        stabilized = entries.get("use_rslora", False)
        if not isinstance(stabilized, bool):
            raise CheckpointError(file, f"`use_rslora` (={stabilized!r}) must be true or false")
        for key, value in _numbers(file, entries, "r", "rank_pattern").items():
            if type(value) is not int or value < 1:
                raise CheckpointError(file, f"`{key}` (={value!r}) must be an integer of at least 1")
        for key, value in _numbers(file, entries, "lora_alpha", "alpha_pattern").items():
            if not is_finite_number(value):
                raise CheckpointError(file, f"`{key}` (={value!r}) must be a finite number")
        return cls(
            file,
            entries["r"],
            float(entries["lora_alpha"]),
            entries.get("rank_pattern") or {},
            {key: float(value) for key, value in (entries.get("alpha_pattern") or {}).items()},
            stabilized,
            {key: _names(file, key, entries.get(key)) for key in _TARGETS},
            _layers(file, entries.get("layers_to_transform")),
        )

    def scale(self, name: str, rank: int) -> float:
        """The scale of the adapter of a module or parameter with that name, without PEFT's prefix."""
        return _of(name, self.alpha_pattern, self.alpha) / (rank**0.5 if self.rank_stabilized else rank)

    def check_rank(self, name: str, rank: int) -> None:
        """Raises CheckpointError unless the adapter of a module or parameter is to have this rank.

        Of fused weights the rank is the number of rows over that of experts: this finds another number of experts.
        """
        expected = _of(name, self.rank_pattern, self.rank)
        if rank != expected:
            rule = f"`r` (={expected}) must be the rank of the adapter of {name!r}, which is {rank} in the files"
            raise CheckpointError(self.file, f"{rule} for this model's number of experts")

    def adapts(self, name: str, layer: int) -> bool:
        """Whether PEFT adapts the module or parameter with that name, in that layer."""
        if _named(name, self.targets["target_parameters"]):
            return True
        of_layer = self.layers is None or layer in self.layers
        excluded = _named(name, self.targets["exclude_modules"])
        return of_layer and not excluded and _named(name, self.targets["target_modules"])


def _of[Value](name: str, patterns: Mapping[str, Value], otherwise: Value) -> Value:
    """The value of the first pattern that is the end of a name. The patterns were checked when the file was read."""
    return next((value for key, value in patterns.items() if re.match(_END.format(key), name)), otherwise)


def _named(name: str, names: list[str] | str) -> bool:
    """Whether a name is one of PEFT's targets."""
    if isinstance(names, str):
        return names == "all-linear" or re.fullmatch(names, name) is not None
    return any(name == its or name.endswith(f".{its}") for its in names)


def _numbers(file: Path, entries: Mapping[str, Any], key: str, pattern: str) -> dict[str, Any]:
    """A number and those of patterns, by the key of each in the file."""
    patterns = entries.get(pattern) or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(file, f"`{pattern}` (={patterns!r}) must be an object")
    for each in patterns:
        _check_expression(file, pattern, each, _END)
    return {key: entries.get(key)} | {f"{pattern}.{its}": value for its, value in patterns.items()}


def _names(file: Path, key: str, value: Any) -> list[str] | str:
    if isinstance(value, str):
        _check_expression(file, key, value)
        return value
    names = [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(file, f"`{key}` (={value!r}) must be a list of names, a string, or null")
    return names


def _check_expression(file: Path, key: str, expression: str, within: str = "{}") -> None:
    try:
        compiled(expression, within)
    except ValueError as error:
        raise CheckpointError(file, f"`{key}`: {error}") from error


def _layers(file: Path, value: Any) -> list[int] | None:
    layers = [value] if type(value) is int else value
    if layers is not None and not (isinstance(layers, list) and all(type(layer) is int for layer in layers)):
        raise CheckpointError(file, f"`layers_to_transform` (={value!r}) must be integers, or null")
    return layers


def entries_of(
    base_model: str | None, targets: Mapping[str, Any], ranks: Mapping[str, int], alphas: Mapping[str, float]
) -> dict[str, Any]:
    """The entries of a config.

    Args:
        base_model: the name or path of the model that is adapted, or None.
        targets: `target_modules` and `target_parameters`, and `layers_to_transform` if it is needed.
        ranks, alphas: of each target, by a pattern of its name.
    """
    first = next(iter(ranks))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": False,
        "lora_dropout": 0.0,
        "r": ranks[first],
        "lora_alpha": alphas[first],
        "rank_pattern": {name: rank for name, rank in ranks.items() if rank != ranks[first]},
        "alpha_pattern": {name: alpha for name, alpha in alphas.items() if alpha != alphas[first]},
        "use_rslora": False,
        **targets,
    }
