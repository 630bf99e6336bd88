"""The tunable sizes of the kernel, the shared memory that they take, the heuristic, and the candidates for tuning."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any, NamedTuple

from jmx.pallas.sm90.config import FEW_TOKENS, MAX_BLOCK_N, SHARED_MEMORY, BaseConfig, check_stages, widths

ROW_BYTES = 128  # bytes of a row in a stage: 128 columns of e4m3
MAX_STAGES = 16
MAX_UNITS = 4  # 512 columns, for which the tensor cores' sums of some 14 bits are precise enough
MAX_OWN_UNITS = 32  # 4096 columns, up to which `own_sums` may be requested; int32 sums are exact
_MAX_EXACT_UNITS = 1024  # 2^17 columns, up to which int32 holds sums of products of 8-bit integers
_UNIT_REGISTERS = 16  # registers of a thread for a decoded unit; sums and totals of a block take one per row
_SUM_REGISTERS = {3: 112, 4: 72, 5: 56}  # that ptxas finds for these, by warpgroups, if a launch has fewer than 168
MAX_WIDTH = 128  # rows of a product of e4m3 weights, for which registers hold two totals and one sum
_MAX_EXACT_STEP = 32  # rows of a product of integers, above which they are multiples of 16
_MAX_DECODED = 192  # rows of a product of 4-bit weights: a total, a sum, and two operands
_LARGE_DECODED = 176  # the same without spills
_LARGE_INTEGERS = 208  # rows of a product of 8-bit integers under scales of 128 columns: a total and a sum
_STAGED_BYTES = 256  # of a row of a tile's results, at most: 64 in float32
_STAGED_OF_LARGE = 8192  # bytes of results of large blocks, where stages leave little space
_BARRIER_BYTES = 2048
_QUANTIZE_BYTES = 1024  # of rows' largest magnitudes, or of the scales of resident rows, with alignment
_MIN_BLOCK = 1.25  # rows of a block, in average rows of an expert, if it is made smaller for more warpgroups
_WHOLE_BLOCKS = 2  # blocks of an expert, on average, from which on all but the last are whole
# Bytes of weights in the pipeline of a launch that quantizes rows: with more, reads and signals of rows wait longer.
_PIPELINE_BYTES = 136 << 10
_PIPELINE_BYTES_OF_PAIRS = 160 << 10  # the same where items are of two tiles: see `Shape.takes_pairs_of_tiles`
_PIPELINE_BYTES_RESIDENT = 112 << 10  # the same with resident rows, which every SM loads
_PIPELINE_BYTES_SHARED = 120 << 10  # the same where warpgroups share columns
_MIN_PIPELINE_STEPS = 3  # steps of a warpgroup that such a pipeline holds in any case
_MAX_FUSED_BLOCK_N = 64  # up to here shared memory holds the results of both products
_MAX_FUSED_ROWS = 3  # rows that a warpgroup quantizes in the time of a separate launch
_SPLIT_COST = 6  # of a part of the columns, in the units of `_cost`
_SHARING_WARPGROUPS = 4  # warpgroups that share columns
_SHARING_TOKENS = range(6, 17)  # for which that was measured to be faster
_SHARING_MAX_ROWS = 2  # of an expert, on average
_SHARING_MIN_UNITS = 16  # of columns


@dataclass(frozen=True)
class Config(BaseConfig):
    """The sizes of a layer's blocks, tiles and pipeline.

    Args:
        block_n: the maximal number of rows of a block; a multiple of 8.
        warpgroups_m: warpgroups next to each other along the weight's rows, 64 each.
        units: stages that a warpgroup takes at a time. The tensor cores accumulate these, with fewer bits than float32.
        num_stages: stages of the pipeline, of 128 columns for each of `warpgroups_k`.
        split_k: parts of `down`'s columns that are computed separately and added at the end.
        warpgroups_k: warpgroups that share the columns of the same rows, and add their sums at the end.
        own_sums: whether the tensor cores accumulate all columns (fast accumulation). Then registers hold products of
            256 rows.
        fuse_quantize: whether rows are quantized in the launch of both products; if not, there are four launches.
        resident_rows: whether in that launch each SM quantizes a block's rows for itself, and keeps all of their
            columns in shared memory while it multiplies them; for at most as many tokens as `warpgroups_m`.
    """

    block_n: int
    warpgroups_m: int
    units: int
    num_stages: int
    split_k: int = 1
    warpgroups_k: int = 1
    own_sums: bool = False
    fuse_quantize: bool = False
    resident_rows: bool = False

    def __post_init__(self) -> None:
        self.check_sizes("split_k")
        if self.warpgroups_k > 1 and self.block_n > MAX_WIDTH:
            raise ValueError(f"`warpgroups_k` (={self.warpgroups_k}) must be 1 above {MAX_WIDTH} rows of a block")
        if not 1 <= self.units <= MAX_UNITS:
            raise ValueError(f"`units` (={self.units}) must be in 1..{MAX_UNITS}")
        if not self.units <= self.num_stages <= MAX_STAGES:
            raise ValueError(f"`num_stages` (={self.num_stages}) must be in {self.units}..{MAX_STAGES}")
        excess = self._sum_registers - _SUM_REGISTERS.get(self.num_warpgroups, self._sum_registers)
        if excess > 0:
            raise ValueError(
                f"`block_n` (={self.block_n}) must be at most {self.block_n - excess}, for which "
                f"{self.num_warpgroups} warpgroups have registers with {self.units} units"
            )
        if self.block_n % self._step:
            raise ValueError(f"`block_n` (={self.block_n}) must be a multiple of {self._step} above {MAX_WIDTH}")
        if self.resident_rows and not self.fuse_quantize:
            raise ValueError(f"`resident_rows` (={self.resident_rows}) must be False without `fuse_quantize`")
        if self.resident_rows and self.warpgroups_k > 1:
            raise ValueError(f"`resident_rows` (={self.resident_rows}) must be False with `warpgroups_k` above 1")

    @property
    def _sum_registers(self) -> int:
        return self.block_n + _UNIT_REGISTERS * self.units

    @property
    def _step(self) -> int:
        return 8 if self.block_n <= MAX_WIDTH else 16

    @property
    def staged_bytes(self) -> int:
        """Bytes of shared memory for a tile's results, before they are copied to global memory."""
        return self.block_n * _STAGED_BYTES if self.block_n <= MAX_WIDTH else _STAGED_OF_LARGE

    def widths(self, exact: bool) -> tuple[int, ...]:
        """The numbers of rows that the kernel is compiled for; `exact`: for products of integers."""
        return tuple(n for n in widths(self.block_n, self._step) if not exact or _is_width_of_integers(n))

    @property
    def scales_n(self) -> int:
        """Scales of a stage's rows, with padding: stages must begin at multiples of 128 bytes."""
        return -(-self.block_n // 32) * 32

    def row_slots(self, row_units: int) -> int:
        """Units of a block's rows that shared memory holds; `row_units`: units of a row."""
        slots = self.num_stages * self.warpgroups_k
        return max(slots, row_units) if self.resident_rows else slots

    def shared_memory(self, unit_bytes: int, row_units: int) -> int:
        """An upper bound of the shared memory that the kernel uses, in bytes.

        Args:
            unit_bytes: of a unit of the weight.
            row_units: units of 128 columns of a row, of x or h, whichever has more.
        """
        weights = self.num_stages * self.num_warpgroups * unit_bytes
        rows = self.row_slots(row_units) * (self.block_n * ROW_BYTES + 4 * self.scales_n)
        results = self.warpgroups_m * self.staged_bytes * (2 if self.fuse_quantize else 1)
        others = _BARRIER_BYTES + _QUANTIZE_BYTES * (self.fuse_quantize + self.resident_rows)
        return weights + rows + results + 4 * self.partial_sums + others

    def parts_of(self, width: int, decoded: bool) -> int:
        """The number of products, of equally many rows, in which a block of `width` rows is computed."""
        most = MAX_BLOCK_N if self.own_sums else _MAX_DECODED if decoded else MAX_WIDTH
        return -(-width // most)

    @property
    def tokens_may_be_a(self) -> bool:
        """Whether the sizes allow tokens as operand A; see `tokens_as_a`."""
        return (self.warpgroups_m, self.warpgroups_k) == (2, 1) and self.block_n % MAX_WIDTH == 0

    def check(self, shape: "Shape") -> None:
        """Raises ValueError unless it supports the shape."""
        check_stages(self, self.shared_memory(shape.unit_bytes, max(shape.units)))
        if self.resident_rows and shape.weighted:
            raise ValueError(f"`resident_rows` (={self.resident_rows}) must be False where inputs differ by expert")
        if self.resident_rows and shape.num_tokens > self.warpgroups_m:
            rule = f"must be False for more tokens than `warpgroups_m` (={self.warpgroups_m}), here {shape.num_tokens}"
            raise ValueError(f"`resident_rows` (={self.resident_rows}) {rule}")
        if self.fuse_quantize and shape.one_scale:
            raise ValueError(f"`fuse_quantize` (={self.fuse_quantize}) must be False where all rows share a scale")
        # For a row of one unit Pallas makes TMA read that unit in place of the padding after it.
        if self.split_k > 1 and shape.units[1] == 1:
            raise ValueError(f"`split_k` (={self.split_k}) must be 1 where a row of `down` has one unit of columns")
        if self.warpgroups_k > 1 and min(shape.units) == 1:
            raise ValueError(f"`warpgroups_k` (={self.warpgroups_k}) must be 1 where a row has one unit of columns")
        if self.own_sums and shape.by_block:
            raise ValueError(f"`own_sums` (={self.own_sums}) must be False where scales belong to 128 columns")
        if shape.exact and not shape.by_block and not self.own_sums:
            raise ValueError(f"`own_sums` (={self.own_sums}) must be True for integers with scales of whole rows")
        if shape.exact and not _is_width_of_integers(self.block_n):
            rule = f"must be a multiple of 16 above {_MAX_EXACT_STEP} for products of integers"
            raise ValueError(f"`block_n` (={self.block_n}) {rule}")
        if self.own_sums and not shape.sums_may_be_own:
            most = shape.max_own_units * ROW_BYTES
            raise ValueError(f"`own_sums` (={self.own_sums}) must be False for more than {most} columns")
        if shape.exact and shape.by_block and not shape.decoded and self.block_n > _LARGE_INTEGERS:
            raise ValueError(
                f"`block_n` (={self.block_n}) must be at most {_LARGE_INTEGERS} for integers with scales of 128 columns"
            )
        if shape.decoded and self.parts_of(self.block_n, decoded=True) > 1:
            raise ValueError(
                f"`block_n` (={self.block_n}) must be at most {_MAX_DECODED} for 4-bit weights without `own_sums`"
            )


def _is_width_of_integers(n: int) -> bool:
    """Whether `wgmma` multiplies n rows of integers."""
    return n <= _MAX_EXACT_STEP or n % 16 == 0


class Shape(NamedTuple):
    """What a configuration is chosen by.

    Args:
        unit_bytes: of a unit of the weight.
        decoded: whether its elements become 8 bits in registers.
        exact: whether sums are int32.
        fast: whether the tensor cores' own sums are preferred where they are float32.
        by_block: whether scales, of weights or inputs, belong to 128 columns.
        inputs_by_block: whether those of inputs do.
        num_tokens, top_k, num_experts: of the layer.
        tiles, units: of 64 rows, and of 128 columns, of `gate_up` and `down`.
        num_cores: SMs.
        weighted: whether routing weights multiply inputs, which then differ by expert.
        one_scale: whether all rows share a dynamic scale, which is known when all of them are there.
    """

    unit_bytes: int
    decoded: bool
    exact: bool
    fast: bool
    by_block: bool
    inputs_by_block: bool
    num_tokens: int
    top_k: int
    num_experts: int
    tiles: tuple[int, int]
    units: tuple[int, int]
    num_cores: int
    weighted: bool
    one_scale: bool = False

    @property
    def rows(self) -> float:
        """The average number of rows of an expert."""
        return self.num_tokens * self.top_k / self.num_experts

    @property
    def rows_with_padding(self) -> int:
        """The maximal number of rows of all experts, each of which begins at a multiple of 8."""
        assignments = self.num_tokens * self.top_k
        return assignments + 7 * min(assignments, self.num_experts)

    @property
    def block_n(self) -> int:
        """Rows that few experts exceed with random routing: the average and three standard deviations."""
        most = int(self.rows + 3 * sqrt(self.rows))
        step = 8 if most <= (_MAX_EXACT_STEP if self.exact else MAX_WIDTH) else 16
        return min(max(8, -(-most // step) * step), self._max_block_n)

    @property
    def tokens_as_a(self) -> bool:
        """Whether tokens may be operand A, of blocks of many: weights are e4m3, and inputs have scales by block."""
        return self.inputs_by_block and not self.decoded

    @property
    def whole_blocks(self) -> bool:
        """Whether an expert's blocks are whole but the last, where it has several of INT4 in groups: blocks of
        near-equal size are computed up to the next multiple of 16 rows."""
        in_groups = self.by_block and not self.inputs_by_block and self.decoded
        return in_groups and self.rows >= _WHOLE_BLOCKS * self._max_block_n

    @property
    def _max_block_n(self) -> int:
        if not self.by_block:
            return MAX_BLOCK_N
        if self.tokens_as_a:
            return MAX_BLOCK_N if self.rows >= _WHOLE_BLOCKS * MAX_BLOCK_N else MAX_WIDTH
        if self.inputs_by_block or not (self.decoded or self.exact):
            return MAX_WIDTH  # scales are applied to each unit's sums, in registers, while the next product runs
        return _LARGE_DECODED if self.decoded else _LARGE_INTEGERS

    @property
    def max_own_units(self) -> int:
        """Units of a row, up to which `own_sums` is supported."""
        return _MAX_EXACT_UNITS if self.exact else MAX_OWN_UNITS

    @property
    def sums_may_be_own(self) -> bool:
        """Whether `own_sums` is supported."""
        return not self.by_block and max(self.units) <= self.max_own_units

    @property
    def sums_are_own(self) -> bool:
        """Whether `own_sums` is required, since sums are exact."""
        return self.exact and not self.by_block

    @property
    def columns_pay_to_share(self) -> bool:
        """Whether warpgroups should share an item's columns: with few rows this gives more items, which are divided
        more evenly."""
        few = self.num_tokens in _SHARING_TOKENS and self.rows <= _SHARING_MAX_ROWS
        return few and not self.by_block and min(self.units) >= _SHARING_MIN_UNITS

    @property
    def takes_pairs_of_tiles(self) -> bool:
        """Whether two warpgroups are fastest, of any number: items of two tiles are divided more evenly than larger
        ones, and 8-bit elements with scales of whole rows need no more warpgroups to multiply them."""
        return not (self.decoded or self.by_block) and self.num_tokens >= _SHARING_TOKENS.stop

    @property
    def experts_in_use(self) -> int:
        """The expected number with random routing."""
        idle = (1 - self.top_k / self.num_experts) ** self.num_tokens
        return round(self.num_experts * (1 - idle))


def _shallow(block_n: int, warpgroups_m: int, units: int = 2, **others: Any) -> Config:
    """A configuration with the fewest stages; see `deepest`."""
    return Config(block_n, warpgroups_m, units, num_stages=units, **others)


def deepest(shape: Shape, config: Config) -> Config:
    """`config` with as many stages as fit, or as are useful. ValueError if not even its `units` of them fit."""
    most = MAX_STAGES
    if config.fuse_quantize:
        pipeline_bytes = _PIPELINE_BYTES_OF_PAIRS if shape.takes_pairs_of_tiles else _PIPELINE_BYTES
        pipeline_bytes = _PIPELINE_BYTES_SHARED if config.warpgroups_k > 1 else pipeline_bytes
        pipeline_bytes = _PIPELINE_BYTES_RESIDENT if config.resident_rows else pipeline_bytes
        stage_bytes = config.num_warpgroups * shape.unit_bytes
        most = min(most, max(pipeline_bytes // stage_bytes, _MIN_PIPELINE_STEPS * config.units))
    config = replace(config, num_stages=most)
    while (needed := config.shared_memory(shape.unit_bytes, max(shape.units))) > SHARED_MEMORY:
        if config.num_stages == config.units:
            check_stages(config, needed)
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def heuristic(shape: Shape) -> Config:
    """A configuration for shapes without a tuned one, from the average number of rows of an expert."""
    if shape.block_n > MAX_WIDTH:
        own_sums = shape.sums_are_own or (shape.fast and shape.sums_may_be_own)
        block_n = shape.block_n if own_sums or not shape.decoded else min(shape.block_n, _LARGE_DECODED)
        units = 1 if shape.by_block and (shape.decoded or not shape.exact) else 2
        return deepest(shape, _shallow(block_n, 2, units, own_sums=own_sums))
    choices = [
        shallow
        for shallow in _choices(shape)
        if shallow.block_n == shape.block_n or shallow.block_n >= _MIN_BLOCK * shape.rows
    ]
    if shape.takes_pairs_of_tiles:
        choices = [shallow for shallow in choices if shallow.warpgroups_m == 2]
    config = _fused(shape, min(choices, key=partial(_cost, shape)))
    if not config.fuse_quantize or config.resident_rows or not shape.columns_pay_to_share:
        return config
    sharing = _shallow(shape.block_n, 1, warpgroups_k=_SHARING_WARPGROUPS, own_sums=shape.sums_are_own)
    sharing = _fused(shape, sharing)
    return sharing if sharing.fuse_quantize else config


def _fused(shape: Shape, shallow: Config) -> Config:
    """`deepest`, with quantization fused if warpgroups have few rows to quantize, and with resident rows if these leave
    at least half of the stages."""
    few = not shape.one_scale and shape.rows_with_padding <= _MAX_FUSED_ROWS * shallow.num_warpgroups * shape.num_cores
    fuse_quantize = few and shallow.block_n <= _MAX_FUSED_BLOCK_N
    config = deepest(shape, replace(shallow, fuse_quantize=fuse_quantize))
    if fuse_quantize and shape.num_tokens <= shallow.warpgroups_m and not shape.weighted:
        with suppress(ValueError):
            resident = deepest(shape, replace(shallow, fuse_quantize=True, resident_rows=True))
            if max(resident.units + 1, config.num_stages / 2) <= resident.num_stages:
                return resident
    return config


def _with_stages(shape: Shape, config: Config, num_stages: int) -> Config:
    config = replace(config, num_stages=num_stages)
    config.check(shape)
    return config


def _choices(shape: Shape) -> list[Config]:
    """What the heuristic chooses among, with the fewest stages; the other fields follow from the sizes."""
    splits = (1, 2, 3) if shape.num_tokens <= FEW_TOKENS and shape.units[1] > 1 else (1,)
    limits = ((m, _SUM_REGISTERS.get(m, MAX_WIDTH + 2 * _UNIT_REGISTERS) - 2 * _UNIT_REGISTERS) for m in (2, 3, 4, 5))
    own_sums = shape.sums_are_own

    def at_most(rows: int) -> int:
        return rows if not shape.exact or _is_width_of_integers(rows) else rows // 16 * 16

    return [
        _shallow(min(shape.block_n, at_most(most)), m, split_k=split, own_sums=own_sums)
        for m, most in limits
        for split in splits
    ]


def _cost(shape: Shape, config: Config) -> int:
    """The work of the busiest SM, in units; each unit of an item counts as if it had one warpgroup more.

    Of some ten configurations each at 1, 4 and 64 tokens it is least for the one that was the fastest on an H200.
    """
    cost = _SPLIT_COST * config.split_k
    for tiles, columns, parts in zip(shape.tiles, shape.units, (1, config.split_k), strict=True):
        items = shape.experts_in_use * -(-tiles // config.warpgroups_m) * parts
        cost += -(-items // shape.num_cores) * -(-columns // parts) * (config.warpgroups_m + 1)
    return cost


def candidates(shape: Shape) -> list[Config]:
    """Configurations to tune over, the heuristic's first: few, since compiling each takes half a minute."""
    first = heuristic(shape)
    found = [first]
    for make in _small_candidates(shape, first) if first.block_n <= MAX_WIDTH else _large_candidates(shape):
        with suppress(ValueError):  # registers or shared memory do not suffice
            config = make()
            config.check(shape)
            found.append(config)
    return list(dict.fromkeys(found))


def _small_candidates(shape: Shape, first: Config) -> Iterator[Callable[[], Config]]:
    """Those with blocks of few rows, around the heuristic's; a call makes one, or raises ValueError."""
    n, changed = first.block_n, {"num_stages": first.units, "fuse_quantize": False, "resident_rows": False}
    for shallow in _choices(shape):
        yield partial(_fused, shape, shallow)
    if n <= 16 and min(shape.units) > 1:
        for m, k in ((1, 3), (1, 4), (1, 5), (2, 2)):
            yield lambda m=m, k=k: _fused(shape, _shallow(n, m, warpgroups_k=k, own_sums=shape.sums_are_own))
    for more in (-16, -8, 8, 16):
        yield lambda more=more: _fused(shape, replace(first, **changed | {"block_n": n + more}))
    for units in (1, 3, 4):
        yield lambda units=units: _fused(shape, replace(first, **changed | {"units": units, "num_stages": units}))
    for fuse, resident in [(False, False), (True, False), *([(True, True)] if first.resident_rows else [])]:
        yield lambda fuse=fuse, resident=resident: deepest(
            shape, replace(first, num_stages=first.units, fuse_quantize=fuse, resident_rows=resident)
        )
    for more in (-2, -1, 1, 2):
        yield partial(_with_stages, shape, first, first.num_stages + more)


def _large_candidates(shape: Shape) -> Iterator[Callable[[], Config]]:
    """Those with blocks of many rows; a call makes one, or raises ValueError."""
    if shape.decoded:
        large, units = (144, 160, _LARGE_DECODED, _MAX_DECODED), (1, 2) if shape.by_block else (2, 4)
    else:  # with scales of 128 columns, registers do not hold the sums of two parts
        large, units = (176, 192, 208, 224, MAX_BLOCK_N), (1,) if shape.by_block else (1, 2)
    for n, count in itertools.product((MAX_WIDTH, *large), units):
        yield lambda n=n, count=count: _fused(shape, _shallow(n, 2, count, own_sums=shape.sums_are_own))
    if shape.sums_may_be_own:
        for n, count in itertools.product((176, 208, MAX_BLOCK_N), (2, 4)):
            yield lambda n=n, count=count: _fused(shape, _shallow(n, 2, count, own_sums=True))
