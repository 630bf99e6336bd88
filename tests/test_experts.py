"""Experts: construction and its errors, layouts and their memory, updates, views of stacks, and use as a pytree."""

import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from properties import examples

import jmx
from jmx import BlockScaled, Experts
from jmx.experts.creation import ORDERS
from jmx.numerics import quantization
from jmx.numerics.layouts import LAYOUTS

pytestmark = [pytest.mark.costly, pytest.mark.sampled(3)]

E, H, I = 4, 64, 96  # noqa: E741
BOTH = ("packed", "canonical")


def draw(rng, num_experts=E, hidden=H, intermediate=I, order: str | None = "interleaved", **options):
    key = jax.random.key(int(rng.integers(2**31)))
    return random(key, num_experts, hidden, intermediate, gate_up_order=order, **options)


random = jax.jit(
    Experts.random,
    static_argnums=(1, 2, 3),
    static_argnames=("gate_up_order", "bias", "bias_dtype"),
)


def shapes(*sizes, **options):
    """Experts without arrays, which is all that a refusal needs to see."""
    return jax.eval_shape(lambda: draw(np.random.default_rng(0), *sizes, **options))


def bits(experts):
    """The packed bytes and bias bits by name, copied to numpy: a view would keep buffers from being donated."""
    return {name: np.array(a).view(np.uint8) for name, a in experts.prepare("packed").arrays().items()}


def same(a, b):
    a, b = bits(a), bits(b)
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def call(experts, x):
    routing = jmx.Routing(jnp.arange(x.shape[0])[:, None] % experts.num_experts, jnp.ones((x.shape[0], 1)))
    return jmx.moe(x, routing, experts, activation=jmx.SwiGLU() if experts.gated else jmx.SiLU())


# Construction


def test_of_takes_packed_and_canonical_arrays(rng):
    packed = draw(rng)
    canonical = packed.canonical()
    for experts in (packed, canonical):
        arrays = (experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias)
        again = Experts.of(*arrays, gate_up_order="interleaved")
        assert again.layout == experts.layout
        assert (again.num_experts, again.hidden_size, again.intermediate_size) == (E, H, I)
        assert same(again, packed)
    assert canonical.gate_up.values.dtype == jnp.float4_e2m1fn
    assert canonical.gate_up.values.shape == (E, 2 * I, H)
    assert canonical.down.scales.shape == (E, H, I // 32)


def test_of_takes_leading_layer_axes(rng):
    a, b = draw(rng), draw(rng)
    stack = Experts.stack([a, b])
    again = Experts.of(stack.gate_up, stack.down, stack.gate_up_bias, stack.down_bias, gate_up_order="interleaved")
    assert same(again, stack)


def abstract(rows=2 * I, hidden=H, out=H, intermediate=I, num=E, down_num=E, packed=True):
    gate_up = jmx.MXFP4.abstract((num, rows, hidden), packed=packed)
    return gate_up, jmx.MXFP4.abstract((down_num, out, intermediate), packed=packed)


def floats(*shape, dtype=jnp.bfloat16):
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((*abstract(rows=I),), ValueError, "`gate_up` (logical shape (4, 96, 64)) must have 192 rows, 2I with I = 96"),
        ((*abstract(out=96),), ValueError, "`down` (logical shape (4, 96, 96)) must be (E, H, I) with E, H = (4, 64)"),
        ((*abstract(down_num=3),), ValueError, "`down` (logical shape (3, 64, 96)) must be (E, H, I)"),
        ((abstract()[0], abstract(packed=False)[1]), TypeError, "`gate_up` and `down` must both be packed or both"),
        ((*abstract(), floats(E, I)), ValueError, "`gate_up_bias` (shape (4, 96)) must be (4, 192)"),
        ((*abstract(), None, floats(E, 32)), ValueError, "`down_bias` (shape (4, 32)) must be (4, 64)"),
        ((*abstract(), floats(E, 2 * I, dtype=jnp.int32)), TypeError, "`gate_up_bias` (dtype int32) must be floating"),
        ((*abstract(), None, floats(E, H, dtype=jnp.float8_e4m3fn)), TypeError, "`down_bias` (dtype float8_e4m3fn)"),
    ],
)
def test_of_names_the_array_that_does_not_fit(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Experts.of(*arguments, gate_up_order="interleaved")


def test_of_names_other_misfits():
    with pytest.raises(ValueError, match=re.escape("`gate_up_order` (='alternating') must be one of")):
        Experts.of(*abstract(), gate_up_order="alternating")
    with pytest.raises(ValueError, match=re.escape("must have 96 rows, I with I = 96")):
        Experts.of(*abstract(), gate_up_order=None)
    with pytest.raises(ValueError, match="must have an expert axis"):
        Experts.of(
            jmx.MXFP4.abstract((2 * I, H), packed=True),
            jmx.MXFP4.abstract((H, I), packed=True),
            gate_up_order="interleaved",
        )
    scales = abstract()[0]._replace(scales=floats(E, 2 * I, 3, dtype=jnp.uint8))
    with pytest.raises(ValueError, match=re.escape("`scales` (shape (4, 192, 3)) must be (4, 192, 2)")):
        Experts.of(scales, abstract()[1], gate_up_order="interleaved")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, H, I), "`num_experts` (=0) must be at least 1"),
        ((E, 2870, I), "`hidden_size` (=2870) must be a multiple of 32 for MXFP4"),
        ((E, H, 80), "`intermediate_size` (=80) must be a multiple of 32 for MXFP4"),
        ((E, H, -32), "`intermediate_size` (=-32) must be at least 1"),
    ],
)
def test_random_names_a_size_that_cannot_be(sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Experts.random(jax.random.key(0), *sizes, gate_up_order="interleaved")


def test_random_draws_weights_of_the_usual_size_and_other_ones_each_time(rng):
    a, b = draw(rng, bias_dtype=jnp.float32), draw(rng, bias_dtype=jnp.float32)
    assert not np.array_equal(a.gate_up.values, b.gate_up.values)
    assert not np.array_equal(a.gate_up.values[0], a.gate_up.values[1])
    for weight, size in zip(a.dequantize(jnp.float32), (H, I), strict=True):
        assert 0.5 < float(weight.std()) * size**0.5 < 2
    assert a.gate_up_bias.dtype == jnp.float32
    assert 0.01 < float(a.down_bias.std()) < 0.04
    bare = draw(rng, order=None, bias=False)
    assert bare.gate_up_bias is None
    assert bare.down_bias is None
    assert bare.gate_up.values.shape == (E, I, H // 2)


def test_random_in_eval_shape_allocates_nothing():
    key = jax.random.key(0)
    before = {id(a) for a in jax.live_arrays()}

    def build(key, layout):
        return Experts.random(key, 128, 2880, 2880, gate_up_order="interleaved").prepare(layout)

    for layout in LAYOUTS:
        shapes = jax.eval_shape(lambda key, layout=layout: build(key, layout), key)
        assert shapes.num_experts == 128
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))
    assert {id(a) for a in jax.live_arrays()} <= before


# Quantizing float experts


def test_quantize_rounds_each_weight_as_ml_dtypes_does(rng):
    gate_up = rng.normal(size=(E, 2 * I, H)).astype(np.float32)
    down = rng.normal(size=(E, H, I)).astype(np.float32)
    experts = Experts.quantize(jnp.asarray(gate_up), jnp.asarray(down), gate_up_order="concatenated")
    assert experts.layout == "packed"
    for weight, got in zip((gate_up, down), experts.dequantize(jnp.float32), strict=True):
        blocks = weight.reshape(*weight.shape[:-1], -1, 32)
        scale = 2.0 ** (np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True))) - 2)
        expected = (blocks / scale).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
        np.testing.assert_array_equal(got, expected.reshape(weight.shape))


@examples(15)
@given(
    rule=st.sampled_from(sorted(quantization.SCALE_RULES)),
    layout=st.sampled_from(BOTH),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 2**31 - 1),
)
def test_what_was_quantized_once_quantizes_to_the_same_values(rule, layout, order, seed):
    experts = Experts.random(jax.random.key(seed), E, H, I, gate_up_order=order, bias=False).prepare(layout)
    values = experts.dequantize(jnp.float32)
    again = Experts.quantize(*values, gate_up_order=order, scale_rule="ocp" if rule == "round_even" else rule)
    for a, b in zip(values, again.dequantize(jnp.float32), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda g, d: (g.at[2, 7, 5].set(jnp.nan), d), ValueError, "`gate_up` of expert 2: `x` holds 1 NaN or inf"),
        (lambda g, d: (g, d.at[1, 0, 0].set(jnp.inf)), ValueError, "`down` of expert 1: `x` holds 1 NaN or infinite"),
        (lambda g, d: (g[0], d), ValueError, "`gate_up` (shape (192, 64)) must be (E, N, K)"),
        (lambda g, d: (g.swapaxes(1, 2), d), ValueError, "`down` (logical shape (4, 64, 96)) must be (E, H, I)"),
        (lambda g, d: (g[..., :40], d), ValueError, "`gate_up.shape[-1]` (=40) must be a multiple of 32 for MXFP4"),
        (lambda g, d: (g.astype(jnp.int32), d), TypeError, "`gate_up` (dtype int32) must be floating"),
        (lambda g, d: (g[:0], d[:0]), ValueError, "`gate_up` (logical shape (0, 192, 64)) must have no axis of size 0"),
        (lambda g, d: (g, d[:, :0]), ValueError, "`down` (logical shape (4, 0, 96)) must have no axis of size 0"),
    ],
)
def test_quantize_names_the_weight_at_fault(rng, change, error, message):
    gate_up = jnp.asarray(rng.normal(size=(E, 2 * I, H)), jnp.float32)
    down = jnp.asarray(rng.normal(size=(E, H, I)), jnp.float32)
    with pytest.raises(error, match=re.escape(message)):
        Experts.quantize(*change(gate_up, down), gate_up_order="concatenated")


def test_quantize_can_mark_blocks_that_are_not_finite(rng):
    gate_up = jnp.asarray(rng.normal(size=(E, 2 * I, H)), jnp.float32).at[2, 7, 40].set(jnp.nan)
    down = jnp.asarray(rng.normal(size=(E, H, I)), jnp.float32)
    experts = Experts.quantize(gate_up, down, gate_up_order="concatenated", nonfinite="nan_block")
    broken = np.argwhere(np.isnan(experts.dequantize(jnp.float32)[0]))
    assert {tuple(row[:2]) for row in broken} == {(2, 7)}
    assert sorted(broken[:, 2]) == list(range(32, 64))


# Layouts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prepare_is_idempotent_and_has_an_inverse(rng, layout):
    experts = draw(rng)
    expected = bits(experts)
    moved = experts.prepare(layout)
    assert moved.layout == layout
    assert moved.prepare(layout) is moved
    assert moved.prepare(layout, donate=True) is moved
    assert same(moved.canonical(), experts)
    assert all(np.array_equal(expected[name], array) for name, array in bits(experts).items())
    with pytest.raises(ValueError, match=re.escape("`layout` (='auto') must be one of")):
        experts.prepare("auto")


@pytest.mark.parametrize(("source", "target"), [BOTH, BOTH[::-1]])
def test_donating_frees_the_old_weights_and_only_them(rng, source, target):
    experts = draw(rng).prepare(source)
    expected = bits(experts)
    moved = experts.prepare(target, donate=True)
    assert all(a.is_deleted() for a in jax.tree.leaves((experts.gate_up, experts.down)))
    assert moved.gate_up_bias is experts.gate_up_bias
    assert all(np.array_equal(expected[name], array) for name, array in bits(moved).items())


def test_the_peak_of_a_donating_prepare_is_one_weight_more(rng, monkeypatch):
    model = [draw(rng, 8, 256, 256) for _ in range(4)]
    largest = max(q.values.nbytes + q.scales.nbytes for q in (model[0].gate_up, model[0].down))
    held = lambda: sum(a.on_device_size_in_bytes() for a in jax.live_arrays())  # noqa: E731
    before, seen = held(), []
    wait = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: (wait(tree), seen.append(held()))[0])
    while any(experts.layout == "packed" for experts in model):
        model.append(model.pop(0).prepare("canonical", donate=True))
    assert len(seen) == 8  # each weight of each layer, at the moment when it is held twice
    assert largest * 0.9 < max(seen) - before <= largest * 1.01
    assert held() <= before


@pytest.mark.devices(4)
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P(None, None, "x")])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_prepare_and_update_keep_the_sharding(rng, spec, kind):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    experts, new = draw(rng, 4, 256, 128), draw(rng, 4, 256, 128)
    placed = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P(*spec[: a.ndim]))), experts)

    def check(experts, expected):
        for name, array in experts.arrays().items():
            wanted = NamedSharding(mesh, P(*spec[: array.ndim]))
            assert array.sharding.is_equivalent_to(wanted, array.ndim), (name, array.sharding)
        assert same(experts, expected)

    for donate in (False, True):
        canonical = placed.prepare("canonical", donate=donate)
        check(canonical, experts)
        placed = canonical.prepare("packed", donate=donate)
        check(placed, experts)
    check(placed.update(new), new)
    check(placed.canonical().update(new), new)


@pytest.mark.devices(4)
@pytest.mark.parametrize(
    ("layout", "format"),
    [("mosaic_sm90", "int4_g32_order"), ("mosaic_sm90_fp8", "fp8_channel"), ("cutlass_sm90", "mxfp4")],
)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_experts_that_a_mesh_divides_are_converted_where_they_are(rng, layout, format, kind):
    """Layouts loop over experts, for which XLA gathers all of them on each device."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, AxisType.Auto))
    experts = jmx.Experts.random(
        jax.random.key(int(rng.integers(2**31))), 4, 128, 128, gate_up_order="interleaved", format=format
    )
    divided = jax.device_put(experts, NamedSharding(mesh, P("x")))
    found, expected = divided.prepare(layout), experts.prepare(layout).arrays()
    for name, array in found.arrays().items():
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), array.ndim), (name, array.sharding)
        assert array.sharding.mesh.axis_types == mesh.axis_types, name
        assert np.array_equal(np.asarray(array), np.asarray(expected[name])), name
    with jax.set_mesh(mesh):
        back = found.prepare("packed", donate=True)
    assert back.gate_up.values.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 3)
    assert found.gate_up.values.is_deleted()
    assert same(back, experts)


@pytest.mark.devices(4)
@pytest.mark.parametrize("format", ["mxfp4", "int4_g32_order"])
def test_what_explicit_axes_divide_along_hidden_is_converted(rng, format):
    """jax rejects most operations along an axis that an Explicit axis splits."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    experts = jmx.Experts.random(
        jax.random.key(int(rng.integers(2**31))), 4, 128, 128, gate_up_order="interleaved", format=format
    )

    def put(array):
        parts = P(None, None, "x") if array.ndim == 3 and array.shape[-1] % 2 == 0 else P()
        return jax.device_put(array, NamedSharding(mesh, parts))

    divided = jax.tree.map(put, experts)
    for found, floats in zip(divided.dequantize(jnp.float32), experts.dequantize(jnp.float32), strict=True):
        assert found.sharding.mesh.axis_types == mesh.axis_types
        assert np.array_equal(np.asarray(found), np.asarray(floats))
    expected = jmx.ShardedExperts.of(experts, 2).arrays()
    for name, array in jmx.ShardedExperts.of(divided, 2).arrays().items():
        assert np.array_equal(np.asarray(array), np.asarray(expected[name])), name
    before = bits(experts)
    donated = divided.prepare("mosaic_sm90", donate=True)
    after = bits(donated)
    assert all(np.array_equal(after[name], before[name]) for name in before)
    assert divided.gate_up.values.is_deleted()


# Updating


@pytest.mark.parametrize("theirs", BOTH)
@pytest.mark.parametrize("ours", BOTH)
def test_update_gives_the_bits_of_loading_afresh(rng, ours, theirs):
    old, new = draw(rng).prepare(ours), draw(rng)
    updated = old.update(new.prepare(theirs))
    fresh = new.prepare(ours)
    assert updated.layout == ours
    assert jax.tree.structure(updated) == jax.tree.structure(fresh)
    for a, b in zip(jax.tree.leaves(updated), jax.tree.leaves(fresh), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_update_inside_a_trace(rng):
    old, new = draw(rng).canonical(), draw(rng)
    assert same(jax.jit(lambda old, new: old.update(new))(old, new), new)


def test_update_names_what_differs(rng):
    old = draw(rng)
    faults = [
        (shapes(3), "`new.num_experts` (=3) must be 4"),
        (shapes(hidden=96), "`new.hidden_size` (=96) must be 64"),
        (shapes(intermediate=64), "`new.intermediate_size` (=64) must be 96"),
        (shapes(order="concatenated"), "`new.gate_up_order` (='concatenated') must be 'interleaved'"),
        (shapes(bias=False), "`new.down_bias` (=None) must be bfloat16[4, 64]"),
        (shapes(bias_dtype=jnp.float32), "`new.down_bias` (=float32[4, 64]) must be bfloat16[4, 64]"),
        (Experts.stack([old, old]), "`new.num_experts` (=2) must be 4"),
        (Experts.stack([old, old]).layer(0), "not with a `layer` of a stack"),
    ]
    expected = bits(old)
    for new, message in faults:
        with pytest.raises(ValueError, match=re.escape(message)):
            old.update(new)
    assert all(np.array_equal(expected[name], array) for name, array in bits(old).items())


# Views and stacks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_take_undoes_one_expert_in_a_trace(rng, layout):
    experts = draw(rng)
    moved = experts.prepare(layout)
    for role in ("gate_up", "down"):
        taken = jax.jit(lambda m, e, role=role: m.take(role, e))(moved, jnp.int32(2))
        expected = getattr(experts, role)
        np.testing.assert_array_equal(taken.values, expected.values[2])
        np.testing.assert_array_equal(taken.scales, expected.scales[2])
        bias = jax.jit(lambda m, e, role=role: m.take_bias(role, e))(moved, jnp.array([3, 1]))
        np.testing.assert_array_equal(bias, getattr(experts, f"{role}_bias")[jnp.array([3, 1])])
    assert draw(rng, bias=False).take_bias("down", jnp.int32(0)) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_of_a_stack_is_that_layer(rng, layout):
    layers = [draw(rng).prepare(layout) for _ in range(2)]
    stack = Experts.stack(layers)
    x = jnp.asarray(rng.normal(size=(5, H)), jnp.float32)
    for i, one in enumerate(layers):
        view = stack.layer(i)
        assert view.num_experts == E
        assert view.gate_up is stack.gate_up
        np.testing.assert_array_equal(call(view, x), call(one, x))
        np.testing.assert_array_equal(view.take("down", jnp.int32(1)).values, one.take("down", jnp.int32(1)).values)
        for a, b in zip(view.dequantize(), one.dequantize(), strict=True):
            np.testing.assert_array_equal(a, b)
    traced = jax.jit(lambda stack, i: call(stack.layer(i), x))(stack, 1)
    np.testing.assert_allclose(traced, call(layers[1], x), rtol=1e-5, atol=1e-5)


def test_stack_and_layer_name_their_faults(rng):
    a = draw(rng)
    faults = [
        ([], "`experts` (=[]) must hold those of one layer at least"),
        ([a, a.canonical()], "`experts[1].layout` (='canonical') must be 'packed' in one stack"),
        ([a, shapes(3)], "`experts[1].num_experts` (=3) must be 4 in one stack"),
        ([a, shapes(bias=False)], "`experts[1].down_bias` (=None) must be bfloat16[4, 64] in one stack"),
        ([Experts.stack([a, a]).layer(0)], "`experts[0]` must be whole experts"),
    ]
    for experts, message in faults:
        with pytest.raises(ValueError, match=re.escape(message)):
            Experts.stack(experts)
    stack = Experts.stack([a, a])
    for experts in (a, stack.layer(1)):
        with pytest.raises(ValueError, match="`layer` must be called on a stack"):
            experts.layer(0)


LAST = 2  # of a stack of three layers
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
BEYOND = (LAST + 1, 127, 255, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1, 2**63 + 1)
INDICES = (*range(LAST + 1), *BEYOND, -1, -3, -4, -(2**31), -(2**32))
CONCRETE = {
    "int": lambda value, dtype: value,
    "numpy scalar": lambda value, dtype: np.dtype(dtype).type(value),
    "numpy array": lambda value, dtype: np.array(value, dtype),
    "jax array": lambda value, dtype: jnp.array(value, dtype),
}


def abstract_stack():
    return jax.eval_shape(lambda experts: Experts.stack([experts] * (LAST + 1)), shapes())


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("kind", CONCRETE)
def test_a_known_index_is_a_layer_or_refused(kind, dtype):
    stack = abstract_stack()
    with jax.enable_x64(dtype.endswith("64")):
        for value in (v for v in INDICES if np.iinfo(dtype).min <= v <= np.iinfo(dtype).max):
            index = CONCRETE[kind](value, dtype)
            if 0 <= value <= LAST:
                layer = stack.layer(index)
                assert (layer.index.dtype, int(layer.index)) == (jnp.int32, value)
                continue
            with pytest.raises(ValueError, match=re.escape(f"`index` (={value}) must be an integer in 0..{LAST}")):
                stack.layer(index)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_traced_index_is_clamped_before_it_is_narrowed(dtype):
    stack = abstract_stack()
    with jax.enable_x64(dtype.endswith("64")):
        clamped = jax.jit(lambda index: stack.layer(index).index)
        for value in (v for v in INDICES if np.iinfo(dtype).min <= v <= np.iinfo(dtype).max):
            found = clamped(np.array(value, dtype))
            assert (found.dtype, int(found)) == (jnp.int32, min(max(value, 0), LAST))


def test_a_traced_index_of_few_bits_is_a_layer_of_many():
    stack = jax.eval_shape(lambda experts: Experts.stack([experts] * 300), shapes())
    for dtype in (jnp.int4, jnp.uint4, jnp.int8, jnp.uint8):
        last = int(jnp.iinfo(dtype).max)
        assert int(jax.jit(lambda index: stack.layer(index).index)(jnp.array(last, dtype))) == last


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    "index",
    [
        *(True, np.True_, np.array(True), jnp.array(False)),
        *(0.0, 1.5, np.float32(1), np.array(1.0), jnp.float32(1), jnp.bfloat16(0), float("nan"), 1j, jax.random.key(0)),
        *([0], (1,), [], np.array([0]), jnp.array([1]), jnp.zeros((1, 1), jnp.int32)),
        *("0", np.str_("0"), None, slice(0, 1), ..., jax.ShapeDtypeStruct((), jnp.int32)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_integer_is_no_index(index, traced):
    stack, rule = abstract_stack(), f"must be an integer in 0..{LAST}, the layers of this stack"
    if not traced:
        with pytest.raises(TypeError, match=r"`index` \(.*\) " + re.escape(rule)):
            stack.layer(index)
    elif isinstance(index, bool | float | complex | np.ndarray | np.bool_ | np.floating | jax.Array):
        with pytest.raises(TypeError, match=r"`index` \(.*\[.*\]\) " + re.escape(rule)):
            jax.eval_shape(stack.layer, index)


def gradient(stack, i, x):
    """Of x and of a bias, with respect to the whole stack."""

    def loss(x, bias):
        return (call(dataclasses.replace(stack, down_bias=bias).layer(i), x) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1))(x, stack.down_bias)


TRACED = {
    "jit": lambda stack, indices, x: jnp.stack([jax.jit(lambda i: call(stack.layer(i), x))(i) for i in indices]),
    "scan": lambda stack, indices, x: jax.lax.scan(lambda _, i: (None, call(stack.layer(i), x)), None, indices)[1],
    "vmap": lambda stack, indices, x: jax.vmap(lambda i: call(stack.layer(i), x))(indices),
    "gradient": lambda stack, indices, x: jax.lax.map(lambda i: gradient(stack, i, x), indices),
    "take": lambda stack, indices, x: jax.lax.map(lambda i: stack.layer(i).take("down", jnp.int32(1)), indices),
    "floats": lambda stack, indices, x: jax.lax.map(lambda i: stack.layer(i).dequantize(), indices),
}


@pytest.mark.parametrize("how", TRACED)
@pytest.mark.parametrize("backend", ["cpu", "xla"])
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="`cpu` is one; see `test_backends` for others")
def test_an_index_beyond_the_stack_means_its_nearest_layer(rng, backend, how):
    stack = Experts.stack([draw(rng) for _ in range(LAST + 1)])
    x = jnp.asarray(rng.normal(size=(3, H)), jnp.float32)
    beyond = jnp.array([0, 1, LAST, LAST + 1, 2**31 - 1, -1, -LAST - 1, -(2**31)], jnp.int32)
    with jmx.use_backend(backend):
        found, expected = (TRACED[how](stack, i, x) for i in (beyond, jnp.clip(beyond, 0, LAST)))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    for leaf in jax.tree.leaves(expected):
        assert not np.array_equal(leaf[0], leaf[1])
        assert not np.array_equal(leaf[1], leaf[2])


def test_dequantize_gives_exact_floats_of_either_dtype(rng):
    experts = draw(rng)
    for layout in LAYOUTS:
        narrow, wide = (experts.prepare(layout).dequantize(dtype) for dtype in (jnp.bfloat16, jnp.float32))
        for role, a, b in zip(("gate_up", "down"), narrow, wide, strict=True):
            q = getattr(experts, role)
            codes = np.stack([np.asarray(q.values) & 15, np.asarray(q.values) >> 4], -1).reshape(b.shape)
            values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
            scale = np.repeat(2.0 ** (np.asarray(q.scales).astype(np.float32) - 127), 32, axis=-1)
            np.testing.assert_array_equal(b, values * scale)
            np.testing.assert_array_equal(a.astype(jnp.float32), b)
            assert (a.dtype, b.dtype) == (jnp.bfloat16, jnp.float32)


# As a pytree


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_are_jit_arguments_and_results(rng, layout):
    experts = draw(rng).prepare(layout)
    traces = []

    @jax.jit
    def through(experts):
        traces.append(experts.layout)
        return experts

    out = through(through(experts))
    assert traces == [layout]
    assert same(out, experts)
    assert jax.tree.structure(out) == jax.tree.structure(experts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_can_be_donated_to_a_jitted_call(rng, layout):
    experts = draw(rng).prepare(layout)
    expected = bits(jax.tree.map(jnp.copy, experts))  # an array that numpy has seen keeps its buffer
    out = jax.jit(lambda e: jax.tree.map(lambda a: a[::-1], e), donate_argnums=0)(experts)
    assert all(array.is_deleted() for array in jax.tree.leaves(experts))
    assert all(np.array_equal(expected[name][::-1], array) for name, array in bits(out).items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_pickle(rng, layout):
    experts = draw(rng).prepare(layout)
    again = pickle.loads(pickle.dumps(experts))
    assert jax.tree.structure(again) == jax.tree.structure(experts)
    assert again.format == jmx.MXFP4
    assert same(again, experts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_can_be_vmapped_over(rng, layout):
    layers = [draw(rng).prepare(layout) for _ in range(2)]
    x = jnp.asarray(rng.normal(size=(2, 5, H)), jnp.float32)
    together = jax.vmap(call)(Experts.stack(layers), x)
    for i, one in enumerate(layers):
        np.testing.assert_allclose(together[i], call(one, x[i]), rtol=1e-5, atol=1e-5)


def test_arrays_by_name_and_back(rng):
    experts, other = draw(rng), draw(rng)
    names = ["gate_up_values", "gate_up_scales", "down_values", "down_scales", "gate_up_bias", "down_bias"]
    assert list(experts.arrays()) == names
    assert same(experts.with_arrays(other.arrays()), other)
    assert experts.with_arrays({}).gate_up == BlockScaled(None, None)
    assert list(draw(rng, bias=False).arrays()) == names[:4]


def test_check_names_what_a_layer_does_not_share(rng):
    experts = draw(rng)
    experts.check(num_experts=E, hidden_size=H, bias=True)
    with pytest.raises(ValueError, match=re.escape("`hidden_size` (=96) must be 64, as `experts` have it")):
        experts.check(hidden_size=96, bias=True)
    with pytest.raises(ValueError, match=re.escape("`bias` (=False) must be True: `experts` have a `")):
        experts.check(bias=False)
    for wrong in (Experts.stack([experts]), Experts.stack([experts]).layer(0)):
        with pytest.raises(ValueError, match="`experts` must be those of one layer"):
            wrong.check(bias=True)
