"""A progress bar on stderr that counts bytes, and readers that advance one."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from jmx.util.checks import check_bool, check_int


@contextlib.contextmanager
def progress_bar(description: str, total: int, enabled: bool) -> Iterator[Callable[[int], object]]:
    """A bar on stderr that counts to `total` bytes. Yields the function to call with the number of bytes done.

    Nothing is shown if `enabled` is false or stderr is not a terminal.
    """
    if not (enabled and sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)


class CountsBytes:
    """A reader that calls `_advance` with the bytes of each tensor that it has read."""

    _advance: Callable[[int], object] = staticmethod(lambda _: None)

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        raise NotImplementedError

    @contextlib.contextmanager
    def progress(self, enabled: bool = True, total: int | None = None) -> Iterator[None]:
        """A context in which a bar on stderr (if that is a terminal) counts the bytes that are read.

        Args:
            enabled: whether to show the bar.
            total: bytes at which the bar is full; None: the bytes of all tensors.
        """
        check_bool("enabled", enabled)
        if total is not None:
            check_int("total", total, least=0)
        with progress_bar("reading", self.nbytes() if total is None else total, enabled) as self._advance:
            try:
                yield
            finally:
                del self._advance  # the class's, which counts nothing
