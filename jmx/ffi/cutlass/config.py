"""Tuning parameters of the backend `cutlass`: the tiles that are compiled, and which of them each product uses.

A tile of `rows` weight rows by `tokens` token rows is summed up by one or two warpgroups, which take `columns` columns
at a time. Scales are applied to float32 sums after each 32 columns, so every sum has a second one beside it in
registers: the larger tiles of FlashInfer's list (128x256, 256x128, 256x256) do not fit there, and are not compiled.
Nor are those of 512 columns, which leave shared memory for few stages, those of 128x128, which were slower than 128x64
at every size that was measured, and every combination of schedules and clusters: each tile is more than a minute of
compiling.
"""

from dataclasses import dataclass, replace

from jmx.selection.problem import Problem

PADDING = 128  # sizes of weights are padded to its multiples: scales lie in blocks of 64 rows by 128 columns


@dataclass(frozen=True)
class Tile:
    """A tile of a product.

    Args:
        rows: of the weight; it divides the padded number of rows.
        tokens: rows of one expert's tokens.
        columns: of the weight, at a time; it divides the padded number of columns.
        pingpong: two warpgroups take tiles in turns, one multiplying while the other writes; else both share a tile.
        cluster_rows, cluster_tokens: tiles next to each other that share what they load.
    """

    rows: int
    tokens: int
    columns: int
    pingpong: bool
    cluster_rows: int = 1
    cluster_tokens: int = 1

    @property
    def name(self) -> str:
        """As the library lists it: "64x16x128-Pingpong-1x1"."""
        cluster = f"{self.cluster_rows}x{self.cluster_tokens}"
        return f"{self.rows}x{self.tokens}x{self.columns}-{self.schedule}-{cluster}"

    @property
    def macro(self) -> str:
        """As the sources take it: "TILE(64, 16, 128, Pingpong, 1, 1)"."""
        sizes = f"{self.rows}, {self.tokens}, {self.columns}"
        return f"TILE({sizes}, {self.schedule}, {self.cluster_rows}, {self.cluster_tokens})"

    @property
    def schedule(self) -> str:
        """What CUTLASS calls it."""
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
    """How a layer runs.

    Args:
        gate_up, down: tiles of the two products, of `TILES`.
        overlap: whether a small kernel may be launched before the one ahead of it has ended (programmatic dependent
            launch), and wait for it on the device.
    """

    gate_up: Tile
    down: Tile
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in ("gate_up", "down"):
            tile = getattr(self, name)
            if tile not in TILES:
                raise ValueError(f"`{name}` (={tile}) must be one of the tiles that are compiled")


def padded(size: int) -> int:
    """`size` rounded up to a multiple of PADDING."""
    return -(-size // PADDING) * PADDING


def faults(tile: Tile, product: str, problem: Problem) -> str | None:
    """The reason why `tile` cannot run the "gate_up" or "down" product of `problem`; None where it can."""
    hidden, intermediate = padded(problem.hidden_size), padded(problem.intermediate_size)
    halves = 1 if problem.gate_up_order is None else 2
    rows, columns = (halves * intermediate, hidden) if product == "gate_up" else (hidden, intermediate)
    for name, size in (("rows", rows), ("columns", columns)):
        if size % getattr(tile, name):
            return f"`{product}.{name}` (={getattr(tile, name)}) must divide the weight's {size}"
    return None


def heuristic(problem: Problem) -> Config:
    """A configuration for shapes that nobody tuned, from the rows that an expert in use gets on average."""
    assignments = (problem.num_tokens or 1) * problem.top_k
    average = assignments / min(problem.num_experts, assignments or 1)
    tokens = 16 if average <= 16 else 64  # of 32 rows an expert 64 are faster than 32: benchmarks/NOTES.md
    tile = Tile(128, tokens, 128, False)
    return Config(tile, tile)


def candidates(problem: Problem) -> list[Config]:
    """What is worth a try, the heuristic's own first: all pairs of tiles of its size, and each tile of other sizes."""
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
    """Raises ValueError, naming the field, its value and the rule, where `config` cannot run `problem`."""
    for product in ("gate_up", "down"):
        fault = faults(getattr(config, product), product, problem)
        if fault is not None:
            raise ValueError(fault)
