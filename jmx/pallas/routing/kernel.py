"""The kernel: from router logits to expert ids, weights and blocks of rows, by one CTA.

All of it is on a tile of tokens by experts in registers. The k best are found by k passes, each a maximum and the
lowest expert that has it; so a token never has an expert twice, and an assignment's place among those of its expert is
the number of earlier tokens with that expert, a sum along tokens. Each expert then writes its own blocks.

Rounding is that of `jmx.routing`: the same exponentials and quotients, sums in the order of slots.
"""

from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from jmx.pallas.routing.choice import Choice
from jmx.pallas.routing.sizes import Results, Sizes, power_of_two
from jmx.util.typing import Array, Bool, Float32, Int32, Shaped

Ref = Any

_LARGEST = float(jnp.finfo(jnp.float32).max)
_LEAST = -0x7F800001  # `_ordered` of -inf


def kernel(values: Ref, mask: Ref | None, bias: Ref | None, first: Ref | None, *refs: Ref, sizes: Sizes) -> None:
    """Routes all tokens.

    Args:
        values: (T, E) floating.
        mask: (T,) bool, or None.
        bias: (E,) float32 if the choice is biased, or None.
        first: (1,) int32, the first of the experts for which rows are grouped, if these are some; or None.
        refs: those of `Results` that are there.
    """
    given = iter(refs)
    out = Results._make(None if shape is None else next(given) for shape in Results.shapes(sizes))
    tokens, experts = (jnp.arange(n, dtype=jnp.int32) for n in sizes.tile)
    keys = keys_of(values, mask, bias, tokens, experts, sizes)
    best, ids, used = top_k(keys, experts, sizes.top_k)

    slots = jnp.arange(power_of_two(sizes.top_k), dtype=jnp.int32)[None, :]
    real = (tokens < sizes.num_tokens)[:, None] & (slots < sizes.top_k)

    def by_slot(ref: Ref, columns: Array) -> None:
        plgpu.store(ref.at[tokens[:, None], slots], columns, mask=real)

    id_of_slot = stacked(ids, slots)
    by_slot(out.expert_ids, id_of_slot)
    if out.weights is not None:
        by_slot(out.weights, stacked(softmax(keys, best, sizes.choice.softmax_of == "all"), slots))
    if sizes.form is None:
        return
    fill(out.counters, power_of_two(out.counters.shape[0]), 0)
    if sizes.form == "single":
        block = jnp.where(id_of_slot < 0, sizes.num_experts - 1, id_of_slot)
        plgpu.store(out.experts.at[slots + tokens[:, None]], block, mask=real)
        by_slot(out.row_of, jnp.where(id_of_slot < 0, -1, slots * sizes.align))
        return
    of_others, own = id_of_slot < 0, experts
    if first is not None:
        begin = first[0]
        own = experts - begin
        used = jnp.where(is_own(own, sizes)[None, :], used, 0)
        of_others |= ~is_own(id_of_slot - begin, sizes)
    place = few(out, used, tokens, own, sizes) if sizes.form == "few" else many(out, used, own, sizes)
    rows = [jnp.sum(jnp.where(experts[None, :] == its[:, None], place, 0), axis=1) for its in ids]
    row_of_slot = jnp.where(of_others, -1, stacked(rows, slots))
    by_slot(out.row_of, row_of_slot)
    if sizes.form == "many":
        scatter(out.token_of_row, row_of_slot, jnp.broadcast_to(tokens[:, None], row_of_slot.shape), row_of_slot >= 0)


def keys_of(
    values: Ref,
    mask: Ref | None,
    bias: Ref | None,
    tokens: Int32[Array, " t"],
    experts: Int32[Array, " e"],
    sizes: Sizes,
) -> Float32[Array, "t e"]:
    """The keys by which some tokens' experts are chosen; -inf where one must not be. Operands are those of `kernel`."""
    real = (tokens < sizes.num_tokens)[:, None] & (experts < sizes.num_experts)[None, :]
    loaded = plgpu.load(values.at[tokens[:, None], experts[None, :]], mask=real, other=-jnp.inf).astype(jnp.float32)
    if mask is not None:
        routed = plgpu.load(mask.at[tokens], mask=tokens < sizes.num_tokens, other=False)
        loaded = jnp.where(routed[:, None], loaded, -jnp.inf)
    usable = loaded > -jnp.inf  # false for NaN too
    keys = jnp.where(usable, jnp.minimum(loaded, _LARGEST), -jnp.inf)
    if bias is not None:
        biases = plgpu.load(bias.at[experts], mask=experts < sizes.num_experts, other=-jnp.inf)
        keys = biased(keys, biases)
    if sizes.choice.num_groups > 1:
        keys = of_best_groups(keys, sizes.choice)
    return keys


def is_own(ids: Int32[Array, "*n"], sizes: Sizes) -> Bool[Array, "*n"]:
    """Whether ids that count from the first expert for which rows are grouped are of one of these."""
    return (ids >= 0) & (ids < sizes.num_grouped)


def biased(logits: Float32[Array, "t e"], bias: Float32[Array, " e"]) -> Float32[Array, "t e"]:
    """The sigmoids of finite logits plus the bias; -inf where the logit, or the sum, is no number above that."""
    usable = logits > -jnp.inf
    keys = 1 / (1 + jnp.exp(-jnp.where(usable, logits, 0))) + bias[None, :]
    return jnp.where(usable & (keys > -jnp.inf), keys, -jnp.inf)


def of_best_groups(keys: Float32[Array, "t e"], choice: Choice) -> Float32[Array, "t e"]:
    """Keys, -inf outside the groups that `jmx.routing.top_k.mask_groups` keeps."""
    num_tokens, num_experts = keys.shape
    groups = jnp.arange(choice.num_groups, dtype=jnp.int32)
    size = num_experts // choice.num_groups
    grouped = keys.reshape(num_tokens, choice.num_groups, size)
    first = jnp.max(grouped, axis=2)
    total = jnp.where(first > -jnp.inf, first, 0)
    if choice.best_of_group > 1 and size > 1:
        member = jnp.arange(size, dtype=jnp.int32)[None, None, :]
        lowest = jnp.min(jnp.where(grouped == first[:, :, None], member, size), axis=2)
        second = jnp.max(jnp.where(member == lowest[:, :, None], -jnp.inf, grouped), axis=2)
        total += jnp.where(second > -jnp.inf, second, 0)
    total = jnp.where(first > -jnp.inf, total, -jnp.inf)
    mine, other = total[:, :, None], total[:, None, :]
    before = (other > mine) | ((other == mine) & (groups[None, None, :] < groups[None, :, None]))
    kept = jnp.sum(before.astype(jnp.int32), axis=2) < choice.topk_groups
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(num_tokens, num_experts)


def top_k(
    keys: Float32[Array, "t e"], experts: Int32[Array, " e"], k: int
) -> tuple[list[Float32[Array, " t"]], list[Int32[Array, " t"]], Int32[Array, "t e"]]:
    """The k largest keys of each token, largest first, and their experts; of equal keys the lower expert first.

    Where no key is left they are -inf, and expert -1. The tile is 1 for the experts of each token, else 0.
    """
    best, ids = [], []
    given = keys = _ordered(jnp.where(keys == 0, 0.0, keys))  # 0.0 and -0.0 are equal
    for _ in range(k):
        peak = jnp.max(keys, axis=1)
        lowest = jnp.min(jnp.where(keys == peak[:, None], experts[None, :], experts.size), axis=1)
        lowest = jnp.where(peak > _LEAST, lowest, -1)
        keys = jnp.where(experts[None, :] == lowest[:, None], _LEAST, keys)
        best.append(_unordered(peak))
        ids.append(lowest)
    return best, ids, (keys != given).astype(jnp.int32)


def _ordered(keys: Float32[Array, "*n"]) -> Int32[Array, "*n"]:
    """Integers in the order of floats that are not NaN: a warp finds the largest of those in one instruction."""
    return _flipped(lax.bitcast_convert_type(keys, jnp.int32))


def _unordered(keys: Int32[Array, "*n"]) -> Float32[Array, "*n"]:
    return lax.bitcast_convert_type(_flipped(keys), jnp.float32)


def _flipped(bits: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    """The bits of negative floats but the sign, inverted; twice is the identity."""
    return bits ^ (lax.shift_right_arithmetic(bits, jnp.full_like(bits, 31)) & 0x7FFFFFFF)


def softmax(keys: Float32[Array, "t e"], best: list[Float32[Array, " t"]], of_all: bool) -> list[Float32[Array, " t"]]:
    """The weights of the chosen: 0 where nothing was left to choose."""

    def power(keys: Array) -> Array:
        peak = best[0] if keys.ndim == 1 else best[0][:, None]
        usable = keys > -jnp.inf
        return jnp.where(usable, jnp.exp(jnp.where(usable, keys - peak, 0)), 0)

    powers = [power(its) for its in best]
    total = jnp.sum(power(keys), axis=1) if of_all else reduce(jnp.add, powers)
    total = jnp.where(total > 0, total, 1)
    return [its / total for its in powers]


def sums_along_tokens(used: Int32[Array, "t e"]) -> tuple[Int32[Array, "t e"], Int32[Array, " e"]]:
    """The sums of zeros and ones over earlier tokens, and over all.

    Several neighboring experts share a word, since each warp adds up the sums of all others.
    """
    num_tokens, num_experts = used.shape
    shared = min(num_experts, 4 if num_tokens < 1 << 8 else 2)
    bits = 32 // shared
    shifts = jnp.arange(shared, dtype=jnp.int32)[None, None, :] * bits
    words = jnp.sum(used.reshape(num_tokens, -1, shared) << shifts, axis=2)

    def unpacked(words: Int32[Array, "n words"]) -> Int32[Array, "n e"]:
        apart = jnp.broadcast_to(words[:, :, None], (*words.shape, shared))
        if shared > 1:
            apart = lax.shift_right_logical(apart, jnp.broadcast_to(shifts, apart.shape)) & ((1 << bits) - 1)
        return apart.reshape(-1, num_experts)

    counts = jnp.sum(unpacked(jnp.sum(words, axis=0)[None, :]), axis=0)
    return unpacked(jnp.cumsum(words, axis=0)) - used, counts


def few(
    out: Results, used: Int32[Array, "t e"], tokens: Int32[Array, " t"], experts: Int32[Array, " e"], sizes: Sizes
) -> Int32[Array, "t e"]:
    """A block of all tokens for each expert in use; returns the row of a token in each expert's block."""
    in_use = jnp.max(used, axis=0)
    ends = jnp.cumsum(in_use)
    nth = ends - in_use
    number = jnp.sum(in_use)
    scatter(out.experts, nth, experts, in_use > 0)
    repeat_last(out, number, jnp.max(jnp.where(in_use > 0, experts, 0)), sizes)
    return nth[None, :] * sizes.stride + tokens[:, None]


def many(out: Results, used: Int32[Array, "t e"], experts: Int32[Array, " e"], sizes: Sizes) -> Int32[Array, "t e"]:
    """Sorted rows in blocks; returns the row of a token among each expert's, if it has that expert."""
    align = sizes.align
    earlier, counts = sums_along_tokens(used)
    aligned = (counts + (align - 1)) & -align
    ends = jnp.cumsum(aligned)
    starts = ends - aligned

    # Rows between those of experts, and after them, read token 0.
    fill(out.token_of_row, power_of_two(sizes.num_rows), 0)
    if not sizes.interpret:
        plgpu.debug_barrier()  # before others are written

    write_blocks(out, Group(experts, counts, starts), counts, experts, sizes)
    number = jnp.sum(num_shares(counts, sizes))
    repeat_last(out, number, last_expert(counts, experts, sizes), sizes)
    return starts[None, :] + earlier


class Group(NamedTuple):
    """Some experts: their numbers of rows, and their first rows."""

    experts: Int32[Array, " g"]
    counts: Int32[Array, " g"]
    starts: Int32[Array, " g"]


def num_shares(counts: Int32[Array, " e"], sizes: Sizes) -> Int32[Array, " e"]:
    """The number of blocks of each expert."""
    return lax.div(counts + (sizes.block_m - 1), jnp.full_like(counts, sizes.block_m))


def write_blocks(
    out: Results, group: Group, counts: Int32[Array, " e"], experts: Int32[Array, " e"], sizes: Sizes
) -> None:
    """The blocks of some experts. `counts`: of all experts."""
    align = sizes.align
    shares = num_shares(group.counts, sizes)
    together, firsts, lasts = _places(group, shares, counts, experts, sizes)
    # If an expert's rows do not divide evenly, its first blocks have `align` rows more.
    aligned = (group.counts + (align - 1)) & -align
    units, divisor = lax.div(aligned, jnp.full_like(aligned, align)), jnp.maximum(shares, 1)
    each = lax.div(units, divisor)
    more = units - each * divisor

    def write(nth: Int32[Array, ""], carry: None) -> None:
        before = nth * sizes.block_m if sizes.whole else (nth * each + jnp.minimum(nth, more)) * align
        here = sizes.block_m if sizes.whole else (each + (nth < more).astype(jnp.int32)) * align
        written = nth < shares
        place = jnp.where(nth < together, firsts + nth, lasts)
        scatter(out.experts, place, group.experts, written)
        scatter(out.rows, place, group.starts + before, written)
        scatter(out.counts, place, jnp.minimum(here, group.counts - before), written)

    lax.fori_loop(0, jnp.max(shares), write, None)


def _places(
    group: Group, shares: Int32[Array, " g"], counts: Int32[Array, " e"], experts: Int32[Array, " e"], sizes: Sizes
) -> tuple[Int32[Array, " g"], Int32[Array, " g"], Int32[Array, " g"]]:
    """As `jmx.grouping._places`, of some experts."""
    earlier = experts[None, :] < group.experts[:, None]

    def before(keys: Int32[Array, " e"], mine: Int32[Array, " g"]) -> Bool[Array, "g e"]:
        return (keys[None, :] > mine[:, None]) | ((keys[None, :] == mine[:, None]) & earlier)

    def sums(where: Bool[Array, "g e"], values: Int32[Array, " e"]) -> Int32[Array, " g"]:
        return jnp.sum(jnp.where(where, values[None, :], 0), axis=1)

    if not sizes.largest_first:
        return shares, sums(earlier, num_shares(counts, sizes)), shares
    if sizes.whole:
        full, rest = full_and_rest(counts, sizes)
        mine, mine_rest = full_and_rest(group.counts, sizes)
        lasts = jnp.sum(full) + sums(before(rest, mine_rest), (rest > 0).astype(jnp.int32))
        return mine, sums(earlier, full), lasts
    where = before(largest_block(counts, sizes), largest_block(group.counts, sizes))
    return shares, sums(where, num_shares(counts, sizes)), shares


def full_and_rest(counts: Int32[Array, " e"], sizes: Sizes) -> tuple[Int32[Array, " e"], Int32[Array, " e"]]:
    """The number of full blocks of each expert, and its rows in none of them."""
    full = lax.div(counts, jnp.full_like(counts, sizes.block_m))
    return full, counts - full * sizes.block_m


def largest_block(counts: Int32[Array, " e"], sizes: Sizes) -> Int32[Array, " e"]:
    """Rows of each expert's largest block, in multiples of `align`, if blocks are not whole."""
    units = lax.div(counts + (sizes.align - 1), jnp.full_like(counts, sizes.align))
    shares = jnp.maximum(num_shares(counts, sizes), 1)
    return lax.div(units + shares - 1, shares)


def last_expert(counts: Int32[Array, " e"], experts: Int32[Array, " e"], sizes: Sizes) -> Int32[Array, ""]:
    """The expert of the last block; 0 if no expert has rows."""
    used = jnp.max(jnp.where(counts > 0, experts, 0))
    if not sizes.largest_first:
        return used
    keys = full_and_rest(counts, sizes)[1] if sizes.whole else largest_block(counts, sizes)
    last = experts.size - 1
    key = jnp.min(jnp.where(keys > 0, keys * experts.size + (last - experts), jnp.iinfo(jnp.int32).max))
    return jnp.where(jnp.max(keys) > 0, last - (key & last), used)


def repeat_last(out: Results, number: Int32[Array, ""], last: Int32[Array, ""], sizes: Sizes) -> None:
    """The blocks after the last real one, and the number of real ones."""
    count = power_of_two(sizes.num_blocks)
    fill(out.num_blocks, count, number)
    fill(out.experts, count, last, number)
    if out.counts is not None:
        fill(out.counts, count, 0, number)
        fill(out.rows, count, 0, number)


def stacked(columns: list[Shaped[Array, " t"]], slots: Int32[Array, "1 s"]) -> Shaped[Array, "t s"]:
    """Columns side by side; to store them at once takes less time than one after the other."""
    found = jnp.broadcast_to(columns[0][:, None], (columns[0].size, slots.size))
    for slot, column in enumerate(columns[1:], 1):
        found = jnp.where(slots == slot, column[:, None], found)
    return found


def scatter(ref: Ref, index: Int32[Array, "*n"], values: Int32[Array, "*n"], where: Bool[Array, "*n"]) -> None:
    """Stores some of the values, at distinct indices. Interpreted, all are written: the others out of range."""
    plgpu.store(ref.at[jnp.where(where, index, ref.shape[0])], values, mask=where)


def fill(ref: Ref, count: int, value: Int32[Array, ""] | int, start: Int32[Array, ""] | int = 0) -> None:
    """Stores a value from `start` on; `count`: a power of two, not less than the size."""
    index = jnp.arange(count, dtype=jnp.int32)
    inside: Bool[Array, " n"] = (index >= start) & (index < ref.shape[0])
    plgpu.store(ref.at[index], jnp.full(count, value, jnp.int32), mask=inside)
