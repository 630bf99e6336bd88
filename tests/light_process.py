"""Processes for tests of what needs no jax: importing it would take longer than all else that they do."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The package's own __init__ imports jax. In its place is an empty module, and importing jax is an error.
WITHOUT_JAX = f"""
import sys, types
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
sys.modules["jax"] = None
sys.modules["jmx"] = types.ModuleType("jmx")
sys.modules["jmx"].__path__ = [{str(ROOT / "jmx")!r}]
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Runs `code` with `arguments` in a process, whose standard input and output are pipes."""
    command = [sys.executable, "-c", WITHOUT_JAX + code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
