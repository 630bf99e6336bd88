"""The demo model speaks: what its page says of it is so, on each backend."""

import json
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from float_checkpoints import float_gpt_oss
from tokenizers import Tokenizer

from examples.fine_tune import fine_tune, random_adapters, read_tokens
from jmx.models import load
from jmx.training import bits_per_byte

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "gpt_oss_demo"
UNSEEN = lzma.decompress((ROOT / "tests" / "data" / "kjv_last_twentieth.txt.xz").read_bytes())
LENGTH = 256  # tokens of a window in training


def bits(model, text: bytes) -> float:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokens = np.asarray(tokenizer.encode(text.decode()).ids, np.int32)
    return bits_per_byte(model, tokens, len(text), LENGTH)


def test_it_is_small_and_its_config_is_of_gpt_oss():
    assert sum(file.stat().st_size for file in DEMO.iterdir()) <= 5_000_000
    config = json.loads((DEMO / "config.json").read_text())
    assert config["architectures"] == ["GptOssForCausalLM"]
    assert config["quantization_config"]["quant_method"] == "mxfp4"


@pytest.mark.costly
@pytest.mark.parametrize("backend", ["cpu", "xla", pytest.param("mosaic", marks=pytest.mark.gpu)])
def test_a_part_of_the_text_that_it_was_not_trained_on_takes_few_bits(backend):
    model = load(DEMO, dtype=jnp.bfloat16 if backend == "mosaic" else jnp.float32, backend=backend)
    assert bits(model, UNSEEN[:8000].rpartition(b"\n")[0]) <= 1.9


@pytest.mark.slow
def test_all_of_it_takes_the_bits_that_its_page_states():
    (stated,) = re.findall(r"last twentieth of the text \| ([\d.]+) bits per byte", (DEMO / "README.md").read_text())
    assert float(stated) <= 1.9
    assert abs(bits(load(DEMO), UNSEEN) - float(stated)) <= 0.005


@pytest.mark.costly
def test_it_writes_sentences_in_words_of_the_text():
    command = [sys.executable, "-m", "jmx.cli", "generate", DEMO, "And God said", "--max-new-tokens", "40"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    words, known = (re.findall(r"\w+", text.lower()) for text in (done.stdout, UNSEEN.decode()))
    assert len(words) >= 20
    assert sum(word in known for word in words) >= 0.8 * len(words)
    sentences = re.findall(r"[A-Z][^.!?]*[.!?]", f"And God said{done.stdout}")  # the second begins with a capital, too
    assert sentences
    assert all(len(sentence.split()) >= 4 for sentence in sentences)


@pytest.mark.costly
@pytest.mark.parametrize("backend", ["xla", pytest.param("mosaic", marks=pytest.mark.gpu)])
def test_adapters_over_its_experts_learn_as_over_experts_in_bfloat16(backend, tmp_path):
    """The same weights, which bfloat16 holds exactly, adapters and windows of another text: losses fall alike."""
    tokens, steps = read_tokens(ROOT / "LICENSE"), 30
    model = load(DEMO, dtype=jnp.bfloat16, backend=backend)
    adapters = random_adapters(model)
    in_floats = load(float_gpt_oss(tmp_path / "floats", source=DEMO)[0], dtype=jnp.bfloat16)
    assert all(layer.moe.experts.format.name == "bfloat16" for layer in in_floats.layers)
    losses, of_floats = (np.asarray(fine_tune(its, adapters, tokens, steps)) for its in (model, in_floats))
    first, last = (float(np.mean(its)) for its in (of_floats[:5], of_floats[-5:]))
    print(
        f"{backend}: {np.mean(losses[:5]):.3f} to {np.mean(losses[-5:]):.3f}; in bfloat16 {first:.3f} to {last:.3f}; "
        f"a step differs by at most {np.abs(losses / of_floats - 1).max():.2%}"
    )
    assert last < 0.8 * first
    np.testing.assert_allclose(losses, of_floats, rtol=0.02)
