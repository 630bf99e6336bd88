"""Multi-head latent attention (MLA) as a module: the cache has one latent a token, not the keys and values of heads."""

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jmx.checkpoint.model_configs.yarn import Yarn
from jmx.models.attention.functions import attend_latents, attend_prompt
from jmx.models.attention.paged import attend_latent_pages
from jmx.models.attention.self_attention import SelfAttention
from jmx.models.config import Config
from jmx.models.layers import Linear, RMSNorm, Variables
from jmx.models.paged_cache import PagedLayer
from jmx.models.rope import rotate
from jmx.numerics.formats import precision


class LatentConfig(Config, Protocol):
    """The fields of a configuration that `LatentAttention` needs: see `model_configs.deepseek_v3.Config`."""

    @property
    def q_lora_rank(self) -> int | None: ...
    @property
    def kv_lora_rank(self) -> int: ...
    @property
    def qk_nope_head_dim(self) -> int: ...
    @property
    def qk_rope_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def latent_norm_eps(self) -> float: ...
    @property
    def rope_interleave(self) -> bool: ...
    @property
    def yarn(self) -> Yarn | None: ...


class LatentAttention(SelfAttention):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    A token's keys and values are products of one latent of `kv_lora_rank` channels, and all heads share one rotated
    key. The cache has these alone. A prompt is attended to through the keys and values of each head. After a cache,
    their matrices are absorbed: that of keys multiplies the queries, and that of values the results, so that all heads
    attend to the latents themselves, as to one head's keys and values.

    The weights of keys' and values' matrices are in one product, each head's keys above its values, as in checkpoints.
    Those that read the residual stream are in one, too: the latent of queries, if there is one, then the latent of keys
    and values, then the rotated key. Without `q_lora_rank`, queries are a product of the residual stream, too.
    """

    def __init__(self, config: LatentConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        linear = partial(Linear, dtype=dtype, rngs=rngs)
        heads, rank, rotated = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
        self.rank, self.rotated = rank, rotated
        self.key_dim, self.value_dim = config.qk_nope_head_dim, config.v_head_dim
        self.interleaved = config.rope_interleave
        query_dim = self.key_dim + rotated
        self.scale = query_dim**-0.5 * (1 if config.yarn is None else config.yarn.score_factor)
        queries, query_rank = heads * query_dim, config.q_lora_rank
        self.query_width = query_rank or 0
        inputs = self.query_width + rank + rotated
        self.latents = linear(config.hidden_size, inputs, bias=config.attention_bias)
        self.query_norm = nnx.data(None if query_rank is None else RMSNorm(query_rank, config.latent_norm_eps))
        by_head = {"bias": False, "divided": ("heads", None)}
        self.query_up = linear(config.hidden_size if query_rank is None else query_rank, queries, **by_head)
        self.latent_norm = RMSNorm(rank, config.latent_norm_eps)
        self.key_value_up = linear(rank, heads * (self.key_dim + self.value_dim), **by_head)
        columns = heads * self.value_dim
        self.out = linear(columns, config.hidden_size, bias=config.attention_bias, divided=(None, "heads"))

    def project(
        self, x: jax.Array, norm: RMSNorm, angles: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        inputs = self.latents(x, norm).astype(x.dtype)
        query, latent, key = jnp.split(inputs, (self.query_width, self.query_width + self.rank), axis=-1)
        query = self.query_up(x, norm) if self.query_norm is None else self.query_up(query, self.query_norm)
        query = query.astype(x.dtype).reshape(*x.shape[:2], -1, self.key_dim + self.rotated)
        query, rotated = jnp.split(query, (self.key_dim,), axis=-1)
        rotated = rotate(rotated, angles, interleaved=self.interleaved)
        key = rotate(key[:, :, None], angles, interleaved=self.interleaved)
        latent = self.latent_norm(latent)[:, :, None]
        return (query, rotated, latent, key), (jnp.concatenate([latent, key], axis=-1),)

    def attend(self, heads: tuple[jax.Array, ...], cache: Any, starts: jax.Array | None) -> jax.Array:
        """A prompt attends to expanded keys and values; other tokens to latents, with the matrices absorbed."""
        query, rotated, latent, key = heads
        if starts is None:
            return self._expanded(query, rotated, latent, key)
        return self._absorbed(query, rotated, cache, starts)

    def _expanded(self, query: jax.Array, rotated: jax.Array, latent: jax.Array, key: jax.Array) -> jax.Array:
        """Attention of rows that start at position 0 over their own keys and values, one of each a head.

        query, rotated, latent, key (B, T, heads or 1, channels) -> (B, T, heads, value_dim).
        """
        up = self.key_value_up(latent[:, :, 0]).astype(query.dtype).reshape(*query.shape[:3], -1)
        keys, values = jnp.split(up, (self.key_dim,), axis=-1)
        keys = jnp.concatenate([keys, jnp.broadcast_to(key, (*keys.shape[:3], self.rotated))], axis=-1)
        query = jnp.concatenate([query, rotated], axis=-1)
        return attend_prompt(query, keys, values, sinks=None, window=None, scale=self.scale)

    def _absorbed(self, query: jax.Array, rotated: jax.Array, cache: Any, starts: jax.Array) -> jax.Array:
        """Attention over a cache (1, B, 1, C, W), whose latents are the keys and values of one head.

        query, rotated (B, T, heads, channels) -> (B, T, heads, value_dim).
        """
        up = self.key_value_up.floats(query.dtype).reshape(-1, self.key_dim + self.value_dim, self.rank)
        key_up, value_up = jnp.split(up, (self.key_dim,), axis=1)
        query = _of_heads(key_up, query, axis=1).astype(query.dtype)
        query = jnp.concatenate([query, rotated], axis=-1)
        if isinstance(cache, PagedLayer):
            out = attend_latent_pages(query, cache, self.rank, self.scale)
        else:
            out = attend_latents(query, cache, starts, self.rank, self.scale)
        return _of_heads(value_up, out, axis=2).astype(query.dtype)

    def cache_shape(self, batch: int, capacity: int) -> tuple[int, ...]:
        """Shape of this layer's cache: latents and rotated keys, (1, B, 1, C, kv_lora_rank + qk_rope_head_dim)."""
        return 1, batch, 1, capacity, self.rank + self.rotated

    cache_axes = (None, "token", None, None, None)

    def variables(self) -> Variables:
        """The variables, by DeepSeek's names: q_a and q_b, or q, then kv_a, kv_b, o and the norms."""
        found = self.key_value_up.variables("kv_b") | self.out.variables("o") | {("kv_a_norm",): self.latent_norm.scale}
        if self.query_norm is None:
            return found | self.query_up.variables("q") | self.latents.variables("kv_a")
        found |= self.latents.variables("q_a", "kv_a") | self.query_up.variables("q_b")
        return found | {("q_a_norm",): self.query_norm.scale}


def _of_heads(weights: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """Sums over `axis`, 1 or 2, of weights (heads, rows, columns) times x (B, T, heads, its size), in float32.

    Returns:
        (B, T, heads, size of the other axis).
    """
    if x.shape[:2] == (1, 1):  # a plain sum reads the weights once, where they are: see `layers.project`
        row = jnp.expand_dims(x[0, 0].astype(jnp.float32), 3 - axis)
        return jnp.sum(weights.astype(jnp.float32) * row, axis=axis)[None, None]
    # The weights come first: XLA's CPU compiler has no product of bfloat16 with them in the other order.
    product = "hio,bthi->btho" if axis == 1 else "hoi,bthi->btho"
    exact = precision(weights.dtype)
    return jnp.einsum(product, weights, x, precision=exact, preferred_element_type=jnp.float32)
