"""benchmarks/layer_turns.py: who times what, that rows mean what those of `jmx bench` do, and failures."""

import json
import sys

import pytest

from benchmarks import layer_turns, layer_turns_worker
from benchmarks.layer_turns import LIMITS, Part, Table, main, plan
from jmx.perf import bench, roofline
from jmx.perf.settings import Settings

pytestmark = pytest.mark.costly

FOUND = {"device": "a card", "versions": {"jmx": "0"}, "copy_TBs": 4.0, "dense_TFLOPs": 800.0}
MEASURED = {"layers": 1, "active": 4.0, "us": 50.0, "spread": 0.0, "rel_err": 4e-3}
FLAGS = ["--model", "small", "--tokens", "1,2", "--layers", "1", "--repeats", "1", "--seed", "3"]


def settings(**changes):
    return Settings(**{"model": "gpt-oss-120b", "tokens": [1, 64], "seed": 3, "layers": 1} | changes)


def test_each_case_is_timed_once_after_the_limits_and_peers_come_last():
    of_two = settings(tokens=[1, 4, 16, 64, 256], formats=["mxfp4", "nvfp4:mxfp8"])
    limits, *parts = plan(of_two, ["mosaic", "xla"], ["marlin"], 2)
    assert limits == Part(LIMITS, None, ())
    assert parts.pop() == Part("marlin", None, (1, 4, 16, 64, 256))
    cases = [(part.system, part.pair, tokens) for part in parts for tokens in part.tokens]
    wanted = {(name, pair, t) for name in ("mosaic", "xla") for pair in ("mxfp4", "nvfp4:mxfp8") for t in of_two.tokens}
    assert (len(cases), {*cases}) == (len(wanted), wanted)
    assert [part.tokens for part in plan(settings(), ["xla"], [], 5)[1:]] == [(1,), (64,)]  # none without work


def test_processes_get_all_settings(tmp_path):
    ours = Part("mosaic", "nvfp4", (1, 64)).command(settings(routing="zipf", repeats=7), None)
    given = {"routing": "zipf", "repeats": 7, "layers": 1, "seed": 3, "model": "gpt-oss-120b", "tokens": [1, 64]}
    assert json.loads(ours[-1]) == given | {"pair": "nvfp4"}
    *_, module, system = (peer := Part("marlin", None, (1, 64)).command(settings(layers=None), tmp_path))[:4]
    assert (module, system) == ("benchmarks.peers.run", "marlin")
    assert {"--tokens=1,64", "--layers=16,4", f"--packages={tmp_path}", "--repeats=5"} <= {*peer}
    assert not any(flag.startswith("--output") for flag in peer)  # so it waits for its turn


def test_floors_are_those_of_the_row_s_own_formats(tmp_path):
    table = Table(settings(tokens=[8192], formats=["mxfp4", "mxfp4:fp8_token"]), str(tmp_path / "report.json"))
    table.add_limits(FOUND)
    sixteen = table.add(Part("mosaic", "mxfp4", (8192,)), {"case": 8192, **MEASURED, "times_bfloat16": 1})
    eight = table.add(Part("mosaic_fp8", "mxfp4:fp8_token", (8192,)), {"case": 8192, **MEASURED, "times_bfloat16": 2})
    peer = table.add(Part("marlin", None, (8192,)), {"case": 8192, **MEASURED, "versions": {"torch": "2"}})
    assert sixteen is not None
    assert eight is not None
    assert peer is not None
    floors = [row.floor_us or 0.0 for row in (sixteen, peer, eight)]
    assert floors == [floors[0], floors[0], floors[0] / 2]
    assert sixteen.over_floor == pytest.approx(50 / floors[0])
    assert (eight.format, eight.input_format, peer.weights) == ("mxfp4", "fp8_token", "mxfp4")
    saved = roofline.Report.load(str(tmp_path / "report.json"))
    assert saved.rows == (sixteen, eight, peer)
    assert saved.machine == {"device": "a card", "versions": {"jmx": "0", "torch": "2"}}


def test_rows_are_saved_by_tokens_and_what_a_backend_lacks_is_left_out_of_several_formats(tmp_path):
    file = str(tmp_path / "report.json")
    for formats, left_out in ((["mxfp4", "nvfp4"], True), (["mxfp4"], False)):
        table = Table(settings(formats=formats), file)
        table.add_limits(FOUND)
        assert table.add(Part("mosaic", "mxfp4", (64,)), {"case": 64, **MEASURED}) is not None
        assert table.add(Part("mosaic", "mxfp4", (1,)), {"case": 1, "error": "killed"}) is not None
        refused = {"case": 1, "error": "NoBackendError: no"}
        assert (table.add(Part("triton", "mxfp4", (1,)), refused) is None) == left_out
        rows = roofline.Report.load(file).rows
        assert [(row.system, row.tokens, row.error) for row in rows[:2]] == [
            ("mosaic", 1, "killed"),
            ("mosaic", 64, None),
        ]
        assert len(rows) == (2 if left_out else 3)


def test_the_rows_are_those_of_jmx_bench(tmp_path, monkeypatch):
    """Processes of their own, on this machine: the same draws give the same errors, and all of a row's fields."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    file = tmp_path / "report.json"
    assert main([str(file), *FLAGS, "--backends", "xla", "--processes", "1"]) == 0
    found = roofline.Report.load(str(file))
    monkeypatch.setattr(bench, "measure_limits", lambda repeats: found.limits)
    wanted = bench.run("small", [1, 2], backends=["xla"], layers=1, repeats=1, seed=3)
    assert [(row.tokens, row.rel_err, row.active, row.floor_us, row.weights, row.layers) for row in found.rows] == [
        (row.tokens, row.rel_err, row.active, row.floor_us, row.weights, row.layers) for row in wanted.rows
    ]
    assert all(row.us is not None and row.us > 0 and row.error is None for row in found.rows)
    assert {**found.settings} == {**wanted.settings}


SCRIPTS = {
    LIMITS: f"print('{{}}', flush=True); input(); print({json.dumps(json.dumps(FOUND))!s})",
    "late": "import time; time.sleep(60)",
    "ends": 'print(\'{"compiled": 2}\', flush=True); input(); print(\'{"us": null, "error": "no"}\', flush=True)',
    "right": f"print('{{}}', flush=True); input(); print({json.dumps(json.dumps(MEASURED))!s})",
}


def test_what_does_not_compile_in_time_or_ends_early_has_rows_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(Part, "command", lambda part, *_: [sys.executable, "-c", SCRIPTS[part.system]])
    monkeypatch.setattr(layer_turns.bench, "systems", lambda: ["late", "ends", "right"])
    file = tmp_path / "report.json"
    flags = ["--backends", "late,ends,right", "--processes", "1", "--compile-limit", "5", "--limit", "30"]
    assert main([str(file), *FLAGS, *flags]) == 1
    rows = {(row.system, row.tokens): row for row in roofline.Report.load(str(file)).rows}
    errors = {key: row.error or "" for key, row in rows.items()}
    assert errors["late", 1] == "killed: it printed nothing in time"
    assert errors["ends", 1] == "no"
    assert errors["ends", 2].startswith("the process ended")
    assert errors["right", 1] == ""
    assert rows["right", 1].us == 50.0


def test_one_token_count_that_does_not_compile_leaves_the_others(monkeypatch):
    real = bench.compile_layers

    def compile_layers(system, shape, case, layer_keys):
        if case.num_tokens == 2:
            raise RuntimeError("out of\nregisters")
        return real(system, shape, case, layer_keys)

    monkeypatch.setattr(bench, "compile_layers", compile_layers)
    given = {"model": "small", "pair": None, "tokens": [1, 2], "routing": "uniform", "layers": 1, "repeats": 1}
    turn = layer_turns_worker.Turn("xla", given | {"seed": 3})
    assert turn.compiled(2) == "RuntimeError: out of registers"
    program = turn.compiled(1)
    assert isinstance(program, layer_turns_worker.Program)
    assert turn.measured(1, program)["rel_err"] < 1e-2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "gpt"], "`model` (="),
        (["--formats", "fp5"], "`formats` (='fp5')"),
        (["--backends", "mosaik"], "`--backends` (='mosaik')"),
        (["--which", "vllm"], "`--which` (='vllm')"),
        (["--processes", "0"], "`--processes` (=0) must be at least 1"),
        (["--peers", "nowhere"], "`--peers` (=nowhere) must be a directory"),
        (["--tokens", "0"], "`tokens` (=0) must be at least 1"),
    ],
)
def test_bad_arguments_are_reported_before_anything_starts(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(layer_turns, "Worker", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "report.json"), *flags])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_report_is_kept(tmp_path, monkeypatch, capsys):
    (tmp_path / "notes.json").write_text("{}")
    monkeypatch.setattr(layer_turns, "Worker", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit):
        main([str(tmp_path / "notes.json")])
    assert (tmp_path / "notes.json").read_text() == "{}"
    assert "notes.json" in capsys.readouterr().err
