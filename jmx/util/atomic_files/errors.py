"""Errors of the system that name their file."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def named_errors(file: Path) -> Iterator[None]:
    """Errors of the system, such as a full disk, with the name of the file, which those of an open file lack."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(file)) from error
