"""Float experts on Hopper: which problems the backend takes, and the layer around its kernels, against the reference.

On any machine numpy computes what the kernels' contracts say, in their places; on a Hopper GPU they run themselves.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmx
from jmx import Environment, Experts, Problem, Reason, Routing
from jmx.lora import LoRA
from jmx.pallas.float_sm90 import outer as outer_module
from jmx.pallas.float_sm90 import product as product_module
from jmx.pallas.float_sm90.backend import MosaicFloat
from jmx.pallas.float_sm90.config import FittedConfig
from jmx.perf.shapes import MODELS

HOPPER = Environment.named("h200")
ENGINE = MosaicFloat()


# Which problems


def problem(**changes) -> Problem:
    its = Problem(
        num_tokens=5, hidden_size=64, intermediate_size=128, num_experts=4, top_k=2, dtype="bfloat16",
        format="bfloat16", activation=jmx.SwiGLU(), gate_up_order="interleaved", bias=False, layout="packed",
    )  # fmt: skip
    return dataclasses.replace(its, **changes)


@pytest.mark.parametrize(
    ("device", "changes", "reason", "message"),
    [
        ("cpu", {}, Reason.PLATFORM, "'cpu'"),
        ("a100", {}, Reason.COMPUTE_CAPABILITY, "(8, 0)"),
        ("b200", {}, Reason.COMPUTE_CAPABILITY, "(10, 0)"),
        ("h200", {"format": "mxfp4"}, Reason.FORMAT, "'mxfp4'"),
        ("h200", {"input_format": "fp8_token"}, Reason.INPUT_FORMAT, "'fp8_token'"),
        ("h200", {"dtype": "float32"}, Reason.DTYPE, "float32"),
        ("h100", {"dtype": "float16"}, Reason.DTYPE, "range"),
        ("h200", {"intermediate_size": 96}, Reason.SHAPE, "intermediate_size (=96)"),
        ("h200", {"hidden_size": 72}, Reason.SHAPE, "hidden_size (=72)"),
        ("h200", {"num_tokens": None}, Reason.SYMBOLIC_TOKENS, "symbolic"),
        ("h200", {"layout": "canonical"}, Reason.LAYOUT, "'canonical'"),
    ],
)
def test_rejected_problems(device, changes, reason, message):
    found = ENGINE.supports(problem(**changes), Environment.named(device))
    assert found is not None
    assert found.reason is reason
    assert message in found.detail


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(
    ("format", "dtype"),
    [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16"), ("float16", "bfloat16")],
)
@pytest.mark.parametrize("model", MODELS)
def test_layers_of_published_models_run(model, format, dtype, adapters):
    its = MODELS[model].problem(64, "packed")
    its = dataclasses.replace(its, format=format, dtype=dtype, input_format=None, adapters=adapters)
    assert jmx.explain(its, device="h200").chosen == ENGINE.name


# The layer


def emulated_product(rows, weights, groups, its, *, transposed, first=0):
    """As `product.product` says; rows of no group are NaN."""
    assert len(rows) % 8 == 0
    assert rows.dtype == weights.dtype
    fitted = isinstance(its.config, FittedConfig)
    assert not fitted or jnp.dtype(its.dtype).itemsize == 2

    def run(rows, weights, starts, ends, first):
        assert not fitted or (starts % 8 == 0).all()
        out = np.full((len(rows), weights.shape[2 if transposed else 1]), np.nan)
        for group, (start, end) in enumerate(zip(starts, ends, strict=True)):
            its = weights[first + group]
            out[start:end] = rows[start:end] @ (its if transposed else its.T)
        return out

    shape = (len(rows), weights.shape[2 if transposed else 1])
    return called(run, shape, its.dtype, rows, weights, groups.starts, groups.ends, jnp.asarray(first, jnp.int32))


def emulated_outer(d, rows, groups, its):
    """As `outer.outer` says."""
    assert len(rows) == len(d)
    assert len(rows) % 8 == 0
    assert rows.dtype == d.dtype

    def run(d, rows, starts, ends):
        mine = [slice(int(start), int(end)) for start, end in zip(starts, ends, strict=True)]
        return np.stack([d[each].T @ rows[each] for each in mine])

    shape = (len(groups.starts), d.shape[1], rows.shape[1])
    return called(run, shape, its.dtype, d, rows, groups.starts, groups.ends)


def called(run, shape, dtype, *arrays):
    """`run` of numpy arrays, floats in 64 bits."""

    def in_numpy(*arrays):
        wide = (np.asarray(a) if a.dtype == np.int32 else np.asarray(a, np.float64) for a in arrays)
        return run(*wide).astype(dtype)

    return jax.pure_callback(in_numpy, jax.ShapeDtypeStruct(shape, dtype), *arrays, vmap_method="sequential")


@pytest.fixture(params=["emulated", pytest.param("on a GPU", marks=pytest.mark.gpu)])
def kernels(request, monkeypatch):
    if request.param == "emulated":
        monkeypatch.setattr(product_module, "product", emulated_product)
        monkeypatch.setattr(outer_module, "outer", emulated_outer)
        monkeypatch.setattr(Environment, "probe", classmethod(lambda cls, *arguments: HOPPER))
    elif Environment.probe().compute_capability != (9, 0):
        pytest.skip("needs a Hopper GPU")


OF_EACH = jmx.SwiGLUPerExpert((1.0, 0.5, 2.0, 1.5, 1.0), (0.0, 1.0, 0.5, 0.0, 1.0), (7.0, 7.0, 3.0, 7.0, 2.0))
CASES = {
    "plain": {},
    "float32 weights": {"format": "float32"},
    "float16": {"format": "float16", "dtype": "float16"},
    "float16 weights": {"format": "float16"},
    "concatenated, weights on the input": {"order": "concatenated", "weights_on": "input"},
    "without a gate": {"order": None, "activation": "relu2"},
    "without biases": {"bias": False},
    "one token": {"tokens": 1},
    "many tokens": {"tokens": 200, "num_experts": 3},
    "more tokens": {"tokens": 700, "num_experts": 3, "sizes": (320, 192)},
    "a layer of a stack": {"stacked": True},
    "a layer of a stack, rounded": {"stacked": True, "format": "float32"},
    "padded": {"sizes": (40, 72)},
    "an activation of each expert": {"activation": OF_EACH},
    "adapters": {"lora": LoRA(4, targets=("gate", "down"))},
}


class Case:
    """A layer, its inputs, and its results and gradients on a backend."""

    def __init__(
        self, rng, *, tokens=20, num_experts=5, top_k=2, sizes=(64, 128), format="bfloat16", dtype="bfloat16",
        order="interleaved", weights_on="output", activation="swiglu", bias=True, stacked=False, lora=None,
    ):  # fmt: skip
        key = jax.random.key(int(rng.integers(2**31)))
        options = {"gate_up_order": order, "format": format, "bias": bias, "bias_dtype": jnp.float32}
        its = [Experts.random(k, num_experts, *sizes, **options) for k in jax.random.split(key, 2)]
        self.experts = Experts.stack(its) if stacked else its[1]
        self.stacked = stacked
        if any(size % 64 for size in sizes):
            self.experts = self.experts.pad(*(-(-size // 64) * 64 for size in sizes))
        self.x = jnp.asarray(rng.standard_normal((tokens, sizes[0])), dtype)
        self.dy = jnp.asarray(rng.standard_normal(self.x.shape), jnp.float32)
        ids = rng.integers(-1, num_experts + 1, (tokens, top_k)).astype(np.int32)  # some go nowhere
        ids[0] = rng.permutation(num_experts)[:top_k]
        self.routing = Routing(jnp.asarray(ids), jnp.asarray(rng.uniform(0.2, 1, (tokens, top_k)), jnp.float32))
        self.adapters = None
        if lora is not None:
            made = lora.random(key, self.experts)
            self.adapters = jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape) / 4, jnp.float32), made)
        self.call: dict[str, Any] = {"activation": activation, "weights_on": weights_on}

    def results(self, backend):
        """y, and the gradients of x, routing weights, experts and adapters, by name."""

        def layer(x, weights, experts, adapters):
            experts = experts.layer(1) if self.stacked else experts
            routing = self.routing._replace(weights=weights)
            y = jmx.moe(x, routing, experts, backend=backend, adapters=adapters, **self.call)
            return (y.astype(jnp.float32) * self.dy).sum(), y

        arguments = self.x, self.routing.weights, self.experts, self.adapters
        wanted = (0, 1, 2) if self.adapters is None else (0, 1, 2, 3)
        (_, y), found = jax.jit(jax.value_and_grad(layer, wanted, has_aux=True))(*arguments)
        named = {"y": y, "x": found[0], "weights": found[1], **found[2].arrays()}
        return named | ({} if self.adapters is None else found[3].arrays())


@pytest.mark.parametrize("name", CASES)
def test_results_and_all_gradients_are_those_of_the_reference(name, kernels, rng):
    case = Case(rng, **CASES[name])
    got, wanted = case.results("mosaic_float"), case.results("xla")
    assert got.keys() == wanted.keys()
    for array, its in got.items():
        assert its.dtype == wanted[array].dtype, array
        assert its.shape == wanted[array].shape, array
        got_array, wanted_array = (np.asarray(a, np.float64) for a in (its, wanted[array]))
        assert np.isfinite(got_array).all(), array
        assert np.linalg.norm(got_array - wanted_array) <= 2e-2 * np.linalg.norm(wanted_array), array
        assert np.linalg.norm(wanted_array) > 0, array


def test_gradients_of_frozen_weights_are_not_computed(kernels, rng):
    case = Case(rng)

    def loss(x, experts):
        y = jmx.moe(x, case.routing, experts, backend="mosaic_float", **case.call)
        return y.astype(jnp.float32).sum()

    def calls(wanted):
        text = jax.jit(jax.grad(loss, wanted)).lower(case.x, case.experts).as_text()
        return text.count("stablehlo.custom_call @")

    assert calls((0, 1)) - calls(0) == 2
