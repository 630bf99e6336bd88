"""What a backend is, and why one does not run a problem."""

import enum
from dataclasses import dataclass
from typing import Protocol

import jax

from jmx.experts import Experts
from jmx.routing import Routing
from jmx.selection.environment import Environment
from jmx.selection.problem import Computation, Problem


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
