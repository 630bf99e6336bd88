"""Prompts of different lengths in one batch: a prefill, then decoding steps with a sampler of one's own."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jmx.models import Runner, load

STEPS = 8


def sample(logits: jax.Array) -> jax.Array:
    """The second most probable token of each row, (B, vocab_size) -> int32 (B,)."""
    return jax.lax.top_k(logits, 2)[1][:, 1].astype(jnp.int32)


runner = Runner(load(Path(__file__).parent / "gpt_oss_demo"))
prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]]
logits, cache = runner.prefill(prompts, cache=runner.model.empty_cache(len(prompts), capacity=32))
tokens = []
for _ in range(STEPS):
    tokens.append(sample(logits))
    logits, cache = runner.decode(tokens[-1], cache)
for prompt, row in zip(prompts, np.stack(tokens, axis=1), strict=True):
    print(prompt, "->", row)
print("tokens in the cache:", cache.lengths)
