"""The routing methods: one frozen dataclass each, from router logits to expert ids and weights.

Results are defined where the literature leaves them open. Experts are chosen in descending order of their score; of
equal scores the lower expert id comes first. An expert whose logit is NaN or -inf is never chosen; +inf counts as the
largest finite float32. Slots left over get id `NOWHERE` and weight 0, so weights and their gradients are always finite.
All is computed in float32.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp

from jmx.routing.routing import Routing, as_int32, validate
from jmx.routing.top_k import assign, mask_groups, weigh
from jmx.util import pytrees
from jmx.util.checks import check_bool, check_callable, check_finite, check_instance, check_int, check_one_of, shown
from jmx.util.typing import AnyArray, Array, Float, Float32, Int32, Integer

SCORINGS = ("softmax", "sigmoid", "sqrt_softplus")

Assignment = tuple[Int32[AnyArray, "T k"], Float32[AnyArray, "T k"]]  # ids and weights

# The check of each field, by name. They return Python's own numbers, so that equal methods compare as equal.
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "top_k": partial(check_int, least=1),
    "num_groups": partial(check_int, least=1),
    "topk_groups": check_int,
    "scoring": partial(check_one_of, choices=SCORINGS),
    "renormalize": check_bool,
    "routed_scaling_factor": check_finite,
    "function": check_callable,
}


@dataclass(frozen=True)
class Method:
    """Base class of the routing methods, static values.

    Called with float32 logits (T, E) and a correction bias (E,) or None, a method returns ids (T, k) and weights
    (T, k).

    Args:
        top_k: slots of a token, k.
    """

    top_k: int
    takes_bias: ClassVar[bool] = False  # whether the definition has a correction bias

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            assert field.name in _CHECKS, f"`_CHECKS` must have a check of `{field.name}`"
            object.__setattr__(self, field.name, _CHECKS[field.name](field.name, getattr(self, field.name)))

    def check(self, num_experts: int) -> None:
        """Raises ValueError if the method cannot choose among `num_experts`."""
        check_int("num_experts", num_experts, least=1)
        if self.top_k > num_experts:
            raise ValueError(f"`top_k` (={self.top_k}) must be at most the number of experts (={num_experts})")

    def __call__(self, logits: Float32[Array, "T E"], correction_bias: Float32[Array, " E"] | None) -> Assignment:
        raise NotImplementedError


@dataclass(frozen=True)
class TopKSoftmax(Method):
    """The k largest logits, then softmax over those k (gpt-oss's published model code)."""

    def __call__(self, logits: Float32[Array, "T E"], correction_bias: Float32[Array, " E"] | None) -> Assignment:
        return assign(logits, None, self.top_k, "softmax", renormalize=True)


@dataclass(frozen=True)
class SoftmaxTopK(Method):
    """Softmax over all experts, then the k largest (Shazeer et al. 2017; Mixtral, Qwen).

    Args:
        top_k: slots of a token.
        renormalize: whether the k weights are divided by their sum; then it is `TopKSoftmax`.
    """

    renormalize: bool

    def __call__(self, logits: Float32[Array, "T E"], correction_bias: Float32[Array, " E"] | None) -> Assignment:
        return assign(logits, None, self.top_k, "softmax", renormalize=self.renormalize)


@dataclass(frozen=True)
class _ScoreTopK(Method):
    """The k largest of an expert's own score + correction bias, weighted by the score alone."""

    renormalize: bool
    routed_scaling_factor: float = 1.0
    takes_bias: ClassVar[bool] = True
    scoring: ClassVar[str]

    def __call__(self, logits: Float32[Array, "T E"], correction_bias: Float32[Array, " E"] | None) -> Assignment:
        ids, weights = assign(logits, correction_bias, self.top_k, self.scoring, renormalize=self.renormalize)
        return ids, weights * self.routed_scaling_factor

    def weigh(self, logits: Float32[Array, "T E"], ids: Int32[Array, "T k"]) -> Float32[Array, "T k"]:
        """The weights of ids that the method chose."""
        return weigh(logits, ids, self.scoring, renormalize=self.renormalize) * self.routed_scaling_factor


@dataclass(frozen=True)
class SigmoidTopK(_ScoreTopK):
    """The k largest of sigmoid(logit) + correction bias, weighted by sigmoid(logit) alone (DeepSeek-V3 ungrouped).

    Args:
        top_k: slots of a token.
        renormalize: whether the k weights are divided by their sum.
        routed_scaling_factor: multiplies the weights at the end.
    """

    scoring: ClassVar[str] = "sigmoid"


@dataclass(frozen=True)
class SqrtSoftplusTopK(_ScoreTopK):
    """The k largest of sqrt(softplus(logit)) + correction bias, weighted by sqrt(softplus(logit)) alone (DeepSeek-V4).

    softplus(x) = log(1 + exp(x)).

    The arguments are those of `SigmoidTopK`.
    """

    scoring: ClassVar[str] = "sqrt_softplus"


@dataclass(frozen=True)
class GroupedTopK(Method):
    """The k best experts among the best groups of neighboring experts (DeepSeek-V2 and V3 reports, routing sections).

    An expert's score plus the correction bias decides the choice, its score alone the weight. A group's score is the
    sum of its two best biased scores if there is a correction bias (V3), else its best score (V2).

    Args:
        top_k: slots of a token.
        num_groups: groups of E / num_groups consecutive experts.
        topk_groups: groups among whose experts the k are chosen.
        scoring: "softmax" over all experts, "sigmoid", or "sqrt_softplus", the square root of log(1 + exp(logit)).
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
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(f"`topk_groups` (={self.topk_groups}) must be in 1..`num_groups` (={self.num_groups})")

    def check(self, num_experts: int) -> None:
        super().check(num_experts)
        if num_experts % self.num_groups:
            raise ValueError(f"`num_groups` (={self.num_groups}) must divide the number of experts (={num_experts})")
        candidates = self.topk_groups * (num_experts // self.num_groups)
        if candidates < self.top_k:
            raise ValueError(
                f"`top_k` (={self.top_k}) must be at most the experts (={candidates}) of `topk_groups` "
                f"(={self.topk_groups}) groups"
            )

    def __call__(self, logits: Float32[Array, "T E"], correction_bias: Float32[Array, " E"] | None) -> Assignment:
        options: dict[str, Any] = {"renormalize": self.renormalize}
        if self.topk_groups < self.num_groups:  # else no group is masked
            best_of_group = 1 if correction_bias is None else 2
            options["mask"] = partial(mask_groups, self.num_groups, self.topk_groups, best_of_group)
        ids, weights = assign(logits, correction_bias, self.top_k, self.scoring, **options)
        return ids, weights * self.routed_scaling_factor

    def weigh(self, logits: Float32[Array, "T E"], ids: Int32[Array, "T k"]) -> Float32[Array, "T k"]:
        """The weights of ids that the method chose."""
        return weigh(logits, ids, self.scoring, renormalize=self.renormalize) * self.routed_scaling_factor


@dataclass(frozen=True)
class Custom(Method):
    """A user's function: float32 logits (T, E), unchanged, to integer ids and floating weights (T, k).

    With a correction bias it is called as `function(logits, correction_bias)`, float32 (E,), else as
    `function(logits)`. It then decides about ties, NaN and whether weights are finite.
    """

    function: Callable[..., tuple[Integer[Any, "T k"], Float[Any, "T k"]]]
    takes_bias: ClassVar[bool] = True

    def __call__(self, logits: Float32[Array, "T E"], correction_bias: Float32[Array, " E"] | None) -> Assignment:
        result = self.function(logits) if correction_bias is None else self.function(logits, correction_bias)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"`function` (={self.function!r}) must return ids and weights, not {shown(result)}")
        ids, weights = result
        validate(Routing(ids, weights), logits.shape[0])
        if ids.shape[1] != self.top_k:
            raise ValueError(f"`expert_ids` (shape {ids.shape}) must have `top_k` (={self.top_k}) slots a token")
        return as_int32(ids), weights.astype(jnp.float32)


# By name, for arguments: the constructor of each method from `top_k`. `GroupedTopK` and `Custom` have more arguments.
ROUTING_METHODS: dict[str, Callable[[int], Method]] = {
    "top_k_softmax": TopKSoftmax,
    "softmax_top_k": partial(SoftmaxTopK, renormalize=False),
    "sigmoid_top_k": partial(SigmoidTopK, renormalize=False),
    "sigmoid_top_k_renormalized": partial(SigmoidTopK, renormalize=True),
    "sqrt_softplus_top_k": partial(SqrtSoftplusTopK, renormalize=False),
    "sqrt_softplus_top_k_renormalized": partial(SqrtSoftplusTopK, renormalize=True),
}


def get(routing: Method | str, top_k: int) -> Method:
    """A method, or the one of that name in `ROUTING_METHODS`. ValueError, naming those, for other names."""
    if isinstance(routing, str):
        return ROUTING_METHODS[check_one_of("routing", routing, ROUTING_METHODS)](top_k)
    return check_instance("routing", routing, Method, f"a routing method, or one of {[*ROUTING_METHODS]}")


def _written(method: Method) -> dict[str, Any]:
    kind = type(method)
    if kind not in _SERIALIZED.values():
        raise ValueError(
            f"`method` ({shown(method)}) must be one of {[*_SERIALIZED]} to be serialized: call `jmx.route` in the "
            "function that is exported"
        )
    return {"name": kind.__name__, **dataclasses.asdict(method)}


def _read(written: dict[str, Any]) -> Method:
    given = dict(written)
    return _SERIALIZED[check_one_of("name", given.pop("name"), _SERIALIZED)](**given)


_SERIALIZED = {kind.__name__: kind for kind in (TopKSoftmax, SoftmaxTopK, SigmoidTopK, SqrtSoftplusTopK, GroupedTopK)}
CODEC: pytrees.Codec = (_written, _read)
