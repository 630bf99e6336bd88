"""Selection: which backend runs a problem on a machine, and why each of the others does not.

`select` is a pure function of a `Problem`, an `Environment`, a request, and the list of backends. It reads no
environment variables: jit would reuse a trace after they changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jmx.numerics.formats import FORMATS
from jmx.selection import vllm_names
from jmx.selection.backend import Backend, ProductBackend, Reason, Rejection
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.util.checks import check_instance, check_one_of, shown


@dataclass(frozen=True)
class Selection:
    """The outcome of `select`: the chosen backend, and the trail: each backend's name and answer."""

    problem: Problem
    environment: Environment
    request: str | None
    backend: Backend
    trail: tuple[tuple[str, Rejection | None], ...]


class NoBackendError(ValueError):
    """No backend runs the problem, or the one requested does not; the message has each backend's reason and remedy.

    `trail`: as that of a `Selection`.
    """

    def __init__(self, message: str, trail: tuple[tuple[str, Rejection | None], ...]):
        super().__init__(message)
        self.trail = trail


_requested = jax.make_user_context(None)


def use_backend(name: str | None) -> Any:
    """Context in which layers run on the backend called `name`, except those that have a `backend=`.

    Calls traced outside are traced again inside. Whether `name` exists and can run is checked when a layer is traced.
    """
    return _requested(check_instance("name", name, str | None, "the name of a backend, or None"))


def requested(backend: str | None) -> str | None:
    """The name of the requested backend: `backend`, else that of the `use_backend` context, or None."""
    return backend if backend is not None else _requested.value


def check_backend(backend: str | None, backends: Sequence[Backend]) -> None:
    """Raises ValueError or TypeError, naming them, unless `backend` is the name of one of `backends`, or None."""
    for i, engine in enumerate(check_instance("backends", backends, Sequence, "a sequence of backends")):
        if not (hasattr(engine, "name") and hasattr(engine, "supports")):
            raise TypeError(f"`backends[{i}]` ({shown(engine)}) must be a backend")
    if backend is not None:
        check_one_of("backend", backend, [engine.name for engine in backends], vllm_names.meant)


def select(problem: Problem, environment: Environment, request: str | None, backends: Sequence[Backend]) -> Selection:
    """Chooses the backend that runs `problem`: the requested one, else the first of `backends` that can.

    Args:
        problem, environment: the call and the machine.
        request: name of the backend that must run; None: that of the `use_backend` context, if any.
        backends: in order of preference.

    Raises:
        ValueError: `request` names no backend.
        NoBackendError: the requested backend cannot run, or none can; the message has each backend's reason and remedy.
    """
    check_instance("problem", problem, Problem, "a jmx.Problem")
    check_instance("environment", environment, Environment, "a jmx.Environment")
    check_backend(request, backends)
    request = requested(request)
    check_backend(request, backends)
    trail = tuple((b.name, _answer(b, problem, environment)) for b in backends)
    for backend, (name, rejection) in zip(backends, trail, strict=True):
        if rejection is None and request in (None, name):
            return Selection(problem, environment, request, backend, trail)
    fault = "no backend can run this" if request is None else f"backend {request!r} was requested, but cannot run this"
    answers = [f"  {name}: {'can run' if rejection is None else rejection}" for name, rejection in trail]
    raise NoBackendError("\n".join([fault, f"  {problem} on {environment.device_kind}", *answers]), trail)


def _answer(backend: Backend, problem: Problem, environment: Environment) -> Rejection | None:
    rejection = backend.supports(problem, environment)
    if rejection is not None or isinstance(backend, ProductBackend):
        return rejection
    if problem.adapters:
        detail = "adapters add before the activation, and it computes both products at once"
        return Rejection(Reason.ADAPTERS, detail, "use xla, or merge the adapters with jmx.lora.merge")
    if FORMATS[problem.format].is_float:
        detail = f"weights are {problem.format!r}, and it does not compute products one by one"
        return Rejection(Reason.FORMAT, detail, "use xla")
    return None
