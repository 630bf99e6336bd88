"""The backend `cutlass` beyond tests/test_backends.py: when it is chosen and what it rejects; on any machine, the
arguments of its call, which numpy replaces; and on a Hopper GPU, every tile, stacks of layers, and sizes of models."""

import dataclasses
import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from backend_cases import (
    ACTIVATIONS,
    BOTH,
    GPT_OSS,
    NEITHER,
    Case,
    activated,
    assert_agrees,
    assert_close,
    assert_rejects,
    call,
    draw_routing,
    draw_weights,
    draw_x,
    reference,
    suited,
)

import jmx
from jmx import Environment, Experts, Reason, Routing, SiLU, SwiGLU, SwiGLUStep
from jmx.activations import Activation
from jmx.backends import registered_backends
from jmx.ffi.build import Missing
from jmx.ffi.cutlass import backend as cutlass
from jmx.ffi.cutlass import build as cutlass_build
from jmx.ffi.cutlass import library as cutlass_library
from jmx.ffi.cutlass import source as cutlass_source
from jmx.ffi.cutlass.backend import Cutlass
from jmx.ffi.cutlass.config import TILES, Config, padded
from jmx.ffi.cutlass.layout import LAYOUT
from jmx.ffi.cutlass.library import Library
from jmx.numerics.formats import BlockScaled
from jmx.numerics.layouts import WeightSpec
from jmx.perf import doctor
from jmx.selection import tuning
from jmx.selection.select import select

PROBLEM = Case(dtype="bfloat16", layout=LAYOUT.name).problem()
HOPPER = Environment.named("h200")
SUPPORTED = [activation for activation in ACTIVATIONS if not isinstance(activation, SwiGLUStep)]
FOUND = cutlass_library.library()
built = pytest.mark.skipif(FOUND.fault is not None, reason=str(FOUND.fault))


@pytest.fixture
def there(monkeypatch):
    """As on a machine where the library is built."""
    monkeypatch.setattr(cutlass, "library", lambda: Library(pathlib.Path("built.so"), ("a-tile",)))


@pytest.fixture
def nowhere(monkeypatch):
    monkeypatch.setattr(cutlass, "library", lambda: Library(fault="it is not compiled"))


# When it is chosen


@dataclasses.dataclass(frozen=True)
class Unknown(Activation):
    gated = True


@pytest.mark.parametrize(
    ("change", "reason", "reported"),
    [
        ({"dtype": "float32"}, Reason.DTYPE, "float32"),
        ({"layout": "packed"}, Reason.LAYOUT, "'packed', not in 'cutlass_sm90'"),
        ({"format": "nvfp4"}, Reason.FORMAT, "'nvfp4'"),
        ({"input_format": "mxfp8"}, Reason.INPUT_FORMAT, "'mxfp8'"),
        ({"num_tokens": None}, Reason.SYMBOLIC_TOKENS, "symbolic"),
        ({"activation": Unknown()}, Reason.ACTIVATION, "Unknown()"),
        ({"activation": SwiGLUStep(limit=7.0)}, Reason.ACTIVATION, "SwiGLUStep(limit=7.0)"),
        ({"gate_up_order": "interleaved_up_first", "bias": True}, Reason.LAYOUT, "gate before up"),
        ({"num_tokens": 1 << 29}, Reason.SHAPE, "536870912 rows times 8 experts"),
        ({"num_tokens": 1 << 28, "weights_on": "input"}, Reason.SHAPE, "536870912 rows times 8 experts"),
    ],
)
def test_what_it_refuses_of_a_problem(there, change, reason, reported):
    assert Cutlass().supports(PROBLEM, HOPPER) is None
    assert_rejects(Cutlass(), dataclasses.replace(PROBLEM, **change), HOPPER, reason, reported)


@pytest.mark.parametrize(
    ("device", "reason", "reported"),
    [
        ("cpu", Reason.PLATFORM, "'cpu'"),
        ("a100", Reason.COMPUTE_CAPABILITY, "(8, 0)"),
        ("b200", Reason.COMPUTE_CAPABILITY, "(10, 0)"),
    ],
)
def test_what_it_refuses_of_a_machine(there, device, reason, reported):
    assert_rejects(Cutlass(), PROBLEM, Environment.named(device), reason, reported)


@pytest.mark.parametrize("layout", ["packed", LAYOUT.name])
def test_unbuilt_it_names_the_command_that_builds_it(nowhere, layout):
    rejection = Cutlass().supports(dataclasses.replace(PROBLEM, layout=layout), HOPPER)
    assert rejection is not None
    assert rejection.reason is Reason.NOT_BUILT
    assert str(rejection) == "not built: it is not compiled; jmx build cutlass"


def test_unbuilt_it_names_first_what_building_would_not_mend(nowhere):
    for field, value, reason in (
        ("format", "nvfp4", Reason.FORMAT),
        ("input_format", "fp8_token", Reason.INPUT_FORMAT),
        ("dtype", "float32", Reason.DTYPE),
    ):
        assert_rejects(Cutlass(), dataclasses.replace(PROBLEM, **{field: value}), HOPPER, reason)


@pytest.mark.parametrize("request_", [None, "cutlass"])
def test_built_it_runs_weights_in_its_layout(there, request_):
    problem = dataclasses.replace(PROBLEM, layout=LAYOUT.name)
    assert select(problem, HOPPER, request_, registered_backends()).backend.name == "cutlass"
    assert select(problem, HOPPER, "xla", registered_backends()).backend.name == "xla"


def test_other_weights_and_machines_run_as_if_it_were_not_there(there):
    for change, device, chosen in (
        ({"layout": "mosaic_sm90"}, "h200", "mosaic"),
        ({"layout": "packed"}, "h200", "triton"),
        ({"layout": LAYOUT.name, "dtype": "float32"}, "h200", "xla"),
        ({"layout": LAYOUT.name}, "a100", "xla"),
    ):
        problem = dataclasses.replace(PROBLEM, **change)
        assert select(problem, Environment.named(device), None, registered_backends()).backend.name == chosen


def test_unbuilt_its_weights_run_on_xla(nowhere):
    chosen = select(dataclasses.replace(PROBLEM, layout=LAYOUT.name), HOPPER, None, registered_backends())
    assert chosen.backend.name == "xla"
    assert str(dict(chosen.trail)["cutlass"]) == "not built: it is not compiled; jmx build cutlass"


@pytest.mark.parametrize("activation", SUPPORTED, ids=str)
def test_it_runs_every_other_activation(there, activation):
    problem = dataclasses.replace(PROBLEM, activation=activation, gate_up_order=None)
    assert Cutlass().supports(problem, HOPPER) is None


def test_doctor_tells_what_its_build_lacks(monkeypatch):
    lacking = [Missing("nvcc 12.8 or newer", "get it")]
    monkeypatch.setattr(cutlass_build, "find", lambda: lacking)
    not_built = {"name": "cutlass", "runs": False, "reason": Reason.NOT_BUILT.value}
    assert doctor._examine_build([not_built]) == ["for `jmx build cutlass`, nvcc 12.8 or newer is missing: get it"]
    assert doctor._examine_build([not_built | {"reason": Reason.PLATFORM.value}]) == []


# Arguments of the call, on any machine


def moe(
    x, expert_ids, weights, gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias, layer, *,
    intermediate_size, gated, interleaved, activation, alpha, beta, limit, gate_up_tile, down_tile, overlap,
):  # fmt: skip
    """The contract of the handler `jmx_cutlass_moe`: y in float64 out of arrays as it gets them."""
    assert {gate_up_tile, down_tile} <= {tile.name for tile in TILES}
    assert isinstance(overlap, bool)
    assert (gate_up.ndim, layer.shape) in [(3, (0,)), (4, (1,))]
    if layer.size:
        gate_up, gate_up_scales, down, down_scales = (a[layer[0]] for a in (gate_up, gate_up_scales, down, down_scales))
        gate_up_bias, down_bias = (a[layer[0]] if a.size else a for a in (gate_up_bias, down_bias))
    hidden = x.shape[1]
    rows = intermediate_size * (2 if gated else 1)
    assert gate_up.shape[1:] == (rows // intermediate_size * padded(intermediate_size), padded(hidden) // 2)
    assert down.shape[1:] == (padded(hidden), padded(intermediate_size) // 2)
    order = ("interleaved" if interleaved else "concatenated") if gated else None

    def floats(role, shape, values, scales):
        held = BlockScaled(jnp.asarray(values), jnp.asarray(scales))
        weight = LAYOUT.inverse(held, WeightSpec(role, shape, order, jmx.MXFP4))
        return np.asarray(jmx.dequantize(weight, jnp.float32), np.float64)

    up_floats = floats("gate_up", (rows, hidden), gate_up, gate_up_scales)
    down_floats = floats("down", (hidden, intermediate_size), down, down_scales)
    case = Case(activation=known(activation, gated, alpha, beta, limit), order=order)
    y = np.zeros(x.shape)
    for token, slot in np.ndindex(expert_ids.shape):
        expert = expert_ids[token, slot]
        if not 0 <= expert < gate_up.shape[0]:
            continue
        h = up_floats[expert] @ x[token].astype(np.float64) + (
            gate_up_bias[expert].astype(np.float64) if gate_up_bias.size else 0
        )
        out = down_floats[expert] @ activated(case, h) + (down_bias[expert].astype(np.float64) if down_bias.size else 0)
        y[token] += weights[token, slot] * out
    return y


def declared(source, struct):
    """(type, name) of each field of a C++ struct."""
    body = re.findall(rf"struct {struct} {{\n(.*?)\n}};", source, re.DOTALL)[0]
    lines = re.findall(r"^ *([\w:]+) ([\w, ]+);", body, re.MULTILINE)
    return [(kind, name) for kind, names in lines for name in names.split(", ")]


def test_the_handler_binds_what_that_contract_names():
    """In C++ the call's arrays are bound by position, its attributes by name; a difference shows on a GPU only."""
    handler, checks = ((cutlass_source.FOLDER / name).read_text() for name in ("handler.cu", "checks.h"))
    parameters = inspect.signature(moe).parameters.values()
    arrays = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    attributes = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert [name for _, name in declared(checks, "Arrays")] == [*arrays, "y", "workspace"]
    assert f"BindArguments<{len(arrays)}>(" in checks
    assert checks.count(".template Ret<") == 2
    members = re.findall(r'StructMember<([\w:]+)>\("(\w+)"\)', handler)
    assert members == declared(handler, "Attributes")
    assert [name for _, name in members] == attributes


def known(name, gated, alpha, beta, limit):
    gated_ones = {
        "swiglu": SwiGLU(alpha=float(alpha), beta=float(beta), limit=None if np.isinf(limit) else float(limit)),
        "silu": jmx.SiLUAndMul(), "gelu": jmx.GELUAndMul(approximate=False),
        "gelu_tanh": jmx.GELUAndMul(approximate=True),
    }  # fmt: skip
    others = {
        "silu": SiLU(), "gelu": jmx.GELU(approximate=False), "gelu_tanh": jmx.GELU(approximate=True),
        "relu": jmx.ReLU(), "relu2": jmx.ReLU2(),
    }  # fmt: skip
    return (gated_ones if gated else others)[name]


@pytest.fixture
def in_numpy(there, monkeypatch):
    def ffi_call(target, results):
        assert target == cutlass_library.TARGET
        y, workspace = results
        assert workspace == jax.ShapeDtypeStruct((1234,), jnp.uint8)

        def given(*arrays, **attributes):
            def run(*arrays):
                return moe(*map(np.asarray, arrays), **attributes).astype(y.dtype)

            return jax.pure_callback(run, y, *arrays), jnp.zeros(workspace.shape, workspace.dtype)

        return given

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    monkeypatch.setattr(cutlass, "workspace_bytes", lambda *sizes: 1234)


def apply(case, x, routing, experts):
    return np.asarray(Cutlass().apply(case.problem(), x, routing, experts, HOPPER))


@pytest.mark.parametrize("weights_on", ["output", "input"])
@pytest.mark.parametrize("activation", SUPPORTED, ids=str)
def test_the_call_gets_what_it_needs(in_numpy, activation, weights_on, rng):
    # Each order with each bias, but only once for both places of the weights.
    orders = ("interleaved", "concatenated") if weights_on == "output" else ("concatenated", "interleaved")
    for i, bias in enumerate((BOTH, NEITHER, (True, False), (False, True))):
        case = Case(
            tokens=4, hidden=96, intermediate=160, num_experts=3, dtype="bfloat16", activation=activation,
            order=orders[i % 2] if activation.gated else None, bias=bias, weights_on=weights_on, ids="anywhere",
            layout=LAYOUT.name,
        )  # fmt: skip
        weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
        y = apply(case, jnp.asarray(x), Routing(*map(jnp.asarray, routing)), weights.experts(case))
        assert y.dtype == x.dtype
        assert_agrees("cutlass", case, y, reference(case, weights, x, routing))


@pytest.mark.parametrize(
    "dtypes", [(np.float32, ml_dtypes.bfloat16), (np.float16, np.float16), (ml_dtypes.bfloat16, None)]
)
def test_biases_of_any_dtypes(in_numpy, dtypes, rng):
    case = Case(dtype="float16", layout=LAYOUT.name)
    weights = draw_weights(rng, case)
    biases = [None if t is None else np.asarray(bias).astype(t) for bias, t in zip(weights[2:], dtypes, strict=True)]
    weights = weights._replace(gate_up_bias=biases[0], down_bias=biases[1])
    x, routing = draw_x(rng, case), draw_routing(rng, case)
    expected = reference(case, weights, x, routing)
    assert_agrees("cutlass", case, apply(case, x, routing, weights.experts(case)), expected)


def test_a_layer_of_a_stack_is_named_by_its_index(in_numpy, rng):
    case = Case(dtype="bfloat16", layout=LAYOUT.name)
    layers = [draw_weights(rng, case) for _ in range(3)]
    x, routing = draw_x(rng, case), draw_routing(rng, case)
    stack = Experts.stack([weights.experts(case) for weights in layers])
    for i, weights in enumerate(layers):
        assert_agrees("cutlass", case, apply(case, x, routing, stack.layer(i)), reference(case, weights, x, routing))


def test_the_configuration_in_use_is_the_calls(in_numpy, monkeypatch, rng):
    case = Case(dtype="bfloat16", hidden=128, intermediate=256, layout=LAYOUT.name)
    seen = []
    moe_ = moe
    monkeypatch.setitem(
        globals(),
        "moe",
        lambda *a, **k: seen.append((k["gate_up_tile"], k["down_tile"], k["overlap"])) or moe_(*a, **k),
    )
    config = Config(TILES[1], TILES[2], overlap=False)
    experts = draw_weights(rng, case).experts(case)
    with tuning.override("cutlass", config):
        apply(case, draw_x(rng, case), draw_routing(rng, case), experts)
    assert seen == [(TILES[1].name, TILES[2].name, False)]


# The library, wherever it is built


@built
def test_the_library_has_the_tiles_of_the_list():
    assert FOUND.tiles == tuple(tile.name for tile in TILES)


@built
def test_workspace_is_found_without_a_gpu_and_grows_with_all_sizes():
    sizes = (64, 4, 32, 2944, 2944)
    least = cutlass_library.workspace_bytes(*sizes, gated=True)
    assert 64 * 4 * 2944 * (2 + 2 * 4) < least < 64 * 4 * 2944 * (2 + 2 * 4) * 4
    for i in range(5):
        larger = tuple(size * (2 if i == j else 1) for j, size in enumerate(sizes))
        assert cutlass_library.workspace_bytes(*larger, gated=True) > least
    assert cutlass_library.workspace_bytes(*sizes, gated=False) < least


# On a GPU


def check(case, rng):
    case = suited("cutlass", case)
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    y = call("cutlass", case, weights.experts(case), x, routing)
    assert_agrees("cutlass", case, y, reference(case, weights, x, routing))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
def test_every_tile_computes_both_products(tile, tokens, rng):
    case = Case(tokens=tokens, top_k=3, hidden=512, intermediate=256, num_experts=5, ids="anywhere")
    for config in (Config(tile, TILES[0]), Config(TILES[0], tile), Config(tile, tile, overlap=False)):
        with tuning.override("cutlass", config):
            check(case, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 17, 300, 2000])
@pytest.mark.parametrize("sizes", [(32, 32), (96, 160), (160, 2880), (2880, 96), (1024, 768)], ids=str)
def test_sizes_that_padding_fills_up(sizes, tokens, rng):
    hidden, intermediate = sizes
    check(Case(tokens=tokens, hidden=hidden, intermediate=intermediate, num_experts=6, ids="anywhere"), rng)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (2, 7), (129, 4), (300, 16), (600, 3)])
def test_numbers_of_experts_and_slots(num_experts, top_k, rng):
    """More than a block's threads count at a time, and more slots than there are experts."""
    for tokens in (1, 70):
        check(Case(tokens=tokens, num_experts=num_experts, top_k=top_k, ids="repeated"), rng)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("order", ["interleaved", "concatenated", None])
def test_biases_as_they_lie(dtype, order, rng):
    case = suited("cutlass", Case(tokens=20, activation=GPT_OSS if order else SiLU(), order=order))
    weights, x, routing = draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)
    assert weights.gate_up_bias is not None
    assert weights.down_bias is not None
    kind = jnp.dtype(dtype)
    weights = weights._replace(gate_up_bias=weights.gate_up_bias.astype(kind), down_bias=weights.down_bias.astype(kind))
    expected = reference(case, weights, x, routing)
    assert_agrees("cutlass", case, call("cutlass", case, weights.experts(case), x, routing), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 1024])
def test_gpt_oss_sizes_agree_with_the_reference(tokens, rng):
    case = suited(
        "cutlass", Case(tokens=tokens, hidden=2880, intermediate=2880, num_experts=32, top_k=4, dtype="bfloat16")
    )
    experts = Experts.random(jax.random.key(int(rng.integers(2**31))), 32, 2880, 2880, gate_up_order="interleaved")
    x, routing = draw_x(rng, case), draw_routing(rng, case)

    def run(backend, experts):
        return jax.jit(lambda x, e: jmx.moe(x, routing, e, activation=GPT_OSS, backend=backend))(x, experts)

    expected = run("xla", experts.prepare("packed"))
    assert_close(
        np.asarray(run("cutlass", experts.prepare(LAYOUT.name)), np.float64),
        np.asarray(expected, np.float64),
        "bfloat16",
        4 / 3,
    )


@pytest.mark.gpu
def test_calls_of_many_shapes_in_one_program(rng):
    """A program of several calls, as a model has it: each with its own workspace, in one CUDA graph or none."""
    cases = [suited("cutlass", Case(tokens=tokens, top_k=2, ids="anywhere")) for tokens in (1, 30, 300)]
    drawn = [(draw_weights(rng, case), draw_x(rng, case), draw_routing(rng, case)) for case in cases]
    experts = [weights.experts(case) for case, (weights, _, _) in zip(cases, drawn, strict=True)]

    @jax.jit
    def run(experts, xs):
        return [
            jmx.moe(x, routing, e, activation=GPT_OSS, backend="cutlass")
            for e, x, (_, _, routing) in zip(experts, xs, drawn, strict=True)
        ]

    for _ in range(3):
        outs = run(experts, [x for _, x, _ in drawn])
        for y, case, (weights, x, routing) in zip(outs, cases, drawn, strict=True):
            assert_agrees("cutlass", case, y, reference(case, weights, x, routing))


@pytest.mark.gpu
@built
def test_a_call_that_does_not_fit_is_an_error(rng):
    case = Case(tokens=4, hidden=128, intermediate=128, dtype="bfloat16", layout=LAYOUT.name)
    experts, x, routing = draw_weights(rng, case).experts(case), draw_x(rng, case), draw_routing(rng, case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutlass, "workspace_bytes", lambda *sizes: 64)
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"`workspace` \(U8 \(64\)\) must have \d+ bytes"):
            jax.block_until_ready(
                cutlass._layer(
                    jnp.asarray(x),
                    Routing(*map(jnp.asarray, routing)),
                    experts,
                    GPT_OSS,
                    Config(TILES[0], TILES[0]),
                    x.dtype,
                )
            )
