"""The attention of published models that `benchmarks/attention.py` times, and the systems that compute it.

A system's `build` returns, for a case, how its inputs are arranged and the function that is timed. It raises an error
where the system cannot run the case.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmx.models.attention.functions import NO_SINK, attend, attend_cache, attend_latents, attend_prompt

BF16 = jnp.bfloat16


class Model(NamedTuple):
    """Sizes of one layer's attention. `rank`: the values in a latent, of `width` channels; 0 without latents."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    windows: tuple[int | None, ...] = (None,)
    sinks: bool = False
    width: int = 0
    rank: int = 0


MODELS = {
    "gpt-oss": Model(64, 8, 64, 64, (None, 128), True),
    "qwen3-30b-a3b": Model(32, 4, 128, 128),
    "mixtral-8x7b": Model(32, 8, 128, 128),
    "deepseek-v2-lite": Model(16, 16, 192, 128, width=576, rank=512),
    "deepseek-v3": Model(128, 128, 192, 128, width=576, rank=512),
}
PROMPTS, CONTEXTS, BATCHES = (1024, 4096), (1024, 8192), (1, 8, 64)


class Case(NamedTuple):
    """One attention: of prompts of `length` tokens, or of one token a row over caches of `length` tokens."""

    model: str
    kind: Literal["prompt", "step"]
    batch: int
    length: int
    window: int | None

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        return f"{self.model} {self.kind} {self.batch} x {self.length}{window}"

    @property
    def sizes(self) -> Model:
        return MODELS[self.model]

    @property
    def latent(self) -> bool:
        return self.kind == "step" and self.sizes.rank > 0

    @property
    def scale(self) -> float:
        return self.sizes.key_dim**-0.5

    @property
    def seen(self) -> int:
        """Pairs of a query and a key that it attends to, of one row and head."""
        window = self.length if self.window is None else min(self.window, self.length)
        if self.kind == "step":
            return window
        return window * (window + 1) // 2 + (self.length - window) * window

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of queries, and of keys and values or of latents."""
        model, batch, length = self.sizes, self.batch, self.length
        if self.kind == "prompt":
            rows = (batch, length)
            keys, values = (*rows, model.kv_heads, model.key_dim), (*rows, model.kv_heads, model.value_dim)
            return (*rows, model.heads, model.key_dim), keys, values
        if self.latent:
            return (batch, model.heads, model.width), (batch, length, model.width)
        return (batch, model.heads, model.key_dim), (2, batch, model.kv_heads, length, model.key_dim)

    @property
    def flops(self) -> int:
        model = self.sizes
        channels = model.width + model.rank if self.latent else model.key_dim + model.value_dim
        return 2 * self.batch * model.heads * self.seen * channels

    @property
    def bytes(self) -> int:
        """Read and written at least once: queries, the keys and values that are seen, and results."""
        model = self.sizes
        size = 2 * sum(int(np.prod(shape)) for shape in self.shapes[1:])
        if self.kind == "step":
            size = size * self.seen // self.length
        queries = int(np.prod(self.shapes[0]))
        return size + 2 * queries + 2 * queries // self.shapes[0][-1] * (model.rank if self.latent else model.value_dim)


def all_cases() -> list[Case]:
    """Models in order, prompts before steps. Those with latents come last."""
    found = []
    for name, model in MODELS.items():
        for window in model.windows:
            found += [Case(name, "prompt", 1, length, window) for length in PROMPTS]
            found += [Case(name, "step", batch, length, window) for length in CONTEXTS for batch in BATCHES]
    return found


class Inputs(NamedTuple):
    """Arrays of `Case.shapes`; sinks float32 (heads,) or None; the position of each row's query, for steps."""

    arrays: tuple[jax.Array, ...]
    sinks: jax.Array | None
    positions: jax.Array


class Built(NamedTuple):
    """How a system computes a case.

    Args:
        arrange: inputs, or their shapes, in the system's own order of axes; not timed.
        call: the function of these that is timed.
        note: what is not as in the case.
    """

    arrange: Callable[[Inputs], Any]
    call: Callable[..., jax.Array]
    note: str = ""


def _as_they_are(inputs: Inputs) -> Any:
    return inputs


def jmx_kernels(case: Case) -> Built:
    """What jmx chooses."""

    def call(inputs: Inputs) -> jax.Array:
        query, *rest = inputs.arrays
        if case.kind == "prompt":
            keys, values = rest
            return attend_prompt(query, keys, values, inputs.sinks, case.window, case.scale)
        query = query[:, None]
        if case.latent:
            latents = rest[0][None, :, None]
            return attend_latents(query, latents, inputs.positions, case.sizes.rank, case.scale)[:, 0]
        return attend_cache(query, rest[0], inputs.sinks, inputs.positions, case.window)[:, 0]

    return Built(_as_they_are, call)


def jmx_xla(case: Case) -> Built:
    """The plain code of jmx."""

    def call(inputs: Inputs) -> jax.Array:
        query, *rest = inputs.arrays
        sinks = jnp.full(case.sizes.heads, NO_SINK, jnp.float32) if inputs.sinks is None else inputs.sinks
        if case.kind == "prompt":
            keys, values = (array.swapaxes(1, 2) for array in rest)
            starts = jnp.zeros(case.batch, jnp.int32)
            return attend(query, keys, values, sinks, starts, case.window, case.scale)
        keys, values = (rest[0][:, None],) * 2 if case.latent else rest[0]
        out = attend(query[:, None], keys, values, sinks, inputs.positions, case.window, case.scale)[:, 0]
        return out[..., : case.sizes.rank] if case.latent else out

    return Built(_as_they_are, call)


def _by_row(case: Case, inputs: Inputs, *, same_width: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values (B, T or 1 or C, heads, channels); values as wide as keys, with zeros, if asked for."""
    query, *rest = inputs.arrays
    if case.kind == "prompt":
        keys, values = rest
    elif case.latent:
        query, keys = query[:, None], rest[0][:, :, None]
        values = keys if same_width else keys[..., : case.sizes.rank]
    else:
        query = query[:, None]
        keys, values = rest[0].swapaxes(2, 3)
    if same_width and values.shape[-1] < keys.shape[-1]:
        missing = keys.shape[-1] - values.shape[-1]
        values = jnp.pad(values, ((0, 0), (0, 0), (0, 0), (0, missing)))
    return query, keys, values


def _dot_product_attention(case: Case, function: Callable[..., jax.Array], same_width: bool) -> Built:
    """By a function with the arguments of `jax.nn.dot_product_attention`."""

    def arrange(inputs: Inputs) -> Any:
        return *_by_row(case, inputs, same_width=same_width), inputs.positions

    def call(arguments: Any) -> jax.Array:
        query, keys, values, positions = arguments
        left = None if case.window is None else (case.window - 1, 0)
        options: dict[str, Any] = {"scale": case.scale}
        if case.kind == "prompt":
            options |= {"is_causal": True, "local_window_size": left}
        elif case.window is None:
            options |= {"key_value_seq_lengths": positions + 1}
        else:
            raise ValueError("windows of caches are not among its arguments")
        out = function(query, keys, values, **options)
        return out if case.kind == "prompt" else out[:, 0]

    notes = ["no sinks"] if case.sizes.sinks else []
    notes += ["values padded"] if same_width and case.sizes.rank else []
    return Built(arrange, call, ", ".join(notes))


def xla(case: Case) -> Built:
    """jax's own plain code."""
    return _dot_product_attention(
        case, lambda *a, **o: jax.nn.dot_product_attention(*a, implementation="xla", **o), True
    )


def cudnn(case: Case) -> Built:
    """cuDNN, through jax."""
    return _dot_product_attention(
        case, lambda *a, **o: jax.nn.dot_product_attention(*a, implementation="cudnn", **o), True
    )


def tokamax(case: Case) -> Built:
    """tokamax's kernels in Mosaic GPU; an ImportError where it is not installed."""
    import tokamax  # pyright: ignore[reportMissingImports]

    return _dot_product_attention(
        case, lambda *a, **o: tokamax.dot_product_attention(*a, implementation="mosaic", **o), False
    )


def jax_mosaic(case: Case) -> Built:
    """jax's example of a Pallas Mosaic GPU kernel, for float16."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    if case.kind != "prompt" or case.window is not None or case.sizes.key_dim != case.sizes.value_dim:
        raise ValueError("has prompts without windows only, and values of the keys' size")
    stages = 4 if case.sizes.key_dim == 64 else 2
    config = attention_mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=stages, causal=True)

    def arrange(inputs: Inputs) -> Any:
        query, keys, values = (array.astype(jnp.float16) for array in inputs.arrays)
        return (query * case.scale).astype(jnp.float16), keys, values

    note = "float16, no sinks" if case.sizes.sinks else "float16"
    return Built(arrange, lambda arguments: attention_mgpu.attention(*arguments, config), note)


def jax_triton(case: Case) -> Built:
    """jax's examples of Pallas Triton kernels."""
    from jax.experimental.pallas.ops.gpu import attention, decode_attention

    if case.window is not None or case.latent or case.sizes.rank:
        raise ValueError("has neither windows nor sizes that are no powers of two")
    group = case.sizes.heads // case.sizes.kv_heads

    def arrange(inputs: Inputs) -> Any:
        query, keys, values = _by_row(case, inputs, same_width=True)
        if case.kind == "prompt":
            return query, jnp.repeat(keys, group, axis=2), jnp.repeat(values, group, axis=2)
        return query[:, 0], keys, values, inputs.positions + 1

    def call(arguments: Any) -> jax.Array:
        if case.kind == "prompt":
            return attention.mha(*arguments, None, sm_scale=case.scale, causal=True)
        query, keys, values, lengths = arguments
        return decode_attention.gqa(query, keys, values, kv_seq_len=lengths, sm_scale=case.scale)

    notes = ["no sinks"] if case.sizes.sinks else []
    notes += ["keys repeated"] if case.kind == "prompt" else []
    return Built(arrange, call, ", ".join(notes))


SYSTEMS: dict[str, Callable[[Case], Built]] = {
    "jmx": jmx_kernels,
    "jmx_xla": jmx_xla,
    "xla": xla,
    "cudnn": cudnn,
    "jax_mosaic": jax_mosaic,
    "jax_triton": jax_triton,
    "tokamax": tokamax,
}


def expected(case: Case, row: Inputs, sinks: bool, queries: Sequence[int]) -> np.ndarray:
    """The result of one row, of numpy arrays, in float32: (1, heads, V); for prompts (queries, heads, V) of these."""
    wide = Inputs(tuple(array.astype(np.float32) for array in row.arrays), row.sinks, row.positions)
    query, keys, values = (array[0] for array in _by_row(case, wide, same_width=False))
    prompt, kv_heads, heads = case.kind == "prompt", keys.shape[1], case.sizes.heads
    at = np.asarray(queries if prompt else row.positions)
    rows = np.asarray(query[at] if prompt else query).reshape(len(at), kv_heads, heads // kv_heads, -1)
    rows = rows.transpose(1, 2, 0, 3).reshape(kv_heads, -1, rows.shape[-1])
    scores = (case.scale * rows @ keys.transpose(1, 2, 0)).reshape(heads, len(at), -1)
    distance = at[:, None] - np.arange(len(keys))
    scores = np.where((distance >= 0) & (distance < (case.window or len(keys))), scores, -np.inf)
    sink = np.asarray(row.sinks) if sinks and row.sinks is not None else np.full(heads, NO_SINK, np.float32)
    peak = np.maximum(scores.max(-1), sink[:, None])[..., None]
    powers = np.exp(scores - peak)
    weights = powers / (powers.sum(-1, keepdims=True) + np.exp(sink[:, None, None] - peak))
    out = weights.reshape(kv_heads, -1, len(keys)) @ values.transpose(1, 0, 2)
    return out.reshape(heads, len(at), -1).swapaxes(0, 1)
