"""Whole models with adapters: tokens of merged weights, over meshes and served, too; files that do not fit."""

import functools
import io
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_checkpoints
from flax import nnx
from float_checkpoints import TINY, float_gpt_oss
from model_steps import relative_error
from safetensors.numpy import load_file, save_file
from serving_process import serving
from tokenizers import Tokenizer

import jmx
from jmx import cli
from jmx.checkpoint import CheckpointError, peft
from jmx.checkpoint.quantizing import FloatExperts
from jmx.lora import Adapters, LoRA, merge
from jmx.lora.forms import fused
from jmx.models import Model, Runner, Sampler, from_source, load, memory, save
from jmx.models.adapters import abstract_experts, open_adapter
from jmx.models.loading import file_source
from jmx.models.text.chat_template import ChatTemplate
from jmx.models.text.stream import read_tokenizer
from jmx.numerics.gate_up import split_gate_up
from jmx.serving.engine import Generate

DATA = Path(__file__).parent / "data"
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9]]
STEPS = 12
FORMS = {"parameters": ("gate_up", "down"), "modules": ("gate", "up", "down")}


class Base(NamedTuple):
    """Where weights come from, what they are quantized to, and the order of gate and up in the model's fused weight."""

    path: Path | None  # None: gpt-oss in floats, which a test writes
    format: str | None
    order: str


BASES = {
    "gpt-oss in MXFP4": Base(TINY, None, "interleaved"),
    "gpt-oss in floats": Base(None, None, "interleaved"),
    "Qwen3-MoE in floats": Base(DATA / "qwen3_moe" / "bf16", None, "concatenated"),
    "Qwen3-MoE as INT8": Base(DATA / "qwen3_moe" / "bf16", "int8_channel", "concatenated"),
    "Qwen3-MoE in INT4": Base(DATA / "qwen3_moe" / "w4a16", None, "concatenated"),
}


@functools.cache
def in_floats(folder: str) -> Path:
    return float_gpt_oss(Path(folder) / "floats", 2)[0]


@pytest.fixture(scope="module")
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        yield name
    in_floats.cache_clear()


def options_of(base: str, folder: str) -> dict[str, Any]:
    """Arguments of `load`."""
    its = BASES[base]
    return {"path": its.path or in_floats(folder), "format": its.format, "dtype": jnp.float32}


def write_adapter(new: Path, config: Any, order: str, form: str, rng: np.random.Generator) -> dict[int, Adapters]:
    """Writes adapters, large enough to change tokens, of all layers' experts."""
    layers = [number for number in range(config.num_hidden_layers) if number not in config.dense_layers]
    experts = abstract_experts(config.num_experts, config.hidden_size, config.moe_intermediate_size, order)
    made = LoRA(2, 3, FORMS[form]).random(jax.random.key(0), experts)

    def draw(matrix: jax.Array) -> jax.Array:
        return jnp.asarray(rng.normal(size=matrix.shape) * matrix.shape[-1] ** -0.5, jnp.float32)

    adapters = {layer: jax.tree.map(draw, made) for layer in layers}
    of_layers: Any = dict.fromkeys(layers, experts)
    peft.save(new, adapters, of_layers, form=form)
    return adapters


def merged(model: Model, adapters: dict[int, Adapters], order: str) -> Model:
    """The model with experts in float32, to which the adapters are added."""

    def gate_first(rows: jax.Array) -> jax.Array:
        """Rows of gate and up (E, 2I, ...) in the order of experts in floats."""
        return jnp.concatenate(split_gate_up(jnp.moveaxis(rows, 1, -1), order), -1).swapaxes(1, -1)

    for number, its in adapters.items():
        moe = model.layers[number].moe
        experts = moe.experts
        if experts.format.is_float and order == "interleaved":  # of the adapters, not of these experts
            both = fused(its, abstract_experts(*experts.down.values.shape, order)).by_target()
            deltas = {role: each.scale * jnp.matmul(each.b, each.a, precision="highest") for role, each in both.items()}
            weights = experts.gate_up.values + gate_first(deltas["gate_up"]), experts.down.values + deltas["down"]
            biases = [experts.gate_up_bias, experts.down_bias]
        else:
            gate_up, down = merge(experts, its, dtype=jnp.float32)
            weights = gate_first(gate_up), down
            biases = [None if experts.gate_up_bias is None else gate_first(experts.gate_up_bias), experts.down_bias]
        model.layers[number].moe = model.make_moe(FloatExperts(*weights, *biases), nnx.Rngs(0))
    return model


def tokens_of(model: Model, steps: int = STEPS) -> list[list[int]]:
    """Greedy tokens, of each row."""
    drawn = [tokens.tolist() for tokens in Runner(model).generate(PROMPTS, Sampler(), steps)]
    return [[*row] for row in zip(*drawn, strict=True)]


def greedy(model: Model, tokens: list[list[int]]) -> list[list[int]]:
    """The likeliest token after each prompt and each of its tokens: `tokens` only if they are greedy. Compiles less."""
    rows = [prompt + its for prompt, its in zip(PROMPTS, tokens, strict=True)]
    likeliest = np.asarray(Runner(model).prefill(rows, all_logits=True)[0]).argmax(-1)
    return [row[len(p) - 1 : len(p) - 1 + STEPS].tolist() for p, row in zip(PROMPTS, likeliest, strict=True)]


def logits_of(model: Model) -> np.ndarray:
    return np.asarray(Runner(model).prefill(PROMPTS)[0])


@pytest.mark.costly
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("base", BASES)
def test_greedy_tokens_are_those_of_merged_weights(base, form, folder, tmp_path, rng):
    options, order = options_of(base, folder), BASES[base].order
    plain = load(**options)
    adapters = write_adapter(tmp_path / "adapter", plain.config, order, form, rng)
    expected, got = merged(plain, adapters, order), load(**options, adapter=tmp_path / "adapter")
    tokens = tokens_of(got)
    assert tokens == greedy(expected, tokens)
    assert relative_error(logits_of(got), logits_of(expected)) <= 1e-4


@pytest.mark.costly
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shared", [(), ("a",), ("b",), ("a", "b")])
def test_adapters_of_float_experts_are_rounded_to_the_tokens_dtype_and_may_be_shared(shared, dtype, rng):
    options: dict[str, Any] = {"gate_up_order": "concatenated", "format": jnp.dtype(dtype).name, "bias_dtype": dtype}
    experts = jmx.Experts.random(jax.random.key(int(rng.integers(2**31))), 4, 64, 32, **options)
    like = LoRA(3, 6, shared=shared).random(jax.random.key(0), experts)
    adapters = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) / 4, jnp.float32), like)
    x, logits = (jnp.asarray(rng.normal(size=(9, columns)), dtype) for columns in (64, 4))

    def layer(adapters: Adapters | None, experts: jmx.Experts = experts) -> jax.Array:
        routing = jmx.Logits(logits, jmx.SoftmaxTopK(2, renormalize=True))
        return jmx.moe(x, routing, experts, activation="swiglu", adapters=adapters)

    rounded = jax.tree.map(lambda a: a.astype(dtype).astype(jnp.float32), adapters)
    np.testing.assert_array_equal(layer(adapters), layer(rounded))
    gate_up, down = (jmx.BlockScaled(w.astype(dtype)) for w in merge(experts, rounded, dtype=jnp.float32))
    biases = experts.gate_up_bias, experts.down_bias
    its = jmx.Experts.of(gate_up, down, *biases, gate_up_order="concatenated", format=experts.format)
    merged = layer(None, its)
    assert relative_error(layer(None), merged) > 0.1
    assert relative_error(layer(adapters), merged) < (1e-5 if dtype == jnp.float32 else 3e-2)
    of_loss = jax.grad(lambda adapters: jnp.square(layer(adapters).astype(jnp.float32)).sum())(adapters)
    assert all(a.dtype == jnp.float32 and jnp.abs(a).max() > 0 for a in jax.tree.leaves(of_loss))


@pytest.mark.costly
@pytest.mark.devices(2)
@pytest.mark.parametrize("base", ["gpt-oss in MXFP4", "Qwen3-MoE in floats"])
def test_a_mesh_divides_adapters_as_it_does_experts(base, folder, tmp_path, rng):
    options, mesh = options_of(base, folder), jax.make_mesh((2,), ("ep",), devices=jax.devices()[:2])
    config = file_source(options["path"]).config
    write_adapter(tmp_path / "adapter", config, BASES[base].order, "modules", rng)
    options["adapter"] = tmp_path / "adapter"
    whole, divided = load(**options), load(**options, mesh=mesh)
    assert relative_error(logits_of(divided), logits_of(whole)) <= 2e-5
    matrix = jax.tree.leaves(divided.layers[0].moe.adapters)[0]
    assert matrix.addressable_shards[0].data.shape[0] * 2 == matrix.shape[0]


@pytest.mark.costly
def test_commands_run_adapters(tmp_path, rng, capsys):
    path = text_checkpoints.write(tmp_path / "tiny", "gpt_oss", layers=2)
    adapter = tmp_path / "adapter"
    adapters = write_adapter(adapter, file_source(path).config, "interleaved", "parameters", rng)
    model = merged(load(path, dtype=jnp.float32), adapters, "interleaved")
    flags = [str(path), "--adapter", str(adapter), "--dtype", "float32"]
    ids = ",".join(map(str, PROMPTS[0]))
    asked = ["--prompt-ids", ids, "--max-new-tokens", str(STEPS), "--ignore-eos", "--json"]
    assert cli.main(["--no-compilation-cache", "generate", *flags, *asked]) == 0
    got = json.loads(capsys.readouterr().out)["ids"]
    assert got == greedy(model, [got, got])[0]
    # The engine of a server, in this process.
    from jmx.cli.serving import make_engine

    limits = ["--max-users", "1", "--page", "16", "--prompt-tokens", "16", "--cache-tokens", "64"]
    arguments = cli.parser().parse_args(["--no-compilation-cache", "serve", *flags, *limits])
    engine, outputs = make_engine(arguments, 64), []
    engine.submit(Generate(0, tuple(PROMPTS[0]), STEPS))
    while not engine.is_idle:
        outputs += engine.step()
    assert [output.token for output in outputs if output.token is not None] == got


@pytest.mark.costly
def test_a_chat_with_an_adapter_answers_as_merged_weights_do(tmp_path, rng, monkeypatch, capsys):
    path, adapter = text_checkpoints.write(tmp_path / "model", "qwen2_moe"), tmp_path / "adapter"
    adapters = write_adapter(adapter, file_source(path).config, "concatenated", "modules", rng)
    plain = load(path, dtype=jnp.float32)
    template, tokenizer = ChatTemplate.read(path), Tokenizer.from_file(str(path / "tokenizer.json"))

    def chat(*more: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
        options = ["--dtype", "float32", "--max-new-tokens", str(STEPS), *more]
        assert cli.main(["--no-compilation-cache", "chat", str(path), *options]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    without = chat()
    prompt = tokenizer.encode(template.render([{"role": "user", "content": "Hello"}]), add_special_tokens=False).ids
    drawn = Runner(merged(plain, adapters, "concatenated")).generate([prompt], Sampler(), STEPS)
    ids = [int(tokens[0]) for tokens in drawn]
    last = json.loads((path / "generation_config.json").read_text())["eos_token_id"]
    ends = [number for number, token in enumerate(ids) if token in last]
    answer = chat("--adapter", str(adapter))
    assert answer == tokenizer.decode(ids[: ends[0]] if ends else ids)
    assert answer != without


@pytest.mark.slow
def test_a_server_with_an_adapter_answers_as_merged_weights_do(tmp_path, rng):
    path = text_checkpoints.write(tmp_path / "gpt_oss", "gpt_oss", layers=2)
    adapter = tmp_path / "adapter"
    adapters = write_adapter(adapter, file_source(path).config, "interleaved", "modules", rng)
    expected = tokens_of(merged(load(path, dtype=jnp.float32), adapters, "interleaved"))[0]
    with serving(tmp_path, "gpt_oss", "--adapter", str(adapter), "--name", "mine") as server:
        asked = {"model": "mine", "prompt": PROMPTS[0], "max_tokens": STEPS, "temperature": 0, "ignore_eos": True}
        status, answer = server.post("/v1/completions", asked)
    assert status == 200
    assert answer["choices"][0]["text"] == read_tokenizer(path).decode(expected, skip_special_tokens=True)


# What does not fit


def _attention(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return tensors | {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.ones((2, 64), np.float32)}


def _further_layer(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return tensors | {name.replace("layers.0", "layers.4"): array for name, array in tensors.items()}


def _fewer_layers(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in tensors.items() if "layers.3" not in name}


def _half_the_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {n: a[: a.shape[0] // 2] if "lora_A" in n else a[:, : a.shape[1] // 2] for n, a in tensors.items()}


def _narrower(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array[:, :-1] if "lora_A" in name else array for name, array in tensors.items()}


CHANGES = {
    "attention": (_attention, "q_proj.* must be of an adapter of experts: jmx has no others"),
    "a further layer": (_further_layer, r"must be of a layer with experts, one of \[0, 1, 2, 3\]"),
    "fewer layers": (_fewer_layers, r"layers\.3\..* is missing, which adapter_config.json names"),
    "other experts": (_half_the_experts, "`r` .*must be the rank of the adapter .*number of experts"),
    "other sizes": (_narrower, "must have N and K of one of"),
    "truncated": (None, "adapter_model.safetensors"),
    "missing": (None, "adapter_model.safetensors"),
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter") / "right"
    write_adapter(path, file_source(TINY).config, "interleaved", "parameters", np.random.default_rng(0))
    return path


@pytest.mark.parametrize("case", CHANGES)
def test_files_that_do_not_fit_are_errors_before_weights_are_read(case, adapter, tmp_path, monkeypatch, capsys):
    change, message = CHANGES[case]
    shutil.copytree(adapter, tmp_path / "copy")
    file = tmp_path / "copy" / "adapter_model.safetensors"
    if change is not None:
        save_file({name: np.ascontiguousarray(a) for name, a in change(load_file(file)).items()}, file)
    elif case == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    monkeypatch.setattr("jmx.models.loading.fill", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(CheckpointError, match=message):
        load(TINY, adapter=tmp_path / "copy")
    with pytest.raises(CheckpointError, match=message):
        open_adapter(tmp_path / "copy", file_source(TINY))
    flags = [str(TINY), "--prompt-ids", "1", "--adapter", str(tmp_path / "copy")]
    assert cli.main(["--no-compilation-cache", "generate", *flags]) != 0
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("jmx: error: ")
    assert err.count("\n") == 1


@pytest.mark.devices(2)
def test_where_experts_have_no_adapters_is_an_error_before_weights_are_read(adapter, monkeypatch, capsys):
    monkeypatch.setattr("jmx.models.loading.fill", lambda *_, **__: pytest.fail("weights were read"))
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2])
    with pytest.raises(
        ValueError, match=r"`axes\['intermediate'\]` \(=\('tp',\)\) must be None for experts with adapt"
    ):
        load(TINY, adapter=adapter, mesh=mesh)
    with pytest.raises(
        ValueError, match=r"`backend` \(='cpu'\) must be one of \[.*'xla'.*\], or None, for experts with"
    ):
        load(TINY, adapter=adapter, backend="cpu")
    flags = [str(TINY), "--prompt-ids", "1", "--adapter", str(adapter), "--backend", "cpu"]
    assert cli.main(["--no-compilation-cache", "generate", *flags]) == 2
    assert "`backend` (='cpu') must be one of" in capsys.readouterr().err


def test_memory_counts_adapters(adapter):
    source = file_source(TINY)
    reader = open_adapter(adapter, source)
    with_them, without = (memory.needed(source, [8], 1, adapters=its).weights for its in (reader, None))
    numbers = sum(array.size for array in load_file(adapter / "adapter_model.safetensors").values())
    assert with_them - without == 2 * numbers  # bfloat16


@pytest.mark.costly
def test_a_model_with_adapters_is_not_saved_as_one_without(adapter, tmp_path):
    source = file_source(TINY)
    model = from_source(source, adapters=open_adapter(adapter, source))
    with pytest.raises(ValueError, match="`model` must have no adapters"):
        save(tmp_path / "new", model)
    assert [*tmp_path.iterdir()] == []
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(model.layers[0].moe.adapters)} == {"bfloat16"}
