"""The suite's own configuration: which warnings are errors."""

import pathlib
import re
import subprocess
import sys

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


def test_a_plugin_that_warns_stops_nothing_and_a_test_that_does_fails(tmp_path):
    (tmp_path / "pytest_loud.py").write_text(PLUGIN)
    (tmp_path / "test_two.py").write_text(TESTS)
    options = ["-p", "pytest_loud", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--noconftest"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_two.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert re.search(r"1 failed, 1 passed", done.stdout), done.stdout + done.stderr
    assert "::test_that_warns - UserWarning: a test's own" in done.stdout
