"""Keys of config.json that describe experts in any family: their number, sizes and activation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jmx.checkpoint.shards import CheckpointError

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_HIDDEN_SIZE = ("hidden_size",)
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
_HIDDEN_ACT = ("hidden_act", "hidden_activation")
_INNER = "text_config"  # in models with other inputs than text


def check_model_sizes(file: Path, config: Mapping[str, Any], layer: str, *, num_experts: int, hidden_size: int) -> None:
    """CheckpointError if `config`, the contents of `file`, disagrees with the tensors of `layer`.

    Without this check, missing experts at the end would not be noticed. Keys that the config lacks are not checked.
    """
    for entries in _levels(config):
        for keys, found, what in ((_NUM_EXPERTS, num_experts, "experts"), (_HIDDEN_SIZE, hidden_size, "inputs")):
            for key in keys:
                stated = entries.get(key)
                if type(stated) is int and stated != found:
                    raise CheckpointError(file, f"`{key}` (={stated}) must be {found}, the {what} that {layer!r} has")


def check_heads(file: Path, heads: int, kv_heads: int, head_dim: int) -> None:
    """CheckpointError unless key/value heads divide the heads, and a head has an even size, for rotary pairs."""
    if heads % kv_heads:
        rule = f"must be a multiple of `num_key_value_heads` (={kv_heads})"
        raise CheckpointError(file, f"`num_attention_heads` (={heads}) {rule}")
    if head_dim % 2:
        raise CheckpointError(file, f"`head_dim` (={head_dim}) must be even, for rotary pairs")


def top_k(config: Mapping[str, Any]) -> int | None:
    """Experts per token, or None if the config has no such key."""
    return _first(config, _TOP_K, int)


def hidden_act(config: Mapping[str, Any]) -> str | None:
    """The name of the activation function, or None if the config has no such key."""
    return _first(config, _HIDDEN_ACT, str)


def _first(config: Mapping[str, Any], keys: tuple[str, ...], kind: type) -> Any:
    given = (entries.get(key) for entries in _levels(config) for key in keys)
    return next((value for value in given if type(value) is kind), None)


def _levels(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    inner = config.get(_INNER)
    return (config, inner) if isinstance(inner, dict) else (config,)
