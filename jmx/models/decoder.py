"""A decoder in Flax NNX on `jmx.nnx.MoE`: blocks between an embedding and logits."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

import jmx
import jmx.nnx
from jmx.backends import registered_backends
from jmx.checkpoint.quantizing import FloatExperts
from jmx.models.block import Block, DenseBlock, MoERecord
from jmx.models.cache import Cache
from jmx.models.config import check_config, expert_sizes
from jmx.models.float_moe import FloatMoE, random_experts
from jmx.models.layers import Linear, RMSNorm, Variables, project
from jmx.models.shared_experts import SharedExperts
from jmx.numerics import formats
from jmx.selection.select import check_backend
from jmx.util.checks import check_array, check_dtype, check_instance, check_int

DTYPES = (jnp.bfloat16, jnp.float32)  # of activations


class Model(nnx.Module):
    """A decoder of blocks; a family adds `make_attention`, `angles` and `moe_options`.

    Activations, cache and dense weights are of `dtype`; norms, angles, softmax, routing and logits are float32;
    expert weights stay quantized.

    Args:
        config: sizes and constants.
        format: of the experts' weights, or its name; None: they are floats of `dtype`.
        dtype: bfloat16 or float32.
        backend: name of the jmx backend that must run quantized experts, or None.
        rngs: `nnx.Rngs` with the stream `params`.

    Raises:
        TypeError, ValueError: an argument of another type, or an unknown format or backend.
    """

    def __init__(
        self,
        config: Any,
        *,
        format: jmx.Format | str | None = None,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        backend: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.config = check_config("config", config)
        self.format = None if format is None else formats.get(format)
        self.dtype = check_dtype("dtype", dtype, *DTYPES)
        check_backend(backend, registered_backends())
        self.backend = backend
        check_instance("rngs", rngs, nnx.Rngs)
        self.embedding = nnx.Param(
            nnx.initializers.normal(1.0)(rngs.params(), (config.vocab_size, config.hidden_size), dtype)
        )
        self.layers: Any = nnx.List([self.make_block(layer, rngs) for layer in range(config.num_hidden_layers)])
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        unembedding = None
        if not config.tie_word_embeddings:
            unembedding = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, rngs=rngs)
        self.unembedding = nnx.data(unembedding)

    router_bias: ClassVar[bool] = False

    def make_block(self, layer: int, rngs: nnx.Rngs) -> Any:
        """A layer: `Block`, or another module with its `sublayers` and `variables`."""
        config, dtype = self.config, self.dtype
        attention = self.make_attention(layer, rngs)
        if layer in config.dense_layers:
            return DenseBlock(config, attention, dtype=dtype, rngs=rngs)
        router = Linear(config.hidden_size, config.num_experts, bias=self.router_bias, dtype=dtype, rngs=rngs)
        return Block(config, attention, router, self.make_moe(None, rngs), self.make_shared_experts(rngs))

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> Any:
        """A layer's attention, with the call of `Attention`."""
        raise NotImplementedError

    def make_shared_experts(self, rngs: nnx.Rngs) -> SharedExperts | None:
        """The shared experts of a layer with experts, if the family has some."""
        return None

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines of the rotations of heads, float32 (B, T, half the rotated channels), of int32 positions
        (B, T)."""
        raise NotImplementedError

    def moe_options(self) -> dict[str, Any]:
        """Arguments of `jmx.nnx.MoE`: activation, routing, and what else the family's experts have."""
        raise NotImplementedError

    def make_moe(self, experts: jmx.Experts | FloatExperts | None, rngs: nnx.Rngs) -> jmx.nnx.MoE | FloatMoE:
        """A block's `moe`: with loaded experts, whose format and inputs it keeps, or (None) with random ones."""
        config = self.config
        options: dict[str, Any] = {"format": self.format} | self.moe_options()
        if experts is None and self.format is None:
            experts = random_experts(
                *expert_sizes(config), bias=options.get("bias", False), dtype=self.dtype, rngs=rngs
            )
        if isinstance(experts, FloatExperts):
            options = {name: options[name] for name in ("activation", "routing", "correction_bias") if name in options}
            return FloatMoE(jax.tree.map(lambda array: array.astype(self.dtype), experts), **options)
        if experts is not None:
            options |= {"format": experts.format, "gate_up_order": experts.gate_up_order}
        return jmx.nnx.MoE(
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            config.top_k,
            **options,
            router=False,
            param_dtype=self.dtype,
            backend=self.backend,
            experts=experts,
            rngs=rngs,
        )

    def __call__(
        self,
        tokens: jax.Array,
        starts: jax.Array | None,
        caches: Sequence[jax.Array],
        *,
        mask: jax.Array | None = None,
        expert_ids: Sequence[jax.Array] | None = None,
        records: list[MoERecord] | None = None,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Runs T consecutive tokens of each row, after those in the caches.

        Args:
            tokens: int32 (B, T).
            starts: int32 (B,), position of each row's first token, the number of its tokens in the caches; None for 0,
                which is faster: nothing is read from the caches.
            caches: one per layer, with capacity for position starts + T - 1.
            mask: bool (B, T) or None; False is padding, which goes to no expert and must follow a row's tokens.
            expert_ids: int32 (B, T, top_k) per layer, instead of the router's choice of experts (not of their weights).
            records: a list to which each layer's `MoERecord` is appended, for comparisons.

        Returns:
            The last layer's residual stream (B, T, H), for `logits`, and the new caches.
        """
        x, angles = self.embed(tokens, starts)
        written = []
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            ids = None if expert_ids is None else expert_ids[index]
            attention, experts = map(nnx.split, layer.sublayers())
            x, cache = _run(*attention, x, starts, angles, cache)
            x, record = _run(*experts, x, mask, ids)
            written.append(cache)
            if records is not None and record is not None:
                records.append(record)
        return x, written

    def embed(self, tokens: jax.Array, starts: jax.Array | None) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The residual stream before the first layer (B, T, H), and the angles of the positions of `tokens`."""
        positions = jnp.arange(tokens.shape[1])
        return self.embedding[...][tokens], self.angles(
            positions[None] if starts is None else starts[:, None] + positions
        )

    def cache_layers(self, batch: int, capacity: int) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtype of the arrays of a cache of `batch` rows with a capacity of `capacity` tokens each."""
        check_int("batch", batch, least=1)
        check_int("capacity", capacity, least=1)
        shapes = (layer.attention.cache_shape(batch, capacity) for layer in self.layers)
        return [jax.ShapeDtypeStruct(shape, self.dtype) for shape in shapes]

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        """A cache of no tokens, of `cache_layers`."""
        return Cache.empty([layer.shape for layer in self.cache_layers(batch, capacity)], self.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """Next-token logits, float32 (..., vocab_size), of the residual stream (..., H)."""
        check_array("x", x, jnp.floating)
        weights = self.embedding if self.unembedding is None else self.unembedding.weights
        return project(x, weights.get_value(), None, self.final_norm)

    def variables(self) -> Variables:
        """The variables outside layers."""
        found: Variables = {("embedding",): self.embedding, ("final_norm",): self.final_norm.scale}
        return found if self.unembedding is None else found | {("unembedding",): self.unembedding.weights}


@partial(jax.jit, static_argnums=0)
def _run(graphdef: nnx.GraphDef[Any], state: Any, *arguments: Any) -> Any:
    """A sublayer's call. Those that are alike are traced and lowered once: their graphdefs are equal."""
    return nnx.merge(graphdef, state)(*arguments)
