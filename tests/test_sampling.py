"""Choosing tokens: each parameter against its definition in numpy, alone and together, and what is refused."""

import dataclasses
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jmx.models import Sampler, TokenCounts
from jmx.models.logprobs import log_probabilities
from jmx.models.penalties import penalize

ROWS, VOCAB = 4000, 8
PROMPT, NEW = [0, 3, 3], [3, 5, 5, 5]
DEFAULTS = dataclasses.asdict(Sampler())


def penalized(logits: np.ndarray, sampler: Sampler) -> np.ndarray:
    """Logits (VOCAB,) after PROMPT and NEW."""
    logits = logits.astype(np.float64)
    for token in {*PROMPT, *NEW}:
        logits[token] *= sampler.repetition_penalty ** (1 if logits[token] < 0 else -1)
    for token in {*NEW}:
        logits[token] -= sampler.presence_penalty
    for token in NEW:
        logits[token] -= sampler.frequency_penalty
    return logits


def probabilities(logits: np.ndarray, sampler: Sampler) -> np.ndarray:
    """The definition of a random choice: the probabilities of all tokens (VOCAB,), 0 for those that are dropped."""
    logits = penalized(logits, sampler) / sampler.temperature
    if sampler.top_k is not None and sampler.top_k < VOCAB:
        logits[logits < np.sort(logits)[-sampler.top_k]] = -np.inf
    part = softmax(logits)
    kept, total = [], 0.0
    for token in np.argsort(-part, kind="stable"):
        if total >= sampler.top_p:
            break
        total += part[token]
        kept.append(token)
    logits[part < part[kept].min()] = -np.inf
    part = softmax(logits)
    return softmax(np.where(part >= sampler.min_p * part.max(), logits, -np.inf))


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def counts(rows: int) -> TokenCounts:
    found = TokenCounts.of([PROMPT] * rows, VOCAB)
    for token in NEW:
        found = found.add(jnp.full(rows, token))
    return found


def drawn(logits: np.ndarray, sampler: Sampler) -> np.ndarray:
    """ROWS choices from the same logits."""
    return np.asarray(sampler(jnp.asarray(np.tile(logits, (ROWS, 1))), 3, counts(ROWS)))


LOGITS = {
    "different": [0.3, -1.2, 2.1, 1.7, -0.4, 1.1, 0.9, -3.0],
    "with ties": [1.0, 2.0, 2.0, 1.0, -1.0, 1.0, 0.0, 2.0],
    "with -inf": [-np.inf, 1.0, 0.5, -np.inf, 2.0, -np.inf, 1.5, -1.0],
    "one finite": [-np.inf] * 7 + [-3.0],
    "all equal": [0.5] * 8,
}
PENALTIES = {"repetition_penalty": 1.7, "presence_penalty": 0.6, "frequency_penalty": -0.35}


@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("penalties", [{}, PENALTIES], ids=["plain", "penalties"])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": VOCAB},
        {"top_k": 1 << 40},
        {"top_p": 0.6},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"min_p": 0.31},
        {"min_p": 1e-50},
        {"top_k": 4, "top_p": 0.7, "min_p": 0.29},
    ],
    ids=str,
)
def test_choices_are_as_frequent_as_the_definitions_probabilities(
    logits: str, penalties: dict[str, Any], filters: dict[str, Any], rng: np.random.Generator
) -> None:
    sampler = Sampler(temperature=1.3, seed=int(rng.integers(2**32)), **filters, **penalties)
    values = np.array(LOGITS[logits], np.float32)
    expected = probabilities(values, sampler)
    got = np.bincount(drawn(values, sampler), minlength=VOCAB) / ROWS
    assert (got[expected == 0] == 0).all()
    np.testing.assert_allclose(got, expected, atol=6 * 0.5 / ROWS**0.5)  # six standard deviations, at most


@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("penalties", [{}, *({name: value} for name, value in PENALTIES.items()), PENALTIES], ids=str)
@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.5, "min_p": 0.2}], ids=["all", "filters"])
def test_temperature_0_takes_the_first_largest_whatever_the_filters(
    logits: str, penalties: dict[str, Any], filters: dict[str, Any]
) -> None:
    sampler, values = Sampler(**filters, **penalties), np.array(LOGITS[logits], np.float32)
    assert (drawn(values, sampler) == penalized(values, sampler).argmax()).all()


def test_penalties_are_of_each_rows_own_tokens(rng: np.random.Generator) -> None:
    prompts, new = [[1, 1, 2], [4], [0]], [[2, 2], [4, 5], [0, 0]]
    state = TokenCounts.of(prompts, VOCAB)
    for tokens in np.transpose(new):
        state = state.add(jnp.asarray(tokens))
    assert np.asarray(state.new).tolist() == [np.bincount(row, minlength=VOCAB).tolist() for row in new]
    logits = rng.standard_normal((3, VOCAB)).astype(np.float32)
    got = np.asarray(penalize(jnp.asarray(logits), state, 1.5, 0.25, 0.5))
    for row, (values, prompt, generated) in enumerate(zip(logits, prompts, new, strict=True)):
        expected = [
            (value if token not in prompt + generated else value * 1.5 if value < 0 else value / 1.5)
            - 0.25 * (token in generated)
            - 0.5 * generated.count(token)
            for token, value in enumerate(values)
        ]
        np.testing.assert_allclose(got[row], expected, rtol=1e-5, atol=1e-6)


def test_a_prompts_tokens_are_only_penalized_as_repetitions() -> None:
    state, logits = TokenCounts.of([PROMPT], VOCAB), jnp.ones((1, VOCAB))
    assert (np.asarray(penalize(logits, state, 1.0, 2.0, 2.0)) == 1).all()
    assert np.asarray(penalize(logits, state, 2.0, 0.0, 0.0))[0].tolist() == [0.5, 1, 1, 0.5, 1, 1, 1, 1]


@pytest.mark.parametrize("penalty", [np.finfo(np.float32).tiny, np.finfo(np.float32).max])
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_largest_penalties_give_no_nan(penalty: float, temperature: float) -> None:
    values = np.array([2.0, 1, 1, -1, -2, 0, 0, 0], np.float32)
    sampler = Sampler(temperature, repetition_penalty=penalty)
    assert {*drawn(values, sampler).tolist()} <= ({0} if penalty < 1 else {0, 1, 2, 4, 5, 6, 7} if temperature else {1})


def test_only_what_has_an_effect_is_computed() -> None:
    assert Sampler(top_k=3, top_p=0.5, min_p=0.1).numbers == {}
    assert Sampler().counts([PROMPT], VOCAB) is None
    assert Sampler(1.0).numbers.keys() == {"temperature", "seed"}
    assert Sampler(1.0, top_k=5).numbers.keys() == {"temperature", "seed", "top_k"}
    assert Sampler(presence_penalty=1.0).numbers.keys() == PENALTIES.keys()
    assert not jax.tree.leaves(jax.make_jaxpr(lambda x: Sampler()(x, 0))(jnp.ones((2, 3))).consts)


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_without_counts_are_an_error(name: str) -> None:
    wanted: dict[str, Any] = {name: 1.5}
    sampler = Sampler(**wanted)
    with pytest.raises(ValueError, match=r"`counts` \(=None\) must be given to a sampler with penalties"):
        sampler(jnp.ones((1, VOCAB)), 0)
    assert sampler.counts([PROMPT], VOCAB) is not None


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("count", [0, 1, 5, VOCAB])
def test_log_probabilities_are_the_log_softmax_with_the_lower_id_first(dtype: Any, logits: str, count: int) -> None:
    values = jnp.asarray([LOGITS[logits]] * 2, dtype)
    tokens = np.array([2, 7])
    with np.errstate(divide="ignore"):
        expected = np.log(softmax(np.asarray(values, np.float64)[0]))
    got = log_probabilities(values, jnp.asarray(tokens), count)
    assert all(array.dtype == np.float32 for array in (got.chosen, got.top))
    np.testing.assert_allclose(got.chosen, expected[tokens], rtol=1e-5, atol=1e-6)
    order = np.argsort(-expected, kind="stable")[:count]
    for row in range(2):
        assert np.asarray(got.top_ids)[row].tolist() == order.tolist()
        np.testing.assert_allclose(np.asarray(got.top)[row], expected[order], rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("top_p", [1e-300, 1e-45, 1e-6])
def test_a_tiny_top_p_keeps_the_largest(top_p: float, rng: np.random.Generator) -> None:
    logits = jnp.asarray(rng.standard_normal((20, 50)) * 10, jnp.float32)
    assert (np.asarray(Sampler(2.0, top_p)(logits, 0)) == np.asarray(logits).argmax(-1)).all()


@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("temperature", [1e-50, 1e-38, 1e-20])
def test_a_tiny_temperature_takes_the_largest(temperature: float, top_p: float, rng: np.random.Generator) -> None:
    logits = jnp.asarray(rng.standard_normal((20, 50)) * 10, jnp.float32)
    drawn = Sampler(temperature, top_p)(logits, 0)
    assert (np.asarray(drawn) == np.asarray(logits).argmax(-1)).all()


def test_greedy_takes_the_first_largest() -> None:
    assert np.asarray(Sampler()(jnp.array([[1.0, 3, 3], [5, 0, 5]]), 0)).tolist() == [1, 0]


WRONG = [True, "1", [1.0], 1j, None, np.ones(2), np.bool_(True)]


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("value", [*WRONG, 1.5], ids=repr)
def test_a_parameter_of_another_type_is_a_type_error_that_names_it(name: str, value: Any) -> None:
    if (name == "top_k" and value is None) or (
        type(value) is float and name not in ("top_k", "seed")
    ):  # these are allowed
        value = 1 + 2j
    with pytest.raises(TypeError, match=f"`{name}` \\(.*must be a"):
        dataclasses.replace(Sampler(), **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        *itertools.product([*PENALTIES, "temperature", "top_p", "min_p"], [math.nan, math.inf], ["must be finite"]),
        ("temperature", -0.1, "must be at least 0 and at most 3.40282e+38"),
        ("temperature", 1e39, "must be at least 0"),
        ("top_p", 0.0, "must be above 0 and at most 1"),
        ("top_p", 1.1, "must be above 0"),
        ("top_k", 0, "must be at least 1"),
        ("top_k", -3, "must be at least 1"),
        ("min_p", -0.1, "must be at least 0 and at most 1"),
        ("min_p", 1.1, "must be at least 0"),
        ("repetition_penalty", 0.0, "must be at least 1.17549e-38"),
        ("repetition_penalty", -1.0, "must be at least"),
        ("presence_penalty", -2.1, "must be at least -2 and at most 2"),
        ("presence_penalty", 2.1, "must be at least -2"),
        ("frequency_penalty", -2.1, "must be at least -2 and at most 2"),
        ("frequency_penalty", 2.1, "must be at least -2"),
        ("seed", -1, "must be in 0..4294967295"),
        ("seed", 2**32, "must be in 0.."),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(name: str, value: float, rule: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"`{name}` (={value})")) as raised:
        dataclasses.replace(Sampler(), **{name: value})
    assert rule in str(raised.value)


@pytest.mark.parametrize("kind", [int, np.int64, np.float32, jnp.float32])
def test_numbers_of_numpy_and_jax_are_as_good_as_pythons(kind: Any) -> None:
    assert Sampler(temperature=kind(1), top_p=kind(1), min_p=kind(1)) == Sampler(1.0, 1.0, min_p=1.0)
    integers: dict[str, Any] = {"top_k": np.int64(4), "seed": np.uint32(3)}
    assert Sampler(**integers) == Sampler(top_k=4, seed=3)
