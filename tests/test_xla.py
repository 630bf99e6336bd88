"""What the reference backend promises beyond its results: memory that does not grow with the number of experts."""

import aot
import jax
import jax.numpy as jnp
import pytest
from memory import abstract_step, compile_here, expert_bytes, temporary_bytes

import jmx
from jmx import Environment, Problem, Reason, SwiGLU
from jmx.xla import Xla

SIZE = 1024
# One token of stacked arrays is all that XLA can slice without a copy; see `Experts.layer`.
STEPS = [
    *((form, tokens) for form in ("forward", "backward", "views") for tokens in (1, 64, 4096)),
    *(("backward views", tokens) for tokens in (1, 4096)),
    ("arrays", 1),
]
ON_AN_H200 = [(form, tokens) for form in ("forward", "backward", "views") for tokens in (1, 64, 4096)] + [("arrays", 1)]
ON_AN_H200 = [step for step in ON_AN_H200 if step not in (("views", 4096), ("backward", 64))]  # each takes seconds


def assert_memory_does_not_grow_with_experts(compile_step, form, tokens, layout, workspace=0):
    few, many = (
        temporary_bytes(compile_step(step, *arguments))
        for step, arguments in (abstract_step(tokens, n, SIZE, layout, form) for n in (8, 128))
    )
    expert = expert_bytes(SIZE)
    # Not to the byte: blocks are chosen by an expert's usual share of the tokens.
    assert many - few < expert + workspace
    activations = tokens * SIZE * 4
    assert max(few, many) < 14 * expert + 4 * activations + workspace


@pytest.mark.parametrize(("form", "tokens"), STEPS)
def test_memory_does_not_grow_with_experts(form, tokens):
    # A GPU's autotuner may give cuBLAS a product, and 32 MiB of workspace with it, in one program and not in another.
    workspace = 32 << 20 if Environment.probe().platform == "gpu" else 0
    with jmx.use_backend("xla"):
        assert_memory_does_not_grow_with_experts(compile_here, form, tokens, "packed", workspace)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("form", "tokens", "layout"), [*((*step, "packed") for step in ON_AN_H200), ("arrays", 1, "canonical")]
)
def test_memory_does_not_grow_with_experts_on_an_h200(form, tokens, layout):
    with jmx.use_backend("xla"):
        assert_memory_does_not_grow_with_experts(aot.compile_for_h200, form, tokens, layout)


@pytest.mark.parametrize("tokens", [1, 64])
def test_canonical_weights_are_not_widened(tokens):
    """On a CPU, packing copies them once, in 4 bits: less than a quarter of what bfloat16 would take."""
    step, arguments = abstract_step(tokens, 128, SIZE, "canonical", "forward")
    assert temporary_bytes(compile_here(step, *arguments)) < 128 * expert_bytes(SIZE) * 0.35 + 14 * expert_bytes(SIZE)


def problem(dtype):
    experts = abstract_step(4, 8, 64, "packed", "forward")[1][3]
    x = jax.ShapeDtypeStruct((4, 64), dtype)
    return Problem.of(x, 2, experts, SwiGLU())


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_dtypes_that_are_refused(dtype):
    rejection = Xla().supports(problem(dtype), Environment.named("cpu"))
    assert rejection is not None
    assert rejection.reason is Reason.DTYPE
    assert jnp.dtype(dtype).name in rejection.detail


@pytest.mark.parametrize("device", ["cpu", "a100", "h200", "b200"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_it_runs_everywhere(device, dtype):
    assert jmx.select(problem(dtype), Environment.named(device), None, [Xla()]).backend == Xla()
