"""More tokens than one CTA routes and groups: two kernels, of which the first routes a chunk of tokens a CTA.

It also counts each expert's assignments in the chunk, and for each assignment the earlier ones of its expert there.
Each CTA of the second kernel adds up the counts of all chunks, and of those before its own, which gives the row of each
assignment; and it writes the blocks of some of the experts.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jmx.pallas.routing import kernel
from jmx.pallas.routing.kernel import Group, Ref
from jmx.pallas.routing.sizes import Results, Sizes, power_of_two
from jmx.util.typing import Array, Int32

_LOADED = 1 << 12  # counts that a CTA loads at a time
_WARPS = 8


class Chunks(NamedTuple):
    """References to what the first kernel writes, or their shapes.

    `expert_ids`, `weights` (T, k); `earlier` (T, k) int32: for each assignment the number of earlier ones of its expert
    in its chunk; `counts` (C * E,) int32: the number of all of each expert, chunk by chunk. None: not of this form.
    """

    expert_ids: Any
    weights: Any
    earlier: Any
    counts: Any

    @classmethod
    def shapes(cls, sizes: Sizes) -> "Chunks":
        whole = Results.shapes(sizes)
        ids = jax.ShapeDtypeStruct((sizes.num_tokens, sizes.top_k), jnp.int32)
        if sizes.form is None:
            return cls(ids, whole.weights, None, None)
        return cls(ids, whole.weights, ids, jax.ShapeDtypeStruct((sizes.num_chunks * sizes.num_experts,), jnp.int32))


def route_chunk(values: Ref, mask: Ref | None, bias: Ref | None, *refs: Ref, sizes: Sizes) -> None:
    """Routes a chunk of tokens. Operands are those of `kernel.kernel`; `refs`: those of `Chunks` that are there."""
    given = iter(refs)
    out = Chunks._make(None if shape is None else next(given) for shape in Chunks.shapes(sizes))
    chunk_tokens, num_experts = sizes.tile
    tokens = pl.program_id(0) * chunk_tokens + jnp.arange(chunk_tokens, dtype=jnp.int32)
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    keys = kernel.keys_of(values, mask, bias, tokens, experts, sizes)
    best, ids, used = kernel.top_k(keys, experts, sizes.top_k)
    slots, inside = _slots(tokens, sizes)

    def by_slot(ref: Ref, columns: list[Array]) -> None:
        plgpu.store(ref.at[tokens[:, None], slots], kernel.stacked(columns, slots), mask=inside)

    by_slot(out.expert_ids, ids)
    if out.weights is not None:
        by_slot(out.weights, kernel.softmax(keys, best, sizes.choice.softmax_of == "all"))
    if sizes.form is None:
        return
    earlier, counts = kernel.sums_along_tokens(used)
    by_slot(out.earlier, [jnp.sum(jnp.where(experts[None, :] == its[:, None], earlier, 0), axis=1) for its in ids])
    first = pl.program_id(0) * sizes.num_experts
    plgpu.store(out.counts.at[first + experts], counts, mask=experts < sizes.num_experts)


def place(expert_ids: Ref, earlier: Ref, chunk_counts: Ref, first: Ref | None, *refs: Ref, sizes: Sizes) -> None:
    """The rows of some chunks' assignments, and the blocks of some experts.

    Args:
        expert_ids, earlier, chunk_counts: as in `Chunks`.
        first: (1,) int32, the first of the experts for which rows are grouped, if these are some; or None.
        refs: those of `Results` from `row_of` on, and the first row of each expert's in each chunk (C * E,).
    """
    out, firsts = Results(None, None, *refs[:-1]), refs[-1]
    nth, experts = pl.program_id(0), jnp.arange(power_of_two(sizes.num_experts), dtype=jnp.int32)
    mine = -(-sizes.num_chunks // sizes.num_placers)
    counts, before = sums_of_chunks(chunk_counts, nth * mine, experts, sizes)
    begin = 0 if first is None else first[0]
    if first is not None:
        counts = jnp.where(kernel.is_own(experts - begin, sizes), counts, 0)
    aligned = (counts + (sizes.align - 1)) & -sizes.align
    ends = jnp.cumsum(aligned)
    starts = ends - aligned
    real = experts < sizes.num_experts

    def write_firsts(chunk: Int32[Array, ""], row: Int32[Array, " e"]) -> Int32[Array, " e"]:
        its = chunk * sizes.num_experts + experts
        plgpu.store(firsts.at[its], row, mask=real)
        return row + plgpu.load(chunk_counts.at[its], mask=real, other=0)

    last = jnp.minimum((nth + 1) * mine, sizes.num_chunks)
    lax.fori_loop(nth * mine, last, write_firsts, starts + before)
    if not sizes.interpret:
        plgpu.debug_barrier()  # before they are read

    def write_rows(chunk: Int32[Array, ""], carry: None) -> None:
        tokens = chunk * sizes.tile[0] + jnp.arange(sizes.tile[0], dtype=jnp.int32)
        slots, inside = _slots(tokens, sizes)
        at = tokens[:, None], slots
        ids = plgpu.load(expert_ids.at[at], mask=inside, other=-1)
        chosen = inside & (ids >= 0)
        if first is not None:
            chosen &= kernel.is_own(ids - begin, sizes)
        its = jnp.where(chosen, chunk * sizes.num_experts + ids, 0)
        rows = plgpu.load(firsts.at[its], mask=chosen, other=0) + plgpu.load(earlier.at[at], mask=chosen, other=0)
        plgpu.store(out.row_of.at[at], jnp.where(chosen, rows, -1), mask=inside)
        kernel.scatter(out.token_of_row, rows, jnp.broadcast_to(tokens[:, None], rows.shape), chosen)

    lax.fori_loop(nth * mine, last, write_rows, None)

    groups = 1 << (min(sizes.num_placers, experts.size).bit_length() - 1)
    share = experts.size // groups
    members = nth * share + jnp.arange(share, dtype=jnp.int32)
    where = experts[None, :] == members[:, None]
    its_counts, its_starts = (jnp.sum(jnp.where(where, its[None, :], 0), axis=1) for its in (counts, starts))
    own = experts - begin  # by which blocks name them
    kernel.write_blocks(out, Group(members - begin, its_counts, its_starts), counts, own, sizes)
    _fill_between(out.token_of_row, its_starts + its_counts, jnp.max(ends), sizes)

    @pl.when(nth == 0)
    def _() -> None:
        kernel.fill(out.counters, power_of_two(out.counters.shape[0]), 0)
        number = jnp.sum(kernel.num_shares(counts, sizes))
        kernel.repeat_last(out, number, kernel.last_expert(counts, own, sizes), sizes)


def sums_of_chunks(
    chunk_counts: Ref, first: Int32[Array, ""], experts: Int32[Array, " e"], sizes: Sizes
) -> tuple[Int32[Array, " e"], Int32[Array, " e"]]:
    """The counts of all chunks, and of those before `first`."""
    num_loaded = max(1, min(_LOADED // experts.size, power_of_two(sizes.num_chunks)))

    def add(step: Int32[Array, ""], sums: tuple[Array, Array]) -> tuple[Array, Array]:
        chunks = (step * num_loaded + jnp.arange(num_loaded, dtype=jnp.int32))[:, None]
        inside = (chunks < sizes.num_chunks) & (experts < sizes.num_experts)[None, :]
        loaded = plgpu.load(chunk_counts.at[chunks * sizes.num_experts + experts[None, :]], mask=inside, other=0)
        earlier = jnp.where(chunks < first, loaded, 0)
        return sums[0] + jnp.sum(loaded, axis=0), sums[1] + jnp.sum(earlier, axis=0)

    zeros = jnp.zeros(experts.shape, jnp.int32)
    counts, before = lax.fori_loop(0, -(-sizes.num_chunks // num_loaded), add, (zeros, zeros))
    return counts, before


def _slots(tokens: Int32[Array, " t"], sizes: Sizes) -> tuple[Int32[Array, "1 s"], Array]:
    """Slots, and which of them are inside for each token."""
    slots = jnp.arange(power_of_two(sizes.top_k), dtype=jnp.int32)[None, :]
    return slots, (tokens < sizes.num_tokens)[:, None] & (slots < sizes.top_k)


def _fill_between(ref: Ref, ends: Int32[Array, " g"], end: Int32[Array, ""], sizes: Sizes) -> None:
    """Token 0 for rows between those of experts, of which some end at `ends`, and for some of those from `end` on."""
    for further in range(sizes.align - 1):
        rows = ends + further
        kernel.scatter(ref, rows, jnp.zeros_like(rows), further < (-ends & (sizes.align - 1)))
    share = -(-sizes.num_rows // sizes.num_placers)
    index = jnp.arange(power_of_two(share), dtype=jnp.int32)
    rows = pl.program_id(0) * share + index
    kernel.scatter(ref, rows, jnp.zeros_like(rows), (index < share) & (rows >= end) & (rows < sizes.num_rows))


def launch(values: Array, mask: Array | None, bias: Array | None, first: Array | None, sizes: Sizes) -> Results:
    """Both kernels. Operands are those of `call.Given`."""
    shapes = Chunks.shapes(sizes)
    found = iter(
        pl.pallas_call(
            partial(route_chunk, sizes=sizes),
            out_shape=jax.tree.leaves(shapes),
            grid=(sizes.num_chunks,),
            compiler_params=plgpu.CompilerParams(num_warps=sizes.num_warps, num_stages=1),
            interpret=sizes.interpret,
            name="jmx_route",
        )(values, mask, bias)
    )
    chunks = Chunks._make(None if shape is None else next(found) for shape in shapes)
    results = Results.shapes(sizes)._replace(expert_ids=chunks.expert_ids, weights=chunks.weights)
    if sizes.form is None:
        return results
    *placed, _ = pl.pallas_call(
        partial(place, sizes=sizes),
        out_shape=[*results[2:], chunks.counts],
        grid=(sizes.num_placers,),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=sizes.interpret,
        name="jmx_group",
    )(chunks.expert_ids, chunks.earlier, chunks.counts, first)
    return Results(chunks.expert_ids, chunks.weights, *placed)
