"""Attention over pages against attention over a contiguous cache, whose tokens are in pages in any order."""

import jax.numpy as jnp
import numpy as np
import pytest
from model_steps import relative_error

from jmx.models.attention.functions import attend, no_sinks
from jmx.models.attention.paged import attend_latent_pages, attend_pages
from jmx.models.paged_cache import PagedLayer, Places

PAGE, CAPACITY = 4, 24


class Case:
    """Rows and blocks of a step with a contiguous cache of each, and the same in shuffled pages."""

    def __init__(self, rng: np.random.Generator, parts: int, heads: int, dim: int, rows: int, blocks: int):
        groups = rows + blocks
        self.rows, self.blocks = rows, blocks
        self.cache = rng.standard_normal((parts, groups, heads, CAPACITY, dim)).astype(np.float32)
        number = CAPACITY // PAGE
        self.tables = 1 + rng.permutation(groups * number).reshape(groups, number).astype(np.int32)
        self.positions = np.concatenate(
            [rng.integers(CAPACITY, size=rows), PAGE * rng.integers(number, size=blocks)]
        ).astype(np.int32)
        self.pages = rng.standard_normal((parts, groups * number + 1, heads, PAGE, dim)).astype(np.float32)
        in_pages = self.cache.reshape(parts, groups, heads, number, PAGE, dim).swapaxes(2, 3)
        self.pages[:, self.tables] = in_pages
        self.query_shape = (rows + blocks * PAGE, 1)

    @property
    def layer(self) -> PagedLayer:
        places = Places(jnp.asarray(self.tables), jnp.asarray(self.positions))
        return PagedLayer(jnp.asarray(self.pages), places, self.rows)

    def groups(self, flat: np.ndarray) -> list[tuple[np.ndarray, slice]]:
        """What is of each token (rows, then blocks), as groups of one token and of a page, and their part of groups."""
        rows, of_blocks = flat[: self.rows], flat[self.rows :]
        pairs = (rows, slice(0, self.rows)), (of_blocks.reshape(-1, PAGE, *flat.shape[2:]), slice(self.rows, None))
        return [pair for pair in pairs if len(pair[0])]


STEPS = [(3, 0), (0, 2), (2, 3), (1, 1)]


@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 9, 100])
@pytest.mark.parametrize(("rows", "blocks"), STEPS)
def test_pages_attend_as_one_cache_does(rng: np.random.Generator, window: int | None, rows: int, blocks: int) -> None:
    case = Case(rng, 2, 2, 8, rows, blocks)
    query = rng.standard_normal((*case.query_shape, 6, 8)).astype(np.float32)
    sinks = jnp.asarray(rng.standard_normal(6), jnp.float32) if rng.random() < 0.5 else None
    expected = [
        np.asarray(
            attend(
                jnp.asarray(its),
                jnp.asarray(case.cache[0, part]),
                jnp.asarray(case.cache[1, part]),
                no_sinks(6) if sinks is None else sinks,
                jnp.asarray(case.positions[part]),
                window,
            )
        ).reshape(-1, 1, 6, 8)
        for its, part in case.groups(query)
    ]
    got = attend_pages(jnp.asarray(query), case.layer, sinks, window)
    assert got.shape == query.shape
    assert relative_error(got, np.concatenate(expected)) <= 1e-6


@pytest.mark.parametrize(("rows", "blocks"), STEPS)
def test_latents_in_pages_attend_as_in_one_cache(rng: np.random.Generator, rows: int, blocks: int) -> None:
    case = Case(rng, 1, 1, 12, rows, blocks)
    query = rng.standard_normal((*case.query_shape, 5, 12)).astype(np.float32)
    expected = []
    for its, part in case.groups(query):
        latents, starts = jnp.asarray(case.cache[0, part]), jnp.asarray(case.positions[part])
        out = attend(jnp.asarray(its), latents, latents, no_sinks(5), starts, None, 0.3)[..., :8]
        expected.append(np.asarray(out).reshape(-1, 1, 5, 8))
    got = attend_latent_pages(jnp.asarray(query), case.layer, 8, 0.3)
    assert relative_error(got, np.concatenate(expected)) <= 1e-6


@pytest.mark.parametrize(("rows", "blocks"), STEPS)
def test_tokens_are_written_to_their_pages_and_nowhere_else(rng: np.random.Generator, rows: int, blocks: int) -> None:
    case = Case(rng, 2, 3, 8, rows, blocks)
    new = rng.standard_normal((2, *case.query_shape, 3, 8)).astype(np.float32)
    expected = case.pages.copy()
    token = 0
    for group, position in enumerate(case.positions):
        for offset in range(1 if group < rows else PAGE):
            number, at = divmod(position + offset, PAGE)
            expected[:, case.tables[group, number], :, at] = new[:, token, 0]
            token += 1
    got = case.layer.write([jnp.asarray(part) for part in new])
    np.testing.assert_array_equal(got.pages, expected)
