"""The backend `mosaic` beyond tests/test_backends.py: what it rejects, and on a Hopper GPU the sizes, scales and splits
that are its own concern."""

import dataclasses
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend_cases import (
    GPT_OSS,
    NEITHER,
    ONE,
    Case,
    assert_agrees,
    assert_rejects,
    call,
    draw_routing,
    draw_weights,
    draw_x,
    reference,
    suited,
)
from test_backends import check

import jmx
from jmx import GELU, Environment, GELUAndMul, Reason, ReLU, ReLU2, SiLUAndMul
from jmx.backends import resolve_layout
from jmx.numerics.formats import FORMATS
from jmx.numerics.gate_up import split_gate_up
from jmx.numerics.layouts import WeightSpec, rows_in_order
from jmx.pallas.mosaic_sm90 import act_order, kernel, round_rows, rounded_inputs
from jmx.pallas.mosaic_sm90.backend import MosaicSm90
from jmx.pallas.mosaic_sm90.config import Config
from jmx.pallas.mosaic_sm90.layout import LAYOUT, Tile
from jmx.pallas.mosaic_sm90.rounded_inputs import INPUTS, RoundedRows
from jmx.selection import tuning

pytestmark = pytest.mark.sampled(3)

PROBLEM = Case(dtype="bfloat16", layout=LAYOUT.name).problem()
HOPPER = Environment.named("h200")


# What it rejects


@pytest.mark.parametrize(
    ("change", "reason", "message"),
    [
        ({"dtype": "float32"}, Reason.DTYPE, "float32"),
        ({"layout": "packed"}, Reason.LAYOUT, "'packed'"),
        ({"input_format": "fp8_block"}, Reason.INPUT_FORMAT, "'fp8_block'"),
        ({"input_format": "mxfp8", "format": "int4_g32_order"}, Reason.INPUT_FORMAT, "another order than the blocks"),
        ({"num_tokens": None}, Reason.SYMBOLIC_TOKENS, "symbolic"),
    ],
)
def test_rejected_problems(change, reason, message):
    assert_rejects(MosaicSm90(), dataclasses.replace(PROBLEM, **change), HOPPER, reason, message)


@pytest.mark.parametrize(
    ("device", "reason", "message"),
    [
        ("cpu", Reason.PLATFORM, "'cpu'"),
        ("a100", Reason.COMPUTE_CAPABILITY, "(8, 0)"),
        ("b200", Reason.COMPUTE_CAPABILITY, "(10, 0)"),
    ],
)
def test_rejected_machines(device, reason, message):
    assert_rejects(MosaicSm90(), PROBLEM, Environment.named(device), reason, message)


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_what_it_runs(device):
    for dtype in ("bfloat16", "float16"):
        for tokens in (0, 1, 1 << 20):
            problem = dataclasses.replace(PROBLEM, dtype=dtype, num_tokens=tokens)
            assert MosaicSm90().supports(problem, Environment.named(device)) is None


# Around the kernel, on any machine: the kernel's contract in numpy in its place


def expert_products(x, gate_up, down, blocks, *, config, num_rows, num_cores, rounding=None):
    """As `kernel.expert_products` says; rows that no block names are NaN."""
    assert num_cores == HOPPER.core_count
    assert all(np.asarray(rows).max(initial=0) % 8 == 0 for rows in (blocks.x_rows, blocks.out_rows))
    h = product(np.asarray(x, np.float32), gate_up, blocks, blocks.x_rows, config.block_n, num_rows, 1)
    (h,) = h.astype(gate_up.dtype)
    if rounding is not None:
        width = rounding.columns + -rounding.columns % 64
        h, scales = rounded_rows(
            jnp.asarray(h), rounding.format, rounding.static_scale, columns=rounding.columns, width=width
        )
        down = down if scales is None else dataclasses.replace(down, row_scales=scales)
    h = np.asarray(h, np.float32)
    out = product(h, down, blocks, blocks.out_rows, config.block_n, num_rows, config.split_k)
    return jnp.asarray(out.reshape(-1, down.rows.num_outputs), down.dtype)


def one_product(x, one, blocks, *, split_k, config, num_rows, num_cores):
    """As `kernel.one_product` says."""
    assert num_cores == HOPPER.core_count
    assert x.dtype == jnp.bfloat16
    out = product(np.asarray(x, np.float32), one, blocks, blocks.x_rows, config.block_n, num_rows, split_k)
    return jnp.asarray(out.reshape(-1, one.stored.num_outputs), one.dtype)


@partial(jax.jit, static_argnums=(1, 2))
def dequantized(weight, spec, format):
    return jmx.dequantize(LAYOUT.inverse(weight, spec), jnp.float32, format)


def activated(activation, *parts):
    """Of as many rows as make few shapes, since each compiles anew."""
    rows = len(parts[0])
    padded = (jnp.asarray(np.pad(part, ((0, -rows % 64), (0, 0)))) for part in parts)
    return np.asarray(activation(*padded))[:rows]


def floats_of(one):
    """The weight that the product reads, as (E, outputs, inputs), without padding of its outputs."""
    rows, order, weight = one.rows, one.rows.gate_up_order, one.weight._replace(order=None)
    tiles, columns = weight.values.shape[1], 64 * (weight.values.shape[2] // Tile.of(one.format).value_rows)
    format = FORMATS[one.format.name.removesuffix("_order")]  # `x` comes in the order of columns
    if not one.transposed:
        spec = WeightSpec("down" if order is None else "gate_up", (rows.num_rows, columns), order, format)
        return np.asarray(dequantized(weight, spec, format))
    whole = "scales" if Tile.of(format).scales == 0 else "global_scales"  # which the product leaves out
    if getattr(weight, whole) is not None:
        old = getattr(weight, whole)
        weight = weight._replace(**{whole: jnp.ones((old.shape[0], 64 * tiles, *old.shape[2:]), old.dtype)})
    # Rows of a weight without a gate are in the order of tiles.
    floats = np.asarray(dequantized(weight, WeightSpec("down", (64 * tiles, columns), None, format), format))
    return floats[..., : rows.num_rows].swapaxes(1, 2)


def in_order_of_tiles(h, order):
    """Outputs of a gated weight (R, 2I) as its tiles have them: 8 gates, their 8 ups."""
    halves = (part.reshape(len(h), -1, 8) for part in padded_to_tiles(*split_gate_up(h, order)))
    return np.stack([*halves], axis=2).reshape(len(h), -1)


def padded_to_tiles(*parts):
    return [np.pad(part, ((0, 0), (0, -part.shape[1] % 64))) for part in parts]


def product(x, one, blocks, x_rows, block_n, num_rows, split_k):
    """One of the two: (split_k, R, its outputs), float32."""
    order, floats = one.rows.gate_up_order, floats_of(one)
    columns = x.shape[1]
    floats = np.pad(floats, ((0, 0), (0, 0), (0, columns - floats.shape[2])))
    out = np.full((split_k, num_rows, one.stored.num_outputs), np.nan, np.float32)
    experts = np.asarray(blocks.experts)
    assert ((experts >= 0) & (experts < floats.shape[0])).all()
    steps = np.arange(experts.size)
    x_rows, out_rows = (n * steps if isinstance(n, int) else np.asarray(n) for n in (x_rows, blocks.out_rows))
    counts = np.broadcast_to(blocks.counts, experts.shape)
    written = np.zeros(num_rows, bool)
    for b in range(np.ravel(blocks.num_blocks)[0]):
        assert 0 < counts[b] <= block_n
        here = slice(out_rows[b], out_rows[b] + counts[b])
        assert here.stop <= num_rows
        assert not written[here].any()
        written[here] = True
        given = x[x_rows[b] : x_rows[b] + counts[b]]
        assert len(given) == counts[b]
        for part, chosen in enumerate(np.array_split(np.arange(columns), split_k)):
            h = given[:, chosen] @ floats[experts[b]][:, chosen].T
            if one.row_scales is not None:
                h *= np.asarray(one.row_scales)[x_rows[b] : x_rows[b] + counts[b], None]
            if one.bias is not None and part == 0:
                bias = np.asarray(one.bias[experts[b]], np.float32)
                h += bias if one.order is None else bias[rows_in_order(one.order[experts[b]], order)]
            if one.added is not None:
                assert split_k == 1
                matrix = np.asarray(one.added.matrices[one.added.groups[b]], np.float32)
                h += np.asarray(one.added.inner[here], np.float32) @ matrix.T
            if order is not None and one.activation is not None:
                h = activated(one.activation, *split_gate_up(h, order))
            elif one.activation is not None:
                h = activated(one.activation, h)
            elif order is not None:
                h = in_order_of_tiles(h, order)
            (out[part, here],) = padded_to_tiles(h)
    return out


def ordered_rows(x, tokens, order, experts):
    """As `act_order.ordered_rows` says."""
    tokens, order, experts = (np.asarray(array) for array in (tokens, order, experts))
    assert tokens.size == 8 * experts.size
    return jnp.asarray(x)[tokens[:, None], order[np.repeat(experts, 8)]]


def rounded_rows(x, format, static_scale, *, columns, width, row_of=None, num_rows=None):
    """As `round_rows.round_rows` says; rows that are not written are NaN."""
    given = rounded_inputs.round_rows(x[:, :columns], format, static_scale)
    values, scales = np.pad(np.asarray(given.values), ((0, 0), (0, width - columns))), given.scales
    if row_of is None:
        return RoundedRows(jnp.asarray(values), scales)
    assert num_rows is not None
    row_of = np.asarray(row_of)
    at, of = row_of[row_of >= 0], np.nonzero(row_of >= 0)[0]
    placed = np.full((num_rows, width), np.nan, values.dtype)
    placed[at] = values[of]
    if scales is not None:
        own = np.full(num_rows, np.nan, np.float32)
        own[at] = np.asarray(scales)[of]
        scales = jnp.asarray(own)
    return RoundedRows(jnp.asarray(placed), scales)


AROUND = [
    *(Case(tokens=tokens, dtype="bfloat16") for tokens in (1, 2, 9, 16, 17, 64)),
    *(Case(tokens=tokens, ids="anywhere", top_k=4) for tokens in (1, 5, 64)),
    *(Case(tokens=tokens, ids="nowhere") for tokens in (1, 9, 17)),
    Case(tokens=400, ids="one_expert", top_k=1, hidden=32, intermediate=32),
    Case(tokens=16, ids="one_expert", top_k=4, num_experts=64, dtype="float16"),
    Case(tokens=300, ids="every_third", hidden=96, intermediate=160, bias=NEITHER, order="concatenated"),
    Case(tokens=1, ids="repeated", num_experts=2, top_k=6, bias=(True, False)),
    Case(tokens=3, weights_on="input", dtype="float16", ids="anywhere"),
    Case(tokens=40, weights_on="input", bias=(False, True), hidden=160),
    Case(tokens=7, activation=GELU(approximate=False), order=None),
    Case(tokens=7, activation=GELUAndMul(approximate=False)),
    Case(tokens=7, activation=ReLU2(), order=None),
    Case(tokens=7, activation=ReLU(), order=None),
    Case(tokens=5, hidden=128, format="nvfp4"),
    Case(tokens=40, hidden=96, intermediate=160, format="mxfp8", ids="anywhere"),
    Case(tokens=9, format="mxfp8", input_format="mxfp8", order="concatenated", weights_on="input", dtype="float16"),
    Case(tokens=5, hidden=256, intermediate=128, format="int4_g128_order"),
    Case(tokens=40, hidden=128, intermediate=192, format="int8_g64_asym_order", ids="anywhere", weights_on="input"),
    Case(tokens=40, hidden=64, intermediate=192, format="int4_g64_order", order="concatenated"),
    Case(tokens=1, hidden=192, intermediate=64, format="int4_g32_order", order=None, activation=ReLU2()),
    Case(tokens=40, format="fp8_block"),
    *(
        Case(tokens=tokens, input_format=inputs, hidden=96, intermediate=160)
        for tokens in (1, 9, 40)
        for inputs in INPUTS
    ),
    Case(tokens=9, input_format="int8_token", format="int4_g32", hidden=128, weights_on="input"),
    Case(tokens=40, input_format="fp8_token", format="int4_g64_order", hidden=128, intermediate=192),
    Case(tokens=5, input_format="fp8_static", format="int8_g64_asym_order", hidden=128, intermediate=192),
    Case(
        tokens=40, input_format="int8_token", format="int4_g64_order", hidden=128, intermediate=64, weights_on="input"
    ),
    Case(tokens=40, input_format="nvfp4", format="nvfp4", weights_on="input", dtype="float16"),
    Case(tokens=40, input_format="int8_token", format="int8_channel", ids="anywhere", order="concatenated"),
]


@pytest.mark.parametrize(
    ("case", "layers"),
    [*((case, None) for case in AROUND), (Case(tokens=5), 3), (AROUND[5], 3), (AROUND[-3], 3)],
    ids=str,
)
def test_what_is_around_the_kernel(case, layers, rng, monkeypatch):
    monkeypatch.setattr(kernel, "expert_products", expert_products)
    monkeypatch.setattr(kernel, "one_product", one_product)
    monkeypatch.setattr(act_order, "ordered_rows", ordered_rows)
    monkeypatch.setattr(round_rows, "round_rows", rounded_rows)
    dtype = "bfloat16" if case.dtype == "float32" else case.dtype
    case = dataclasses.replace(case, dtype=dtype, layout=LAYOUT.name)
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts = weights.experts(case)
    if layers is not None:
        others = [draw_weights(rng, case).experts(case) for _ in range(layers - 1)]
        experts = jmx.Experts.stack([*others, experts]).layer(layers - 1)
    y = MosaicSm90().apply(case.problem(), jnp.asarray(x), jax.tree.map(jnp.asarray, routing), experts, HOPPER)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    assert_agrees("mosaic", case, y, reference(case, weights, x, routing))


FULL = Config(24, 3, 1, 2, 12)  # no shared memory is left beside its stages of MXFP4


@pytest.mark.parametrize(
    ("inputs", "config", "by_tile"),
    [("mxfp8", None, True), ("nvfp4", None, True), ("mxfp8", FULL, False), ("int8_token", None, False)],
)
def test_the_epilogue_rounds_h_where_its_blocks_and_shared_memory_allow_it(inputs, config, by_tile, rng, monkeypatch):
    found = []

    def recorded(*args, rounding, **rest):
        found.append(rounding.by_tile)
        return expert_products(*args, rounding=rounding, **rest)

    monkeypatch.setattr(kernel, "expert_products", recorded)
    monkeypatch.setattr(round_rows, "round_rows", rounded_rows)
    case = Case(tokens=40, input_format=inputs, hidden=96, intermediate=160, dtype="bfloat16", layout=LAYOUT.name)
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    with nullcontext() if config is None else tuning.override("mosaic", config):
        routing = jax.tree.map(jnp.asarray, routing)
        MosaicSm90().apply(case.problem(), jnp.asarray(x), routing, weights.experts(case), HOPPER)
    assert found == [by_tile]


# Sizes


ODD = Case(hidden=96, intermediate=160, dtype="bfloat16")
SIZES = [
    *(dataclasses.replace(ODD, tokens=tokens) for tokens in (1, 2, 7, 8, 9, 16, 17, 64, 300, 2000)),
    dataclasses.replace(ODD, tokens=2000, top_k=1, ids="one_expert", hidden=160, intermediate=96),
    dataclasses.replace(ODD, tokens=16, top_k=4, ids="one_expert", num_experts=64),
    dataclasses.replace(ODD, tokens=300, ids="nowhere"),
    dataclasses.replace(ODD, tokens=17, ids="anywhere", num_experts=64, weights_on="input"),
    dataclasses.replace(ODD, tokens=64, dtype="float16", activation=GELU(approximate=False), order=None),
    dataclasses.replace(ODD, tokens=1, top_k=4, dtype="float16", activation=ReLU2(), order=None, weights_on="input"),
    Case(tokens=9, hidden=2880, intermediate=2880, num_experts=2, dtype="bfloat16"),
    Case(tokens=1, hidden=2880, intermediate=2880, num_experts=4, top_k=4, dtype="bfloat16"),
    Case(tokens=300, hidden=2880, intermediate=32, num_experts=3, dtype="bfloat16", order="concatenated"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", SIZES, ids=str)
def test_sizes(case, rng):
    check("mosaic", case, rng)


@pytest.mark.gpu
def test_biases_of_sixteen_bits(rng):
    case = suited("mosaic", ODD)
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    for dtype in (jnp.bfloat16, jnp.float16):
        biases = [np.asarray(bias).astype(dtype) for bias in weights[2:]]
        experts = weights._replace(gate_up_bias=biases[0], down_bias=biases[1]).experts(case)
        rounded = weights._replace(gate_up_bias=biases[0].astype(float), down_bias=biases[1].astype(float))
        y = call("mosaic", case, experts, x, routing)
        assert_agrees("mosaic", case, y, reference(case, rounded, x, routing))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("columns", [64, 2880, 7168, 16384])
def test_rows_in_the_order_of_their_experts(columns, dtype, rng):
    """Eight, four, two and one at a time."""
    x = jnp.asarray(rng.normal(size=(40, columns)), dtype)
    order = jnp.asarray(rng.permuted(np.tile(np.arange(columns, dtype=np.int32), (5, 1)), axis=1))
    tokens, experts = (jnp.asarray(rng.integers(0, n, size), jnp.int32) for n, size in ((40, 72), (5, 9)))
    out = jax.jit(act_order.ordered_rows)(x, tokens, order, experts)
    np.testing.assert_array_equal(out, ordered_rows(x, tokens, order, experts))


# Formats


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if not format.is_float])
@pytest.mark.parametrize("tokens", [1, 5, 40, 600])
def test_every_format(tokens, name, rng):
    """By both products' instructions, at odd numbers of tiles where the format has them."""
    size = 256 if FORMATS[name].block_size == 128 and not FORMATS[name].short_block else 192
    order = "concatenated" if tokens == 5 else "interleaved"
    check("mosaic", Case(tokens=tokens, hidden=size, intermediate=size + 128, format=name, order=order), rng)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [("float16", "float16"), ("float32", "float32"), ("bfloat16", "float32")])
@pytest.mark.parametrize("name", ["int4_g32", "int4_g64_asym", "int8_channel", "fp8_block"])
@pytest.mark.parametrize("tokens", [2, 64])
def test_scales_of_any_dtype(tokens, name, dtypes, rng):
    case = suited("mosaic", Case(tokens=tokens, hidden=192, intermediate=320, format=name, dtype="bfloat16"))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    weights = weights.with_scales_of(rng, *dtypes)
    y = call("mosaic", case, weights.experts(case), x, routing)
    assert_agrees("mosaic", case, y, reference(case, weights, x, routing))


# Scales


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0, 1, 250])
@pytest.mark.parametrize(
    ("role", "activation", "order"),
    [("gate_up", GPT_OSS, "interleaved"), ("gate_up", SiLUAndMul(), "concatenated"), ("down", ReLU(), None)],
)
@pytest.mark.parametrize("tokens", [2, 64])
def test_one_extreme_scale_throughout(tokens, role, activation, order, scale, rng):
    case = suited("mosaic", Case(tokens=tokens, activation=activation, order=order, bias=NEITHER))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    getattr(weights, role)[1][:] = scale
    magnitudes = rng.uniform(1, 2, x.shape) * 2.0 ** (ONE - scale - 4)
    x = (magnitudes * rng.choice([-1, 1], x.shape)).astype(x.dtype)
    y = call("mosaic", case, weights.experts(case), x, routing)
    assert_agrees("mosaic", case, y, reference(case, weights, x, routing))


@pytest.mark.gpu
@pytest.mark.parametrize(("low", "high"), [(0, 128), (60, 193), (121, 254)])
@pytest.mark.parametrize("tokens", [2, 64])
def test_a_mixture_of_scales_that_bfloat16_holds(tokens, low, high, rng):
    """The largest is lowered to 128 at most, and then the smallest still leaves every element a bfloat16.

    Each block of x balances the scales that it meets, so that all of them count alike in the result.
    """
    case = suited("mosaic", Case(tokens=tokens, hidden=512, activation=ReLU(), order=None, bias=NEITHER))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    scales = weights.gate_up[1]
    blocks = rng.integers(low, high - 1, scales.shape[-1])
    blocks[:2] = low, high - 2
    scales[:] = blocks + rng.integers(0, 3, scales.shape)
    balanced = min(ONE + 4, 120 + low)  # x stays in bfloat16's normal range
    magnitudes = rng.uniform(1, 2, x.shape) * 2.0 ** np.repeat(balanced - blocks, 32)
    x = (magnitudes * rng.choice([-1, 1], x.shape)).astype(x.dtype)
    y = call("mosaic", case, weights.experts(case), x, routing)
    assert_agrees("mosaic", case, y, reference(case, weights, x, routing))


# Splits


CONFIGS = [
    Config(8, 1, 1, 1, 2),
    Config(8, 1, 3, 5, 3, split_k=3),
    Config(16, 1, 5, 1, 4),
    Config(16, 1, 4, 2, 3, split_k=2),
    Config(24, 2, 2, 2, 3),
    Config(24, 1, 2, 1, 5, split_k=5),
    Config(40, 4, 1, 2, 4),
    Config(64, 5, 1, 1, 8),
    Config(80, 2, 1, 3, 2),
    Config(80, 1, 2, 3, 1),
    Config(144, 1, 2, 1, 2),
    Config(192, 3, 1, 2, 3),
    Config(256, 2, 1, 1, 3),
    Config(256, 2, 1, 2, 2),
]


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "-".join(map(str, dataclasses.astuple(config))))
def test_every_split_gives_the_result(config, rng):
    for tokens, top_k in ((5, 2), (100, 3)):
        case = suited("mosaic", Case(tokens=tokens, top_k=top_k, hidden=224, intermediate=160, num_experts=3))
        weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
        experts = weights.experts(case)
        with tuning.override("mosaic", config):
            first = call("mosaic", case, experts, x, routing)
            np.testing.assert_array_equal(call("mosaic", case, experts, x, routing), first)
        assert_agrees("mosaic", case, first, reference(case, weights, x, routing))


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [2, 3])
def test_no_stage_is_filled_while_it_is_read(stages, rng):
    """Few stages and few rows a block: each stage is filled again as soon as it is released."""
    sizes = {"hidden": 2880, "intermediate": 2880, "num_experts": 32, "dtype": "bfloat16"}
    case = suited("mosaic", Case(tokens=132, top_k=4, **sizes))
    experts = draw_weights(rng, case).experts(case)
    calls = [(draw_x(rng, case), draw_routing(rng, case)) for _ in range(4)]

    @jax.jit
    def run(x, routing):
        return jmx.moe(x, routing, experts, activation=case.activation, backend="mosaic")

    differ = jax.jit(lambda a, b: jnp.any(a != b))
    with tuning.override("mosaic", Config(32, 5, 1, 3, stages)):
        first = [run(*its) for its in calls]
        found = [differ(run(*calls[i]), first[i]) for i in rng.integers(len(calls), size=3000).tolist()]
    assert sum(map(int, found)) == 0


# In a program


@pytest.mark.gpu
def test_the_auto_layout_leads_here_and_nothing_is_rejected(rng):
    case = suited("mosaic", Case(dtype="bfloat16"))
    assert resolve_layout("auto", Environment.probe()) == LAYOUT.name
    x, routing = draw_x(rng, case), draw_routing(rng, case)
    explained = jmx.explain(x, routing, draw_weights(rng, case).experts(case), activation=case.activation)
    assert explained.chosen == "mosaic"


@pytest.mark.gpu
def test_another_routing_does_not_retrace(rng):
    case = suited("mosaic", Case(tokens=64, dtype="bfloat16"))
    weights, x = draw_weights(rng, case), draw_x(rng, case)
    experts, traces = weights.experts(case), []

    @jax.jit
    def run(x, routing, experts):
        traces.append(x.shape)
        return jmx.moe(x, routing, experts, activation=case.activation, backend="mosaic")

    for ids in ("distinct", "one_expert", "anywhere", "nowhere"):
        routing = draw_routing(rng, dataclasses.replace(case, ids=ids))
        assert_agrees("mosaic", case, run(x, routing, experts), reference(case, weights, x, routing))
    assert len(traces) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64])
def test_layers_that_do_not_wait_for_each_other(tokens, rng):
    """Each is persistent on all SMs; XLA may launch them concurrently."""
    case = suited("mosaic", Case(tokens=tokens, dtype="bfloat16"))
    weights = [draw_weights(rng, case) for _ in range(4)]
    xs, routings = [draw_x(rng, case) for _ in weights], [draw_routing(rng, case) for _ in weights]
    experts = [one.experts(case) for one in weights]

    @jax.jit
    def run(xs, routings, experts):
        return [
            jmx.moe(*arguments, activation=case.activation, backend="mosaic")
            for arguments in zip(xs, routings, experts, strict=True)
        ]

    ys = [run(xs, routings, experts) for _ in range(20)][-1]
    for y, one, x, routing in zip(ys, weights, xs, routings, strict=True):
        assert_agrees("mosaic", case, y, reference(case, one, x, routing))
