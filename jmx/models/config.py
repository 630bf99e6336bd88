"""The protocol of configurations: the fields that every model has."""

from typing import Any, Protocol, runtime_checkable

from jmx.util.checks import check_instance


@runtime_checkable
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


def check_config(name: str, value: Any) -> Any:
    """TypeError unless `value` has the fields of a configuration."""
    return check_instance(name, value, Config, "a configuration of a model, as a family's `read_config` returns it")


def expert_layers(config: Config) -> list[int]:
    """Numbers of the layers that have experts."""
    return [layer for layer in range(config.num_hidden_layers) if layer not in config.dense_layers]


def expert_sizes(config: Config) -> tuple[int, int, int]:
    """E, H, I of each layer's experts."""
    return config.num_experts, config.hidden_size, config.moe_intermediate_size
