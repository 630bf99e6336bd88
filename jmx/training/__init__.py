"""Training: master weights of quantized experts, losses and updates that spread tokens over experts, and optimizers
that leave frozen weights out."""

from jmx.qat import QAT, MasterExperts, rounded
from jmx.training.correction import updated_correction_bias
from jmx.training.frozen import refuse_frozen
from jmx.training.losses import load_balancing_loss, router_z_loss, sequence_balance_loss

__all__ = [
    "QAT",
    "MasterExperts",
    "load_balancing_loss",
    "refuse_frozen",
    "rounded",
    "router_z_loss",
    "sequence_balance_loss",
    "updated_correction_bias",
]
