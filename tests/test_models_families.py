"""Families of models with grouped-query attention: each against transformers' numbers for the same checkpoints."""

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_steps import decode_step, relative_error
from safetensors.numpy import load_file, save_file

import jmx
from jmx.checkpoint import CheckpointError, quantizing
from jmx.models import FAMILIES, Family, Model, Sampler, from_source, load, random_source
from jmx.models.config import expert_layers, expert_sizes
from jmx.models.loading import file_source

pytestmark = pytest.mark.costly

GOLDEN = Path(__file__).parent / "data" / "families"
NEW = ("mixtral", "qwen2_moe", "olmoe", "glm4_moe")
NAMES = (*NEW, *(f"{name}_other" for name in NEW))
YARN = ("mixtral_yarn", "glm4_moe_yarn")
CAPACITY = 32  # tokens of a row's cache: prompt and continuation

# Parameters that transformers 5.23 counts in models of these sizes, and billions of the models' cards, which round.
# The counts leave out the layers of GLM-4.5 that predict further tokens.
PARAMETERS = {
    "mixtral-8x7b": (46_702_792_704, 46.7),
    "mixtral-8x22b": (140_620_634_112, 141),
    "qwen1.5-moe-a2.7b": (14_315_784_192, 14.3),
    "qwen2-57b-a14b": (57_408_658_944, 57.4),
    "olmoe-1b-7b": (6_919_161_856, 6.9),
    "glm-4.5": (352_797_829_024, 355),
    "glm-4.5-air": (106_852_251_264, 106),
}


@jax.jit
def whole(model: Model, tokens: jax.Array) -> tuple[jax.Array, list[jmx.Routing], list[Any]]:
    """Logits of whole prompts, where each layer's tokens went, and the caches."""
    records: list[Any] = []
    caches = model.empty_cache(tokens.shape[0], CAPACITY).layers
    x, caches = model(tokens, None, caches, records=records)
    sparse = [layer for layer in model.layers if hasattr(layer, "moe")]
    routes = [
        jmx.route(jmx.Logits(layer.router(record.input), layer.moe.routing, _bias(layer.moe)))
        for layer, record in zip(sparse, records, strict=True)
    ]
    return model.logits(x), routes, caches


def _bias(moe: Any) -> jax.Array | None:
    return None if moe.correction_bias is None else moe.correction_bias[...]


def edited(
    folder: Path, name: str, change: Callable[[dict[str, np.ndarray]], Any] = lambda t: None, **config: Any
) -> Path:
    """A copy of a golden checkpoint with other tensors, and other entries of its config; `...` leaves one out."""
    folder.mkdir(parents=True)
    tensors = load_file(GOLDEN / name / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    contents = json.loads((GOLDEN / name / "config.json").read_text()) | config
    contents = {key: value for key, value in contents.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(contents))
    return folder


def assert_same(one: Model, other: Model) -> None:
    """Same variables, bit by bit, except that files hold the reciprocals of NVFP4's global scales."""
    first, second = (nnx.to_flat_state(nnx.state(model)) for model in (one, other))
    for (path, variable), (its_path, its) in zip(first, second, strict=True):
        assert path == its_path
        if str(path[-1]).endswith("global_scales"):
            np.testing.assert_allclose(variable.get_value(), its.get_value(), rtol=2**-23)
        else:
            assert np.array_equal(variable.get_value(), its.get_value()), path


# Against the reference


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [*NAMES, *YARN])
def test_logits_routes_and_greedy_tokens_are_the_references(name: str) -> None:
    golden, model = load_file(GOLDEN / f"{name}.safetensors"), load(GOLDEN / name, dtype=jnp.float32)
    assert type(model) is FAMILIES[re.sub("_(other|yarn)$", "", name)].model
    ids = jnp.asarray(golden["input_ids"])
    rows, length = ids.shape
    logits, routes, caches = whole(model, ids)
    assert relative_error(logits, golden["logits"]) <= 2e-5
    sparse = expert_layers(model.config)
    assert {f"experts{layer}" for layer in sparse} == {key for key in golden if key.startswith("experts")}
    for layer, route in zip(sparse, routes, strict=True):
        expected, weights = golden[f"experts{layer}"], golden[f"weights{layer}"]
        order, its = np.argsort(expected, axis=-1), np.asarray(route.expert_ids).reshape(expected.shape)
        its_order = np.argsort(its, axis=-1)
        assert np.array_equal(np.take_along_axis(its, its_order, -1), np.take_along_axis(expected, order, -1))
        its_weights = np.take_along_axis(np.asarray(route.weights).reshape(weights.shape), its_order, -1)
        np.testing.assert_allclose(its_weights, np.take_along_axis(weights, order, -1), rtol=1e-4, atol=1e-6)
    logits = logits[:, -1]
    for number, expected in enumerate(golden["greedy"].T):
        tokens = Sampler()(logits, number)
        assert np.array_equal(np.asarray(tokens), expected)
        logits, caches = decode_step(model, tokens, jnp.full(rows, length + number), caches)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_near_the_reference(name: str) -> None:
    golden, model = load_file(GOLDEN / f"{name}.safetensors"), load(GOLDEN / name)
    logits, _, _ = whole(model, jnp.asarray(golden["input_ids"]))
    assert logits.dtype == jnp.float32
    assert 1e-4 < relative_error(logits, golden["logits"]) <= 0.1


def test_float_experts_are_run_by_the_requested_backend_or_by_none() -> None:
    tokens = jnp.ones((1, 3), jnp.int32)
    whole(load(GOLDEN / "mixtral", backend="xla"), tokens)
    with pytest.raises(jmx.NoBackendError, match="backend 'cpu' was requested"):
        whole(load(GOLDEN / "mixtral", backend="cpu"), tokens)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_in_two_files_is_the_same(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = load_file(GOLDEN / name / "model.safetensors")
    files = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    where = {tensor: files[int(rng.integers(2))] for tensor in tensors}
    for file in files:
        save_file({tensor: array for tensor, array in tensors.items() if where[tensor] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    shutil.copyfile(GOLDEN / name / "config.json", tmp_path / "config.json")
    assert_same(load(tmp_path), load(GOLDEN / name))


@pytest.mark.parametrize("stored", ["embedding", "unembedding", "both"])
@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("other")])
def test_tied_tables_are_one(name: str, stored: str, tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        if stored != "both":
            del tensors["lm_head.weight" if stored == "embedding" else "model.embed_tokens.weight"]

    model = load(edited(tmp_path / "it", name, change))
    assert model.unembedding is None
    assert_same(model, load(GOLDEN / name))


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int4_g32", "int8_channel_asym", "fp8_channel"])
@pytest.mark.parametrize("name", NEW)
def test_floats_rounded_as_they_are_read_are_those_that_convert_writes(name: str, format: str, tmp_path: Path) -> None:
    quantizing.convert(GOLDEN / name, tmp_path / "it", format)
    model = load(GOLDEN / name, format=jmx.FORMATS[format])
    for layer in expert_layers(model.config):
        assert model.layers[layer].moe.experts.format == jmx.FORMATS[format]
    assert_same(model, load(tmp_path / "it"))


@pytest.mark.parametrize("name", NAMES)
def test_quantized_experts_are_near_the_floats(name: str) -> None:
    golden = load_file(GOLDEN / f"{name}.safetensors")
    model = load(GOLDEN / name, format=jmx.FORMATS["int8_channel"], dtype=jnp.float32)
    logits, _, _ = whole(model, jnp.asarray(golden["input_ids"]))
    assert 1e-5 < relative_error(logits, golden["logits"]) <= 0.05


# The parts


def reference_config(family: Family) -> Any:
    """A small config of a family."""
    if family.name in NEW:
        return family.read_config(GOLDEN / family.name)
    config = next(iter(family.published.values()))
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_experts": 8, "vocab_size": 64}
    return dataclasses.replace(config, **sizes)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tensors_of_a_family_are_the_variables_of_its_model(name: str) -> None:
    """In name and, of those that are not concatenated, in shape."""
    family = FAMILIES[name]
    config = reference_config(family)
    model = nnx.eval_shape(lambda: family.model(config, format=jmx.FORMATS["fp8_channel"], rngs=nnx.Rngs(0)))
    held = dict(model.variables())
    for number, layer in enumerate(model.layers):
        held |= {tuple(f"layers.{number}.{name}" for name in names): its for names, its in layer.variables().items()}
    shapes = family.shapes(config)
    assert sorted(name for names in held for name in names) == sorted(shapes)
    for names, variable in held.items():
        first, *others = (shapes[name] for name in names)
        assert variable.get_value().shape == (first[0] + sum(other[0] for other in others), *first[1:])
    names = [family.file_name(name) for name in shapes]
    assert len({*names}) == len(names)


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_shapes_have_the_published_number_of_parameters(name: str) -> None:
    family = next(family for family in FAMILIES.values() if name in family.published)
    config = family.published[name]
    experts = 3 * math.prod(expert_sizes(config)) * len(expert_layers(config))
    count = sum(map(math.prod, family.shapes(config).values())) + experts
    counted, billions = PARAMETERS[name]
    assert count == counted
    assert count / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_random_weights_make_a_model_that_runs(name: str) -> None:
    family = FAMILIES[name.removesuffix("_other")]
    source = random_source(family.read_config(GOLDEN / name), format=jmx.FORMATS["int8_channel"])
    model = from_source(source, dtype=jnp.float32)
    logits, _, _ = whole(model, jnp.array([[1, 2, 3], [4, 5, 6]]))
    assert np.isfinite(np.asarray(logits)).all()
    assert 0.1 < float(logits.std()) < 30


# Configs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type` (='llama') must be one of"),
        ({"hidden_act": "gelu"}, "hidden_act` (='gelu')"),
        ({"hidden_size": ...}, "hidden_size` is missing"),
        ({"hidden_size": 32.0}, "hidden_size` (=32.0) must be a whole number of at least 1"),
        ({"num_experts_per_tok": 9}, "`num_experts_per_tok` (=9) must be at most"),
        ({"num_key_value_heads": 3}, "must be a multiple of `num_key_value_heads` (=3)"),
        ({"head_dim": 7}, "`head_dim` (=7) must be even"),
        ({"num_hidden_layers": 1 << 21}, "`num_hidden_layers` (=2097152) must be at most"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type` (='llama3') must be one of"),
        ({"rope_parameters": {"rope_type": "yarn"}, "rope_theta": 1e4}, "rope_parameters.factor` is missing"),
        ({"rope_parameters": {"factor": 4.0, "rope_theta": 1e4}}, "factor` (=4.0) must go with a `rope_type`, one of"),
        ({"rope_theta": 1.0}, "`rope_theta` must be one number"),
        ({"eos_token_id": "x"}, "eos_token_id` (='x') must be an id"),
        ({"rms_norm_eps": 0}, "rms_norm_eps` (=0) must be a positive number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings` (=1) must be one of"),
    ],
)
@pytest.mark.parametrize("name", NEW)
def test_configs_of_other_models_are_refused_by_key(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        FAMILIES[name].read_config(edited(tmp_path / "it", name, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"sliding_window": 0}, "sliding_window` (=0) must be a whole number of at least 1"),
        ("qwen2_moe", {"shared_expert_intermediate_size": ...}, "shared_expert_intermediate_size` is missing"),
        ("qwen2_moe", {"norm_topk_prob": 1}, "norm_topk_prob` (=1) must be one of"),
        (
            "qwen2_moe",
            {"mlp_only_layers": [2]},
            "mlp_only_layers` (=[2]) must be a list of layers, of which there are 2",
        ),
        ("qwen2_moe", {"layer_types": ["full_attention"]}, "must be 2 of ['full_attention']"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 2}, "must be 2 of ['full_attention']"),
        ("olmoe", {"clip_qkv": -1}, "clip_qkv` (=-1) must be a positive number"),
        ("glm4_moe", {"n_group": 3}, "`n_group` (=3) must divide 8 experts"),
        ("glm4_moe", {"topk_group": 2}, "`topk_group` (=2) must be at most 1"),
        ("glm4_moe", {"n_group": 8}, "`num_experts_per_tok` (=2) must be at most 1, the experts of `topk_group`"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts` (=0) must be a whole number of at least 1"),
        (
            "glm4_moe",
            {"first_k_dense_replace": -1},
            "first_k_dense_replace` (=-1) must be a whole number of at least 0",
        ),
        ("glm4_moe", {"partial_rotary_factor": 0.25}, "`partial_rotary_factor` must be one number"),
        (
            "glm4_moe",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2}},
            "`partial_rotary_factor` (=2.0) must make an even number of the 16 channels of a head",
        ),
    ],
)
def test_keys_of_one_family_are_checked(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        FAMILIES[name].read_config(edited(tmp_path / "it", name, **changes))
    assert message in str(caught.value)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    folder = edited(tmp_path / "it", "glm4_moe", first_k_dense_replace=3)
    with pytest.raises(CheckpointError, match=r"config.json: must have a layer with experts, but all 3 are dense"):
        load(folder)


@pytest.mark.parametrize("name", NEW)
def test_rotary_positions_of_types_of_layers_are_refused(name: str, tmp_path: Path) -> None:
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(CheckpointError, match=r"rope_parameters.full_attention` \(=\{.*must not be an object"):
        FAMILIES[name].read_config(edited(tmp_path / "it", name, rope_parameters=rope))


@pytest.mark.parametrize("name", NEW)
def test_rotary_frequencies_in_files_are_those_of_the_config(name: str, tmp_path: Path) -> None:
    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    assert_same(load(edited(tmp_path / "it", name, add)), load(GOLDEN / name))


@pytest.mark.parametrize("name", NEW)
def test_rotary_positions_in_the_older_spelling(name: str, tmp_path: Path) -> None:
    rope = json.loads((GOLDEN / name / "config.json").read_text())["rope_parameters"]
    del rope["rope_type"]
    older = edited(tmp_path / "it", name, rope_parameters=..., rope_scaling=None, **rope)
    assert FAMILIES[name].read_config(older) == FAMILIES[name].read_config(GOLDEN / name)


def test_what_configs_leave_out(tmp_path: Path) -> None:
    def read(name: str, *keys: str, **changes: Any) -> Any:
        folder = edited(tmp_path / f"{name}{len([*tmp_path.iterdir()])}", name, **dict.fromkeys(keys, ...), **changes)
        return FAMILIES[name.removesuffix("_other")].read_config(folder)

    config = read("mixtral_other", "head_dim", "num_key_value_heads", "rms_norm_eps", "rope_parameters")
    assert (config.head_dim, config.num_key_value_heads, config.rms_norm_eps, config.rope_theta) == (8, 4, 1e-5, 1e6)
    config = read("qwen2_moe_other", "layer_types", "qkv_bias", "mlp_only_layers", "decoder_sparse_step")
    assert (config.windows, config.qkv_bias, config.dense_layers) == ((7, None, None, None), True, ())
    assert read("qwen2_moe_other", "layer_types", max_window_layers=0).windows == (None,) * 4
    assert read("qwen2_moe_other", "layer_types", max_window_layers=9).windows == (7, None) * 2
    config = read("olmoe_other", "attention_bias", "norm_topk_prob", "clip_qkv")
    assert (config.attention_bias, config.norm_topk_prob, config.clip_qkv) == (False, False, None)
    config = read("glm4_moe_other", "first_k_dense_replace", "n_shared_experts", "n_group", "topk_group", "use_qk_norm")
    assert (config.dense_layers, config.n_shared_experts, config.n_group, config.use_qk_norm) == ((0,), 1, 1, False)
    assert read("glm4_moe", "rope_parameters").rotary_dim == 8


# Broken checkpoints


@pytest.mark.parametrize("name", NAMES)
def test_every_missing_or_wrong_tensor_is_refused_by_name(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name.removesuffix("_other")]
    config = family.read_config(GOLDEN / name)
    for number, neutral in enumerate(family.shapes(config)):
        file = family.file_name(neutral)
        missing = edited(tmp_path / f"missing{number}", name, lambda t, file=file: t.pop(file))
        with pytest.raises(CheckpointError, match=rf"tensor '{file}' is missing"):
            file_source(missing)
        wrong = edited(tmp_path / f"wrong{number}", name, lambda t, file=file: t.update({file: t[file][:-1]}))
        with pytest.raises(CheckpointError, match=rf"tensor '{file}' has shape .*, but must have"):
            file_source(wrong)


@pytest.mark.parametrize("extra", ["model.layers.0.self_attn.rotary.weight", "model.layers.9.input_layernorm.weight"])
@pytest.mark.parametrize("name", NAMES)
def test_other_tensors_are_refused_by_name(name: str, extra: str, tmp_path: Path) -> None:
    folder = edited(tmp_path / "it", name, lambda t: t.update({extra: np.zeros(3, np.float32)}))
    with pytest.raises(CheckpointError, match=f"tensor '{extra}' is not one of a model with this config"):
        file_source(folder)


@pytest.mark.parametrize("name", NAMES)
def test_missing_experts_are_refused(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name.removesuffix("_other")]
    config = family.read_config(GOLDEN / name)
    layers = family.experts(config)
    module = layers[min(layers)]

    def without(prefix: str) -> Callable[[dict[str, np.ndarray]], Any]:
        return lambda tensors: [tensors.pop(its) for its in [*tensors] if its.startswith(prefix)]

    with pytest.raises(CheckpointError, match=rf"must be {config.num_experts - 1}, the experts that '{module}' has"):
        file_source(edited(tmp_path / "last", name, without(f"{module}.{config.num_experts - 1}.")))
    with pytest.raises(CheckpointError, match=rf"is missing, where experts are {config.num_experts - 1}"):
        file_source(edited(tmp_path / "first", name, without(f"{module}.0.")))
    with pytest.raises(CheckpointError, match=r"experts .* are missing|must hold tensors of experts"):
        file_source(edited(tmp_path / "all", name, without(f"{module}.")))


def test_experts_with_biases_are_refused_where_a_model_has_none(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        weights = {name: array for name, array in tensors.items() if ".mlp.experts." in name}
        tensors |= {f"{name.removesuffix('weight')}bias": array[:, 0].copy() for name, array in weights.items()}

    folder = edited(tmp_path / "it", "glm4_moe", change)
    with pytest.raises(CheckpointError, match=r"experts 'model.layers.1.mlp.experts' have biases, but must have none"):
        load(folder)


def test_layers_that_predict_further_tokens_are_not_run_with_a_warning(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        last = {name: array for name, array in tensors.items() if name.startswith("model.layers.2.")}
        tensors |= {name.replace(".2.", ".3.", 1): array for name, array in last.items()}
        tensors["model.layers.3.eh_proj.weight"] = np.zeros((32, 64), np.float32)

    folder = edited(tmp_path / "it", "glm4_moe", change)
    with pytest.warns(
        UserWarning, match=r"tensors, such as 'model.layers.3.eh_proj.weight', are of modules .* not run"
    ):
        model = load(folder)
    assert_same(model, load(GOLDEN / "glm4_moe"))
    none = edited(tmp_path / "none", "glm4_moe", change, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match="is not one of a model with this config"):
        file_source(none)
