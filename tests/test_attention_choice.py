"""Which implementation of attention is chosen, the reasons against others, and that calls follow the choice."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jmx
from jmx.models.attention import choice, functions
from jmx.models.attention.choice import IMPLEMENTATIONS, ORDER, Case, Choice, Kind, choose, reject_reason
from jmx.models.attention.functions import attend_cache, attend_latents, attend_prompt

H200, A100, CPU = (jmx.Environment.named(name) for name in ("h200", "a100", "cpu"))
BF16 = jnp.bfloat16
CASES: dict[Kind, Case] = {
    "prompt": Case("prompt", 256, 256, 8, 2, 64, 64, BF16),
    "step": Case("step", 1, 256, 8, 2, 64, 64, BF16),
    "latent_step": Case("latent_step", 1, 256, 16, 1, 576, 512, BF16),
}


@pytest.mark.parametrize("kind", CASES)
def test_kernels_are_chosen_on_hopper_and_plain_code_elsewhere(kind: Kind) -> None:
    chosen = choose(CASES[kind], H200)
    assert chosen.implementation == "mosaic"
    assert {chosen.implementation, *chosen.reasons} == {*IMPLEMENTATIONS}
    assert chosen.reasons["xla"] == "mosaic is faster"
    for environment, this in ((A100, "8.0"), (CPU, "cpu")):
        elsewhere = choose(CASES[kind], environment)
        assert elsewhere.implementation == "xla"
        assert elsewhere.reasons["mosaic"] == f"needs a GPU of compute capability 9.0 (this is {this})"


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        *((kind, {"dtype": jnp.float32}, "`dtype` (=float32) must be bfloat16") for kind in CASES),
        ("prompt", {"tokens": 100}, "length (=100) must be a multiple of 128"),
        ("prompt", {"key_dim": 72}, "`key_dim` (=72)"),
        ("prompt", {"value_dim": 128}, "`value_dim` (=128)"),
        ("prompt", {"key_dim": 256, "value_dim": 256}, "`key_dim` (=256)"),
        ("step", {"tokens": 2}, "`tokens` (=2) must be 1"),
        ("step", {"length": 64}, "capacity (=64) must be a multiple of 128"),
        ("step", {"value_dim": 32}, "`value_dim` (=32) must be `key_dim` (=64)"),
        ("step", {"key_dim": 256, "value_dim": 256}, "`key_dim` (=256) must be a multiple of 16 and at most 128"),
        ("step", {"heads": 130}, "heads to a key head (=65) must be at most 64"),
        ("latent_step", {"tokens": 16}, "`tokens` (=16) must be 1"),
        ("latent_step", {"length": 32}, "capacity (=32) must be a multiple of 64"),
        ("latent_step", {"key_dim": 544}, "of 544 channels"),
        ("latent_step", {"value_dim": 448}, "448 are values"),
        ("latent_step", {"key_dim": 640}, "of 640 channels"),
    ],
)
def test_what_the_kernels_reject_is_stated(kind: Kind, change: dict[str, Any], reason: str) -> None:
    rejecting = choose(dataclasses.replace(CASES[kind], **change), H200)
    assert rejecting.implementation == "xla"
    assert reason in rejecting.reasons["mosaic"]
    assert f"mosaic: {rejecting.reasons['mosaic']}" in str(rejecting)


@pytest.mark.parametrize(
    ("change", "environment", "reason"),
    [
        ({}, H200, None),
        ({"window": 100}, A100, None),
        ({"sinks": True}, H200, "has no sinks"),
        ({"dtype": jnp.float32}, H200, "`dtype` (=float32)"),
        ({"key_dim": 192, "value_dim": 192}, H200, None),
        ({"key_dim": 192, "value_dim": 192}, A100, "`key_dim` (=192) must be a multiple of 8 and at most 128"),
        ({"value_dim": 32}, H200, "`value_dim` (=32) must be `key_dim` (=64)"),
        ({}, CPU, "needs an NVIDIA GPU of compute capability 8.0 or higher (this is cpu)"),
        ({"kind": "step", "tokens": 1}, H200, "another order of axes"),
    ],
)
def test_what_cudnn_rejects_is_stated(change: dict[str, Any], environment: jmx.Environment, reason: str | None) -> None:
    found = reject_reason("cudnn", dataclasses.replace(CASES["prompt"], **change), environment)
    assert found is None if reason is None else found is not None and reason in found


def test_the_first_of_the_order_that_can_run_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(CASES["prompt"], H200).reasons["cudnn"] == "not among the fastest measured"
    monkeypatch.setitem(ORDER, "prompt", ("cudnn", "mosaic", "xla"))
    assert choose(CASES["prompt"], H200) == Choice("cudnn", {"mosaic": "cudnn is faster", "xla": "cudnn is faster"})
    with_sinks = choose(dataclasses.replace(CASES["prompt"], sinks=True), H200)
    assert with_sinks == Choice("mosaic", {"cudnn": "has no sinks", "xla": "mosaic is faster"})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", CASES)
def test_calls_follow_the_choice(kind: Kind, implementation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call gives to the implementation, and the case that it describes."""
    if implementation == "cudnn" and kind != "prompt":
        pytest.skip("cuDNN has no such case")
    seen: list[str] = []
    case, cases = CASES[kind], []

    def chosen(case: Case, environment: jmx.Environment) -> Choice:
        cases.append(case)
        return Choice(implementation, {})

    def recorder(name: str, out: Any) -> Any:
        return lambda *arguments, **options: seen.append(name) or out

    shape = (1, case.tokens, case.heads)
    monkeypatch.setattr(functions, "choose", chosen)
    monkeypatch.setattr(functions.prefill, "flash_prefill", recorder("mosaic", jnp.ones((*shape, 64))))
    monkeypatch.setattr(functions.decode, "flash_decode", recorder("mosaic", jnp.ones((1, case.heads, 64))))
    latent = recorder("mosaic", jnp.ones((1, case.heads, 512)))
    monkeypatch.setattr(functions.latent_decode, "flash_decode_latent", latent)
    monkeypatch.setattr(jax.nn, "dot_product_attention", recorder("cudnn", jnp.ones((*shape, 64))))
    monkeypatch.setattr(functions, "attend", recorder("xla", jnp.ones((*shape, 576 if kind == "latent_step" else 64))))
    monkeypatch.setattr(jmx.Environment, "probe", lambda *_: H200)
    query, starts = jnp.ones((*shape, case.key_dim), BF16), jnp.zeros(1, jnp.int32)
    if kind == "prompt":
        keys = jnp.ones((1, case.length, case.kv_heads, case.key_dim), BF16)
        out = attend_prompt(query, keys, keys, None, None)
    elif kind == "step":
        out = attend_cache(query, jnp.ones((2, 1, case.kv_heads, case.length, 64), BF16), None, starts, None)
    else:
        out = attend_latents(query, jnp.ones((1, 1, 1, case.length, 576), BF16), starts, 512, 0.1)
    assert seen == [implementation]
    assert cases == [case]
    assert out.shape == (*shape, case.value_dim)


def test_prompts_by_cudnn_have_the_window_of_others(rng: Any) -> None:
    """jax's own plain code in place of cuDNN's. Its window is how far a query looks back, without its own position."""
    query, keys, values = (jnp.asarray(rng.standard_normal((2, 128, heads, 16)), jnp.float32) for heads in (4, 2, 2))
    for window in (None, 1, 30):
        left = None if window is None else (window - 1, 0)
        with jax.default_matmul_precision("highest"):  # GPUs would round float32
            other = jax.nn.dot_product_attention(
                query, keys, values, scale=0.3, is_causal=True, local_window_size=left, implementation="xla"
            )
        got = attend_prompt(query, keys, values, None, window, 0.3)
        assert jnp.allclose(got, other, atol=1e-5)


def test_order_names_each_kind_and_ends_with_the_one_that_always_runs() -> None:
    assert {*ORDER} == {*CASES}
    assert all(order[-1] == "xla" for order in ORDER.values())
    assert all(choice.reject_reason("xla", case, CPU) is None for case in CASES.values())
