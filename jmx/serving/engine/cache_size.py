"""How many tokens the cache of an engine has place for."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jmx.checkpoint import peft
from jmx.models import memory
from jmx.models.decoder import Model
from jmx.models.loading import shapes_of
from jmx.models.model_split import ModelSplit
from jmx.models.sources.protocol import Source
from jmx.serving.engine.limits import Limits, Pools

# Of the memory that weights leave on a GPU; the rest is for what XLA and kernels allocate.
_SHARE = 0.85
# On a CPU the cache is part of the machine's memory, which others use, too.
_MOST_ON_CPU = 65536


def automatic_cache_tokens(
    source: Source,
    limits: Limits,
    dtype: jax.typing.DTypeLike,
    split: ModelSplit | None = None,
    adapters: peft.Reader | None = None,
) -> int:
    """The tokens of a cache for all users, or as many as the device has memory for beside the weights.

    Each group of devices that has requests of its own has an equal part of them.

    Args:
        source: of the weights; only its shapes are used.
        limits: of the engine; `cache_tokens` does not count.
        dtype: of activations and of the cache.
        split: how a mesh divides the model; None: it is on one device.
        adapters: of the experts; None: there are none.

    Raises:
        MemoryError: there is no memory for the weights and one request.
    """
    devices = [jax.devices()[0]] if split is None else split.mesh.local_devices
    device, groups = devices[0], 1 if split is None else split.ways("token")
    limits = replace(limits, cache_tokens=max(limits.cache_tokens, groups * limits.max_length)).of_group(groups)
    model = shapes_of(source.config, dtype=jnp.dtype(dtype), split=split)
    wanted = limits.max_users * limits.max_length
    options: dict[str, Any] = {"dtype": jnp.dtype(dtype), "split": split, "adapters": adapters}
    weights = memory.needed(source, [limits.page] * groups, 1, **options).weights
    has = memory.available(device)
    if device.platform == "cpu":
        wanted = max(limits.max_length, min(wanted, _MOST_ON_CPU // groups))
        has = None if has is None else has // len(devices)  # they are parts of one machine's memory
    if has is None:
        return groups * wanted
    fixed, each = cache_bytes(model, limits)
    left = int((has - weights) * _SHARE) - fixed
    if left < each * limits.max_length:
        one = fixed + each * limits.max_length
        smaller = "a smaller --max-length, --max-users or --prompt-tokens" if weights < has else "a smaller model"
        helps = "; or ".join([smaller, *memory.remedies(device, split)])
        raise MemoryError(
            f"the model needs {weights / 1e9:.2f} GB for its weights and {one / 1e9:.2f} GB for a request of "
            f"{limits.max_length} tokens, and {device.platform} {device.id} has {has / 1e9:.2f} GB free; "
            f"what helps: {helps}"
        )
    return groups * min(wanted, left // each)


def cache_bytes(model: Model, limits: Limits) -> tuple[int, int]:
    """Bytes that an engine needs whatever its cache holds (sliding layers, logits, histories), and bytes of each token
    of layers that attend to all tokens. Over a mesh, those of each device, with the limits of its group."""
    pools, item = Pools.of(model), model.dtype.itemsize
    settings = limits.settings(pools.windows)
    fixed = each = 0
    for layer, pool in zip(model.layers, pools.of_layer, strict=True):
        its = math.prod(layer.attention.cache_shape(1, 1)) * item
        if model.split is not None and "heads" in layer.attention.cache_axes:
            its //= model.split.ways("heads")
        if pools.windows[pool] is None:
            each += its
        else:
            fixed += its * limits.page * (settings.pages[pool] + 1)
    vocabulary, tokens = model.config.vocab_size, limits.max_users + limits.page * limits.max_blocks
    logits = 4 * vocabulary * (limits.max_users + limits.max_blocks)
    groups = 1 if model.split is None else model.split.ways("token")
    history = 5 * vocabulary * limits.max_users * groups  # whole on each device
    return fixed + 3 * logits + history + 8 * tokens * model.config.hidden_size * item, each
