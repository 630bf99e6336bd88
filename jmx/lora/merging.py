"""Adapters added into the weights: as floats, or quantized again, with what that loses."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmx.experts import ROLES, Experts
from jmx.experts.stacking import check_one_layer
from jmx.lora.adapters import Adapters
from jmx.lora.forms import fused
from jmx.numerics import formats
from jmx.numerics.formats import Format
from jmx.util import html
from jmx.util.checks import check_dtype, check_instance
from jmx.util.tables import numbers
from jmx.util.typing import Array, Float, Float32


class Requantized(NamedTuple):
    """Experts with their adapters merged and quantized, and what that lost.

    Args:
        experts: the new weights; biases are shared with the old ones.
        errors: of each weight, "gate_up" and "down", float32 (E,): the norm of the rounding error over that of what
            the adapters changed. From about 1 on, quantization loses as much as was trained. NaN for experts that the
            adapters do not change.
        relative_errors: likewise, over the norm of the merged weight.
    """

    experts: Experts
    errors: dict[str, Float32[np.ndarray, " E"]]
    relative_errors: dict[str, Float32[np.ndarray, " E"]]

    def _repr_html_(self) -> str:
        """A row for each expert."""
        columns = [f"{name}, over {what}" for name in self.errors for what in ("the change", "the weight")]
        both = [of[name] for name in self.errors for of in (self.errors, self.relative_errors)]
        rows = ([str(expert), *(f"{error:.4f}" for error in its)] for expert, its in enumerate(zip(*both, strict=True)))
        return "<p>Rounding errors</p>" + html.table(numbers("expert", *columns), rows)


def merge(
    experts: Experts, adapters: Adapters, *, dtype: Any = jnp.bfloat16
) -> tuple[Float[Array, "E N H"], Float[Array, "E H I"]]:
    """Float weights with the adapters added: gate_up (E, 2I, H) and down (E, H, I), as `Experts.dequantize` has them.

    They are added in float32, and rounded once.

    Args:
        experts: of one layer.
        adapters: of these experts.
        dtype: bfloat16 or float32.

    Raises:
        ValueError, TypeError: a stack of layers, adapters that do not fit, another dtype.
    """
    dtype = check_dtype("dtype", dtype, jnp.bfloat16, jnp.float32)
    _check(experts, adapters)
    floats = dict(zip(ROLES, experts.dequantize(jnp.float32), strict=True))
    return tuple(_added(floats[role], experts, adapters, role).astype(dtype) for role in ROLES)  # pyright: ignore[reportReturnType]


def requantize(experts: Experts, adapters: Adapters, *, format: Format | str | None = None) -> Requantized:
    """Experts with the adapters added, quantized again.

    Args:
        experts: of one layer.
        adapters: of these experts.
        format: of the new weights, or its name in `jmx.FORMATS`; None: that of `experts`.

    Raises:
        ValueError, TypeError: as `merge`, and as `Experts.quantize`.
    """
    _check(experts, adapters)
    format = experts.format if format is None else formats.get(format)
    merged = merge(experts, adapters, dtype=jnp.float32)
    biases = experts.gate_up_bias, experts.down_bias
    new = Experts.quantize(
        *merged, *biases, gate_up_order=experts.gate_up_order, format=format, pad=experts.padded_to is not None
    )
    before, after = (dict(zip(ROLES, each.dequantize(jnp.float32), strict=True)) for each in (experts, new))
    errors, relative = {}, {}
    for role, wanted in zip(ROLES, merged, strict=True):
        lost, changed = _norms(after[role] - wanted), _norms(wanted - before[role])
        errors[role] = np.divide(lost, changed, out=np.full_like(lost, np.nan), where=changed > 0)
        relative[role] = lost / _norms(wanted)
    return Requantized(new.prepare(experts.layout) if format == experts.format else new, errors, relative)


def _check(experts: Experts, adapters: Adapters) -> None:
    check_instance("experts", experts, Experts, "jmx.Experts")
    check_one_layer(experts)
    check_instance("adapters", adapters, Adapters, "a jmx.lora.Adapters")
    adapters.check(experts)


def _added(weight: Float[Array, "E N K"], experts: Experts, adapters: Adapters, role: str) -> Float[Array, "E N K"]:
    adapter = getattr(fused(adapters, experts), role)
    if adapter is None:
        return weight
    a, b = (jnp.asarray(matrix, jnp.float32) for matrix in (adapter.a, adapter.b))
    return weight + adapter.scale * jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)


def _norms(weights: Float[Array, "E N K"]) -> Float32[np.ndarray, " E"]:
    return np.asarray(jnp.linalg.norm(weights.reshape(weights.shape[0], -1), axis=1))
