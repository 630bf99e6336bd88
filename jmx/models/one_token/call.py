"""A decoder's layer of one to eight tokens between two sums of experts: by four kernels that overlap on a Hopper GPU.

Norm, queries, keys and values, their rotation, the cache, attention, the product of the result, the residual, norm and
router. Derivatives are those of the definition, in plain jnp.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmx import meshes
from jmx.ffi.one_token.library import TARGET
from jmx.pallas import defined
from jmx.pallas.few_rows import heads, linear
from jmx.pallas.few_rows.choice import CAPABILITY, Tile
from jmx.selection.environment import Environment
from jmx.util.typing import Array, Shaped

# As jmx/ffi/one_token/src/call.h has them.
MOST_TOKENS = 8
DIM = 64  # channels of a head
MOST_GROUP = 8
MOST_COLUMNS = 4096  # of a matrix
VECTOR = 8  # elements that are loaded at once

_NO_TILE = Tile(2, 1024, 4)  # of definitions, which have none


class Operands(NamedTuple):
    """Operands of T tokens, each of another row. None: not in this call.

    Args:
        x: (T, H), bfloat16 as all weights and the cache.
        scale: of the norm before attention, float32 (H,).
        heads: weights (kv_heads * (group + 2) * D, H): of each key head its queries, the key, and the value.
        heads_bias: (kv_heads * (group + 2) * D,).
        cos, sin: float32 (T, D / 2), of the positions.
        cache: (2, T, kv_heads, C, D), keys and values; or in pages, (2, pages, kv_heads, page, D).
        tables: int32 (T, pages of a row), or None.
        position: int32 (T,); beyond the last one of the cache it is the last.
        sinks: float32 (kv_heads * group,): one more logit a head, without a value.
        out: weights (H, kv_heads * group * D).
        out_bias: (H,).
        router_scale: of the norm before the router, float32 (H,).
        router: weights (E, H).
        router_bias: (E,).
    """

    x: Any
    scale: Any
    heads: Any
    heads_bias: Any
    cos: Any
    sin: Any
    cache: Any
    tables: Any
    position: Any
    sinks: Any
    out: Any
    out_bias: Any
    router_scale: Any
    router: Any
    router_bias: Any


_BIASES = ("heads_bias", "out_bias", "router_bias")
_OPTIONAL = ("heads_bias", "tables", "sinks", "out_bias", "router_bias")


class Results(NamedTuple):
    """The residual stream (T, H) after attention; the cache; logits, float32 (T, E); the normed tokens (T, H)."""

    x: Any
    cache: Any
    logits: Any
    normed: Any


def reject_reason(given: Operands, environment: Environment) -> str | None:
    """Why the kernels do not take operands, of shapes that fit each other, on a machine; None if they do."""
    if environment.compute_capability != CAPABILITY:
        capability = environment.compute_capability
        this = environment.platform if capability is None else ".".join(map(str, capability))
        return f"needs a GPU of compute capability 9.0 (this is {this})"
    biases = (name for name in _BIASES if getattr(given, name) is not None)
    tokens = given.x.shape[0]
    if not isinstance(tokens, int) or tokens > MOST_TOKENS:
        return f"tokens (={tokens}) must be at most {MOST_TOKENS}"
    for name in ("x", "heads", "out", "router", "cache", *biases):
        dtype = getattr(getattr(given, name), "dtype", None)  # quantized weights have none
        if dtype != jnp.bfloat16:
            return f"`{name}` (of {dtype}) must be bfloat16"
    kv_heads, dim = given.cache.shape[2], given.cache.shape[4]
    if dim != DIM or given.cos.shape[-1] != DIM // 2:
        return f"channels of a head (={dim}) must be {DIM}, all of them rotated (={2 * given.cos.shape[-1]})"
    group = given.out.shape[1] // DIM // kv_heads
    if group > MOST_GROUP:
        return f"queries to a key head (={group}) must be at most {MOST_GROUP}"
    for name in ("heads", "out", "router"):
        columns = getattr(given, name).shape[1]
        if columns % VECTOR or columns > MOST_COLUMNS:
            return f"columns of `{name}` (={columns}) must be a multiple of {VECTOR} and at most {MOST_COLUMNS}"
    return None


@dataclass(frozen=True)
class OneToken:
    """What is static of a call.

    Args:
        window: how many positions are attended to, the token's own included; None: all.
        epsilon, router_epsilon: of the norms.
    """

    window: int | None
    epsilon: float
    router_epsilon: float

    interpret = False

    # As `jmx.pallas.defined` has it: results are those of `Results`.

    def shapes(self, given: Operands) -> list[jax.ShapeDtypeStruct]:
        x = jax.ShapeDtypeStruct(given.x.shape, given.x.dtype)
        logits = jax.ShapeDtypeStruct((given.x.shape[0], given.router.shape[0]), jnp.float32)
        return [x, jax.ShapeDtypeStruct(given.cache.shape, given.cache.dtype), logits, x]

    def define(self, given: Operands) -> list[Shaped[Array, "..."]]:
        length = given.cache.shape[3]
        pages = 1 if given.tables is None else given.tables.shape[1]
        position = jnp.minimum(given.position, length * pages - 1)
        number, place = jnp.divmod(position, length)
        if given.tables is None:
            numbers = jnp.arange(given.x.shape[0])
        else:
            numbers = jnp.take_along_axis(given.tables, number[:, None], axis=1)[:, 0]
        of_heads = heads.Operands(
            given.x, given.scale, given.heads, given.heads_bias, given.cos, given.sin, given.cache, numbers, place
        )
        query, cache = heads.Heads(_NO_TILE, self.epsilon).define(of_heads)
        attended = _attend(query, cache, given, position, self.window)
        of_out = linear.Operands(attended.reshape(given.x.shape[0], -1), None, given.out, given.out_bias, given.x)
        (x,) = linear.Linear(_NO_TILE).define(of_out)
        of_router = linear.Operands(x, given.router_scale, given.router, given.router_bias, None)
        logits, normed = linear.Linear(_NO_TILE, self.router_epsilon, normed=True).define(of_router)
        return [x, cache, logits, normed]

    def launch(self, given: Operands) -> list[Shaped[Array, "..."]]:
        arrays = {name: array for name, array in given._asdict().items() if array is not None}
        present = sum((name in arrays) << bit for bit, name in enumerate(_OPTIONAL))
        aliases = {[*arrays].index("cache"): 1}
        sizes = given.heads.shape[0], given.out.shape[1]
        between = [jax.ShapeDtypeStruct((given.x.shape[0], size), given.x.dtype) for size in sizes]
        call = jax.ffi.ffi_call(TARGET, [*self.shapes(given), *between], input_output_aliases=aliases)
        results = call(
            *arrays.values(),
            present=np.int64(present),
            window=np.int64(self.window or 0),
            epsilon=np.float32(self.epsilon),
            router_epsilon=np.float32(self.router_epsilon),
        )
        return [*results[:-2]]


def _attend(
    query: Shaped[Array, "T heads D"],
    cache: Shaped[Array, "2 pages kv_heads C D"],
    given: Operands,
    position: Array,
    window: int | None,
) -> Shaped[Array, "T heads D"]:
    """Softmax of the scores, with the sink, times the values, in float32."""
    tokens, _, dim = query.shape
    cache = cache[:, jnp.arange(tokens)[:, None] if given.tables is None else given.tables]
    keys, values = cache.swapaxes(2, 3).reshape(2, tokens, cache.shape[3], -1, dim).astype(jnp.float32)
    groups = query.astype(jnp.float32).reshape(tokens, keys.shape[1], -1, dim)
    scores = jnp.einsum("thgd,thkd->thgk", groups, keys, precision="highest") * dim**-0.5
    at = jnp.arange(keys.shape[2])
    seen = at <= position[:, None]
    if window is not None:
        seen &= at > position[:, None] - window
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    if given.sinks is not None:
        sinks = jnp.broadcast_to(given.sinks.reshape(*scores.shape[1:3], 1), (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    shares = jax.nn.softmax(scores, axis=-1)[..., : len(at)]
    values = jnp.where(seen[:, None, :, None], values, 0)  # what is not written yet may be anything
    return jnp.einsum("thgk,thkd->thgd", shares, values, precision="highest").astype(query.dtype).reshape(query.shape)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def run(window: int | None, epsilon: float, router_epsilon: float, given: Operands) -> Results:
    """The results of a call, see `OneToken` and `Operands`."""
    call = OneToken(window, epsilon, router_epsilon)
    return Results(*meshes.unchecked(partial(_one_token, call=call))(given))


@run.defjvp
def _derivative(window: int | None, epsilon: float, router_epsilon: float, primals: Any, tangents: Any) -> Any:
    call = OneToken(window, epsilon, router_epsilon)
    _, of_results = jax.jvp(lambda given: Results(*call.define(given)), primals, tangents)
    return run(window, epsilon, router_epsilon, *primals), of_results


_one_token = defined.primitive("jmx_one_token")
