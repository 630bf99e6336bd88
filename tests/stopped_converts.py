"""Runs `jmx convert` in many processes, each of which gets a signal at a stage: python stopped_converts.py DIR CASES

One process imports jmx and forks one for each case. CASES is a list in JSON of those of `cases()` that run. Rounding is
numpy's, so that none of them has to start XLA. It prints a line of JSON a case: how the conversion ended, what it left,
and after SIGKILL how the next one went.
"""

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jmx import cli
from jmx.checkpoint.quantizing import file_list, writer
from jmx.numerics.formats import BlockScaled, Format
from jmx.util.atomic_files import parts, renaming, writing

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)

# Stage -> module and function, which call of it, and whether the signal comes before or after.
STAGES: dict[str, tuple[Any, str, int, str]] = {
    "config": (writer, "_read_config", 1, "before"),
    "part": (parts, "_machine", 1, "before"),
    "locked": (parts.fcntl, "flock", 1, "after"),
    "second part": (parts.fcntl, "flock", 2, "after"),
    "copy": (writer.shutil, "copyfile", 1, "after"),
    "first matrix": (writer, "quantize", 1, "before"),
    "last matrix": (writer, "quantize", 3, "after"),
    "list": (file_list, "write_list", 1, "after"),
    "rename": (writing, "_rename_new", 1, "before"),
    "renamed": (renaming, "rename_new", 1, "after"),
    "report renamed": (renaming, "rename_new", 2, "after"),
    "exchange": (renaming, "exchange", 1, "before"),
    "exchanged": (renaming, "exchange", 1, "after"),
    "removal": (parts.shutil, "rmtree", 1, "before"),
    "removed": (parts.shutil, "rmtree", 1, "after"),
}
OVERWRITING = ("config", "last matrix", "exchange", "exchanged", "removal", "removed")
ONLY_OVERWRITING = ("exchange", "exchanged")


def cases() -> Iterator[tuple[str, int, bool]]:
    for overwrite in (False, True):
        for stage in OVERWRITING if overwrite else [stage for stage in STAGES if stage not in ONLY_OVERWRITING]:
            for number in SIGNALS:
                yield stage, number, overwrite


def quantize(weight: np.ndarray, format: Format) -> BlockScaled:
    assert format.name in ("fp8_channel", "int8_channel")
    scales = np.max(np.abs(weight), axis=1, keepdims=True) / np.float32(100)
    return BlockScaled((weight / scales).astype(format.element_dtype), scales.astype(format.scale_dtype))


def stop_at(stage: str, number: int) -> None:
    module, name, count, when = STAGES[stage]
    function: Callable[..., Any] = getattr(module, name)
    calls = []

    def wrapped(*arguments: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == count and when == "before":
            os.kill(os.getpid(), number)
        result = function(*arguments, **options)
        if len(calls) == count and when == "after":
            os.kill(os.getpid(), number)
        return result

    setattr(module, name, wrapped)


def convert(source: Path, folder: Path, *flags: str, stop: tuple[str, int] | None = None) -> tuple[int, str]:
    """Runs a conversion in a new process: its exit code (negative: the signal) and stderr."""
    log = folder.with_name(f"{folder.name}.log")
    if (child := os.fork()) == 0:
        handle = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        if stop is not None:
            stop_at(*stop)
        code = cli.main(["convert", str(source), str(folder / "out"), "--report", str(folder / "errors.json"), *flags])
        sys.stderr.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), log.read_text()


def main(directory: Path, chosen: list[tuple[str, int, bool]]) -> None:
    warnings.filterwarnings("ignore", ".*fork.*")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a shell: tests may run where both are ignored
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    writer.quantize = quantize
    writer.jnp = np
    source = directory / "in"
    for index, (stage, number, overwrite) in enumerate(chosen):
        folder = directory / str(index)
        folder.mkdir()
        if overwrite:
            assert convert(source, folder, "--quantize", "int8_channel")[0] == 0
        flags = ["--quantize", "fp8_channel", *(["--overwrite"] if overwrite else [])]
        code, reported = convert(source, folder, *flags, stop=(stage, number))
        left = {str(path.relative_to(folder)): path.read_bytes().hex() for path in folder.rglob("*") if path.is_file()}
        parts_left = sorted(path.name for path in folder.iterdir() if path.name.startswith("."))
        again, reported_again = None, ""
        if number == signal.SIGKILL:
            again, reported_again = convert(source, folder, "--quantize", "fp8_channel", "--overwrite")
        found = {
            "stage": stage,
            "signal": number,
            "overwrite": overwrite,
            "code": code,
            "reported": reported,
            "left": left,
        }
        found |= {"parts": parts_left, "again": again, "reported_again": reported_again}
        print(json.dumps(found | {"after": sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
