"""The protocol of every family's reader: `config`, `layers`, `dense(name)` and `experts(layer)`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from jmx.checkpoint.placement import ShardingLike
from jmx.experts import Experts
from jmx.numerics.formats import Format
from jmx.util.typing import Array, Shaped


class ExpertLayer(Protocol):
    """The description of one layer's experts, known before any weight is read.

    Attributes:
        num_experts: E.
        hidden_size: H, the experts' inputs and outputs.
        intermediate_size: I, so that gate_up is (E, 2 I, H), or (E, I, H) without a gate, and down (E, H, I).
        format: of the weights that `Reader.experts` returns; None where they are floats.
        gate_up_order: of those weights, as `jmx.Experts` has it; None without a gate.
        has_bias: whether both products have biases.
    """

    @property
    def num_experts(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def format(self) -> Format | None: ...
    @property
    def gate_up_order(self) -> str | None: ...
    @property
    def has_bias(self) -> bool: ...


class Reader[Key: (int, str)](Protocol):
    """A checkpoint, checked when it is opened and read tensor by tensor.

    A family of one model has numbered layers and neutral tensor names (`jmx.checkpoint.gpt_oss`). A family of files of
    any model uses the names in the files for both, such as "model.layers.0.mlp.experts"
    (`jmx.checkpoint.compressed_tensors`, `jmx.checkpoint.quantizing`).

    Attributes:
        path: the directory.
        config: the contents of config.json: a dataclass of `jmx.checkpoint.model_configs`, or the JSON object itself.
        layers: the layers that have experts, in order; the keys are what `experts` takes.

    Raises:
        CheckpointError: from the constructor, for files that are wrong or broken; on reading, for numbers that a tensor
            must not hold. The message names the file, the tensor or key, and the expectation.
    """

    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> Any: ...
    @property
    def layers(self) -> Mapping[Key, ExpertLayer]: ...

    def dense(self, name: str, sharding: ShardingLike = None) -> Shaped[Array, "..."]:
        """A tensor outside the experts.

        Args:
            name: of the tensor.
            sharding: a `jax.sharding.Sharding`, or a mapping or function that gives one (or None) by `name`. Only the
                slices that this process's devices need are read. None is the default device.

        Returns:
            The array in the shape and dtype of the file; weights are (out, in). A quantized weight is dequantized to
            float32.

        Raises:
            CheckpointError: see the class.
            ValueError: an unknown `name`, a `sharding` that cannot split the array.
        """
        ...

    def experts(self, layer: Key, layout: str = "auto", sharding: ShardingLike = None) -> Experts:
        """One layer's experts, which stay quantized throughout.

        Args:
            layer: a key of `layers`.
            layout: a name in `jmx.numerics.layouts.LAYOUTS`; "auto" is the one that this machine's backends prefer.
            sharding: as in `dense`, by the arrays' names in `Experts.arrays`.

        Raises:
            CheckpointError: see the class.
            ValueError: an unknown `layer`, an unknown `layout` or one that does not support the format, a
                `sharding` that cannot split an array.
        """
        ...
