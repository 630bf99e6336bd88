"""Random weights as a source."""

import contextlib
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

import jmx
from jmx.backends import resolve_layout
from jmx.checkpoint.assembly import mesh_of_experts, prepared_over
from jmx.models.config import Config
from jmx.models.sampling import check_seed
from jmx.models.sources.popularity import ROUTINGS, zipf_lengths
from jmx.models.sources.protocol import Shape, in_layer
from jmx.util.checks import check_one_of


@dataclass(frozen=True)
class _Layer:
    """The experts of each layer; see `jmx.checkpoint.ExpertLayer`."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    gate_up_order: str
    format: jmx.Format
    has_bias: bool


class RandomSource[C: Config]:
    """Random weights, made on the device: codes and scales of experts are drawn directly.

    Norms are near 1, biases are small, and products preserve the variance. A tensor depends only on the seed and its
    name.

    Args:
        config: of the model.
        seed: in 0..2^32 - 1.
        shapes: of the tensors outside the experts, by neutral name.
        layers: numbers of the layers with experts.
        sizes: E, H, I of each of those.
        format: of experts' weights.
        gate_up_order: as in `jmx.Experts`.
        bias: whether experts have biases.
        routing: one of `popularity.ROUTINGS`: whether a layer's routers choose all experts equally often.

    Raises:
        ValueError: `seed` is out of range, or an unknown `routing`.
    """

    def __init__(
        self,
        config: C,
        seed: int,
        shapes: Mapping[str, Shape],
        layers: Collection[int],
        sizes: tuple[int, int, int],
        format: jmx.Format,
        *,
        gate_up_order: str,
        bias: bool,
        routing: str = "uniform",
    ):
        check_seed("seed", seed)
        check_one_of("routing", routing, ROUTINGS)
        self.config = config
        self.layers = dict.fromkeys(layers, _Layer(*sizes, gate_up_order, format, bias))
        self._key = jax.random.key(seed)
        self._shapes, self._routing = shapes, routing

    def dense(self, name: str, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
        shape, last = self._shapes[name], name.rpartition(".")[2]
        deviation = 0.02 if last.endswith("bias") else 1.0
        if last.endswith("_weight") or last == "unembedding":
            deviation = shape[-1] ** -0.5
        key = self._named(name)
        drawn = _normal(key, shape, float(last.endswith("_norm")), deviation, sharding)
        if self._routing == "zipf" and last == "router_weight":
            lengths = jax.random.permutation(key, zipf_lengths(shape[0], self.config.top_k))
            drawn = drawn * lengths[:, None].astype(drawn.dtype)
        return drawn

    def experts(self, layer: int, *, sharding: jax.sharding.Sharding | None = None) -> jmx.Experts:
        """A layer's experts, in the layout of this machine. With a sharding, each device draws its own."""
        its = self.layers[layer]
        layout = resolve_layout("auto", jmx.Environment.probe(), its.format)
        return _random_experts(self._named(in_layer(layer, "experts")), its, layout, sharding)

    def progress(self, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Does nothing: nothing is read."""
        return contextlib.nullcontext()

    def _named(self, name: str) -> jax.Array:
        return jax.random.fold_in(self._key, zlib.crc32(name.encode()))


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _normal(
    key: jax.Array, shape: tuple[int, ...], mean: float, deviation: float, sharding: jax.sharding.Sharding | None
) -> jax.Array:
    drawn = jax.random.normal(key, shape, jnp.bfloat16)
    if sharding is not None:
        drawn = jax.lax.with_sharding_constraint(drawn, sharding)
    return (mean + deviation * drawn).astype(jnp.bfloat16)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _random_experts(key: jax.Array, its: _Layer, layout: str, sharding: jax.sharding.Sharding | None) -> jmx.Experts:
    sizes = its.num_experts, its.hidden_size, its.intermediate_size
    made = {"gate_up_order": its.gate_up_order, "format": its.format, "bias": its.has_bias}
    experts = jmx.Experts.random(key, *sizes, **made)
    mesh = mesh_of_experts([sharding])
    if mesh is None:
        return experts.prepare(layout)
    return prepared_over(mesh, jax.lax.with_sharding_constraint(experts, sharding), layout)
