"""The protocol of a backend, and `Rejection`: why a backend cannot run a problem."""

import enum
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jmx.experts import Experts
from jmx.grouping import SortedRows
from jmx.routing import Routing
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.util.typing import Array, Float


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
    ADAPTERS = "adapters"
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
    """A way to run the layer: the problems it supports, and the computation. Instances are hashable values."""

    @property
    def name(self) -> str:
        """Its name in `backend=`."""
        ...

    @property
    def summary(self) -> str:
        """One line of description."""
        ...

    def supports(self, problem: Problem, environment: Environment) -> Rejection | None:
        """None if it can run the problem, else the reason. Pure and cheap: no arrays are needed."""
        ...

    def apply(
        self, problem: Problem, x: Float[Array, "T H"], routing: Routing, experts: Experts, environment: Environment
    ) -> Float[Array, "T H"]:
        """Computes the layer, while tracing: y (T, H) of x's dtype.

        Args:
            problem: supported on `environment`, with at least one token and one slot.
            x: (T, H).
            routing: (T, k), ids int32; those outside 0..E-1 contribute nothing.
            experts: the weights, in the problem's layout.
            environment: the machine.
        """
        ...


@runtime_checkable
class SkipsPadding(Protocol):
    """A backend whose `apply` takes experts with their padding, and x and y of the size before it.

    Others get x widened to the padded size, and their result is sliced.
    """

    skips_padding: bool


@runtime_checkable
class GivesTerms(Protocol):
    """A backend that can leave the sum over a token's slots to what sends the results to other devices."""

    def takes_rows(self, problem: Problem, experts: Experts, environment: Environment) -> bool:
        """Whether `terms` reads x by `take` alone."""
        ...

    def terms(
        self,
        problem: Problem,
        x: Float[Array, "T H"],
        routing: Routing,
        experts: Experts,
        environment: Environment,
        take: Any = None,
    ) -> Any:
        """A `jmx.engines.grouped.Terms`, whose sums are what `Backend.apply` returns for the same arguments.

        `take`: a `jmx.engines.grouped.Take`, for a call that `takes_rows`: x need not have its values before. None: x
        has them.
        """
        ...


@dataclass(frozen=True)
class ExpertProduct:
    """One of the two products of a layer with adapters, or of float experts: rows times a weight of their experts.

    Args:
        problem: supported on `environment`.
        role: of the weight, "gate_up" or "down".
        sorted: which rows each expert has, beginning at multiples of 8. Others may come out as anything.
        experts: the weights, in the problem's layout. Padding of theirs counts as weights.
        environment: the machine.
    """

    problem: Problem
    role: str
    sorted: SortedRows
    experts: Experts
    environment: Environment


@runtime_checkable
class ProductBackend(Backend, Protocol):
    """A backend that also computes one product alone, for layers with adapters, and of float experts."""

    def product(self, product: ExpertProduct, rows: Float[Array, "R K"], dtype: Any) -> Float[Array, "R W"]:
        """Rows times their experts' weight, without the bias, while tracing.

        Args:
            product: the weight, and which rows each expert has.
            rows: (R, K), rounded to the problem's input format first, if it has one.
            dtype: of the result, bfloat16 or float32.

        Returns:
            (R, W): the outputs in an order of the backend's own, which `outputs` undoes.
        """
        ...

    def outputs(self, problem: Problem, role: str, result: Float[Array, "*lead W"]) -> tuple[Float[Array, "..."], ...]:
        """Outputs of "gate_up", gate and up (..., I) each or (..., I) alone without a gate, or of "down", (..., H)."""
        ...


@runtime_checkable
class ActivatedProduct(Protocol):
    """What a `ProductBackend` has that adds a product with few columns to its sums before the activation."""

    def takes_added(self, problem: Problem, rank: int) -> bool:
        """Whether it does for a problem that it supports, and so many columns."""
        ...

    def activated(
        self,
        product: ExpertProduct,
        rows: Float[Array, "R H"],
        inner: Float[Array, "R r"],
        b: Float[Array, "*experts N r"],
    ) -> Float[Array, "R I"]:
        """The activation of outputs, the bias, and b @ inner of each row, in bfloat16, while tracing.

        Args:
            product: that of "gate_up".
            rows: as of `ProductBackend.product`.
            inner, b: bfloat16. Rows of b, which may be one of all experts, are in the order of the weight's.
        """
        ...


@runtime_checkable
class TransposedProduct(Protocol):
    """What a `ProductBackend` has whose gradients are not the reference's."""

    def transposed_product(self, product: ExpertProduct, rows: Float[Array, "R W"]) -> Float[Array, "R K"]:
        """The transpose of `ProductBackend.product`: `rows` are like its result."""
        ...


@runtime_checkable
class WeightProduct(Protocol):
    """What a `ProductBackend` for float experts has whose gradients of weights are not the reference's."""

    def weight_product(
        self, product: ExpertProduct, dresult: Float[Array, "R W"], rows: Float[Array, "R K"]
    ) -> Float[Array, "E N K"]:
        """The gradient of the weights of this layer's experts: for each the sum over its rows of `dresult`, which is
        like the result of `ProductBackend.product`, times `rows`."""
        ...
