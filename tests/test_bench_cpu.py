"""benchmarks/cpu.py: the order of timing, the contents of its report, and the conversion of weights for llama.cpp."""

import dataclasses
import json

import numpy as np
import pytest
from backend_cases import BLOCK

from benchmarks import cpu
from benchmarks.peers import llama_cpp
from jmx.perf import machine, roofline, shapes
from jmx.perf.roofline import Limits, Row

pytestmark = [pytest.mark.costly, pytest.mark.usefixtures("on_cpu")]


def test_blocks_hold_what_the_packed_bytes_hold(rng):
    codes = rng.integers(0, 16, (3, 5, 2 * BLOCK), dtype=np.uint8)
    scales = rng.integers(0, 256, (3, 5, 2), dtype=np.uint8)
    found = llama_cpp.blocks(codes[..., ::2] | codes[..., 1::2] << 4, scales)
    assert found.shape == (3, 5, 2, 17)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found[..., 0], scales)
    halves = [found[..., 1:] & 15, found[..., 1:] >> 4]  # elements 0..15 of a block, and 16..31
    np.testing.assert_array_equal(np.concatenate(halves, -1).reshape(codes.shape), codes)


def test_all_are_timed_in_each_round_and_every_second_one_turns_around(monkeypatch):
    order, seconds = [], iter([1e-3, 2e-3, 6e-3, 5e-3, 3e-3, 8e-3])
    monkeypatch.setattr(machine, "seconds", lambda call, repeats: (call(), (next(seconds), 0.0))[1])
    monkeypatch.setattr(machine, "measure_limits", lambda repeats: Limits(float(len(order)), 1.0))
    limits = []
    systems = [cpu.Timed(Row(name, 1, layers=2), lambda name=name: order.append(name)) for name in "ab"]
    a, b = cpu._time(systems, 3, limits)
    assert "".join(order) == "abbaab"
    assert [limit.copy_rate for limit in limits] == [0, 2, 4]
    assert (a.us, b.us) == (1500, 3000)  # medians of 1, 5, 3 and of 2, 6, 8 ms, of which a layer has half
    assert (a.spread, b.spread) == (pytest.approx(4 / 3), pytest.approx(1.0))


def test_the_report_holds_all_systems_on_the_same_tokens(tmp_path, monkeypatch, capsys):
    gpt_oss = shapes.MODELS["gpt-oss-20b"]
    small = dataclasses.replace(gpt_oss, num_experts=6, hidden_size=64, intermediate_size=96)
    monkeypatch.setitem(shapes.MODELS, "gpt-oss-20b", small)
    monkeypatch.setattr(machine, "measure_limits", lambda repeats: Limits(1e9, 5e9))
    monkeypatch.setattr(llama_cpp, "Ggml", lambda directory, num_threads: (directory, num_threads))
    monkeypatch.setattr(llama_cpp, "Layer", lambda ggml, weights: weights)

    class Program:
        """Answers with zeros, which is wrong."""

        def __init__(self, layers, calls, alpha, limit):
            assert (alpha, limit) == (1.702, 7.0)
            assert [layer.gate_up.shape for layer in layers] == 2 * [(6, 192, 32)]
            (self.shape,) = {call.x.shape for call in calls}
            for call in calls:
                assert call.expert_ids.shape == call.weights.shape == (self.shape[0], 4)
                np.testing.assert_allclose(call.weights.sum(-1), 1, rtol=1e-5)

        def run(self):
            pass

        def result(self):
            return np.zeros(self.shape, np.float32)

    monkeypatch.setattr(llama_cpp, "Program", Program)
    (tmp_path / "versions.json").write_text('{"llama-cpp-python": "1"}')
    file = tmp_path / "r.json"
    flags = ["--peer", str(tmp_path), "--tokens", "1,3", "--rounds", "2", "--json", str(file)]
    assert cpu.main(flags) == 1
    report = roofline.Report.load(str(file))
    assert [(row.system, row.tokens) for row in report.rows] == [
        (s, t) for s in ("cpu", "xla", cpu.PEER) for t in (1, 3)
    ]
    assert [row.error is None for row in report.rows] == [True] * 4 + [False] * 2
    assert "wrong result" in str(report.rows[-1].error)
    assert report.machine["versions"]["llama-cpp-python"] == "1"
    assert json.loads(file.read_text())["rows"][0]["shape"] == "gpt-oss-20b"
    assert "wrong result" in capsys.readouterr().out


def test_formats_are_timed_beside_each_other(tmp_path, monkeypatch):
    small = dataclasses.replace(shapes.MODELS["gpt-oss-20b"], num_experts=4, hidden_size=64, intermediate_size=64)
    monkeypatch.setitem(shapes.MODELS, "gpt-oss-20b", small)
    monkeypatch.setattr(machine, "measure_limits", lambda repeats: Limits(1e9, 5e9))
    file = tmp_path / "r.json"
    formats = ["--format", "nvfp4,int4_g64", "--input-format", "int8_token"]
    assert cpu.main([*formats, "--tokens", "2", "--rounds", "1", "--layers", "1", "--json", str(file)]) == 0
    found = [(row.format, row.input_format, row.error) for row in roofline.Report.load(str(file)).rows]
    assert found == [("nvfp4", None, None), ("int4_g64", None, None), ("int4_g64", "int8_token", None)]


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        (["--format", "int5"], "'int5' must be one of"),
        (["--peer", "x", "--input-format", "int8_token"], "--input-format needs --format"),
        ([], "one of the arguments --peer --format is required"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(flags, reported, capsys):
    with pytest.raises(SystemExit):
        cpu.main(flags)
    assert reported in capsys.readouterr().err
