"""Sizes of the tiles of a weight that CTAs compute."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Sizes of a tile, and how tiles are computed.

    Args:
        rows: of the weight, a power of two; for several tokens 16 or more, or 1, which needs no tensor cores.
        columns: of a step along K, a power of two.
        num_warps: of a CTA.
        num_stages: of Triton's pipeline, for tensor cores.
        most_ctas: for one token; each takes several tiles where there are more.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int = 1
    most_ctas: int = 1 << 30

    def num_ctas(self, num_tokens: int, num_tiles: int) -> int:
        """As many as have the same number of tiles, but for the last."""
        if num_tokens > 1:
            return num_tiles
        each = -(-num_tiles // self.most_ctas)
        return -(-num_tiles // each)
