"""The list of backends in order of preference, to which other packages can add."""

import importlib.metadata
import threading
import warnings
from collections.abc import Iterable, Sequence

import jax

from jmx.numerics import layouts
from jmx.numerics.layouts import Layout
from jmx.selection.backend import Backend
from jmx.util.checks import check_instance, check_one_of, check_str, shown

GROUP = "jmx.backends"  # of entry points


class Registry:
    """Backends in order of preference. Methods may be called from any thread.

    Args:
        backends: the initial ones.
        group: the group of entry points, each a function without arguments that registers backends. They are loaded
            when the list is first read, once in a process; None: no entry points.
    """

    def __init__(self, backends: Iterable[Backend], group: str | None = None):
        self._backends = tuple(backends)
        self._group = group
        self._was_read = False
        self._lock = threading.RLock()  # an entry point registers while it is loaded

    def backends(self) -> tuple[Backend, ...]:
        """All backends, in order of preference."""
        with self._lock:
            self._load()
            self._was_read = True
            return self._backends

    def register(self, backend: Backend, new_layouts: Sequence[Layout] = (), before: str | None = "xla") -> None:
        """See `jmx.register_backend`."""
        for name in ("name", "summary", "supports", "apply"):
            if isinstance(backend, type) or not hasattr(backend, name):
                raise TypeError(f"`backend` ({shown(backend)}) must have a name, a summary, supports and apply")
        check_str("backend.name", backend.name)
        check_instance("layouts", new_layouts, Sequence, "a sequence of jmx.numerics.layouts.Layout")
        for i, layout in enumerate(new_layouts):
            check_instance(f"layouts[{i}]", layout, Layout, "a jmx.numerics.layouts.Layout")
            if layouts.LAYOUTS.get(layout.name, layout) is not layout:
                raise ValueError(f"`layouts[{i}].name` (={layout.name!r}) is taken by another layout")
        with self._lock:
            self._load()
            known = [each.name for each in self._backends]
            if backend.name in known:
                raise ValueError(f"`backend.name` (={backend.name!r}) is taken: a backend of that name is registered")
            check_one_of("before", before, (*known, None))
            for layout in new_layouts:
                layouts.register(layout)
            at = len(known) if before is None else known.index(before)
            self._backends = (*self._backends[:at], backend, *self._backends[at:])
            stale = self._was_read
        if stale:
            jax.clear_caches()  # a trace contains the backend that was selected for it

    def _load(self) -> None:
        """Calls the functions of the entry points, once; a failure is a warning."""
        group, self._group = self._group, None
        for entry in [] if group is None else importlib.metadata.entry_points(group=group):
            try:
                entry.load()()
            except Exception as e:
                package = "unknown" if entry.dist is None else entry.dist.name
                warnings.warn(
                    f"the entry point {entry.name!r} of the package {package!r} (group {group!r}) failed, and its "
                    f"backends are missing: {type(e).__name__}: {e}",
                    stacklevel=3,
                )
