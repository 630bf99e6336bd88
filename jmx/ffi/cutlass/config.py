"""Configurations of the backend `cutlass`: the tiles that are compiled, and which of them each product uses.

A tile is `rows` weight rows by `tokens` token rows, computed by one or two warpgroups in steps of `columns` columns.
Scales are applied to float32 sums after each 32 columns, so registers hold two accumulators per element. The larger
tiles of FlashInfer's list (128x256, 256x128, 256x256) exceed registers and are not compiled. Nor are tiles of 512
columns, which leave shared memory for few stages; 128x128, which was slower than 128x64 at every size measured; and
every combination of schedules and clusters, because each tile takes more than a minute to compile.
"""

from dataclasses import dataclass, replace

from jmx.selection.problem import Problem

PADDING = 128  # sizes of weights are padded to a multiple of it; scales are in blocks of 64 rows by 128 columns


@dataclass(frozen=True)
class Tile:
    """A tile of a product.

    Args:
        rows: rows of the weight; it divides the padded number of rows.
        tokens: rows of one expert's tokens.
        columns: columns of the weight in a step; it divides the padded number of columns.
        pingpong: whether two warpgroups alternate, one in its main loop, the other in its epilogue ("Pingpong");
            otherwise both share a tile ("Cooperative").
        cluster_rows, cluster_tokens: the cluster: neighboring CTAs that multicast their loads.
    """

    rows: int
    tokens: int
    columns: int
    pingpong: bool
    cluster_rows: int = 1
    cluster_tokens: int = 1

    @property
    def name(self) -> str:
        """The name that the library lists: "64x16x128-Pingpong-1x1"."""
        cluster = f"{self.cluster_rows}x{self.cluster_tokens}"
        return f"{self.rows}x{self.tokens}x{self.columns}-{self.schedule}-{cluster}"

    @property
    def macro(self) -> str:
        """The macro in the sources: "TILE(64, 16, 128, Pingpong, 1, 1)"."""
        sizes = f"{self.rows}, {self.tokens}, {self.columns}"
        return f"TILE({sizes}, {self.schedule}, {self.cluster_rows}, {self.cluster_tokens})"

    @property
    def schedule(self) -> str:
        """CUTLASS's name of the schedule."""
        return "Pingpong" if self.pingpong else "Cooperative"


TILES = (
    Tile(64, 16, 128, True),
    Tile(128, 16, 128, False),
    Tile(64, 16, 256, True),
    Tile(64, 32, 128, True),
    Tile(128, 32, 128, False),
    Tile(128, 64, 128, False),
    Tile(128, 64, 128, True),
)


@dataclass(frozen=True)
class Config:
    """Configuration of a layer.

    Args:
        gate_up, down: tiles of the two products, of `TILES`.
        overlap: whether small kernels are launched before the previous one has ended (programmatic dependent launch),
            and wait for it on the device.
    """

    gate_up: Tile
    down: Tile
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in ("gate_up", "down"):
            tile = getattr(self, name)
            if tile not in TILES:
                raise ValueError(f"`{name}` (={tile}) must be one of the compiled tiles")


def padded(size: int) -> int:
    """`size` rounded up to a multiple of PADDING."""
    return -(-size // PADDING) * PADDING


def faults(tile: Tile, product: str, problem: Problem) -> str | None:
    """Why `tile` cannot run the "gate_up" or "down" product of `problem`; None if it can."""
    hidden, intermediate = padded(problem.hidden_size), padded(problem.intermediate_size)
    halves = 1 if problem.gate_up_order is None else 2
    rows, columns = (halves * intermediate, hidden) if product == "gate_up" else (hidden, intermediate)
    for name, size in (("rows", rows), ("columns", columns)):
        if size % getattr(tile, name):
            return f"`{product}.{name}` (={getattr(tile, name)}) must divide the weight's {size}"
    return None


def heuristic(problem: Problem) -> Config:
    """A configuration for shapes without a table, from the average number of rows per expert in use."""
    assignments = (problem.num_tokens or 1) * problem.top_k
    average = assignments / min(problem.num_choices, assignments or 1)
    tokens = 16 if average <= 16 else 64  # 64 are faster than 32 even for 32 rows per expert: benchmarks/NOTES.md
    tile = Tile(128, tokens, 128, False)
    return Config(tile, tile)


def candidates(problem: Problem) -> list[Config]:
    """Configurations worth measuring, the heuristic's first: all pairs of its token rows, and each tile of others."""
    first = heuristic(problem)
    size = first.gate_up.tokens
    pairs = [(a, b) for a in TILES for b in TILES if a.tokens == b.tokens == size]
    pairs += [(tile, tile) for tile in TILES if tile.tokens != size]
    found = [first, replace(first, overlap=False)]
    for a, b in pairs:
        config = Config(a, b)
        if config != first and not faults(a, "gate_up", problem) and not faults(b, "down", problem):
            found.append(config)
    return found


def check(config: Config, problem: Problem) -> None:
    """Raises ValueError, with the field, its value and the rule, if `config` cannot run `problem`."""
    for product in ("gate_up", "down"):
        fault = faults(getattr(config, product), product, problem)
        if fault is not None:
            raise ValueError(fault)
