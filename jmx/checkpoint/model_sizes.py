"""What config.json says of a model's experts, under the names that models have for it, held to what files hold."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jmx.checkpoint.shards import CheckpointError

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_HIDDEN_SIZE = ("hidden_size",)
_INNER = "text_config"  # of models that take more than text


def check_model_sizes(file: Path, config: Mapping[str, Any], layer: str, *, num_experts: int, hidden_size: int) -> None:
    """CheckpointError if `config`, which is that of `file`, has other numbers than `layer` has in the files.

    Else the last of the experts could be missing unseen. What the config does not say is not checked.
    """
    inner = config.get(_INNER)
    for entries in (config, inner if isinstance(inner, dict) else {}):
        for keys, found, what in ((_NUM_EXPERTS, num_experts, "experts"), (_HIDDEN_SIZE, hidden_size, "inputs")):
            for key in keys:
                said = entries.get(key)
                if type(said) is int and said != found:
                    raise CheckpointError(file, f"`{key}` (={said}) must be {found}, the {what} that {layer!r} has")
