"""Configuration of DeepSeek-V3, DeepSeek-V2 and Kimi-K2: config.json, defaults of missing keys, published models."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jmx.checkpoint.model_configs.decoder_config import decoder_fields, sizes
from jmx.checkpoint.model_configs.decoder_entries import FILE, DecoderEntries
from jmx.checkpoint.model_configs.grouped_experts import GroupedExpertsConfig, check_groups, grouped_experts_fields
from jmx.checkpoint.model_configs.yarn import Yarn
from jmx.checkpoint.shards import read_json

# Defaults of keys that configs may lack, by `model_type`, from transformers' DeepseekV3Config and DeepseekV2Config. No
# config states `latent_norm_eps`; it is 1e-6 in DeepSeek's published code, whatever `rms_norm_eps` is.
_V3: dict[str, Any] = {
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "latent_norm_eps": 1e-6,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_interleave": True,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
_V2 = _V3 | {
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
}
DEFAULTS: dict[str, dict[str, Any]] = {"deepseek_v3": _V3, "kimi_k2": _V3, "deepseek_v2": _V2}

# DeepSeek's code and transformers read null as false in these, which are true by default.
_NULLS_OF_V3: dict[str, Any] = {"norm_topk_prob": False, "rope_interleave": False}
_NULLS: dict[str, dict[str, Any]] = {"deepseek_v3": _NULLS_OF_V3, "kimi_k2": _NULLS_OF_V3, "deepseek_v2": {}}

# The values of keys that are supported, by `model_type`, where the published code of each has one definition.
_ONLY_V3 = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
_ONLY_V2 = {
    "scoring_func": ("softmax",),
    "topk_method": ("greedy", "group_limited_greedy"),
    "norm_topk_prob": (False,),  # true: transformers and DeepSeek's code differ
    "rope_interleave": (True,),
    "mlp_bias": (False, None),
}
_SUPPORTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "deepseek_v3": _ONLY_V3,
    "kimi_k2": _ONLY_V3,
    "deepseek_v2": _ONLY_V2,
}


@dataclass(frozen=True, kw_only=True)
class Config(GroupedExpertsConfig):
    """A model with multi-head latent attention (MLA) and grouped routing; see `GroupedExpertsConfig` for other fields.

    Args:
        q_lora_rank: size of the latent of queries; None: there is none.
        kv_lora_rank: size of the latent of keys and values.
        qk_nope_head_dim, qk_rope_head_dim: channels of a head's query and key that are not rotated, and that are.
        v_head_dim: channels of a head's value.
        attention_bias: whether the projections to latents and of the result have biases.
        latent_norm_eps: added to the mean square in RMSNorm of latents.
        rope_interleave: whether a rotated pair is two neighboring channels.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    attention_bias: bool = False
    rms_norm_eps: float = _V3["rms_norm_eps"]
    latent_norm_eps: float = _V3["latent_norm_eps"]
    rope_theta: float = _V3["rope_theta"]
    rope_interleave: bool = True


_HEADS: dict[str, Any] = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_PUBLISHED_V3: dict[str, Any] = _HEADS | {
    "n_shared_experts": 1,
    "scoring": "sigmoid",
    "correction_bias": True,
    "norm_topk_prob": True,
    "q_lora_rank": 1536,
}

# Published models. Tests compare them with public copies of their config.json (tests/data/published_configs.json, which
# names the sources, and the end-of-sequence ids that no copy has).
PUBLISHED = {
    "deepseek-v3": Config(
        **sizes(61, 7168, 18432, 2048, 256, 8, 128, 129280),
        **_PUBLISHED_V3,
        dense_layers=(0, 1, 2),
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        yarn=Yarn(40.0, 4096, 32.0, 1.0, True, 1.0, 1.0),
        num_nextn_predict_layers=1,
        eos_token_ids=(1,),
    ),
    "deepseek-v2-lite": Config(
        **sizes(27, 2048, 10944, 1408, 64, 6, 16, 102400),
        **_HEADS,
        dense_layers=(0,),
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
        scoring="softmax",
        correction_bias=False,
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        q_lora_rank=None,
        yarn=Yarn(40.0, 4096, 32.0, 1.0, True, 0.707, 0.707),
        eos_token_ids=(100001,),
    ),
    "kimi-k2": Config(
        **sizes(61, 7168, 18432, 2048, 384, 8, 64, 163840),
        **_PUBLISHED_V3,
        dense_layers=(0,),
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
        rope_theta=50000.0,
        yarn=Yarn(32.0, 4096, 1.0, 1.0, True, 1.0, 1.0),
        eos_token_ids=(163585, 163586),
    ),
}


def read_config(path: str | os.PathLike[str]) -> Config:
    """The config of the checkpoint in the directory `path`. Raises `CheckpointError`, as `DecoderEntries.read` does."""
    file = Path(path) / FILE
    entries = DecoderEntries(file, file.name, read_json(file))
    model_type = entries.one_of("model_type", (*DEFAULTS,))
    entries.defaults, entries.nulls = DEFAULTS[model_type], _NULLS[model_type]
    for key, values in ({"hidden_act": ("silu",)} | _SUPPORTED[model_type]).items():
        if not entries.is_absent(key):
            entries.one_of(key, values)
    common = decoder_fields(entries)
    method = entries.entries.get("topk_method") or entries.defaults["topk_method"]
    config = Config(
        **common,
        **grouped_experts_fields(entries),
        moe_intermediate_size=entries.size("moe_intermediate_size"),
        num_experts=entries.size("n_routed_experts"),
        dense_layers=_dense_layers(entries, common["num_hidden_layers"]),
        n_group=1 if method == "greedy" else entries.size("n_group"),
        topk_group=1 if method == "greedy" else entries.size("topk_group"),
        scoring=entries.defaults["scoring_func"],
        correction_bias=method == "noaux_tc",
        q_lora_rank=None if _is_null(entries, "q_lora_rank") else entries.size("q_lora_rank"),
        kv_lora_rank=entries.size("kv_lora_rank"),
        qk_nope_head_dim=entries.size("qk_nope_head_dim"),
        qk_rope_head_dim=entries.size("qk_rope_head_dim"),
        v_head_dim=entries.size("v_head_dim"),
        attention_bias=entries.flag("attention_bias"),
        latent_norm_eps=entries.defaults["latent_norm_eps"],
        rope_interleave=entries.flag("rope_interleave"),
    )
    _check(entries, config)
    return config


def _is_null(entries: DecoderEntries, key: str) -> bool:
    return key in entries.entries and entries.is_absent(key)


def _dense_layers(entries: DecoderEntries, num_layers: int) -> tuple[int, ...]:
    """The first layers, and of the others all except every `moe_layer_freq`-th."""
    first, step = entries.count("first_k_dense_replace"), entries.size("moe_layer_freq")
    return tuple(layer for layer in range(num_layers) if layer < first or layer % step)


def _check(entries: DecoderEntries, config: Config) -> None:
    """CheckpointError for entries that do not fit each other."""

    def must(key: str, fits: bool, rule: str) -> None:
        if not fits:
            raise entries.error(key, rule)

    heads = config.num_attention_heads
    must("num_key_value_heads", entries.size("num_key_value_heads", heads) == heads, f"must be {heads}, as many heads")
    must("qk_rope_head_dim", config.qk_rope_head_dim % 2 == 0, "must be even, for rotary pairs")
    rotated, whole = config.qk_rope_head_dim, config.qk_nope_head_dim + config.qk_rope_head_dim
    # Transformers writes these two, and takes them for the number of rotated channels, and of all.
    must("head_dim", entries.size("head_dim", rotated) == rotated, f"must be `qk_rope_head_dim` (={rotated})")
    its_sum = f"`qk_nope_head_dim` (={config.qk_nope_head_dim}) + `qk_rope_head_dim` (={rotated})"
    must("qk_head_dim", entries.size("qk_head_dim", whole) == whole, f"must be {its_sum}")
    has_query_latent = config.q_lora_rank is not None
    must("attention_bias", has_query_latent or not config.attention_bias, "must be false without a `q_lora_rank`")
    check_groups(entries, config)
