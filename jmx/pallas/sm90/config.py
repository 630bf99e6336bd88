"""What configurations of both Hopper kernels share: the limits of an SM, and how warpgroups divide a block's work."""

from typing import Any

from jmx.pallas.sm90.tiles import TILE

SHARED_MEMORY = 227 * 1024  # bytes that a CTA may use on Hopper
MAX_BLOCK_N = 256  # wgmma's largest N
FEW_TOKENS = 8  # tokens, up to which every expert in use reads all of them, and nothing is sorted
CONSUMER_REGISTERS = {1: 232, 2: 232, 3: 152, 4: 104, 5: 88}  # of a thread, by number of consumer warpgroups


class BaseConfig:
    """The fields that configurations of both Hopper kernels have: how warpgroups share a block's work."""

    block_n: int
    warpgroups_m: int
    warpgroups_k: int

    def check_sizes(self, *names: str) -> None:
        """Raises ValueError unless blocks and warpgroups have supported sizes, and the fields `names` are 1 or more."""
        if self.block_n % 8 or not 8 <= self.block_n <= MAX_BLOCK_N:
            raise ValueError(f"`block_n` (={self.block_n}) must be a multiple of 8 in 8..{MAX_BLOCK_N}")
        for name in ("warpgroups_m", "warpgroups_k", *names):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` (={getattr(self, name)}) must be 1 or more")
        if self.num_warpgroups not in CONSUMER_REGISTERS:
            raise ValueError(
                f"`warpgroups_m * warpgroups_k` (={self.num_warpgroups}) must be at most {max(CONSUMER_REGISTERS)}"
            )

    @property
    def num_warpgroups(self) -> int:
        """Consumer warpgroups; one more has the producer warps."""
        return self.warpgroups_m * self.warpgroups_k

    @property
    def registers(self) -> int:
        """Registers of a consumer thread."""
        return CONSUMER_REGISTERS[self.num_warpgroups]

    @property
    def partial_sums(self) -> int:
        """Float32 partial sums that warpgroups along the columns pass to the first of them."""
        return self.warpgroups_m * (self.warpgroups_k - 1) * TILE * self.block_n


def check_stages(config: Any, needed: int) -> None:
    """Raises ValueError unless shared memory holds the `needed` bytes of a configuration."""
    if needed > SHARED_MEMORY:
        raise ValueError(
            f"`num_stages` (={config.num_stages}) must be such that {SHARED_MEMORY} bytes of shared memory hold "
            f"them, and {config!r} needs {needed}"
        )


def widths(block_n: int, step: int) -> tuple[int, ...]:
    """The numbers of rows that a kernel with blocks of at most `block_n` rows is compiled for.

    Up to 64 these are all that tensor cores support. An expert's rows are divided into near-equal blocks, so with a
    larger `block_n` most blocks have at least half of it. Then fewer of the smaller widths are compiled, to save time.

    Args:
        block_n: a multiple of `step`.
        step: the distance of two widths, a multiple of 8.
    """
    if block_n <= 64:
        return tuple(range(step, block_n + 1, step))
    half = block_n // 2 // step * step
    return (*range(32, half - 8, 32), *range(half, block_n, step), block_n)
