"""Experts of a layer that a mesh divides along their intermediate axis: the counterpart of `jmx.nnx.MoE` for shards."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jmx
import jmx.nnx
from jmx.experts import has_expert_axis
from jmx.models.model_split import ModelSplit
from jmx.parallel.over_mesh import expert_specs
from jmx.routing import Method
from jmx.selection.problem import Problem


class ShardedMoE(nnx.Module):
    """`jmx.ShardedExperts` over a mesh, with the call of `jmx.nnx.MoE`.

    Args:
        experts: the shards; their mesh axes are those of `split`.
        activation, routing, correction_bias, backend: as in `jmx.nnx.MoE`.
        split: how the mesh divides the model.
    """

    def __init__(
        self,
        experts: jmx.ShardedExperts,
        activation: jmx.Activation,
        routing: Method,
        *,
        correction_bias: bool = False,
        backend: str | None = None,
        split: ModelSplit,
    ):
        num_experts = experts.shards.gate_up.values.shape[1]
        self.activation, self.routing, self.backend, self.split = activation, routing, backend, split
        for name, array in experts.shards.arrays().items():
            kind = jmx.nnx.variable_of(name, experts.shards.format)
            of_experts = ("expert",) if has_expert_axis(name) else ()
            setattr(self, name, kind(array, divided=("intermediate", *of_experts)))
        bias = experts.down_bias
        self.down_bias = nnx.data(None if bias is None else nnx.Param(bias, divided=("expert",)))
        self.skeleton = nnx.static(
            dataclasses.replace(experts, shards=experts.shards.with_arrays({}), down_bias=None)  # all but the arrays
        )
        self.names = tuple(experts.shards.arrays())
        self.correction_bias = nnx.data(
            jmx.nnx.CorrectionBias(jnp.zeros(num_experts, jnp.float32)) if correction_bias else None
        )

    @property
    def experts(self) -> jmx.ShardedExperts:
        """The shards as a pytree."""
        shards = self.skeleton.shards.with_arrays({name: getattr(self, name).get_value() for name in self.names})
        bias = None if self.down_bias is None else self.down_bias[...]
        return dataclasses.replace(self.skeleton, shards=shards, down_bias=bias)

    def __call__(self, x: jax.Array, logits: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """x (..., H), router logits (..., E), mask (...) -> (..., H)."""
        bias = None if self.correction_bias is None else self.correction_bias[...]
        routing = jmx.Logits(logits, self.routing, bias)
        options: dict[str, Any] = {"activation": self.activation, "backend": self.backend}
        return jmx.moe(x, routing, self.experts, **options, mask=mask, split=self.split.experts)

    def problem(self, x: Any) -> Problem:
        """That of x and one shard, for `jmx.explain`."""
        shard = jax.eval_shape(lambda experts: experts.shard(0), self.experts)
        return Problem.of(x, self.routing.top_k, shard, self.activation)


def in_shards(experts: jmx.Experts, split: ModelSplit) -> jmx.ShardedExperts:
    """Shards of experts, in their layout, of which each device makes its own. Frees the experts' arrays.

    Args:
        experts: on the devices of the mesh, with the sharding `split.reading` or `split.sharding("expert")`. In the
            first case devices that share experts get those that the others have read; nothing else moves.
        split: how the mesh divides the model.
    """
    count, layout = split.ways("intermediate"), experts.layout
    whole, specs = dataclasses.replace(split.experts, intermediate=None), partial(expert_specs, split.experts)
    shapes = jax.eval_shape(lambda its: jmx.ShardedExperts.of(its, count).prepare(layout), experts)

    def own(experts: jmx.Experts) -> jmx.ShardedExperts:
        shards = jmx.ShardedExperts.of(experts, count)
        at = lax.axis_index(split.intermediate)
        mine = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, at, 1), shards.shards)
        return dataclasses.replace(shards, shards=mine).prepare(layout)

    mapped = jax.shard_map(
        own, mesh=split.mesh, in_specs=(expert_specs(whole, experts),), out_specs=specs(shapes), check_vma=False
    )
    shards = jax.block_until_ready(jax.jit(mapped)(experts))
    for array in experts.arrays().values():
        array.delete()
    return shards
