"""The benchmark of training: results are checked, steps train, and a process that fails is reported."""

import json
import sys
import time
from typing import Any

import numpy as np
import pytest

from benchmarks import training, training_layer, training_model
from benchmarks.random_checkpoint import SMALL
from benchmarks.training_layer import Settings
from benchmarks.worker import Worker
from jmx.checkpoint.model_configs.gpt_oss import SLIDING
from jmx.perf.shapes import MODELS

SETTINGS = Settings("small", (40,), layers=2, repeats=1)


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_layer, "seconds", lambda call, *_: (call() is not None and 1e-3, 0.0))


@pytest.mark.costly
@pytest.mark.usefixtures("on_cpu", "no_waiting")
@pytest.mark.parametrize("system", ["xla", "ragged_dot"])
def test_gradients_of_a_layer_are_checked_and_timed(system: str) -> None:
    shape = MODELS[SETTINGS.model]
    program = training_layer.compile_case(system, shape, SETTINGS, 40)
    assert isinstance(program, training_layer.Program), program
    row = training_layer.measure(shape, SETTINGS, 40, program)
    assert (row["forward_us"], row["both_us"], row["over_forward"]) == (500, 500, 1)  # one of two layers
    assert 0 < max(row["rel_err"].values()) < 2e-2
    wrong = program._replace(
        both=lambda *arguments: program.both(*arguments)._replace(dx=program.forward(*arguments[:3]))
    )
    row = training_layer.measure(shape, SETTINGS, 40, wrong)
    assert row["error"] == "the result is wrong"
    assert "both_us" not in row


def test_a_system_that_cannot_run_gives_the_reason() -> None:
    found = training_layer.compile_case("tokamax_or_another", MODELS["small"], SETTINGS, 40)
    assert "tokamax_or_another" in found


@pytest.mark.costly
@pytest.mark.usefixtures("on_cpu")
def test_steps_train_the_adapters_of_a_model() -> None:
    sizes = SMALL | {"num_hidden_layers": 1, "layer_types": (SLIDING,), "vocab_size": 64, "head_dim": 16}
    settings = training_model.Settings("gpt-oss-20b", rank=2, batch=2, length=32, sizes=sizes)
    row = training_model.measure(*training_model.compile_step(settings), settings)
    assert np.isfinite(row["losses"]).all()
    assert (np.diff(row["losses"]) < 0).all()  # of the same tokens
    assert row["trained_parameters"] == SMALL["num_experts"] * 2 * 5 * 256
    assert row["tokens_per_s"] == pytest.approx(64 / row["seconds"])


@pytest.mark.costly
def test_the_layer_of_torch_is_the_reference() -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.peers import grouped_mm

    sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 96}
    shape = grouped_mm.Shape(**sizes, alpha=1.702, beta=1.0, limit=7.0, bias=True)
    weights, case = grouped_mm.draw_weights(shape, "cpu"), grouped_mm.draw_case(shape, 40, "cpu")
    got = grouped_mm.both(lambda *arguments: grouped_mm.layer(shape, *arguments), *case[:2], weights, case[2])
    assert max(grouped_mm.errors(shape, case, weights, got).values()) < 2e-2
    wrong = got[0], got[1], torch.zeros_like(got[2])
    assert grouped_mm.errors(shape, case, weights, wrong)["dlogits"] == 1


def test_a_process_that_fails_or_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "SILENT", 0.5)
    row = json.dumps({"both_us": 3.0})
    ready = "print('{\"compiled\": 1}', flush=True); input()\n"

    def found(program: str) -> list[dict[str, Any]]:
        worker = Worker("system", [sys.executable, "-S", "-c", program])
        worker.wait_for_compiling(time.monotonic() + 60)
        rows = [*training.results(worker, 2, time.monotonic() + 20)]
        assert worker.process.poll() is not None
        return rows

    hanging = found(ready + f"print('{row}', flush=True)\nimport time; time.sleep(100)")
    assert hanging[0] == {"both_us": 3.0}
    assert "killed" in hanging[1]["error"]
    (failing,) = found(ready + "raise SystemExit('no memory')")
    assert "the process ended: no memory" in failing["error"]
    (never,) = found("raise SystemExit('no device')")
    assert "no device" in never["error"]


def test_the_report_as_text() -> None:
    timed = {"forward_us": 500.0, "both_us": 1500.0, "over_forward": 3.0, "both_temporary_bytes": 5e6}
    rows = [{"system": "tokamax", "tokens": 64, "error": "not installed"}, {"system": "mosaic", "tokens": 8, **timed}]
    assert training.table(rows).splitlines()[2:] == [
        "| 8 | mosaic | 500 | 1500 | 3.00 | 5 |",
        "| 64 | tokamax | not installed |  |  |  |",
    ]
    step = {"tokens_per_s": 4096.0, "seconds": 1.0, "peak_bytes": 7e10, "trained_parameters": 5e8}
    report = {
        "lora": [{"system": "lora", "ratios": {"forward": 1.25}, "seconds": {"forward": 1e-3}}],
        "models": [{"system": "120b", **step}, {"system": "20b", "error": "no memory"}],
    }
    assert [*training.others(report)] == [
        "forward: 1000 us, with adapters +25.0%",
        "120b: 4096 tokens/s, 1.000 s a step, peak 70.0 GB, 500 M parameters",
        "20b: no memory",
    ]


def test_unknown_parts_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        training.main(["--parts", "nothing"])
    assert "nothing" in capsys.readouterr().err
