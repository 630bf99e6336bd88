"""Choosing tokens from logits, against definitions in numpy."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jmx.models import Sampler
from jmx.models.logprobs import log_probabilities
from jmx.models.penalties import TokenCounts, penalize

ROWS, VOCAB = 3, 50  # of all logits: one compilation


@examples(20)
@given(st.floats(0.2, 3), st.floats(0.05, 1), st.integers(0, 2**31 - 1))
def test_sampling_stays_within_top_p_and_repeats_by_seed(temperature: float, top_p: float, seed: int) -> None:
    logits = np.random.default_rng(seed).standard_normal((3, 50)).astype(np.float32) * 2
    sampler = Sampler(temperature, top_p, seed)
    drawn = np.asarray(sampler(jnp.asarray(logits), 5))
    assert (drawn == np.asarray(sampler(jnp.asarray(logits), 5))).all()
    scaled = np.exp(logits.astype(np.float64) / temperature)
    probabilities = scaled / scaled.sum(axis=-1, keepdims=True)
    for row, token in zip(probabilities, drawn, strict=True):
        assert row[row > row[token]].sum() < top_p + 1e-5


def test_sampling_draws_in_proportion(rng: np.random.Generator) -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = jnp.asarray(np.tile(2 * np.log(probabilities), (20000, 1)), jnp.float32)
    seed = int(rng.integers(2**31))
    drawn = np.asarray(Sampler(temperature=2.0, seed=seed)(logits, 0))
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / drawn.size, probabilities, atol=0.03)
    drawn = np.asarray(Sampler(temperature=2.0, top_p=0.7, seed=seed)(logits, 0))
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / drawn.size, [0.625, 0.375, 0, 0], atol=0.03)
    assert (np.asarray(Sampler(temperature=2.0, seed=seed)(logits, 1)) != drawn).any()


def test_seeds_of_32_bits_are_drawn_by_and_all_differ(rng: np.random.Generator) -> None:
    logits = jnp.asarray(rng.standard_normal((50, 100)), jnp.float32)
    seeds = (0, 2**31 - 1, 2**31, 2**32 - 1)
    assert len({np.asarray(Sampler(1.0, seed=seed)(logits, 0)).tobytes() for seed in seeds}) == len(seeds)


@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("temperature", [1e-50, 1e-38, 1e-20])
def test_a_tiny_temperature_takes_the_largest(temperature: float, top_p: float, rng: np.random.Generator) -> None:
    logits = jnp.asarray(rng.standard_normal((20, 50)) * 10, jnp.float32)
    drawn = Sampler(temperature, top_p)(logits, 0)
    assert (np.asarray(drawn) == np.asarray(logits).argmax(-1)).all()


def test_greedy_takes_the_first_largest() -> None:
    assert np.asarray(Sampler()(jnp.array([[1.0, 3, 3], [5, 0, 5]]), 0)).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("seed", -1),
        ("seed", 2**32),
        ("top_k", 0),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3.0),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"`{name}` \(={value}\)"):
        dataclasses.replace(Sampler(), **{name: value})


@pytest.mark.parametrize("value", ["1", None, [1.0], 1j, np.ones(2)], ids=repr)
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Sampler)])
def test_sampling_parameters_of_other_types_are_refused(name: str, value: Any) -> None:
    if name == "top_k" and value is None:
        pytest.skip("None keeps all tokens")
    with pytest.raises((TypeError, ValueError), match=f"`{name}`"):
        dataclasses.replace(Sampler(), **{name: value})


# Filters


def kept(sampler: Sampler, logits: np.ndarray) -> np.ndarray:
    """Which tokens of a row may be drawn, in float64, of logits without near ties."""
    scaled = logits.astype(np.float64) / sampler.temperature
    probabilities = np.exp(scaled - scaled.max())
    order = np.argsort(-probabilities)
    allowed = order[: sampler.top_k]
    shares = probabilities[allowed] / probabilities[allowed].sum()
    allowed = allowed[np.concatenate([[True], np.cumsum(shares)[:-1] < sampler.top_p])]
    return np.isin(np.arange(logits.size), allowed) & (probabilities >= sampler.min_p * probabilities.max())


@examples(30)
@given(
    st.sampled_from([None, 1, 2, 7, VOCAB, 10 * VOCAB]),
    st.sampled_from([1.0, 0.9, 0.35]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.floats(0.3, 3),
    st.integers(0, 2**31 - 1),
)
def test_only_tokens_that_all_filters_keep_are_drawn(
    top_k: int | None, top_p: float, min_p: float, temperature: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.permuted(np.tile(np.linspace(-6, 6, VOCAB), (ROWS, 1)), axis=1)).astype(np.float32)
    sampler = Sampler(temperature, top_p * 0.999, seed, top_k=top_k, min_p=min_p)
    allowed = np.stack([kept(sampler, row) for row in logits])
    for step in range(8):
        drawn = np.asarray(sampler(jnp.asarray(logits), step))
        assert allowed[np.arange(ROWS), drawn].all()


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.4}], ids=str)
def test_a_filter_draws_in_proportion_to_what_it_keeps(filters: dict[str, Any]) -> None:
    probabilities = np.array([0.4, 0.3, 0.2, 0.1])
    logits = jnp.asarray(np.tile(np.log(probabilities), (20000, 1)), jnp.float32)
    sampler = Sampler(1.0, seed=5, **filters)
    shares = np.where(kept(sampler, np.log(probabilities)), probabilities, 0)
    drawn = np.asarray(sampler(logits, 0))
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / drawn.size, shares / shares.sum(), atol=0.03)


def test_logits_of_minus_infinity_are_never_drawn(rng: np.random.Generator) -> None:
    logits = np.full((ROWS, VOCAB), -np.inf, np.float32)
    allowed = rng.integers(VOCAB, size=(ROWS, 2))
    np.put_along_axis(logits, allowed, 0.0, axis=1)
    for sampler in (Sampler(), Sampler(1.0), Sampler(1.0, 0.9, top_k=40, min_p=0.01)):
        drawn = np.asarray(sampler(jnp.asarray(logits), 1))
        assert all(token in row for token, row in zip(drawn, allowed, strict=True))


def test_equals_of_the_last_token_kept_are_kept() -> None:
    logits = jnp.asarray(np.tile([0.0, 0.0, 0.0, -9.0], (3000, 1)), jnp.float32)
    drawn = np.asarray(Sampler(1.0, top_k=2)(logits, 0))
    assert set(drawn.tolist()) == {0, 1, 2}


# Penalties


def penalized(
    logits: np.ndarray, prompt: list[int], new: list[int], repetition: float, presence: float, frequency: float
) -> np.ndarray:
    """The definition, of one row, in float64."""
    out = logits.astype(np.float64)
    for token in {*prompt, *new}:
        out[token] = out[token] / repetition if out[token] >= 0 else out[token] * repetition
    for token in {*new}:
        out[token] -= presence + frequency * new.count(token)
    return out


@examples(20)
@given(
    st.floats(0.5, 2), st.floats(-2, 2), st.floats(-2, 2), st.lists(st.integers(0, VOCAB - 1), max_size=9), st.data()
)
def test_penalties_are_their_definition(
    repetition: float, presence: float, frequency: float, new: list[int], data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31 - 1)))
    logits = rng.standard_normal((ROWS, VOCAB)).astype(np.float32)
    prompts = rng.integers(VOCAB, size=(ROWS, 5)).tolist()
    counts = TokenCounts.of(prompts, VOCAB)
    for token in new:
        counts = counts.add(jnp.full(ROWS, token))
    got = np.asarray(penalize(jnp.asarray(logits), counts, repetition, presence, frequency))
    expected = [penalized(*row, new, repetition, presence, frequency) for row in zip(logits, prompts, strict=True)]
    np.testing.assert_allclose(got, np.stack(expected), rtol=1e-5, atol=1e-5)


def test_penalties_change_a_greedy_choice_and_need_counts() -> None:
    sampler, logits = Sampler(frequency_penalty=1.0), jnp.array([[2.0, 1.5, 0.0]])
    counts = sampler.counts([[0]], 3)
    assert counts is not None
    first = sampler(logits, 0, counts)
    second = sampler(logits, 1, counts.add(first))
    assert (first.tolist(), second.tolist()) == ([0], [1])
    with pytest.raises(ValueError, match=r"`counts` \(=None\)"):
        sampler(logits, 0)
    assert Sampler().counts([[0]], 3) is None


def test_other_parameters_compile_nothing_more(rng: np.random.Generator) -> None:
    logits = jnp.asarray(rng.standard_normal((ROWS, VOCAB)), jnp.float32)
    Sampler(0.5, 0.9, 1, top_k=3)(logits, 0)
    with jax.no_tracing():
        Sampler(0.7, 0.8, 2, top_k=4)(logits, 1)


# Log probabilities


@pytest.mark.parametrize("count", [0, 1, 5, VOCAB])
def test_log_probabilities_are_those_of_the_softmax(count: int, rng: np.random.Generator) -> None:
    logits = (5 * rng.standard_normal((ROWS, VOCAB))).astype(np.float32)
    tokens = rng.integers(VOCAB, size=ROWS)
    found = log_probabilities(jnp.asarray(logits), jnp.asarray(tokens), count)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(found.chosen, expected[np.arange(ROWS), tokens], rtol=1e-5, atol=1e-5)
    order = np.argsort(-expected, axis=1, kind="stable")[:, :count]
    assert np.array_equal(np.asarray(found.top_ids), order)
    np.testing.assert_allclose(found.top, np.take_along_axis(expected, order, axis=1), rtol=1e-5, atol=1e-5)
