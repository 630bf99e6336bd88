"""Weights of experts from arrays, floats or random numbers, checked before anything is computed."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmx.activations import Activation
from jmx.experts import padding
from jmx.numerics import formats, quantization
from jmx.numerics.formats import BlockScaled, Format
from jmx.numerics.gate_up import GATE_UP_ORDERS, join_gate_up, split_gate_up
from jmx.numerics.input_formats import INPUT_FORMATS, check_static_range
from jmx.util.checks import check_array, check_dtype, check_instance, check_int
from jmx.util.typing import AbstractArray, AnyArray, Array, Float, Float32, Shaped

ORDERS = (*GATE_UP_ORDERS, None)
_BIAS_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


def resolve_bias_dtype(name: str, value: Any) -> np.dtype:
    """A dtype of biases, of a router's weights, or of adapters, which jax does not narrow."""
    dtype = check_dtype(name, value, *_BIAS_DTYPES)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(f"`{name}` (={dtype.name}) must not be narrowed by jax: enable `jax_enable_x64`")
    return dtype


def check_sizes(
    num_experts: Any, hidden_size: Any, intermediate_size: Any, format: Format, input_format: str | None = None
) -> tuple[int, int, int]:
    """The sizes as Python integers.

    `input_format`: a key of `INPUT_FORMATS`, whose blocks must divide the sizes, or None.

    Raises:
        ValueError, TypeError: an invalid size, naming the argument.
    """
    num_experts = check_int("num_experts", num_experts, least=1)
    hidden_size = check_int("hidden_size", hidden_size, least=1)
    intermediate_size = check_int("intermediate_size", intermediate_size, least=1)
    format.check_size("hidden_size", hidden_size)
    format.check_size("intermediate_size", intermediate_size)
    if input_format is not None:
        INPUT_FORMATS[input_format].check_sizes(hidden_size, intermediate_size)
    return num_experts, hidden_size, intermediate_size


def check_input_scale(
    name: str, scale: Float32[AnyArray, "*layers"] | None, format: str | None, shape: tuple[int, ...]
) -> None:
    """Checks a static scale of inputs: there is one, float32 of this shape, where the input format is static.

    Raises:
        ValueError, TypeError: otherwise, naming the argument; also if it is outside `input_formats.static_limits`.
    """
    static = format is not None and INPUT_FORMATS[format].static
    if (scale is not None) != static:
        needed = f"float32 {shape}" if static else "None"
        raise ValueError(f"`{name}` (={scale}) must be {needed} for {format} inputs")
    if scale is None or format is None:
        return
    check_array(name, scale)
    if scale.dtype != jnp.float32 or tuple(scale.shape) != shape:
        raise TypeError(f"`{name}` ({scale.dtype} {tuple(scale.shape)}) must be float32 {shape}")
    check_static_range(name, scale, INPUT_FORMATS[format])


def check_weights(
    gate_up: BlockScaled, down: BlockScaled, gate_up_order: str | None, format: Format
) -> tuple[int, ...]:
    """The logical shape (*lead, H, I) of weights gate_up (*lead, 2I or I, H) and down (*lead, H, I); lead ends with E.

    Raises:
        ValueError, TypeError: arrays that do not fit each other, naming the weight.
    """
    sizes = _check_shapes(
        formats.logical_shape(gate_up, format, "gate_up"), formats.logical_shape(down, format, "down"), gate_up_order
    )
    if formats.is_packed(gate_up) != formats.is_packed(down):
        raise TypeError("`gate_up` and `down` must both be packed or both be canonical")
    return sizes


def _check_shapes(gate_up: tuple[int, ...], down: tuple[int, ...], gate_up_order: str | None) -> tuple[int, ...]:
    """`check_weights`, of the logical shapes."""
    *lead, hidden = gate_up
    *down_lead, intermediate = down
    for name, shape in (("gate_up", (*lead, hidden)), ("down", (*down_lead, intermediate))):
        if len(shape) < 2:
            raise ValueError(f"`{name}` (logical shape {shape}) must have axes of experts, rows and columns")
        if 0 in shape:
            raise ValueError(f"`{name}` (logical shape {shape}) must have no axis of size 0")
    rows, down_rows = lead.pop(), down_lead.pop()
    if not lead:
        raise ValueError(f"`gate_up` (logical shape {(rows, hidden)}) must have an expert axis")
    if down_lead != lead or down_rows != hidden:
        raise ValueError(
            f"`down` (logical shape {(*down_lead, down_rows, intermediate)}) must be (E, H, I) with "
            f"E, H = {(*lead, hidden)} as `gate_up` has them"
        )
    expected = intermediate * (1 if gate_up_order is None else 2)
    if rows != expected:
        raise ValueError(
            f"`gate_up` (logical shape {(*lead, rows, hidden)}) must have {expected} rows, "
            f"{'I' if gate_up_order is None else '2I'} with I = {intermediate} as `down` has it"
        )
    return (*lead, hidden, intermediate)


def check_activation(activation: Any, gate_up_order: str | None, num_experts: int) -> None:
    """Raises ValueError or TypeError unless `activation` fits that many experts with that order of gate and up."""
    check_instance("activation", activation, Activation, "a jmx.Activation")
    if activation.gated != (gate_up_order is not None):
        raise ValueError(
            f"`activation` (={activation}) is {'' if activation.gated else 'un-'}gated, but the experts have "
            f"gate_up_order={gate_up_order!r}"
        )
    if activation.num_experts not in (None, num_experts):
        raise ValueError(
            f"`activation` (with parameters of {activation.num_experts} experts) must have those of {num_experts}"
        )


def check_bias(name: str, bias: Any, shape: tuple[int, ...], *, abstract: bool = False) -> None:
    """Raises ValueError or TypeError, naming the bias, unless it is None or a floating array of this shape.

    `abstract`: whether it may be a description of an array, without values.
    """
    if bias is None:
        return
    check_array(name, bias, abstract=abstract)
    if tuple(bias.shape) != shape:
        raise ValueError(f"`{name}` (shape {tuple(bias.shape)}) must be {shape}")
    check_bias_dtype(name, bias)


def check_bias_dtype(name: str, bias: AbstractArray) -> None:
    """Raises TypeError, naming the bias, unless its dtype is floating, of 16 bits or more."""
    if not jnp.issubdtype(bias.dtype, jnp.floating) or bias.dtype.itemsize < 2:
        raise TypeError(f"`{name}` (dtype {bias.dtype}) must be floating, of 16 bits or more")


def check_float_weight(name: str, weight: Any, format: Format) -> None:
    """Raises ValueError or TypeError, naming the weight, unless it is floats (E, N, K) that `format` can hold."""
    check_array(name, weight, jnp.floating)
    if len(weight.shape) != 3:
        raise ValueError(f"`{name}` (shape {tuple(weight.shape)}) must be (E, N, K), the contracted axis last")
    format.check_size(f"{name}.shape[-1]", weight.shape[-1])


def pad_floats(
    floats: tuple[Any, Any, Any, Any], gate_up_order: str | None, format: Format
) -> tuple[tuple[Any, Any, Any, Any], tuple[int, int]]:
    """Float weights and biases, gate_up and down each, with zeros up to whole blocks of `format`; and H and I before.

    Raises:
        ValueError, TypeError: weights that are not floats (E, N, K), or do not fit each other: padding would hide it.
    """
    gate_up, down, gate_up_bias, down_bias = floats
    for name, weight in (("gate_up", gate_up), ("down", down)):
        check_array(name, weight, jnp.floating, (None, None, None))
    *_, hidden, intermediate = _check_shapes(tuple(gate_up.shape), tuple(down.shape), gate_up_order)
    for name, bias, rows in (("gate_up_bias", gate_up_bias, gate_up.shape[1]), ("down_bias", down_bias, down.shape[1])):
        check_bias(name, bias, (gate_up.shape[0], rows))
    h, i = format.whole_size(hidden), format.whole_size(intermediate)
    if (h, i) == (hidden, intermediate):
        return floats, (hidden, intermediate)
    rows = partial(padding.resize_rows, axis=1, gate_up_order=gate_up_order, intermediate_size=i)
    gate_up = padding.resize_axis(rows(jnp.asarray(gate_up)), 2, h)
    down = padding.resize_axis(padding.resize_axis(jnp.asarray(down), 1, h), 2, i)
    gate_up_bias = None if gate_up_bias is None else rows(jnp.asarray(gate_up_bias))
    down_bias = None if down_bias is None else padding.resize_axis(jnp.asarray(down_bias), 1, h)
    return (gate_up, down, gate_up_bias, down_bias), (hidden, intermediate)


def quantize_padded(
    quantize: Callable[..., Any], floats: tuple[Any, Any, Any, Any], *, gate_up_order: str | None, **options: Any
) -> Any:
    """`Experts.quantize` of `pad_floats`, with the sizes before them."""
    padded, (hidden, intermediate) = pad_floats(floats, gate_up_order, options["format"])
    made = quantize(*padded, gate_up_order=gate_up_order, **options)
    its = made.hidden_size, made.intermediate_size
    if its == (hidden, intermediate):
        return made
    return dataclasses.replace(made, hidden_size=hidden, intermediate_size=intermediate, padded_to=its)


def quantize_weight(
    name: str, weight: Float[AnyArray, "E N K"], gate_up_order: str | None, format: Format, **options: str
) -> BlockScaled:
    """Packed arrays of a float weight, quantized one expert at a time, which needs little memory beside both.

    `gate_up_order`: that of a "gate_up" weight, whose gate and up are quantized separately if rows share scales; else
    None. `options`: those of `quantization.quantize`, checked.

    Raises:
        ValueError, TypeError: as `quantization.quantize`, naming the weight and the expert.
    """
    packed = []
    for i in range(weight.shape[0]):
        try:
            packed.append(quantize_expert(weight[i], gate_up_order=gate_up_order, format=format, **options))
        except (ValueError, TypeError) as e:
            raise type(e)(f"`{name}` of expert {i}: {e}") from None
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *packed)


def quantize_expert(
    weight: Float[AnyArray, "N K"], *, gate_up_order: str | None, format: Format, **options: str
) -> BlockScaled:
    """Packed arrays of one expert's float weight, also while tracing; arguments as of `quantize_weight`."""
    quantize = partial(quantization.quantize, format=format, **options)
    if gate_up_order is None or not quantization.rows_share_scales(format):
        return formats.pack(quantize(weight))
    halves = split_gate_up(weight.T, gate_up_order)
    gate, up = (formats.pack(quantize(half.T)) for half in halves)
    return jax.tree.map(lambda gate, up: join_gate_up(gate.T, up.T, gate_up_order).T, gate, up)


def random_biases(
    keys: list[Shaped[Array, "..."]], num_experts: int, sizes: tuple[int, int], dtype: Any
) -> list[Float[Array, "E _"]]:
    """Normal biases with a standard deviation of 0.02: for each key an array with the number of rows in `sizes`."""
    return [0.02 * jax.random.normal(key, (num_experts, n), dtype) for key, n in zip(keys, sizes, strict=True)]
