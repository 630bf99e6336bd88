"""The master weights of a layer's experts as a pytree, which the layer rounds to their format at each call."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmx.experts import ORDERS, Experts, check_sizes, creation
from jmx.experts.stacking import check_one_layer
from jmx.numerics import formats, quantization
from jmx.numerics.formats import MXFP4, BlockScaled, Format
from jmx.qat.rounding import check_gradients, check_master
from jmx.util import pytrees
from jmx.util.checks import check_bool, check_dtype, check_instance, check_key, check_one_of, check_values
from jmx.util.typing import AnyArray, Array, Float, Key, Shaped, UInt32

_WEIGHTS = ("gate_up", "down")
MASTER_ARRAYS = ("gate_up", "down", "gate_up_bias", "down_bias")


@dataclass(frozen=True)
class QAT:
    """How a layer trains master weights of its experts: the argument `qat` of modules. Hashable.

    Args:
        gradients: "straight_through": those of the rounded weights. "clipped": the same, but 0 where the master weight
            is above the largest value, or below the least, that its block can hold with its scale.
        scale_rule: of MXFP4, as of `jmx.quantize`.
        dtype: of the master weights, float32 or bfloat16.

    Raises:
        ValueError, TypeError: arguments that are not as above.
    """

    gradients: str = "straight_through"
    scale_rule: str = "ocp"
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        check_gradients(self.gradients)
        check_one_of("scale_rule", self.scale_rule, quantization.SCALE_RULES)
        object.__setattr__(self, "dtype", check_dtype("dtype", self.dtype, jnp.float32, jnp.bfloat16))

    def masters(self, experts: Experts) -> "MasterExperts":
        """Master weights with the values of quantized `experts` of one layer, to train from.

        Raises:
            ValueError, TypeError: a stack of layers, experts with padding or a declared input format, or of a format
                that nothing rounds to.
        """
        check_instance("experts", experts, Experts, "jmx.Experts")
        check_one_layer(experts)
        if experts.padded_to is not None:
            raise ValueError(f"`experts` (with padded_to={experts.padded_to}) must have no padding: see `unpad`")
        if experts.input_format is not None:
            raise ValueError(
                f"`experts` (with input_format={experts.input_format!r}) must declare no input format: give it to the "
                "layer instead"
            )
        return MasterExperts.of(
            *experts.dequantize(self.dtype),
            experts.gate_up_bias,
            experts.down_bias,
            gate_up_order=experts.gate_up_order,
            format=experts.format,
            gradients=self.gradients,
            scale_rule=self.scale_rule,
        )


@pytrees.register(
    data=[*MASTER_ARRAYS],
    static=["format", "gate_up_order", "hidden_size", "intermediate_size", "gradients", "scale_rule"],
    format=formats.CODEC,
)
@dataclass(frozen=True)
class MasterExperts:
    """Master weights of E experts, in place of `jmx.Experts` in `jmx.moe`. Created by `of`, `random` or `QAT.masters`.

    A call rounds them to `format` and computes what it computes with the experts of `quantize`, on any backend. Their
    gradients are those of the rounded weights; those of biases are exact.

    Args:
        gate_up: float32 or bfloat16 (E, 2I, H), or (E, I, H) without a gate.
        down: float32 or bfloat16 (E, H, I).
        gate_up_bias: floating (E, 2I) or (E, I), or None.
        down_bias: floating (E, H), or None.
        format, gate_up_order, hidden_size, intermediate_size: as of `jmx.Experts`. Static, as all below.
        gradients, scale_rule: as of `QAT`.
    """

    gate_up: Float[Any, "*lead N H"]
    down: Float[Any, "*lead H I"]
    gate_up_bias: Float[Any, "*lead N"] | None
    down_bias: Float[Any, "*lead H"] | None
    format: Format
    gate_up_order: str | None
    hidden_size: int
    intermediate_size: int
    gradients: str = "straight_through"
    scale_rule: str = "ocp"

    @classmethod
    def of(
        cls,
        gate_up: Float[AnyArray, "E N H"],
        down: Float[AnyArray, "E H I"],
        gate_up_bias: Float[AnyArray, "E N"] | None = None,
        down_bias: Float[AnyArray, "E H"] | None = None,
        *,
        gate_up_order: str | None,
        format: Format | str = MXFP4,
        gradients: str = "straight_through",
        scale_rule: str = "ocp",
    ) -> "MasterExperts":
        """Master weights from arrays, see the class.

        Raises:
            ValueError, TypeError: arrays whose shapes or dtypes do not fit each other or the format; a format with an
                order of columns, which needs calibration; a scale rule that is not of the format.
        """
        check_one_of("gate_up_order", gate_up_order, ORDERS)
        check_gradients(gradients)
        check_one_of("scale_rule", scale_rule, quantization.SCALE_RULES)
        for name, weight in (("gate_up", gate_up), ("down", down)):
            check_master(name, weight)
        sizes = down.shape[-2:] if len(down.shape) == 3 else (0, 0)
        format = formats.get(format)
        made = cls(gate_up, down, gate_up_bias, down_bias, format, gate_up_order, *sizes, gradients, scale_rule)
        made._check("", abstract=False)
        return made

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
        qat: QAT = QAT(),
    ) -> "MasterExperts":
        """Normal weights with a standard deviation of K ** -0.5, and biases of 0.

        Raises:
            ValueError, TypeError: invalid sizes, and arguments of a wrong type.
        """
        check_key("key", key)
        check_one_of("gate_up_order", gate_up_order, ORDERS)
        check_instance("qat", qat, QAT, "a jmx.training.QAT")
        format = formats.get(format)
        bias_dtype = creation.resolve_bias_dtype("bias_dtype", bias_dtype)
        num_experts, hidden_size, intermediate_size = check_sizes(num_experts, hidden_size, intermediate_size, format)
        check_bool("bias", bias)
        rows = intermediate_size * (1 if gate_up_order is None else 2)
        shapes = (num_experts, rows, hidden_size), (num_experts, hidden_size, intermediate_size)
        weights = [
            jax.random.normal(each, shape, qat.dtype) * jnp.asarray(shape[-1] ** -0.5, qat.dtype)
            for each, shape in zip(jax.random.split(key), shapes, strict=True)
        ]
        biases = [jnp.zeros(shape[:-1], bias_dtype) if bias else None for shape in shapes]
        how = {"gradients": qat.gradients, "scale_rule": qat.scale_rule}
        return cls.of(*weights, *biases, gate_up_order=gate_up_order, format=format, **how)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate_up.shape[0]

    def check(self) -> None:
        """Raises ValueError or TypeError, naming the array, unless the arrays fit the sizes, the format and each other.

        They may be abstract or traced.
        """
        self._check("experts.", abstract=True)

    def _check(self, prefix: str, *, abstract: bool) -> None:
        for name in _WEIGHTS:
            check_master(f"{prefix}{name}", weight := getattr(self, name), abstract=abstract)
            if len(weight.shape) != 3:
                raise ValueError(f"`{prefix}{name}` (shape {tuple(weight.shape)}) must be (E, N, K) of one layer")
        if self.gate_up.dtype != self.down.dtype:
            raise TypeError(f"`{prefix}down` (dtype {self.down.dtype}) must be {self.gate_up.dtype}, as `gate_up`")
        if "order" in self.format.arrays:
            raise ValueError(f"`format` (={self.format.name!r}) must have no order of columns, which needs calibration")
        if self.scale_rule != "ocp" and self.format != MXFP4:
            raise ValueError(f"`scale_rule` (={self.scale_rule!r}) must be 'ocp': other rules are for MXFP4 only")
        check_sizes(self.num_experts, self.hidden_size, self.intermediate_size, self.format)
        rows = self.intermediate_size * (1 if self.gate_up_order is None else 2)
        shapes = {
            "gate_up": (self.num_experts, rows, self.hidden_size),
            "down": (self.num_experts, self.hidden_size, self.intermediate_size),
        }
        for name, shape in shapes.items():
            if tuple(getattr(self, name).shape) != shape:
                raise ValueError(f"`{prefix}{name}` (shape {tuple(getattr(self, name).shape)}) must be {shape}")
            bias = getattr(self, f"{name}_bias")
            creation.check_bias(f"{prefix}{name}_bias", bias, shape[:-1], abstract=abstract)

    def arrays(self) -> dict[str, Shaped[Any, "..."]]:
        """The arrays by name: gate_up, down, and the biases if present."""
        return {name: array for name in MASTER_ARRAYS if (array := getattr(self, name)) is not None}

    def with_arrays(self, arrays: Mapping[str, Any]) -> "MasterExperts":
        """These with other arrays, by the names of `arrays`; those that are not given become None.

        Raises:
            TypeError: not a mapping. Arrays and other names are not checked.
        """
        check_instance("arrays", arrays, Mapping, "a mapping of names to arrays")
        return dataclasses.replace(self, **{name: arrays.get(name) for name in MASTER_ARRAYS})

    def quantize(self) -> Experts:
        """The rounded experts, in the layout "packed": the bits of `Experts.quantize`, also while tracing.

        Blocks with NaN or infinity get the scale NaN. Weights have no gradient; biases are shared.

        Raises:
            ValueError, TypeError: as `check`, and for arrays without values.
        """
        check_values({"experts": self})
        self.check()
        gate_up, down = (
            _quantized(lax.stop_gradient(weight), order, self.format, self.scale_rule)
            for weight, order in ((self.gate_up, self.gate_up_order), (self.down, None))
        )
        return Experts.of(
            gate_up, down, self.gate_up_bias, self.down_bias, gate_up_order=self.gate_up_order, format=self.format
        )

    def skeleton(self) -> Experts:
        """The experts of `quantize` without their arrays."""
        empty = BlockScaled(*(None,) * len(BlockScaled._fields))
        order, sizes = self.gate_up_order, (self.hidden_size, self.intermediate_size)
        return Experts(empty, empty, None, None, None, self.format, order, "packed", *sizes)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _quantized(
    weight: Float[Array, "E N K"], gate_up_order: str | None, format: Format, scale_rule: str
) -> BlockScaled:
    """Packed arrays of a float weight, all experts at once."""
    options = {"format": format, "scale_rule": scale_rule, "nonfinite": "nan_block"}
    return jax.vmap(partial(creation.quantize_expert, gate_up_order=gate_up_order, **options))(weight)


def check_of_layer(masters: MasterExperts, qat: QAT, *, bias: bool, **fields: Any) -> None:
    """Raises ValueError or TypeError, naming the argument, unless these fit a layer of such `qat` and `fields`."""
    masters.check()
    if (masters.gate_up_bias is not None) is not bias or (masters.down_bias is not None) is not bias:
        raise ValueError(f"`bias` (={bias}) must be that of `experts`")
    if masters.gate_up.dtype != qat.dtype:
        raise TypeError(f"`experts.gate_up` (dtype {masters.gate_up.dtype}) must be {qat.dtype}, the dtype of `qat`")
    for name, wanted in (fields | {"gradients": qat.gradients, "scale_rule": qat.scale_rule}).items():
        if (its := getattr(masters, name)) != wanted:
            raise ValueError(f"`{name}` (={wanted!r}) must be that of `experts`, {its!r}")
