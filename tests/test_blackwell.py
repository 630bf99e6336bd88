"""The engines for Blackwell: what each says where, and that nothing is ever run on them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import jmx
from jmx import Environment, NoBackendError, Problem, Reason, cli
from jmx.backends import BACKENDS
from jmx.ffi.blackwell import ENGINES
from jmx.numerics.layouts import LAYOUTS
from jmx.selection.environment import known_devices
from jmx.selection.select import select

BLACKWELL = ("b100", "b200", "gb200")
PROBLEM = Problem(
    num_tokens=64,
    hidden_size=2880,
    intermediate_size=2880,
    num_experts=128,
    top_k=4,
    dtype="bfloat16",
    format="mxfp4",
    activation=jmx.SwiGLU(alpha=1.702, beta=1.0, limit=7.0),
    gate_up_order="interleaved",
    bias=True,
    layout="packed",
)


def of_capability(*capability):
    return Environment("gpu", "some GPU", capability, 148)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_it_rejects_everything_everywhere(engine):
    for environment in known_devices().values():
        for layout in LAYOUTS:
            for input_format in (None, "mxfp8"):
                problem = dataclasses.replace(PROBLEM, layout=layout, input_format=input_format)
                rejection = engine.supports(problem, environment)
                if environment.platform != "gpu":
                    assert rejection.reason is Reason.PLATFORM
                elif environment.compute_capability == (10, 0):
                    assert rejection.reason is Reason.NOT_BUILT
                else:
                    assert rejection.reason is Reason.COMPUTE_CAPABILITY


def test_where_their_kernels_would_run():
    cutlass, trtllm = ENGINES
    for capability, reasons in {
        (9, 0): (Reason.COMPUTE_CAPABILITY, Reason.COMPUTE_CAPABILITY),
        (10, 0): (Reason.NOT_BUILT, Reason.NOT_BUILT),
        (10, 3): (Reason.NOT_BUILT, Reason.NOT_BUILT),
        (12, 0): (Reason.NOT_BUILT, Reason.COMPUTE_CAPABILITY),
    }.items():
        found = [engine.supports(PROBLEM, of_capability(*capability)).reason for engine in (cutlass, trtllm)]
        assert tuple(found) == reasons, capability
    assert "(9, 0) is none of (10, 0), (10, 3)" in trtllm.supports(PROBLEM, of_capability(9, 0)).detail


@pytest.mark.parametrize("device", BLACKWELL)
def test_explain_tells_what_each_would_need(device):
    found = jmx.explain(PROBLEM, device=device)
    assert found.chosen == "xla"
    trail = {name: rejection for name, _, rejection in found.trail}
    for engine in ENGINES:
        told = trail[engine.name]
        assert told is not None
        assert told.reason is Reason.NOT_BUILT
        assert f"jmx has the layout {engine.name!r} and an MXFP8 quantiser, but binds no kernel; needs" in told.detail
    text = str(found)
    assert "needs FlashInfer's" in text
    assert "needs TensorRT-LLM's" in text


def test_the_command_line_tells_the_same(capsys):
    arguments = ["explain", "--model", "gpt-oss-120b", "--tokens", "64", "--device", "b200", "--json"]
    assert cli.main(arguments) == cli.EXIT_OK
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["device"], found["chosen"], found["problem"]["layout"]) == ("NVIDIA B200", "xla", "packed")
    reasons = {backend["name"]: (backend["rejection"] or {}).get("reason") for backend in found["backends"]}
    assert [reasons[engine.name] for engine in ENGINES] == ["not built", "not built"]


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_asking_for_one_is_an_error_that_says_why(engine):
    with pytest.raises(NoBackendError, match=f"{engine.name}: not built: jmx has the layout"):
        select(PROBLEM, Environment.named("b200"), engine.name, BACKENDS)
    experts = jmx.Experts.random(jax.random.key(0), 4, 64, 96, gate_up_order="interleaved").prepare(engine.name)
    routing = jmx.Routing(jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1)))
    with pytest.raises(NoBackendError, match=f"backend '{engine.name}' was requested, but cannot run this"):
        jmx.moe(jnp.ones((2, 64)), routing, experts, activation=jmx.SwiGLU(), backend=engine.name)


def test_it_says_nowhere_that_it_runs():
    for engine in ENGINES:
        assert "no kernel" in engine.summary
        with pytest.raises(NotImplementedError, match="has no kernel"):
            engine.apply(None, None, None, None, None)  # pyright: ignore[reportArgumentType]
