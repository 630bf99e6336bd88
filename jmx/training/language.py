"""Whole models in training: the loss of next tokens, bits per byte, and the same weights computed in other dtypes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jmx.checkpoint.quantizing import FloatExperts
from jmx.models import Model, MoERecord
from jmx.models.decoder import DTYPES
from jmx.numerics.gate_up import split_gate_up
from jmx.qat import MasterExperts
from jmx.util.checks import check_array, check_dtype, check_instance, check_int
from jmx.util.typing import Array, Float32, Int32


def next_token_losses(
    model: Model, windows: Int32[Array, "B window"], *, records: list[MoERecord] | None = None
) -> Float32[Array, "B T"]:
    """The cross-entropy in nats of each token of windows (B, T + 1) but the first ones.

    Args:
        model: of `jmx.models`.
        windows: token ids, T at least 1; ids outside the vocabulary are not checked.
        records: a list to which each layer's `MoERecord` is appended, with the router's logits.

    Raises:
        TypeError, ValueError: arguments that are not as above.
    """
    check_instance("model", model, Model, "a model of jmx.models")
    check_array("windows", windows, jnp.integer)
    if len(windows.shape) != 2 or windows.shape[1] < 2:
        raise ValueError(f"`windows` (shape {tuple(windows.shape)}) must be (B, T + 1), with T at least 1")
    check_instance("records", records, list | None, "a list, or None")
    tokens, targets = windows[:, :-1], windows[:, 1:]
    x, _ = model(tokens, None, model.empty_cache(*tokens.shape).layers, records=records)
    logits = model.logits(x)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def bits_per_byte(model: Model, tokens: Int32[Any, " N"], num_bytes: int, length: int) -> float:
    """The cross-entropy of a text's tokens after the first one, in bits, over its bytes.

    The text is read in windows. Each of its tokens is predicted from at least half a window of tokens before it, except
    in the first window.

    Args:
        model: of `jmx.models`.
        tokens: of the text, at least two, on the host.
        num_bytes: of the text.
        length: tokens that are predicted in a window.

    Raises:
        TypeError, ValueError: arguments that are not as above.
    """
    check_instance("model", model, Model, "a model of jmx.models")
    check_array("tokens", tokens, jnp.integer)
    if len(tokens.shape) != 1 or len(tokens) < 2:
        raise ValueError(f"`tokens` (shape {tuple(tokens.shape)}) must be (N,), with N at least 2")
    check_int("num_bytes", num_bytes, least=1)
    check_int("length", length, least=1)
    evaluate = nnx.jit(next_token_losses)
    tokens, nats, stride = np.asarray(tokens), 0.0, max(1, length // 2)
    for first in range(0, len(tokens) - 1, stride):
        window = np.pad(tokens[first : first + length + 1], (0, length + 1))[: length + 1]
        found = np.asarray(evaluate(model, jnp.asarray(window[None])))[0, : len(tokens) - 1 - first]
        nats += found[length - stride if first else 0 :].sum()
    return float(nats / np.log(2) / num_bytes)


def in_dtype(model: Model, dtype: Any) -> Model:
    """The model with activations, dense weights and biases in another dtype; master weights keep theirs.

    Args:
        model: of `jmx.models`, on one device, without adapters.
        dtype: bfloat16 or float32.

    Raises:
        TypeError, ValueError: arguments that are not as above.
    """
    _check(model)
    made = _like(model, check_dtype("dtype", dtype, *DTYPES), format=model.format, qat=model.qat)
    new, old = nnx.state(made), nnx.state(model)
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ValueError(f"`model` (a {type(model).__name__}) must have no adapters, and experts in `format` alone")
    nnx.update(made, jax.tree.map(lambda new, old: old.astype(new.dtype), new, old))
    return made


def unrounded(model: Model) -> Model:
    """A model that shares the variables of one with `qat`, but computes with master weights as they are, not rounded.

    Args:
        model: of `jmx.models`, on one device, without adapters.

    Raises:
        TypeError, ValueError: arguments that are not as above.
    """
    _check(model)
    floats = _like(model, model.dtype)
    copy = nnx.merge(*nnx.split(model))
    for number, block in enumerate(copy.layers):
        if (moe := getattr(block, "moe", None)) is None:
            continue  # a dense layer
        if not isinstance(masters := getattr(moe, "held", None), MasterExperts) or moe.adapters is not None:
            raise ValueError(f"`model.layers[{number}].moe` must have master weights, and no adapters")
        order = masters.gate_up_order
        gate_up = jnp.concatenate([half.mT for half in split_gate_up(masters.gate_up.mT, order)], axis=1)
        bias = masters.gate_up_bias
        if bias is not None:
            bias = jnp.concatenate(split_gate_up(bias, order), axis=-1)
        block.moe = floats.make_moe(FloatExperts(gate_up, masters.down, bias, masters.down_bias), nnx.Rngs(0))
    return copy


def _check(model: Model) -> None:
    check_instance("model", model, Model, "a model of jmx.models")
    if model.split is not None:
        raise ValueError(f"`model` (a {type(model).__name__} over a mesh) must be on one device")


def _like(model: Model, dtype: Any, **options: Any) -> Model:
    """The shapes of a model of the same family and config."""
    options |= {"dtype": dtype, "backend": model.backend}
    return nnx.eval_shape(lambda: type(model)(model.config, rngs=nnx.Rngs(0), **options))
