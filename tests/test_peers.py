"""benchmarks/layer.py --peers: what is fetched, what the report contains, and that the peers' reference is ours."""

import dataclasses
import json
import types
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmx
from benchmarks import layer, table
from benchmarks.peers import fetch
from jmx.experts import Experts
from jmx.numerics.formats import BlockScaled
from jmx.perf import bench, roofline, shapes

LIMITS = roofline.Limits(copy_rate=4e12, dense_rate=8e14)
SETTINGS = {"model": "gpt-oss-120b", "tokens": [1, 64], "routing": "uniform", "layers": 3, "repeats": 2}


@pytest.fixture
def saved(tmp_path):
    """A report of ours, as `jmx bench --json` leaves it."""
    file = tmp_path / "report.json"
    ours = (
        roofline.Row("mosaic", 1, "tiles", 3, 20.0, 0.01, 1.0, 1.0, 4.0, 12.4, 1.6, 2e-3, 0),
        roofline.Row("mosaic", 64, "tiles", 2, error="ValueError: no"),
        roofline.Row("ragged_dot", 64, "bf16", 1, error="MemoryError: too much"),
    )
    roofline.Report({"device": "a card", "versions": {"jmx": "0"}}, LIMITS, SETTINGS, ours).save(str(file))
    return file


def test_peers_are_listed_beside_ours_against_the_same_floor(saved, monkeypatch):
    right = {"layers": 3, "active": 4.0, "us": 50.0, "spread": 0.0, "rel_err": 4e-3}
    answers = {
        "marlin": ({"torch": "2"}, {1: right, 64: right | {"active": 112.0, "us": 700.0, "rel_err": 0.5}}, ""),
        "humming": ({"humming": "1"}, {1: {"error": "ValueError: no"}}, "humming's process ended with exit code -11"),
    }
    asked = []
    monkeypatch.setattr(layer, "measure", lambda system, *arguments: (asked.append(arguments), answers[system])[1])
    layer.with_peers(str(saved), saved.parent, ["marlin", "humming"])
    report = roofline.Report.load(str(saved))
    assert report.machine["versions"] == {"jmx": "0", "torch": "2", "humming": "1"}
    assert [settings["layers"] for *_, settings in asked] == 2 * [[3, 2]]  # as ours had
    assert report.settings == SETTINGS
    ours, *_, one, wrong, refused, missing = report.rows
    assert ours.system == "mosaic"
    least_bytes = 4 * 3 * 2880 * 2880 * 17 / 32
    assert one.floor_us == pytest.approx(least_bytes / 4e12 * 1e6)
    assert one.over_floor == pytest.approx(50.0 / (least_bytes / 4e12 * 1e6))
    assert one.error is None
    assert "wrong result" in str(wrong.error)
    assert refused.error == "ValueError: no"
    assert missing.error == "humming's process ended with exit code -11"
    assert (missing.system, missing.tokens) == ("humming", 64)


def test_a_peer_that_ends_early_leaves_what_it_has_measured(tmp_path, monkeypatch):
    started = []

    def run(command, **options):
        started.append(command)
        flags = dict(flag.removeprefix("--").split("=", 1) for flag in command if flag.startswith("--"))
        with open(flags["output"], "w") as file:
            print('{"torch": "2"}\n{"tokens": 1, "layers": 3, "us": 5.0}', file=file)
        return types.SimpleNamespace(returncode=-6)

    monkeypatch.setattr(layer.subprocess, "run", run)
    shape = layer.peer_shape(shapes.MODELS["gpt-oss-120b"])
    versions, rows, failure = layer.measure("marlin", tmp_path, shape, SETTINGS | {"layers": [16, 4]})
    assert versions == {"torch": "2"}
    assert rows == {1: {"layers": 3, "us": 5.0}}
    assert "marlin's process ended with exit code -6" in failure
    ((*_, module, system, packages, given, _, tokens, layers, routing, repeats),) = started
    assert (module, system, packages) == ("benchmarks.peers.run", "marlin", f"--packages={tmp_path}")
    assert json.loads(given.removeprefix("--shape="))["limit"] == 7.0
    assert (tokens, layers) == ("--tokens=1,64", "--layers=16,4")
    assert (routing, repeats) == ("--routing=uniform", "--repeats=2")


@pytest.mark.parametrize("flags", [["--peers", "nowhere"], ["--peers", "filled", "--which", "marlin,cutlas"]])
def test_bad_arguments_are_one_line_before_anything_runs(flags, tmp_path, monkeypatch, capsys):
    (tmp_path / "filled").mkdir()
    (tmp_path / "filled" / "versions.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(layer.subprocess, "run", lambda *a, **k: pytest.fail("started"))
    assert layer.main(flags) == 2
    reported = capsys.readouterr().err
    assert reported.startswith("layer.py: error: `--")
    assert reported.count("\n") == 1


@pytest.mark.costly
def test_ours_and_the_peers_end_in_one_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(layer.__dict__, "measure", lambda *a: ({}, {}, "no card"))
    (tmp_path / "versions.json").write_text("{}")
    flags = ["--model", "small", "--tokens", "2", "--layers", "1", "--repeats", "1", "--backends", "xla"]
    code = layer.main(["--peers", str(tmp_path), "--which", "humming", *flags, "--json", str(tmp_path / "r.json")])
    assert code == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(row["system"], row["shape"], row["error"]) for row in rows] == [
        ("xla", "small", None),
        ("humming", "small", "no card"),
    ]
    assert "humming, 2 tokens: no card" in capsys.readouterr().out


def test_the_table_has_the_fastest_sound_time_in_bold(saved):
    rows = [
        roofline.Row("mosaic", 1, active=4.0, us=20.04, floor_us=12.5, over_floor=1.6, rel_err=2e-3),
        roofline.Row("marlin", 1, active=4.0, us=10.0, floor_us=12.5, over_floor=0.8, rel_err=0.5, error="wrong"),
        roofline.Row("marlin", 64, active=112.0, us=1234.5, floor_us=350.0, over_floor=3.527, rel_err=2e-3),
    ]
    machine = {"device": "a card", "date": "2026-01-02T03:04", "versions": {"jax": "0.11"}}
    caption, _, head, _, one, many = table.markdown(
        roofline.Report(machine, LIMITS, SETTINGS, tuple(rows))
    ).splitlines()
    assert caption == (
        "gpt-oss-120b, uniform routing. a card, 2026-01-02; jax 0.11; copy 4.00 TB/s, dense 800 TFLOP/s."
    )
    assert head == "| tokens | experts used | floor, us | mosaic | marlin |"
    assert one == "| 1 | 4 | 12.5 | **20.04** (1.60x) | - |"
    assert many == "| 64 | 112 | 350.0 | - | **1234** (3.53x) |"


def test_only_what_is_used_is_kept_of_a_wheel(tmp_path):
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        kept = ["vllm/third_party/triton_kernels/details/a.py", "humming/_native/x86_64/compile", fetch.LIBRARY]
        for name in (*kept, "vllm/third_party/other/b.py", "vllm/c.py", "humming/"):
            archive.writestr(name, name)
    fetch.extract(wheel, tmp_path / "out")
    files = {path.relative_to(tmp_path / "out").as_posix(): path for path in (tmp_path / "out").rglob("*")}
    files = {name: path for name, path in files.items() if path.is_file()}
    assert files.keys() == {"triton_kernels/details/a.py", "humming/_native/x86_64/compile", "moe_C.so"}
    assert files["moe_C.so"].read_text() == fetch.LIBRARY
    assert files["humming/_native/x86_64/compile"].stat().st_mode & 0o111


@pytest.mark.parametrize("model", ["gpt-oss-20b", "deepseek-v3"])
def test_the_peers_are_checked_against_what_the_reference_computes(model, rng):
    torch = pytest.importorskip("torch")
    from benchmarks.peers import problem

    shape = problem.Shape(**layer.peer_shape(shapes.MODELS[model]))
    shape = dataclasses.replace(shape, num_experts=6, top_k=2, hidden_size=96, intermediate_size=64)
    weights = problem.draw_weights(shape, "cpu")
    case = problem.draw_case(shape, 9, "uniform", "cpu")
    activation = jmx.SwiGLU(shape.alpha, shape.beta, shape.limit)

    def ours(array):
        return None if array is None else jnp.asarray((array.float() if array.is_floating_point() else array).numpy())

    x, _, ids, router_weights = (ours(array) for array in case)
    gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias = (ours(array) for array in weights)
    products = BlockScaled(gate_up, gate_up_scales), BlockScaled(down, down_scales)
    experts = Experts.of(*products, gate_up_bias, down_bias, gate_up_order="interleaved")
    expected = jax.jit(lambda x: jmx.moe(x, jmx.Routing(ids, router_weights), experts, activation=activation))(x)
    assert bench.relative_error(problem.reference(shape, weights, case).numpy(), expected) < 1e-5
    larger = dataclasses.replace(shape, hidden_size=128, intermediate_size=96)
    padded = case._replace(x=torch.nn.functional.pad(case.x, (0, 32)))
    y = problem.reference(larger, weights.padded(128, 96), padded).numpy()
    assert bench.relative_error(y[:, :96], expected) < 1e-5
    assert not y[:, 96:].any()


@pytest.mark.parametrize(("routing", "share"), [("uniform", 2 / 16), ("zipf", None), ("half", 0.5)])
def test_the_peers_tokens_are_routed_as_ours_are(routing, share, rng):
    torch = pytest.importorskip("torch")
    from benchmarks.peers import problem

    logits = problem.draw_logits(4000, 16, 2, routing, "cpu")
    top = logits.float().topk(3, dim=-1)
    assert not (top.values[:, 1] == top.values[:, 2]).any()  # else two sets of experts would be right
    shares = (torch.bincount(top.indices[:, :2].flatten(), minlength=16) / 4000).sort(descending=True).values.numpy()
    key = jax.random.key(rng.integers(2**31))
    ours = np.argsort(-shapes.draw_logits(key, (1, 4000, 16), routing)[0], axis=-1)[:, :2]
    expected = np.sort(np.bincount(ours.ravel(), minlength=16) / 4000)[::-1]
    np.testing.assert_allclose(shares, expected, atol=0.06)
    assert share is None or abs(shares[0] - share) < 0.12
