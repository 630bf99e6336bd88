"""Whether a call of attention takes a kernel of `jmx.pallas.attention`, or the plain code in `functions`.

That is decided while it is traced. `benchmarks/attention.py` times both, and others.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

import jmx
from jmx.pallas.attention import decode, latent_decode, prefill

# Rows from position 0 over their own keys and values; one token a row over a cache of keys and values; the same over a
# cache of latents, of which the first channels are the values.
Kind = Literal["prompt", "step", "latent_step"]


@dataclass(frozen=True)
class Case:
    """What is known of a call of attention while it is traced.

    Args:
        kind: of queries and keys, see `Kind`.
        tokens: queries of a row.
        length: keys of a row: the tokens of a prompt, or the capacity of a cache.
        heads, kv_heads: of queries, and of keys.
        key_dim, value_dim: channels of a head's queries and keys, and of its values.
        dtype: of queries, keys and values.
    """

    kind: Kind
    tokens: int
    length: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: jax.typing.DTypeLike


def reject_reason(case: Case, environment: jmx.Environment) -> str | None:
    """Why no kernel can run a case on a machine; None if one can, which a call then takes: it is faster."""
    capability = environment.compute_capability
    if capability != (9, 0):
        this = environment.platform if capability is None else ".".join(map(str, capability))
        return f"needs a GPU of compute capability 9.0 (this is {this})"
    if case.dtype != jnp.bfloat16:
        return f"`dtype` (={jnp.dtype(case.dtype).name}) must be bfloat16"
    return {"prompt": _prefill_reason, "step": _decode_reason, "latent_step": _latent_reason}[case.kind](
        case, environment
    )


def _prefill_reason(case: Case, environment: jmx.Environment) -> str | None:
    if case.tokens % prefill.BLOCK:
        return f"the prompt's length (={case.tokens}) must be a multiple of {prefill.BLOCK}"
    if not prefill.fits(case.key_dim, case.value_dim):
        sizes = f"`key_dim` (={case.key_dim}) and `value_dim` (={case.value_dim}) must be multiples of 16"
        most = f"values no larger than keys or {prefill.MOST_CHANNELS}"
        return f"{sizes}, {most}, and fit in shared memory"
    return None


def _step_reason(case: Case, keys: int) -> str | None:
    """For a kernel of one token a row, which reads `keys` positions of the cache at a time."""
    if case.tokens != 1:
        return f"`tokens` (={case.tokens}) must be 1"
    if case.length % keys:
        return f"the cache's capacity (={case.length}) must be a multiple of {keys}"
    return None


def _decode_reason(case: Case, environment: jmx.Environment) -> str | None:
    if reason := _step_reason(case, decode.PAGE):
        return reason
    if case.key_dim != case.value_dim:
        return f"`value_dim` (={case.value_dim}) must be `key_dim` (={case.key_dim})"
    if not decode.fits(1, case.key_dim):
        return f"`key_dim` (={case.key_dim}) must be a multiple of 16 and at most {decode.MOST_CHANNELS}"
    group = case.heads // case.kv_heads
    if not decode.fits(group, case.key_dim):
        return f"heads to a key head (={group}) must be at most {decode.ROWS}"
    return None


def _latent_reason(case: Case, environment: jmx.Environment) -> str | None:
    if reason := _step_reason(case, latent_decode.KEYS):
        return reason
    if not latent_decode.fits(case.key_dim, case.value_dim):
        latent = f"a latent (of {case.key_dim} channels, of which {case.value_dim} are values)"
        return f"{latent} must be a multiple of 64, its values one of 128 and at most 512, and fit in shared memory"
    if environment.core_count is None:
        return "the GPU's number of SMs is unknown"
    return None
