"""The benchmark of attention: each system's result is checked, and a process that hangs is ended."""

import json
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention, attention_cases, attention_worker
from benchmarks.attention_cases import Built, Case, Model
from benchmarks.worker import Worker

MODELS = {
    "sinks": Model(8, 2, 16, 16, (None, 5), True),
    "plain": Model(4, 4, 16, 16),
    "latent": Model(4, 4, 24, 16, width=24, rank=16),
}
CASES = [
    *(Case("sinks", kind, 2, 128, window) for kind in ("prompt", "step") for window in (None, 5)),
    *(Case(model, kind, 2, 128, None) for model in ("plain", "latent") for kind in ("prompt", "step")),
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cases, "MODELS", MODELS)
    monkeypatch.setattr(attention_worker, "POOL", 1 << 17)
    monkeypatch.setattr(attention_worker, "LAYERS", (2, 2))
    monkeypatch.setattr(attention_worker, "CALL", 3.5 * 2 * 4e-6)  # three passes
    monkeypatch.setattr(attention_worker, "seconds", lambda call, *_: (call() and 1e-3, 0.0))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("system", ["jmx", "jmx_xla", "xla"])
def test_results_are_checked_and_timed(system: str, case: Case, rng: np.random.Generator) -> None:
    program = attention_worker.compile_case(system, case)
    if system == "xla" and (case.window is not None and case.kind == "step"):
        assert program == "ValueError: windows of caches are not among its arguments"
        return
    assert isinstance(program, attention_worker.Program), program
    pool = jnp.asarray(rng.standard_normal(attention_worker.POOL), jnp.bfloat16)
    row = attention_worker.measure(case, program, pool)
    assert (row["layers"], row["passes"]) == (2, 3)
    assert row["us"] == pytest.approx(1e3 / 6)
    assert row["rel_err"] < 1e-2
    assert ("no sinks" in row["note"]) == (system == "xla" and case.model == "sinks")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("factor", "error"), [(1.1, "the result is wrong"), (np.nan, "results are not finite")])
def test_wrong_results_have_no_times(
    factor: float, error: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    def wrong(case: Case) -> Built:
        right = attention_cases.jmx_xla(case)
        return right._replace(call=lambda inputs: factor * right.call(inputs))

    monkeypatch.setitem(attention_cases.SYSTEMS, "wrong", wrong)
    program: Any = attention_worker.compile_case("wrong", CASES[-1])
    pool = jnp.asarray(rng.standard_normal(attention_worker.POOL), jnp.bfloat16)
    row = attention_worker.measure(CASES[-1], program, pool)
    assert row["error"] == error
    assert "us" not in row


def test_bytes_and_flops_are_those_of_what_is_seen() -> None:
    step, prompt = Case("sinks", "step", 2, 128, 5), Case("sinks", "prompt", 2, 128, 5)
    assert (step.seen, prompt.seen) == (5, sum(min(t + 1, 5) for t in range(128)))
    assert step.flops == 2 * 2 * 8 * 5 * (16 + 16)
    assert step.bytes == 2 * (2 * 2 * 2 * 5 * 16) + 2 * 2 * (2 * 8 * 16)
    assert Case("latent", "step", 2, 128, None).flops == 2 * 2 * 4 * 128 * (24 + 16)
    assert Case("latent", "step", 2, 128, None).bytes == 2 * 2 * 128 * 24 + 2 * 2 * 4 * (24 + 16)


def worker_of(program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Worker:
    file = tmp_path / "worker.py"
    file.write_text(program)
    monkeypatch.setattr(attention, "WORKER", file)
    monkeypatch.setattr(attention, "SILENT", 0.5)
    worker = attention.worker_of("jmx", CASES[:3])
    worker.wait_for_compiling(time.monotonic() + 60)
    return worker


def test_a_process_that_hangs_is_ended_and_one_that_fails_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    row = json.dumps({"us": 3.0})
    first = f"print('{{\"compiled\": 3}}', flush=True); input(); print('{row}', flush=True)\n"
    hanging = worker_of(first + "import time; time.sleep(100)", monkeypatch, tmp_path)
    found = [*attention.results(hanging, CASES[:3], time.monotonic() + 20)]
    assert found[0]["us"] == 3
    assert "killed" in found[1]["error"]
    assert found[2]["error"].startswith(f"not run, since {CASES[1]} failed")
    assert hanging.process.poll() is not None
    failing = worker_of(first + "raise SystemExit('no memory')", monkeypatch, tmp_path)
    found = [*attention.results(failing, CASES[:3], time.monotonic() + 20)]
    assert "the process ended" in found[1]["error"]
    never = worker_of("raise SystemExit('no device')", monkeypatch, tmp_path)
    found = [*attention.results(never, CASES[:3], time.monotonic() + 20)]
    assert "the process ended" in found[0]["error"]
    assert len(found) == 3


def test_tables_have_ratios_and_each_reason_once() -> None:
    machine = {"copy_TBs": 4.0, "dense_TFLOPs": 700.0}
    rows = [
        attention.row_of("jmx", {"case": CASES[0], "us": 10.0, "note": ""}, machine),
        attention.row_of("cudnn", {"case": CASES[0], "us": 15.0, "note": "no sinks"}, machine),
        attention.row_of("cudnn", {"case": CASES[1], "error": "not supported"}, machine),
        attention.row_of("cudnn", {"case": CASES[2], "error": "not supported"}, machine),
    ]
    table = attention.table(rows, ["jmx", "cudnn"], CASES[:3])
    assert "| 10.0 (1.00 x) | 15.0 (1.50 x) |" in table
    assert attention.errors(rows).splitlines() == [
        f"cudnn: no sinks: 1 cases, {CASES[0]}",
        f"cudnn: not supported: 2 cases, {CASES[1]}",
    ]
    assert rows[0]["floor_us"] == pytest.approx(max(CASES[0].bytes / 4e6, CASES[0].flops / 7e8))


@pytest.mark.parametrize("arguments", [["--systems", "nothing"], ["--cases", "nothing"]])
def test_unknown_systems_and_cases_are_rejected(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        attention.main(arguments)
    assert "nothing" in capsys.readouterr().err
