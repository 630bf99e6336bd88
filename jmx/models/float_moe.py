"""Float experts, which jmx does not quantize: two grouped products, see `jmx.floats`."""

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jmx
import jmx.nnx
from jmx.checkpoint.quantizing import FloatExperts
from jmx.floats import grouped_dot
from jmx.lora import Adapters
from jmx.lora.adapters import Skeleton
from jmx.lora.forms import fused
from jmx.models.model_split import ModelSplit
from jmx.models.per_device import on_each_device
from jmx.numerics.gate_up import join_gate_up
from jmx.parallel.over_mesh import OwnExperts, exchanged
from jmx.qat import QAT, MasterExperts
from jmx.routing import Method


def random_experts(
    num_experts: int, hidden: int, intermediate: int, *, bias: bool, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
) -> FloatExperts:
    """Normal weights that preserve the variance of what they multiply, and biases of 0."""
    shapes = (num_experts, 2 * intermediate, hidden), (num_experts, hidden, intermediate)
    weights = [nnx.initializers.normal(shape[-1] ** -0.5)(rngs.params(), shape, dtype) for shape in shapes]
    return FloatExperts(*weights, *(jnp.zeros(shape[:-1], dtype) if bias else None for shape in shapes))


@lru_cache
def abstract_experts(num_experts: int, hidden: int, intermediate: int, gate_up_order: str | None) -> Any:
    """Experts without arrays, whose adapters have the shapes of any others of these sizes."""
    sizes = num_experts, hidden, intermediate
    options: dict[str, Any] = {"gate_up_order": gate_up_order, "format": "fp8_channel"}  # which supports any sizes
    return jax.eval_shape(lambda: jmx.Experts.random(jax.random.key(0), *sizes, **options))  # no device is used


def masters_of(floats: FloatExperts, gate_up_order: str, format: jmx.Format, qat: QAT) -> MasterExperts:
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


class FloatMoE(nnx.Module):
    """The counterpart of `jmx.nnx.MoE` for float experts, with the same call.

    Args:
        correction_bias: whether there is a bias (E,) of the choice of experts, as in `jmx.nnx.MoE`.
        split: over a mesh, how it divides the experts.
    """

    def __init__(
        self,
        experts: FloatExperts,
        activation: jmx.Activation,
        routing: Method,
        *,
        correction_bias: bool = False,
        split: ModelSplit | None = None,
    ):
        of_experts: dict[str, Any] = {"divided": ("expert",)}
        self.gate_up = nnx.Param(experts.gate_up, **of_experts)
        self.down = nnx.Param(experts.down, **of_experts)
        biases = experts.gate_up_bias, experts.down_bias
        self.gate_up_bias, self.down_bias = (
            nnx.data(None if b is None else nnx.Param(b, **of_experts)) for b in biases
        )
        self.split = split
        self.activation = activation
        self.routing = routing
        bias = jmx.nnx.CorrectionBias(jnp.zeros(experts.down.shape[0], jnp.float32)) if correction_bias else None
        self.correction_bias = nnx.data(bias)
        self.adapter_skeleton = nnx.static(None)
        self.lora: dict[str, nnx.LoRAParam] = nnx.data({})

    @property
    def adapters(self) -> Adapters | None:
        """The adapters of the experts, one of gate and up together, or None if there are none."""
        skeleton = self.adapter_skeleton
        if skeleton is None:
            return None
        return skeleton.with_arrays({name: self.lora[name].get_value() for name in skeleton.names})

    def adapt(self, adapters: Adapters) -> None:
        """Adds adapters to the experts, whose gate rows come first.

        Raises:
            ValueError, TypeError: adapters that do not fit.
        """
        experts = abstract_experts(*self.down.shape, "concatenated")
        adapters.check(experts)
        adapters = fused(adapters, experts)
        self.adapter_skeleton = nnx.static(Skeleton.of(adapters))
        divided: dict[str, Any] = {"divided": ("expert",)}
        self.lora = nnx.data(
            {
                name: nnx.LoRAParam(each, **(divided if each.ndim == 3 else {}))  # experts share the others
                for name, each in adapters.arrays().items()
            }
        )

    def __call__(self, x: jax.Array, logits: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """x (..., H), router logits (..., E), mask (...) -> (..., H)."""
        if self.split is None:
            return _routed(self, x, logits, mask)
        arguments = [(argument, ("token",)) for argument in (x, logits, mask)]
        return on_each_device(self.split, [self], partial(_exchanged, self.split.experts), arguments, ("token",))

    def experts_of(self, tokens: jax.Array, routing: jmx.Routing) -> jax.Array:
        """Tokens (T, H) and their routing (T, k) -> (T, H). Ids outside 0..E-1 contribute nothing."""
        (ids, weights), top_k = routing, routing.expert_ids.shape[-1]
        groups = jmx.group(ids, self.gate_up.shape[0])

        adapters = {} if self.adapters is None else self.adapters.by_target()

        def product(rows: jax.Array, role: str) -> jax.Array:
            sums = grouped_dot(rows, getattr(self, role)[...], groups.sizes)
            if (bias := getattr(self, f"{role}_bias")) is not None:
                sums += bias[...][ids.reshape(-1)[groups.order]]
            if (adapter := adapters.get(role)) is not None:
                a, b = (_of_each(matrix, groups.sizes.size).astype(rows.dtype) for matrix in (adapter.a, adapter.b))
                inner = grouped_dot(rows, a, groups.sizes) * adapter.scale
                sums += grouped_dot(inner.astype(rows.dtype), b, groups.sizes)
            return sums.astype(rows.dtype)

        hidden = product(tokens[groups.order // top_k], "gate_up")
        gate, up = jnp.split(hidden, 2, axis=-1)
        out = product(self.activation(gate, up), "down")
        out = out[groups.inverse].reshape(*ids.shape, -1)
        mine = (ids >= 0) & (ids < self.gate_up.shape[0]) & (weights != 0)
        out = jnp.where(mine[..., None], out, 0)  # rows of no expert are undefined
        summed = jnp.einsum("tkh,tk->th", out.astype(jnp.float32), weights, precision=lax.Precision.HIGHEST)
        return summed.astype(tokens.dtype)


def _of_each(matrix: jax.Array, num_experts: int) -> jax.Array:
    """The matrices (E, N, K) of an adapter, of which experts may share one, (N, K)."""
    return jnp.broadcast_to(matrix, (num_experts, *matrix.shape[-2:]))


def _routing(moe: FloatMoE, x: jax.Array, logits: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jmx.Routing]:
    """The tokens of x (T, H), and their routing."""
    bias = None if moe.correction_bias is None else moe.correction_bias[...]
    values = jmx.Logits(logits.reshape(-1, logits.shape[-1]), moe.routing, bias)
    return x.reshape(-1, x.shape[-1]), jmx.route(values, None if mask is None else mask.reshape(-1))


def _routed(moe: FloatMoE, x: jax.Array, logits: jax.Array, mask: jax.Array | None) -> jax.Array:
    return moe.experts_of(*_routing(moe, x, logits, mask)).reshape(x.shape)


def _exchanged(split: jmx.Split, moe: FloatMoE, x: jax.Array, logits: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The results of one device's tokens, inside `jax.shard_map`."""
    tokens, routing = _routing(moe, x, logits, mask)
    graph, arrays = nnx.split(moe)

    def experts_of(arrays: Any, tokens: jax.Array, routing: jmx.Routing) -> jax.Array:
        return nnx.merge(graph, arrays).experts_of(tokens, routing)

    own = OwnExperts(moe.gate_up.shape[0], experts_of, arrays)
    return exchanged(split, tokens, routing, own).reshape(x.shape)
