"""Configuration of Qwen3-MoE: config.json, defaults of missing keys, published models."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jmx.checkpoint.config_object import ConfigObject
from jmx.checkpoint.model_configs.common_keys import check_heads
from jmx.checkpoint.shards import CheckpointError, read_json

FILE = "config.json"
GENERATION_FILE = "generation_config.json"
MODEL_TYPE = "qwen3_moe"
MOST_LAYERS = 1 << 20  # far beyond any model: a larger number is corrupt

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


@dataclass(frozen=True)
class Config:
    """A Qwen3-MoE model.

    Args:
        num_hidden_layers, hidden_size, num_experts, vocab_size: sizes.
        intermediate_size: of layers with a dense MLP instead of experts.
        moe_intermediate_size: of each expert.
        top_k: experts per token.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum.
        dense_layers: numbers of the layers without experts.
        num_attention_heads, num_key_value_heads, head_dim: attention's sizes.
        attention_bias: whether the q, k, v and o projections have biases.
        rms_norm_eps: added to the mean square in RMSNorm.
        sliding_window: tokens that each layer attends to, including its own; None for all.
        rope_theta: base of the rotary frequencies.
        tie_word_embeddings: whether the embedding is also the unembedding.
        eos_token_ids: ids that end a generation, from config.json and generation_config.json; may be empty.
    """

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    top_k: int
    norm_topk_prob: bool
    dense_layers: tuple[int, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    attention_bias: bool
    rms_norm_eps: float
    sliding_window: int | None
    rope_theta: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()


def _published(num_hidden_layers: int, hidden_size: int, moe_intermediate_size: int, heads: int) -> Config:
    return Config(
        num_hidden_layers=num_hidden_layers,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        moe_intermediate_size=moe_intermediate_size,
        num_experts=128,
        top_k=8,
        norm_topk_prob=True,
        dense_layers=(),
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        attention_bias=False,
        rms_norm_eps=1e-6,
        sliding_window=None,
        rope_theta=1e6,
        tie_word_embeddings=False,
        eos_token_ids=(151645, 151643),
    )


# The published models, from their config.json and generation_config.json.
PUBLISHED = {"qwen3-30b-a3b": _published(48, 2048, 768, 32), "qwen3-235b-a22b": _published(94, 4096, 1536, 64)}


def read_config(path: str | os.PathLike[str]) -> Config:
    """The config of the checkpoint in the directory `path`.

    Raises:
        CheckpointError: a file is missing or is not JSON; a key is missing, has a value of another type or out of
            range, or would make it another model.
    """
    file = Path(path) / FILE
    entries = _entries(file)
    entries.one_of("model_type", (MODEL_TYPE,))
    entries.one_of("hidden_act", ("silu",), "silu")
    layers = _size(entries, "num_hidden_layers")
    heads, hidden = _size(entries, "num_attention_heads"), _size(entries, "hidden_size")
    config = Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=_size(entries, "intermediate_size"),
        moe_intermediate_size=_size(entries, "moe_intermediate_size"),
        num_experts=_size(entries, "num_experts" if "num_experts" in entries.entries else "num_local_experts"),
        top_k=_size(entries, "num_experts_per_tok"),
        norm_topk_prob=_flag(entries, "norm_topk_prob"),
        dense_layers=_dense_layers(entries, layers),
        num_attention_heads=heads,
        num_key_value_heads=_size(entries, "num_key_value_heads"),
        head_dim=_size(entries, "head_dim", hidden // heads),
        vocab_size=_size(entries, "vocab_size"),
        attention_bias=_flag(entries, "attention_bias"),
        rms_norm_eps=_number(entries, "rms_norm_eps"),
        sliding_window=_size(entries, "sliding_window") if _flag(entries, "use_sliding_window") else None,
        rope_theta=_rope_theta(entries),
        tie_word_embeddings=_flag(entries, "tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(entries, file.parent / GENERATION_FILE),
    )
    _check(file, config)
    return config


def _entries(file: Path) -> ConfigObject:
    return ConfigObject(file, file.name, read_json(file))


def _default(entries: ConfigObject, key: str) -> list[Any]:
    """The default of an entry that is missing or null, in a list; empty if there is none."""
    if entries.entries.get(key) is None and key in DEFAULTS:
        return [DEFAULTS[key]]
    return []


def _size(entries: ConfigObject, key: str, *default: int) -> int:
    if entries.entries.get(key) is None and (given := [*_default(entries, key), *default]):
        return given[0]
    return entries.check(key, lambda value: type(value) is int and value >= 1, "must be a whole number of at least 1")


def _flag(entries: ConfigObject, key: str) -> bool:
    return entries.one_of(key, (True, False), *_default(entries, key))


def _number(entries: ConfigObject, key: str) -> float:
    if given := _default(entries, key):
        return given[0]

    def fits(value: Any) -> bool:
        return type(value) in (int, float) and 0 < value < float("inf")

    return float(entries.check(key, fits, "must be a positive number"))


def _rope_theta(entries: ConfigObject) -> float:
    """From the config, or its rope object, `rope_scaling` in older files and `rope_parameters` in newer ones."""
    found: dict[str, float] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if entries.entries.get(key) is not None:
            rope = entries.object(key)
            for kind in ("rope_type", "type"):
                rope.one_of(kind, ("default",), "default")
            if rope.entries.get("rope_theta") is not None:
                found[key] = _number(rope, "rope_theta")
    if entries.entries.get("rope_theta") is not None or not found:
        found["rope_theta"] = _number(entries, "rope_theta")
    if len({*found.values()}) > 1:
        raise CheckpointError(entries.file, f"`rope_theta` must be one number, but is {found}")
    return next(iter(found.values()))


def _dense_layers(entries: ConfigObject, num_layers: int) -> tuple[int, ...]:
    """The layers that `mlp_only_layers` names, and all except every `decoder_sparse_step`-th."""
    step = _size(entries, "decoder_sparse_step")

    def fits(value: Any) -> bool:
        return value is None or (
            isinstance(value, list) and all(type(item) is int and 0 <= item < num_layers for item in value)
        )

    rule = f"must be a list of layers, of which there are {num_layers}"
    named = entries.check("mlp_only_layers", fits, rule, DEFAULTS["mlp_only_layers"]) or []
    if num_layers > MOST_LAYERS:
        raise CheckpointError(entries.file, f"`num_hidden_layers` (={num_layers}) must be at most {MOST_LAYERS}")
    return tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % step)


def _eos_token_ids(entries: ConfigObject, generation: Path) -> tuple[int, ...]:
    found: list[int] = []
    for source in (entries, *([_entries(generation)] if generation.exists() else [])):

        def fits(value: Any) -> bool:
            ids = value if isinstance(value, list) else [value]
            return value is None or all(type(item) is int and item >= 0 for item in ids)

        value = source.check("eos_token_id", fits, "must be an id or a list of ids", None)
        found += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(found))


def _check(file: Path, config: Config) -> None:
    if config.top_k > config.num_experts:
        raise CheckpointError(file, f"`num_experts_per_tok` (={config.top_k}) must be at most {config.num_experts}")
    check_heads(file, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
