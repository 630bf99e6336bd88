"""Rows of a batch on a terminal or in a file: the text of one as it grows, of several one after the other."""

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

from jmx.cli.prompts import Prompt
from jmx.models.text.continuation import Continuation

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class RowOutput:
    """Shows rows while they are generated, in a context.

    The text of a single row is printed as it grows. Of several, each has a line with its number, and is printed when it
    and all before it have ended. Rows without text are printed as ids. A single prompt is shown on stderr.

    Args:
        prompts: of the rows.
        file: for the rows.
    """

    def __init__(self, prompts: Sequence[Prompt], file: TextIO):
        self._prompts, self._file = prompts, file
        self._ended: dict[int, Continuation] = {}
        self._printed = 0

    def __enter__(self) -> "RowOutput":
        if len(self._prompts) == 1:
            self._show_prompt(*self._prompts[0])
        return self

    def _show_prompt(self, ids: list[int], text: str | None) -> None:
        shown = f"{len(ids)} ids given, new ones: " if text is None else text
        if sys.stderr.isatty():
            shown = f"{_DIM}{shown}{_PLAIN}"
        follows = self._file is sys.stderr or (sys.stderr.isatty() and self._file.isatty())
        print(shown, end="" if follows else "\n", file=sys.stderr, flush=True)

    def step(self, number: int, row: Continuation, text: str) -> None:
        """Takes a row after its last token, and the text that this token completed."""
        if len(self._prompts) == 1:
            shown = text if self._prompts[number].text is not None else f"{row.ids[-1]} "
            self._print(shown, "" if row.finish_reason is None else "\n")
            return
        if row.finish_reason is not None:
            self._ended[number] = row
        while (ended := self._ended.pop(self._printed, None)) is not None:
            ids = self._prompts[self._printed].text is None
            self._printed += 1
            self._print(f"==> {self._printed} <==\n{' '.join(map(str, ended.ids)) if ids else ended.text}", "\n")

    def _print(self, text: str, end: str) -> None:
        print(text, end=end, file=self._file, flush=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt) and len(self._prompts) == 1:
            self._print("", "\n")
