"""What a model reads after a layer's experts: kernels of few tokens read it into the cache while memory is idle."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_array: ContextVar[Any] = ContextVar("read_next", default=None)


@contextlib.contextmanager
def reads(array: Any) -> Iterator[None]:
    """Calls of `jmx.moe` that are traced inside are followed by a kernel that reads `array`; None: by any."""
    before = _array.set(array)
    try:
        yield
    finally:
        _array.reset(before)


def array() -> Any:
    """The array that is read after the call that is being traced, or None."""
    return _array.get()
