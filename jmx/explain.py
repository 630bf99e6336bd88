"""The trail of a selection, as an object and as a table, with the bytes, flops and time floor of the problem."""

import dataclasses
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import jax
from rich.console import Console, Group
from rich.table import Table

from jmx import formats
from jmx.activations import Activation
from jmx.backends import BACKENDS
from jmx.experts import Experts
from jmx.routing import Logits, Routing
from jmx.selection import Environment, NoBackendError, Problem, Rejection, Selection, select


@dataclass(frozen=True)
class Peak:
    """A device's peak rates: memory bandwidth in bytes/s, dense bfloat16 products in flop/s."""

    bandwidth: float
    flops: float


# NVIDIA's data sheets of the SXM parts (L40S: PCIe), dense rates. Measured ceilings are lower: `jmx bench` takes them.
PEAKS = {
    "A100": Peak(2.039e12, 312e12),
    "L40S": Peak(0.864e12, 362e12),
    "H100": Peak(3.35e12, 989e12),
    "H200": Peak(4.8e12, 989e12),
    "B200": Peak(8.0e12, 2250e12),
}


def peak(device_kind: str) -> Peak | None:
    """Peak rates of a device by its own name, or None where they are not known."""
    return next((p for name, p in PEAKS.items() if name in device_kind.upper()), None)


def weight_shapes(problem: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
    """Logical shapes of one expert's two weights."""
    rows = problem.intermediate_size * (1 if problem.gate_up_order is None else 2)
    return (rows, problem.hidden_size), (problem.hidden_size, problem.intermediate_size)


def active_experts(problem: Problem) -> float:
    """Experts that tokens reach, expected under uniform random routing: E (1 - (1 - k/E)^T)."""
    assert problem.num_tokens is not None
    unused = max(0.0, 1 - problem.top_k / problem.num_experts) ** problem.num_tokens
    return problem.num_experts * (1 - unused)


def weight_bytes(problem: Problem, experts: float) -> float:
    """Bytes of so many experts' values and scales."""
    return experts * sum(formats.FORMATS[problem.format].bytes(shape) for shape in weight_shapes(problem))


def flops(problem: Problem) -> float:
    """Multiplications and additions of both products over all tokens."""
    assert problem.num_tokens is not None
    return 2 * problem.num_tokens * problem.top_k * sum(rows * columns for rows, columns in weight_shapes(problem))


@dataclass(frozen=True)
class Explanation:
    """What would run a problem, why each other backend would not, and what the problem costs at least.

    Args:
        problem, environment: what was asked, and where.
        chosen: name of the backend, or None where none runs it.
        trail: each backend's name, summary and rejection (None: it can).
        error: the message of the error that a call would raise, or None.
        active_experts: expected under uniform random routing; None for a symbolic token count, as the next three.
        bytes: of the active experts' weights and of x and y.
        flops: of both products.
        floor_us: max(bytes / bandwidth, flops / rate) by the device's data sheet; None for devices not known.
    """

    problem: Problem
    environment: Environment
    chosen: str | None
    trail: tuple[tuple[str, str, Rejection | None], ...]
    error: str | None
    active_experts: float | None
    bytes: float | None
    flops: float | None
    floor_us: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        problem = dataclasses.asdict(self.problem) | {"activation": str(self.problem.activation)}
        backends = [
            {"name": name, "summary": summary, "chosen": name == self.chosen, "rejection": _rejection_dict(no)}
            for name, summary, no in self.trail
        ]
        rest = {f: getattr(self, f) for f in ("chosen", "error", "active_experts", "bytes", "flops", "floor_us")}
        return {"problem": problem, "device": self.environment.device_kind, "backends": backends} | rest

    def __rich__(self) -> Group:
        p = self.problem
        tokens = "symbolic" if p.num_tokens is None else str(p.num_tokens)
        title = (
            f"{tokens} tokens, {p.num_experts} experts, top-{p.top_k}, H={p.hidden_size}, I={p.intermediate_size}, "
            f"{p.format} ({p.layout}) x {p.input_format or p.dtype} on {self.environment.device_kind}"
        )
        table = Table()
        for column in ("backend", "", "why"):
            table.add_column(column)
        for name, summary, no in self.trail:
            if no is not None:
                table.add_row(name, "no", str(no))
            elif name == self.chosen:
                table.add_row(f"[bold]{name}[/bold]", "chosen", summary)
            else:
                table.add_row(name, "can", summary)
        return Group(title, table, self._costs())

    def _costs(self) -> str:
        if self.bytes is None or self.flops is None or self.active_experts is None:
            return "bytes and flops depend on the token count"
        floor = "floor not known for this device" if self.floor_us is None else f"floor {self.floor_us:.1f} us"
        return (
            f"about {self.active_experts:.1f} experts used, {self.bytes / 1e6:.3g} MB moved, "
            f"{self.flops / 1e9:.3g} GFLOP: {floor}"
        )

    def __str__(self) -> str:
        console = Console(width=120, no_color=True, highlight=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()


def explain_problem(
    problem: Problem, environment: Environment | None = None, backend: str | None = None
) -> Explanation:
    """The explanation of a problem that need not have arrays, on a machine that need not be here (default: this one).

    `backend` is a request as a layer's own. A request that cannot be met does not raise here: it is `error`.
    """
    environment = environment if environment is not None else Environment.probe()
    selection: Selection | None = None
    error = None
    try:
        selection = select(problem, environment, backend, BACKENDS)
    except NoBackendError as e:
        error = str(e)
    trail = tuple((b.name, b.summary, b.supports(problem, environment)) for b in BACKENDS)
    costs: tuple[float | None, ...] = (None,) * 4
    if problem.num_tokens is not None:
        active = active_experts(problem)
        itemsize = jax.numpy.dtype(problem.dtype).itemsize
        moved = weight_bytes(problem, active) + 2 * problem.num_tokens * problem.hidden_size * itemsize
        device = peak(environment.device_kind)
        floor = None if device is None else 1e6 * max(moved / device.bandwidth, flops(problem) / device.flops)
        costs = (active, moved, flops(problem), floor)
    return Explanation(problem, environment, selection.backend.name if selection else None, trail, error, *costs)


def _rejection_dict(rejection: Rejection | None) -> dict[str, str] | None:
    if rejection is None:
        return None
    return {"reason": rejection.reason.value, "detail": rejection.detail, "remedy": rejection.remedy}


@singledispatch
def explain(subject: Any, *arguments: Any, device: str | None = None, **options: Any) -> Explanation:
    """What runs a layer, and why nothing else does.

    Forms:
        explain(layer, x): a `jmx.nnx.MoE` (or any object with `problem(x)`) and its input.
        explain(x, routing, experts, activation=..., weights_on=..., backend=...): the arguments of `jmx.moe`.
        explain(problem): a `Problem`, that is plain shapes; no device is needed.
    Arrays may be `jax.ShapeDtypeStruct`. `device` names one that need not be here ("h200"); the default is the one
    that the arguments, or else new arrays, lie on.
    """
    environment = Environment.named(device) if device is not None else None
    if hasattr(subject, "problem"):
        (x,) = arguments
        environment = environment or Environment.probe(x, subject)
        backend = options.get("backend", getattr(subject, "backend", None))
        return explain_problem(subject.problem(x), environment, backend)
    return _explain_arrays(subject, *arguments, environment=environment, **options)


@explain.register
def _(subject: Problem, *, device: str | None = None, backend: str | None = None) -> Explanation:
    return explain_problem(subject, Environment.named(device) if device is not None else None, backend)


def _explain_arrays(
    x: Any,
    routing: Routing | Logits,
    experts: Experts,
    *,
    environment: Environment | None,
    activation: Activation,
    weights_on: str = "output",
    backend: str | None = None,
) -> Explanation:
    top_k = routing.method.top_k if isinstance(routing, Logits) else routing.expert_ids.shape[-1]
    problem = Problem.of(x, top_k, experts, activation, weights_on)
    return explain_problem(problem, environment or Environment.probe(x, routing, experts), backend)
