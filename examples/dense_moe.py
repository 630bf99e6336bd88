"""A Flax model's float MoE, in which every expert computes every token, replaced by a quantized one of jmx."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jmx
import jmx.nnx


class DenseMoE(nnx.Module):
    """Top-k experts with SiLU gates; kernels (E, in, out), as Flax has them."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, *, rngs: nnx.Rngs):
        self.top_k = top_k
        self.router = nnx.Linear(hidden_size, num_experts, use_bias=False, rngs=rngs)
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.gate_up = nnx.Param(init(rngs.params(), (num_experts, hidden_size, 2 * intermediate_size)))
        self.down = nnx.Param(init(rngs.params(), (num_experts, intermediate_size, hidden_size)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x (T, H) -> (T, H)."""
        weights, ids = jax.lax.top_k(self.router(x).astype(jnp.float32), self.top_k)
        weights = jax.nn.softmax(weights)
        gate, up = jnp.split(jnp.einsum("th,ehi->tei", x, self.gate_up[...]), 2, axis=-1)
        out = jnp.einsum("tei,eih->teh", nnx.silu(gate) * up, self.down[...])
        chosen = jnp.take_along_axis(out, ids[..., None], axis=1)
        return jnp.einsum("tkh,tk->th", chosen, weights).astype(x.dtype)


class Block(nnx.Module):
    """The part of a transformer block around its MoE: norm and residual."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(hidden_size, rngs=rngs)
        self.moe: Any = DenseMoE(hidden_size, intermediate_size, num_experts, top_k, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x (T, H) -> (T, H)."""
        return x + self.moe(self.norm(x))


def quantized(moe: DenseMoE, format: str) -> jmx.nnx.MoE:
    """The layer of jmx with a dense MoE's router, and its experts rounded to a format of weights."""
    gate_up, down = moe.gate_up[...].mT, moe.down[...].mT
    experts = jmx.Experts.quantize(gate_up, down, gate_up_order="concatenated", format=format)
    num_experts, intermediate_size, hidden_size = moe.down.shape
    sizes = hidden_size, intermediate_size, num_experts, moe.top_k
    layer = jmx.nnx.MoE(*sizes, activation="silu_and_mul", format=format, experts=experts, rngs=nnx.Rngs(0))
    layer.router.kernel.set_value(moe.router.kernel[...])
    return layer


def size(layer: nnx.Module) -> int:
    """Bytes of a layer's arrays."""
    return sum(array.nbytes for array in jax.tree.leaves(nnx.state(layer)) if hasattr(array, "nbytes"))


if __name__ == "__main__":
    block = Block(hidden_size=256, intermediate_size=512, num_experts=8, top_k=2, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (16, 256))
    dense = block(x)
    for format in ("mxfp4", "nvfp4", "int8_channel"):
        changed = nnx.clone(block)
        changed.moe = quantized(block.moe, format)
        error = jnp.linalg.norm(nnx.jit(lambda block, x: block(x))(changed, x) - dense) / jnp.linalg.norm(dense)
        print(f"{format}: {error:.1%} from the dense block, {size(changed.moe):,} bytes instead of {size(block.moe):,}")
