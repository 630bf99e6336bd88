"""YaRN: how a config stretches rotary positions to a context longer than that of the training before."""

import math
from dataclasses import dataclass
from typing import Any

from jmx.checkpoint.model_configs.decoder_entries import DecoderEntries
from jmx.checkpoint.shards import CheckpointError

# Defaults of keys that a config may lack, from DeepSeek's published code and transformers.
DEFAULTS: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
NULLS: dict[str, Any] = {"truncate": False}  # as transformers reads it


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


def read_yarn(entries: DecoderEntries) -> Yarn | None:
    """The constants in a config; None if its rotary positions are plain.

    Raises:
        CheckpointError: positions of another type; a constant is missing, has a value of another type or out of range;
            `mscale` without `mscale_all_dim`, or the reverse, which DeepSeek's code and transformers read differently;
            a stated `attention_factor`; two objects that differ.
    """
    found = [_parse(rope) for rope in entries.rope_objects().values()]
    if len({*found}) > 1:
        raise CheckpointError(entries.file, f"`rope_scaling` and `rope_parameters` must agree, but are {found}")
    return found[0] if found else None


def _parse(rope: DecoderEntries) -> Yarn | None:
    if "yarn" not in (rope.entries.get("rope_type"), rope.entries.get("type")):
        return None
    rope.defaults, rope.nulls = DEFAULTS, NULLS
    rope.one_of("attention_factor", (None,), None)
    names = "mscale", "mscale_all_dim"
    given = {name: rope.number(name) for name in names if not rope.is_absent(name)}
    if len(given) == 1:
        raise CheckpointError(rope.file, f"`{rope.place}` must have both of {names}, or neither, but has {given}")
    return Yarn(
        rope.number("factor"),
        rope.size("original_max_position_embeddings"),
        rope.number("beta_fast"),
        rope.number("beta_slow"),
        rope.flag("truncate"),
        **given,
    )
