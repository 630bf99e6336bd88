"""Names of tensors in PEFT's files, and the forms in which they hold the adapters of experts.

Fused weights (E, ., .), those of `target_parameters`, have one pair of matrices for all experts: A (E r, K), the ranks
of an expert side by side, and B (N, r E), the experts of a rank side by side. Where both weights of a module have an
adapter, one wraps the other, whose name then has `base_layer`: which is which, shapes tell. Experts that are modules of
their own have a pair (r, K) and (N, r) for each projection.
"""

import re
from typing import NamedTuple

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<stem>(?:\w+\.)*?layers\.(?P<layer>\d+)\.(?:\w+\.)*experts)"
    r"(?:\.(?P<inner>(?:base_layer)|(?:(?P<expert>\d+)\.(?P<projection>\w+))))?\.lora_(?P<matrix>[AB])\.weight"
)
# The adapters of projections, by their names in models.
PROJECTIONS = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
MODULES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
PARAMETERS = {"gate_up": "gate_up_proj", "down": "down_proj"}


class Place(NamedTuple):
    """What a tensor is of.

    Args:
        layer: its number in the model.
        module: the name of the module that was wrapped, without PEFT's prefix.
        expert, projection: of a module for one expert; None for fused weights.
        wrapped: whether it is of the weight that is wrapped first.
        matrix: "a" or "b".
    """

    layer: int
    module: str
    expert: int | None
    projection: str | None
    wrapped: bool
    matrix: str


def parse(name: str) -> Place | None:
    """Where the tensor of that name belongs; None if it is not of an adapter of experts."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    expert, projection, stem = found["expert"], found["projection"], found["stem"]
    module = stem if expert is None else f"{stem}.{expert}.{projection}"
    if projection is not None and projection not in PROJECTIONS:
        return None
    number = None if expert is None else int(expert)
    wrapped = found["inner"] == "base_layer"
    return Place(int(found["layer"]), module, number, projection, wrapped, found["matrix"].lower())
