#!/usr/bin/env python3
"""Draws the picture of docs/balancing.md: the load of each rank before and after balancing.

python benchmarks/balance_picture.py docs/images/balancing.svg
"""

import argparse
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from jmx.parallel import Placement, balance, imbalance, rank_loads
from jmx.perf.roofline import require_matplotlib

EXPERTS, RANKS, SPARE = 128, 8, 8
TOKENS, TOP_K = 8192, 4


def main() -> int:
    """Writes the picture: SVG or PNG, by the name of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", help="file to write: .svg or .png")
    draw(parser.parse_args().picture)
    return 0


def counts() -> np.ndarray:
    """Tokens of each expert by Zipf's law, the n-th most popular one with 1 / n of the first's, in random order."""
    popularity = 1 / np.arange(1, EXPERTS + 1)
    return np.random.default_rng(0).permutation(popularity / popularity.sum()) * TOKENS * TOP_K


def loads() -> dict[str, np.ndarray]:
    """Loads of ranks by the name of the placement."""
    placements = {
        "in order": Placement.identity(EXPERTS, RANKS),
        "balanced": balance(counts(), RANKS),
        f"balanced, {SPARE} spare experts": balance(counts(), RANKS, SPARE),
    }
    return {name: rank_loads(counts(), placement) for name, placement in placements.items()}


def draw(path: str) -> None:
    """Writes the picture to `path`; an SVG is the same bytes for the same matplotlib."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    colors = ("#9ca3af", "#1d4ed8", "#c2410c")
    with matplotlib.rc_context({"svg.hashsalt": "jmx", "font.size": 11, "svg.fonttype": "path"}):
        figure = Figure(figsize=(8, 3.6), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        ranks, width = np.arange(RANKS), 0.27
        for i, ((name, by_rank), color) in enumerate(zip(loads().items(), colors, strict=True)):
            label = f"{name}: fullest {imbalance(by_rank):.2f} x average"
            axes.bar(ranks + (i - 1) * width, by_rank, width, color=color, label=label)
        axes.axhline(TOKENS * TOP_K / RANKS, color="black", linewidth=1.2)
        axes.set_ylim(0, 1.4 * max(by_rank.max() for by_rank in loads().values()))  # with space for the legend
        axes.set_xticks(ranks, [str(rank) for rank in ranks])
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.set_title(f"{TOKENS} tokens, top-{TOP_K} of {EXPERTS} experts by Zipf's law, on {RANKS} ranks")
        axes.set_xlabel("rank")
        axes.set_ylabel(f"load: tokens times {TOP_K}")
        axes.legend(frameon=False)
        axes.grid(visible=True, axis="y", linewidth=0.3)
        axes.set_axisbelow(True)
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.endswith(".svg") else None)


if __name__ == "__main__":
    sys.exit(main())
