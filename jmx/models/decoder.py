"""A decoder in Flax NNX on `jmx.nnx.MoE`: blocks between an embedding and logits."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jmx
import jmx.nnx
from jmx.checkpoint.quantizing import FloatExperts
from jmx.models.block import MoERecord
from jmx.models.config import expert_sizes
from jmx.models.float_moe import FloatMoE, random_experts
from jmx.models.layers import Linear, RMSNorm, Variables, project


class Model(nnx.Module):
    """A decoder of blocks; a family adds `make_block`, `angles` and `moe_options`.

    Activations, cache and dense weights are of `dtype`; norms, angles, softmax, routing and logits are float32;
    expert weights stay quantized.

    Args:
        config: sizes and constants.
        format: of the experts' weights; None: they are floats of `dtype`.
        dtype: bfloat16 or float32.
        backend: name of the jmx backend that must run quantized experts, or None.
        rngs: `nnx.Rngs` with the stream `params`.
    """

    def __init__(
        self,
        config: Any,
        *,
        format: jmx.Format | None = None,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        backend: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.config, self.format, self.dtype, self.backend = config, format, jnp.dtype(dtype), backend
        self.embedding = nnx.Param(
            nnx.initializers.normal(1.0)(rngs.params(), (config.vocab_size, config.hidden_size), dtype)
        )
        self.layers: Any = nnx.List([self.make_block(layer, rngs) for layer in range(config.num_hidden_layers)])
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        unembedding = None
        if not config.tie_word_embeddings:
            unembedding = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, rngs=rngs)
        self.unembedding = nnx.data(unembedding)

    def make_block(self, layer: int, rngs: nnx.Rngs) -> Any:
        """A layer, with the call of `Block`; one without experts returns None for its record."""
        raise NotImplementedError

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines of the rotations of heads, float32 (B, T, head_dim / 2), of int32 positions (B, T)."""
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
            return FloatMoE(
                jax.tree.map(lambda array: array.astype(self.dtype), experts), options["activation"], options["routing"]
            )
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
        x = self.embedding[...][tokens]
        positions = jnp.arange(tokens.shape[1])
        angles = self.angles(positions[None] if starts is None else starts[:, None] + positions)
        written = []
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            ids = None if expert_ids is None else expert_ids[index]
            x, cache, record = layer(x, starts, angles, cache, mask, ids)
            written.append(cache)
            if records is not None and record is not None:
                records.append(record)
        return x, written

    def logits(self, x: jax.Array) -> jax.Array:
        """Next-token logits, float32 (..., vocab_size), of the residual stream (..., H)."""
        weights = self.embedding if self.unembedding is None else self.unembedding.weights
        return project(x, weights[...], None, self.final_norm)

    def variables(self) -> Variables:
        """The variables outside layers."""
        found: Variables = {("embedding",): self.embedding, ("final_norm",): self.final_norm.scale}
        return found if self.unembedding is None else found | {("unembedding",): self.unembedding.weights}
