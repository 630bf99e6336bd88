"""Exit codes of commands, and printing of results and errors."""

import contextlib
import json
import shutil
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
