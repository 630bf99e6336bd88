"""What the first product of the backend `mosaic` adds to its sums: around the kernel anywhere, all of it on Hopper."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_mosaic_sm90 as emulated
from backend_cases import NEITHER, Case, draw_routing, draw_weights, poison_memory

import jmx
from jmx import Environment, ReLU2, SiLUAndMul, SwiGLU, grouping
from jmx.numerics.gate_up import split_gate_up
from jmx.pallas.mosaic_sm90 import kernel, round_rows
from jmx.pallas.mosaic_sm90.backend import MosaicSm90
from jmx.pallas.mosaic_sm90.layout import LAYOUT
from jmx.selection.backend import ExpertProduct
from jmx.xla import backend as xla

SMOOTH = SwiGLU(alpha=1.702, beta=1.0)
TOLERANCE = 5e-3  # of a result that is rounded to bfloat16 once: 1.7e-3
CASES = [  # with ranks
    (Case(tokens=40, hidden=96, intermediate=160, activation=SMOOTH), 16),
    (Case(tokens=3, activation=SMOOTH), 3),
    (Case(tokens=9, hidden=128, format="nvfp4", order="concatenated", ids="anywhere", top_k=4), 40),
    (Case(tokens=40, hidden=128, format="int8_channel", order="concatenated_up_first", activation=SiLUAndMul()), 17),
    (Case(tokens=9, hidden=96, format="mxfp8", activation=SMOOTH), 16),
    (Case(tokens=40, hidden=128, format="fp8_tensor", order=None, activation=ReLU2(), bias=NEITHER), 8),
    (Case(tokens=9, hidden=128, input_format="int8_token", format="int4_g32", order="interleaved_up_first"), 16),
]
FORMS = [None, "shared", "stack"]  # matrices of each expert, or one of all; experts of a stack of layers


def arguments(case, rng, rank, form, device):
    """A product, its rows, and both factors; and which rows there are. Other rows are NaN."""
    case = dataclasses.replace(case, dtype="bfloat16", layout=LAYOUT.name)
    weights, routing = draw_weights(rng, case), jax.tree.map(jnp.asarray, draw_routing(rng, case))
    experts, problem = weights.experts(case), case.problem()
    if form == "stack":
        experts = jmx.Experts.stack([draw_weights(rng, case).experts(case), experts]).layer(1)
    sorted = grouping.sort_rows(routing.expert_ids, problem.num_experts, 8)
    valid = np.asarray(sorted.assignment_of_row) >= 0
    rows, inner = (
        jnp.asarray(np.where(valid[:, None], rng.normal(size=(valid.size, size)), np.nan), jnp.bfloat16)
        for size in (case.hidden, rank)
    )
    outputs = experts.spec("gate_up").shape[0]
    shape = (outputs, rank) if form == "shared" else (problem.num_experts, outputs, rank)
    b = jnp.asarray(rng.normal(size=shape) * rank**-0.5, jnp.bfloat16)
    return ExpertProduct(problem, "gate_up", sorted, experts, device), rows, inner, b, valid


def expected(product, rows, inner, b, valid):
    """In float32."""
    rows, inner = (jnp.where(valid[:, None], array, 0).astype(jnp.float32) for array in (rows, inner))
    ids = jnp.minimum(product.sorted.expert_of(jnp.arange(len(rows), dtype=jnp.int32)), product.problem.num_experts - 1)
    h = xla.product_of_rows(product, rows, jnp.float32)
    bias = product.experts.take_bias("gate_up", ids)
    h += 0 if bias is None else bias.astype(jnp.float32)
    b = b.astype(jnp.float32)
    more = inner @ b.T if b.ndim == 2 else jnp.einsum("rk,rnk->rn", inner, b[ids], precision="highest")
    order, activation = product.experts.gate_up_order, product.problem.activation
    return activation(h + more) if order is None else activation(*split_gate_up(h + more, order))


def check(product, rows, inner, b, valid):
    assert MosaicSm90().takes_added(product.problem, inner.shape[1])
    got = MosaicSm90().activated(product, rows, inner, b)
    assert got.dtype == jnp.bfloat16
    # First those that are written: others are anything, which a cast may warn of.
    got, wanted = (
        np.asarray(each)[valid].astype(np.float64) for each in (got, expected(product, rows, inner, b, valid))
    )
    assert got.shape == wanted.shape
    assert np.linalg.norm(got - wanted) <= TOLERANCE * np.linalg.norm(wanted)


@pytest.mark.costly
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("case", "rank"), CASES, ids=str)
def test_what_is_around_the_kernel(case, rank, form, rng, monkeypatch):
    monkeypatch.setattr(kernel, "one_product", emulated.one_product)
    monkeypatch.setattr(round_rows, "round_rows", emulated.rounded_rows)
    check(*arguments(case, rng, rank, form, emulated.HOPPER))


ON_A_GPU = [
    *CASES,
    *((Case(tokens=tokens, hidden=96, intermediate=160, activation=SMOOTH), 16) for tokens in (1, 17, 300, 2000)),
    (Case(tokens=300, hidden=2880, intermediate=2880, num_experts=3, activation=SMOOTH), 64),
]


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("case", "rank"), ON_A_GPU, ids=str)
def test_it_adds_on_a_gpu(case, rank, form, rng):
    environment = Environment.probe()
    if environment.compute_capability != (9, 0):
        pytest.skip("needs a Hopper GPU")
    given = arguments(case, rng, rank, form, environment)
    poison_memory()
    check(*given)


def test_problems_without_an_epilogue_that_adds():
    problem = Case(hidden=128).problem()
    assert not MosaicSm90().takes_added(problem, 65)
