"""Kernels for Hopper GPUs over a cache in pages: interpreted, on a Hopper GPU, and compiled without one."""

from functools import partial

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_steps import relative_error
from test_attention_kernels import BF16, TOLERANCE, compiled, interpreted, last_phases_may_be_skipped, on_hopper

from jmx.models.attention.paged import attend_pages
from jmx.models.paged_cache import PagedLayer, Places
from jmx.pallas.attention.decode import flash_decode
from jmx.pallas.attention.prefill import flash_prefill_pages
from jmx.pallas.attention.write_pages import write_blocks, write_rows

PAGE = 128


def check_pages(rng: np.random.Generator, heads: int, dim: int, window: int | None, width: int) -> None:
    """Rows and blocks over shuffled pages by kernels, against the plain code in float32 on the same numbers."""
    groups, kv_heads = 2, 2
    tables = 1 + rng.permutation(groups * width).reshape(groups, width).astype(np.int32)
    pages = jnp.asarray(2 * rng.standard_normal((2, groups * width + 1, kv_heads, PAGE, dim)), BF16)
    query = jnp.asarray(2 * rng.standard_normal((groups, PAGE, heads, dim)), BF16)
    sinks = jnp.asarray(3 * rng.standard_normal(heads), jnp.float32)
    starts = jnp.asarray(PAGE * rng.integers(width, size=groups), jnp.int32)
    positions = jnp.asarray(rng.integers(width * PAGE, size=groups), jnp.int32)

    @partial(jax.jit, static_argnames="rows")
    def plain(pages: jax.Array, flat: jax.Array, at: jax.Array, rows: int) -> jax.Array:
        layer = PagedLayer(pages.astype(jnp.float32), Places(jnp.asarray(tables), at), rows)
        return attend_pages(flat.astype(jnp.float32), layer, sinks, window)

    expected = plain(pages, query.reshape(-1, 1, heads, dim), starts, rows=0).reshape(query.shape)
    got = flash_prefill_pages(query, pages, jnp.asarray(tables), starts, sinks, window)
    assert relative_error(got, expected) <= TOLERANCE
    expected = plain(pages, query[:, :1], positions, rows=groups)[:, 0]
    got = flash_decode(query[:, 0], pages, sinks, positions, window, jnp.asarray(tables))
    assert relative_error(got, expected) <= TOLERANCE


def check_writes(rng: np.random.Generator, heads: int, dim: int) -> None:
    pages = jnp.asarray(rng.standard_normal((2, 7, heads, PAGE, dim)), BF16)
    numbers = jnp.asarray(1 + rng.permutation(6)[:3], jnp.int32)
    offsets = jnp.asarray(rng.integers(PAGE, size=3), jnp.int32)
    rows = jnp.asarray(rng.standard_normal((2, 3, heads, dim)), BF16)
    expected = pages.at[:, numbers, :, offsets].set(rows.swapaxes(0, 1))
    np.testing.assert_array_equal(jax.jit(write_rows)(pages, rows, numbers, offsets), expected)
    blocks = jnp.asarray(rng.standard_normal((2, 3, PAGE, heads, dim)), BF16)
    expected = pages.at[:, numbers].set(blocks.swapaxes(2, 3))
    np.testing.assert_array_equal(jax.jit(write_blocks)(pages, blocks, numbers), expected)


CASES = [(4, 64, None, 3), (8, 64, 128, 3), (2, 128, 1, 2), (6, 80, 200, 4)]


@last_phases_may_be_skipped
@pytest.mark.costly
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("heads", "dim", "window", "width"), CASES)
def test_interpreted_kernels_attend_to_pages(rng, monkeypatch, heads, dim, window, width) -> None:
    with interpreted(monkeypatch):
        check_pages(rng, heads, dim, window, width)


@pytest.mark.costly
@pytest.mark.usefixtures("on_cpu")
def test_interpreted_kernels_write_pages(rng, monkeypatch) -> None:
    with interpreted(monkeypatch):
        check_writes(rng, 2, 64)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("heads", "dim", "window", "width"), [*CASES, (64, 64, 128, 64), (32, 128, None, 64)])
def test_kernels_attend_to_pages(rng, heads, dim, window, width) -> None:
    check_pages(rng, heads, dim, window, width)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (4, 128), (2, 80)])
def test_kernels_write_pages(rng, heads, dim) -> None:
    check_writes(rng, heads, dim)


MODELS = [(128, 64, 8, 64), (None, 32, 4, 128)]  # window, heads, kv_heads, D of gpt-oss and Qwen3-30B-A3B


@pytest.mark.aot
@pytest.mark.parametrize(("window", "heads", "kv_heads", "dim"), MODELS)
def test_the_kernel_of_rows_compiles_for_an_h200(window, heads, kv_heads, dim, capfd) -> None:
    shape = jax.ShapeDtypeStruct
    query, pages = shape((64, heads, dim), BF16), shape((2, 1025, kv_heads, PAGE, dim), BF16)
    rest = shape((heads,), jnp.float32), shape((64,), jnp.int32)

    def call(query, pages, sinks, positions, tables):
        return flash_decode(query, pages, sinks, positions, window, tables)

    compiled(
        capfd,
        call,
        query,
        pages,
        *rest,
        shape((64, 64), jnp.int32),
        largest_temporary=1.1 * 8 * 64 * heads * (dim + 2) * 4,
    )


@pytest.mark.aot
@pytest.mark.parametrize(("window", "heads", "kv_heads", "dim"), MODELS)
def test_the_kernel_of_blocks_compiles_for_an_h200(window, heads, kv_heads, dim, capfd) -> None:
    shape = jax.ShapeDtypeStruct
    query, pages = shape((8, PAGE, heads, dim), BF16), shape((2, 1025, kv_heads, PAGE, dim), BF16)
    rest = shape((8, 64), jnp.int32), shape((8,), jnp.int32), shape((heads,), jnp.float32)
    compiled(capfd, partial(flash_prefill_pages, window=window), query, pages, *rest, largest_temporary=1e6)


@pytest.mark.aot
def test_pages_are_written_in_place_on_an_h200() -> None:
    shape = jax.ShapeDtypeStruct
    pages, new = shape((2, 1025, 8, PAGE, 64), BF16), shape((2, 64, 8, 64), BF16)
    numbers = shape((64,), jnp.int32)

    def call(pages, new, blocks, numbers, offsets):
        return write_blocks(write_rows(pages, new, numbers, offsets), blocks, numbers[:4])

    program = aot.compile_for_h200(
        jax.jit(call, donate_argnums=0), pages, new, shape((2, 4, PAGE, 8, 64), BF16), numbers, numbers
    )
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 1e6  # the pages have 269 MB
