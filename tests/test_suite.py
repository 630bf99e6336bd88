"""The suite's own configuration: which warnings are errors, which cases are drawn, which versions are the oldest."""

import collections
import functools
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import oldest
import pytest

ROOT = pathlib.Path(__file__).parents[1]
PLUGIN = """import warnings
from pytest import PytestWarning

def pytest_configure():
    warnings.warn(PytestWarning("switched off beside another plugin"))
"""
TESTS = """import warnings

def test_in_silence():
    pass

def test_that_warns():
    warnings.warn("a test's own")
"""


def test_a_plugin_that_warns_stops_nothing_and_a_test_that_does_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # pytest cuts its summary, by how long paths are
    (tmp_path / "pytest_loud.py").write_text(PLUGIN)
    (tmp_path / "test_two.py").write_text(TESTS)
    options = ["-p", "pytest_loud", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--noconftest"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_two.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert re.search(r"1 failed, 1 passed", done.stdout), done.stdout + done.stderr
    assert "::test_that_warns - UserWarning: a test's own" in done.stdout


DRAWN = """import pytest

@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "mxint4"])
@pytest.mark.parametrize("backend", ["xla", "cpu"])
def test_one(backend, format):
    pass

@pytest.mark.sampled(2)
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "mxint4"])
def test_two(format):
    pass

@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.devices(10**6)), 2])
def test_three(n):
    pass

def test_four():
    pass

@pytest.mark.every_case
@pytest.mark.parametrize("n", [1, 2, 3])
def test_five(n):
    pass
"""
COSTLY = """import pytest

pytestmark = pytest.mark.costly
""" + "".join(
    f"""
@pytest.mark.parametrize("n", [1, 2])
def test_{number}(n):
    pass
"""
    for number in range(7)
)
FEW = 5  # costly tests of a run here, where a third of those of one file are three


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[tuple[str, str, str]]]:
    """Collects the tests above with a seed and options, in a process: file, test and case of each that would run."""
    folder = tmp_path_factory.mktemp("suite")
    text, replaced = re.subn(r"^COSTLY = \d+$", f"COSTLY = {FEW}", (ROOT / "tests/conftest.py").read_text(), flags=re.M)
    assert replaced == 1
    (folder / "conftest.py").write_text(text)
    (folder / "test_drawn.py").write_text(DRAWN)
    for name in ("a", "b", "c"):
        (folder / f"test_costly_{name}.py").write_text(COSTLY)
    options = ["-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", folder, "--collect-only", "-q"]

    @functools.cache
    def collect(seed: int, *more: str) -> list[tuple[str, str, str]]:
        environment = {name: value for name, value in os.environ.items() if name != "JMX_TEST_ALL"}
        environment |= {"JMX_TEST_SEED": str(seed), "JAX_PLATFORMS": "cpu", "JMX_TEST_SHAPES": "0"}
        command = [sys.executable, "-m", "pytest", *options, *more, "."]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        found = re.findall(r"(\w+)\.py::(\w+)(?:\[(.*)\])?", done.stdout)
        assert found, done.stdout + done.stderr
        return found

    return collect


@pytest.mark.costly
@pytest.mark.parametrize("seed", [1, 2])
def test_one_case_of_each_test_and_backend_is_drawn_and_each_format_in_turn(seed, collected):
    drawn = [(test, case) for file, test, case in collected(seed, "--drawn") if file == "test_drawn"]
    assert sorted(name for name, _ in drawn) == [
        *["test_five"] * 3,
        "test_four",
        "test_one",
        "test_one",
        "test_three",
        "test_three",
        "test_two",
    ]
    words = {word for _, case in drawn for word in case.split("-")}
    assert words >= {"xla", "cpu", "mxfp4", "nvfp4", "mxint4"}
    assert sum(file == "test_drawn" for file, *_ in collected(1)) == 6 + 2 + 2 + 1 + 3


@pytest.mark.costly
def test_costly_tests_are_a_third_of_a_file_and_few_in_all_and_others_in_other_runs(collected):
    runs = []
    for seed in (1, 2):
        drawn = [(file, test) for file, test, _ in collected(seed, "--drawn") if file != "test_drawn"]
        assert len(drawn) == len({*drawn}) == FEW  # one case of each
        counts = collections.Counter(file for file, _ in drawn)
        assert sorted(counts.values()) == [1, 2, 2]  # none has a third one before each has a second one
        runs.append(sorted(drawn))
    assert runs[0] != runs[1]


def test_the_oldest_versions_are_those_of_pyproject():
    extras = {"test": ["jmx-moe[hf]", "psutil", "pytest>=8.2"], "hf": ["tokenizers>=0.21"]}
    found = [*oldest.requirements(["jax>=0.11", "jmx-moe[test]"], extras)]
    assert found == ["jax==0.11", "tokenizers==0.21", "psutil", "pytest==8.2"]
