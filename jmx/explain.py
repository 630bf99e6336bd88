"""Why a backend was chosen, as an object and as a table, with configuration, bytes, flops and minimum time."""

import dataclasses
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console, Group
from rich.text import Text

from jmx import activations
from jmx.activations import Activation
from jmx.backends import registered_backends
from jmx.experts import Experts, ShardedExperts
from jmx.pallas.routing import call as routing_kernel
from jmx.parallel import over_mesh
from jmx.parallel.division import Division
from jmx.parallel.experts_form import KINDS, AnyExperts, one_device
from jmx.parallel.placed_experts import PlacedExperts
from jmx.parallel.placement import slots_needed
from jmx.parallel.split import Split
from jmx.routing import Logits, Method, Routing
from jmx.routing import get as get_method
from jmx.routing.leading import slots_of
from jmx.selection import tuning
from jmx.selection.backend import Reason, Rejection
from jmx.selection.costs import PEAKS, Floor, active_experts, flops, scaled, times_bfloat16
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem, check_arguments, weight_bytes
from jmx.selection.select import NoBackendError, check_backend, requested, select
from jmx.selection.tuning import Choice, Tunable
from jmx.util import html
from jmx.util.checks import check_bool, check_instance, is_array, shown
from jmx.util.tables import FoldingTable, words

_SURELY = 1e-3  # if fewer experts are expected to be unused, all are reported as used


@dataclass(frozen=True)
class Explanation:
    """Which backend runs a problem, why each other one does not, and the minimum cost of the problem.

    Args:
        problem, environment: the call and the machine.
        chosen: name of the backend, or None if none runs it.
        configuration: that of its kernels, and where it was found; None if it has nothing to tune.
        trail: each backend's name, summary and rejection (None: it can run).
        error: the message of the error that a call would raise, or None.
        active_experts: expected under uniform random routing; None for a symbolic token count, like the next three.
        bytes: of the active experts' weights and of x and y.
        flops: of both products.
        floor: by the device's data sheet; None for unknown devices, too.
        inputs_declared: whether the input format is the one that the experts declare, not one that the caller named.
        request: name of the requested backend, or None.
        all: whether the printed table lists backends of other platforms, too.
        division: how a mesh divides the call, or None. The backend is then that of a device's part, `division.local`,
            and experts, bytes, flops and floor are those of one device, with all tokens evenly routed.
        notes: further sentences about what runs.
    """

    problem: Problem
    environment: Environment
    chosen: str | None
    configuration: Choice[Any] | None
    trail: tuple[tuple[str, str, Rejection | None], ...]
    error: str | None
    active_experts: float | None
    bytes: float | None
    flops: float | None
    floor: Floor | None
    inputs_declared: bool = False
    request: str | None = None
    all: bool = False
    division: Division | None = None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        problem = dataclasses.asdict(self.problem) | {"activation": str(self.problem.activation)}
        backends = [
            {"name": name, "summary": summary, "chosen": name == self.chosen, "rejection": _rejection_dict(no)}
            for name, summary, no in self.trail
        ]
        rest = {name: getattr(self, name) for name in ("chosen", "error", "active_experts", "bytes", "flops")}
        configuration = None
        if self.configuration is not None:
            config, source = self.configuration
            configuration = {"values": dataclasses.asdict(config), "source": source}
        floor = {
            "floor_us": None if self.floor is None else self.floor.us,
            "bound": None if self.floor is None else self.floor.bound,
        }
        head = {"problem": problem, "inputs_declared": self.inputs_declared}
        head |= {"device": self.environment.device_kind, "backends": backends}
        divided = {} if self.division is None else {"division": self.division.as_dict()}
        return head | {"configuration": configuration} | rest | floor | divided

    def __rich__(self) -> Group:
        table = FoldingTable(words("backend", "", "why"))
        elsewhere = []
        for name, summary, no in self.trail:
            if no is not None and no.reason is Reason.PLATFORM and name != self.request and not self.all:
                elsewhere.append(name)
            elif no is not None:
                table.add_row(name, Text("no", "red"), str(no))
            elif name == self.chosen:
                how = summary if self.configuration is None else f"{summary}\n{tuning.describe(*self.configuration)}"
                table.add_row(Text(name, "bold"), Text("chosen", "bold green"), how)
            else:
                table.add_row(name, "can", summary)
        lines = [Text(f"{self.problem} on {self.environment.device_kind}", "bold"), table]
        if self.division is not None:
            lines += self.division.lines()
        if elsewhere:
            lines.append(Text(f"not on this platform: {', '.join(elsewhere)} (--all, or all=True, lists them)"))
        if self.problem.input_format is not None:  # else the first line states their dtype
            by = "declared by the experts" if self.inputs_declared else "asked for"
            lines.append(Text(f"inputs: {self.problem.input_format}, {by}"))
        lines += map(Text, self.notes)
        lines.append(Text(self._costs()))
        if self.error is not None:
            lines.append(Text(f"a call raises NoBackendError: {self.error.splitlines()[0]}", "red"))
        return Group(*lines)

    def _costs(self) -> str:
        if self.bytes is None or self.flops is None or self.active_experts is None:
            return "bytes, flops and floor depend on the token count"
        p, its = self.problem, self.division
        used = f"{self.active_experts:.1f}".removesuffix(".0")
        here = p.num_experts if its is None else its.local.num_experts
        if (p.num_tokens not in (0, 1) or its is not None) and here - self.active_experts > _SURELY:
            used = f"about {used}"
        floor = f"floor not known for {self.environment.device_kind}" if self.floor is None else str(self.floor)
        sent = ""
        if its is not None:
            before, after = (scaled(count, "B") for count in (its.bytes_before, its.bytes_after))
            sent = f"{before} sent before the experts and {after} after them, "
            if self.floor is None and self.environment.device_kind in PEAKS:
                floor = f"floor not known: no figure for the links of {self.environment.device_kind}"
        return (
            f"{'' if its is None else 'each device: '}{used} of {here} experts used, "
            f"{scaled(self.bytes, 'B')} moved, {scaled(self.flops, 'FLOP')}, {sent}".removesuffix(", ")
            + f": {floor}"
        )

    def _repr_html_(self) -> str:
        return html.render(self.__rich__())

    def __str__(self) -> str:
        console = Console(width=120, no_color=True, highlight=False, force_terminal=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()


def explain_problem(
    problem: Problem,
    environment: Environment | None = None,
    backend: str | None = None,
    *,
    inputs_declared: bool = False,
    all: bool = False,
    division: Division | None = None,
    routed: Method | Routing | None = None,
) -> Explanation:
    """The explanation of a problem on a machine, by default this one; no arrays are needed.

    `backend` is a request, like that of a layer. If it cannot run, nothing is raised: `error` has the message.
    `inputs_declared`, `all` and `division`: see `Explanation`. `routed`: the method of router logits, or the routing
    that a call has instead; None: not known.

    Raises:
        ValueError: no backend is called `backend`.
        TypeError, ValueError: the backend cannot run with the configuration of a `tuning.override` in scope.
    """
    environment = environment if environment is not None else Environment.probe()
    chosen = configuration = error = None
    division = None if division is None else division.of_logits(routed, environment)
    try:
        of_a_device = problem if division is None else division.local
        selection = select(of_a_device, environment, backend, registered_backends())
        chosen, answers = selection.backend.name, dict(selection.trail)
        if isinstance(selection.backend, Tunable):
            configuration = tuning.config(selection.backend, of_a_device, environment)
    except NoBackendError as e:
        error, answers = str(e), dict(e.trail)
    trail = tuple((b.name, b.summary, answers[b.name]) for b in registered_backends())
    return Explanation(
        problem,
        environment,
        chosen,
        configuration,
        trail,
        error,
        *_costs(problem, environment, division),
        inputs_declared,
        requested(backend),
        all,
        division,
        () if division is not None else routing_kernel.notes(problem, environment, routed),
    )


def _costs(problem: Problem, environment: Environment, division: Division | None) -> tuple[Any, Any, Any, Floor | None]:
    """Active experts, bytes, flops and the floor, of one device; None for a symbolic token count."""
    if problem.num_tokens is None:
        return None, None, None, None
    sent, devices = 0, 1
    if division is not None:  # tokens and sizes of a device, and the experts of all, among which tokens choose
        problem = dataclasses.replace(division.local, num_experts=division.local.num_choices, num_routed=None)
        sent, devices = division.bytes_before + division.bytes_after, division.expert_devices
    assert problem.num_tokens is not None
    active, operations = active_experts(problem) / devices, flops(problem) / devices
    activations = problem.num_tokens * problem.hidden_size * jnp.dtype(problem.dtype).itemsize
    moved = weight_bytes(problem, active) + 2 * activations
    peak = PEAKS.get(environment.device_kind)
    if peak is None or (sent and peak.links is None):
        return active, moved, operations, None
    peak = dataclasses.replace(peak, flops=peak.flops * times_bfloat16(problem, environment))
    return active, moved, operations, Floor.of(moved, operations, peak, sent)


def explain(
    subject: Any,
    *arguments: Any,
    device: str | None = None,
    backend: str | None = None,
    activation: Activation | str | None = None,
    weights_on: str | None = None,
    input_format: str | None = None,
    all: bool = False,
    split: Split | None = None,
) -> Explanation:
    """Which backend runs a layer, why the others do not, and the minimum cost of the call.

    It is called in one of three forms. Arrays may be `jax.ShapeDtypeStruct`.

    * `explain(layer, x)`: a `jmx.nnx.MoE`, `jmx.linen.MoE` (or any object with `problem(x)`) and its input.
    * `explain(x, routing, experts, activation=..., weights_on=..., input_format=...)`: the arguments of `jmx.moe`.
    * `explain(problem)`: a `Problem`, which has shapes only.

    Args:
        device: name of a device that need not be present, such as "h200" (see `Environment.named`); default: that of
            the arguments, else that of new arrays.
        backend: requested instead of that of the layer. If it cannot run, the explanation's `error` has the message.
        activation, weights_on, input_format: for the second form only, as in `jmx.moe`.
        all: whether the printed table has a row for each backend of other platforms, instead of one line for all.
        split: how mesh axes divide the call, as in `jmx.moe`. The explanation then is that of one device, and has the
            exchange too. The mesh may be a `jax.sharding.AbstractMesh`.

    Raises:
        TypeError, ValueError: `device` or `backend` has no such name, a call would reject these arguments, or the
            backend cannot run with the configuration of a `tuning.override` in scope.
    """
    environment = None if device is None else Environment.named(device)
    check_bool("all", all)
    check_instance("split", split, Split | None, "a jmx.Split, or None")
    check_backend(backend, registered_backends())
    of_moe = {"activation": activation, "weights_on": weights_on, "input_format": input_format}
    of_moe = {name: value for name, value in of_moe.items() if value is not None}
    if is_array(subject):
        _check_form("x", arguments, ("routing", "experts"))
        if activation is None:
            raise TypeError(
                "`activation` (=None) must be given with `x`, `routing` and `experts`, as `jmx.moe` takes it"
            )
        found = _explain_arrays(subject, *arguments, environment=environment, backend=backend, split=split, **of_moe)
        return dataclasses.replace(found, all=all)
    is_problem = isinstance(subject, Problem)
    if not is_problem and not (hasattr(subject, "problem") and not isinstance(subject, type)):
        raise TypeError(
            f"`subject` ({shown(subject)}) must be a layer, a jmx.Problem, or the array `x` of a call of `jmx.moe`"
        )
    if of_moe:
        name, value = next(iter(of_moe.items()))
        raise TypeError(f"`{name}` (={value!r}) must be left out for a {type(subject).__name__}, which has its own")
    _check_form(f"a {type(subject).__name__}", arguments, () if is_problem else ("x",))
    if is_problem:
        return explain_problem(subject, environment, backend, all=all, division=_division(subject, split, environment))
    found = _explain_layer(subject, *arguments, environment=environment, backend=backend, split=split)
    return dataclasses.replace(found, all=all)


def _check_form(subject: str, arguments: tuple[Any, ...], names: tuple[str, ...]) -> None:
    if len(arguments) != len(names):
        wanted = " and ".join(f"`{name}`" for name in names) or "nothing"
        raise TypeError(f"`arguments` ({len(arguments)} of them) must be {wanted} after {subject}")


def _explain_layer(
    layer: Any, x: Any, *, environment: Environment | None, backend: str | None, split: Split | None
) -> Explanation:
    backend = backend if backend is not None else getattr(layer, "backend", None)
    if split is None and hasattr(layer, "split_of"):
        split = layer.split_of(x)
    problem, spare = layer.problem(x), getattr(layer, "spare_experts", 0)
    declared = problem.input_format is not None and getattr(layer, "input_format", "not known") is None
    division = _division(problem, split, environment, x, spare=spare)
    environment = environment or Environment.probe(x, layer)
    method = getattr(layer, "routing", None)
    if isinstance(method, str):  # of a Linen module, which keeps the name
        method = get_method(method, problem.top_k)
    of_layer = {"inputs_declared": declared, "division": division, "routed": method}
    return explain_problem(problem, environment, backend, **of_layer)


def _explain_arrays(
    x: Any,
    routing: Routing | Logits,
    experts: AnyExperts,
    *,
    environment: Environment | None,
    activation: Activation | str,
    weights_on: str = "output",
    input_format: str | None = None,
    backend: str | None = None,
    split: Split | None = None,
) -> Explanation:
    activation, slots = activations.get(activation), None
    check_instance("experts", experts, AnyExperts, KINDS)
    one = one_device(experts)
    number = over_mesh.total_experts(split or Split(), experts)
    check_arguments(x, routing, one, activation, weights_on, number)
    if split is None and isinstance(experts, Experts):
        split = over_mesh.split_of_types(x.ndim - 1, {"x": x}, experts.arrays())
    problem = Problem.of(x, slots_of(routing), one, activation, weights_on, input_format)
    if isinstance(experts, ShardedExperts):
        problem = dataclasses.replace(problem, intermediate_size=experts.intermediate_size)
    if isinstance(experts, PlacedExperts):
        problem, slots = dataclasses.replace(problem, num_experts=number), problem.num_experts
        if isinstance(experts.experts, ShardedExperts):
            problem = dataclasses.replace(problem, intermediate_size=experts.experts.intermediate_size)
    declared = problem.input_format is not None and input_format is None
    division = _division(problem, split, environment, x, *jax.tree.leaves(experts), slots=slots)
    environment = environment or Environment.probe(x, routing, experts)
    routed = routing.method if isinstance(routing, Logits) else routing
    of_call = {"inputs_declared": declared, "division": division, "routed": routed}
    return explain_problem(problem, environment, backend, **of_call)


def _division(
    problem: Problem,
    split: Split | None,
    named: Environment | None,
    *arrays: Any,
    slots: int | None = None,
    spare: int = 0,
) -> Division | None:
    """How a split divides a problem, over its mesh, the one in scope, or that of arrays.

    `named`: devices that need not be here; None: those of this process.
    """
    if split is None:
        return None
    sizes = split.mesh_of(arrays).shape
    if spare:
        slots = slots_needed(problem.num_experts, prod(sizes[name] for name in split.names("expert")), spare)
    return Division.of(problem, split, sizes, slots, None if named is None else named.platform)


def _rejection_dict(rejection: Rejection | None) -> dict[str, str] | None:
    if rejection is None:
        return None
    return {"reason": rejection.reason.value, "detail": rejection.detail, "remedy": rejection.remedy}
