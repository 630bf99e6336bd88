"""Training: master weights of quantized experts, losses that balance routers, and optimizers without frozen weights."""

from typing import TYPE_CHECKING, Any

from jmx.engines.gradients import SAVED as GATE_UP
from jmx.qat import QAT, MasterExperts, rounded
from jmx.training.correction import updated_correction_bias
from jmx.training.finite import check_finite
from jmx.training.frozen import refuse_frozen
from jmx.training.losses import load_balancing_loss, router_z_loss, sequence_balance_loss

if TYPE_CHECKING:
    from jmx.models.exporting import export as export

__all__ = [
    "GATE_UP",
    "QAT",
    "MasterExperts",
    "check_finite",
    "export",
    "load_balancing_loss",
    "refuse_frozen",
    "rounded",
    "router_z_loss",
    "sequence_balance_loss",
    "updated_correction_bias",
]


def __getattr__(name: str) -> Any:
    """`export`, imported when first used: it imports models and Orbax, which the rest does without."""
    if name == "export":
        from jmx.models.exporting import export

        return export
    raise AttributeError(f"module 'jmx.training' has no attribute '{name}'")
