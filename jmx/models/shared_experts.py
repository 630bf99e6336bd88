"""Shared experts: the part of a block that every token goes through, beside the experts that its router chooses."""

import jax
from flax import nnx

from jmx.models.layers import MLP, Linear, RMSNorm, Variables


class SharedExperts(nnx.Module):
    """One MLP for all tokens, whose result a block adds to that of its experts (DeepSeekMoE, Dai et al., 2024).

    Several shared experts are one MLP of their joint intermediate size, as files have them.

    Args:
        hidden_size, intermediate_size: sizes.
        gate: whether each token's result is multiplied by sigmoid(x w), with w (H,) (Qwen2-MoE).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        gate: bool = False,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.mlp = MLP(hidden_size, intermediate_size, dtype=dtype, rngs=rngs)
        self.gate = nnx.data(Linear(hidden_size, 1, bias=False, dtype=dtype, rngs=rngs) if gate else None)

    def __call__(self, x: jax.Array, norm: RMSNorm | None = None) -> jax.Array:
        """x (..., H), or the input of `norm` -> (..., H) of the same dtype."""
        out = self.mlp(x, norm)
        if self.gate is not None:
            out *= jax.nn.sigmoid(self.gate(x, norm))
        return out.astype(x.dtype)

    def variables(self) -> Variables:
        found = self.mlp.variables("shared_")
        return found if self.gate is None else found | self.gate.variables("shared_expert_gate")
