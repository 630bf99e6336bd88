"""Configuration of Mixtral: config.json, defaults of missing keys, published models."""

import os
from dataclasses import dataclass
from typing import Any

from jmx.checkpoint.model_configs.decoder_config import sizes
from jmx.checkpoint.model_configs.decoder_entries import DecoderEntries
from jmx.checkpoint.model_configs.grouped_query import GroupedQueryConfig, grouped_query_fields

MODEL_TYPE = "mixtral"

# Defaults of keys that configs may lack, from transformers' MixtralConfig.
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, kw_only=True)
class Config(GroupedQueryConfig):
    """A Mixtral model; see `GroupedQueryConfig` for its other fields.

    Args:
        sliding_window: tokens that each layer attends to, including its own; None for all.
    """

    norm_topk_prob: bool = True
    sliding_window: int | None = None


_PUBLISHED: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "eos_token_ids": (2,),
}

# Published models. Tests compare them with public copies of their config.json (tests/data/published_configs.json, which
# names the sources, and the end-of-sequence ids that no copy has).
PUBLISHED = {
    "mixtral-8x7b": Config(**sizes(32, 4096, 14336, 14336, 8, 2, 32, 32000), **_PUBLISHED),
    "mixtral-8x22b": Config(**sizes(56, 6144, 16384, 16384, 8, 2, 48, 32000), **_PUBLISHED),
}


def read_config(path: str | os.PathLike[str]) -> Config:
    """The config of the checkpoint in the directory `path`. Raises `CheckpointError`, as `DecoderEntries.read` does."""
    entries = DecoderEntries.read(path, MODEL_TYPE, DEFAULTS)
    window = None if entries.is_absent("sliding_window") else entries.size("sliding_window")
    return Config(**grouped_query_fields(entries, "intermediate_size"), sliding_window=window)
