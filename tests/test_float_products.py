"""The kernels for float weights: their blocks, schedules and sizes of tiles; themselves on a Hopper GPU."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_grouped_dot import SIZES, assert_close, exact

from jmx import Environment
from jmx.pallas.float_sm90.blocks import Groups, RowBlocks, Schedule
from jmx.pallas.float_sm90.config import Config, FittedConfig, Launch, blocks_of_rows, deepest
from jmx.pallas.float_sm90.outer import outer
from jmx.pallas.float_sm90.product import product
from jmx.pallas.sm90.config import SHARED_MEMORY

FITTED_SIZES = {"hundreds": [512, 530, 130, 300, 0, 190, 575], "edges": [144, 145, 152, 153, 160, 161, 192, 193, 2000]}
KERNEL_SIZES = SIZES | {"many": [513, 0, 1, 64, 63, 65, 200], "aligned": [64, 128, 8, 256], "ones": [1] * 9}


# Blocks, schedules and sizes of tiles


@pytest.mark.parametrize("block_m", [64, 128, 192])
@pytest.mark.parametrize("name", KERNEL_SIZES)
def test_blocks_write_each_row_once_and_begin_where_tma_reads(name, block_m):
    sizes = np.array(KERNEL_SIZES[name], np.int32)
    blocks = RowBlocks.of(Groups.of(jnp.asarray(sizes)), int(sizes.sum()), block_m)
    ends = np.cumsum(sizes)
    number = int(blocks.number[0])
    assert number <= len(blocks.groups)
    written = np.full(sizes.sum(), -1)
    for group, aligned, start, end, _ in zip(
        *(np.asarray(field)[:number] for field in jax.tree.leaves(blocks)), strict=True
    ):
        assert aligned % 8 == 0
        assert aligned <= start < end <= aligned + block_m
        assert ends[group] - sizes[group] <= start
        assert end <= ends[group]
        assert (written[start:end] == -1).all()
        written[start:end] = group
    np.testing.assert_array_equal(written, np.repeat(np.arange(len(sizes)), sizes))


def aligned_starts(sizes: np.ndarray) -> np.ndarray:
    """Where groups begin in the layer: at multiples of 8."""
    taken = -(-sizes // 8) * 8
    return (np.cumsum(taken) - taken).astype(np.int32)


@pytest.mark.parametrize("most", [64, 144, 192])
def test_fitted_blocks_write_each_row_once_and_have_as_many_rows_each(most, rng):
    fitted = jax.jit(RowBlocks.fitted, static_argnums=(1, 2))  # one program for all its operations
    draws = [rng.integers(0, high, int(rng.integers(1, 9))) for high in (20, 600, 600, 9000)]
    for sizes in (
        *(np.array(its, np.int32) for its in KERNEL_SIZES.values()),
        *(its.astype(np.int32) for its in draws),
    ):
        starts = aligned_starts(sizes)
        num_rows = int((starts + sizes).max()) // 8 * 8 + 8
        blocks = fitted(Groups.at(jnp.asarray(starts), jnp.asarray(sizes)), num_rows, most)
        number = int(blocks.number[0])
        assert number <= len(blocks.groups)
        assert number == (-(-sizes // most)).sum()
        written = np.full(num_rows, -1)
        found = zip(*(np.asarray(field)[:number] for field in jax.tree.leaves(blocks)), strict=True)
        for group, aligned, start, end, _ in found:
            assert aligned == start
            assert start % 8 == 0
            assert start < end <= start + most
            assert (end - start) % 16 == 0 or end == starts[group] + sizes[group]
            assert (written[start:end] == -1).all()
            written[start:end] = group
        for group, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            assert (written[start : start + size] == group).all()
        assert (written >= 0).sum() == sizes.sum()


@pytest.mark.parametrize(("column_blocks", "section"), [(1, 8), (8, 8), (23, 8), (5, 2), (7, 16)])
@pytest.mark.parametrize("num_blocks", [1, 6])
def test_a_schedule_has_each_tile_once(column_blocks, section, num_blocks):
    schedule = Schedule(column_blocks, section)
    number = schedule.num_items(num_blocks)
    positions = jax.vmap(lambda item: schedule.position(item, jnp.int32(num_blocks)))(jnp.arange(number))
    positions = [*zip(*(np.asarray(axis).tolist() for axis in positions), strict=True)]
    assert sorted(positions) == [(block, column) for block in range(num_blocks) for column in range(column_blocks)]
    assert positions[0] == (0, 0)


@pytest.mark.parametrize("columns", [64, 128, 192, 320, 768, 2048, 2880, 5760, 7168])
def test_the_heuristic_fills_shared_memory_and_leaves_little_empty(columns):
    config = Launch.of_rows(4096, 32, columns, jnp.float32, 132).config
    assert config.num_stages * config.stage_bytes < SHARED_MEMORY
    assert config.num_stages >= 4
    padded = -(-columns // config.block_n) * config.block_n
    assert padded < columns + config.block_n


@pytest.mark.parametrize(
    ("num_rows", "num_groups", "columns", "block_n"),
    [
        (65536, 128, 2048, 256),  # Qwen3-30B-A3B's down at 8192 tokens
        (65536, 128, 768, 192),  # its transpose: 14 tiles of 128 x 256 for some CTAs would take more than 12
        (32768, 32, 5760, 256),  # gpt-oss-20b's gate_up
        (32768, 32, 2880, 192),
        (1, 8, 2048, 256),
    ],
)
def test_tiles_are_those_of_which_no_cta_takes_many(num_rows, num_groups, columns, block_n):
    assert Launch.of_rows(num_rows, num_groups, columns, jnp.float32, 132).config.block_n == block_n


def test_blocks_are_fitted_to_groups_of_many_rows_if_results_have_16_bits():
    def of(num_rows, dtype):
        return isinstance(Launch.of_rows(num_rows, 32, 2880, dtype, 132).config, FittedConfig)

    assert [of(num_rows, jnp.bfloat16) for num_rows in (128, 4095, 4096, 32768)] == [False, False, True, True]
    assert of(4096, jnp.float16)
    assert not of(32768, jnp.float32)
    for dtype, staged in ((jnp.float16, True), (jnp.float32, False)):
        config = Launch.of_groups(32, 5760, 2880, dtype, 132).config
        assert isinstance(config, Config)
        assert config.staged is staged


def test_blocks_of_rows_are_those_of_random_routing(rng):
    for mean, block_m in ((512, 128), (512, 192), (40, 64), (3, 128)):
        sizes = rng.poisson(mean, 2000)
        found = (-(-sizes // block_m)).sum()
        assert blocks_of_rows(2000 * mean, 2000, block_m) == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("change", [{"block_n": 128}, {"block_n": 200}, {"piece_rows": 24}, {"num_stages": 4}])
def test_wrong_configurations_of_fitted_blocks(change):
    (name,) = change
    with pytest.raises(ValueError, match=f"`{name}` \\(=.*must be"):
        FittedConfig(**change)


@pytest.mark.parametrize("change", [{"block_n": 96}, {"block_n": 320}, {"num_stages": 0}, {"num_stages": 5}])
def test_wrong_configurations(change):
    (name,) = change
    with pytest.raises(ValueError, match=f"`{name}` \\(=.*must be"):
        dataclasses.replace(Config(256, 2, 4), **change)


# On a Hopper GPU: few programs, each of which takes all of the groups


def as_many(cases: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """These sizes with empty groups after them, so that all have as many."""
    most = max(map(len, cases.values()))
    return {name: np.array(sizes + [0] * (most - len(sizes)), np.int32) for name, sizes in cases.items()}


@pytest.fixture
def cores():
    if Environment.probe().compute_capability != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return jax.devices()[0].core_count


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(128, 192), (448, 64), (320, 576)])
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "result"), [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")]
)
def test_kernels_on_a_gpu(dtype, result, warpgroups, n, k, rng, cores):
    """Rows of no group hold NaN, which must not reach any result."""
    cases = as_many(KERNEL_SIZES)
    num_rows = max(int(sizes.sum()) for sizes in cases.values()) // 8 * 8 + 8
    configs = [deepest(min(256 if warpgroups < 3 else 192, size), warpgroups) for size in (n, k)]
    staged = deepest(configs[1].block_n, warpgroups, staged=True)
    to_n, to_k, in_shared = (Launch(jnp.dtype(result), config, cores) for config in (*configs, staged))
    forward, dx = (
        jax.jit(partial(product, its=its, transposed=transposed)) for its, transposed in ((to_n, False), (to_k, True))
    )
    outers = [jax.jit(partial(outer, its=its)) for its in (to_k, in_shared)]
    bound = "float32" if result == "float32" else "bfloat16"
    for sizes in cases.values():
        used, groups = int(sizes.sum()), Groups.of(jnp.asarray(sizes))
        rows, d = (jnp.asarray(rng.standard_normal((num_rows, size)), dtype) for size in (k, n))
        rows, d = (array.at[used:].set(jnp.nan) for array in (rows, d))
        weights = jnp.asarray(rng.standard_normal((sizes.size, n, k)), dtype)
        products, drows, dweights = exact(sizes, rows, weights, d)
        assert_close(forward(rows, weights, groups)[:used], products, bound)
        assert_close(dx(d, weights, groups)[:used], drows[:used], bound)
        for run in outers:
            assert_close(run(d, rows, groups), dweights, bound)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(128, 192), (448, 64), (320, 576), (64, 128)])
@pytest.mark.parametrize("block_n", [144, 192])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_in_fitted_blocks_on_a_gpu(dtype, block_n, n, k, rng, cores):
    """Rows between groups hold NaN, and the rows after each group that may be written are less than 8."""
    cases = as_many(KERNEL_SIZES | FITTED_SIZES)
    num_rows = max(int((aligned_starts(sizes) + sizes).max()) for sizes in cases.values()) // 8 * 8 + 8
    launch = Launch(jnp.dtype(dtype), FittedConfig(block_n), cores)
    forward, dx = (jax.jit(partial(product, its=launch, transposed=transposed)) for transposed in (False, True))
    for sizes in cases.values():
        starts = aligned_starts(sizes)
        inside = [np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        inside = np.concatenate(inside).astype(np.int32)
        groups = Groups.at(jnp.asarray(starts), jnp.asarray(sizes))
        packed, d = (jnp.asarray(rng.standard_normal((inside.size, size)), dtype) for size in (k, n))
        weights = jnp.asarray(rng.standard_normal((sizes.size, n, k)), dtype)
        products, drows, _ = exact(sizes, packed, weights, d)
        rows, drows_of = (jnp.full((num_rows, its.shape[1]), jnp.nan, dtype).at[inside].set(its) for its in (packed, d))
        assert_close(forward(rows, weights, groups)[inside], products, "bfloat16")
        assert_close(dx(drows_of, weights, groups)[inside], drows, "bfloat16")
