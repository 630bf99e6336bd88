"""The backend `triton` beyond tests/test_backends.py: when it is chosen and what it rejects; its splits, interpreted on
a CPU; and what only a compiled kernel shows, on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_backends as battery
from backend_cases import (
    GPT_OSS,
    INTERPRETED,
    NEITHER,
    TESTED,
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

import jmx
from jmx import GELU, Environment, Experts, GELUAndMul, NoBackendError, Reason, Routing, SiLU
from jmx.backends import registered_backends
from jmx.numerics.formats import FORMATS
from jmx.pallas.triton.backend import Triton
from jmx.pallas.triton.config import Config
from jmx.pallas.triton.ptx import FORMAT_NAMES
from jmx.selection import tuning
from jmx.selection.registry import Registry
from jmx.selection.select import select

pytestmark = [pytest.mark.costly, pytest.mark.sampled(3)]

interpreted = pytest.mark.usefixtures("on_cpu")  # where the interpreter runs, also if there is a GPU
REGISTERED = registered_backends()
PROBLEM = Case(dtype="bfloat16").problem()
AMPERE, HOPPER = Environment.named("a100"), Environment.named("h200")


@pytest.fixture(autouse=True)
def interpreted_too(monkeypatch):
    monkeypatch.setattr("jmx.backends.REGISTRY", Registry(TESTED))


# When it is chosen


@pytest.mark.parametrize(
    ("change", "reason", "reported"),
    [
        ({"dtype": "float32"}, Reason.DTYPE, "float32"),
        ({"layout": "canonical"}, Reason.LAYOUT, "'canonical'"),
        ({"format": "fp8_block"}, Reason.FORMAT, "'fp8_block'"),
        ({"format": "int8_g32"}, Reason.FORMAT, "'int8_g32'"),
        ({"format": "int4_channel", "hidden_size": 66}, Reason.SHAPE, "hidden_size (=66) must be a multiple of 4"),
        ({"intermediate_size": 98}, Reason.SHAPE, "intermediate_size (=98) must be a multiple of 32"),
        ({"input_format": "mxfp8"}, Reason.INPUT_FORMAT, "'mxfp8'"),
        ({"num_tokens": None}, Reason.SYMBOLIC_TOKENS, "symbolic"),
    ],
)
def test_what_it_refuses_of_a_problem(change, reason, reported):
    assert Triton().supports(PROBLEM, AMPERE) is None
    assert_rejects(Triton(), dataclasses.replace(PROBLEM, **change), AMPERE, reason, reported)


@pytest.mark.parametrize(
    ("environment", "reason", "reported"),
    [
        (Environment.named("cpu"), Reason.PLATFORM, "'cpu', not 'gpu'"),
        (Environment.named("b200"), Reason.COMPUTE_CAPABILITY, "(10, 0) is none of (8, 0)"),
        (Environment("gpu", "Tesla T4", (7, 5)), Reason.COMPUTE_CAPABILITY, "(7, 5)"),
        (Environment("gpu", "unknown"), Reason.COMPUTE_CAPABILITY, "None"),
    ],
)
def test_what_it_refuses_of_a_machine(environment, reason, reported):
    assert_rejects(Triton(), PROBLEM, environment, reason, reported)


def test_interpreted_it_runs_on_a_cpu_alone():
    assert INTERPRETED not in REGISTERED
    assert INTERPRETED.supports(PROBLEM, Environment.named("cpu")) is None
    rejection = INTERPRETED.supports(PROBLEM, AMPERE)
    assert rejection is not None
    assert rejection.detail == "platform is 'gpu', not 'cpu'"


@pytest.mark.parametrize(
    ("device", "change", "runs"),
    [
        ("a100", {}, True),
        ("l4", {}, True),
        ("l40s", {"dtype": "float16"}, True),
        ("h200", {}, True),
        ("a100", {"dtype": "float32"}, False),
        ("a100", {"layout": "canonical"}, False),
        ("a100", {"format": "nvfp4"}, True),
        ("l4", {"format": "int4_g128_asym_order", "hidden_size": 256, "intermediate_size": 256}, True),
        ("a100", {"format": "int8_channel"}, False),
        ("b200", {}, False),
        ("h200", {"layout": "mosaic_sm90"}, False),
    ],
)
def test_where_it_is_chosen(device, change, runs):
    problem, environment = dataclasses.replace(PROBLEM, **change), Environment.named(device)
    assert (Triton().supports(problem, environment) is None) == runs
    assert (select(problem, environment, None, registered_backends()).backend.name == "triton") == runs


def test_asked_for_where_it_cannot_run_it_says_what_would_help():
    problem = dataclasses.replace(PROBLEM, layout="mosaic_sm90")
    with pytest.raises(NoBackendError, match=r"triton: layout: .* experts\.prepare\('packed'\)"):
        select(problem, HOPPER, "triton", registered_backends())


# Interpreted


CASES = [
    Case(tokens=0),
    Case(tokens=1, top_k=1, num_experts=1, hidden=32, intermediate=32),
    Case(tokens=16, top_k=3, dtype="bfloat16"),
    Case(tokens=17, top_k=3, dtype="float16", hidden=96, intermediate=160),
    Case(tokens=64, top_k=1, ids="one_expert"),
    Case(tokens=64, ids="nowhere"),
    Case(tokens=9, ids="anywhere", order="concatenated", weights_on="input"),
    Case(tokens=40, ids="every_third", order=None, activation=SiLU(), bias=(False, True)),
    Case(tokens=5, order=None, activation=GELU(approximate=False), bias=NEITHER),
    Case(tokens=5, order="concatenated", activation=GELUAndMul(approximate=True)),
    *battery.REAL[2:4],
]


@pytest.mark.parametrize("case", CASES, ids=str)
@interpreted
def test_cases_of_all_kinds(case, rng):
    battery.check(INTERPRETED.name, case, rng)


slow = pytest.mark.slow
OF_FORMATS = [
    Case(tokens=20, hidden=80, intermediate=112, format="nvfp4", order="concatenated"),
    Case(tokens=3, hidden=256, intermediate=128, format="int4_g128_asym_order", ids="anywhere", top_k=3),
    pytest.param(Case(tokens=20, hidden=96, intermediate=32, format="mxint4", bias=NEITHER), marks=slow),
    pytest.param(Case(tokens=30, hidden=64, format="int4_g32_order", order=None, activation=SiLU()), marks=slow),
    Case(tokens=1, hidden=68, intermediate=36, format="int4_channel_asym", dtype="float16"),
]


@pytest.mark.parametrize("case", OF_FORMATS, ids=str)
@interpreted
def test_formats(case, rng):
    battery.check(INTERPRETED.name, dataclasses.replace(case, num_experts=4), rng)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 50])
@pytest.mark.parametrize("name", ["nvfp4", "int4_channel_asym"])
def test_formats_of_sizes_that_no_word_ends_at(name, tokens, rng):
    """Rows of 17 words and of 9, or of 5 groups and of 7."""
    hidden, intermediate = (80, 112) if name == "nvfp4" else (68, 36)
    case = Case(tokens=tokens, num_experts=4, hidden=hidden, intermediate=intermediate, format=name)
    battery.check("triton", case, rng)


def of_format(name, tokens):
    """With parts of blocks and tiles where the format has them."""
    size = 256 if FORMATS[name].block_size == 128 else 192
    order = "concatenated" if tokens == 5 else "interleaved"
    return Case(tokens=tokens, num_experts=4, hidden=size, intermediate=size + 128, format=name, order=order)


@slow
@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("tokens", [1, 40])
@interpreted
def test_every_format_interpreted(tokens, name, rng):
    battery.check(INTERPRETED.name, of_format(name, tokens), rng)


def with_scales(weights, dtype):
    """Scales of blocks in a dtype, with as many bits as it has."""
    odd = [q._replace(scales=(q.scales.astype(np.float32) * np.float32(0.7)).astype(dtype)) for q in weights[:2]]
    return weights._replace(gate_up=odd[0], down=odd[1])


@pytest.mark.parametrize("name", ["int4_g32_asym", pytest.param("int4_channel", marks=slow)])
@interpreted
def test_gate_up_and_down_may_have_scales_of_different_dtypes(name, rng):
    case = Case(tokens=4, num_experts=3, hidden=64, intermediate=64, dtype="bfloat16", format=name)
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    weights = weights._replace(
        gate_up=with_scales(weights, np.float32).gate_up, down=with_scales(weights, np.float16).down
    )
    y = call(INTERPRETED.name, case, weights.experts(case), x, routing)
    assert_agrees(INTERPRETED.name, case, y, reference(case, weights, x, routing))


# All of tests/test_backends.py takes minutes; `-m slow` runs it.
@pytest.mark.parametrize(
    ("test", "options"),
    [
        (battery.test_masked_tokens_route_nowhere, {"tokens": 64}),
        (battery.test_a_bad_token_keeps_to_itself, {"bad": np.nan, "dtype": "bfloat16", "tokens": 6}),
        (battery.test_a_bad_token_keeps_to_itself, {"bad": np.inf, "dtype": "bfloat16", "tokens": 64}),
        (battery.test_unused_experts_may_hold_nan, {"tokens": 5, "layout": "packed"}),
        (battery.test_unused_experts_may_hold_nan, {"tokens": 64, "layout": "packed"}),
        (battery.test_extreme_scales, {"tokens": 2, "dtype": "bfloat16", "scale": 0}),
        (battery.test_extreme_scales, {"tokens": 2, "dtype": "bfloat16", "scale": 254}),
        (battery.test_a_nan_block_reaches_the_tokens_of_its_expert, {"tokens": 64}),
        (battery.test_stacked_layers, {"tokens": 64, "layout": "packed", "form": "scan over views"}),
        (battery.test_a_token_does_not_depend_on_its_neighbours, {"tokens": 40, "dtype": "bfloat16"}),
        (battery.test_inside_shard_map, {"tokens": 64, "check": True}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@interpreted
def test_the_part_of_the_battery_that_always_runs(test, options, rng):
    test(INTERPRETED.name, rng=rng, **options)


@interpreted
def test_a_split_sum_repeats_bit_for_bit(rng):
    case = Case(tokens=2, hidden=96, intermediate=224, dtype="bfloat16")
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    with tuning.override(INTERPRETED.name, Config(16, 32, 64, 4, 2, split_k=4)):
        first, again = (call(INTERPRETED.name, case, weights.experts(case), x, routing) for _ in range(2))
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize(
    "config",
    [
        Config(16, 32, 64, 1, 1),
        Config(16, 32, 64, 4, 2, products=1, split_k=2),
        Config(16, 32, 64, 1, 2, narrow_m=8),  # of some 25 rows an expert: 16, and some 9
        Config(16, 128, 128, 4, 3, split_k=3),  # of two steps, so that one part is empty
        Config(32, 64, 512, 4, 2),
        Config(64, 32, 64, 4, 2, products=1),
        Config(8, 64, 128, 2, 3),
        Config(8, 32, 256, 4, 2, products=1, split_k=2),  # fewer rows than threads, and fewer codes than a step's
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [3, 50])
@interpreted
def test_every_tiling(tokens, config, rng):
    """Sizes that no tile divides: 160 and 224 columns, quarters of 40 and 56 of them."""
    assert_cut(Case(tokens=tokens, hidden=160, intermediate=224, num_experts=4, dtype="bfloat16"), config, rng)


@pytest.mark.parametrize(
    ("name", "sizes", "config"),
    [
        pytest.param("nvfp4", (80, 112), Config(16, 32, 512, 4, 2, products=1), marks=slow),  # more than there are
        ("int4_g128_asym", (384, 128), Config(16, 32, 64, 1, 1, products=1, split_k=2)),  # half a group a step
        pytest.param("int4_g64_asym", (320, 64), Config(16, 32, 64, 4, 1, split_k=3), marks=slow),  # repeated
    ],
)
@interpreted
def test_however_groups_are_divided(name, sizes, config, rng):
    hidden, intermediate = sizes
    case = Case(3, hidden, intermediate, num_experts=3, dtype="bfloat16", format=name)
    assert_cut(case, config, rng)


def assert_cut(case, config, rng):
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    with tuning.override(INTERPRETED.name, config):
        y = call(INTERPRETED.name, case, weights.experts(case), x, routing)
    assert_agrees(INTERPRETED.name, case, y, reference(case, weights, x, routing))


def a_nan_scale(backend, name, tokens, rng):
    """Whatever the elements under it are, it makes NaN of the tokens of its expert and of no others."""
    case = suited(backend, of_format(name, tokens))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    routing.expert_ids[0, 0] = 1
    scales, values = weights.gate_up.scales.copy(), weights.gate_up.values.copy()
    scales[1, 7, -1] = np.nan
    values[1, 7, -2:] = 0
    weights = weights._replace(gate_up=weights.gate_up._replace(scales=scales, values=values))
    y = call(backend, case, weights.experts(case), x, routing)
    hit = (routing.expert_ids == 1).any(axis=1)
    assert np.isnan(y[hit]).all()
    assert np.isfinite(y[~hit]).all()


@pytest.mark.parametrize(("name", "tokens"), [("nvfp4", 3), pytest.param("int4_g32", 20, marks=slow)])
@interpreted
def test_a_scale_that_is_nan(name, tokens, rng):
    a_nan_scale(INTERPRETED.name, name, tokens, rng)


def a_scale_of_two_and_above(backend, code, config, rng):
    """Tiles that have one are computed in another way than the rest."""
    case = Case(tokens=6, num_experts=4, hidden=320, intermediate=288, dtype="bfloat16")
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    routing.expert_ids[0, 0] = 1
    weights.gate_up[1][1, 7, 3] = weights.down[1][1, 200, 8] = code
    with tuning.override(backend, config):
        y = call(backend, case, weights.experts(case), x, routing)
    assert_agrees(backend, case, y, reference(case, weights, x, routing))


@pytest.mark.parametrize("code", [127, 128, 131])
@interpreted
def test_a_scale_of_two_and_above(code, rng):
    a_scale_of_two_and_above(INTERPRETED.name, code, Config(8, 64, 256, 2, 3), rng)


@pytest.mark.gpu
@pytest.mark.parametrize("code", [127, 128, 131])
@pytest.mark.parametrize(
    "config", [Config(8, 64, 256, 2, 3), Config(8, 64, 256, 4, 3, split_k=2), Config(16, 64, 128, 4, 3, 1)], ids=str
)
def test_a_scale_of_two_and_above_on_a_gpu(config, code, rng):
    a_scale_of_two_and_above("triton", code, config, rng)


# Rows of 4 and 3 codes, of 5 and 4, of 10 and 9: they begin at every byte of a word, at every second, and at the first.
ROWS_OF_CODES = [(128, 96), (160, 128), (320, 288)]


def a_nan_code_in_a_row(backend, sizes, config, rng):
    """Among the first of a row of `down`, or the last, whose neighbours may be in the same word."""
    hidden, intermediate = sizes
    case = Case(tokens=6, num_experts=4, hidden=hidden, intermediate=intermediate, dtype="bfloat16")
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    routing.expert_ids[0, 0] = 1
    rows = rng.permutation(hidden)[:8]
    weights.down[1][1, rows[:4], 0] = weights.down[1][1, rows[4:], -1] = 255  # NaN
    with tuning.override(backend, config):
        y = call(backend, case, weights.experts(case), x, routing)
    hit = (routing.expert_ids == 1).any(axis=1)
    expected = hit[:, None] & np.isin(np.arange(hidden), rows)
    np.testing.assert_array_equal(np.isnan(np.asarray(y, np.float32)), expected)


@pytest.mark.parametrize("sizes", ROWS_OF_CODES, ids=str)
@pytest.mark.parametrize("config", [Config(8, 64, 128, 2, 3), Config(8, 32, 256, 2, 2, split_k=2)], ids=str)
@interpreted
def test_a_nan_code_keeps_to_its_row(config, sizes, rng):
    a_nan_code_in_a_row(INTERPRETED.name, sizes, config, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", ROWS_OF_CODES, ids=str)
@pytest.mark.parametrize("block_k", [64, 128, 256])
@pytest.mark.parametrize(("block_m", "products"), [(8, 4), (16, 4), (16, 1)])
def test_a_nan_code_keeps_to_its_row_on_a_gpu(block_m, products, block_k, sizes, rng):
    a_nan_code_in_a_row("triton", sizes, Config(block_m, 64, block_k, 4, 3, products, split_k=2), rng)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("code", [0, 1, 128, 129, 240, 255])
def test_scales_of_every_size_reach_the_tensor_cores(code, tokens, rng):
    """One block of one expert has the code."""
    case = suited("triton", Case(tokens=tokens, num_experts=4, hidden=320, intermediate=160, dtype="bfloat16"))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    routing.expert_ids[0, 0] = 1
    weights.gate_up[1][1, 7, 3] = code
    y, expected = (
        np.asarray(call(backend, case, weights.experts(case), x, routing), np.float64) for backend in ("triton", "xla")
    )
    np.testing.assert_array_equal(np.isfinite(y), np.isfinite(expected))
    assert np.isfinite(y[0]).all() == (code != 255)
    finite = np.isfinite(y).all(axis=1)
    if finite.any():
        assert_agrees("triton", case, y[finite], expected[finite])


@interpreted
def test_gradients_and_vmap(rng):
    case = Case(tokens=6, hidden=32, intermediate=32, num_experts=3, dtype="bfloat16")
    weights, x, routing = draw_weights(rng, case), jnp.asarray(draw_x(rng, case)), draw_routing(rng, case)
    experts = weights.experts(case)

    def layer(backend, x, routing):
        return jmx.moe(x, Routing(*routing), experts, activation=case.activation, backend=backend)

    def gradients(backend):
        def loss(x, w):
            return (layer(backend, x, (routing.expert_ids, w)).astype(jnp.float32) ** 2).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, routing.weights)

    for found, expected in zip(gradients(INTERPRETED.name), gradients("xla"), strict=True):
        assert_agrees(INTERPRETED.name, case, found, expected, 3)
    xs = jnp.stack([x, 2 * x])
    out = jax.jit(jax.vmap(lambda x: layer(INTERPRETED.name, x, routing)))(xs)
    twice = [np.concatenate([array] * 2) for array in routing]
    np.testing.assert_array_equal(out.reshape(12, -1), layer(INTERPRETED.name, xs.reshape(12, -1), twice))


def test_a_nan_passes_a_clamp(rng):
    """Also where the kernel is compiled: its minimum of a NaN and a number is the number."""
    backend = "triton" if jax.default_backend() == "gpu" else INTERPRETED.name
    case = suited(backend, Case(tokens=20, activation=GPT_OSS))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    x[3] = np.nan
    y = call(backend, case, weights.experts(case), x, routing)
    assert np.isnan(y[3]).all()
    assert np.isfinite(np.delete(y, 3, axis=0)).all()


# Compiled


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 8, 9, 16, 17, 100, 1000])
@pytest.mark.parametrize("top_k", [1, 4])
def test_sizes_of_gpt_oss(tokens, top_k, rng):
    battery.check("triton", Case(tokens=tokens, top_k=top_k, hidden=2880, intermediate=2880, dtype="bfloat16"), rng)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("tokens", [1, 5, 40, 600])
def test_every_format(tokens, name, rng):
    battery.check("triton", of_format(name, tokens), rng)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("name", ["int4_g32", "int4_g64_asym", "int4_g128_asym_order", "int4_channel"])
@pytest.mark.parametrize("tokens", [1, 40, 600])
def test_formats_with_scales_of_every_dtype(tokens, name, dtype, rng):
    case = suited("triton", of_format(name, tokens))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    weights = with_scales(weights, dtype)
    y = call("triton", case, weights.experts(case), x, routing)
    assert_agrees("triton", case, y, reference(case, weights, x, routing))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nvfp4", "int4_g32"])
@pytest.mark.parametrize("tokens", [3, 100])
def test_a_scale_of_any_format_that_is_nan_on_a_gpu(tokens, name, rng):
    a_nan_scale("triton", name, tokens, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4_g32_asym", "int4_channel_asym"])
@pytest.mark.parametrize("tokens", [1, 20, 200, 2000])
def test_every_candidate_agrees(tokens, name, rng):
    case = suited("triton", Case(tokens=tokens, hidden=480, intermediate=416, dtype="bfloat16", format=name))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    expected = reference(case, weights, x, routing)
    for config in Triton().candidates(case.problem(), Environment.probe()):
        with tuning.override("triton", config):
            y = call("triton", case, weights.experts(case), x, routing)
        assert_agrees("triton", case, y, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [260, 520])
def test_the_last_expert_of_an_array_beyond_32_bits(num_experts):
    """Between 2 and 4 GiB of values, and above."""
    order = "interleaved"

    @jax.jit
    def draw():
        return Experts.random(jax.random.key(0), num_experts, 2880, 2880, gate_up_order=order, bias=False)

    experts = draw()
    assert (experts.gate_up.values.size > 2**32) == (num_experts == 520)
    last = jax.tree.map(lambda array: array[-1:], (experts.gate_up, experts.down))
    x = jax.random.normal(jax.random.key(1), (3, 2880), jnp.bfloat16)
    ys = [
        jmx.moe(x, Routing(jnp.full((3, 1), e - 1), jnp.ones((3, 1))), held, activation=GPT_OSS, backend="triton")
        for e, held in ((num_experts, experts), (1, Experts.of(*last, gate_up_order=order)))
    ]
    assert np.asarray(ys[0], np.float32).any()
    np.testing.assert_array_equal(ys[0], ys[1])
