"""What can be tuned of the kernel of `kernel`, what it costs in shared memory, and what is tried."""

import itertools
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import NamedTuple

from jmx.pallas.sm90.config import FEW_TOKENS, MAX_BLOCK_N, SHARED_MEMORY, BaseConfig, check_stages, widths

ROW_BYTES = 128  # of a row in a stage: 128 columns of e4m3
MAX_STAGES = 16
MAX_UNITS = 4  # 512 columns, for which sums of some 14 bits suffice
MAX_OWN_UNITS = 32  # 4096 columns, for which they may be asked to
_UNIT_REGISTERS = 16  # of a thread, for a unit that is decoded; a block's sums and totals take one a row
_HELD = {3: 112, 4: 72, 5: 56}  # such registers that ptxas finds, by warpgroups, where a launch has less than 168
MAX_WIDTH = 128  # of a product of e4m3 weights, for whose blocks registers hold two totals and one sum
_MAX_DECODED = 192  # of MXFP4 ones: a total, a sum, and two operands
_LARGE_DECODED = 176  # such a block without spills
_STAGED_BYTES = 256  # of a row of a tile's results, at most: 64 in float32
_STAGED_OF_LARGE = 8192  # bytes of results, where stages leave little room
_BARRIER_BYTES = 2048
_ROUNDING_BYTES = 1024  # what rows' largest magnitudes take, or the scales of rows that are kept, with alignment
_ROOM = 1.25  # an expert's rows on average by which a block has to be larger, if more warpgroups are to make up for it
_WHOLE_BLOCKS = 2  # that an expert has on average, for blocks of which all rows are computed
_RING_BYTES = 136 << 10  # of weights, in a launch that rounds rows, which with more is slower: they are in its way
_RING_BYTES_OF_KEPT = 112 << 10  # the same where every multiprocessor loads the rows
_RING_BYTES_OF_SHARED = 120 << 10  # the same where warpgroups share columns
_RING_STEPS = 3  # that a warpgroup takes, for which such a ring has room in any case
_MAX_OF_ONE_LAUNCH = 64  # rows of a block, beside which shared memory has room for results of both products
_ROUNDED_BY_A_WARPGROUP = 3  # rows, in the time that a launch of its own would take
_COST_OF_A_PART = 6  # of columns, in the units of `_cost`
_SHARING = 4  # warpgroups that share columns, where that pays
_TOKENS_TO_SHARE = range(6, 17)  # which it was measured for
_ROWS_TO_SHARE = 2  # that an expert has on average, at most
_UNITS_TO_SHARE = 16  # of columns, at least


@dataclass(frozen=True)
class Config(BaseConfig):
    """A configuration.

    Args:
        block_n: rows of a block, at most; a multiple of 8.
        warpgroups_m: warpgroups next to each other along the weight's rows, 64 each.
        units: stages that a warpgroup takes at a time: sums of so many are the tensor cores' own, with fewer bits.
        num_stages: stages of the ring, of 128 columns for each of `warpgroups_k`.
        split_k: parts of `down`'s columns that are computed apart and added up in the end.
        warpgroups_k: warpgroups that share the columns of the same rows, and add up what they have at the end.
        own_sums: whether sums of all columns are the tensor cores' own. Registers then have room for products of 256
            rows.
        one_launch: whether rows are rounded in the launch of the products, which is one; else there are four.
        keeps_rows: whether in that launch each multiprocessor rounds a block's rows for itself, and has all of their
            columns in shared memory while it multiplies them; for at most as many tokens as `warpgroups_m`.
    """

    block_n: int
    warpgroups_m: int
    units: int
    num_stages: int
    split_k: int = 1
    warpgroups_k: int = 1
    own_sums: bool = False
    one_launch: bool = False
    keeps_rows: bool = False

    def __post_init__(self) -> None:
        self.check_cut("split_k")
        if self.warpgroups_k > 1 and self.block_n > MAX_WIDTH:
            raise ValueError(f"`warpgroups_k` (={self.warpgroups_k}) must be 1 above {MAX_WIDTH} rows of a block")
        if not 1 <= self.units <= MAX_UNITS:
            raise ValueError(f"`units` (={self.units}) must be in 1..{MAX_UNITS}")
        if not self.units <= self.num_stages <= MAX_STAGES:
            raise ValueError(f"`num_stages` (={self.num_stages}) must be in {self.units}..{MAX_STAGES}")
        held = _HELD.get(self.num_warpgroups, self._held)
        if self._held > held:
            raise ValueError(
                f"`block_n` (={self.block_n}) must be at most {held - self._held + self.block_n}, for which "
                f"{self.num_warpgroups} warpgroups have registers with {self.units} units"
            )
        if self.block_n % self._step:
            raise ValueError(f"`block_n` (={self.block_n}) must be a multiple of {self._step} above {MAX_WIDTH}")
        if self.keeps_rows and not self.one_launch:
            raise ValueError(f"`keeps_rows` (={self.keeps_rows}) must be False without `one_launch`")
        if self.keeps_rows and self.warpgroups_k > 1:
            raise ValueError(f"`keeps_rows` (={self.keeps_rows}) must be False with `warpgroups_k` above 1")

    @property
    def _held(self) -> int:
        return self.block_n + _UNIT_REGISTERS * self.units

    @property
    def _step(self) -> int:
        return 8 if self.block_n <= MAX_WIDTH else 16

    @property
    def staged_bytes(self) -> int:
        """Shared memory of a tile for results on their way to global memory."""
        return self.block_n * _STAGED_BYTES if self.block_n <= MAX_WIDTH else _STAGED_OF_LARGE

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of rows that the kernel is compiled for."""
        return widths(self.block_n, self._step)

    @property
    def scales_n(self) -> int:
        """Scales of a stage's rows, with padding: stages must begin at multiples of 128 bytes."""
        return -(-self.block_n // 32) * 32

    def row_slots(self, row_units: int) -> int:
        """Units of a block's rows for which there is room, where rows have so many."""
        slots = self.num_stages * self.warpgroups_k
        return max(slots, row_units) if self.keeps_rows else slots

    def shared_memory(self, unit_bytes: int, row_units: int) -> int:
        """Bytes of shared memory that the kernel uses, at most.

        Args:
            unit_bytes: of a unit of the weight.
            row_units: units of 128 columns that a row has, of x or h, whichever has more.
        """
        weights = self.num_stages * self.num_warpgroups * unit_bytes
        rows = self.row_slots(row_units) * (self.block_n * ROW_BYTES + 4 * self.scales_n)
        of_tiles = self.warpgroups_m * self.staged_bytes * (2 if self.one_launch else 1)
        others = _BARRIER_BYTES + _ROUNDING_BYTES * (self.one_launch + self.keeps_rows)
        return weights + rows + of_tiles + 4 * self.partial_sums + others

    def parts_of(self, width: int, decoded: bool) -> int:
        """How many products of equally many rows a block of so many is computed in."""
        most = MAX_BLOCK_N if self.own_sums else _MAX_DECODED if decoded else MAX_WIDTH
        return -(-width // most)

    @property
    def tokens_may_be_a(self) -> bool:
        """Whether blocks are such that tokens may be the operand A, for which see `tokens_as_a`."""
        return (self.warpgroups_m, self.warpgroups_k) == (2, 1) and self.block_n % MAX_WIDTH == 0

    def check(self, shape: "Shape") -> None:
        """Raises ValueError unless it can run the shape."""
        check_stages(self, self.shared_memory(shape.unit_bytes, max(shape.units)))
        if self.keeps_rows and shape.weighted:
            raise ValueError(f"`keeps_rows` (={self.keeps_rows}) must be False where an expert's inputs are its own")
        if self.keeps_rows and shape.num_tokens > self.warpgroups_m:
            rule = f"must be False for more tokens than `warpgroups_m` (={self.warpgroups_m}), here {shape.num_tokens}"
            raise ValueError(f"`keeps_rows` (={self.keeps_rows}) {rule}")
        # Pallas has TMA read a unit, if it is all, for those behind it.
        if self.split_k > 1 and shape.units[1] == 1:
            raise ValueError(f"`split_k` (={self.split_k}) must be 1 where a row of `down` has one unit of columns")
        if self.warpgroups_k > 1 and min(shape.units) == 1:
            raise ValueError(f"`warpgroups_k` (={self.warpgroups_k}) must be 1 where a row has one unit of columns")
        if self.own_sums and shape.by_block:
            raise ValueError(f"`own_sums` (={self.own_sums}) must be False where scales belong to 128 columns")
        if self.own_sums and not shape.sums_may_be_own:
            most = MAX_OWN_UNITS * ROW_BYTES
            raise ValueError(f"`own_sums` (={self.own_sums}) must be False for more than {most} columns")
        if shape.decoded and self.parts_of(self.block_n, decoded=True) > 1:
            raise ValueError(f"`block_n` (={self.block_n}) must be at most {_MAX_DECODED} for MXFP4 without `own_sums`")


class Shape(NamedTuple):
    """What a configuration goes by.

    Args:
        unit_bytes: of a unit of the weight.
        decoded: whether its elements become e5m2 in registers.
        by_block: whether scales, of weights or inputs, belong to 128 columns.
        tokens_as_a: whether those of inputs do, and weights are e4m3: then tokens may be the operand A.
        num_tokens, top_k, num_experts: of the layer.
        tiles, units: of 64 rows, and of 128 columns, that `gate_up` and `down` have.
        num_cores: multiprocessors.
        weighted: whether inputs are weighted, and so an expert's own.
    """

    unit_bytes: int
    decoded: bool
    by_block: bool
    tokens_as_a: bool
    num_tokens: int
    top_k: int
    num_experts: int
    tiles: tuple[int, int]
    units: tuple[int, int]
    num_cores: int
    weighted: bool

    @property
    def rows(self) -> float:
        """Rows of an expert, on average."""
        return self.num_tokens * self.top_k / self.num_experts

    @property
    def rows_with_padding(self) -> int:
        """Rows of all experts, at most, of which each begins at a multiple of 8."""
        assignments = self.num_tokens * self.top_k
        return assignments + 7 * min(assignments, self.num_experts)

    @property
    def block_n(self) -> int:
        """Rows that hardly any expert exceeds where routing is random: by three standard deviations."""
        most = int(self.rows + 3 * sqrt(self.rows))
        step = 8 if most <= MAX_WIDTH else 16
        # Where a unit's sums are scaled and added up by themselves, that has to run beside the products.
        large = self.rows >= _WHOLE_BLOCKS * MAX_BLOCK_N if self.tokens_as_a else not self.by_block
        return min(max(8, -(-most // step) * step), MAX_BLOCK_N if large else MAX_WIDTH)

    @property
    def sums_may_be_own(self) -> bool:
        """Whether the tensor cores may be asked to add up all columns."""
        return not self.by_block and max(self.units) <= MAX_OWN_UNITS

    @property
    def columns_pay_to_share(self) -> bool:
        """Whether warpgroups had better share an item's columns, with few rows: there are more items then, and these
        are divided more evenly."""
        few = self.num_tokens in _TOKENS_TO_SHARE and self.rows <= _ROWS_TO_SHARE
        return few and not self.by_block and min(self.units) >= _UNITS_TO_SHARE

    @property
    def experts_in_use(self) -> int:
        """Of random routing."""
        idle = (1 - self.top_k / self.num_experts) ** self.num_tokens
        return round(self.num_experts * (1 - idle))


class _Cut(NamedTuple):
    """What a configuration is chosen by; the rest follows."""

    block_n: int
    warpgroups_m: int
    units: int = 2
    split_k: int = 1
    warpgroups_k: int = 1


def deepest(
    shape: Shape,
    block_n: int,
    warpgroups_m: int,
    units: int,
    split_k: int = 1,
    warpgroups_k: int = 1,
    *,
    own_sums: bool = False,
    one_launch: bool = False,
    keeps_rows: bool = False,
) -> Config:
    """The configuration with as many stages as fit, or as pay. ValueError where not even `units` of them fit."""
    most = MAX_STAGES
    if one_launch:
        ring = _RING_BYTES_OF_KEPT if keeps_rows else _RING_BYTES_OF_SHARED if warpgroups_k > 1 else _RING_BYTES
        most = min(most, max(ring // (warpgroups_m * warpgroups_k * shape.unit_bytes), _RING_STEPS * units))
    config = Config(block_n, warpgroups_m, units, most, split_k, warpgroups_k, own_sums, one_launch, keeps_rows)
    while (needed := config.shared_memory(shape.unit_bytes, max(shape.units))) > SHARED_MEMORY:
        if config.num_stages == units:
            check_stages(config, needed)
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def heuristic(shape: Shape) -> Config:
    """A configuration for shapes that nobody tuned, from the rows that an expert gets on average."""
    if shape.block_n > MAX_WIDTH:
        own_sums = shape.decoded and shape.sums_may_be_own
        block_n = shape.block_n if own_sums or not shape.decoded else min(shape.block_n, _LARGE_DECODED)
        return deepest(shape, block_n, 2, 1 if shape.by_block else 2, own_sums=own_sums)
    cuts = [cut for cut in _cuts(shape) if cut.block_n == shape.block_n or cut.block_n >= _ROOM * shape.rows]
    config = _deepest(shape, min(cuts, key=partial(_cost, shape)))
    if not config.one_launch or config.keeps_rows or not shape.columns_pay_to_share:
        return config
    sharing = _deepest(shape, _Cut(shape.block_n, 1, warpgroups_k=_SHARING))
    return sharing if sharing.one_launch else config


def _deepest(shape: Shape, cut: _Cut, *, own_sums: bool = False) -> Config:
    """`deepest` of a cut.

    In one launch where a warpgroup has few rows to round; with rows kept where that costs no more than half the stages.
    """
    num_warpgroups = cut.warpgroups_m * cut.warpgroups_k
    few = shape.rows_with_padding <= _ROUNDED_BY_A_WARPGROUP * num_warpgroups * shape.num_cores
    one_launch = few and cut.block_n <= _MAX_OF_ONE_LAUNCH
    config = deepest(shape, *cut, own_sums=own_sums, one_launch=one_launch)
    if one_launch and shape.num_tokens <= cut.warpgroups_m and not shape.weighted:
        with suppress(ValueError):
            keeping = deepest(shape, *cut, own_sums=own_sums, one_launch=True, keeps_rows=True)
            if max(keeping.units + 1, config.num_stages / 2) <= keeping.num_stages:
                return keeping
    return config


def _with_stages(shape: Shape, config: Config, num_stages: int) -> Config:
    config = replace(config, num_stages=num_stages)
    config.check(shape)
    return config


def _cuts(shape: Shape) -> list[_Cut]:
    """Those to choose from."""
    splits = (1, 2, 3) if shape.num_tokens <= FEW_TOKENS and shape.units[1] > 1 else (1,)
    held = ((m, _HELD.get(m, MAX_WIDTH + 2 * _UNIT_REGISTERS) - 2 * _UNIT_REGISTERS) for m in (2, 3, 4, 5))
    return [_Cut(min(shape.block_n, most), m, split_k=split) for m, most in held for split in splits]


def _cost(shape: Shape, cut: _Cut) -> int:
    """What the busiest multiprocessor has to do: units, of which an item's take as long as one warpgroup's more would.

    Of some ten configurations each at 1, 4 and 64 tokens it is least for the one that was the fastest on an H200.
    """
    cost = _COST_OF_A_PART * cut.split_k
    for tiles, columns, parts in zip(shape.tiles, shape.units, (1, cut.split_k), strict=True):
        items = shape.experts_in_use * -(-tiles // cut.warpgroups_m) * parts
        cost += -(-items // shape.num_cores) * -(-columns // parts) * (cut.warpgroups_m + 1)
    return cost


def candidates(shape: Shape) -> list[Config]:
    """What is worth a try, the heuristic first: few, since each is compiled, which takes half a minute."""
    first = heuristic(shape)
    n = first.block_n
    if n <= MAX_WIDTH:
        its = _Cut(n, first.warpgroups_m, first.units, first.split_k, first.warpgroups_k)
        cuts = _cuts(shape)
        if n <= 16 and min(shape.units) > 1:
            cuts += [_Cut(n, m, warpgroups_k=k) for m, k in ((1, 3), (1, 4), (1, 5), (2, 2))]
        cuts += [its._replace(block_n=n + more) for more in (-16, -8, 8, 16)]
        cuts += [its._replace(units=units) for units in (1, 3, 4)]
        ways = [partial(_deepest, shape, cut) for cut in cuts]
        of_launches = [(False, False), (True, False), *([(True, True)] if first.keeps_rows else [])]
        for one_launch, keeps_rows in of_launches:
            ways.append(partial(deepest, shape, *its, one_launch=one_launch, keeps_rows=keeps_rows))
        ways += [partial(_with_stages, shape, first, first.num_stages + more) for more in (-2, -1, 1, 2)]
    else:
        if shape.decoded:
            large, units = () if shape.by_block else (144, 160, _LARGE_DECODED, _MAX_DECODED), (2, 4)
        else:  # scaled beside products, sums of two parts do not fit registers
            large, units = (176, 192, 208, 224, MAX_BLOCK_N), (1,) if shape.by_block else (1, 2)
        cuts = itertools.starmap(_Cut, itertools.product((MAX_WIDTH, *large), (2,), units))
        ways = [partial(_deepest, shape, cut) for cut in cuts]
        if shape.sums_may_be_own:
            own = itertools.starmap(_Cut, itertools.product((176, 208, MAX_BLOCK_N), (2,), (2, 4)))
            ways += [partial(_deepest, shape, cut, own_sums=True) for cut in own]
    found = [first]
    for way in ways:
        try:
            found.append(way())
        except ValueError:  # registers or shared memory do not hold it
            continue
    return list(dict.fromkeys(found))
