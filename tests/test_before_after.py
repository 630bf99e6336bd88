"""benchmarks/before_after.py: two checkouts take turns, each with its own jmx."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "before_after.py"
TINY = ROOT / "tests" / "data" / "gpt_oss_tiny"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=300)


@pytest.mark.costly
@pytest.mark.parametrize("case", ["layer:small:3", f"decode:{TINY}:2", f"prefill:{TINY}:9"])
def test_both_are_timed_in_each_round(case, tmp_path):
    ended = run(ROOT, ROOT, "--cases", case, "--layers", 2, "--rounds", 3, "--json", tmp_path / "new.json")
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(rf"{case}: [\d.]+ -> [\d.]+ us, [\d.]+ \([\d.]+ to [\d.]+\)\n", ended.stdout)
    (row,) = json.loads((tmp_path / "new.json").read_text())["rows"]
    assert row["case"] == case
    assert [len(pair) for pair in row["seconds"]] == [2, 2, 2]
    assert all(seconds > 0 for pair in row["seconds"] for seconds in pair)


def test_each_process_imports_the_jmx_of_its_checkout(tmp_path):
    package = tmp_path / "jmx"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the jmx of the other checkout')")
    ended = run(tmp_path, ROOT, "--cases", "layer:small:3")
    assert "the jmx of the other checkout" in ended.stderr
    assert f"the process of {tmp_path} ended (exit code 1)" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ((ROOT, "--cases", "layer:small:3"), "must be two checkouts"),
        ((ROOT, "nowhere", "--cases", "layer:small:3"), r"TREE \(=\['nowhere'\]\) must be a checkout of jmx"),
        ((ROOT, ROOT, "--cases", "layers:small:3"), r"case \(='layers:small:3'\) must be KIND:MODEL:N"),
        ((ROOT, ROOT, "--cases", "layer:small:0"), "N at least 1"),
        ((ROOT, ROOT, "--cases", "layer:small:3", "--rounds", 1), r"--rounds \(=1\) must be at least 2"),
        ((ROOT, ROOT, "--cases", "layer:small:3", "--layers", 0), r"--layers \(=0\) must be at least 1"),
        ((ROOT, ROOT, "--cases", "layer:small:3", "--json", SCRIPT), "must not exist"),
    ],
)
def test_a_wrong_argument_ends_it_before_anything_is_timed(arguments, rule):
    ended = run(*arguments)
    assert ended.returncode == 2
    assert re.search(rule, ended.stderr)
    assert not ended.stdout
