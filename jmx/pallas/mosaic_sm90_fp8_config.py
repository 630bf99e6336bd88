"""What can be tuned of the kernel `mosaic_sm90_fp8_kernel`, what it costs in shared memory, and what is tried."""

import itertools
from dataclasses import dataclass, replace

from jmx.pallas.mosaic_sm90_config import SHARED_MEMORY

ROW_BYTES = 128  # of a row in a stage: 128 columns of e4m3
MAX_STAGES = 16
MAX_UNITS = 4  # 512 columns, for which sums of some 14 bits suffice
MAX_BLOCK_N = 128  # two sums a row for every column: more, and registers of two warpgroups do not hold them
REGISTERS = 232  # of a computing thread, where there are one or two warpgroups of them
_BARRIER_BYTES = 2048
_MUCH_PADDING = 8  # a part of so many


@dataclass(frozen=True)
class Config:
    """A configuration.

    Args:
        block_n: rows of a block, at most; a multiple of 8.
        warpgroups_m: warpgroups that compute, each on 64 rows of the weight of its own.
        units: stages that a warpgroup takes at a time: sums of so many are the tensor cores' own, with fewer bits.
        num_stages: stages of the ring, of 128 columns each.
    """

    block_n: int
    warpgroups_m: int
    units: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.block_n % 8 or not 8 <= self.block_n <= MAX_BLOCK_N:
            raise ValueError(f"`block_n` (={self.block_n}) must be a multiple of 8 in 8..{MAX_BLOCK_N}")
        if self.warpgroups_m not in (1, 2):
            raise ValueError(f"`warpgroups_m` (={self.warpgroups_m}) must be 1 or 2")
        if not 1 <= self.units <= MAX_UNITS:
            raise ValueError(f"`units` (={self.units}) must be in 1..{MAX_UNITS}")
        if not self.units <= self.num_stages <= MAX_STAGES:
            raise ValueError(f"`num_stages` (={self.num_stages}) must be in {self.units}..{MAX_STAGES}")

    @property
    def stage_tiles(self) -> int:
        """Units along the columns in one stage: what a `Schedule` asks for."""
        return 1

    @property
    def scales_n(self) -> int:
        """Scales of a stage's rows, with padding: stages must begin at multiples of 128 bytes."""
        return -(-self.block_n // 32) * 32

    def shared_memory(self, unit_bytes: int) -> int:
        """Bytes of shared memory that the kernel uses, where a unit of the weight has so many."""
        rows = self.block_n * ROW_BYTES + 4 * self.scales_n
        return self.num_stages * (self.warpgroups_m * unit_bytes + rows) + _BARRIER_BYTES

    def check(self, unit_bytes: int) -> None:
        """Raises ValueError unless shared memory holds the stages."""
        needed = self.shared_memory(unit_bytes)
        if needed > SHARED_MEMORY:
            raise ValueError(
                f"`num_stages` (={self.num_stages}) must be such that {SHARED_MEMORY} bytes of shared memory hold "
                f"them, and {self!r} needs {needed}"
            )


def deepest(unit_bytes: int, block_n: int, warpgroups_m: int, units: int) -> Config:
    """The configuration with as many stages as fit. ValueError where not even `units` of them do."""
    least = Config(block_n, warpgroups_m, units, units)
    least.check(unit_bytes)
    more = replace(least, num_stages=units + 1).shared_memory(unit_bytes) - least.shared_memory(unit_bytes)
    left = SHARED_MEMORY - least.shared_memory(unit_bytes)
    return replace(least, num_stages=min(MAX_STAGES, units + left // more))


def units_at_a_time(columns: tuple[int, int]) -> int:
    """Two or three, whichever needs less padding of both products' columns; one where that is much for both."""
    whole = [-(-size // ROW_BYTES) for size in columns]
    padding = {units: sum(-size % units for size in whole) for units in (3, 2)}
    best = min(padding, key=padding.__getitem__)
    return best if _MUCH_PADDING * padding[best] <= sum(whole) else 1


def heuristic(unit_bytes: int, columns: tuple[int, int], num_tokens: int, top_k: int, num_experts: int) -> Config:
    """A configuration for shapes that nobody tuned, from the rows that an expert gets on average."""
    rows = -(-num_tokens * top_k // num_experts)
    block_n = next((n for n in (8, 16, 32, 64) if 2 * rows <= n), MAX_BLOCK_N)
    return deepest(unit_bytes, block_n, 2, units_at_a_time(columns))


def candidates(
    unit_bytes: int, columns: tuple[int, int], num_tokens: int, top_k: int, num_experts: int
) -> list[Config]:
    """What `jmx tune` tries, the heuristic first."""
    first = heuristic(unit_bytes, columns, num_tokens, top_k, num_experts)
    cuts = itertools.product((8, 16, 32, 64, 96, MAX_BLOCK_N), (2, 1), (1, 2, 3, 4))
    return list(dict.fromkeys((first, *(deepest(unit_bytes, *cut) for cut in cuts))))
