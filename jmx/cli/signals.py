"""Signals that ask a process to end, as exceptions: partial output is then removed, as on Ctrl-C."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_NUMBERS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Terminated(KeyboardInterrupt):
    """A signal was received. Like KeyboardInterrupt it is not an Exception, so `except Exception` does not catch it."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return signal.Signals(self.number).name


@contextlib.contextmanager
def as_exceptions() -> Iterator[None]:
    """A context in which SIGTERM and SIGHUP raise `Terminated` in the main thread.

    A signal that is handled or ignored already, as SIGHUP under nohup, is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        raise Terminated(number)

    with contextlib.ExitStack() as stack:
        for number in _NUMBERS:
            if signal.getsignal(number) is signal.SIG_DFL:
                stack.callback(signal.signal, number, signal.SIG_DFL)
                signal.signal(number, end)
        yield
