import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
import safetensors
import safetensors.numpy

import jmx
from jmx.backends import resolve_layout
from jmx.checkpoint import CheckpointError, gpt_oss, progress, shards
from jmx.checkpoint.gpt_oss import tensor_names, writer
from jmx.selection.environment import Environment

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "data" / "gpt_oss_tiny"
GOLDEN = ROOT / "tests" / "data" / "gpt_oss_tiny_golden.safetensors"

# The original form's names, from OpenAI's gpt_oss/torch: (file's name, Hugging Face names of what it holds).
TOP = [
    ("embedding.weight", ["model.embed_tokens.weight"]),
    ("norm.scale", ["model.norm.weight"]),
    ("unembedding.weight", ["lm_head.weight"]),
]
LAYER = [
    ("attn.norm.scale", ["input_layernorm.weight"]),
    ("attn.qkv.weight", ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"]),
    ("attn.qkv.bias", ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"]),
    ("attn.sinks", ["self_attn.sinks"]),
    ("attn.out.weight", ["self_attn.o_proj.weight"]),
    ("attn.out.bias", ["self_attn.o_proj.bias"]),
    ("mlp.norm.scale", ["post_attention_layernorm.weight"]),
    ("mlp.gate.weight", ["mlp.router.weight"]),
    ("mlp.gate.bias", ["mlp.router.bias"]),
    ("mlp.mlp1_weight.blocks", ["mlp.experts.gate_up_proj_blocks"]),
    ("mlp.mlp1_weight.scales", ["mlp.experts.gate_up_proj_scales"]),
    ("mlp.mlp1_bias", ["mlp.experts.gate_up_proj_bias"]),
    ("mlp.mlp2_weight.blocks", ["mlp.experts.down_proj_blocks"]),
    ("mlp.mlp2_weight.scales", ["mlp.experts.down_proj_scales"]),
    ("mlp.mlp2_bias", ["mlp.experts.down_proj_bias"]),
]
ORIGINAL_CONFIG = {
    "num_hidden_layers": 4,
    "num_experts": 8,
    "experts_per_token": 2,
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "swiglu_limit": 7.0,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 16,
    "initial_context_length": 4096,
    "rope_theta": 150000.0,
    "rope_scaling_factor": 32.0,
    "rope_ntk_alpha": 1.0,
    "rope_ntk_beta": 32.0,
}


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a directory's safetensors files, as the safetensors package reads them."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: array for file in files for name, array in safetensors.numpy.load_file(file).items()}


def original_tensors(hf: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = TOP + [
        (f"block.{i}.{ours}", [f"model.layers.{i}.{name}" for name in theirs])
        for i in range(4)
        for ours, theirs in LAYER
    ]
    return {name: np.concatenate([hf[member] for member in members]) for name, members in names}


def same(a: np.ndarray | jax.Array, b: np.ndarray | jax.Array) -> bool:
    """Equal down to the bits. jax and numpy arrays, canonical ones too."""
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def same_tensors(a: Mapping[str, np.ndarray | jax.Array], b: Mapping[str, np.ndarray | jax.Array]) -> bool:
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def everything(reader: gpt_oss.Reader) -> dict[str, jax.Array]:
    found = reader.top()
    for i in range(reader.config.num_hidden_layers):
        found |= {f"{i}.{name}": array for name, array in reader.layer(i).items()}
        found |= {f"{i}.{name}": array for name, array in reader.experts(i, "packed").arrays().items()}
    return found


@pytest.fixture
def hf() -> dict[str, np.ndarray]:
    return tensors_of(TINY)


@pytest.fixture
def single(tmp_path, hf) -> Path:
    """The tiny checkpoint as one file without an index."""
    path = tmp_path / "single"
    path.mkdir()
    shutil.copyfile(TINY / "config.json", path / "config.json")
    safetensors.numpy.save_file(hf, path / "model.safetensors")
    return path


@pytest.fixture
def original(tmp_path, hf) -> Path:
    """The tiny checkpoint in the original form, as the safetensors package writes it."""
    path = tmp_path / "original"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(ORIGINAL_CONFIG))
    safetensors.numpy.save_file(original_tensors(hf), path / "model.safetensors")
    return path


# Reading


def test_tensors_come_by_neutral_names_bit_for_bit(hf):
    reader = gpt_oss.Reader(TINY)
    assert reader.form == "hf"
    assert same_tensors(
        reader.top(),
        {
            "embedding": hf["model.embed_tokens.weight"],
            "final_norm": hf["model.norm.weight"],
            "unembedding": hf["lm_head.weight"],
        },
    )
    at = "model.layers.2."
    expected = {
        "input_norm": hf[at + "input_layernorm.weight"],
        "post_attention_norm": hf[at + "post_attention_layernorm.weight"],
        "sinks": hf[at + "self_attn.sinks"],
        "router_weight": hf[at + "mlp.router.weight"],
        "router_bias": hf[at + "mlp.router.bias"],
    }
    for name in "qkvo":
        expected[f"{name}_weight"] = hf[f"{at}self_attn.{name}_proj.weight"]
        expected[f"{name}_bias"] = hf[f"{at}self_attn.{name}_proj.bias"]
    assert same_tensors(reader.layer(2), expected)
    at += "mlp.experts."
    experts = reader.experts(2, "packed")
    assert same_tensors(
        experts.arrays(),
        {
            "gate_up_values": hf[at + "gate_up_proj_blocks"].reshape(8, 192, 32),
            "gate_up_scales": hf[at + "gate_up_proj_scales"],
            "gate_up_bias": hf[at + "gate_up_proj_bias"],
            "down_values": hf[at + "down_proj_blocks"].reshape(8, 64, 48),
            "down_scales": hf[at + "down_proj_scales"],
            "down_bias": hf[at + "down_proj_bias"],
        },
    )
    assert experts.gate_up_order == "interleaved"


def test_all_forms_and_files_give_the_same_arrays(single, original, tmp_path, hf):
    expected = everything(gpt_oss.Reader(TINY))
    assert same_tensors(everything(gpt_oss.Reader(single)), expected)
    reader = gpt_oss.Reader(original)
    assert reader.form == "original"
    assert same_tensors(everything(reader), expected)
    gpt_oss.convert(single, tmp_path / "orbax", "orbax")
    reader = gpt_oss.Reader(tmp_path / "orbax")
    assert reader.form == "orbax"
    assert same_tensors(everything(reader), expected)


def test_a_directory_with_both_forms_is_the_hugging_face_one(single, original):
    original.rename(single / "original")
    assert gpt_oss.Reader(single).form == "hf"
    assert gpt_oss.Reader(single / "original").form == "original"


def test_norms_may_be_float32(single, hf):
    norms = {name: array.astype(np.float32) for name, array in hf.items() if "norm" in name}
    safetensors.numpy.save_file(hf | norms, single / "model.safetensors")
    found = gpt_oss.Reader(single).layer(1)
    assert same(found["input_norm"], norms["model.layers.1.input_layernorm.weight"])
    assert found["q_weight"].dtype == jnp.bfloat16


def test_models_without_attention_biases_have_none(single, hf):
    config = json.loads((single / "config.json").read_text()) | {"attention_bias": False}
    (single / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"tensor '.*_proj\.bias' is not one of a model with this config"):
        gpt_oss.Reader(single)
    kept = {name: array for name, array in hf.items() if not re.search(r"self_attn\..*bias", name)}
    safetensors.numpy.save_file(kept, single / "model.safetensors")
    assert not {"q_bias", "o_bias"} & gpt_oss.Reader(single).layer(0).keys()


@pytest.mark.parametrize("layer", range(4))
def test_loaded_experts_compute_what_transformers_computes(layer):
    reader = gpt_oss.Reader(TINY)
    config, golden = reader.config, safetensors.numpy.load_file(GOLDEN)
    x = jnp.asarray(golden[f"layer{layer}.moe_in"]).reshape(-1, config.hidden_size)
    router = {name: array.astype(jnp.float32) for name, array in reader.layer(layer).items() if "router" in name}
    logits = jnp.dot(x, router["router_weight"].T, precision="highest") + router["router_bias"]
    activation = jmx.SwiGLU(alpha=config.swiglu_alpha, beta=config.swiglu_beta, limit=config.swiglu_limit)
    experts = gpt_oss.load(TINY, layer)
    y = jmx.moe(x, jmx.Logits(logits, jmx.TopKSoftmax(config.top_k)), experts, activation=activation)
    expected = golden[f"layer{layer}.moe_out"].reshape(y.shape)
    assert np.linalg.norm(y - expected) <= 1e-4 * np.linalg.norm(expected)


def test_load_resolves_layouts_and_names_bad_arguments():
    automatic = gpt_oss.load(TINY, 3)
    assert automatic.layout == resolve_layout("auto", Environment.probe())
    canonical = gpt_oss.load(TINY, 3, layout="canonical")
    assert canonical.gate_up.values.dtype == jnp.float4_e2m1fn
    assert same_tensors(canonical.prepare("packed").arrays(), gpt_oss.load(TINY, 3, layout="packed").arrays())
    with pytest.raises(ValueError, match=r"`layout` \(='sideways'\) must be one of"):
        gpt_oss.load(TINY, layout="sideways")
    for layer in (-1, 4):
        with pytest.raises(ValueError, match=rf"`layer` \(={layer}\) must be 0 to 3"):
            gpt_oss.load(TINY, layer)


def test_arrays_outlive_their_files(single, hf):
    reader = gpt_oss.Reader(single)
    experts, top = reader.experts(0, "packed"), reader.top()
    with (single / "model.safetensors").open("r+b") as file:
        file.write(b"\0" * (single / "model.safetensors").stat().st_size)
    assert same(experts.gate_up.values, hf["model.layers.0.mlp.experts.gate_up_proj_blocks"].reshape(8, 192, 32))
    assert same(top["embedding"], hf["model.embed_tokens.weight"])


# Broken checkpoints: nothing is read, nothing written

BLOCKS = "model.layers.3.mlp.experts.gate_up_proj_blocks"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (BLOCKS, None, r"is missing; it must be U8 \(8, 192, 2, 16\)"),
        ("lm_head.weight", None, r"is missing; it must be BF16 \(320, 64\)"),
        ("model.layers.0.self_attn.sinks", None, r"is missing; it must be BF16 or F32 \(4\)"),
        (BLOCKS, lambda a: a.reshape(8, 192, 32), r"is U8 \(8, 192, 32\), but must be U8 \(8, 192, 2, 16\)"),
        (BLOCKS, lambda a: a[:7], r"is U8 \(7, 192, 2, 16\), but must be"),
        (BLOCKS, lambda a: a.view(np.int8), r"is I8 .*, but must be U8"),
        ("model.layers.3.mlp.experts.down_proj_bias", lambda a: a.astype(np.float32), r"is F32 .*, but must be BF16"),
        ("model.norm.weight", lambda a: a.astype(np.float16), r"is F16 .*, but must be BF16 or F32"),
        ("model.layers.1.self_attn.q_proj.weight", lambda a: a.T, r"is BF16 \(64, 128\), but must be BF16 \(128, 64\)"),
    ],
)
def test_wrong_tensors_are_refused_before_any_is_read(single, hf, monkeypatch, name, change, message):
    changed = {n: a for n, a in hf.items() if n != name}
    if change is not None:
        changed[name] = np.ascontiguousarray(change(hf[name]))
    safetensors.numpy.save_file(changed, single / "model.safetensors")
    monkeypatch.setattr(shards.Tensor, "view", lambda self: pytest.fail("a tensor was read"))
    for use in (gpt_oss.Reader, gpt_oss.load, lambda path: gpt_oss.convert(path, single.parent / "out")):
        with pytest.raises(CheckpointError, match=rf"single.*: tensor '{re.escape(name)}' {message}"):
            use(single)
    assert [p.name for p in single.parent.iterdir()] == ["single"]


def test_tensors_that_the_config_does_not_call_for_are_refused(single, hf):
    safetensors.numpy.save_file(hf | {"model.layers.4.sinks": np.ones(4)}, single / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'model\.layers\.4\.sinks' is not one of a"):
        gpt_oss.Reader(single)


@pytest.mark.parametrize("form", ["hf", "orbax"])
def test_layers_without_tensors_are_refused_before_tables_of_them_are_made(single, tmp_path, form, monkeypatch):
    if form == "orbax":
        gpt_oss.convert(single, tmp_path / "orbax", "orbax")
    path = {"hf": single, "orbax": tmp_path / "orbax"}[form]
    config = json.loads((path / "config.json").read_text())
    layers = {"num_hidden_layers": 1_000_000, "layer_types": None}
    (path / "config.json").write_text(json.dumps(config | layers))
    named = []
    layer_name = tensor_names.layer_name
    monkeypatch.setattr(tensor_names, "layer_name", lambda *args: named.append(args) or layer_name(*args))
    message = {"hf": r"`num_hidden_layers` \(=1000000\) must fit", "orbax": r"layers/4: must be an Orbax checkpoint"}
    with pytest.raises(CheckpointError, match=message[form]):
        gpt_oss.Reader(path)
    assert len(named) < 10


def test_other_models_are_refused(single):
    safetensors.numpy.save_file({"wte.weight": np.ones((3, 3))}, single / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"must hold a tensor 'model\.embed_tokens\.weight' \(hf\) or 'embedding"):
        gpt_oss.Reader(single)


@pytest.mark.parametrize("form", ["hf", "original"])
def test_truncated_and_garbled_files_are_refused(single, original, form):
    path = {"hf": single, "original": original}[form]
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for broken, message in (
        (whole[:-1], "must end within the file.*cut short"),
        (whole[: len(whole) // 2], "must end within the file.*cut short"),
        (whole[:1000], "the header must end within the file"),
        (whole[:3], "the file has 3 bytes"),
        (b"\xff" * 8 + whole[8:], "the header must end within the file"),
        (whole[:8] + b"}" + whole[9:], "the header must be JSON"),
    ):
        file.write_bytes(broken)
        with pytest.raises(CheckpointError, match=re.escape(str(file)) + ".*" + message):
            gpt_oss.load(path)


def test_missing_shards_and_other_methods_are_refused(tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(TINY, path)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: the shard is missing"):
        gpt_oss.Reader(path)
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"`quantization_config\.quant_method` \(='gptq'\) must be 'mxfp4'"):
        gpt_oss.Reader(path)
    with pytest.raises(CheckpointError, match="nowhere"):
        gpt_oss.Reader(tmp_path / "nowhere")


# Writing


def test_every_byte_survives_each_conversion(tmp_path, hf):
    gpt_oss.convert(TINY, tmp_path / "hf", max_shard_bytes=100_000)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 5
    assert same_tensors(tensors_of(tmp_path / "hf"), hf)
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (TINY / name).read_bytes()

    gpt_oss.convert(tmp_path / "hf", tmp_path / "original", "original", max_shard_bytes=150_000)
    assert same_tensors(tensors_of(tmp_path / "original"), original_tensors(hf))
    assert json.loads((tmp_path / "original" / "config.json").read_text()) == ORIGINAL_CONFIG
    dtypes = json.loads((tmp_path / "original" / "dtypes.json").read_text())
    assert dtypes.keys() == original_tensors(hf).keys()
    assert dtypes["block.2.mlp.mlp1_weight.blocks"] == "FP4"
    assert dtypes["block.2.mlp.mlp2_weight.scales"] == "UE8"
    assert dtypes["block.2.attn.qkv.bias"] == "BF16"

    gpt_oss.convert(tmp_path / "original", tmp_path / "orbax", "orbax")
    gpt_oss.convert(tmp_path / "orbax", tmp_path / "back")
    assert same_tensors(tensors_of(tmp_path / "back"), hf)
    for form in ("hf", "original", "orbax", "back"):
        assert gpt_oss.read_config(tmp_path / form) == gpt_oss.read_config(TINY)
        assert (tmp_path / form / "tokenizer.json").exists()


def test_float32_norms_survive_conversion(single, tmp_path, hf):
    changed = hf | {name: a.astype(np.float32) * 1.1 for name, a in hf.items() if "norm" in name}
    safetensors.numpy.save_file(changed, single / "model.safetensors")
    for form in ("original", "orbax"):
        gpt_oss.convert(single, tmp_path / form, form)
        gpt_oss.convert(tmp_path / form, tmp_path / f"{form}_back")
        assert same_tensors(tensors_of(tmp_path / f"{form}_back"), changed)


def test_plain_orbax_reads_the_orbax_form(tmp_path, hf):
    gpt_oss.convert(TINY, tmp_path / "orbax", "orbax")
    assert sorted(p.name for p in (tmp_path / "orbax" / "layers").iterdir()) == ["0", "1", "2", "3"]
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        "gate_up_values": jax.ShapeDtypeStruct((8, 192, 64), jnp.float4_e2m1fn, sharding=device),
        "q_weight": jax.ShapeDtypeStruct((128, 64), jnp.bfloat16, sharding=device),
    }
    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        restore = orbax.checkpoint.args.PyTreeRestore(
            wanted, orbax.checkpoint.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
        )
        found = checkpointer.restore(tmp_path / "orbax" / "layers" / "1", args=restore)
    assert same(found["gate_up_values"], gpt_oss.load(TINY, 1, "canonical").gate_up.values)
    assert same(found["q_weight"], hf["model.layers.1.self_attn.q_proj.weight"])


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def edited(old, new):
    def edit(file):
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    return edit


TREE, NOTE = "top/_METADATA", "top/_CHECKPOINT_METADATA"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (TREE, Path.unlink, "top: must be an Orbax checkpoint, a directory that holds _METADATA"),
        (TREE, cut, "top/_METADATA: the file must be JSON"),
        (TREE, lambda file: file.write_text("[1]"), "top/_METADATA: must be a JSON object, not list"),
        (TREE, lambda file: file.write_text("{}"), "top: must be an Orbax checkpoint: KeyError"),
        (NOTE, Path.unlink, "top/_CHECKPOINT_METADATA: .* its custom metadata lack 'jmx_gpt_oss'"),
        (NOTE, cut, "top/_CHECKPOINT_METADATA: the file must be JSON"),
        (NOTE, edited('"version": 1', '"version": 2'), r"`jmx_gpt_oss\.version` \(=2\) must be 1, which is"),
        (NOTE, edited('"version": 1', '"x": 1'), r"`jmx_gpt_oss\.version` is missing"),
        (NOTE, edited('"version": 1', '"version": 1, "x": 0'), r"`jmx_gpt_oss\.x` \(=0\) is not a known key"),
        (NOTE, edited('"top"', "[]"), r"`jmx_gpt_oss\.part` \(=\[\]\) must be 'top', which is"),
    ],
)
def test_a_damaged_orbax_form_is_named(tmp_path, orbax_form, file, change, message):
    path = tmp_path / "orbax"
    shutil.copytree(orbax_form, path)
    change(path / file)
    with pytest.raises(CheckpointError, match=message):
        gpt_oss.Reader(path)


def test_layers_of_the_orbax_form_that_changed_places_are_refused(tmp_path, orbax_form):
    shutil.copytree(orbax_form, tmp_path / "orbax")
    layers = tmp_path / "orbax" / "layers"
    for old, new in (("1", "aside"), ("2", "1"), ("aside", "2")):
        (layers / old).rename(layers / new)
    message = r"layers/1/_CHECKPOINT_METADATA: `jmx_gpt_oss\.part` \(='layers/2'\) must be 'layers/1', which is"
    with pytest.raises(CheckpointError, match=message):
        gpt_oss.Reader(tmp_path / "orbax")


@pytest.fixture(scope="module")
def orbax_form(tmp_path_factory):
    path = tmp_path_factory.mktemp("forms") / "orbax"
    gpt_oss.convert(TINY, path, "orbax")
    return path


def test_a_broken_orbax_form_is_named(tmp_path):
    gpt_oss.convert(TINY, tmp_path / "orbax", "orbax")
    config = json.loads((tmp_path / "orbax" / "config.json").read_text())
    shutil.move(tmp_path / "orbax" / "layers" / "2", tmp_path / "aside")
    with pytest.raises(CheckpointError, match=r"layers/2: must be an Orbax checkpoint"):
        gpt_oss.Reader(tmp_path / "orbax")
    shutil.move(tmp_path / "aside", tmp_path / "orbax" / "layers" / "2")
    (tmp_path / "orbax" / "config.json").write_text(json.dumps(config | {"vocab_size": 321}))
    with pytest.raises(CheckpointError, match=r"top: array 'embedding' is bfloat16 \(320, 64\), but must be .*321"):
        gpt_oss.Reader(tmp_path / "orbax")


def test_what_a_form_cannot_say_is_refused(single, tmp_path):
    config = json.loads((single / "config.json").read_text())
    for key, value in (("rms_norm_eps", 1e-6), ("swiglu_alpha", 1.5), ("layer_types", ["full_attention"] * 4)):
        (single / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(CheckpointError, match=rf"config\.json: `{key}` .* for the original form"):
            gpt_oss.convert(single, tmp_path / "out", "original")
        gpt_oss.convert(single, tmp_path / key, "hf")
    assert not (tmp_path / "out").exists()


def test_generation_configs_keep_their_other_entries(single, tmp_path):
    generation = {"eos_token_id": [319, 12], "temperature": 0.7}
    (single / "generation_config.json").write_text(json.dumps(generation))
    gpt_oss.convert(single, tmp_path / "out", "original")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {"eos_token_id": [319, 12], "temperature": 0.7, "bos_token_id": 317, "pad_token_id": 318}
    assert gpt_oss.read_config(tmp_path / "out").eos_token_ids == (319, 12)


def test_convert_overwrites_nothing_and_names_bad_arguments(tmp_path):
    (tmp_path / "there").mkdir()
    for form in ("hf", "original", "orbax"):
        with pytest.raises(FileExistsError, match="there must not exist yet"):
            gpt_oss.convert(TINY, tmp_path / "there", form)
    with pytest.raises(ValueError, match=r"`form` \(='gguf'\) must be one of \['hf', 'original', 'orbax'\]"):
        gpt_oss.convert(TINY, tmp_path / "new", "gguf")
    with pytest.raises(ValueError, match=r"`max_shard_bytes` \(=0\) must be at least 1"):
        gpt_oss.convert(TINY, tmp_path / "new", max_shard_bytes=0)
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("form", ["hf", "original", "orbax"])
def test_a_conversion_that_fails_midway_leaves_nothing(single, hf, form, monkeypatch):
    name = "model.layers.3.mlp.experts.gate_up_proj_scales"
    hf[name] = hf[name].copy()
    hf[name][7, 191, 1] = 255
    safetensors.numpy.save_file(hf, single / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor '{re.escape(name)}' .* scale of 255 \(NaN\).* \(7, 191, 1\)"):
        gpt_oss.convert(single, single.parent / "out", form)
    assert [p.name for p in single.parent.iterdir()] == ["single"]

    def interrupt(self, name, part, index=()):
        if name == "layers.2.q_weight":
            raise KeyboardInterrupt

    monkeypatch.setattr(gpt_oss.Reader, "check_scales", interrupt)
    with pytest.raises(KeyboardInterrupt):
        gpt_oss.convert(single, single.parent / "out", form)
    assert [p.name for p in single.parent.iterdir()] == ["single"]


def test_progress_counts_every_byte(tmp_path, monkeypatch):
    bars = []

    class Bar(list):
        def __enter__(self):
            return self.append

        def __exit__(self, *_):
            pass

    def bar(description, total, enabled):
        bars.append((total, enabled, Bar()))
        return bars[-1][2]

    for module in (progress, writer):
        monkeypatch.setattr(module, "progress_bar", bar)
    gpt_oss.load(TINY, 1, progress=True)
    reader = gpt_oss.Reader(TINY)
    with reader.progress():
        everything(reader)
    everything(reader)  # after the bar
    gpt_oss.convert(TINY, tmp_path / "hf", progress=True)
    gpt_oss.convert(TINY, tmp_path / "orbax", "orbax", progress=True)
    layer = sum(a.nbytes for a in gpt_oss.load(TINY, 1, "packed").arrays().values())
    whole = sum(a.nbytes for a in tensors_of(TINY).values())
    assert [total for total, _, _ in bars[:4]] == [layer, whole, whole, whole]
    assert [sum(done) for _, _, done in bars[:4]] == [layer, whole, whole, whole]
    assert [enabled for _, enabled, _ in bars[:4]] == [True] * 4
