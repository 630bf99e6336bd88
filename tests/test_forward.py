"""Passes whose last layer computes the wanted tokens alone, beside whole ones: families, turns, meshes."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_steps import relative_error

from jmx.lora import LoRA
from jmx.models import Model, Runner, Sampler, from_source, load, random_source
from jmx.models import forward as forward_module

pytestmark = [
    pytest.mark.costly,
    pytest.mark.devices(8),
    pytest.mark.filterwarnings("ignore:.* modules outside experts are quantized", "ignore:.* tensors, such as"),
]

DATA = Path(__file__).parent / "data"
CHECKPOINTS = {
    "gpt_oss": DATA / "gpt_oss_tiny",
    "qwen3_moe": DATA / "qwen3_moe" / "bf16",
    "qwen3_moe fp8": DATA / "qwen3_moe" / "fp8_block",  # whose dense matrices stay quantized
    **{name: DATA / "families" / name for name in ("mixtral", "qwen2_moe", "olmoe", "glm4_moe")},
    "deepseek_v3": DATA / "deepseek_v3" / "published",
    "deepseek_v3 fp8": DATA / "deepseek_v3" / "fp8",
}
PROMPTS = [[*range(1, 38)], [7, 8, 9], [3], [*range(2, 20)]]
MORE = [[5], [*range(4, 23)], [1, 2, 3], [9, 9]]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also passes of few tokens compute the wanted ones alone in the last layer."""
    monkeypatch.setattr(forward_module, "LAST_ALONE", 2)


def end(logits: jax.Array, rows: list[list[int]]) -> np.ndarray:
    """The logits after each row's last token."""
    return np.asarray([logits[row, len(its) - 1] for row, its in enumerate(rows)])


def check(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and caches of a prompt, of a further turn, and of a step after it."""
    runner = Runner(model)
    every, before = runner.prefill(PROMPTS, all_logits=True)
    logits, cache = runner.prefill(PROMPTS)
    assert runner._forward._finish._compiled
    assert relative_error(logits, end(every, PROMPTS)) <= 1e-5
    assert all(np.asarray(layer).any() for layer in before.layers)
    same_caches(cache, before, [len(its) for its in PROMPTS])

    after, cache = runner.extend(MORE, cache)
    step, cache = runner.decode(jnp.arange(4, dtype=jnp.int32), cache)
    monkeypatch.setattr(forward_module, "LAST_ALONE", 1 << 30)
    whole = Runner(model)
    _, before = whole.prefill(PROMPTS)
    expected, before = whole.extend(MORE, before)
    assert not whole._forward._finish._compiled
    assert relative_error(after, expected) <= 1e-5
    expected, before = whole.decode(jnp.arange(4, dtype=jnp.int32), before)
    assert relative_error(step, expected) <= 1e-5
    same_caches(cache, before, [len(a) + len(b) + 1 for a, b in zip(PROMPTS, MORE, strict=True)])


def same_caches(found: Any, expected: Any, lengths: list[int]) -> None:
    """All tokens of each row are in both, in every layer."""
    assert np.asarray(found.lengths).tolist() == np.asarray(expected.lengths).tolist() == lengths
    for mine, other in zip(found.layers, expected.layers, strict=True):
        for row, length in enumerate(lengths):
            assert relative_error(mine[:, row, :, :length], other[:, row, :, :length]) <= 1e-5


@pytest.mark.sampled(3)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_the_last_layer_of_the_wanted_tokens_is_that_of_all(
    checkpoint: str, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(load(CHECKPOINTS[checkpoint], dtype=jnp.float32), monkeypatch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", [{"ep": 2}, {"tp": 2}, {"dp": 2, "ep": 2}])
@pytest.mark.parametrize("checkpoint", ["gpt_oss", "deepseek_v3"])
def test_over_a_mesh(checkpoint: str, sizes: dict[str, int], alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = jax.devices()[: int(np.prod([*sizes.values()]))]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices)
    check(load(CHECKPOINTS[checkpoint], dtype=jnp.float32, mesh=mesh), monkeypatch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("checkpoint", "sizes"),
    [
        ("gpt_oss", {"num_hidden_layers": 1, "layer_types": ("sliding_attention",)}),
        ("glm4_moe", {"num_hidden_layers": 2, "dense_layers": (1,)}),
        ("deepseek_v3", {"num_hidden_layers": 1, "dense_layers": (0,)}),
    ],
)
def test_models_of_one_layer_and_of_a_dense_last_one(
    checkpoint: str, sizes: dict[str, Any], alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(load(CHECKPOINTS[checkpoint], dtype=jnp.float32).config, **sizes)
    check(from_source(random_source(config), dtype=jnp.float32), monkeypatch)


def test_experts_with_adapters(alone: None, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    model = load(CHECKPOINTS["gpt_oss"], dtype=jnp.float32)
    plain, _ = Runner(model).prefill(PROMPTS)
    for layer in model.layers:
        made = LoRA(2, 3).random(jax.random.key(0), layer.moe.experts)
        layer.moe.adapt(jax.tree.map(partial(_normal, rng), made))
    check(model, monkeypatch)
    assert relative_error(Runner(model).prefill(PROMPTS)[0], plain) > 1e-2


def _normal(rng: np.random.Generator, matrix: jax.Array) -> jax.Array:
    return jnp.asarray(rng.normal(size=matrix.shape) * matrix.shape[-1] ** -0.5, jnp.float32)


def test_generated_tokens_and_their_log_probabilities_are_those_of_whole_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = Runner(load(CHECKPOINTS["gpt_oss"], dtype=jnp.float32))
    found = []
    for least in (2, 1 << 30):
        monkeypatch.setattr(forward_module, "LAST_ALONE", least)
        made = runner.generate(PROMPTS, Sampler(), 4, logprobs=3)
        found.append([(tokens.tolist(), made.logprobs) for tokens in made])
    for (tokens, mine), (others, its) in zip(*found, strict=True):
        assert tokens == others
        assert mine is not None
        assert its is not None
        for one, other in zip(mine, its, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_of_few_tokens_the_last_layer_computes_all() -> None:
    runner = Runner(load(CHECKPOINTS["gpt_oss"], dtype=jnp.float32))
    runner.prefill([[1, 2, 3]])
    assert not runner._forward._finish._compiled
    runner.prefill([[1, 2, 3]] * (forward_module.LAST_ALONE // 16))  # of a bucket of 16 tokens each
    assert runner._forward._finish._compiled
