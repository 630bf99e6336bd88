"""What `jmx bench` measures and how: the arguments that runs on one device and over a mesh share."""

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jmx.experts import check_sizes
from jmx.numerics.formats import FORMATS
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.perf.roofline import Report
from jmx.perf.shapes import MODELS, ROUTINGS, Shape, split_formats
from jmx.util.checks import check_int, check_one_of

SEED_BITS = 32  # jax.random.key silently drops higher ones, unless jax computes in 64 bits


@dataclass(frozen=True)
class Settings:
    """What is measured, and how.

    Args:
        model: a key of `MODELS`.
        tokens: token counts.
        formats: weight formats, or pairs "WEIGHTS:INPUTS" with an input format, one after the other; None: that of the
            model's shape only.
        routing: a key of `ROUTINGS`.
        layers: different layers in one call; None: a number for each token count, or for the mesh.
        repeats: samples per median.
        seed: of weights, tokens and logits, below 2^32; None draws a new one, which the report names.
        progress: called with a line for every limit and every row.
        so_far: called with the rows measured so far, as soon as there are more.

    Raises:
        ValueError, TypeError: an unknown name, a number that is not an integer of at least 1, or a seed out of range.
    """

    model: str
    tokens: Sequence[int]
    formats: Sequence[str] | None = None
    routing: str = "uniform"
    layers: int | None = None
    repeats: int = 5
    seed: int | None = None
    progress: Callable[[str], None] = lambda line: None
    so_far: Callable[[Report], None] = lambda report: None

    def __post_init__(self) -> None:
        check_one_of("model", self.model, MODELS)
        check_one_of("routing", self.routing, ROUTINGS)
        for pair in self.formats or ():
            self._check_pair(pair)
        if not self.tokens:
            raise ValueError("`tokens` must name at least one token count")
        counts = [("tokens", count) for count in self.tokens]
        for name, value in [("layers", self.layers), ("repeats", self.repeats), *counts]:
            if value is not None:
                check_int(name, value, least=1)
        if self.seed is None:
            object.__setattr__(self, "seed", secrets.randbits(SEED_BITS))
        elif not 0 <= self.seed < 1 << SEED_BITS:
            raise ValueError(f"`seed` (={self.seed}) must be in 0..{(1 << SEED_BITS) - 1}")

    @property
    def drawn_seed(self) -> int:
        """`seed`, which is drawn if None was given."""
        assert self.seed is not None
        return self.seed

    def _check_pair(self, pair: str) -> None:
        weights, inputs = split_formats(pair)
        if weights not in FORMATS or inputs not in (None, *INPUT_FORMATS):
            raise ValueError(
                f"`formats` (={pair!r}) must be WEIGHTS or WEIGHTS:INPUTS, of {[*FORMATS]} and {[*INPUT_FORMATS]}"
            )
        shape = MODELS[self.model]
        sizes = shape.num_experts, shape.hidden_size, shape.intermediate_size
        try:
            check_sizes(*sizes, FORMATS[weights], inputs)
        except ValueError as e:
            raise ValueError(f"`formats` (={pair!r}) must go with `model` (={self.model!r}): {e}") from None

    def as_dict(self, shape: Shape) -> dict[str, Any]:
        """For the report: all but the functions, and the shape that was measured."""
        names = ("routing", "formats", "layers", "repeats", "seed")
        settings = {"model": self.model, "tokens": [*self.tokens]} | {name: getattr(self, name) for name in names}
        described = {"activation": str(shape.activation), "method": str(shape.method)}
        return settings | {"shape": dataclasses.asdict(shape) | described}
