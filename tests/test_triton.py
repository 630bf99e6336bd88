"""The backend `triton` beyond the battery: who gets it and what it refuses; interpreted on a CPU, how it cuts and
decodes; and on a GPU, what only a compiled kernel shows."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
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
    call,
    draw_routing,
    draw_weights,
    draw_x,
    reference,
    suited,
)
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from ptx import halves, run_ptx

import jmx
from jmx import GELU, Environment, Experts, GELUAndMul, NoBackendError, Reason, Routing, SiLU, tuning
from jmx.backends import BACKENDS
from jmx.pallas import triton_decode
from jmx.pallas.triton import Triton
from jmx.pallas.triton_config import Config
from jmx.selection import select

PROBLEM = Case(dtype="bfloat16").problem()
AMPERE, HOPPER = Environment.named("a100"), Environment.named("h200")


@pytest.fixture(autouse=True)
def interpreted_too(monkeypatch):
    monkeypatch.setattr("jmx.layer.BACKENDS", TESTED)


# Who gets it


@pytest.mark.parametrize(
    ("change", "reason", "told"),
    [
        ({"dtype": "float32"}, Reason.DTYPE, "float32"),
        ({"layout": "canonical"}, Reason.LAYOUT, "'canonical'"),
        ({"format": "nvfp4"}, Reason.FORMAT, "'nvfp4'"),
        ({"input_format": "mxfp8"}, Reason.INPUT_FORMAT, "'mxfp8'"),
        ({"num_tokens": None}, Reason.SYMBOLIC_TOKENS, "symbolic"),
    ],
)
def test_what_it_refuses_of_a_problem(change, reason, told):
    assert Triton().supports(PROBLEM, AMPERE) is None
    rejection = Triton().supports(dataclasses.replace(PROBLEM, **change), AMPERE)
    assert rejection is not None
    assert rejection.reason is reason
    assert told in rejection.detail


@pytest.mark.parametrize(
    ("environment", "reason", "told"),
    [
        (Environment.named("cpu"), Reason.PLATFORM, "'cpu', not 'gpu'"),
        (Environment.named("b200"), Reason.COMPUTE_CAPABILITY, "(10, 0) is none of (8, 0)"),
        (Environment("gpu", "Tesla T4", (7, 5)), Reason.COMPUTE_CAPABILITY, "(7, 5)"),
        (Environment("gpu", "unknown"), Reason.COMPUTE_CAPABILITY, "None"),
    ],
)
def test_what_it_refuses_of_a_machine(environment, reason, told):
    rejection = Triton().supports(PROBLEM, environment)
    assert rejection is not None
    assert rejection.reason is reason
    assert told in rejection.detail


def test_interpreted_it_runs_on_a_cpu_alone():
    assert INTERPRETED not in BACKENDS
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
        ("b200", {}, False),
        ("h200", {"layout": "mosaic_sm90"}, False),
    ],
)
def test_where_it_is_chosen(device, change, runs):
    problem, environment = dataclasses.replace(PROBLEM, **change), Environment.named(device)
    assert (Triton().supports(problem, environment) is None) == runs
    assert (select(problem, environment, None, BACKENDS).backend.name == "triton") == runs


def test_asked_for_where_it_cannot_run_it_says_what_would_help():
    problem = dataclasses.replace(PROBLEM, layout="mosaic_sm90")
    with pytest.raises(NoBackendError, match=r"triton: layout: .* experts\.prepare\('packed'\)"):
        select(problem, HOPPER, "triton", BACKENDS)


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
def test_cases_of_all_kinds(case, rng):
    battery.check(INTERPRETED.name, case, rng)


# The whole battery takes minutes; `-m slow` runs it.
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
        (battery.test_inside_shard_map, {"tokens": 64}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_part_of_the_battery_that_always_runs(test, options, rng):
    test(INTERPRETED.name, rng=rng, **options)


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
        Config(16, 128, 128, 4, 3, split_k=3),  # of two steps, so that one part is empty
        Config(32, 64, 512, 4, 2),
        Config(64, 32, 64, 4, 2, products=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [3, 50])
def test_however_it_is_cut(tokens, config, rng):
    """Sizes that no tile divides: 160 and 224 columns, quarters of 40 and 56 of them."""
    case = Case(tokens=tokens, hidden=160, intermediate=224, num_experts=4, dtype="bfloat16")
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    with tuning.override(INTERPRETED.name, config):
        y = call(INTERPRETED.name, case, weights.experts(case), x, routing)
    assert_agrees(INTERPRETED.name, case, y, reference(case, weights, x, routing))


# Decoding: interpreted, as PTX run in numpy, and on a GPU

SCALES = np.arange(256, dtype=np.uint8)


def every_code():
    """int16 (256, 16): of each row, words with every code at every place, among others at the other places."""
    places = (np.arange(16)[:, None] + [0, 5, 10, 15]) % 16
    word = np.bitwise_or.reduce(places << np.arange(0, 16, 4), axis=1)
    return np.broadcast_to(word.astype(np.uint16).view(np.int16), (256, 16))


def elements(words, place):
    """The code at `place` of each word, as float64."""
    codes = (words.view(np.uint16) >> 4 * place & 15).astype(np.uint8)
    return codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def weights_of(words, scales, place):
    """Elements times their scales, rounded to bfloat16, which makes infinities of what it does not hold."""
    exact = elements(words, place) * scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return np.where(np.abs(exact) < 2.0**128, exact, np.copysign(np.inf, exact)) + 0 * exact


def test_every_code_under_every_scale_interpreted():
    """Exact as far as bfloat16 holds it, but that XLA on a CPU makes zeros of subnormal results."""
    words = every_code()
    decode = jax.jit(triton_decode.weights_by_place, static_argnums=2)
    normal = []
    for place, found in enumerate(decode(words, SCALES[:, None], True)):
        found, expected = np.asarray(found, np.float64), weights_of(words, SCALES[:, None], place)
        assert np.isnan(found[255]).all()
        normal.append(~(np.abs(expected) < 2.0**-126))
        np.testing.assert_array_equal(found[normal[-1]], expected[normal[-1]])
        assert ((found == expected) | (found == 0))[~normal[-1]].all()
    assert np.mean(normal) > 0.85


def run_both(place, words, scales):
    """float64 (..., 2) of the kernel's PTX, from uint16 words and uint8 scale codes (..., 2): in both its forms."""
    words, scales = (pair.astype(np.uint32)[..., 0] | pair.astype(np.uint32)[..., 1] << 16 for pair in (words, scales))
    powers = run_ptx(triton_decode.POWERS, scales)
    found = run_ptx(triton_decode.WEIGHTS[place], words, powers)
    signs, turn = triton_decode.SIGNS[place // 2], triton_decode.TURNS[place]
    np.testing.assert_array_equal(run_ptx(triton_decode.WEIGHTS_OF_ANY, words, powers, signs, signs, turn, turn), found)
    return halves(found)


@pytest.mark.parametrize("place", range(4))
def test_the_ptx_of_every_word_beside_every_other(place, rng):
    """All words in either half of a register, next to one of each other's, under scales that differ."""
    words = np.stack([np.arange(1 << 16, dtype=np.uint16), rng.permutation(1 << 16).astype(np.uint16)], axis=1)
    scales = rng.integers(0, 255, words.shape, np.uint8)
    np.testing.assert_array_equal(run_both(place, words, scales), weights_of(words, scales, place))


@pytest.mark.parametrize("place", range(4))
def test_the_ptx_of_every_code_under_every_scale(place):
    words = np.repeat(every_code()[:255, :, None], 2, axis=2).view(np.uint16)
    scales = np.broadcast_to(SCALES[:255, None, None], words.shape)
    np.testing.assert_array_equal(run_both(place, words, scales), weights_of(words, scales, place))


def test_the_turned_order(rng):
    for columns in (64, 96, 320):
        x = rng.standard_normal((3, columns)).astype(np.float32)
        found = np.asarray(triton_decode.turned(jnp.asarray(x)))
        column = triton_decode.column_at(np.arange(found.shape[1]))
        np.testing.assert_array_equal(found[:, column < columns], x[:, column[column < columns]])
        assert (found[:, column >= columns] == 0).all()
        for place in range(4):
            word = np.arange(columns // 4)
            np.testing.assert_array_equal(column[triton_decode.index_of(place, word)], 4 * word + place)


def test_weights_of_all_places_are_in_the_turned_order(rng):
    words, codes = rng.integers(-(2**15), 2**15, (16, 32), np.int16), rng.integers(100, 140, (16, 4), np.uint8)
    by_place = triton_decode.weights_by_place(jnp.asarray(words), jnp.asarray(codes), True)
    whole = jnp.stack(by_place, axis=2).reshape(16, 128)
    tables = jnp.asarray(triton_decode.SIGNS), jnp.asarray(triton_decode.TURNS)
    found = triton_decode.weights_turned(jnp.asarray(words), jnp.asarray(codes), True, *tables)
    np.testing.assert_array_equal(found, triton_decode.turned(whole))


@pytest.mark.gpu
@pytest.mark.parametrize("products", [1, 4])
def test_every_code_under_every_scale_on_a_gpu(products):
    """Every word under a scale of its group's own, and another, and another; the groups of a row differ."""
    words = np.arange(1 << 16, dtype=np.uint16).view(np.int16).reshape(256, 256)

    def kernel(words, codes, signs, turns, out):
        if products == 1:
            weights = triton_decode.weights_turned(words[...], codes[...], False, signs[...], turns[...])
            plgpu.store(out.at[...], weights)
            return
        for place, weights in enumerate(triton_decode.weights_by_place(words[...], codes[...], False)):
            at = triton_decode.index_of(place, jnp.arange(256))[None, :]
            plgpu.store(out.at[jnp.arange(256)[:, None], at], weights)

    @jax.jit
    def decode(words, codes):
        shape = jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16)
        call = pl.pallas_call(kernel, out_shape=shape, compiler_params=plgpu.CompilerParams(num_warps=16))
        return call(words, codes, triton_decode.SIGNS, triton_decode.TURNS)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        for turn in range(0, 256, 32):
            codes = np.minimum(np.roll(SCALES, turn)[:, None] ^ np.arange(32, dtype=np.uint8), 254)
            expected = [weights_of(words, np.repeat(codes, 8, axis=1), place) for place in range(4)]
            column = triton_decode.column_at(np.arange(1024))
            expected = np.stack(expected, axis=2).reshape(256, 1024)[:, column]
            np.testing.assert_array_equal(np.asarray(decode(words, codes), np.float64), expected)


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
@pytest.mark.parametrize("tokens", [1, 16, 17, 100, 1000])
@pytest.mark.parametrize("top_k", [1, 4])
def test_sizes_of_gpt_oss(tokens, top_k, rng):
    battery.check("triton", Case(tokens=tokens, top_k=top_k, hidden=2880, intermediate=2880, dtype="bfloat16"), rng)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 20, 200, 2000])
def test_every_candidate_agrees(tokens, rng):
    case = suited("triton", Case(tokens=tokens, hidden=480, intermediate=416, dtype="bfloat16"))
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
