"""Experts: the weights of all experts of one MoE layer (or of a stack of layers) as a pytree."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmx import meshes
from jmx.activations import Activation
from jmx.experts import conversion, creation, padding
from jmx.experts.creation import ORDERS, check_sizes
from jmx.experts.stacking import check_alike, check_fields, check_stackable, layer_index
from jmx.numerics import formats, layouts, quantization, resizing
from jmx.numerics.formats import MXFP4, BlockScaled, Format
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.numerics.layouts import WeightSpec
from jmx.util import pytrees
from jmx.util.checks import (
    check_array,
    check_bool,
    check_dtype,
    check_instance,
    check_key,
    check_one_of,
)
from jmx.util.typing import AnyArray, Array, Float, Float32, Int32, Integer, Key, Shaped, UInt32

ROLES = ("gate_up", "down")
OTHER_ARRAYS = ("bias", "input_scale")  # of each role, beside the arrays of its weight


@pytrees.register(
    data=["gate_up", "down", "gate_up_bias", "down_bias", "index", "gate_up_input_scale", "down_input_scale"],
    static=["format", "gate_up_order", "layout", "hidden_size", "intermediate_size", "input_format", "padded_to"],
    format=formats.CODEC,
)
@dataclass(frozen=True)
class Experts:
    """Weights of E experts in a block format. Created by `of`, `quantize`, `random` or a checkpoint's reader.

    Shapes are those of the canonical layout, contracted axis last (H hidden, I intermediate). Arrays come first; from
    `format` on fields are static, except the input scales.

    Attributes:
        gate_up: values (E, 2I, H), or (E, I, H) without a gate.
        down: values (E, H, I).
        gate_up_bias: (E, 2I) or (E, I), floating, or None.
        down_bias: (E, H), floating, or None.
        index: None, or () int32, the index of a layer in a stack of layers (L, E, ...); see `layer`.
        format: the block format.
        gate_up_order: "interleaved" (gate in rows 0, 2, 4 ..., as in gpt-oss), "concatenated" (all of gate first),
            either with up before gate ("interleaved_up_first", "concatenated_up_first"), or None for un-gated experts.
        layout: name of the layout of gate_up and down. Biases are canonical in every layout.
        hidden_size: H, without padding.
        intermediate_size: I, without padding.
        gate_up_input_scale: () float32, (L,) in a stack: static scale of the first product's inputs; None for input
            formats that are not static.
        down_input_scale: likewise, of the second product's.
        input_format: name of the format that a checkpoint declares for both products' inputs; None: 16 bits.
        padded_to: the hidden and the intermediate size of the arrays, if these have padding; see `pad`. Else None.
    """

    gate_up: BlockScaled
    down: BlockScaled
    gate_up_bias: Float[Any, "*lead N"] | None
    down_bias: Float[Any, "*lead H"] | None
    index: Int32[Any, ""] | None
    format: Format
    gate_up_order: str | None
    layout: str
    hidden_size: int
    intermediate_size: int
    gate_up_input_scale: Float32[Any, "*layers"] | None = None
    down_input_scale: Float32[Any, "*layers"] | None = None
    input_format: str | None = None
    padded_to: tuple[int, int] | None = None

    # Construction

    @classmethod
    def of(
        cls,
        gate_up: BlockScaled,
        down: BlockScaled,
        gate_up_bias: Float[Any, "*lead N"] | None = None,
        down_bias: Float[Any, "*lead H"] | None = None,
        *,
        gate_up_order: str | None,
        format: Format | str = MXFP4,
    ) -> "Experts":
        """Experts from canonical or packed arrays (see the class for shapes; leading layer axes are allowed).

        Raises:
            ValueError, TypeError: arrays whose shapes or dtypes do not fit each other, naming one of them.
        """
        check_one_of("gate_up_order", gate_up_order, ORDERS)
        format = formats.get(format)
        *lead, hidden, intermediate = creation.check_weights(gate_up, down, gate_up_order, format)
        rows = intermediate * (1 if gate_up_order is None else 2)
        creation.check_bias("gate_up_bias", gate_up_bias, (*lead, rows))
        creation.check_bias("down_bias", down_bias, (*lead, hidden))
        layout = "packed" if format.is_float or formats.is_packed(gate_up) else "canonical"
        return cls(gate_up, down, gate_up_bias, down_bias, None, format, gate_up_order, layout, hidden, intermediate)

    @classmethod
    def quantize(
        cls,
        gate_up: Float[AnyArray, "E N H"],
        down: Float[AnyArray, "E H I"],
        gate_up_bias: Float[AnyArray, "E N"] | None = None,
        down_bias: Float[AnyArray, "E H"] | None = None,
        *,
        gate_up_order: str | None,
        format: Format | str = MXFP4,
        scale_rule: str = "ocp",
        nonfinite: str = "refuse",
        pad: bool = False,
    ) -> "Experts":
        """Experts from float weights: gate_up (E, 2I, H), down (E, H, I), contracted axis last.

        A Flax kernel (E, in, out) must be transposed first: `kernel.swapaxes(1, 2)`. One expert at a time is
        quantized, which needs little memory beside the floats and the packed bytes. Biases are not changed.

        Args:
            scale_rule, nonfinite: see `quantization.quantize`.
            pad: whether sizes that whole blocks of the format do not divide are padded; see `pad`. False: they are an
                error, unless the format's last block may be short.

        Raises:
            ValueError, TypeError: as `of` and `quantization.quantize`, naming the weight and the expert.
        """
        check_one_of("gate_up_order", gate_up_order, ORDERS)
        format = formats.get(format)
        if check_bool("pad", pad):
            options = {"format": format, "scale_rule": scale_rule, "nonfinite": nonfinite}
            return creation.quantize_padded(
                cls.quantize, (gate_up, down, gate_up_bias, down_bias), gate_up_order=gate_up_order, **options
            )
        for name, weight in (("gate_up", gate_up), ("down", down)):
            creation.check_float_weight(name, weight, format)
        check_one_of("scale_rule", scale_rule, quantization.SCALE_RULES)
        check_one_of("nonfinite", nonfinite, quantization.NONFINITE)
        make = partial(
            cls.of, gate_up_bias=gate_up_bias, down_bias=down_bias, gate_up_order=gate_up_order, format=format
        )
        # Shapes are checked before any weight is quantized, which may take long.
        make(format.abstract(gate_up.shape, packed=True), format.abstract(down.shape, packed=True))
        options = {"scale_rule": scale_rule, "nonfinite": nonfinite}
        return make(
            creation.quantize_weight("gate_up", gate_up, gate_up_order, format, **options),
            creation.quantize_weight("down", down, None, format, **options),
        )

    @classmethod
    def random(
        cls,
        key: Key[Array, ""] | UInt32[AnyArray, "2"],
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        gate_up_order: str | None,
        format: Format | str = MXFP4,
        bias: bool = True,
        bias_dtype: Any = jnp.bfloat16,
    ) -> "Experts":
        """Random packed experts; codes and scales are drawn directly, without float weights.

        Weights have a standard deviation near K ** -0.5; biases are normal with a standard deviation of 0.02.

        Raises:
            ValueError, TypeError: invalid sizes, and arguments of a wrong type.
        """
        check_key("key", key)
        check_one_of("gate_up_order", gate_up_order, ORDERS)
        format = formats.get(format)
        bias_dtype = creation.resolve_bias_dtype("bias_dtype", bias_dtype)
        num_experts, hidden_size, intermediate_size = check_sizes(num_experts, hidden_size, intermediate_size, format)
        rows = intermediate_size * (1 if gate_up_order is None else 2)
        keys = jax.random.split(key, 4)
        gate_up = quantization.random(keys[0], (num_experts, rows, hidden_size), format)
        down = quantization.random(keys[1], (num_experts, hidden_size, intermediate_size), format)
        biases = (None, None)
        if check_bool("bias", bias):
            biases = creation.random_biases([*keys[2:]], num_experts, (rows, hidden_size), bias_dtype)
        return cls.of(gate_up, down, *biases, gate_up_order=gate_up_order, format=format)

    @classmethod
    def stack(cls, experts: Sequence["Experts"]) -> "Experts":
        """Experts of several layers in one pytree, arrays (L, E, ...). `layer` selects one without copying it.

        Raises:
            ValueError: no experts, or some that differ in more than their weights.
        """
        check_stackable(experts, Experts)
        return jax.tree.map(lambda *arrays: jnp.stack(arrays), *experts)

    # Sizes

    @property
    def num_experts(self) -> int:
        return self.gate_up.values.shape[0 if self.index is None else 1]

    @property
    def array_sizes(self) -> tuple[int, int]:
        """The hidden and the intermediate size of the arrays, with their padding."""
        return self.padded_to or (self.hidden_size, self.intermediate_size)

    @property
    def gated(self) -> bool:
        return self.gate_up_order is not None

    def canonical_shape(self) -> tuple[int, ...]:
        """Shape of gate_up's canonical values: leading layer axes, E, then rows and H."""
        spec, shape = self.spec("gate_up"), self.gate_up.values.shape
        rank = layouts.abstract(self.layout, spec).values.ndim - 1  # of one expert's
        return (*shape[: max(0, len(shape) - rank)], *spec.shape)

    def spec(self, role: str) -> WeightSpec:
        """The `WeightSpec` of one expert's "gate_up" or "down" weight."""
        check_one_of("role", role, ROLES)
        hidden, intermediate = self.array_sizes
        rows = intermediate * (2 if self.gated else 1)
        shape = (rows, hidden) if role == "gate_up" else (hidden, intermediate)
        return WeightSpec(role, shape, self.gate_up_order, self.format)

    def check(self, *, bias: bool, **fields: Any) -> None:
        """Raises ValueError, naming the argument, unless these are of one layer and have such `fields`."""
        check_fields(self, check_bool("bias", bias), fields)

    def check_activation(self, activation: Activation) -> None:
        """Raises ValueError unless `activation` is gated exactly if these experts are, and has parameters of as many if
        it has those of each."""
        creation.check_activation(activation, self.gate_up_order, self.num_experts)

    # Arrays by name, as in modules and checkpoints

    def arrays(self) -> dict[str, Shaped[Any, "..."]]:
        """The arrays by name: gate_up_values, gate_up_scales, down_values, down_scales, and others if present."""
        named = {f"{role}_{name}": getattr(getattr(self, role), name) for role in ROLES for name in self.format.arrays}
        others = {f"{role}_{name}": getattr(self, f"{role}_{name}") for role in ROLES for name in OTHER_ARRAYS}
        return named | {name: array for name, array in others.items() if array is not None}

    def with_arrays(self, arrays: Mapping[str, Any]) -> "Experts":
        """These experts with other arrays, by the names of `arrays`; those that are not given become None.

        Raises:
            TypeError: not a mapping. Arrays and other names are not checked.
        """
        check_instance("arrays", arrays, Mapping, "a mapping of names to arrays")
        quantized = {
            role: BlockScaled(*(arrays.get(f"{role}_{name}") for name in BlockScaled._fields)) for role in ROLES
        }
        others = {f"{role}_{name}": arrays.get(f"{role}_{name}") for role in ROLES for name in OTHER_ARRAYS}
        return dataclasses.replace(self, **quantized, **others)

    # Inputs

    def with_inputs(
        self,
        format: str | None,
        gate_up_scale: Float32[AnyArray, "*layers"] | None = None,
        down_scale: Float32[AnyArray, "*layers"] | None = None,
    ) -> "Experts":
        """These experts with a declared format of both products' inputs, as a checkpoint may have.

        Args:
            format: a key of `input_formats.INPUT_FORMATS`; None: inputs in the activations' dtype.
            gate_up_scale, down_scale: float32 (), or (L,) for a stack of layers, for static formats; else None.

        Raises:
            ValueError, TypeError: an unknown format, one whose blocks do not divide the sizes, scales that are missing,
                not needed, of another shape or dtype, or outside `input_formats.static_limits`.
        """
        check_one_of("format", format, (*INPUT_FORMATS, None))
        for name, scale in (("gate_up_scale", gate_up_scale), ("down_scale", down_scale)):
            creation.check_input_scale(name, scale, format, self.canonical_shape()[:-3])
        if format is not None:
            INPUT_FORMATS[format].check_sizes(*self.array_sizes)
        return dataclasses.replace(
            self, input_format=format, gate_up_input_scale=gate_up_scale, down_input_scale=down_scale
        )

    def input_scale(self, role: str) -> Float32[Any, ""] | None:
        """The static scale () of the inputs of "gate_up" or "down"; None if there is none."""
        check_one_of("role", role, ROLES)
        scale = getattr(self, f"{role}_input_scale")
        return scale if scale is None or self.index is None else scale[self.index]

    # Views

    def layer(self, index: Integer[AnyArray, ""] | np.integer | int) -> "Experts":
        """One layer of a stack (see `stack`): a view, which copies nothing, also inside a scan over `index`.

        (A stack scanned over as `xs` works too, but then XLA copies each layer's weights out of the stack.)

        Args:
            index: () of any integer type, in 0..L-1; negative ones do not count from the end. A traced index is clamped
                to that range, as `jax.lax.dynamic_slice` clamps start indices, on every backend and in gradients.

        Raises:
            ValueError: these are not a stack, or `index` is known and not in 0..L-1.
            TypeError: `index` is not an integer, or an array of several.
        """
        lead = self.canonical_shape()[:-2]
        if self.index is not None or len(lead) != 2:
            raise ValueError("`layer` must be called on a stack, which `Experts.stack` makes, not on one layer")
        return dataclasses.replace(self, index=layer_index(index, lead[0]))

    def merged(self) -> "Experts":
        """All layers' experts along one axis, so that no layer is copied from a stack; see `first_expert`."""
        if self.index is None:
            return self
        scales = {f"{role}_input_scale": self.input_scale(role) for role in ROLES}
        arrays = {n: array.reshape(-1, *array.shape[2:]) for n, array in self.arrays().items() if n not in scales}
        return dataclasses.replace(self.with_arrays(arrays), **scales, index=None)

    @property
    def first_expert(self) -> Int32[Array, ""] | int:
        """The index of this layer's first expert among those of `merged`."""
        return 0 if self.index is None else self.index * self.num_experts

    def take(self, role: str, experts: Integer[AnyArray, "*ids"]) -> BlockScaled:
        """Packed bytes of the chosen experts' "gate_up" or "down" weights, while tracing, from any layout.

        `experts`: integer array of valid ids, any shape. Returns values (*experts.shape, N, K / 2) and scales, without
        the padding of `pad`.
        """
        check_one_of("role", role, ROLES)
        check_array("experts", experts, jnp.integer)
        index = experts if self.index is None else (self.index, experts)
        layout, spec, order = layouts.get(self.layout), self.spec(role), self.down.order
        if order is not None:
            order = order.at[index].get(mode="promise_in_bounds")
        return padding.without(self, role, layout.take(getattr(self, role), spec, index, *layout.rows(order, spec)))

    def take_bias(self, role: str, experts: Integer[AnyArray, "*ids"]) -> Float[Array, "*ids N"] | None:
        """The chosen experts' bias rows (*experts.shape, N), or None if there are no biases."""
        check_one_of("role", role, ROLES)
        check_array("experts", experts, jnp.integer)
        bias = getattr(self, f"{role}_bias")
        index = experts if self.index is None else (self.index, experts)
        if bias is None:
            return None
        return padding.without_rows(self, role, bias.at[index].get(mode="promise_in_bounds"), axis=-1)

    # Layouts

    def prepare(self, layout: str, *, donate: bool = False) -> "Experts":
        """The same weights in another layout; itself if they are in it already.

        Args:
            layout: a name in `layouts.LAYOUTS`. Each device converts its own experts, if a mesh divides them.
            donate: whether this object's arrays are deleted, so that peak memory is one tensor above the weights.

        Warns (UserWarning), except while tracing, if the kernels that read the layout round any weights.

        Raises:
            ValueError: no layout has that name, or it does not hold this format.
        """
        target = layouts.get(layout)
        check_bool("donate", donate)
        if layout == self.layout:
            return self
        if not target.holds(self.format):
            raise ValueError(f"`layout` (={layout!r}) must hold {self.format.name!r}, but holds {target.formats} only")
        source, order = layouts.get(self.layout), self.down.order
        convert = conversion.convert_donating if donate else conversion.convert
        gate_up = convert(self.gate_up, order, source, target, self.spec("gate_up"))
        down = convert(self.down, None, source, target, self.spec("down"))
        prepared = dataclasses.replace(self, gate_up=gate_up, down=down, layout=layout)
        for role in ROLES:
            conversion.warn_of_rounding(getattr(prepared, role), prepared.spec(role), target)
        return prepared

    def pad(self, hidden_size: int | None = None, intermediate_size: int | None = None) -> "Experts":
        """The same experts with arrays of larger sizes, in the layout "packed": results do not change.

        Inputs and results keep the sizes `hidden_size` and `intermediate_size` of these experts, as if there were no
        padding; `array_sizes` are those of the arrays. Further rows and columns are of weights with the value 0, and
        biases of 0.

        Args:
            hidden_size, intermediate_size: those of the arrays; None: the least of at least the present ones that
                blocks of the weights, and of declared inputs, divide. Kernels may run such sizes alone.

        Raises:
            ValueError, TypeError: a size that is smaller than the present one, or that no blocks can have.
        """
        sizes = padding.sizes_of(self, {"hidden_size": hidden_size, "intermediate_size": intermediate_size})
        return padding.resized(self.prepare("packed"), sizes, resizing.pad)

    def unpad(self) -> "Experts":
        """The experts without the padding of `pad`, in the layout "packed".

        Raises:
            ValueError: sizes that no blocks of the format can have without padding.
        """
        return padding.resized(self.prepare("packed"), (self.hidden_size, self.intermediate_size), resizing.unpad)

    @property
    def fits_without_padding(self) -> bool:
        """Whether blocks of the weights and of declared inputs divide the sizes without padding."""
        return padding.fits(self, (self.hidden_size, self.intermediate_size))

    def as_padded(self) -> "Experts":
        """The padding as if it were weights: experts of the sizes that the arrays have."""
        hidden, intermediate = self.array_sizes
        return dataclasses.replace(self, hidden_size=hidden, intermediate_size=intermediate, padded_to=None)

    def canonical(self, *, donate: bool = False) -> "Experts":
        """The same weights in the layout "canonical", in the dtypes of their format."""
        return self.prepare("canonical", donate=donate)

    def update(self, new: "Experts") -> "Experts":
        """`new` weights in the layout and with the sharding of these: the same bits as loading `new`.

        Arrays that are so already are shared with `new`, not copied.

        Raises:
            ValueError: `new` differs in a size, a dtype, the format, the order of gate and up, or the presence of a
                bias; or either is one layer of a stack.
        """
        check_instance("new", new, Experts, "jmx.Experts")
        if self.index is not None or new.index is not None:
            raise ValueError("`update` must be called on and with whole experts, not with a `layer` of a stack")
        abstract = jax.eval_shape(lambda experts: experts.prepare(self.layout), new)
        check_alike("new", abstract, self, " to take the place of these experts")
        return jax.tree.map(conversion.place_like, self, new.prepare(self.layout))

    def dequantize(self, dtype: Any = jnp.bfloat16) -> tuple[Float[Array, "*lead N H"], Float[Array, "*lead H I"]]:
        """Float weights: gate_up (E, 2I, H) and down (E, H, I), rows in their order. They take 2 to 8 times the memory.

        `dtype` is bfloat16 or float32; see `quantization.dequantize`.
        """
        dtype = check_dtype("dtype", dtype, jnp.bfloat16, jnp.float32)
        experts = self.prepare("packed")  # XLA's CPU compiler fails at float4 inside a loop

        def floats(role: str, size: int, q: BlockScaled) -> jax.Array:
            chosen = q if self.index is None else jax.tree.map(lambda array: array[self.index], q)
            rows = quantization.dequantize(chosen, dtype, self.format)
            return padding.without_rows(self, role, rows, axis=-2)[..., :size]

        gate_up = meshes.on_auto_axes(partial(floats, "gate_up", self.hidden_size), experts.gate_up)
        return gate_up, meshes.on_auto_axes(partial(floats, "down", self.intermediate_size), experts.down)
