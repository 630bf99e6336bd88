"""The kernels of one token up to the router: on emulated threads, their definition, and where models use them."""

import ctypes
import pathlib
import re
import shutil
import subprocess
from functools import partial
from typing import Any

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from model_steps import decode_step, relative_error
from sass import early_releases, parse
from test_few_rows import arguments_of_step, draw, tiny_model

from jmx.ffi import nvrtc
from jmx.ffi.one_token import library
from jmx.models.one_token import call, sublayer
from jmx.pallas.few_rows import choice
from jmx.selection.environment import Environment

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ROOT / "jmx" / "ffi" / "one_token" / "src"
H200 = Environment.named("h200")
EPSILONS = 1e-5, 1e-6
KERNELS = ("heads", "attention", "out", "router")


def operands(
    rng: np.random.Generator,
    *,
    hidden: int = 160,
    kv_heads: int = 2,
    group: int = 1,
    experts: int = 9,
    capacity: int = 256,
    position: int | tuple[int, ...] = 100,
    page: int | None = None,
    bias: bool = True,
    sinks: bool = True,
) -> call.Operands:
    positions = position if isinstance(position, tuple) else (position,)
    tokens = len(positions)
    dim, number = call.DIM, 1 if page is None else capacity // page
    rows, columns = kv_heads * (group + 2) * dim, kv_heads * group * dim
    of_page = capacity if page is None else page
    pages = tokens if page is None else tokens * number + 2
    cache = rng.standard_normal((2, pages, kv_heads, of_page, dim))
    tables = (
        None if page is None else rng.permutation(pages)[: tokens * number].reshape(tokens, number).astype(np.int32)
    )
    # What is after the position, and at it, was never written.
    at = np.arange(capacity)
    for token, position in enumerate(positions):
        for place in at[at >= min(position, capacity - 1)]:
            page = token if tables is None else tables[token, place // of_page]
            cache[:, page, :, place % of_page] = np.nan

    def vector(size: int, mean: float = 0) -> jax.Array:
        return draw(rng, size, dtype=jnp.float32, mean=mean)

    angles = vector(tokens * dim // 2).reshape(tokens, -1)
    return call.Operands(
        x=draw(rng, tokens, hidden),
        scale=vector(hidden, 1),
        heads=draw(rng, rows, hidden) / hidden**0.5,
        heads_bias=draw(rng, rows) if bias else None,
        cos=jnp.cos(angles),
        sin=jnp.sin(angles),
        cache=jnp.asarray(cache, jnp.bfloat16),
        tables=None if tables is None else jnp.asarray(tables),
        position=jnp.asarray(positions, jnp.int32),
        sinks=vector(kv_heads * group) if sinks else None,
        out=draw(rng, hidden, columns) / columns**0.5,
        out_bias=draw(rng, hidden) if bias else None,
        router_scale=vector(hidden, 1),
        router=draw(rng, experts, hidden) / hidden**0.5,
        router_bias=draw(rng, experts) if bias else None,
    )


def defined(given: call.Operands, window: int | None) -> call.Results:
    """The results of the definition."""
    return call.Results(*jax.jit(call.OneToken(window, *EPSILONS).define)(given))


def check(got: call.Results, given: call.Operands, window: int | None) -> None:
    """Results are those of the definition but for rounding, and nothing else in the cache changed."""
    expected, before = defined(given, window), given.cache
    for its, other in zip((got.x, got.logits, got.normed), (expected.x, expected.logits, expected.normed), strict=True):
        assert relative_error(np.asarray(its, np.float32), np.asarray(other, np.float32)) <= 1e-2
    cache, other, before = (np.asarray(its, np.float32) for its in (got.cache, expected.cache, before))
    written = (other != before) & ~(np.isnan(other) & np.isnan(before))
    assert np.array_equal(cache[~written], before[~written], equal_nan=True)
    assert relative_error(cache[written], other[written]) <= 1e-2


# The kernels' source, on this CPU

POINTERS = [
    "x",
    "scale",
    "heads_weights",
    "heads_bias",
    "cos",
    "sin",
    "cache",
    "tables",
    "position",
    "sinks",
    "out_weights",
    "out_bias",
    "router_scale",
    "router_weights",
    "router_bias",
    "x_out",
    "logits",
    "normed",
    "heads",
    "attended",
]
NUMBERS = ("tokens", "hidden", "kv_heads", "group", "experts", "page", "num_pages")


class Arguments(ctypes.Structure):
    """`Call` of call.h."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in POINTERS]
        + [(name, ctypes.c_int) for name in NUMBERS]
        + [
            ("part_stride", ctypes.c_longlong),
            ("window", ctypes.c_int),
            ("splits", ctypes.c_int),
            ("processors", ctypes.c_int),
        ]
        + [("epsilon", ctypes.c_float), ("router_epsilon", ctypes.c_float)]
    )


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels as a function of this CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("emulated")
    for file in SOURCES.iterdir():
        shutil.copy(file, folder)
    shutil.copy(ROOT / "tests" / "emulated_primitives.h", folder / "primitives.cuh")
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-I", str(folder)]
    library = folder / "emulate.so"
    subprocess.run([compiler, *flags, str(ROOT / "tests" / "emulate_one_token.cc"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def emulate(
    emulator: ctypes.CDLL, given: call.Operands, window: int | None, *, splits: int, processors: int, seed: int
) -> call.Results:
    """The results of the kernels' source on this CPU."""

    def bits(array: Any) -> np.ndarray:
        found = np.array(array)
        return found.view(np.uint16) if found.dtype == jnp.bfloat16 else found

    def aligned(array: np.ndarray) -> np.ndarray:
        memory = np.empty(array.nbytes + 16, np.uint8)
        start = -memory.ctypes.data % 16
        found = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        found[...] = array
        return found

    held = {name: None if array is None else aligned(bits(array)) for name, array in given._asdict().items()}
    kv_heads, page = given.cache.shape[2:4]
    columns = given.out.shape[1]
    made = {
        "x_out": aligned(np.zeros(given.x.shape, np.uint16)),
        "logits": aligned(np.zeros((len(given.x), len(given.router)), np.float32)),
        "normed": aligned(np.zeros(given.x.shape, np.uint16)),
        "heads": aligned(np.zeros((len(given.x), len(given.heads)), np.uint16)),
        "attended": aligned(np.zeros((len(given.x), columns), np.uint16)),
    }
    names = {"heads": "heads_weights", "out": "out_weights", "router": "router_weights"}
    arrays = {names.get(name, name): array for name, array in held.items()} | made
    pointers = {name: None if array is None else array.ctypes.data for name, array in arrays.items()}
    its = Arguments(
        **pointers,
        tokens=len(given.x),
        hidden=given.x.shape[1],
        kv_heads=kv_heads,
        group=columns // call.DIM // kv_heads,
        experts=len(given.router),
        page=page,
        num_pages=1 if given.tables is None else given.tables.shape[1],
        part_stride=given.cache.size // 2,
        window=window or 0,
        splits=splits,
        processors=processors,
        epsilon=EPSILONS[0],
        router_epsilon=EPSILONS[1],
    )
    assert emulator.emulate(its, ctypes.c_uint(seed)) == 0

    def floats(array: np.ndarray) -> np.ndarray:
        return array.view(jnp.bfloat16)

    cache = held["cache"]
    assert cache is not None
    return call.Results(floats(made["x_out"]), floats(cache), made["logits"], floats(made["normed"]))


@pytest.mark.costly
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("splits", "window", "options"),
    [
        (1, None, {}),
        (2, 33, {"position": 255, "bias": False}),
        (1, 1, {"position": 0, "sinks": False}),
        (3, None, {"position": 400, "page": 16}),  # beyond the last position
        (1, 128, {"position": 128, "page": 128}),
        (8, None, {"capacity": 1024, "position": 1000, "page": 128}),
        (4, None, {"capacity": 1024, "position": 1023, "sinks": False}),
        (8, None, {"kv_heads": 1, "group": 2, "position": 20, "capacity": 512}),  # most splits have no keys
        (2, 17, {"kv_heads": 1, "group": 8, "hidden": 40, "experts": 31}),
        (5, None, {"kv_heads": 1, "group": 3, "hidden": 72, "experts": 5, "position": 150}),
        (1, None, {"kv_heads": 1, "group": 1, "hidden": 3080, "experts": 2, "position": 15}),
        (2, None, {"position": (100, 7)}),
        (1, 33, {"position": (0, 255, 40), "page": 16, "group": 3, "bias": False}),
        (3, None, {"position": (300, 2, 255, 90, 91), "kv_heads": 1, "hidden": 200, "experts": 30, "sinks": False}),
        (1, None, {"capacity": 1024, "position": (1000, 650), "kv_heads": 1, "page": 64}),  # slots are used again
        (2, 128, {"position": (5, 140, 130, 255, 17, 64, 0, 128), "kv_heads": 1, "group": 8, "hidden": 1096}),
    ],
)
def test_the_kernels_on_emulated_threads_compute_their_definition(rng, emulator, splits, window, options):
    given = operands(rng, **options)
    seed = int(rng.integers(1 << 30))
    check(emulate(emulator, given, window, splits=splits, processors=int(rng.integers(1, 9)), seed=seed), given, window)


def test_sizes_are_those_of_the_source():
    constants: dict[str, int] = {}
    for line in re.findall(r"constexpr int (k[^;]*);", (SOURCES / "call.h").read_text()):
        for name, value in re.findall(r"(k\w+) = ([^,]+)", line):
            constants[name] = eval(value, {}, constants)
    names = "MOST_TOKENS", "DIM", "MOST_GROUP", "MOST_COLUMNS", "VECTOR"
    for name in names:
        assert constants["k" + name.title().replace("_", "")] == getattr(call, name)


@pytest.mark.aot
def test_the_kernels_compile_for_hopper(tmp_path):
    """No slot of a ring is freed before what was loaded from it is there."""
    try:
        image = nvrtc.compile_kernels(SOURCES, library.HEADERS, "sm_90a")
    except OSError as e:
        pytest.skip(f"needs NVRTC, which the `aot` extra installs: {e}")
    programs = {name: parse(text) for name, text in aot.sass_of(image, tmp_path).items()}
    assert programs.keys() == {f"jmx_{kind}_{name}" for kind in ("one_token", "few_tokens") for name in KERNELS}
    assert [early for program in programs.values() for early in early_releases(program)] == []


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(Environment.probe().compute_capability != choice.CAPABILITY, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("window", "options"),
    [
        (128, {}),
        (None, {}),
        (None, {"page": 128}),
        (128, {"page": 128, "position": 127}),
        (None, {"position": 0}),
        (128, {"position": 0, "bias": False, "sinks": False}),
        (None, {"capacity": 8192, "position": 8191}),
        (None, {"capacity": 8192, "position": 9000, "bias": False}),
        (None, {"hidden": 1024, "kv_heads": 2, "group": 4, "experts": 32, "position": 300}),
        (3, {"hidden": 4096, "experts": 300, "position": 200}),
        (128, {"position": (1100, 5, 128, 1151, 0, 127, 500, 900)}),
        (None, {"position": (1100, 5, 128, 1151, 0, 127, 500, 900)}),
        (None, {"position": (1100, 700), "page": 128, "bias": False}),
        (128, {"position": (8191, 9000, 3), "capacity": 8192, "page": 64, "sinks": False}),
        (None, {"position": (300, 200, 100, 3, 2), "hidden": 4096, "kv_heads": 2, "group": 4, "experts": 30}),
        (None, {"position": (8191, 4000, 9000, 7000), "capacity": 8192}),
    ],
)
def test_the_kernels_compute_their_definition_on_a_gpu(rng, window, options):
    fault = library.library().fault
    if fault is not None:
        pytest.skip(fault)
    sizes = {"hidden": 2880, "kv_heads": 8, "group": 8, "experts": 128, "capacity": 1152, "position": 1100}
    given = operands(rng, **sizes | options)
    step = jax.jit(partial(call.run, window, *EPSILONS))
    assert library.TARGET in step.lower(given).as_text()
    check(step(given), given, window)


# Where they are used


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"page": 128}, None),
        ({"bias": False, "sinks": False}, None),
        ({"position": (1,) * 8}, None),
        ({"position": (1,) * 9}, "tokens (=9) must be at most 8"),
        ({"hidden": 2884}, "columns of `heads` (=2884) must be a multiple of 8 and at most 4096"),
        ({"hidden": 4104}, "columns of `heads` (=4104) must be a multiple of 8 and at most 4096"),
        ({"kv_heads": 17, "group": 4}, "columns of `out` (=4352) must be a multiple of 8 and at most 4096"),
        ({"group": 9, "kv_heads": 1}, "queries to a key head (=9) must be at most 8"),
    ],
    ids=str,
)
def test_operands_are_rejected_with_the_reason(changes, reason):
    sizes = {"hidden": 2880, "kv_heads": 8, "group": 8, "experts": 128, "capacity": 256, "position": 1} | changes
    given = jax.eval_shape(partial(operands, np.random.default_rng(0), **sizes))
    assert call.reject_reason(given, H200) == reason


def test_other_machines_and_types_are_rejected(rng):
    given = operands(rng)
    assert call.reject_reason(given, H200) is None
    a100 = Environment.named("a100")
    assert call.reject_reason(given, a100) == "needs a GPU of compute capability 9.0 (this is 8.0)"
    wide = given._replace(out=given.out.astype(jnp.float32))
    assert call.reject_reason(wide, H200) == "`out` (of float32) must be bfloat16"
    half = given._replace(cos=given.cos[:, :16], sin=given.sin[:, :16])
    assert call.reject_reason(half, H200) == "channels of a head (=64) must be 64, all of them rotated (=32)"


@pytest.fixture
def by_definition(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Models call the kernels wherever their operands fit, by their definition; windows of the calls traced."""
    traced: list[int | None] = []

    def run(window: int | None, *rest: Any) -> call.Results:
        traced.append(window)
        return plain(window, *rest)

    plain = call.run
    monkeypatch.setattr(call, "run", run)
    monkeypatch.setattr(call, "reject_reason", lambda *_: None)
    monkeypatch.setattr(sublayer, "library", library.Library)
    return traced


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.costly
@pytest.mark.parametrize(("rows", "paged"), [(1, False), (1, True), (3, False), (2, True)])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_steps_of_a_model_are_those_of_plain_code(rng, by_definition, monkeypatch, family, rows, paged):
    model = tiny_model(family, rng)
    step = arguments_of_step(model, rng, rows, paged)
    got = decode_step(model, *step)
    assert {*by_definition} == {layer.attention.window for layer in model.layers}
    monkeypatch.setattr(call, "reject_reason", lambda *_: "no")
    jax.clear_caches()
    by_definition.clear()
    expected = decode_step(model, *step)
    assert not by_definition
    for its, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert relative_error(its.astype(jnp.float32), other.astype(jnp.float32)) <= 2e-2


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.costly
def test_normed_heads_are_left_to_other_code(rng, by_definition):
    model = tiny_model("qwen3_moe", rng)
    caches = [draw(rng, *its.shape) for its in model.cache_layers(1, 16)]
    decode_step(model, jnp.zeros(1, jnp.int32), jnp.full(1, 5, jnp.int32), caches)
    assert not by_definition


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.costly
def test_derivatives_and_maps_are_those_of_the_definition(rng):
    given = operands(rng, capacity=16, position=7)
    given = given._replace(cache=jnp.nan_to_num(given.cache))
    its = call.OneToken(5, *EPSILONS)

    def by_run(x: jax.Array) -> Any:
        return call.run(5, *EPSILONS, given._replace(x=x))

    def by_define(x: jax.Array) -> Any:
        return call.Results(*its.define(given._replace(x=x)))

    def loss(function: Any, x: jax.Array) -> jax.Array:
        return jnp.stack([jnp.sum(jnp.sin(part.astype(jnp.float32))) for part in function(x)]).sum()

    got, expected = (jax.grad(partial(loss, function))(given.x) for function in (by_run, by_define))
    assert jnp.any(expected != 0)
    assert relative_error(got.astype(jnp.float32), expected.astype(jnp.float32)) <= 1e-2
    xs = draw(rng, 2, *given.x.shape)
    mapped = jax.vmap(by_run)(xs)
    for number, x in enumerate(xs):
        for part, other in zip(mapped, by_define(x), strict=True):
            assert relative_error(part[number].astype(jnp.float32), other.astype(jnp.float32)) <= 1e-2


def test_exported_programs_have_the_definition(rng):
    given = operands(rng, capacity=16, position=7)
    run = jax.jit(lambda *its: call.run(5, *EPSILONS, call.Operands(*its)))
    exported = export.export(run, platforms=["cuda"])(*given)
    assert f"custom_call @{library.TARGET}" not in exported.mlir_module()
