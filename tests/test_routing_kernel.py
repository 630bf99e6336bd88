"""The kernel that routes and groups few tokens: against its definition, interpreted; in the layer; and compiled."""

import dataclasses
import re
from dataclasses import dataclass
from functools import partial

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend_cases import GPT_OSS
from blockwise import Blockwise
from flax import nnx
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmx
import jmx.linen
import jmx.nnx
from jmx import (
    Custom,
    Environment,
    Experts,
    GroupedTopK,
    Logits,
    Problem,
    ReLU,
    SigmoidTopK,
    SoftmaxTopK,
    SqrtSoftplusTopK,
    TopKSoftmax,
)
from jmx.backends import registered_backends
from jmx.cli import main
from jmx.engines import grouped
from jmx.engines.grouped import Tiling
from jmx.engines.routed import GroupedRouting
from jmx.pallas.mosaic_sm90.layout import LAYOUT
from jmx.pallas.routing import call as routing_kernel
from jmx.pallas.routing import sizes
from jmx.pallas.routing.call import Call, Given, applies, definition, route_and_group
from jmx.perf.shapes import MODELS
from jmx.routing import ROUTING_METHODS
from jmx.selection.registry import Registry

CPU, H200 = Environment.named("cpu"), Environment.named("h200")
INTERPRETED = pytest.mark.usefixtures("on_cpu")


# Against the definition


def draw_logits(rng, kind, num_tokens, num_experts):
    shape = num_tokens, num_experts
    if kind == "ties":
        return rng.integers(-3, 3, shape).astype(np.float32) / 4
    if kind == "odd":
        return rng.choice(np.array([np.nan, -np.inf, np.inf, 0.0, -0.0, 1, 3e38], np.float32), shape)
    logits = 3 * rng.normal(size=shape).astype(np.float32)
    if kind == "one expert":
        logits[:, num_experts // 2] = 100
    return np.full(shape, np.nan, np.float32) if kind == "nothing" else logits


KINDS = ("random", "ties", "odd", "one expert", "nothing")
SHAPES = [  # tokens, experts, slots, and how rows are grouped
    (1, 128, 4, Tiling(8, 8, 8)),
    (1, 5, 3, Tiling(8, 8, 1)),
    (4, 128, 4, Tiling(8, 8, 8)),
    (7, 33, 3, Tiling(8, 8, 8)),
    (8, 32, 8, None),
    (16, 32, 4, Tiling(8, 8, 8)),
    (16, 32, 4, Tiling(8, 0, 1)),
    (16, 64, 2, Tiling(16, 8, 8, whole=True)),
    (33, 60, 6, Tiling(16, 8, 8)),
    (64, 32, 4, Tiling(24, 8, 8)),
    (33, 9, 6, Tiling(16, 8, 8, whole=True, largest_first=True)),
    (33, 20, 6, Tiling(8, 8, 8, largest_first=True)),
    (5, 3, 3, Tiling(4, 0, 1)),
    (2, 1, 1, Tiling(8, 0, 8)),
]


METHODS = {  # of k slots, and whether they have a correction bias
    "softmax of k": (TopKSoftmax, False),
    "softmax of all": (lambda k: SoftmaxTopK(k, False), False),
    "sigmoid": (lambda k: SigmoidTopK(k, False, 2.5), False),
    "sigmoid and bias": (lambda k: SigmoidTopK(k, True, 2.5), True),
    "sqrt softplus": (lambda k: SqrtSoftplusTopK(k, True), False),
}
GROUPED = [  # DeepSeek-V3's choice and smaller ones; tokens, experts
    pytest.param(GroupedTopK(8, 8, 4, "sigmoid", True, 2.5), True, 9, 256, id="v3"),
    pytest.param(GroupedTopK(3, 4, 2, "sigmoid", False), True, 4, 8, id="bias"),
    pytest.param(GroupedTopK(2, 8, 3, "sigmoid", True), True, 1, 8, id="of one"),
    pytest.param(GroupedTopK(6, 8, 3, "softmax", False, 16.0), False, 3, 64, id="v2"),
    pytest.param(GroupedTopK(4, 3, 3, "sqrt_softplus", True), False, 10, 12, id="all groups"),
]


def assert_computes_its_definition(rng, method, biased, num_tokens, num_experts, tiling, masked, own=None):
    """`own`: the first of the experts whose rows are grouped, and how many they are; None: all."""
    problem = dataclasses.replace(PROBLEM, num_tokens=num_tokens, num_experts=num_experts, top_k=method.top_k)
    first = None
    if own is not None:
        first, problem = jnp.full(1, own[0]), dataclasses.replace(problem, num_experts=own[1], num_routed=num_experts)
    if tiling is not None and tiling.few_tokens == 0:
        problem = dataclasses.replace(problem, weights_on="input")
    call = Call(method, problem, tiling, num_tokens, biased, interpret=True)
    kernel = jax.jit(lambda values, mask, bias: routing_kernel.routed(Given(values, mask, bias, first), call))
    defined = jax.jit(lambda values, mask, bias: definition(Given(values, mask, bias, first), call))
    for kind in KINDS:
        values = draw_logits(rng, kind, num_tokens, num_experts)
        mask = rng.random(num_tokens) < 0.7 if masked else None
        bias = None
        if biased:
            bias = rng.integers(-2, 3, num_experts).astype(np.float32) / 4
            bias[rng.integers(num_experts)] = rng.choice([np.nan, -np.inf, 0.5])
        found, expected = kernel(values, mask, bias), defined(values, mask, bias)
        for name, a, b in zip(found._fields, found, expected, strict=True):
            if a is None or b is None:
                assert a is b, name
                continue
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            if name == "weights":
                np.testing.assert_allclose(a, b, rtol=1e-6, atol=0)
            else:
                real = int(expected.num_blocks[0]) if name == "rows" else None  # others have no rows
                np.testing.assert_array_equal(a[:real], b[:real], err_msg=f"{name} of {kind}")


@INTERPRETED
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sampled(6)
def test_the_kernel_computes_its_definition(rng, shape, method, masked):
    num_tokens, num_experts, top_k, tiling = shape
    make, biased = METHODS[method]
    assert_computes_its_definition(rng, make(top_k), biased, num_tokens, num_experts, tiling, masked)


CHUNKED = [  # tokens, experts, slots, and how rows are grouped
    (70, 12, 4, Tiling(16, 8, 8, whole=True, largest_first=True)),
    (77, 5, 3, Tiling(16, 8, 8, largest_first=True)),
    (65, 33, 2, Tiling(16, 0, 1)),
    (90, 16, 2, None),
]


@INTERPRETED
@pytest.mark.parametrize("own", [None, (0, 1), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", CHUNKED, ids=str)
@pytest.mark.sampled(3)
def test_chunks_of_tokens_compute_the_definition(rng, shape, method, masked, own, monkeypatch):
    """`own`: the device among three, and for how many of them; None: for all experts."""
    monkeypatch.setattr(sizes, "MOST_ELEMENTS", 64)
    num_tokens, num_experts, top_k, tiling = shape
    make, biased = METHODS[method]
    its = None if own is None else tuple(n * (num_experts // 3) for n in own)
    assert_computes_its_definition(rng, make(top_k), biased, num_tokens, num_experts, tiling, masked, its)


@INTERPRETED
@pytest.mark.parametrize("own", [(0, 1), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES[:-2], ids=str)
@pytest.mark.sampled(3)
def test_the_kernel_groups_rows_of_some_experts(rng, shape, method, own):
    """Those of one of three devices, or of two of them."""
    num_tokens, num_experts, top_k, tiling = shape
    make, biased = METHODS[method]
    each = num_experts // 3
    its = own[0] * each, own[1] * each
    assert_computes_its_definition(rng, make(top_k), biased, num_tokens, num_experts, tiling, True, its)


@INTERPRETED
@pytest.mark.parametrize(("method", "biased", "num_tokens", "num_experts"), GROUPED)
@pytest.mark.sampled(3)
def test_the_kernel_chooses_among_groups(rng, method, biased, num_tokens, num_experts):
    assert_computes_its_definition(rng, method, biased, num_tokens, num_experts, Tiling(8, 8, 8), False)


# In the layer

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 64, 32, 8, 2


def draw_layer(rng, num_tokens):
    experts = Experts.random(
        jax.random.key(rng.integers(1 << 31)), NUM_EXPERTS, HIDDEN, INTERMEDIATE, gate_up_order=None
    )
    x = rng.normal(size=(num_tokens, HIDDEN)).astype(np.float32)
    return x, rng.normal(size=(num_tokens, NUM_EXPERTS)).astype(np.float32), experts


@pytest.fixture
def anywhere(monkeypatch):
    """The kernel's call is used on a CPU, too; the calls that were made."""
    made = []

    def recorded(*arguments):
        made.append(arguments)
        return route_and_group(*arguments)

    monkeypatch.setattr("jmx.backends.REGISTRY", Registry((Blockwise(), *registered_backends())))

    def applies(method, biased, num_tokens, *_, **__):
        return isinstance(num_tokens, int) and num_tokens > 0

    monkeypatch.setattr(routing_kernel, "applies", applies)
    monkeypatch.setattr(routing_kernel, "route_and_group", recorded)
    return made


@pytest.fixture
def interpreted(anywhere, monkeypatch):
    """The same, with the kernel interpreted."""
    monkeypatch.setattr(routing_kernel, "Call", partial(Call, interpret=True))
    return anywhere


def layer(x, routing, experts, **options):
    return jmx.moe(x, routing, experts, activation=ReLU(), backend="blockwise", **options)


def at_once(x, logits, experts, **options):
    return layer(x, Logits(logits, TopKSoftmax(TOP_K)), experts, **options)


def apart(x, logits, experts, mask=None):
    return layer(x, jmx.route(Logits(logits, TopKSoftmax(TOP_K)), mask), experts)


def assert_close(found, expected):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected)


@INTERPRETED
@pytest.mark.parametrize("num_tokens", [1, 3, 9])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.sampled(4)
def test_a_layer_takes_the_blocks_of_the_kernel(rng, interpreted, num_tokens, masked, jit, monkeypatch):
    x, logits, experts = draw_layer(rng, num_tokens)
    mask = rng.random(num_tokens) < 0.7 if masked else None
    expected = apart(x, logits, experts, mask)
    assert not interpreted
    grouped_again = []
    monkeypatch.setattr(grouped.grouping, "many", grouped_again.append)
    monkeypatch.setattr(grouped.grouping, "unsorted", grouped_again.append)
    call = jax.jit(at_once) if jit else at_once
    assert_close(call(x, logits, experts, mask=mask), expected)
    assert len(interpreted) == 1
    assert not grouped_again


def transformed(transformation):
    """A function of one that takes x (T, H), logits (T, E) and experts."""

    def gradients(layer):
        return jax.grad(lambda x, logits, experts: (layer(x, logits, experts) ** 2).sum(), (0, 1))

    def by_two(layer):
        def call(x, logits, experts):
            pairs = (a.reshape(2, -1, a.shape[-1]) for a in (x, logits))
            return jax.vmap(lambda x, logits: layer(x, logits, experts))(*pairs)

        return call

    def scan(layer):
        def call(x, logits, experts):
            return jax.lax.scan(lambda x, _: (x + layer(x, logits, experts), None), x, None, length=2)[0]

        return call

    return {
        "grad": gradients,
        "vmap": by_two,
        "vmap of grad": lambda layer: by_two(gradients(layer)),
        "grad of vmap": lambda layer: gradients(by_two(layer)),
        "scan": scan,
        "grad of scan": lambda layer: gradients(scan(layer)),
        "grad of checkpoint": lambda layer: gradients(jax.checkpoint(layer)),
    }[transformation]


@INTERPRETED
@pytest.mark.parametrize(
    "transformation",
    ["grad", "vmap", "vmap of grad", "grad of vmap", "scan", "grad of scan", "grad of checkpoint"],
)
@pytest.mark.parametrize("num_tokens", [2, 10])
@pytest.mark.sampled(4)
def test_transformations(rng, interpreted, transformation, num_tokens):
    x, logits, experts = draw_layer(rng, num_tokens)
    make = transformed(transformation)
    found = jax.jit(make(at_once))(x, logits, experts)
    assert interpreted
    assert_close(found, jax.jit(make(apart))(x, logits, experts))


@INTERPRETED
@pytest.mark.parametrize("transformation", ["grad", "vmap of grad"])
def test_transformations_of_biased_groups(rng, interpreted, transformation):
    x, logits, experts = draw_layer(rng, 6)
    method, bias = GroupedTopK(TOP_K, 4, 2, "sigmoid", True), rng.normal(size=NUM_EXPERTS).astype(np.float32)

    def at_once(x, logits, experts):
        return layer(x, Logits(logits, method, bias), experts)

    def apart(x, logits, experts):
        return layer(x, jmx.route(Logits(logits, method, bias)), experts)

    make = transformed(transformation)
    found = jax.jit(make(at_once))(x, logits, experts)
    assert interpreted
    assert_close(found, jax.jit(make(apart))(x, logits, experts))


@INTERPRETED
def test_second_derivatives_and_forward_mode_are_errors_as_before(rng, anywhere):
    x, logits, experts = draw_layer(rng, 1)

    def loss(logits):
        return at_once(x, logits, experts).sum()

    with pytest.raises(TypeError, match=r"forward-mode derivatives of `jmx\.moe`"):
        jax.jvp(loss, (logits,), (logits,))
    with pytest.raises(TypeError, match=r"second derivatives of `jmx\.moe`"):
        jax.grad(lambda logits: jax.grad(loss)(logits).sum())(logits)


@INTERPRETED
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("interpret", [False, True])
def test_tokens_split_over_a_mesh(rng, anywhere, kind, interpret, monkeypatch):
    if interpret:
        monkeypatch.setattr(routing_kernel, "Call", partial(Call, interpret=True))
    x, logits, experts = draw_layer(rng, 6)
    expected = apart(x, logits, experts)
    mesh = jax.make_mesh((2,), ("data",), (kind,), devices=jax.devices("cpu")[:2])
    with jax.set_mesh(mesh):
        given = [jax.device_put(a, jax.NamedSharding(mesh, P("data"))) for a in (x, logits)]
        whole = jax.device_put(experts, jax.NamedSharding(mesh, P()))
        assert_close(jax.jit(at_once)(*given, whole), expected)
        by_hand = jax.shard_map(at_once, in_specs=(P("data"), P("data"), P()), out_specs=P("data"))
        assert_close(jax.jit(by_hand)(*given, whole), expected)
    assert anywhere


@INTERPRETED
def test_an_exported_layer_has_no_kernel_of_triton(rng, anywhere):
    """Whose form is not stable: `jax.export` would refuse it."""
    x, logits, experts = draw_layer(rng, 3)
    program = export.export(jax.jit(at_once), platforms=["cuda", "cpu"])(x, logits, experts)
    assert anywhere
    assert "xla.gpu.triton" not in program.mlir_module()
    assert_close(export.deserialize(program.serialize()).call(x, logits, experts), apart(x, logits, experts))


def test_changed_ids_have_no_blocks(rng, anywhere):
    problem = dataclasses.replace(PROBLEM, num_tokens=3, num_experts=NUM_EXPERTS, top_k=TOP_K)
    tiling = Tiling(8, 4, 8)
    _, logits, _ = draw_layer(rng, 3)
    method = TopKSoftmax(TOP_K)
    routing = route_and_group(Logits(jnp.asarray(logits), method), None, Call(method, problem, tiling, 3))
    assert isinstance(routing, GroupedRouting)
    assert routing.work(tiling.of(problem)) is not None
    assert routing.work(Tiling(16, 4, 8).of(problem)) is None
    assert routing._replace(weights=2 * routing.weights).work(tiling.of(problem)) is None
    copied = jax.tree.map(lambda array: array, routing)
    assert copied.work(tiling.of(problem)).blocks.counts == 3  # an int, which kernels take as it is


# When it is used


@dataclass(frozen=True)
class OtherSoftmax(TopKSoftmax):
    """A user's method, which may choose others."""


PROBLEM = Problem(
    num_tokens=1, hidden_size=64, intermediate_size=64, num_experts=8, top_k=2, dtype="bfloat16", format="mxfp4",
    activation=GPT_OSS, gate_up_order="interleaved", bias=False, layout="packed",
)  # fmt: skip


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("method", "num_tokens", "num_experts", "machine", "biased", "expected"),
    [
        (TopKSoftmax(4), 1, 128, "h200", False, True),
        (SoftmaxTopK(8, True), 64, 128, "a100", False, True),
        (SoftmaxTopK(8, False), 64, 128, "b200", False, True),
        (TopKSoftmax(4), 256, 32, "h200", False, True),
        (TopKSoftmax(4), 257, 32, "h200", False, True),
        (TopKSoftmax(4), 8192, 128, "h200", False, True),
        (TopKSoftmax(4), 8193, 128, "h200", False, False),
        (TopKSoftmax(4), 8, 4096, "h200", False, False),
        (TopKSoftmax(4), 0, 128, "h200", False, False),
        (TopKSoftmax(4), None, 128, "h200", False, False),
        (TopKSoftmax(4), 1, 128, "cpu", False, False),
        (TopKSoftmax(9), 1, 128, "h200", False, False),
        (SigmoidTopK(4, True), 1, 128, "h200", True, True),
        (SqrtSoftplusTopK(4, True), 1, 128, "h200", False, True),
        (SqrtSoftplusTopK(4, True), 1, 128, "h200", True, False),
        (GroupedTopK(8, 8, 4, "sigmoid", True), 32, 256, "h200", True, True),
        (GroupedTopK(8, 8, 4, "softmax", True), 32, 256, "h200", True, False),
        (GroupedTopK(4, 5, 2, "softmax", True), 1, 160, "h200", False, False),
        (GroupedTopK(4, 5, 5, "softmax", True), 1, 160, "h200", False, True),
        (Custom(4, lambda logits: (logits, logits)), 1, 128, "h200", False, False),
        (OtherSoftmax(4), 1, 128, "h200", False, False),
    ],
)
def test_when_the_kernel_is_used(method, num_tokens, num_experts, machine, biased, expected):
    assert applies(method, biased, num_tokens, num_experts, Environment.named(machine)) == expected


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("num_tokens", "device", "method", "used"),
    [
        (16, "h200", "top_k_softmax", True),
        (16, "h200", "softmax_top_k", True),
        (16, "h200", "sigmoid_top_k", True),
        (16, "h200", "sqrt_softplus_top_k", False),
        (1024, "h200", "top_k_softmax", True),
        (16384, "h200", "top_k_softmax", False),
        (16, "cpu", "top_k_softmax", False),
    ],
)
def test_it_is_explained(num_tokens, device, method, used, rng):
    layer_sizes, given = (64, 32, 128, 4), ROUTING_METHODS[method](4)
    experts = Experts.random(jax.random.key(0), 128, 64, 32, gate_up_order="interleaved")
    x = jnp.asarray(rng.standard_normal((num_tokens, 64)), jnp.bfloat16)
    logits = Logits(jnp.asarray(rng.standard_normal((num_tokens, 128)), jnp.float32), given)

    def lines(*arguments, **options):
        printed = str(jmx.explain(*arguments, **options, device=device)).splitlines()
        return [line for line in printed if "jmx_route" in line]

    kernels = "one kernel, jmx_route" if num_tokens == 16 else "two kernels, jmx_route and jmx_group"
    expected = [f"logits: routed and grouped by {kernels}"] if used else []
    assert lines(x, logits, experts, activation="swiglu") == expected
    assert lines(x, jmx.route(logits), experts, activation="swiglu") == []
    assert lines(jmx.nnx.MoE(*layer_sizes, routing=given, rngs=nnx.Rngs(0)), x) == expected
    assert lines(jmx.linen.MoE(*layer_sizes, routing=method), x) == expected
    problem = dataclasses.replace(PROBLEM, num_tokens=num_tokens, num_experts=128, top_k=4)
    where = applies(TopKSoftmax(4), False, num_tokens, 128, Environment.named(device))
    assert lines(problem) == [f"logits with softmax routing: routed and grouped by {kernels}"] * where


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("model", "tokens", "used"), [("gpt-oss-120b", 8, True), ("deepseek-v3", 8, True), ("deepseek-v3", 8192, False)]
)
def test_the_command_knows_the_method_of_a_model(model, tokens, used, capsys):
    assert main(["explain", "--model", model, "--tokens", str(tokens), "--device", "h200"]) == 0
    assert ("jmx_route" in capsys.readouterr().out) == used


# Compiled


@pytest.mark.aot
@pytest.mark.parametrize(("num_tokens", "most"), [(1, 3), (4, 3), (16, 4), (64, 4), (1024, 5)])
def test_a_layer_of_few_tokens_is_few_kernels_on_an_h200(num_tokens, most, tmp_path):
    """Routing (two kernels of 1024 tokens), rows if they are sorted, both products, combining: from 5 and, sorted, 14
    or more."""
    shape = MODELS["gpt-oss-20b"]
    experts = jax.eval_shape(
        lambda key: shape.experts(key).prepare(LAYOUT.name), jax.ShapeDtypeStruct((2,), jnp.uint32)
    )

    def layers(x, all_logits, experts):
        for logits in all_logits:
            x += jmx.moe(x, Logits(logits, shape.method), experts, activation=shape.activation, backend="mosaic")
        return x

    x = jax.ShapeDtypeStruct((num_tokens, shape.hidden_size), jnp.bfloat16)
    logits = jax.ShapeDtypeStruct((num_tokens, shape.num_experts), jnp.float32)
    (graph,) = aot.launches_on_h200(tmp_path, layers, x, [logits] * 3, experts)  # XLA makes no graph of few kernels
    assert graph[0] == "kCommandBuffer"
    assert len(graph[1:]) <= 3 * most, graph


@pytest.mark.aot
def test_quotients_and_exponentials_are_those_of_xla(tmp_path):
    """So that weights have the bits of `jmx.route`."""
    problem = dataclasses.replace(PROBLEM, num_tokens=4, num_experts=128, top_k=4)
    call = Call(TopKSoftmax(4), problem, Tiling(8, 8, 8), 4)

    def calls(*values):
        return [routing_kernel.routed(Given(its), call) for its in values]

    values = [jax.ShapeDtypeStruct((4, 128), jnp.float32)] * 6  # XLA reports launches only if it makes a graph of them
    _, kernels = aot.triton_kernels("h200", tmp_path, "jmx_route", calls, *values)
    for kernel in kernels:
        assert kernel.spilled == 0
        assert {*re.findall(r"div\.\w+", kernel.ptx)} == {"div.full"}
