"""Grouping: assignments of tokens to experts, sorted and split into blocks, under jit with static shapes.

An *assignment* is one (token, slot) pair of a routing of T tokens to k experts each; there are R = T * k of them, and
assignment `a` belongs to token `a // k`. Many tokens: assignments are sorted by expert, and each expert's rows split
into *blocks* of at most `block_m` rows, the work items of kernels (`many`). Few tokens: nothing is sorted, and each
expert in use is one block of all tokens (`few`).

On a GPU a kernel takes at least about 2 us, so small steps are written as counting and bit operations, which XLA fuses.
"""

from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmx.util.checks import check_array, check_int
from jmx.util.typing import AnyArray, Array, Float, Float32, Int32, Integer

_CHUNK = 64  # assignments; 128 to 512 took up to twice the time on an H200
_WORD = 32  # bits
_COMPARED = 64  # up to so many chunks, sums over all pairs of chunks are cheaper than the kernels of cumsum


class Groups(NamedTuple):
    """Assignments sorted by expert.

    `order` (R,) int32: the assignment at each sorted position; those of one expert keep token order.
    `inverse` (R,) int32: the sorted position of each assignment.
    `sizes` (E,) int32: assignments of each expert. Ids outside 0..E-1 are sorted last and not counted.
    """

    order: Int32[Array, " R"]
    inverse: Int32[Array, " R"]
    sizes: Int32[Array, " E"]


def group(expert_ids: Integer[AnyArray, "T k"], num_experts: int) -> Groups:
    """Groups `expert_ids` (T, k), any integer dtype, by expert; see `Groups`.

    It is a counting sort: an assignment comes after those with lower keys, those with its key in earlier chunks, and
    those with its key before it in its chunk. From 1024 tokens on, it takes a quarter to a half of the time of XLA's
    sort on an H200.
    """
    check_array("expert_ids", expert_ids, jnp.integer)
    num_experts = check_int("num_experts", num_experts, least=1)
    keys = _keys(expert_ids.reshape(-1), num_experts)  # flat first: XLA's faster reductions do not fuse with a reshape
    rank, sizes = _rank(keys, num_experts)
    starts = _sums_below(sizes)
    inverse = starts.at[keys].get(mode="promise_in_bounds") + rank
    index = jnp.arange(keys.size, dtype=jnp.int32)
    order = jnp.zeros_like(index).at[inverse].set(index, unique_indices=True, mode="promise_in_bounds")
    return Groups(order, inverse, sizes[:num_experts])


def _rank(keys: Int32[Array, " R"], num_experts: int) -> tuple[Int32[Array, " R"], Int32[Array, " n"]]:
    """The number of assignments before each one with its key, one of 0..E, and of all with each key (E + 1,)."""
    num_chunks = max(1, -(-keys.size // _CHUNK))
    padding = num_chunks * _CHUNK - keys.size
    chunks = jnp.pad(keys, (0, padding), constant_values=num_experts + 1).reshape(num_chunks, _CHUNK)
    counts = (chunks[:, :, None] == jnp.arange(num_experts + 1)[None, None]).sum(axis=1, dtype=jnp.int32)
    before = _prefix(counts)
    earlier = jnp.arange(_CHUNK)[None] < jnp.arange(_CHUNK)[:, None]
    nth = ((chunks[:, :, None] == chunks[:, None, :]) & earlier[None]).sum(axis=2, dtype=jnp.int32)
    rank = jnp.take_along_axis(before[:-1], chunks, axis=1, mode="clip") + nth
    return rank.reshape(-1)[: keys.size], before[-1]


def _prefix(counts: Int32[Array, "C n"]) -> Int32[Array, "C+1 n"]:
    """(C, n) -> (C + 1, n): exclusive sums of the rows."""
    num_rows = counts.shape[0]
    if num_rows > _COMPARED:
        return jnp.pad(jnp.cumsum(counts, axis=0), ((1, 0), (0, 0)))
    above = jnp.arange(num_rows)[None] < jnp.arange(num_rows + 1)[:, None]
    return jnp.where(above[:, :, None], counts[None], 0).sum(axis=1, dtype=jnp.int32)


def _sums_below(values: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """(n,) -> (n,): exclusive sums, by a reduction of all pairs, which takes fewer kernels than cumsum."""
    index = jnp.arange(values.size)
    return jnp.where(index[None] < index[:, None], values[None], 0).sum(axis=1, dtype=jnp.int32)


def _keys(expert_ids: Integer[AnyArray, "*shape"], num_experts: int) -> Int32[Array, "*shape"]:
    """Ids as int32, and E for those outside 0..E-1."""
    if expert_ids.dtype.itemsize < 4:  # `num_experts` might wrap around in a byte
        expert_ids = expert_ids.astype(jnp.int32)
    inside = (expert_ids >= 0) & (expert_ids < num_experts)
    return jnp.where(inside, expert_ids, num_experts).astype(jnp.int32)


class Blocks(NamedTuple):
    """Work items: B blocks, each some rows of one expert; B is the most that any routing needs.

    `experts` (B,) int32: the expert of each block. Those after the last real block repeat its expert, so that no
        further weights are read for them.
    `x_rows`, `out_rows`: each block's first row in the rows read and in those written: (B,) int32, or an int n if block
        b has row n * b.
    `counts`: the number of rows of each block: (B,) int32, 0 after the last real block; or an int if all have as many.
    `num_blocks`: the number of real blocks: () int32, or (B,) times the same, or an int.
    `counters`: zeros that a kernel of products may count in: int32, B or more; None: it makes them itself.

    Fields known while tracing are ints: XLA would compute them as arrays in separate kernels.
    """

    experts: Int32[Any, " B"]
    x_rows: Any
    out_rows: Any
    counts: Any
    num_blocks: Any
    counters: Any = None

    def of_layer(self, first_expert: Int32[Array, ""] | int) -> "Blocks":
        """The same with experts numbered from `first_expert` on, for kernels that take ints, too.

        `num_blocks`, if not an int, is broadcast to (B,): a scalar would take a separate kernel.
        """
        ids, number = self.experts + first_expert, self.num_blocks
        number = number if isinstance(number, int) else jnp.broadcast_to(number, ids.shape)
        return self._replace(experts=ids, num_blocks=number)

    @property
    def zeros(self) -> Int32[Array, " n"]:
        """The counters, or B zeros, which XLA makes in the kernel that makes `experts`."""
        return self.experts >> 30 if self.counters is None else self.counters

    @property
    def arrays(self) -> "Blocks":
        """The fields that are arrays, as operands of a kernel; None for the others, and for counters."""
        return Blocks._make(None if isinstance(field, int) else field for field in self._replace(counters=None))

    def with_refs(self, refs: "Blocks") -> "Blocks":
        """The same inside a kernel that takes ints, too: with the refs of `arrays` instead of the arrays."""
        return Blocks._make(field if isinstance(field, int) else ref for field, ref in zip(self, refs, strict=True))

    @property
    def number(self) -> Any:
        """The number of real blocks, inside such a kernel, of the blocks that `of_layer` returns."""
        return self.num_blocks if isinstance(self.num_blocks, int) else self.num_blocks[0]

    def count_of(self, block: Any) -> Any:
        """The number of rows of a block, inside such a kernel."""
        return jnp.int32(self.counts) if isinstance(self.counts, int) else self.counts[block]

    @staticmethod
    def first_row(rows: Any, block: Any) -> Any:
        """A block's first row by `x_rows` or `out_rows`, inside such a kernel."""
        return block * rows if isinstance(rows, int) else rows[block]

    def as_arrays(self) -> "Blocks":
        """The same with arrays for ints, for kernels that take arrays only."""
        index = np.arange(self.experts.size, dtype=np.int32)
        rows = (index * rows if isinstance(rows, int) else rows for rows in (self.x_rows, self.out_rows))
        counts = self.counts
        if isinstance(counts, int):
            counts = jnp.where(index < self.num_blocks, np.int32(counts), np.int32(0))
        return Blocks(self.experts, *map(jnp.asarray, (*rows, counts, self.num_blocks)))


class Work(NamedTuple):
    """Blocks, and the rows of tokens in them (dispatch) and of their results (combine).

    `row_of` (T, k) int32: the row that holds the result of each assignment, -1 where its id is outside 0..E-1.
    `token_of_row` (R,) int32: the token that each row reads; None if blocks read the tokens in their own order.
    """

    blocks: Blocks
    row_of: Int32[Array, "T k"]
    token_of_row: Int32[Array, " R"] | None

    @property
    def num_rows(self) -> int:
        """R, the number of rows of results."""
        if self.token_of_row is not None:
            return self.token_of_row.size
        return self.blocks.experts.size * self.blocks.out_rows

    @property
    def is_single(self) -> bool:
        """Whether it is of a single token, with a block for each slot (`single`): slot s has row s * `out_rows`."""
        num_blocks = self.blocks.num_blocks
        return self.token_of_row is None and isinstance(num_blocks, int) and self.row_of.shape == (1, num_blocks)


def few(expert_ids: Integer[AnyArray, "T k"], num_experts: int, align: int = 1) -> Work:
    """A block of all T tokens for each expert in `expert_ids` (T, k), of any integer dtype.

    Block b writes T rows from row b * T' on; T' is T rounded up to a multiple of `align`, a power of two.
    """
    num_tokens, top_k = expert_ids.shape
    keys = _keys(expert_ids, num_experts)
    num_words = -(-num_experts // _WORD)
    one = jnp.uint32(1)

    # The experts in use, as bits of words.
    here = keys[..., None] // _WORD == jnp.arange(num_words)[None, None]
    bits = jnp.where(here & (keys < num_experts)[..., None], one << (keys % _WORD).astype(jnp.uint32)[..., None], 0)
    used = lax.reduce(bits, np.uint32(0), lax.bitwise_or, (0, 1))

    def rank(ids: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
        """How many experts below each id are in use."""
        shifts = (jnp.clip(ids - word * _WORD, 0, _WORD).astype(jnp.uint32) for word in range(num_words))
        below = ((one << shift) - one for shift in shifts)  # 1 << 32 is 0 in jax, so that all bits are set
        counts = (lax.population_count(used[i] & mask).astype(jnp.int32) for i, mask in enumerate(below))
        return reduce(jnp.add, counts)

    num_blocks = rank(jnp.int32(num_experts))
    index = np.arange(min(num_tokens * top_k, num_experts), dtype=np.int32)  # a constant, without a kernel
    nth = jnp.minimum(index, num_blocks - 1)
    experts = jnp.zeros_like(nth)
    for step in (1 << i for i in reversed(range(num_experts.bit_length()))):  # the last id of rank `nth`, by bisection
        experts = jnp.where(rank(experts + step) <= nth, experts + step, experts)

    stride = _aligned(num_tokens, align)
    rows = rank(keys) * stride + jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    blocks = Blocks(experts, 0, stride, num_tokens, num_blocks)
    return Work(blocks, jnp.where(keys < num_experts, rows, -1), None)


def single(expert_ids: Integer[AnyArray, "1 k"], num_experts: int, align: int = 1) -> Work:
    """`few` for a single token (1, k): every slot is a block, so that ids are not compared.

    A slot outside 0..E-1 is a block of an existing expert, whose result is not read. An expert that occurs twice is
    computed twice.
    """
    keys = _keys(expert_ids.reshape(-1), num_experts)
    rows = jnp.where(keys < num_experts, np.arange(keys.size, dtype=np.int32) * align, -1)
    blocks = Blocks(jnp.minimum(keys, num_experts - 1), 0, align, 1, keys.size)
    return Work(blocks, rows.reshape(expert_ids.shape), None)


def unsorted(expert_ids: Integer[AnyArray, "T k"], num_experts: int, align: int = 1) -> Work:
    """`single` for a single token, else `few`."""
    return (single if expert_ids.shape[0] == 1 else few)(expert_ids, num_experts, align)


class SortedRows(NamedTuple):
    """Rows of assignments sorted by expert; each expert's begin at a multiple of `align`.

    `row_of` (T, k) int32: the row of each assignment, -1 where its id is outside 0..E-1.
    `assignment_of_row` (R,) int32: the assignment of each row, -1 for rows between those of experts.
    `sizes`, `starts` (E,) int32: the number of rows of each expert, and its first one.
    """

    row_of: Int32[Array, "T k"]
    assignment_of_row: Int32[Array, " R"]
    sizes: Int32[Array, " E"]
    starts: Int32[Array, " E"]

    def blocks(self, block_m: int, align: int, *, whole: bool = False) -> Blocks:
        """Work items of at most `block_m` rows, as those of `many`. `align` divides that of the rows."""
        return _split_groups(self.sizes, self.starts, self.row_of.size, Cut(block_m, align, whole))

    def expert_of(self, rows: Int32[Array, " n"]) -> Int32[Array, " n"]:
        """The expert of each of some rows, by its number; of rows between those of experts, any expert."""
        return jnp.sum(self.starts[None] <= rows[:, None], axis=1, dtype=jnp.int32) - 1


def sort_rows(expert_ids: Integer[AnyArray, "T k"], num_experts: int, align: int) -> SortedRows:
    """Rows for the assignments of `expert_ids` (T, k), any integer dtype; `align` is a power of two."""
    rows, sizes, starts = _sorted(expert_ids, num_experts, align)
    num_rows = max_rows(rows.size, num_experts, align)
    assignments = jnp.arange(rows.size, dtype=jnp.int32)
    of_row = jnp.full(num_rows, -1, jnp.int32).at[jnp.where(rows >= 0, rows, num_rows)].set(assignments, mode="drop")
    return SortedRows(rows.reshape(expert_ids.shape), of_row, sizes, starts)


class Cut(NamedTuple):
    """How sorted rows are split into blocks.

    `block_m`: the most rows of a block, a multiple of `align`, by which each expert's rows begin, a power of two.
    `whole`: whether all blocks of an expert but the last have `block_m` rows; otherwise they differ by at most `align`.
    `largest_first`: whether larger blocks come before smaller ones (sizes in multiples of `align` if they are not
        `whole`), those of an expert next to each other but for its last one; otherwise experts are in the order of ids.
    """

    block_m: int
    align: int = 1
    whole: bool = False
    largest_first: bool = False


def many(expert_ids: Integer[AnyArray, "T k"], num_experts: int, cut: Cut) -> Work:
    """Assignments of `expert_ids` (T, k), any integer dtype, sorted by expert and split into blocks.

    Blocks read and write the same rows, in sorted order. Rows between those of experts read token 0.
    """
    align = cut.align
    top_k = expert_ids.shape[1]
    rows, sizes, starts = _sorted(expert_ids, num_experts, align)
    num_rows = max_rows(rows.size, num_experts, align)
    token_of_row = jnp.zeros(num_rows, jnp.int32)
    token_of_row = token_of_row.at[jnp.where(rows >= 0, rows, num_rows)].set(
        jnp.arange(rows.size, dtype=jnp.int32) // top_k, mode="drop"
    )
    blocks = _split_groups(sizes, starts, rows.size, cut)
    return Work(blocks, rows.reshape(expert_ids.shape), token_of_row)


def _sorted(
    expert_ids: Integer[AnyArray, "T k"], num_experts: int, align: int
) -> tuple[Int32[Array, " n"], Int32[Array, " E"], Int32[Array, " E"]]:
    """The row of each assignment, -1 where its id is outside 0..E-1; each expert's number of rows and first one."""
    keys = _keys(expert_ids.reshape(-1), num_experts)
    rank, sizes = _rank(keys, num_experts)
    starts = _sums_below(_aligned(sizes, align))
    rows = jnp.where(keys < num_experts, starts.at[keys].get(mode="promise_in_bounds") + rank, -1)
    return rows, sizes[:num_experts], starts[:num_experts]


def _aligned(sizes: Any, align: int) -> Any:
    """Sizes rounded up to a multiple of `align`, a power of two; by bit operations, which XLA does not store."""
    return (sizes + (align - 1)) & -align


def max_rows(num_assignments: int, num_experts: int, align: int) -> int:
    """The most rows that `many` can need: each expert in use has fewer than `align` unused ones."""
    rows = num_assignments + min(num_assignments, num_experts) * (align - 1)
    return -(-rows // align) * align


def max_blocks(num_assignments: int, num_experts: int, block_m: int) -> int:
    """The most blocks that any routing can need, known while tracing."""
    whole = max(0, num_assignments - num_experts) // block_m  # each expert has one block that may not be full
    return min(num_assignments, num_experts + whole)


def by_row(weights: Float[AnyArray, "T k"], work: Work, num_rows: int) -> Float32[Array, " R"]:
    """Routing weights (T, k) -> float32 (num_rows,), in the order of rows; 0 for rows of no assignment."""
    rows = jnp.where(work.row_of < 0, num_rows, work.row_of).reshape(-1)
    zeros = jnp.zeros(num_rows, jnp.float32)
    return zeros.at[rows].set(weights.astype(jnp.float32).reshape(-1), mode="drop")


def expert_of_row(work: Work, expert_ids: Integer[AnyArray, "T k"], num_rows: int) -> Int32[Array, " R"]:
    """The expert of each row, int32 (num_rows,); any expert for rows of no assignment."""
    rows = jnp.where(work.row_of < 0, num_rows, work.row_of)
    return jnp.zeros(num_rows, jnp.int32).at[rows].set(expert_ids.astype(jnp.int32), mode="drop")


def weigh(rows: Float[Array, "R H"], work: Work, weights: Float[AnyArray, "T k"]) -> Float[Array, "R H"]:
    """Rows (R, H) times the routing weights (T, k) of their assignments, in rows' dtype."""
    return weighted(rows, by_row(weights, work, rows.shape[0])[:, None])


def weighted(rows: Float[Array, "*rows H"], weights: Float[Array, "*weights 1"]) -> Float[Array, "..."]:
    """Rows times their routing weights, multiplied in float32, in rows' dtype."""
    return (rows.astype(jnp.float32) * weights.astype(jnp.float32)).astype(rows.dtype)


def combine(
    parts: Float[Array, "P R H"], work: Work | SortedRows, weights: Float[AnyArray, "T k"] | None
) -> Float32[Array, "T H"]:
    """Rows of results -> each token's sum (T, H), float32, in the order of its slots.

    Args:
        parts: floats (P, R, H), summed over P in float32 to the rows; rows of no assignment may hold anything.
        weights: (T, k), or None if rows are weighted already.
    """
    total = jnp.zeros((work.row_of.shape[0], parts.shape[-1]), jnp.float32)
    for slot in range(work.row_of.shape[1]):
        row = work.row_of[:, slot]
        if isinstance(work, Work) and work.is_single:  # a row whose number is known is read without waiting for it
            found = [part[slot * work.blocks.out_rows][None] for part in parts]
        else:
            found = [part.at[jnp.maximum(row, 0)].get(mode="promise_in_bounds") for part in parts]
        found = [part.astype(jnp.float32) for part in found]
        term = sum(found[1:], found[0])
        if weights is not None:
            term *= weights[:, slot, None].astype(jnp.float32)
        total += jnp.where(row[:, None] >= 0, term, 0)
    return total


def split_groups(sizes: Int32[Array, " E"], num_assignments: int, block_m: int) -> Blocks:
    """Splits groups of `sizes` (E,) into near-equal blocks of at most `block_m` sorted rows; see `Blocks`."""
    return _split_groups(sizes, _sums_below(sizes), num_assignments, Cut(block_m))


def _split_groups(sizes: Int32[Array, " E"], starts: Int32[Array, " E"], num_assignments: int, cut: Cut) -> Blocks:
    """`split_groups` with groups from row `starts` on; blocks but a group's last have a multiple of `align` rows."""
    block_m, align, whole, _ = cut
    (num_experts,) = sizes.shape
    per_expert = -(-sizes // block_m)
    ids = jnp.arange(num_experts, dtype=jnp.int32)
    together, firsts, lasts = _places(sizes, per_expert, cut)
    num_blocks = per_expert.sum(dtype=jnp.int32)
    index = jnp.arange(max_blocks(num_assignments, num_experts, block_m), dtype=jnp.int32)
    real = jnp.minimum(index, num_blocks - 1)[:, None]
    first, last, joined = firsts[None], lasts[None], together[None]
    mine = ((first <= real) & (real < first + joined)) | ((real == last) & (joined < per_expert[None]))
    experts = jnp.where(mine, ids[None], 0).sum(axis=1, dtype=jnp.int32)
    size, shares = sizes[experts], per_expert[experts]
    nth = index - firsts[experts]
    nth = jnp.where((index == lasts[experts]) & (together[experts] < shares), together[experts], nth)
    shares = jnp.maximum(shares, 1)
    units = _aligned(size, align) // align
    # If an expert's rows do not divide evenly, its first blocks have `align` rows more.
    before_block = (nth * (units // shares) + jnp.minimum(nth, units % shares)) * align
    here = (units // shares + (nth < units % shares).astype(jnp.int32)) * align
    if whole:
        before_block, here = nth * block_m, block_m
    rows = starts[experts] + before_block
    counts = jnp.where(index < num_blocks, jnp.minimum(here, size - before_block), 0)
    return Blocks(experts, rows, rows, counts, num_blocks)


def _places(
    sizes: Int32[Array, " E"], per_expert: Int32[Array, " E"], cut: Cut
) -> tuple[Int32[Array, " E"], Int32[Array, " E"], Int32[Array, " E"]]:
    """For each expert how many of its blocks are next to each other, the place of the first, and that of one more."""
    ids = jnp.arange(sizes.size, dtype=jnp.int32)
    earlier = ids[None] < ids[:, None]
    if not cut.largest_first:
        return per_expert, _sums_below(per_expert), jnp.zeros_like(sizes)
    if cut.whole:
        full = sizes // cut.block_m
        rest = sizes - full * cut.block_m
        before = ((rest[None] > rest[:, None]) | ((rest[None] == rest[:, None]) & earlier)) & (rest > 0)[None]
        return full, _sums_below(full), full.sum(dtype=jnp.int32) + before.sum(axis=1, dtype=jnp.int32)
    largest = -(-(_aligned(sizes, cut.align) // cut.align) // jnp.maximum(per_expert, 1))
    before = (largest[None] > largest[:, None]) | ((largest[None] == largest[:, None]) & earlier)
    firsts = jnp.where(before, per_expert[None], 0).sum(axis=1, dtype=jnp.int32)
    return per_expert, firsts, jnp.zeros_like(sizes)
