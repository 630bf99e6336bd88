"""Files and directories that appear whole, or not at all."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_json(file: Path, contents: Any) -> None:
    """Writes JSON as people read it."""
    file.write_text(json.dumps(contents, indent=2) + "\n")


@contextlib.contextmanager
def new_path(path: str | os.PathLike[str], *, replace: bool = False) -> Iterator[Path]:
    """Something that appears at `path` whole, or not at all: make it at the path given, which is moved there.

    What is given lies in a new directory beside `path`, so that moving is renaming; that goes whatever happens. With
    `replace`, what is at `path` stays until then.

    Raises:
        FileExistsError: there is something at `path`, and not `replace`.
        FileNotFoundError: the directory that should hold it does not exist.
    """
    path = Path(path).absolute()
    if os.path.lexists(path) and not replace:
        raise FileExistsError(f"{path} must not exist yet: nothing is overwritten")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} must be in a directory that exists")
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    try:
        yield temporary / path.name
        old = temporary / f"{path.name}.old"
        if replace and os.path.lexists(path):
            path.rename(old)
        try:
            (temporary / path.name).rename(path)
        except BaseException:
            if os.path.lexists(old):
                old.rename(path)
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
