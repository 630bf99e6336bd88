"""Float experts, which jmx does not run: two grouped GEMMs by XLA's `ragged_dot`."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jmx
import jmx.nnx
from jmx.checkpoint.quantizing import FloatExperts
from jmx.models.layers import precision
from jmx.routing import Method


def random_experts(
    num_experts: int, hidden: int, intermediate: int, *, bias: bool, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
) -> FloatExperts:
    """Normal weights that preserve the variance of what they multiply, and biases of 0."""
    shapes = (num_experts, 2 * intermediate, hidden), (num_experts, hidden, intermediate)
    weights = [nnx.initializers.normal(shape[-1] ** -0.5)(rngs.params(), shape, dtype) for shape in shapes]
    return FloatExperts(*weights, *(jnp.zeros(shape[:-1], dtype) if bias else None for shape in shapes))


class FloatMoE(nnx.Module):
    """The counterpart of `jmx.nnx.MoE` for float experts, with the same call.

    Args:
        correction_bias: whether there is a bias (E,) of the choice of experts, as in `jmx.nnx.MoE`.
    """

    def __init__(
        self,
        experts: FloatExperts,
        activation: jmx.Activation,
        routing: Method,
        *,
        correction_bias: bool = False,
    ):
        self.gate_up = nnx.Param(experts.gate_up)
        self.down = nnx.Param(experts.down)
        biases = experts.gate_up_bias, experts.down_bias
        self.gate_up_bias, self.down_bias = (nnx.data(None if b is None else nnx.Param(b)) for b in biases)
        self.activation = activation
        self.routing = routing
        bias = jmx.nnx.CorrectionBias(jnp.zeros(experts.down.shape[0], jnp.float32)) if correction_bias else None
        self.correction_bias = nnx.data(bias)

    def __call__(self, x: jax.Array, logits: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """x (..., H), router logits (..., E), mask (...) -> (..., H)."""
        logits = logits.reshape(-1, logits.shape[-1])
        bias = None if self.correction_bias is None else self.correction_bias[...]
        ids, weights = jmx.route(jmx.Logits(logits, self.routing, bias), None if mask is None else mask.reshape(-1))
        tokens, top_k = x.reshape(-1, x.shape[-1]), ids.shape[-1]
        groups = jmx.group(ids, self.gate_up.shape[0])

        def product(rows: jax.Array, weights: nnx.Param, bias: nnx.Param | None) -> jax.Array:
            exact = precision(rows.dtype)
            sums = lax.ragged_dot(rows, weights[...].mT, groups.sizes, exact, preferred_element_type=jnp.float32)
            if bias is not None:
                sums += bias[...][ids.reshape(-1)[groups.order]]
            return sums.astype(rows.dtype)

        hidden = product(tokens[groups.order // top_k], self.gate_up, self.gate_up_bias)
        gate, up = jnp.split(hidden, 2, axis=-1)
        out = product(self.activation(gate, up), self.down, self.down_bias)
        out = out[groups.inverse].reshape(*ids.shape, -1)
        out = jnp.where(weights[..., None] == 0, 0, out)  # rows of no expert are undefined
        summed = jnp.einsum("tkh,tk->th", out.astype(jnp.float32), weights, precision=lax.Precision.HIGHEST)
        return summed.astype(x.dtype).reshape(x.shape)
