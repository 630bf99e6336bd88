"""Whole models over meshes, beside one device: every family and mesh, further turns, programs, and saved models."""

import dataclasses
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aot
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from child_environment import importing
from flax import nnx
from model_steps import relative_error

import jmx
from jmx.checkpoint import CheckpointError
from jmx.checkpoint.gpt_oss import read_config
from jmx.checkpoint.model_configs.gpt_oss import FULL, SLIDING
from jmx.models import (
    FAMILIES,
    GptOss,
    Model,
    ModelSplit,
    ProgramStore,
    Runner,
    Sampler,
    from_source,
    load,
    random_source,
    restore,
    save,
)
from jmx.models.forward import Weights
from jmx.models.saving import _placed
from jmx.models.sharded_moe import ShardedMoE

pytestmark = [
    pytest.mark.costly,
    pytest.mark.devices(8),
    pytest.mark.filterwarnings("ignore:.* modules outside experts are quantized", "ignore:.* tensors, such as"),
]

TINY = Path(__file__).resolve().parents[1] / "tests" / "data" / "gpt_oss_tiny"
DATA = Path(__file__).parent / "data"
CHECKPOINTS = {
    "gpt_oss": TINY,
    **{f"qwen3_moe {name}": DATA / "qwen3_moe" / name for name in ("bf16", "nvfp4", "w4a16", "fp8_block")},
    **{name: DATA / "families" / name for name in ("mixtral", "qwen2_moe", "olmoe", "glm4_moe")},
    **{f"deepseek_v3 {name}": DATA / "deepseek_v3" / name for name in ("published", "sparse", "fp8")},
}
# Sizes of mesh axes, and what they divide if it is not the default.
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "ep": ({"ep": 2}, {}),
    "tp": ({"tp": 2}, {}),
    "dp and ep": ({"dp": 2, "ep": 2}, {}),
    "ep of 4, whole heads": ({"ep": 4}, {"heads": None}),
    "ep and tp": ({"ep": 2, "tp": 2}, {"heads": "tp"}),
    "rows and experts by the same axes": ({"dp": 2, "ep": 2}, {"token": "ep", "heads": "dp", "expert": ("dp", "ep")}),
}
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9]]
STEPS = 20  # more than a chunk, and more than the first bucket of a cache
TWO_LAYERS = dataclasses.replace(read_config(TINY), num_hidden_layers=2, layer_types=(SLIDING, FULL))
COMPILE = "/jax/core/compile/backend_compile_duration"


def over(name: str | None) -> dict[str, Any]:
    """The arguments of `load` for one of `MESHES`, or none."""
    if name is None:
        return {}
    sizes, axes = MESHES[name]
    devices = jax.devices()[: int(np.prod([*sizes.values()]))]
    return {"mesh": jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices), "axes": axes}


def split_of(name: str) -> ModelSplit:
    return ModelSplit.of(*over(name).values())


def tokens_of(runner: Runner, steps: int = STEPS) -> list[list[int]]:
    return [tokens.tolist() for tokens in runner.generate(PROMPTS, Sampler(), steps)]


@functools.cache
def expected(checkpoint: str) -> tuple[list[list[int]], np.ndarray]:
    """The tokens and the logits of one device."""
    runner = Runner(load(CHECKPOINTS[checkpoint], dtype=jnp.float32))
    return tokens_of(runner), np.asarray(runner.prefill(PROMPTS)[0])


@pytest.fixture(scope="module")
def small() -> Runner:
    return Runner(from_source(random_source(TWO_LAYERS), dtype=jnp.float32))


def divided(mesh: str, store: ProgramStore | None = None) -> Runner:
    return Runner(from_source(random_source(TWO_LAYERS), dtype=jnp.float32, split=split_of(mesh)), store=store)


# Families


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_greedy_tokens_are_those_of_one_device(checkpoint: str, mesh: str) -> None:
    split, path = split_of(mesh), CHECKPOINTS[checkpoint]
    of_files = load(path, dtype=jnp.float32)
    options: dict[str, Any] = {"dtype": jnp.float32, **over(mesh)}
    if of_files.config.num_experts % split.ways("expert"):
        with pytest.raises(ValueError, match=r"must divide `num_experts` \(=6\) of the config evenly"):
            load(path, **options)
        return
    tokens, logits = expected(checkpoint)
    runner = Runner(load(path, **options))
    assert relative_error(runner.prefill(PROMPTS)[0], logits) <= 2e-5
    assert tokens_of(runner) == tokens


@pytest.mark.parametrize(
    ("mesh", "kept"), [("ep", ["grouped"]), ("dp and ep", ["grouped"]), (None, ["grouped", "out"])]
)
def test_a_device_has_whole_blocks_of_fp8_matrices(mesh: str | None, kept: list[str]) -> None:
    """The product after attention has 32 columns, one block of scales: two devices each have a half of it."""
    model = load(CHECKPOINTS["qwen3_moe fp8_block"], dtype=jnp.float32, **over(mesh))
    attention = model.layers[0].attention
    assert [
        name for name in ("grouped", "out") if isinstance(getattr(attention, name).weights, jmx.nnx.Quantized)
    ] == kept


def test_random_weights_do_not_depend_on_the_mesh(small: Runner) -> None:
    for mesh in ("ep", "dp and ep"):
        pairs = zip(*(nnx.to_flat_state(nnx.state(its.model)) for its in (small, divided(mesh))), strict=True)
        for (path, one), (its_path, other) in pairs:
            assert path == its_path
            assert np.array_equal(one.get_value(), other.get_value()), path


# The runner


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_further_turns_and_steps(small: Runner, mesh: str) -> None:
    found = []
    for runner in (small, divided(mesh)):
        cache = runner.model.empty_cache(2, 32)
        first, cache = runner.prefill([prompt[:2] for prompt in PROMPTS], cache=cache)
        second, cache = runner.extend([[5, 6, 7], [8]], cache)
        third, cache = runner.decode(jnp.array([3, 4]), cache)
        last, _ = runner.extend([[1], [2, 3]], cache.truncate([4, 3]))
        found.append([np.asarray(logits) for logits in (first, second, third, last)])
    for got, wanted in zip(found[1], found[0], strict=True):
        assert relative_error(got, wanted) <= 1e-5


def test_sampling_and_penalties_are_those_of_one_device(small: Runner) -> None:
    sampler = Sampler(temperature=0.9, top_p=0.9, seed=3, frequency_penalty=0.5)
    got, wanted = (
        [tokens.tolist() for tokens in runner.generate(PROMPTS, sampler, 6, logprobs=2)]
        for runner in (divided("dp and ep"), small)
    )
    assert got == wanted


def test_rows_that_the_mesh_does_not_divide_are_refused(small: Runner) -> None:
    runner = divided("dp and ep")
    message = r"`prompts` \(of 3 rows\) must be a multiple of 2 rows, into which mesh axes \('dp',\) divide a batch"
    with pytest.raises(ValueError, match=message):
        runner.prefill([[1], [2], [3]])
    with pytest.raises(ValueError, match=message):
        runner.generate([[1], [2], [3]], Sampler(), 2)
    with pytest.raises(ValueError, match=r"`batch` \(of 1 rows\) must be a multiple of 2 rows"):
        runner.model.empty_cache(1, 16)


def test_the_cache_is_divided_by_heads_and_rows() -> None:
    heads, dim = TWO_LAYERS.num_key_value_heads // 2, TWO_LAYERS.head_dim
    for mesh, shape in (("ep", (2, 2, heads, 16, dim)), ("dp and ep", (2, 1, heads, 16, dim))):
        cache = divided(mesh).model.empty_cache(2, 16)
        assert {shard.data.shape for layer in cache.layers for shard in layer.addressable_shards} == {shape}


# Programs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_program_is_compiled_once_and_moves_no_weights(mesh: str) -> None:
    runner = divided(mesh)
    tokens_of(runner)
    (compiled,) = (found.result() for found in runner._steps._compiled.values())
    found: list[str] = []

    def add(event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        found.append(event)

    jax.monitoring.register_event_duration_secs_listener(add)
    tokens_of(runner)
    jax.monitoring.unregister_event_duration_listener(add)
    assert COMPILE not in found
    largest = 2 * TWO_LAYERS.vocab_size  # logits of all rows
    for line in re.findall(r".* (?:all-gather|all-to-all|collective-permute)(?:-start)?\(.*", compiled.as_text() or ""):
        sizes = [int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"\[([\d,]+)\]", line)]
        assert max(sizes) <= largest, line


def test_kept_programs_are_those_of_their_mesh(tmp_path: Path) -> None:
    """Of other devices, or the same in another order, too."""
    files: set[str] = set()
    wanted = None
    for devices in ((0, 1), (1, 0), (2, 3)):
        split = ModelSplit.of(jax.sharding.Mesh(np.array(jax.devices())[[*devices]], ("ep",)))
        for again in (False, True):
            model = from_source(random_source(TWO_LAYERS), dtype=jnp.float32, split=split)
            got = tokens_of(Runner(model, store=ProgramStore(tmp_path)), 3)
            wanted = wanted or got
            assert got == wanted
            now = {file.name for file in tmp_path.iterdir()}
            assert (now == files) is again
            files = now


@pytest.mark.aot
def test_on_two_h200s_a_step_sums_twice_a_layer_and_moves_nothing_else() -> None:
    """With the kernels for Hopper on each."""
    config = FAMILIES["gpt_oss"].published["gpt-oss-120b"]
    config = dataclasses.replace(config, num_hidden_layers=2, layer_types=(SLIDING, FULL))
    mesh = jax.sharding.Mesh(aot.mesh_of("h200", 2).devices, ("ep",))
    split = ModelSplit.of(mesh)
    with jax.sharding.use_abstract_mesh(split.mesh.abstract_mesh):
        model = nnx.eval_shape(lambda: GptOss(config, format="mxfp4", split=split, rngs=nnx.Rngs(0)))
        weights = Weights.of(_placed(model, split))
        row = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=split.sharding())

        def decode(arrays: Any, layers: Any, lengths: jax.Array, tokens: jax.Array) -> Any:
            model = weights.merge(arrays)
            x, layers = model(tokens[:, None], lengths, layers)
            return model.logits(x[:, 0]), layers

        lowered = jax.jit(decode, donate_argnums=1).lower(weights.arrays, model.cache_layers(2, 2048), row, row)
        text = lowered.compile().as_text() or ""
    moved = re.findall(r" (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(", text)
    assert moved == ["all-reduce"] * 4
    assert "mosaic_gpu" in text


# Saved models


@pytest.mark.sampled(3)
@pytest.mark.parametrize("to", [None, *MESHES])
@pytest.mark.parametrize("saved", [None, *MESHES])
def test_saved_models_are_restored_onto_any_mesh(saved: str | None, to: str | None, tmp_path: Path) -> None:
    model = load(TINY, dtype=jnp.float32, **over(saved))
    save(tmp_path / "model", model)
    options: dict[str, Any] = {"format": "mxfp4", "dtype": jnp.float32, **over(to)}
    found = restore(tmp_path / "model", model.config, **options)
    wanted = load(TINY, dtype=jnp.float32, **over(to))
    for (path, one), (its_path, other) in zip(*map(variables, (found, wanted)), strict=True):
        assert path == its_path
        for array, its in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            assert array.sharding.is_equivalent_to(its.sharding, array.ndim), path
            assert np.array_equal(array, its), path


@pytest.mark.parametrize("stage", ["writing", "written", "renamed"])
def test_a_save_that_is_killed_leaves_a_whole_model_or_none(stage: str, tmp_path: Path) -> None:
    """And the one that was saved before; and the next save succeeds, and removes what the killed one left."""
    script = Path(__file__).with_name("killed_save.py")
    environment = importing(script.parents[1], JAX_PLATFORMS="cpu")
    command = [sys.executable, script, TINY, tmp_path, stage]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    options: dict[str, Any] = {"format": "mxfp4", "dtype": jnp.float32, **over("ep")}
    wanted = load(TINY, dtype=jnp.float32, **over("ep"))
    restored = functools.partial(restore, config=wanted.config, **options)
    assert same_values(restored(tmp_path / "earlier"), wanted, 1)
    assert (tmp_path / "model").exists() == (stage == "renamed")
    if stage == "renamed":
        assert same_values(restored(tmp_path / "model"), wanted, 2)
        shutil.rmtree(tmp_path / "model")
    with pytest.warns(UserWarning, match="which a process left that was killed while it wrote"):
        save(tmp_path / "model", wanted)
    assert same_values(restored(tmp_path / "model"), wanted, 1)
    assert sorted(os.listdir(tmp_path)) == ["earlier", "model"]


def same_values(found: Model, wanted: Model, factor: int) -> bool:
    """Whether these are the weights of `wanted`, floats times a factor."""
    pairs = zip(*map(variables, (found, wanted)), strict=True)
    leaves = [map(jax.tree.leaves, (one, other)) for (_, one), (_, other) in pairs]
    arrays = [pair for one, other in leaves for pair in zip(one, other, strict=True)]
    return all(np.array_equal(a, b * factor if b.dtype == jnp.float32 else b) for a, b in arrays)


def variables(model: Model) -> Any:
    return nnx.to_flat_state(nnx.state(model))


def test_models_in_floats_and_others_are_not_mistaken(tmp_path: Path) -> None:
    path = DATA / "families" / "mixtral"
    model = load(path, dtype=jnp.float32, **over("ep"))
    save(tmp_path / "model", model)
    found = restore(tmp_path / "model", model.config, dtype=jnp.float32, **over("dp and ep"))
    assert tokens_of(Runner(found), 2) == expected("mixtral")[0][:2]
    with pytest.raises(CheckpointError):
        restore(tmp_path / "model", model.config, format="mxfp4", dtype=jnp.float32, **over("ep"))
    for divided in (
        restore(tmp_path / "model", model.config, dtype=jnp.float32, **over("tp")),
        load(path, dtype=jnp.float32, **over("tp")),
    ):
        moe: Any = divided.layers[0].moe
        assert type(moe.gate_up_values) is nnx.Param
        assert isinstance(moe, ShardedMoE)
        assert tokens_of(Runner(divided), 2) == expected("mixtral")[0][:2]
