"""Choosing the next token from logits."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmx.models.penalties import TokenCounts, penalize
from jmx.models.token_rows import TokenIds
from jmx.util.checks import check_finite, check_int

_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Sampler:
    """Greedy, or random from the softmax at a temperature, optionally only from its most probable part.

    Penalties change the logits first, also of a greedy choice; then temperature, top_k, top_p and min_p follow, in this
    order, as in transformers. Tokens that are as probable as the last one kept are kept, too.

    Args:
        temperature: divides the logits; 0 takes the largest logit, and the lowest id among equals.
        top_p: above 0, at most 1; keeps the most probable tokens up to the first at which their sum reaches it (nucleus
            sampling, Holtzman et al., 2019), in the softmax of those that `top_k` keeps.
        seed: in 0..2^32 - 1; the same seed, step and logits give the same token.
        top_k: keeps so many of the most probable tokens; None keeps all.
        min_p: in 0..1; keeps tokens at least so many times as probable as the most probable one (Nguyen et al., 2024).
        repetition_penalty: a positive number of float32; see `penalize`. 1 changes nothing.
        presence_penalty: in -2..2; see `penalize`. 0 changes nothing.
        frequency_penalty: likewise.

    Raises:
        TypeError: a parameter that is not a number.
        ValueError: a parameter outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    _: KW_ONLY
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))

    @cached_property
    def numbers(self) -> dict[str, np.generic]:
        """The parameters that have an effect, by name: the argument of `choose`."""
        names: list[str] = []
        if self.has_penalties:
            names += ["repetition_penalty", "presence_penalty", "frequency_penalty"]
        if self.temperature > 0:
            names += ["temperature", "seed"]
            filters = {"top_k": None, "top_p": 1, "min_p": 0}
            names += [name for name, keeps_all in filters.items() if getattr(self, name) != keeps_all]
        types = {"seed": np.uint32, "top_k": lambda count: np.int32(min(count, np.iinfo(np.int32).max))}
        return {name: types.get(name, np.float32)(getattr(self, name)) for name in names}

    @property
    def has_penalties(self) -> bool:
        """Whether a choice depends on the tokens before it, of which `TokenCounts` are needed."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def counts(self, prompts: TokenIds, vocab_size: int) -> TokenCounts | None:
        """The state before the first choice: None without penalties."""
        return TokenCounts.of(prompts, vocab_size) if self.has_penalties else None

    def __call__(self, logits: jax.Array, step: int | jax.Array, counts: TokenCounts | None = None) -> jax.Array:
        """Logits (B, vocab_size) -> int32 (B,). `step` counts the tokens drawn so far.

        ValueError if there are penalties and no `counts`.
        """
        if self.has_penalties and counts is None:
            raise ValueError("`counts` (=None) must be given to a sampler with penalties")
        return _choose(logits, self.numbers, step, counts)


def choose(
    logits: jax.Array, numbers: Mapping[str, Any], step: int | jax.Array, counts: TokenCounts | None
) -> jax.Array:
    """`Sampler.__call__` with parameters like `Sampler.numbers`, which may be traced: other values compile nothing."""
    logits = logits.astype(jnp.float32)
    if "repetition_penalty" in numbers and counts is not None:
        penalties = (numbers[f"{name}_penalty"] for name in ("repetition", "presence", "frequency"))
        logits = penalize(logits, counts, *penalties)
    if "temperature" not in numbers:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    # Without the comparison, a temperature that float32 rounds to 0, and infinite logits, would give NaN.
    logits = jnp.where(logits == largest, 0, (logits - largest) / numbers["temperature"])
    if "top_k" in numbers or "top_p" in numbers:
        logits = likeliest(logits, numbers.get("top_k"), numbers.get("top_p"))
    if "min_p" in numbers:
        logits = jnp.where(logits >= jnp.log(numbers["min_p"]), logits, -jnp.inf)
    key = jax.random.fold_in(jax.random.key(numbers["seed"]), step)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


_choose = jax.jit(choose)


def likeliest(logits: jax.Array, top_k: jax.Array | None, top_p: jax.Array | None) -> jax.Array:
    """Logits (..., vocab_size) with -inf for tokens that `top_k` or `top_p`, of all rows, drops; None drops none."""
    descending = -jnp.sort(-logits, axis=-1)
    if top_k is not None:
        at = jnp.minimum(top_k, logits.shape[-1]) - 1
        least = jnp.take(descending, at, axis=-1)[..., None]
        logits, descending = (jnp.where(array >= least, array, -jnp.inf) for array in (logits, descending))
    if top_p is not None:
        probabilities = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        top_p = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)  # a smaller one is 0 in float32, and the first is kept
        least = jnp.min(jnp.where(before < top_p, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits


def check_seed(name: str, seed: Any) -> int:
    """The seed, an integer of at most 32 bits: `jax.random.key` would use only the low ones of another."""
    seed = check_int(name, seed)
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"`{name}` (={seed}) must be in 0..{(1 << 32) - 1}")
    return seed


def _check_range(name: str, value: Any, least: float, most: float, *, without_least: bool = False) -> float:
    value = check_finite(name, value)
    if not least <= value <= most or (without_least and value == least):
        above = f"above {least:g}" if without_least else f"at least {least:g}"
        raise ValueError(f"`{name}` (={value}) must be {above} and at most {most:g}")
    return value


# The ranges of penalties are those of OpenAI's API.
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "temperature": partial(_check_range, least=0, most=_MOST),
    "top_p": partial(_check_range, least=0, most=1, without_least=True),
    "seed": check_seed,
    "top_k": lambda name, value: None if value is None else check_int(name, value, least=1),
    "min_p": partial(_check_range, least=0, most=1),
    "repetition_penalty": partial(_check_range, least=_LEAST, most=_MOST),
    "presence_penalty": partial(_check_range, least=-2, most=2),
    "frequency_penalty": partial(_check_range, least=-2, most=2),
}
