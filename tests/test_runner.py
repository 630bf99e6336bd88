"""Prefill, further turns and decoding, of a model that is only compared with itself."""

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_steps import relative_error
from properties import examples

from jmx.checkpoint.gpt_oss import read_config
from jmx.checkpoint.model_configs.gpt_oss import FULL, SLIDING
from jmx.models import Cache, Runner, from_source, random_source
from jmx.models.attention.functions import QUERIES

pytestmark = pytest.mark.costly

TINY = Path(__file__).resolve().parents[1] / "tests" / "data" / "gpt_oss_tiny"
WINDOW = 16  # of the sliding layer
LENGTH = 32


@pytest.fixture(scope="module")
def small() -> Runner:
    """Two layers, one that slides and one that does not."""
    config = dataclasses.replace(read_config(TINY), num_hidden_layers=2, layer_types=(SLIDING, FULL))
    return Runner(from_source(random_source(config), dtype=jnp.float32))


@pytest.fixture(scope="module")
def rows(small: Runner) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return rng.integers(small.model.config.vocab_size, size=(2, LENGTH)).tolist()


@pytest.fixture(scope="module")
def expected(small: Runner, rows: list[list[int]]) -> np.ndarray:
    """Logits after each token, by one prefill."""
    return np.asarray(small.prefill(rows, all_logits=True)[0])


# Further turns


def check_turns(small: Runner, rows: list[list[int]], ends: list[list[int]], expected: np.ndarray) -> Cache:
    """Runs each row up to `ends` (turns, B), and compares the logits there."""
    cache = small.model.empty_cache(len(rows), 64)
    logits, cache = small.prefill([row[:end] for row, end in zip(rows, ends[0], strict=True)], cache=cache)
    for before, after in pairwise(ends):
        new = [row[start:end] for row, start, end in zip(rows, before, after, strict=True)]
        logits, cache = small.extend(new, cache)
        assert relative_error(logits, expected[np.arange(len(rows)), np.array(after) - 1]) <= 1e-4
        assert np.asarray(cache.lengths).tolist() == after
        assert cache.longest >= max(after)
    return cache


@examples(15)
@given(st.data())
def test_turns_of_any_lengths_give_the_logits_of_one_prefill(
    small: Runner, rows: list[list[int]], expected: np.ndarray, data: st.DataObject
) -> None:
    """Over the edge of the window, with rows that differ in every turn."""
    turns = data.draw(st.integers(2, 5))
    ends = [
        sorted(data.draw(st.lists(st.integers(1, LENGTH), min_size=turns, max_size=turns, unique=True))) for _ in rows
    ]
    check_turns(small, rows, [list(turn) for turn in zip(*ends, strict=True)], expected)


@pytest.mark.parametrize("at", range(1, LENGTH, 4))
def test_every_split_in_two_gives_the_logits_of_one_prefill(
    small: Runner, rows: list[list[int]], expected: np.ndarray, at: int
) -> None:
    check_turns(small, rows, [[at, LENGTH - at], [LENGTH, LENGTH]], expected)


def test_a_turn_of_more_than_one_block_of_queries_for_which_the_cache_grows(
    small: Runner, rng: np.random.Generator
) -> None:
    rows = rng.integers(small.model.config.vocab_size, size=(2, QUERIES + 70)).tolist()
    expected, _ = small.prefill(rows)
    _, old = small.prefill([rows[0][:5], rows[1][:29]], cache=small.model.empty_cache(2, 64))
    logits, cache = small.extend([rows[0][5:], rows[1][29:]], old)
    assert relative_error(logits, np.asarray(expected)) <= 1e-4
    assert (old.capacity, cache.capacity) == (64, 512)
    assert all(layer.is_deleted() for layer in old.layers)


def test_a_turn_after_truncation_gives_the_logits_of_one_prefill(
    small: Runner, rows: list[list[int]], expected: np.ndarray
) -> None:
    """What follows in the cache is not seen, and is written over; decoding goes on from there, too."""
    cache = check_turns(small, rows, [[20, 9], [31, 30]], expected)
    short = cache.truncate([17, 0])
    assert (short.longest, np.asarray(short.lengths).tolist()) == (17, [17, 0])
    assert short.layers is cache.layers
    changed = [rows[0][:17] + rows[0][::-1], rows[1][::-1]]
    expected = np.asarray(small.prefill([row[:LENGTH] for row in changed], all_logits=True)[0])
    logits, cache = small.extend([changed[0][17:28], changed[1][:3]], short)
    assert relative_error(logits, expected[[0, 1], [27, 2]]) <= 1e-4
    logits, _ = small.decode(jnp.array([changed[0][28], changed[1][3]]), cache)
    assert relative_error(logits, expected[[0, 1], [28, 3]]) <= 1e-4


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], r"`tokens` \(=\[\]\) must be at least one"),
        ([[1]], r"`tokens` \(of 1 rows\) must have 2 rows"),
        ([[1], []], r"`tokens\[1\]` \(=\[\]\) must have at least one token"),
        ([[1], [320]], r"`tokens\[1\]` has the id 320, which must be in 0..319"),
        ([[-1], [0]], r"`tokens\[0\]` has the id -1"),
    ],
)
def test_turns_that_cannot_be_read_are_refused(small: Runner, rows: list[list[int]], tokens: Any, message: str) -> None:
    _, cache = small.prefill([row[:14] for row in rows], cache=small.model.empty_cache(2, 64))
    with pytest.raises(ValueError, match=message):
        small.extend(tokens, cache)
    assert not cache.layers[0].is_deleted()


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3], r"`lengths` \(of 1 rows\) must have 2 rows"),
        ([3, -1], r"`lengths\[1\]` \(=-1\) must be in 0..7"),
        ([15, 7], r"`lengths\[0\]` \(=15\) must be in 0..14"),
        ([14, 8], r"`lengths\[1\]` \(=8\) must be in 0..7"),
    ],
)
def test_truncation_to_what_is_not_there_is_refused(
    small: Runner, rows: list[list[int]], lengths: list[int], message: str
) -> None:
    lengths_there = jnp.array([14, 7], jnp.int32)
    cache = Cache(small.model.empty_cache(2, 16).layers, lengths_there, 14)
    with pytest.raises(ValueError, match=message):
        cache.truncate(lengths)
