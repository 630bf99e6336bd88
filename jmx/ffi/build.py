"""Building a shared library on the user's machine: steps side by side with progress, once, and all of it or nothing.

A file is built in a folder beside where it goes, and renamed when it is done. A lock lets one process at a time build
there; the next one finds it built.
"""

import contextlib
import hashlib
import os
import pathlib
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jmx.util.atomic_files import Kind, check_new, new_path

_TOLD_LINES = 30  # of what a compiler says when it fails


class BuildError(RuntimeError):
    """A build that cannot begin, or that failed; the text says what is missing, or what the compiler said."""


@dataclass(frozen=True)
class Missing:
    """Something that a build needs: what it is, and the command that gets it."""

    what: str
    command: str

    def __str__(self) -> str:
        return f"{self.what} is missing: {self.command}"


@dataclass(frozen=True)
class Step:
    """One command of a build, by a name to show while it runs."""

    name: str
    command: tuple[str, ...]


def fingerprint(*parts: object) -> str:
    """16 hexadecimal digits that differ where any of `parts` does, by its repr."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def install(
    target: pathlib.Path,
    make: Callable[[pathlib.Path], pathlib.Path],
    console: Console,
    kind: Kind,
    *,
    again: bool = False,
) -> bool:
    """Lets `make` build `target` in an empty folder beside it, unless it is there; returns whether it was built now.

    Args:
        make: builds in the folder that it is given, and returns the file, which is moved to `target`.
        console: is told when another process builds there, before it is waited for.
        kind: of what is built; nothing else is taken for it, or replaced.
        again: whether to build although it is there.

    Raises:
        FileExistsError: something else is there.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    check_new(target, kind, overwrite=True)
    with locked(target.parent / f".{target.name}.lock", console):
        if target.exists() and not again:
            return False
        with new_path(target, kind, overwrite=True) as new:
            make(new.parent).replace(new)
    return True


@contextlib.contextmanager
def locked(file: pathlib.Path, console: Console) -> Iterator[None]:
    """Alone among the processes that hold `file`, where the platform has such locks."""
    with contextlib.ExitStack() as stack:
        handle = os.open(file, os.O_RDWR | os.O_CREAT)
        stack.callback(os.close, handle)
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                console.print("another process builds it: waiting for that", markup=False)
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run_steps(title: str, steps: Sequence[Step], jobs: int, console: Console) -> None:
    """Runs `steps`, `jobs` at a time in their order, with a progress bar. All are ended when one fails, or on Ctrl-C.

    Raises:
        BuildError: a step failed; the text has its command and the last lines of what it said.
    """
    running: set[subprocess.Popen[str]] = set()
    guard, stopped = threading.Lock(), threading.Event()

    def run(step: Step) -> None:
        with guard:
            if stopped.is_set():
                return
            process = subprocess.Popen(
                step.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C comes to this process alone, which ends the step and all it started
            )
            running.add(process)
        told, _ = process.communicate()
        with guard:
            running.discard(process)
            failed = process.returncode != 0 and not stopped.is_set()  # and was not ended because another one failed
            if failed:
                stopped.set()
        if failed:
            last = "\n".join(told.splitlines()[-_TOLD_LINES:])
            raise BuildError(f"{step.name} failed ({process.returncode}): {' '.join(step.command)}\n{last}")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task(title, total=len(steps))
        futures = {pool.submit(run, step): step for step in steps}
        try:
            for done in as_completed(futures):
                done.result()
                progress.update(task, advance=1, description=f"{title}: {futures[done].name}")
        except BaseException:
            with guard:
                stopped.set()
                for process in running:
                    _end(process)
            raise


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a step and what it started, which is one session."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, 15)
