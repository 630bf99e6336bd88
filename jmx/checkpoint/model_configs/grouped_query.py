"""What the configurations of families with grouped-query attention have in common."""

from dataclasses import dataclass
from typing import Any

from jmx.checkpoint.model_configs.common_keys import check_heads
from jmx.checkpoint.model_configs.decoder_entries import DecoderEntries
from jmx.checkpoint.shards import CheckpointError


@dataclass(frozen=True, kw_only=True)
class GroupedQueryConfig:
    """A decoder with grouped-query attention, rotary positions and experts.

    Args:
        num_hidden_layers, hidden_size, num_experts, vocab_size: sizes.
        intermediate_size: of layers with a dense MLP instead of experts.
        moe_intermediate_size: of each expert.
        top_k: experts per token.
        dense_layers: numbers of the layers without experts.
        num_attention_heads, num_key_value_heads, head_dim: attention's sizes.
        rms_norm_eps: added to the mean square in RMSNorm.
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
    dense_layers: tuple[int, ...] = ()
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()


def common_fields(entries: DecoderEntries, expert_size: str = "moe_intermediate_size") -> dict[str, Any]:
    """The fields of `GroupedQueryConfig`, except `dense_layers`, of a config that spells them as most families do.

    The activation must be silu. `expert_size` is the key of the experts' intermediate size.

    Raises:
        CheckpointError: a key is missing, has a value of another type or out of range, or would make it another model.
    """
    entries.one_of("hidden_act", ("silu",), "silu")
    heads, hidden = entries.size("num_attention_heads"), entries.size("hidden_size")
    kv_heads = entries.size("num_key_value_heads", heads)
    head_dim = entries.size("head_dim", hidden // heads)
    check_heads(entries.file, heads, kv_heads, head_dim)
    num_experts = _num_experts(entries)
    top_k = entries.size("num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(entries.file, f"`num_experts_per_tok` (={top_k}) must be at most {num_experts}")
    return {
        "num_hidden_layers": entries.layers(),
        "hidden_size": hidden,
        "intermediate_size": entries.size("intermediate_size"),
        "moe_intermediate_size": entries.size(expert_size),
        "num_experts": num_experts,
        "top_k": top_k,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": entries.size("vocab_size"),
        "rms_norm_eps": entries.number("rms_norm_eps"),
        "rope_theta": entries.rope_number("rope_theta"),
        "tie_word_embeddings": entries.flag("tie_word_embeddings"),
        "eos_token_ids": entries.eos_token_ids(),
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
