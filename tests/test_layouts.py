"""Layouts: exact inverses, experts taken inside a trace, and a backend's layout that pads and transposes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmx
from jmx.backends import registered_backends
from jmx.numerics import formats, layouts, resizing
from jmx.numerics.formats import BlockScaled
from jmx.numerics.layouts import LAYOUTS, Layout, WeightSpec

pytestmark = pytest.mark.sampled(3)

registered_backends()  # of other packages, too, which have layouts
SPEC = WeightSpec("gate_up", (96, 64), "interleaved", jmx.MXFP4)


def draw(rng, *lead):
    """Canonical weight (*lead, 96, 64) that has every code and every scale but NaN."""
    packed = formats.BlockScaled(
        jnp.asarray(rng.integers(0, 256, (*lead, 96, 32), np.uint8)),
        jnp.asarray(rng.integers(0, 255, (*lead, 96, 2), np.uint8)),
    )
    return formats.unpack(packed)


def same_bits(a, b):
    a, b = formats.pack(a), formats.pack(b)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a[:2], b[:2], strict=True))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("lead", [(1,), (5,), (2, 3)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_inverse_undoes_forward_bit_for_bit(rng, name, lead):
    layout, q = layouts.get(name), draw(rng, *lead)
    moved = layout.forward(q, SPEC)
    back = layout.inverse(moved, SPEC)
    assert all(array.shape[: len(lead)] == lead for array in moved[:2])
    assert back.values.dtype == jnp.float4_e2m1fn
    assert back.scales.dtype == jnp.float8_e8m0fnu
    assert same_bits(back, q)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_take_gives_the_packed_bytes_of_chosen_experts(rng, name, jit):
    layout, q = layouts.get(name), draw(rng, 5)
    index = jnp.asarray(rng.integers(0, 5, (2, 3)))
    take = lambda held, index: layout.take(held, SPEC, index)  # noqa: E731
    taken = (jax.jit(take) if jit else take)(layout.forward(q, SPEC), index)
    bytes_of_all = formats.pack(q)
    for got, everything in zip(taken[:2], bytes_of_all[:2], strict=True):
        assert got.dtype == jnp.uint8
        np.testing.assert_array_equal(got, np.asarray(everything)[np.asarray(index)])


@pytest.mark.parametrize("name", LAYOUTS)
def test_take_out_of_a_stack_of_layers(rng, name):
    layout, q = layouts.get(name), draw(rng, 2, 5)
    taken = jax.jit(lambda held, i, e: layout.take(held, SPEC, (i, e)))(
        layout.forward(q, SPEC), jnp.int32(1), jnp.array([4, 0])
    )
    np.testing.assert_array_equal(taken.values, np.asarray(formats.pack(q).values)[1, [4, 0]])


def test_an_unknown_layout_is_named_beside_those_that_exist():
    with pytest.raises(ValueError, match=r"`layout` \(='swizzled'\) must be one of \['canonical', .*'packed'"):
        layouts.get("swizzled")


def test_a_name_belongs_to_one_layout():
    layouts.register(layouts.PACKED)  # again, the same one
    with pytest.raises(ValueError, match=r"`layout\.name` \(='packed'\) is taken"):
        layouts.register(Layout("packed", *[lambda q, spec, *index: q] * 3))  # pyright: ignore[reportArgumentType]


# A layout as an engine would have it: rows padded, values transposed, scales as canonical packed ones are.


def _forward(q, spec):
    packed = resizing.pad(formats.pack(q), (spec.shape[0] + 64, spec.shape[1]), spec.format)
    return BlockScaled(packed.values.swapaxes(-1, -2), formats.pack(q).scales)


def _whole(held, spec):
    return BlockScaled(held.values.swapaxes(-1, -2)[..., : spec.shape[0], :], held.scales)


FOREIGN = Layout(
    "foreign",
    forward=_forward,
    inverse=lambda held, spec: formats.unpack(_whole(held, spec), spec.format),
    take=lambda held, spec, index: _whole(layouts.gather(held, index), spec),
)


@pytest.fixture
def foreign(monkeypatch):
    monkeypatch.setitem(LAYOUTS, FOREIGN.name, FOREIGN)
    return FOREIGN.name


@jax.jit  # here, so that packed weights are compiled for once
@jax.jit
@jax.value_and_grad
def loss(x, routing, experts):
    return (jmx.moe(x, routing, experts, activation=jmx.SwiGLU(), backend="xla") ** 2).sum()


@pytest.mark.parametrize("name", [FOREIGN.name, *(name for name in LAYOUTS if name != "packed")])
def test_weights_in_any_layout_have_a_fallback_and_a_gradient(rng, name, foreign):
    key = jax.random.key(int(rng.integers(2**31)))
    experts = jmx.Experts.random(key, 4, 64, 96, gate_up_order="interleaved")
    moved = experts.prepare(name)
    x = jnp.asarray(rng.normal(size=(6, 64)), jnp.float32)
    routing = jmx.Routing(jnp.asarray(rng.integers(0, 4, (6, 2))), jnp.asarray(rng.random((6, 2)), jnp.float32))

    stack = jmx.Experts.stack([experts.prepare(name), moved])
    for other in (moved, stack.layer(1)):
        for a, b in zip(loss(x, routing, experts), loss(x, routing, other), strict=True):
            assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a)


def test_donating_keeps_an_array_that_two_layouts_share(rng, foreign):
    key = jax.random.key(int(rng.integers(2**31)))
    experts = jmx.Experts.random(key, 4, 64, 96, gate_up_order="interleaved")
    expected = jax.tree.map(np.array, experts)
    back = experts.prepare(foreign, donate=True).prepare("packed", donate=True)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, back), expected)
