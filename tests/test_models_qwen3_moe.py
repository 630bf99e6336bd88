"""Qwen3-MoE whole: against transformers' numbers for the same checkpoints, and from every scheme's golden file."""

import dataclasses
import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aot
import golden_experts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_experts import EXPERTS, Family, check_tokens
from model_steps import decode_step, relative_error
from safetensors.numpy import load_file, save_file

import jmx
from jmx.checkpoint import CheckpointError, compressed_tensors, quantizing
from jmx.checkpoint.compressed_tensors.layers import Layer
from jmx.checkpoint.model_configs.qwen3_moe import PUBLISHED, read_config
from jmx.models import Model, Runner, Sampler, from_source, load, random_source
from jmx.models.checkpoint import Checkpoint
from jmx.models.config import expert_sizes
from jmx.models.families.qwen3_moe import FAMILY
from jmx.models.float_experts import experts_of

pytestmark = [pytest.mark.costly, pytest.mark.sampled(3)]

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "qwen3_moe"
NAMES = ("bf16", "other", "nvfp4", "fp8_block", "w4a16")


def quietly(name: str | Path, **arguments: Any) -> Model:
    """`load` in float32, of checkpoints whose attention may be quantized."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*modules outside experts are quantized")
        return load(GOLDEN / name, dtype=jnp.float32, **arguments)


def empty(model: Model, ids: jax.Array) -> list[jax.Array]:
    """Caches for the prompts `ids`."""
    rows, length = ids.shape
    return model.empty_cache(rows, length).layers


@jax.jit
def whole(model: Model, tokens: jax.Array, caches: list[jax.Array]) -> tuple[jax.Array, list[jmx.Routing], list[Any]]:
    """Logits of whole prompts, where each layer's tokens went, and the caches."""
    records: list[Any] = []
    x, caches = model(tokens, None, caches, records=records)
    sparse = [layer for layer in model.layers if hasattr(layer, "moe")]
    routes = [
        jmx.route(jmx.Logits(layer.router(record.input), layer.moe.routing))
        for layer, record in zip(sparse, records, strict=True)
    ]
    return model.logits(x), routes, caches


# Against the reference


@pytest.mark.parametrize("name", NAMES)
def test_logits_routes_and_greedy_tokens_are_the_references(name: str) -> None:
    golden, model = load_file(GOLDEN / f"{name}.safetensors"), quietly(name)
    ids = jnp.asarray(golden["input_ids"])
    rows, length = ids.shape
    logits, routes, caches = whole(model, ids, model.empty_cache(rows, 64).layers)
    assert relative_error(logits, golden["logits"]) <= 1e-5
    sparse = [i for i in range(model.config.num_hidden_layers) if i not in model.config.dense_layers]
    assert len(routes) == len(sparse)
    for index, route in zip(sparse, routes, strict=True):
        expected = golden[f"experts{index}"]
        assert np.array_equal(np.asarray(route.expert_ids).reshape(expected.shape), expected)
        weights = np.asarray(route.weights).reshape(expected.shape)
        np.testing.assert_allclose(weights, golden[f"weights{index}"], rtol=1e-4, atol=1e-6)
    logits = logits[:, -1]
    for number, expected in enumerate(golden["greedy"].T):
        tokens = Sampler()(logits, number)
        assert np.array_equal(np.asarray(tokens), expected)
        logits, caches = decode_step(model, tokens, jnp.full(rows, length + number), caches)


def test_the_runner_generates_the_references_tokens_from_prompts_of_two_lengths() -> None:
    golden, runner = load_file(GOLDEN / "other.safetensors"), Runner(quietly("other"))
    prompts = golden["input_ids"].tolist()
    prompts[1] += golden["greedy"][1, :5].tolist()
    got = np.array([*runner.generate(prompts, Sampler(), 8)])
    assert np.array_equal(got[:, 0], golden["greedy"][0, :8])
    assert np.array_equal(got[:, 1], golden["greedy"][1, 5:13])


def test_bfloat16_is_near_the_reference() -> None:
    golden = load_file(GOLDEN / "nvfp4.safetensors")
    with pytest.warns(UserWarning, match=r"8 modules outside experts are quantized, such as .*q_proj"):
        model = load(GOLDEN / "nvfp4")
    ids = jnp.asarray(golden["input_ids"])
    logits, _, _ = whole(model, ids, empty(model, ids))
    assert logits.dtype == jnp.float32
    assert 1e-4 < relative_error(logits, golden["logits"]) <= 0.1


def as_published(folder: Path) -> Path:
    """The FP8 golden file as Qwen writes such ones: other names, another config, inputs rounded in groups."""
    shutil.copytree(GOLDEN / "fp8_block", folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size].replace(b".weight_scale", b".weight_scale_inv")
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])
    return folder


def test_fp8_as_qwen_publishes_it(tmp_path: Path) -> None:
    published, golden = as_published(tmp_path / "fp8"), load_file(GOLDEN / "fp8_block.safetensors")
    ours, theirs = compressed_tensors.Reader(GOLDEN / "fp8_block"), compressed_tensors.Reader(published)
    assert theirs.layers[EXPERTS].scheme.inputs == "fp8_block"
    for name in ours.layers:
        arrays = ours.arrays(name)
        assert all(np.array_equal(array, arrays[key]) for key, array in theirs.arrays(name).items())
    module = "model.layers.1.self_attn.o_proj"
    assert np.array_equal(theirs.module(module).weight().scales, ours.module(module).weight().scales)
    ids = jnp.asarray(golden["input_ids"])
    for declared, least, most in ((False, 0, 1e-5), (True, 1e-3, golden_experts.INPUT_ERRORS["fp8_block"])):
        model = quietly(published, declared_inputs=declared)
        logits, _, _ = whole(model, ids, empty(model, ids))
        assert least <= relative_error(logits, golden["logits"]) <= most
    compressed_tensors.convert(theirs, tmp_path / "again")
    again = compressed_tensors.Reader(tmp_path / "again")
    assert all(np.array_equal(again.view(name), theirs.view(name)) for name in theirs.tensors)


def test_floats_rounded_as_they_are_read_are_those_that_convert_writes(tmp_path: Path) -> None:
    quantizing.convert(GOLDEN / "bf16", tmp_path / "int8", jmx.FORMATS["int8_g32"])
    ids = jnp.asarray(load_file(GOLDEN / "bf16.safetensors")["input_ids"])
    models = [load(GOLDEN / "bf16", format=jmx.FORMATS["int8_g32"]), load(tmp_path / "int8")]
    for layer in range(2):
        first, second = (model.layers[layer].moe.experts.arrays() for model in models)
        assert all(np.array_equal(first[name], second[name]) for name in first.keys() | second.keys())
    golden = load_file(GOLDEN / "bf16.safetensors")["logits"]
    model = load(tmp_path / "int8", dtype=jnp.float32)
    logits, _, _ = whole(model, ids, empty(model, ids))
    assert 1e-5 < relative_error(logits, golden) <= 0.02


def test_padded_experts_give_the_same_logits(tmp_path: Path) -> None:
    quantizing.convert(GOLDEN / "bf16", tmp_path / "fp8", jmx.FORMATS["fp8_block"])
    ids = jnp.asarray(load_file(GOLDEN / "bf16.safetensors")["input_ids"])
    plain, padded = (load(tmp_path / "fp8", dtype=jnp.float32, pad_experts=pad) for pad in (False, True))
    sizes = plain.config.hidden_size, plain.config.moe_intermediate_size
    for model, wanted in ((plain, sizes), (padded, tuple(-(-size // 128) * 128 for size in sizes))):
        experts = model.layers[0].moe.experts
        assert (experts.array_sizes, (experts.hidden_size, experts.intermediate_size)) == (wanted, sizes)
    assert sizes != (128, 128), "nothing would be padded"
    first, second = (whole(model, ids, empty(model, ids))[0] for model in (plain, padded))
    np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", ["absent", "equal", "other", "of another dtype"])
@pytest.mark.parametrize("embedding", ["stored", "absent"])
def test_tied_tables_that_files_hold_both_or_either(
    embedding: str, head: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """As transformers reads them: two different ones stay two, whatever the config declares."""
    names = "model.embed_tokens.weight", "lm_head.weight"

    def change(tensors: dict[str, np.ndarray]) -> None:
        table = tensors[names[0]]
        assert names[1] not in tensors
        heads = {"equal": table.copy(), "other": rng.permutation(table), "of another dtype": table.astype(np.float32)}
        tensors |= {names[1]: heads[head]} if head in heads else {}
        if embedding == "absent":
            del tensors[names[0]]

    folder = edited(tmp_path / "it", "other", change)
    if (embedding, head) == ("absent", "absent"):
        with pytest.raises(CheckpointError, match=rf"tensor '{names[0]}' is missing"):
            load(folder)
        return
    golden = load_file(GOLDEN / "other.safetensors")
    ids = jnp.asarray(golden["input_ids"])
    if embedding == "stored" and head in ("other", "of another dtype"):
        with pytest.warns(UserWarning, match=r"`tie_word_embeddings` is true, but 'lm_head.weight' is not"):
            model = load(folder, dtype=jnp.float32)
        assert model.unembedding is not None
    else:
        model = load(folder, dtype=jnp.float32)
        assert model.unembedding is None
    logits, _, _ = whole(model, ids, empty(model, ids))
    if head != "other":
        assert relative_error(logits, golden["logits"]) <= 1e-5
    elif embedding == "stored":  # the rows of the last product are those of the table that files have for it
        rows = load_file(folder / "model.safetensors")
        order = [int(np.flatnonzero((rows[names[0]] == row).all(axis=1))[0]) for row in rows[names[1]]]
        assert relative_error(logits, golden["logits"][..., order]) <= 1e-5


# Every scheme's golden file, as the experts of a model whose other weights are random


def golden_source(layer: Layer) -> Any:
    sizes = {"hidden_size": layer.hidden_size, "moe_intermediate_size": layer.intermediate_size}
    config = dataclasses.replace(read_config(GOLDEN / "other"), num_hidden_layers=1, dense_layers=(), **sizes)
    return random_source(dataclasses.replace(config, num_experts=layer.num_experts, top_k=2))


def silu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize("name", golden_experts.NAMES)
def test_tokens_come_from_every_schemes_golden_file(name: str, rng: np.random.Generator) -> None:
    check_tokens(golden_experts.DATA / name, Family(golden_source, from_source, silu), rng)


@pytest.mark.parametrize(("name", "most"), [("modelopt_nvfp4", 0.2), ("modelopt_fp8", 0.05)])
def test_a_whole_model_from_modelopt_gives_the_references_logits(name: str, most: float) -> None:
    path = DATA / "compressed_tensors" / name
    golden = load_file(path.with_suffix(".safetensors"))
    ids = jnp.asarray(golden["input_ids"])
    errors = []
    for declared in (False, True):
        model = quietly(path, declared_inputs=declared)
        logits, _, _ = whole(model, ids, empty(model, ids))
        errors.append(relative_error(logits, golden["logits"]))
    assert errors[0] <= 1e-5
    assert 1e-3 < errors[1] <= most


# The parts


def test_float_experts_are_the_plain_sum(rng: np.random.Generator) -> None:
    gate_up, down = rng.standard_normal((4, 12, 8)), rng.standard_normal((4, 8, 6))
    x, logits = rng.standard_normal((2, 5, 8)), rng.standard_normal((2, 5, 4))
    mask = np.arange(5) < np.array([[3], [5]])
    floats = quantizing.FloatExperts(jnp.asarray(gate_up, jnp.float32), jnp.asarray(down, jnp.float32))
    logits_and_method = jmx.Logits(jnp.asarray(logits, jnp.float32), jmx.SoftmaxTopK(2, renormalize=False))
    experts = experts_of(floats, jnp.float32)
    x32 = jnp.asarray(x, jnp.float32)
    got = jmx.moe(x32, logits_and_method, experts, activation="swiglu", mask=jnp.asarray(mask))
    expected = np.zeros_like(x)
    for at in np.ndindex(2, 5):
        shares = np.exp(logits[at]) / np.exp(logits[at]).sum()
        for expert in np.argsort(-shares)[:2] if mask[at] else ():
            gate, up = np.split(gate_up[expert] @ x[at], 2)
            expected[at] += shares[expert] * (down[expert] @ silu(gate, up))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "billions"), [("qwen3-30b-a3b", 30.5), ("qwen3-235b-a22b", 235.1)])
def test_published_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    config = PUBLISHED[name]
    shapes = FAMILY.shapes(config).values()
    experts = 3 * math.prod(expert_sizes(config)) * config.num_hidden_layers
    assert (sum(map(math.prod, shapes)) + experts) / 1e9 == pytest.approx(billions, abs=0.05)


def test_random_weights_make_a_model_that_runs() -> None:
    config = dataclasses.replace(read_config(GOLDEN / "other"), num_hidden_layers=2, dense_layers=(1,))
    model = from_source(random_source(config, format=jmx.NVFP4), dtype=jnp.float32)
    ids = jnp.array([[1, 2, 3], [4, 5, 6]])
    logits, _, _ = whole(model, ids, empty(model, ids))
    assert np.isfinite(np.asarray(logits)).all()
    assert 0.1 < float(logits.std()) < 30
    assert model.layers[0].moe.experts.format == jmx.NVFP4


@pytest.mark.aot
def test_a_decoding_step_is_one_cuda_graph_on_an_h200(tmp_path: Path) -> None:
    config = dataclasses.replace(PUBLISHED["qwen3-30b-a3b"], num_hidden_layers=2)
    with jax.sharding.use_abstract_mesh(aot.h200_mesh().abstract_mesh):
        model = nnx.eval_shape(lambda: from_source(random_source(config), backend="mosaic"))
        cache = jax.eval_shape(lambda: model.empty_cache(1, 1024).layers)
    runner, row = Runner(model), jax.ShapeDtypeStruct((1,), jnp.int32)
    (graph,) = aot.launches_on_h200(tmp_path, runner._decode.jitted, runner._weights, cache, row, row)
    assert graph[0] == "kCommandBuffer"
    assert graph.count("kCustomCall") == 4  # each layer's attention and experts


# The config


def config_with(folder: Path, **changes: Any) -> Path:
    """The golden config, an entry of `...` left out."""
    contents = json.loads((GOLDEN / "other" / "config.json").read_text()) | changes
    contents = {key: value for key, value in contents.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(contents))
    return folder


def test_what_a_config_leaves_out_and_says_otherwise(tmp_path: Path) -> None:
    left = ("attention_bias", "use_sliding_window", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")
    left += ("rms_norm_eps", "tie_word_embeddings", "head_dim", "rope_parameters", "eos_token_id")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    config = read_config(config_with(tmp_path, **dict.fromkeys(left, ...)))
    assert (config.attention_bias, config.norm_topk_prob, config.tie_word_embeddings) == (False,) * 3
    assert (config.sliding_window, config.dense_layers, config.head_dim) == (None, (), 32 // 4)
    assert (config.rms_norm_eps, config.rope_theta, config.eos_token_ids) == (1e-6, 1e4, (7, 8))
    old = {"rope_parameters": ..., "rope_theta": 77.0, "rope_scaling": None, "num_local_experts": ..., "num_experts": 4}
    config = read_config(config_with(tmp_path, **old, sliding_window=None, use_sliding_window=False))
    assert (config.rope_theta, config.num_experts, config.sliding_window) == (77.0, 4, None)
    assert read_config(GOLDEN / "other").dense_layers == (0, 2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2_moe"}, "`config.json.model_type` (='qwen2_moe') must be one of ['qwen3_moe']"),
        ({"hidden_act": "gelu"}, "hidden_act` (='gelu')"),
        ({"hidden_size": ...}, "hidden_size` is missing"),
        ({"hidden_size": 32.0}, "hidden_size` (=32.0) must be a whole number of at least 1"),
        ({"num_experts_per_tok": 5}, "`num_experts_per_tok` (=5) must be at most 4"),
        ({"num_key_value_heads": 3}, "must be a multiple of `num_key_value_heads` (=3)"),
        ({"head_dim": 7}, "`head_dim` (=7) must be even"),
        ({"mlp_only_layers": [4]}, "mlp_only_layers` (=[4]) must be a list of layers, of which there are 4"),
        ({"norm_topk_prob": 1}, "norm_topk_prob` (=1) must be one of"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type` (='linear') must be one of ['default', 'yarn']"),
        ({"rope_theta": 1.0}, "`rope_theta` must be one number"),
        ({"eos_token_id": "x"}, "eos_token_id` (='x') must be an id"),
        ({"rms_norm_eps": 0}, "rms_norm_eps` (=0) must be a positive number"),
    ],
)
def test_configs_of_other_models_are_refused_by_key(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config(config_with(tmp_path, **changes))
    assert message in str(caught.value)


# Broken checkpoints


def edited(folder: Path, name: str, change: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    shutil.copytree(GOLDEN / name, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "tensor 'model.norm.weight' is missing"),
        (
            lambda t: t.update({"model.layers.9.mlp.gate.weight": t["model.norm.weight"]}),
            "tensor 'model.layers.9.mlp.gate.weight' is not one of a model with this config",
        ),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].view(np.int16)}),
            "'model.norm.weight' is I16, but must be BF16 or F16 or F32",
        ),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:-1]}),
            "has shape (31,), but must",
        ),
        (
            lambda t: [t.pop(n) for n in [*t] if ".1.mlp.experts.3." in n],
            "`num_local_experts` (=4) must be 3, the experts that",
        ),
        (
            lambda t: t.update({n: a[:, :8] if "down" in n else a[:8] for n, a in t.items() if ".1.mlp.experts." in n}),
            "are E, H, I = (4, 32, 8), but must be (4",
        ),
        (lambda t: [t.pop(n) for n in [*t] if ".1.mlp.experts." in n], "must hold tensors of experts"),
    ],
)
def test_checkpoints_that_lack_what_the_config_calls_for_are_refused(
    change: Callable[[dict[str, np.ndarray]], Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(edited(tmp_path / "it", "other", change))
    assert message in str(caught.value)


def test_a_cache_that_is_to_be_quantized_is_reported(tmp_path: Path) -> None:
    folder = edited(tmp_path / "it", "w4a16", lambda t: t.update({"model.layers.0.self_attn.k_scale": np.ones(1)}))
    shapes = {name: t.shape for name, t in compressed_tensors.Reader(folder).tensors.items() if ".experts." not in name}
    del shapes["model.layers.0.self_attn.k_scale"]
    experts = {f"model.layers.{layer}.mlp.experts": (8, 128, 32) for layer in range(2)}
    with pytest.raises(CheckpointError, match="k_scale' is not one"):
        Checkpoint(folder).check(shapes, experts)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="declares quantized keys and values in the cache"):
        Checkpoint(folder).check(shapes, experts)


def test_a_format_for_quantized_experts_is_refused() -> None:
    with pytest.raises(CheckpointError, match="experts are quantized already, and not to nvfp4"):
        Checkpoint(GOLDEN / "w4a16", format=jmx.NVFP4)
