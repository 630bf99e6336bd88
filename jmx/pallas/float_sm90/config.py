"""Sizes of the tiles of both kernels, and how they are chosen."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from jmx.pallas.sm90.config import SHARED_MEMORY, BaseConfig, check_stages
from jmx.pallas.sm90.tiles import TILE

ITEM_BYTES = 2  # of an element of operands
_BARRIER_BYTES = 2048  # an upper bound for barriers and alignment
_MAX_STAGES = 8


@dataclass(frozen=True)
class Config(BaseConfig):
    """The tile of a CTA: `warpgroups_m` warpgroups of 64 rows by `block_n` columns each.

    Args:
        block_n: columns, a multiple of 64.
        warpgroups_m: warpgroups below each other.
        num_stages: stages of the pipeline, of 64 steps of the sum each.
        section: column blocks that are computed for all rows before the next ones, so that weights stay in L2.
    """

    block_n: int
    warpgroups_m: int
    num_stages: int
    section: int = 8
    warpgroups_k: int = 1

    def __post_init__(self) -> None:
        self.check_sizes("num_stages", "section")
        if self.block_n % TILE:
            raise ValueError(f"`block_n` (={self.block_n}) must be a multiple of {TILE}")
        check_stages(self, self.num_stages * self.stage_bytes + _BARRIER_BYTES)

    @property
    def block_m(self) -> int:
        """Rows of a tile."""
        return self.warpgroups_m * TILE

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage."""
        return (self.block_m + self.block_n) * TILE * ITEM_BYTES


def deepest(block_n: int, warpgroups_m: int, section: int = 8) -> Config:
    """The configuration with as many stages as fit."""
    one = Config(block_n, warpgroups_m, 1, section)
    return Config(block_n, warpgroups_m, min(_MAX_STAGES, (SHARED_MEMORY - _BARRIER_BYTES) // one.stage_bytes), section)


def heuristic(columns: int) -> Config:
    """The configuration for a result of so many columns, a multiple of 64: 128 x 256, or 192 x 192 where that leaves
    less of the last tile empty."""
    if columns <= 3 * TILE:
        return deepest(columns, 2)
    wide, narrow = (-(-columns // n) * n for n in (256, 192))
    return deepest(192, 3) if 1.04 * narrow < wide else deepest(256, 2)


class Launch(NamedTuple):
    """What is static of a launch.

    Args:
        dtype: of the result; sums are float32.
        config: of the tiles.
        num_cores: SMs.
    """

    dtype: Any
    config: Config
    num_cores: int

    @classmethod
    def of(cls, columns: int, dtype: Any, num_cores: int) -> "Launch":
        """With the configuration that is chosen for `columns` of the result."""
        return cls(dtype, heuristic(columns), num_cores)
