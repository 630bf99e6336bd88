"""The suite's own configuration: which warnings are errors, which cases are drawn, which versions are the oldest."""

import pathlib
import re
import subprocess
import sys

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


@pytest.mark.parametrize("seed", ["1", "2"])
def test_one_case_of_each_test_and_backend_is_drawn_and_each_format_in_turn(tmp_path, seed, monkeypatch):
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_four.py").write_text(DRAWN)
    monkeypatch.setenv("JMX_TEST_SEED", seed)
    monkeypatch.delenv("JMX_TEST_ALL", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JMX_TEST_SHAPES", "0")
    options = ["-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "--collect-only", "-q"]

    def collected(*more):
        command = [sys.executable, "-m", "pytest", *options, *more, "test_four.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return re.findall(r"::(\w+)(?:\[(.*)\])?", done.stdout)

    drawn = collected("--drawn")
    assert sorted(name for name, _ in drawn) == [
        "test_four",
        "test_one",
        "test_one",
        "test_three",
        "test_three",
        "test_two",
    ]
    words = {word for _, case in drawn for word in case.split("-")}
    assert words >= {"xla", "cpu", "mxfp4", "nvfp4", "mxint4"}
    assert len(collected()) == 6 + 2 + 2 + 1


def test_a_third_of_a_files_costly_tests_is_drawn_others_in_other_runs(tmp_path, monkeypatch):
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_costly.py").write_text(COSTLY)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JMX_TEST_SHAPES", "0")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"]
    command += ["--rootdir", tmp_path, "--collect-only", "-q", "--drawn", "test_costly.py"]
    drawn = set()
    for seed in ("1", "2"):
        monkeypatch.setenv("JMX_TEST_SEED", seed)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        found = re.findall(r"::(\w+)", done.stdout)
        assert len(found) == 3, done.stdout + done.stderr
        drawn.add(tuple(sorted(found)))
    assert len(drawn) > 1


def test_the_oldest_versions_are_those_of_pyproject():
    extras = {"test": ["jmx[hf]", "psutil", "pytest>=8.2"], "hf": ["tokenizers>=0.21"]}
    found = [*oldest.requirements(["jax>=0.11", "jmx[test]"], extras)]
    assert found == ["jax==0.11", "tokenizers==0.21", "psutil", "pytest==8.2"]
