"""Grouped products of float weights: which engine multiplies them, and what is around the kernels for Hopper; the
kernels themselves on a Hopper GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_grouped_dot import SIZES, assert_close, data, exact, inner

from jmx import Environment, Reason
from jmx.floats import grouped_dot, rejection
from jmx.pallas.float_sm90 import grouped
from jmx.pallas.float_sm90.blocks import Groups, RowBlocks
from jmx.pallas.float_sm90.config import Config, Launch, deepest, heuristic
from jmx.pallas.float_sm90.outer import outer
from jmx.pallas.float_sm90.product import Schedule, product
from jmx.pallas.sm90.config import SHARED_MEMORY
from jmx.perf.shapes import MODELS

HOPPER = Environment.named("h200")
KERNEL_SIZES = SIZES | {"many": [513, 0, 1, 64, 63, 65, 200], "aligned": [64, 128, 8, 256], "ones": [1] * 9}


# Which engine


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "reason", "message"),
    [
        ("cpu", "bfloat16", (64, 64), Reason.PLATFORM, "'cpu'"),
        ("a100", "bfloat16", (64, 64), Reason.COMPUTE_CAPABILITY, "(8, 0)"),
        ("b200", "bfloat16", (64, 64), Reason.COMPUTE_CAPABILITY, "(10, 0)"),
        ("h200", "float32", (64, 64), Reason.DTYPE, "'float32'"),
        ("h200", "bfloat16", (96, 64), Reason.SHAPE, "(96, 64)"),
        ("h100", "float16", (64, 72), Reason.SHAPE, "(64, 72)"),
    ],
)
def test_rejected_weights(device, dtype, sizes, reason, message):
    found = rejection(dtype, sizes, Environment.named(device))
    assert found is not None
    assert found.reason is reason
    assert message in found.detail


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_published_models_are_multiplied(model, dtype):
    shape = MODELS[model]
    for sizes in ((2 * shape.intermediate_size, shape.hidden_size), (shape.hidden_size, shape.intermediate_size)):
        assert rejection(dtype, sizes, HOPPER) is None


# Blocks, schedules and sizes of tiles


@pytest.mark.parametrize("block_m", [64, 128, 192])
@pytest.mark.parametrize("name", KERNEL_SIZES)
def test_blocks_write_each_row_once_and_begin_where_tma_reads(name, block_m):
    sizes = np.array(KERNEL_SIZES[name], np.int32)
    blocks = RowBlocks.of(jnp.asarray(sizes), int(sizes.sum()), block_m)
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
    config = heuristic(columns)
    assert config.num_stages * config.stage_bytes < SHARED_MEMORY
    assert config.num_stages >= 4
    padded = -(-columns // config.block_n) * config.block_n
    assert padded < columns + config.block_n


@pytest.mark.parametrize("change", [{"block_n": 96}, {"block_n": 320}, {"num_stages": 0}, {"num_stages": 5}])
def test_wrong_configurations(change):
    (name,) = change
    with pytest.raises(ValueError, match=f"`{name}` \\(=.*must be"):
        dataclasses.replace(Config(256, 2, 4), **change)


# Around the kernels, on any machine: their contracts in numpy in their places


def emulated_product(rows, weights, sizes, its, *, transposed):
    """As `product.product` says; rows of no group are NaN."""
    assert its.num_cores == HOPPER.core_count
    assert len(rows) % 8 == 0

    def run(rows, weights, sizes):
        out = np.full((len(rows), weights.shape[2 if transposed else 1]), np.nan)
        group = np.repeat(np.arange(len(sizes)), sizes)
        dims = "rn,rnk->rk" if transposed else "rk,rnk->rn"
        out[: len(group)] = np.einsum(dims, rows[: len(group)], weights[group])
        return out

    return called(run, (len(rows), weights.shape[2 if transposed else 1]), its.dtype, rows, weights, sizes)


def emulated_outer(d, rows, groups, its):
    """As `outer.outer` says."""
    assert its.num_cores == HOPPER.core_count
    assert len(rows) == len(d)
    assert len(rows) % 8 == 0

    def run(d, rows, aligned, starts, ends):
        del aligned
        mine = [slice(int(start), int(end)) for start, end in zip(starts, ends, strict=True)]
        return np.stack([d[each].T @ rows[each] for each in mine])

    return called(run, (len(groups.starts), d.shape[1], rows.shape[1]), its.dtype, d, rows, *groups)


def called(run, shape, dtype, *arrays):
    """`run` of numpy arrays, floats in 64 bits."""

    def in_numpy(*arrays):
        wide = (np.asarray(a) if a.dtype == np.int32 else np.asarray(a, np.float64) for a in arrays)
        return run(*wide).astype(dtype)

    return jax.pure_callback(in_numpy, jax.ShapeDtypeStruct(shape, dtype), *arrays, vmap_method="sequential")


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(grouped, "product", emulated_product)
    monkeypatch.setattr(grouped, "outer", emulated_outer)
    monkeypatch.setattr(Environment, "probe", classmethod(lambda cls, *arguments: HOPPER))


def widened(sizes, rows, weights, d):
    """`data` with sizes that the kernels take."""
    return sizes, *(jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % 64)]) for a in (rows, weights, d))


def wide_data(rng, name, dtype="bfloat16"):
    sizes, rows, weights, d = widened(*data(rng, name, dtype))
    return sizes, rows, jnp.pad(weights, [(0, 0), (0, -weights.shape[1] % 64), (0, 0)]), d


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SIZES)
def test_products_and_gradients_around_the_kernels(name, dtype, rng, emulated):
    sizes, rows, weights, d = wide_data(rng, name, dtype)
    products, drows, dweights = exact(sizes, rows, weights, d)
    got = jax.jit(grouped_dot)(rows, weights, sizes)
    assert got.dtype == jnp.float32
    assert got.shape == (len(rows), weights.shape[1])
    assert_close(got[: len(products)], products, "bfloat16")
    with_gradients = lambda rows, weights: inner(sizes, d, grouped_dot)(rows, weights)  # noqa: E731
    got = jax.jit(jax.grad(with_gradients, (0, 1)))(rows, weights)
    assert [part.dtype for part in got] == [rows.dtype, weights.dtype]
    assert_close(got[0], drows, "bfloat16")
    assert_close(got[1], dweights, "bfloat16")


@pytest.mark.parametrize("transform", ["remat", "scan", "vmap", "shard_map", "frozen"])
def test_transformations_around_the_kernels(transform, rng, emulated):
    sizes, rows, weights, d = wide_data(rng, "even")
    loss = inner(sizes, d, grouped_dot)
    expected = jax.grad(loss, (0, 1))(rows, weights)
    if transform == "remat":
        got = jax.grad(jax.checkpoint(loss), (0, 1))(rows, weights)
    elif transform == "scan":
        stacked = jax.grad(
            lambda rows, many: jax.lax.scan(lambda c, w: (c + loss(rows, w), None), 0.0, many)[0], (0, 1)
        )
        got = stacked(rows, weights[None])
        got = got[0], got[1][0]
    elif transform == "vmap":
        each = jax.vmap(jax.grad(loss, (0, 1)), (0, None))(jnp.stack([rows, rows]), weights)
        got = tuple(part[1] for part in each)
    elif transform == "shard_map":
        mesh = jax.make_mesh((1,), ("experts",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("experts")
        mapped = jax.shard_map(grouped_dot, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)
        divided = inner(sizes, d, mapped)
        got = jax.jit(jax.grad(divided, (0, 1)))(rows, weights)
    else:
        texts = [jax.jit(jax.grad(loss, which)).lower(rows, weights).compile().as_text() or "" for which in ((0, 1), 0)]
        # The product itself is not needed.
        assert [text.count("custom_call_target=") for text in texts] == [2, 1]
        return
    for part, whole in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(part, np.float32), np.asarray(whole, np.float32), rtol=2e-2, atol=2e-2)


@pytest.mark.devices(2)
@pytest.mark.parametrize("engine", ["kernels", "xla"])
def test_devices_with_their_own_rows_add_up_the_gradients_of_shared_weights(engine, rng, request):
    if engine == "kernels":
        request.getfixturevalue("emulated")
    sizes, rows, weights, d = wide_data(rng, "even")
    expected = jax.grad(inner(sizes, d, grouped_dot), (0, 1))(rows, weights)
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def loss(rows, weights):
        def local(rows, weights, sizes, d):
            return (grouped_dot(rows, weights, sizes[0]) * d).sum()[None]

        specs = (spec("rows"), spec(), spec("rows"), spec("rows"))
        own = jnp.array([[5, 5, 0, 0], [0, 0, 5, 5]], jnp.int32)  # of the 20 rows of `sizes`
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec("rows"))(rows, weights, own, d).sum()

    for got, whole in zip(jax.jit(jax.grad(loss, (0, 1)))(rows, weights), expected, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(whole, np.float32), rtol=2e-2, atol=2e-2)


def test_weights_that_xla_divides_are_multiplied_by_xla(rng, emulated, monkeypatch):
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    sizes, rows, weights, _ = wide_data(rng, "even")
    monkeypatch.setattr(grouped, "product", None)  # not called
    auto = jax.make_mesh((2,), ("experts",), axis_types=(jax.sharding.AxisType.Auto,))
    expected = exact(sizes, rows, weights, jnp.zeros((len(rows), weights.shape[1])))[0]
    with jax.set_mesh(auto):
        got = jax.jit(grouped_dot)(rows, weights, sizes)
    assert_close(got, expected, "bfloat16")


# On a Hopper GPU


@pytest.mark.gpu
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
@pytest.mark.parametrize("name", KERNEL_SIZES)
@pytest.mark.parametrize(
    ("dtype", "result"), [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")]
)
def test_kernels_on_a_gpu(name, dtype, result, warpgroups, rng):
    """Rows of no group hold NaN, which must not reach any result."""
    if Environment.probe().compute_capability != (9, 0):
        pytest.skip("needs a Hopper GPU")
    sizes = jnp.asarray(KERNEL_SIZES[name], jnp.int32)
    used = int(sizes.sum())
    num_rows = -(-(used + 5) // 8) * 8
    for n, k in ((128, 192), (448, 64), (320, 576)):
        rows, d = (jnp.asarray(rng.standard_normal((num_rows, size)), dtype) for size in (k, n))
        rows, d = (array.at[used:].set(jnp.nan) for array in (rows, d))
        weights = jnp.asarray(rng.standard_normal((sizes.size, n, k)), dtype)
        products, drows, dweights = exact(sizes, rows, weights, d)
        cores = jax.devices()[0].core_count
        its = [
            Launch(jnp.dtype(result), deepest(min(256 if warpgroups < 3 else 192, size), warpgroups), cores)
            for size in (n, k)
        ]
        bound = "float32" if result == "float32" else "bfloat16"
        got = product(rows, weights, sizes, its[0], transposed=False)
        assert_close(got[:used], products, bound)
        got = product(d, weights, sizes, its[1], transposed=True)
        assert_close(got[:used], drows[:used], bound)
        got = outer(d, rows, Groups.of(sizes), its[1])
        assert_close(got, dweights, bound)
