"""Configurations of the kernel: their limits, the heuristic, and the candidates that are tuned over."""

from dataclasses import dataclass, replace
from itertools import product

FEW_TOKENS = 8  # up to so many, tokens are not sorted: the smallest M of a tensor core instruction here
# Of three times a thread's sums plus its weights of a step: above this, ptxas spills on compute capability 8.0.
_MAX_REGISTERS = 304
# Of a group of 32 weights, in the format with the most: a float32 scale and a zero point; three factors of 16 bits.
_GROUP_BYTES = 5
_GROUP_FACTORS = 3
MAX_SUMS = 128  # float32 sums per thread, half of its 255 registers
_MAX_MMA_SUMS = 64  # the same for `mma`: with 128 ptxas spills
# Bytes of shared memory available to a CTA, by compute capability (CUDA C++ Programming Guide, technical specifications
# per compute capability: 100, 164 and 228 KiB, less the 1 KiB that the driver reserves).
SHARED_MEMORY = {(8, 0): 163 * 1024, (8, 6): 99 * 1024, (8, 7): 163 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024}


@dataclass(frozen=True)
class Config:
    """Tile sizes of both products of a layer.

    Args:
        block_m: the most rows of a block, whose tokens go to one expert.
        block_n: rows of the weight in a tile; for gated experts half of them are gates and half are ups.
        block_k: columns of the weight in a step of the main loop.
        num_warps: warps per CTA.
        num_stages: stages of the pipeline from global to shared memory.
        products: products in a step: 4, each of every fourth column, or 1 of all columns, which takes more instructions
            to decode, but waits for the tensor cores once.
        split_k: parts of `down`'s columns that are summed separately.
        narrow_m: the least rows of a tile: a block's tile has `block_m`, or a half, a quarter, ... down to `narrow_m`,
            if its rows fit, and all blocks of an expert but its last have `block_m` rows. 0: every tile has `block_m`,
            and the blocks of an expert are alike.

    Raises:
        ValueError: a value that no problem can run with.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    products: int = 4
    split_k: int = 1
    narrow_m: int = 0

    def __post_init__(self) -> None:
        # Tensor cores take 8 rows of x, and 16 columns in each of the four products of a step.
        for name, low, high in (("block_m", 8, 256), ("block_n", 32, 256), ("block_k", 64, 512), ("num_warps", 1, 16)):
            value = getattr(self, name)
            if value not in (1 << n for n in range(low.bit_length() - 1, high.bit_length())):
                raise ValueError(f"`{name}` (={value}) must be a power of two in {low}..{high}")
        if self.products not in (1, 4):
            raise ValueError(f"`products` (={self.products}) must be 1 or 4")
        for name, high in (("num_stages", 8), ("split_k", 64)):
            if not 1 <= getattr(self, name) <= high:
                raise ValueError(f"`{name}` (={getattr(self, name)}) must be in 1..{high}")
        if self.narrow_m and self.narrow_m not in (1 << n for n in range(3, self.block_m.bit_length() - 1)):
            most = self.block_m // 2
            raise ValueError(f"`narrow_m` (={self.narrow_m}) must be 0 or a power of two in 8..{most} (half `block_m`)")
        if self.sums > MAX_SUMS:
            num_sums = self.block_m * self.block_n
            raise ValueError(
                f"`num_warps` (={self.num_warps}) must be at least {num_sums // (32 * MAX_SUMS)}, so that a thread has "
                f"at most {MAX_SUMS} of the `block_m * block_n` (={num_sums}) sums"
            )

    @property
    def sums(self) -> int:
        """Float32 sums per thread."""
        return self.block_m * self.block_n // (32 * self.num_warps)

    @property
    def tiles(self) -> list["Config"]:
        """Those of blocks of ever fewer rows, itself first.

        Each has half as many rows as the one before, and, down to four, half as many warps. So several of its CTAs are
        on an SM, and it has a stage more or fewer, as its warps' share of this one's shared memory holds.
        """
        found: list[Config] = [replace(self, narrow_m=0)]
        while self.narrow_m and found[-1].block_m > self.narrow_m:
            wider = found[-1]
            warps = max(min(4, wider.num_warps), wider.num_warps // 2)
            share = self.shared_memory * warps // self.num_warps
            stages = range(wider.num_stages + 1, 1, -1)
            narrower = replace(wider, block_m=wider.block_m // 2, num_warps=warps, num_stages=2)
            made = (replace(narrower, num_stages=number) for number in stages)
            found.append(next((each for each in made if each.shared_memory <= share), narrower))
        return found

    @property
    def weights(self) -> int:
        """Weights that a thread decodes in a step of the main loop."""
        return self.block_n * self.block_k // (32 * self.num_warps)

    @property
    def shared_memory(self) -> int:
        """The most bytes of shared memory that the kernel uses.

        A stage of the pipeline holds 16-bit rows, 4-bit weights and scales. Scales and zero points also pass through
        shared memory to the threads that have their weights; after the main loop, sums to the threads that store them.
        """
        groups = self.block_n * self.block_k // 32
        stage = self.block_k * (2 * self.block_m + self.block_n // 2) + _GROUP_BYTES * groups
        return max(self.num_stages * stage + 2 * _GROUP_FACTORS * groups, 4 * self.block_m * self.block_n)


def check(config: Config, capability: tuple[int, int]) -> None:
    """Raises ValueError if `config` exceeds the registers or the shared memory of this compute capability."""
    if config.sums > _MAX_MMA_SUMS and not is_wgmma(config, capability):
        raise ValueError(
            f"`num_warps` (={config.num_warps}) must be higher: {config!r} has {config.sums} sums a thread, and "
            f"without `wgmma`, as on compute capability {capability}, there is space for {_MAX_MMA_SUMS}"
        )
    limit = SHARED_MEMORY[capability]
    if config.shared_memory > limit:
        raise ValueError(
            f"`num_stages` (={config.num_stages}) must be lower: {config!r} needs {config.shared_memory} bytes of "
            f"shared memory, and compute capability {capability} has {limit}"
        )


def is_wgmma(config: Config, capability: tuple[int, int]) -> bool:
    """Whether Triton uses `wgmma`, and not `mma`."""
    fits = config.num_warps % 4 == 0 and config.block_n >= 64 and config.block_m >= 16
    return capability >= (9, 0) and fits


def decodes_once(config: Config, capability: tuple[int, int]) -> bool:
    """Whether Triton gives each warp different rows of the weight; otherwise some warps decode the same ones.

    It does for `wgmma`. For `mma` it divides the longer side of a tile among all warps if the sums of one product go
    into the next; else it halves in turn the side that has more instructions, of 16 rows and of 8 tokens.
    """
    if config.block_n < 16 * config.num_warps:
        return False
    if is_wgmma(config, capability):
        return True
    return config.block_n >= config.block_m * (1 if config.products > 1 else config.num_warps)


def copies_tokens(config: Config) -> bool:
    """Whether Triton copies x ahead: a thread's share for a product must be 4 bytes, the least of `cp.async`."""
    return 2 * config.block_m * config.block_k // config.products >= 4 * 32 * config.num_warps


# With `wgmma`, from few rows an expert to many. Of the first two, two CTAs to an SM: one decodes while the other
# multiplies. The last decodes a weight once for twice as many rows.
_WGMMA = (
    Config(64, 128, 128, 4, 3, products=1, narrow_m=16),
    Config(128, 128, 128, 4, 2, products=1, narrow_m=32),
    Config(256, 128, 128, 8, 3, products=1, narrow_m=32),
)


def heuristic(num_tokens: int, top_k: int, num_experts: int, capability: tuple[int, int]) -> Config:
    """A configuration for shapes without a table, from the average number of rows per expert."""
    assignments = num_tokens * top_k
    if assignments <= 8:  # so few tiles that `down` needs split-K
        return Config(8, 64, 256, 4, 3, products=4, split_k=2)
    rows = 1 if num_tokens <= FEW_TOKENS else -(-assignments // num_experts)
    if rows <= 4:  # blocks of random routing have a few more rows
        return Config(8, 64, 256, 2, 3, products=4)
    if rows <= 12:
        return Config(16, 64, 256, 2, 3, products=4)
    if capability >= (9, 0):  # Triton waits for each `wgmma`, so there is one a step
        return _WGMMA[0] if rows <= 48 else _WGMMA[1] if rows <= 208 else _WGMMA[2]
    if rows <= 24:
        return Config(32, 64, 128, 2, 4, products=4)
    if rows <= 48:
        return Config(64, 128, 64, 4, 4)
    return Config(128, 128, 64, 8, 3)


# Of candidates: block_k, num_warps and num_stages for each block_n.
_TILES: dict[int, tuple[tuple[int, int, int], ...]] = {
    32: ((128, 1, 4), (256, 2, 3)),
    64: ((128, 2, 4), (256, 2, 3), (64, 4, 4), (128, 4, 4), (256, 4, 3)),
    128: ((64, 4, 4), (128, 4, 3), (128, 8, 3), (64, 8, 3), (128, 8, 2)),
}


def candidates(num_tokens: int, top_k: int, num_experts: int, capability: tuple[int, int]) -> list[Config]:
    """Configurations worth measuring, the heuristic's first; a few only, because each takes seconds to compile."""
    first = heuristic(num_tokens, top_k, num_experts, capability)
    block_rows = {max(8, first.block_m // 2), first.block_m, first.block_m * 2}
    found = [first]
    if num_tokens <= FEW_TOKENS:
        found += [replace(first, split_k=parts) for parts in (1, 2, 4) if parts != first.split_k]
    if first in _WGMMA:
        found += [replace(tile, narrow_m=narrow) for tile in _WGMMA for narrow in (16, 32) if narrow < tile.block_m]
        found = [*dict.fromkeys(found)]
    tiles = [(block_n, tile) for block_n, each in _TILES.items() for tile in each]
    for block_m, (block_n, tile), products in product(sorted(block_rows), tiles, (4, 1)):
        try:
            config = Config(block_m, block_n, *tile, products, first.split_k)
            check(config, capability)
        except ValueError:  # exceeds registers or shared memory
            continue
        fits = 3 * config.sums + config.weights <= _MAX_REGISTERS
        # Triton waits for each product of `wgmma`; a single one decodes more slowly, and pays off only there.
        waits = products > 1 and is_wgmma(config, capability)
        too_small = products == 1 and block_m < 16
        suits = decodes_once(config, capability) and copies_tokens(config)
        if config not in found and fits and not waits and not too_small and suits:
            found.append(config)
    return found
