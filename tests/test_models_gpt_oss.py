"""The whole model: against what transformers computed from the same checkpoint, and against itself step by step."""

import dataclasses
import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import aot
import golden_experts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from float_checkpoints import float_gpt_oss
from float_checkpoints import write as write_files
from golden_experts import Family, check_tokens
from hypothesis import given
from hypothesis import strategies as st
from model_steps import decode_step, relative_error
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import jmx
import jmx.layer
from jmx.checkpoint import CheckpointError, quantizing
from jmx.checkpoint.compressed_tensors.layers import Layer
from jmx.checkpoint.gpt_oss import convert, read_config
from jmx.checkpoint.gpt_oss.tensor_names import layer_shapes, top_shapes
from jmx.checkpoint.model_configs.gpt_oss import FULL, PUBLISHED, SLIDING
from jmx.checkpoint.shards import read_headers
from jmx.models import Cache, GptOss, Model, MoERecord, Runner, Sampler, from_source, load, random_source, restore, save
from jmx.models.cache import bucket, write
from jmx.models.runner import CHUNK
from jmx.models.text.stream import TextStream
from jmx.selection.environment import Environment

pytestmark = [pytest.mark.costly, pytest.mark.sampled(3)]

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = load_file(ROOT / "tests/data/gpt_oss_tiny_golden.safetensors")
TINY = ROOT / "tests" / "data" / "gpt_oss_tiny"
PROMPTS = GOLDEN["input_ids"].tolist()
ON_HOPPER = Environment.probe().compute_capability == (9, 0)
WINDOW = 16  # of the tiny checkpoint's sliding layers


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(load(TINY, dtype=jnp.float32))


@pytest.fixture(scope="module")
def small() -> Runner:
    """Two layers, one that slides and one that does not, where a model is only held against itself."""
    config = dataclasses.replace(read_config(TINY), num_hidden_layers=2, layer_types=(SLIDING, FULL))
    return Runner(from_source(random_source(config), dtype=jnp.float32))


@jax.jit
def whole(model: Model, expert_ids: list[jax.Array] | None = None) -> tuple[jax.Array, list[MoERecord]]:
    """Logits of the golden prompts, and what went through each layer's experts."""
    records: list[MoERecord] = []
    batch, length = GOLDEN["input_ids"].shape
    caches = model.empty_cache(batch, length).layers
    starts = jnp.zeros(batch, jnp.int32)
    x, _ = model(jnp.asarray(GOLDEN["input_ids"]), starts, caches, expert_ids=expert_ids, records=records)
    return model.logits(x), records


def chosen_experts(model: Model, records: list[MoERecord]) -> list[jax.Array]:
    """Expert ids (B, T, k) of each layer."""
    return [
        jmx.route(jmx.Logits(layer.router(record.input), layer.moe.routing)).expert_ids
        for layer, record in zip(model.layers, records, strict=True)
    ]


def test_layers_computed_again_have_the_same_gradients_and_keep_less(small: Runner, rng: np.random.Generator) -> None:
    tokens = jnp.asarray(rng.integers(small.model.config.vocab_size, size=(2, 24)), jnp.int32)
    graphdef, trained, rest = nnx.split(small.model, lambda path, _: path[-1] in ("sinks", "scale"), ...)

    def loss(trained: Any, remat: bool) -> jax.Array:
        model = nnx.merge(graphdef, trained, rest)
        x, _ = model(tokens, None, model.empty_cache(*tokens.shape).layers, remat=remat)
        return jnp.square(model.logits(x)).mean()

    found, kept = [], []
    for remat in (False, True):
        found.append(jax.jit(jax.grad(partial(loss, remat=remat)))(trained))
        vjp = jax.eval_shape(lambda trained, remat=remat: jax.vjp(partial(loss, remat=remat), trained)[1], trained)
        kept.append(sum(leaf.size for leaf in jax.tree.leaves(vjp)))
    assert len(jax.tree.leaves(trained)) == 2 * 3 + 1  # sinks and both norms of each layer, and the last norm
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *found)
    assert kept[1] < kept[0]


# Against the reference


def test_float32_logits_and_every_layers_experts_are_the_references(runner: Runner) -> None:
    logits, records = whole(runner.model)
    assert relative_error(logits, GOLDEN["logits"]) <= 2e-5
    for index, record in enumerate(records):
        assert relative_error(record.input, GOLDEN[f"layer{index}.moe_in"]) <= 2e-5
        assert relative_error(record.output, GOLDEN[f"layer{index}.moe_out"]) <= 2e-5


@pytest.mark.parametrize("index", range(4))
def test_a_layers_experts_give_the_references_output_for_its_input(runner: Runner, index: int) -> None:
    layer, x = runner.model.layers[index], jnp.asarray(GOLDEN[f"layer{index}.moe_in"])
    out = layer.moe(x, layer.router(x))
    assert relative_error(out, GOLDEN[f"layer{index}.moe_out"]) <= 2e-5


def test_bfloat16_agrees_where_the_experts_are_the_same(runner: Runner) -> None:
    _, records = whole(runner.model)
    ids = chosen_experts(runner.model, records)
    half = load(TINY, dtype=jnp.bfloat16)
    logits, forced = whole(half, ids)
    assert relative_error(logits, GOLDEN["logits"]) <= 3e-2
    assert all(record.output.dtype == jnp.bfloat16 for record in forced)
    logits, free = whole(half)
    routes = zip(chosen_experts(half, free), ids, strict=True)
    flips = sum(int((np.sort(a, -1) != np.sort(b, -1)).any(-1).sum()) for a, b in routes)
    print(f"{flips} of {sum(a[..., 0].size for a in ids)} routes flip in bfloat16")
    assert relative_error(logits, GOLDEN["logits"]) <= 0.1
    assert flips <= 20


def test_given_expert_ids_are_the_ones_that_run(runner: Runner, rng: np.random.Generator) -> None:
    config = runner.model.config
    shape = (*GOLDEN["input_ids"].shape, config.num_experts)
    ids = [
        jnp.asarray(rng.random(shape).argsort(-1)[..., : config.top_k], jnp.int32)
        for _ in range(config.num_hidden_layers)
    ]
    _, records = whole(runner.model, ids)
    layer, record = runner.model.layers[0], records[0]
    values = jnp.take_along_axis(layer.router(record.input), ids[0], axis=-1)
    routing = jmx.Routing(ids[0], jax.nn.softmax(values, axis=-1))
    assert relative_error(layer.moe(record.input, routing), np.asarray(record.output)) <= 1e-5


def test_greedy_tokens_are_the_references_where_the_margin_is_wide(runner: Runner) -> None:
    """Fed with the reference's own tokens, so that one narrow step does not end the comparison."""
    logits, cache = runner.prefill(PROMPTS)
    compared = 0
    for expected in GOLDEN["greedy"].T:
        second, first = np.sort(np.asarray(logits), axis=-1)[:, -2:].T
        wide = first - second > 1e-3
        assert (np.asarray(Sampler()(logits, 0))[wide] == expected[wide]).all()
        compared += int(wide.sum())
        logits, cache = runner.decode(jnp.asarray(expected), cache)
    assert compared >= 0.9 * GOLDEN["greedy"].size


def test_both_forms_of_a_checkpoint_give_the_same_logits(runner: Runner, tmp_path: Path) -> None:
    convert(TINY, tmp_path / "original", form="original")
    again, _ = Runner(load(tmp_path / "original", dtype=jnp.float32)).prefill(PROMPTS)
    assert (np.asarray(again) == np.asarray(runner.prefill(PROMPTS)[0])).all()


# Experts of other formats, and from other tools

# By how a format's name begins: of the logits of a layer alone, against those in MXFP4.
FORMAT_ERRORS = {"nvfp4": 0.15, "mxfp4": 0, "int4": 0.3, "int8": 0.03, "fp8": 0.1}
CHOSEN = ("nvfp4", "int4_g32_asym", "fp8_block")  # `-m slow` runs all the others


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Model]:
    """A checkpoint in floats, and its model in MXFP4, which loses nothing."""
    folder, _ = float_gpt_oss(tmp_path_factory.mktemp("floats") / "bf16", num_layers=1)
    return folder, load(folder, format=jmx.MXFP4, dtype=jnp.float32)


@pytest.mark.parametrize(
    "name", [n if n in CHOSEN else pytest.param(n, marks=pytest.mark.slow) for n in quantizing.WRITABLE]
)
def test_tokens_come_from_experts_in_every_format(name: str, one_layer: tuple[Path, Model], tmp_path: Path) -> None:
    folder, floats = one_layer
    format = jmx.FORMATS[name]
    sizes = floats.config.hidden_size, floats.config.intermediate_size
    if any(size % format.block_size for size in sizes) and not format.short_block:
        pytest.skip(f"blocks of {format.block_size} do not divide {sizes}")
    quantizing.convert(folder, tmp_path / "out", format)
    model = load(tmp_path / "out", dtype=jnp.float32)
    assert model.layers[0].moe.experts.format == format
    caches = [model.empty_cache(2, 16).layers for _ in range(2)]
    tokens = jnp.array([PROMPTS[0][0], PROMPTS[1][0]])
    most = next(error for start, error in FORMAT_ERRORS.items() if name.startswith(start))
    for position in range(4):
        starts = jnp.full(2, position)
        logits, caches[0] = decode_step(model, tokens, starts, caches[0])
        expected, caches[1] = decode_step(floats, tokens, starts, caches[1])
        assert 0.01 * most < relative_error(logits, np.asarray(expected)) <= most or most == 0
        tokens = Sampler()(logits, position)


@pytest.mark.filterwarnings("ignore:(?s).*modules outside experts are quantized", "ignore:static input scales differ")
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize(
    ("name", "inputs", "error"),
    [
        ("quark_gpt_oss", "fp8_static", 0.1),
        ("quark_gpt_oss_fp8", "fp8_token", 0.1),
        ("modelopt_gpt_oss", "nvfp4", 0.3),
    ],
)
def test_whole_models_of_other_tools_give_the_references_logits(
    name: str, inputs: str, error: float, declared: bool
) -> None:
    path = ROOT / "tests/data/compressed_tensors" / name
    golden = load_file(path.with_suffix(".safetensors"))
    prompts, length = golden["input_ids"].tolist(), golden["input_ids"].shape[1]
    runner = Runner(load(path, dtype=jnp.float32, declared_inputs=declared))
    assert {layer.moe.experts.input_format for layer in runner.model.layers} == {inputs if declared else None}
    logits, _ = runner.prefill(prompts, all_logits=True)
    found = relative_error(logits[:, :length], golden["logits"])
    assert 1e-3 < found <= error if declared else found <= 1e-5
    tokens = np.array([*runner.generate(prompts, Sampler(), 4)])
    logits, _ = runner.prefill([p + t for p, t in zip(prompts, tokens.T.tolist(), strict=True)], all_logits=True)
    assert np.array_equal(tokens, np.asarray(logits).argmax(-1)[:, length - 1 : length + 3].T)


def golden_source(layer: Layer) -> Any:
    sizes = {"hidden_size": layer.hidden_size, "intermediate_size": layer.intermediate_size}
    config = dataclasses.replace(read_config(TINY), num_hidden_layers=1, layer_types=(FULL,), **sizes)
    return random_source(dataclasses.replace(config, num_experts=layer.num_experts, top_k=2))


def clamped(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    config = read_config(TINY)
    most = config.swiglu_limit
    gate, up = np.minimum(gate, most), np.clip(up, -most, most)
    with np.errstate(over="ignore"):  # of a gate far below zero: the quotient is then zero
        return gate / (1 + np.exp(-config.swiglu_alpha * gate)) * (up + config.swiglu_beta)


@pytest.mark.parametrize("name", golden_experts.NAMES)
def test_tokens_come_from_every_schemes_golden_file(name: str, rng: np.random.Generator) -> None:
    check_tokens(golden_experts.DATA / name, Family(golden_source, from_source, clamped, biases=True), rng)


def test_floats_without_a_format_stay_floats(one_layer: tuple[Path, Model]) -> None:
    folder, quantized = one_layer
    model = load(folder, dtype=jnp.float32)
    assert model.layers[0].moe.experts.format.name == "float32"
    tokens, starts = jnp.asarray(GOLDEN["input_ids"][:, 0]), jnp.zeros(2, jnp.int32)
    caches = model.empty_cache(2, 16).layers
    logits, expected = (decode_step(its, tokens, starts, caches)[0] for its in (model, quantized))
    assert relative_error(logits, expected) <= 1e-5  # MXFP4 loses nothing of these


def test_float_experts_may_have_sizes_that_mxfp4_does_not_divide(tmp_path: Path) -> None:
    folder, tensors = float_gpt_oss(tmp_path / "whole", num_layers=1)
    config, channels = json.loads((folder / "config.json").read_text()), 44
    experts = "model.layers.0.mlp.experts."
    tensors[f"{experts}down_proj"] = np.copy(tensors[f"{experts}down_proj"])
    tensors[f"{experts}down_proj"][:, channels:] = 0
    zeros = write_files(tmp_path / "zeros", {n: np.ascontiguousarray(a) for n, a in tensors.items()}, config)
    tensors |= {n: tensors[n][..., : 2 * channels] for n in (f"{experts}gate_up_proj", f"{experts}gate_up_proj_bias")}
    tensors[f"{experts}down_proj"] = tensors[f"{experts}down_proj"][:, :channels]
    fewer = config | {"intermediate_size": channels}
    short = write_files(tmp_path / "short", {n: np.ascontiguousarray(a) for n, a in tensors.items()}, fewer)
    tokens, starts = jnp.asarray(GOLDEN["input_ids"][:, 0]), jnp.zeros(2, jnp.int32)
    models = [load(folder, dtype=jnp.float32) for folder in (short, zeros)]
    assert [its.layers[0].moe.experts.intermediate_size for its in models] == [channels, config["intermediate_size"]]
    found, expected = (decode_step(its, tokens, starts, its.empty_cache(2, 16).layers)[0] for its in models)
    assert relative_error(found, expected) <= 1e-5
    for format, padded_to in (("mxfp4", (64, 64)), ("fp8_channel", None)):
        saved = load(short, format=format, dtype=jnp.float32)
        assert saved.layers[0].moe.experts.padded_to == padded_to
        save(tmp_path / format, saved)
        restored = restore(tmp_path / format, saved.config, format=format, dtype=jnp.float32)
        pairs = zip(*(nnx.to_flat_state(nnx.state(its)) for its in (saved, restored)), strict=True)
        assert all(path == other and jnp.array_equal(one[...], two[...]) for (path, one), (other, two) in pairs)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (["gate_up_proj_bias", "down_proj_bias"], "'model.layers.0.mlp.experts' have no biases, but must have some"),
        (["gate_up_proj_bias"], "must have a bias, or none, but ['down'] have one"),
        (["down_proj_bias"], "must have a bias, or none, but ['gate', 'up'] have one"),
    ],
)
def test_float_experts_that_lack_biases_are_refused(
    missing: list[str], message: str, one_layer: tuple[Path, Model], tmp_path: Path
) -> None:
    folder, _ = one_layer
    ends = tuple(f"experts.{name}" for name in missing)
    tensors = {name: tensor.view() for name, tensor in read_headers(folder).items() if not name.endswith(ends)}
    lacking = write_files(tmp_path / "it", tensors, json.loads((folder / "config.json").read_text()))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(lacking)


def test_a_format_for_quantized_experts_is_refused() -> None:
    with pytest.raises(CheckpointError, match="experts are quantized already, and not to nvfp4"):
        load(TINY, format=jmx.NVFP4)


# Prefill and decode


def test_prefill_returns_the_last_positions_logits_or_all(runner: Runner) -> None:
    last, _ = runner.prefill(PROMPTS)
    everything, _ = runner.prefill(PROMPTS, all_logits=True)
    assert last.shape == (2, 320)
    assert last.dtype == jnp.float32
    assert everything.shape == (2, bucket(48), 320)
    assert relative_error(everything[:, :48], GOLDEN["logits"]) <= 1e-4
    assert relative_error(last, GOLDEN["logits"][:, -1]) <= 1e-4


def test_rows_of_different_lengths_decode_as_if_each_were_alone(small: Runner, rng: np.random.Generator) -> None:
    """Teacher-forced over the sliding window's edge and two growths of the cache, against one pass over everything."""
    lengths = [3, WINDOW, WINDOW - 2, 1]
    rows = rng.integers(320, size=(4, 48))
    expected, _ = small.prefill(rows.tolist(), all_logits=True)
    logits, cache = small.prefill([row[:length].tolist() for row, length in zip(rows, lengths, strict=True)])
    for step in range(30):
        at = np.array(lengths) + step
        assert relative_error(logits, np.asarray(expected)[np.arange(4), at - 1]) <= 1e-4
        logits, cache = small.decode(jnp.asarray(rows[np.arange(4), at], jnp.int32), cache)
    assert cache.capacity == bucket(max(lengths) + 30) == 64
    assert np.asarray(cache.lengths).tolist() == [length + 30 for length in lengths]


def test_padding_tokens_go_to_no_expert(small: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[jax.Array] = []
    route = jmx.layer.flat_routing

    def recorded(*args: Any) -> jmx.Routing:
        routing = route(*args)
        jax.debug.callback(seen.append, routing.expert_ids)
        return routing

    monkeypatch.setattr(jmx.layer, "flat_routing", recorded)
    mask = np.arange(13) < np.array([[5], [13]])  # of a length that no other test has: layers alike are traced once
    caches = small.model.empty_cache(2, 13).layers
    tokens, starts = jnp.asarray(GOLDEN["input_ids"][:, :13]), jnp.zeros(2, jnp.int32)
    jax.block_until_ready(small.model(tokens, starts, caches, mask=jnp.asarray(mask)))
    jax.effects_barrier()
    assert len(seen) == 2
    for expert_ids in seen:
        assert ((np.asarray(expert_ids) == jmx.NOWHERE) == ~mask.reshape(-1, 1)).all()


def test_prefill_and_decode_are_traced_once_a_bucket(small: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[tuple[int, int]] = []
    call = GptOss.embed

    def counted(self: GptOss, tokens: jax.Array, starts: Any) -> Any:
        traced.append((tokens.shape[0], tokens.shape[1]))
        return call(self, tokens, starts)

    monkeypatch.setattr(GptOss, "embed", counted)
    runner = Runner(small.model)
    for length in (2, 9, 16, 17, 30):
        logits, cache = runner.prefill([PROMPTS[0][:length]])
        for step in range(5):
            logits, cache = runner.decode(Sampler()(logits, step), cache)
    # Of prompts in 2 buckets, and of steps in caches of 16, 32 and 64.
    assert sorted(traced) == [(1, 1)] * 3 + [(1, 16), (1, 32)]


def test_generating_in_chunks_gives_the_tokens_of_single_steps(small: Runner) -> None:
    prompts, sampler = [PROMPTS[0][:10], PROMPTS[1][:14]], Sampler(1.0, seed=3)
    logits, cache = small.prefill(prompts)
    expected = []
    for step in range(2 * CHUNK + 1):
        expected.append(np.asarray(sampler(logits, step)))
        logits, cache = small.decode(jnp.asarray(expected[-1]), cache)
    for count in (1, 2, CHUNK + 1, 2 * CHUNK + 1):
        got = list(small.generate(prompts, sampler, count))
        assert len(got) == count
        assert (np.array(got) == np.array(expected[:count])).all()


def test_old_caches_are_given_up(small: Runner) -> None:
    def is_gone(cache: Cache) -> bool:
        return all(layer.is_deleted() for layer in cache.layers)

    empty = small.model.empty_cache(1, 16)
    logits, filled = small.prefill([PROMPTS[0][:15]], cache=empty)
    token = Sampler()(logits, 0)
    _, full = small.decode(token, filled)
    assert full.capacity == 16
    _, grown = small.decode(token, full)
    assert grown.capacity == 32
    assert is_gone(empty)
    assert is_gone(filled)
    assert is_gone(full)
    assert not is_gone(grown)


def test_a_cache_that_is_written_over_leaves_no_trace(small: Runner) -> None:
    _, used = small.prefill([PROMPTS[0][:16]])
    logits, cache = small.prefill([PROMPTS[1][:7]], cache=used)
    fresh, other = small.prefill([PROMPTS[1][:7]])
    assert relative_error(logits, np.asarray(fresh)) <= 1e-5
    token = jnp.array([3])
    assert relative_error(small.decode(token, cache)[0], np.asarray(small.decode(token, other)[0])) <= 1e-5


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], r"`prompts` \(=\[\]\) must be at least one"),
        ([[1], []], r"`prompts\[1\]` \(=\[\]\) must have at least one token"),
        ([[1, 320]], r"`prompts\[0\]` has the id 320, which must be in 0..319"),
        ([[-1]], r"has the id -1"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(runner: Runner, prompts: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runner.prefill(prompts)


def test_tokens_that_are_not_one_a_row_are_refused(small: Runner) -> None:
    _, cache = small.prefill([[1, 2], [3]])
    for shape in ((1,), (3,), (2, 1)):
        with pytest.raises(ValueError, match=r"`tokens` \(shape .*\) must have shape \(2,\)"):
            small.decode(jnp.ones(shape, jnp.int32), cache)


def test_a_cache_without_space_is_refused(small: Runner) -> None:
    with pytest.raises(ValueError, match=r"`cache` \(1 rows of 16\) must have 1 rows of at least 32"):
        small.prefill([PROMPTS[0][:20]], cache=small.model.empty_cache(1, 16))


# The parts


@pytest.mark.aot
def test_a_decoding_step_is_one_cuda_graph_on_an_h200(tmp_path: Path) -> None:
    config = PUBLISHED["gpt-oss-20b"]
    config = dataclasses.replace(config, num_hidden_layers=2, layer_types=config.layer_types[:2])
    with jax.sharding.use_abstract_mesh(aot.h200_mesh().abstract_mesh):
        model = nnx.eval_shape(
            lambda: GptOss(config, format=jmx.MXFP4, dtype=jnp.bfloat16, backend="mosaic", rngs=nnx.Rngs(0))
        )
        cache = jax.eval_shape(lambda: model.empty_cache(1, 1024).layers)
    runner, row = Runner(model), jax.ShapeDtypeStruct((1,), jnp.int32)
    (graph,) = aot.launches_on_h200(tmp_path, runner._decode.jitted, runner._weights, cache, row, row)
    assert graph[0] == "kCommandBuffer"
    assert graph.count("kCustomCall") == 4  # each layer's attention and experts


@given(st.integers(1, 1 << 20))
def test_a_bucket_is_the_next_power_of_two(length: int) -> None:
    assert bucket(length) >= length
    assert bucket(length).bit_count() == 1
    assert bucket(length) < 2 * length or bucket(length) == 16


def test_a_cache_grows_with_what_it_holds(rng: np.random.Generator) -> None:
    config = read_config(TINY)
    shape = (2, 2, config.num_key_value_heads, 16, config.head_dim)
    cache = Cache.empty([shape] * config.num_hidden_layers, jnp.float32)
    written = jnp.asarray(rng.standard_normal((2, 3, config.num_key_value_heads, config.head_dim)), jnp.float32)
    layer = write(cache.layers[1], (written, 2 * written), jnp.array([0, 13]))
    held = np.asarray(layer[0])
    assert (held[0, :, :3] == np.asarray(written[0]).swapaxes(0, 1)).all()
    assert (held[1, :, 13:] == np.asarray(written[1]).swapaxes(0, 1)).all()
    grown = Cache([cache.layers[0], layer], cache.lengths, 16).reserve(17)
    assert grown.capacity == 32
    assert (np.asarray(grown.layers[1][1])[:, :, :16] == 2 * held).all()
    assert grown.reserve(32) is grown
    assert grown.nbytes == sum(a.on_device_size_in_bytes() for a in grown.layers)


@given(st.text(max_size=40))
def test_streamed_text_is_the_whole_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    stream = TextStream(tokenizer)
    parts = [stream.step(token) for token in tokenizer.encode(text, add_special_tokens=False).ids]
    assert not any(part.endswith("\ufffd") for part in parts if "\ufffd" not in text)
    assert "".join(parts) + stream.flush() == text


# Random weights


def test_random_weights_make_a_model_that_runs(small: Runner) -> None:
    config = small.model.config
    logits, _ = small.prefill([PROMPTS[0][:16]])
    assert np.isfinite(np.asarray(logits)).all()
    assert 0.1 < float(logits.std()) < 10
    source, other = (random_source(config, seed) for seed in (1, 2))
    values = [np.asarray(e.gate_up.values) for e in (source.experts(0), source.experts(1), other.experts(0))]
    assert (values[0] != values[1]).any()
    assert (values[0] != values[2]).any()
    assert (values[0] == np.asarray(source.experts(0).gate_up.values)).all()


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 20.9), ("gpt-oss-120b", 116.8)])
def test_published_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    """As OpenAI's model card counts them."""
    config = PUBLISHED[name]

    def count(shapes: dict[str, tuple[int, ...]]) -> int:
        codes_a_byte = {name: 2 for name in shapes if name.endswith("_values")}
        return sum(
            codes_a_byte.get(name, 1) * math.prod(s) for name, s in shapes.items() if not name.endswith("_scales")
        )

    total = count(top_shapes(config)) + config.num_hidden_layers * count(layer_shapes(config))
    assert total / 1e9 == pytest.approx(billions, abs=0.06)
