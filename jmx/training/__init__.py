"""Training: master weights of quantized experts, losses that balance routers, and runs that continue after a kill."""

import importlib
from typing import TYPE_CHECKING, Any

from jmx.engines.gradients import SAVED as GATE_UP
from jmx.qat import QAT, MasterExperts, rounded
from jmx.training.correction import updated_correction_bias
from jmx.training.finite import check_finite
from jmx.training.frozen import refuse_frozen
from jmx.training.losses import load_balancing_loss, router_z_loss, sequence_balance_loss
from jmx.training.text import Text

if TYPE_CHECKING:
    from jmx.models.exporting import export as export
    from jmx.training.language import bits_per_byte as bits_per_byte
    from jmx.training.language import in_dtype as in_dtype
    from jmx.training.language import next_token_losses as next_token_losses
    from jmx.training.language import unrounded as unrounded
    from jmx.training.run import Run as Run

__all__ = [
    "GATE_UP",
    "QAT",
    "MasterExperts",
    "Run",
    "Text",
    "bits_per_byte",
    "check_finite",
    "export",
    "in_dtype",
    "load_balancing_loss",
    "next_token_losses",
    "refuse_frozen",
    "rounded",
    "router_z_loss",
    "sequence_balance_loss",
    "unrounded",
    "updated_correction_bias",
]

# Imported when they are first used: they import models and Orbax, which the rest does without.
_OF_MODELS = {
    "jmx.models.exporting": ("export",),
    "jmx.training.language": ("bits_per_byte", "in_dtype", "next_token_losses", "unrounded"),
    "jmx.training.run": ("Run",),
}


def __getattr__(name: str) -> Any:
    for module, names in _OF_MODELS.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'jmx.training' has no attribute '{name}'")
