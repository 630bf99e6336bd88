"""Builds a shared library on the user's machine: steps in parallel, with progress, atomically, and only once.

A file is built in a folder beside its target, and renamed when it is complete. A lock allows one process at a time to
build there; the next one finds the result.
"""

import contextlib
import hashlib
import os
import pathlib
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jmx.util.atomic_files import Kind, check_new, new_path

_SHOWN_LINES = 30  # of a failed compiler's output


class BuildError(RuntimeError):
    """A build cannot start, or failed; the message has what is missing, or the compiler's output."""


@dataclass(frozen=True)
class Missing:
    """A missing dependency of a build, and the command that installs it."""

    what: str
    command: str

    def __str__(self) -> str:
        return f"{self.what} is missing: {self.command}"


@dataclass(frozen=True)
class Step:
    """One command of a build, and the name to show while it runs."""

    name: str
    command: tuple[str, ...]


def fingerprint(*parts: object) -> str:
    """16 hexadecimal digits of a hash of the reprs of `parts`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def install(
    target: pathlib.Path,
    make: Callable[[pathlib.Path], pathlib.Path],
    console: Console,
    kind: Kind,
    *,
    again: bool = False,
) -> bool:
    """Builds `target` in an empty folder beside it, unless it exists; returns whether it was built now.

    Args:
        make: builds in the folder that it is given, and returns the file, which is moved to `target`.
        console: where waiting for another process that builds the same target is reported.
        kind: the kind of `target`; an existing file of another kind is neither used nor replaced.
        again: whether to build even if `target` exists.

    Raises:
        FileExistsError: `target` exists and is of another kind.
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
    """Holds an exclusive lock of `file` among processes, if the platform has such locks."""
    with contextlib.ExitStack() as stack:
        handle = os.open(file, os.O_RDWR | os.O_CREAT)
        stack.callback(os.close, handle)
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                console.print("another process builds it: waiting for it to finish", markup=False)
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run_steps(title: str, steps: Sequence[Step], jobs: int, console: Console) -> None:
    """Runs `steps` in order, `jobs` in parallel, with a progress bar. If one fails, or on Ctrl-C, all are terminated.

    Raises:
        BuildError: a step failed; the message has its command and the last lines of its output.
    """
    running: set[subprocess.Popen[str]] = set()
    lock, stopped = threading.Lock(), threading.Event()

    def run(step: Step) -> None:
        with lock:
            if stopped.is_set():
                return
            process = subprocess.Popen(
                step.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # only this process receives Ctrl-C; it terminates the step and its children
            )
            running.add(process)
        output, _ = process.communicate()
        with lock:
            running.discard(process)
            failed = process.returncode != 0 and not stopped.is_set()  # not terminated because another step failed
            if failed:
                stopped.set()
        if failed:
            last = "\n".join(output.splitlines()[-_SHOWN_LINES:])
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
            with lock:
                stopped.set()
                for process in running:
                    _terminate(process)
            raise


def _terminate(process: subprocess.Popen[str]) -> None:
    """Terminates a step and its children, which are one session."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGTERM)
