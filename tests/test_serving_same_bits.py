"""The engine on a GPU: asked again, it has the same log probabilities, bit for bit, wherever pages lie."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jmx
from jmx.models import FAMILIES, Sampler, from_source, random_source
from jmx.serving.engine import Engine, Generate, Limits

NEW = 4  # tokens of an answer


class Asked:
    """An engine and how it is asked: one prompt after the other, without reuse."""

    def __init__(self, layers: int):
        config: Any = FAMILIES["gpt_oss"].published["gpt-oss-20b"]
        config = dataclasses.replace(config, num_hidden_layers=layers, layer_types=config.layer_types[:layers])
        model = from_source(random_source(config, 0, jmx.MXFP4), dtype=jnp.bfloat16)
        limits = Limits(max_users=4, max_length=1280, cache_tokens=6 * 1280, decode_steps=1)
        self.engine, self.vocab_size, self.count = Engine(model, limits), config.vocab_size, 0

    def ask(self, prompt: tuple[int, ...]) -> list[Any]:
        """The token, its log probability and the likeliest ones, of each new token."""
        self.count += 1
        salt = str(self.count).encode()
        self.engine.submit(Generate(self.count, prompt, NEW, Sampler(), frozenset(), logprobs=True, salt=salt))
        found = []
        while not self.engine.is_idle:
            found += [(its.token, its.logprobs) for its in self.engine.step()]
        return found


@pytest.mark.gpu
def test_an_engine_asked_again_gives_the_same_bits(rng: np.random.Generator) -> None:
    """Routers are random: what differs in a last bit before them would choose other experts somewhere."""
    asked = Asked(layers=6)
    lengths = [1, 5, 100, 127, 128, 129, 1000]  # a row, one block that is full or not, several blocks
    prompts = [tuple(rng.integers(asked.vocab_size, size=length).tolist()) for length in lengths]
    first = [asked.ask(prompt) for prompt in prompts]
    assert all(len(its) == NEW for its in first)
    for _ in range(4):
        for length, prompt, its in zip(lengths, prompts, first, strict=True):
            assert asked.ask(prompt) == its, f"a prompt of {length} tokens"
