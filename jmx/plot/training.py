"""A picture of a training: the loss by step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jmx.plot import style
from jmx.util.checks import check_finite

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def training_loss(curve: Sequence[tuple[int, float]], *, bytes_per_token: float | None = None) -> "Figure":
    """The loss by step, in bits per byte, or in nats a token.

    Args:
        curve: numbers of steps and losses in nats a token, such as `jmx.training.Run.train` returns; at least one.
        bytes_per_token: of the text, above 0; None: the unit is nats a token.

    Raises:
        TypeError, ValueError: arguments that are not as above.
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        points = np.asarray(curve, np.float64)
    except (TypeError, ValueError):
        points = np.asarray(np.nan)
    if len(points.shape) != 2 or points.shape[1:] != (2,) or not points.size:
        raise ValueError(f"`curve` (={curve!r}) must be pairs of a step and a loss, at least one")
    steps, losses = points.T
    unit = "nats a token"
    if bytes_per_token is not None:
        if check_finite("bytes_per_token", bytes_per_token) <= 0:
            raise ValueError(f"`bytes_per_token` (={bytes_per_token}) must be above 0")
        losses, unit = losses / np.log(2) / bytes_per_token, "bits per byte"
    with style.settings():
        figure, axes = style.figure(6, 3)
        axes.plot(steps, losses, color=style.OURS)
        axes.set(xlabel="step", ylabel=unit, title="Training loss")
    return figure
