"""The blocks of a decoder: attention, then experts or one MLP for all tokens."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jmx
import jmx.nnx
from jmx.models.attention.self_attention import SelfAttention
from jmx.models.config import Config
from jmx.models.layers import MLP, Linear, RMSNorm, Variables
from jmx.models.model_split import ModelSplit
from jmx.models.one_token.sublayer import Routed, attend_and_route
from jmx.models.paged_cache import PagedLayer, Places
from jmx.models.per_device import on_each_device
from jmx.models.shared_experts import SharedExperts


class MoERecord(NamedTuple):
    """The input and the output of one layer's experts, both (B, T, H), and the router's logits (B, T, E)."""

    input: jax.Array
    output: jax.Array
    logits: jax.Array


class AttentionSublayer(nnx.Module):
    """Attention after a norm, added to the residual stream. Over a mesh each device has its own rows and heads.

    Args:
        router: what is after it: a norm and a router, which a single token may be given to at once; None: something
            else.
    """

    def __init__(
        self,
        norm: RMSNorm,
        attention: SelfAttention,
        split: ModelSplit | None,
        router: tuple[RMSNorm, Linear] | None = None,
    ):
        self.norm, self.attention, self.split = norm, attention, split
        router_norm, linear = (None, None) if router is None else router
        self.router_norm: Any = nnx.data(router_norm)
        self.router: Any = nnx.data(linear)

    def __call__(
        self, x: jax.Array, starts: jax.Array | None, angles: tuple[jax.Array, jax.Array], cache: Any
    ) -> tuple[jax.Array, Any, Routed | None]:
        """The residual stream, the cache, and what the router computes of the first, if that is known already."""
        if self.split is None and self.router is not None:
            after = self.router_norm, self.router
            found = attend_and_route(x, self.norm, self.attention, *after, starts, angles, cache)
            if found is not None:
                return found
        return (*self._by_device(_attended, x, starts, angles, cache), None)

    def fill(self, x: jax.Array, starts: jax.Array | None, angles: tuple[jax.Array, jax.Array], cache: Any) -> Any:
        """The cache with all tokens of x, of which no result is wanted."""
        return self._by_device(_filled, x, starts, angles, cache)[1]

    def _by_device(
        self,
        function: Callable[..., tuple[jax.Array, Any]],
        x: jax.Array,
        starts: jax.Array | None,
        angles: tuple[jax.Array, jax.Array],
        cache: Any,
    ) -> tuple[jax.Array, Any]:
        """The residual stream and the cache that `function` of norm, attention and the rest returns."""
        if self.split is None:
            return function(self.norm, self.attention, x, starts, angles, cache)
        rows, cached = ("token",), self.attention.cache_axes
        if isinstance(cache, PagedLayer):
            of_tokens = (x, rows), (starts, rows), (angles, rows)
            arguments = (*of_tokens, (cache.pages, cached), (cache.places, rows))
            of_pages = partial(_of_pages, function, cache.num_rows)
            x, pages = on_each_device(self.split, (self.norm, self.attention), of_pages, arguments, (rows, cached))
            return x, replace(cache, pages=pages)
        of_rows = rows if angles[0].shape[0] == x.shape[0] else ()  # else positions are those of all rows
        arguments = (x, rows), (starts, rows), (angles, of_rows), (cache, cached)
        return on_each_device(self.split, (self.norm, self.attention), function, arguments, (rows, cached))


def _attended(
    norm: RMSNorm, attention: Any, x: jax.Array, starts: jax.Array | None, angles: Any, cache: Any
) -> tuple[jax.Array, Any]:
    return attention(x, norm, starts, angles, cache)


def _filled(
    norm: RMSNorm, attention: Any, x: jax.Array, starts: jax.Array | None, angles: Any, cache: Any
) -> tuple[jax.Array, Any]:
    return x, attention.fill(x, norm, angles, starts, cache)


def _of_pages(
    function: Callable[..., tuple[jax.Array, Any]],
    num_rows: int,
    norm: RMSNorm,
    attention: Any,
    x: jax.Array,
    starts: jax.Array,
    angles: Any,
    pages: jax.Array,
    places: Places,
) -> tuple[jax.Array, jax.Array]:
    x, layer = function(norm, attention, x, starts, angles, PagedLayer(pages, places, num_rows))
    return x, layer.pages


class MoESublayer(nnx.Module):
    """Experts after a norm, added to the residual stream; arguments as `Block`'s.

    Called with `routed`, it uses that as what norm and router compute of x.
    """

    def __init__(
        self, norm: RMSNorm, router: Linear, moe: Any, shared_experts: SharedExperts | None, split: ModelSplit | None
    ):
        self.norm, self.router, self.moe, self.split = norm, router, moe, split
        self.shared_experts = nnx.data(shared_experts)

    def __call__(
        self, x: jax.Array, mask: jax.Array | None, expert_ids: jax.Array | None, routed: Routed | None = None
    ) -> tuple[jax.Array, MoERecord]:
        logits, normed = self.router.beside_norm(x, self.norm) if routed is None else routed
        if expert_ids is not None:  # restrict the choice to these
            chosen = (expert_ids[..., None] == jnp.arange(logits.shape[-1])).any(axis=-2)
            logits = jnp.where(chosen, logits, -jnp.inf)
        out = _of_experts(self.moe, normed, logits, mask, self.split)
        shared = 0 if self.shared_experts is None else self.shared_experts(x, self.norm)
        return x + out + shared, MoERecord(normed, out, logits)


def _of_experts(
    moe: Any, x: jax.Array, logits: jax.Array, mask: jax.Array | None, split: ModelSplit | None
) -> jax.Array:
    if split is None or not isinstance(moe, jmx.nnx.MoE):  # others have the split themselves
        return moe(x, logits, mask=mask)
    bias = None if moe.correction_bias is None else moe.correction_bias[...]
    return jmx.moe(
        x,
        jmx.Logits(logits, moe.routing, bias),
        moe.held,
        activation=moe.activation,
        weights_on=moe.weights_on,
        input_format=moe.input_format,
        mask=mask,
        backend=moe.backend,
        split=split.experts,
        adapters=moe.adapters,
        save_gate_up=moe.save_gate_up,
    )


class MLPSublayer(nnx.Module):
    """One MLP for all tokens after a norm, added to the residual stream. Its record is None."""

    def __init__(self, norm: RMSNorm, mlp: MLP):
        self.norm, self.mlp = norm, mlp

    def __call__(
        self, x: jax.Array, mask: jax.Array | None, expert_ids: jax.Array | None, routed: None = None
    ) -> tuple[jax.Array, None]:
        return x + self.mlp(x, self.norm).astype(x.dtype), None


class Block(nnx.Module):
    """Attention, then experts, each after a norm and added to the residual stream.

    Args:
        router: returns logits (..., E).
        moe: `jmx.nnx.MoE` with `router=False`, or a module with the same signature.
        shared_experts: their result for every token is added to that of `moe`; None: there are none.
        split: over a mesh, how it divides the model.
    """

    def __init__(
        self,
        config: Config,
        attention: SelfAttention,
        router: Linear,
        moe: nnx.Module,
        shared_experts: SharedExperts | None = None,
        split: ModelSplit | None = None,
    ):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = attention
        self.moe_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.router = router
        self.moe: Any = moe
        self.shared_experts = nnx.data(shared_experts)
        self.split = split

    def sublayers(self) -> tuple[AttentionSublayer, MoESublayer]:
        """Both halves, as modules that share this one's variables: each can be a program of its own."""
        experts = MoESublayer(self.moe_norm, self.router, self.moe, self.shared_experts, self.split)
        router = self.moe_norm, self.router
        return AttentionSublayer(self.attention_norm, self.attention, self.split, router), experts

    def variables(self) -> Variables:
        """All variables except the experts'. The bias of their choice, if there is one, is a variable of `moe`."""
        norms = {("input_norm",): self.attention_norm.scale, ("post_attention_norm",): self.moe_norm.scale}
        found = norms | self.attention.variables() | self.router.variables("router")
        if (bias := getattr(self.moe, "correction_bias", None)) is not None:
            found[("router_correction_bias",)] = bias
        return found if self.shared_experts is None else found | self.shared_experts.variables()


class DenseBlock(nnx.Module):
    """Attention, then one MLP for all tokens, each after a norm and added to the residual stream."""

    def __init__(
        self,
        config: Config,
        attention: SelfAttention,
        *,
        split: ModelSplit | None = None,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.split = split
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)

    def sublayers(self) -> tuple[AttentionSublayer, MLPSublayer]:
        """Both halves, as modules that share this one's variables."""
        attention = AttentionSublayer(self.attention_norm, self.attention, self.split)
        return attention, MLPSublayer(self.mlp_norm, self.mlp)

    def variables(self) -> Variables:
        norms = {("input_norm",): self.attention_norm.scale, ("post_attention_norm",): self.mlp_norm.scale}
        return norms | self.attention.variables() | self.mlp.variables()
