"""Device memory: what a model and a generation need, computed before anything is read, and what there is."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jmx
import jmx.nnx
from jmx.backends import resolve_layout
from jmx.checkpoint import ExpertLayer, peft
from jmx.models.adapters import nbytes as adapter_bytes
from jmx.models.cache import bucket
from jmx.models.decoder import Model
from jmx.models.float_experts import format_of
from jmx.models.loading import num_kept, shapes_of
from jmx.models.model_split import ModelSplit
from jmx.models.per_device import local_size
from jmx.models.runner import CHUNK
from jmx.models.sources.protocol import Source
from jmx.util.checks import check_int

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


class Needs(NamedTuple):
    """Bytes on a device.

    Args:
        weights: of the model, in the layout of this machine's backends, but for the scales of those outside experts
            that stay in FP8.
        cache: of keys and values, or what else attention keeps, of all rows.
        activations: logits and the residual stream of the prompts. What kernels and XLA allocate besides is not known
            before they are compiled, so that the sum is a lower bound.
    """

    weights: int
    cache: int
    activations: int

    @property
    def total(self) -> int:
        return sum(self)


def needed(
    source: Source,
    lengths: Sequence[int],
    max_new_tokens: int,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    all_logits: bool = False,
    split: ModelSplit | None = None,
    adapters: peft.Reader | None = None,
) -> Needs:
    """What `from_source` and then `Runner.generate` need at least, of the shapes alone: nothing is read or computed.

    Over a mesh, on each of its devices.

    Args:
        source: of the weights.
        lengths: of the prompts, in tokens, each at least 1.
        max_new_tokens: of each, at least 1.
        dtype: of activations and dense weights.
        all_logits: whether logits of all positions of the prompts are computed, not of the last ones only.
        split: how a mesh divides the model; None: it is on one device.
        adapters: of the experts; None: there are none.

    Raises:
        TypeError: lengths or `max_new_tokens` are not integers.
        ValueError: there is no prompt, or one of these is less than 1; or a mesh does not divide the model or the rows.
    """
    check_int("max_new_tokens", max_new_tokens, least=1)
    if not len(lengths):
        raise ValueError("`lengths` must be of at least one prompt")
    for number, length in enumerate(lengths):
        check_int(f"lengths[{number}]", length, least=1)
    model = shapes_of(source.config, dtype=dtype, split=split)
    model.check_rows("lengths", len(lengths))
    rows, longest = len(lengths), bucket(max(lengths))
    cache = model.cache_layers(rows, _capacity(max(lengths), max_new_tokens))
    rows //= 1 if split is None else split.ways("token")
    logits = 4 * rows * source.config.vocab_size * (longest if all_logits else 1)
    residual = rows * longest * source.config.hidden_size * model.dtype.itemsize
    weights = _weights(model, source) + (0 if adapters is None else adapter_bytes(adapters, dtype, split))
    return Needs(weights, sum(map(_on_a_device, cache)), logits + residual)


def _on_a_device(array: jax.ShapeDtypeStruct) -> int:
    shape = array.shape if array.sharding is None else array.sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize


def _capacity(longest: int, max_new_tokens: int) -> int:
    """Tokens of a row of the cache at the end of `Runner.generate`, which runs whole chunks."""
    chunks = -(-(max_new_tokens - 1) // CHUNK)
    return bucket(max(bucket(longest), longest + chunks * CHUNK))


def _weights(model: Model, source: Source) -> int:
    kinds: dict[tuple[Any, ...], int] = {}
    total = sum(local_size(model.split, its) * its.dtype.itemsize for _, its in nnx.to_flat_state(nnx.state(model)))
    total -= num_kept(model, source) * (model.dtype.itemsize - 1)  # those are in 8 bits
    ways = (1, 1) if model.split is None else (model.split.ways("expert"), model.split.ways("intermediate"))
    for number, layer in source.layers.items():
        kind = _kind(layer)
        if kind not in kinds:
            kinds[kind] = _expert_bytes(*kind, model.dtype, *ways)
        moe = model.layers[number].moe  # with experts of another format, which do not count
        total += kinds[kind] - _nbytes(nnx.state(moe)) + _nbytes(nnx.state(moe, jmx.nnx.CorrectionBias))
    return total


def _kind(layer: ExpertLayer) -> tuple[int, int, int, jmx.Format | None, str | None, bool]:
    sizes = layer.num_experts, layer.hidden_size, layer.intermediate_size
    return *sizes, layer.format, layer.gate_up_order, layer.has_bias


def _expert_bytes(
    num_experts: int,
    hidden: int,
    inner: int,
    format: jmx.Format | None,
    order: str | None,
    bias: bool,
    dtype: jnp.dtype,
    parts: int,
    shards: int,
) -> int:
    """Bytes of a layer's experts on one device, which has one of `parts` of them, and one of `shards` of each."""
    num_experts //= parts
    format = format_of(dtype) if format is None else format
    layout = resolve_layout("auto", jmx.Environment.probe(), format)

    def experts(key: jax.Array) -> jmx.Experts:
        sizes, made = (
            (num_experts, *map(format.whole_size, (hidden, inner))),
            {"format": format, "bias": bias, "bias_dtype": dtype},
        )
        whole = jmx.Experts.random(key, *sizes, gate_up_order=order, **made)
        return (whole if shards == 1 else jmx.ShardedExperts.of(whole, shards).shard(0)).prepare(layout)

    arrays = jax.eval_shape(experts, jax.random.key(0)).arrays()
    scales = sum(its.size for name, its in arrays.items() if name in ("gate_up_scales", "down_scales"))
    least = min(dtype.itemsize for dtype in format.scale_dtypes)  # files have any of them
    return _nbytes(arrays) - scales * (format.scale_dtype.itemsize - least)


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def available(device: Any) -> int | None:
    """Bytes that this process can still allocate on a device, or None if that is not known.

    On a CPU these are what the machine, or the limit of its container, has left.
    """
    if device.platform != "cpu":
        stats: Mapping[str, int] = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return None if limit is None else limit - stats.get("bytes_in_use", 0)
    left = [_memory_of_host(), _memory_of_container()]
    return min((size for size in left if size is not None), default=None)


def remedies(device: Any, split: ModelSplit | None) -> list[str]:
    """What gives a command more memory for the same work, for its error.

    Args:
        device: that has too little.
        split: how a mesh divides the model; None: it is on one device.
    """
    found = [] if split is not None else ["more devices (--mesh ep=2)"]
    if device.platform == "gpu":
        found.append("a larger XLA_PYTHON_CLIENT_MEM_FRACTION (by default jax takes 0.75 of the device)")
    return found


def _memory_of_host() -> int | None:
    try:
        found = {line.split(":")[0]: line.split()[1] for line in _MEMINFO.read_text().splitlines()}
        return 1024 * int(found["MemAvailable"])
    except (OSError, ValueError, LookupError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _memory_of_container() -> int | None:
    """What control group version 2 leaves to this process, not counting pages of files, which are given back."""
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        found = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return limit - used + int(found["file"])
    except (OSError, ValueError, LookupError):  # there is no limit, or another system
        return None
