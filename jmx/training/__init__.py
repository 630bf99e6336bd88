"""Training a router: losses and updates that spread tokens over experts."""

from jmx.training.correction import updated_correction_bias
from jmx.training.losses import load_balancing_loss, router_z_loss, sequence_balance_loss

__all__ = ["load_balancing_loss", "router_z_loss", "sequence_balance_loss", "updated_correction_bias"]
