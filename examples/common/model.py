"""A decoder in Flax NNX on `jmx.nnx.MoE`: its parts, and the model of them."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from examples.common.attention import NO_SINK, attend_cache, attend_prompt, precision, rotate
from examples.common.cache import write
from examples.common.config import Config

# Variables of a model, by the neutral names of the tensors that are concatenated in each.
Variables = dict[tuple[str, ...], nnx.Variable]


class MoERecord(NamedTuple):
    """The input and the output of one layer's experts, both (B, T, H)."""

    input: jax.Array
    output: jax.Array


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale over the last axis (Zhang and Sennrich, 2019), in float32."""

    def __init__(self, size: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x.astype(jnp.float32) * self.scale[...] * self.rate(x)).astype(x.dtype)

    def rate(self, x: jax.Array) -> jax.Array:
        """1 / sqrt(mean(x^2) + epsilon), float32 (..., 1)."""
        return jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True) + self.epsilon)


class Linear(nnx.Module):
    """x W^T + b in float32. Weights are (out, in), as in checkpoints; there is a bias unless `bias` is False."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        self.weights = nnx.Param(nnx.initializers.normal(inputs**-0.5)(rngs.params(), (outputs, inputs), dtype))
        self.bias = nnx.data(nnx.Param(jnp.zeros(outputs, dtype)) if bias else None)

    def __call__(self, x: jax.Array, norm: RMSNorm | None = None) -> jax.Array:
        """x (..., in), or the input of `norm` -> float32 (..., out)."""
        return project(x, self.weights[...], None if self.bias is None else self.bias[...], norm)

    def variables(self, *names: str) -> Variables:
        """The variables, for outputs that sources name separately."""
        found: Variables = {tuple(f"{name}_weight" for name in names): self.weights}
        return found if self.bias is None else found | {tuple(f"{name}_bias" for name in names): self.bias}


def project(x: jax.Array, weights: jax.Array, bias: jax.Array | None, norm: RMSNorm | None) -> jax.Array:
    """x W^T + b, or norm(x) W^T + b; see `Linear`."""
    if x.size == x.shape[-1]:
        # For one row, a plain sum reads the weights once, at memory bandwidth, and fuses with neighboring operations.
        # A product would be autotuned by XLA's GPU compiler, in buffers three times as large as the weights.
        # The norm's rate multiplies the result, so that its sum and the scaled row are computed in one kernel.
        row = x.astype(jnp.float32) * (1 if norm is None else norm.scale[...])
        row = jax.lax.optimization_barrier(row.reshape(-1))
        out = jnp.sum(weights.astype(jnp.float32) * row, axis=-1).reshape(*x.shape[:-1], -1)
        out *= 1 if norm is None else norm.rate(x)
    else:
        x = x if norm is None else norm(x)
        exact = precision(weights.dtype)
        out = jnp.einsum("...i,oi->...o", x, weights, precision=exact, preferred_element_type=jnp.float32)
    return out if bias is None else out + bias.astype(jnp.float32)


class Attention(nnx.Module):
    """Grouped-query attention, with biases if the config has them.

    Args:
        window: how many positions a token attends to, including its own; None for all.
        sinks: whether each head has a sink.
        head_norms: whether each head's queries and keys are normalized before they are rotated.
    """

    def __init__(
        self,
        config: Config,
        *,
        window: int | None,
        sinks: bool = False,
        head_norms: bool = False,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        linear = partial(Linear, bias=config.attention_bias, dtype=dtype, rngs=rngs)
        self.head_dim = config.head_dim
        self.cuts = (heads, heads + kv_heads)  # where keys and values begin among the heads of one product
        self.window = window
        self.query_key_value = linear(config.hidden_size, (heads + 2 * kv_heads) * config.head_dim)
        self.out = linear(heads * config.head_dim, config.hidden_size)
        self.sinks = nnx.data(nnx.Param(jnp.zeros(heads, jnp.float32)) if sinks else None)
        norms = [RMSNorm(config.head_dim, config.rms_norm_eps) if head_norms else None for _ in range(2)]
        self.query_norm, self.key_norm = map(nnx.data, norms)

    def __call__(
        self,
        x: jax.Array,
        norm: RMSNorm,
        starts: jax.Array | None,
        angles: tuple[jax.Array, jax.Array],
        cache: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """x (B, T, H), T consecutive tokens a row before `norm`, the first at `starts` (B,) -> (B, T, H), cache."""
        heads = self.query_key_value(x, norm).astype(x.dtype).reshape(*x.shape[:2], -1, self.head_dim)
        query, key, value = jnp.split(heads, self.cuts, axis=2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, angles), rotate(key, angles)
        cache = write(cache, key, value, starts)
        sinks = jnp.full(query.shape[2], NO_SINK, jnp.float32) if self.sinks is None else self.sinks[...]
        if starts is None:
            out = attend_prompt(query, key, value, sinks, self.window)
        else:
            out = attend_cache(query, cache, sinks, starts, self.window)
        return self.out(out.reshape(*x.shape[:2], -1)).astype(x.dtype), cache

    def variables(self) -> Variables:
        found = self.query_key_value.variables("q", "k", "v") | self.out.variables("o")
        if self.sinks is not None:
            found[("sinks",)] = self.sinks
        norms = {"q_norm": self.query_norm, "k_norm": self.key_norm}
        return found | {(name,): norm.scale for name, norm in norms.items() if norm is not None}


class Block(nnx.Module):
    """Attention, then experts, each after a norm and added to the residual stream.

    Args:
        router: returns logits (..., E).
        moe: `jmx.nnx.MoE` with `router=False`, or a module with the same signature.
    """

    def __init__(self, config: Config, attention: Attention, router: Linear, moe: nnx.Module):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = attention
        self.moe_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.router = router
        self.moe: Any = moe

    def __call__(
        self,
        x: jax.Array,
        starts: jax.Array | None,
        angles: tuple[jax.Array, jax.Array],
        cache: jax.Array,
        mask: jax.Array | None,
        expert_ids: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, MoERecord]:
        attended, cache = self.attention(x, self.attention_norm, starts, angles, cache)
        x = x + attended
        normed = self.moe_norm(x)
        logits = self.router(x, self.moe_norm)
        if expert_ids is not None:  # restrict the choice to these
            chosen = (expert_ids[..., None] == jnp.arange(logits.shape[-1])).any(axis=-2)
            logits = jnp.where(chosen, logits, -jnp.inf)
        out = self.moe(normed, logits, mask=mask)
        return x + out, cache, MoERecord(normed, out)

    def variables(self) -> Variables:
        """All variables except those of `moe`."""
        norms = {("input_norm",): self.attention_norm.scale, ("post_attention_norm",): self.moe_norm.scale}
        return norms | self.attention.variables() | self.router.variables("router")


class Model(nnx.Module):
    """A decoder of blocks; a family adds the blocks, `angles` and `make_moe`.

    Activations, cache and dense weights are of `dtype`; norms, angles, softmax, routing and logits are float32;
    expert weights stay quantized.

    Args:
        config: sizes and constants.
        blocks: one per layer, with the call of `Block`; those without experts record None.
        tied: whether the embedding is also the unembedding.
        dtype: bfloat16 or float32.
        rngs: `nnx.Rngs` with the stream `params`.
    """

    def __init__(self, config: Any, blocks: Sequence[Any], *, tied: bool, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.embedding = nnx.Param(
            nnx.initializers.normal(1.0)(rngs.params(), (config.vocab_size, config.hidden_size), dtype)
        )
        self.layers: Any = nnx.List(blocks)
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        unembedding = None
        if not tied:
            unembedding = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, rngs=rngs)
        self.unembedding = nnx.data(unembedding)

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines of the rotations of heads, float32 (B, T, head_dim / 2), of int32 positions (B, T)."""
        raise NotImplementedError

    def make_moe(self, experts: Any, rngs: nnx.Rngs) -> nnx.Module:
        """A block's `moe`: with loaded experts, whose format and inputs it keeps, or (None) with experts of the right
        shapes."""
        raise NotImplementedError

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
