"""Weights outside experts that files have quantized: which stay so, what is reported of it, and their products."""

import json
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aot
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quantized_dense
from flax import nnx
from model_steps import relative_error
from safetensors.numpy import load_file

import jmx
from jmx import cli
from jmx.checkpoint import shards
from jmx.models import FAMILIES, Model, load, restore, save
from jmx.models.families.family import Family
from jmx.models.layers import Linear, RMSNorm, project
from jmx.models.quantized_weights import QuantizedWeights, concatenated, stays_quantized

pytestmark = pytest.mark.costly

DATA = Path(__file__).parent / "data"
SOURCES = {
    "mixtral": DATA / "families/mixtral",
    "qwen2_moe": DATA / "families/qwen2_moe",
    "olmoe": DATA / "families/olmoe",
    "glm4_moe": DATA / "families/glm4_moe",
    "qwen3_moe": DATA / "qwen3_moe/bf16",
    "deepseek_v3": DATA / "deepseek_v3/published",
}
FP8 = ("fp8_tensor", "fp8_channel", "fp8_block")
TOKENS = jnp.array([[3, 14, 15, 9, 2], [6, 5, 35, 8, 9]])
ATTENTION = "model.layers.0.self_attn"


def file_names(family: Family, config: Any) -> dict[str, str]:
    """Names in files of the tensors outside experts, by neutral name."""
    return {name: family.file_name(name) for name in family.shapes(config)}


def products(name: str) -> list[str]:
    """Modules of a family's checkpoint whose weights a product multiplies by.

    Without routers that have a correction bias: no tool quantizes one.
    """
    family = FAMILIES[name]
    config = family.read_config(SOURCES[name])
    named = file_names(family, config)
    shapes = family.shapes(config)
    return [
        file.removesuffix(".weight")
        for neutral, file in named.items()
        if len(shapes[neutral]) == 2
        and neutral != "embedding"
        and neutral.replace("router_weight", "router_correction_bias") not in shapes.keys() - {neutral}
    ]


def loaded(path: Path, **arguments: Any) -> tuple[Model, list[str]]:
    """A model, and the warnings about modules outside its experts."""
    options: dict[str, Any] = {"dtype": jnp.float32} | arguments
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load(path, **options)
    assert {Path(its.filename).name for its in caught} <= {Path(__file__).name}  # where it is loaded
    return model, [str(its.message) for its in caught]


def kept(model: Model) -> dict[tuple[str, ...], QuantizedWeights]:
    """The weights that are quantized, by the names of the tensors in each."""
    modules = {"": model} | {f"layers.{number}.": layer for number, layer in enumerate(model.layers)}
    found = {
        tuple(prefix + name for name in names): variable.get_value()
        for prefix, module in modules.items()
        for names, variable in module.variables().items()
    }
    return {names: its for names, its in found.items() if isinstance(its, QuantizedWeights)}


@jax.jit
def logits(model: Model, tokens: jax.Array) -> jax.Array:
    x, _ = model(tokens, None, model.empty_cache(*tokens.shape).layers)
    return model.logits(x)


def reported(messages: list[str]) -> dict[str, int]:
    """How many modules the warnings report as staying quantized, and as dequantized."""
    found = {"stay": 0, "dequantized": 0}
    for message in messages:
        number = re.search(r"(\d+) modules outside experts are quantized, such as '.*'", message)
        assert number is not None
        found["stay" if "they stay so, but" in message else "dequantized"] += int(number[1])
    return found


# What stays


@pytest.mark.parametrize("format", FP8)
@pytest.mark.parametrize("name", SOURCES)
def test_weights_in_one_format_of_fp8_stay_in_it(name: str, format: str, tmp_path: Path) -> None:
    """Of all products, the head and the router included, with the numbers and the memory of the files."""
    modules = products(name)
    path = quantized_dense.write(tmp_path / "it", SOURCES[name], dict.fromkeys(modules, format))
    model, messages = loaded(path)
    held = kept(model)
    assert reported(messages) == {"stay": len(modules), "dequantized": 0}
    family = FAMILIES[name]
    names = file_names(family, model.config)
    assert {names[its].removesuffix(".weight") for group in held for its in group} == {*modules}
    floats = {its: tensor.view() for its, tensor in shards.read_headers(path / "floats").items()}
    for group, weights in held.items():
        rows, columns = weights.shape
        scales = -(-columns // 128) if format == "fp8_block" else 1
        assert weights.format == jmx.FORMATS[format]
        assert sum(array.nbytes for array in jax.tree.leaves(weights)) == rows * (columns + 4 * scales)
        elements, factors = (np.asarray(its) for its in (weights.arrays.values, weights.arrays.scales))
        found = elements.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        found *= np.repeat(factors, 128 if scales > 1 else columns, axis=1)[:, :columns]
        # Queries that share keys are side by side with their keys and values.
        groups = model.config.num_key_value_heads if len(group) == 3 else 1
        parts = [floats[names[its]].reshape(groups, -1, columns) for its in group]
        assert np.array_equal(found, np.concatenate(parts, axis=1).reshape(rows, columns))


@pytest.mark.parametrize("format", FP8)
def test_logits_are_those_of_the_dequantized_weights(format: str, tmp_path: Path) -> None:
    path = quantized_dense.write(tmp_path / "it", SOURCES["mixtral"], dict.fromkeys(products("mixtral"), format))
    expected = logits(load(path / "floats", dtype=jnp.float32), TOKENS)
    assert relative_error(logits(loaded(path)[0], TOKENS), expected) <= 1e-5


MIXED: list[tuple[dict[str, str], set[str]]] = [
    ({"q_proj": "fp8_channel"}, set()),
    ({"q_proj": "fp8_channel", "k_proj": "fp8_channel"}, set()),
    ({"q_proj": "fp8_channel", "k_proj": "fp8_tensor", "v_proj": "fp8_tensor"}, set()),
    ({"q_proj": "fp8_block", "k_proj": "fp8_block", "v_proj": "int8_channel", "o_proj": "fp8_tensor"}, {"o_proj"}),
    ({"q_proj": "int8_channel", "k_proj": "int8_channel", "v_proj": "int8_channel"}, set()),
    (dict.fromkeys(("q_proj", "k_proj", "v_proj"), "fp8_tensor"), {"q_proj", "k_proj", "v_proj"}),
]


@pytest.mark.parametrize(("formats", "stay"), MIXED)
def test_warnings_count_what_stays_and_what_does_not(
    formats: Mapping[str, str], stay: set[str], tmp_path: Path
) -> None:
    """Parts of one product that are not alike become floats, all of them."""
    modules = {f"{ATTENTION}.{module}": format for module, format in formats.items()}
    path = quantized_dense.write(tmp_path / "it", SOURCES["mixtral"], modules)
    model, messages = loaded(path)
    assert reported(messages) == {"stay": len(stay), "dequantized": len(formats) - len(stay)}
    assert {name for names in kept(model) for name in names} == {f"layers.0.{its[0]}_weight" for its in stay}
    assert relative_error(logits(model, TOKENS), logits(load(path / "floats", dtype=jnp.float32), TOKENS)) <= 1e-5


def test_an_embedding_is_dequantized_and_a_head_is_not(tmp_path: Path) -> None:
    modules = {"model.embed_tokens": "fp8_channel", "lm_head": "fp8_channel"}
    path = quantized_dense.write(tmp_path / "it", SOURCES["mixtral"], modules)
    model, messages = loaded(path)
    assert reported(messages) == {"stay": 1, "dequantized": 1}
    assert kept(model).keys() == {("unembedding",)}
    assert any("'model.embed_tokens.weight': they are dequantized" in message for message in messages)
    assert relative_error(logits(model, TOKENS), logits(load(path / "floats", dtype=jnp.float32), TOKENS)) <= 1e-5


def test_the_rule_of_what_stays() -> None:
    """For every pair of formats, floats included."""
    formats = [None, *jmx.FORMATS.values()]
    for first in formats:
        for second in formats:
            is_fp8 = first is not None and first.name in (*FP8, "mxfp8")
            assert stays_quantized([first, second]) is (is_fp8 and first is second)
            assert stays_quantized([first]) is is_fp8


def test_dense_weights_are_dequantized_on_request(tmp_path: Path) -> None:
    modules = products("qwen2_moe")
    path = quantized_dense.write(tmp_path / "it", SOURCES["qwen2_moe"], dict.fromkeys(modules, "fp8_channel"))
    model, messages = loaded(path, dequantize_dense=True)
    assert reported(messages) == {"stay": 0, "dequantized": len(modules)}
    assert not kept(model)
    floats = load(path / "floats", dtype=jnp.float32)
    for (place, one), (_, other) in zip(*(nnx.to_flat_state(nnx.state(its)) for its in (model, floats)), strict=True):
        assert np.array_equal(one.get_value(), other.get_value()), place


def test_bfloat16_has_the_same_weights_whether_they_stay_or_not(tmp_path: Path) -> None:
    modules = dict.fromkeys(products("mixtral"), "fp8_block")
    path = quantized_dense.write(tmp_path / "it", SOURCES["mixtral"], modules)
    one, other = (loaded(path, dtype=jnp.bfloat16, dequantize_dense=value)[0] for value in (False, True))
    token = TOKENS[:1, :1]  # one row, whose products are sums
    assert relative_error(logits(one, token), logits(other, token)) <= 1e-3


# Products


@pytest.mark.parametrize("format", FP8)
@pytest.mark.parametrize("normed", [False, True])
def test_a_row_is_multiplied_by_the_same_weights_whatever_the_number_of_rows(
    format: str, normed: bool, rng: np.random.Generator
) -> None:
    matrix = jmx.quantize(rng.standard_normal((48, 256)).astype(np.float32), format=jmx.FORMATS[format])
    weights = QuantizedWeights(jmx.pack(matrix), jmx.FORMATS[format])
    norm = RMSNorm(256, 1e-6) if normed else None
    x = jnp.asarray(rng.standard_normal((3, 256)), jnp.bfloat16)
    run: Callable[[jax.Array], jax.Array] = jax.jit(lambda x: project(x, weights, None, norm))
    rounded = np.asarray(jmx.dequantize(matrix, jnp.bfloat16, jmx.FORMATS[format]), np.float64)
    exact = np.asarray(jmx.dequantize(matrix, jnp.float32, jmx.FORMATS[format]), np.float64)
    assert relative_error(rounded, exact) > 1e-4  # so that another rounding is noticed
    rows = np.asarray(x, np.float64)
    if normed:
        rows = rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + 1e-6)
    limit = 3e-3 if normed else 1e-6  # the norm's result is rounded for several rows
    assert relative_error(run(x), rows @ rounded.T) <= limit
    for number in range(3):
        assert relative_error(run(x[number : number + 1]), rows[number] @ rounded.T) <= 1e-6
    floats = np.asarray(jax.jit(lambda: weights.astype(jnp.bfloat16).astype(jnp.float32))())
    assert np.array_equal(floats, rounded)


@pytest.mark.aot
@pytest.mark.parametrize("format", FP8)
def test_one_row_reads_the_weights_where_they_are(format: str) -> None:
    """On an H200: rounding is part of the kernel that sums, and no matrix of floats is written."""
    weights = QuantizedWeights(jmx.FORMATS[format].abstract((1024, 1024), packed=True), jmx.FORMATS[format])
    row = jax.ShapeDtypeStruct((1, 1, 1024), jnp.bfloat16)
    compiled = aot.compile_for_h200(lambda x, weights: project(x, weights, None, None), row, weights)
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= 1024 * 4  # the row in float32


@pytest.mark.parametrize("format", FP8)
def test_concatenated_rows_are_those_of_all_parts(format: str, rng: np.random.Generator) -> None:
    parts = [rng.standard_normal((rows, 192)).astype(np.float32) for rows in (3, 130, 1)]
    made = [
        QuantizedWeights(jmx.pack(jmx.quantize(part, format=jmx.FORMATS[format])), jmx.FORMATS[format])
        for part in parts
    ]
    whole = concatenated(made)
    assert whole.shape == (134, 192)
    assert np.array_equal(whole.astype(jnp.float32), np.concatenate([its.astype(jnp.float32) for its in made]))
    linear = Linear(192, 134, bias=False, dtype=jnp.float32, rngs=nnx.Rngs(0))
    linear.weights = jmx.nnx.Quantized(whole)
    x = rng.standard_normal((2, 192)).astype(np.float32)
    np.testing.assert_allclose(
        linear(jnp.asarray(x)), x @ np.asarray(whole.astype(jnp.float32)).T, rtol=1e-4, atol=1e-4
    )


def test_saving_them_is_an_error_that_names_the_remedy(tmp_path: Path) -> None:
    folder = DATA / "deepseek_v3/fp8"
    model, _ = loaded(folder)
    message = r"^`model` must have floats outside experts, but \S+ is in 'fp8_\w+': load it with dequantize_dense=True$"
    with pytest.raises(ValueError, match=message):
        save(tmp_path / "model", model)
    assert not any(tmp_path.iterdir())
    model, _ = loaded(folder, dequantize_dense=True)
    save(tmp_path / "model", model)
    read = restore(tmp_path / "model", model.config, format="fp8_block", dtype=jnp.float32)
    assert np.array_equal(logits(read, TOKENS), logits(model, TOKENS))


# The command line


@pytest.mark.filterwarnings("ignore:(?s).*modules outside experts are quantized")
def test_generate_gives_the_references_tokens_of_an_fp8_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    golden = load_file(DATA / "deepseek_v3/fp8.safetensors")
    ids = ",".join(map(str, golden["input_ids"][0]))
    arguments = ["generate", str(DATA / "deepseek_v3/fp8"), "--prompt-ids", ids, "--dtype", "float32", "--ignore-eos"]
    assert cli.main([*arguments, "--inputs", "float", "--max-new-tokens", "6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == golden["greedy"][0, :6].tolist()
