"""Arguments of the NNX and Linen modules: checks, defaults, and initial weights."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jmx import activations, routing
from jmx.activations import Activation
from jmx.backends import registered_backends, resolve_layout
from jmx.experts import ORDERS, Experts
from jmx.experts.creation import resolve_bias_dtype
from jmx.lora import Adapters, LoRA
from jmx.lora.adapters import check_targets
from jmx.numerics import formats
from jmx.numerics.formats import Format
from jmx.numerics.input_formats import FAMILIES, INPUT_FORMATS
from jmx.numerics.layouts import LAYOUTS
from jmx.parallel.experts_form import AnyExperts, Form, one_device
from jmx.parallel.module_axes import check_module_axes
from jmx.qat import QAT, MasterExperts
from jmx.qat.masters import MASTER_ARRAYS, check_of_layer
from jmx.routing import Method, TopKSoftmax
from jmx.selection.environment import Environment
from jmx.selection.problem import WEIGHTS_ON, resolve_input_format
from jmx.selection.select import check_backend
from jmx.util.checks import check_bool, check_instance, check_int, check_one_of
from jmx.util.typing import Array, Key, UInt32

SIZES = ("hidden_size", "intermediate_size", "num_experts", "top_k")


@dataclass(frozen=True)
class Arguments:
    """The arguments of a module (see `jmx.nnx.MoE`), checked, with names and defaults resolved.

    Raises:
        ValueError, TypeError: arguments that are wrong, or do not fit each other, naming the first wrong one.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    format: Format
    activation: Activation
    bias: bool
    gate_up_order: str | None
    routing: Method
    router: bool
    router_bias: bool
    correction_bias: bool
    weights_on: str
    input_format: str | None
    backend: str | None
    save_gate_up: bool
    layout: str
    param_dtype: Any
    axes: Mapping[str, Any] | None
    spare_experts: int
    experts: Experts | MasterExperts | None
    lora: LoRA | None
    qat: QAT | None

    @classmethod
    def of(cls, **given: Any) -> "Arguments":
        """The arguments given to a module, in which names and None may replace formats, activations and methods."""
        sizes = {name: check_int(name, given[name], least=1) for name in SIZES}
        flags = {name: check_bool(name, given[name]) for name in ("bias", "router", "correction_bias", "save_gate_up")}
        router_bias = given["router_bias"]
        flags["router_bias"] = flags["bias"] if router_bias is None else check_bool("router_bias", router_bias)
        qat = check_instance("qat", given["qat"], QAT | None, "a jmx.training.QAT, or None")
        kinds = (Experts | None, "jmx.Experts, or None")
        if qat is not None:
            kinds = (Experts | MasterExperts | None, "jmx.Experts, a jmx.training.MasterExperts, or None")
        experts = check_instance("experts", given["experts"], *kinds)
        activation = activations.get(given["activation"])
        order = check_one_of("gate_up_order", given["gate_up_order"], ("auto", *ORDERS))
        if order == "auto" and experts is not None:
            order = experts.gate_up_order
        check_one_of("weights_on", given["weights_on"], WEIGHTS_ON)
        check_one_of("input_format", given["input_format"], (*INPUT_FORMATS, *FAMILIES, None))
        check_backend(given["backend"], registered_backends())
        check_one_of("layout", given["layout"], ("auto", *sorted(LAYOUTS)))
        resolve_bias_dtype("param_dtype", given["param_dtype"])
        if given["axes"] is not None:
            check_module_axes(given["axes"])
        check_instance("lora", given["lora"], LoRA | None, "a jmx.lora.LoRA, or None")
        resolved: dict[str, Any] = {
            "spare_experts": check_int("spare_experts", given["spare_experts"], least=0),
            "format": formats.get(given["format"]),
            "activation": activation,
            "gate_up_order": resolve_order(order, activation),
            "routing": resolve_method(given["routing"], sizes["top_k"], sizes["num_experts"], flags["correction_bias"]),
        }
        arguments = cls(**{**given, **sizes, **flags, **resolved})
        if arguments.qat is not None:
            if arguments.lora is not None:
                raise ValueError(f"`lora` (={arguments.lora}) must be None for a layer with `qat`")
            check_undivided(arguments.axes, arguments.spare_experts, "master weights")
        elif arguments.format.is_float and arguments.spare_experts:
            raise ValueError(
                f"`spare_experts` (={arguments.spare_experts}) must be 0 for experts in {arguments.format.name!r}, of "
                "which copies would be trained apart"
            )
        if arguments.lora is not None:
            check_undivided(arguments.axes, arguments.spare_experts, "experts with adapters")
            check_targets("lora.targets", arguments.lora.targets, arguments.gate_up_order is not None)
        return arguments

    def initial_adapters(
        self, key: Callable[[], Key[Array, ""] | UInt32[Array, "2"]], held: AnyExperts
    ) -> Adapters | None:
        """The initial adapters of the experts that a module holds, if `lora` asks for some."""
        return None if self.lora is None else self.lora.random(key(), one_device(held))

    def initial_weights(
        self, key: Callable[[], Key[Array, ""] | UInt32[Array, "2"]], form: Form | None = None
    ) -> tuple[AnyExperts, Form]:
        """The initial weights, in the module's layout: `experts`, or random ones from `key()`, called only then.

        And their form: None is that of the mesh in scope.

        Raises:
            ValueError: sizes that no experts can have, that differ from those of `experts`, or that the mesh does not
                divide.
        """
        experts = self.experts
        sizes = {name: getattr(self, name) for name in ("num_experts", "hidden_size", "intermediate_size")}
        kind = {"gate_up_order": self.gate_up_order, "format": self.format, "bias": self.bias}
        if self.qat is not None:
            return self._initial_masters(self.qat, key, sizes | kind), Form()
        assert not isinstance(experts, MasterExperts), "checked by `of`"
        if experts is None:
            experts = Experts.random(key(), **sizes, **kind, bias_dtype=self.param_dtype)
        else:
            experts.check(**sizes, **kind)
        inputs = resolve_input_format(experts, self.input_format)
        layout = resolve_layout(self.layout, Environment.probe(experts), experts.format, inputs)
        form = dataclasses.replace(form or Form.of(self.axes, self.spare_experts), input_format=inputs)
        return form.apply(experts).prepare(layout), form

    def _initial_masters(self, qat: QAT, key: Callable[[], Any], wanted: dict[str, Any]) -> MasterExperts:
        """The initial master weights: `experts` as they are or dequantized, or random ones."""
        experts = self.experts
        if experts is None:
            return MasterExperts.random(key(), **wanted, bias_dtype=self.param_dtype, qat=qat)
        if isinstance(experts, Experts):
            experts = qat.masters(experts)
        check_of_layer(experts, qat, **wanted)
        return experts


def is_trained(name: str, format: Format) -> bool:
    """Whether the array of experts called `name` is trained: biases, master weights, and weights that are floats."""
    return name.endswith("bias") or name in MASTER_ARRAYS or (format.is_float and name.endswith("_values"))


def check_undivided(axes: Mapping[str, Any] | None, spare_experts: int, what: str) -> None:
    """Raises ValueError for a module with experts in slots, or divided along other axes than theirs, naming `what` it
    cannot have then."""
    if spare_experts:
        raise ValueError(f"`spare_experts` (={spare_experts}) must be 0 for {what}")
    for name in ("intermediate", "hidden"):
        if (given := (axes or {}).get(name)) is not None:
            raise ValueError(f"`axes` (with {name!r}: {given!r}) must not divide {name!r} for {what}")


def resolve_order(gate_up_order: str | None, activation: Activation) -> str | None:
    """The order of gate and up rows: "auto" is "concatenated" if `activation` has a gate, else None.

    Raises:
        ValueError: an order that does not fit `activation`.
    """
    if gate_up_order == "auto":
        return "concatenated" if activation.gated else None
    if activation.gated != (gate_up_order is not None):
        raise ValueError(
            f"`gate_up_order` (={gate_up_order!r}) must be {'given' if activation.gated else 'None'} for "
            f"`activation` (={activation}), which has {'a' if activation.gated else 'no'} gate"
        )
    return gate_up_order


def resolve_method(method: Method | str | None, top_k: int, num_experts: int, correction_bias: bool) -> Method:
    """The routing method: `TopKSoftmax(top_k)` if `method` is None.

    Raises:
        ValueError: a method that has another `top_k`, cannot choose among `num_experts`, or has no correction bias.
    """
    method = TopKSoftmax(top_k) if method is None else routing.get(method, top_k)
    if method.top_k != top_k:
        raise ValueError(f"`top_k` (={top_k}) must be that of `routing` (={method})")
    method.check(num_experts)
    if correction_bias and not method.takes_bias:
        raise ValueError(f"`correction_bias` (=True) must be False for `routing` (={method}), which has no such bias")
    return method
