"""Activations between an expert's two matrices: frozen dataclasses, hashable and static, each defined in jnp.

A gated activation takes gate and up, the two halves of the first matrix's 2I outputs; an un-gated one takes its I
outputs. Kernels read the parameters; `__call__` is the definition that they are tested against. All compute in the
dtype of their arguments and propagate NaN. Gradients are those of jax: 0 beyond a clamp, half at the clamp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jmx.numerics.gate_up import split_gate_up
from jmx.util.checks import check_bool, check_finite, check_named, is_array, shown
from jmx.util.typing import Array, Float, Integer


@dataclass(frozen=True)
class Activation:
    """Base class of the activations. `gated`: whether the first matrix has 2I rows (gate and up) or I.

    Gated ones are called with `(gate, up)`, un-gated ones with `(x)`; floating arrays in, the same shape and dtype out.
    """

    gated: ClassVar[bool]

    def __call__(self, *args: Any, **kwargs: Any) -> Float[Array, "..."]:
        raise NotImplementedError(f"`{type(self).__name__}` must define `__call__`, of (gate, up) or (x)")

    @property
    def num_experts(self) -> int | None:
        """The number of experts, if each has parameters of its own; else None."""
        return None


@dataclass(frozen=True)
class SwiGLU(Activation):
    """(up + beta) * gate * sigmoid(alpha * gate), with gate = min(gate, limit) and up = clip(up, -limit, limit).

    gpt-oss has alpha 1.702, beta 1.0, limit 7.0 (its published model code). The defaults are plain SwiGLU (Shazeer,
    "GLU Variants Improve Transformer", 2020).

    Args:
        alpha: slope inside the sigmoid, finite.
        beta: added to up, finite.
        limit: positive and finite, or None for no clamp.

    Raises:
        ValueError, TypeError: a parameter outside its range, or not a number.
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None
    gated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "limit"):
            value = getattr(self, name)
            if name != "limit" or value is not None:
                object.__setattr__(self, name, check_finite(name, value))
        if self.limit is not None and self.limit <= 0:
            raise ValueError(f"`limit` (={self.limit}) must be positive, or None for no clamp")

    def __call__(self, gate: Float[Any, "*shape"], up: Float[Any, "*shape"] | float) -> Float[Array, "*shape"]:
        if self.limit is not None:
            gate = jnp.minimum(gate, self.limit)
            up = jnp.clip(up, -self.limit, self.limit)
        return (up + self.beta) * gate * jax.nn.sigmoid(self.alpha * gate)


@dataclass(frozen=True)
class SwiGLUPerExpert(Activation):
    """`SwiGLU` with parameters of each expert, as the arguments `gemm1_alpha` and so on of TensorRT-LLM's kernels are.

    Of quantized experts the backend `xla` alone runs it. It is called with the experts' ids, too.

    Args:
        alpha, beta: E numbers each, finite.
        limit: E numbers, positive and finite, or None for no clamp.

    Raises:
        ValueError, TypeError: sequences of different lengths, or a parameter that `SwiGLU` rejects.
    """

    alpha: tuple[float, ...]
    beta: tuple[float, ...]
    limit: tuple[float, ...] | None = None
    gated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "limit"):
            value = getattr(self, name)
            if name == "limit" and value is None:
                continue
            if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str) or np.ndim(value) != 1:
                raise TypeError(f"`{name}` ({shown(value)}) must be a sequence of numbers, one an expert")
            numbers = tuple(check_finite(f"{name}[{i}]", number) for i, number in enumerate(value))
            if not numbers:
                raise ValueError(f"`{name}` (={value}) must have a number for each expert")
            if len(numbers) != len(self.alpha):
                raise ValueError(f"`{name}` (={value}) must have as many numbers as `alpha` (={self.alpha})")
            if name == "limit" and min(numbers) <= 0:
                raise ValueError(f"`limit` (={numbers}) must be positive, or None for no clamp")
            object.__setattr__(self, name, numbers)

    @property
    def num_experts(self) -> int:
        return len(self.alpha)

    def __call__(
        self, gate: Float[Any, "*ids I"], up: Float[Any, "*ids I"], experts: Integer[Any, "..."]
    ) -> Float[Array, "*ids I"]:
        """`experts`: the ids, of the first axes of gate and up."""
        more = gate.ndim - experts.ndim

        def of_experts(numbers: tuple[float, ...]) -> Float[Array, "..."]:
            chosen = jnp.asarray(numbers, gate.dtype).at[experts].get(mode="clip")
            return chosen.reshape(*experts.shape, *[1] * more)

        if self.limit is not None:
            limit = of_experts(self.limit)
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + of_experts(self.beta)) * gate * jax.nn.sigmoid(of_experts(self.alpha) * gate)


@dataclass(frozen=True)
class SwiGLUStep(Activation):
    """min(gate * sigmoid(gate), limit) * clip(up, -limit, limit): the gate is clamped after the sigmoid, not before it.

    Step-3.5 has limit 7.0 in some of its layers (vLLM's `SwigluStepAndMul`).

    Args:
        limit: positive and finite.

    Raises:
        ValueError, TypeError: a limit outside its range, or not a number.
    """

    limit: float
    gated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "limit", check_finite("limit", self.limit))
        if self.limit <= 0:
            raise ValueError(f"`limit` (={self.limit}) must be positive")

    def __call__(self, gate: Float[Any, "*shape"], up: Float[Any, "*shape"] | float) -> Float[Array, "*shape"]:
        return jnp.minimum(jax.nn.silu(gate), self.limit) * jnp.clip(up, -self.limit, self.limit)


@dataclass(frozen=True)
class SiLUAndMul(Activation):
    """up * gate * sigmoid(gate): `SwiGLU` without parameters, by its name in most checkpoints."""

    gated: ClassVar[bool] = True

    def __call__(self, gate: Float[Any, "*shape"], up: Float[Any, "*shape"] | float) -> Float[Array, "*shape"]:
        return jax.nn.silu(gate) * up


@dataclass(frozen=True)
class _Approximate(Activation):
    """Base class of activations with an exact (erf) and, with `approximate`, a tanh form."""

    approximate: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "approximate", check_bool("approximate", self.approximate))


@dataclass(frozen=True)
class GELUAndMul(_Approximate):
    """gelu(gate) * up (Shazeer 2020, GEGLU); `approximate` chooses the tanh form, else erf."""

    gated: ClassVar[bool] = True

    def __call__(self, gate: Float[Any, "*shape"], up: Float[Any, "*shape"] | float) -> Float[Array, "*shape"]:
        return jax.nn.gelu(gate, approximate=self.approximate) * up


@dataclass(frozen=True)
class SiLU(Activation):
    """x * sigmoid(x)."""

    gated: ClassVar[bool] = False

    def __call__(self, x: Float[Any, "*shape"]) -> Float[Array, "*shape"]:
        return jax.nn.silu(x)


@dataclass(frozen=True)
class GELU(_Approximate):
    """x * Phi(x) (Hendrycks and Gimpel 2016); `approximate` chooses the tanh form, else erf."""

    gated: ClassVar[bool] = False

    def __call__(self, x: Float[Any, "*shape"]) -> Float[Array, "*shape"]:
        return jax.nn.gelu(x, approximate=self.approximate)


@dataclass(frozen=True)
class ReLU(Activation):
    """max(x, 0)."""

    gated: ClassVar[bool] = False

    def __call__(self, x: Float[Any, "*shape"]) -> Float[Array, "*shape"]:
        return jax.nn.relu(x)


@dataclass(frozen=True)
class ReLU2(Activation):
    """max(x, 0)^2 (So et al., "Primer", 2021)."""

    gated: ClassVar[bool] = False

    def __call__(self, x: Float[Any, "*shape"]) -> Float[Array, "*shape"]:
        return jnp.square(jax.nn.relu(x))


# By name, for arguments and command lines. Those with parameters of one model have no name: `SwiGLU(alpha=...)`.
ACTIVATIONS: dict[str, Activation] = {
    "swiglu": SwiGLU(),
    "silu_and_mul": SiLUAndMul(),
    "gelu_and_mul": GELUAndMul(approximate=False),
    "gelu_tanh_and_mul": GELUAndMul(approximate=True),
    "silu": SiLU(),
    "gelu": GELU(approximate=False),
    "gelu_tanh": GELU(approximate=True),
    "relu": ReLU(),
    "relu2": ReLU2(),
}


def get(activation: Activation | str) -> Activation:
    """An activation, or the one of that name in `ACTIVATIONS`. ValueError, naming those, for other names."""
    return check_named("activation", activation, Activation, ACTIVATIONS)


def apply(
    activation: Activation, h: Float[Any, "*lead N"], order: str | None, experts: Integer[Any, "..."] | None = None
) -> Float[Array, "*lead I"]:
    """Applies `activation` to the outputs of an expert's first matrix.

    Args:
        activation: gated or not.
        h: (..., 2I) for gated activations, (..., I) for others.
        order: the order of gate and up in `h`, one of `gate_up.GATE_UP_ORDERS`; ignored if there is no gate.
        experts: the ids of the first axes of `h`, which an activation with parameters of each expert needs.

    Returns:
        (..., I), in the dtype of `h`.

    Raises:
        TypeError: an activation that returns anything but an array of its arguments' shape.
    """
    of_experts = () if activation.num_experts is None else (experts,)
    halves = split_gate_up(h, order) if activation.gated else (h,)
    found = activation(*halves, *of_experts)
    if not is_array(found) or found.shape != halves[0].shape:
        raise TypeError(
            f"`activation` (={activation}) must return an array of its arguments' shape {halves[0].shape}, not "
            f"{shown(found).removeprefix('=')}"
        )
    return found
