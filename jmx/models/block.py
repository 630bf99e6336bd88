"""The blocks of a decoder: attention, then experts or one MLP for all tokens."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jmx.models.attention.protocol import SelfAttention
from jmx.models.config import Config
from jmx.models.layers import MLP, Linear, RMSNorm, Variables
from jmx.models.shared_experts import SharedExperts


class MoERecord(NamedTuple):
    """The input and the output of one layer's experts, both (B, T, H)."""

    input: jax.Array
    output: jax.Array


class AttentionSublayer(nnx.Module):
    """Attention after a norm, added to the residual stream."""

    def __init__(self, norm: RMSNorm, attention: SelfAttention):
        self.norm, self.attention = norm, attention

    def __call__(
        self, x: jax.Array, starts: jax.Array | None, angles: tuple[jax.Array, jax.Array], cache: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        attended, cache = self.attention(x, self.norm, starts, angles, cache)
        return x + attended, cache


class MoESublayer(nnx.Module):
    """Experts after a norm, added to the residual stream; arguments as `Block`'s."""

    def __init__(self, norm: RMSNorm, router: Linear, moe: Any, shared_experts: SharedExperts | None):
        self.norm, self.router, self.moe = norm, router, moe
        self.shared_experts = nnx.data(shared_experts)

    def __call__(
        self, x: jax.Array, mask: jax.Array | None, expert_ids: jax.Array | None
    ) -> tuple[jax.Array, MoERecord]:
        normed = self.norm(x)
        logits = self.router(x, self.norm)
        if expert_ids is not None:  # restrict the choice to these
            chosen = (expert_ids[..., None] == jnp.arange(logits.shape[-1])).any(axis=-2)
            logits = jnp.where(chosen, logits, -jnp.inf)
        out = self.moe(normed, logits, mask=mask)
        shared = 0 if self.shared_experts is None else self.shared_experts(x, self.norm)
        return x + out + shared, MoERecord(normed, out)


class MLPSublayer(nnx.Module):
    """One MLP for all tokens after a norm, added to the residual stream. Its record is None."""

    def __init__(self, norm: RMSNorm, mlp: MLP):
        self.norm, self.mlp = norm, mlp

    def __call__(self, x: jax.Array, mask: jax.Array | None, expert_ids: jax.Array | None) -> tuple[jax.Array, None]:
        return x + self.mlp(x, self.norm).astype(x.dtype), None


class Block(nnx.Module):
    """Attention, then experts, each after a norm and added to the residual stream.

    Args:
        router: returns logits (..., E).
        moe: `jmx.nnx.MoE` with `router=False`, or a module with the same signature.
        shared_experts: their result for every token is added to that of `moe`; None: there are none.
    """

    def __init__(
        self,
        config: Config,
        attention: SelfAttention,
        router: Linear,
        moe: nnx.Module,
        shared_experts: SharedExperts | None = None,
    ):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = attention
        self.moe_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.router = router
        self.moe: Any = moe
        self.shared_experts = nnx.data(shared_experts)

    def sublayers(self) -> tuple[AttentionSublayer, MoESublayer]:
        """Both halves, as modules that share this one's variables: each can be a program of its own."""
        experts = MoESublayer(self.moe_norm, self.router, self.moe, self.shared_experts)
        return AttentionSublayer(self.attention_norm, self.attention), experts

    def variables(self) -> Variables:
        """All variables except the experts'. The bias of their choice, if there is one, is a variable of `moe`."""
        norms = {("input_norm",): self.attention_norm.scale, ("post_attention_norm",): self.moe_norm.scale}
        found = norms | self.attention.variables() | self.router.variables("router")
        if (bias := getattr(self.moe, "correction_bias", None)) is not None:
            found[("router_correction_bias",)] = bias
        return found if self.shared_experts is None else found | self.shared_experts.variables()


class DenseBlock(nnx.Module):
    """Attention, then one MLP for all tokens, each after a norm and added to the residual stream."""

    def __init__(self, config: Config, attention: SelfAttention, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)

    def sublayers(self) -> tuple[AttentionSublayer, MLPSublayer]:
        """Both halves, as modules that share this one's variables."""
        return AttentionSublayer(self.attention_norm, self.attention), MLPSublayer(self.mlp_norm, self.mlp)

    def variables(self) -> Variables:
        norms = {("input_norm",): self.attention_norm.scale, ("post_attention_norm",): self.mlp_norm.scale}
        return norms | self.attention.variables() | self.mlp.variables()
