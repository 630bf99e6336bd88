"""Programs that are compiled before they are called, and kept between processes."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec
from model_steps import relative_error

import jmx
from jmx import backends
from jmx.checkpoint.gpt_oss import read_config
from jmx.checkpoint.model_configs.gpt_oss import FULL, SLIDING
from jmx.models import ProgramStore, Runner, Sampler, from_source, program_store, random_source
from jmx.models.programs import Program
from jmx.models.runner import CHUNK

TINY = Path(__file__).resolve().parents[1] / "tests" / "data" / "gpt_oss_tiny"
COMPILE = "/jax/core/compile/backend_compile_duration"
TRACE = "/jax/core/compile/jaxpr_trace_duration"


@contextmanager
def counted(wanted: str) -> Iterator[list[str]]:
    """The events of this name while the context lasts."""
    found: list[str] = []

    def add(event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        if event == wanted:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(add)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(add)


def scaled(weights: list[jax.Array], x: Any, rest: dict[str, Any], power: int = 1) -> dict[str, jax.Array]:
    return {"y": x * weights[0] ** power, "rest": rest["a"] + 1}


WEIGHTS = [jnp.full(3, 2.0)]


def program(store: ProgramStore | None = None, identity: str = "scaled") -> Program:
    return Program(scaled, WEIGHTS, static=("power",), identity=identity, store=store)


def arguments(rows: int = 2) -> tuple[jax.Array, dict[str, Any]]:
    return jnp.arange(3.0 * rows).reshape(rows, 3), {"a": np.float32(4)}


def test_a_program_returns_what_the_function_does() -> None:
    found = program()
    for rows in (1, 2):
        for power in (1, 2):
            got, expected = found(WEIGHTS, *arguments(rows), power=power), scaled(WEIGHTS, *arguments(rows), power)
            assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), got, expected))


def test_a_program_compiled_ahead_is_not_compiled_when_called() -> None:
    found, (x, rest) = program(), arguments()
    found.compile(jax.ShapeDtypeStruct(x.shape, x.dtype), rest, power=2).result()
    with counted(COMPILE) as compiled:
        found(WEIGHTS, x, rest, power=2)
        found(WEIGHTS, jax.device_put(x, jax.devices()[0]), rest, power=2)  # committed to where it would go anyway
    assert not compiled


@pytest.mark.parametrize(
    "context",
    [
        lambda: jmx.use_backend("xla"),
        lambda: jax.default_matmul_precision("highest"),
        lambda: jax.set_mesh(jax.make_mesh((1,), ("x",))),
    ],
    ids=["backend", "option", "mesh"],
)
def test_a_program_is_compiled_again_where_a_trace_may_differ(context: Any) -> None:
    found = program()
    found(WEIGHTS, *arguments())
    with context(), counted(TRACE) as traced:
        found.compile(*arguments())
    assert traced
    with counted(COMPILE) as compiled:
        found(WEIGHTS, *arguments())
    assert not compiled


def test_a_program_is_traced_into_a_caller_that_is_compiled() -> None:
    x, rest = arguments()
    y = jax.jit(lambda weights, x: program()(weights, x, rest)["y"])(WEIGHTS, x)
    assert (y == 2 * x).all()


def test_donated_arguments_are_donated() -> None:
    donating = Program(lambda weights, x: x + weights[0], WEIGHTS, donate=("x",))
    x = jnp.ones(3)
    assert (donating(WEIGHTS, x) == 3).all()
    assert x.is_deleted()


def test_an_error_of_tracing_is_raised_where_the_program_is_compiled() -> None:
    with pytest.raises(ValueError, match="Incompatible shapes"):
        program().compile(jnp.ones((2, 4)), {"a": 1.0})


@pytest.mark.devices(2)
def test_arrays_elsewhere_have_programs_of_their_own() -> None:
    found, (x, rest) = program(), arguments()
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for place in (None, jax.devices()[1], NamedSharding(mesh, PartitionSpec("x"))):
        weights = WEIGHTS if place is None else jax.device_put(WEIGHTS, NamedSharding(mesh, PartitionSpec()))
        if place is None or isinstance(place, NamedSharding):
            y = Program(scaled, weights)(weights, jax.device_put(x, place), rest)["y"]
            assert (np.asarray(y) == np.asarray(x) * 2).all()
    assert (found(WEIGHTS, x, rest)["y"] == x * 2).all()


# Kept


@pytest.fixture
def store(tmp_path: Path) -> ProgramStore:
    return ProgramStore(tmp_path / "cache" / "programs")


def files(store: ProgramStore) -> list[Path]:
    return sorted(store.directory.iterdir())


def test_a_kept_program_is_loaded_without_tracing(store: ProgramStore) -> None:
    expected = program(store)(WEIGHTS, *arguments())
    assert len(files(store)) == 1
    with counted(TRACE) as traced:
        got = program(store).compiled(*arguments())(WEIGHTS, *arguments())
    assert not traced
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), got, expected))


def test_what_a_program_depends_on_is_in_its_name(store: ProgramStore) -> None:
    program(store)(WEIGHTS, *arguments())
    program(store, "another")(WEIGHTS, *arguments())
    program(store)(WEIGHTS, *arguments(), power=2)
    program(store)(WEIGHTS, *arguments(rows=3))
    Program(scaled, [WEIGHTS[0].astype(jnp.bfloat16)], identity="scaled", store=store).compile(*arguments()).result()
    with jmx.use_backend("xla"):
        program(store)(WEIGHTS, *arguments())
    assert len(files(store)) == 6


def test_only_handlers_that_a_kept_program_calls_are_registered(
    store: ProgramStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def factored(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        return jnp.linalg.cholesky(x) @ weights[0]

    wanted: list[set[str]] = []
    monkeypatch.setattr(program_store, "register_handlers", wanted.append)
    for function in (factored, scaled):
        given = (jnp.eye(3),) if function is factored else arguments()
        for _ in range(2):
            kept = Program(function, WEIGHTS, identity=function.__name__, store=store)
            jax.block_until_ready(kept.compiled(*given)(WEIGHTS, *given))
    of_factored, of_scaled = wanted
    assert any("potrf" in name or "Cholesky" in name for name in of_factored)
    assert not any("potrf" in name or "Cholesky" in name for name in of_scaled)


@pytest.mark.parametrize("name", ["cpu", "cutlass", "one_token", "peer"])
def test_a_library_is_loaded_for_its_own_targets_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {its: getattr(backends, f"{its}_library") for its in ("cpu", "cutlass", "one_token", "peer")}
    loaded: list[str] = []
    for its, module in modules.items():
        monkeypatch.setattr(module, "library", partial(loaded.append, its))
    monkeypatch.setattr(modules["peer"], "compile_for", lambda target: None)  # which tests/test_needed.py has
    backends.register_handlers({"another"})
    assert not loaded
    for target in modules[name].TARGETS:
        backends.register_handlers({"another", target})
    assert loaded == [name] * len(modules[name].TARGETS)


@pytest.fixture
def jax_cache(tmp_path: Path) -> Iterator[Path]:
    """A directory of jax's compilation cache, which a process opens once."""
    new = {"enable_compilation_cache": True, "compilation_cache_dir": str(tmp_path / "jax")}
    new |= {"persistent_cache_min_compile_time_secs": 0, "persistent_cache_min_entry_size_bytes": -1}
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in new}
    compilation_cache.reset_cache()
    jax.clear_caches()
    for name, value in new.items():
        jax.config.update(f"jax_{name}", value)
    yield tmp_path / "jax"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_a_program_that_jax_has_kept_is_not_kept_again(store: ProgramStore, jax_cache: Path, tmp_path: Path) -> None:
    """Serialized twice, some lose functions on a CPU."""
    expected = program(store, "read")(WEIGHTS, *arguments())
    assert (len(files(store)), len([*jax_cache.glob("jit_scaled-*")])) == (1, 1)
    jax.clear_caches()
    empty = ProgramStore(tmp_path / "others")
    for _ in range(2):
        got = program(empty, "read")(WEIGHTS, *arguments())
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), got, expected))
    assert not files(empty)
    program(empty, "read")(WEIGHTS, *arguments(rows=5))  # which jax has not
    assert len(files(empty)) == 1


@pytest.mark.parametrize("damage", [b"", b"jmx", None], ids=["empty", "short", "changed"])
def test_a_damaged_file_is_replaced(store: ProgramStore, damage: bytes | None) -> None:
    expected = program(store)(WEIGHTS, *arguments())
    (file,) = files(store)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"?" if damage is None else damage)
    with pytest.warns(UserWarning, match="is not used, and the program is compiled again: the file is damaged"):
        got = program(store)(WEIGHTS, *arguments())
    assert (got["y"] == expected["y"]).all()
    assert files(store) == [file]
    assert len(file.read_bytes()) > 100


def test_a_directory_that_others_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match="no one else may write to it"):
        ProgramStore(shared)


def test_a_store_that_cannot_be_written_is_a_warning(store: ProgramStore) -> None:
    store.directory.rmdir()
    with pytest.warns(UserWarning, match="a compiled program is not kept"):
        assert (program(store)(WEIGHTS, *arguments())["y"] == arguments()[0] * 2).all()


# Models


@pytest.fixture(scope="module")
def config() -> Any:
    """Four layers of two kinds."""
    return dataclasses.replace(read_config(TINY), num_hidden_layers=4, layer_types=(SLIDING, FULL) * 2)


@pytest.mark.costly
def test_layers_alike_share_programs_which_compute_what_the_model_does(config: Any) -> None:
    model = from_source(random_source(config), dtype=jnp.float32)
    runner = Runner(model)
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8]]
    logits, cache = runner.prefill(prompts, all_logits=True)
    assert len(runner._forward._programs) == 6  # two of attention, one of experts, the first and two kinds of last
    tokens = np.zeros((2, 16), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    mask = jnp.asarray(tokens > 0)
    x, layers = jax.jit(lambda *of: model(of[0], None, of[1], mask=of[2]))(
        tokens, model.empty_cache(2, 16).layers, mask
    )
    expected = model.logits(x)
    for row, prompt in enumerate(prompts):
        assert relative_error(logits[row, : len(prompt)], expected[row, : len(prompt)]) <= 1e-5
    assert all(relative_error(a, b) <= 1e-5 for a, b in zip(cache.layers, layers, strict=True))


@pytest.mark.costly
def test_generating_compiles_its_steps_once(config: Any) -> None:
    runner = Runner(from_source(random_source(config), dtype=jnp.float32))
    for prompts, kept in (([[1, 2], [3, 4, 5]], 1), ([[1] * 40, [2] * 3], 2)):
        for _ in range(2):
            list(runner.generate(prompts, Sampler(temperature=1.0), 2 + CHUNK, logprobs=2))
            assert len(runner._steps._compiled) == kept


SCRIPT = """
import sys, pathlib
from jmx.models import ProgramStore, Runner, Sampler, load
traced = []
runner = Runner(load(sys.argv[1]), store=ProgramStore(pathlib.Path(sys.argv[2])))
programs = [runner._steps, *runner._forward._programs.values()]
for program in programs:
    lower = program._lower
    program._lower = lambda *of, lower=lower: traced.append("lowered") or lower(*of)
tokens = [int(token) for (token,) in runner.generate([[1, 2, 3]], Sampler(), 20)]
print(traced.count("lowered"), tokens)
"""


@pytest.mark.costly
def test_another_process_generates_without_lowering(tmp_path: Path) -> None:
    arguments = [sys.executable, "-W", "error", "-c", SCRIPT, str(TINY), str(tmp_path / "programs")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    first, second = (
        subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True).stdout.split(maxsplit=1)
        for _ in range(2)
    )
    assert int(first[0]) > 3
    assert int(second[0]) == 0
    assert second[1] == first[1]
