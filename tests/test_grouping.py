"""Grouping against numpy's stable sort, and the cutting into blocks as a partition of its rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmx.grouping import cut, group, max_blocks

few = settings(max_examples=15)  # shapes are drawn from few values: each compiles anew
jitted_group = jax.jit(group, static_argnums=1)
jitted_cut = jax.jit(cut, static_argnums=(1, 2))

tokens = st.sampled_from([0, 1, 7, 40])
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


@few
@given(seeds, tokens, slots, experts, ranges)
def test_group_sorts_stably_and_back(seed, num_tokens, top_k, num_experts, where):
    ids = draw_ids(seed, num_tokens, top_k, num_experts, where)
    flat = ids.reshape(-1)
    inside = (flat >= 0) & (flat < num_experts)
    for groups in (jitted_group(ids, num_experts), group(jnp.asarray(ids), num_experts)):
        assert all(array.dtype == jnp.int32 for array in groups)
        expected = np.argsort(np.where(inside, flat, num_experts), kind="stable")
        np.testing.assert_array_equal(groups.order, expected)
        np.testing.assert_array_equal(np.asarray(groups.order)[np.asarray(groups.inverse)], np.arange(flat.size))
        np.testing.assert_array_equal(groups.sizes, np.bincount(flat[inside], minlength=num_experts))


@few
@given(seeds, tokens.filter(bool), slots, experts, ranges, st.sampled_from([1, 4, 16, 1024]))
def test_blocks_partition_the_rows(seed, num_tokens, top_k, num_experts, where, block_m):
    ids = draw_ids(seed, num_tokens, top_k, num_experts, where)
    sizes = np.asarray(jitted_group(ids, num_experts).sizes)
    blocks = jax.tree.map(np.asarray, jitted_cut(sizes, ids.size, block_m))
    bound = max_blocks(ids.size, num_experts, block_m)
    count = int(blocks.num_blocks)
    assert count == sum(-(-int(size) // block_m) for size in sizes)
    assert blocks.experts.shape == blocks.starts.shape == blocks.ends.shape == (bound,)
    assert count <= bound

    lengths = blocks.ends - blocks.starts
    assert (lengths[:count] >= 1).all()
    assert (lengths <= block_m).all()
    assert not lengths[count:].any()
    owner = np.repeat(np.arange(num_experts), sizes)  # the expert of each sorted row
    covered = [row for start, end in zip(blocks.starts, blocks.ends, strict=True) for row in range(start, end)]
    assert covered == list(range(sizes.sum()))
    for expert, start, end in zip(blocks.experts, blocks.starts, blocks.ends, strict=True):
        assert (owner[start:end] == expert).all()
    # What is read beyond the real blocks is an expert that is read anyway.
    assert ((blocks.experts >= 0) & (blocks.experts < num_experts)).all()
    if count:
        assert (blocks.experts[count:] == blocks.experts[count - 1]).all()


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


def test_sixty_four_bit_ids(rng):
    with jax.enable_x64(True):
        ids = jnp.asarray(rng.choice([0, 3, 2**32, 2**32 + 3, -(2**32)], (50, 2)))
        assert ids.dtype == jnp.int64
        groups = group(ids, 8)
    assert all(array.dtype == jnp.int32 for array in groups)
    np.testing.assert_array_equal(groups.sizes, np.bincount(np.asarray(ids)[np.isin(ids, [0, 3])], minlength=8))
