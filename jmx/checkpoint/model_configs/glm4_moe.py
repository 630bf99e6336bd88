"""Configuration of GLM-4.5: config.json, defaults of missing keys, published models."""

import os
from dataclasses import dataclass
from typing import Any

from jmx.checkpoint.model_configs.common_keys import check_groups
from jmx.checkpoint.model_configs.decoder_entries import DecoderEntries
from jmx.checkpoint.model_configs.grouped_query import GroupedQueryConfig, common_fields
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
class Config(GroupedQueryConfig):
    """A GLM-4.5 model; see `GroupedQueryConfig` for its other fields.

    Args:
        n_shared_experts: experts that every token goes to, each as large as the others.
        n_group, topk_group: groups of experts, and how many of them a token's experts are chosen from.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum.
        routed_scaling_factor: multiplies these weights.
        attention_bias: whether the q, k and v projections have biases.
        use_qk_norm: whether queries and keys are normalized per head.
        rotary_dim: how many of a head's channels, the first ones, are rotated.
        num_nextn_predict_layers: layers after the others that predict further tokens. They are not run.
    """

    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float
    attention_bias: bool
    use_qk_norm: bool
    rotary_dim: int
    num_nextn_predict_layers: int = 1


def _published(layers: int, dense: int, *, routed_scaling_factor: float, use_qk_norm: bool, **sizes: Any) -> Config:
    return Config(
        num_hidden_layers=layers,
        dense_layers=tuple(range(dense)),
        top_k=8,
        routed_scaling_factor=routed_scaling_factor,
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=128,
        rotary_dim=64,
        vocab_size=151552,
        attention_bias=True,
        use_qk_norm=use_qk_norm,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        eos_token_ids=(151329, 151336, 151338),
        **sizes,
    )


# Published models. Tests compare them with public copies of their config.json (tests/data/published_configs.json, which
# names the sources, and the end-of-sequence ids that no copy has).
PUBLISHED = {
    "glm-4.5": _published(
        92,
        3,
        hidden_size=5120,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_experts=160,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
    ),
    "glm-4.5-air": _published(
        46,
        1,
        hidden_size=4096,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_experts=128,
        routed_scaling_factor=1.0,
        use_qk_norm=False,
    ),
}


def read_config(path: str | os.PathLike[str]) -> Config:
    """The config of the checkpoint in the directory `path`.

    Raises:
        CheckpointError: a file is missing or is not JSON; a key is missing, has a value of another type or out of
            range, or would make it another model.
    """
    entries = DecoderEntries.read(path, MODEL_TYPE, DEFAULTS)
    common = common_fields(entries)
    dense = min(entries.count("first_k_dense_replace"), common["num_hidden_layers"])
    config = Config(
        **common,
        dense_layers=tuple(range(dense)),
        n_shared_experts=entries.size("n_shared_experts"),
        n_group=entries.size("n_group"),
        topk_group=entries.size("topk_group"),
        norm_topk_prob=entries.flag("norm_topk_prob"),
        routed_scaling_factor=entries.number("routed_scaling_factor"),
        attention_bias=entries.flag("attention_bias"),
        use_qk_norm=entries.flag("use_qk_norm"),
        rotary_dim=_rotary_dim(entries, common["head_dim"]),
        num_nextn_predict_layers=entries.count("num_nextn_predict_layers"),
    )
    check_groups(entries.file, config.num_experts, config.top_k, config.n_group, config.topk_group)
    return config


def _rotary_dim(entries: DecoderEntries, head_dim: int) -> int:
    factor = entries.rope_number("partial_rotary_factor")
    rotary_dim = int(head_dim * factor)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        rule = f"must make an even number of the {head_dim} channels of a head, for rotary pairs, but makes"
        raise CheckpointError(entries.file, f"`partial_rotary_factor` (={factor}) {rule} {rotary_dim}")
    return rotary_dim
