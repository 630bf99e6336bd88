"""The engine: requests served together get the tokens that each gets alone, from `Runner`, in float32."""

import dataclasses
import functools
import json
import os
import pathlib
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import text_checkpoints
from jax.sharding import AxisType

from jmx.models import Model, ModelSplit, Runner, Sampler, from_source, load, random_source
from jmx.serving.engine import Engine, Generate, Guides, Limits, Output
from jmx.serving.engine.guide import check_schema
from jmx.serving.engine.sampling import Level

pytestmark = pytest.mark.costly

DATA = pathlib.Path(__file__).parent / "data"
CHECKPOINTS = {"qwen3_moe": DATA / "qwen3_moe" / "other", "deepseek_v3": DATA / "deepseek_v3" / "published"}
NAMES = ["gpt_oss", *(pytest.param(name, marks=pytest.mark.slow) for name in CHECKPOINTS)]


class FewPrograms(Limits):
    """Limits of an engine all of whose steps have the same size but one: compiling takes most of the time."""

    def sizes(self) -> list[tuple[int, int]]:
        return [(3, 0), (3, 2)]

    def decode_sizes(self) -> list[int]:
        return [3]


LIMITS = FewPrograms(max_users=3, max_length=72, cache_tokens=160, page=16, prompt_tokens=32)


@functools.cache
def model(name: str) -> Model:
    """Of few layers: compiling takes most of the time."""
    if name in CHECKPOINTS:
        return load(CHECKPOINTS[name], dtype=jnp.float32)
    with tempfile.TemporaryDirectory() as folder:
        return load(text_checkpoints.write(pathlib.Path(folder, name), name, layers=2), dtype=jnp.float32)


@functools.cache
def runner(name: str) -> Runner:
    return Runner(model(name))


@pytest.fixture(scope="module", autouse=True)
def _models_are_freed():
    yield
    model.cache_clear()
    runner.cache_clear()
    shared_engine.cache_clear()


UNUSED = 10**9  # an id


@functools.cache
def shared_engine(name: str) -> Engine:
    """One for all tests, which compiles each program once. Its ids go on."""
    return Engine(model(name), LIMITS)


def finish(engine: Engine, outputs: list[Output] | None = None) -> list[Output]:
    found = [] if outputs is None else outputs
    for _ in range(2000):
        if engine.is_idle:
            break
        found += engine.step()
    assert engine.is_idle
    assert [used for used, _ in engine.pages] == [0] * len(engine.pages)
    return found


def tokens_of(outputs: Sequence[Output], id: int) -> list[int | None]:
    return [output.token for output in outputs if output.id == id]


def alone(name: str, request: Generate) -> list[int]:
    """The tokens of a request that the engine serves alone, in steps of the same size, without reuse."""
    engine, salt = shared_engine(name), secrets.token_bytes(8)
    engine.submit(dataclasses.replace(request, id=UNUSED, salt=salt))
    return [token for token in tokens_of(finish(engine), UNUSED) if token is not None]


def by_runner(name: str, request: Generate) -> list[int]:
    steps = runner(name).generate([list(request.prompt)], request.sampler, request.max_new_tokens)
    return [int(tokens[0]) for tokens in steps]


SAMPLERS = [
    Sampler(),
    Sampler(temperature=0.9, seed=3),
    Sampler(temperature=1.3, seed=2**32 - 1, top_k=7, top_p=0.8),
    Sampler(temperature=0.7, top_p=0.9, min_p=0.05, seed=11),
    Sampler(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.6),
    Sampler(temperature=1.1, seed=5, top_k=20, frequency_penalty=1.5),
]


@pytest.mark.parametrize("name", NAMES)
def test_together_is_alone(name: str, rng: np.random.Generator) -> None:
    """More requests than users, at different times, with prompts that share pages, and a cache that is too small."""
    engine, vocabulary = shared_engine(name), model(name).config.vocab_size
    start = rng.integers(vocabulary, size=40).tolist()
    requests = []
    for number, sampler in enumerate(SAMPLERS):
        prompt = start[: rng.integers(1, 41)] + rng.integers(vocabulary, size=rng.integers(1, 8)).tolist()
        new = int(rng.integers(1, min(24, 72 - len(prompt))))
        requests.append(Generate(number, tuple(prompt), new, sampler))
    outputs: list[Output] = []
    for request in requests:
        engine.submit(request)
        outputs += engine.step()
    finish(engine, outputs)
    for request in requests:
        assert tokens_of(outputs, request.id) == alone(name, request), request
        reasons = [output.finish_reason for output in outputs if output.id == request.id]
        assert reasons == [None] * (request.max_new_tokens - 1) + ["length"]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(3)
def test_alone_is_the_runner(name: str, sampler: Sampler, rng: np.random.Generator) -> None:
    prompt = tuple(rng.integers(model(name).config.vocab_size, size=rng.integers(1, 33)).tolist())
    request = Generate(0, prompt, 17, sampler)
    assert alone(name, request) == by_runner(name, request)


def test_preempted_requests_get_the_same_tokens(rng: np.random.Generator) -> None:
    """Requests that need more pages together than there are."""
    engine = shared_engine("gpt_oss")
    prompts = [tuple(rng.integers(256, size=30).tolist()) for _ in range(3)]
    requests = [Generate(id, prompt, 40, SAMPLERS[2 * id]) for id, prompt in enumerate(prompts)]
    before = engine.statistics.preempted
    for request in requests:
        engine.submit(request)
    outputs = finish(engine)
    assert engine.statistics.preempted > before
    for request in requests:
        assert tokens_of(outputs, request.id) == alone("gpt_oss", request)


def test_stop_ids_and_banned_tokens(rng: np.random.Generator) -> None:
    engine = shared_engine("gpt_oss")
    prompt = tuple(rng.integers(256, size=9).tolist())
    whole = alone("gpt_oss", Generate(0, prompt, 12))
    stop = whole[5]
    engine.submit(Generate(1, prompt, 12, stop_ids=frozenset({stop})))
    engine.submit(Generate(2, prompt, 12, banned=(whole[0],)))
    outputs = finish(engine)
    assert tokens_of(outputs, 1) == whole[: whole.index(stop) + 1]
    assert [output.finish_reason for output in outputs if output.id == 1][-1] == "stop"
    assert whole[0] not in tokens_of(outputs, 2)
    assert len(tokens_of(outputs, 2)) == 12


@pytest.mark.parametrize("beside", [False, True])
def test_a_slot_forbids_nothing_of_its_last_request(rng: np.random.Generator, beside: bool) -> None:
    """`beside`: another request, and not the slot's own, needs a step in which tokens can be forbidden."""
    engine, vocabulary = Engine(model("gpt_oss"), LIMITS), model("gpt_oss").config.vocab_size
    prompt = tuple(rng.integers(vocabulary, size=20).tolist())
    free = Generate(0, prompt, 6, logprobs=not beside)
    expected = alone("gpt_oss", free)
    for id in range(1, 4):  # in every slot
        engine.submit(Generate(id, prompt, 6, banned=tuple({*expected})))
    assert not {*expected} & {output.token for output in finish(engine)}
    engine.submit(free)
    if beside:
        engine.submit(Generate(4, prompt, 6, logprobs=True))
    assert tokens_of(finish(engine), 0) == expected


def test_several_steps_of_a_call_give_the_tokens_of_single_ones(rng: np.random.Generator) -> None:
    """For every sampler, with and without log probabilities, and with a stop in any place of a group of tokens."""
    engine = shared_engine("gpt_oss")
    settings = engine._state.settings
    assert settings.decode_steps == 4
    for id, sampler in enumerate(SAMPLERS):
        prompts = [tuple(rng.integers(256, size=size).tolist()) for size in (5, 20)]
        whole = alone("gpt_oss", Generate(0, prompts[0], 14, sampler))
        for stop in (None, *whole[2 + id % 4 :: 3]):
            found, calls = [], []
            for steps in (1, 4):
                engine._state = dataclasses.replace(
                    engine._state, settings=dataclasses.replace(settings, decode_steps=steps)
                )
                for number, prompt in enumerate(prompts[: 1 + id % 2]):
                    given = {"stop_ids": frozenset({stop} - {None}), "logprobs": id == 1 and number == 1}
                    engine.submit(Generate(number, prompt, 14, sampler, **given, salt=secrets.token_bytes(8)))
                outputs, count = [], 0
                while not engine.is_idle:
                    outputs, count = outputs + engine.step(), count + 1
                found.append([[its[1::2] for its in outputs if its.id == number] for number in range(2)])
                calls.append(count)
            engine._state = dataclasses.replace(engine._state, settings=settings)
            assert found[0] == found[1]  # tokens, and what ended them
            if stop is None and Level.of(sampler, forbids=False, logprobs=id == 1) < Level.ALL:
                assert calls[1] < calls[0] - 4


def test_log_probabilities_are_those_of_the_runner(rng: np.random.Generator) -> None:
    engine = shared_engine("gpt_oss")
    prompt = rng.integers(256, size=21).tolist()
    sampler = Sampler(temperature=1, seed=1)
    engine.submit(Generate(1, tuple(prompt), 5, sampler, logprobs=True))
    engine.submit(Generate(2, tuple(prompt), 5))
    outputs = finish(engine)
    assert all(output.logprobs is None for output in outputs if output.id == 2)
    steps = runner("gpt_oss").generate([prompt], sampler, 5, logprobs=20)
    for output, tokens in zip([output for output in outputs if output.id == 1], steps, strict=True):
        assert output.token == tokens[0]
        assert steps.logprobs is not None
        assert output.logprobs is not None
        np.testing.assert_allclose(output.logprobs.chosen, steps.logprobs.chosen[0], atol=1e-4)
        np.testing.assert_allclose([value for _, value in output.logprobs.top], steps.logprobs.top[0], atol=1e-4)


def test_cancelled_requests_free_their_pages_and_others_go_on(rng: np.random.Generator) -> None:
    engine = shared_engine("gpt_oss")
    prompts = [tuple(rng.integers(256, size=20).tolist()) for _ in range(5)]
    requests = [Generate(id, prompt, 20) for id, prompt in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
    outputs = [output for _ in range(4) for output in engine.step()]
    for id in (0, 2, 4, 99):
        engine.cancel(id)
    before = len(outputs)
    finish(engine, outputs)
    assert {output.id for output in outputs[before:]} == {1, 3}
    for id in (1, 3):
        assert tokens_of(outputs, id) == alone("gpt_oss", requests[id])


def test_prefixes_are_reused_and_reported(rng: np.random.Generator) -> None:
    engine = shared_engine("gpt_oss")
    prompt = tuple(rng.integers(256, size=40).tolist())
    cached = []
    for id, salt in enumerate((b"", b"", b"other")):
        engine.submit(Generate(id, prompt, 3, salt=salt))
        outputs = finish(engine)
        assert tokens_of(outputs, id) == alone("gpt_oss", Generate(id, prompt, 3))
        cached.append([output.cached for output in outputs])
    assert cached == [[0, 0, 0], [32, 0, 0], [0, 0, 0]]


def test_the_load_of_experts_is_counted() -> None:
    engine = shared_engine("gpt_oss")
    config = model("gpt_oss").config
    before = engine.statistics.load.sum() if engine.statistics.load.size else 0
    engine.statistics.steps = 0
    engine.submit(Generate(0, (1, 2, 3, 4, 5), 1))
    finish(engine)
    load = engine.statistics.load
    assert load.shape == (config.num_hidden_layers, config.num_experts)
    assert load.sum() - before == 5 * config.num_hidden_layers * config.top_k


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Generate(0, (), 1), "prompt"),
        (Generate(0, (10**6,), 1), "must be in 0"),
        (Generate(0, (1,), 0), "`max_new_tokens`"),
        (Generate(0, (1,) * 70, 3), "together at most 72"),
        (Generate(0, (1,), 3, banned=(-1,)), "banned"),
    ],
)
def test_wrong_requests_are_errors(request_: Generate, message: str) -> None:
    engine = shared_engine("gpt_oss")
    with pytest.raises(ValueError, match=message):
        engine.submit(request_)
    assert engine.is_idle


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_users": 0}, "`max_users` .=0. must be at least 1"),
        ({"page": 1.5}, "`page` .*must be an integer"),
        ({"reuse": None}, "`reuse`"),
        ({"cache_tokens": 71}, "`cache_tokens` .=71. must be at least `max_length` .=72."),
    ],
)
def test_wrong_limits_are_errors(change, message) -> None:
    given = {"max_users": 3, "max_length": 72, "cache_tokens": 160, "page": 16} | change
    with pytest.raises((TypeError, ValueError), match=message):
        Limits(**given)


@pytest.mark.parametrize("users", [1, 2, 3, 8, 100, 256])
def test_there_are_few_programs_and_one_for_each_step(users: int) -> None:
    limits = Limits(max_users=users)
    sizes = limits.sizes()
    assert len(sizes) <= 8
    for rows in range(users + 1):
        for blocks in range(limits.max_blocks + 1):
            assert any(size[0] >= rows and size[1] >= blocks for size in sizes)


RUN_EXPORTED = """import sys, jax, numpy as np
import jax.export

folder, = sys.argv[1:]
step = jax.export.deserialize(open(f"{folder}/step", "rb").read())
lists = [np.load(f"{folder}/{name}.npz") for name in ("weights", "device", "inputs")]
left, results = step.call(*([its[name] for name in sorted(its)] for its in lists))
np.savez(f"{folder}/results.npz", *results)
assert not [name for name in sys.modules if name.startswith("jmx")]
"""


@pytest.mark.slow
def test_an_exported_step_runs_without_model_code(tmp_path: pathlib.Path, rng: np.random.Generator) -> None:
    """Rows at positions of random pages, with a token each that the host gives."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = text_checkpoints.write(pathlib.Path(folder, "gpt_oss"), "gpt_oss", layers=2)
        engine = Engine(load(checkpoint, dtype=jnp.float32, backend="xla"), LIMITS)
    exported = engine.export(3)
    inputs = engine._sizes.padding(3, 0)
    for tables, pool in zip(inputs.tables, engine._state.pools[0], strict=True):
        tables[:] = rng.integers(1, pool.size + 1, tables.shape)
    inputs.positions[:], inputs.row_tokens[:] = rng.integers(72, size=3), rng.integers(256, size=3)
    inputs.counts[:], inputs.slots[:], inputs.draws[:] = 1, np.arange(3), True
    pages = [jnp.asarray(rng.standard_normal(its.shape), its.dtype) for its in engine._device.pages]
    device = engine._device._replace(pages=pages)
    (tmp_path / "step").write_bytes(exported.program.serialize())
    for name, tree in {"weights": engine._weights, "device": device, "inputs": inputs}.items():
        leaves: dict[str, Any] = {f"{number:04}": np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(tree))}
        np.savez(tmp_path / f"{name}.npz", **leaves)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", RUN_EXPORTED, tmp_path], cwd=tmp_path, env=environment, check=True)
    _, results, _ = engine._programs.run(jax.tree.map(jnp.copy, device), inputs, Level.ALL, counts_load=False)
    got = np.load(tmp_path / "results.npz")
    assert exported.results[0] == ".tokens"
    np.testing.assert_array_equal(got["arr_0"], results.tokens)
    assert len(exported.inputs) == len(jax.tree.leaves(inputs))


MESHES = [{"ep": 2}, {"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}, {"both": 2}]
MESHES = [{"dp": 2, "ep": 2}, *(pytest.param(axes, marks=pytest.mark.slow) for axes in MESHES)]
# An axis "both" divides requests and experts, whose tokens are exchanged.
AXES = {"expert": ("ep", "both"), "heads": ("ep", "tp"), "token": ("dp", "both")}


@pytest.mark.devices(4)
@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "x".join(axes))
@pytest.mark.parametrize("name", NAMES)
def test_a_mesh_gives_the_same_tokens(name: str, axes: dict[str, int], rng: np.random.Generator) -> None:
    """With every sampler, prompts that share pages, and too few pages; of dp, each group has what one device has."""
    mesh = jax.make_mesh((*axes.values(),), (*axes,), axis_types=(AxisType.Auto,) * len(axes))
    named = {key: tuple(name for name in names if name in axes) for key, names in AXES.items()}
    options: Any = {"dtype": jnp.float32, "mesh": mesh, "axes": named}
    if name in CHECKPOINTS:
        named["intermediate"] = ()  # their experts are floats
        divided = load(CHECKPOINTS[name], **options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            divided = load(text_checkpoints.write(pathlib.Path(folder, name), name, layers=2), **options)
    groups, vocabulary = divided.split.ways("token"), divided.config.vocab_size
    limits = dataclasses.replace(LIMITS, max_users=groups * 3, cache_tokens=groups * 128, prompt_tokens=groups * 32)
    engine = Engine(divided, limits)
    shared = rng.integers(vocabulary, size=32).tolist()
    prompts = [(*shared[: 8 + 8 * (id % 4)], *rng.integers(vocabulary, size=4).tolist()) for id in range(9)]
    requests = [Generate(id, prompt, 36, SAMPLERS[id % 6], logprobs=id == 4) for id, prompt in enumerate(prompts)]
    outputs: list[Output] = []
    for request in requests:
        engine.submit(request)
        outputs += engine.step()
    finish(engine, outputs)
    for request in requests:
        assert tokens_of(outputs, request.id) == alone(name, request)
    assert engine.statistics.cached_tokens > 0
    assert engine.statistics.preempted > 0 or None not in engine._sizes.pools.windows  # windows need few pages
    assert engine.statistics.load.sum() > 0


@pytest.mark.devices(2)
def test_requests_that_groups_of_devices_do_not_divide_are_an_error() -> None:
    split = ModelSplit.of(jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Auto,)))
    divided = from_source(random_source(model("gpt_oss").config), split=split)
    with pytest.raises(ValueError, match=r"`max_users` \(=3\) must be a multiple of 2"):
        Engine(divided, LIMITS)
    with pytest.raises(ValueError, match=r"`cache_tokens` \(=140\) must be at least 144"):
        Engine(divided, dataclasses.replace(LIMITS, max_users=4, cache_tokens=140))


def test_answers_fit_a_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random ones, beside others that are free, and without spaces, which are banned."""
    pytest.importorskip("llguidance")
    engine = shared_engine("gpt_oss")
    tokenizer = text_checkpoints.make_tokenizer(("<s>", "</s>", *map(str, range(7))))  # without gpt-oss' channels
    end: Any = tokenizer.token_to_id("</s>")
    monkeypatch.setattr(engine, "_guides", Guides(tokenizer, model("gpt_oss").config.vocab_size, [end]))
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}, "b": {"type": "boolean"}}}
    grammar = check_schema(schema | {"required": ["a", "b"], "additionalProperties": False})
    spaces = tuple(tokenizer.encode(" \n\t\r", add_special_tokens=False).ids)
    free = Generate(9, (3, 4), 30, Sampler(temperature=1, seed=1))
    engine.submit(free)
    for id in range(4):
        sampler = Sampler(temperature=1.5, seed=id)
        engine.submit(Generate(id, (5, id), 40, sampler, frozenset({end}), banned=spaces, grammar=grammar))
    outputs = finish(engine)
    for id in range(4):
        text: list[Any]
        *text, last = tokens_of(outputs, id)
        assert last == end
        found = json.loads(tokenizer.decode(text))
        assert found["a"] in ("yes", "no")
        assert found["b"] in (True, False)
    assert tokens_of(outputs, 9) == alone("gpt_oss", free)


def test_a_grammar_needs_guides() -> None:
    with pytest.raises(ValueError, match="`grammar` must be None"):
        shared_engine("gpt_oss").submit(Generate(0, (1,), 2, grammar="{}"))
