"""What can be tuned of the kernel `mosaic_sm90_fp8_kernel`, what it costs in shared memory, and what is tried."""

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

from jmx.pallas.mosaic_sm90_config import SHARED_MEMORY

ROW_BYTES = 128  # of a row in a stage: 128 columns of e4m3
MAX_STAGES = 16
MAX_UNITS = 4  # 512 columns, for which sums of some 14 bits suffice
MAX_BLOCK_N = 256  # three sums of 128 columns: registers of two warpgroups do not hold more
MAX_WIDTH = 128  # of a product
REGISTERS = 232  # of a computing thread, where there are one or two warpgroups of them
_STAGED_BYTES = 256  # of a row of a tile's results, at most: 64 in float32
_STAGED_OF_LARGE = 32  # rows of results, where stages leave little room
_BARRIER_BYTES = 2048


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
        if self.block_n % self._step:
            raise ValueError(f"`block_n` (={self.block_n}) must be a multiple of {self._step} above {MAX_WIDTH}")

    @property
    def _step(self) -> int:
        return 8 if self.block_n <= MAX_WIDTH else 16

    @property
    def staged(self) -> int:
        """Rows of results that a warpgroup writes to shared memory at a time, on their way to global memory."""
        return self.block_n if self.block_n <= MAX_WIDTH else _STAGED_OF_LARGE

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of rows that the kernel is compiled for: a block takes the least that holds its own.

        All up to 64. Blocks that may be larger are mostly halves and more of `block_n`, as an expert's rows are cut
        into near-equal blocks. So there, what is smaller is stepped over, which saves compilation.
        """
        if self.block_n <= 64:
            return tuple(range(self._step, self.block_n + 1, self._step))
        half = self.block_n // 2 // self._step * self._step
        return (*range(32, half - 8, 32), *range(half, self.block_n, self._step), self.block_n)

    @property
    def scales_n(self) -> int:
        """Scales of a stage's rows, with padding: stages must begin at multiples of 128 bytes."""
        return -(-self.block_n // 32) * 32

    def shared_memory(self, unit_bytes: int) -> int:
        """Bytes of shared memory that the kernel uses, where a unit of the weight has so many."""
        rows = self.block_n * ROW_BYTES + 4 * self.scales_n
        staged = self.warpgroups_m * self.staged * _STAGED_BYTES
        return self.num_stages * (self.warpgroups_m * unit_bytes + rows) + staged + _BARRIER_BYTES

    def check(self, unit_bytes: int) -> None:
        """Raises ValueError unless shared memory holds the stages."""
        needed = self.shared_memory(unit_bytes)
        if needed > SHARED_MEMORY:
            raise ValueError(
                f"`num_stages` (={self.num_stages}) must be such that {SHARED_MEMORY} bytes of shared memory hold "
                f"them, and {self!r} needs {needed}"
            )


def parts_of(width: int) -> int:
    """How many products of equally many rows a block of so many is computed in."""
    return -(-width // MAX_WIDTH)


def deepest(unit_bytes: int, block_n: int, warpgroups_m: int, units: int) -> Config:
    """The configuration with as many stages as fit. ValueError where not even `units` of them do."""
    least = Config(block_n, warpgroups_m, units, units)
    least.check(unit_bytes)
    more = replace(least, num_stages=units + 1).shared_memory(unit_bytes) - least.shared_memory(unit_bytes)
    left = SHARED_MEMORY - least.shared_memory(unit_bytes)
    return replace(least, num_stages=min(MAX_STAGES, units + left // more))


class Shape(NamedTuple):
    """What a configuration goes by.

    Args:
        unit_bytes: of a unit of the weight.
        decoded: whether its elements become e4m3 in registers.
        by_block: whether scales, of weights or inputs, belong to 128 columns.
        num_tokens, top_k, num_experts: of the layer.
    """

    unit_bytes: int
    decoded: bool
    by_block: bool
    num_tokens: int
    top_k: int
    num_experts: int


def heuristic(shape: Shape) -> Config:
    """A configuration for shapes that nobody tuned, from the rows that an expert gets on average."""
    rows = -(-shape.num_tokens * shape.top_k // shape.num_experts)
    block_n = next((n for n in (8, 16, 32, 64, MAX_WIDTH) if 2 * rows <= n), MAX_BLOCK_N)
    if shape.by_block:  # so much is scaled and added up that it has to run beside the products
        block_n = min(block_n, MAX_WIDTH)
    return deepest(shape.unit_bytes, block_n, 2, 1 if shape.decoded and block_n > MAX_WIDTH else 2)


def candidates(shape: Shape) -> list[Config]:
    """What `jmx tune` tries, the heuristic first."""
    few = itertools.product((8, 16, 32, 64, 96, MAX_WIDTH), (2, 1), (1, 2, 3, 4))
    units = (1,) if shape.by_block else (1, 2)  # scaled beside products, sums of two parts do not fit registers
    many = itertools.product((192, 208, 224, MAX_BLOCK_N), (2,), units)
    cuts = (deepest(shape.unit_bytes, *cut) for cut in (*few, *many))
    return list(dict.fromkeys((heuristic(shape), *cuts)))
