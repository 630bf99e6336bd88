"""What config.json says of a model's experts, under the names that models have for it, held to what files hold."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jmx.checkpoint.shards import CheckpointError

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_HIDDEN_SIZE = ("hidden_size",)
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
_HIDDEN_ACT = ("hidden_act", "hidden_activation")
_INNER = "text_config"  # of models that take more than text


def check_model_sizes(file: Path, config: Mapping[str, Any], layer: str, *, num_experts: int, hidden_size: int) -> None:
    """CheckpointError if `config`, which is that of `file`, has other numbers than `layer` has in the files.

    Else the last of the experts could be missing unseen. What the config does not say is not checked.
    """
    for entries in _places(config):
        for keys, found, what in ((_NUM_EXPERTS, num_experts, "experts"), (_HIDDEN_SIZE, hidden_size, "inputs")):
            for key in keys:
                said = entries.get(key)
                if type(said) is int and said != found:
                    raise CheckpointError(file, f"`{key}` (={said}) must be {found}, the {what} that {layer!r} has")


def top_k(config: Mapping[str, Any]) -> int | None:
    """Experts of a token, or None where the config does not say."""
    return _said(config, _TOP_K, int)


def hidden_act(config: Mapping[str, Any]) -> str | None:
    """The name of the activation's function, or None where the config does not say."""
    return _said(config, _HIDDEN_ACT, str)


def _said(config: Mapping[str, Any], keys: tuple[str, ...], kind: type) -> Any:
    given = (entries.get(key) for entries in _places(config) for key in keys)
    return next((value for value in given if type(value) is kind), None)


def _places(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    inner = config.get(_INNER)
    return (config, inner) if isinstance(inner, dict) else (config,)
