"""The protocol of configurations: the fields that every model has."""

from typing import Protocol


class Config(Protocol):
    """Sizes, the epsilon of norms, and the ids that end a generation: see `model_configs.qwen3_moe.Config`."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def dense_layers(self) -> tuple[int, ...]: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


def expert_layers(config: Config) -> list[int]:
    """Numbers of the layers that have experts."""
    return [layer for layer in range(config.num_hidden_layers) if layer not in config.dense_layers]


def expert_sizes(config: Config) -> tuple[int, int, int]:
    """E, H, I of each layer's experts."""
    return config.num_experts, config.hidden_size, config.moe_intermediate_size
