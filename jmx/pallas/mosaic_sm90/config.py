"""The tunable sizes of the kernel, the shared memory that they take, the heuristic, and the candidates for tuning."""

from dataclasses import dataclass, replace
from math import sqrt

from jmx.pallas.sm90.config import MAX_BLOCK_N, SHARED_MEMORY, BaseConfig, check_stages, widths
from jmx.pallas.sm90.tiles import TILE

_LARGE_TILE = 3072  # bytes: between those of 4 bits and those of 8
_BARRIER_BYTES = 2048  # an upper bound for barriers, alignment and unused buffers
_BY_EIGHT = 64  # rows of a block, above which the kernel is compiled for half as many widths
# Blocks of at least `_LARGE_BLOCK` rows are also compiled for all multiples of 8 above three quarters of their size,
# unless the kernel then has more than `_MOST_WIDTHS` widths: experts with more rows than a block has are divided into
# blocks of about that size.
_LARGE_BLOCK, _MOST_WIDTHS = 128, 9
_LEAST_OF_FOUR = 40  # rows of a block, from which stages of four tiles were faster than of three
MAX_STAGES = 32
_REGISTERS = 64 * 1024  # of an SM
_OTHER_REGISTERS = 30  # of a thread, which ptxas needs beside wgmma's accumulator
# Assignments up to which warpgroups share a tile's columns, and up to which `down` is also split along K.
_MOST_SHARED, _MOST_SPLIT = 24, 8
_MOST_OF_FIVE = 80  # rows of a block beside which five warpgroups have registers to dequantize every format


@dataclass(frozen=True)
class Config(BaseConfig):
    """How a layer is divided: tokens into blocks of rows of one expert, and both products into tiles.

    Args:
        block_n: the maximal number of rows of a block.
        warpgroups_m: warpgroups next to each other along the weight's rows, 64 each.
        warpgroups_k: warpgroups that share the columns of the same rows, and add their sums at the end.
        k_tiles: tiles of 64 columns that a warpgroup takes from one stage.
        num_stages: stages of the pipeline from global to shared memory.
        split_k: parts of `down`'s columns that are computed separately and added at the end.
    """

    block_n: int
    warpgroups_m: int
    warpgroups_k: int
    k_tiles: int
    num_stages: int
    split_k: int = 1

    def __post_init__(self) -> None:
        self.check_sizes("k_tiles", "num_stages", "split_k")
        if self.num_stages > MAX_STAGES:
            raise ValueError(f"`num_stages` (={self.num_stages}) must be at most {MAX_STAGES}")
        if self.block_n > self.max_block_n:
            raise ValueError(
                f"`block_n` (={self.block_n}) must be at most {self.max_block_n}, for which "
                f"{self.num_warpgroups} warpgroups have registers"
            )

    @property
    def stage_tiles(self) -> int:
        """Tiles along the columns in one stage."""
        return self.warpgroups_k * self.k_tiles

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of rows that the kernel is compiled for."""
        if self.block_n <= _BY_EIGHT:
            return widths(self.block_n, 8)
        found = widths(self.block_n, 16)
        large = range(self.block_n, 3 * self.block_n // 4, -8) if self.block_n >= _LARGE_BLOCK else ()
        every = tuple(sorted({*found, *large}))
        return every if len(every) <= _MOST_WIDTHS else found

    @property
    def max_block_n(self) -> int:
        """The largest `block_n` whose accumulator fits the registers that each thread is launched with."""
        launched = _REGISTERS // (128 * (self.num_warpgroups + 1)) // 8 * 8
        return min(MAX_BLOCK_N, 2 * (launched - _OTHER_REGISTERS) // 8 * 8)

    def check(self, tile_bytes: int, down_tiles: int) -> None:
        """Raises ValueError unless it supports tiles of `tile_bytes` and rows of `down` of `down_tiles` tiles."""
        check_stages(self, self.shared_memory(tile_bytes))
        if self.split_k > 1 and self.stage_tiles == down_tiles == 1:
            # For a row of one tile Pallas makes TMA read that tile in place of the padding after it.
            raise ValueError(f"`split_k` (={self.split_k}) must be 1 where a row of `down` has one tile")

    def shared_memory(self, tile_bytes: int) -> int:
        """Bytes of shared memory that the kernel uses."""
        return self.num_stages * self.stage_bytes(tile_bytes) + self.partial_sums * 4 + _BARRIER_BYTES

    def stage_bytes(self, tile_bytes: int) -> int:
        """Bytes of one stage: weights, and `block_n` rows."""
        return self.stage_tiles * (self.warpgroups_m * tile_bytes + self.block_n * TILE * 2)


def deepest(
    tile_bytes: int, block_n: int, warpgroups_m: int, warpgroups_k: int, k_tiles: int, split_k: int = 1
) -> Config:
    """The configuration with as many stages as fit. ValueError if shared memory or registers do not suffice for one."""
    one = Config(block_n, warpgroups_m, warpgroups_k, k_tiles, 1, split_k)
    needed = one.shared_memory(tile_bytes)
    check_stages(one, needed)
    more = (SHARED_MEMORY - needed) // one.stage_bytes(tile_bytes)
    return replace(one, num_stages=min(MAX_STAGES, 1 + more))


def heuristic(tile_bytes: int, num_tokens: int, top_k: int, num_experts: int) -> Config:
    """A configuration for shapes without a tuned one, from the average number of rows of an expert."""
    large, assignments = tile_bytes > _LARGE_TILE, num_tokens * top_k
    if assignments <= _MOST_SPLIT:
        return deepest(tile_bytes, 8, 1, 3, 3 if large else 5, split_k=3)
    if assignments <= _MOST_SHARED:
        return deepest(tile_bytes, 8, 1, 5, 2 if large else 3)
    return backward_config(tile_bytes, assignments, num_experts)


def backward_config(tile_bytes: int, assignments: int, num_experts: int) -> Config:
    """A configuration for sorted rows, from the average number of rows of an expert: also that of the gradients."""
    k_tiles = 1 if tile_bytes > _LARGE_TILE else 2
    rows = max(1.0, assignments / num_experts)
    most = rows + 3 * sqrt(rows)  # with random routing
    if most > 96:
        return deepest(tile_bytes, 192, 3, 1, k_tiles)
    block_n = -(-int(most) // 8) * 8
    return deepest(tile_bytes, block_n, 5 if block_n <= _MOST_OF_FIVE else 4, 1, 1 + k_tiles)


def with_whole_stages(config: Config, tile_bytes: int, tiles: tuple[int, int]) -> Config:
    """`config` with four tiles a stage instead of three, if rows of both products are whole stages of four but neither
    product's are of three.

    Args:
        tiles: of a row of `gate_up` and of `down`.
    """
    thirds, fourths = any(n % 3 == 0 for n in tiles), all(n % 4 == 0 for n in tiles)
    if config.stage_tiles != 3 or config.block_n < _LEAST_OF_FOUR or thirds or not fourths:
        return config
    return deepest(tile_bytes, config.block_n, config.warpgroups_m, 1, 4)


def candidates(tile_bytes: int, num_tokens: int, top_k: int, num_experts: int) -> list[Config]:
    """Configurations to tune over, the heuristic's first: few, since compiling each takes seconds."""
    first = heuristic(tile_bytes, num_tokens, top_k, num_experts)
    n = first.block_n
    if num_tokens * top_k <= _MOST_SHARED:
        shapes = [(n, m, k, t, split) for m, k, t in [(1, 3, 5), (1, 3, 3), (1, 5, 3), (5, 1, 3)] for split in (1, 3)]
    elif n <= 96:
        shapes = [(n, m, 1, t) for m, t in [(5, 3), (5, 2), (5, 5), (4, 3), (3, 5)]]
        shapes += [(near, 5, 1, 3) for near in (n + 8, n - 8) if near >= 8]
    else:
        shapes = [(n, 3, 1, 2) for n in (128, 144, 160, 176)] + [(192, 3, 1, 1), (256, 2, 1, 1)]
    found = [first]
    for shape in shapes:
        try:
            config = deepest(tile_bytes, *shape)
        except ValueError:  # registers or shared memory do not suffice
            continue
        if config not in found and config.num_stages > 1:
            found.append(config)
    return found
