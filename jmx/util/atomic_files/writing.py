"""Writing to a temporary path beside the final one, and renaming the complete result."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jmx.util.atomic_files import parts, renaming
from jmx.util.atomic_files.paths import Kind, absolute, check_new, named_errors


@contextlib.contextmanager
def new_path(path: str | os.PathLike[str], kind: Kind | None = None, *, overwrite: bool = False) -> Iterator[Path]:
    """Context for writing a file or directory that appears at `path` whole or not at all. Write it to the path yielded.

    Args:
        path: the final path, in an existing directory.
        kind: the kind of result, if an earlier one may be replaced.
        overwrite: whether an earlier result may be replaced. It is kept until the new one is complete.

    Raises:
        FileExistsError: `path` exists and may not be replaced; raised at the beginning, or at the end if it appeared or
            changed meanwhile.
        FileNotFoundError: the directory of `path` does not exist.
    """
    path = absolute(path)
    check_new(path, kind, overwrite=overwrite)
    parts.remove_leftovers(path)
    check_new(path, kind, overwrite=overwrite)  # the removal may have restored an earlier result
    earlier = path.lstat() if os.path.lexists(path) else None
    with parts.part(path) as part:
        new = part / parts.NEW / path.name
        new.parent.mkdir()
        yield new
        if kind is not None and earlier is not None and os.path.lexists(path):
            _replace(part, path, kind, earlier)
        else:
            _rename_new(new, path)


def write(path: str | os.PathLike[str], content: bytes, kind: Kind | None = None) -> None:
    """Writes a file, all of it or nothing. A file of the same `kind` is replaced. Raises the errors of `new_path`."""
    with new_path(path, kind, overwrite=kind is not None) as new, named_errors(new), new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_json(file: Path, contents: Any) -> None:
    """Writes indented JSON into a directory that is not yet complete."""
    with named_errors(file):
        file.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def set_aside(path: Path, beside: Path | None = None) -> Path:
    """Renames `path` to a free name, which is returned: NAME.old, NAME.2.old ..., beside `path` or another path."""
    beside = beside or path
    number = 1
    while True:
        aside = beside.with_name(f"{beside.name}.old" if number == 1 else f"{beside.name}.{number}.old")
        try:
            renaming.rename_new(path, aside)
            return aside
        except FileExistsError:
            number += 1


# Renaming the complete result


def _rename_new(new: Path, path: Path) -> None:
    try:
        renaming.rename_new(new, path)
    except FileExistsError:
        raise FileExistsError(f"{path} must not exist yet, but appeared while it was being written: it stays") from None


def _replace(part: Path, path: Path, kind: Kind, earlier: os.stat_result) -> None:
    """Moves the new result to `path`, and the one there, which must be the `earlier` one, into `part`.

    The latter is checked again after it has been moved, so that it cannot have changed in between.
    """

    def check(found: Path) -> None:
        if not os.path.samestat(found.lstat(), earlier):
            raise FileExistsError(f"{path} must stay as it is while it is being replaced, but changed: it stays")
        kind.check(found)

    check(path)
    new, old = part / parts.NEW / path.name, part / parts.OLD / path.name
    if renaming.exchange(new, path):
        try:
            check(new)
        except BaseException:
            try:
                renaming.exchange(new, path)
            except OSError:  # the new result was removed from `path`
                _put_back(new, path)
            raise
        return
    old.parent.mkdir()
    path.rename(old)
    try:
        check(old)
        _rename_new(new, path)
    except BaseException:
        _put_back(old, path)
        raise


def _put_back(old: Path, path: Path) -> None:
    """Moves the old result back to its name or, if that is taken, to a free one."""
    try:
        renaming.rename_new(old, path)
    except FileExistsError:
        set_aside(old, path)
