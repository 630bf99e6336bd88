#!/usr/bin/env python3
"""The relative error of a product by input format: quantized inputs against bfloat16 ones.

    python benchmarks/input_error.py --tokens 256 --columns 4096 --rows 512 --draws 9

Activations are drawn normal or from Student's t with 3 degrees of freedom, whose tails are heavy, and cast to bfloat16;
weights are normal. The error is ||x' W^T - x W^T|| / ||x W^T|| in float64, where x' is x quantized and dequantized.
Each number is the median over draws. Static scales are calibrated as tools do: the largest magnitude among as many
other tokens becomes the largest number of the format. `bfloat16` is the error of the cast itself, against float32.
"""

import argparse
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax.numpy as jnp
import numpy as np

from jmx.numerics.input_formats import INPUT_FORMATS, InputFormat, dequantize, quantize

DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "student-t, 3": lambda rng, shape: rng.standard_t(3, shape),
}
UNROUNDED = "bfloat16"


def main(argv: Sequence[str]) -> int:
    """Prints the table of `argv`, as Markdown."""
    arguments = _parse(argv)
    print("| inputs |", " | ".join(DISTRIBUTIONS), "|")
    print("|---" * (1 + len(DISTRIBUTIONS)) + "|")
    columns = [measure(name, arguments) for name in DISTRIBUTIONS]
    for name in (UNROUNDED, *INPUT_FORMATS):
        print(f"| `{name}` |", " | ".join(f"{100 * column[name]:.3g}%" for column in columns), "|")
    return 0


def measure(distribution: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Each format's relative error, the median over draws."""
    rng = np.random.default_rng(arguments.seed)
    found: dict[str, list[float]] = {name: [] for name in (UNROUNDED, *INPUT_FORMATS)}
    for _ in range(arguments.draws):
        drawn, calibration = (
            DISTRIBUTIONS[distribution](rng, (arguments.tokens, arguments.columns)).astype(np.float32) for _ in range(2)
        )
        weights = rng.standard_normal((arguments.rows, arguments.columns))
        x = drawn.astype(jnp.bfloat16)
        product = x.astype(np.float64) @ weights.T
        for name, format in INPUT_FORMATS.items():
            found[name].append(_error(_rounded(x, calibration, format) @ weights.T, product))
        found[UNROUNDED].append(_error(product, drawn.astype(np.float64) @ weights.T))
    return {name: statistics.median(errors) for name, errors in found.items()}


def _rounded(x: np.ndarray, calibration: np.ndarray, format: InputFormat) -> np.ndarray:
    static = np.float32(np.abs(calibration).max() / format.largest) if format.static else None
    return np.asarray(dequantize(quantize(x, format, static), format)).astype(np.float64)


def _error(product: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(product - expected) / np.linalg.norm(expected))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="rows of x")
    parser.add_argument("--columns", type=int, default=4096, help="the contracted axis, in whole blocks of each format")
    parser.add_argument("--rows", type=int, default=512, help="rows of the weight")
    parser.add_argument("--draws", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
