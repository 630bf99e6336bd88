"""Losses and updates that balance a router, beside their papers' formulas in float64; padding and meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmx
from jmx import training

B, S, E, K = 3, 5, 8, 2
METHODS = [
    jmx.TopKSoftmax(K),
    jmx.SoftmaxTopK(K, renormalize=False),
    jmx.SigmoidTopK(K, renormalize=True),
    jmx.GroupedTopK(K, num_groups=4, topk_groups=2, scoring="sigmoid", renormalize=True),
]
MASKS = {"all": np.ones((B, S), bool), "some": np.arange(B * S).reshape(B, S) % 3 > 0, "one": np.eye(B, S, dtype=bool)}
MASKS["a sequence"] = np.repeat(np.array([[True], [False], [True]]), S, axis=1)


def values_of(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(B, S, E)).astype(np.float32)


def chosen(values: np.ndarray, method: jmx.routing.Method, bias: np.ndarray | None = None) -> np.ndarray:
    """1 where a token goes to an expert."""
    ids = np.asarray(jmx.route(jmx.Logits(values, method, bias)).expert_ids)
    return (ids[..., None] == np.arange(E)).any(axis=-2)


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values.astype(np.float64))
    return powers / powers.sum(axis=-1, keepdims=True)


def sigmoids(values: np.ndarray) -> np.ndarray:
    scores = 1 / (1 + np.exp(-values.astype(np.float64)))
    return scores / scores.sum(axis=-1, keepdims=True)


def sqrt_softplus(values: np.ndarray) -> np.ndarray:
    scores = np.sqrt(np.log1p(np.exp(values.astype(np.float64))))
    return scores / scores.sum(axis=-1, keepdims=True)


SCORES = {"softmax": softmax, "sigmoid": sigmoids, "sqrt_softplus": sqrt_softplus}


def balance(ones: np.ndarray, probabilities: np.ndarray) -> float:
    """E * sum of shares and mean probabilities of tokens (T, E)."""
    return float(E * (ones.sum(axis=0) / ones.sum() * probabilities.mean(axis=0)).sum())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_load_balancing_loss(method, mask, rng):
    values, used = values_of(rng), MASKS[mask]
    expected = balance(chosen(values, method)[used], softmax(values)[used])
    given = None if mask == "all" else used
    assert np.isclose(training.load_balancing_loss(jmx.Logits(values, method), given), expected, rtol=1e-6)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scoring", SCORES)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_sequence_balance_loss(method, scoring, mask, rng):
    values, used = values_of(rng), MASKS[mask]
    ones, probabilities = chosen(values, method), SCORES[scoring](values)
    by_sequence = [balance(ones[i][used[i]], probabilities[i][used[i]]) for i in range(B) if used[i].any()]
    got = training.sequence_balance_loss(jmx.Logits(values, method), used, scoring=scoring)
    assert np.isclose(got, np.mean(by_sequence), rtol=1e-6)


@pytest.mark.parametrize("mask", MASKS)
def test_router_z_loss(mask, rng):
    values, used = values_of(rng), MASKS[mask]
    expected = np.mean(np.log(np.exp(values.astype(np.float64)).sum(axis=-1))[used] ** 2)
    assert np.isclose(training.router_z_loss(values, used), expected, rtol=1e-6)
    assert np.isclose(training.router_z_loss(jmx.Logits(values, METHODS[0]), used), expected, rtol=1e-6)


LOSSES = {
    "load_balancing": training.load_balancing_loss,
    "sequence_balance": training.sequence_balance_loss,
    "router_z": training.router_z_loss,
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=[*LOSSES])
def test_gradients_are_those_of_differences(loss, rng):
    """In float64 by numbers, with the choice of experts held where it is: differences are too small to change it."""
    values, used = values_of(rng), MASKS["some"]
    gradient = np.asarray(jax.grad(lambda v: loss(jmx.Logits(v, METHODS[2]), used))(values))
    direction = rng.normal(size=values.shape).astype(np.float32)
    step = 1e-2
    up, down = (float(loss(jmx.Logits(values + sign * step * direction, METHODS[2]), used)) for sign in (1, -1))
    same = (chosen(values + step * direction, METHODS[2]) == chosen(values - step * direction, METHODS[2])).all()
    if loss is training.router_z_loss or same:
        assert np.isclose((gradient * direction).sum(), (up - down) / (2 * step), rtol=2e-2, atol=1e-3)
    assert (gradient[~used] == 0).all()
    assert np.abs(gradient[used]).min() > 0


@pytest.mark.parametrize("loss", LOSSES.values(), ids=[*LOSSES])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_padding_does_not_count_whatever_is_in_it(loss, dtype, rng):
    values, used = values_of(rng).astype(jnp.dtype(dtype)), MASKS["some"]
    poisoned = np.where(used[..., None], values, jnp.nan).astype(values.dtype)

    def both(values):
        return jax.value_and_grad(lambda v: loss(jmx.Logits(v, METHODS[0]), used))(jnp.asarray(values))

    (clean, slope), (value, gradient) = both(values), both(poisoned)
    assert value.dtype == jnp.float32
    assert value == clean
    assert (gradient == slope).all()


@pytest.mark.parametrize("loss", LOSSES.values(), ids=[*LOSSES])
@pytest.mark.parametrize("shape", [(2, 3, E), (2, 0, E), (0, 3, E)])
def test_no_tokens_are_no_loss(loss, shape):
    logits = jmx.Logits(jnp.ones(shape), METHODS[0])
    assert loss(logits, jnp.zeros(shape[:-1], bool)) == 0
    assert not jnp.isnan(
        jax.grad(lambda v: loss(jmx.Logits(v, METHODS[0]), jnp.zeros(shape[:-1], bool)))(logits.values)
    ).any()


def test_a_nan_that_counts_is_seen(rng):
    values = values_of(rng)
    values[0, 0, 0] = np.nan
    for loss in LOSSES.values():
        assert jnp.isnan(loss(jmx.Logits(values, METHODS[0])))


def test_equal_loads_are_one_and_one_expert_is_most():
    even = np.zeros((E, E), np.float32)
    even[np.arange(E), np.arange(E)] = even[np.arange(E), (np.arange(E) + 1) % E] = 1e-3
    assert np.isclose(training.load_balancing_loss(jmx.Logits(even, jmx.TopKSoftmax(2))), 1, rtol=1e-6)
    skewed = np.tile(np.eye(E, dtype=np.float32)[0] * 100, (5, 1))
    assert np.isclose(training.load_balancing_loss(jmx.Logits(skewed, jmx.TopKSoftmax(1))), E, rtol=1e-6)


@pytest.mark.devices(4)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("loss", [training.load_balancing_loss, training.router_z_loss])
def test_tokens_of_all_devices_count(loss, kind, rng):
    """Whole arrays that a mesh splits, and shards inside `jax.shard_map`; padding is not even among devices."""
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(kind,), devices=jax.devices()[:4])
    values, used = rng.normal(size=(8, E)).astype(np.float32), np.arange(8) < 5
    expected, slope = jax.value_and_grad(lambda v: loss(jmx.Logits(v, METHODS[0]), used))(jnp.asarray(values))
    sharding = jax.NamedSharding(mesh, P("dp"))
    v, m = jax.device_put(values, sharding), jax.device_put(used, sharding)

    def of_shards(v, m):
        def body(v, m):
            return loss(jmx.Logits(v, METHODS[0]), m, axis_name="dp")

        return jax.shard_map(body, mesh=mesh, in_specs=(P("dp"), P("dp")), out_specs=P())(v, m)

    ways = [of_shards]
    if kind is AxisType.Auto:
        ways.append(lambda v, m: loss(jmx.Logits(v, METHODS[0]), m))
    for way in ways:
        value, gradient = jax.jit(jax.value_and_grad(way))(v, m)
        assert np.isclose(value, expected, rtol=1e-6)
        assert np.allclose(gradient, slope, rtol=1e-5, atol=1e-7)


def test_a_bias_moves_against_the_load():
    bias = jnp.array([0.5, -0.25, 0.0, 1.0])
    counts = jnp.array([7, 1, 4, 4])
    got = training.updated_correction_bias(bias, counts, 0.125)
    assert (got == jnp.array([0.375, -0.125, 0.0, 1.0])).all()
    assert got.dtype == jnp.float32
    assert (training.updated_correction_bias(bias, counts, 0) == bias).all()
    assert (jax.jit(training.updated_correction_bias, static_argnums=2)(bias, counts, 0.125) == got).all()


def test_updates_of_the_bias_balance_a_skewed_router(rng):
    """A router that prefers the first experts: after some hundred steps no expert has 1.3 times the mean load."""
    method = jmx.SigmoidTopK(K, renormalize=True)
    values = rng.normal(size=(512, E)).astype(np.float32) + np.linspace(1, -1, E, dtype=np.float32)

    @jax.jit
    def step(bias):
        counts = jmx.token_counts(jmx.route(jmx.Logits(values, method, bias)), E)
        return training.updated_correction_bias(bias, counts, 0.01), counts

    bias, first = step(jnp.zeros(E))
    last = first
    for _ in range(200):
        bias, last = step(bias)
    assert first.max() > 1.6 * first.mean()
    assert last.max() < 1.3 * last.mean()
