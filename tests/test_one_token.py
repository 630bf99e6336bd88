"""The kernel of one token up to the router: on a CPU that emulates its threads, its definition, and where it is used."""

import ctypes
import pathlib
import shutil
import subprocess
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_steps import relative_error
from test_few_rows import draw

from jmx.ffi.one_token import call
from jmx.selection.environment import Environment

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ROOT / "jmx" / "ffi" / "one_token" / "src"
H200 = Environment.named("h200")
EPSILONS = 1e-5, 1e-6


def operands(
    rng: np.random.Generator,
    *,
    hidden: int = 160,
    kv_heads: int = 2,
    group: int = 1,
    experts: int = 9,
    capacity: int = 256,
    position: int = 100,
    page: int | None = None,
    bias: bool = True,
    sinks: bool = True,
) -> call.Operands:
    dim, number = call.DIM, 1 if page is None else capacity // page
    rows, columns = kv_heads * (group + 2) * dim, kv_heads * group * dim
    of_page = capacity if page is None else page
    pages = 1 if page is None else number + 2
    cache = rng.standard_normal((2, pages, kv_heads, of_page, dim))
    tables = None if page is None else rng.permutation(pages)[None, :number].astype(np.int32)
    # What is after the position, and at it, was never written.
    at = np.arange(capacity)
    for place in at[at >= min(position, capacity - 1)]:
        cache[:, 0 if tables is None else tables[0, place // of_page], :, place % of_page] = np.nan

    def vector(size: int, mean: float = 0) -> jax.Array:
        return draw(rng, size, dtype=jnp.float32, mean=mean)

    return call.Operands(
        x=draw(rng, 1, hidden),
        scale=vector(hidden, 1),
        heads=draw(rng, rows, hidden) / hidden**0.5,
        heads_bias=draw(rng, rows) if bias else None,
        cos=vector(dim // 2)[None],
        sin=vector(dim // 2)[None],
        cache=jnp.asarray(cache, jnp.bfloat16),
        tables=None if tables is None else jnp.asarray(tables),
        position=jnp.asarray([position], jnp.int32),
        sinks=vector(kv_heads * group) if sinks else None,
        out=draw(rng, hidden, columns) / columns**0.5,
        out_bias=draw(rng, hidden) if bias else None,
        router_scale=vector(hidden, 1),
        router=draw(rng, experts, hidden) / hidden**0.5,
        router_bias=draw(rng, experts) if bias else None,
    )


def defined(given: call.Operands, window: int | None) -> call.Results:
    return jax.jit(partial(call.run, window, *EPSILONS))(given)


def check(got: call.Results, expected: call.Results, before: Any) -> None:
    """Results are those of the definition but for rounding, and nothing else in the cache changed."""
    for its, other in zip((got.x, got.logits, got.normed), (expected.x, expected.logits, expected.normed), strict=True):
        assert relative_error(np.asarray(its, np.float32), np.asarray(other, np.float32)) <= 1e-2
    cache, other, before = (np.asarray(its, np.float32) for its in (got.cache, expected.cache, before))
    written = (other != before) & ~(np.isnan(other) & np.isnan(before))
    assert np.array_equal(cache[~written], before[~written], equal_nan=True)
    assert relative_error(cache[written], other[written]) <= 1e-2


# The kernel's source, on this CPU

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
    "kept",
]
NUMBERS = ["hidden", "kv_heads", "group", "experts", "page", "num_pages"]


class Arguments(ctypes.Structure):
    """`Call` of call.h."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in POINTERS]
        + [(name, ctypes.c_int) for name in NUMBERS]
        + [("part_stride", ctypes.c_longlong), ("window", ctypes.c_int), ("slots", ctypes.c_int)]
        + [("epsilon", ctypes.c_float), ("router_epsilon", ctypes.c_float)]
    )


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel as a function of this CPU."""
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
    emulator: ctypes.CDLL,
    given: call.Operands,
    window: int | None,
    num_ctas: int,
    num_launches: int,
    slots: int,
    seed: int,
) -> call.Results:
    """The results of the kernel's source on this CPU."""

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
        "logits": aligned(np.zeros((1, len(given.router)), np.float32)),
        "normed": aligned(np.zeros(given.x.shape, np.uint16)),
        "kept": None,
    }
    names = {"heads": "heads_weights", "out": "out_weights", "router": "router_weights"}
    arrays = {names.get(name, name): array for name, array in held.items()} | made
    pointers = {name: None if array is None else array.ctypes.data for name, array in arrays.items()}
    its = Arguments(
        **pointers,
        hidden=given.x.shape[1],
        kv_heads=kv_heads,
        group=columns // call.DIM // kv_heads,
        experts=len(given.router),
        page=page,
        num_pages=1 if given.tables is None else given.tables.shape[1],
        part_stride=given.cache.size // 2,
        window=window or 0,
        slots=slots,
        epsilon=EPSILONS[0],
        router_epsilon=EPSILONS[1],
    )
    assert emulator.emulate(its, num_ctas, num_launches, ctypes.c_uint(seed)) == 0

    def floats(array: np.ndarray) -> np.ndarray:
        return array.view(jnp.bfloat16)

    cache = held["cache"]
    assert cache is not None
    return call.Results(floats(made["x_out"]), floats(cache), made["logits"], floats(made["normed"]))


@pytest.mark.costly
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("num_ctas", "slots", "window", "options"),
    [
        (6, 16, None, {}),
        (6, 40, 33, {"position": 255, "bias": False}),
        (7, 17, 1, {"position": 0, "sinks": False}),
        (6, 19, None, {"position": 400, "page": 16}),  # beyond the last position
        (6, 23, 128, {"position": 128, "page": 128}),
        (8, 40, None, {"capacity": 1024, "position": 1000, "page": 128}),  # four splits
        (7, 40, None, {"capacity": 1024, "position": 1023, "sinks": False}),
        (4, 21, None, {"kv_heads": 1, "group": 2, "position": 256, "capacity": 512}),
        (10, 18, 17, {"kv_heads": 1, "group": 8, "hidden": 40, "experts": 31}),
        (3, 40, None, {"kv_heads": 1, "hidden": 72, "experts": 5, "position": 15}),
    ],
)
def test_the_kernel_on_emulated_threads_computes_its_definition(rng, emulator, num_ctas, slots, window, options):
    given = operands(rng, **options)
    got = emulate(emulator, given, window, num_ctas, 1, slots, seed=int(rng.integers(1 << 30)))
    check(got, defined(given, window), given.cache)
