"""Attention kernels for Hopper GPUs against the plain code: interpreted, on a Hopper GPU, and compiled without one."""

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import aot
import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
import sass
from model_steps import relative_error

from jmx.models.attention.functions import NO_SINK, attend, flash_attention
from jmx.pallas.attention import prefill
from jmx.pallas.attention.decode import flash_decode
from jmx.pallas.attention.latent_decode import flash_decode_latent
from jmx.pallas.attention.prefill import flash_prefill
from jmx.pallas.attention.schedule import BLOCK, Items, plan
from jmx.pallas.attention.softmax import LEAST, MERGED, RunningSoftmax, SplitResults
from jmx.selection.environment import Environment

pytestmark = pytest.mark.costly

BF16 = jnp.bfloat16
CORES = 132
SHARED_MEMORY = 227 * 1024  # bytes that a CTA can have
TOLERANCE = 4e-3
on_hopper = pytest.mark.skipif(Environment.probe().compute_capability != (9, 0), reason="needs a Hopper GPU")
last_phases_may_be_skipped = pytest.mark.skipif(
    jax.__version_info__ < (0, 12),
    reason="before jax 0.12 the interpreter refused barriers whose last phases no thread waits for",
)


def qkv(rng: np.random.Generator, batch: int, length: int, group: int, dim: int, value_dim: int) -> list[jax.Array]:
    """bfloat16 (B, T, heads, D or V): queries, and the keys and values of two heads that groups of them share."""
    shapes = ((2 * group, dim), (2, dim), (2, value_dim))
    return [jnp.asarray(2 * rng.standard_normal((batch, length, *shape)), BF16) for shape in shapes]


@partial(jax.jit, static_argnames=("window", "scale"))
def in_float32(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    sinks: jax.Array,
    starts: jax.Array,
    window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """`attend`, of keys and values (B, C, kv_heads, D or V)."""
    query, keys, values = (array.astype(jnp.float32) for array in (query, keys, values))
    return attend(query, keys.swapaxes(1, 2), values.swapaxes(1, 2), sinks, starts, window, scale)


def plain(*arrays: Any, starts: Any = 0, **options: Any) -> np.ndarray:
    """`in_float32` of queries from `starts` on, on the CPU, which compiles it faster than a GPU."""
    starts = np.broadcast_to(np.asarray(starts, np.int32), len(arrays[0]))
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(in_float32(*map(np.asarray, arrays), starts, **options))


def check_prompt(
    rng: np.random.Generator,
    length: int,
    group: int,
    sizes: tuple[int, int],
    window: int | None,
    batch: int = 2,
    cores: int | None = CORES,
) -> None:
    """Both kernels for keys and values of heads on one problem, the one for a token at two positions."""
    query, keys, values = qkv(rng, batch, length, group, *sizes)
    sinks = jnp.asarray(3 * rng.standard_normal(2 * group), jnp.float32)
    expected = plain(query, keys, values, sinks, window=window, scale=0.1)
    assert relative_error(flash_prefill(query, keys, values, sinks, window, 0.1, cores), expected) <= TOLERANCE
    if sizes[0] == sizes[1]:
        expected = plain(query, keys, values, sinks, window=window)
        held, rows = jnp.stack([keys, values]).swapaxes(2, 3), np.arange(batch)
        at = np.append(rng.integers(length, size=batch - 1), length - 1)
        got = flash_decode(query[rows, at], held, sinks, jnp.asarray(at, jnp.int32), window)
        assert relative_error(got, expected[rows, at]) <= TOLERANCE


def check_latent(
    rng: np.random.Generator, heads: int, capacity: int, positions: list[int], sizes: tuple[int, int], cores: int
) -> None:
    """The kernel for latents; those beyond a row's position are large, and have no effect."""
    (width, rank), batch = sizes, len(positions)
    latents = rng.standard_normal((batch, capacity, width))
    for row, position in enumerate(positions):
        latents[row, position + 1 :] = 1e4
    latents = latents.astype(BF16)
    query = rng.standard_normal((batch, heads, width)).astype(BF16)
    keys, no_sinks = latents[:, :, None], np.full(heads, NO_SINK, np.float32)
    expected = plain(query[:, None], keys, keys[..., :rank], no_sinks, starts=positions, scale=0.1)[:, 0]
    starts = jnp.asarray(positions, jnp.int32)
    got = flash_decode_latent(jnp.asarray(query), jnp.asarray(latents), starts, rank, 0.1, cores)
    assert got.shape == (batch, heads, rank)
    for row in range(batch):
        assert relative_error(got[row], expected[row]) <= TOLERANCE


@pytest.mark.parametrize(
    ("ctas", "heads", "steps", "together"),
    [
        (132, 64, (*range(1, 33),), 8),
        (132, 64, (1, *[2] * 31), 16),
        (132, 37, (*range(1, 9),), 16),
        (7, 5, (1, 2, 3, *[4] * 6), 1),
        (45, 5, (*range(1, 10),), 2),
        (132, 64, (2, 3, 5, 6, 8, 8), 16),  # items of 192 queries of 1024
    ],
)
def test_a_plan_has_every_item_once_and_divides_the_steps_evenly(
    ctas: int, heads: int, steps: tuple[int, ...], together: int
) -> None:
    counts, *turns = plan(ctas, heads, steps, together)
    taken = [[turn[cta] for turn in turns[:count]] for cta, count in enumerate(counts)]
    assert sorted(item for its in taken for item in its) == [*range(heads * len(steps))]
    taking = [sum(steps[item % len(steps)] + 1 for item in its) for its in taken]
    assert max(taking) - min(taking) <= max(steps) + 1


@pytest.mark.parametrize(
    ("length", "heads", "window", "token_bytes", "together"),
    [
        (4096, 128, None, 640, 8),  # DeepSeek-V3
        (1024, 128, None, 640, 16),
        (65536, 128, None, 640, 1),
        (65536, 128, 4096, 640, 8),
        (4096, 64, None, 32, 16),  # gpt-oss
    ],
)
def test_heads_whose_keys_and_values_the_cache_holds_are_taken_together(
    length: int, heads: int, window: int | None, token_bytes: float, together: int
) -> None:
    schedule = Items(1, length, heads, window, CORES, token_bytes).schedule()
    assert schedule is not None
    blocks = length // BLOCK
    firsts = {divmod(int(number), blocks) for number in schedule[1]}  # head and block, of each CTA
    groups = -(-CORES // (together * blocks))
    assert {head for head, _ in firsts} <= {*range(groups * together)}
    assert {head for head, block in firsts if block == blocks - 1} >= {*range(together)}


@pytest.mark.parametrize("splits", [1, 3, MERGED, MERGED + 1, 2 * MERGED + 1, MERGED * MERGED])
def test_softmaxes_of_splits_are_merged(rng: np.random.Generator, splits: int) -> None:
    rows, keys, channels = (2, 30), 5, 4
    sinks = rng.choice([-1e30, -200.0, 0.0, 200.0], size=rows)
    scores = 40 * rng.standard_normal((splits, *rows, keys))
    scores[splits // 3 + 1 :: 3] = -np.inf  # splits without keys
    values = rng.standard_normal((splits, *rows, keys, channels))
    peaks = np.maximum(scores.max(-1), LEAST)
    weights = np.exp2(scores - peaks[..., None])
    parts = np.einsum("sbhk,sbhkc->sbhc", weights, values), peaks, weights.sum(-1)
    merged = SplitResults(*(jnp.asarray(part, jnp.float32) for part in parts)).merged()
    got = merged.results(jnp.asarray(sinks, jnp.float32))
    shares = np.exp2(scores - scores.max((0, 3), keepdims=True))
    total = shares.sum((0, 3)) + np.exp2(sinks - scores.max((0, 3)))
    expected = np.einsum("sbhk,sbhkc->bhc", shares, values) / total[..., None]
    assert relative_error(got, expected) <= 1e-4  # scores of 100 have no more digits in float32


# Interpreted


@contextlib.contextmanager
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs kernels on a CPU, where memory begins as NaN and races are found.

    jax's interpreter has no product whose first operand is in registers. The plain one that stands in for it reads
    values as no product of tensor cores does, so that a fence has to follow before they are overwritten.
    """

    def add_values(softmax: RunningSoftmax, weights: jax.Array, values: Any) -> RunningSoftmax:
        product = jnp.dot(weights.astype(values.dtype), values[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return softmax._replace(gathered=softmax.gathered + product)

    def add_values_and_score(
        softmax: RunningSoftmax,
        weights: jax.Array,
        values: Any,
        rows: Any,
        keys: Any,
        queued: Callable[[], None],
        read: Callable[[], None],
    ) -> tuple[RunningSoftmax, jax.Array]:
        def multiply(accumulator: Any) -> jax.Array:
            plgpu.wgmma(accumulator, rows, keys.transpose((1, 0)))
            queued()
            return accumulator[...]

        softmax = add_values(softmax, weights, values)
        accumulator = plgpu.ACC((rows.shape[0], keys.shape[0]), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        scores = pl.run_scoped(multiply, accumulator)
        read()
        return softmax, scores

    monkeypatch.setattr(RunningSoftmax, "add_values", add_values)
    monkeypatch.setattr(RunningSoftmax, "add_values_and_score", add_values_and_score)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


@last_phases_may_be_skipped
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("length", "group", "sizes", "window", "cores"),
    [
        (256, 1, (192, 128), None, None),
        (512, 1, (192, 128), None, 2),
        (256, 1, (192, 128), 100, 3),
        (256, 4, (64, 64), 100, 3),
        (384, 1, (64, 64), 129, 4),
        (128, 3, (80, 80), None, 2),
        (128, 8, (128, 128), 1, 12),
        (128, 1, (96, 96), 200, 1),
        (384, 1, (128, 128), None, 2),
        (640, 1, (64, 64), 300, 2),
    ],
)
def test_interpreted_kernels_attend_as_the_plain_code_does(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    length: int,
    group: int,
    sizes: tuple[int, int],
    window: int | None,
    cores: int | None,
) -> None:
    with interpreted(monkeypatch):
        check_prompt(rng, length, group, sizes, window, batch=1, cores=cores)


@last_phases_may_be_skipped
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("length", "cores"), [(128, None), (256, 2), (640, 3)])
def test_interpreted_consumers_that_are_three_attend_as_the_plain_code_does(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, length: int, cores: int | None
) -> None:
    monkeypatch.setattr(prefill, "LONG", 128)
    with interpreted(monkeypatch):
        check_prompt(rng, length, 2, (64, 64), None, batch=1, cores=cores)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("heads", [1, 16, 24, 80])
def test_the_interpreted_kernel_attends_to_latents_as_the_plain_code_does(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, heads: int
) -> None:
    with interpreted(monkeypatch):
        check_latent(rng, heads, 256, [int(rng.integers(256)), 255], (192, 128), cores=8)


# On a GPU


@pytest.fixture
def poisoned() -> None:
    """Fills the memory that results get next with NaN."""
    jax.block_until_ready([jnp.full(1 << 24, jnp.nan, jnp.float32) for _ in range(16)])


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("window", [None, 1, 128, 300])
@pytest.mark.parametrize(
    ("length", "group", "sizes"),
    [
        (128, 1, (64, 64)),
        (384, 8, (64, 64)),
        (2048, 16, (64, 64)),
        (640, 8, (128, 128)),
        (640, 4, (128, 128)),  # Mixtral's
        (384, 1, (128, 128)),
        (384, 3, (96, 96)),
        (384, 12, (128, 128)),  # GLM-4.5's
        (384, 2, (80, 80)),
        (384, 1, (192, 128)),  # DeepSeek-V2's
        (1024, 1, (192, 128)),
        (256, 1, (128, 64)),
    ],
)
def test_the_kernels_attend_as_the_plain_code_does(
    rng: np.random.Generator, length: int, group: int, sizes: tuple[int, int], window: int | None
) -> None:
    check_prompt(rng, length, group, sizes, window)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("cores", [None, 5, CORES])
@pytest.mark.parametrize("length", [128, 256, 384, 640, 1152, 4096])  # of which 192 queries divide one
@pytest.mark.parametrize("sizes", [(64, 64), (48, 32)])
def test_three_consumers_attend_as_the_plain_code_does(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    length: int,
    sizes: tuple[int, int],
    cores: int | None,
) -> None:
    monkeypatch.setattr(prefill, "LONG", 128)
    check_prompt(rng, length, 8, sizes, None, cores=cores)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("window", [None, 128])
def test_gradients_of_prompts_on_a_gpu(rng: np.random.Generator, window: int | None) -> None:
    *arrays, dout = (jnp.asarray(rng.standard_normal((2, 512, heads, 64)), BF16) for heads in (16, 2, 2, 16))
    arrays.append(jnp.asarray(rng.standard_normal(16), jnp.float32))

    @jax.jit
    def gradients(arrays: list[jax.Array], dout: jax.Array) -> Any:
        _, vjp = jax.vjp(lambda *arrays: flash_attention(*arrays, window, None), *arrays)
        return vjp(dout)

    @jax.jit
    def expected_gradients(arrays: list[jax.Array], dout: jax.Array) -> Any:
        starts = jnp.zeros(len(dout), jnp.int32)
        _, vjp = jax.vjp(lambda *arrays: in_float32(*arrays, starts, window=window), *arrays)
        return vjp(dout.astype(jnp.float32))

    wide = [array.astype(jnp.float32) for array in arrays]
    for got, expected in zip(gradients(arrays, dout), expected_gradients(wide, dout), strict=True):
        assert relative_error(got.astype(jnp.float32), expected) <= 1e-2


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("capacity", [64, 192, 1024, 8192])
@pytest.mark.parametrize("heads", [1, 16, 20, 64, 96, 128])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_kernel_attends_to_latents_as_the_plain_code_does(
    rng: np.random.Generator, heads: int, capacity: int, batch: int
) -> None:
    positions = [capacity - 1, 0, int(rng.integers(capacity))][:batch]
    check_latent(rng, heads, capacity, positions, (576, 512), CORES)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
def test_the_kernel_attends_to_latents_of_more_rows_than_the_gpu_has_sms(rng: np.random.Generator) -> None:
    check_latent(rng, 128, 256, rng.integers(256, size=150).tolist(), (576, 512), CORES)


# Compiled without one


def assert_sound(kernel: aot.Kernel) -> None:
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in kernel.report
    assert "wgmma" not in kernel.report, kernel.report  # C7510 and similar: products that were serialized
    assert kernel.shared_memory <= SHARED_MEMORY
    program = sass.parse(kernel.sass)
    assert sass.hazards(program) == []
    assert sass.early_releases(program) == []
    limits = sass.register_limits(program)
    assert all(used <= limit for limit, used in limits), limits


def compiled(
    capfd: pytest.CaptureFixture[str], function: Callable[..., Any], *shapes: Any, largest_temporary: float
) -> None:
    """Compiles a kernel for an H200, and checks its machine code and that scores are on the chip."""
    program, (kernel,) = aot.kernels_for_h200(capfd, function, *shapes)
    assert_sound(kernel)
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < largest_temporary


@pytest.mark.aot
@pytest.mark.parametrize(
    ("window", "heads", "kv_heads", "sizes"),
    [
        (None, 64, 8, (64, 64)),
        (128, 64, 8, (64, 64)),
        (None, 32, 4, (128, 128)),
        (None, 6, 2, (80, 80)),
        (None, 4, 4, (96, 96)),
        (None, 16, 16, (192, 128)),
    ],
)
def test_the_kernel_of_prompts_compiles_for_an_h200(
    window: int | None, heads: int, kv_heads: int, sizes: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    shape, (dim, value_dim), batch = jax.ShapeDtypeStruct, sizes, (1, 8192)
    query, keys = shape((*batch, heads, dim), BF16), shape((*batch, kv_heads, dim), BF16)
    values, sinks = shape((*batch, kv_heads, value_dim), BF16), shape((heads,), jnp.float32)
    kernel = partial(flash_prefill, window=window, core_count=CORES)
    compiled(capfd, kernel, query, keys, values, sinks, largest_temporary=1e6)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("window", "heads", "kv_heads", "dim"),
    [(None, 64, 8, 64), (128, 64, 8, 64), (None, 32, 4, 128), (None, 32, 8, 128), (None, 6, 2, 80), (None, 4, 4, 96)],
)
def test_the_kernel_of_steps_compiles_for_an_h200(
    window: int | None, heads: int, kv_heads: int, dim: int, capfd: pytest.CaptureFixture[str]
) -> None:
    shape = jax.ShapeDtypeStruct
    query, cache = shape((1, heads, dim), BF16), shape((2, 1, kv_heads, 8192, dim), BF16)
    rest = shape((heads,), jnp.float32), shape((1,), jnp.int32)
    compiled(capfd, partial(flash_decode, window=window), query, cache, *rest, largest_temporary=1e6)


@pytest.mark.aot
@pytest.mark.parametrize("heads", [16, 128])
def test_the_kernel_of_latents_compiles_for_an_h200(heads: int, capfd: pytest.CaptureFixture[str]) -> None:
    def call(query: jax.Array, latents: jax.Array, positions: jax.Array) -> jax.Array:
        return flash_decode_latent(query, latents, positions, 512, 0.1, CORES)

    batch, shape = 2, jax.ShapeDtypeStruct
    query, latents = shape((batch, heads, 576), BF16), shape((batch, 8192, 576), BF16)
    results = 1.1 * CORES * 64 * 512 * 4  # of at most one CTA an SM
    compiled(capfd, call, query, latents, shape((batch,), jnp.int32), largest_temporary=results)


@pytest.mark.aot
@pytest.mark.parametrize("latent", [False, True])
def test_results_of_splits_are_merged_by_one_kernel(latent: bool) -> None:
    shape, position = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((1,), jnp.int32)
    if latent:
        call = partial(flash_decode_latent, rank=512, scale=0.1, core_count=CORES)
        arguments = shape((1, 16, 576), BF16), shape((1, 8192, 576), BF16), position
    else:
        call = partial(flash_decode, window=None)
        cache = shape((2, 1, 8, 8192, 64), BF16)
        arguments = shape((1, 64, 64), BF16), cache, shape((64,), jnp.float32), position
    program = aot.compile_for_h200(call, *arguments).as_text() or ""
    entry = program[program.index("\nENTRY ") :]
    assert len(re.findall(r" custom-call\(", entry)) == 1
    assert len(re.findall(r" (?:fusion|reduce)\(", entry)) == 1
