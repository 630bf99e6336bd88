"""What a mesh makes of a call, by hand: parts, exchange, bytes, floor; in `jmx.explain` and on the command line."""

import dataclasses
import json
import re
import sys
from math import comb
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmx
import jmx.nnx
from jmx import cli
from jmx.backends import registered_backends
from jmx.parallel import PlacedExperts, Placement, needed
from jmx.parallel import exchanges as known
from jmx.parallel.division import Division
from jmx.selection.costs import PEAKS, Peak, active_experts, flops
from jmx.selection.environment import Environment
from jmx.selection.problem import weight_bytes
from jmx.selection.tuning import Tunable, config

PROBLEM = jmx.Problem(64, 2880, 2880, 128, 4, "bfloat16", "mxfp4", jmx.SwiGLU(), "interleaved", True, "mosaic_sm90")
MESH = AbstractMesh((2, 4, 2), ("dp", "ep", "tp"))
X_BYTES = 2880 * 2


def explain(problem: Any = PROBLEM, *arguments: Any, device: str = "h200", **fields: Any) -> Any:
    activation = fields.pop("activation", None)
    fields = {"mesh": MESH, **fields}
    split: Any = jmx.Split(**fields)
    return jmx.explain(problem, *arguments, device=device, split=split, activation=activation)


class Never:
    """An exchange that runs no call."""

    name = "never"
    summary = "for tests"

    def supports(self, call: Any) -> str:
        return f"{call.num_tokens} tokens are too many; send fewer"

    def bytes_sent(self, call: Any) -> tuple[int, int]:
        raise AssertionError

    def apply(self, *_: Any) -> Any:
        raise AssertionError


# Parts and bytes, by hand


@pytest.mark.parametrize(
    ("fields", "tokens", "experts", "columns", "before", "after"),
    [
        # 3 others get each of 8 tokens, with 4 ids and 4 weights of 4 bytes each, and send as many results back
        ({"expert": "ep", "tokens": ("dp", "ep")}, 8, 32, 2880, 3 * 8 * (X_BYTES + 32), 3 * 8 * X_BYTES),
        ({"expert": "ep", "tokens": "ep"}, 16, 32, 2880, 3 * 16 * (X_BYTES + 32), 3 * 16 * X_BYTES),
        # results of the same tokens are added around a ring
        ({"expert": "ep", "tokens": "dp"}, 32, 32, 2880, 0, 2 * 3 * 32 * X_BYTES // 4),
        ({"intermediate": "tp"}, 64, 128, 1440, 0, 2 * 1 * 64 * X_BYTES // 2),
        ({"intermediate": ("ep", "tp"), "tokens": "dp"}, 32, 128, 384, 0, 2 * 7 * 32 * X_BYTES // 8),
        ({"tokens": "dp"}, 32, 128, 2880, 0, 0),
        ({"expert": ("dp", "ep"), "tokens": "dp"}, 32, 16, 2880, 32 * (X_BYTES + 32), 32 * X_BYTES * 5 // 2),
    ],
)
def test_each_devices_part(fields: Any, tokens: int, experts: int, columns: int, before: int, after: int) -> None:
    its = Division.of(PROBLEM, jmx.Split(**fields), MESH.shape)
    assert (its.num_tokens, its.local.num_experts, its.local.intermediate_size) == (tokens, experts, columns)
    assert (its.bytes_before, its.bytes_after) == (before, after)
    assert its.chosen == ("gather" if before else None)
    assert (its.call is None) == (before == 0)


def test_costs_are_those_of_one_device() -> None:
    found = explain(expert="ep", tokens=("dp", "ep"))
    group = dataclasses.replace(PROBLEM, num_tokens=32)  # of the four devices that exchange tokens
    assert found.active_experts == pytest.approx(active_experts(group) / 4)
    assert found.flops == flops(group) / 4
    assert found.bytes == pytest.approx(weight_bytes(PROBLEM, active_experts(group) / 4) + 2 * 32 * X_BYTES)
    assert found.floor.bound == "memory"
    assert found.floor.us == pytest.approx(found.bytes / 4.8e6)
    assert found.chosen == "mosaic"


@pytest.mark.parametrize(
    "backend", [its for its in registered_backends() if isinstance(its, Tunable)], ids=lambda its: its.name
)
def test_kernels_are_those_of_an_expert_with_as_many_rows_in_the_whole_layer(backend: Any) -> None:
    """A device has all tokens and a part of the experts, each of which gets as many rows as without a mesh."""
    fields = {"layout": {"mosaic": "mosaic_sm90", "mosaic_fp8": "mosaic_sm90_fp8"}.get(backend.name, "packed")}
    fields |= {"input_format": "fp8_token"} if backend.name == "mosaic_fp8" else {}
    environment = Environment("gpu", "NVIDIA H200", (9, 0), 132)
    for tokens in (4, 64, 256, 1024, 8192):
        whole = dataclasses.replace(PROBLEM, num_tokens=4 * tokens, **fields)
        its = Division.of(whole, jmx.Split(expert="ep", tokens="ep"), MESH.shape)
        assert (its.local.num_tokens, its.local.num_experts, its.local.num_routed) == (4 * tokens, 32, 128)
        assert config(backend, its.local, environment) == config(backend, whole, environment)
    assert Division.of(PROBLEM, jmx.Split(tokens="ep"), MESH.shape).local.num_routed is None


def test_a_floor_of_links(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = dataclasses.replace(PROBLEM, num_tokens=1 << 16)
    found = explain(problem, expert=("dp", "ep"), tokens=("dp", "ep"), exchange="gather")
    sent = 7 * 8192 * (2 * X_BYTES + 32)
    assert found.floor.bound == "links"
    assert found.floor.us == pytest.approx(sent / 245e3)
    assert "(links, 245 GB/s measured with NCCL)" in str(found)
    monkeypatch.setattr(needed, "MOST_SHARE", 0.85)
    # Of a token's row and result `peer` leaves out those of devices without any of its four experts.
    fewer = explain(problem, expert=("dp", "ep"), tokens=("dp", "ep"), exchange="peer")
    share = 1 - comb(112, 4) / comb(128, 4)
    assert str(round(7 * 8192 * (share * X_BYTES + 32) / 1e6)) in str(fewer)
    assert explain(problem, tokens="dp").floor.bound == "compute"  # nothing is sent


def test_unknown_links_give_no_floor() -> None:
    found = explain(expert="ep", tokens="ep", device="b200")
    assert found.floor is None
    assert "floor not known: no figure for the links of NVIDIA B200" in str(found)
    assert explain(tokens="dp", device="b200").floor is not None
    assert PEAKS["NVIDIA B200"] == Peak(8.0e12, 2250e12, None)


# What is printed


def test_the_text_names_mesh_exchanges_and_bytes() -> None:
    text = str(explain(expert="ep", tokens=("dp", "ep")))
    assert "mesh dp=2,ep=4: experts over ep, tokens over dp and ep" in text
    assert "each device: 8 tokens, 32 experts, I=2880" in text
    assert re.search(r"peer_lines +│ chosen", text)
    assert "139 kB sent before the experts and 138 kB after" in text.replace("\n", " ")
    text = str(explain(expert="ep", tokens="dp", intermediate="tp"))
    assert "no exchange: devices with other experts have the same tokens, and results are added over ep and tp" in text


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="GPUs that are here have `peer`")
@pytest.mark.parametrize(("device", "tokens", "chosen"), [("h200", 64, "peer_lines"), ("h200", 1024, "peer")])
def test_named_devices_are_those_of_one_process(device: str, tokens: int, chosen: str) -> None:
    """They need not be here; those that are here have no exchange that they cannot run."""
    problem = dataclasses.replace(PROBLEM, num_tokens=tokens)
    found: Any = explain(problem, expert="ep", tokens="ep", device=device)
    assert found.division.chosen == chosen
    here = Division.of(problem, jmx.Split(expert="ep", tokens="ep"), MESH.shape)
    assert here.chosen == "gather"
    assert {name: no for name, _, no in here.trail}["peer"] == "the platform is cpu, not gpu"
    on_cpus = Division.of(problem, jmx.Split(expert="ep", tokens="ep"), MESH.shape, platform="cpu")
    assert on_cpus.chosen == "gather"
    many = Division.of(problem, jmx.Split(expert="ep", tokens="ep"), {"ep": 16}, platform="gpu")
    assert {name: no for name, _, no in many.trail}["peer"] == "16 GPUs are more than 8"


def test_why_no_other_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(known.EXCHANGES, "never", Never())
    monkeypatch.setattr(known, "EXCHANGES", {"never": Never(), **known.EXCHANGES})
    monkeypatch.setattr(sys.modules["jmx.parallel.division"], "EXCHANGES", known.EXCHANGES)
    found: Any = explain(expert="ep", tokens="ep")
    assert re.search(r"never +│ no +│ 16 tokens are too many; send fewer", str(found))
    assert found.division.chosen == "peer_lines"
    rows = found.as_dict()["division"]["exchanges"]
    assert rows[0] == {"name": "never", "chosen": False, "reason": "16 tokens are too many; send fewer"}
    assert {"name": "peer_lines", "chosen": True, "reason": None} in rows
    requested = jmx.Split(expert="ep", tokens="ep", mesh=MESH)
    object.__setattr__(requested, "exchange", "never")
    found = jmx.explain(PROBLEM, device="h200", split=requested)
    assert found.division.chosen is None
    assert "a call raises ValueError: `exchange` (='never') must be one that can run this call" in str(found)


def test_gathered_weights_are_stated() -> None:
    its, ways = Division.of(PROBLEM, jmx.Split(tokens="dp", hidden="dp"), MESH.shape), MESH.shape["dp"]
    gathered = weight_bytes(PROBLEM, PROBLEM.num_experts) * (ways - 1) / ways
    told = f"weights are gathered over dp at each call, {gathered / 1e6:.3g} MB a device"
    assert told in [str(line) for line in its.lines()]
    assert its.as_dict()["gathered"] == ("dp",)
    assert its.as_dict()["bytes_gathered"] == its.bytes_before == round(gathered)


def test_plain_values() -> None:
    values = json.loads(json.dumps(explain(expert="ep", tokens=("dp", "ep")).as_dict()))["division"]
    assert values["mesh"] == {"dp": 2, "ep": 4}
    assert values["exchange"] == "peer_lines"
    assert values["bytes_before_experts"] == 3 * 8 * (X_BYTES + 32)
    assert "division" not in jmx.explain(PROBLEM, device="h200").as_dict()


# Forms of the call


def test_a_layer_and_arrays() -> None:
    layer = jmx.nnx.MoE(64, 64, 8, 2, rngs=nnx.Rngs(0), layout="packed")
    x, logits = jax.ShapeDtypeStruct((32, 64), jnp.float32), jax.ShapeDtypeStruct((32, 8), jnp.float32)
    fields = {"expert": "ep", "tokens": ("dp", "ep"), "device": "cpu"}
    found = explain(layer, x, **fields)
    assert found.division.local.num_experts == 2
    routing, experts = jmx.Logits(logits, jmx.TopKSoftmax(2)), layer.experts
    arrays = {"activation": layer.activation, **fields}
    assert explain(x, routing, experts, **arrays).division == found.division
    shards = explain(x, routing, jmx.ShardedExperts.of(experts, 2), intermediate="tp", **arrays)
    assert shards.division.local.intermediate_size == 32
    placed = PlacedExperts.of(experts, Placement.identity(8, 4, 4))
    assert explain(x, routing, placed, **arrays).division.local.num_experts == 3


@pytest.mark.devices(4)
def test_explicit_axes_need_no_split() -> None:
    mesh = jax.make_mesh((2, 2), ("dp", "ep"), axis_types=(AxisType.Explicit,) * 2)
    experts = jmx.Experts.random(jax.random.key(0), 4, 64, 64, gate_up_order="interleaved")
    divided = jax.tree.map(lambda array: jax.device_put(array, NamedSharding(mesh, P("ep"))), experts)
    x = jax.device_put(jnp.ones((8, 64)), NamedSharding(mesh, P(("dp", "ep"))))
    logits = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P(("dp", "ep"))))
    routing = jmx.Logits(logits, jmx.TopKSoftmax(2))
    found = jmx.explain(x, routing, divided, activation="swiglu").division
    assert found is not None
    assert (found.num_tokens, found.local.num_experts, found.mesh) == (2, 2, "dp=2,ep=2")


@pytest.mark.parametrize(
    ("sizes", "fields", "message"),
    [
        ({}, {"expert": "zz"}, r"must name axes of the mesh"),
        ({"num_tokens": 30}, {"tokens": "ep"}, r"`tokens` \(='ep'\) must divide the 30 tokens evenly"),
        ({"num_tokens": None}, {"tokens": "ep"}, r"`num_tokens` \(=None\) must be a number"),
        ({"num_experts": 6}, {"expert": "ep"}, r"`expert` \(='ep'\) must divide the 6 experts evenly"),
        ({}, {"expert": "ep", "mesh": None}, r"must have a mesh"),
    ],
)
def test_divisions_that_are_refused(sizes: Any, fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(dataclasses.replace(PROBLEM, **sizes), **fields)


# The command line


def test_explain_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", "--model", "gpt-oss-120b", "--device", "h200", "--tokens", "64,128"]
    assert cli.main([*command, "--mesh", "dp=2,ep=4", "--json"]) == 0
    values = [found["division"] for found in json.loads(capsys.readouterr().out)]
    assert [found["tokens_per_device"] for found in values] == [8, 16]
    assert [found["exchange"] for found in values] == ["peer_lines", "peer_lines"]
    assert cli.main([*command, "--mesh", "ep=4", "--exchange", "peer"]) == 0
    capsys.readouterr()
    assert cli.main([*command, "--mesh", "ep=4,tp=2", "--exchange", "gather"]) == 0
    out = capsys.readouterr().out
    assert "mesh ep=4,tp=2: experts over ep, their intermediate axis over tp, tokens over ep" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh", "xx=2"], "`--mesh` (='xx') must be one of dp, ep, fsdp, tp"),
        (["--mesh", "ep"], "must be axes as NAME=SIZE"),
        (["--mesh", "ep=\uff12"], "must be axes as NAME=SIZE"),  # a full-width digit
        (["--mesh", "ep=3"], "must divide the 1 tokens evenly, over 3 devices"),
        (["--exchange", "gather"], "`--exchange` (='gather') needs --mesh"),
        (["--mesh", "ep=1", "--exchange", "pigeons"], "`--exchange` (='pigeons') must be one of gather"),
    ],
)
def test_wrong_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["explain", "--model", "small"], ["bench", "--model", "small"]):
        if command[0] == "bench" and "ep=3" in flags:
            continue
        assert cli.main([*command, *flags]) == 2
        assert message in capsys.readouterr().err


def test_one_device_of_experts_routes_as_without_a_mesh() -> None:
    environment, split = Environment.named("h200"), jmx.Split(expert="ep", tokens=("dp", "ep"))
    plain = Division.of(dataclasses.replace(PROBLEM, num_tokens=16), split, {"dp": 2, "ep": 1}, None, "gpu")
    assert plain.of_logits(jmx.TopKSoftmax(4), environment) == plain


@pytest.mark.parametrize(
    ("fields", "method", "device", "tokens", "sent"),
    [
        ({}, jmx.TopKSoftmax(4), "h200", 16, 3 * 2 * (X_BYTES + 4 * 128)),
        ({"tokens": "dp"}, jmx.TopKSoftmax(4), "h200", 16, 0),
        ({}, jmx.TopKSoftmax(4), "h200", 256, 3 * 32 * (X_BYTES + 4 * 128)),
        ({}, jmx.TopKSoftmax(4), "h200", 1 << 15, None),  # 16384 tokens of 128 experts are more than the kernel takes
        ({}, jmx.TopKSoftmax(4), "cpu", 16, None),
        ({}, None, "h200", 16, None),  # a call gets a routing
        ({"chunks": 2}, jmx.TopKSoftmax(4), "h200", 16, None),
        ({"exchange": "rows"}, jmx.TopKSoftmax(4), "h200", 16, None),
        ({"intermediate": "tp"}, jmx.TopKSoftmax(4), "h200", 16, None),
        ({"slots": 136}, jmx.TopKSoftmax(4), "h200", 16, None),
    ],
    ids=str,
)
def test_few_tokens_logits_are_exchanged(fields: Any, method: Any, device: str, tokens: int, sent: int | None) -> None:
    """On devices that have the kernel, and with experts as they are. `sent`: None: they are not."""
    slots = fields.get("slots")
    axes: dict[str, Any] = {"tokens": ("dp", "ep")} | {name: its for name, its in fields.items() if name != "slots"}
    split = jmx.Split(expert="ep", **axes)
    environment = Environment.named(device)
    problem = dataclasses.replace(PROBLEM, num_tokens=tokens)
    plain = Division.of(problem, split, MESH.shape, slots, environment.platform)
    found = plain.of_logits(method, environment)
    if sent is None:
        assert found == plain
        assert not found.as_dict()["routes_all"]
    else:
        assert found.as_dict()["routes_all"]
        assert found.bytes_before == sent
        line = f"each device routes {found.local.num_tokens} tokens"
        assert sum(str(its).startswith(line) for its in found.lines()) == 1
