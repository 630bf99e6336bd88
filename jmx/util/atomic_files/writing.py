"""Writing beside a place, and renaming what is complete."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jmx.util.atomic_files import parts, renaming
from jmx.util.atomic_files.paths import Kind, check_new, named_errors, place


@contextlib.contextmanager
def new_path(path: str | os.PathLike[str], kind: Kind | None = None, *, overwrite: bool = False) -> Iterator[Path]:
    """Something that appears at `path` whole, or not at all: make it at the path given, which is renamed.

    Args:
        path: its place, in a directory that exists.
        kind: of what is made, if an earlier result may be replaced.
        overwrite: whether one may. It stays until the new one is complete.

    Raises:
        FileExistsError: there is something at `path` that is not to be replaced: before anything is made, or when it is
            complete, if it appeared or changed meanwhile.
        FileNotFoundError: the directory that should hold it does not exist.
    """
    path = place(path)
    check_new(path, kind, overwrite=overwrite)
    parts.remove_leftovers(path)
    check_new(path, kind, overwrite=overwrite)  # of what may have come back
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
    """Writes a file: all of it or nothing. One of the same `kind` is replaced. Raises what `new_path` raises."""
    with new_path(path, kind, overwrite=kind is not None) as new, named_errors(new), new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_json(file: Path, contents: Any) -> None:
    """Writes JSON as people read it, into a directory that is being made."""
    with named_errors(file):
        file.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def set_aside(path: Path, beside: Path | None = None) -> Path:
    """Gives what is at `path` a name that is free, which it returns: NAME.old, NAME.2.old ..., beside another path."""
    beside = beside or path
    number = 1
    while True:
        aside = beside.with_name(f"{beside.name}.old" if number == 1 else f"{beside.name}.{number}.old")
        try:
            renaming.rename_new(path, aside)
            return aside
        except FileExistsError:
            number += 1


# Renaming what is complete


def _rename_new(new: Path, path: Path) -> None:
    try:
        renaming.rename_new(new, path)
    except FileExistsError:
        raise FileExistsError(f"{path} must not exist yet, but appeared while it was being written: it stays") from None


def _replace(part: Path, path: Path, kind: Kind, earlier: os.stat_result) -> None:
    """Puts what is new at `path`, and what is there, which must be what was there `earlier`, into `part`.

    That is checked again once it has lost its name, so that nothing can be added to it in between.
    """

    def check(place: Path) -> None:
        if not os.path.samestat(place.lstat(), earlier):
            raise FileExistsError(f"{path} must stay as it is while it is being replaced, but changed: it stays")
        kind.check(place)

    check(path)
    new, old = part / parts.NEW / path.name, part / parts.OLD / path.name
    if renaming.exchange(new, path):
        try:
            check(new)
        except BaseException:
            try:
                renaming.exchange(new, path)
            except OSError:  # what was put there is gone
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
    """Gives back its name, or one that is free where that has been taken."""
    try:
        renaming.rename_new(old, path)
    except FileExistsError:
        set_aside(old, path)
