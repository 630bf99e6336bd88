"""Adapters in PEFT's files: those that PEFT wrote, beside what it adds to weights; files of jmx; broken ones."""

import errno
import json
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmx
from jmx.checkpoint import CheckpointError, peft, shards
from jmx.checkpoint.peft.config import Config
from jmx.lora import Adapter, Adapters, LoRA
from jmx.lora.forms import fused

DATA = pathlib.Path(__file__).parent / "data" / "peft"
E, H, I = 3, 32, 24  # noqa: E741
GOLDEN = {"gpt_oss": "interleaved", "qwen3_moe": "concatenated", "modules": "concatenated"}
LAYERS = {"gpt_oss": (0, 1), "qwen3_moe": (0, 1), "modules": (0,)}


def experts_of(order, layers=(0, 1)) -> dict[int, Any]:
    experts: Any = jax.eval_shape(
        lambda key: jmx.Experts.random(key, E, H, I, gate_up_order=order, format="int8_channel"), jax.random.key(0)
    )
    return dict.fromkeys(layers, experts)


def tensors(file):
    return {name: tensor.view() for name, tensor in shards.read_header(file).items()}


def deltas(adapters):
    """What is added to each weight (E, N, K)."""
    return {
        name: np.broadcast_to(np.asarray(each.b @ each.a) * each.scale, (E, each.b.shape[-2], each.a.shape[-1]))
        for name, each in adapters.by_target().items()
    }


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for name, each in expected.items():
        np.testing.assert_allclose(got[name], each, rtol=1e-5, atol=1e-6, err_msg=str(name))


@pytest.mark.parametrize("name", GOLDEN)
def test_files_of_peft_add_what_peft_adds(name):
    found = peft.load(DATA / name, experts_of(GOLDEN[name], LAYERS[name]))
    got = {f"{layer}.{target}": d for layer, its in found.items() for target, d in deltas(its).items()}
    assert_equal(got, tensors(DATA / name / "deltas.safetensors"))


def test_rows_are_put_into_the_order_of_the_experts():
    there = peft.load(DATA / "gpt_oss", experts_of("interleaved"))
    turned = peft.load(DATA / "gpt_oss", experts_of("concatenated_up_first"), gate_up_order="interleaved")
    rows = deltas(there[0])["gate_up"]
    np.testing.assert_array_equal(deltas(turned[0])["gate_up"], np.concatenate([rows[:, 1::2], rows[:, ::2]], axis=1))


@pytest.mark.parametrize("name", GOLDEN)
def test_what_is_written_has_the_tensors_and_scales_of_peft(name, tmp_path):
    experts = experts_of(GOLDEN[name], LAYERS[name])
    found = peft.load(DATA / name, experts)
    form = "modules" if name == "modules" else "parameters"
    peft.save(tmp_path / "new", found, experts, form=form, base_model="some/model")
    got, expected = (tensors(path / "adapter_model.safetensors") for path in (tmp_path / "new", DATA / name))
    assert got.keys() == expected.keys()
    for key, each in expected.items():
        np.testing.assert_array_equal(got[key], each, err_msg=key)
    again = peft.load(tmp_path / "new", experts)
    for layer, its in found.items():
        assert_equal(deltas(again[layer]), deltas(its))
    files = (path / "adapter_config.json" for path in (tmp_path / "new", DATA / name))
    written, theirs = (json.loads(file.read_text()) for file in files)
    assert written["base_model_name_or_path"] == "some/model"
    assert {*(written["target_parameters"] or ())} == {*(theirs["target_parameters"] or ())}
    assert {*written["target_modules"]} == {*theirs["target_modules"]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shared", [(), ("a",), ("b",)])
@pytest.mark.parametrize("targets", [("gate_up", "down"), ("gate", "up", "down"), ("up",), ("down",)])
@pytest.mark.parametrize("form", ["parameters", "modules"])
def test_round_trip(form, targets, shared, dtype, tmp_path, rng):
    experts = experts_of("interleaved", (3, 11))
    config = LoRA(2, 5, targets, shared, dtype=jnp.dtype(dtype))
    adapters = {
        layer: jax.tree.map(
            lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), config.random(jax.random.key(0), its)
        )
        for layer, its in experts.items()
    }
    peft.save(tmp_path / "new", adapters, experts, form=form)
    found = peft.load(tmp_path / "new", experts)
    assert {*found} == {3, 11}
    for layer, its in experts.items():
        assert {str(a.dtype) for a in jax.tree.leaves(found[layer])} == {dtype}
        floats = [jax.tree.map(jnp.float32, each) for each in (found[layer], adapters[layer])]
        got, expected = (deltas(fused(each, its)) for each in floats)
        assert_equal(got, expected)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    experts = experts_of("interleaved")
    found = peft.load(DATA / "gpt_oss", experts)
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr("jmx.checkpoint.shards.os.fsync", full)
        with pytest.raises(OSError, match=r"adapter_model\.safetensors") as caught:
            peft.save(tmp_path / "new", found, experts)
    assert caught.value.errno == errno.ENOSPC
    assert [*tmp_path.iterdir()] == []
    peft.save(tmp_path / "new", found, experts)
    with pytest.raises(FileExistsError, match="must not exist yet"):
        peft.save(tmp_path / "new", found, experts)


def test_a_file_that_cannot_grow_leaves_nothing(tmp_path):
    resource = pytest.importorskip("resource")
    experts = experts_of("interleaved")
    found = peft.load(DATA / "gpt_oss", experts)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # bytes: the header fits, matrices do not
    try:
        with pytest.raises(OSError, match=r"adapter_model\.safetensors"):
            peft.save(tmp_path / "new", found, experts)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [*tmp_path.iterdir()] == []


CONFIGS = [
    ("peft_type", "VERA", "`peft_type` (='VERA') must be 'LORA'"),
    ("r", 0, "`r` (=0) must be an integer of at least 1"),
    ("rank_pattern", {"x": 2.0}, "`rank_pattern.x` (=2.0) must be an integer of at least 1"),
    ("target_modules", "(", "`target_modules`: pattern '(' must be a regular expression"),
    ("target_modules", "(.*a)+b", "`target_modules`: pattern '(.*a)+b' must have at most 6 repeats, none of a group"),
    ("rank_pattern", {"(?i)x": 2}, "`rank_pattern`: pattern '(?i)x' must be a regular expression: global flags"),
    ("alpha_pattern", {"x{100000000000000000000}": 2}, "`alpha_pattern`: pattern 'x{1"),
    ("target_parameters", [1], "`target_parameters` (=[1]) must be a list of names"),
    ("layers_to_transform", ["0"], "`layers_to_transform` (=['0']) must be integers, or null"),
    ("lora_alpha", "6", "`lora_alpha` (='6') must be a finite number"),
    ("lora_alpha", float("nan"), "`lora_alpha` (=nan) must be a finite number"),
    ("lora_alpha", 10**400, "must be a finite number"),
    ("bias", "all", "`bias` (='all') must be 'none'"),
    ("use_dora", True, "`use_dora` (=True) must be null"),
    ("modules_to_save", ["lm_head"], "`modules_to_save` (=['lm_head']) must be null"),
    ("use_rslora", 1, "`use_rslora` (=1) must be true or false"),
    ("alpha_pattern", {"x": None}, "`alpha_pattern.x` (=None) must be a finite number"),
    ("novel_config", {"x": 1}, "`novel_config`"),
]


@pytest.mark.parametrize(("key", "value", "message"), CONFIGS)
def test_configs_that_jmx_cannot_read_are_named(key, value, message, tmp_path):
    shutil.copytree(DATA / "gpt_oss", tmp_path / "copy")
    file = tmp_path / "copy" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(CheckpointError) as caught:
        peft.load(tmp_path / "copy", experts_of("interleaved"))
    assert message in str(caught.value)
    assert "adapter_config.json" in str(caught.value)


@pytest.mark.parametrize(
    "module", ["experts", "layers.{layer}.{x}", "layers.{layer}.{", "layers.{layer}", "{layer:x}.experts"]
)
def test_names_of_modules_have_a_place_for_the_layer_and_no_other(module, tmp_path):
    experts = experts_of("interleaved")
    found = peft.load(DATA / "gpt_oss", experts)
    with pytest.raises(ValueError, match=r"`module` \(='.*'\) must have '\{layer\}\.'"):
        peft.save(tmp_path / "new", found, experts, module=module)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors", ""])
def test_missing_files_are_named(missing, tmp_path):
    shutil.copytree(DATA / "gpt_oss", tmp_path / "copy")
    (tmp_path / "copy" / missing).unlink() if missing else shutil.rmtree(tmp_path / "copy")
    with pytest.raises(CheckpointError, match=missing or "must be a directory"):
        peft.load(tmp_path / "copy", experts_of("interleaved"))


MODULE = "base_model.model.model.layers.0.mlp.experts"
ATTENTION = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
CHANGES = {
    "attention": (lambda t: t | {ATTENTION: np.ones((2, 32), np.float32)}, "q_proj.* must be of an adapter of experts"),
    "no B": (lambda t: {n: a for n, a in t.items() if n != f"{MODULE}.0.up_proj.lora_B.weight"}, "lora_B.* is missing"),
    "no expert": (lambda t: {n: a for n, a in t.items() if "experts.1.gate" not in n}, "experts.1.gate_proj.*missing"),
    "expert 3": (lambda t: t | {f"{MODULE}.3.up_proj.lora_A.weight": np.ones((2, 32), np.float32)}, "below 3"),
    "layer 7": (lambda t: {n.replace("layers.0", "layers.7"): a for n, a in t.items()}, "must be of a layer with"),
    "integers": (lambda t: {n: a.astype(np.int32) for n, a in t.items()}, "has dtype I32"),
    "sizes": (lambda t: {n: a[:, :-1] for n, a in t.items()}, "has shape"),
    "nothing": (lambda _: {}, "must have adapters"),
    "both": (lambda t: t | {f"{MODULE}.lora_A.weight": np.ones((3, 24), np.float32)}, "not both"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_tensors_that_do_not_fit_are_named(case, tmp_path):
    shutil.copytree(DATA / "modules", tmp_path / "copy")
    file = tmp_path / "copy" / "adapter_model.safetensors"
    change, message = CHANGES[case]
    changed = {name: np.ascontiguousarray(array) for name, array in change(tensors(file)).items()}
    spelled = {dtype: name for name, dtype in shards.DTYPES.items()}
    outputs = [shards.Output(n, spelled[a.dtype], a.shape, lambda a=a: [a]) for n, a in changed.items()]
    file.unlink()
    shards.write_file(file, outputs)
    with pytest.raises(CheckpointError, match=message):
        peft.load(tmp_path / "copy", experts_of("concatenated", (0,)))


def test_fused_tensors_of_other_experts_are_named():
    wrong: Any = jax.eval_shape(lambda: jmx.Experts.random(jax.random.key(0), E, 64, 32, gate_up_order="interleaved"))
    with pytest.raises(CheckpointError, match=r"must have N and K of one of"):
        peft.load(DATA / "gpt_oss", {0: wrong, 1: wrong})


def experts_like(number, order="interleaved"):
    return jax.eval_shape(
        lambda: jmx.Experts.random(jax.random.key(0), number, H, I, gate_up_order=order, format="int8_channel")
    )


@pytest.mark.parametrize(("name", "number"), [("gpt_oss", 2), ("gpt_oss", 1), ("qwen3_moe", 1), ("modules", 2)])
def test_files_of_another_number_of_experts_are_named(name, number):
    rule = {"modules": "must be of an expert below 2"}.get(name, "`r` .*must be the rank .*number of experts")
    experts: Any = dict.fromkeys(LAYERS[name], experts_like(number, GOLDEN[name]))
    with pytest.raises(CheckpointError, match=rule):  # three experts of rank 2 are also two of rank 3
        peft.load(DATA / name, experts)


@pytest.mark.parametrize("name", GOLDEN)
def test_files_of_a_model_with_fewer_layers_are_named(name, tmp_path):
    wanted, more = (experts_of(GOLDEN[name], layers) for layers in (LAYERS[name], range(5)))
    with pytest.raises(
        CheckpointError, match=r"adapter of 'model.layers.\d.mlp.experts.* is missing, which adapter_con"
    ):
        peft.load(DATA / name, more)
    found = peft.load(DATA / name, wanted)
    form = "modules" if name == "modules" else "parameters"
    peft.save(tmp_path / "some", found, more, form=form)  # the config names the layers
    assert peft.Reader(tmp_path / "some", more).layers == LAYERS[name]
    config = json.loads((tmp_path / "some" / "adapter_config.json").read_text())
    if form == "modules":
        assert config["layers_to_transform"] == [0]
    else:
        assert "model.layers.1.mlp.experts.down_proj" in config["target_parameters"]


@pytest.mark.parametrize(
    ("changed", "adapts"),
    [
        ({}, True),
        ({"target_modules": r".*experts\.\d+\.(gate|up|down)_proj"}, True),
        ({"target_modules": "all-linear"}, True),
        ({"target_modules": ["layers.0.mlp.experts.0.gate_proj"]}, False),
        ({"layers_to_transform": 0}, False),
        ({"layers_to_transform": [0, 1]}, True),
        ({"exclude_modules": r".*layers\.1\..*"}, False),
    ],
)
def test_which_layers_have_adapters_is_what_the_config_names(changed, adapts, tmp_path):
    shutil.copytree(DATA / "modules", tmp_path / "copy")
    file = tmp_path / "copy" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    if adapts:
        with pytest.raises(CheckpointError, match=r"layers\.1\..* is missing"):
            peft.load(tmp_path / "copy", experts_of("concatenated"))
    else:
        assert [*peft.load(tmp_path / "copy", experts_of("concatenated"))] == [0]


@pytest.mark.parametrize("name", GOLDEN)
def test_files_are_checked_before_they_are_read(name, monkeypatch):
    monkeypatch.setattr(shards.Tensor, "view", lambda _: pytest.fail("a tensor was read"))
    reader = peft.Reader(DATA / name, experts_of(GOLDEN[name], LAYERS[name]))
    monkeypatch.undo()
    for layer in reader.layers:
        there: Any = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), reader.adapters(layer))
        assert there == reader.shapes(layer)


def test_a_truncated_file_is_named(tmp_path):
    shutil.copytree(DATA / "gpt_oss", tmp_path / "copy")
    file = tmp_path / "copy" / "adapter_model.safetensors"
    whole = file.read_bytes()
    for length in (0, 7, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
            peft.load(tmp_path / "copy", experts_of("interleaved"))


def test_layers_that_differ_are_an_error(tmp_path):
    experts = experts_of("interleaved")
    found = peft.load(DATA / "gpt_oss", experts)
    other: Any = found[1].down
    with pytest.raises(ValueError, match=r"`adapters\[1\]` .* must be as those before"):
        peft.save(tmp_path / "new", found | {1: Adapters(down=Adapter(other.a, other.b, 9.0))}, experts)
    with pytest.raises(ValueError, match=r"`experts` \(of layers \[0\]\) must have layer 1"):
        peft.save(tmp_path / "new", found, {0: experts[0]})
    with pytest.raises(ValueError, match="r of 1 or more"):
        peft.save(tmp_path / "new", {0: Adapters(down=Adapter(other.a[:, :0], other.b[..., :0], 1.0))}, experts)
    assert [*tmp_path.iterdir()] == []


def test_alpha_patterns_are_matched_as_peft_does():
    patterns = {"experts.down_proj": 4.0, r"layers\.1\..*": 2.0}
    config = Config(pathlib.Path("x"), 2, 6.0, {}, patterns, rank_stabilized=False, targets={}, layers=None)
    assert config.scale("model.layers.0.mlp.experts.down_proj", 2) == 2
    assert config.scale("model.layers.1.mlp.experts.gate_up_proj", 2) == 1
    assert config.scale("model.layers.0.mlp.myexperts.down_proj", 2) == 3
