"""`adapter_config.json`: what scales adapters, and features of PEFT that jmx does not have, which are errors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jmx.checkpoint.shards import CheckpointError, read_object

# Entries that change nothing about results, or only how adapters were trained and initialized.
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_version"),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *(
        "init_lora_weights",
        "lora_dropout",
        "rank_pattern",
        "runtime_config",
        "ensure_weight_tying",
        "monteclora_config",
    ),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_config", "megatron_core"),
    "qalora_group_size",
}
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "alpha_pattern", "bias"}


@dataclass(frozen=True)
class Config:
    """What a config says about the scale of adapters.

    Args:
        alpha: lora_alpha.
        alpha_pattern: others, by a pattern of names of modules or parameters.
        rank_stabilized: whether alpha is divided by sqrt(r).
    """

    alpha: float
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool

    @classmethod
    def read(cls, file: Path) -> "Config":
        """The config in a file.

        Raises:
            CheckpointError: the file is missing or no config of LoRA, or it has a feature that jmx does not have.
        """
        entries = read_object(file)
        if entries.get("peft_type") != "LORA":
            raise CheckpointError(file, f"`peft_type` (={entries.get('peft_type')!r}) must be 'LORA'")
        rank = entries.get("r")
        if type(rank) is not int or rank < 1:
            raise CheckpointError(file, f"`r` (={rank!r}) must be an integer of at least 1")
        if (bias := entries.get("bias", "none")) != "none":
            raise CheckpointError(file, f"`bias` (={bias!r}) must be 'none'")
        for key in sorted(entries.keys() - _HARMLESS - _READ):
            if entries[key] not in (None, False, [], {}):
                raise CheckpointError(file, f"`{key}` (={entries[key]!r}) must be null: jmx does not have it")
        stabilized = entries.get("use_rslora", False)
        if not isinstance(stabilized, bool):
            raise CheckpointError(file, f"`use_rslora` (={stabilized!r}) must be true or false")
        patterns = entries.get("alpha_pattern") or {}
        if not isinstance(patterns, dict):
            raise CheckpointError(file, f"`alpha_pattern` (={patterns!r}) must be an object")
        alphas = {f"alpha_pattern.{key}": value for key, value in patterns.items()}
        for key, value in {"lora_alpha": entries.get("lora_alpha"), **alphas}.items():
            if type(value) not in (int, float):
                raise CheckpointError(file, f"`{key}` (={value!r}) must be a number")
        return cls(float(entries["lora_alpha"]), {key: float(value) for key, value in patterns.items()}, stabilized)

    def scale(self, name: str, rank: int) -> float:
        """The scale of the adapter of a module or parameter with that name, without PEFT's prefix."""
        matches = (value for key, value in self.alpha_pattern.items() if re.match(rf"(.*\.)?({key})$", name))
        return next(matches, self.alpha) / (rank**0.5 if self.rank_stabilized else rank)


def entries_of(
    base_model: str | None, targets: Mapping[str, Any], ranks: Mapping[str, int], alphas: Mapping[str, float]
) -> dict[str, Any]:
    """The entries of a config.

    Args:
        base_model: the name or path of the model that is adapted, or None.
        targets: `target_modules` and `target_parameters`.
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
