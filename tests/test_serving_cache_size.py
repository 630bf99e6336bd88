"""How large a server's cache is by default: what a device's memory leaves, of each group of devices."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import jmx
from jmx.checkpoint.model_configs.gpt_oss import PUBLISHED
from jmx.models import ModelSplit, memory, random_source
from jmx.models.loading import shapes_of
from jmx.serving.engine import Limits, automatic_cache_tokens
from jmx.serving.engine.cache_size import cache_bytes

LIMITS = Limits(max_users=8, max_length=512)
WHOLE = PUBLISHED["gpt-oss-20b"]
CONFIG = dataclasses.replace(WHOLE, num_hidden_layers=2, layer_types=WHOLE.layer_types[:2])  # one has a window


def tokens(monkeypatch: pytest.MonkeyPatch, limits: Limits, split: ModelSplit | None, has: int | None) -> int:
    monkeypatch.setattr(memory, "available", lambda _: has)
    return automatic_cache_tokens(random_source(CONFIG, 0, jmx.MXFP4), limits, "bfloat16", split)


def split_of(**axes: int) -> ModelSplit:
    return ModelSplit.of(jax.make_mesh((*axes.values(),), (*axes,), axis_types=(AxisType.Auto,) * len(axes)))


def test_it_holds_all_requests_if_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokens(monkeypatch, LIMITS, None, None) == 8 * 512
    assert tokens(monkeypatch, LIMITS, None, 1 << 40) == 8 * 512


@pytest.mark.devices(4)
@pytest.mark.parametrize("axes", [{}, {"dp": 2}, {"dp": 2, "ep": 2}, {"ep": 2}], ids=str)
def test_it_is_what_memory_leaves(monkeypatch: pytest.MonkeyPatch, axes: dict[str, int]) -> None:
    """Devices have half of the pages of what there is for each, if they divide requests, or heads, in two parts."""
    split = split_of(**axes) if axes else None
    groups, devices = axes.get("dp", 1), axes.get("dp", 1) * axes.get("ep", 1)
    options: Any = {"dtype": jnp.bfloat16, "split": split}
    weights = memory.needed(random_source(CONFIG, 0, jmx.MXFP4), [128] * groups, 1, **options).weights
    model = shapes_of(CONFIG, dtype=jnp.bfloat16, split=split)
    fixed, each = cache_bytes(model, LIMITS.of_group(groups))
    assert each == 2 * 8 * 64 * 2 // axes.get("ep", 1)
    has = weights + int((fixed + 900 * each) / 0.85)
    found = tokens(monkeypatch, LIMITS, split, has * devices)  # they share the memory of one machine
    assert found == pytest.approx(groups * 900, abs=4 * groups)
    with pytest.raises(MemoryError, match="a request of 512 tokens"):
        tokens(monkeypatch, LIMITS, split, devices * (weights + fixed))


@pytest.mark.devices(2)
def test_users_are_divided_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"`max_users` \(=7\) must be a multiple of 2"):
        tokens(monkeypatch, dataclasses.replace(LIMITS, max_users=7), split_of(dp=2), None)


@pytest.mark.parametrize(
    ("share", "helps"), [(0.5, "a smaller model; or more devices"), (1.0001, "a smaller --max-length, --max-users or")]
)
def test_too_little_memory_is_an_error_that_says_what_helps(
    monkeypatch: pytest.MonkeyPatch, share: float, helps: str
) -> None:
    weights = memory.needed(random_source(CONFIG, 0, jmx.MXFP4), [128], 1, dtype=jnp.bfloat16).weights
    with pytest.raises(MemoryError, match=f"what helps: {helps}"):
        tokens(monkeypatch, LIMITS, None, int(share * weights))


def test_a_gpu_can_give_jax_more_of_its_memory() -> None:
    gpu, cpu = (types.SimpleNamespace(platform=platform) for platform in ("gpu", "cpu"))
    assert [("MEM_FRACTION" in its) for its in memory.remedies(gpu, None)] == [False, True]
    assert memory.remedies(cpu, split_of(dp=1)) == []
