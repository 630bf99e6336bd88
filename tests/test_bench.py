"""The benchmark on small shapes: its numbers mean what their names say, and failures are reported."""

import dataclasses
import functools
import json
import os
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

from jmx.activations import SwiGLU
from jmx.numerics import formats
from jmx.numerics.layouts import LAYOUTS
from jmx.perf import bench, machine, roofline, shapes
from jmx.perf.bench import RAGGED_DOT
from jmx.perf.shapes import Shape
from jmx.routing import Logits, TopKSoftmax, route
from jmx.selection.backend import Reason, Rejection
from jmx.selection.environment import Environment
from jmx.selection.registry import Registry
from jmx.util.atomic_files import renaming
from jmx.xla.backend import Xla

pytestmark = pytest.mark.costly

TINY = Shape(4, 32, 64, TopKSoftmax(2), SwiGLU(), "concatenated", True)
LIMITS = roofline.Limits(copy_rate=1e9, dense_rate=5e9)


@pytest.fixture
def tiny(monkeypatch):
    """Makes "tiny" a model, and limits that need no measuring."""
    monkeypatch.setitem(shapes.MODELS, "tiny", TINY)
    monkeypatch.setattr(bench, "measure_limits", lambda repeats: LIMITS)
    monkeypatch.setattr(bench, "seconds", partial(machine.seconds, least=1e-3))


def test_a_run_has_a_checked_row_for_every_system_and_token_count(tiny):
    lines = []
    report = bench.run("tiny", [1, 40], backends=["xla", RAGGED_DOT], layers=2, repeats=2, progress=lines.append)
    assert [(row.system, row.tokens) for row in report.rows] == [
        ("xla", 1),
        ("xla", 40),
        (RAGGED_DOT, 1),
        (RAGGED_DOT, 40),
    ]
    assert str(report.rows[-1]) == lines[-1]
    expert_bytes = sum(formats.MXFP4.bytes(shape) for shape in ((128, 32), (32, 64)))
    for row in (SimpleNamespace(**dataclasses.asdict(row)) for row in report.rows):
        assert row.error is None
        assert row.layers == 2
        assert row.active == (2 if row.tokens == 1 else 4)
        least_bytes, flops = row.active * expert_bytes, row.tokens * 2 * 2 * 3 * 32 * 64
        assert row.floor_us == pytest.approx(1e6 * max(least_bytes / 1e9, flops / 5e9))
        assert row.over_floor == pytest.approx(row.us / row.floor_us)
        assert row.tb_s == pytest.approx(least_bytes / row.us / 1e6)
        assert row.tflop_s == pytest.approx(flops / row.us / 1e6)
        assert 1e-5 < row.rel_err < bench.TOLERANCE  # 0 would mean that the reference was compared with itself
        assert row.temporary_bytes is not None


def test_formats_are_timed_one_after_the_other_each_against_its_own_reference(tiny):
    lines = []
    pairs = ["nvfp4", "mxfp4:fp8_static", "int4_g32:int8_token"]
    report = bench.run("tiny", [3], formats=pairs, backends=["xla"], layers=1, repeats=1, progress=lines.append)
    reported = [(row.format, row.input_format, row.error) for row in report.rows]
    assert reported == [("nvfp4", None, None), ("mxfp4", "fp8_static", None), ("int4_g32", "int8_token", None)]
    assert lines[-1].startswith("xla int4_g32 x int8_token, 3 tokens:")
    for row in (SimpleNamespace(**dataclasses.asdict(row)) for row in report.rows):
        expert_bytes = sum(formats.FORMATS[row.format].bytes(shape) for shape in ((128, 32), (32, 64)))
        assert row.tb_s == pytest.approx(row.active * expert_bytes / row.us / 1e6)


@pytest.mark.parametrize(("device", "times"), [("h200", 2), ("a100", 1), ("cpu", 1)])
def test_the_floor_of_fp8_inputs_is_by_the_rate_of_fp8_where_the_device_has_it(device, times, tiny, monkeypatch):
    fast_memory = dataclasses.replace(LIMITS, copy_rate=1e15)
    monkeypatch.setattr(bench, "measure_limits", lambda repeats: fast_memory)
    environment = Environment.named(device)
    monkeypatch.setattr(Environment, "probe", classmethod(lambda cls, *arguments: environment))
    options = {"formats": ["mxfp4", "mxfp4:fp8_token"], "backends": [RAGGED_DOT], "layers": 1, "repeats": 1}
    report = bench.run("tiny", [40], **options)
    plain, rounded = (SimpleNamespace(**dataclasses.asdict(row)) for row in report.rows)
    assert plain.floor_us == pytest.approx(1e6 * 40 * 2 * 2 * 3 * 32 * 64 / 5e9)
    assert rounded.floor_us == pytest.approx(plain.floor_us / times)
    assert rounded.over_floor == pytest.approx(rounded.us / rounded.floor_us)
    assert report.limits == fast_memory  # those of bfloat16, as measured


def test_all_that_run_here_are_measured_and_the_others_reported(tiny, monkeypatch):
    def supports(problem, environment):
        return None if problem.num_tokens == 3 else Rejection(Reason.SHAPE, f"{problem.num_tokens} tokens", "take 3")

    picky, xla = SimpleNamespace(name="picky", supports=supports), Xla()
    monkeypatch.setattr("jmx.backends.REGISTRY", Registry((picky, xla)))  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(bench, "_measure_row", lambda name, shape, case, *rest: roofline.Row(name, case.num_tokens))
    for tokens, names in [([5, 3], ["picky", "xla", RAGGED_DOT]), ([5], ["xla", RAGGED_DOT])]:
        lines = []
        report = bench.run("tiny", tokens, layers=1, progress=lines.append)
        assert list(dict.fromkeys(row.system for row in report.rows)) == names
        assert ("picky does not run here: shape: 5 tokens; take 3" in lines) == ("picky" not in names)


def test_of_several_formats_a_named_backend_is_timed_in_those_that_it_takes(tiny, monkeypatch):
    def supports(problem, environment):
        return None if problem.format == "nvfp4" else Rejection(Reason.FORMAT, "not nvfp4", "quantize to it")

    picky = SimpleNamespace(name="picky", supports=supports)
    monkeypatch.setattr("jmx.backends.REGISTRY", Registry((picky, Xla())))  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(bench, "_measure_row", lambda name, shape, case, *rest: roofline.Row(name, case.num_tokens))
    lines = []
    options = {"backends": ["picky", "xla"], "layers": 1, "progress": lines.append}
    rows = bench.run("tiny", [5], formats=["mxfp4", "nvfp4"], **options).rows
    assert [(row.system, row.format) for row in rows] == [("xla", "mxfp4"), ("picky", "nvfp4"), ("xla", "nvfp4")]
    assert "picky does not run here: weight format: not nvfp4; quantize to it" in lines
    rows = bench.run("tiny", [5], formats=["mxfp4"], **options).rows
    assert [row.system for row in rows] == ["picky", "xla"]


def test_the_reference_is_measured_in_a_layout_that_it_need_not_undo():
    h200 = Environment.named("h200")
    assert bench.System.of("xla", TINY, 1, h200).weights == "packed"
    assert bench.System.of("mosaic", TINY, 1, h200).weights == "mosaic_sm90"


def test_few_tokens_run_through_more_layers_whose_weights_are_built_once(tiny, monkeypatch):
    assert [bench.layers_of_call(count, None) for count in (1, 16, 17, 8192)] == [16, 16, 4, 4]
    assert [bench.layers_of_call(count, 3) for count in (1, 8192)] == [3, 3]
    monkeypatch.setattr(bench, "_LAYERS_OF_FEW_TOKENS", 4)
    monkeypatch.setattr(bench, "_LAYERS", 2)
    built = []
    expanded = bench._expanded

    def expand(experts):
        if not isinstance(experts.down.values, Tracer):
            built.append(experts)
        return expanded(experts)

    monkeypatch.setattr(bench, "_expanded", expand)
    report = bench.run("tiny", [1, 16, 17], backends=[RAGGED_DOT], repeats=1)
    assert [(row.layers, row.error) for row in report.rows] == [(4, None), (4, None), (2, None)]
    assert len(built) == 4
    assert report.settings["layers"] is None


def test_weights_are_kept_for_as_many_layers_as_the_last_call_had():
    system, built = bench.System("packed", lambda experts: experts, lambda x, logits, weights: x), {}
    keys = jax.random.split(jax.random.key(0), 3)
    one, two, _ = system.build(TINY, keys, built)
    weights = system.build(TINY, keys[:2], built)
    assert weights is built["packed"]
    assert [id(layer) for layer in weights] == [id(one), id(two)]
    (other,) = system._replace(weights="other").build(TINY, keys[:1], built)
    assert built == {"other": [other]}


def test_a_seed_draws_the_same_data_again_and_no_seed_new_data(tiny, monkeypatch):
    drawn = []
    monkeypatch.setattr(bench.Case, "draw", lambda shape, tokens, kind, layers, key, first: drawn.append((key, first)))
    monkeypatch.setattr(bench, "_measure_row", lambda *arguments: roofline.Row("xla", 1))
    seeds = [bench.run("tiny", [5], backends=["xla"], layers=1, seed=seed).settings["seed"] for seed in (7, 7, None)]
    seeds.append(bench.run("tiny", [5], backends=["xla"], layers=1).settings["seed"])
    assert seeds[:2] == [7, 7]
    assert len({*seeds}) == 3
    keys = [key for key, _ in drawn]
    values = [np.asarray(first.down.values) for _, first in drawn]
    assert keys[0] == keys[1] != keys[2]
    assert np.array_equal(values[0], values[1])
    assert not np.array_equal(values[0], values[2])


def test_a_wrong_result_is_reported_beside_its_time(tiny, monkeypatch):
    right = bench.ragged_dot_layer
    monkeypatch.setattr(bench, "ragged_dot_layer", lambda *arguments: right(*arguments) * 1.1)
    (row,) = bench.run("tiny", [3], backends=[RAGGED_DOT], layers=1, repeats=1).rows
    assert row.us is not None
    assert row.rel_err == pytest.approx(0.1, rel=0.2)
    assert "wrong result: relative error" in str(row.error)


def test_one_failing_row_leaves_the_others(tiny, monkeypatch):
    right = bench.ragged_dot_layer

    def layer(shape, x, logits, weights):
        if x.shape[0] == 3:
            raise NotImplementedError("no three\ntokens")
        return right(shape, x, logits, weights)

    monkeypatch.setattr(bench, "ragged_dot_layer", layer)
    three, five = bench.run("tiny", [3, 5], backends=[RAGGED_DOT], layers=1, repeats=1).rows
    assert three.error == "NotImplementedError: no three tokens"
    assert three.us is None
    assert five.error is None


def test_memory_that_runs_out_means_fewer_layers_and_then_an_error_in_the_row(tiny, monkeypatch):
    limits = iter([1000, 10**12, 1000, 1000])  # bytes that the device has, at each try
    monkeypatch.setattr(machine, "memory_limit", lambda device: next(limits))
    monkeypatch.setattr(bench, "describe_machine", lambda device: {})
    half, none = bench.run("tiny", [2, 3], backends=[RAGGED_DOT], layers=2, repeats=1).rows
    assert (half.layers, half.error) == (1, None)
    assert (none.layers, none.us) == (1, None)
    assert str(none.error).startswith("MemoryError: the call needs")
    assert str(none.error).endswith("the device has 0.0 GB")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "tinny"}, "`model` (='tinny') must be one of"),
        ({"routing": "skewed"}, "`routing` (='skewed') must be one of"),
        ({"formats": ["nvfp4", "nvfp5"]}, "`formats` (='nvfp5') must be WEIGHTS or WEIGHTS:INPUTS"),
        ({"formats": ["nvfp4:"]}, "`formats` (='nvfp4:') must be WEIGHTS or WEIGHTS:INPUTS"),
        (
            {"model": "odd", "formats": ["int8_channel", "mxfp4"]},
            "`formats` (='mxfp4') must go with `model` (='odd'): `hidden_size` (=80) must be a multiple of 32",
        ),
        ({"backends": ["xla", "cutlas"]}, "`backends` (='cutlas') must be one of"),
        ({"tokens": [1, 0]}, "`tokens` (=0) must be at least 1"),
        ({"tokens": [2.5]}, "`tokens` (=2.5, a float) must be an integer"),
        ({"tokens": []}, "`tokens` must name"),
        ({"layers": 0}, "`layers` (=0) must be at least 1"),
        ({"seed": 1 << 32}, "`seed` (=4294967296) must be in 0..4294967295"),
        ({"seed": -1}, "`seed` (=-1) must be in 0..4294967295"),
        ({"repeats": -1}, "`repeats` (=-1) must be at least 1"),
    ],
)
def test_bad_arguments_are_reported_before_anything_is_measured(arguments, message, monkeypatch):
    monkeypatch.setattr(bench, "measure_limits", lambda repeats: pytest.fail("measured"))
    monkeypatch.setitem(shapes.MODELS, "odd", dataclasses.replace(shapes.MODELS["small"], hidden_size=80))
    with pytest.raises((ValueError, TypeError)) as reported:
        bench.run(**{"model": "small", "tokens": [1]} | arguments)
    assert str(reported.value).startswith(message)


@pytest.mark.parametrize("model", shapes.MODELS)
def test_every_named_shape_can_be_run_and_is_the_problem_that_it_names(model):
    shape = shapes.MODELS[model]
    experts = jax.eval_shape(shape.experts, jax.random.key(0))
    x = jax.ShapeDtypeStruct((7, shape.hidden_size), jnp.bfloat16)
    logits = jax.ShapeDtypeStruct((7, shape.num_experts), jnp.float32)
    weights = jax.eval_shape(bench._expanded, experts)
    assert jax.eval_shape(partial(bench._jmx_layer, shape, "xla"), x, logits, experts) == x
    assert jax.eval_shape(partial(bench.ragged_dot_layer, shape), x, logits, weights) == x
    assert weights.down.shape == (shape.num_experts, shape.intermediate_size, shape.hidden_size)
    assert weights.gate_up.dtype == jnp.bfloat16
    problem = bench.Problem.of(x, shape.method.top_k, experts, shape.activation)
    assert shape.problem(7, experts.layout) == problem


def test_routings_are_as_skewed_as_they_say(rng):
    tokens, num_experts = 3000, 16

    def shares(kind, top_k=2):
        logits = shapes.draw_logits(jax.random.key(rng.integers(2**31)), (2, tokens, num_experts), kind)
        ids = [np.asarray(route(Logits(layer, TopKSoftmax(top_k))).expert_ids) for layer in logits]
        return np.stack([np.bincount(layer.ravel(), minlength=num_experts) / tokens for layer in ids])

    assert np.abs(shares("uniform") - 2 / num_experts).max() < 0.05
    half = shares("half")
    assert np.all((half.max(axis=1) > 0.5) & (half.max(axis=1) < 0.62))  # the other half finds it by chance too
    zipf = shares("zipf", top_k=1)
    harmonic = (1 / np.arange(1, num_experts + 1)).sum()
    assert np.abs(np.sort(zipf)[:, ::-1] - 1 / np.arange(1, num_experts + 1) / harmonic).max() < 0.05


def test_top1_routes_every_token_to_one_expert(tiny):
    (row,) = bench.run("tiny", [1], routing="top1", backends=["xla"], layers=1, repeats=1).rows
    assert row.active == 1


def test_a_backend_is_measured_in_a_layout_that_it_can_read(monkeypatch):
    def supports(problem, environment):
        return None if problem.layout == "canonical" else Rejection(Reason.LAYOUT, problem.layout, "prepare it")

    picky = SimpleNamespace(name="picky", supports=supports)
    never = SimpleNamespace(name="never", supports=lambda p, e: Rejection(Reason.PLATFORM, f"in {p.layout}", "buy one"))
    monkeypatch.setattr("jmx.backends.REGISTRY", Registry((picky, never)))  # pyright: ignore[reportArgumentType]
    problem, environment = TINY.problem(1, "packed"), Environment.named("cpu")
    assert len(LAYOUTS) > 1
    assert bench.usable_layout(problem, environment, "picky") == "canonical"
    with pytest.raises(bench.NoBackendError, match="in packed; buy one"):
        bench.usable_layout(problem, environment, "never")


def test_relative_error_sees_nan_and_scale(rng):
    reference = rng.normal(size=(3, 5))
    assert bench.relative_error(reference * 1.5, reference) == pytest.approx(0.5)
    assert not bench.relative_error(np.where(reference == reference[0, 0], np.nan, reference), reference) <= 1


def test_seconds_are_those_of_one_call():
    import time

    calls = []

    def call():
        calls.append(0)
        time.sleep(0.004)
        return jnp.float32(1)

    median, spread = machine.seconds(call, repeats=3, least=0.02)
    assert 0.004 <= median < 0.02
    assert spread >= 0
    assert len(calls) > 3 * 2  # several calls a sample


def test_limits_are_measured(monkeypatch):
    monkeypatch.setattr(machine, "seconds", lambda call, repeats: (jax.block_until_ready(call()).nbytes * 1e-9, 0.0))
    monkeypatch.setattr(machine, "_read_rate", lambda words, repeats: 3e9)
    limits = machine.measure_limits(1)
    on_cpu = jax.default_backend() == "cpu"
    assert limits.copy_rate == pytest.approx(3e9 if on_cpu else 2e9)  # a copied byte is read and written
    size = 1024 if on_cpu else 8192
    assert limits.dense_rate == pytest.approx(2 * size**3 / (size**2 * 2e-9))  # bfloat16's result has half the bytes


@pytest.mark.parametrize("cpus", [1, 3])
def test_every_word_is_read_by_some_core(monkeypatch, cpus):
    found = []
    monkeypatch.setattr(machine, "seconds", lambda call, repeats: (found.extend(call()) or 0.5, 0.0))
    monkeypatch.setattr(machine, "num_cpus", lambda: cpus)
    assert machine._read_rate(np.uint32(1) << np.arange(32, dtype=np.uint32), 1) == 2 * 32 * 4
    assert len(found) == cpus
    assert sum(int(part) for part in found) == 2**32 - 1


def _report():
    rows = (
        roofline.Row("xla", 1, "packed", 2, 10.0, 0.1, 0.5, 1.5, 4.0, 5.0, 2.0, 3e-3, 4096),
        roofline.Row("xla", 64, "packed", 2, 20.0, 0.1, 0.4, 9.5, 9.5, 5.0, 4.0, 3e-3, 4096),
        roofline.Row(RAGGED_DOT, 1, error="MemoryError: [none] left"),
    )
    settings = {"model": "tiny", "routing": "uniform"}
    return roofline.Report({"device": "a device"}, roofline.Limits(4e12, 8e14), settings, rows)


def test_a_report_is_saved_and_loaded_whole(tmp_path, monkeypatch):
    file = tmp_path / "report.json"
    _report().save(str(file))
    assert roofline.Report.load(str(file)) == _report()
    saved = json.loads(file.read_text())
    assert {"device": "a device", "copy_TBs": 4.0, "dense_TFLOPs": 800.0}.items() <= saved.items()
    wanted = {"system": "xla", "shape": "tiny", "tokens": 64, "active": 9.5, "us": 20.0, "floor_us": 5.0}
    assert (wanted | {"over_floor": 4.0, "rel_err": 3e-3}).items() <= saved["rows"][1].items()

    def interrupted(*paths):
        raise KeyboardInterrupt

    before = file.read_bytes()
    monkeypatch.setattr(renaming, "exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dataclasses.replace(_report(), rows=()).save(str(file))
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [before]


def _put(state, path):
    """Something at `path` that is no result of the benchmark."""
    if state == "text":
        path.write_text("mine")
    elif state == "json":
        path.write_text('{"rows": []}')
    elif state == "picture":
        path.write_bytes(b"\x89PNG\r\n\x1a\n, mine")
    elif state == "digits":
        path.write_text("9" * 5000)
    elif state == "nested":
        path.write_text("[" * 100_000)
    elif state == "directory":
        path.mkdir()
    elif state == "fifo":
        os.mkfifo(path)
    else:
        _report().save(str(path.with_name("elsewhere")))
        path.symlink_to(path.with_name("elsewhere" if state == "link" else "nowhere"))


@pytest.mark.parametrize(
    "state", ["text", "json", "picture", "digits", "nested", "directory", "fifo", "link", "dangling link"]
)
@pytest.mark.parametrize("what", ["report", "picture"])
def test_reports_and_pictures_replace_nothing_else(what, state, tmp_path):
    if what == "picture":
        pytest.importorskip("matplotlib")
    save = _report().save if what == "report" else functools.partial(roofline.draw, _report())
    path = tmp_path / "it"
    _put(state, path)

    def found():
        entries = ((file.name, file.lstat()) for file in tmp_path.iterdir())
        return sorted((name, its.st_ino, its.st_mode, its.st_size, its.st_mtime_ns) for name, its in entries)

    before = found()
    with pytest.raises(FileExistsError, match=r"it must be a (saved report|picture).*, to be replaced, but "):
        save(str(path))
    assert found() == before


def test_a_picture_replaces_an_earlier_one_and_no_report(tmp_path):
    pytest.importorskip("matplotlib")
    picture, file = tmp_path / "it.png", tmp_path / "it.json"
    roofline.draw(_report(), str(picture))
    roofline.draw(dataclasses.replace(_report(), rows=()), str(picture))
    _report().save(str(file))
    with pytest.raises(FileExistsError, match="must be a picture"):
        roofline.draw(_report(), str(file))
    with pytest.raises(FileExistsError, match="must be a saved report"):
        _report().save(str(picture))
    assert sorted(os.listdir(tmp_path)) == ["it.json", "it.png"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"rows": [{"speed": 1}]}'])
def test_what_is_no_report_is_refused_by_name(content, tmp_path):
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"other\.json is not a saved report"):
        roofline.Report.load(str(file))


def test_a_table_tells_numbers_limits_and_errors():
    from rich.console import Console

    console = Console(width=140)
    with console.capture() as capture:
        console.print(_report())
    table = capture.get()
    assert "tiny, uniform routing, one layer on a device" in table
    assert "copy 4 TB/s, dense 800 TFLOP/s" in table
    assert "ragged_dot, 1 tokens: MemoryError: [none] left" in table
    assert any(
        all(cell in line for cell in ("xla", "64", "20.0", "9.5", "4.00", "3.0e-03")) for line in table.splitlines()
    )


def test_the_picture_shows_the_points(tmp_path):
    imread = pytest.importorskip("matplotlib.image").imread
    roofline.draw(_report(), str(tmp_path / "with.png"))
    roofline.draw(dataclasses.replace(_report(), rows=()), str(tmp_path / "without.png"))
    pictures = [imread(tmp_path / name) for name in ("with.png", "without.png")]
    assert pictures[0].shape == pictures[1].shape
    assert (pictures[0] != pictures[1]).mean() > 1e-3
    assert len(list(tmp_path.iterdir())) == 2


def test_without_matplotlib_the_error_says_what_helps(monkeypatch, tmp_path):
    monkeypatch.setattr(roofline.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jmx-moe\[bench\]'"):
        roofline.draw(_report(), str(tmp_path / "x.png"))
