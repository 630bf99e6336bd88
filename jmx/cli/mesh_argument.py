"""Meshes on the command line, such as `--mesh dp=2,ep=4`."""

import re
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.sharding import Mesh

_AXIS = re.compile(r"([A-Za-z_]\w*)=([0-9]{1,9})")
_DIVIDES = re.compile(r"([a-z]+)=(\w+(?:\+\w+)*)")
_NOTHING = "none"


def sizes(text: str) -> dict[str, int]:
    """The axes of a mesh and their sizes, of `--mesh`. Needs no devices.

    Raises:
        ValueError: not NAME=SIZE with commas between them, a name twice, or a size of 0.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        match = _AXIS.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"`--mesh` (={text!r}) must be axes as NAME=SIZE with commas between them, such as ep=2")
        name, size = match[1], int(match[2])
        if name in found:
            raise ValueError(f"`--mesh` (={text!r}) must not name the axis {name!r} twice")
        if size < 1:
            raise ValueError(f"`--mesh` (={text!r}) must have sizes of at least 1, and {name!r} has {size}")
        found[name] = size
    return found


def axes(text: str) -> dict[str, tuple[str, ...] | None]:
    """Mesh axes by what they divide, of `--mesh-axes`. ValueError unless it is WHAT=AXIS or WHAT=AXIS+AXIS."""
    found: dict[str, tuple[str, ...] | None] = {}
    for part in text.split(","):
        match = _DIVIDES.fullmatch(part.strip())
        if match is None or match[1] in found:
            rule = "must be WHAT=AXIS with commas between them, each WHAT once, such as heads=none,expert=dp+ep"
            raise ValueError(f"`--mesh-axes` (={text!r}) {rule}")
        found[match[1]] = None if match[2] == _NOTHING else tuple(match[2].split("+"))
    return found


def make(text: str) -> "Mesh":
    """The mesh of `--mesh` over the first devices. ValueError if there are too few."""
    import jax
    from jax.sharding import AxisType

    shape = sizes(text)
    needed = prod(shape.values())
    if needed > jax.device_count():
        raise ValueError(f"`--mesh` (={text!r}) needs {needed} devices, and there are {jax.device_count()}")
    kinds, devices = (AxisType.Auto,) * len(shape), jax.devices()[:needed]
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=kinds, devices=devices)
