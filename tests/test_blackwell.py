"""Blackwell: `xla` runs there, no other backend is registered for it, and the layouts prepared for it work."""

import json

import jax
import jax.numpy as jnp
import pytest

import jmx
from jmx import cli
from jmx.backends import registered_backends, resolve_layout
from jmx.numerics.layouts import LAYOUTS
from jmx.selection.environment import Environment

BLACKWELL = ("b100", "b200", "gb200")
PREPARED = ("cutlass_sm100", "trtllm_sm100", "trtllm_sm100_vllm")
PROBLEM = jmx.Problem(64, 2880, 2880, 128, 4, "bfloat16", "mxfp4", jmx.SwiGLU(), "interleaved", True, "packed")


def test_what_cannot_run_anywhere_is_no_backend():
    assert not {*PREPARED} & {backend.name for backend in registered_backends()}
    assert {*PREPARED} <= {*LAYOUTS}
    with pytest.raises(ValueError, match=r"`backend` \(='trtllm_sm100'\) must be one of"):
        jmx.select(PROBLEM, Environment.named("b200"), PREPARED[1], registered_backends())


@pytest.mark.parametrize("device", BLACKWELL)
def test_xla_runs_there_over_packed_weights(device, capsys):
    assert resolve_layout("auto", Environment.named(device)) == "packed"
    arguments = ["explain", "--model", "gpt-oss-120b", "--tokens", "64", "--device", device, "--json"]
    assert cli.main(arguments) == cli.EXIT_OK
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["chosen"], found["problem"]["layout"]) == ("xla", "packed")


@pytest.mark.parametrize(
    ("layout", "format"),
    [(layout, format) for layout in PREPARED for format in jmx.FORMATS if LAYOUTS[layout].holds(jmx.FORMATS[format])],
)
def test_the_reference_reads_the_layouts(layout, format, rng):
    key = jax.random.key(int(rng.integers(1 << 30)))
    experts = jmx.Experts.random(key, 4, 64, 96, gate_up_order="interleaved", format=format)
    routing = jmx.Routing(jnp.asarray(rng.integers(0, 4, (5, 2)), jnp.int32), jnp.ones((5, 2)))
    x = jnp.asarray(rng.standard_normal((5, 64)), jnp.float32)
    y, expected = (
        jmx.moe(x, routing, experts.prepare(name), activation=jmx.SwiGLU(), backend="xla")
        for name in (layout, "packed")
    )
    assert float(jnp.linalg.norm(expected)) > 0
    assert float(jnp.linalg.norm(y - expected) / jnp.linalg.norm(expected)) < 2e-6
