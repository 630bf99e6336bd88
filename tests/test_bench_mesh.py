"""`jmx bench --mesh`: a layer divided over fake devices, its rows, its memory, and its files."""

import argparse
import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import jmx
from benchmarks import mesh_picture
from jmx import cli
from jmx.cli.layer_split import split_of, splits_of
from jmx.parallel import EXCHANGES
from jmx.perf import bench_mesh
from jmx.perf.divided import Case, Layers
from jmx.perf.mesh_memory import MeshMemory
from jmx.perf.roofline import DividedRow, Report
from jmx.perf.shapes import MODELS

pytestmark = [pytest.mark.costly, pytest.mark.devices(4)]

NUMBERS = ("us", "spread", "experts_us", "exchange_us", "fullest_experts_us", "waits_us", "one_us", "all_on_one_us")
NUMBERS += ("efficiency", "floor_us", "rel_err")


def mesh_of(**sizes: int) -> Any:
    count = int(np.prod([*sizes.values()]))
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=jax.devices()[:count])


@pytest.mark.parametrize(
    "sizes",
    [
        {"ep": 2},
        {"dp": 2, "ep": 2},
        {"ep": 2, "tp": 2},
        {"ep": 2, "tp": 1},
        {"dp": 4},
        {"fsdp": 2},
        {"dp": 2, "fsdp": 2},
        {"fsdp": 2, "ep": 2},
        {"fsdp": 2, "tp": 2},
    ],
    ids=str,
)
def test_the_calls_of_a_case_compute_the_same_layers(sizes: dict[str, int]) -> None:
    """Also the experts alone: with the exchange's sum they are the first divided layer."""
    mesh = mesh_of(**sizes)
    split = split_of(mesh, None)
    layers = Layers.of(MODELS["small"], split, mesh, 1)
    case = Case(layers, 3, {"split": split})
    arguments = case.arguments(layers.drawn(), *case.draw())
    results = {name: np.asarray(its.result()(*arguments[name]), np.float64) for name, its in case.calls.items()}
    own = sizes.get("dp", 1) * sizes.get("fsdp", 1)
    assert case.all_tokens == 3 * own * sizes.get("ep", 1)
    whole = results["all_on_one"]
    np.testing.assert_allclose(results["one"], whole[:3], atol=0.1)
    assert np.linalg.norm(results["split"] - whole) <= 1e-2 * np.linalg.norm(whole)
    x = np.asarray(arguments["all_on_one"][0], np.float64)
    axes = [own, *(sizes.get(name, 1) for name in ("ep", "tp"))]
    added = results["experts"].reshape(*axes, -1, x.shape[1]) - x.reshape(axes[0], 1, 1, -1, x.shape[1])
    together = x + added.sum((1, 2)).reshape(x.shape)
    assert np.linalg.norm(together - whole) <= 2e-2 * np.linalg.norm(whole)


def test_a_run_has_all_numbers_and_its_file_is_read_again(tmp_path: pathlib.Path) -> None:
    mesh, lines, parts = mesh_of(dp=2, ep=2), [], []
    split = split_of(mesh, "gather")
    report = bench_mesh.run(
        "small", [2], mesh, [split], layers=1, repeats=2, seed=3, progress=lines.append, so_far=parts.append
    )
    (row,) = report.rows
    assert isinstance(row, DividedRow)
    assert all(isinstance(getattr(row, name), float) for name in NUMBERS)
    assert (row.mesh, row.exchange, row.tokens, row.error) == ("dp=2,ep=2", "gather", 2, None)
    assert row.sent_bytes == 2 * (256 * 2 + 2 * 8) + 2 * 256 * 2
    assert row.us is not None
    assert row.experts_us is not None
    assert row.all_on_one_us is not None
    assert row.exchange_us == pytest.approx(row.us - row.experts_us)
    assert row.fullest_experts_us is not None
    assert row.waits_us == pytest.approx(row.fullest_experts_us - row.experts_us)
    assert row.efficiency == pytest.approx(row.all_on_one_us / (4 * row.us))
    assert 0 < (row.active or 0) <= 4  # of a device's experts
    assert parts == [report]
    values = report.as_dict()
    assert values["mesh"] == {"dp": 2, "ep": 2}
    assert values["link_GBs"] > 0
    file = str(tmp_path / "report.json")
    report.save(file)
    assert Report.load(file).rows == report.rows


def test_exchanges_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One leaves a token count out, with its reason; another runs at none, which is an error before all else."""
    mesh, lines = mesh_of(ep=2), []
    no = "such tokens are too many"
    monkeypatch.setattr(EXCHANGES["rows"], "supports", lambda call: no if call.num_tokens > 2 else None, raising=False)
    splits = [split_of(mesh, name) for name in ("gather", "rows")]
    report = bench_mesh.run("small", [1, 4], mesh, splits, layers=1, repeats=1, progress=lines.append)
    assert [(row.tokens, getattr(row, "exchange", None)) for row in report.rows] == [
        (1, "gather"),
        (1, "rows"),
        (4, "gather"),
    ]
    first, second, _ = report.rows
    assert isinstance(first, DividedRow)
    assert isinstance(second, DividedRow)
    assert (first.experts_us, first.all_on_one_us) == (second.experts_us, second.all_on_one_us)
    assert first.us != second.us
    assert f"{splits[1]} does not run with 4 tokens a device: rows: {no}" in lines
    assert [*map(lines.index, ("compiling", f"measuring the limits of {jax.devices()[0].device_kind}"))] == [1, 3]
    assert "0.00 GB whole weights" in lines[2]
    with pytest.raises(ValueError, match=r"`exchange` \(='rows'\) cannot run this call: rows: such tokens"):
        bench_mesh.run("small", [8, 4], mesh, splits, layers=1, repeats=1)


def test_the_fullest_experts_are_the_program_of_the_experts() -> None:
    """With logits by which both devices have as many experts in use, and rows, as the fuller one has without them."""
    mesh = mesh_of(ep=2)
    split = split_of(mesh, None)
    case = Case(Layers.of(MODELS["small"], split, mesh, 4), 2, {"split": split})
    assert case.calls["fullest"] is case.calls["experts"]
    x, logits = case.draw()
    arguments = case.arguments(case.layers.drawn(), x, logits)
    before = case.shares(logits)
    most = np.maximum(*np.moveaxis(before.used[:, 0], 1, 0))
    assert (before.used[:, 0] < most[:, None]).any()
    for rank in range(2):
        own = jax.numpy.stack([its.addressable_shards[rank].data for its in arguments["fullest"][1]])
        np.testing.assert_array_equal(case.shares(own).used[:, 0, rank], most)
    assert case.calls["fullest"].result()(*arguments["fullest"]).shape == (2, 4, 256)


@pytest.mark.parametrize("other", ["dp", "fsdp"])
def test_memory_is_that_of_the_arrays(other: str) -> None:
    mesh = mesh_of(**{other: 2, "ep": 2})
    split = split_of(mesh, "gather")
    layers = Layers.of(MODELS["small"], split, mesh, 2)
    small, case = (Case(layers, count, {"gather": split}) for count in (1, 5))
    memory = MeshMemory.of(layers, [small, case])
    weights = layers.drawn()
    described = layers.described()
    for array, like in zip(jax.tree.leaves(weights), jax.tree.leaves(described), strict=True):
        assert (array.shape, array.dtype, array.sharding) == (like.shape, like.dtype, like.sharding)
    assert memory.whole == sum(array.nbytes for array in jax.tree.leaves(weights.whole))
    divided, gathered = (
        sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(its))
        for its in (weights.divided, weights.gathered)
    )
    if other == "dp":
        assert all(parts is its for parts, its in zip(weights.divided, weights.gathered, strict=True))
        assert memory.divided == divided < memory.whole
    else:
        assert memory.divided == divided + gathered
        assert divided < 0.6 * gathered
    x, logits = case.draw()
    assert memory.tokens >= x.nbytes + logits.nbytes
    assert memory.temporary > 0
    memory.check(2)
    less = dataclasses.replace(memory, limit=memory.needed - 1)
    with pytest.raises(
        ValueError, match=r"`layers` \(=2\) must be fewer, or `tokens` smaller, for the memory of a device: memory .*"
    ):
        less.check(2)
    alone = dataclasses.replace(memory, is_shared=False)
    assert alone.needed == memory.whole + memory.divided + memory.tokens + memory.temporary
    assert memory.needed == alone.needed + 3 * (alone.needed - memory.whole)


@pytest.mark.parametrize(
    ("tokens", "fields", "message"),
    [
        ([0], {}, r"`tokens` \(=0\) must be at least 1"),
        ([1], {"model": "tiny"}, r"`model` \(='tiny'\) must be one of"),
        ([1], {"format": "fp3"}, r"`formats` \(='fp3'\) must be WEIGHTS"),
    ],
)
def test_runs_that_are_refused(tokens: list[int], fields: dict[str, Any], message: str) -> None:
    mesh = mesh_of(ep=2)
    with pytest.raises(ValueError, match=message):
        bench_mesh.run(fields.pop("model", "small"), tokens, mesh, [split_of(mesh, None)], **fields)


def test_experts_that_the_mesh_does_not_divide() -> None:
    mesh = mesh_of(ep=3)
    with pytest.raises(ValueError, match="must divide the 8 experts evenly, over 3 devices"):
        bench_mesh.run("small", [1], mesh, [split_of(mesh, None)])


def test_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    file = tmp_path / "out.json"
    command = ["bench", "--model", "small", "--layers", "1", "--repeats", "1", "--tokens", "1", "--mesh", "ep=2"]
    assert cli.main([*command, "--exchange", "rows,gather", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("gather", "efficiency", "links"))
    rows = json.loads(file.read_text())["rows"]
    assert [(row["mesh"], row["exchange"]) for row in rows] == [("ep=2", "rows"), ("ep=2", "gather")]
    assert cli.main(["bench", "--from", str(file)]) == 0
    assert capsys.readouterr().out == out
    mesh_picture.draw(Report.load(str(file)), str(tmp_path / "out.svg"))
    assert (tmp_path / "out.svg").read_text().rstrip().endswith("</svg>")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh", "ep=64"], "`--mesh` (='ep=64') needs 64 devices"),
        (["--mesh", "ep=2", "--exchange", "gather,"], "`--exchange` (='') must be one of gather"),
        (["--mesh", "ep=2", "--exchange", "gather,peer"], "`exchange` (='peer') cannot run this call: peer: the platf"),
        (["--chunks", "2"], "`--chunks` (=2) needs --mesh"),
        (["--mesh", "ep=2", "--exchange", "rows", "--chunks", "1,2"], "rows: it has rounds instead of chunks"),
        (["--mesh", "ep=2", "--backends", "xla"], "`--backends` (='xla') must be left out with --mesh"),
        (["--mesh", "ep=2", "--format", "mxfp4,nvfp4"], "`--format` (='mxfp4,nvfp4') must be one format with --mesh"),
    ],
)
def test_wrong_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--model", "small", *flags]) == 2
    assert message in capsys.readouterr().err


def test_splits_of_the_axes() -> None:
    named = argparse.Namespace(exchange="gather,rows,gather", chunks=[1, 4])
    ways = [(split.exchange, split.chunks) for split in splits_of(mesh_of(ep=2), named)]
    assert ways == [("gather", 1), ("gather", 4), ("rows", 1), ("rows", 4)]
    assert split_of(mesh_of(ep=2, dp=2), None).exchanged == ("ep",)
    assert split_of(mesh_of(ep=2, dp=2), None).names("tokens") == ("dp", "ep")
    split = split_of(mesh_of(tp=2), None)
    assert isinstance(split, jmx.Split)
    assert (split.names("intermediate"), split.summed, split.exchanged) == (("tp",), ("tp",), ())


def test_doctor_lists_exchanges(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    devices = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["mesh"]
    assert (found["axes"], found["link_bytes_s"]) == ({"ep": 4}, None)
    assert {exchange["name"] for exchange in found["exchanges"]} == {*EXCHANGES}
    assert sum(exchange["chosen"] for exchange in found["exchanges"]) == 1
    assert all(exchange["runs"] == (exchange["reason"] is None) for exchange in found["exchanges"])
    assert cli.main(["doctor"]) == 0
    assert "exchanges between devices (mesh ep=4, links: no figure)" in capsys.readouterr().out
    monkeypatch.setattr(jax, "devices", lambda *_: devices[:1])
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mesh"] is None
