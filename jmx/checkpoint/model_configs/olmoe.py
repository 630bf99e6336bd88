"""Configuration of OLMoE: config.json, defaults of missing keys, published models."""

import os
from dataclasses import dataclass
from typing import Any

from jmx.checkpoint.model_configs.decoder_config import sizes
from jmx.checkpoint.model_configs.decoder_entries import DecoderEntries
from jmx.checkpoint.model_configs.grouped_query import GroupedQueryConfig, grouped_query_fields

MODEL_TYPE = "olmoe"

# Defaults of keys that configs may lack, from transformers' OlmoeConfig.
DEFAULTS: dict[str, Any] = {
    "attention_bias": False,
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, kw_only=True)
class Config(GroupedQueryConfig):
    """An OLMoE model; see `GroupedQueryConfig` for its other fields.

    Args:
        attention_bias: whether the q, k, v and o projections have biases.
        clip_qkv: the largest magnitude of queries, keys and values, which are clipped to it; None: they are not.
    """

    attention_bias: bool
    clip_qkv: float | None


# Published models. Tests compare them with public copies of their config.json (tests/data/published_configs.json, which
# names the sources, and the end-of-sequence ids that no copy has).
PUBLISHED = {
    "olmoe-1b-7b": Config(
        **sizes(16, 2048, 1024, 1024, 64, 8, 16, 50304),
        norm_topk_prob=False,
        num_key_value_heads=16,
        head_dim=128,
        attention_bias=False,
        clip_qkv=None,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        eos_token_ids=(50279,),
    )
}


def read_config(path: str | os.PathLike[str]) -> Config:
    """The config of the checkpoint in the directory `path`. Raises `CheckpointError`, as `DecoderEntries.read` does."""
    entries = DecoderEntries.read(path, MODEL_TYPE, DEFAULTS)
    return Config(
        **grouped_query_fields(entries, "intermediate_size"),
        norm_topk_prob=entries.flag("norm_topk_prob"),
        attention_bias=entries.flag("attention_bias"),
        clip_qkv=None if entries.is_absent("clip_qkv") else entries.number("clip_qkv"),
    )
