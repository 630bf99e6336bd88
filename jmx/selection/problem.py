"""`Problem`: everything static about one call of the layer, and the checks of it."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmx import activations
from jmx.activations import Activation
from jmx.experts import ORDERS, Experts
from jmx.experts.arrays import check_arrays
from jmx.numerics import layouts
from jmx.numerics.formats import FORMATS
from jmx.numerics.input_formats import INPUT_FORMATS, resolve
from jmx.routing import Logits, Routing
from jmx.routing.logits import check as check_logits
from jmx.util.checks import (
    check_array,
    check_bool,
    check_dtype,
    check_instance,
    check_int,
    check_one_of,
    check_shape,
    check_str,
)
from jmx.util.typing import Float

WEIGHTS_ON = ("output", "input")


@dataclass(frozen=True)
class Problem:
    """Everything static about one call of the layer. Backends accept or reject it, and compute it.

    Args:
        num_tokens: tokens of the call, or None if it is symbolic (`jax.export`).
        hidden_size, intermediate_size, num_experts, top_k: sizes.
        dtype: name of the activations' dtype.
        format: name of the weights' format.
        input_format: name of the format that activations are rounded to before each product; None: `dtype` itself.
        padded_from: the sizes before padding, hidden and intermediate, if weights are padded; else None.
        activation: the activation between the two products.
        gate_up_order: one of `gate_up.GATE_UP_ORDERS`, or None for un-gated experts.
        bias: whether the experts have biases.
        layout: name of the weights' layout.
        weights_on: whether routing weights multiply the experts' "output" or "input".
        adapters: whether the experts have adapters, see `jmx.lora`.
        num_routed: the experts among which tokens are routed, if these are some of them; None: these.

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
    padded_from: tuple[int, int] | None = None
    adapters: bool = False
    num_routed: int | None = None

    def __post_init__(self) -> None:
        if self.num_tokens is not None:
            self._set("num_tokens", check_int("num_tokens", self.num_tokens, least=0))
        sizes = {name: getattr(self, name) for name in ("num_experts", "hidden_size", "intermediate_size")}
        for name, size in sizes.items():
            self._set(name, check_int(name, size, least=1))
        if self.num_routed is not None:
            self._set("num_routed", check_int("num_routed", self.num_routed, least=self.num_experts))
        self._set("top_k", check_int("top_k", self.top_k, least=0))
        check_str("dtype", self.dtype)
        self._set("dtype", check_dtype("dtype", self.dtype, jnp.floating).name)
        check_one_of("format", self.format, FORMATS)
        check_one_of("input_format", self.input_format, (*INPUT_FORMATS, None))
        self._set("activation", activations.get(self.activation))
        check_one_of("gate_up_order", self.gate_up_order, ORDERS)
        self._set("bias", check_bool("bias", self.bias))
        layouts.get(self.layout)
        if self.padded_from is not None:
            self._set("padded_from", check_shape("padded_from", self.padded_from, 2))
        check_one_of("weights_on", self.weights_on, WEIGHTS_ON)
        self._set("adapters", check_bool("adapters", self.adapters))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls,
        x: Float[Any, "*tokens H"],
        top_k: int,
        experts: Experts,
        activation: Activation | str,
        weights_on: str = "output",
        input_format: str | None = None,
        adapters: bool = False,
        num_routed: int | None = None,
    ) -> "Problem":
        """The problem of calling `experts` on `x` (..., H): arrays, tracers or `jax.ShapeDtypeStruct`.

        `input_format`: a format or a family that the caller requests, or None; see `input_formats.resolve`.
        `adapters`: whether these experts have adapters. `num_routed`: of how many experts these are some.
        """
        check_x(x, check_instance("experts", experts, Experts, "jmx.Experts").hidden_size, abstract=True)
        tokens: int | None = 1
        for size in x.shape[:-1]:
            tokens = tokens * size if isinstance(size, int) and tokens is not None else None
        hidden_size, intermediate_size = experts.array_sizes
        padded = experts.padded_to is not None
        return cls(
            num_tokens=tokens,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
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
            padded_from=(experts.hidden_size, experts.intermediate_size) if padded else None,
            adapters=adapters,
            num_routed=num_routed,
        )

    def without_padding(self) -> "Problem":
        """The same problem of weights that are not padded."""
        if self.padded_from is None:
            return self
        hidden_size, intermediate_size = self.padded_from
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
        return dataclasses.replace(self, **sizes, padded_from=None)

    @property
    def num_choices(self) -> int:
        """Experts among which tokens are routed: an expert gets num_tokens top_k / num_choices rows on average."""
        return self.num_experts if self.num_routed is None else self.num_routed

    @property
    def on_input(self) -> bool:
        """Whether routing weights multiply the experts' input."""
        return self.weights_on == "input"

    def __str__(self) -> str:
        tokens = {None: "a symbolic number of tokens", 1: "1 token"}.get(self.num_tokens, f"{self.num_tokens} tokens")
        sizes = self.hidden_size, self.intermediate_size
        experts = f"{self.num_choices} experts" + ("" if self.num_routed is None else f", {self.num_experts} of them")
        h, i = (
            f"{size}" if size == its else f"{size} (padded to {its})"
            for size, its in zip(self.padded_from or sizes, sizes, strict=True)
        )
        return (
            f"{tokens}, top-{self.top_k} of {experts}, H={h}, I={i}, "
            f"{self.format} ({self.layout}) x {self.input_format or self.dtype}"
            f"{', with adapters' if self.adapters else ''}"
        )


def with_tokens(problem: Problem, num_tokens: Any) -> Problem:
    """The same problem for another number of tokens: `x.shape[0]` of (T, H), which may be symbolic."""
    return dataclasses.replace(problem, num_tokens=num_tokens if isinstance(num_tokens, int) else None)


class Some(NamedTuple):
    """Which of the experts among which tokens are routed a call has.

    Args:
        num_routed: how many there are in all.
        first: the first one of the call, int32, for logits, which are of all; None: ids count from it already.
    """

    num_routed: int
    first: Any = None


def check_arguments(
    x: Float[Any, "*tokens H"],
    routing: Any,
    experts: Any,
    activation: Any,
    weights_on: str,
    num_experts: int | None = None,
) -> None:
    """Raises ValueError or TypeError, naming the argument, for arguments that `moe` rejects; these may be abstract.

    `num_experts`: those of all devices; None: `experts`.
    """
    check_instance("routing", routing, Routing | Logits, "a jmx.Routing or jmx.Logits")
    check_instance("experts", experts, Experts, "jmx.Experts")
    check_arrays(experts)
    check_x(x, experts.hidden_size, abstract=True)
    if isinstance(routing, Logits):
        values = check_array("values", routing.values, abstract=True)
        number = experts.num_experts if num_experts is None else num_experts
        if values.shape[-1:] != (number,):
            raise ValueError(f"`values` (shape {values.shape}) must be (..., {number}), one an expert")
        check_logits(routing)
    experts.check_activation(activation)
    check_one_of("weights_on", weights_on, WEIGHTS_ON)


def check_x(x: Float[Any, "*tokens H"], hidden_size: int, *, abstract: bool = False) -> None:
    """Raises ValueError or TypeError, naming it, unless `x` is floating (..., hidden_size) and not narrowed by jax.

    `abstract`: as of `check_array`.
    """
    check_array("x", x, abstract=abstract)
    if not x.shape or x.shape[-1] != hidden_size:
        raise ValueError(f"`x` (of shape {x.shape}) must be (..., {hidden_size}), the experts' hidden size")
    if not jnp.issubdtype(x.dtype, jnp.floating) or jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
        raise TypeError(f"`x` (dtype {x.dtype}) must be floating, and not narrowed by jax")


def resolve_input_format(experts: Experts, wanted: str | None) -> str | None:
    """The format that both products' inputs are rounded to, a key of `input_formats.INPUT_FORMATS`; None: x's dtype.

    Args:
        experts: may declare one, as a checkpoint does.
        wanted: a format or family that the caller requests, or None.

    Raises:
        ValueError: see `input_formats.resolve`; a format whose blocks do not divide the experts' sizes, or a static one
            for experts that have no static scales.
    """
    name = resolve(experts.input_format, wanted, (None, *INPUT_FORMATS))
    if name is None:
        return None
    format = INPUT_FORMATS[name]
    format.check_sizes(*experts.array_sizes)
    if format.static and experts.gate_up_input_scale is None:
        raise ValueError(
            f"`input_format` (={name!r}) is static, and `experts` have no scales for it: add them with "
            "`experts.with_inputs`"
        )
    return name


def check_by_token(experts: Experts, wanted: str | None) -> None:
    """Raises ValueError if inputs have one dynamic scale for all tokens, of which no device has all.

    `wanted`: as of `resolve_input_format`.
    """
    name = resolve(experts.input_format, wanted, (None, *INPUT_FORMATS))
    if name is not None and not INPUT_FORMATS[name].by_token:
        known = [name for name, format in INPUT_FORMATS.items() if format.by_token]
        raise ValueError(f"`input_format` (={name!r}) must be one of {known} where several devices run a call")


def weight_shapes(problem: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
    """Logical shapes of one expert's two weights."""
    rows = problem.intermediate_size * (1 if problem.gate_up_order is None else 2)
    return (rows, problem.hidden_size), (problem.hidden_size, problem.intermediate_size)


def weight_bytes(problem: Problem, experts: float) -> float:
    """Bytes of the values and scales of `experts` experts."""
    return experts * sum(FORMATS[problem.format].bytes(shape) for shape in weight_shapes(problem))
