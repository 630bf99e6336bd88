#!/usr/bin/env python3
"""Draws the picture of docs/balancing.md: the load of each rank before and after balancing.

python benchmarks/balance_picture.py docs/images/balancing.svg
"""

import argparse
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from jmx import plot
from jmx.parallel import Placement, balance, rank_loads
from jmx.plot import style

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
    figure = plot.rank_load(loads())
    figure.axes[0].set_title(f"{TOKENS} tokens, top-{TOP_K} of {EXPERTS} experts by Zipf's law, on {RANKS} ranks")
    style.save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
