"""Configuration of GLM-4.5: config.json, defaults of missing keys, published models."""

import os
from dataclasses import dataclass
from typing import Any

from jmx.checkpoint.model_configs.decoder_config import sizes
from jmx.checkpoint.model_configs.decoder_entries import DecoderEntries
from jmx.checkpoint.model_configs.grouped_experts import GroupedExpertsConfig, check_groups, grouped_experts_fields
from jmx.checkpoint.model_configs.grouped_query import GroupedQueryConfig, grouped_query_fields
from jmx.checkpoint.shards import CheckpointError

MODEL_TYPE = "glm4_moe"

# Defaults of keys that configs may lack, from transformers' Glm4MoeConfig.
DEFAULTS: dict[str, Any] = {
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
}


@dataclass(frozen=True, kw_only=True)
class Config(GroupedExpertsConfig, GroupedQueryConfig):
    """A GLM-4.5 model; see `GroupedExpertsConfig` and `GroupedQueryConfig` for its other fields.

    Args:
        attention_bias: whether the q, k and v projections have biases.
        use_qk_norm: whether queries and keys are normalized per head.
        rotary_dim: how many of a head's channels, the first ones, are rotated.
    """

    scoring: str = "sigmoid"
    correction_bias: bool = True
    attention_bias: bool
    use_qk_norm: bool
    rotary_dim: int


_PUBLISHED: dict[str, Any] = {
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rotary_dim": 64,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "eos_token_ids": (151329, 151336, 151338),
}

# Published models. Tests compare them with public copies of their config.json (tests/data/published_configs.json, which
# names the sources, and the end-of-sequence ids that no copy has).
PUBLISHED = {
    "glm-4.5": Config(
        **sizes(92, 5120, 12288, 1536, 160, 8, 96, 151552),
        **_PUBLISHED,
        dense_layers=(0, 1, 2),
        routed_scaling_factor=2.5,
        use_qk_norm=True,
    ),
    "glm-4.5-air": Config(
        **sizes(46, 4096, 10944, 1408, 128, 8, 96, 151552),
        **_PUBLISHED,
        dense_layers=(0,),
        routed_scaling_factor=1.0,
        use_qk_norm=False,
    ),
}


def read_config(path: str | os.PathLike[str]) -> Config:
    """The config of the checkpoint in the directory `path`. Raises `CheckpointError`, as `DecoderEntries.read` does."""
    entries = DecoderEntries.read(path, MODEL_TYPE, DEFAULTS)
    common = grouped_query_fields(entries)
    dense = min(entries.count("first_k_dense_replace"), common["num_hidden_layers"])
    config = Config(
        **common,
        **grouped_experts_fields(entries),
        dense_layers=tuple(range(dense)),
        n_group=entries.size("n_group"),
        topk_group=entries.size("topk_group"),
        attention_bias=entries.flag("attention_bias"),
        use_qk_norm=entries.flag("use_qk_norm"),
        rotary_dim=_rotary_dim(entries, common["head_dim"]),
    )
    check_groups(entries, config)
    return config


def _rotary_dim(entries: DecoderEntries, head_dim: int) -> int:
    factor = entries.rope_number("partial_rotary_factor")
    rotary_dim = int(head_dim * factor)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        rule = f"must make an even number of the {head_dim} channels of a head, for rotary pairs, but makes"
        raise CheckpointError(entries.file, f"`partial_rotary_factor` (={factor}) {rule} {rotary_dim}")
    return rotary_dim
