"""What can be tuned of the kernel of `kernel`, what it takes of shared memory, and what is tried."""

from dataclasses import dataclass, replace
from itertools import product

FEW_TOKENS = 8  # the fewest rows that a product of tensor cores has here: up to here nothing is sorted
# Three times a thread's sums plus its weights of a step: beyond, ptxas spills on compute capability 8.0.
_MAX_HELD = 304
# Of 32 weights, in the format that has most: a scale in float32 and a zero point, which are three factors of 16 bits.
_BLOCK_BYTES = 6
_BLOCK_FACTORS = 3
MAX_SUMS = 64  # float32 sums of a thread: with 128 of its 255 registers taken so, ptxas spills
# Bytes of shared memory that a CTA may use, by compute capability (CUDA C++ Programming Guide, technical
# specifications per compute capability; one of the 100, 164 and 228 KiB is the driver's own).
SHARED_MEMORY = {(8, 0): 163 * 1024, (8, 6): 99 * 1024, (8, 7): 163 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024}


@dataclass(frozen=True)
class Config:
    """Tile sizes of a layer: tokens go into blocks of rows of one expert, and both products into tiles.

    Args:
        block_m: rows of a block, at most.
        block_n: rows of the weight in a tile; of gated experts half of them are gates and half are ups.
        block_k: columns of the weight in a step of the loop.
        num_warps: warps that compute a tile.
        num_stages: stages of the pipeline from global to shared memory.
        products: products in a step of the loop, 4 of every fourth column each, or 1 of all columns, for which decoding
            takes more instructions, and waiting fewer.
        split_k: parts of `down`'s columns that are computed apart and added up in the end.

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

    def __post_init__(self) -> None:
        # Tensor cores take 8 rows and 16 columns, of gates and of ups, and of each of four products a step.
        for name, low, high in (("block_m", 8, 256), ("block_n", 32, 256), ("block_k", 64, 512), ("num_warps", 1, 16)):
            value = getattr(self, name)
            if value not in (1 << n for n in range(low.bit_length() - 1, high.bit_length())):
                raise ValueError(f"`{name}` (={value}) must be a power of two in {low}..{high}")
        if self.products not in (1, 4):
            raise ValueError(f"`products` (={self.products}) must be 1 or 4")
        for name, high in (("num_stages", 8), ("split_k", 64)):
            if not 1 <= getattr(self, name) <= high:
                raise ValueError(f"`{name}` (={getattr(self, name)}) must be in 1..{high}")
        if self.sums > MAX_SUMS:
            raise ValueError(
                f"`num_warps` (={self.num_warps}) must be such that `block_m * block_n` sums "
                f"(={self.block_m * self.block_n}) are at most {MAX_SUMS} a thread"
            )

    @property
    def sums(self) -> int:
        """Float32 sums of a thread."""
        return self.block_m * self.block_n // (32 * self.num_warps)

    @property
    def weights(self) -> int:
        """Weights that a thread decodes in a step of the loop."""
        return self.block_n * self.block_k // (32 * self.num_warps)

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that the kernel uses at most.

        The pipeline holds rows in 16 bits, weights in 4, and some scales. Beside it scales and zero points go to the
        threads that hold their weights; after it, sums to those that store them.
        """
        blocks = self.block_n * self.block_k // 32
        stage = self.block_k * (2 * self.block_m + self.block_n // 2) + _BLOCK_BYTES * blocks
        return max(self.num_stages * stage + 2 * _BLOCK_FACTORS * blocks, 4 * self.block_m * self.block_n)


def check(config: Config, capability: tuple[int, int]) -> None:
    """ValueError where shared memory of a GPU of this compute capability does not hold the pipeline of `config`."""
    limit = SHARED_MEMORY[capability]
    if config.shared_memory > limit:
        raise ValueError(
            f"`num_stages` (={config.num_stages}) must be such that the {limit} bytes of shared memory of compute "
            f"capability {capability} hold them, and {config!r} needs {config.shared_memory}"
        )


def is_wgmma(config: Config, capability: tuple[int, int]) -> bool:
    """Whether Triton multiplies by `wgmma`, else by `mma`."""
    fits = config.num_warps % 4 == 0 and config.block_n >= 64 and config.block_m >= 16
    return capability >= (9, 0) and fits


def decodes_once(config: Config, capability: tuple[int, int]) -> bool:
    """Whether Triton gives each warp rows of the weight of its own; else some would decode the same ones.

    `wgmma` always gets them so; `mma`, where a product's sums go into another product, or a tile is high enough.
    """
    high = 2 * config.block_n >= config.block_m * config.num_warps
    several = config.products > 1
    return config.block_n >= 16 * config.num_warps and (is_wgmma(config, capability) or several or high)


def heuristic(num_tokens: int, top_k: int, num_experts: int, capability: tuple[int, int]) -> Config:
    """A configuration for shapes that nobody tuned, from the rows that an expert gets on average."""
    assignments = num_tokens * top_k
    if assignments <= 8:  # so few tiles that `down` is split
        return Config(8, 64, 256, 4, 3, products=4, split_k=2)
    rows = 1 if num_tokens <= FEW_TOKENS else -(-assignments // num_experts)
    if rows <= 4:  # most blocks of random routing have a few more rows than that
        return Config(8, 64, 256, 2, 3, products=4)
    if rows <= 12:
        return Config(16, 64, 256, 2, 3, products=4)
    if rows <= 24:
        return Config(32, 64, 128, 2, 4, products=4)
    products = 1 if capability >= (9, 0) else 4  # each of `wgmma` is waited for
    if rows <= 40 and products == 1:
        return Config(32, 128, 128, 4, 3, products)
    if rows <= 48:
        return Config(64, 128, 64, 4, 4, products)
    return Config(128, 128, 64, 8, 3, products)


# What a tile and a step may be: block_n, block_k, num_warps, num_stages.
_TILES = (
    (32, 128, 1, 4),
    (32, 256, 2, 3),
    (64, 128, 2, 4),
    (64, 256, 2, 3),
    (64, 64, 4, 4),
    (64, 128, 4, 4),
    (64, 256, 4, 3),
    (128, 64, 4, 4),
    (128, 128, 4, 3),
    (128, 128, 8, 3),
    (128, 64, 8, 3),
    (128, 128, 8, 2),
)


def candidates(num_tokens: int, top_k: int, num_experts: int, capability: tuple[int, int]) -> list[Config]:
    """What is worth a try, the heuristic's own first: few, since each is compiled, which takes seconds."""
    first = heuristic(num_tokens, top_k, num_experts, capability)
    heights = {max(8, first.block_m // 2), first.block_m, first.block_m * 2}
    found = [first]
    if num_tokens <= FEW_TOKENS:
        found += [replace(first, split_k=parts) for parts in (1, 2, 4) if parts != first.split_k]
    for block_m, tile, products in product(sorted(heights), _TILES, (4, 1)):
        try:
            config = Config(block_m, *tile, products, first.split_k)
            check(config, capability)
        except ValueError:  # registers or shared memory do not hold it
            continue
        held = 3 * config.sums + config.weights <= _MAX_HELD
        # Each product of `wgmma` is waited for. One of all columns, which takes more to decode, is for that.
        waits = products > 1 and is_wgmma(config, capability)
        vain = products == 1 and block_m < 16
        if config not in found and held and not waits and not vain and decodes_once(config, capability):
            found.append(config)
    return found
