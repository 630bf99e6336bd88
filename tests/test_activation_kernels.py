"""The kernel of the activation's derivative: against its definition, interpreted; on a GPU; and compiled."""

import dataclasses

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmx import GELU, GELUAndMul, ReLU, ReLU2, SiLUAndMul, SwiGLU
from jmx.pallas.activation import gradient
from jmx.pallas.activation.columns import columns, join, split

ACTIVATIONS = [
    SwiGLU(alpha=1.702, beta=1.0, limit=7.0),
    SwiGLU(),
    SiLUAndMul(),
    GELUAndMul(approximate=False),
    GELUAndMul(approximate=True),
    ReLU2(),
    ReLU(),
    GELU(approximate=False),
]
ORDERS = [(160, "eights"), (72, "interleaved"), (50, "concatenated"), (50, "concatenated_up_first")]
INTERPRETED = pytest.mark.usefixtures("on_cpu")


def width_of(size, order):
    if order == "eights":
        return -(-size // 64) * 128
    return size if order is None else 2 * size


@pytest.mark.parametrize(("size", "order"), [*ORDERS, (50, None)])
def test_columns_are_where_split_finds_them(size, order, rng):
    h = rng.normal(size=(3, width_of(size, order))).astype(np.float32)
    parts = split(jnp.asarray(h), order, size)
    for column, part in zip(columns(jnp.arange(size, dtype=jnp.int32), order, size), parts, strict=True):
        np.testing.assert_array_equal(h[:, column], part)
    back = np.asarray(join(parts, order, h.shape[1]))
    for column in columns(jnp.arange(size, dtype=jnp.int32), order, size):
        np.testing.assert_array_equal(back[:, column], h[:, column])
    assert np.count_nonzero(back) <= 3 * size * len(parts)


def draw_gradient(rng, activation, size, order, num_rows=21):
    """Operands, with anything in rows that are not used and in columns that are not read; and the call."""
    order = order if activation.gated else None
    h = 3 * rng.normal(size=(num_rows, width_of(size, order)))
    da = rng.normal(size=(num_rows, size + 3))
    used = rng.random(num_rows) < 0.7
    h[~used], da[~used], da[:, size:] = np.nan, np.inf, np.nan
    operands = h.astype(np.float32), da.astype(np.float32), rng.normal(size=num_rows).astype(np.float32), used
    return tuple(map(jnp.asarray, operands)), gradient.Call(activation, size, order, jnp.dtype("float32"))


def assert_close(got, expected, most):
    got, expected = (np.asarray(each, np.float64) for each in (got, expected))
    assert got.shape == expected.shape
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - expected) <= most * np.linalg.norm(expected)


@INTERPRETED
@pytest.mark.sampled(3)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
@pytest.mark.parametrize(("size", "order"), ORDERS)
def test_the_gradient_is_that_of_jax(activation, size, order, rng):
    (h, da, factor, used), call = draw_gradient(rng, activation, size, order)
    defined = gradient.through_activation(h, da, factor, used, call)
    kernel = gradient.through_activation(h, da, factor, used, dataclasses.replace(call, interpret=True))
    for got, expected in zip(kernel, defined, strict=True):
        assert_close(got, expected, 1e-5)

    def value(h, factor):
        parts = split(jnp.where(used[:, None], h, 0), call.order, size)
        da_used = jnp.where(used[:, None], da[:, :size], 0)
        return (jnp.where(used, factor, 0)[:, None] * da_used * activation(*parts)).sum()

    for got, expected in zip(defined, jax.grad(value, (0, 1))(h, factor), strict=True):
        assert_close(got, expected, 1e-5)
    assert not np.asarray(defined[0])[~np.asarray(used)].any()


@INTERPRETED
def test_the_gradient_of_no_rows_in_use(rng):
    (h, da, factor, used), call = draw_gradient(rng, SwiGLU(), 72, "interleaved")
    for its in (call, dataclasses.replace(call, interpret=True, dtype=jnp.dtype("bfloat16"))):
        dh, dfactor = gradient.through_activation(h, da, factor, jnp.zeros_like(used), its)
        assert dh.dtype == its.dtype
        assert not np.asarray(dh, np.float32).any()
        assert not np.asarray(dfactor).any()


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
@pytest.mark.parametrize(("size", "order"), ORDERS)
def test_the_gradient_on_a_gpu(activation, size, order, rng):
    (h, da, factor, used), call = draw_gradient(rng, activation, size, order, num_rows=1000)
    defined = jax.jit(call.define)(h, da, factor, used)
    for got, expected in zip(gradient.through_activation(h, da, factor, used, call), defined, strict=True):
        assert_close(got, expected, 1e-5)


# Compiled


SHAPE = SwiGLU(alpha=1.702, beta=1.0, limit=7.0), 2880, "eights"  # of gpt-oss


@pytest.mark.aot
def test_the_gradient_compiled_for_an_h200(tmp_path):
    call = gradient.Call(*SHAPE, jnp.dtype("bfloat16"))

    def calls(h, da, factor, used):  # XLA reports launches only if it makes a graph of them
        return [gradient.through_activation(h + i, da, factor, used, call) for i in range(6)]

    rows = 34000
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, 5760), (rows, 2880), (rows,))]
    used = jax.ShapeDtypeStruct((rows,), jnp.bool_)
    _, (kernel, *_) = aot.triton_kernels("h200", tmp_path, "jmx_activation_gradient", calls, *arrays, used)
    assert kernel.spilled == 0
    assert "ld.global.v4" in kernel.ptx
