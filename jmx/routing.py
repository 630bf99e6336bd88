"""Router logits to expert ids and weights: one frozen dataclass a method, `route` to run any of them.

The results are defined where the field leaves them open. Experts are chosen in descending order of their score and
equal scores go to the lower expert id. A NaN or -inf logit is an expert that is never chosen, and +inf counts as the
largest finite float32. Slots left over get id `NOWHERE` and weight 0, so weights are always finite, and so are their
gradients. All is computed in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import prod
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmx import meshes
from jmx.util.checks import (
    check_array,
    check_bool,
    check_callable,
    check_finite,
    check_instance,
    check_int,
    check_one_of,
    shown,
)

Array = Any  # a jax.Array, a numpy array, or a tracer

NOWHERE = -1  # the expert id of a slot that routes nowhere

SCORINGS = ("softmax", "sigmoid")

_FEW = 8  # slots that are worth code of their own

_Entry = tuple[Any, Any]  # a key and its index


class Routing(NamedTuple):
    """Which experts each token goes to: `expert_ids` (T, k) int32, `weights` (T, k) float32; a pytree.

    Ids outside 0..E-1 are legal and contribute nothing.
    """

    expert_ids: Array
    weights: Array


@dataclass(frozen=True)
class Method:
    """Base of the routing methods, static values. `top_k` is the number of slots a token has, k.

    Called with float32 logits (T, E) and a correction bias (E,) or None, a method returns the ids (T, k) and weights
    (T, k) of its definition. `check` raises ValueError where it cannot serve `num_experts`; `takes_bias` says whether
    its definition has a place for a correction bias.
    """

    top_k: int
    takes_bias: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._set(top_k=check_int("top_k", self.top_k, least=1))

    def _set(self, **fields: Any) -> None:
        """Fields as they were checked: Python's own numbers, of which equal methods are equal."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def check(self, num_experts: int) -> None:
        check_int("num_experts", num_experts, least=1)
        if self.top_k > num_experts:
            raise ValueError(f"`top_k` (={self.top_k}) must be at most the number of experts (={num_experts})")

    def __call__(self, logits: jax.Array, correction_bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        raise NotImplementedError


@dataclass(frozen=True)
class TopKSoftmax(Method):
    """The k largest logits, then softmax over those k (gpt-oss's published model code)."""

    def __call__(self, logits: jax.Array, correction_bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return _assign(logits, None, self.top_k, "softmax", renormalize=True)


@dataclass(frozen=True)
class SoftmaxTopK(Method):
    """Softmax over all experts, then the k largest (Shazeer et al. 2017; Mixtral, Qwen).

    Args:
        top_k: slots a token.
        renormalize: whether the k weights are divided by their sum; then it is `TopKSoftmax`.
    """

    renormalize: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(renormalize=check_bool("renormalize", self.renormalize))

    def __call__(self, logits: jax.Array, correction_bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return _assign(logits, None, self.top_k, "softmax", renormalize=self.renormalize)


@dataclass(frozen=True)
class SigmoidTopK(Method):
    """The k largest of sigmoid(logit) + correction bias, weighed by sigmoid(logit) alone (DeepSeek-V3 ungrouped).

    Args:
        top_k: slots a token.
        renormalize: whether the k weights are divided by their sum.
        routed_scaling_factor: multiplies the weights at the end.
    """

    renormalize: bool
    routed_scaling_factor: float = 1.0
    takes_bias: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(
            renormalize=check_bool("renormalize", self.renormalize),
            routed_scaling_factor=check_finite("routed_scaling_factor", self.routed_scaling_factor),
        )

    def __call__(self, logits: jax.Array, correction_bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        ids, weights = _assign(logits, correction_bias, self.top_k, "sigmoid", renormalize=self.renormalize)
        return ids, weights * self.routed_scaling_factor


@dataclass(frozen=True)
class GroupedTopK(Method):
    """The k best experts among the best groups of neighbouring experts (DeepSeek-V2 and V3 reports, routing sections).

    An expert's score plus the correction bias decides the choice, its score alone the weight. A group's score is the
    sum of its two best biased scores where there is a correction bias (V3), else its best score (V2).

    Args:
        top_k: slots a token.
        num_groups: groups of E / num_groups consecutive experts.
        topk_groups: groups that stay in the choice.
        scoring: "softmax" over all experts, or "sigmoid".
        renormalize: whether the k weights are divided by their sum.
        routed_scaling_factor: multiplies the weights at the end.
    """

    num_groups: int
    topk_groups: int
    scoring: str
    renormalize: bool
    routed_scaling_factor: float = 1.0
    takes_bias: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(
            num_groups=check_int("num_groups", self.num_groups, least=1),
            topk_groups=check_int("topk_groups", self.topk_groups),
            scoring=check_one_of("scoring", self.scoring, SCORINGS),
            renormalize=check_bool("renormalize", self.renormalize),
            routed_scaling_factor=check_finite("routed_scaling_factor", self.routed_scaling_factor),
        )
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(f"`topk_groups` (={self.topk_groups}) must be in 1..`num_groups` (={self.num_groups})")

    def check(self, num_experts: int) -> None:
        super().check(num_experts)
        if num_experts % self.num_groups:
            raise ValueError(f"`num_groups` (={self.num_groups}) must divide the number of experts (={num_experts})")
        reach = self.topk_groups * (num_experts // self.num_groups)
        if reach < self.top_k:
            raise ValueError(
                f"`top_k` (={self.top_k}) must be at most the experts (={reach}) of `topk_groups` "
                f"(={self.topk_groups}) groups"
            )

    def __call__(self, logits: jax.Array, correction_bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        best_of_group = 1 if correction_bias is None else 2
        limit = partial(_keep_groups, self.num_groups, self.topk_groups, best_of_group)
        ids, weights = _assign(
            logits, correction_bias, self.top_k, self.scoring, renormalize=self.renormalize, limit=limit
        )
        return ids, weights * self.routed_scaling_factor


@dataclass(frozen=True)
class Custom(Method):
    """A function of the user's own: float32 logits (T, E), as they come, to integer ids and floating weights (T, k).

    What the module promises of ties, NaN and finite weights is then up to the function.
    """

    top_k: int
    function: Callable[[jax.Array], tuple[jax.Array, jax.Array]]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_callable("function", self.function)

    def __call__(self, logits: jax.Array, correction_bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        result = self.function(logits)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"`function` (={self.function!r}) must return ids and weights, not {shown(result)}")
        ids, weights = result
        validate(Routing(ids, weights), logits.shape[0])
        if ids.shape[1] != self.top_k:
            raise ValueError(f"`expert_ids` (shape {ids.shape}) must have `top_k` (={self.top_k}) slots a token")
        return as_int32(ids), weights.astype(jnp.float32)


# By name, for arguments: what makes the method of a `top_k`. `GroupedTopK` and `Custom` need more than that.
ROUTING_METHODS: dict[str, Callable[[int], Method]] = {
    "top_k_softmax": TopKSoftmax,
    "softmax_top_k": partial(SoftmaxTopK, renormalize=False),
    "sigmoid_top_k": partial(SigmoidTopK, renormalize=False),
    "sigmoid_top_k_renormalized": partial(SigmoidTopK, renormalize=True),
}


def get(routing: Method | str, top_k: int) -> Method:
    """A method, or that of `ROUTING_METHODS` under that name. ValueError, naming those, for other names."""
    if isinstance(routing, str):
        return ROUTING_METHODS[check_one_of("routing", routing, ROUTING_METHODS)](top_k)
    return check_instance("routing", routing, Method, f"a routing method, or one of {[*ROUTING_METHODS]}")


@partial(jax.tree_util.register_dataclass, data_fields=["values", "correction_bias"], meta_fields=["method"])
@dataclass(frozen=True)
class Logits:
    """Router logits and what to make of them; a pytree in which `method` is static.

    Args:
        values: floating (..., E), any leading token axes.
        method: the routing method.
        correction_bias: floating (E,) or None; takes part in the choice of experts, never in their weights. NaN or
            -inf takes an expert out of the choice.
    """

    values: Array
    method: Method
    correction_bias: Array | None = None


def route(logits: Logits, mask: Array | None = None) -> Routing:
    """Chooses experts and weighs them; differentiable with respect to the logits' values.

    Args:
        logits: router logits (..., E).
        mask: bool (...) or None; False is a padding token, which routes nowhere.

    Returns:
        `Routing` of expert_ids (..., k) int32 and weights (..., k) float32, best expert first.

    Raises:
        TypeError: values or a correction bias that are not floating, a mask that is not bool.
        ValueError: shapes that do not fit each other, a method that cannot serve E experts, or arrays that Explicit
            mesh axes split along anything but tokens.
    """
    check_instance("logits", logits, Logits, "jmx.Logits")
    values, bias, method = logits.values, logits.correction_bias, logits.method
    check_array("values", values, jnp.floating)
    check_instance("method", method, Method, "a routing method, such as jmx.TopKSoftmax(top_k=2)")
    if len(values.shape) == 0:
        raise ValueError("`values` (a scalar) must have shape (..., num_experts)")
    *leading, num_experts = values.shape
    method.check(num_experts)
    if bias is not None:
        if not method.takes_bias:
            raise ValueError(f"`correction_bias` must be None for {type(method).__name__}, which has no place for it")
        check_array("correction_bias", bias, jnp.floating)
        if bias.shape != (num_experts,):
            raise ValueError(f"`correction_bias` (shape {bias.shape}) must be {(num_experts,)}")
        bias = jnp.asarray(bias, jnp.float32)
    if mask is not None:
        check_array("mask", mask, jnp.bool_)
        if mask.shape != tuple(leading):
            raise ValueError(f"`mask` (shape {mask.shape}) must be {tuple(leading)}, the leading axes of `values`")

    by_token = {"values": values} if mask is None else {"values": values, "mask": mask}
    split = meshes.leading_split(len(leading), by_token, {} if bias is None else {"correction_bias": bias})
    if split is None:
        return _route(by_token, bias, method)
    return _route_on_devices(by_token, bias, method, split)


def _route(by_token: dict[str, Array], bias: Array | None, method: Method) -> Routing:
    """`route` of arrays that are checked."""
    *leading, num_experts = by_token["values"].shape
    num_tokens = prod(leading)
    values = jnp.asarray(by_token["values"], jnp.float32).reshape(num_tokens, num_experts)
    ids, weights = method(values, bias)
    if "mask" in by_token:
        routed = by_token["mask"].reshape(num_tokens, 1)
        ids, weights = jnp.where(routed, ids, NOWHERE), jnp.where(routed, weights, 0)
    return Routing(ids.reshape(*leading, method.top_k), weights.reshape(*leading, method.top_k))


@partial(jax.jit, static_argnums=(2, 3))
def _route_on_devices(by_token: dict[str, Array], bias: Array | None, method: Method, split: meshes.Split) -> Routing:
    return meshes.over_devices(split, lambda by_token, bias: _route(by_token, bias, method), by_token, bias)


def validate(routing: Routing, num_tokens: int) -> None:
    """Checks a routing of `num_tokens` (T) tokens.

    Raises:
        TypeError: ids that are not integers, weights that are not floating.
        ValueError: shapes that are not (T, k) with the same k.
    """
    ids, weights = routing
    check_array("expert_ids", ids, jnp.integer)
    check_array("weights", weights, jnp.floating)
    if ids.ndim != 2 or ids.shape[0] != num_tokens:
        raise ValueError(f"`expert_ids` (shape {ids.shape}) must be (T, k) with T = {num_tokens} tokens")
    if weights.shape != ids.shape:
        raise ValueError(f"`weights` (shape {weights.shape}) must have the shape of `expert_ids` (={ids.shape})")


def token_counts(routing: Routing, num_experts: int) -> jax.Array:
    """How many slots of `routing` go to each expert: (E,) int32. Ids outside 0..E-1 count nowhere.

    Raises:
        ValueError, TypeError: what is no routing, no number of experts, or ids that Explicit mesh axes split.
    """
    check_instance("routing", routing, Routing, "a jmx.Routing")
    check_array("expert_ids", routing.expert_ids, jnp.integer)
    num_experts = check_int("num_experts", num_experts, least=1)
    meshes.check_whole({"expert_ids": routing.expert_ids})
    ids = jnp.asarray(as_int32(routing.expert_ids)).reshape(-1)
    ids = jnp.where(ids < 0, num_experts, ids)  # a negative index would count from the end
    return jnp.zeros(num_experts, jnp.int32).at[ids].add(1, mode="drop")


def as_int32(ids: Array) -> Array:
    """Expert ids as int32; those that int32 cannot hold, which jax would wrap around, are `NOWHERE`."""
    if ids.dtype.itemsize < 4 or ids.dtype == jnp.int32:
        return ids.astype(jnp.int32)
    xp = np if isinstance(ids, np.ndarray) else jnp  # jnp narrows 64 bits before it compares
    inside = (ids >= 0) & (ids <= jnp.iinfo(jnp.int32).max)
    return xp.where(inside, ids.astype(jnp.int32), NOWHERE)


def _assign(
    logits: jax.Array,
    correction_bias: jax.Array | None,
    top_k: int,
    scoring: str,
    *,
    renormalize: bool,
    limit: Callable[[jax.Array], jax.Array] = lambda keys: keys,
) -> tuple[jax.Array, jax.Array]:
    """Ids and weights (T, k) of logits (T, E). `limit` sets the keys of experts that may not be chosen to -inf."""
    largest = jnp.finfo(jnp.float32).max
    usable = logits > -jnp.inf  # false for NaN too
    logits = jnp.minimum(jnp.where(usable, logits, -largest), largest)
    scores = _softmax(logits, usable) if scoring == "softmax" else jax.nn.sigmoid(logits)

    # Without a bias the logits order the experts as the scores do, and still where scores have rounded to equal.
    keys = lax.stop_gradient(logits if correction_bias is None else scores + correction_bias)
    keys = limit(jnp.where(usable & (keys > -jnp.inf), keys, -jnp.inf))
    best, ids = _top_k(keys, top_k)
    chosen = best > -jnp.inf

    if renormalize:  # a softmax of log scores divides by their sum, also where all of them underflow
        log_scores = logits if scoring == "softmax" else jax.nn.log_sigmoid(logits)
        weights = _softmax(jnp.take_along_axis(log_scores, ids, axis=-1), chosen)
    else:
        weights = jnp.where(chosen, jnp.take_along_axis(scores, ids, axis=-1), 0)
    return jnp.where(chosen, ids, NOWHERE), weights


def _softmax(x: jax.Array, where: jax.Array) -> jax.Array:
    """Softmax of finite `x` over the entries that `where` admits; 0 elsewhere, and all 0 where it admits none."""
    peak = lax.stop_gradient(_fold(jnp.maximum, jnp.where(where, x, -jnp.inf)))
    powers = jnp.where(where, jnp.exp(jnp.where(where, x - peak, 0)), 0)
    total = _fold(jnp.add, powers)
    return powers / jnp.where(total > 0, total, 1)


def _fold(ufunc: Any, x: jax.Array) -> jax.Array:
    """x (..., n) -> (..., 1) by an associative `ufunc`, few entries one by one.

    On a GPU those are part of the kernel that reads the result; a reduction would be a kernel of its own.
    """
    if x.shape[-1] > _FEW:
        return ufunc.reduce(x, axis=-1, keepdims=True)
    return reduce(ufunc, jnp.split(x, x.shape[-1], axis=-1))


def _top_k(keys: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of float32 keys (..., n), which are not NaN, and their indices: both (..., k), largest first.

    Equal keys go to the lower index. A few are found by one reduction that merges lists of the best, which is one
    kernel on a GPU, where sorting takes several.
    """
    if k > _FEW:
        best, ids = lax.top_k(jnp.where(keys == 0, 0.0, keys), k)  # it holds -0.0 to be less than 0.0
        return best, ids
    axis, width = keys.ndim - 1, 1 << (k - 1).bit_length()

    def order(a: _Entry, b: _Entry) -> tuple[_Entry, _Entry]:
        first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return (
            (jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])),
            (jnp.where(first, b[0], a[0]), jnp.where(first, b[1], a[1])),
        )

    def merge(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
        """The better half of two ordered lists, ordered (Batcher's bitonic merge); a list is its keys, then indices."""
        lists = [list(zip(c[:width], c[width:], strict=True)) for c in (a, b)]
        best = [order(*pair)[0] for pair in zip(lists[0], reversed(lists[1]), strict=True)]
        for stride in (width >> i for i in range(1, width.bit_length())):
            for i in range(width):
                if not i & stride:
                    best[i], best[i + stride] = order(best[i], best[i + stride])
        return tuple(entry[0] for entry in best) + tuple(entry[1] for entry in best)

    index = lax.broadcasted_iota(jnp.int32, keys.shape, axis)
    worst = (np.float32(-np.inf), np.int32(keys.shape[axis]))
    lists = [
        [array] + [jnp.full_like(array, none)] * (width - 1) for array, none in zip((keys, index), worst, strict=True)
    ]
    columns = lax.reduce((*lists[0], *lists[1]), (worst[0],) * width + (worst[1],) * width, merge, (axis,))
    return _stack(columns[:k]), _stack(columns[width : width + k])


def _stack(columns: Sequence[jax.Array]) -> jax.Array:
    """`jnp.stack` on the last axis, in a form that XLA fuses with what reads it on a GPU."""
    out = jnp.broadcast_to(columns[0][..., None], (*columns[0].shape, len(columns)))
    slot = lax.broadcasted_iota(jnp.int32, out.shape, out.ndim - 1)
    for i, column in enumerate(columns):
        out = jnp.where(slot == i, column[..., None], out)
    return out


def _keep_groups(num_groups: int, topk_groups: int, best_of_group: int, keys: jax.Array) -> jax.Array:
    """Keys (T, E) with -inf outside the `topk_groups` groups whose `best_of_group` best keys have the largest sum."""
    num_tokens, num_experts = keys.shape
    grouped = keys.reshape(num_tokens, num_groups, num_experts // num_groups)
    best, _ = _top_k(grouped, min(best_of_group, num_experts // num_groups))
    # Experts out of the choice must not drag down a group that has others.
    total = jnp.where(best > -jnp.inf, best, 0).sum(axis=-1)
    total = jnp.where(best[..., 0] > -jnp.inf, total, -jnp.inf)
    _, kept = _top_k(total, topk_groups)
    is_kept = (kept[..., None] == jnp.arange(num_groups)).any(axis=1)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(keys.shape)
