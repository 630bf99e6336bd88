"""Whole models in training: losses of tokens, bits per byte, other dtypes, and master weights that are not rounded."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmx import training
from jmx.models import FAMILIES, Model, MoERecord
from jmx.training import language

pytestmark = pytest.mark.costly


def tiny(name: str) -> Model:
    family = FAMILIES[name]
    config: Any = next(iter(family.published.values()))
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_experts": 4, "top_k": 2, "vocab_size": 31}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    inner = 32
    given = {"intermediate_size": inner, "moe_intermediate_size": inner} | sizes
    fields = {field.name for field in dataclasses.fields(config)}
    given = {key: value for key, value in given.items() if key in fields}
    if "layer_types" in fields:
        given["layer_types"] = config.layer_types[:2]
    options: dict[str, Any] = {"format": "mxfp4", "qat": training.QAT(), "dtype": jnp.float32}
    return family.model(dataclasses.replace(config, **given), rngs=nnx.Rngs(0), **options)


@pytest.fixture(scope="module", params=["gpt_oss", "qwen3_moe"])
def model(request: pytest.FixtureRequest) -> Model:
    return tiny(request.param)


def windows(rng: np.random.Generator) -> jax.Array:
    return jnp.asarray(rng.integers(31, size=(2, 9)), jnp.int32)


def test_losses_are_those_of_the_next_tokens(model: Model, rng: np.random.Generator) -> None:
    its, records = windows(rng), list[MoERecord]()
    losses = nnx.jit(training.next_token_losses)(model, its)
    again = training.next_token_losses(model, its, records=records)
    x, _ = model(its[:, :-1], None, model.empty_cache(2, 8).layers)
    probabilities = np.asarray(jax.nn.log_softmax(model.logits(x)), np.float64)
    expected = -np.take_along_axis(probabilities, np.asarray(its)[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(again, expected, rtol=1e-4, atol=1e-5)
    assert [record.logits.shape[-1] for record in records] == [4, 4]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 100])
@pytest.mark.parametrize("count", [2, 9, 16])
def test_each_token_but_the_first_counts_once(
    model: Model, length: int, count: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the token itself in place of its loss: the sum is known then."""
    tokens = rng.integers(1, 31, size=count).astype(np.int32)
    monkeypatch.setattr(language, "next_token_losses", lambda model, windows: windows[:, 1:].astype(jnp.float32))
    found = language.bits_per_byte(model, tokens, 7, length)
    assert found == pytest.approx(tokens[1:].sum() / np.log(2) / 7)


def test_another_dtype_is_that_of_all_but_master_weights(model: Model, rng: np.random.Generator) -> None:
    its = windows(rng)
    half = training.in_dtype(model, "bfloat16")
    assert half.dtype == jnp.bfloat16
    assert half.embedding[...].dtype == jnp.bfloat16
    assert (half.embedding[...] == model.embedding[...].astype(jnp.bfloat16)).all()
    for new, old in zip(half.layers, model.layers, strict=True):
        for role in ("gate_up", "down"):
            assert (getattr(new.moe.held, role) == getattr(old.moe.held, role)).all()
            assert getattr(new.moe.held, role).dtype == jnp.float32
    losses, near = (np.asarray(training.next_token_losses(each, its)) for each in (model, half))
    assert 0 < np.abs(losses - near).max() < 0.5
    back = training.in_dtype(half, jnp.float32)
    assert (back.embedding[...] == half.embedding[...]).all()
    assert model.dtype == jnp.float32


def test_unrounded_master_weights_are_computed_as_they_are(model: Model, rng: np.random.Generator) -> None:
    its = windows(rng)
    exact = nnx.clone(model)
    for block in exact.layers:  # masters that MXFP4 holds exactly: rounding does nothing
        gate_up, down = block.moe.experts.dequantize(jnp.float32)
        for role, value in (("gate_up", gate_up), ("down", down)):
            getattr(block.moe, role).set_value(value)
        if block.moe.held.gate_up_bias is not None:  # interleaved, as the rows are
            block.moe.gate_up_bias.set_value(jnp.asarray(rng.standard_normal((4, 64)), jnp.float32))
    rounded, same = (training.next_token_losses(its_, its) for its_ in (exact, training.unrounded(exact)))
    np.testing.assert_allclose(rounded, same, rtol=1e-4, atol=1e-4)
    rounded, other = (training.next_token_losses(its_, its) for its_ in (model, training.unrounded(model)))
    assert np.abs(np.asarray(rounded) - np.asarray(other)).max() > 1e-3


def test_models_that_have_no_master_weights_are_refused(model: Model) -> None:
    plain = type(model)(model.config, format="mxfp4", dtype=jnp.float32, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"`model.layers\[0\].moe` must have master weights"):
        training.unrounded(plain)
    exported = training.in_dtype(plain, jnp.bfloat16)
    assert exported.dtype == jnp.bfloat16
