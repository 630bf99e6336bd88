"""A build that takes as long as it is asked to, in a process of its own or not."""

import os
import pathlib
import time

from rich.console import Console

from jmx.ffi import build
from jmx.util.atomic_files import Kind

QUIET = Console(quiet=True)
# The arguments of a process: target, log, seconds. It prints whether it has built.
PROCESS = "import slow_build; print(slow_build.run(*sys.argv[1:3], float(sys.argv[3])))"


def run(target: str | os.PathLike[str], log: str | os.PathLike[str], seconds: float) -> bool:
    """Builds `target` unless it is there, and adds a line to `log` when it begins; returns whether it has built."""

    def make(folder: pathlib.Path) -> pathlib.Path:
        with open(log, "a") as file:
            file.write("begun\n")
        (folder / "part").write_text("half")
        time.sleep(seconds)
        made = folder / "whole"
        made.write_text("whole")
        return made

    def fault(path: pathlib.Path) -> str | None:
        return None if path.read_text() == "whole" else "it is not whole"

    return build.install(pathlib.Path(target), make, QUIET, Kind("a library", fault))
