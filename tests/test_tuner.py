"""`jmx tune` on a backend whose configurations differ in speed and in faults: the fastest correct one is kept."""

import dataclasses
import itertools
import json
import re
import threading
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rich.console import Console

from jmx import backends, cli
from jmx.activations import SwiGLU
from jmx.numerics.formats import MXFP4
from jmx.pallas.mosaic_sm90 import backend as mosaic_sm90
from jmx.pallas.mosaic_sm90.backend import MosaicSm90
from jmx.pallas.mosaic_sm90.layout import Tile
from jmx.perf import bench, machine, shapes, tuner
from jmx.perf.shapes import Shape
from jmx.routing import TopKSoftmax
from jmx.selection import tuning
from jmx.selection.backend import Reason, Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.selection.registry import Registry
from jmx.selection.tuning import Key
from jmx.xla import backend as xla

pytestmark = [pytest.mark.costly, pytest.mark.sampled(3)]

SHAPE = Shape(4, 32, 64, TopKSoftmax(2), SwiGLU(), "concatenated", True)
NAME = tuning.shape_class(SHAPE.problem(1, "packed"))


@dataclass(frozen=True)
class Config:
    """`work`: microseconds that it pretends to take. `fault`: what goes wrong."""

    work: int
    fault: str = ""


SLOW, MIDDLING, FAST = Config(300), Config(100), Config(0)
_unsteady_runs = itertools.count()


@dataclass(frozen=True)
class Fake:
    """The reference."""

    configs: tuple[Config, ...] = (FAST, MIDDLING)
    name: str = "fake"
    summary: str = "for tests"
    config_type: type[Config] = Config

    def supports(self, problem, environment):
        if problem.num_tokens == 13:
            return Rejection(Reason.SHAPE, "13 tokens", "add one")
        return None

    def heuristic(self, problem, environment):
        return SLOW

    def candidates(self, problem, environment):
        return self.configs

    def check(self, config, problem, environment):
        pass

    def apply(self, computation, x, routing, experts, environment):
        problem = Problem.of(x, routing.expert_ids.shape[-1], experts, computation.activation)
        config, _ = tuning.config(self, problem, Environment.probe())
        if config.fault == "trace":
            raise NotImplementedError("no such\nblock")
        y = xla.forward(computation, x, routing, experts)
        if config.fault == "compile":
            return jax.ffi.ffi_call("no_such_kernel", jax.ShapeDtypeStruct(y.shape, y.dtype))(y)
        if config.fault == "scale":
            return y * jnp.bfloat16(1.1)
        if config.fault == "nan":
            return y.at[0, 0].set(jnp.nan)
        if config.fault == "token":  # far too few to show in the norm of all
            return y.at[-1].multiply(-1)
        if config.fault == "unsteady":
            later = jax.pure_callback(_is_later, jax.ShapeDtypeStruct((), jnp.float32))
            return (y * (1 + later / 128)).astype(y.dtype)
        if config.fault == "run":
            return jax.pure_callback(_fail, x, y)
        return y


def _is_later():
    return np.float32(next(_unsteady_runs) > 0)


def _fail(y):
    raise RuntimeError("an illegal address")


def _take_fakes_at_their_word(monkeypatch):
    """A `Config` takes the time that it states, so a busy machine changes no outcome; other backends' are timed."""
    trial, time, configs = tuner._Rig.trial, tuner._Rig.time, {}

    def reported(rig, call, repeats):
        us, config = time(rig, call, repeats), configs.setdefault(call.func, rig.trying)
        return 1 + config.work + 1e-6 * us if isinstance(config, Config) else us

    def trying(rig, config, compiled):
        rig.trying = config
        return trial(rig, config, compiled)

    monkeypatch.setattr(tuner._Rig, "trial", trying)
    monkeypatch.setattr(tuner._Rig, "time", reported)


@pytest.fixture(autouse=True)
def registered(tmp_path, monkeypatch):
    """Returns a function that registers a backend before the others."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(shapes.MODELS, "tiny", SHAPE)
    monkeypatch.setattr(machine, "seconds", partial(machine.seconds, least=2e-3))
    monkeypatch.setattr(bench, "_LAYERS_OF_FEW_TOKENS", 2)  # each is compiled anew
    monkeypatch.setattr(bench, "_LAYERS", 1)
    _take_fakes_at_their_word(monkeypatch)
    tuning._tables.cache_clear()

    def register(*engines):
        monkeypatch.setattr(backends, "REGISTRY", Registry((*engines, xla.Xla())))
        return engines[0] if engines else None

    yield register
    tuning._tables.cache_clear()


def run(engine, file, tokens=(2,), **options):
    lines = Console(width=1000)
    with lines.capture() as capture:
        outcomes = tuner.run(engine, SHAPE, tokens, file, **{"layers": 1, "console": lines} | options)
    return outcomes, capture.get()


def entry(outcome) -> tuning.Entry:
    assert outcome.entry is not None
    return outcome.entry


def test_the_fastest_is_kept_and_used_from_then_on(registered, tmp_path):
    engine, file = registered(Fake((MIDDLING, FAST, SLOW))), tmp_path / "a" / "table.json"
    (outcome,), reported = run(engine, file)
    assert reported == ""
    assert (outcome.key, outcome.tried, outcome.failed) == (Key(NAME, 2), 3, ())
    assert entry(outcome).config == FAST
    assert 0 < entry(outcome).us < (entry(outcome).heuristic_us or 0)
    kind = jax.devices()[0].device_kind
    assert tuning.load(file, engine, kind) == {outcome.key: outcome.entry}
    own = tuning.cache_file("fake", kind)
    own.parent.mkdir(parents=True)
    file.rename(own)
    tuning.reload()
    assert tuning.config(engine, SHAPE.problem(2, "packed"), Environment.probe()) == (FAST, "user")


@pytest.mark.parametrize(
    ("fault", "reported"),
    [
        ("trace", "NotImplementedError: no such block"),
        ("compile", "JaxRuntimeError: NOT_FOUND: No FFI handler registered for no_such_kernel"),
        ("run", "JaxRuntimeError: INTERNAL"),
        ("scale", "ValueError: wrong result: relative error 1.0e-01 is above 5e-02"),
        ("nan", "ValueError: wrong result: relative error nan"),
        ("token", "ValueError: wrong result: relative error 2.0e+00"),
        ("unsteady", "ValueError: wrong result: not the same bits on every run"),
    ],
)
def test_a_candidate_that_fails_is_reported_by_name_and_passed_over(fault, reported, registered, tmp_path):
    bad = Config(0, fault)
    (outcome,), lines = run(registered(Fake((bad, MIDDLING))), tmp_path / "t.json", tokens=[5])
    assert entry(outcome).config == MIDDLING
    assert outcome.tried == 3
    (failed,) = outcome.failed
    assert failed.startswith(f"{bad!r}: ")
    assert reported in failed
    assert f"5 tokens: passed over {bad!r}" in lines


def test_the_engine_for_hopper_is_tuned_from_its_layout_to_its_table(registered, tmp_path, monkeypatch):
    """All but the kernel, which needs a GPU: the reference replaces it, from the backend's own layout."""
    h200 = Environment.named("h200")
    slow, bad, wrong, fast = mosaic_sm90.candidates(Tile.of(MXFP4).bytes, 5, 2, 4)[:4]
    monkeypatch.setattr(mosaic_sm90, "candidates", lambda *sizes: [slow, bad, wrong, fast])
    monkeypatch.setattr(Environment, "probe", classmethod(lambda cls, *arguments: h200))

    def apply(self, computation, x, routing, experts, environment):
        assert experts.layout == "mosaic_sm90"
        problem = Problem.of(x, routing.expert_ids.shape[-1], experts, computation.activation)
        config, source = tuning.config(self, problem, h200)
        assert source == "override"
        if config == bad:
            raise NotImplementedError("too many registers")
        rounds = 300 if config == slow else 0
        labour = lax.fori_loop(0, rounds, lambda _, a: jnp.tanh(a * 1.5), jnp.ones((64, 64)))
        y = xla.forward(computation, x, routing, experts) + (0 * labour.min()).astype(x.dtype)
        return 2 * y if config == wrong else y

    monkeypatch.setattr(MosaicSm90, "apply", apply)
    engine = registered(MosaicSm90())
    assert tuner.choose_engine(None, SHAPE, 5, h200) == engine
    (outcome,), _ = run(engine, tmp_path / "t.json", tokens=[5])
    assert (entry(outcome).config, outcome.tried, len(outcome.failed)) == (fast, 4, 2)
    assert outcome.failed[0] == f"{bad!r}: NotImplementedError: too many registers"
    assert outcome.failed[1].startswith(f"{wrong!r}: ValueError: wrong result")
    own = tuning.cache_file("mosaic", "NVIDIA H200")
    own.parent.mkdir(parents=True)
    (tmp_path / "t.json").rename(own)
    tuning.reload()
    assert tuning.config(engine, SHAPE.problem(4, "mosaic_sm90"), h200) == (fast, "user")


def test_a_wrong_heuristic_is_found_out_by_the_reference(registered, tmp_path, monkeypatch):
    bad = Config(0, "scale")
    monkeypatch.setattr(Fake, "heuristic", lambda self, problem, environment: bad)
    (outcome,), _ = run(registered(Fake((MIDDLING,))), tmp_path / "t.json")
    assert (entry(outcome).config, entry(outcome).heuristic_us) == (MIDDLING, None)
    (right,), _ = run(registered(Fake((Config(0, "nan"), bad))), tmp_path / "u.json")
    assert (right.entry, right.tried, len(right.failed)) == (None, 2, 2)
    assert not (tmp_path / "u.json").exists()


def test_a_run_goes_on_where_the_last_one_was_interrupted(registered, tmp_path, monkeypatch):
    engine, file = registered(Fake((FAST,))), tmp_path / "t.json"
    tune = tuner._tune

    def interrupted(rig, key, *rest):
        if key.tokens == 5:
            raise KeyboardInterrupt
        return tune(rig, key, *rest)

    monkeypatch.setattr(tuner, "_tune", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(engine, file, tokens=[2, 5])
    monkeypatch.setattr(tuner, "_tune", tune)
    before = json.loads(file.read_text())["entries"][NAME]["2"]
    (two, five), _ = run(engine, file, tokens=[2, 5, 2])
    assert (two.tried, five.tried) == (0, 2)
    assert entry(two).us == before["us"]
    assert entry(five).config == FAST
    (two,), _ = run(engine, file, tokens=[2], again=True)
    assert two.tried == 2
    assert entry(two).us != before["us"]


def test_no_candidate_is_begun_after_the_seconds(registered, tmp_path):
    (outcome,), _ = run(registered(Fake((FAST, MIDDLING))), tmp_path / "t.json", seconds=1e-9)
    assert (outcome.tried, entry(outcome).config) == (1, SLOW)


def test_only_the_finalists_and_the_heuristic_are_timed_again(registered, tmp_path, monkeypatch):
    repeats = []
    seconds = machine.seconds
    monkeypatch.setattr(machine, "seconds", lambda call, count: (repeats.append(count), seconds(call, count))[1])
    many = tuple(Config(work) for work in range(6))
    (outcome,), _ = run(registered(Fake(many)), tmp_path / "t.json")
    assert outcome.tried == 7
    assert repeats == 7 * [tuner._REPEATS] + (tuner._FINALISTS + 1) * [tuner._FINAL_REPEATS]


def test_candidates_are_compiled_side_by_side_and_timed_once_all_are_compiled(registered, tmp_path, monkeypatch):
    compile_, seconds, done = jax.stages.Lowered.compile, machine.seconds, []
    two = threading.Barrier(2, timeout=60)  # for two compilations under way at once; one alone fails

    def compile_beside_another(lowered):
        assert threading.current_thread() is not threading.main_thread()
        two.wait()
        compiled = compile_(lowered)
        done.append("compiled")
        return compiled

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_beside_another)
    monkeypatch.setattr(machine, "seconds", lambda call, count: (done.append("timed"), seconds(call, count))[1])
    monkeypatch.setattr(machine, "num_cpus", lambda: 2)
    (outcome,), reported = run(registered(Fake((FAST, MIDDLING, Config(200)))), tmp_path / "t.json")
    assert reported == ""
    assert (outcome.tried, outcome.failed) == (4, ())
    assert done == 4 * ["compiled"] + 8 * ["timed"]


def test_the_layers_are_those_of_the_benchmark_or_as_many_as_memory_holds(registered, tmp_path, monkeypatch):
    build, layers, most = bench.System.build, [], 2

    def hold(system, shape, keys, built):
        if len(keys) > most:
            raise MemoryError
        layers.append(len(keys))
        return build(system, shape, keys, built)

    monkeypatch.setattr(bench.System, "build", hold)
    engine = registered(Fake((FAST,)))
    run(engine, tmp_path / "t.json", tokens=[16, 17], layers=None)
    assert layers == [2, 1]
    most = 1
    (outcome,), _ = run(engine, tmp_path / "t.json", tokens=[1], layers=None)
    assert layers == [2, 1, 1]
    assert entry(outcome).config == FAST


def test_token_counts_that_the_engine_refuses_are_reported_and_others_measured(registered, tmp_path):
    (none, two), _ = run(registered(Fake((FAST,))), tmp_path / "t.json", tokens=[13, 2])
    assert (none.entry, none.tried) == (None, 0)
    assert none.failed == ("'fake' does not run: shape: 13 tokens; add one",)
    assert entry(two).config == FAST


def test_a_device_that_died_ends_the_run_and_keeps_what_was_found(registered, tmp_path, monkeypatch):
    bad, file, dead = Config(0, "run"), tmp_path / "t.json", []
    block = jax.block_until_ready

    class Deadly(Fake):
        def candidates(self, problem, environment):
            return (FAST,) if problem.num_tokens == 2 else (bad,)

    def die(y):
        dead.append(True)
        raise RuntimeError("an illegal address")

    def answer(arrays):
        if dead:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        return block(arrays)

    monkeypatch.setitem(globals(), "_fail", die)
    monkeypatch.setattr(jax, "block_until_ready", answer)
    engine = registered(Deadly())
    with pytest.raises(RuntimeError, match=r"the device no longer responds since Config\(.*run.*ILLEGAL_ADDRESS"):
        run(engine, file, tokens=[2, 3, 4])
    kept = tuning.load(file, engine, jax.devices()[0].device_kind)
    assert kept.keys() == {Key(NAME, 2)}


def test_a_file_that_is_no_table_is_an_error_or_replaced(registered, tmp_path):
    engine, file = registered(Fake((FAST,))), tmp_path / "report.json"
    file.write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"report\.json is not a table"):
        run(engine, file, strict=True)
    assert file.read_text() == '{"rows": []}'
    with pytest.warns(UserWarning, match=r"report\.json is not a table"):
        run(engine, file)
    assert tuning.load(file, engine, jax.devices()[0].device_kind)


def test_a_terminal_shows_a_bar_that_counts_what_is_compiled_and_what_is_measured(registered, tmp_path):
    engine, screen = registered(Fake((FAST,))), Console(width=200, force_terminal=True)
    with screen.capture() as capture:
        tuner.run(engine, SHAPE, [2], tmp_path / "t.json", layers=1, console=screen)
    assert re.search(r"2 tokens, \d+\.\d+ us .*4/4", capture.get())


def test_the_engine_is_the_first_that_can_be_tuned_and_runs(registered):
    here = Environment.probe()
    second = dataclasses.replace(Fake(), name="second")
    assert registered(Fake(), second) == tuner.choose_engine(None, SHAPE, 1, here)
    assert tuner.choose_engine(None, SHAPE, 1, here).name == "fake"
    assert tuner.choose_engine("second", SHAPE, 1, here) == second
    with pytest.raises(ValueError, match=r"`backend` \(='xla'\) has nothing to tune; these have: fake, second"):
        tuner.choose_engine("xla", SHAPE, 1, here)
    with pytest.raises(bench.NoBackendError, match=r"no backend can be tuned on .*: 'fake' does not run: shape: 13 "):
        tuner.choose_engine(None, SHAPE, 13, here)
    with pytest.raises(bench.NoBackendError, match="backend 'fake' was requested"):
        tuner.choose_engine("fake", SHAPE, 13, here)


def test_the_command_prints_what_it_chose_and_exits_with_1_where_a_count_has_nothing(registered, tmp_path, capsys):
    registered(Fake((FAST, Config(0, "trace"))))
    file = tmp_path / "out.json"
    argv = ["tune", "--shape", "tiny", "--output", str(file), "--tokens"]
    assert cli.main([*argv, "2"]) == 0
    out, err = capsys.readouterr()
    assert NAME in out
    assert repr(FAST) in out
    assert out.endswith(f"in {file}\n")
    assert err.startswith("2 tokens: passed over")
    assert err.endswith("NotImplementedError: no such block\n")
    assert cli.main([*argv, "2,13"]) == 1
    out, err = capsys.readouterr()
    assert "before" in out
    assert err == "13 tokens: 'fake' does not run: shape: 13 tokens; add one\n"


def test_the_command_writes_the_users_cache(registered, capsys):
    engine = registered(Fake((FAST,)))
    assert cli.main(["tune", "--shape", "4,2,32,64", "--tokens", "2"]) == 0
    file = tuning.cache_file("fake", jax.devices()[0].device_kind)
    assert capsys.readouterr().out.endswith(f"in {file}\n")
    (key,) = tuning.load(file, engine, jax.devices()[0].device_kind)
    assert key == Key(NAME, 2)


def test_the_command_tunes_other_formats_under_keys_of_their_own(registered, capsys):
    engine = registered(Fake((FAST,)))
    argv = ["tune", "--shape", "4,2,32,64", "--tokens", "2", "--format"]
    assert cli.main([*argv, "int4_g32:int8_token"]) == 0
    capsys.readouterr()
    device = jax.devices()[0].device_kind
    (key,) = tuning.load(tuning.cache_file("fake", device), engine, device)
    assert key.shape.endswith("gated int4_g32 int8_token")
    for pair, reported in (("int5", "`--format` (='int5')"), ("mxfp4:fp9", "`--format` (='fp9')")):
        assert cli.main([*argv, pair]) == cli.EXIT_USAGE
        assert reported in capsys.readouterr().err


def test_inputs_in_fp8_are_tuned_on_the_engine_that_takes_them():
    h200 = Environment.named("h200")
    shape = dataclasses.replace(SHAPE, input_format="fp8_token")
    assert tuner.choose_engine(None, shape, 5, h200).name == "mosaic_fp8"
