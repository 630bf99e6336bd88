"""benchmarks/mesh_table.py: each token count in a process, one report and picture of all."""

import os
import pathlib
import subprocess
import sys

import pytest

from jmx.perf.roofline import DividedRow, Report

SCRIPT = pathlib.Path(__file__).parents[1] / "benchmarks" / "mesh_table.py"
pytestmark = pytest.mark.costly


def run(folder: pathlib.Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(folder), "--model", "small", "--mesh", "ep=2", "--repeats", "1", *flags]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_counts_are_measured_in_processes_and_joined(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path / "table", "--exchange", "gather,peer", "--tokens", "1,6")
    assert done.returncode == 0, done.stderr
    assert "2 of 2 compiled" in done.stdout
    rows = Report.load(str(tmp_path / "table" / "table.json")).rows
    assert all(isinstance(row, DividedRow) and row.error is None and row.us for row in rows)
    found = [(row.tokens, row.exchange) for row in rows if isinstance(row, DividedRow)]
    assert found == [(1, "gather"), (6, "gather")]  # CPUs have no `peer`
    assert "</svg>" in (tmp_path / "table" / "table.svg").read_text()


def test_a_process_that_fails_is_named(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path / "table", "--exchange", "peer", "--tokens", "1")
    assert done.returncode == 1
    assert "1 tokens: exit code 1, see 1.log" in done.stdout
    assert "must name one that runs with 1 tokens a device" in (tmp_path / "table" / "1.log").read_text()
    assert not (tmp_path / "table" / "table.json").exists()
