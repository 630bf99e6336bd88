"""Memory that a compiled step needs, measured on shapes alone: nothing is allocated, nothing runs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jmx
from jmx import Experts, Routing, SwiGLU

ACTIVATION = SwiGLU(alpha=1.702, beta=1.0, limit=7.0)

Compile = Callable[..., jax.stages.Compiled]  # (function, *abstract arguments)


def compile_here(function: Callable[..., Any], *arguments: Any) -> jax.stages.Compiled:
    return jax.jit(function).lower(*arguments).compile()


def abstract_experts(num_experts: int, size: int, layout: str, layers: int | None = None) -> Experts:
    """Interleaved experts with biases, H = I = `size`; a stack of `layers` if that is given."""

    def build(key: Any) -> Experts:
        return Experts.random(key, num_experts, size, size, gate_up_order="interleaved").prepare(layout)

    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    if layers is None:
        return jax.eval_shape(build, key)
    return jax.eval_shape(jax.vmap(build), jax.ShapeDtypeStruct((layers, *key.shape), key.dtype))


def abstract_step(
    tokens: int, num_experts: int, size: int, layout: str, form: str, top_k: int = 4
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step and its abstract arguments.

    `form`: "forward"; "backward" to x and the routing weights; "views" or "arrays", forward through a scan over three
    layers by `Experts.layer` or over the stacked arrays; "backward views".
    """
    x = jax.ShapeDtypeStruct((tokens, size), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((tokens, top_k), jnp.int32)
    weights = jax.ShapeDtypeStruct((tokens, top_k), jnp.float32)

    def forward(x: Any, weights: Any, ids: Any, experts: Experts) -> jax.Array:
        return jmx.moe(x, Routing(ids, weights), experts, activation=ACTIVATION)

    def views(x: Any, weights: Any, ids: Any, stack: Experts) -> jax.Array:
        return jax.lax.scan(lambda x, i: (forward(x, weights, ids, stack.layer(i)), None), x, jnp.arange(3))[0]

    def arrays(x: Any, weights: Any, ids: Any, stack: Experts) -> jax.Array:
        return jax.lax.scan(lambda x, experts: (forward(x, weights, ids, experts), None), x, stack)[0]

    def backward(function: Callable[..., jax.Array]) -> Callable[..., Any]:
        return jax.grad(lambda *arguments: function(*arguments).astype(jnp.float32).sum(), argnums=(0, 1))

    step = {
        "forward": forward,
        "backward": backward(forward),
        "views": views,
        "arrays": arrays,
        "backward views": backward(views),
    }[form]
    experts = abstract_experts(num_experts, size, layout, None if form in ("forward", "backward") else 3)
    return step, (x, weights, ids, experts)


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def expert_bytes(size: int) -> int:
    """One expert, expanded to bfloat16."""
    return 3 * size * size * 2
