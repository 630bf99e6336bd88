"""Pictures of loads: the tokens of each expert by layer, and those of each rank under placements of experts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jmx.parallel.loads import Comparison, check_counts, imbalance, layer_counts
from jmx.plot import style
from jmx.util.checks import check_instance
from jmx.util.typing import AnyArray, Float, Num

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def expert_load(counts: Num[AnyArray, "*layers E"] | Mapping[Any, Any]) -> "Figure":
    """A map of layers by experts: the tokens of an expert over those of the layer's average expert.

    Args:
        counts: tokens of each expert, (L, E), or (E,) of one layer, as `jmx.token_counts` counts them; finite, 0 or
            more. Or the intermediates of a model, as `jmx.parallel.layer_counts` takes them.

    Raises:
        TypeError, ValueError: `counts` that are no such numbers.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if isinstance(counts, Mapping):
        counts = layer_counts(counts)
    loads = np.atleast_2d(check_counts(counts))
    means = loads.mean(-1, keepdims=True)
    relative = loads / np.where(means > 0, means, 1)
    layers, experts = loads.shape
    with style.settings():
        figure, axes = style.figure(8, min(5, 1.6 + 0.25 * layers))
        image = axes.imshow(relative, cmap="magma_r", vmin=0, aspect="auto", interpolation="nearest")
        axes.set_xlabel("expert")
        axes.set_ylabel("layer")
        axes.set_yticks(np.unique(np.linspace(0, layers - 1, min(layers, 12)).astype(int)))
        axes.set_title(f"Tokens of {experts} experts: at most {relative.max():.2f} x the average of a layer")
        figure.colorbar(image, label="over the average")
    return figure


def rank_load(loads: Comparison | Mapping[str, Float[AnyArray, "*layers ranks"]]) -> "Figure":
    """Bars of the load of each rank, all layers together, under placements: two of a comparison, or those of a mapping.

    Args:
        loads: what `jmx.parallel.compare` returned; or the name of each placement, at most six, and what
            `jmx.parallel.rank_loads` returned for it, all of the same ranks.

    Raises:
        TypeError, ValueError: `loads` that are no such loads.
        ModuleNotFoundError: matplotlib is not installed.
    """
    check_instance("loads", loads, (Comparison, Mapping), "a jmx.parallel.Comparison or a mapping")
    if isinstance(loads, Comparison):
        loads = {"before": loads.before, "after": loads.after}
    by_name = {name: check_counts(value) for name, value in loads.items()}
    shapes = {value.shape for value in by_name.values()}
    if not 1 <= len(by_name) <= len(style.COLORS) or len(shapes) != 1:
        raise ValueError(f"`loads` (of shapes {sorted(shapes)}) must be 1 to {len(style.COLORS)} of equal shapes")
    with style.settings():
        figure, axes = style.figure(8, 3.6)
        _bars(axes, by_name)
    return figure


def _bars(axes: Any, by_name: Mapping[str, Float[np.ndarray, "*layers ranks"]]) -> None:
    """A group of bars for each rank, and a line at the average load."""
    totals = {name: value.reshape(-1, value.shape[-1]).sum(0) for name, value in by_name.items()}
    ranks, width = np.arange(len(next(iter(totals.values())))), 0.8 / len(totals)
    for i, (name, total) in enumerate(totals.items()):
        label = f"{name}: fullest {imbalance(by_name[name]):.2f} x average"
        axes.bar(ranks + (i - (len(totals) - 1) / 2) * width, total, width, color=style.COLORS[i], label=label)
    axes.axhline(np.mean([total.mean() for total in totals.values()]), color="black", linewidth=1.2)
    axes.set_ylim(0, 1.4 * max(1, *(total.max() for total in totals.values())))  # with space for the legend
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.set_xlabel("rank")
    axes.set_ylabel("load: assignments")
    axes.grid(visible=True, axis="y", linewidth=0.3)
    axes.legend(frameon=False)
