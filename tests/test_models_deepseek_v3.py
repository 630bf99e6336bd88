"""DeepSeek-V3 and V2 whole: against transformers' numbers for the same checkpoints, and from step to step."""

import dataclasses
import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aot
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from model_steps import decode_step, relative_error
from safetensors.numpy import load_file, save_file

import jmx
from jmx.checkpoint import CheckpointError
from jmx.checkpoint.model_configs.deepseek_v3 import PUBLISHED, Config, read_config
from jmx.checkpoint.shards import read_headers
from jmx.models import DeepseekV3, Model, Runner, Sampler, from_source, load, random_source
from jmx.models.config import expert_layers, expert_sizes
from jmx.models.families.deepseek_v3 import FAMILY
from jmx.models.quantized_weights import QuantizedWeights

pytestmark = pytest.mark.costly

DATA = Path(__file__).parent / "data"
PLAIN = (
    "deepseek_v3/published",
    "deepseek_v3/other",
    "deepseek_v2/lite",
    "deepseek_v2/other",
    "deepseek_v3/sparse",
    "deepseek_v2/plain",
)
NAMES = (*PLAIN, "deepseek_v3/fp8")
CAPACITY = 32  # tokens of a row's cache: prompt and continuation

# Billions of parameters, from the models' reports, without the layer of V3 that predicts further tokens.
BILLIONS = {"deepseek-v3": 671.0, "deepseek-v2-lite": 15.7, "kimi-k2": 1026.4}

# Of the float32 logits in bfloat16: up to this. Of the 80 routes of a golden file some are others.
BFLOAT16_ERROR = 0.1


def golden(name: str) -> dict[str, np.ndarray]:
    return load_file(DATA / f"{name}.safetensors")


def quietly(name: str | Path, **arguments: Any) -> Model:
    """`load` in float32 unless another dtype is given, of checkpoints that may be quantized outside experts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*modules outside experts are quantized")
        return load(DATA / name, **{"dtype": jnp.float32, "declared_inputs": False} | arguments)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(quietly(PLAIN[0]))


@jax.jit
def whole(model: Model, tokens: jax.Array) -> tuple[jax.Array, list[jmx.Routing], list[Any]]:
    """Logits of whole prompts, where each layer's tokens went, and the caches."""
    records: list[Any] = []
    x, caches = model(tokens, None, model.empty_cache(tokens.shape[0], CAPACITY).layers, records=records)
    routes = []
    for layer, record in zip([its for its in model.layers if hasattr(its, "moe")], records, strict=True):
        bias = layer.moe.correction_bias
        logits = jmx.Logits(layer.router(record.input), layer.moe.routing, None if bias is None else bias[...])
        routes.append(jmx.route(logits))
    return model.logits(x), routes, caches


def in_order(experts: Any, weights: Any) -> tuple[np.ndarray, np.ndarray]:
    """Ids (T, k) of each token's experts, the lowest first, and their weights."""
    order = np.argsort(np.reshape(experts, (-1, np.shape(experts)[-1])), axis=-1)
    first, second = (np.take_along_axis(np.reshape(its, order.shape), order, -1) for its in (experts, weights))
    return first, second


# Against the reference


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_logits_routes_and_greedy_tokens_are_the_references(name: str) -> None:
    expected, model = golden(name), quietly(name)
    assert type(model) is DeepseekV3
    ids = jnp.asarray(expected["input_ids"])
    rows, length = ids.shape
    logits, routes, caches = whole(model, ids)
    assert relative_error(logits, expected["logits"]) <= 2e-5
    layers = expert_layers(model.config)
    assert {f"experts{layer}" for layer in layers} == {key for key in expected if key.startswith("experts")}
    for layer, route in zip(layers, routes, strict=True):
        experts, weights = in_order(expected[f"experts{layer}"], expected[f"weights{layer}"])
        its_experts, its_weights = in_order(route.expert_ids, route.weights)
        assert np.array_equal(its_experts, experts)
        np.testing.assert_allclose(its_weights, weights, rtol=1e-4, atol=1e-6)
    logits = logits[:, -1]
    for number, tokens in enumerate(expected["greedy"].T):
        assert np.array_equal(np.asarray(Sampler()(logits, number)), tokens)
        logits, caches = decode_step(model, jnp.asarray(tokens), jnp.full(rows, length + number), caches)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_near_the_reference(name: str) -> None:
    expected, model = golden(name), quietly(name, dtype=jnp.bfloat16)
    logits, _, caches = whole(model, jnp.asarray(expected["input_ids"]))
    assert logits.dtype == jnp.float32
    assert {cache.dtype for cache in caches} == {jnp.dtype(jnp.bfloat16)}
    assert 1e-4 < relative_error(logits, expected["logits"]) <= BFLOAT16_ERROR


@pytest.mark.sampled(2)
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int4_g32", "int8_channel", "fp8_block"])
def test_float_experts_are_quantized_as_they_are_read(format: str) -> None:
    most = {"mxfp4": 0.3, "nvfp4": 0.3, "int4_g32": 0.3, "int8_channel": 0.05, "fp8_block": 0.1}[format]
    model = quietly(PLAIN[2], format=jmx.FORMATS[format])
    assert model.layers[1].moe.experts.format == jmx.FORMATS[format]
    logits, _, _ = whole(model, jnp.asarray(golden(PLAIN[2])["input_ids"]))
    assert 1e-5 < relative_error(logits, golden(PLAIN[2])["logits"]) <= most


def test_fp8_as_deepseek_publishes_it() -> None:
    """Experts stay in FP8, and quantize their inputs; the rest stays in FP8 too, with a warning for its inputs."""
    path, expected = DATA / "deepseek_v3/fp8", golden("deepseek_v3/fp8")
    with pytest.warns(
        UserWarning, match=r"16 modules outside experts are quantized, such as .*self_attn.*they stay so"
    ):
        model = load(path, dtype=jnp.float32)
    experts = model.layers[1].moe.experts
    assert (experts.format, experts.input_format) == (jmx.FORMATS["fp8_block"], "fp8_block")
    logits, _, _ = whole(model, jnp.asarray(expected["input_ids"]))
    assert 1e-3 < relative_error(logits, expected["logits"]) <= 0.1
    weights = model.layers[1].attention.key_value_up.weights.get_value()
    assert isinstance(weights, QuantizedWeights)
    assert (weights.shape, weights.nbytes) == ((160, 20), 160 * 20 + 160 * 4)  # a scale for each row


# Prefill and decode


def test_the_runner_generates_the_references_tokens_from_prompts_of_two_lengths(runner: Runner) -> None:
    expected = golden(PLAIN[0])
    prompts = expected["input_ids"].tolist()
    prompts[1] += expected["greedy"][1, :5].tolist()
    got = np.array([*runner.generate(prompts, Sampler(), 7)])
    assert np.array_equal(got[:, 0], expected["greedy"][0, :7])
    assert np.array_equal(got[:, 1], expected["greedy"][1, 5:12])


@pytest.mark.parametrize("rows", [[3, 14, 1], [6]])
def test_rows_of_different_lengths_decode_as_if_each_were_alone(
    rows: list[int], runner: Runner, rng: np.random.Generator
) -> None:
    """Teacher-forced over a growth of the cache, against one pass over everything."""
    count, every = len(rows), np.arange(len(rows))
    tokens = rng.integers(64, size=(count, 24))
    expected, _ = runner.prefill(tokens.tolist(), all_logits=True)
    logits, cache = runner.prefill([its[:length].tolist() for its, length in zip(tokens, rows, strict=True)])
    assert cache.layers[0].shape == (1, count, 1, 16, 28)
    for step in range(24 - max(rows)):
        at = np.array(rows) + step
        assert relative_error(logits, np.asarray(expected)[every, at - 1]) <= 2e-5
        logits, cache = runner.decode(jnp.asarray(tokens[every, at], jnp.int32), cache)
    assert cache.capacity == 32


# The parts


@pytest.mark.parametrize("name", BILLIONS)
def test_published_shapes_have_the_published_number_of_parameters(name: str) -> None:
    config = PUBLISHED[name]
    experts = 3 * math.prod(expert_sizes(config)) * len(expert_layers(config))
    count = sum(map(math.prod, FAMILY.shapes(config).values())) + experts
    assert count / 1e9 == pytest.approx(BILLIONS[name], abs=0.05)


@pytest.mark.parametrize("name", PLAIN)
def test_the_tensors_of_the_family_are_the_variables_of_its_model(name: str) -> None:
    config = read_config(DATA / name)
    model = nnx.eval_shape(lambda: DeepseekV3(config, format=jmx.FORMATS["fp8_channel"], rngs=nnx.Rngs(0)))
    held = dict(model.variables())
    for number, layer in enumerate(model.layers):
        held |= {tuple(f"layers.{number}.{name}" for name in names): its for names, its in layer.variables().items()}
    shapes = FAMILY.shapes(config)
    assert sorted(name for names in held for name in names) == sorted(shapes)
    for names, variable in held.items():
        first, *others = (shapes[name] for name in names)
        assert variable.get_value().shape == (first[0] + sum(other[0] for other in others), *first[1:])


def test_random_weights_make_a_model_that_runs() -> None:
    model = from_source(random_source(read_config(DATA / PLAIN[0]), format=jmx.FORMATS["fp8_block"]), dtype=jnp.float32)
    logits, _, _ = whole(model, jnp.array([[1, 2, 3], [4, 5, 6]]))
    assert np.isfinite(np.asarray(logits)).all()
    assert 0.1 < float(logits.std()) < 30


@pytest.mark.aot
def test_a_decoding_step_is_one_cuda_graph_on_an_h200(tmp_path: Path) -> None:
    config = dataclasses.replace(PUBLISHED["deepseek-v2-lite"], num_hidden_layers=2, dense_layers=(0,))
    with jax.sharding.use_abstract_mesh(aot.h200_mesh().abstract_mesh):
        model = nnx.eval_shape(lambda: from_source(random_source(config), backend="mosaic"))
        cache = jax.eval_shape(lambda: model.empty_cache(1, 1024).layers)
    runner, row = Runner(model), jax.ShapeDtypeStruct((1,), jnp.int32)
    (graph,) = aot.launches_on_h200(tmp_path, runner._decode.jitted, runner._weights, cache, row, row)
    assert graph[0] == "kCommandBuffer"
    assert graph.count("kCustomCall") == 3  # the experts, and attention of two layers


# The config

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "eos_token_id": [163585, 163586],
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}


def written(folder: Path, contents: dict[str, Any], **changes: Any) -> Path:
    """A folder with a config.json, of which an entry of `...` is left out."""
    folder.mkdir(exist_ok=True)
    contents = {key: value for key, value in (contents | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(contents))
    return folder


@pytest.mark.parametrize(
    ("name", "contents"),
    [("deepseek-v3", DEEPSEEK_V3), ("kimi-k2", KIMI_K2), ("deepseek-v2-lite", DEEPSEEK_V2_LITE)],
)
def test_published_configs_are_read_in_both_spellings_of_rotary_positions(
    name: str, contents: dict[str, Any], tmp_path: Path
) -> None:
    rope = contents["rope_scaling"]
    newer = {"rope_scaling": ..., "rope_theta": ...}
    newer["rope_parameters"] = rope | {"rope_type": "yarn", "rope_theta": contents["rope_theta"]}
    for changes in ({}, newer, {"rope_parameters": newer["rope_parameters"]}):
        assert read_config(written(tmp_path, contents, **changes)) == PUBLISHED[name]


def test_what_configs_leave_out_is_as_in_transformers(tmp_path: Path) -> None:
    left = ("attention_bias", "moe_layer_freq", "norm_topk_prob", "rms_norm_eps", "rope_theta", "scoring_func")
    left += ("tie_word_embeddings", "topk_method", "num_key_value_heads", "eos_token_id", "hidden_act")
    for name, contents, eos in (("deepseek-v3", DEEPSEEK_V3, (7, 8)), ("deepseek-v2-lite", DEEPSEEK_V2_LITE, ())):
        config = read_config(written(tmp_path, contents, **dict.fromkeys(left, ...)))
        assert config == dataclasses.replace(PUBLISHED[name], eos_token_ids=())
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(eos)}))
        assert read_config(tmp_path).eos_token_ids == eos
        (tmp_path / "generation_config.json").unlink()
    more = ("first_k_dense_replace", "routed_scaling_factor", "num_nextn_predict_layers", "rope_scaling")
    config = read_config(written(tmp_path, DEEPSEEK_V3, **dict.fromkeys(more, ...)))
    assert (config.dense_layers, config.routed_scaling_factor) == ((0, 1, 2), 2.5)
    assert (config.num_nextn_predict_layers, config.yarn) == (1, None)


def test_layers_without_experts_are_the_first_and_those_between(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, DEEPSEEK_V3, num_hidden_layers=8, moe_layer_freq=3, first_k_dense_replace=2))
    assert config.dense_layers == (0, 1, 2, 4, 5, 7)
    config = read_config(written(tmp_path, DEEPSEEK_V3, num_hidden_layers=2))
    assert config.dense_layers == (0, 1)


ROPE = DEEPSEEK_V3["rope_scaling"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v4"}, "model_type` (='deepseek_v4') must be one of ['deepseek_v3', 'kimi_k2'"),
        ({"hidden_act": "gelu"}, "hidden_act` (='gelu') must be one of ['silu']"),
        ({"scoring_func": "softmax"}, "scoring_func` (='softmax') must be one of ['sigmoid']"),
        ({"topk_method": "greedy"}, "topk_method` (='greedy') must be one of ['noaux_tc']"),
        ({"hidden_size": ...}, "hidden_size` is missing"),
        ({"q_lora_rank": ...}, "q_lora_rank` is missing"),
        ({"q_lora_rank": 0}, "q_lora_rank` (=0) must be a whole number of at least 1"),
        ({"kv_lora_rank": 1.5}, "kv_lora_rank` (=1.5) must be a whole number"),
        ({"n_shared_experts": None}, "n_shared_experts` (=None) must be a whole number of at least 1"),
        ({"num_hidden_layers": 1 << 21}, "`num_hidden_layers` (=2097152) must be at most"),
        ({"num_key_value_heads": 8}, "num_key_value_heads` (=8) must be 128, as many heads"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim` (=63) must be even, for rotary pairs"),
        ({"attention_bias": True, "q_lora_rank": None}, "attention_bias` (=True) must be false without a"),
        ({"n_group": 7}, "`n_group` (=7) must divide 256 experts"),
        ({"topk_group": 9}, "`topk_group` (=9) must be at most 8"),
        ({"num_experts_per_tok": 129}, "`num_experts_per_tok` (=129) must be at most 128, the experts of"),
        ({"rope_interleave": 1}, "rope_interleave` (=1) must be one of"),
        ({"rope_theta": 1}, "`rope_theta` (=1.0) must be above 1 for YaRN"),
        ({"rope_scaling": ROPE | {"type": "linear"}}, "rope_scaling.type` (='linear') must be one of ['default', 'y"),
        ({"rope_scaling": ROPE | {"factor": 0}}, "rope_scaling.factor` (=0) must be a positive number"),
        ({"rope_scaling": ROPE | {"beta_fast": 10**400}}, "must be a positive number"),  # above all floats
        ({"rope_scaling": ROPE | {"mscale": None}}, "must have both of ('mscale', 'mscale_all_dim'), or neither"),
        ({"rope_scaling": ROPE | {"mscale_all_dim": 0}}, "mscale_all_dim` (=0) must be a positive number"),
        ({"rope_scaling": ROPE | {"attention_factor": 2.0}}, "attention_factor` (=2.0) must be one of [None]"),
        ({"rope_parameters": ROPE | {"factor": 8}}, "`rope_scaling` and `rope_parameters` must agree"),
        ({"rope_parameters": ROPE | {"rope_theta": 5}}, "`rope_theta` must be one number"),
    ],
)
def test_configs_of_other_models_are_refused_by_key(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config(written(tmp_path, DEEPSEEK_V3, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": True}, "norm_topk_prob` (=True) must be one of [False]"),
        ({"mlp_bias": True}, "mlp_bias` (=True) must be one of [False, None]"),
        ({"rope_interleave": False}, "rope_interleave` (=False) must be one of [True]"),
        ({"scoring_func": "sigmoid"}, "scoring_func` (='sigmoid') must be one of ['softmax']"),
        ({"topk_method": "noaux_tc"}, "topk_method` (='noaux_tc') must be one of ['greedy', 'group_limited_greedy']"),
        ({"topk_method": "group_limited_greedy", "n_group": None}, "n_group` (=None) must be a whole number"),
    ],
)
def test_configs_of_v2_that_would_be_read_otherwise_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config(written(tmp_path, DEEPSEEK_V2_LITE, **changes))
    assert message in str(caught.value)


# Checkpoints with more, and broken ones


def edited(
    folder: Path, name: str, change: Callable[[dict[str, np.ndarray]], Any] = lambda t: None, **config: Any
) -> Path:
    """A copy of a golden checkpoint with other tensors, and other entries of its config."""
    shutil.copytree(DATA / name, folder)
    tensors = {name: np.array(tensor.view()) for name, tensor in read_headers(folder).items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return written(folder, json.loads((folder / "config.json").read_text()), **config)


def with_a_further_layer(tensors: dict[str, np.ndarray]) -> None:
    """Adds a layer that predicts a further token, as DeepSeek's files have it after the last one."""
    tensors |= {name.replace("layers.1.", "layers.2."): its for name, its in tensors.items() if ".layers.1." in name}
    norm, head = tensors["model.norm.weight"], tensors["lm_head.weight"]
    tensors |= {f"model.layers.2.{name}.weight": norm for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors |= {f"model.layers.2.{name}.weight": head for name in ("embed_tokens", "shared_head.head")}
    tensors["model.layers.2.eh_proj.weight"] = np.concatenate([head, head], axis=1)


@pytest.mark.parametrize("name", ["deepseek_v3/published", "deepseek_v3/fp8"])
@pytest.mark.filterwarnings("ignore:(?s).*modules outside experts are quantized")
def test_layers_that_predict_further_tokens_are_reported_and_not_read(name: str, tmp_path: Path) -> None:
    folder = edited(tmp_path / "it", name, with_a_further_layer)
    with pytest.warns(UserWarning, match=r"tensors, such as 'model.layers.2.*, are of modules that are not run"):
        model = load(folder, dtype=jnp.float32, declared_inputs=False)
    assert len(model.layers) == 2
    logits, _, _ = whole(model, jnp.asarray(golden(name)["input_ids"]))
    assert relative_error(logits, golden(name)["logits"]) <= 2e-5
    with pytest.raises(CheckpointError, match=r"tensor 'model\.layers\.2\..*' is not one of a model with this config"):
        load(edited(tmp_path / "other", name, with_a_further_layer, num_nextn_predict_layers=0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.gate.e_score_correction_bias"), "e_score_correction_bias' is missing"),
        (lambda t: t.pop("model.layers.0.self_attn.q_a_layernorm.weight"), "q_a_layernorm.weight' is missing"),
        (lambda t: t.pop("model.layers.1.mlp.shared_experts.up_proj.weight"), "shared_experts.up_proj.weight' is mis"),
        (
            lambda t: t.update({n: a[:-1] for n, a in t.items() if n.endswith("kv_b_proj.weight")}),
            "kv_b_proj.weight' has shape (159, 20), but must have (160, 20)",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.gate.weight": np.ones((8, 32), ml_dtypes.bfloat16)}),
            "tensor 'model.layers.0.mlp.gate.weight' is not one of a model with this config",
        ),
        (lambda t: [t.pop(n) for n in [*t] if ".experts.7." in n], "`n_routed_experts` (=8) must be 7, the experts"),
    ],
)
def test_checkpoints_that_lack_what_the_config_calls_for_are_refused(
    change: Callable[[dict[str, np.ndarray]], Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(edited(tmp_path / "it", PLAIN[0], change))
    assert message in str(caught.value)


def test_the_names_of_files_are_those_of_transformers() -> None:
    """Nothing but experts is left over, and no two tensors have one name."""
    for name in PLAIN:
        config: Config = read_config(DATA / name)
        files = load_file(DATA / name / "model.safetensors")
        outside = {its for its in files if ".experts." not in its}
        named = [FAMILY.file_name(its) for its in FAMILY.shapes(config)]
        assert len(named) == len({*named})
        assert {*named} == outside
