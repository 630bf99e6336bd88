"""Where attention takes a kernel, the reasons against it, and that calls follow the choice."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

import jmx
from jmx.models.attention import functions
from jmx.models.attention.choice import Case, Kind, reject_reason
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
    assert reject_reason(CASES[kind], H200) is None
    for environment, this in ((A100, "8.0"), (CPU, "cpu")):
        found = reject_reason(CASES[kind], environment)
        assert found == f"needs a GPU of compute capability 9.0 (this is {this})"


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
    found = reject_reason(dataclasses.replace(CASES[kind], **change), H200)
    assert found is not None
    assert reason in found


@pytest.mark.parametrize("reason", [None, "not here"])
@pytest.mark.parametrize("kind", CASES)
def test_calls_follow_the_choice(kind: Kind, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call gives to the implementation, and the case that it describes."""
    seen: list[str] = []
    case, cases = CASES[kind], []

    def found(case: Case, environment: jmx.Environment) -> str | None:
        cases.append(case)
        return reason

    def recorder(name: str, out: Any) -> Any:
        return lambda *arguments, **options: seen.append(name) or out

    shape = (1, case.tokens, case.heads)
    monkeypatch.setattr(functions, "reject_reason", found)
    monkeypatch.setattr(functions.prefill, "flash_prefill", recorder("kernel", jnp.ones((*shape, 64))))
    monkeypatch.setattr(functions.decode, "flash_decode", recorder("kernel", jnp.ones((1, case.heads, 64))))
    latent = recorder("kernel", jnp.ones((1, case.heads, 512)))
    monkeypatch.setattr(functions.latent_decode, "flash_decode_latent", latent)
    monkeypatch.setattr(
        functions, "attend", recorder("plain", jnp.ones((*shape, 576 if kind == "latent_step" else 64)))
    )
    monkeypatch.setattr(jmx.Environment, "probe", lambda *_: H200)
    query, starts = jnp.ones((*shape, case.key_dim), BF16), jnp.zeros(1, jnp.int32)
    if kind == "prompt":
        keys = jnp.ones((1, case.length, case.kv_heads, case.key_dim), BF16)
        out = attend_prompt(query, keys, keys, None, None)
    elif kind == "step":
        out = attend_cache(query, jnp.ones((2, 1, case.kv_heads, case.length, 64), BF16), None, starts, None)
    else:
        out = attend_latents(query, jnp.ones((1, 1, 1, case.length, 576), BF16), starts, 512, 0.1)
    assert seen == ["kernel" if reason is None else "plain"]
    assert cases == [case]
    assert out.shape == (*shape, case.value_dim)
