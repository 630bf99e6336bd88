"""The arithmetic of routing: softmax over some of the experts, the k largest in a stable order, the best groups.

All is computed in float32, in forms that XLA compiles into few kernels on a GPU.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmx.routing.routing import NOWHERE
from jmx.util.typing import Array, Bool, Float32, Int32, Shaped

_TAIL = -10.0  # below it, the next term of the series in `_tail_of_log` is less than half a unit of float32
_UNROLLED = 8  # up to so many entries are reduced or merged one by one

_Entry = tuple[Any, Any]  # a key and its index


def assign(
    logits: Float32[Array, "T E"],
    correction_bias: Float32[Array, " E"] | None,
    top_k: int,
    scoring: str,
    *,
    renormalize: bool,
    mask: Callable[[Float32[Array, "T E"]], Float32[Array, "T E"]] = lambda keys: keys,
) -> tuple[Int32[Array, "T k"], Float32[Array, "T k"]]:
    """Ids and weights (T, k) of logits (T, E).

    Args:
        scoring: "softmax", "sigmoid" or "sqrt_softplus".
        renormalize: whether the k weights are divided by their sum.
        mask: sets the keys of experts that may not be chosen to -inf.
    """
    logits, usable = _bounded(logits)
    scores = _scores(logits, usable, scoring)

    # Without a bias the logits order the experts as the scores do, and still do where scores round to equal numbers.
    keys = lax.stop_gradient(logits if correction_bias is None else scores + correction_bias[None])
    keys = mask(jnp.where(usable & (keys > -jnp.inf), keys, -jnp.inf))
    best, ids = _top_k(keys, top_k)
    chosen = best > -jnp.inf
    weights = _weigh(logits, scores, ids, chosen, scoring=scoring, renormalize=renormalize)
    return jnp.where(chosen, ids, NOWHERE), weights


def weigh(
    logits: Float32[Array, "T E"], ids: Int32[Array, "T k"], scoring: str, *, renormalize: bool
) -> Float32[Array, "T k"]:
    """The weights of `assign` (T, k) for ids that it chose."""
    logits, usable = _bounded(logits)
    chosen = ids != NOWHERE
    scores, ids = _scores(logits, usable, scoring), jnp.where(chosen, ids, 0)
    return _weigh(logits, scores, ids, chosen, scoring=scoring, renormalize=renormalize)


def _bounded(logits: Float32[Array, "T E"]) -> tuple[Float32[Array, "T E"], Bool[Array, "T E"]]:
    """Finite logits, and which of them may be chosen."""
    largest = jnp.finfo(jnp.float32).max
    usable = logits > -jnp.inf  # false for NaN too
    return jnp.minimum(jnp.where(usable, logits, -largest), largest), usable


def _scores(logits: Float32[Array, "T E"], usable: Bool[Array, "T E"], scoring: str) -> Float32[Array, "T E"]:
    return _softmax(logits, usable) if scoring == "softmax" else _SCORES[scoring][0](logits)


def _weigh(
    logits: Float32[Array, "T E"],
    scores: Float32[Array, "T E"],
    ids: Int32[Array, "T k"],
    chosen: Bool[Array, "T k"],
    *,
    scoring: str,
    renormalize: bool,
) -> Float32[Array, "T k"]:
    if not renormalize:
        return jnp.where(chosen, jnp.take_along_axis(scores, ids, axis=-1), 0)
    # A softmax of log scores divides by their sum, also where all of them underflow.
    log_scores = logits if scoring == "softmax" else _SCORES[scoring][1](logits)
    return _softmax(jnp.take_along_axis(log_scores, ids, axis=-1), chosen)


def sqrt_softplus(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """sqrt(log(1 + exp(x))); positive, with a finite gradient, also where exp(x) underflows."""
    tail, inside = x < _TAIL, jnp.maximum(x, _TAIL)
    return jnp.where(tail, jnp.exp(_tail_of_log(x)), jnp.sqrt(jax.nn.softplus(inside)))


def _log_sqrt_softplus(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return jnp.where(x < _TAIL, _tail_of_log(x), 0.5 * jnp.log(jax.nn.softplus(jnp.maximum(x, _TAIL))))


def _tail_of_log(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """log(sqrt(softplus(x))) below `_TAIL`: log(log(1 + t)) = log(t) - t / 2 + O(t^2), with t = exp(x)."""
    x = jnp.minimum(x, _TAIL)
    return 0.5 * (x - 0.5 * jnp.exp(x))


# Scores of logits, each by itself, and their logarithms.
_SCORES: dict[str, tuple[Callable[..., Array], Callable[..., Array]]] = {
    "sigmoid": (jax.nn.sigmoid, jax.nn.log_sigmoid),
    "sqrt_softplus": (sqrt_softplus, _log_sqrt_softplus),
}


def mask_groups(
    num_groups: int, topk_groups: int, best_of_group: int, keys: Float32[Array, "T E"]
) -> Float32[Array, "T E"]:
    """Keys (T, E) with -inf outside the `topk_groups` groups whose `best_of_group` best keys have the largest sum."""
    num_tokens, num_experts = keys.shape
    grouped = keys.reshape(num_tokens, num_groups, num_experts // num_groups)
    best, _ = _top_k(grouped, min(best_of_group, num_experts // num_groups))
    # Experts that cannot be chosen must not lower the sum of a group that has others.
    total = jnp.where(best > -jnp.inf, best, 0).sum(axis=-1)
    total = jnp.where(best[..., 0] > -jnp.inf, total, -jnp.inf)
    _, kept = _top_k(total, topk_groups)
    is_kept = (kept[..., None] == jnp.arange(num_groups)[None, None]).any(axis=1)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(keys.shape)


def _softmax(x: Float32[Array, "*lead n"], where: Bool[Array, "*lead n"]) -> Float32[Array, "*lead n"]:
    """Softmax of finite `x` over the entries where `where` is true; 0 elsewhere, and all 0 if none is true."""
    peak = lax.stop_gradient(_fold(jnp.maximum, jnp.where(where, x, -jnp.inf)))
    powers = jnp.where(where, jnp.exp(jnp.where(where, x - peak, 0)), 0)
    total = _fold(jnp.add, powers)
    return powers / jnp.where(total > 0, total, 1)


def _fold(ufunc: Any, x: Float32[Array, "*lead n"]) -> Float32[Array, "*lead 1"]:
    """x (..., n) -> (..., 1) by an associative `ufunc`; up to `_UNROLLED` entries one by one.

    On a GPU the latter fuse into the kernel that reads the result; a reduction would be a separate kernel.
    """
    if x.shape[-1] > _UNROLLED:
        return ufunc.reduce(x, axis=-1, keepdims=True)
    return reduce(ufunc, jnp.split(x, x.shape[-1], axis=-1))


def _top_k(keys: Float32[Array, "*lead n"], k: int) -> tuple[Float32[Array, "*lead k"], Int32[Array, "*lead k"]]:
    """The k largest of float32 keys (..., n), which are not NaN, and their indices: both (..., k), largest first.

    Of equal keys the lower index comes first. Up to `_UNROLLED` are found by one reduction that merges lists of the
    best, which is one kernel on a GPU, where sorting takes several.
    """
    if k > _UNROLLED:
        best, ids = lax.top_k(jnp.where(keys == 0, 0.0, keys), k)  # it orders -0.0 below 0.0
        return best, ids
    axis, width = keys.ndim - 1, 1 << (k - 1).bit_length()
    index = lax.broadcasted_iota(jnp.int32, keys.shape, axis)
    worst = (np.float32(-np.inf), np.int32(keys.shape[axis]))
    lists = [
        [array] + [jnp.full_like(array, none)] * (width - 1) for array, none in zip((keys, index), worst, strict=True)
    ]
    columns = lax.reduce((*lists[0], *lists[1]), (worst[0],) * width + (worst[1],) * width, _merge, (axis,))
    return _stack(columns[:k]), _stack(columns[width : width + k])


def _merge(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
    """The better half of two ordered lists, ordered (Batcher's bitonic merge); a list is its keys, then indices."""
    width = len(a) // 2
    lists = [list(zip(c[:width], c[width:], strict=True)) for c in (a, b)]
    best = [_ordered(*pair)[0] for pair in zip(lists[0], reversed(lists[1]), strict=True)]
    for stride in (width >> i for i in range(1, width.bit_length())):
        for i in range(width):
            if not i & stride:
                best[i], best[i + stride] = _ordered(best[i], best[i + stride])
    return tuple(entry[0] for entry in best) + tuple(entry[1] for entry in best)


def _ordered(a: _Entry, b: _Entry) -> tuple[_Entry, _Entry]:
    """Two entries, the better one first: the larger key, of equal keys the lower index."""
    first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    return (
        (jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])),
        (jnp.where(first, b[0], a[0]), jnp.where(first, b[1], a[1])),
    )


def _stack(columns: Sequence[Shaped[Array, "*lead"]]) -> Shaped[Array, "*lead k"]:
    """`jnp.stack` on the last axis, in a form that XLA fuses with what reads it on a GPU."""
    out = jnp.broadcast_to(columns[0][..., None], (*columns[0].shape, len(columns)))
    slot = lax.broadcasted_iota(jnp.int32, out.shape, out.ndim - 1)
    for i, column in enumerate(columns):
        out = jnp.where(slot == i, column[..., None], out)
    return out
