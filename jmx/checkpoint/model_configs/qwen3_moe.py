"""Configuration of Qwen3-MoE: config.json, defaults of missing keys, published models."""

import os
from dataclasses import dataclass
from typing import Any

from jmx.checkpoint.model_configs.decoder_config import sizes
from jmx.checkpoint.model_configs.decoder_entries import DecoderEntries
from jmx.checkpoint.model_configs.grouped_query import GroupedQueryConfig, grouped_query_fields

MODEL_TYPE = "qwen3_moe"

# Defaults of keys that configs may lack, from transformers' Qwen3MoeConfig.
DEFAULTS: dict[str, Any] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}


@dataclass(frozen=True, kw_only=True)
class Config(GroupedQueryConfig):
    """A Qwen3-MoE model; see `GroupedQueryConfig` for its other fields.

    Args:
        attention_bias: whether the q, k, v and o projections have biases.
        sliding_window: tokens that each layer attends to, including its own; None for all.
    """

    attention_bias: bool
    sliding_window: int | None


_PUBLISHED: dict[str, Any] = {
    "norm_topk_prob": True,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "attention_bias": False,
    "sliding_window": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "eos_token_ids": (151645, 151643),
}

# Published models. Tests compare them with public copies of their config.json (tests/data/published_configs.json, which
# names the sources, and the end-of-sequence ids that no copy has).
PUBLISHED = {
    "qwen3-30b-a3b": Config(**sizes(48, 2048, 6144, 768, 128, 8, 32, 151936), **_PUBLISHED),
    "qwen3-235b-a22b": Config(**sizes(94, 4096, 12288, 1536, 128, 8, 64, 151936), **_PUBLISHED),
}


def read_config(path: str | os.PathLike[str]) -> Config:
    """The config of the checkpoint in the directory `path`. Raises `CheckpointError`, as `DecoderEntries.read` does."""
    entries = DecoderEntries.read(path, MODEL_TYPE, DEFAULTS)
    common = grouped_query_fields(entries)
    return Config(
        **common,
        dense_layers=entries.dense_layers(common["num_hidden_layers"]),
        norm_topk_prob=entries.flag("norm_topk_prob"),
        attention_bias=entries.flag("attention_bias"),
        sliding_window=entries.size("sliding_window") if entries.flag("use_sliding_window") else None,
    )
