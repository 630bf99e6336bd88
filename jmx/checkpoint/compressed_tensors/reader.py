"""Reading a compressed-tensors checkpoint: checked whole before anything is built, then expert by expert."""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jmx.checkpoint import shards
from jmx.checkpoint.assembly import experts_of
from jmx.checkpoint.compressed_tensors import layers
from jmx.checkpoint.compressed_tensors.config import FILE, Quantization
from jmx.checkpoint.compressed_tensors.layers import Layer
from jmx.checkpoint.compressed_tensors.module import Module, Piece
from jmx.checkpoint.compressed_tensors.quantization_config import quantization_of
from jmx.checkpoint.compressed_tensors.tensor_names import QUANTIZED
from jmx.checkpoint.model_configs.common_keys import check_model_sizes
from jmx.checkpoint.placement import ShardingLike, place, sharding_of
from jmx.checkpoint.safetensors_reader import SafetensorsReader
from jmx.checkpoint.shards import CheckpointError
from jmx.experts import ORDERS, ROLES, Experts
from jmx.numerics.input_formats import INPUT_FORMATS, reduce_static_scales
from jmx.numerics.quantization import dequantize
from jmx.util.checks import check_bool, check_one_of, check_path, check_str

_WAY_OUT = "; with `inputs=False` experts load without, and inputs stay as they are"


class Reader(SafetensorsReader):
    """A `jmx.checkpoint.Reader` of files that compressed-tensors or another known tool quantized, of any model.

    Making one reads config.json and the headers of the files, and checks that every tensor of experts is there and no
    other, as many as the config has, and that nothing is quantized which the config does not name. Numbers
    are checked as they are read.

    Args:
        path: the directory.
        gate_up_order: "concatenated" or "interleaved": the order of rows in a tensor of gate and up, which files do
            not record. Not used where they are two tensors.

    Attributes:
        config: what config.json holds.
        quantization: of config.json; `quantization.scheme(name)` is the scheme of any module.
        layers: `Layer` by the name of the module that holds the experts, of quantized ones alone.
        tensors: where each tensor of the checkpoint lies, experts' or not, by name.

    Raises:
        CheckpointError: files that are wrong or broken, naming the file, the tensor or key, and the expectation.
        ValueError: an unknown `gate_up_order`, or None where it is needed.
    """

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
                raise Piece(tensor).error(f"is of a quantized module, but no target of the config means {module!r}")
        self.layers: dict[str, Layer] = layers.find(self.tensors, self.quantization, gate_up_order)
        for name, layer in self.layers.items():
            sizes = {"num_experts": layer.num_experts, "hidden_size": layer.hidden_size}
            check_model_sizes(self.path / FILE, self.config, name, **sizes)

    def experts(
        self, layer: str, layout: str = "auto", sharding: ShardingLike = None, *, inputs: bool = True
    ) -> Experts:
        """A layer's experts, in their format all the way.

        Args:
            layer, sharding: as in `arrays`.
            layout: a name in `jmx.numerics.layouts.LAYOUTS`; "auto" is that of the machine's engine family.
            inputs: whether they declare the format of inputs that their scheme names, if it does. Static scales become
                one a product, the largest; with a UserWarning where experts' differ. False: inputs are not
                quantized.

        Raises:
            CheckpointError, ValueError: as `arrays`; an unknown `layout`, or one that does not hold the format; with
                `inputs`, those of `declared_inputs`, and static scales that no inputs have.
        """
        check_bool("inputs", inputs)
        declared = self.declared_inputs(layer) if inputs else None
        found = self._layer(layer)
        scales = [] if declared is None else _static_scales(found)
        read = partial(self.arrays, layer, sharding)
        experts = experts_of(read, found.format, found.gate_up_order, layout, sharding, declared)
        reduced = (None if s is None else jnp.asarray(reduce_static_scales(s)) for s in scales)
        return experts.with_inputs(declared, *reduced)

    def declared_inputs(self, layer: str) -> str | None:
        """The format in which the scheme of a layer has inputs, a key of `INPUT_FORMATS`; None: none.

        Raises:
            CheckpointError: another format, or one whose blocks do not divide the sizes of the layer.
            ValueError: a `layer` that is not there.
        """
        found = self._layer(layer)
        declared = found.scheme.inputs
        if declared is None:
            return None
        if declared not in INPUT_FORMATS:
            problem = f"inputs of experts {layer!r} are {declared}, which is none of {[*INPUT_FORMATS]}{_WAY_OUT}"
            raise CheckpointError(self.quantization.file, problem)
        try:
            INPUT_FORMATS[declared].check_sizes(found.hidden_size, found.intermediate_size)
        except ValueError as error:
            raise CheckpointError(self.quantization.file, f"experts {layer!r}: {error}{_WAY_OUT}") from error
        return declared

    def module(self, name: str) -> Module:
        """A quantized module outside experts, such as a projection of attention.

        Raises:
            CheckpointError: its tensors are not those that its scheme calls for.
            ValueError: there is none of that name, or it is not quantized.
        """
        check_str("name", name)
        scheme, pieces = self.quantization.scheme(name), self._modules.get(name)
        if scheme is None or pieces is None:
            raise ValueError(f"`name` (={name!r}) must be that of a quantized module")
        return Module(name, pieces, scheme)

    def module_of(self, name: str) -> Module | None:
        """The quantized module outside experts whose weight is the tensor `name`, such as "...q_proj.weight", or None.

        What files hold decides: a config may name modules that it does not quantize, such as embeddings.
        """
        module, _, last = check_str("name", name).rpartition(".")
        scaled = any(f"{module}.{scale}" in self.tensors for scale in ("weight_scale", "weight_scale_inv"))
        return self.module(module) if last == "weight" and scaled else None

    def dense(self, name: str, sharding: ShardingLike = None) -> jax.Array:
        """A tensor outside the experts, by its name in the files; see `jmx.checkpoint.Reader.dense`.

        The weight of a quantized module, "...q_proj.weight", is dequantized to float32 (N, K).

        Raises:
            CheckpointError: there is none of that name; numbers that no such tensor holds.
            ValueError: a `sharding` that cannot split the array.
        """
        module = self.module_of(name)
        if module is None:
            return super().dense(name, sharding)
        its_sharding = sharding_of(name, sharding)
        weight = dequantize(jax.tree.map(jnp.asarray, module.weight()), jnp.float32, module.format)
        self._advance(sum(piece.tensor.nbytes for piece in module.pieces.values()))
        return weight if its_sharding is None else jax.device_put(weight, its_sharding)

    def arrays(self, layer: str, sharding: ShardingLike = None) -> dict[str, jax.Array]:
        """The packed arrays of a layer's experts, by name as `jmx.Experts.arrays` names them.

        Args:
            layer: a key of `layers`.
            sharding: a `jax.sharding.Sharding` for every array, or a mapping or function that gives one (or None) by
                the array's name. Only experts that the devices need are read. None is the default device.

        Raises:
            CheckpointError: numbers that no such tensor holds; see `Module.array`.
            ValueError: a `layer` that is not there, a `sharding` that cannot split an array.
        """
        found = self._layer(layer)
        arrays = {key: place(key, array, sharding) for key, array in found.arrays().items()}
        self._advance(sum(tensor.nbytes for tensor in found.tensors()))
        return arrays

    def _layer(self, layer: str) -> Layer:
        return self.layers[check_one_of("layer", layer, self.layers)]


def _static_scales(layer: Layer) -> list[np.ndarray | None]:
    try:
        return [layer.static_scales(role) for role in ROLES]
    except CheckpointError as error:
        raise CheckpointError(error.file, f"{error.problem}{_WAY_OUT}") from error
