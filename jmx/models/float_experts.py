"""Float experts of checkpoints, as the experts of a layer."""

import jax
import jax.numpy as jnp

import jmx
from jmx.checkpoint.quantizing import FloatExperts
from jmx.numerics.formats import FORMATS, BlockScaled, Format
from jmx.numerics.gate_up import join_gate_up
from jmx.qat import QAT, MasterExperts

ORDER = "concatenated"  # of their rows of gate and up


def format_of(dtype: jax.typing.DTypeLike) -> Format:
    """The format of weights of that dtype that are not quantized."""
    return FORMATS[jnp.dtype(dtype).name]


def experts_of(floats: FloatExperts, dtype: jax.typing.DTypeLike) -> jmx.Experts:
    """Float experts in that dtype."""
    cast = jax.tree.map(lambda array: array.astype(dtype), floats)
    weights = BlockScaled(cast.gate_up), BlockScaled(cast.down)
    biases = cast.gate_up_bias, cast.down_bias
    return jmx.Experts.of(*weights, *biases, gate_up_order=ORDER, format=format_of(dtype))


def masters_of(floats: FloatExperts, gate_up_order: str, format: Format, qat: QAT) -> MasterExperts:
    """Float experts as master weights of `format`, with rows of gate and up in that order."""
    gate, up = jnp.split(floats.gate_up, 2, axis=1)
    gate_up = join_gate_up(gate.mT, up.mT, gate_up_order).mT
    bias = floats.gate_up_bias
    if bias is not None:
        gate_bias, up_bias = jnp.split(bias, 2, axis=-1)
        bias = join_gate_up(gate_bias, up_bias, gate_up_order)
    return MasterExperts.of(
        gate_up.astype(qat.dtype),
        floats.down.astype(qat.dtype),
        bias,
        floats.down_bias,
        gate_up_order=gate_up_order,
        format=format,
        gradients=qat.gradients,
        scale_rule=qat.scale_rule,
    )
