"""Grouping against numpy's stable sort, and blocks against what each expert must read and write."""

import itertools
import re
from functools import partial

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jmx import grouping
from jmx.grouping import Cut, few, group, many, max_blocks, single, split_groups
from jmx.routing import Logits, TopKSoftmax, route

pytestmark = pytest.mark.sampled(3)

some = examples(15)  # shapes are drawn from few values: each compiles anew
jitted_group = jax.jit(group, static_argnums=1)
jitted_cut = jax.jit(split_groups, static_argnums=(1, 2))
jitted_few = jax.jit(partial(few, align=8), static_argnums=1)
jitted_many = jax.jit(many, static_argnums=(1, 2))
jitted_sort = jax.jit(grouping.sort_rows, static_argnums=(1, 2))
jitted_combine = jax.jit(grouping.combine)

tokens = st.sampled_from([0, 1, 7, 64, 90])
slots = st.sampled_from([1, 3])
experts = st.sampled_from([1, 5, 32])
seeds = st.integers(0, 2**32 - 1)
ranges = st.sampled_from(["inside", "around", "one", "outside"])


def draw_ids(seed, num_tokens, top_k, num_experts, where):
    low, high = {
        "inside": (0, num_experts),
        "around": (-3, num_experts + 3),
        "one": (num_experts - 1, num_experts),
        "outside": (num_experts, 2**31),
    }[where]
    return np.random.default_rng(seed).integers(low, high, (num_tokens, top_k)).astype(np.int32)


@some
@given(seeds, tokens, slots, experts, ranges)
def test_group_sorts_stably_and_back(seed, num_tokens, top_k, num_experts, where):
    ids = draw_ids(seed, num_tokens, top_k, num_experts, where)
    flat = ids.reshape(-1)
    inside = (flat >= 0) & (flat < num_experts)
    groups = jitted_group(ids, num_experts)
    assert all(array.dtype == jnp.int32 for array in groups)
    expected = np.argsort(np.where(inside, flat, num_experts), kind="stable")
    np.testing.assert_array_equal(groups.order, expected)
    np.testing.assert_array_equal(np.asarray(groups.order)[np.asarray(groups.inverse)], np.arange(flat.size))
    np.testing.assert_array_equal(groups.sizes, np.bincount(flat[inside], minlength=num_experts))


@some
@given(seeds, tokens, slots, experts, ranges, st.sampled_from([1, 8]))
def test_the_expert_of_a_row_is_that_of_its_assignment(seed, num_tokens, top_k, num_experts, where, align):
    ids = draw_ids(seed, num_tokens, top_k, num_experts, where)
    rows = jitted_sort(ids, num_experts, align)
    of_row = np.asarray(rows.assignment_of_row)
    found = np.asarray(rows.expert_of(jnp.arange(of_row.size, dtype=jnp.int32)))
    assert found.dtype == np.int32
    assert ((found >= 0) & (found < num_experts)).all()
    np.testing.assert_array_equal(found[of_row >= 0], ids.reshape(-1)[of_row[of_row >= 0]])
    firsts = jnp.arange(0, of_row.size, align, dtype=jnp.int32)  # of whole blocks, each of one expert
    np.testing.assert_array_equal(np.repeat(rows.expert_of(firsts), align)[of_row >= 0], found[of_row >= 0])


def test_group_outside_jit_is_that_inside(rng):
    for where in ("inside", "around", "one", "outside"):
        ids = draw_ids(rng.integers(2**32), 7, 3, 5, where)
        jax.tree.map(np.testing.assert_array_equal, group(jnp.asarray(ids), 5), jitted_group(ids, 5))


@some
@given(seeds, tokens.filter(bool), slots, experts, ranges, st.sampled_from([1, 4, 16, 1024]))
def test_blocks_partition_the_rows(seed, num_tokens, top_k, num_experts, where, block_m):
    ids = draw_ids(seed, num_tokens, top_k, num_experts, where)
    sizes = np.asarray(jitted_group(ids, num_experts).sizes)
    blocks = jax.tree.map(np.asarray, jitted_cut(sizes, ids.size, block_m))
    bound = max_blocks(ids.size, num_experts, block_m)
    count = int(blocks.num_blocks)
    assert count == sum(-(-int(size) // block_m) for size in sizes)
    assert all(array.shape == (bound,) for array in blocks[:4])
    assert all(array.dtype == np.int32 for array in blocks[:5])
    assert count <= bound

    assert (blocks.counts[:count] >= 1).all()
    assert (blocks.counts <= block_m).all()
    assert not blocks.counts[count:].any()
    owner = np.repeat(np.arange(num_experts), sizes)  # the expert of each sorted row
    for starts in (blocks.x_rows, blocks.out_rows):
        covered = [row for first, n in zip(starts, blocks.counts, strict=True) for row in range(first, first + n)]
        assert covered == list(range(sizes.sum()))
    for expert, first, n in zip(blocks.experts, blocks.x_rows, blocks.counts, strict=True):
        assert (owner[first : first + n] == expert).all()
    for expert in range(num_experts):  # its blocks are near equal
        shares = blocks.counts[:count][blocks.experts[:count] == expert]
        assert shares.size == 0 or np.ptp(shares) <= 1
    # What is read beyond the real blocks is an expert that is read anyway.
    assert ((blocks.experts >= 0) & (blocks.experts < num_experts)).all()
    if count:
        assert (blocks.experts[count:] == blocks.experts[count - 1]).all()


def test_blocks_of_one_expert_are_near_equal():
    blocks = jitted_cut(jnp.array([0, 270, 5], jnp.int32), 275, 256)
    assert int(blocks.num_blocks) == 3
    assert blocks.experts[:3].tolist() == [1, 1, 2]
    assert blocks.counts[:3].tolist() == [135, 135, 5]


@some
@given(
    seeds,
    tokens.filter(bool),
    slots,
    experts,
    ranges,
    st.sampled_from([(1, 1), (16, 1), (8, 8), (256, 8)]),
    st.booleans(),
    st.booleans(),
)
def test_many_leads_tokens_into_rows_and_back(seed, num_tokens, top_k, num_experts, where, cut, whole, largest_first):
    block_m, align = cut
    ids = draw_ids(seed, num_tokens, top_k, num_experts, where)
    work = jax.tree.map(np.asarray, jitted_many(ids, num_experts, Cut(block_m, align, whole, largest_first)))
    inside = (ids >= 0) & (ids < num_experts)
    assert work.row_of.dtype == work.token_of_row.dtype == np.int32
    assert (work.row_of[~inside] == -1).all()
    rows = work.row_of[inside]
    token = np.broadcast_to(np.arange(num_tokens)[:, None], ids.shape)[inside]
    np.testing.assert_array_equal(work.token_of_row[rows], token)
    # Sorted by expert and, within one, by token and slot; nothing is left out or met twice.
    np.testing.assert_array_equal(np.argsort(rows), np.argsort(ids[inside], kind="stable"))
    np.testing.assert_array_equal(work.blocks.x_rows, work.blocks.out_rows)
    real = slice(int(work.blocks.num_blocks))
    assert (work.blocks.x_rows[real] % align == 0).all()
    assert (work.blocks.counts <= block_m).all()
    assert len(np.unique(rows)) == len(rows) == work.blocks.counts.sum()
    expert_of_row = np.full(work.token_of_row.shape, -1)
    for expert, row, n in zip(*(array[real] for array in (work.blocks.experts, *work.blocks[2:4])), strict=True):
        expert_of_row[row : row + n] = expert
    np.testing.assert_array_equal(expert_of_row[rows], ids[inside])
    counts, owners = work.blocks.counts[real], work.blocks.experts[real]
    if whole:
        assert all((counts[owners == expert] < block_m).sum() <= 1 for expert in range(num_experts))
    sizes = counts if whole else -(-counts // align)
    if largest_first and not whole:  # an expert's blocks stay together, and may differ by one
        sizes = [max(sizes[owners == expert]) for expert in owners]
    assert not largest_first or (np.diff(sizes) <= 0).all()
    assert largest_first or (np.diff(owners) >= 0).all()
    if owners.size:
        assert (work.blocks.experts[owners.size :] == owners[-1]).all()


def assert_few(work, ids, num_experts):
    num_tokens = ids.shape[0]
    stride = -(-num_tokens // 8) * 8
    used = np.unique(ids[(ids >= 0) & (ids < num_experts)])
    bound = min(ids.size, num_experts)
    num_blocks = int(work.blocks.num_blocks)
    assert num_blocks == len(used) <= bound
    assert all(array.dtype == np.int32 for array in (work.blocks.experts, work.blocks.num_blocks, work.row_of))
    assert work.token_of_row is None
    last = used[-1:] if len(used) else [0]
    assert np.asarray(work.blocks.experts).tolist() == [*used, *np.repeat(last, bound - len(used))]
    assert [int(n) for n in work.blocks[1:4]] == [0, stride, num_tokens]
    block_of = {expert: b for b, expert in enumerate(used)}
    rows = [[block_of[e] * stride + t if e in block_of else -1 for e in row] for t, row in enumerate(ids)]
    assert np.asarray(work.row_of).tolist() == rows


def test_few_on_every_small_routing():
    """Every routing of two tokens to two of three experts, ids from one below to one above."""
    every = np.array(list(itertools.product(range(-1, 4), repeat=4)), np.int32).reshape(-1, 2, 2)
    work = jax.tree.map(np.asarray, jax.jit(jax.vmap(lambda ids: few(ids, 3, 8)))(every))
    for i, ids in enumerate(every):
        assert_few(jax.tree.map(lambda array, i=i: array[i], work), ids, 3)


@examples(40)
@given(
    seeds, st.sampled_from([1, 5, 16]), st.sampled_from([1, 4]), st.sampled_from([1, 31, 32, 33, 128, 500, 512]), ranges
)
def test_few_gives_every_expert_in_use_a_block(seed, num_tokens, top_k, num_experts, where):
    ids = draw_ids(seed, num_tokens, top_k, num_experts, where)
    assert_few(jitted_few(ids, num_experts), ids, num_experts)


@pytest.mark.parametrize("ids", [[3], [0, 2, 1], [2, 2, 5], [-1, 4, 7], [9, -(2**31), 2**31 - 1]])
def test_a_single_token_makes_a_block_of_each_slot(ids):
    ids = np.array([ids], np.int32)
    work = single(jnp.array(ids), 5, 8)
    inside = (ids >= 0) & (ids < 5)
    assert work.blocks[1:] == (0, 8, 1, ids.size, None)
    assert work.token_of_row is None
    experts = np.asarray(work.blocks.experts)
    np.testing.assert_array_equal(experts[inside[0]], ids[inside])
    assert ((experts >= 0) & (experts < 5)).all()
    np.testing.assert_array_equal(work.row_of, np.where(inside, 8 * np.arange(ids.size), -1))


def test_few_with_the_ends_of_every_word(rng):
    ends = np.array([0, 31, 32, 63, 64, 95, 96, 127, 128, -1, 2**31 - 1, -(2**31)], np.int32)
    for _ in range(10):
        ids = rng.choice(ends, (8, 2))
        assert_few(jitted_few(ids, 128), ids, 128)


@pytest.mark.aot
@pytest.mark.parametrize(("num_tokens", "most"), [(1, 6), (16, 8)])
def test_few_tokens_are_routed_and_grouped_by_few_kernels_on_an_h200(num_tokens, most):
    """Each takes about 2 us there, where all of one token's weights take 17; before, they were 25 and a loop."""

    def prepare(logits):
        routing = route(Logits(logits, TopKSoftmax(4)))
        work = few(routing.expert_ids, 128, 8)
        return routing.weights, work.row_of, work.blocks.experts, work.blocks.num_blocks  # the rest are ints

    text = aot.compile_for_h200(prepare, jax.ShapeDtypeStruct((num_tokens, 128), jnp.float32)).as_text()
    assert text is not None
    kernels = re.findall(r" (fusion|copy|while|custom-call)\(", text)
    assert 2 <= len(kernels) <= most, kernels


@pytest.mark.parametrize(("num_experts", "block_m"), [(1, 8), (4, 1), (4, 8), (64, 8)])
def test_max_blocks_holds_the_worst_routing(num_experts, block_m, rng):
    """The worst routing gives one row more than whole blocks to as many experts as there are rows for."""
    for num_assignments in (1, 7, 8, 9, 63, 200):
        bound = max_blocks(num_assignments, num_experts, block_m)
        sizes = np.zeros(num_experts, np.int64)
        sizes[: min(num_experts, num_assignments)] = 1
        rest = num_assignments - sizes.sum()
        sizes[0] += rest // block_m * block_m
        sizes[-1] += rest % block_m
        worst = (-(-sizes // block_m)).sum()
        assert worst <= bound <= num_assignments
        for _ in range(20):
            drawn = rng.multinomial(num_assignments, rng.dirichlet(np.full(num_experts, 0.3)))
            assert (-(-drawn // block_m)).sum() <= bound


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32])
@pytest.mark.parametrize("num_experts", [100, 256, 300])
def test_narrow_and_unsigned_ids(dtype, num_experts, rng):
    limits = np.iinfo(dtype)
    ids = rng.integers(limits.min, min(limits.max, 400), (50, 2), endpoint=True).astype(dtype)
    ids[0] = limits.max
    sizes = jitted_group(ids, num_experts).sizes
    wide = ids.astype(np.int64)
    np.testing.assert_array_equal(sizes, np.bincount(wide[(wide >= 0) & (wide < num_experts)], minlength=num_experts))
    assert_few(jitted_few(ids[:9], num_experts), wide[:9], num_experts)


def test_sixty_four_bit_ids(rng):
    with jax.enable_x64(True):
        ids = jnp.asarray(rng.choice([0, 3, 2**32, 2**32 + 3, -(2**32)], (50, 2)))
        assert ids.dtype == jnp.int64
        groups = jitted_group(ids, 8)
    assert all(array.dtype == jnp.int32 for array in groups)
    np.testing.assert_array_equal(groups.sizes, np.bincount(np.asarray(ids)[np.isin(ids, [0, 3])], minlength=8))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_rows_of_results_are_combined_into_tokens(rng, weighted, num_parts):
    """Each token's slots, and nothing of the rows that no assignment names, which hold NaN here."""
    ids = np.array([[0, 4], [-1, 4], [2, 0], [7, 5]])  # 5 and 7 are no experts
    work = jitted_many(jnp.array(ids), 5, Cut(16, 8))
    assert work.token_of_row is not None
    num_rows = work.token_of_row.size
    parts = rng.normal(size=(num_parts, num_rows, 6)).astype(np.float32)
    named = np.isin(np.arange(num_rows), work.row_of)
    parts[:, ~named] = np.nan
    weights = rng.normal(size=ids.shape).astype(np.float32)
    factors = weights if weighted else np.ones_like(weights)
    by_row = np.zeros(num_rows, np.float32)
    expected = np.zeros((len(ids), 6))
    for token, slot in np.ndindex(ids.shape):
        if (row := work.row_of[token, slot]) >= 0:
            by_row[row] = weights[token, slot]
            expected[token] += factors[token, slot] * parts[:, row].sum(axis=0)
    np.testing.assert_array_equal(grouping.by_row(jnp.array(weights), work, num_rows), by_row)
    combined = jitted_combine(parts, work, weights if weighted else None)
    np.testing.assert_allclose(combined, expected, rtol=1e-5, atol=1e-5)
