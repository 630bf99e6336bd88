"""Kernels of few tokens: against their definitions, interpreted; in models; and compiled for an H200."""

import dataclasses
import re
from functools import partial
from typing import Any

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from model_steps import decode_step, relative_error

from jmx.models import few_rows, from_source, layers, random_source
from jmx.models.families import FAMILIES
from jmx.models.paged_cache import PagedLayer, Places
from jmx.pallas.few_rows import choice, heads, linear
from jmx.pallas.few_rows.choice import Tile
from jmx.pallas.few_rows.primitive import run
from jmx.selection.environment import Environment

H200 = Environment.named("h200")
BF16 = jnp.bfloat16
INTERPRETED = pytest.mark.usefixtures("on_cpu")


def draw(rng: np.random.Generator, *shape: int, dtype: Any = BF16, mean: float = 0) -> jax.Array:
    return jnp.asarray(mean + rng.standard_normal(shape), dtype)


def linear_operands(
    rng: np.random.Generator, tokens: int, size: int, rows: int, *, norm: bool, bias: bool, residual: bool
) -> linear.Operands:
    return linear.Operands(
        x=draw(rng, tokens, size),
        scale=draw(rng, size, dtype=jnp.float32, mean=1) if norm else None,
        weights=draw(rng, rows, size),
        bias=draw(rng, rows) if bias else None,
        residual=draw(rng, tokens, rows) if residual else None,
    )


def heads_operands(
    rng: np.random.Generator,
    tokens: int,
    *,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 32,
    size: int = 48,
    capacity: int = 16,
    paged: bool = False,
    bias: bool = True,
) -> heads.Operands:
    rows, pages = kv_heads * (group + 2) * dim, 2 * tokens + 1
    angles = [draw(rng, tokens, dim // 2, dtype=jnp.float32) for _ in range(2)]
    return heads.Operands(
        draw(rng, tokens, size),
        draw(rng, size, dtype=jnp.float32, mean=1),
        draw(rng, rows, size),
        draw(rng, rows) if bias else None,
        *angles,
        cache=draw(rng, 2, pages if paged else tokens, kv_heads, capacity, dim),
        numbers=jnp.asarray(rng.permutation(pages)[:tokens], jnp.int32) if paged else None,
        places=jnp.asarray(rng.integers(capacity + (not paged), size=tokens), jnp.int32),  # one of a full cache, too
    )


def check_call(call: Any, given: Any, tolerance: float = 6e-3) -> list[Any]:
    """The kernel's results, which are those of the definition but for rounding."""
    got = jax.jit(partial(run, call))(given)
    for its, expected in zip(got, call.define(given), strict=True):
        assert (its.shape, its.dtype) == (expected.shape, expected.dtype)
        assert relative_error(its.astype(jnp.float32), expected.astype(jnp.float32)) <= tolerance
    return got


@INTERPRETED
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("tokens", "size", "rows"), [(1, 48, 20), (1, 160, 9), (1, 64, 16), (2, 80, 50), (8, 48, 33)])
@pytest.mark.sampled(8)
def test_the_linear_kernel_computes_its_definition(rng, tokens, size, rows, norm, bias, residual):
    tile = Tile(4, 32, 1, most_ctas=3) if tokens == 1 else Tile(16 if rows < 50 else 1, 32, 1, 2)
    call = linear.Linear(tile, 1e-5, normed=norm, interpret=True)
    check_call(call, linear_operands(rng, tokens, size, rows, norm=norm, bias=bias, residual=residual))


@INTERPRETED
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("splits", [2, 4, 8])
@pytest.mark.parametrize(("tokens", "size"), [(2, 48), (8, 160), (5, 208)])  # 48 columns have parts without any
@pytest.mark.sampled(4)
def test_warps_share_the_columns_of_a_tile(rng, tokens, size, splits, norm):
    call = linear.Linear(Tile(16, 32, 1, 2, splits=splits), 1e-5, normed=norm, interpret=True)
    check_call(call, linear_operands(rng, tokens, size, 40, norm=norm, bias=True, residual=True))


@INTERPRETED
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_the_kernel_of_heads_computes_its_definition(rng, tokens, bias, paged):
    tile = Tile(8, 64, 1, most_ctas=7) if tokens == 1 else Tile(32, 32, 1, 2, splits=1 if tokens == 3 else 4)
    call = heads.Heads(tile, 1e-5, interpret=True)
    given = heads_operands(rng, tokens, paged=paged, bias=bias)
    _, cache = check_call(call, given)
    changed = np.any(np.asarray(cache != given.cache), axis=(0, 2, 4))  # by row or page, and place
    assert changed.sum() == tokens  # nothing else is written


@INTERPRETED
@pytest.mark.parametrize("tokens", [1, 4])
def test_angles_may_be_those_of_all_tokens(rng, tokens):
    given = heads_operands(rng, tokens)
    call = heads.Heads(Tile(32, 64, 1), interpret=True)
    check_call(call, given._replace(cos=given.cos[:1], sin=given.sin[:1]))


@INTERPRETED
def test_infinities_and_nan_stay_in_their_token(rng):
    given = linear_operands(rng, 3, 48, 16, norm=True, bias=True, residual=True)
    odd = given._replace(x=given.x.at[1, 5].set(jnp.nan).at[2, 7].set(jnp.inf))
    call = linear.Linear(Tile(16, 32, 1, 2), 1e-5, normed=True, interpret=True)
    plain, got = run(call, given), run(call, odd)
    for its, other in zip(got, plain, strict=True):
        assert jnp.array_equal(its[0], other[0])
        assert jnp.isnan(its[1:].astype(jnp.float32)).any(axis=1).all()


# Other ways to call them


@INTERPRETED
def test_derivatives_are_those_of_the_definition(rng):
    call = linear.Linear(Tile(16, 32, 1, 2), 1e-5)
    given = linear_operands(rng, 2, 48, 20, norm=True, bias=True, residual=False)

    def loss(compute, given):
        return sum(jnp.sum(jnp.sin(its.astype(jnp.float32))) for its in compute(given))

    got, expected = (jax.grad(partial(loss, its))(given) for its in (partial(run, call), call.define))
    for its, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert relative_error(its.astype(jnp.float32), other.astype(jnp.float32)) <= 1e-2

    of_heads = heads.Heads(Tile(32, 32, 1, 2), 1e-5)
    given = heads_operands(rng, 2)

    def moved(compute, x):
        query, cache = compute(given._replace(x=x))
        return jnp.sum(jnp.sin(query.astype(jnp.float32))) + jnp.sum(jnp.sin(cache.astype(jnp.float32)))

    got, expected = (jax.grad(partial(moved, its))(given.x) for its in (partial(run, of_heads), of_heads.define))
    assert jnp.any(expected != 0)
    assert relative_error(got.astype(jnp.float32), expected.astype(jnp.float32)) <= 1e-2


@INTERPRETED
def test_calls_are_mapped_by_their_definition(rng):
    call = linear.Linear(Tile(16, 32, 1, 2), 1e-5)
    given = linear_operands(rng, 2, 48, 20, norm=True, bias=True, residual=True)
    xs = draw(rng, 3, 2, 48)
    got = jax.vmap(lambda x: run(call, given._replace(x=x))[0])(xs)
    for its, x in zip(got, xs, strict=True):
        expected = call.define(given._replace(x=x))[0]
        assert relative_error(its.astype(jnp.float32), expected.astype(jnp.float32)) <= 4e-3


def test_exported_programs_have_the_definition(rng):
    call = linear.Linear(Tile(8, 64, 1), 1e-5)
    given = linear_operands(rng, 1, 48, 16, norm=True, bias=True, residual=True)
    exported = export.export(jax.jit(lambda *its: run(call, linear.Operands(*its))), platforms=["cuda"])(*given)
    assert "triton" not in exported.mlir_module()


# The choice


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"num_tokens": 8}, None),
        ({"num_tokens": 9}, "the number of tokens (=9) must be at most 8"),
        ({"num_tokens": 0}, "the number of tokens (=0) must be at most 8"),
        ({"dtype": jnp.float32}, "`dtype` (=float32) must be bfloat16"),
        ({"weights": (128, 2888)}, "columns of the weights (=2888) must be a multiple of 16 and at most 4096"),
        ({"weights": (128, 7168)}, "columns of the weights (=7168) must be a multiple of 16 and at most 4096"),
        ({"weights": (1 << 20, 2880)}, "weights (of 1048576 x 2880) must have at most 268435456 bytes"),
        ({"environment": Environment.named("a100")}, "needs a GPU of compute capability 9.0 (this is 8.0)"),
        ({"environment": Environment.named("cpu")}, "needs a GPU of compute capability 9.0 (this is cpu)"),
    ],
    ids=str,
)
def test_a_product_is_rejected_with_its_reason(changes, reason):
    case = {"num_tokens": 1, "dtype": BF16, "weights": (5120, 2880), "environment": H200} | changes
    assert choice.reject_reason(**case) == reason


@pytest.mark.parametrize(
    ("num_tokens", "weights", "threads"),
    [
        (1, (2880, 4096), 128),
        (1, (128, 4096), 128),
        (8, (128, 2880), 128),
        (8, (128, 4096), 256),  # with 128, registers of 8 tokens would be spilled
        (2, (2880, 4096), None),  # XLA's product takes no longer
    ],
)
def test_tiles_go_by_the_weight_and_the_number_of_tokens(num_tokens, weights, threads):
    tile = choice.linear_tile(num_tokens, weights)
    assert (None if tile is None else 32 * tile.num_warps) == threads
    if tile is not None:
        assert tile.rows == (2 if weights[0] >= choice.ROWS_ALONE else 1)


# In models


@pytest.fixture
def by_kernels(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models call the kernels on this CPU, interpreted; the names of those that were traced."""
    del on_cpu
    traced: list[str] = []

    def interpreted(kind: Any) -> Any:
        def call(tile: Tile, *rest: Any) -> Any:
            traced.append(kind.name)
            return kind(dataclasses.replace(tile, columns=64), *rest, interpret=True)

        return call

    monkeypatch.setattr(choice, "CAPABILITY", None)
    monkeypatch.setattr(linear, "Linear", interpreted(linear.Linear))
    monkeypatch.setattr(heads, "Heads", interpreted(heads.Heads))
    return traced


def arguments_of_step(model: Any, rng: np.random.Generator, rows: int, paged: bool) -> tuple[jax.Array, jax.Array, Any]:
    """Tokens, their positions, and caches of 16 positions that hold others, in one piece or in pages of 4."""
    capacity = 16
    starts = jnp.asarray(rng.integers(3, capacity, size=rows), jnp.int32)
    tokens = jnp.asarray(rng.integers(model.config.vocab_size, size=rows), jnp.int32)
    shapes = [its.shape for its in model.cache_layers(rows, capacity)]
    if not paged:
        return tokens, starts, [draw(rng, *shape) for shape in shapes]
    places = Places(jnp.asarray(1 + rng.permutation(4 * rows).reshape(rows, 4), jnp.int32), starts)
    sizes = [(parts, 4 * rows + 1, kv_heads, 4, dim) for parts, _, kv_heads, _, dim in shapes]
    return tokens, starts, [PagedLayer(draw(rng, *size), places, rows) for size in sizes]


def tiny_model(family: str, rng: np.random.Generator) -> Any:
    config = next(iter(FAMILIES[family].published.values()))
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "intermediate_size": 64,
        "num_experts": 4,
        "top_k": 4,  # all of them: which two are chosen would differ where rounding differs near a tie
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 128,
    }
    fields = {field.name for field in dataclasses.fields(config) if field.init}
    changed: dict[str, Any] = {name: size for name, size in sizes.items() if name in fields}
    if "layer_types" in fields:
        changed["layer_types"] = config.layer_types[:2]
    return from_source(random_source(dataclasses.replace(config, **changed), seed=int(rng.integers(1 << 30))))


@INTERPRETED
@pytest.mark.costly
@pytest.mark.sampled(3)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("gpt_oss", {"jmx_heads": 2, "jmx_linear": 4}),  # per layer: heads; the output product, the router
        ("mixtral", {"jmx_heads": 2, "jmx_linear": 4}),
        ("qwen3_moe", {"jmx_linear": 6}),  # queries and keys are normed before they are rotated
    ],
)
def test_steps_of_a_model_are_those_of_plain_code(rng, by_kernels, monkeypatch, family, kernels, rows, paged):
    model = tiny_model(family, rng)
    step = arguments_of_step(model, rng, rows, paged)
    got = decode_step(model, *step)
    # Sublayers that are alike are traced once: as many calls as kinds of layers have.
    assert {*by_kernels} == {*kernels}
    assert all(by_kernels.count(name) <= most for name, most in kernels.items())
    monkeypatch.setattr(choice, "MOST_TOKENS", 0)
    jax.clear_caches()
    by_kernels.clear()
    expected = decode_step(model, *step)
    assert not by_kernels
    for its, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert relative_error(its.astype(jnp.float32), other.astype(jnp.float32)) <= 2e-2


def test_what_kernels_cannot_do_is_left_to_plain_code(rng, by_kernels):
    x, weights = draw(rng, 1, 1, 32), draw(rng, 16, 32)
    norm = Norm(rng, 32)
    assert few_rows.linear(x, weights, None, norm) is not None
    assert few_rows.linear(x, weights.astype(jnp.float32), None, norm) is None
    assert few_rows.linear(x, weights, None, norm.divided_over("tp")) is None
    assert few_rows.linear(draw(rng, 1, 9, 32), weights, None, norm) is None
    of_heads = partial(few_rows.heads, x, draw(rng, 4 * 32, 32), None, norm)
    angles = draw(rng, 1, 1, 16, dtype=jnp.float32), draw(rng, 1, 1, 16, dtype=jnp.float32)
    starts, cache = jnp.zeros(1, jnp.int32), draw(rng, 2, 1, 1, 16, 32)
    assert of_heads(angles, starts, cache) is not None
    assert of_heads(angles, None, cache) is None  # a prompt
    assert of_heads((angles[0][..., :8], angles[1][..., :8]), starts, cache) is None  # half of the channels
    assert of_heads(angles, starts, cache.astype(jnp.float32)) is None
    mixed = PagedLayer(cache, Places(jnp.ones((2, 1), jnp.int32), jnp.zeros(2, jnp.int32)), num_rows=1)
    assert of_heads(angles, starts, mixed) is None  # a row, and a block of a prompt


@dataclasses.dataclass
class Norm:
    rng: dataclasses.InitVar[np.random.Generator]
    size: dataclasses.InitVar[int]
    epsilon: float = 1e-5
    summed: tuple[str, ...] = ()

    def __post_init__(self, rng: np.random.Generator, size: int) -> None:
        self.scale = draw(rng, size, dtype=jnp.float32, mean=1)

    def divided_over(self, axis: str) -> "Norm":
        other = object.__new__(Norm)
        other.scale, other.epsilon, other.summed = self.scale, self.epsilon, (axis,)
        return other


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(Environment.probe().compute_capability != choice.CAPABILITY, reason="needs a Hopper GPU")
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 8])
@pytest.mark.parametrize(("size", "dim", "group"), [(2880, 64, 8), (4096, 128, 4)])  # of gpt-oss, and of Mixtral
def test_kernels_compute_their_definitions_on_a_gpu(rng, size, dim, group, tokens, paged):
    tile = choice.heads_tile(tokens, dim)
    given = heads_operands(rng, tokens, kv_heads=8, group=group, dim=dim, size=size, capacity=64, paged=paged)
    assert tile is not None
    check_call(heads.Heads(tile, 1e-5), given)
    for rows in (128, size):
        tile = choice.linear_tile(tokens, (rows, size))
        if tile is not None:
            given = linear_operands(rng, tokens, size, rows, norm=True, bias=True, residual=rows == size)
            check_call(linear.Linear(tile, 1e-5, normed=True), given)


# Compiled


@pytest.mark.aot
@pytest.mark.parametrize("kind", ["heads", "output", "router"])
def test_what_one_token_needs_first_is_loaded_before_anything_is_computed(tmp_path, kind):
    """ptxas moves loads behind products where it can: then no memory is read while anything is computed."""
    with jax.sharding.use_abstract_mesh(aot.h200_mesh().abstract_mesh):
        rng = np.random.default_rng(0)
        if kind == "heads":
            given: Any = heads_operands(rng, 1, kv_heads=8, group=8, dim=64, size=2880, capacity=128)
            tile = choice.heads_tile(1, 64)
        else:
            rows, size = (2880, 4096) if kind == "output" else (128, 2880)
            given = linear_operands(rng, 1, size, rows, norm=kind == "router", bias=True, residual=kind == "output")
            tile = choice.linear_tile(1, (rows, size))
    assert tile is not None
    call = heads.Heads(tile, 1e-5) if kind == "heads" else linear.Linear(tile, 1e-5, normed=kind == "router")
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), given)
    _, (kernel,) = aot.triton_kernels("h200", tmp_path, call.name, partial(run, call), shapes)
    assert kernel.spilled == 0
    assert kernel.registers <= 128  # four CTAs an SM
    opcodes = re.findall(r"\b(LDG\.E\.128|FMUL|BAR)\b", kernel.sass())
    steps = -(-given.x.shape[1] // tile.columns)
    scales = 0 if given.scale is None else 2 * steps  # float32: a thread's 8 in two loads
    assert opcodes[: opcodes.index("BAR")] == ["LDG.E.128"] * (tile.rows * steps + scales)
    assert opcodes.index("FMUL") > opcodes.index("BAR")


@pytest.mark.aot
@pytest.mark.parametrize("rows", [1, 8])
def test_a_step_compiles_for_an_h200_to_few_kernels(tmp_path, rows):
    config = dataclasses.replace(FAMILIES["gpt_oss"].published["gpt-oss-20b"], num_hidden_layers=2)
    config = dataclasses.replace(config, layer_types=config.layer_types[:2])
    with jax.sharding.use_abstract_mesh(aot.h200_mesh().abstract_mesh):
        model = nnx.eval_shape(lambda: FAMILIES["gpt_oss"].model(config, format="mxfp4", rngs=nnx.Rngs(0)))
        graphdef, state = nnx.split(model)
        caches = [jax.ShapeDtypeStruct(its.shape, its.dtype) for its in model.cache_layers(rows, 2048)]

    def step(state, tokens, starts, caches):
        return decode_step(nnx.merge(graphdef, state), tokens, starts, caches)

    numbers = jax.ShapeDtypeStruct((rows,), jnp.int32)
    _, kernels = aot.triton_kernels("h200", tmp_path, "jmx_", step, state, numbers, numbers, caches)
    assert {*(kernel.spilled for kernel in kernels)} == {0}
    (launched,) = (its for its in aot.launches(tmp_path) if its[0] == "kCommandBuffer")
    # A layer has heads, attention, its splits' sum where keys are split, the output product, the router, the routing,
    # experts, and their sum; and there are the embedding, angles, copies of both caches, the last norm, and logits.
    assert len(launched) - 1 <= 2 * 8 + 8


# Products of many tokens, which XLA's kernels compute


@INTERPRETED
@pytest.mark.parametrize("tokens", [layers.ROUNDED_TOKENS - 1, layers.ROUNDED_TOKENS])
def test_rounded_products_are_those_in_float32_but_for_rounding(rng, tokens):
    linear = layers.Linear(64, 48, bias=True, dtype=BF16, rngs=nnx.Rngs(0))
    assert linear.bias is not None
    linear.bias[...] = draw(rng, 48)
    x, residual = draw(rng, 1, tokens, 64), draw(rng, 1, tokens, 48)
    expected = linear(x)
    assert expected.dtype == jnp.float32
    rounded, added = linear.rounded(x), linear.add_to(residual, x)
    assert rounded.dtype == added.dtype == BF16
    assert relative_error(rounded.astype(jnp.float32), expected) <= 5e-3
    assert relative_error(added.astype(jnp.float32), residual.astype(jnp.float32) + expected) <= 5e-3


@pytest.mark.aot
def test_on_a_gpu_a_prompts_product_its_bias_and_its_rounding_are_one_kernel():
    with jax.sharding.use_abstract_mesh(aot.h200_mesh().abstract_mesh):
        made = nnx.eval_shape(lambda: layers.Linear(512, 768, bias=True, dtype=BF16, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(made)
    x, residual = (jax.ShapeDtypeStruct((1, 1024, size), BF16) for size in (512, 768))
    given = state, residual, x
    program = aot.compile_for_h200(lambda state, *its: nnx.merge(graphdef, state).add_to(*its), *given).as_text()
    assert program is not None
    assert "f32[1024,768]" not in program.partition("ENTRY")[2]
