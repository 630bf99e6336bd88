"""YaRN: how a config stretches rotary positions to a context longer than that of the training before."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Yarn:
    """The constants of YaRN (Peng et al., 2023, arXiv:2309.00071), and DeepSeek's factors of scores.

    Args:
        factor: how many times as long the context became.
        original_length: tokens of the context before.
        beta_fast, beta_slow: rotations within `original_length` that bound the ramp between kept and divided
            frequencies.
        truncate: whether the ramp's ends are rounded to whole channels.
        mscale, mscale_all_dim: multiply the logarithm in YaRN's factor of scores, of rotated channels and of all. By
            default the former have that of the paper, and the others none.
    """

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def concentration(self) -> float:
        """What cosines and sines are multiplied by, relative to `score_factor`."""
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def score_factor(self) -> float:
        """What all scores are multiplied by."""
        return self._magnitude(self.mscale_all_dim) ** 2

    def _magnitude(self, mscale: float) -> float:
        """0.1 mscale ln(factor) + 1, as `yarn_get_mscale` of DeepSeek's published code; 1 for no longer context."""
        return 0.1 * mscale * math.log(max(self.factor, 1)) + 1
