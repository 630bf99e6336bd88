"""Until jmx.formats has them: what is needed of formats beyond MXFP4."""

from dataclasses import dataclass
from typing import Any, NamedTuple


class BlockScaled(NamedTuple):
    values: Any
    scales: Any
    global_scales: Any = None
    zero_points: Any = None
    order: Any = None


@dataclass(frozen=True)
class Format:
    name: str
    element_bits: int
    block_size: int | None
    arrays: tuple[str, ...] = ("values", "scales")
    short_block: bool = False

    def check_size(self, name: str, size: int) -> None:
        whole = 8 // self.element_bits if self.block_size is None or self.short_block else self.block_size
        if size % whole:
            raise ValueError(f"`{name}` (={size}) must be a multiple of {whole} for {self.name.upper()}")

    def num_blocks(self, size: int, what: str) -> int:
        self.check_size(what, size)
        return 1 if self.block_size is None else -(-size // self.block_size)


def _integers() -> list[Format]:
    found = []
    for bits in (4, 8):
        for group in (32, 64, 128, None):
            for asym in (False, True):
                for order in (False, True) if group else (False,):
                    parts = [f"int{bits}", f"g{group}" if group else "channel", *["asym"] * asym, *["order"] * order]
                    arrays = ("values", "scales", *["zero_points"] * asym, *["order"] * order)
                    found.append(Format("_".join(parts), bits, group, arrays))
    return found


FORMATS = {
    f.name: f
    for f in (
        Format("mxfp4", 4, 32),
        Format("nvfp4", 4, 16, ("values", "scales", "global_scales")),
        Format("mxint4", 4, 32),
        *_integers(),
        Format("fp8_tensor", 8, None),
        Format("fp8_channel", 8, None),
        Format("fp8_block", 8, 128, short_block=True),
    )
}
