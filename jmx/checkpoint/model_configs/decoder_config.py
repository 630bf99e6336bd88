"""What the configurations of most families have in common."""

from dataclasses import dataclass
from typing import Any

from jmx.checkpoint.model_configs.decoder_entries import DecoderEntries
from jmx.checkpoint.model_configs.yarn import Yarn, read_yarn
from jmx.checkpoint.shards import CheckpointError


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder with rotary positions and experts.

    Args:
        num_hidden_layers, hidden_size, num_experts, vocab_size: sizes.
        intermediate_size: of layers with a dense MLP instead of experts.
        moe_intermediate_size: of each expert.
        top_k: experts per token.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum.
        dense_layers: numbers of the layers without experts.
        num_attention_heads: heads of attention.
        rms_norm_eps: added to the mean square in RMSNorm.
        rope_theta: base of the rotary frequencies.
        yarn: how rotary positions are stretched; None: they are not.
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
    dense_layers: tuple[int, ...] = ()
    num_attention_heads: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    yarn: Yarn | None = None
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()


_SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "moe_intermediate_size"),
    *("num_experts", "top_k", "num_attention_heads", "vocab_size"),
)


def sizes(*values: int) -> dict[str, Any]:
    """The sizes of a published model: layers, hidden, intermediate, moe_intermediate; experts, top_k, heads, vocab."""
    return dict(zip(_SIZES, values, strict=True))


def decoder_fields(entries: DecoderEntries) -> dict[str, Any]:
    """The fields of `DecoderConfig`, except `dense_layers`, `norm_topk_prob` and those of the experts' number and size.

    Raises:
        CheckpointError: a key is missing, has a value of another type or out of range, or would make it another model.
    """
    theta, yarn = entries.rope_number("rope_theta"), read_yarn(entries)
    if yarn is not None and theta <= 1:
        raise CheckpointError(entries.file, f"`rope_theta` (={theta}) must be above 1 for YaRN")
    return {
        "num_hidden_layers": entries.layers(),
        "hidden_size": entries.size("hidden_size"),
        "intermediate_size": entries.size("intermediate_size"),
        "top_k": entries.size("num_experts_per_tok"),
        "num_attention_heads": entries.size("num_attention_heads"),
        "vocab_size": entries.size("vocab_size"),
        "rms_norm_eps": entries.number("rms_norm_eps"),
        "rope_theta": theta,
        "yarn": yarn,
        "tie_word_embeddings": entries.flag("tie_word_embeddings"),
        "eos_token_ids": entries.eos_token_ids(),
    }
