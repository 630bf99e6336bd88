"""What a model and a generation need of memory: computed of shapes, equal to what is allocated."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jmx
from jmx.models import FAMILIES, Runner, Sampler, from_source, memory, random_source
from jmx.models.loading import file_source

TINY = Path(__file__).parents[1] / "tests" / "data" / "gpt_oss_tiny"
DATA = Path(__file__).parent / "data"
QWEN3 = DATA / "qwen3_moe"


def nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.filterwarnings("ignore:.* modules outside experts are quantized")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("path", "format"),
    [
        (TINY, None),
        (QWEN3 / "nvfp4", None),
        (QWEN3 / "w4a16", None),
        (QWEN3 / "bf16", None),
        (QWEN3 / "other", jmx.NVFP4),
        (DATA / "deepseek_v3" / "other", None),
        (DATA / "families" / "qwen2_moe", None),
    ],
    ids=["gpt_oss", "nvfp4", "w4a16", "bf16", "quantized_on_reading", "dense_and_shared", "shared_with_gate"],
)
def test_weights_take_what_was_computed(path: Path, format: jmx.Format | None, dtype: str) -> None:
    source = file_source(path, format=format)
    needs = memory.needed(source, [1], 1, dtype=dtype)
    assert needs.weights == nbytes(nnx.state(from_source(source, dtype=dtype)))


@pytest.mark.filterwarnings("ignore:.* modules outside experts are quantized")
def test_weights_outside_experts_that_stay_in_fp8_count_without_their_scales() -> None:
    source = file_source(QWEN3 / "fp8_block")
    needs = memory.needed(source, [1], 1, dtype="float32")
    held = nbytes(nnx.state(from_source(source, dtype=jnp.float32)))
    assert 0.97 * held < needs.weights < held


@pytest.mark.costly
def test_the_cache_takes_what_was_computed() -> None:
    source = file_source(TINY)
    runner = Runner(from_source(source))
    for lengths, new in (((3,), 1), ((3, 17), 1), ((3, 17), 2), ((16,), 17), ((16,), 18)):
        needs = memory.needed(source, lengths, new)
        assert needs.cache == runner.warm_up([[1] * length for length in lengths], Sampler(), new)
        assert needs.total == needs.weights + needs.cache + needs.activations


def test_activations_are_logits_and_the_residual_stream() -> None:
    source = file_source(TINY)  # H = 64, V = 320
    assert memory.needed(source, [3, 17], 1).activations == 2 * 320 * 4 + 2 * 32 * 64 * 2
    assert memory.needed(source, [17], 1, dtype="float32", all_logits=True).activations == 32 * (320 * 4 + 64 * 4)


@pytest.mark.parametrize("name", ["gpt-oss-120b"])
def test_published_models_need_what_their_sizes_make(name: str) -> None:
    """Experts of 4.25 bits a weight, with biases in 16, and 2.1e9 other parameters in 16."""
    (config,) = [family.published[name] for family in FAMILIES.values() if name in family.published]
    needs = memory.needed(random_source(config), [1024], 64)
    experts = 36 * 128 * (3 * 2880 * 2880 * 4.25 / 8 + 3 * 2880 * 2)
    assert 2.0e9 < (needs.weights - experts) / 2 < 2.3e9
    assert needs.cache == 36 * 2 * 2048 * 8 * 64 * 2


def of_platform(platform: str, stats: dict[str, int] | None) -> Any:
    return SimpleNamespace(platform=platform, memory_stats=lambda: stats)


def test_what_there_is_on_a_gpu_is_what_its_allocator_has_left() -> None:
    assert memory.available(of_platform("gpu", {"bytes_limit": 10, "bytes_in_use": 3})) == 7
    assert memory.available(of_platform("gpu", {"bytes_limit": 10})) == 10
    assert memory.available(of_platform("gpu", {})) is None
    assert memory.available(of_platform("gpu", None)) is None


def test_what_there_is_on_a_cpu_is_left_by_the_machine_and_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = of_platform("cpu", None)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    total = memory.available(cpu)
    assert total is None or total > 1 << 20
    (tmp_path / "meminfo").write_text("MemTotal:   9000 kB\nMemAvailable:    5000 kB\n")
    assert memory.available(cpu) == 5000 * 1024
    for name, content in (("memory.max", "max\n"), ("memory.current", "3000\n"), ("memory.stat", "anon 1\nfile 500\n")):
        (tmp_path / name).write_text(content)
    assert memory.available(cpu) == 5000 * 1024  # no limit
    (tmp_path / "memory.max").write_text("4000\n")
    assert memory.available(cpu) == 4000 - 3000 + 500
    (tmp_path / "memory.stat").write_text("broken")
    assert memory.available(cpu) == 5000 * 1024


@pytest.mark.parametrize(
    ("lengths", "new", "error", "message"),
    [
        ([], 1, ValueError, "`lengths` must be of at least one prompt"),
        ([1, 0], 1, ValueError, r"`lengths\[1\]` \(=0\) must be at least 1"),
        ([1.5], 1, TypeError, r"`lengths\[0\]` \(=1.5, a float\)"),
        ([1], 0, ValueError, r"`max_new_tokens` \(=0\) must be at least 1"),
        ([1], "2", TypeError, r"`max_new_tokens` \(='2', a str\)"),
    ],
)
def test_lengths_that_are_none_are_errors(lengths: Any, new: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        memory.needed(file_source(TINY), lengths, new)


def test_the_least_is_known_without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    source = file_source(TINY)
    for name in ("dense", "experts"):
        monkeypatch.setattr(source, name, lambda *_: pytest.fail("read"))
    assert memory.needed(source, [1], 1, dtype=jnp.float32).weights > 0
