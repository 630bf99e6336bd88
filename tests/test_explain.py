"""`jmx.explain`: of layers, arrays and plain shapes, its numbers computed by hand, and its text."""

import dataclasses
import json
import re
import sys
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import jmx
import jmx.linen
import jmx.nnx
from jmx import Environment, Problem, Reason, Rejection
from jmx.backends import registered_backends
from jmx.pallas.mosaic_sm90.backend import MosaicSm90
from jmx.pallas.mosaic_sm90.config import Config
from jmx.selection import tuning
from jmx.selection.costs import PEAKS, times_bfloat16
from jmx.selection.environment import known_devices
from jmx.selection.registry import Registry

MODULE = sys.modules["jmx.explain"]  # in `jmx` the function hides the module of its name
explain: Any = MODULE.explain  # Any: each test knows which fields are None
GPT_OSS = jmx.SwiGLU(alpha=1.702, beta=1.0, limit=7.0)


def gpt_oss_120b(tokens):
    return Problem(tokens, 2880, 2880, 128, 4, "bfloat16", "mxfp4", GPT_OSS, "interleaved", True, "canonical")


def on_hopper(tokens):
    return replace(gpt_oss_120b(tokens), layout="mosaic_sm90")


def small(**options):
    return jmx.nnx.MoE(64, 96, 8, 2, activation=GPT_OSS, bias=True, rngs=nnx.Rngs(0), **options)


@dataclass(frozen=True)
class Never:
    name: str = "never"
    summary: str = "for tests"

    def supports(self, problem, environment):
        return Rejection(Reason.SHAPE, "wants [bold]tiles[/bold] of 7", "ask elsewhere")


# Numbers


def test_one_token_through_gpt_oss_120b_by_hand():
    found = explain(gpt_oss_120b(1), device="h200")
    weights_of_an_expert = 2 * 2880 * 2880 + 2880 * 2880
    bytes_of_an_expert = weights_of_an_expert // 2 + weights_of_an_expert // 32
    assert bytes_of_an_expert == pytest.approx(13.2e6, rel=2e-3)
    assert found.active_experts == pytest.approx(4)
    assert found.bytes == pytest.approx(4 * bytes_of_an_expert + 2 * 2 * 2880)
    assert found.flops == 2 * 4 * weights_of_an_expert
    assert found.floor.us == pytest.approx(1e6 * found.bytes / 4.8e12)
    assert found.floor.us == pytest.approx(11, rel=0.01)
    assert found.floor.bound == "memory"


def test_8192_tokens_through_gpt_oss_120b_by_hand():
    found = explain(gpt_oss_120b(8192), device="h200")
    assert found.active_experts == pytest.approx(128)
    assert found.bytes == pytest.approx(128 * 13.22e6 + 2 * 2 * 8192 * 2880, rel=1e-3)
    assert found.flops == 2 * 8192 * 4 * 3 * 2880**2
    assert found.floor.us == pytest.approx(1e6 * found.flops / 989e12)
    assert found.floor.bound == "compute"
    assert explain(gpt_oss_120b(8192), device="b200").floor.us < found.floor.us


@pytest.mark.parametrize(
    ("device", "format", "input_format", "times"),
    [
        ("h200", "mxfp4", None, 1),
        ("h200", "mxfp4", "fp8_token", 2),
        ("h200", "fp8_block", "fp8_block", 2),
        ("h200", "int4_g32", "fp8_token", 2),
        ("h200", "int8_channel", "int8_token", 2),
        ("h200", "mxfp4", "mxfp4", 2),  # in FP8, which holds e2m1
        ("h200", "int8_channel", "fp8_token", 1),  # no type of 8 bits holds both
        ("h200", "fp8_channel", "int8_token", 1),
        ("l40s", "mxfp4", "fp8_token", 2),
        ("a100", "mxfp4", "fp8_token", 1),  # no FP8 tensor cores: in bfloat16
        ("a100", "mxfp4", "int8_token", 2),
        ("b200", "mxfp4", "mxfp8", 2),
        ("b200", "nvfp4", "nvfp4", 4),
        ("b200", "fp8_channel", "nvfp4", 2),
    ],
)
def test_narrow_inputs_have_the_tensor_cores_own_peak(device, format, input_format, times):
    problem = replace(gpt_oss_120b(1 << 17), format=format, input_format=input_format)
    found = explain(problem, device=device)
    assert found.floor.bound == "compute"
    assert found.floor.us == pytest.approx(1e6 * found.flops / PEAKS[found.environment.device_kind].flops / times)


def test_narrow_inputs_change_no_floor_that_memory_bounds_and_no_devices_without_tensor_cores():
    rounded = replace(gpt_oss_120b(1), input_format="fp8_token")
    assert explain(rounded, device="h200").floor.us == explain(gpt_oss_120b(1), device="h200").floor.us
    for environment in (Environment.named("cpu"), Environment("gpu", "another"), Environment("tpu", "TPU v5e")):
        assert times_bfloat16(replace(rounded, input_format="int8_token"), environment) == 1


@pytest.mark.parametrize("tokens", [2, 16, 100])
def test_active_experts_are_those_that_uniform_routing_reaches(rng, tokens):
    found = explain(gpt_oss_120b(tokens), device="h200").active_experts
    draws = [np.unique(rng.random((tokens, 128)).argsort(axis=1)[:, :4]).size for _ in range(400)]
    assert found == pytest.approx(np.mean(draws), rel=0.03)


def test_no_tokens_cost_nothing_and_use_no_expert():
    found = explain(gpt_oss_120b(0), device="h200")
    assert (found.active_experts, found.bytes, found.flops, found.floor.us) == (0, 0, 0, 0)


def test_an_ungated_layer_has_half_the_first_weight():
    gated = explain(gpt_oss_120b(1), device="h200")
    plain = explain(replace(gpt_oss_120b(1), gate_up_order=None, activation=jmx.SiLU()), device="h200")
    assert plain.flops == pytest.approx(gated.flops * 2 / 3)


def test_every_gpu_that_can_be_named_has_peaks_of_its_own_part():
    gpus = [environment.device_kind for environment in known_devices().values() if environment.platform == "gpu"]
    assert sorted(gpus) == sorted(PEAKS)
    other_part = Environment("gpu", "NVIDIA H100 PCIe", (9, 0), 114)
    found = MODULE.explain_problem(gpt_oss_120b(1), other_part)
    assert found.floor is None
    assert "floor not known for NVIDIA H100 PCIe" in str(found)


# Subjects


def test_a_layer_its_arrays_and_its_shapes_are_explained_alike():
    layer, x = small(), jnp.ones((3, 5, 64), jnp.bfloat16)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    experts, logits = layer.experts, jmx.Logits(jnp.ones((3, 5, 8)), jmx.TopKSoftmax(2))
    ids = jmx.Routing(jnp.zeros((3, 5, 2), jnp.int32), jnp.ones((3, 5, 2)))
    abstract = jax.eval_shape(lambda: experts)
    linen = jmx.linen.MoE(64, 96, 8, 2, activation=GPT_OSS, bias=True)
    expected = explain(layer, x)
    assert expected.problem == layer.problem(x)
    assert expected.problem.num_tokens == 15
    for found in (
        explain(layer, shape),
        explain(nnx.eval_shape(small), shape),
        explain(linen, shape),
        explain(x, ids, experts, activation=GPT_OSS),
        explain(shape, jax.eval_shape(lambda: logits), abstract, activation=GPT_OSS),
        explain(expected.problem),
    ):
        # On a GPU there may be a note on logits, for what is known of their routing.
        assert replace(found, notes=()) == replace(expected, notes=())
    assert explain(x, ids, experts, activation=GPT_OSS, weights_on="input").problem.weights_on == "input"


def test_who_decided_on_the_inputs_is_reported():
    layer, x = small(), jnp.ones((5, 64), jnp.bfloat16)
    scale = jnp.float32(0.01)
    routing, declared = (
        jmx.Logits(jnp.ones((5, 8)), jmx.TopKSoftmax(2)),
        layer.experts.with_inputs("nvfp4", scale, scale),
    )
    assert "inputs:" not in str(explain(layer, x))  # of 16 bits
    asked = "inputs: fp8_token, asked for\n"
    of_linen = jmx.linen.MoE(64, 96, 8, 2, activation=GPT_OSS, input_format="fp8")
    for found in (
        explain(small(input_format="fp8"), x),
        explain(of_linen, x),
        explain(x, routing, layer.experts, activation=GPT_OSS, input_format="fp8"),
        explain(replace(gpt_oss_120b(1), input_format="fp8_token")),
    ):
        assert asked in str(found)
        assert not found.as_dict()["inputs_declared"]
    for found in (
        explain(x, routing, declared, activation=GPT_OSS),
        explain(small(experts=declared), x),
    ):
        assert "inputs: nvfp4, declared by the experts\n" in str(found)
        assert found.as_dict()["inputs_declared"]
    assert "inputs: nvfp4, asked for" in str(explain(x, routing, declared, activation=GPT_OSS, input_format="fp4"))


def test_explaining_inside_a_trace_changes_nothing():
    layer, x, seen = small(), jnp.ones((5, 64)), []
    jax.jit(lambda layer, x: seen.append(explain(layer, x)))(layer, x)
    assert seen == [explain(layer, x)]


def test_a_model_of_real_size_is_explained_without_an_array():
    before = {id(a) for a in jax.live_arrays()}
    layer = nnx.eval_shape(
        lambda: jmx.nnx.MoE(2880, 2880, 128, 4, activation=GPT_OSS, bias=True, layout="canonical", rngs=nnx.Rngs(0))
    )
    found = explain(layer, jax.ShapeDtypeStruct((1, 2880), jnp.bfloat16), device="h200")
    assert {id(a) for a in jax.live_arrays()} <= before
    assert replace(found.problem, gate_up_order="interleaved") == gpt_oss_120b(1)
    assert found.environment == Environment.named("h200")


def test_what_is_missing_or_not_known_is_an_error():
    layer, x = small(), jnp.ones((5, 64))
    with pytest.raises(TypeError, match=re.escape("`arguments` (0 of them) must be `x` after a MoE")):
        explain(layer)
    with pytest.raises(TypeError, match="unexpected keyword argument 'weights_no'"):
        explain(layer, x, weights_no="input")
    with pytest.raises(ValueError, match=re.escape("`device` (='h9000') must be one of")):
        explain(layer, x, device="h9000")
    known = [backend.name for backend in registered_backends()]
    with pytest.raises(ValueError, match=re.escape(f"`backend` (='xlaa') must be one of {known}")):
        explain(layer, x, backend="xlaa")


# Configurations


def test_a_tunable_backends_configuration_and_its_source_are_reported(tmp_path, monkeypatch):
    engine, h200 = MosaicSm90(), Environment.named("h200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuned, asked = (Config(16, 2, 1, n, 2) for n in (1, 2))
    key = tuning.Key(tuning.shape_class(on_hopper(64)), 64)
    tuning.save(
        tuning.cache_file("mosaic", h200.device_kind), engine, h200.device_kind, {key: tuning.Entry(tuned, 1.0, None)}
    )
    tuning.reload()
    try:
        alone = explain(on_hopper(8192), device="h200")
        assert (alone.chosen, alone.configuration) == ("mosaic", tuning.config(engine, on_hopper(8192), h200))
        assert alone.configuration.source != "user"
        found = explain(on_hopper(64), device="h200")
        assert found.configuration == (tuned, "user")
        text = " ".join(re.sub("[│\n ]+", " ", str(found)).split())
        assert f"{tuned!r}, by this user's cache" in text
        values = json.loads(json.dumps(found.as_dict()))["configuration"]
        assert (values["source"], values["values"]["block_n"], values["values"]["k_tiles"]) == ("user", 16, 1)
        with tuning.override("mosaic", asked):
            assert explain(on_hopper(64), device="h200").configuration == (asked, "override")
    finally:
        monkeypatch.undo()
        tuning.reload()


def test_a_backend_that_has_nothing_to_tune_has_no_configuration():
    for found in (
        explain(on_hopper(64), device="h200", backend="xla"),
        explain(on_hopper(64), device="cpu"),
        explain(on_hopper(64), device="cpu", backend="mosaic"),
    ):
        assert found.chosen in ("xla", None)
        assert found.configuration is None
        assert found.as_dict()["configuration"] is None
        assert "Config(" not in str(found)


# Requests


def test_a_request_that_cannot_be_met_is_reported_not_raised(monkeypatch):
    monkeypatch.setattr("jmx.backends.REGISTRY", Registry((Never(), *registered_backends())))  # pyright: ignore[reportArgumentType]
    x = jnp.ones((5, 64))
    for found in (
        explain(small(), x, backend="never"),
        explain(small(backend="never"), x),
        explain(gpt_oss_120b(1), backend="never", device="h200"),
    ):
        assert found.chosen is None
        assert "wants [bold]tiles[/bold] of 7; ask elsewhere" in found.error
        text = str(found)
        assert "a call raises NoBackendError: backend 'never' was requested, but cannot run this" in text
        assert "shape: wants [bold]tiles[/bold] of 7; ask elsewhere" in text
        assert re.search(r"xla +│ can ", text)
    with jmx.use_backend("never"):
        assert explain(small(), x).chosen is None
        assert explain(small(), x, backend="xla").chosen == "xla"


def test_symbolic_tokens_are_reported(rng):
    (tokens,) = export.symbolic_shape("t")
    found = explain(small(), jax.ShapeDtypeStruct((tokens, 64), jnp.float32))
    assert found.chosen is None
    assert {name: rejection.reason for name, _, rejection in found.trail}["xla"] is Reason.SYMBOLIC_TOKENS
    assert (found.active_experts, found.bytes, found.flops, found.floor) == (None,) * 4
    assert "bytes, flops and floor depend on the token count" in str(found)
    assert json.loads(json.dumps(found.as_dict()))["floor_us"] is None


# Output


def test_as_dict_is_json(monkeypatch):
    monkeypatch.setattr("jmx.backends.REGISTRY", Registry((Never(), *registered_backends())))  # pyright: ignore[reportArgumentType]
    found = explain(gpt_oss_120b(1), device="h200")
    values = json.loads(json.dumps(found.as_dict()))
    assert values["problem"]["activation"] == "SwiGLU(alpha=1.702, beta=1.0, limit=7.0)"
    assert values["problem"]["num_tokens"] == 1
    assert (values["device"], values["chosen"], values["error"]) == ("NVIDIA H200", "xla", None)
    assert (values["bytes"], values["flops"]) == (found.bytes, found.flops)
    assert (values["floor_us"], values["bound"]) == (found.floor.us, "memory")
    never = values["backends"][0]
    assert never["rejection"] == {
        "reason": "shape",
        "detail": "wants [bold]tiles[/bold] of 7",
        "remedy": "ask elsewhere",
    }
    (chosen,) = (each for each in values["backends"] if each["chosen"])
    assert (chosen["name"], chosen["rejection"]) == ("xla", None)


def test_the_table_tells_what_where_who_and_how_fast_at_best():
    text = str(explain(gpt_oss_120b(1), device="h200"))
    assert text.startswith(
        "1 token, top-4 of 128 experts, H=2880, I=2880, mxfp4 (canonical) x bfloat16 on NVIDIA H200\n"
    )
    assert re.search(r"│ xla +│ chosen │ reference in plain jnp", text)
    assert text.endswith(
        "4 of 128 experts used, 52.9 MB moved, 199 MFLOP: floor 11.0 us (memory, 4.8 TB/s by data sheet)"
    )
    assert max(len(line) for line in text.splitlines()) <= 120
    assert "\x1b" not in text
    many = str(explain(gpt_oss_120b(8192), device="h200"))
    assert "1.79 GB moved, 1.63 TFLOP: floor 1648.9 us (compute, 989 TFLOP/s by data sheet)" in many


@pytest.mark.parametrize(
    ("tokens", "top_k", "used"),
    [
        (0, 4, "0 of 128"),
        (1, 4, "4 of 128"),
        (2, 4, "about 7.9 of 128"),
        (3, 128, "128 of 128"),
        (256, 4, "about 128 of 128"),  # 0.04 of them are expected to be unused
        (8192, 4, "128 of 128"),
    ],
)
def test_experts_that_are_used_are_an_estimate_where_chance_decides(tokens, top_k, used):
    problem = dataclasses.replace(gpt_oss_120b(tokens), top_k=top_k)
    assert str(explain(problem, device="h200")).splitlines()[-1].startswith(f"{used} experts used, ")


def test_a_short_floor_has_its_digits():
    reported = str(explain(dataclasses.replace(gpt_oss_120b(1), hidden_size=64, intermediate_size=96), device="H200"))
    assert "floor 0.00821 us (memory" in reported
    assert "floor 0 us" in str(explain(gpt_oss_120b(0), device="h200"))


def test_arguments_that_a_call_refuses_are_refused():
    experts = jmx.Experts.random(jax.random.key(0), 4, 64, 96, gate_up_order="interleaved")
    routing = jmx.Logits(jnp.ones((3, 4)), jmx.TopKSoftmax(2))
    with pytest.raises(ValueError, match="`x`"):
        jmx.explain(jnp.ones((3, 100)), routing, experts, activation=jmx.SwiGLU())
    with pytest.raises(ValueError, match="`activation`"):
        jmx.explain(jnp.ones((3, 64)), routing, experts, activation=jmx.ReLU())
