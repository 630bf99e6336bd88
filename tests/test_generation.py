"""`Runner.generate`: its chunks against single steps, with penalties, log probabilities and a cache to continue."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmx.checkpoint.gpt_oss import read_config
from jmx.checkpoint.model_configs.gpt_oss import FULL, SLIDING
from jmx.models import Runner, Sampler, TokenCounts, from_source, random_source
from jmx.models.logprobs import log_probabilities
from jmx.models.runner import CHUNK

pytestmark = pytest.mark.costly

TINY = Path(__file__).parents[1] / "tests" / "data" / "gpt_oss_tiny"
PROMPTS = [[5, 17, 3, 3, 250, 9], [7, 100, 8, 2, 2, 41, 300, 12, 1, 77]]
STEPS = CHUNK + 4
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7}


@pytest.fixture(scope="module")
def runner() -> Runner:
    config = dataclasses.replace(read_config(TINY), num_hidden_layers=2, layer_types=(SLIDING, FULL))
    return Runner(from_source(random_source(config), dtype=jnp.float32))


def single_steps(runner: Runner, sampler: Sampler, count: int) -> tuple[np.ndarray, list[Any]]:
    """New tokens (count, B), and their log probabilities with the three likeliest, one step at a time."""
    logits, cache = runner.prefill(PROMPTS)
    state = TokenCounts.of(PROMPTS, runner.model.config.vocab_size)
    tokens, found = [], []
    for step in range(count):
        tokens.append(sampler(logits, step, state))
        found.append(log_probabilities(logits, tokens[-1], 3))
        state = state.add(tokens[-1])
        logits, cache = runner.decode(tokens[-1], cache)
    return np.array(tokens), found


@pytest.mark.parametrize(
    "parameters",
    [{}, PENALTIES, {"temperature": 0.9, "top_k": 40, "min_p": 0.01}, {"temperature": 1.2, "top_p": 0.9, **PENALTIES}],
    ids=["greedy", "penalties", "filters", "all"],
)
@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_chunks_give_what_single_steps_give(runner: Runner, parameters: dict[str, Any], logprobs: int | None) -> None:
    sampler = Sampler(seed=7, **parameters)
    expected, found = single_steps(runner, sampler, STEPS)
    generation = runner.generate(PROMPTS, sampler, STEPS, logprobs=logprobs)
    assert generation.logprobs is None
    step = -1
    for step, tokens in enumerate(generation):
        assert tokens.tolist() == expected[step].tolist()
        if logprobs is None:
            assert generation.logprobs is None
        else:
            got = generation.logprobs
            assert got is not None
            np.testing.assert_allclose(got.chosen, found[step].chosen, rtol=1e-4, atol=1e-5)
            assert np.asarray(got.top_ids).tolist() == found[step].top_ids[:, :logprobs].tolist()
            np.testing.assert_allclose(got.top, found[step].top[:, :logprobs], rtol=1e-4, atol=1e-5)
    assert step == STEPS - 1


def test_penalties_change_greedy_tokens(runner: Runner) -> None:
    plain = np.array([*runner.generate(PROMPTS, Sampler(), STEPS)])
    penalized = np.array([*runner.generate(PROMPTS, Sampler(presence_penalty=2.0, frequency_penalty=2.0), STEPS)])
    distinct = [[len({*row.tolist()}) for row in tokens.T] for tokens in (plain, penalized)]
    assert distinct[0] < distinct[1]


@pytest.mark.parametrize("ahead", [False, True], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("stop", [1, 2, CHUNK + 1, CHUNK + 3, STEPS])
def test_a_conversation_goes_on_from_a_generations_cache(
    runner: Runner, stop: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_launches_ahead", ahead)
    generation = runner.generate(PROMPTS, Sampler(), STEPS)
    new = [next(generation).tolist() for _ in range(stop)]
    cache = generation.cache()
    assert np.asarray(cache.lengths).tolist() == [len(prompt) + stop - 1 for prompt in PROMPTS]
    turn = [[1, 2, 3], [4]]
    whole = [
        [*prompt, *row, *added] for prompt, row, added in zip(PROMPTS, np.transpose(new).tolist(), turn, strict=True)
    ]
    expected = np.array([*runner.generate(whole, Sampler(**PENALTIES), 5)])
    assert (np.array([*runner.generate(whole, Sampler(**PENALTIES), 5, cache=cache)]) == expected).all()


@pytest.mark.parametrize("ahead", [False, True], ids=["as on a CPU", "as on a GPU"])
def test_when_the_next_chunk_is_launched(runner: Runner, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    steps = runner._steps

    def counted(*arguments: Any, **options: Any) -> Any:
        launched.append(int(arguments[3]))
        return steps(*arguments, **options)

    counted.compile = steps.compile  # pyright: ignore[reportFunctionMemberAccess]
    expected = np.array([*runner.generate(PROMPTS, Sampler(), STEPS)])
    monkeypatch.setattr(runner, "_steps", counted)
    monkeypatch.setattr(runner, "_launches_ahead", ahead)
    generation = runner.generate(PROMPTS, Sampler(), STEPS)
    new = [next(generation)]
    assert launched == [1][:ahead]
    new += [next(generation)]
    assert launched == [1, 1 + CHUNK][: 1 + ahead]
    new += [*generation]
    assert launched == [1, 1 + CHUNK]
    assert (np.array(new) == expected).all()


def test_on_a_cpu_no_chunk_is_launched_before_it_is_wanted(runner: Runner) -> None:
    assert runner._launches_ahead == (jax.default_backend() != "cpu")


def test_a_generation_has_no_cache_before_its_first_tokens(runner: Runner) -> None:
    with pytest.raises(ValueError, match="when its first tokens have been returned"):
        runner.generate(PROMPTS, Sampler(), 3).cache()


def test_other_parameters_of_the_same_kind_compile_nothing(runner: Runner) -> None:
    assert len([*runner.generate(PROMPTS, Sampler(0.7, seed=1, top_k=4, **PENALTIES), STEPS)]) == STEPS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.model.__class__, "__call__", lambda *_, **__: pytest.fail("traced again"))
        other = Sampler(1.7, seed=2, top_k=9, repetition_penalty=0.5, presence_penalty=0.1, frequency_penalty=-1.0)
        assert len([*runner.generate(PROMPTS, other, STEPS)]) == STEPS


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_new_tokens": 0}, ValueError, "`max_new_tokens` (=0) must be at least 1"),
        ({"max_new_tokens": 1.0}, TypeError, "`max_new_tokens` (=1.0, a float) must be an integer"),
        ({"max_new_tokens": True}, TypeError, "`max_new_tokens` (=True, a bool) must be an integer"),
        ({"logprobs": -1}, ValueError, "`logprobs` (=-1) must be at least 0"),
        ({"logprobs": 321}, ValueError, "`logprobs` (=321) must be at most 320"),
        ({"logprobs": math.nan}, TypeError, "`logprobs` (=nan, a float) must be an integer"),
        ({"prompts": []}, ValueError, "`prompts` (=[]) must be at least one"),
        ({"prompts": [[1], []]}, ValueError, "`prompts[1]` (=[]) must have at least one token"),
        ({"prompts": [[1, 320]]}, ValueError, "`prompts[0]` has the id 320, which must be in 0..319"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    runner: Runner, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        runner.generate(**{"prompts": PROMPTS, "sampler": Sampler(), "max_new_tokens": 2} | arguments)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1, 2, 3]], "`cache` (of 2 rows) must have 1 rows, those of `prompts`"),
        ([[1, 2, 3], [1, 2]], "`prompts[1]` (of 2 tokens) must have more tokens than its row of `cache` (=2)"),
    ],
)
def test_a_cache_of_other_prompts_is_refused(runner: Runner, prompts: list[list[int]], message: str) -> None:
    _, cache = runner.prefill([[1, 2], [1, 2]])
    with pytest.raises(ValueError, match=re.escape(message)):
        runner.generate(prompts, Sampler(), 2, cache=cache)
