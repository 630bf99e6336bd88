"""Experts: the weights of all experts of one MoE layer (or of a stack of layers) as a pytree."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jmx.activations import GATE_UP_ORDERS, Activation, join_gate_up, split_gate_up
from jmx.numerics import formats, layouts, quantization
from jmx.numerics.formats import MXFP4, BlockScaled, Format
from jmx.numerics.input_formats import INPUT_FORMATS, check_static_range
from jmx.numerics.layouts import WeightSpec
from jmx.util.checks import (
    check_array,
    check_bool,
    check_dtype,
    check_instance,
    check_int,
    check_key,
    check_one_of,
    shown,
)

Array = Any

ROLES = ("gate_up", "down")
ORDERS = (*GATE_UP_ORDERS, None)
BIAS_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
OTHER_ARRAYS = ("bias", "input_scale")  # of a role, beside those of its weight

MeshAxes = str | tuple[str, ...] | None  # along which one axis of an array is split
Axes = Mapping[str, MeshAxes]  # by logical axis

# Logical axes of the arrays of each role, for partitioning. Layouts keep the expert axis first.
AXES = {"gate_up": ("expert", "intermediate", "hidden"), "down": ("expert", "hidden", "intermediate")}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["gate_up", "down", "gate_up_bias", "down_bias", "index", "gate_up_input_scale", "down_input_scale"],
    meta_fields=["format", "gate_up_order", "layout", "hidden_size", "intermediate_size", "input_format"],
)
@dataclass(frozen=True)
class Experts:
    """Weights of E experts in a block format. Make them with `of`, `quantize`, `random` or a loader.

    Canonical shapes, contracted axis last (H hidden, I intermediate):
        gate_up: values (E, 2I, H), or (E, I, H) where there is no gate.
        down: values (E, H, I).
        gate_up_bias: (E, 2I) or (E, I), floating, or None.
        down_bias: (E, H), floating, or None.
        index: None, or () int32 where the arrays hold a stack of layers (L, E, ...): the layer meant; see `layer`.
        gate_up_input_scale, down_input_scale: None, or () float32 (a stack: (L,)), the static scales of the two
            products' inputs, for input formats that are static.

    Static fields:
        format: the block format.
        gate_up_order: "interleaved" (gate is rows 0, 2, 4 ..., as gpt-oss has it), "concatenated" (gate first), or
            None for un-gated experts.
        layout: name of the layout in which gate_up and down lie. Biases are canonical in every layout.
        hidden_size, intermediate_size: logical sizes, which a layout may pad.
        input_format: name of the format in which a checkpoint declares the inputs of both products; None: of 16 bits.
    """

    gate_up: BlockScaled
    down: BlockScaled
    gate_up_bias: Array | None
    down_bias: Array | None
    index: Array | None
    format: Format
    gate_up_order: str | None
    layout: str
    hidden_size: int
    intermediate_size: int
    gate_up_input_scale: Array | None = None
    down_input_scale: Array | None = None
    input_format: str | None = None

    # Construction

    @classmethod
    def of(
        cls,
        gate_up: BlockScaled,
        down: BlockScaled,
        gate_up_bias: Array | None = None,
        down_bias: Array | None = None,
        *,
        gate_up_order: str | None,
        format: Format | str = MXFP4,
    ) -> "Experts":
        """Experts of canonical or packed arrays (see the class for shapes; leading layer axes are allowed).

        Raises:
            ValueError, TypeError: arrays whose shapes or dtypes do not fit each other, naming the one that does not.
        """
        check_one_of("gate_up_order", gate_up_order, ORDERS)
        format = formats.get(format)
        *lead, hidden = formats.logical_shape(gate_up, format, "gate_up")
        *down_lead, intermediate = formats.logical_shape(down, format, "down")
        for name, shape in (("gate_up", (*lead, hidden)), ("down", (*down_lead, intermediate))):
            if len(shape) < 2:
                raise ValueError(f"`{name}` (logical shape {shape}) must have axes of experts, rows and columns")
            if 0 in shape:
                raise ValueError(f"`{name}` (logical shape {shape}) must have one of each axis at least")
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
        if formats.is_packed(gate_up) != formats.is_packed(down):
            raise TypeError("`gate_up` and `down` must both be packed or both be canonical")
        for name, bias, size in (("gate_up_bias", gate_up_bias, rows), ("down_bias", down_bias, hidden)):
            if bias is None:
                continue
            check_array(name, bias)
            if tuple(bias.shape) != (*lead, size):
                raise ValueError(f"`{name}` (shape {tuple(bias.shape)}) must be {(*lead, size)}")
            if not jnp.issubdtype(bias.dtype, jnp.floating) or bias.dtype.itemsize < 2:
                raise TypeError(f"`{name}` (dtype {bias.dtype}) must be floating, of 16 bits or more")
        layout = "packed" if formats.is_packed(gate_up) else "canonical"
        return cls(gate_up, down, gate_up_bias, down_bias, None, format, gate_up_order, layout, hidden, intermediate)

    @classmethod
    def quantize(
        cls,
        gate_up: Array,
        down: Array,
        gate_up_bias: Array | None = None,
        down_bias: Array | None = None,
        *,
        gate_up_order: str | None,
        format: Format | str = MXFP4,
        scale_rule: str = "ocp",
        nonfinite: str = "refuse",
    ) -> "Experts":
        """Experts of float weights: gate_up (E, 2I, H), down (E, H, I), contracted axis last.

        A Flax kernel (E, in, out) must be transposed first: `kernel.swapaxes(1, 2)`. One expert at a time is rounded,
        so that little more than the floats and the packed bytes is held. Biases stay as they are.

        Args:
            scale_rule, nonfinite: see `quantization.quantize`.

        Raises:
            ValueError, TypeError: those of `of` and of `quantization.quantize`, naming the weight and the expert.
        """
        check_one_of("gate_up_order", gate_up_order, ORDERS)
        format = formats.get(format)
        for name, weight in (("gate_up", gate_up), ("down", down)):
            check_array(name, weight, jnp.floating)
            if len(weight.shape) != 3:
                raise ValueError(f"`{name}` (shape {tuple(weight.shape)}) must be (E, N, K), the contracted axis last")
            format.check_size(f"{name}.shape[-1]", weight.shape[-1])

        def experts(gate_up: BlockScaled, down: BlockScaled) -> "Experts":
            return cls.of(gate_up, down, gate_up_bias, down_bias, gate_up_order=gate_up_order, format=format)

        check_one_of("scale_rule", scale_rule, quantization.SCALE_RULES)
        check_one_of("nonfinite", nonfinite, quantization.NONFINITE)
        # Shapes are checked before any weight is rounded, which may take long.
        experts(format.abstract(gate_up.shape, packed=True), format.abstract(down.shape, packed=True))
        rounded = partial(quantization.quantize, format=format, scale_rule=scale_rule, nonfinite=nonfinite)

        def one(weight: Array, order: str | None) -> BlockScaled:
            if order is None or not quantization.rows_share_scales(format):
                return formats.pack(rounded(weight))
            gate, up = (formats.pack(rounded(half.T)) for half in split_gate_up(weight.T, order))  # each a tensor
            return jax.tree.map(lambda gate, up: join_gate_up(gate.T, up.T, order).T, gate, up)

        def quantized(name: str, weight: Array, order: str | None) -> BlockScaled:
            packed = []
            for i in range(weight.shape[0]):
                try:
                    packed.append(one(weight[i], order))
                except (ValueError, TypeError) as e:
                    raise type(e)(f"`{name}` of expert {i}: {e}") from None
            return jax.tree.map(lambda *arrays: jnp.stack(arrays), *packed)

        return experts(quantized("gate_up", gate_up, gate_up_order), quantized("down", down, None))

    @classmethod
    def random(
        cls,
        key: Array,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        gate_up_order: str | None,
        format: Format | str = MXFP4,
        bias: bool = True,
        bias_dtype: Any = jnp.bfloat16,
    ) -> "Experts":
        """Random packed experts, codes and scales drawn directly: no float weight is ever made.

        Weights have a standard deviation near K ** -0.5; biases are normal with 0.02.

        Raises:
            ValueError, TypeError: sizes that no experts can have, and arguments of a wrong type.
        """
        check_key("key", key)
        check_one_of("gate_up_order", gate_up_order, ORDERS)
        format = formats.get(format)
        bias_dtype = check_dtype("bias_dtype", bias_dtype, *BIAS_DTYPES)
        num_experts, hidden_size, intermediate_size = check_sizes(num_experts, hidden_size, intermediate_size, format)
        rows = intermediate_size * (1 if gate_up_order is None else 2)
        keys = jax.random.split(key, 4)
        gate_up = quantization.random(keys[0], (num_experts, rows, hidden_size), format)
        down = quantization.random(keys[1], (num_experts, hidden_size, intermediate_size), format)
        biases = (None, None)
        if check_bool("bias", bias):
            sizes = (rows, hidden_size)
            biases = [
                0.02 * jax.random.normal(k, (num_experts, n), bias_dtype) for k, n in zip(keys[2:], sizes, strict=True)
            ]
        return cls.of(gate_up, down, *biases, gate_up_order=gate_up_order, format=format)

    @classmethod
    def stack(cls, experts: Sequence["Experts"]) -> "Experts":
        """Experts of several layers in one pytree, arrays (L, E, ...). `layer` picks one without copying it.

        Raises:
            ValueError: no experts, or some that differ in more than their weights.
        """
        if not isinstance(experts, Sequence) or isinstance(experts, str):
            raise TypeError(f"`experts` ({shown(experts)}) must be a sequence of jmx.Experts")
        for i, other in enumerate(experts):
            check_instance(f"experts[{i}]", other, Experts, "jmx.Experts")
        if not experts:
            raise ValueError("`experts` (=[]) must hold those of one layer at least")
        for i, other in enumerate(experts):
            if other.index is not None:
                raise ValueError(f"`experts[{i}]` must be whole experts, not a `layer` of a stack")
            other._check_like(experts[0], f"experts[{i}]", "in one stack")
        return jax.tree.map(lambda *arrays: jnp.stack(arrays), *experts)

    # Sizes

    @property
    def num_experts(self) -> int:
        return self.gate_up.values.shape[0 if self.index is None else 1]

    @property
    def gated(self) -> bool:
        return self.gate_up_order is not None

    def canonical_shape(self) -> tuple[int, ...]:
        """Shape of gate_up's canonical values: leading layer axes, E, then rows and H."""
        spec, shape = self.spec("gate_up"), self.gate_up.values.shape
        rank = layouts.abstract(self.layout, spec).values.ndim - 1  # of one expert's
        return (*shape[: max(0, len(shape) - rank)], *spec.shape)

    def spec(self, role: str) -> WeightSpec:
        """Logical shape of one expert's "gate_up" or "down" weight, and what a layout needs to know of it."""
        check_one_of("role", role, ROLES)
        rows = self.intermediate_size * (2 if self.gated else 1)
        shape = (rows, self.hidden_size) if role == "gate_up" else (self.hidden_size, self.intermediate_size)
        return WeightSpec(role, shape, self.gate_up_order, self.format)

    def check(self, *, bias: bool, **fields: Any) -> None:
        """Raises ValueError, naming the argument, unless these are of one layer and have such `fields`."""
        check_bool("bias", bias)
        if self.index is not None or len(self.canonical_shape()) != 3:
            raise ValueError("`experts` must be those of one layer, not a stack or a `layer` of one")
        for name, value in fields.items():
            if getattr(self, name) != value:
                raise ValueError(f"`{name}` (={value!r}) must be {getattr(self, name)!r}, as `experts` have it")
        for name in ("gate_up_bias", "down_bias"):
            if bias != (getattr(self, name) is not None):
                raise ValueError(f"`bias` (={bias}) must say whether `experts` have a `{name}`")

    def check_activation(self, activation: Activation) -> None:
        """Raises ValueError unless `activation` is gated exactly if these experts are."""
        check_instance("activation", activation, Activation, "a jmx.Activation")
        if activation.gated != self.gated:
            raise ValueError(
                f"`activation` (={activation}) is {'' if activation.gated else 'un-'}gated, but the experts have "
                f"gate_up_order={self.gate_up_order!r}"
            )

    # Arrays by name, as modules and checkpoints hold them

    def arrays(self) -> dict[str, Array]:
        """The arrays by name: gate_up_values, gate_up_scales, down_values, down_scales, and the others there are."""
        named = {f"{role}_{name}": getattr(getattr(self, role), name) for role in ROLES for name in self.format.arrays}
        others = {f"{role}_{name}": getattr(self, f"{role}_{name}") for role in ROLES for name in OTHER_ARRAYS}
        return named | {name: array for name, array in others.items() if array is not None}

    def with_arrays(self, arrays: Mapping[str, Array]) -> "Experts":
        """These experts with other arrays, named as `arrays` names them; one that is not named becomes None.

        Raises:
            TypeError: no mapping. What arrays hold is not looked at, nor are other names.
        """
        check_instance("arrays", arrays, Mapping, "a mapping of names to arrays")
        quantised = {
            role: BlockScaled(*(arrays.get(f"{role}_{name}") for name in BlockScaled._fields)) for role in ROLES
        }
        others = {f"{role}_{name}": arrays.get(f"{role}_{name}") for role in ROLES for name in OTHER_ARRAYS}
        return dataclasses.replace(self, **quantised, **others)

    # Inputs

    def with_inputs(
        self, format: str | None, gate_up_scale: Array | None = None, down_scale: Array | None = None
    ) -> "Experts":
        """These experts, declaring the format in which both products take their inputs, as a checkpoint does.

        Args:
            format: a key of `inputs.INPUT_FORMATS`; None: the activations' own 16 or 32 bits.
            gate_up_scale, down_scale: for formats that are static, float32 () each, or (L,) for a stack of layers.

        Raises:
            ValueError, TypeError: an unknown format, one whose blocks do not divide the sizes, scales that are missing,
                not wanted, of another shape or dtype, or out of `inputs.static_limits`.
        """
        check_one_of("format", format, (*INPUT_FORMATS, None))
        static = format is not None and INPUT_FORMATS[format].static
        shape = self.canonical_shape()[:-3]
        for name, scale in (("gate_up_scale", gate_up_scale), ("down_scale", down_scale)):
            if (scale is not None) != static:
                needed = f"float32 {shape}" if static else "None"
                raise ValueError(f"`{name}` (={scale}) must be {needed} for {format} inputs")
            if scale is not None:
                check_array(name, scale)
            if scale is not None and (scale.dtype != jnp.float32 or tuple(scale.shape) != shape):
                raise TypeError(f"`{name}` ({scale.dtype} {tuple(scale.shape)}) must be float32 {shape}")
            if scale is not None and format is not None:
                check_static_range(name, scale, INPUT_FORMATS[format])
        if format is not None:
            INPUT_FORMATS[format].check_sizes(self.hidden_size, self.intermediate_size)
        return dataclasses.replace(
            self, input_format=format, gate_up_input_scale=gate_up_scale, down_input_scale=down_scale
        )

    def input_scale(self, role: str) -> Array | None:
        """The static scale () of the inputs of "gate_up" or "down"; None where there is none."""
        check_one_of("role", role, ROLES)
        scale = getattr(self, f"{role}_input_scale")
        return scale if scale is None or self.index is None else scale[self.index]

    # Views

    def layer(self, index: Array | int) -> "Experts":
        """One layer of a stack (see `stack`): a view, which copies nothing, also inside a scan over `index`.

        (A stack scanned over as `xs` works too, but then XLA copies each layer's weights out of the stack.)

        Args:
            index: () of any integer type, in 0..L-1; negative ones do not count from the end. A traced one, whose value
                is not known yet, is clamped into that range, as `jax.lax.dynamic_slice` clamps where a slice starts: to
                0 below it, to L-1 above it, on every backend and in gradients.

        Raises:
            ValueError: these are not a stack, or `index` is known and not in 0..L-1.
            TypeError: `index` is no integer, or an array of more than one.
        """
        lead = self.canonical_shape()[:-2]
        if self.index is not None or len(lead) != 2:
            raise ValueError("`layer` must be called on a stack, which `Experts.stack` makes, not on one layer")
        return dataclasses.replace(self, index=_layer_index(index, lead[0]))

    def merged(self) -> "Experts":
        """All layers' experts in one axis, so that no layer is cut out of a stack; see `first_expert`."""
        if self.index is None:
            return self
        scales = {f"{role}_input_scale": self.input_scale(role) for role in ROLES}
        arrays = {n: array.reshape(-1, *array.shape[2:]) for n, array in self.arrays().items() if n not in scales}
        return dataclasses.replace(self.with_arrays(arrays), **scales, index=None)

    @property
    def first_expert(self) -> Array | int:
        """Where this layer's experts begin among those of `merged`."""
        return 0 if self.index is None else self.index * self.num_experts

    def take(self, role: str, experts: Array) -> BlockScaled:
        """Packed bytes of the chosen experts' "gate_up" or "down" weights, inside a trace, out of any layout.

        `experts`: integer array of valid ids, any shape. Returns values (*experts.shape, N, K / 2) and scales.
        """
        check_one_of("role", role, ROLES)
        check_array("experts", experts, jnp.integer)
        index = experts if self.index is None else (self.index, experts)
        layout, spec, order = layouts.get(self.layout), self.spec(role), self.down.order
        if order is not None:
            order = order.at[index].get(mode="promise_in_bounds")
        return layout.take(getattr(self, role), spec, index, *layout.rows(order, spec))

    def take_bias(self, role: str, experts: Array) -> Array | None:
        """The chosen experts' bias rows (*experts.shape, N), or None where there is none."""
        check_one_of("role", role, ROLES)
        check_array("experts", experts, jnp.integer)
        bias = getattr(self, f"{role}_bias")
        index = experts if self.index is None else (self.index, experts)
        return None if bias is None else bias.at[index].get(mode="promise_in_bounds")

    # Layouts

    def prepare(self, layout: str, *, donate: bool = False) -> "Experts":
        """The same weights in another layout; itself where they lie in it already.

        Args:
            layout: a name in `layouts.LAYOUTS`.
            donate: give up this object's weights, so that the peak is one tensor above the weights.

        Warns (UserWarning), but not inside a trace, of weights that the kernels which read the layout will round.

        Raises:
            ValueError: no layout has that name, or it does not hold this format.
        """
        target = layouts.get(layout)
        check_bool("donate", donate)
        if layout == self.layout:
            return self
        if not target.holds(self.format):
            raise ValueError(f"`layout` (={layout!r}) must hold {self.format.name!r}, but holds {target.formats} alone")
        source, order = layouts.get(self.layout), self.down.order

        def convert(role: str) -> BlockScaled:
            spec = self.spec(role)
            moved = _convert_donating if donate else _convert
            return moved(getattr(self, role), order if role == "gate_up" else None, source, target, spec)

        prepared = dataclasses.replace(self, gate_up=convert("gate_up"), down=convert("down"), layout=layout)
        prepared._warn_of_rounding(target)
        return prepared

    def _warn_of_rounding(self, layout: layouts.Layout) -> None:
        if layout.rounds is None:
            return
        for role in ROLES:
            q, spec = getattr(self, role), self.spec(role)
            if isinstance(q.values, Tracer | jax.ShapeDtypeStruct):
                continue
            if count := int(jax.jit(layout.rounds, static_argnums=1)(q, spec)):
                warnings.warn(
                    f"kernels that read {layout.name!r} round {count} blocks of {role}, whose scales are too far below "
                    "the largest of their rows; see docs/mosaic_sm90_fp8.md",
                    UserWarning,
                    stacklevel=3,
                )

    def canonical(self, *, donate: bool = False) -> "Experts":
        """The same weights as a checkpoint holds them, in the dtypes of their format."""
        return self.prepare("canonical", donate=donate)

    def update(self, new: "Experts") -> "Experts":
        """`new` weights in the layout and with the sharding of these: the same bits as loading `new` afresh.

        Arrays that lie so already are shared with `new`, not copied.

        Raises:
            ValueError: `new` differs in a size, a dtype, the format, the order of gate and up, or the presence of a
                bias; or either is one layer of a stack.
        """
        check_instance("new", new, Experts, "jmx.Experts")
        if self.index is not None or new.index is not None:
            raise ValueError("`update` must be called on and with whole experts, not with a `layer` of a stack")
        abstract = jax.eval_shape(lambda experts: experts.prepare(self.layout), new)
        abstract._check_like(self, "new", "to take the place of these experts")
        return jax.tree.map(_place_like, self, new.prepare(self.layout))

    def _check_like(self, other: "Experts", name: str, purpose: str) -> None:
        """Raises ValueError, naming the difference, unless these, called `name`, and `other` differ in values alone."""
        for field in (
            "num_experts",
            "hidden_size",
            "intermediate_size",
            "format",
            "gate_up_order",
            "layout",
            "input_format",
        ):
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                raise ValueError(f"`{name}.{field}` (={ours!r}) must be {theirs!r} {purpose}")
        ours, theirs = self.arrays(), other.arrays()
        for array in sorted({*ours, *theirs}):
            kinds = [f"{a[array].dtype}{list(a[array].shape)}" if array in a else "None" for a in (ours, theirs)]
            if kinds[0] != kinds[1]:
                raise ValueError(f"`{name}.{array}` (={kinds[0]}) must be {kinds[1]} {purpose}")

    def dequantize(self, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, jax.Array]:
        """Float weights: gate_up (E, 2I, H) and down (E, H, I), rows as they stand. 4 or 8 times the memory.

        `dtype` is bfloat16 or float32; see `quantization.dequantize`.
        """
        dtype = check_dtype("dtype", dtype, jnp.bfloat16, jnp.float32)
        experts = self.prepare("packed")  # XLA's CPU compiler fails at float4 inside a loop

        def floats(q: BlockScaled) -> jax.Array:
            chosen = q if self.index is None else jax.tree.map(lambda array: array[self.index], q)
            return quantization.dequantize(chosen, dtype, self.format)

        return floats(experts.gate_up), floats(experts.down)


def check_sizes(
    num_experts: int, hidden_size: int, intermediate_size: int, format: Format, input_format: str | None = None
) -> tuple[int, int, int]:
    """The sizes as Python's integers; ValueError or TypeError, naming the argument, for those that no experts can have.

    Or none whose inputs are in `input_format`, a key of `INPUT_FORMATS`.
    """
    num_experts = check_int("num_experts", num_experts, least=1)
    hidden_size = check_int("hidden_size", hidden_size, least=1)
    intermediate_size = check_int("intermediate_size", intermediate_size, least=1)
    format.check_size("hidden_size", hidden_size)
    format.check_size("intermediate_size", intermediate_size)
    if input_format is not None:
        INPUT_FORMATS[input_format].check_sizes(hidden_size, intermediate_size)
    return num_experts, hidden_size, intermediate_size


def _layer_index(index: Array | int, num_layers: int) -> jax.Array:
    """`index`, checked if it is known and clamped if it is traced, as int32 (); see `Experts.layer`."""
    rule = f"must be an integer in 0..{num_layers - 1}, the layers of this stack"
    if isinstance(index, np.ndarray | np.generic | jax.Array):
        if index.shape or not jnp.issubdtype(index.dtype, jnp.integer):
            raise TypeError(f"`index` ({index.dtype}{list(index.shape)}) {rule}")
    elif not isinstance(index, int) or isinstance(index, bool):
        raise TypeError(f"`index` (={index!r}) {rule}")
    if isinstance(index, Tracer):
        last = min(num_layers - 1, int(jnp.iinfo(index.dtype).max))
        return jnp.clip(index, 0, last).astype(jnp.int32)  # in that order: int32 cannot hold what 64 bits can
    if not 0 <= int(index) < num_layers:
        raise ValueError(f"`index` (={int(index)}) {rule}")
    return jnp.asarray(int(index), jnp.int32)


def check_axes(axes: Axes) -> None:
    """Raises ValueError for logical axes that experts do not have, TypeError for what names no mesh axes."""
    check_instance("axes", axes, Mapping, "a mapping of logical axes to mesh axes")
    unknown = set(axes) - set(AXES["gate_up"])
    if unknown:
        raise ValueError(
            f"`axes` (={dict(axes)}) must name logical axes among {AXES['gate_up']}, not {sorted(unknown)}"
        )
    for logical, names in axes.items():
        for name in names if isinstance(names, tuple) else (names,):
            check_instance(f"axes[{logical!r}]", name, str | None, "the name of a mesh axis, a tuple of those, or None")


def partition_names(experts: Experts, axes: Axes) -> dict[str, tuple[MeshAxes, ...]]:
    """Mesh axis names of each array's axes, for arrays as `Experts.arrays` names them.

    `axes`: mesh axis of the logical axes "expert", "hidden" and "intermediate"; one left out is not split, nor is the
    axis of layers that the arrays of a stack have in front.
    """
    check_axes(axes)
    names, layers = {}, len(experts.canonical_shape()) - 3
    for name, array in experts.arrays().items():
        expert, rows, columns = next(AXES[role] for role in ROLES if name.startswith(role))
        logical = (expert, columns) if name.endswith("_order") else (expert, rows, columns)
        names[name] = (*(None,) * layers, *(axes.get(axis) for axis in logical[: array.ndim - layers]))
    return names


@partial(jax.jit, static_argnums=(2, 3, 4))
def _convert(
    q: BlockScaled, order: Array | None, source: layouts.Layout, target: layouts.Layout, spec: WeightSpec
) -> BlockScaled:
    """`order`: that of the columns of "down", None where there is none, or `q` is that weight."""
    canonical = source.inverse(q, spec, *source.rows(order, spec))
    return target.forward(canonical, spec, *target.rows(order, spec))


def _convert_donating(
    q: BlockScaled, order: Array | None, source: layouts.Layout, target: layouts.Layout, spec: WeightSpec
) -> BlockScaled:
    converted = _convert(q, order, source, target, spec)
    if not isinstance(q.values, Tracer):
        # XLA aliases a donated buffer only into one of the same dtype; freeing it by hand serves every layout.
        jax.block_until_ready(converted)
        kept = jax.tree.leaves(converted)
        for old in jax.tree.leaves(q):
            if isinstance(old, jax.Array) and not any(old is new for new in kept):
                old.delete()
    return converted


def _place_like(old: Array, new: Array) -> Array:
    if isinstance(old, Tracer) or isinstance(new, Tracer) or not isinstance(old, jax.Array):
        return new
    return jax.device_put(new, old.sharding)
