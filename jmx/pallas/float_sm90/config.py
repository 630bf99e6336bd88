"""Sizes of the tiles of the kernels, and how they are chosen."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil, erfc, sqrt
from typing import Any, NamedTuple

import jax.numpy as jnp

from jmx.pallas.float_sm90.blocks import FITTED
from jmx.pallas.sm90.config import SHARED_MEMORY, BaseConfig, check_stages
from jmx.pallas.sm90.tiles import TILE

ITEM_BYTES = 2  # of an element of operands
_BARRIER_BYTES = 2048  # an upper bound for barriers and alignment
_MAX_STAGES = 8
ROW_BYTES = 128  # of a row of a tile in shared memory, which is swizzled
BUFFERS = 2  # of results, of each warpgroup: one is written while the other is copied
_MANY_ROWS = 128  # of a group on average, from which blocks are fitted; measured: faster at 128, slower at 64


@dataclass(frozen=True)
class Config(BaseConfig):
    """The tile of a CTA: `warpgroups_m` warpgroups of 64 rows by `block_n` columns each.

    Args:
        block_n: columns, a multiple of 64.
        warpgroups_m: warpgroups below each other.
        num_stages: stages of the pipeline, of 64 steps of the sum each.
        section: column blocks that are computed for all rows before the next ones, so that weights stay in L2.
        staged: whether results go through shared memory, from where TMA copies them; `outer` has this.
    """

    block_n: int
    warpgroups_m: int
    num_stages: int
    section: int = 8
    staged: bool = False
    warpgroups_k: int = 1

    def __post_init__(self) -> None:
        self.check_sizes("num_stages", "section")
        if self.block_n % TILE:
            raise ValueError(f"`block_n` (={self.block_n}) must be a multiple of {TILE}")
        check_stages(self, self.num_stages * self.stage_bytes + self.staged_bytes + _BARRIER_BYTES)

    @property
    def block_m(self) -> int:
        """Rows of a tile."""
        return self.warpgroups_m * TILE

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of rows that `product` copies at once."""
        return tuple(width for width in (8, 16, 32, 64, 128, 192) if width <= self.block_m)

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage."""
        return (self.block_m + self.block_n) * TILE * ITEM_BYTES

    @property
    def staged_bytes(self) -> int:
        """Bytes of the buffers of results."""
        return self.num_warpgroups * BUFFERS * TILE * ROW_BYTES if self.staged else 0


@dataclass(frozen=True)
class FittedConfig(BaseConfig):
    """The tile of a CTA of `fitted`: up to `block_n` rows by 128 columns of the result for each of two warpgroups.

    Args:
        block_n: rows, a multiple of 16 from 144 on.
        num_stages: stages of the pipeline, of 64 steps of the sum each.
        piece_rows: rows that are copied at once to global memory, a multiple of 16.
        section: column blocks that are computed for all rows before the next ones, so that weights stay in L2.
    """

    block_n: int = 192
    num_stages: int = 3
    piece_rows: int = 96
    section: int = 8
    warpgroups_m: int = 2
    warpgroups_k: int = 1

    def __post_init__(self) -> None:
        self.check_sizes("num_stages", "section", "piece_rows")
        for name, least in (("block_n", 144), ("piece_rows", FITTED)):
            if (size := getattr(self, name)) % FITTED or size < least:
                raise ValueError(f"`{name}` (={size}) must be a multiple of {FITTED}, and at least {least}")
        results = self.num_warpgroups * BUFFERS * self.piece_rows * ROW_BYTES
        check_stages(self, self.num_stages * self.stage_bytes + results + _BARRIER_BYTES)

    @property
    def warpgroup_columns(self) -> int:
        """Columns of the result of a warpgroup."""
        return 2 * TILE

    @property
    def block_m(self) -> int:
        """Columns of the result of a tile."""
        return self.warpgroups_m * self.warpgroup_columns

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of rows that the kernel is compiled for."""
        return (64, 128, *range(144, self.block_n + 1, FITTED))

    @property
    def stage_bytes(self) -> int:
        """Bytes of one stage."""
        return (self.block_m + self.block_n) * TILE * ITEM_BYTES


def deepest(block_n: int, warpgroups_m: int, section: int = 8, *, staged: bool = False) -> Config:
    """The configuration with as many stages as fit."""
    one = Config(block_n, warpgroups_m, 1, section, staged)
    stages = min(_MAX_STAGES, (SHARED_MEMORY - one.staged_bytes - _BARRIER_BYTES) // one.stage_bytes)
    return dataclasses.replace(one, num_stages=stages)


def heuristic(columns: int, num_blocks: Callable[[int], float], num_cores: int, *, staged: bool = False) -> Config:
    """The configuration for a result of so many columns, a multiple of 64: 128 x 256, or 192 x 192 where that takes
    less.

    All CTAs take as many tiles as the one that has most, and a tile takes as long as it is large.

    Args:
        num_blocks: rows of a tile -> the blocks of rows that the result has.
        num_cores: SMs.
        staged: as of `Config`.
    """
    if columns <= 3 * TILE:
        return deepest(columns, 2, staged=staged)

    def cost(config: Config) -> float:
        tiles = num_blocks(config.block_m) * -(-columns // config.block_n)
        return ceil(tiles / num_cores) * config.block_m * config.block_n

    wide, narrow = deepest(256, 2, staged=staged), deepest(192, 3, staged=staged)
    return narrow if cost(narrow) < cost(wide) else wide


def blocks_of_rows(num_rows: int, num_groups: int, block_m: int) -> float:
    """Of how many blocks rows consist, on average, of groups that random routing fills."""
    mean = num_rows / num_groups
    ends = range(0, ceil(mean + 4 * sqrt(mean)), block_m)
    return num_groups * sum(erfc((end - mean) / sqrt(2 * mean)) / 2 for end in ends)


class Launch(NamedTuple):
    """What is static of a launch.

    Args:
        dtype: of the result; sums are float32.
        config: of the tiles; a `FittedConfig` for `fitted`.
        num_cores: SMs.
    """

    dtype: Any
    config: Config | FittedConfig
    num_cores: int

    @classmethod
    def of_rows(cls, num_rows: int, num_groups: int, columns: int, dtype: Any, num_cores: int) -> "Launch":
        """For a product with the result (`num_rows`, `columns`) of groups that begin at multiples of 8."""
        if jnp.dtype(dtype).itemsize == ITEM_BYTES and num_rows >= _MANY_ROWS * num_groups:
            return cls(dtype, FittedConfig(), num_cores)
        return cls(dtype, heuristic(columns, partial(blocks_of_rows, num_rows, num_groups), num_cores), num_cores)

    @classmethod
    def of_groups(cls, num_groups: int, rows: int, columns: int, dtype: Any, num_cores: int) -> "Launch":
        """For a result (`rows`, `columns`) of each group."""

        def blocks(block_m: int) -> int:
            return num_groups * -(-rows // block_m)

        staged = jnp.dtype(dtype).itemsize == ITEM_BYTES  # float32 took 1 to 8% longer so
        return cls(dtype, heuristic(columns, blocks, num_cores, staged=staged), num_cores)
