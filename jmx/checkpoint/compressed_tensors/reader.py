"""Reading a compressed-tensors checkpoint: headers are checked first, then experts are read layer by layer."""

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmx.checkpoint import shards
from jmx.checkpoint.assembly import experts_of
from jmx.checkpoint.compressed_tensors import layers
from jmx.checkpoint.compressed_tensors.config import FILE, Quantization
from jmx.checkpoint.compressed_tensors.gptq_module import module_of
from jmx.checkpoint.compressed_tensors.layers import Layer
from jmx.checkpoint.compressed_tensors.module import Module, Piece
from jmx.checkpoint.compressed_tensors.quantization_config import quantization_of
from jmx.checkpoint.compressed_tensors.rounded import described
from jmx.checkpoint.compressed_tensors.tensor_names import QUANTIZED
from jmx.checkpoint.model_configs.common_keys import check_model_sizes
from jmx.checkpoint.placement import ShardingLike, send, sharding_of
from jmx.checkpoint.safetensors_reader import SafetensorsReader
from jmx.checkpoint.shards import CheckpointError, Tensor
from jmx.experts import ORDERS, ROLES, Experts
from jmx.numerics.formats import FORMATS, BlockScaled
from jmx.numerics.input_formats import INPUT_FORMATS, reduce_static_scales
from jmx.numerics.quantization import dequantize
from jmx.util.checks import check_bool, check_one_of, check_path, check_str
from jmx.util.typing import Array, Float32, Shaped

# Each quantized module has one of these.
_OF_QUANTIZED = ("weight_scale", "weight_scale_inv", "scale", "qweight")
_HERE = os.path.dirname(os.path.dirname(__file__))  # jmx.checkpoint, outside which experts are read
_REMEDY = (
    "; `inputs=False` loads the experts with inputs that are not quantized (of `jmx.models.load` "
    "`declared_inputs=False`, of commands `--inputs float`)"
)


class Reader(SafetensorsReader):
    """A `jmx.checkpoint.Reader` of files that compressed-tensors or another known tool quantized, of any model.

    The constructor reads config.json and the headers of the files. It checks that every tensor of experts is present
    and no other, that their number is the config's, and that nothing is quantized that the config does not name.
    Numbers are checked as they are read.

    Args:
        path: the directory.
        gate_up_order: the order of rows in a tensor of gate and up, as `jmx.Experts` has it, which files do not
            record. Ignored if gate and up are separate tensors.

    Attributes:
        config: the contents of config.json.
        quantization: of config.json; `quantization.scheme(name)` is the scheme of any module.
        layers: `Layer` by the name of the module that holds the experts, for layers with quantized experts.
        tensors: where each tensor of the checkpoint is stored, by name.

    Raises:
        CheckpointError: files that are wrong or broken, naming the file, the tensor or key, and the expectation.
        ValueError: `gate_up_order` is unknown, or None where it is needed.
    """

    _find: Callable[..., dict[str, Any]] = staticmethod(layers.find_layers)

    def __init__(self, path: str | os.PathLike[str], gate_up_order: str | None = None):
        check_one_of("gate_up_order", gate_up_order, ORDERS)
        self.path = check_path("path", path)
        self.config = shards.read_object(self.path / FILE)
        self.quantization: Quantization = quantization_of(self.path / FILE, self.config)
        self.tensors = shards.read_headers(self.path)
        self._modules: dict[str, dict[str, Piece]] = {}
        for name, tensor in self.tensors.items():
            module, _, last = name.rpartition(".")
            self._modules.setdefault(module, {})[last] = Piece(tensor)
            if last in QUANTIZED and self.quantization.scheme(module) is None:
                raise Piece(tensor).error(f"is of a quantized module, but no target of the config selects {module!r}")
        self.layers: dict[str, Layer] = self._find(self.tensors, self.quantization, gate_up_order)
        for name, layer in self.layers.items():
            sizes = {"num_experts": layer.num_experts, "hidden_size": layer.hidden_size}
            check_model_sizes(self.path / FILE, self.config, name, **sizes)

    def experts(
        self,
        layer: str,
        layout: str = "auto",
        sharding: ShardingLike = None,
        *,
        inputs: bool = True,
        pad: bool = False,
    ) -> Experts:
        """A layer's experts, which stay in their format throughout.

        Where files have several formats in a layer, all are in one in which their weights are the same numbers (see
        `common_format`), with a UserWarning. Single experts or projections in floats are rounded to it by
        `jmx.quantize`, with a UserWarning that names them and their error.

        Args:
            layer, sharding: as in `arrays`.
            layout: a name in `jmx.numerics.layouts.LAYOUTS`; "auto" is chosen for this machine.
            inputs: whether the experts declare the input format of their scheme, if it has one. Of static scales each
                product takes the largest, with a UserWarning if those of experts differ. False: inputs are not
                quantized.
            pad: whether sizes are padded to whole blocks of weights and inputs, which some kernels and inputs need; see
                `jmx.Experts.pad`.

        Raises:
            CheckpointError, ValueError: as `arrays`; an unknown `layout`, or one that does not support the format; with
                `inputs`, the errors of `declared_inputs`, and invalid static scales.
        """
        declared = self.declared_inputs(layer, pad=pad) if check_bool("inputs", inputs) else None
        check_bool("pad", pad)
        found = self._layer(layer)
        _warn_of_common_format(found)
        scales = [] if declared is None else _static_scales(found)
        read = partial(self.arrays, layer, sharding)
        experts = experts_of(read, found.format, found.gate_up_order, layout, sharding, declared, pad=pad)
        reduced = (None if s is None else jnp.asarray(reduce_static_scales(s)) for s in scales)
        return experts.with_inputs(declared, *reduced)

    def declared_inputs(self, layer: str, *, pad: bool = False) -> str | None:
        """The input format of a layer's scheme, a key of `INPUT_FORMATS`; None if inputs are not quantized.

        `pad`: whether sizes will be padded to whole blocks of inputs.

        Raises:
            CheckpointError: another format, or one whose blocks do not divide the sizes of the layer.
            ValueError: an unknown `layer`.
        """
        check_bool("pad", pad)
        found = self._layer(layer)
        declared = found.scheme.inputs
        if declared is None:
            return None
        if declared not in INPUT_FORMATS:
            problem = f"inputs of experts {layer!r} are {declared}, which is none of {[*INPUT_FORMATS]}{_REMEDY}"
            raise CheckpointError(self.quantization.file, f"{problem}, to which `with_inputs` gives another format")
        if pad:
            return declared
        try:
            INPUT_FORMATS[declared].check_sizes(found.hidden_size, found.intermediate_size)
        except ValueError as error:
            raise CheckpointError(self.quantization.file, f"experts {layer!r}: {error}{_REMEDY}") from error
        return declared

    def module(self, name: str) -> Module:
        """A quantized module outside experts, such as a projection of attention.

        Raises:
            CheckpointError: its tensors are not those of its scheme.
            ValueError: no module has that name, or it is not quantized.
        """
        check_str("name", name)
        scheme, pieces = self.quantization.scheme(name), self._modules.get(name)
        if scheme is None or pieces is None:
            raise ValueError(f"`name` (={name!r}) must be the name of a quantized module")
        return module_of(name, pieces, scheme)

    def module_of(self, name: str) -> Module | None:
        """The quantized module outside experts whose weight is the tensor `name`, such as "...q_proj.weight", or None.

        The tensors in the files decide: a config may name modules that are not quantized, such as embeddings.
        """
        module, _, last = check_str("name", name).rpartition(".")
        scaled = any(f"{module}.{scale}" in self.tensors for scale in _OF_QUANTIZED)
        return self.module(module) if last == "weight" and scaled else None

    def weight(self, name: str) -> BlockScaled:
        """The packed arrays of the weight of a quantized module outside experts, on the default device.

        Raises:
            CheckpointError: its tensors are not those of its scheme, or hold invalid numbers; see `Module.array`.
            ValueError: no module has that name, or it is not quantized.
        """
        module = self.module(name)
        arrays = jax.tree.map(jnp.asarray, module.weight())
        self._advance(sum(piece.tensor.nbytes for piece in module.pieces.values()))
        return arrays

    def dense(self, name: str, sharding: ShardingLike = None) -> Shaped[Array, "..."]:
        """A tensor outside the experts, by its name in the files; see `jmx.checkpoint.Reader.dense`.

        The weight of a quantized module, "...q_proj.weight", is dequantized to float32 (N, K).

        Raises:
            CheckpointError: no tensor has that name, or it holds invalid numbers.
            ValueError: a `sharding` that cannot split the array.
        """
        module = self.module_of(name)
        if module is None:
            return super().dense(name, sharding)
        its_sharding = sharding_of(name, sharding)
        weight = dequantize(self.weight(module.name), jnp.float32, module.format)
        return weight if its_sharding is None else jax.device_put(weight, its_sharding)

    def arrays(self, layer: str, sharding: ShardingLike = None) -> dict[str, Shaped[Array, "E ..."]]:
        """The packed arrays of a layer's experts, by their names in `jmx.Experts.arrays`.

        Modules in floats are rounded, with a UserWarning, as in `experts`.

        Args:
            layer: a key of `layers`.
            sharding: a `jax.sharding.Sharding` for all arrays, or a mapping or function that gives one (or None) by
                the array's name. Only experts that the devices need are read. None is the default device.

        Raises:
            CheckpointError: a tensor holds invalid numbers; see `Module.array`.
            ValueError: an unknown `layer`, a `sharding` that cannot split an array.
        """
        found = self._layer(layer)
        arrays = {key: send(key, array, sharding) for key, array in found.arrays().items()}
        jax.block_until_ready(arrays)
        self._advance(sum(tensor.nbytes for tensor in found.tensors()))
        _warn_of_rounding(found)
        return arrays

    def _stored(self, item: int | str) -> list[Tensor]:
        if item in self.layers:
            return [tensor for array in self.layers[str(item)].arrays().values() for tensor in array.tensors()]
        module = self.module_of(str(item))
        if module is None:
            return [self._tensor(str(item))]
        return [piece.tensor for name in module.format.arrays for piece in module.sources(name)]

    def _layer(self, layer: str) -> Layer:
        return self.layers[check_one_of("layer", layer, self.layers)]


def _static_scales(layer: Layer) -> list[Float32[np.ndarray, "E _"] | None]:
    try:
        return [layer.static_scales(role) for role in ROLES]
    except CheckpointError as error:
        raise CheckpointError(error.file, f"{error.problem}{_REMEDY}") from error


def _warn_of_common_format(layer: Layer) -> None:
    found = {FORMATS[scheme.weights].name for scheme in layer.schemes}
    if found != {layer.format.name}:
        warnings.warn(
            f"experts {layer.name!r} are {' and '.join(sorted(found))} in the files: all are held in "
            f"{layer.format.name}, as the same numbers",
            stacklevel=3,  # where experts are read
        )


def _warn_of_rounding(layer: Layer) -> None:
    """Warns of the modules that were rounded, and frees what they hold."""
    read = [module for module in layer.rounded if module.error is not None]
    if read:
        warnings.warn(described(layer.name, read, layer.scheme.inputs), skip_file_prefixes=(_HERE,))
    for module in read:
        module.forget()
