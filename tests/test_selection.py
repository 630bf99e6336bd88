"""Selection: problems and environments as they are probed, the order of preference, requests, and error messages."""

import enum
import re
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import export
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmx
import jmx.nnx
from jmx import Environment, Experts, NoBackendError, Problem, Reason, Rejection, layer
from jmx.backends import registered_backends, resolve_layout
from jmx.selection.backend import Backend
from jmx.selection.environment import known_devices
from jmx.selection.registry import Registry
from jmx.selection.select import select, use_backend

H200 = Environment.named("h200")


@dataclass(frozen=True)
class Fake:
    """A backend that needs a GPU, and at least `least` tokens."""

    name: str
    least: int = 0
    gpu: bool = False
    summary: str = "for tests"

    def supports(self, problem, environment):
        if self.gpu and environment.platform != "gpu":
            return Rejection(Reason.PLATFORM, f"runs on gpu, not on {environment.platform}", "take an NVIDIA GPU")
        if problem.num_tokens is None or problem.num_tokens < self.least:
            return Rejection(Reason.SHAPE, f"{problem.num_tokens} tokens, of {self.least} at least", "send more tokens")
        return None

    def apply(self, problem, x, routing, experts, environment):
        return jnp.full_like(x, len(self.name))


BIG, FAST, SLOW = Fake("big", least=64), Fake("fast", gpu=True), Fake("slow")
FAKES = (BIG, FAST, SLOW)


def problem(tokens=1):
    return Problem(tokens, 64, 96, 8, 2, "bfloat16", "mxfp4", jmx.SwiGLU(), "interleaved", True, "packed")


def experts(num=8, bias=True):
    return Experts.random(jax.random.key(0), num, 64, 96, gate_up_order="interleaved", bias=bias)


# select


@pytest.mark.parametrize(
    ("tokens", "device", "chosen"),
    [(64, "h200", "big"), (64, "cpu", "big"), (63, "h200", "fast"), (63, "cpu", "slow"), (None, "cpu", None)],
)
def test_the_first_backend_that_can_is_chosen(tokens, device, chosen):
    backends = FAKES if chosen else FAKES[:2]
    if chosen is None:
        with pytest.raises(NoBackendError):
            select(problem(tokens), Environment.named(device), None, backends)
        return
    found = select(problem(tokens), Environment.named(device), None, backends)
    assert found.backend.name == chosen
    assert [name for name, _ in found.trail] == ["big", "fast", "slow"]
    for backend, (_, answer) in zip(FAKES, found.trail, strict=True):
        assert answer == backend.supports(problem(tokens), Environment.named(device))


def test_order_is_preference_and_select_is_pure():
    assert select(problem(), H200, None, (SLOW, FAST)).backend is SLOW
    assert select(problem(), H200, None, (FAST, SLOW)).backend is FAST
    assert select(problem(), H200, None, FAKES) == select(problem(), H200, None, FAKES)
    assert hash(select(problem(), H200, None, FAKES)) == hash(select(problem(), H200, None, FAKES))


def test_a_request_that_can_run_is_met():
    found = select(problem(), H200, "slow", FAKES)
    assert (found.backend, found.request) == (SLOW, "slow")


def test_a_request_that_cannot_run_says_why_what_helps_and_who_could():
    with pytest.raises(NoBackendError) as caught:
        select(problem(3), Environment.named("cpu"), "fast", FAKES)
    text = str(caught.value)
    assert text.startswith("backend 'fast' was requested, but cannot run this")
    assert "3 tokens, top-2 of 8 experts, H=64, I=96, mxfp4 (packed) x bfloat16 on cpu" in text
    assert "fast: platform: runs on gpu, not on cpu; take an NVIDIA GPU" in text
    assert "big: shape: 3 tokens, of 64 at least; send more tokens" in text
    assert "slow: can run" in text


def test_when_none_can_run_the_error_holds_the_trail():
    with pytest.raises(NoBackendError) as caught:
        select(problem(3), Environment.named("cpu"), None, FAKES[:2])
    assert re.search(
        r"^no backend can run this\n.*\n  big: shape: .*; send.*\n  fast: platform: .*; take", str(caught.value)
    )


def test_a_request_must_name_a_backend():
    with pytest.raises(ValueError, match=re.escape("`backend` (='fats') must be one of ['big', 'fast', 'slow']")):
        select(problem(), H200, "fats", FAKES)
    with use_backend("fats"), pytest.raises(ValueError, match=re.escape("`backend` (='fats') must be one of")):
        select(problem(), H200, None, FAKES)
    with pytest.raises(TypeError, match=re.escape("`name` (=3, an int) must be the name of a backend")):
        use_backend(3)  # pyright: ignore[reportArgumentType]


def test_reasons_are_closed():
    assert issubclass(Reason, enum.Enum)
    with pytest.raises(TypeError, match="cannot extend"):
        enum.Enum("More", {"SLOW": "too slow"}, type=Reason)
    with pytest.raises(ValueError, match="'too slow' is not a valid Reason"):
        Reason("too slow")
    assert str(Rejection(Reason.DTYPE, "x is int8", "cast x")) == "dtype: x is int8; cast x"


def test_the_registered_backends_keep_the_protocol():
    names = [backend.name for backend in registered_backends()]
    assert len({*names}) == len(names)
    for backend in registered_backends():
        like: Backend = backend
        assert like.summary
        hash(backend)
        for device in known_devices():
            answer = like.supports(problem(), Environment.named(device))
            assert answer is None or isinstance(answer.reason, Reason)


# use_backend


@pytest.fixture
def fakes(monkeypatch):
    monkeypatch.setattr("jmx.backends.REGISTRY", Registry(FAKES))
    jitted: Any = layer._run
    jitted.clear_cache()  # traces of other backends
    yield
    jitted.clear_cache()


def called(backend=None):
    """A jitted layer that returns the length of its backend's name, and the list of its traces."""
    traces = []
    weights = experts()
    routing = jmx.Routing(jnp.zeros((5, 1), jnp.int32), jnp.ones((5, 1)))

    @jax.jit
    def call(x):
        traces.append(1)
        return jmx.moe(x, routing, weights, activation=jmx.SwiGLU(), backend=backend)[0, 0]

    return lambda: int(call(jnp.ones((5, 64)))), traces


def test_use_backend_retraces_nests_and_ends(fakes, monkeypatch):
    monkeypatch.setattr("jmx.backends.REGISTRY", Registry((Fake("a"), Fake("bb"), Fake("ccc"))))
    call, traces = called()
    assert call() == 1
    with use_backend("bb"):
        assert call() == 2
        with use_backend("ccc"):
            assert call() == 3
            with use_backend(None):
                assert call() == 1
        assert call() == 2
    assert call() == 1
    assert len(traces) == 3  # one a backend: those seen before come out of jit's cache
    with pytest.raises(RuntimeError, match="on purpose"), use_backend("bb"):
        raise RuntimeError("on purpose")
    assert call() == 1


def test_an_explicit_backend_beats_the_context(fakes):
    call, _ = called(backend="slow")
    with use_backend("big"):
        assert call() == len("slow")


def test_the_context_reaches_every_layer_and_its_errors(fakes):
    call, _ = called()
    with use_backend("big"), pytest.raises(NoBackendError, match="big: shape: 5 tokens, of 64 at least"):
        call()
    with use_backend("typo"), pytest.raises(ValueError, match=re.escape("`backend` (='typo') must be one of")):
        call()


def test_a_vmapped_call_is_judged_by_all_its_tokens(fakes):
    weights = experts()
    routing = jmx.Routing(jnp.zeros((8, 16, 1), jnp.int32), jnp.ones((8, 16, 1)))
    y = jax.vmap(lambda x, r: jmx.moe(x, r, weights, activation=jmx.SwiGLU()))(jnp.ones((8, 16, 64)), routing)
    assert int(y[0, 0, 0]) == len("big")


def test_a_call_without_assignments_reaches_no_backend(monkeypatch):
    class Never(Fake):
        def apply(self, problem, x, routing, experts, environment):
            raise AssertionError

    monkeypatch.setattr("jmx.backends.REGISTRY", Registry((Never("never"),)))
    for tokens, top_k in ((0, 2), (3, 0)):
        routing = jmx.Routing(jnp.zeros((tokens, top_k), jnp.int32), jnp.ones((tokens, top_k)))
        y = jmx.moe(jnp.ones((tokens, 64), jnp.bfloat16), routing, experts(), activation=jmx.SwiGLU(limit=3.0))
        assert (y.shape, y.dtype, float(jnp.abs(y).sum())) == ((tokens, 64), jnp.bfloat16, 0)


# Problem


def test_problem_of_arrays_tracers_and_shapes():
    weights = experts()
    x = jnp.ones((3, 5, 64), jnp.bfloat16)
    expected = replace(problem(15), activation=jmx.SwiGLU(limit=7.0), weights_on="input")
    seen = []

    def of(x, weights):
        seen.append(Problem.of(x, 2, weights, jmx.SwiGLU(limit=7.0), "input"))

    of(x, weights)
    of(jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(lambda: weights))
    jax.jit(of)(x, weights)
    jax.eval_shape(lambda *arguments: of(*arguments), x, weights)
    assert seen == [expected] * 4
    assert len({*seen}) == 1


def test_problem_of_one_token_none_and_no_bias():
    weights = experts(bias=False)
    one = Problem.of(jnp.ones(64), 2, weights, jmx.SwiGLU())
    assert (one.num_tokens, one.bias, one.dtype) == (1, False, "float32")
    assert Problem.of(jnp.ones((3, 0, 64)), 2, weights, jmx.SwiGLU()).num_tokens == 0
    assert Problem.of(jnp.ones(64), 2, weights.canonical(), jmx.SwiGLU()).layout == "canonical"
    stack = Experts.stack([weights, weights])
    assert Problem.of(jnp.ones(64), 2, stack.layer(0), jmx.SwiGLU()).num_experts == 8


def test_problem_of_symbolic_dimensions():
    tokens, batch = export.symbolic_shape("t, b")
    for shape in ((tokens, 64), (batch, 3, 64), (batch, tokens, 64)):
        x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        found = Problem.of(x, 2, experts(), jmx.SwiGLU())
        assert found.num_tokens is None
        assert str(found).startswith("a symbolic number of tokens, top-2 of 8")


# Environment


@pytest.mark.devices(3)
def test_the_default_device_is_probed_where_nothing_else_is_said(monkeypatch):
    seen = []
    monkeypatch.setattr(Environment, "of_device", classmethod(lambda cls, device: seen.append(device)))
    x = jnp.ones(3)
    Environment.probe(x, 3, None)
    with jax.default_device(jax.devices()[2]):
        Environment.probe(x)  # not committed: it would go there
        jax.jit(lambda x: Environment.probe(x))(x)
    with jax.default_device("cpu"):
        Environment.probe()
    assert seen == [jax.devices()[0], jax.devices()[2], jax.devices()[2], jax.devices("cpu")[0]]


@pytest.mark.devices(4)
def test_committed_arguments_come_before_the_default_device(monkeypatch):
    seen = []
    monkeypatch.setattr(Environment, "of_device", classmethod(lambda cls, device: seen.append(device)))
    there = jax.device_put(jnp.ones(3), jax.devices()[3])
    with jax.default_device(jax.devices()[2]):
        Environment.probe({"a": jnp.ones(3), "b": [there]})
    assert seen == [jax.devices()[3]]


def on_h200(name="NVIDIA H200", cores=132):
    kind = type(abstract_device())
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=kind(name, cores, "gpu")))


def abstract_device():
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        return jax.sharding.get_abstract_mesh().abstract_device


@pytest.mark.devices(2)
def test_the_mesh_comes_first():
    x = jnp.ones(3)
    with on_h200():
        assert Environment.probe() == H200
        assert Environment.probe(x) == H200
        seen = []
        jax.eval_shape(lambda x: seen.append(Environment.probe(x)), jax.ShapeDtypeStruct((3,), jnp.float32))
        assert seen == [H200]
    mesh = jax.make_mesh((2,), ("x",))
    with jax.set_mesh(mesh):
        placed = jax.device_put(jnp.ones(4), NamedSharding(mesh, P("x")))
        assert Environment.probe(placed) == Environment.of_device(jax.devices()[0])


def test_a_longer_name_and_fewer_cores_are_still_that_device():
    with on_h200("NVIDIA H200 141GB HBM3e"):
        assert Environment.probe() == H200
    with on_h200("NVIDIA H200 MIG 1g.18gb", 16):
        assert Environment.probe() == replace(H200, core_count=16)


def test_platforms_that_cannot_meet_are_an_error(monkeypatch):
    here = jax.device_put(jnp.ones(3), jax.devices("cpu")[0])
    message = "committed to cpu devices in a mesh of gpu devices cannot be used in one call: move them to one platform"
    with on_h200(), pytest.raises(ValueError, match=message):
        Environment.probe(here)

    @dataclass(frozen=True)
    class Elsewhere:
        platform: str = "gpu"

    monkeypatch.setattr("jmx.selection.environment._committed_devices", lambda _: [*here.devices(), Elsewhere()])
    with pytest.raises(ValueError, match="committed to cpu and gpu devices cannot be used"):
        Environment.probe(here)


def test_a_device_that_is_not_known_is_described_as_far_as_it_is(monkeypatch):
    for name in ("NVIDIA GH200 480GB", "NVIDIA L40"):  # which is no L4
        with on_h200(name):
            assert Environment.probe() == Environment("gpu", name, None, 132)


def test_of_device_reads_what_a_gpu_says():
    @dataclass(frozen=True)
    class Gpu:
        platform: str = "gpu"
        device_kind: str = "NVIDIA H200"
        compute_capability: str = "9.0"
        core_count: int = 132

    assert Environment.of_device(Gpu()) == H200
    assert Environment.of_device(jax.devices("cpu")[0]).compute_capability is None
    assert dict(H200.versions)["jax"] == jax.__version__


def test_named_devices():
    assert H200.compute_capability == (9, 0)
    for name in ("b100", "b200", "gb200"):
        assert Environment.named(name).compute_capability == (10, 0)
        assert resolve_layout("auto", Environment.named(name)) == "packed"
    with pytest.raises(ValueError, match=re.escape("`device` (='h300') must be one of ['a100', 'b100', 'b200', 'cpu'")):
        Environment.named("h300")


def test_a_layer_on_a_mesh_of_a_gpu_gets_that_gpus_layout():
    with on_h200():
        shapes = nnx.eval_shape(lambda: jmx.nnx.MoE(64, 96, 8, 2, rngs=nnx.Rngs(0)))
    assert shapes.experts.layout == resolve_layout("auto", H200) == "mosaic_sm90"
    assert resolve_layout("auto", Environment.named("cpu")) == "packed"
    assert resolve_layout("canonical", H200) == "canonical"
    with pytest.raises(ValueError, match=re.escape("`layout` (='fancy') must be one of")):
        resolve_layout("fancy", H200)
