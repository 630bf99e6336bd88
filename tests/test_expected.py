"""The model of shapes that a source fills is the one that it does fill, or none."""

import dataclasses
import pathlib

import jax.numpy as jnp
import pytest
import text_checkpoints

import jmx
from jmx.checkpoint.model_configs.gpt_oss import PUBLISHED
from jmx.models import from_source, random_source
from jmx.models.expected import expected
from jmx.models.forward import Weights
from jmx.models.loading import file_source
from jmx.models.programs import signature
from jmx.models.sources.protocol import Source

PUBLISHED_20B = PUBLISHED["gpt-oss-20b"]
TINY = dataclasses.replace(
    PUBLISHED_20B,
    num_hidden_layers=2,
    layer_types=PUBLISHED_20B.layer_types[:2],
    hidden_size=64,
    intermediate_size=64,
    num_experts=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=512,
)


def is_expected(source: Source, dtype: str) -> bool | None:
    shapes = expected(source, dtype=jnp.dtype(dtype), backend=None)
    if shapes is None:
        return None
    found, filled = Weights.of(shapes), Weights.of(from_source(source, dtype=jnp.dtype(dtype)))
    same = (found.graphdef, found.treedef, signature(found.arrays))
    return same == (filled.graphdef, filled.treedef, signature(filled.arrays))


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", [jmx.MXFP4, jmx.FORMATS["int4_g32"], jmx.FORMATS["fp8_channel"]])
def test_random_weights_are_expected(format: jmx.Format, dtype: str) -> None:
    assert is_expected(random_source(TINY, 0, format), dtype)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "format", "found"),
    [
        ("gpt_oss", None, True),
        ("qwen3_moe", "mxfp4", None),
        ("deepseek_v2", "int4_g32", True),
        ("qwen3_moe", None, None),
    ],
)
def test_checkpoints_are_expected(name: str, format: str | None, found: bool | None, tmp_path: pathlib.Path) -> None:
    folder = text_checkpoints.write(tmp_path / name, name, layers=2 if name == "gpt_oss" else None)
    assert is_expected(file_source(folder, format=format), "bfloat16") is found
