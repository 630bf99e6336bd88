"""Each example runs, is short, and prints what it says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# All of them in one process, since starting one costs as much as most of them.
RUN_ALL = """
import contextlib, io, json, pathlib, runpy, sys
found = {}
for file in sys.argv[1:]:
    sys.argv = [file]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(file, run_name="__main__")
    found[pathlib.Path(file).stem] = out.getvalue()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each example prints, run in an empty directory."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN_ALL, *map(str, EXAMPLES)],
        cwd=tmp_path_factory.mktemp("examples"),
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_are_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) < 80


def test_every_example_runs(printed: dict[str, str]) -> None:
    assert printed.keys() == {file.stem for file in EXAMPLES}
    assert printed["generate"].startswith("Licensed under the Apache License")
    assert "tokens in the cache: [11 14  9]" in printed["batch"]
    assert "experts 0 and 1 alone: (64, 128)" in printed["custom_routing"]
    assert "expert_load.svg" in printed["expert_load"]


@pytest.mark.parametrize("name", ["several_gpus", "custom_backend"])
def test_results_are_those_of_the_other_way(name: str, printed: dict[str, str]) -> None:
    (difference,) = re.findall(r"largest difference from .*: ([\d.e+-]+)", printed[name])
    assert float(difference) <= 1e-5


def test_tokens_go_elsewhere_when_an_experts_bias_is_lowered(printed: dict[str, str]) -> None:
    before, after = (
        [int(count) for count in counts.split()] for counts in re.findall(r".*: \[(.*)\]", printed["shared_experts"])
    )
    assert sum(before) == sum(after) == 2 * 8 * 4
    assert after[0] == 0
    assert "output: (2, 8, 128)" in printed["shared_experts"]


def test_counts_of_a_custom_routing_add_up(printed: dict[str, str]) -> None:
    (counts,) = re.findall(r"tokens by expert: \[(.*)\]", printed["custom_routing"])
    assert sum(map(int, counts.split())) == 64 * 2
