"""`Environment`: the machine that a call runs on, probed, or a well-known device by its name."""

import dataclasses
import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jaxlib.version
from jax.core import Tracer

from jmx.util.checks import check_instance, check_int, check_one_of, check_shape, check_str, shown

Device = Any  # jax.Device, which type checkers do not know


@dataclass(frozen=True)
class Environment:
    """The properties of a machine that backends depend on.

    Args:
        platform: "cpu", "gpu" or "tpu".
        device_kind: the device's own name, such as "NVIDIA H200".
        compute_capability: (major, minor) of an NVIDIA GPU, else None.
        core_count: SMs of a GPU, else None.
        versions: (library, version) pairs.

    Raises:
        ValueError, TypeError: a field that is not as above.
    """

    platform: str
    device_kind: str
    compute_capability: tuple[int, int] | None = None
    core_count: int | None = None
    versions: tuple[tuple[str, str], ...] = (("jax", jax.__version__), ("jaxlib", jaxlib.version.__version__))

    def __post_init__(self) -> None:
        for name in ("platform", "device_kind"):
            check_str(name, getattr(self, name))
        if self.compute_capability is not None:
            capability = check_shape("compute_capability", self.compute_capability, 2)
            object.__setattr__(self, "compute_capability", capability)
        if self.core_count is not None:
            object.__setattr__(self, "core_count", check_int("core_count", self.core_count, least=1))
        for i, pair in enumerate(check_instance("versions", self.versions, tuple, "a tuple of pairs")):
            if not isinstance(pair, tuple) or [*map(type, pair)] != [str, str]:
                raise TypeError(f"`versions[{i}]` ({shown(pair)}) must be the names of a library and a version")

    @classmethod
    def probe(cls, *arguments: Any) -> "Environment":
        """The machine that a call on `arguments` (pytrees) runs on.

        That is the mesh in scope, else the devices that arguments are committed to, else the default device. Traced
        arguments have no known device: for another platform than that of the default device, set `jax.default_device`
        or a mesh around the jitted call.

        Raises:
            ValueError: arguments are committed to devices of several platforms, or of another platform than the mesh.
        """
        found = {device.platform: device for device in _committed_devices(arguments)}
        mesh_device = jax.sharding.get_abstract_mesh().abstract_device
        platforms = {*found} | ({mesh_device.platform} if mesh_device is not None else set())
        if len(platforms) > 1:
            mesh = "" if mesh_device is None else f" in a mesh of {mesh_device.platform} devices"
            raise ValueError(
                f"arguments committed to {' and '.join(sorted(found))} devices{mesh} cannot be used in one call: "
                "move them to one platform with jax.device_put"
            )
        if mesh_device is not None:
            return cls._of_kind(mesh_device)
        return cls.of_device(next(iter(found.values())) if found else _default_device())

    @classmethod
    def of_device(cls, device: Device) -> "Environment":
        """The machine of a device."""
        for name in ("platform", "device_kind"):
            if not isinstance(getattr(device, name, None), str):
                raise TypeError(f"`device` ({shown(device)}) must be a jax.Device, such as one of jax.devices()")
        capability = getattr(device, "compute_capability", None)
        return cls(
            device.platform,
            device.device_kind,
            _parse_capability(capability) if device.platform == "gpu" else None,
            getattr(device, "core_count", None),
        )

    @classmethod
    def _of_kind(cls, device: Any) -> "Environment":
        """The machine of a mesh's abstract device, which has a kind and a number of cores only."""
        default = _default_device()
        if device.device_kind == default.device_kind:
            return cls.of_device(default)
        # A compiler's target may have a longer name than the device: "NVIDIA H200 141GB HBM3e".
        words = f"{device.device_kind} "
        known = next((e for e in known_devices().values() if words.startswith(f"{e.device_kind} ")), None)
        if known is not None:
            return dataclasses.replace(known, core_count=device.num_cores)
        return cls(device.platform, device.device_kind, None, device.num_cores)

    @classmethod
    def named(cls, name: str) -> "Environment":
        """A well-known device, present or not: "h200" or "H200". ValueError, naming those known, for other names."""
        return known_devices()[check_one_of("device", check_str("device", name).lower(), sorted(known_devices()))]


@functools.cache
def known_devices() -> Mapping[str, Environment]:
    """Well-known devices by their short names.

    Numbers of SMs are those of NVIDIA's data sheets for the SXM parts, the L4 and the L40S; that of a B100 is unknown.
    """
    devices = {
        "cpu": Environment("cpu", "cpu"),
        "a100": Environment("gpu", "NVIDIA A100-SXM4-80GB", (8, 0), 108),
        "l4": Environment("gpu", "NVIDIA L4", (8, 9), 58),
        "l40s": Environment("gpu", "NVIDIA L40S", (8, 9), 142),
        "h100": Environment("gpu", "NVIDIA H100 80GB HBM3", (9, 0), 132),
        "h200": Environment("gpu", "NVIDIA H200", (9, 0), 132),
        "b100": Environment("gpu", "NVIDIA B100", (10, 0)),
        "b200": Environment("gpu", "NVIDIA B200", (10, 0), 148),
        "gb200": Environment("gpu", "NVIDIA GB200", (10, 0), 152),
    }
    return types.MappingProxyType(devices)


def _parse_capability(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def _committed_devices(arguments: Any) -> list[Device]:
    # An array that is not committed moves to the device of the call.
    arrays = [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array)]
    return [d for a in arrays if not isinstance(a, Tracer) and a.committed for d in a.sharding.device_set]


def _default_device() -> Device:
    default = jax.config.jax_default_device
    if isinstance(default, str):
        return jax.devices(default)[0]
    return default if default is not None else jax.devices()[0]
