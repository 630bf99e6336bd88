"""What configurations of both Hopper kernels share: the limits of an SM, and how warpgroups divide a block."""

from typing import Any

from jmx.pallas.sm90.tiles import TILE

SHARED_MEMORY = 227 * 1024  # bytes a block may use on Hopper
MAX_BLOCK_N = 256  # wgmma's largest N
FEW_TOKENS = 8  # up to here every active expert sees all tokens, so that nothing is sorted
COMPUTE_REGISTERS = {1: 232, 2: 232, 3: 152, 4: 104, 5: 88}  # a thread, by compute warpgroups: what a launch can give


class BaseConfig:
    """What configurations of both kernels for Hopper have in common: how warpgroups share a block's work."""

    block_n: int
    warpgroups_m: int
    warpgroups_k: int

    def check_cut(self, *names: str) -> None:
        """Raises ValueError unless blocks and warpgroups can be such, and what `names` name is 1 or more."""
        if self.block_n % 8 or not 8 <= self.block_n <= MAX_BLOCK_N:
            raise ValueError(f"`block_n` (={self.block_n}) must be a multiple of 8 in 8..{MAX_BLOCK_N}")
        for name in ("warpgroups_m", "warpgroups_k", *names):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` (={getattr(self, name)}) must be 1 or more")
        if self.num_warpgroups not in COMPUTE_REGISTERS:
            raise ValueError(
                f"`warpgroups_m * warpgroups_k` (={self.num_warpgroups}) must be at most {max(COMPUTE_REGISTERS)}"
            )

    @property
    def num_warpgroups(self) -> int:
        """Warpgroups that compute; one more fetches."""
        return self.warpgroups_m * self.warpgroups_k

    @property
    def registers(self) -> int:
        """Registers of a computing thread."""
        return COMPUTE_REGISTERS[self.num_warpgroups]

    @property
    def partial_sums(self) -> int:
        """Float32 sums that warpgroups along the columns hand over."""
        return self.warpgroups_m * (self.warpgroups_k - 1) * TILE * self.block_n


def check_stages(config: Any, needed: int) -> None:
    """Raises ValueError unless shared memory holds the stages of a configuration, which needs so many bytes."""
    if needed > SHARED_MEMORY:
        raise ValueError(
            f"`num_stages` (={config.num_stages}) must be such that {SHARED_MEMORY} bytes of shared memory hold "
            f"them, and {config!r} needs {needed}"
        )


def widths(block_n: int, step: int) -> tuple[int, ...]:
    """The numbers of rows that a kernel is compiled for whose blocks have at most `block_n`.

    All that tensor cores offer, up to 64. Blocks that may be larger are mostly halves and more of `block_n`, since an
    expert's rows are cut into near-equal blocks. So there, what is smaller is stepped over, which saves compilation.

    Args:
        block_n: a multiple of `step`.
        step: from one width to the next, a multiple of 8.
    """
    if block_n <= 64:
        return tuple(range(step, block_n + 1, step))
    half = block_n // 2 // step * step
    return (*range(32, half - 8, 32), *range(half, block_n, step), block_n)
