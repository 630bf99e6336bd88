"""What a backend is, and why one does not run a problem."""

import enum
from dataclasses import dataclass
from typing import Protocol

from jax import Array

from jmx.experts import Experts
from jmx.routing import Routing
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem


class Reason(enum.Enum):
    """The kinds of reasons why a backend cannot run a problem. A new one is a change of the interface."""

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
    LIBRARY = "library"
    NOT_BUILT = "not built"


@dataclass(frozen=True)
class Rejection:
    """Why a backend cannot run a problem, and the fix: a reason, the value found and the one required, a remedy."""

    reason: Reason
    detail: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}; {self.remedy}"


class Backend(Protocol):
    """One engine: what it can run, and how. Instances are hashable values."""

    @property
    def name(self) -> str:
        """What `backend=` calls it."""
        ...

    @property
    def summary(self) -> str:
        """One line: what it is."""
        ...

    def supports(self, problem: Problem, environment: Environment) -> Rejection | None:
        """None where it can run the problem, else why it cannot. Pure and cheap: no arrays are needed."""
        ...

    def apply(self, problem: Problem, x: Array, routing: Routing, experts: Experts, environment: Environment) -> Array:
        """The layer, while tracing: y (T, H) of x's dtype.

        Args:
            problem: one that it supports on `environment`, of at least one assignment.
            x: (T, H).
            routing: (T, k), ids int32; those outside 0..E-1 contribute nothing.
            experts: the weights, in the problem's layout.
            environment: the machine.
        """
        ...
