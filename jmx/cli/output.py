"""Output of commands: exit codes, printing of results and errors, and a check of files to write."""

import contextlib
import json
import os
import pathlib
import shutil
import stat
import sys
from typing import Any

_WIDTH_OF_FILES, _LEAST_WIDTH = 140, 40  # characters of a line, if neither a terminal nor COLUMNS gives it
EXIT_OK, EXIT_NO, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
EXIT_SIGNAL = 128  # and the number of the signal that ended the command


def fail(error: Exception, code: int) -> int:
    """Prints the error as one line on stderr, and returns `code`."""
    to_stderr(f"jmx: error: {' '.join(str(error).split()) or type(error).__name__}")
    return code


def to_stderr(line: str) -> None:
    """Prints a line on stderr, if it is open."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def show(*results: Any) -> None:
    from rich.console import Console

    width = shutil.get_terminal_size((_WIDTH_OF_FILES, 0)).columns
    console = Console(width=max(width, _LEAST_WIDTH), highlight=False)
    for result in results:
        console.print(result)


def print_json(values: Any) -> None:
    print(json.dumps(values, indent=1))


def check_directories(*paths: str | None) -> None:
    """Raises ValueError for a file that cannot be written, before the work starts.

    An existing file may be replaced if it is a regular file, unlike a device such as /dev/null.
    """
    for path in (path for path in paths if path is not None):
        if (fault := _writing_fault(path)) is not None:
            raise ValueError(f"{path or repr(path)} cannot be written: {fault}")


def _writing_fault(path: str) -> str | None:
    directory = pathlib.Path(path).absolute().parent
    if not path:
        return "it is not the name of a file"
    if not os.path.isdir(directory):
        return "its directory does not exist"
    if not os.access(directory, os.W_OK | os.X_OK):
        return "its directory may not be written to"
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # a name that is too long, or has a null character
        return getattr(error, "strerror", None) or str(error)
    if stat.S_ISREG(mode):
        return None
    return "it is a directory" if stat.S_ISDIR(mode) else "it is not a regular file"
