"""Routing against a row-by-row float64 reference, with its ties, NaN, masks, gradients and refusals."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from safetensors import safe_open
from safetensors.numpy import load_file

import jmx
from jmx.numerics.formats import BlockScaled
from jmx.routing import (
    NOWHERE,
    Custom,
    GroupedTopK,
    Logits,
    Method,
    Routing,
    SigmoidTopK,
    SoftmaxTopK,
    SqrtSoftplusTopK,
    TopKSoftmax,
    route,
    token_counts,
    validate,
)

pytestmark = pytest.mark.sampled(3)

T, E = 64, 16  # most tests share one shape, and so one compilation a method
METHODS = [
    TopKSoftmax(4),
    SoftmaxTopK(4, renormalize=False),
    SoftmaxTopK(3, renormalize=True),
    SigmoidTopK(4, renormalize=True, routed_scaling_factor=2.5),
    SigmoidTopK(1, renormalize=False),
    SqrtSoftplusTopK(4, renormalize=True, routed_scaling_factor=1.5),
    SqrtSoftplusTopK(3, renormalize=False),
    GroupedTopK(4, 4, 2, "sigmoid", True, 2.5),
    GroupedTopK(3, 4, 2, "sqrt_softplus", True, 2.5),
    GroupedTopK(3, 8, 2, "sigmoid", False),
    GroupedTopK(4, 4, 2, "softmax", False, 16.0),
    GroupedTopK(2, E, 3, "softmax", True),
]
BIASED = [method for method in METHODS if method.takes_bias]
LARGEST = np.finfo(np.float32).max
jitted_route = jax.jit(route)  # one compilation a method and shape; that route gives the same outside is tested below


def descending(keys, count):
    """Ids of the `count` largest keys, equal keys in order, those of -inf left out."""
    order = sorted(range(len(keys)), key=lambda e: (-keys[e], e))[:count]
    return [e for e in order if keys[e] > -np.inf]


def reference_row(x, bias, method):
    """(ids, weights) of one token by the definitions, in float64."""
    usable = x > -np.inf
    finite = np.where(usable, np.minimum(x, LARGEST), 0)
    if isinstance(method, TopKSoftmax | SoftmaxTopK) or getattr(method, "scoring", None) == "softmax":
        powers = np.where(usable, np.exp(np.where(usable, finite - max(finite[usable], default=0), 0)), 0)
        scores = powers / max(powers.sum(), 1)
    elif isinstance(method, SqrtSoftplusTopK) or getattr(method, "scoring", None) == "sqrt_softplus":
        scores = np.sqrt(np.maximum(finite, 0) + np.log1p(np.exp(-np.abs(finite))))
    else:
        scores = 1 / (1 + np.exp(-finite))
    keys = np.where(usable, finite if bias is None else scores + bias, -np.inf)
    if isinstance(method, GroupedTopK):
        groups = keys.reshape(method.num_groups, -1)
        best = [sorted(g[g > -np.inf])[-1 if bias is None else -2 :] for g in groups]
        kept = descending([sum(b) if b else -np.inf for b in best], method.topk_groups)
        keys = np.where(np.isin(np.arange(len(x)) // groups.shape[1], kept), keys, -np.inf)
    ids = descending(keys, method.top_k)
    weights = scores[ids]
    if isinstance(method, TopKSoftmax) or method.renormalize:
        weights = weights / weights.sum() if ids else weights
    spare = method.top_k - len(ids)
    weights = weights * getattr(method, "routed_scaling_factor", 1.0)
    return [*ids, *[NOWHERE] * spare], [*weights, *[0.0] * spare]


def assert_matches_reference(x, method, bias=None):
    result = jitted_route(Logits(x, method, bias))
    assert result.expert_ids.dtype == jnp.int32
    assert result.weights.dtype == jnp.float32
    for row, ids, weights in zip(np.asarray(x, np.float64), *map(np.asarray, result), strict=True):
        expected_ids, expected_weights = reference_row(row, bias, method)
        assert ids.tolist() == expected_ids
        np.testing.assert_allclose(weights, expected_weights, rtol=1e-5, atol=1e-30)


def random_logits(num_tokens=T, num_experts=E):
    return (3 * np.random.default_rng().standard_normal((num_tokens, num_experts))).astype(np.float32)


def quarters(shape):
    """Multiples of 1/4 with many ties, exact in float32 together with their sums."""
    return np.random.default_rng().integers(-8, 8, shape).astype(np.float32) / 4


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_methods_match_reference(method):
    assert_matches_reference(random_logits(), method)


@pytest.mark.parametrize("method", BIASED, ids=str)
def test_correction_bias_decides_the_choice_but_not_the_weights(method):
    x = random_logits()
    bias = np.random.default_rng().standard_normal(E).astype(np.float32)
    assert_matches_reference(x, method, bias)
    assert (jitted_route(Logits(x, method, bias)).expert_ids != jitted_route(Logits(x, method)).expert_ids).any()


@examples(12)  # each compiles anew
@given(st.integers(0, 5), st.integers(1, 6), st.integers(1, 4), st.booleans(), st.data())
def test_shapes(num_tokens, num_groups, group_size, renormalize, data):
    num_experts = num_groups * group_size
    topk_groups = data.draw(st.integers(1, num_groups))
    top_k = data.draw(st.integers(1, topk_groups * group_size))
    x = random_logits(num_tokens, num_experts)
    assert_matches_reference(x, GroupedTopK(top_k, num_groups, topk_groups, "sigmoid", renormalize))
    assert_matches_reference(x, SoftmaxTopK(top_k, renormalize))


@pytest.mark.parametrize("num_experts", [8, 1024])
@pytest.mark.parametrize("method", [*METHODS[:7], GroupedTopK(4, 8, 4, "softmax", True)], ids=str)
def test_ties_go_to_the_lower_id(method, num_experts):
    assert_matches_reference(quarters((32, num_experts)), method)


@pytest.mark.parametrize("top_k", range(1, 10))
def test_any_number_of_slots(top_k):
    """Few slots are found in another way than many."""
    x = quarters((64, 9))
    x[::2, np.random.default_rng().permutation(9)[:4]] = -np.inf
    assert_matches_reference(x, TopKSoftmax(top_k))


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_equal_logits_choose_the_first_experts(method):
    zeros = np.zeros((T, E), np.float32)
    zeros[: T // 2, ::2] = -0.0
    assert (jitted_route(Logits(zeros, method)).expert_ids == np.arange(method.top_k)).all()


def test_ties_between_groups_go_to_the_lower_group():
    method = GroupedTopK(2, 4, 1, "sigmoid", True)
    result = jitted_route(Logits(np.ones((1, E), np.float32), method, np.zeros(E, np.float32)))
    assert result.expert_ids.tolist() == [[0, 1]]


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_nan_and_minus_infinity_are_never_chosen(method, bad):
    x = random_logits()
    rng = np.random.default_rng()
    for row in range(T):
        x[row, rng.permutation(E)[: row % (E + 1)]] = bad  # from none to all
    assert_matches_reference(x, method)
    if method.takes_bias:
        assert_matches_reference(x, method, rng.standard_normal(E).astype(np.float32))
    result = jitted_route(Logits(x, method))
    assert result.expert_ids[E].tolist() == [NOWHERE] * method.top_k
    assert result.weights[E].tolist() == [0] * method.top_k


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_extreme_logits_give_finite_weights_and_gradients(method):
    extremes = [np.inf, -np.inf, np.nan, LARGEST, -LARGEST, 200.0, -200.0, 0.0]
    x = np.random.default_rng().choice(extremes, (T, E)).astype(np.float32)
    x[0], x[1], x[2] = np.inf, -LARGEST, -200.0
    mask = np.arange(T) % 5 != 4
    cotangent = random_logits(T, method.top_k)
    result = jitted_route(Logits(x, method), mask)
    gradient = jax.jit(jax.grad(lambda x: (route(Logits(x, method), mask).weights * cotangent).sum()))(x)
    assert np.isfinite(result.weights).all()
    assert np.isfinite(gradient).all()
    assert not gradient[~mask].any()
    assert not gradient[np.isnan(x)].any()
    if isinstance(method, TopKSoftmax) or method.renormalize:
        total = getattr(method, "routed_scaling_factor", 1.0)
        some = (result.expert_ids != NOWHERE).any(axis=1)
        np.testing.assert_allclose(result.weights.sum(axis=1)[some], total, rtol=1e-5)


def test_plus_infinity_counts_as_the_largest_float():
    x = random_logits()
    x[:, 3] = np.inf
    with_largest = np.where(np.isinf(x), LARGEST, x)
    for method in METHODS:
        for a, b in zip(jitted_route(Logits(x, method)), jitted_route(Logits(with_largest, method)), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_correction_bias_can_take_an_expert_out(bad):
    x, bias = random_logits(32), np.zeros(E, np.float32)
    bias[5] = bad
    method = SigmoidTopK(E, renormalize=True)
    result = jitted_route(Logits(x, method, bias))
    assert (np.sort(result.expert_ids, axis=1) == [NOWHERE, *(e for e in range(E) if e != 5)]).all()
    assert np.isfinite(result.weights).all()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_gradients_match_differences(method):
    x, cotangent = random_logits(16), random_logits(16, method.top_k)
    gradient = jax.jit(jax.grad(lambda x: (route(Logits(x, method)).weights * cotangent).sum()))(x)
    step, expected = 1e-6, np.zeros(x.shape)
    for t, row in enumerate(x.astype(np.float64)):
        for e in range(E):
            moved = step * (np.arange(E) == e)
            above, below = (np.array(reference_row(r, None, method)[1]) for r in (row + moved, row - moved))
            expected[t, e] = (above - below) @ cotangent[t] / (2 * step)
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max() + 1e-6)


def test_correction_bias_gets_no_gradient():
    x, bias = random_logits(8), random_logits(1)[0]
    for method in BIASED:
        gradient = jax.jit(jax.grad(lambda b, method=method: route(Logits(x, method, b)).weights.sum()))(bias)
        assert not gradient.any()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_masked_tokens_route_nowhere_and_others_as_before(method):
    x, mask = random_logits(), np.arange(T) % 3 != 1
    full, masked = jitted_route(Logits(x, method)), jitted_route(Logits(x, method), mask)
    for a, b, empty in zip(full, masked, (NOWHERE, 0), strict=True):
        np.testing.assert_array_equal(b[mask], a[mask])
        np.testing.assert_array_equal(b[~mask], empty)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_jit_vmap_and_leading_axes_agree(method):
    logits = Logits(random_logits(12).reshape(3, 4, E), method)
    mask = np.arange(12).reshape(3, 4) % 5 != 2
    results = [route(logits, mask), jitted_route(logits, mask), jax.jit(jax.vmap(route))(logits, mask)]
    for ids, weights in results:
        assert ids.shape == weights.shape == (3, 4, method.top_k)
        np.testing.assert_array_equal(ids, results[0].expert_ids)
        np.testing.assert_allclose(weights, results[0].weights, rtol=1e-6)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_no_tokens(method):
    logits = Logits(jnp.ones((0, E)), method)
    for result in (route(logits, jnp.ones(0, bool)), jitted_route(logits)):
        assert result.expert_ids.shape == result.weights.shape == (0, method.top_k)
    assert jax.grad(lambda x: route(Logits(x, method)).weights.sum())(logits.values).shape == (0, E)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_logits_are_computed_in_float32(dtype):
    x = jnp.asarray(random_logits(16), dtype)
    narrow, wide = (jitted_route(Logits(given, METHODS[1])) for given in (x, x.astype(jnp.float32)))
    for a, b in zip(narrow, wide, strict=True):
        np.testing.assert_array_equal(a, b)


def test_logits_are_a_pytree_with_a_static_method():
    logits = Logits(jnp.ones((2, E)), METHODS[3], jnp.zeros(E))
    leaves, structure = jax.tree.flatten(logits)
    assert [leaf.shape for leaf in leaves] == [(2, E), (E,)]
    assert jax.tree.unflatten(structure, leaves).method == METHODS[3]
    assert hash(METHODS[7]) == hash(GroupedTopK(4, 4, 2, "sigmoid", True, 2.5))


def test_custom_method_runs_the_users_function():
    def first_two(logits):
        return jnp.tile(jnp.arange(2, dtype=jnp.uint8), (logits.shape[0], 1)), jax.nn.sigmoid(logits[:, :2])

    x, mask = random_logits(6).reshape(2, 3, E), np.array([[True, False, True], [True, True, True]])
    result = jitted_route(Logits(x, Custom(2, first_two)), mask)
    assert result.expert_ids.dtype == jnp.int32
    np.testing.assert_array_equal(result.expert_ids, np.where(mask[..., None], [0, 1], NOWHERE))
    np.testing.assert_allclose(result.weights, np.where(mask[..., None], 1 / (1 + np.exp(-x[..., :2])), 0), rtol=1e-5)
    with pytest.raises(ValueError, match=r"`expert_ids` \(shape \(6, 2\)\) must have `top_k` \(=3\) slots"):
        route(Logits(x, Custom(3, first_two)))
    with pytest.raises(TypeError, match=r"`expert_ids` \(dtype float32\) must be integer"):
        route(Logits(x, Custom(2, lambda logits: (logits[:, :2], logits[:, :2]))))


def test_custom_method_gets_the_correction_bias():
    def biased(logits, correction_bias=None):
        scores = jax.nn.sigmoid(logits)
        _, ids = jax.lax.top_k(scores if correction_bias is None else scores + correction_bias, 2)
        return ids, jnp.take_along_axis(scores, ids, axis=1)

    x, bias = random_logits(), np.random.default_rng().standard_normal(E).astype(np.float32)
    for its_bias in (bias, bias.astype(jnp.bfloat16), None):
        found = jitted_route(Logits(x, Custom(2, biased), its_bias))
        expected = jitted_route(Logits(x, SigmoidTopK(2, renormalize=False), its_bias))
        np.testing.assert_array_equal(found.expert_ids, expected.expert_ids)
        np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-6)


@pytest.mark.parametrize("renormalize", [True, False])
def test_scores_that_underflow_still_weigh_experts(renormalize):
    """softplus(x) is 0 in float32 for logits below -104; its square root is not, and the shares of the k are not."""
    x = np.linspace(-170, -9, T * E, dtype=np.float32).reshape(E, T).T
    assert_matches_reference(x, SqrtSoftplusTopK(4, renormalize))


@examples(25)
@given(st.lists(st.lists(st.integers(-3, 8), min_size=3, max_size=3), max_size=6))
def test_token_counts(ids):
    ids = np.array(ids, np.int32).reshape(-1, 3)
    counts = jax.jit(token_counts, static_argnums=1)(Routing(ids, np.ones(ids.shape, np.float32)), 5)
    assert counts.dtype == jnp.int32
    assert counts.tolist() == [int((ids == e).sum()) for e in range(5)]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TopKSoftmax(0), r"`top_k` \(=0\) must be at least 1"),
        (lambda: GroupedTopK(0, 4, 2, "sigmoid", True), r"`top_k` \(=0\) must be at least 1"),
        (lambda: GroupedTopK(2, 0, 1, "sigmoid", True), r"`num_groups` \(=0\) must be at least 1"),
        (lambda: GroupedTopK(2, 4, 5, "sigmoid", True), r"`topk_groups` \(=5\) must be in 1..`num_groups` \(=4\)"),
        (lambda: GroupedTopK(2, 4, 0, "sigmoid", True), r"`topk_groups` \(=0\) must be in 1"),
        (lambda: GroupedTopK(2, 4, 2, "relu", True), r"`scoring` \(='relu'\) must be one of"),
        (lambda: SigmoidTopK(2, True, np.inf), r"`routed_scaling_factor` \(=inf\) must be finite"),
        (lambda: GroupedTopK(2, 4, 2, "sigmoid", True, np.nan), r"`routed_scaling_factor` \(=nan\) must be finite"),
    ],
)
def test_methods_refuse_bad_parameters(build, message):
    with pytest.raises(ValueError, match=message):
        build()


X = np.ones((3, E), np.float32)


@pytest.mark.parametrize(
    ("logits", "mask", "error", "message"),
    [
        (
            Logits(X, TopKSoftmax(17)),
            None,
            ValueError,
            r"`top_k` \(=17\) must be at most the number of experts \(=16\)",
        ),
        (Logits(X, GroupedTopK(2, 5, 2, "sigmoid", True)), None, ValueError, r"`num_groups` \(=5\) must divide"),
        (Logits(X, GroupedTopK(5, 8, 2, "sigmoid", True)), None, ValueError, r"`top_k` \(=5\) .* experts \(=4\) of"),
        (Logits(X, TopKSoftmax(2), X[0]), None, ValueError, "`correction_bias` must be None for TopKSoftmax"),
        (
            Logits(X, SigmoidTopK(2, True), X),
            None,
            ValueError,
            r"`correction_bias` \(shape \(3, 16\)\) must be \(16,\)",
        ),
        (Logits(X, SigmoidTopK(2, True), X[0].astype(int)), None, TypeError, "`correction_bias` .dtype int64. must"),
        (Logits(X.astype(np.int32), TopKSoftmax(2)), None, TypeError, "`values` .dtype int32. must be floating"),
        (Logits(np.float32(1), TopKSoftmax(2)), None, ValueError, "scalar"),
        (Logits(X, TopKSoftmax(2)), np.ones(4, bool), ValueError, r"`mask` \(shape \(4,\)\) must be \(3,\)"),
        (Logits(X, TopKSoftmax(2)), np.ones(3), TypeError, "`mask` .dtype float64. must be bool"),
    ],
)
def test_route_refuses_what_does_not_fit(logits, mask, error, message):
    with pytest.raises(error, match=message):
        route(logits, mask)


@pytest.mark.parametrize(
    ("ids", "weights", "error", "message"),
    [
        (
            np.ones((3, 2), np.float32),
            X[:, :2],
            TypeError,
            r"`expert_ids` \(dtype float32\) must be integer",
        ),
        (np.ones((3, 2), np.int32), np.ones((3, 2), np.int32), TypeError, "`weights` .dtype int32. must be floating"),
        (
            np.ones((4, 2), np.int32),
            X[:, :2],
            ValueError,
            r"`expert_ids` \(shape \(4, 2\)\) must be \(T, k\) with T = 3",
        ),
        (np.ones(3, np.int32), X[:, 0], ValueError, r"`expert_ids` \(shape \(3,\)\) must be"),
        (np.ones((3, 2), np.int32), X[:, :3], ValueError, r"`weights` \(shape \(3, 3\)\) must have the shape"),
    ],
)
def test_validate_refuses_what_is_not_a_routing(ids, weights, error, message):
    validate(Routing(np.ones((3, 2), np.int32), X[:, :2]), 3)
    with pytest.raises(error, match=message):
        validate(Routing(ids, weights), 3)


def test_ids_that_int32_cannot_hold_count_nowhere():
    routing = Routing(np.array([[2**32, 1], [2**32 + 1, -(2**33)]]), np.ones((2, 2), np.float32))
    np.testing.assert_array_equal(token_counts(routing, 4), [0, 1, 0, 0])


# DeepSeek-V3, against transformers: see data/make_qwen3_moe.py

GROUPED = Path(__file__).parent / "data" / "qwen3_moe" / "grouped_routing.safetensors"


def grouped_configs() -> dict[str, dict[str, Any]]:
    with safe_open(GROUPED, "np") as file:  # pyright: ignore
        return json.loads(file.metadata()["configs"])


@pytest.mark.parametrize("name", ["renormalised", "plain", "one_group"])
def test_grouped_sigmoid_routing_and_its_layer_are_deepseeks(name: str) -> None:
    config, golden = grouped_configs()[name], load_file(GROUPED)
    method = GroupedTopK(
        config["num_experts_per_tok"],
        num_groups=config["n_group"],
        topk_groups=config["topk_group"],
        scoring="sigmoid",
        renormalize=config["norm_topk_prob"],
        routed_scaling_factor=config["routed_scaling_factor"],
    )
    x, values = golden["hidden"], golden["hidden"] @ golden["router"].T
    logits = Logits(jnp.asarray(values), method, jnp.asarray(golden["bias"]))
    found = jitted_route(logits)
    expected, got = (  # by expert: transformers does not sort them
        [np.take_along_axis(np.asarray(a), np.argsort(its.expert_ids), axis=1) for a in its]
        for its in (Routing(golden[f"{name}.ids"], golden[f"{name}.weights"]), found)
    )
    assert np.array_equal(got[0], expected[0])
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5)
    packed = {
        role: BlockScaled(golden[role], np.full((*golden[role].shape[:2], 1), golden["scale"]))
        for role in ("gate_up", "down")
    }
    experts = jmx.Experts.of(**packed, gate_up_order="concatenated", format=jmx.FORMATS["fp8_channel"])
    out = np.asarray(jmx.moe(jnp.asarray(x), logits, experts, activation=jmx.SwiGLU()), np.float64)
    assert np.linalg.norm(out - golden[f"{name}.out"]) <= 1e-5 * np.linalg.norm(golden[f"{name}.out"])


def test_every_field_of_a_method_has_a_check():
    @dataclass(frozen=True)
    class Warm(Method):
        temperature: float = 1.0

    with pytest.raises(AssertionError, match="`_CHECKS` must have a check of `temperature`"):
        Warm(2)
