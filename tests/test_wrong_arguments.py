"""Every argument of every public function with every kind of wrong value: jmx's own error names it and the value."""

import atexit
import dataclasses
import functools
import inspect
import math
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from float_checkpoints import float_gpt_oss

import jmx
import jmx.linen
import jmx.lora
import jmx.models
import jmx.nnx
import jmx.training
from jmx import checkpoint
from jmx.backends import registered_backends
from jmx.selection.registry import Registry
from jmx.xla.backend import Xla

ROOT = pathlib.Path(jmx.__file__).parent
TINY = ROOT.parent / "tests" / "data" / "gpt_oss_tiny"
GOLDEN, LAYER = ROOT.parent / "tests" / "data" / "compressed_tensors" / "mxfp4", "model.layers.0.mlp.experts"
E, H, I, K, T = 4, 32, 32, 2, 3  # noqa: E741


class Opaque:
    """No argument of anything."""


# Wrong values of each kind of argument. None is one of them where it is not allowed.
_NO_NUMBER: list[Any] = [None, "3", [3], {}, Opaque(), np.ones(2), jnp.ones((2, 2), jnp.int32)]
_NO_ARRAY: list[Any] = [None, "x", [[1.0]], {}, Opaque(), 3, 2.5, math.nan]
_NO_FLOATS: list[Any] = [np.ones(3, np.int32), np.ones((2, 3), bool), jax.random.key(0)]
_NO_VALUES = [jax.ShapeDtypeStruct((3, 32), np.float32), jax.ShapeDtypeStruct((3, 2), np.int32)]
KINDS: dict[str, list[Any]] = {
    "size": [*_NO_NUMBER, 2.5, math.nan, True, np.float32(2), -1, 0, np.int64(-3)],
    "size or None": [*_NO_NUMBER[1:], 2.5, math.nan, True, np.float32(2), -1, 0, np.int64(-3)],
    "count": [*_NO_NUMBER, 2.5, math.nan, True, -1],
    "number": [*_NO_NUMBER, math.nan, math.inf, -math.inf, True, 1j],
    "numbers": [None, "12", 3.0, (), (1.0,), (1.0, math.nan), ("a", "b"), [[1.0, 2.0]], (True, 1.0), Opaque()],
    "numbers or None": ["12", 3.0, (), (1.0,), (1.0, math.inf), ("a", "b"), [[1.0, 2.0]], (True, 1.0), Opaque()],
    "flag": [*_NO_NUMBER, 1, 0.0, math.nan],
    "flag or None": [*_NO_NUMBER[1:], 1, 0.0, math.nan],
    "name": [None, "no such", 3, 2.5, ["packed"], {}, Opaque(), np.ones(2)],
    "name or None": ["no such", 3, 2.5, ["packed"], {}, Opaque(), np.ones(2)],
    "text": [None, 3, 2.5, ["cpu"], {}, Opaque(), np.ones(2)],
    "text or None": [3, 2.5, ["cpu"], {}, Opaque(), np.ones(2)],
    "dtype": [None, "no such", 3, 2.5, ["x"], Opaque(), jnp.int8, jnp.float8_e5m2, np.float64],
    "floats": [*_NO_ARRAY, *_NO_FLOATS, *_NO_VALUES],
    "floats or None": [*_NO_ARRAY[1:], *_NO_FLOATS, *_NO_VALUES],
    "floats or their shape": [*_NO_ARRAY, *_NO_FLOATS],
    "integers": [*_NO_ARRAY, np.ones((3, 2), np.float32), np.ones((2, 3), bool), *_NO_VALUES],
    "strings": [None, "x", 3, 2.5, {}, Opaque(), [None], [3], [""]],
    "list or None": ["x", 3, 2.5, {}, Opaque(), np.ones(3)],
    "mask": ["x", [True], {}, Opaque(), True, np.ones(T), np.ones(T + 1, bool), jax.ShapeDtypeStruct((T,), bool)],
    "key": [*_NO_ARRAY, np.ones(2, np.float32), np.ones(2, np.int32), jnp.uint32(1)],
    "shape": [None, 3, "64", (64,), (1, 2, 3), (64, -1), (64, 2.5), (True, 64), {}, Opaque()],
    "any shape": [None, 3, "64", (), (64, -1), (64, 2.5), (64, "x"), {}, Opaque()],
    "path or None": [3, 2.5, ["x"], {}, Opaque(), b"bytes", np.ones(2)],
    "path": [None, 3, 2.5, ["x"], {}, Opaque(), b"bytes", np.ones(2)],
    "object": [None, "x", 3, 2.5, [], [1], {}, Opaque(), np.ones(3), jnp.ones((2, 2), jnp.int32)],
    "object or None": ["x", 3, 2.5, [], [1], {}, Opaque(), np.ones(3)],
    "named": [None, "no such", 3, 2.5, [], {}, Opaque(), np.ones(3), jax.nn.silu, jmx.Routing],
    "named or None": ["no such", 3, 2.5, [], {}, Opaque(), np.ones(3), jax.nn.silu, jmx.Routing],
    "axes": ["x", 3, [("expert", "x")], Opaque(), {"experts": "x"}, {"expert": 3}, {"expert": ["x"]}],
    "module axes": [
        "x",
        3,
        Opaque(),
        {"expert": 3},
        {"tokens": "x"},
        {"token": 3},
        {"token": ["x"]},
        {"token": ("a", "a")},
        {"expert": "a", "hidden": ("b", "a")},
    ],
    "mesh axes": [3, 2.5, ["x"], {}, Opaque(), np.ones(2), ("a", 3), ("a", "a")],
    "sharding": ["x", 3, 2.5, [None], Opaque(), np.ones(2)],
    "sequence": [None, "x", 3, 2.5, {}, Opaque(), [None], ["x"], [Opaque()]],
    "function": [None, "x", 3, [], {}, Opaque(), np.ones(2)],
    "weight": [None, "x", 3, [], {}, Opaque(), np.ones((2, 32)), (np.ones(2), np.ones(2))],
    "tree": [None, "x", [], {}, Opaque(), [Opaque()]],
    "array": [*_NO_ARRAY, *_NO_VALUES],
    "bias": ["x", [1.0], {}, Opaque(), 3, np.ones((E, 2 * I), np.int32), np.ones((E, 7), np.float32), _NO_VALUES[0]],
}
UNCHECKED = "anything does"  # only printed, or handed to a function of the caller's own


@dataclass
class Row:
    """A public callable: `kinds` of its arguments, right ones by `given`, names that messages use for them instead."""

    kinds: dict[str, str]
    given: Callable[[], dict[str, Any]] = dict
    call: Callable[..., Any] | None = None
    names: dict[str, str] = field(default_factory=dict)


@functools.cache
def experts(order: str | None = "interleaved") -> jmx.Experts:
    return jmx.Experts.random(jax.random.key(0), E, H, I, gate_up_order=order)


@functools.cache
def shards() -> jmx.ShardedExperts:
    return jmx.ShardedExperts.of(experts(), 2)


@functools.cache
def layer() -> jmx.nnx.MoE:
    return jmx.nnx.MoE(H, I, E, K, layout="packed", rngs=nnx.Rngs(0))


@functools.cache
def linen() -> tuple[jmx.linen.MoE, Any]:
    module = jmx.linen.MoE(H, I, E, K, layout="packed")
    return module, module.init(jax.random.key(0), X)


@functools.cache
def golden() -> checkpoint.compressed_tensors.Reader:
    return checkpoint.compressed_tensors.Reader(GOLDEN)


@functools.cache
def floats() -> checkpoint.quantizing.Reader:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    path, _ = float_gpt_oss(pathlib.Path(folder, "floats"), 1)
    return checkpoint.quantizing.Reader(path, "mxfp4")


@functools.cache
def masters() -> jmx.training.MasterExperts:
    return jmx.training.QAT().masters(experts())


@functools.cache
def adapters() -> jmx.lora.Adapters:
    return jmx.lora.LoRA(2).random(jax.random.key(0), experts())


@functools.cache
def adapter_reader() -> checkpoint.peft.Reader:
    options: Any = {"gate_up_order": "interleaved", "format": "int8_channel"}
    like: Any = jax.eval_shape(lambda: jmx.Experts.random(jax.random.key(0), 3, 32, 24, **options))
    return checkpoint.peft.Reader(GOLDEN.parents[1] / "peft" / "gpt_oss", {0: like, 1: like})


@functools.cache
def adapted() -> tuple[jmx.linen.MoE, Any]:
    module = jmx.linen.MoE(H, I, E, K, layout="packed", lora=jmx.lora.LoRA(2))
    return module, module.init(jax.random.key(0), X)


def reader() -> Any:
    return checkpoint.gpt_oss.Reader(TINY)


def registering(**arguments: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jmx.backends.REGISTRY", Registry(registered_backends()))
        jmx.register_backend(**arguments)


def weight() -> jmx.BlockScaled:
    return jmx.quantize(np.ones((2, 32), np.float32))


X = np.ones((T, H), np.float32)
ROUTING = jmx.Routing(np.ones((T, K), np.int32), np.ones((T, K), np.float32))
LOGITS = jmx.Logits(np.ones((T, E), np.float32), jmx.TopKSoftmax(K))
MODULE = {
    "hidden_size": "size",
    "intermediate_size": "size",
    "num_experts": "size",
    "top_k": "size",
    "format": "named",
    "activation": "named",
    "bias": "flag",
    "gate_up_order": "name or None",
    "routing": "named or None",
    "router": "flag",
    "router_bias": "flag or None",
    "correction_bias": "flag",
    "weights_on": "name",
    "input_format": "name or None",
    "backend": "name or None",
    "save_gate_up": "flag",
    "layout": "name",
    "param_dtype": "dtype",
    "axes": "module axes",
    "spare_experts": "count",
    "experts": "object or None",
    "lora": "object or None",
    "qat": "object or None",
}
SIZES = {"hidden_size": H, "intermediate_size": I, "num_experts": E, "top_k": K}
CALL = {"x": "floats", "routing": "object or None", "mask": "mask"}
QUANTIZING = {"gate_up_order": "name or None", "format": "named"}
FLOAT_WEIGHTS = {"gate_up": "floats", "down": "floats", "gate_up_bias": "bias", "down_bias": "bias", **QUANTIZING}


def float_weights() -> dict[str, Any]:
    """Arguments of what takes `FLOAT_WEIGHTS`."""
    weights = {"gate_up": np.ones((E, 2 * I, H), np.float32), "down": np.ones((E, H, I), np.float32)}
    return weights | {"gate_up_order": "interleaved"}


def method(name: str, kinds: dict[str, str], given: Callable[[], dict[str, Any]] = dict, **names: str) -> Row:
    """Of `Experts`."""
    return Row(kinds, given, lambda **arguments: getattr(experts(), name)(**arguments), names)


def of_linen(name: str | None) -> Callable[..., Any]:
    return lambda **arguments: linen()[0].apply(linen()[1], **arguments, method=name)


def problem(**changed: Any) -> jmx.Problem:
    fields = {"num_tokens": 1, **SIZES, "dtype": "bfloat16", "format": "mxfp4", "activation": jmx.SwiGLU()}
    return jmx.Problem(**fields | {"gate_up_order": "interleaved", "bias": True, "layout": "packed"} | changed)


@functools.cache
def runner() -> jmx.models.Runner:
    family = jmx.models.FAMILIES["mixtral"]
    config = dataclasses.replace(
        next(iter(family.published.values())),
        num_hidden_layers=1,
        hidden_size=H,
        intermediate_size=I,
        moe_intermediate_size=I,
        num_experts=E,
        vocab_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    source = jmx.models.random_source(config, format=jmx.FORMATS["int8_channel"])
    return jmx.models.Runner(jmx.models.from_source(source, dtype=jnp.float32))


def model() -> jmx.models.Model:
    return runner().model


@functools.cache
def text() -> jmx.training.Text:
    return jmx.training.Text(ROOT.parent / "LICENSE", 300)


def cache() -> jmx.models.Cache:
    return jmx.models.Cache.empty([(2, 1, 1, 16, 16)], jnp.float32)


GENERATING = {"prompts": "prompts", "sampler": "object", "max_new_tokens": "size", "logprobs": "count or None"}


def entered(manager: Any) -> None:
    with manager:
        pass


ROWS: dict[str, Row] = {
    # Activations and routing methods
    "jmx.GELU": Row({"approximate": "flag"}),
    "jmx.GELUAndMul": Row({"approximate": "flag"}),
    "jmx.SwiGLU": Row({"alpha": "number", "beta": "number", "limit": "number or None"}),
    "jmx.SwiGLUPerExpert": Row(
        {"alpha": "numbers", "beta": "numbers", "limit": "numbers or None"},
        lambda: {"alpha": (1.0, 2.0), "beta": (0.0, 1.0), "limit": (7.0, 7.0)},
    ),
    "jmx.SwiGLUStep": Row({"limit": "number"}, lambda: {"limit": 7.0}),
    "jmx.TopKSoftmax": Row({"top_k": "size"}),
    "jmx.SoftmaxTopK": Row({"top_k": "size", "renormalize": "flag"}, lambda: {"top_k": 2, "renormalize": True}),
    "jmx.SigmoidTopK": Row(
        {"top_k": "size", "renormalize": "flag", "routed_scaling_factor": "number"},
        lambda: {"top_k": 2, "renormalize": True},
    ),
    "jmx.SqrtSoftplusTopK": Row(
        {"top_k": "size", "renormalize": "flag", "routed_scaling_factor": "number"},
        lambda: {"top_k": 2, "renormalize": True},
    ),
    "jmx.GroupedTopK": Row(
        {
            "top_k": "size",
            "num_groups": "size",
            "topk_groups": "size",
            "scoring": "name",
            "renormalize": "flag",
            "routed_scaling_factor": "number",
        },
        lambda: {"top_k": 2, "num_groups": 2, "topk_groups": 1, "scoring": "sigmoid", "renormalize": True},
    ),
    "jmx.Custom": Row({"top_k": "size", "function": "function"}, lambda: {"top_k": 2, "function": print}),
    **{
        f"jmx.{name}.check": Row(
            {"num_experts": "size"}, call=lambda num_experts: jmx.TopKSoftmax(2).check(num_experts)
        )
        for name in ("TopKSoftmax", "SoftmaxTopK", "SigmoidTopK", "SqrtSoftplusTopK", "GroupedTopK", "Custom")
    },
    # Weights
    "jmx.Format.check_size": Row(
        {"name": UNCHECKED, "size": "count"}, lambda: {"name": "size"}, lambda **a: jmx.MXFP4.check_size(**a)
    ),
    "jmx.Format.whole_size": Row({"size": "count"}, call=lambda **a: jmx.MXFP4.whole_size(**a)),
    "jmx.Format.num_blocks": Row(
        {"size": "count", "what": UNCHECKED}, lambda: {"what": "size"}, lambda **a: jmx.MXFP4.num_blocks(**a)
    ),
    "jmx.Format.abstract": Row(
        {"shape": "any shape", "packed": "flag", "scale_dtype": "dtype or None"},
        lambda: {"shape": (2, 32)},
        lambda **a: jmx.MXFP4.abstract(**a),
    ),
    "jmx.Format.bytes": Row({"shape": "any shape"}, call=lambda shape: jmx.MXFP4.bytes(shape)),
    "jmx.quantize": Row(
        {"x": "floats", "format": "named", "scale_rule": "name", "nonfinite": "name"},
        lambda: {"x": np.ones((2, 32), np.float32)},
    ),
    "jmx.dequantize": Row({"q": "weight", "dtype": "dtype", "format": "named"}, lambda: {"q": weight()}),
    "jmx.pack": Row({"q": "weight"}),
    "jmx.unpack": Row({"q": "weight", "format": "named"}, lambda: {"q": jmx.pack(weight())}),
    "jmx.pad": Row({"q": "weight", "shape": "shape", "format": "named"}, lambda: {"q": weight(), "shape": (4, 64)}),
    "jmx.unpad": Row({"q": "weight", "shape": "shape", "format": "named"}, lambda: {"q": weight(), "shape": (1, 32)}),
    "jmx.from_offset_binary": Row({"q": "weight", "format": "named"}, lambda: {"q": weight(), "format": jmx.MXINT4}),
    # Experts
    "jmx.Experts.of": Row(
        {"gate_up": "weight", "down": "weight", "gate_up_bias": "bias", "down_bias": "bias", **QUANTIZING},
        lambda: {"gate_up": experts().gate_up, "down": experts().down, "gate_up_order": "interleaved"},
    ),
    "jmx.Experts.quantize": Row(
        {
            **FLOAT_WEIGHTS,
            "scale_rule": "name",
            "nonfinite": "name",
            "pad": "flag",
        },
        float_weights,
    ),
    "jmx.Experts.random": Row(
        {
            "key": "key",
            "num_experts": "size",
            "hidden_size": "size",
            "intermediate_size": "size",
            **QUANTIZING,
            "bias": "flag",
            "bias_dtype": "dtype",
        },
        lambda: {
            "key": jax.random.key(0),
            "num_experts": E,
            "hidden_size": H,
            "intermediate_size": I,
            "gate_up_order": None,
        },
    ),
    "jmx.Experts.stack": Row({"experts": "sequence"}),
    "jmx.Experts.spec": method("spec", {"role": "name"}),
    "jmx.Experts.input_scale": method("input_scale", {"role": "name"}),
    "jmx.Experts.take": method(
        "take", {"role": "name", "experts": "integers"}, lambda: {"role": "down", "experts": np.arange(2)}
    ),
    "jmx.Experts.take_bias": method(
        "take_bias", {"role": "name", "experts": "integers"}, lambda: {"role": "down", "experts": np.arange(2)}
    ),
    "jmx.Experts.check": method("check", {"bias": "flag", "fields": UNCHECKED}),
    "jmx.Experts.check_activation": method("check_activation", {"activation": "object"}),
    "jmx.Experts.with_arrays": method("with_arrays", {"arrays": "mapping"}),
    "jmx.Experts.with_inputs": Row(
        {"format": "name or None", "gate_up_scale": "array", "down_scale": "array"},
        lambda: {"format": "fp8_static", "gate_up_scale": jnp.float32(1), "down_scale": jnp.float32(1)},
        lambda **a: experts().with_inputs(**a),
    ),
    "jmx.Experts.prepare": method("prepare", {"layout": "name", "donate": "flag"}, lambda: {"layout": "packed"}),
    "jmx.Experts.canonical": method("canonical", {"donate": "flag"}),
    "jmx.Experts.update": method("update", {"new": "object"}),
    "jmx.Experts.pad": method("pad", {"hidden_size": "size or None", "intermediate_size": "size or None"}),
    "jmx.Experts.dequantize": method("dequantize", {"dtype": "dtype"}),
    # Routing
    "jmx.route": Row({"logits": "object", "mask": "mask"}, lambda: {"logits": LOGITS}),
    "jmx.group": Row(
        {"expert_ids": "integers", "num_experts": "size"}, lambda: {"expert_ids": ROUTING.expert_ids, "num_experts": E}
    ),
    "jmx.token_counts": Row(
        {"routing": "object", "num_experts": "size"}, lambda: {"routing": ROUTING, "num_experts": E}
    ),
    # Selection
    "jmx.Problem": Row(
        {
            "num_tokens": "count or None",
            **dict.fromkeys(("hidden_size", "intermediate_size", "num_experts"), "size"),
            "top_k": "count",
            "dtype": "name",
            "format": "name",
            "activation": "named",
            "gate_up_order": "name or None",
            "bias": "flag",
            "layout": "name",
            "weights_on": "name",
            "input_format": "name or None",
            "padded_from": "shape or None",
            "adapters": "flag",
            "num_routed": "size or None",
        },
        call=problem,
    ),
    "jmx.Problem.of": Row(
        {
            "x": "floats or their shape",
            "top_k": "count",
            "experts": "object",
            "activation": "named",
            "weights_on": "name",
            "input_format": "name or None",
            "adapters": "flag",
            "num_routed": "size or None",
        },
        lambda: {"x": X, "top_k": K, "experts": experts(), "activation": jmx.SwiGLU()},
    ),
    "jmx.Environment": Row(
        {
            "platform": "text",
            "device_kind": "text",
            "compute_capability": "shape or None",
            "core_count": "size or None",
            "versions": "names",
        },
        lambda: {"platform": "gpu", "device_kind": "card"},
    ),
    "jmx.Environment.probe": Row({"arguments": UNCHECKED}),
    "jmx.Environment.of_device": Row({"device": "object"}),
    "jmx.Environment.named": Row({"name": "name"}, names={"name": "device"}),
    "jmx.select": Row(
        {"problem": "object", "environment": "object", "request": "name or None", "backends": "sequence"},
        lambda: {
            "problem": problem(),
            "environment": jmx.Environment.probe(),
            "request": None,
            "backends": registered_backends(),
        },
        names={"request": "backend"},
    ),
    "jmx.register_backend": Row(
        {"backend": "object", "layouts": "sequence", "before": "name or None"},
        lambda: {"backend": Xla("another")},
        lambda **a: registering(**a),
    ),
    "jmx.use_backend": Row({"name": "text or None"}),
    "jmx.explain": Row(
        {
            "subject": "subject",
            "arguments": UNCHECKED,  # as `jmx.moe` has them
            "device": "name or None",
            "backend": "name or None",
            "activation": "named",
            "weights_on": "name or None",
            "input_format": "name or None",
            "all": "flag",
            "split": "object or None",
        },
        lambda: {"subject": X, "activation": jmx.SwiGLU()},
        lambda subject, **a: jmx.explain(subject, *([ROUTING, experts()] if subject is X else []), **a),
    ),
    # The layer
    "jmx.moe": Row(
        {
            "x": "floats",
            "routing": "object",
            "experts": "object",
            "activation": "named",
            "weights_on": "name",
            "input_format": "name or None",
            "mask": "mask",
            "backend": "name or None",
            "split": "object or None",
            "adapters": "object or None",
            "save_gate_up": "flag",
        },
        lambda: {"x": X, "routing": ROUTING, "experts": experts(), "activation": jmx.SwiGLU()},
    ),
    "jmx.batched_moe": Row(
        {
            "x": "floats",
            "counts": "integers",
            "experts": "object",
            "activation": "named",
            "weights": "floats or None",
            "weights_on": "name",
            "input_format": "name or None",
            "backend": "name or None",
        },
        lambda: {
            "x": np.ones((E, T, H), np.float32),
            "counts": np.ones(E, np.int32),
            "experts": experts(),
            "activation": jmx.SwiGLU(),
        },
    ),
    "jmx.Split": Row(
        {
            "expert": "mesh axes",
            "tokens": "mesh axes",
            "intermediate": "mesh axes",
            "hidden": "mesh axes",
            "exchange": "name or None",
            "capacity": "number or None",
            "chunks": "size",
            "mesh": "object or None",
        }
    ),
    "jmx.ShardedExperts.of": Row(
        {"experts": "object", "num_shards": "size", "input_format": "name or None"},
        lambda: {"experts": experts(), "num_shards": 2},
    ),
    "jmx.ShardedExperts.shard": Row({"index": "count"}, call=lambda index: shards().shard(index)),
    "jmx.ShardedExperts.with_arrays": Row({"arrays": "mapping"}, call=lambda arrays: shards().with_arrays(arrays)),
    "jmx.ShardedExperts.prepare": Row(
        {"layout": "name", "donate": "flag"}, lambda: {"layout": "packed"}, lambda **a: shards().prepare(**a)
    ),
    "jmx.nnx.MoE": Row(MODULE | {"rngs": "object"}, lambda: SIZES | {"rngs": nnx.Rngs(0)}),
    "jmx.nnx.MoE.__call__": Row(CALL, lambda: {"x": X}, lambda **a: layer()(**a)),
    "jmx.nnx.MoE.route": Row({"x": "floats", "mask": "mask"}, lambda: {"x": X}, lambda **a: layer().route(**a)),
    "jmx.nnx.MoE.problem": Row({"x": "floats or their shape"}, call=lambda x: layer().problem(x)),
    "jmx.nnx.MoE.split_of": Row({"x": "floats or their shape"}, call=lambda x: layer().split_of(x)),
    "jmx.nnx.MoE.token_counts": Row({"routing": "object"}, call=lambda routing: layer().token_counts(routing)),
    "jmx.nnx.MoE.hold": Row({"held": "object"}, call=lambda held: layer().hold(held)),
    "jmx.nnx.MoE.update": Row({"new": "object"}, call=lambda new: layer().update(new)),
    "jmx.nnx.MoE.adapt": Row({"adapters": "object or None"}, call=lambda adapters: layer().adapt(adapters)),
    "jmx.nnx.MoE.prepare": Row({"layout": "name"}, call=lambda layout: layer().prepare(layout)),
    "jmx.linen.MoE": Row(MODULE, lambda: SIZES),
    "jmx.linen.MoE.__call__": Row(CALL, lambda: {"x": X}, of_linen(None)),
    "jmx.linen.MoE.route": Row({"x": "floats", "mask": "mask"}, lambda: {"x": X}, of_linen("route")),
    "jmx.linen.MoE.problem": Row({"x": "floats or their shape"}, call=of_linen("problem")),
    "jmx.linen.MoE.split_of": Row({"x": "floats or their shape"}, call=of_linen("split_of")),
    "jmx.linen.MoE.token_counts": Row({"routing": "object"}, call=of_linen("token_counts")),
    "jmx.linen.MoE.held": Row({"variables": "mapping"}, call=lambda variables: linen()[0].held(variables)),
    "jmx.linen.MoE.experts_of": Row({"variables": "mapping"}, call=lambda variables: linen()[0].experts_of(variables)),
    "jmx.linen.MoE.hold": Row(
        {"variables": "mapping", "held": "object"},
        lambda: {"variables": linen()[1], "held": linen()[0].held(linen()[1])},
        lambda **a: linen()[0].hold(**a),
    ),
    "jmx.linen.MoE.adapters_of": Row(
        {"variables": "mapping"}, call=lambda variables: adapted()[0].adapters_of(variables)
    ),
    "jmx.linen.MoE.adapt": Row(
        {"variables": "mapping", "adapters": "object"},
        lambda: {"variables": adapted()[1], "adapters": adapted()[0].adapters_of(adapted()[1])},
        lambda **a: adapted()[0].adapt(**a),
    ),
    "jmx.linen.MoE.update": Row(
        {"variables": "mapping", "new": "object"},
        lambda: {"variables": linen()[1], "new": linen()[0].experts_of(linen()[1])},
        lambda **a: linen()[0].update(**a),
    ),
    # Training
    "jmx.training.load_balancing_loss": Row(
        {"logits": "object", "mask": "mask", "axis_name": "mesh axes"}, lambda: {"logits": LOGITS}
    ),
    "jmx.training.sequence_balance_loss": Row(
        {"logits": "object", "mask": "mask", "scoring": "name"}, lambda: {"logits": LOGITS}
    ),
    "jmx.training.router_z_loss": Row(
        {"logits": "floats", "mask": "mask", "axis_name": "mesh axes"}, lambda: {"logits": LOGITS.values}
    ),
    "jmx.training.updated_correction_bias": Row(
        {"correction_bias": "floats", "counts": "array", "rate": "number"},
        lambda: {"correction_bias": np.zeros(E, np.float32), "counts": np.arange(E), "rate": 0.1},
    ),
    "jmx.training.refuse_frozen": Row({"optimizer": "object"}),
    "jmx.training.QAT": Row({"gradients": "name", "scale_rule": "name", "dtype": "dtype"}),
    "jmx.training.QAT.masters": Row({"experts": "object"}, call=lambda experts: jmx.training.QAT().masters(experts)),
    "jmx.training.MasterExperts.of": Row(
        {
            **FLOAT_WEIGHTS,
            "gradients": "name",
            "scale_rule": "name",
        },
        float_weights,
    ),
    "jmx.training.MasterExperts.random": Row(
        {
            "key": "key",
            "num_experts": "size",
            "hidden_size": "size",
            "intermediate_size": "size",
            **QUANTIZING,
            "bias": "flag",
            "bias_dtype": "dtype",
            "qat": "object",
        },
        lambda: {
            "key": jax.random.key(0),
            "num_experts": E,
            "hidden_size": H,
            "intermediate_size": I,
            "gate_up_order": "interleaved",
        },
    ),
    "jmx.training.MasterExperts.with_arrays": Row(
        {"arrays": "mapping"}, call=lambda arrays: masters().with_arrays(arrays)
    ),
    "jmx.training.rounded": Row(
        {"weights": "floats", "format": "named", "gradients": "name", "scale_rule": "name"},
        lambda: {"weights": np.ones((2, 32), np.float32)},
    ),
    "jmx.training.check_finite": Row(
        {"tree": "tree", "step": "count", "kept": "path or None"}, lambda: {"tree": 1.0, "step": 0}
    ),
    "jmx.training.Run": Row(
        {"folder": "path", "arguments": "mapping", "steps": "size", "save_every": "size", "report_every": "size"},
        lambda: {"folder": "/nowhere/at/all", "arguments": {"rate": 0.1}, "steps": 1},
    ),
    "jmx.training.Run.train": Row(
        {"state": "sequence", "step": "function", "tokens_per_step": "size"},
        lambda: {"state": (layer(),), "step": print, "tokens_per_step": 1},
        lambda **a: jmx.training.Run("/nowhere/at/all", {}, steps=1).train(**a),
    ),
    "jmx.training.Text": Row(
        {"path": "path", "vocab_size": "size", "special": "strings"}, lambda: {"path": "/nowhere", "vocab_size": 300}
    ),
    "jmx.training.Text.windows": Row(
        {"batch": "size", "length": "size", "seed": "count"},
        lambda: {"batch": 1, "length": 2},
        lambda **a: text().windows(**a),
    ),
    "jmx.training.next_token_losses": Row(
        {"model": "object", "windows": "integers", "records": "list or None"},
        lambda: {"model": model(), "windows": np.zeros((1, 3), np.int32)},
    ),
    "jmx.training.bits_per_byte": Row(
        {"model": "object", "tokens": "integers", "num_bytes": "size", "length": "size"},
        lambda: {"model": model(), "tokens": np.zeros(3, np.int32), "num_bytes": 3, "length": 2},
    ),
    "jmx.training.in_dtype": Row(
        {"model": "object", "dtype": "model dtype"}, lambda: {"model": model(), "dtype": "float32"}
    ),
    "jmx.training.unrounded": Row({"model": "object"}),
    "jmx.training.export": Row(
        {
            "path": "path",
            "model": "object",
            "like": "path or None",
            "max_shard_bytes": "size",
            "progress": "flag",
        },
        lambda: {"path": "/nowhere/at/all", "model": model()},
    ),
    "jmx.lora.LoRA": Row(
        {
            "rank": "size",
            "alpha": "number or None",
            "targets": "names",
            "shared": "names",
            "rank_stabilized": "flag",
            "dtype": "dtype",
        },
        lambda: {"rank": 2},
    ),
    "jmx.lora.LoRA.random": Row(
        {"key": "key", "experts": "object"},
        lambda: {"key": jax.random.key(0), "experts": experts()},
        lambda **a: jmx.lora.LoRA(2).random(**a),
    ),
    "jmx.lora.Adapters.check": Row({"experts": "object"}, call=lambda experts: adapters().check(experts)),
    "jmx.lora.merge": Row(
        {"experts": "object", "adapters": "object", "dtype": "dtype"},
        lambda: {"experts": experts(), "adapters": adapters()},
    ),
    "jmx.lora.requantize": Row(
        {"experts": "object", "adapters": "object", "format": "named or None"},
        lambda: {"experts": experts(), "adapters": adapters()},
    ),
    # Checkpoints
    "jmx.checkpoint.peft.load": Row(
        {"path": "path", "experts": "mapping", "gate_up_order": "name or None"},
        lambda: {"path": "/nowhere", "experts": {0: experts()}},
    ),
    "jmx.checkpoint.peft.Reader": Row(
        {"path": "path", "experts": "mapping", "gate_up_order": "name or None"},
        lambda: {"path": "/nowhere", "experts": {0: experts()}},
    ),
    **{
        f"jmx.checkpoint.peft.Reader.{name}": Row(
            {"layer": "count"}, call=lambda layer, name=name: getattr(adapter_reader(), name)(layer)
        )
        for name in ("shapes", "adapters")
    },
    "jmx.checkpoint.peft.save": Row(
        {
            "path": "path",
            "adapters": "mapping",
            "experts": "mapping",
            "base_model": "text or None",
            "module": "text",
            "form": "name",
        },
        lambda: {"path": "/nowhere/at/all", "adapters": {0: adapters()}, "experts": {0: experts()}},
    ),
    "jmx.checkpoint.gpt_oss.read_config": Row(
        {"path": "path", "quant_methods": "sequence or None"}, lambda: {"path": TINY}
    ),
    "jmx.checkpoint.gpt_oss.load": Row(
        {"path": "path", "layer": "index", "layout": "name", "sharding": "sharding", "progress": "flag"},
        lambda: {"path": TINY},
    ),
    "jmx.checkpoint.gpt_oss.Reader": Row({"path": "path"}),
    "jmx.checkpoint.gpt_oss.Reader.dense": Row(
        {"name": "text", "sharding": "sharding"}, lambda: {"name": "embedding"}, lambda **a: reader().dense(**a)
    ),
    "jmx.checkpoint.gpt_oss.Reader.top": Row({"sharding": "sharding"}, call=lambda **a: reader().top(**a)),
    "jmx.checkpoint.gpt_oss.Reader.layer": Row(
        {"layer": "index", "sharding": "sharding"}, lambda: {"layer": 0}, lambda **a: reader().layer(**a)
    ),
    "jmx.checkpoint.gpt_oss.Reader.experts": Row(
        {"layer": "index", "layout": "name", "sharding": "sharding"},
        lambda: {"layer": 0},
        lambda **a: reader().experts(**a),
    ),
    "jmx.checkpoint.gpt_oss.Reader.nbytes": Row({"layer": "index or None"}, call=lambda **a: reader().nbytes(**a)),
    "jmx.checkpoint.gpt_oss.Reader.progress": Row(
        {"enabled": "flag", "total": "count or None"}, call=lambda **a: entered(reader().progress(**a))
    ),
    "jmx.checkpoint.gpt_oss.file_name": Row({"name": "name", "form": "name"}, lambda: {"name": "embedding"}),
    "jmx.checkpoint.gpt_oss.is_checkpoint": Row({"path": "path"}),
    "jmx.checkpoint.gpt_oss.tensor_shapes": Row({"config": "object"}),
    "jmx.checkpoint.gpt_oss.convert": Row(
        {"src": "path", "dst": "path", "form": "name", "max_shard_bytes": "size", "progress": "flag"},
        lambda: {"src": TINY, "dst": "/nowhere/at/all"},
    ),
    "jmx.checkpoint.compressed_tensors.Reader": Row(
        {"path": "path", "gate_up_order": "name or None"}, lambda: {"path": TINY}
    ),
    "jmx.checkpoint.compressed_tensors.Reader.dense": Row(
        {"name": "text", "sharding": "sharding"},
        lambda: {"name": "model.layers.0.mlp.gate.weight"},
        lambda **a: golden().dense(**a),
    ),
    "jmx.checkpoint.compressed_tensors.Reader.module_of": Row(
        {"name": "text"}, call=lambda **a: golden().module_of(**a)
    ),
    "jmx.checkpoint.compressed_tensors.Reader.progress": Row(
        {"enabled": "flag", "total": "count or None"}, call=lambda **a: entered(golden().progress(**a))
    ),
    "jmx.checkpoint.compressed_tensors.is_quantized": Row({"path": "path"}),
    "jmx.checkpoint.compressed_tensors.Reader.module": Row({"name": "name"}, call=lambda **a: golden().module(**a)),
    "jmx.checkpoint.compressed_tensors.Reader.weight": Row({"name": "name"}, call=lambda **a: golden().weight(**a)),
    "jmx.checkpoint.compressed_tensors.Reader.view": Row({"name": "text"}, call=lambda **a: golden().view(**a)),
    "jmx.checkpoint.compressed_tensors.Reader.declared_inputs": Row(
        {"layer": "name", "pad": "flag"}, lambda: {"layer": LAYER}, lambda **a: golden().declared_inputs(**a)
    ),
    "jmx.checkpoint.compressed_tensors.Reader.arrays": Row(
        {"layer": "name", "sharding": "sharding"}, lambda: {"layer": LAYER}, lambda **a: golden().arrays(**a)
    ),
    "jmx.checkpoint.compressed_tensors.Reader.experts": Row(
        {"layer": "name", "layout": "name", "sharding": "sharding", "inputs": "flag", "pad": "flag"},
        lambda: {"layer": LAYER},
        lambda **a: golden().experts(**a),
    ),
    "jmx.checkpoint.compressed_tensors.read_quantization": Row({"path": "path"}),
    "jmx.checkpoint.compressed_tensors.convert": Row(
        {"reader": "object", "dst": "path", "max_shard_bytes": "size", "progress": "flag"},
        lambda: {"reader": object.__new__(checkpoint.compressed_tensors.Reader), "dst": "/nowhere/at/all"},
    ),
    "jmx.checkpoint.quantizing.Reader": Row({"path": "path", "format": "named or None"}, lambda: {"path": "/nowhere"}),
    "jmx.checkpoint.quantizing.Reader.dense": Row(
        {"name": "text", "sharding": "sharding"}, lambda: {"name": "lm_head.weight"}, lambda **a: floats().dense(**a)
    ),
    "jmx.checkpoint.quantizing.Reader.experts": Row(
        {"layer": "name", "layout": "name", "sharding": "sharding"},
        lambda: {"layer": LAYER},
        lambda **a: floats().experts(**a),
    ),
    "jmx.checkpoint.quantizing.Reader.floats": Row(
        {"layer": "name", "sharding": "sharding"}, lambda: {"layer": LAYER}, lambda **a: floats().floats(**a)
    ),
    "jmx.checkpoint.quantizing.Reader.progress": Row(
        {"enabled": "flag", "total": "count or None"}, call=lambda **a: entered(floats().progress(**a))
    ),
    "jmx.checkpoint.quantizing.Reader.view": Row({"name": "text"}, call=lambda **a: floats().view(**a)),
    "jmx.checkpoint.quantizing.convert": Row(
        {
            "src": "path",
            "dst": "path",
            "format": "named",
            "report": "path or None",
            "overwrite": "flag",
            "max_shard_bytes": "size",
            "progress": "flag",
        },
        lambda: {"src": TINY, "dst": "/nowhere/at/all", "format": "mxfp4"},
    ),
    # Whole models
    "jmx.models.load": Row(
        {
            "path": "path",
            "format": "named or None",
            "qat": "object or None",
            "declared_inputs": "flag",
            "pad_experts": "flag",
            "dequantize_dense": "flag",
            "dtype": "model dtype",
            "backend": "name or None",
            "mesh": "object or None",
            "axes": "axes",
            "adapter": "path or None",
            "progress": "flag",
        },
        lambda: {"path": TINY},
    ),
    "jmx.models.ModelSplit.of": Row(
        {"mesh": "object", "axes": "axes"}, lambda: {"mesh": jax.make_mesh((1,), ("ep",), devices=jax.devices()[:1])}
    ),
    "jmx.models.save": Row({"path": "path", "model": "object"}, lambda: {"path": "/nowhere/at/all", "model": model()}),
    "jmx.models.restore": Row(
        {
            "path": "path",
            "config": "object",
            "format": "named or None",
            "qat": "object or None",
            "dtype": "model dtype",
            "backend": "name or None",
            "mesh": "object or None",
            "axes": "axes",
        },
        lambda: {"path": "/nowhere/at/all", "config": model().config},
    ),
    "jmx.models.find": Row({"name": "path"}),
    "jmx.models.family_of": Row({"path": "path"}),
    "jmx.models.random_source": Row(
        {"config": "object", "seed": "seed", "format": "named", "routing": "named"}, lambda: {"config": model().config}
    ),
    "jmx.models.from_source": Row(
        {
            "source": "object",
            "dtype": "model dtype",
            "backend": "name or None",
            "dequantize_dense": "flag",
            "split": "object or None",
            "adapters": "object or None",
        },
        lambda: {"source": jmx.models.random_source(model().config)},
    ),
    **{
        f"jmx.models.{family.model.__name__}": Row(
            {
                "config": "object",
                "format": "named or None",
                "qat": "object or None",
                "dtype": "model dtype",
                "backend": "name or None",
                "split": "object or None",
                "rngs": "object",
            },
            lambda family=family: {"config": next(iter(family.published.values())), "rngs": nnx.Rngs(0)},
        )
        for family in jmx.models.FAMILIES.values()
    },
    "jmx.models.Model.empty_cache": Row(
        {"batch": "size", "capacity": "size"},
        lambda: {"batch": 1, "capacity": 16},
        lambda **a: model().empty_cache(**a),
    ),
    "jmx.models.Model.cache_layers": Row(
        {"batch": "size", "capacity": "size"},
        lambda: {"batch": 1, "capacity": 16},
        lambda **a: model().cache_layers(**a),
    ),
    "jmx.models.Model.cache_lengths": Row(
        {"batch": "size"}, lambda: {"batch": 1}, lambda **a: model().cache_lengths(**a)
    ),
    "jmx.models.ProgramStore": Row({"directory": "path"}),
    "jmx.models.Model.logits": Row({"x": "floats"}, call=lambda x: model().logits(x)),
    "jmx.models.Cache.empty": Row(
        {"shapes": "sequence", "dtype": "dtype"}, lambda: {"shapes": [(2, 1, 1, 16, 4)], "dtype": "float32"}
    ),
    "jmx.models.Cache.reserve": Row({"length": "count"}, call=lambda length: cache().reserve(length)),
    "jmx.models.Cache.truncate": Row({"lengths": "rows"}, call=lambda lengths: cache().truncate(lengths)),
    "jmx.models.Runner": Row({"model": "object", "store": "object or None"}, lambda: {"model": model()}),
    "jmx.models.Runner.prefill": Row(
        {"prompts": "prompts", "cache": "object or None", "all_logits": "flag"},
        lambda: {"prompts": [[1, 2]]},
        lambda **a: runner().prefill(**a),
    ),
    "jmx.models.Runner.extend": Row(
        {"tokens": "prompts", "cache": "object"},
        lambda: {"tokens": [[1]], "cache": cache()},
        lambda **a: runner().extend(**a),
    ),
    "jmx.models.Runner.decode": Row(
        {"tokens": "integers", "cache": "object"},
        lambda: {"tokens": jnp.zeros(1, jnp.int32), "cache": cache()},
        lambda **a: runner().decode(**a),
    ),
    "jmx.models.Runner.generate": Row(
        GENERATING | {"cache": "object or None"},
        lambda: {"prompts": [[1]], "sampler": jmx.models.Sampler(), "max_new_tokens": 1},
        lambda **a: runner().generate(**a),
    ),
    "jmx.models.Runner.warm_up": Row(
        GENERATING,
        lambda: {"prompts": [[1]], "sampler": jmx.models.Sampler(), "max_new_tokens": 1},
        lambda **a: runner().warm_up(**a),
    ),
    "jmx.models.Sampler": Row(
        {
            **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), "number"),
            **dict.fromkeys(("presence_penalty", "frequency_penalty"), "number"),
            "seed": "seed",
            "top_k": "size or None",
        }
    ),
    "jmx.models.Sampler.counts": Row(
        {"prompts": "prompts", "vocab_size": "size"},
        lambda: {"prompts": [[1]], "vocab_size": 8},
        lambda **a: jmx.models.Sampler(presence_penalty=1.0).counts(**a),
    ),
    "jmx.models.TokenCounts.of": Row(
        {"prompts": "prompts", "vocab_size": "size"}, lambda: {"prompts": [[1]], "vocab_size": 8}
    ),
    "jmx.models.TokenCounts.add": Row(
        {"tokens": "integers"}, call=lambda tokens: jmx.models.TokenCounts.of([[1]], 8).add(tokens)
    ),
    "jmx.checkpoint.orbax.save": Row(
        {"path": "path", "module": "object"}, lambda: {"path": "/nowhere/at/all", "module": layer()}
    ),
    "jmx.checkpoint.orbax.restore": Row(
        {"path": "path", "module": "object"}, lambda: {"path": "/nowhere", "module": layer()}
    ),
}
KINDS |= {
    "number or None": KINDS["number"][1:],
    "dtype or None": KINDS["dtype"][1:],
    "size or None": KINDS["size"][1:],
    "mapping": [value for value in KINDS["object"] if not isinstance(value, dict)],
    "count or None": KINDS["count"][1:],
    "shape or None": KINDS["shape"][1:],
    "model dtype": [*KINDS["dtype"], jnp.float16],
    "seed": [*KINDS["count"], 1 << 32],
    "prompts": [*KINDS["sequence"], "ab", b"ab", [], [[]], [[1], []], [3], [2.5], [["x"]], [[2.5]], [[True]], [[-1]]],
    "rows": [*KINDS["sequence"], [2.5], [True], [-1], [10**6]],
    "index": [*KINDS["count"], 10**6],
    "index or None": [*KINDS["count"][1:], 10**6],
    "names": [None, "x", 3, ["x"], (3,), ("x", None), {}, Opaque()],
    "sequence or None": ["x", 3, {}, Opaque(), [3], [None]],
    "subject": [None, "x", 3, [], {}, Opaque(), jmx.nnx.MoE],
    UNCHECKED: [],
}
CONTAINER = "a pytree, which jax makes of anything: its contents are checked where it is used"
MADE = "jmx makes it, and nobody else"
EXEMPT = {
    "jmx.Activation": "a base class, without arguments",
    "jmx.BlockScaled": CONTAINER,
    "jmx.lora.Adapter": CONTAINER,
    "jmx.lora.Adapters": CONTAINER,
    "jmx.lora.Adapters.padded": "of checked experts, by a call",
    "jmx.lora.Requantized": MADE,
    "jmx.Experts": CONTAINER,
    "jmx.Groups": CONTAINER,
    "jmx.Logits": CONTAINER,
    "jmx.Routing": CONTAINER,
    "jmx.Explanation": MADE,
    "jmx.Format": MADE,
    "jmx.NoBackendError": MADE,
    "jmx.Reason": "an enum, whose own error names it",
    "jmx.Rejection": "printed",
    "jmx.Selection": MADE,
    "jmx.training.MasterExperts": CONTAINER,
    "jmx.Experts.layer": "tests/test_experts.py has it",
    "jmx.ShardedExperts": CONTAINER,
    "jmx.ShardedExperts.part": "of a device's own number",
    **{f"jmx.Split.{name}": "of fields and meshes that a call has" for name in ("check_sizes", "mesh_of", "names")},
    "jmx.checkpoint.CheckpointError": "printed",
    "jmx.checkpoint.compressed_tensors.Layer": MADE,
    "jmx.checkpoint.compressed_tensors.Module": MADE,
    "jmx.checkpoint.compressed_tensors.Quantization": MADE,
    "jmx.checkpoint.compressed_tensors.Scheme": MADE,
    "jmx.checkpoint.gpt_oss.Config": MADE,
    "jmx.checkpoint.gpt_oss.Layer": MADE,
    "jmx.checkpoint.quantizing.FloatExperts": MADE,
    "jmx.checkpoint.quantizing.Layer": MADE,
    "jmx.checkpoint.quantizing.Errors": MADE,
    "jmx.checkpoint.quantizing.Report": MADE,
    "jmx.checkpoint.gpt_oss.Reader.check_scales": "of numpy arrays that it reads itself",
}
# What subclasses of `jmx.models.Model` define, or runners call, of arrays that are traced.
HOOKS = (
    *("angles", "embed", "make_attention", "make_block", "make_moe", "make_shared_experts"),
    *("by_row", "put_rows", "finish", "whole", "check_rows"),
)
OF_SPLITS = ("check", "check_rows", "mark_sums", "place", "reading", "sharding", "spec", "ways")
EXEMPT |= {
    "jmx.models.Family": MADE,
    "jmx.models.Generation": MADE,
    "jmx.models.LogProbabilities": CONTAINER,
    "jmx.models.MoERecord": CONTAINER,
    "jmx.models.TokenCounts": CONTAINER,
    "jmx.models.Cache": "made by `Cache.empty`, and by a runner",
    "jmx.models.Model": "its families make it",
    "jmx.models.ModelSplit": "made by `ModelSplit.of`",
    **{f"jmx.models.ModelSplit.{name}": "of what a model asks" for name in OF_SPLITS},
    **{f"jmx.models.ProgramStore.{name}": "of keys that it makes" for name in ("has", "key", "load", "save")},
    **{f"jmx.models.Model.{hook}": "no user calls it" for hook in HOOKS},
}
EXEMPT |= {
    f"jmx.checkpoint.{family}.Reader.read_ahead": "of what a loader is about to read"
    for family in ("compressed_tensors", "gpt_oss", "quantizing")
}
FLAX = {"parent", "name"}  # which every Linen module has


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public callable that takes an argument, by its full name."""
    places = {"jmx": (jmx, jmx.__all__), "jmx.nnx": (jmx.nnx, ["MoE"]), "jmx.linen": (jmx.linen, ["MoE"])}
    for module in ("gpt_oss", "compressed_tensors", "quantizing", "orbax", "peft"):
        found = getattr(checkpoint, module)
        names = getattr(found, "__all__", ["save", "restore"])
        places[f"jmx.checkpoint.{module}"] = (found, [n for n in names if n != "CheckpointError"])
    places["jmx.models"] = (jmx.models, jmx.models.__all__)
    places["jmx.training"] = (jmx.training, jmx.training.__all__)
    places["jmx.lora"] = (jmx.lora, jmx.lora.__all__)
    places["jmx.checkpoint"] = (checkpoint, ["CheckpointError"])
    for place, (module, names) in places.items():
        for name in names:
            value = getattr(module, name)
            if inspect.isclass(value):
                yield from of_class(f"{place}.{name}", value)
            elif callable(value) and not isinstance(value, jmx.Activation | jmx.Format):
                yield f"{place}.{name}", value


def of_class(name: str, value: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield name, value
    if EXEMPT.get(name) == MADE and value is not jmx.Format:
        return
    for attribute in dir(value):
        found = inspect.getattr_static(value, attribute)
        is_call = attribute == "__call__" and value in (jmx.nnx.MoE, jmx.linen.MoE)
        if attribute.startswith("_") and not is_call:
            continue
        if issubclass(value, jmx.models.Model) and value is not jmx.models.Model:
            continue  # those of `Model` are its own, and others are `HOOKS`
        is_method = isinstance(found, classmethod | staticmethod) or inspect.isfunction(found)
        if is_method and (inspect.unwrap(getattr(value, attribute)).__module__ or "").startswith("jmx"):
            yield f"{name}.{attribute}", getattr(value, attribute)


def parameters(name: str, function: Callable[..., Any]) -> set[str]:
    ignored = {"self"} | (FLAX if name == "jmx.linen.MoE" else set())
    # Flax's metaclass takes anything for an `nnx.Module`, and hands it on.
    is_module = inspect.isclass(function) and issubclass(function, nnx.Module)
    signature = inspect.signature(function.__init__ if is_module else function)
    return {*signature.parameters} - ignored


def missing() -> dict[str, set[str]]:
    """Parameters of public callables that no row has, by the callable."""
    found = {}
    for name, function in public():
        if name in EXEMPT:
            continue
        lacking = parameters(name, function) - {*(ROWS[name].kinds if name in ROWS else ())}
        if lacking:
            found[name] = lacking
    return found


def test_every_argument_of_every_public_callable_has_a_row():
    assert missing() == {}
    known = dict(public())
    assert {*ROWS, *EXEMPT} <= {*known}
    assert {
        n: {*row.kinds} - parameters(n, known[n]) for n, row in ROWS.items() if {*row.kinds} - parameters(n, known[n])
    } == {}


def test_a_new_public_callable_needs_a_row(monkeypatch):
    def novel(x, y=1):
        return x, y

    monkeypatch.setattr(jmx, "novel", novel, raising=False)
    monkeypatch.setattr(jmx, "__all__", [*jmx.__all__, "novel"])
    monkeypatch.setattr(jmx.Experts, "novel", novel, raising=False)
    monkeypatch.setattr(novel, "__module__", "jmx.experts")
    assert missing() == {"jmx.novel": {"x", "y"}, "jmx.Experts.novel": {"x", "y"}}


def says(message: str, value: Any) -> bool:
    """Whether a message shows a value, or what is wrong of it: its type, dtype or shape, or that of what it holds."""
    parts = [repr(value), str(value), type(value).__name__]
    if isinstance(value, np.ndarray | jax.Array):
        parts += [str(value.dtype), str(tuple(value.shape))]
    if isinstance(value, list | tuple):
        inner = [each for item in value for each in (item if isinstance(item, list) else [])]
        parts += [part for item in (*value, *inner) for part in (repr(item), type(item).__name__)]
    if isinstance(value, dict):
        parts += [part for item in value.values() for part in (repr(item), type(item).__name__)]
    if callable(value):
        parts.append(getattr(value, "__name__", "no name"))
    return any(part in message for part in parts)


def fault_of(row: Row, function: Callable[..., Any], argument: str, value: Any) -> str | None:
    """What is wrong with the error for a wrong value; None if it is right."""
    call = function if row.call is None else row.call
    try:
        call(**row.given() | {argument: value})
    except (TypeError, ValueError) as error:
        message, named = str(error), row.names.get(argument, argument)
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        assert place is not None
        if ROOT not in pathlib.Path(place.tb_frame.f_code.co_filename).parents:
            return f"not jmx's own: {type(error).__name__}: {message[:150]}"
        if not re.search(rf"`{re.escape(named)}[`.\[]", message):
            return f"does not name it: {message[:150]}"
        return None if says(message, value) else f"does not show it: {message[:150]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    return "accepted"


@pytest.mark.parametrize("name", ROWS)
def test_wrong_arguments_are_named(name):
    row, function = ROWS[name], dict(public())[name]
    faults = [
        f"{argument} = {value!r:.60}: {fault}"
        for argument, kind in row.kinds.items()
        for value in KINDS[kind]
        if (fault := fault_of(row, function, argument, value))
    ]
    assert not faults, "\n".join(faults)
