"""Configuration of Qwen2-MoE: config.json, defaults of missing keys, published models."""

import os
from dataclasses import dataclass
from typing import Any

from jmx.checkpoint.model_configs.decoder_config import sizes
from jmx.checkpoint.model_configs.decoder_entries import DecoderEntries
from jmx.checkpoint.model_configs.grouped_query import GroupedQueryConfig, grouped_query_fields

MODEL_TYPE = "qwen2_moe"

# Defaults of keys that configs may lack, from transformers' Qwen2MoeConfig.
DEFAULTS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "max_window_layers": 28,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
    "qkv_bias": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Config(GroupedQueryConfig):
    """A Qwen2-MoE model; see `GroupedQueryConfig` for its other fields.

    Args:
        shared_expert_intermediate_size: of the expert that every token goes to.
        qkv_bias: whether the q, k and v projections have biases.
        windows: for each layer how many tokens it attends to, including its own; None for all.
    """

    shared_expert_intermediate_size: int
    qkv_bias: bool
    windows: tuple[int | None, ...]


_PUBLISHED: dict[str, Any] = {
    "norm_topk_prob": False,
    "head_dim": 128,
    "qkv_bias": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "eos_token_ids": (151643,),
}

# Published models. Tests compare them with public copies of their config.json (tests/data/published_configs.json, which
# names the sources, and the end-of-sequence ids that no copy has).
PUBLISHED = {
    "qwen1.5-moe-a2.7b": Config(
        **sizes(24, 2048, 5632, 1408, 60, 4, 16, 151936),
        **_PUBLISHED,
        shared_expert_intermediate_size=5632,
        num_key_value_heads=16,
        windows=(None,) * 24,
    ),
    "qwen2-57b-a14b": Config(
        **sizes(28, 3584, 18944, 2560, 64, 8, 28, 151936),
        **_PUBLISHED,
        shared_expert_intermediate_size=20480,
        num_key_value_heads=4,
        windows=(None,) * 28,
    ),
}


def read_config(path: str | os.PathLike[str]) -> Config:
    """The config of the checkpoint in the directory `path`. Raises `CheckpointError`, as `DecoderEntries.read` does."""
    entries = DecoderEntries.read(path, MODEL_TYPE, DEFAULTS)
    common = grouped_query_fields(entries)
    layers = common["num_hidden_layers"]
    return Config(
        **common,
        dense_layers=entries.dense_layers(layers),
        shared_expert_intermediate_size=entries.size("shared_expert_intermediate_size"),
        norm_topk_prob=entries.flag("norm_topk_prob"),
        qkv_bias=entries.flag("qkv_bias"),
        windows=_windows(entries, layers),
    )


def _windows(entries: DecoderEntries, layers: int) -> tuple[int | None, ...]:
    """By `layer_types`; without it, in the first `max_window_layers` layers every second one has a window."""
    window = entries.size("sliding_window") if entries.flag("use_sliding_window") else None
    if entries.is_absent("layer_types"):
        first = min(layers, entries.count("max_window_layers"))
        return tuple(window if layer < first and layer % 2 == 0 else None for layer in range(layers))
    known = (_FULL,) if window is None else (_SLIDING, _FULL)

    def fits(value: Any) -> bool:
        return isinstance(value, list) and len(value) == layers and all(kind in known for kind in value)

    kinds = entries.check("layer_types", fits, f"must be {layers} of {list(known)}")
    return tuple(window if kind == _SLIDING else None for kind in kinds)
