"""Temporary directories for results that are being written, and removal of those that killed processes left.

The directory `.NAME.xxxxxxxx.part`, beside the future NAME, contains

    lock        the name and the machine of the writer, which holds a lock on this file (flock) while it runs.
    new/NAME    the result that is being written.
    old/NAME    the result that is being replaced, if the file system cannot exchange two names in one step.

The writer removes it when it is done or fails. A directory whose lock is free, or that is empty and has no lock, was
left by a killed process: the next process that writes to the same path removes it, with a warning.
"""

import contextlib
import json
import os
import platform
import re
import secrets
import shutil
import stat
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from jmx.util.atomic_files import renaming
from jmx.util.atomic_files.paths import named_errors

try:
    import fcntl
except ImportError:  # no such locks on this platform: leftovers cannot be recognized
    fcntl = None

_SCHEMA = "jmx.part/1"
_LOCK, NEW, OLD = "lock", "new", "old"
_NEW_LOCK = "lock.new"  # while it is being made
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@contextlib.contextmanager
def part(path: Path) -> Iterator[Path]:
    """A new directory beside `path`, for this process only, removed when the context ends."""
    made, lock = _make(path)
    try:
        yield made
    finally:
        try:
            _remove(made)
        finally:
            os.close(lock)


def _make(path: Path) -> tuple[Path, int]:
    """A new directory and its lock, which is held if the platform and the file system have locks."""
    while True:
        made = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        with contextlib.ExitStack() as stack:
            os.mkdir(made, 0o700)
            stack.callback(_remove, made)
            with contextlib.suppress(FileNotFoundError):  # another process removed it as a leftover
                lock = os.open(made / _NEW_LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
                stack.callback(os.close, lock)
                with named_errors(made / _NEW_LOCK):
                    os.write(lock, json.dumps({"schema": _SCHEMA, "target": path.name, "machine": _machine()}).encode())
                if _locked(lock):
                    (made / _NEW_LOCK).rename(made / _LOCK)  # it must be locked before other processes find it
                stack.pop_all()
                return made, lock


def _locked(lock: int) -> bool:
    """Takes a lock; False if the platform has none: then no process takes the directory for a leftover."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _machine() -> dict[str, str]:
    """The machine and its boot, which containers share. A free lock means a dead process only on the same machine: on
    network file systems machines may not see each other's locks."""
    try:
        boot = _BOOT.read_text().strip()
    except OSError:
        boot = ""
    return {"host": platform.node(), "boot": boot}


def _remove(part: Path) -> None:
    """Removes a directory of `part` completely, even if interrupted; the lock last."""
    interrupted = None
    for _ in range(10):
        try:
            for name in (NEW, OLD):
                shutil.rmtree(part / name, ignore_errors=True)
            if not any(os.path.lexists(part / name) for name in (NEW, OLD)):
                for name in (_LOCK, _NEW_LOCK):
                    (part / name).unlink(missing_ok=True)
                part.rmdir()
            break
        except OSError:
            break
        except KeyboardInterrupt as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


def remove_leftovers(path: Path) -> None:
    """Removes directories that killed processes left beside `path`. A UserWarning names each."""
    if fcntl is None:
        return
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.part")
    try:
        found = sorted(entry.path for entry in os.scandir(path.parent) if pattern.fullmatch(entry.name))
    except OSError:  # a directory may be writable but not readable
        return
    for part in map(Path, found):
        with contextlib.suppress(OSError):
            if _is_unfinished(part):
                _remove_unfinished(part, path)
                continue
            with _taken(part, path.name) as machine:
                if machine is not None:
                    _remove_leftover(part, path, machine)


def _is_unfinished(part: Path) -> bool:
    """Whether a directory is empty, as at the beginning and at the end of `part`."""
    return stat.S_ISDIR(part.lstat().st_mode) and {*os.listdir(part)} <= {_NEW_LOCK}


def _remove_unfinished(part: Path, path: Path) -> None:
    """Removes such a directory; a running writer makes another. OSError if the writer has continued meanwhile."""
    assert fcntl is not None
    if os.path.lexists(part / _NEW_LOCK):
        lock = os.open(part / _NEW_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(lock)
            if not stat.S_ISREG(status.st_mode) or (status.st_size and _note(lock, path.name) is None):
                return
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (part / _NEW_LOCK).unlink()
        finally:
            os.close(lock)
    part.rmdir()
    _warn_of_removed(part, path)


@contextlib.contextmanager
def _taken(part: Path, name: str) -> Iterator[dict[str, str] | None]:
    """Holds the lock of a leftover directory and gives its writer's machine; None if it is not a leftover."""
    assert fcntl is not None
    if not stat.S_ISDIR(part.lstat().st_mode) or {*os.listdir(part)} - {_LOCK, NEW, OLD}:
        yield None
        return
    lock = os.open(part / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        note = _note(lock, name)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its writer runs
            note = None
        yield note if note is not None and os.path.samestat(os.fstat(lock), (part / _LOCK).lstat()) else None
    finally:
        os.close(lock)


def _note(lock: int, name: str) -> dict[str, str] | None:
    """The machine in a lock file, if it is that of a directory for `name`."""
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        return None
    try:
        match json.loads(os.read(lock, 1 << 16)):
            case {"schema": schema, "target": target, "machine": {"host": str(), "boot": str()} as machine}:
                return machine if (schema, target) == (_SCHEMA, name) else None
    except ValueError:
        pass
    return None


def _remove_leftover(part: Path, path: Path, machine: Mapping[str, str]) -> None:
    here = _machine()
    if machine["host"] != here["host"] and (not here["boot"] or machine["boot"] != here["boot"]):
        _warn(f"{part} is of another machine, {machine['host']!r}: remove it if no process writes {path} there")
        return
    old, new = part / OLD / path.name, part / NEW / path.name
    if os.path.lexists(old) and os.path.lexists(new):  # killed between two renames: the old result has no other name
        try:
            renaming.rename_new(old, path)
        except FileExistsError:
            _warn(f"{part} holds what a process that was killed had not yet replaced: it stays")
            return
        _warn(f"{path} is back, which a process that was killed had not yet replaced")
    _remove(part)
    if not part.exists():
        _warn_of_removed(part, path)


def _warn_of_removed(part: Path, path: Path) -> None:
    _warn(f"removed {part}, which a process left that was killed while it wrote {path}")


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)
