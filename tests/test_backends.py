"""The tests that every backend must pass."""

import contextlib
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend_cases import (
    ACTIVATIONS,
    BOTH,
    GPT_OSS,
    IDS,
    INTERPRETED,
    MODELS,
    NAN,
    NEITHER,
    ONE,
    ROUNDED_INPUTS,
    TAKES,
    TESTED,
    TOLERANCE,
    Case,
    assert_agrees,
    call,
    draw_routing,
    draw_weights,
    draw_x,
    form,
    layer,
    reference,
    suited,
)
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from properties import examples

import jmx
from jmx import Experts, ReLU2, Routing, SiLU, SiLUAndMul, SwiGLU
from jmx.backends import registered_backends
from jmx.numerics.formats import FORMATS
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.selection.registry import Registry

SIZES = [
    Case(tokens=0),
    Case(tokens=0, dtype="bfloat16", jit=False),
    Case(tokens=1, top_k=1, num_experts=1, hidden=32, intermediate=32),
    Case(tokens=1, top_k=8, dtype="bfloat16"),
    Case(tokens=1, top_k=4, dtype="float16", layout="canonical"),
    Case(tokens=2, top_k=3, num_experts=3, hidden=160, intermediate=32, jit=False),
    Case(tokens=5, top_k=1, num_experts=3, dtype="bfloat16", hidden=96, intermediate=160, layout="canonical"),
    Case(tokens=5, top_k=8, dtype="float16", hidden=32, intermediate=192),
    Case(tokens=64, top_k=1, num_experts=1, dtype="bfloat16"),
    Case(tokens=64, top_k=3, layout="canonical"),
    Case(tokens=64, top_k=2, dtype="float16", jit=False),
    Case(tokens=300, top_k=2, hidden=96, intermediate=64),
    Case(tokens=300, top_k=4, dtype="bfloat16"),
    Case(tokens=300, top_k=3, num_experts=3, dtype="float16"),
]
COMPUTATIONS = [
    Case(activation=activation, order=order, bias=bias, weights_on=weights_on)
    for activation, order, bias, weights_on in [
        *((a, "interleaved" if a.gated else None, BOTH, "output") for a in ACTIVATIONS),
        *((a, "concatenated" if a.gated else None, NEITHER, "input") for a in ACTIVATIONS),
        (GPT_OSS, "interleaved", (True, False), "output"),
        (GPT_OSS, "concatenated", (False, True), "output"),
        (GPT_OSS, "interleaved", (False, True), "input"),
        *(
            (GPT_OSS, f"{order}_up_first", bias, "output")
            for order in ("interleaved", "concatenated")
            for bias in (BOTH, NEITHER)
        ),
        (SiLU(), None, (True, False), "input"),
    ]
]
ROUTINGS = [
    Case(tokens=tokens, top_k=top_k, ids=ids, layout=layout)
    for ids in IDS
    if ids != "distinct"
    for tokens, top_k, layout in [(1, 4, "canonical"), (300, 3, "packed")]
]
REAL = [
    dataclasses.replace(case, tokens=tokens, note=f"{name}-{tokens}")
    for name, case in MODELS.items()
    for tokens in (1, 64)
]


FORMS = [
    {"tokens": 1, "order": "interleaved", "dtype": "bfloat16"},
    {"tokens": 40, "order": "concatenated", "layout": "canonical", "bias": NEITHER},
    {"tokens": 300, "order": None, "activation": SiLU(), "weights_on": "input", "dtype": "bfloat16"},
]


def other_formats(environment):
    """Every format under every format of inputs, on each backend that takes the two.

    Each in all of `FORMS`, except on the reference. It takes by far the most pairs, and its dequantization, its
    rounding of inputs and the rest do not depend on each other: there each pair has one form.
    """
    sizes = {"top_k": 2, "num_experts": 4, "hidden": 256, "intermediate": 128}
    found = []
    for (i, format), (j, inputs) in itertools.product(enumerate(FORMATS), enumerate((None, *INPUT_FORMATS))):
        forms = [Case(format=format, input_format=inputs, **sizes, **how) for how in FORMS]
        for backend in registered_backends():
            of_backend = [forms[(i + j) % len(forms)]] if backend.name == "xla" else forms
            taken = ((case, form(backend, case, environment)) for case in of_backend)
            found += [
                (backend.name, case)
                for case, suits in taken
                if isinstance(suits, Case) and suits.input_format == inputs
            ]
    return found


OTHER_FORMATS = other_formats(jmx.Environment.probe())

# What is interpreted takes minutes; tests/test_triton.py has a part of it that always runs.
NAMES = [*(b.name for b in registered_backends()), pytest.param(INTERPRETED.name, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def interpreted_too(monkeypatch):
    monkeypatch.setattr("jmx.backends.REGISTRY", Registry(TESTED))


@pytest.fixture(params=NAMES)
def backend(request):
    return request.param


def check(backend, case, rng):
    case = suited(backend, case)
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    y = call(backend, case, weights.experts(case), x, routing)
    assert_agrees(backend, case, y, reference(case, weights, x, routing))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", SIZES, ids=str)
def test_sizes_and_dtypes(backend, case, rng):
    check(backend, case, rng)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("backend", "case"), OTHER_FORMATS, ids=str)
def test_other_formats(backend, case, rng):
    check(backend, case, rng)


def test_other_formats_are_all_that_a_backend_takes():
    """Also for a GPU that is not here: its backends are asked about their own layouts."""
    found = {backend.name: set() for backend in registered_backends()}
    for name, case in other_formats(jmx.Environment.named("h200")):
        found[name].add((case.format, case.input_format))
    unquantized = {name for name, format in FORMATS.items() if format.is_float}
    by_row = {"fp8_static", "fp8_token", "int8_token"}  # those whose scales no order of columns disturbs
    assert found["mosaic"] == {
        (format, inputs)
        for format, inputs in itertools.product(FORMATS.keys() - unquantized, (None, *INPUT_FORMATS))
        if inputs in (None, *by_row) or (inputs not in ("fp8_block", "fp8_tensor") and not format.endswith("_order"))
    }
    not_int8 = ["mxfp4", "fp8_tensor", "fp8_channel", "fp8_block", "int4_g128", "int4_channel"]
    integers = ["int4_g128", "int4_channel", "int8_g128", "int8_channel"]
    assert found["mosaic_fp8"] == {
        *itertools.product(not_int8, ["fp8_static", "fp8_tensor", "fp8_token", "fp8_block"]),
        *itertools.product(integers, ["int8_token"]),
    }
    assert found["mosaic_float"] == {(format, None) for format in unquantized}
    assert found["xla"] == {*itertools.product(FORMATS, (None, *INPUT_FORMATS))}
    assert {("nvfp4", None), ("int4_g64_asym_order", None)} < found["triton"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [2, 64])
def test_an_order_of_columns(backend, tokens, dtype, rng):
    """With several experts at a time, each of which has its own order."""
    check(backend, Case(tokens=tokens, hidden=64, intermediate=96, dtype=dtype, format="int4_g32_order"), rng)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", COMPUTATIONS, ids=str)
def test_activations_biases_and_weights(backend, case, rng):
    check(backend, case, rng)


@pytest.mark.parametrize("case", ROUTINGS, ids=str)
def test_routings(backend, case, rng):
    check(backend, case, rng)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", REAL, ids=str)
def test_model_shapes(backend, case, rng):
    check(backend, case, rng)


@pytest.mark.parametrize("name", NAMES)
@examples(4)  # each compiles anew
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(0, 40),
    hidden=st.integers(1, 5),
    intermediate=st.integers(1, 5),
    num_experts=st.integers(1, 9),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    ids=st.sampled_from(["repeated", "anywhere", "every_third"]),
    layout=st.sampled_from(["packed", "canonical"]),
    computation=st.sampled_from(COMPUTATIONS),
    top_k=st.integers(1, 5),
)
def test_any_case(name, seed, hidden, intermediate, computation, **sizes):
    case = dataclasses.replace(computation, hidden=32 * hidden, intermediate=32 * intermediate, **sizes)
    check(name, case, np.random.default_rng(seed))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("weights_on", ["output", "input"])
def test_weights_of_zero_and_large_ones(backend, weights_on, rng):
    case = suited(backend, Case(activation=SiLUAndMul(), weights_on=weights_on, tokens=64))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    scale = rng.choice([0.0, 1e-6, 1.0, 100.0], routing.weights.shape).astype(np.float32)
    routing = routing._replace(weights=routing.weights * scale)
    y = call(backend, case, weights.experts(case), x, routing)
    assert_agrees(backend, case, y, reference(case, weights, x, routing))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("jit", [True, False])
def test_ids_of_any_integer_dtype(backend, dtype, jit, rng):
    """256 experts: more than a byte counts."""
    case = suited(backend, Case(tokens=64, top_k=4, num_experts=256, hidden=32, intermediate=32))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    limits = np.iinfo(dtype)
    ids = (routing.expert_ids % min(case.num_experts, limits.max + 1)).astype(dtype)
    # Beyond int32, where the value that its low bits make is an expert's.
    outside = [v for v in (-1, -128, limits.min, limits.max, 2**32, 2**32 + 3) if limits.min <= v <= limits.max]
    ids = np.where(rng.random(ids.shape) < 0.3, rng.choice(np.array(outside, dtype), ids.shape), ids)
    routing = Routing(ids, routing.weights)
    experts = weights.experts(case)

    def run(x):  # the ids as constants, since an argument of jit is narrowed before the layer sees it
        return layer(x, routing, experts, None, case.activation, case.weights_on, backend)

    y = (jax.jit(run) if jit else run)(x)
    assert_agrees(backend, case, y, reference(case, weights, x, routing))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32])
def test_traced_ids_of_any_integer_dtype(backend, dtype, rng):
    case = suited(backend, Case(tokens=64, top_k=4, num_experts=256, hidden=32, intermediate=32))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    routing = routing._replace(expert_ids=routing.expert_ids.astype(dtype))  # int8 makes half of them negative
    y = call(backend, case, weights.experts(case), x, routing)
    assert_agrees(backend, case, y, reference(case, weights, x, routing))


@pytest.mark.parametrize("tokens", [1, 64])
def test_masked_tokens_route_nowhere(backend, tokens, rng):
    case = suited(backend, Case(tokens=tokens, dtype="bfloat16"))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    mask = rng.random(tokens) < 0.5
    mask[0] = False
    x[~mask] = np.nan  # padding may hold anything
    y = call(backend, case, weights.experts(case), x, routing, mask)
    assert not y[~mask].any()
    expected = reference(case, weights, np.where(mask[:, None], x, 0).astype(x.dtype), routing, mask)
    assert_agrees(backend, case, y, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("dtype", "tokens"), [("float32", 6), ("float32", 64), ("bfloat16", 64)])
def test_a_bad_token_keeps_to_itself(backend, bad, dtype, tokens, rng):
    case = suited(backend, Case(tokens=tokens, top_k=3, dtype=dtype, activation=SiLUAndMul()))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts = weights.experts(case)
    clean = call(backend, case, experts, x, routing)
    x[3, 5] = bad
    y = call(backend, case, experts, x, routing)
    others = np.arange(case.tokens) != 3
    assert not np.isfinite(y[3]).any()
    np.testing.assert_array_equal(y[others], clean[others])


def test_a_bad_routing_weight_keeps_to_its_token(backend, rng):
    case = suited(backend, Case(tokens=64, top_k=3))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts = weights.experts(case)
    clean = call(backend, case, experts, x, routing)
    routing.weights[40, 1] = np.nan
    y = call(backend, case, experts, x, routing)
    others = np.arange(case.tokens) != 40
    assert np.isnan(y[40]).all()
    np.testing.assert_array_equal(y[others], clean[others])


@pytest.mark.parametrize("tokens", [0, 1, 5, 64])
@pytest.mark.parametrize("layout", ["packed", "canonical"])
def test_unused_experts_may_hold_nan(backend, tokens, layout, rng):
    case = suited(backend, Case(tokens=tokens, ids="every_third", layout=layout))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    routing.expert_ids[::4] = -1  # the first token, too, uses none
    unused = np.setdiff1d(np.arange(case.num_experts), routing.expert_ids)
    expected = reference(case, weights, x, routing)
    for array in (weights.gate_up[1], weights.down[1]):
        array[unused] = NAN
    for bias in weights[2:]:
        assert bias is not None
        bias[unused] = np.nan
    y = call(backend, case, weights.experts(case), x, routing)
    assert_agrees(backend, case, y, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [0, 1, 253, 254])
@pytest.mark.parametrize("tokens", [2, 64])
def test_extreme_scales(backend, tokens, dtype, scale, rng):
    """One block in three has the scale, elements whose product with it is normal, and an x that nearly balances it."""
    if backend == "cutlass" and scale == 0:
        pytest.skip("it reads the least scale, 2^-127, as zero")
    if backend == "mosaic_fp8" and scale < ONE:
        pytest.skip("it reads blocks 27 octaves and more below their row's largest as zeros")
    case = suited(backend, Case(tokens=tokens, hidden=96, dtype=dtype, bias=NEITHER, activation=SwiGLU()))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    codes, scales = weights.gate_up
    scales[..., 1] = scale
    elements = [0, 1, 2, 3, 8, 9, 10, 11] if scale > ONE else [0, 4, 5, 6, 7, 12, 13, 14, 15]
    codes[..., 32:64] = rng.choice(np.array(elements, np.uint8), codes[..., 32:64].shape)
    x[:] = 0
    magnitudes = rng.uniform(1, 2, (tokens, 32)) * 2.0 ** (-100 if scale > ONE else 110)
    x[:, 32:64] = (magnitudes * rng.choice([-1, 1], magnitudes.shape)).astype(x.dtype)
    # The rows' other blocks are that far below here, and meet an x of 0.
    reported = pytest.warns(UserWarning, match="blocks of gate_up, whose scales are too far below")
    with reported if backend == "mosaic_fp8" else contextlib.nullcontext():
        y = call(backend, case, weights.experts(case), x, routing)
    assert_agrees(backend, case, y, reference(case, weights, x, routing))


@pytest.mark.parametrize("tokens", [2, 64])
def test_a_nan_block_reaches_the_tokens_of_its_expert(backend, tokens, rng):
    if backend in ("mosaic", "cutlass"):
        pytest.skip("what it makes of a NaN scale is not promised: checkpoints that hold one are refused")
    case = suited(backend, Case(tokens=tokens, num_experts=8, top_k=1))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    routing.expert_ids[0], routing.expert_ids[1] = 3, 4
    expected = reference(case, weights, x, routing)
    weights.down[1][3, 7, 0] = NAN
    y = call(backend, case, weights.experts(case), x, routing)
    hit = np.zeros(y.shape, bool)
    hit[routing.expert_ids[:, 0] == 3, 7] = True
    assert hit.any()
    assert np.isnan(y[hit]).all()
    assert_agrees(backend, case, np.where(hit, 0, y), np.where(hit, 0, expected))


@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("layout", ["packed", "canonical"])
@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", ["eager view", "scan over views", "scan over arrays"])
def test_stacked_layers(backend, tokens, layout, form, rng):
    case = suited(backend, Case(tokens=tokens, hidden=64, intermediate=32, activation=GPT_OSS))
    layers = [draw_weights(rng, case) for _ in range(3)]
    x, routing = draw_x(rng, case), draw_routing(rng, case)
    stack = Experts.stack([weights.experts(case) for weights in layers])

    def run(experts):
        return jmx.moe(x, routing, experts, activation=case.activation, backend=backend)

    if form == "eager view":
        outs = [run(stack.layer(i)) for i in range(3)]
    elif form == "scan over views":
        numbers = jnp.array([-3, 1, 7])  # clamped to 0, 1, 2
        scan = jax.jit(lambda stack: jax.lax.scan(lambda _, i: (None, run(stack.layer(i))), None, numbers))
        outs = scan(stack)[1]
    else:
        outs = jax.jit(lambda stack: jax.lax.scan(lambda _, e: (None, run(e)), None, stack))(stack)[1]
    for y, weights in zip(outs, layers, strict=True):
        assert_agrees(backend, case, y, reference(case, weights, x, routing))


@pytest.mark.parametrize("leading", [(), (3,), (2, 0), (2, 3, 4)], ids=str)
def test_leading_axes(backend, leading, rng):
    case = suited(backend, Case(tokens=int(np.prod(leading)), dtype="bfloat16"))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    mask = rng.random(case.tokens) < 0.7
    shaped = jax.tree.map(lambda a: a.reshape((*leading, *a.shape[1:])), (x, routing, mask))
    y = call(backend, case, weights.experts(case), *shaped)
    assert_agrees(backend, case, y.reshape(x.shape), reference(case, weights, x, routing, mask))


def test_a_run_repeats_bit_for_bit(backend, rng):
    for case in (Case(tokens=300, top_k=8, dtype="bfloat16"), Case(tokens=1, top_k=8)):
        case = suited(backend, case)
        weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
        experts = weights.experts(case)
        first = call(backend, case, experts, x, routing)
        for _ in range(10):
            np.testing.assert_array_equal(call(backend, case, experts, x, routing), first)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [2, 40, 300])
def test_a_token_does_not_depend_on_its_neighbours(backend, tokens, dtype, rng):
    case = suited(backend, Case(tokens=tokens, top_k=4, dtype=dtype, hidden=160))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts = weights.experts(case)
    first = call(backend, case, experts, x, routing)
    kept = rng.random(tokens) < 0.3
    kept[rng.integers(tokens)] = True
    for ids in ("distinct", "one_expert", "anywhere", "nowhere"):
        other = dataclasses.replace(case, ids=ids)
        new_x, new_routing = draw_x(rng, other), draw_routing(rng, other)
        x2 = np.where(kept[:, None], x, new_x)
        routing2 = Routing(*(np.where(kept[:, None], a, b) for a, b in zip(routing, new_routing, strict=True)))
        np.testing.assert_array_equal(call(backend, case, experts, x2, routing2)[kept], first[kept])


def test_large_outputs_overflow_to_infinity_in_float16(backend, rng):
    case = suited(backend, Case(tokens=5, dtype="float16", activation=ReLU2(), order=None))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    weights.gate_up[1][:] += 6
    expected = reference(case, weights, x, routing)
    assert (np.abs(expected) > 70000).any()
    y = call(backend, case, weights.experts(case), x, routing)
    # Sums cancel, so errors go by the size of all elements, not of their own.
    tolerance = TOLERANCE[TAKES.get(backend, case.dtype)] * (ROUNDED_INPUTS if case.input_format else 1)
    margin = 8 * tolerance * np.sqrt(np.square(expected).mean())
    far, near = np.abs(expected) > 65520 + margin, np.abs(expected) < 65520 - margin
    assert far.any()
    assert near.any()
    np.testing.assert_array_equal(y[far], np.sign(expected[far]) * np.inf)
    assert np.linalg.norm(y[near] - expected[near]) <= 2 * tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("tokens", [1, 64])
def test_x_may_be_donated(backend, tokens, rng):
    case = suited(backend, Case(tokens=tokens))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts, given = weights.experts(case), jnp.array(x)
    y = jax.jit(lambda x: layer(x, routing, experts, None, case.activation, "output", backend), donate_argnums=0)(given)
    assert given.is_deleted()
    assert_agrees(backend, case, y, reference(case, weights, x, routing))


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("tokens", [1, 64])
def test_inside_shard_map(backend, tokens, check, rng):
    case = suited(backend, Case(tokens=tokens))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts = weights.experts(case)
    here = [*experts.gate_up.values.devices()]  # a CPU's for an interpreted kernel, though a GPU is the default
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=here)
    run = jax.shard_map(
        lambda x, routing, experts: layer(x, routing, experts, None, case.activation, "output", backend),
        mesh=mesh,
        in_specs=(P("x"), P("x"), P()),
        out_specs=P("x"),
        check_vma=check,
    )
    y = jax.jit(run)(x, routing, experts)
    assert_agrees(backend, case, y, reference(case, weights, x, routing))
