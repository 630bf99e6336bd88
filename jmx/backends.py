"""The backends, in order of preference, and the layouts that devices get. The only file that knows every engine."""

from jmx import layouts
from jmx.selection import Backend, Environment
from jmx.xla import Xla

BACKENDS: tuple[Backend, ...] = (Xla(),)


def resolve_layout(layout: str, environment: Environment) -> str:
    """The layout that `layout` names on this machine: "auto" is the one of the machine's engine family.

    Raises:
        ValueError: no layout has that name.
    """
    if layout == "auto":
        # There is one family, which every environment gets. It likes bytes: in a loop XLA's CPU compiler widens whole
        # float4 arrays, and its GPU compiler fuses a gather of bytes, but not of float4, into what follows.
        return "packed"
    return layouts.get(layout).name
