"""Configuration of Mixtral: config.json, defaults of missing keys, published models."""

import os
from dataclasses import dataclass
from typing import Any

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

    sliding_window: int | None = None


def _published(num_hidden_layers: int, hidden_size: int, intermediate_size: int, heads: int) -> Config:
    return Config(
        num_hidden_layers=num_hidden_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        moe_intermediate_size=intermediate_size,
        num_experts=8,
        top_k=2,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=32000,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        eos_token_ids=(2,),
    )


# Published models. Tests compare them with public copies of their config.json (tests/data/published_configs.json, which
# names the sources, and the end-of-sequence ids that no copy has).
PUBLISHED = {"mixtral-8x7b": _published(32, 4096, 14336, 32), "mixtral-8x22b": _published(56, 6144, 16384, 48)}


def read_config(path: str | os.PathLike[str]) -> Config:
    """The config of the checkpoint in the directory `path`. Raises `CheckpointError`, as `DecoderEntries.read` does."""
    entries = DecoderEntries.read(path, MODEL_TYPE, DEFAULTS)
    window = None if entries.is_absent("sliding_window") else entries.size("sliding_window")
    return Config(**grouped_query_fields(entries, "intermediate_size"), sliding_window=window)
