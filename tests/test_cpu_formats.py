"""The backend `cpu` beyond MXFP4: NVFP4, INT4 in groups, and INT4 times int8 tokens.

`tests/test_backends.py` has the layer in every format, in 16 and 32 bits; here are the kernels' own promises, what rows
go through before a product, and the layer with inputs in int8.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from backend_cases import Case, activated, assert_close, assert_rejects, draw_routing, draw_weights, draw_x
from cpu_product import product
from dequantized import by_column, dequantized
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

import jmx
from jmx import Environment, Reason
from jmx.ffi.cpu import backend as cpu
from jmx.ffi.cpu import library as ffi
from jmx.ffi.cpu.backend import Cpu
from jmx.numerics import input_formats
from jmx.numerics.formats import FORMATS, WHOLE_ROW, BlockScaled, unpack

pytestmark = [pytest.mark.costly, pytest.mark.usefixtures("on_cpu"), pytest.mark.sampled(3)]
FOUND = ffi.library()
KERNELS = FOUND.kernels
built = pytest.mark.skipif(FOUND.fault is not None, reason=str(FOUND.fault))
HERE = Environment.named("cpu")
BFLOAT16, FLOAT16, FLOAT32 = (np.dtype(d) for d in (ml_dtypes.bfloat16, np.float16, np.float32))
# x's dtype, and the most rows an expert, or 0.
FLOATS = [(FLOAT32, 0), (BFLOAT16, 0), (BFLOAT16, 4), (BFLOAT16, 1)]
INT8 = (np.dtype(np.int8), 0)

# A format and its scales' dtype.
FORMS = [
    ("nvfp4", None),
    ("mxint4", BFLOAT16),
    ("int4_g32", FLOAT16),
    ("int4_g32_asym", FLOAT32),
    ("int4_g64", FLOAT32),
    ("int4_g64_asym", BFLOAT16),
    ("int4_g128", BFLOAT16),
    ("int4_g128_asym", FLOAT16),
    ("int4_channel", FLOAT32),
    ("int4_channel_asym", BFLOAT16),
]


def ways(name):
    return FLOATS + [INT8] * (FORMATS[name].element_dtype == jnp.int4)


def draw(rng, name, columns, k, scale_dtype):
    """A packed weight of numpy, any codes and zero points, scales within some octaves."""
    abstract = FORMATS[name].abstract((columns, k), packed=True, scale_dtype=scale_dtype)
    values = rng.integers(0, 256, abstract.values.shape).astype(np.uint8)
    if name == "nvfp4":
        codes = rng.integers(0x20, 0x50, abstract.scales.shape).astype(np.uint8)
        return BlockScaled(values, codes, rng.normal(0, 1, columns).astype(np.float32))
    scales = (rng.uniform(0.5, 4, abstract.scales.shape) * rng.choice([-1, 1], abstract.scales.shape)).astype(
        scale_dtype
    )
    zeros = rng.integers(-8, 8, abstract.scales.shape).astype(np.int8) if abstract.zero_points is not None else None
    return BlockScaled(values, scales, zero_points=zeros)


def draw_rows(rng, rows, k, dtype):
    """x, the scale of its rows or None, and x in float64."""
    if dtype == np.int8:
        x, scales = rng.integers(-127, 128, (rows, k)).astype(np.int8), rng.uniform(0.1, 1, rows).astype(np.float32)
        return x, scales, x * scales[:, None].astype(np.float64)
    x = rng.standard_normal((rows, k)).astype(dtype)
    return x, None, x.astype(np.float64)


def magnitudes(weight, format):
    """What sums of products are rounded against: |element| and |zero point| times |scale|."""
    canonical = unpack(weight, format)
    w = np.abs(dequantized(canonical, format))
    if weight.zero_points is None:
        return w
    scales = np.abs(by_column(weight.scales.astype(np.float64), format, w.shape[-1]))
    return w + 2 * scales * np.abs(by_column(weight.zero_points.astype(np.float64), format, w.shape[-1]))


def tolerance(instructions, name, dtype, few):
    """Of a sum, against the sum of its terms' magnitudes."""
    rounds_weights = instructions.endswith("_bf16") and dtype == BFLOAT16 and not few and name != "nvfp4"
    return 2**-8 if rounds_weights else 1e-6


# The kernels, without XLA


@built
@examples(100)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 20),
    columns=st.integers(1, 6),
    blocks=st.integers(1, 24),
    form=st.sampled_from(FORMS),
    before=st.integers(0, 15),
)
def test_any_sizes_at_any_address(seed, rows, columns, blocks, form, before):
    rng = np.random.default_rng(seed)
    name, scale_dtype = form
    format = FORMATS[name]
    k = blocks * (2 * rng.integers(1, 20) if format.block_size == WHOLE_ROW else format.block_size)
    weight = draw(rng, name, 4 * columns, k, scale_dtype)
    w, terms = dequantized(unpack(weight, format), format), magnitudes(weight, format)
    bias = rng.standard_normal(4 * columns).astype(np.float32)
    for dtype, few in ways(name):
        x, scales, x64 = draw_rows(rng, rows, k, dtype)
        expected, bound = x64 @ w.T + bias, np.abs(x64) @ terms.T + np.abs(bias)
        for instructions in KERNELS:
            y = product(instructions, x, weight, bias, format, few=few, x_scales=scales, before=before)
            assert (np.abs(y - expected) <= tolerance(instructions, name, dtype, few) * bound).all(), (
                instructions,
                dtype,
            )


@built
@pytest.mark.parametrize(("name", "scale_dtype"), FORMS)
def test_an_element_has_the_same_bits_in_any_piece(name, scale_dtype):
    rng = np.random.default_rng(0)
    format = FORMATS[name]
    k = 190 if format.block_size == WHOLE_ROW else 240 if name == "nvfp4" else 2 * format.block_size
    weight = draw(rng, name, 12, k, scale_dtype)
    bias = rng.standard_normal(12).astype(np.float32)
    for dtype, few in ways(name):
        x, scales, _ = draw_rows(rng, 19, k, dtype)
        for instructions in KERNELS:
            whole = product(instructions, x, weight, bias, format, few=few, x_scales=scales)
            for rows in (1, 2, 3, 4, 5, 6, 7, 12):
                for columns in (4, 8):
                    of = BlockScaled(*(None if a is None else a[:columns] for a in weight))
                    some = None if scales is None else scales[-rows:]
                    part = product(instructions, x[-rows:], of, bias[:columns], format, few=few, x_scales=some)
                    np.testing.assert_array_equal(part, whole[-rows:, :columns])


def one_weight(rows, k, at, dtype):
    x = np.zeros((rows, k), dtype)
    x[:, at] = 1
    return x


@built
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("instructions", KERNELS)
def test_every_code_of_nvfp4_under_every_scale(instructions, rows):
    """A one in x picks one weight: products are exact, and nothing is added to them but zeros."""
    format, global_scales = FORMATS["nvfp4"], np.float32(2.0) ** np.arange(-8, 8, dtype=np.float32)
    values = np.repeat((np.arange(16) * 0x11).astype(np.uint8)[:, None], 24, axis=1)
    elements = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    for code in range(256):
        for half in range(3):  # of a block, and alone at the end of a row
            scales = np.full((16, 3), 0x38, np.uint8)
            scales[:, half] = code
            scale = np.uint8(code).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
            expected = (elements * scale * global_scales).astype(np.float32)
            weight = BlockScaled(values, scales, global_scales)
            for dtype, few in FLOATS[code % 3 :][:1] if rows > 1 else FLOATS:
                x = one_weight(rows, 48, 16 * half + 5, dtype)
                y = product(instructions, x, weight, np.zeros(16, np.float32), format, few=few)
                np.testing.assert_array_equal(y, np.broadcast_to(expected, y.shape))


@built
@pytest.mark.parametrize("instructions", KERNELS)
@pytest.mark.parametrize("scale_dtype", [BFLOAT16, FLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("name", ["int4_g32_asym", "int4_channel_asym"])
def test_every_code_of_int4_under_every_zero_point_and_all_kinds_of_scales(instructions, scale_dtype, name):
    rng = np.random.default_rng(0)
    format = FORMATS[name]
    numbers = ml_dtypes.finfo(scale_dtype)
    least, most = float(numbers.smallest_normal), float(numbers.max) / 16
    kinds = [
        1,
        -1,
        least,
        most,
        *rng.normal(0, 1, 8),
        *([float(numbers.smallest_subnormal)] if scale_dtype == FLOAT16 else []),
    ]
    codes = np.arange(16, dtype=np.uint8)
    values = np.repeat((codes * 0x11)[:, None], 32, axis=1)
    integers = (codes.astype(np.int64) ^ 8) - 8
    for zero in range(-8, 8):
        for kind in kinds:
            blocks = 1 if format.block_size == WHOLE_ROW else 2
            scales = np.full((16, blocks), kind, np.float64).astype(scale_dtype)
            zeros = np.full((16, blocks), zero, np.int8)
            weight = BlockScaled(values, scales, zero_points=zeros)
            exact = (integers - zero) * scales[0, 0].astype(np.float64)
            for dtype, few in [FLOATS[zero % len(FLOATS)], INT8]:
                x = one_weight(1 + zero % 2 * 8, 64, 37, dtype)
                ones = np.ones(len(x), np.float32) if dtype == np.int8 else None
                y = product(instructions, x, weight, np.zeros(16, np.float32), format, few=few, x_scales=ones)
                expected = exact.astype(np.float32)
                if blocks > 1 and tolerance(instructions, name, dtype, few) > 1e-6:
                    expected = exact.astype(np.float32).astype(BFLOAT16).astype(np.float32)
                np.testing.assert_array_equal(y, np.broadcast_to(expected, y.shape))


@built
def test_integers_are_multiplied_exactly():
    """Every element times every int8, at the largest sums there can be: no instruction saturates."""
    format = FORMATS["int4_channel_asym"]
    k = 512
    for instructions in KERNELS:
        for zero in (-8, 0, 7):
            codes = np.arange(16, dtype=np.uint8)
            values = np.repeat((codes * 0x11)[:, None], k // 2, axis=1)
            weight = BlockScaled(values, np.ones((16, 1), np.float32), zero_points=np.full((16, 1), zero, np.int8))
            x = np.repeat(np.arange(-128, 128).astype(np.int8)[:, None], k, axis=1)
            ones, bias = np.ones(256, np.float32), np.zeros(16, np.float32)
            y = product(instructions, x, weight, bias, format, x_scales=ones)
            integers = (codes.astype(np.int64) ^ 8) - 8 - zero
            np.testing.assert_array_equal(y, k * x[:, :1].astype(np.int64) * integers)


@built
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "scale_dtype"), FORMS)
def test_a_bad_scale_shows_in_its_own_row_alone(name, scale_dtype, bad):
    rng = np.random.default_rng(0)
    format = FORMATS[name]
    k = 2 * (64 if format.block_size == WHOLE_ROW else format.block_size)
    weight = draw(rng, name, 8, k, scale_dtype)
    worse = weight._replace(scales=weight.scales.copy())
    worse.scales[5, -1] = 0x7F if name == "nvfp4" else bad
    for dtype, few in ways(name):
        for rows in (1, 9):
            x, scales, _ = draw_rows(rng, rows, k, dtype)
            for instructions in KERNELS:
                call = {"format": format, "few": few, "x_scales": scales}
                clean = product(instructions, x, weight, np.zeros(8, np.float32), **call)
                y = product(instructions, x, worse, np.zeros(8, np.float32), **call)
                assert not np.isfinite(y[:, 5]).any()
                np.testing.assert_array_equal(np.delete(y, 5, 1), np.delete(clean, 5, 1))


# Quantization of rows before a product


def rounded(x):
    results = jax.ShapeDtypeStruct(x.shape, jnp.int8), jax.ShapeDtypeStruct((len(x), 1), jnp.float32)
    return jax.jit(jax.ffi.ffi_call(ffi.ROUND_ROWS, results))(x)


@built
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32], ids=str)
def test_rows_are_rounded_to_the_bits_of_the_definition(dtype, rng):
    rows, k = 500, 67
    octaves = rng.choice([0, 0, 0, -125, -130, -149, 120, 127], (rows, 1))
    with np.errstate(over="ignore"):
        x = np.ldexp(rng.standard_normal((rows, k)), octaves).astype(np.float32)
    odd = rng.random((rows, k)) < 0.005
    x[odd] = rng.choice([0.0, -0.0, 127.0, 63.5, np.nan, np.inf, -np.inf, 1e-45], odd.sum())
    x = jnp.asarray(x.astype(dtype))
    expected, (values, scales) = input_formats.quantize(x, input_formats.INT8_TOKEN), rounded(x)
    np.testing.assert_array_equal(values, expected.values)
    np.testing.assert_array_equal(np.asarray(scales).view(np.uint32), np.asarray(expected.scales).view(np.uint32))


@built
def test_ties_go_to_even_and_empty_rows_keep_the_least_scale():
    x = np.concatenate([np.arange(-127, 128) + 0.5, [127]]).astype(np.float32)[None].repeat(2, 0)
    x[:, 254], x[1] = 127, 0
    values, scales = rounded(jnp.asarray(x))
    np.testing.assert_array_equal(values[0], np.rint(x[0]))
    np.testing.assert_array_equal(np.asarray(scales)[:, 0], np.array([1, 2.0**-126], np.float32))
    assert rounded(jnp.zeros((0, 5)))[0].shape == (0, 5)


def ordered(x, order, blocks, num_rows):
    call = jax.ffi.ffi_call(ffi.ORDER_COLUMNS, jax.ShapeDtypeStruct((num_rows, x.shape[1]), x.dtype))
    arrays = (jnp.asarray(a, jnp.int32) for a in (order, *blocks))
    return np.asarray(jax.block_until_ready(call(x, *arrays)))


@built
@pytest.mark.parametrize("dtype", [np.int8, BFLOAT16, FLOAT32], ids=str)
def test_columns_come_in_the_order_of_their_expert(dtype, rng):
    x = rng.integers(-100, 100, (5, 7)).astype(dtype)
    order = np.stack([rng.permutation(7) for _ in range(3)])
    y = ordered(x, order, ([2, 0, 1], [0, 0, 3], [0, 2, 3], [2, 1, 0]), 3)
    np.testing.assert_array_equal(y, [x[0, order[2]], x[1, order[2]], x[0, order[0]]])


@built
@pytest.mark.parametrize(("argument", "value"), [("experts", 2), ("experts", -1), ("x_rows", 3), ("out_rows", -1)])
def test_blocks_outside_of_the_arrays_and_orders_outside_of_a_row_are_errors(argument, value):
    blocks = {"experts": 1, "x_rows": 1, "out_rows": 0, "counts": 2}
    x, order = jnp.ones((4, 3)), np.tile(np.arange(3), (2, 1))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"block 0 \(`experts` .*\) is outside of the arrays"):
        ordered(x, order, [[n] for n in (blocks | {argument: value}).values()], 4)
    for bad in (-1, 3):
        order[1, 2] = bad
        with pytest.raises(jax.errors.JaxRuntimeError, match="`order` of expert 1 contains a column out of range"):
            ordered(x, order, [[n] for n in blocks.values()], 4)


@built
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "int8"}, r"`format` \(=int8\) must be mxfp4, nvfp4 or int4"),
        ({"group": 48}, r"`group` \(=48\) must be the number of weights of int4 that share a scale"),
        ({"group": 16}, r"`group` \(=16\) must be the number of weights of int4 that share a scale"),
        ({"format": "nvfp4", "group": 16}, r"`scales` \(F32 \(2, 8, 1\)\) must be of type U8"),
        ({"group": 32}, r"`scales` \(F32 \(2, 8, 1\)\) must have the shape \(2, 8, 2\)"),
        ({"zero_points": 7}, r"`zero_points` \(S8 \(7\)\) must have the shape \(2, 8, 1\)"),
        ({"x": 4}, r"`x_scales` \(F32 \(0\)\) must have the shape \(4, 1\)"),
    ],
)
def test_calls_that_do_not_fit_are_errors(changed, message):
    given = {"x": 0, "zero_points": 0, "format": "int4", "group": 64} | changed
    x = jnp.ones((4, 64), jnp.int8) if given["x"] else jnp.ones((4, 64))
    nothing, block = jnp.zeros(0), [jnp.array([n], jnp.int32) for n in (0, 0, 0, 4)]
    arguments = (
        x,
        nothing,
        jnp.zeros((2, 8, 32), jnp.uint8),
        jnp.ones((2, 8, 1)),
        jnp.zeros(given["zero_points"], jnp.int8),
    )
    call = jax.ffi.ffi_call(ffi.GROUPED_PRODUCT, jax.ShapeDtypeStruct((4, 8), jnp.float32))
    attributes = {"instructions": "best", "format": given["format"], "group": np.int64(given["group"]), "few": False}
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(*arguments, nothing, nothing, *block, **attributes))


# The layer with inputs in int8

INT8_CASES = [
    Case(tokens=1, format="int4_g128", dtype="bfloat16", hidden=256, intermediate=128),
    Case(tokens=1, format="int4_g32_asym_order", dtype="float32", top_k=4),
    Case(tokens=7, format="mxint4", dtype="bfloat16", ids="anywhere"),
    Case(tokens=7, format="int4_g64_order", dtype="float16", weights_on="input", hidden=192, intermediate=64),
    Case(tokens=40, format="int4_channel_asym", dtype="float32", hidden=148, intermediate=66, ids="every_third"),
    Case(tokens=300, format="int4_g128_asym", dtype="bfloat16", order="concatenated", hidden=128, intermediate=256),
    Case(tokens=300, format="int4_channel", dtype="bfloat16", weights_on="input", hidden=36, intermediate=62),
]


def quantized(a, dtype):
    """int8 tokens by the definition, in numpy: their values in float64."""
    a = a.astype(dtype).astype(np.float32)
    scales = np.maximum(np.abs(a).max(-1, keepdims=True, initial=0) / np.float32(127), np.float32(2.0**-126))
    return np.rint(a / scales).astype(np.float64) * scales


def int8_reference(case, weights, x, routing):
    """The layer with both products' inputs in int8, expert by expert."""
    gate_up, down = weights.floats(case)
    between = BFLOAT16 if case.dtype == "bfloat16" else FLOAT32
    y = np.zeros(x.shape)
    for expert in range(case.num_experts):
        tokens, slots = np.nonzero(routing.expert_ids == expert)
        weight = routing.weights[tokens, slots, None]
        rows = (x[tokens] * weight).astype(x.dtype) if case.weights_on == "input" else x[tokens]
        h = quantized(rows, between) @ gate_up[expert].T + weights.gate_up_bias[expert]
        out = quantized(activated(case, h), between) @ down[expert].T + weights.down_bias[expert]
        np.add.at(y, tokens, out * (weight if case.weights_on == "output" else 1))
    return y


def apply(case, x, routing, experts, backend):
    def run(x, routing, experts):
        call = {"activation": case.activation, "weights_on": case.weights_on, "input_format": "int8"}
        return jmx.moe(x, routing, experts, backend=backend, **call)

    return np.asarray(jax.jit(run)(x, routing, experts)).astype(np.float64)


def check_error(y, expected):
    """Codes of the first product are those of the reference. Of the second's, a few in ten thousand are so near to the
    middle between two codes that a last bit of float32 takes them to the other: then they are off by one."""
    assert np.linalg.norm(y - expected) <= 3e-3 * np.linalg.norm(expected)


@built
@pytest.mark.parametrize("case", INT8_CASES, ids=str)
def test_int8_inputs(case, rng):
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    expected = int8_reference(case, weights, x, routing)
    y = apply(case, x, routing, weights.experts(case), "cpu")
    check_error(y, expected.astype(x.dtype).astype(np.float64))


@built
def test_int8_inputs_agree_with_the_other_backend(rng):
    case = Case(tokens=40, format="int4_g32_asym_order", hidden=64, intermediate=96, dtype="bfloat16")
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    experts = weights.experts(case)
    check_error(apply(case, x, routing, experts, None), apply(case, x, routing, experts, "xla"))


@built
def test_a_bad_token_keeps_to_itself_in_int8(rng):
    case = Case(tokens=40, format="int4_g64", hidden=128, intermediate=64)
    experts, x, routing = draw_weights(rng, case).experts(case), draw_x(rng, case), draw_routing(rng, case)
    run = jax.jit(lambda x: jmx.moe(x, routing, experts, activation=case.activation, input_format="int8"))
    clean = run(x)
    x[3, 5] = np.nan
    y = run(x)
    assert np.isnan(y[3]).all()
    np.testing.assert_array_equal(np.delete(y, 3, 0), np.delete(clean, 3, 0))


@built
def test_a_layer_of_a_stack(rng):
    """Every array of a format is found by the layer's number."""
    case = Case(tokens=9, format="int4_g32_asym_order", hidden=64, intermediate=64, num_experts=4)
    layers = [draw_weights(rng, case).experts(case) for _ in range(2)]
    x, routing = draw_x(rng, case), draw_routing(rng, case)
    expected, y = (apply(case, x, routing, e, "cpu") for e in (layers[1], jmx.Experts.stack(layers).layer(1)))
    np.testing.assert_array_equal(y, expected)


@built
def test_gradients_are_those_of_the_reference(rng):
    case = Case(tokens=9, format="nvfp4", hidden=64, intermediate=64, num_experts=4)
    experts, x, routing = draw_weights(rng, case).experts(case), draw_x(rng, case), draw_routing(rng, case)

    @partial(jax.jit, static_argnums=1)
    @jax.grad
    def gradient(x, backend):
        return (jmx.moe(x, routing, experts, activation=case.activation, backend=backend) ** 2).sum()

    assert_close(gradient(x, "cpu"), gradient(x, "xla"), "float32")


# Arguments that it supports

TAKEN = {name for name in FORMATS if name in ("mxfp4", "nvfp4", "mxint4") or name.startswith("int4")}


@built
@pytest.mark.parametrize("input_format", [None, *input_formats.INPUT_FORMATS])
def test_which_pairs_it_takes(input_format):
    for name in FORMATS:
        problem = dataclasses.replace(
            Case(hidden=128, intermediate=128).problem(), format=name, input_format=input_format
        )
        yes = name in TAKEN and (input_format is None or (input_format == "int8_token" and "int4" in name))
        assert jmx.explain(problem, device="cpu").chosen == ("cpu" if yes else "xla")
        if not yes:
            reason, found = (Reason.INPUT_FORMAT, input_format) if name in TAKEN else (Reason.FORMAT, name)
            assert_rejects(Cpu(), problem, HERE, reason, str(found))


@built
@pytest.mark.parametrize("sizes", [{"hidden_size": 34}, {"intermediate_size": 35, "gate_up_order": None}])
def test_rows_that_do_not_come_by_fours_are_refused(sizes):
    problem, (size, *_) = dataclasses.replace(Case(format="int4_channel").problem(), **sizes), sizes.values()
    assert_rejects(Cpu(), problem, HERE, Reason.SHAPE, f"(={size}) must be a multiple of 4")


def test_its_formats_are_those_of_four_bits():
    assert {*cpu.FORMATS} == TAKEN
