"""The installed command before the package is imported."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SENDS_ITSELF_CTRL_C = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
PRINTS_AND_SENDS = """
import os, signal

def main():
    print("runs", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
"""
IGNORES = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"


def run(folder: Path, package: str, cli: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """The command with another package in place of `jmx`."""
    (folder / "jmx").mkdir()
    (folder / "jmx/__init__.py").write_text(package)
    (folder / "jmx/cli.py").write_text(cli)
    program = f"{before}import sys\nsys.path[:0] = {[str(folder), str(ROOT)]}\nfrom jmx_command import main\nmain()\n"
    alone = [sys.executable, "-I", "-S", "-c", program]  # -S: without the packages that are installed, jmx among them
    return subprocess.run(alone, capture_output=True, text=True, check=False)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_while_modules_are_imported_leaves_no_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, SENDS_ITSELF_CTRL_C, "def main(): pass\n")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_is_an_exception_once_the_command_runs(tmp_path: Path) -> None:
    done = run(tmp_path, "", PRINTS_AND_SENDS)
    assert done.stdout == "runs\n"
    assert "KeyboardInterrupt" in done.stderr


def test_ctrl_c_stays_ignored_where_it_was(tmp_path: Path) -> None:
    done = run(tmp_path, SENDS_ITSELF_CTRL_C, PRINTS_AND_SENDS, IGNORES)
    assert (done.returncode, done.stdout, done.stderr) == (0, "runs\n", "")
