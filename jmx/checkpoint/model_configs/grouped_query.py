"""What the configurations of families with grouped-query attention have in common."""

from dataclasses import dataclass
from typing import Any

from jmx.checkpoint.model_configs.common_keys import check_heads
from jmx.checkpoint.model_configs.decoder_config import DecoderConfig, decoder_fields
from jmx.checkpoint.model_configs.decoder_entries import DecoderEntries
from jmx.checkpoint.shards import CheckpointError


@dataclass(frozen=True, kw_only=True)
class GroupedQueryConfig(DecoderConfig):
    """A decoder with grouped-query attention; see `DecoderConfig` for its other fields.

    Args:
        num_key_value_heads: heads of keys and values.
        head_dim: channels of a head.
    """

    num_key_value_heads: int
    head_dim: int


def grouped_query_fields(entries: DecoderEntries, expert_size: str = "moe_intermediate_size") -> dict[str, Any]:
    """The fields of `GroupedQueryConfig`, except `dense_layers` and `norm_topk_prob`.

    The config must spell them as most families do, and its activation must be silu.

    `expert_size`: the key of the experts' intermediate size.

    Raises:
        CheckpointError: a key is missing, has a value of another type or out of range, or would make it another model.
    """
    entries.one_of("hidden_act", ("silu",), "silu")
    fields = decoder_fields(entries)
    heads = fields["num_attention_heads"]
    kv_heads = entries.size("num_key_value_heads", heads)
    head_dim = entries.size("head_dim", fields["hidden_size"] // heads)
    check_heads(entries.file, heads, kv_heads, head_dim)
    num_experts, top_k = _num_experts(entries), fields["top_k"]
    if top_k > num_experts:
        raise CheckpointError(entries.file, f"`num_experts_per_tok` (={top_k}) must be at most {num_experts}")
    return fields | {
        "moe_intermediate_size": entries.size(expert_size),
        "num_experts": num_experts,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _num_experts(entries: DecoderEntries) -> int:
    """The number of experts, which files spell in three ways. CheckpointError if two differ."""
    spellings = [key for key in ("n_routed_experts", "num_experts", "num_local_experts") if not entries.is_absent(key)]
    first, *others = spellings or ["num_experts"]
    number = entries.size(first)
    for other in others:
        if entries.size(other) != number:
            raise entries.error(other, f"must be `{first}` (={number})")
    return number
