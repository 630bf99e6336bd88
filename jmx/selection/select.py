"""Selection: which backend runs a problem on a machine, and why each of the others does not.

`select` is a pure function of a `Problem` (what is asked, all of it static), an `Environment` (what was probed about
the machine), a request, and the list of backends. Nothing here looks at environment variables: read while tracing they
are a trap, since jit would serve the stale trace.
"""

import dataclasses
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import jaxlib.version
from jax.core import Tracer

from jmx import activations
from jmx.numerics import layouts
from jmx.activations import Activation
from jmx.util.checks import check_array, check_bool, check_dtype, check_instance, check_int, check_one_of, check_shape, check_str, shown
from jmx.experts import ORDERS, Experts
from jmx.numerics.formats import FORMATS
from jmx.numerics.input_formats import INPUT_FORMATS, resolve
from jmx.routing import Routing

Array = Any
Device = Any  # jax.Device, which type checkers do not know
WEIGHTS_ON = ("output", "input")


@dataclass(frozen=True)
class Problem:
    """One call of the layer, as a backend may judge it.

    Args:
        num_tokens: tokens of the call, or None where it is symbolic (`jax.export`).
        hidden_size, intermediate_size, num_experts, top_k: sizes.
        dtype: name of the activations' dtype.
        format: name of the weights' format.
        input_format: name of the format that activations are rounded to before each product; None: `dtype` itself.
        activation: the activation between the two products.
        gate_up_order: "interleaved", "concatenated", or None for un-gated experts.
        bias: whether the experts have biases.
        layout: name of the layout in which the weights lie.
        weights_on: whether routing weights multiply the experts' "output" or "input".
        mesh_axes: names of the manual mesh axes in scope.

    Raises:
        ValueError, TypeError: a field that is not as above.
    """

    num_tokens: int | None
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    dtype: str
    format: str
    activation: Activation
    gate_up_order: str | None
    bias: bool
    layout: str
    weights_on: str = "output"
    input_format: str | None = None
    mesh_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_tokens is not None:
            self._set("num_tokens", check_int("num_tokens", self.num_tokens, least=0))
        sizes = {name: getattr(self, name) for name in ("num_experts", "hidden_size", "intermediate_size")}
        for name, size in sizes.items():
            self._set(name, check_int(name, size, least=1))
        self._set("top_k", check_int("top_k", self.top_k, least=0))
        check_str("dtype", self.dtype)
        self._set("dtype", check_dtype("dtype", self.dtype, jnp.floating).name)
        check_one_of("format", self.format, FORMATS)
        check_one_of("input_format", self.input_format, (*INPUT_FORMATS, None))
        self._set("activation", activations.get(self.activation))
        check_one_of("gate_up_order", self.gate_up_order, ORDERS)
        self._set("bias", check_bool("bias", self.bias))
        layouts.get(self.layout)
        check_one_of("weights_on", self.weights_on, WEIGHTS_ON)
        for i, axis in enumerate(check_instance("mesh_axes", self.mesh_axes, tuple, "a tuple of names")):
            check_str(f"mesh_axes[{i}]", axis)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls,
        x: Array,
        top_k: int,
        experts: Experts,
        activation: Activation | str,
        weights_on: str = "output",
        input_format: str | None = None,
    ) -> "Problem":
        """The problem of calling `experts` on `x` (..., H): arrays, tracers or `jax.ShapeDtypeStruct`.

        `input_format`: a name or a family that the caller asks for; see `inputs.resolve`.
        """
        check_x(x, check_instance("experts", experts, Experts, "jmx.Experts").hidden_size)
        tokens: int | None = 1
        for size in x.shape[:-1]:
            tokens = tokens * size if isinstance(size, int) and tokens is not None else None
        return cls(
            num_tokens=tokens,
            hidden_size=experts.hidden_size,
            intermediate_size=experts.intermediate_size,
            num_experts=experts.num_experts,
            top_k=top_k,
            dtype=jnp.dtype(x.dtype).name,
            format=experts.format.name,
            activation=activations.get(activation),
            gate_up_order=experts.gate_up_order,
            bias=experts.gate_up_bias is not None or experts.down_bias is not None,
            layout=experts.layout,
            weights_on=weights_on,
            input_format=resolve_input_format(experts, input_format),
            mesh_axes=tuple(jax.sharding.get_abstract_mesh().manual_axes),
        )

    def __str__(self) -> str:
        tokens = {None: "a symbolic number of tokens", 1: "1 token"}.get(self.num_tokens, f"{self.num_tokens} tokens")
        return (
            f"{tokens}, top-{self.top_k} of {self.num_experts} experts, H={self.hidden_size}, "
            f"I={self.intermediate_size}, {self.format} ({self.layout}) x {self.input_format or self.dtype}"
        )


def check_x(x: Array, hidden_size: int) -> None:
    """Raises ValueError or TypeError, naming it, unless `x` is a floating (..., hidden_size), as jax keeps it."""
    check_array("x", x)
    if not x.shape or x.shape[-1] != hidden_size:
        raise ValueError(f"`x` (of shape {x.shape}) must be (..., {hidden_size}), the experts' hidden size")
    if not jnp.issubdtype(x.dtype, jnp.floating) or jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
        raise TypeError(f"`x` (dtype {x.dtype}) must be floating, of a width that jax keeps as it is")


def resolve_input_format(experts: Experts, wanted: str | None) -> str | None:
    """The format that both products' inputs are rounded to: a key of `inputs.INPUT_FORMATS`, or None for 16 or 32 bits.

    Args:
        experts: which may declare one, as a checkpoint does.
        wanted: a format or family that the caller asks for, or None.

    Raises:
        ValueError: `inputs.resolve`'s, a format whose blocks do not divide the experts' sizes, and a static one for
            experts that have no static scales.
    """
    name = resolve(experts.input_format, wanted, (None, *INPUT_FORMATS))
    if name is None:
        return None
    format = INPUT_FORMATS[name]
    format.check_sizes(experts.hidden_size, experts.intermediate_size)
    if format.static and experts.gate_up_input_scale is None:
        raise ValueError(f"`input_format` (={name!r}) is static: give `experts` its scales, by `experts.with_inputs`")
    return name


@dataclass(frozen=True)
class Environment:
    """What is known about the machine.

    Args:
        platform: "cpu", "gpu" or "tpu".
        device_kind: the device's own name, such as "NVIDIA H200".
        compute_capability: (major, minor) of an NVIDIA GPU, else None.
        core_count: streaming multiprocessors of a GPU, else None.
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

        It is that of the mesh in scope, else of the devices that arguments are committed to, else the default device.
        Traced arguments do not tell where they lie: for another platform than the default device's, name it by
        `jax.default_device` or a mesh around the jitted call.

        Raises:
            ValueError: arguments that are committed to devices of several platforms, or of another than the mesh's.
        """
        found = {device.platform: device for device in _committed_devices(arguments)}
        mesh_device = jax.sharding.get_abstract_mesh().abstract_device
        platforms = {*found} | ({mesh_device.platform} if mesh_device is not None else set())
        if len(platforms) > 1:
            mesh = "" if mesh_device is None else f" in a mesh of {mesh_device.platform} devices"
            raise ValueError(
                f"arguments committed to {' and '.join(sorted(found))} devices{mesh} cannot meet in one call: "
                "move them to one platform with jax.device_put"
            )
        if mesh_device is not None:
            return cls._of_kind(mesh_device)
        return cls.of_device(next(iter(found.values())) if found else _default_device())

    @classmethod
    def of_device(cls, device: Device) -> "Environment":
        """The machine seen through one of its devices."""
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
        """From a mesh's abstract device, which says its kind and number of cores alone."""
        default = _default_device()
        if device.device_kind == default.device_kind:
            return cls.of_device(default)
        # A compiler's target may say more than the card's own name: "NVIDIA H200 141GB HBM3e".
        words = f"{device.device_kind} "
        known = next((e for e in known_devices().values() if words.startswith(f"{e.device_kind} ")), None)
        if known is not None:
            return dataclasses.replace(known, core_count=device.num_cores)
        return cls(device.platform, device.device_kind, None, device.num_cores)

    @classmethod
    def named(cls, name: str) -> "Environment":
        """A well-known device that need not be here: "h200" or "H200". ValueError, naming those known, for others."""
        return known_devices()[check_one_of("device", check_str("device", name).lower(), sorted(known_devices()))]


def known_devices() -> dict[str, Environment]:
    """Devices that can be named without being there, by the kind that each calls itself.

    Sizes are those of NVIDIA's data sheets: the SXM parts, the L4 and the L40S. How many cores
    a B100 has is not known here.
    """
    return {
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


def _parse_capability(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def _committed_devices(arguments: Any) -> list[Device]:
    # An array that is not committed goes wherever the call does.
    arrays = [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, jax.Array)]
    return [d for a in arrays if not isinstance(a, Tracer) and a.committed for d in a.sharding.device_set]


def _default_device() -> Device:
    default = jax.config.jax_default_device
    if isinstance(default, str):
        return jax.devices(default)[0]
    return default if default is not None else jax.devices()[0]


class Reason(enum.Enum):
    """Why a backend does not run a problem. Closed: a new reason is a change of the interface."""

    PLATFORM = "platform"
    COMPUTE_CAPABILITY = "compute capability"
    FORMAT = "weight format"
    INPUT_FORMAT = "input format"
    DTYPE = "dtype"
    LAYOUT = "layout"
    SHAPE = "shape"
    ACTIVATION = "activation"
    WEIGHTS_ON = "routing weights"
    SYMBOLIC_TOKENS = "symbolic token count"
    MESH = "mesh"
    LIBRARY = "library"
    NOT_BUILT = "not built"


@dataclass(frozen=True)
class Rejection:
    """A backend's no: the reason, the detail (measured and required value), and what would make it a yes."""

    reason: Reason
    detail: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}; {self.remedy}"


@dataclass(frozen=True)
class Computation:
    """What the layer computes beside its arrays; static.

    Args:
        activation: the activation between the two products.
        weights_on: whether routing weights multiply the experts' "output" or "input".
        input_format: name of the format that the inputs of both products are rounded to; None: of 16 or 32 bits.
    """

    activation: Activation
    weights_on: str = "output"
    input_format: str | None = None


class Backend(Protocol):
    """One engine. Instances are hashable values."""

    @property
    def name(self) -> str:
        """What `backend=` calls it."""
        ...

    @property
    def summary(self) -> str:
        """One line: what it is."""
        ...

    def supports(self, problem: Problem, environment: Environment) -> Rejection | None:
        """None for yes, else the reason why not. Pure and cheap."""
        ...

    def apply(
        self,
        computation: Computation,
        x: jax.Array,
        routing: Routing,
        experts: Experts,
        environment: Environment,
    ) -> jax.Array:
        """x (T, H), routing of (T, k) -> y (T, H) of x's dtype, on a machine that it supports. Traceable."""
        ...


@dataclass(frozen=True)
class Selection:
    """The outcome of `select`: the chosen backend, and the trail of every backend asked with its answer."""

    problem: Problem
    environment: Environment
    request: str | None
    backend: Backend
    trail: tuple[tuple[str, Rejection | None], ...]


class NoBackendError(ValueError):
    """No backend runs the problem, or the one requested does not. Tells each backend's reason and remedy.

    `trail`: as that of a `Selection`.
    """

    def __init__(self, message: str, trail: tuple[tuple[str, Rejection | None], ...]):
        super().__init__(message)
        self.trail = trail


# Keyed into jit's cache: changing it retraces.
_requested = jax.make_user_context(None)


def use_backend(name: str | None) -> Any:
    """Context in which every layer runs on the backend called `name`, unless its own `backend=` says otherwise.

    Calls traced outside are traced again inside. Whether `name` exists and can run is told when a layer is traced.
    """
    return _requested(check_instance("name", name, str | None, "the name of a backend, or None"))


def check_backend(backend: str | None, backends: Sequence[Backend]) -> None:
    """Raises ValueError or TypeError, naming them, unless `backend` is the name of one of `backends`, or None."""
    for i, engine in enumerate(check_instance("backends", backends, Sequence, "a sequence of backends")):
        if not (hasattr(engine, "name") and hasattr(engine, "supports")):
            raise TypeError(f"`backends[{i}]` ({shown(engine)}) must be a backend")
    if backend is not None:
        check_one_of("backend", backend, [engine.name for engine in backends])


def select(problem: Problem, environment: Environment, request: str | None, backends: Sequence[Backend]) -> Selection:
    """Chooses the backend that runs `problem`: the requested one, else the first of `backends` that can.

    Args:
        problem, environment: what is asked, and where.
        request: name of the backend that must run; None takes the `use_backend` context, else chooses.
        backends: in order of preference.

    Raises:
        ValueError: `request` names no backend.
        NoBackendError: the requested backend cannot run, or none can; the text has the whole trail, that is each
            backend's reason and what would make it run.
    """
    check_instance("problem", problem, Problem, "a jmx.Problem")
    check_instance("environment", environment, Environment, "a jmx.Environment")
    check_backend(request, backends)
    request = request if request is not None else _requested.value
    check_backend(request, backends)
    trail = tuple((b.name, b.supports(problem, environment)) for b in backends)
    for backend, (name, rejection) in zip(backends, trail, strict=True):
        if rejection is None and request in (None, name):
            return Selection(problem, environment, request, backend, trail)
    fault = "no backend can run this" if request is None else f"backend {request!r} was requested, but cannot run this"
    told = [f"  {name}: {'can run' if rejection is None else rejection}" for name, rejection in trail]
    raise NoBackendError("\n".join([fault, f"  {problem} on {environment.device_kind}", *told]), trail)
