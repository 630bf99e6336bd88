"""Experts that a checkpoint holds as floats: their tensors, and the matrix of each projection.

Files hold each projection of each expert separately ("experts.3.down_proj.weight"), weights (out, in); or all experts
in one tensor ("experts.down_proj"), in an order that depends on the model: see `FUSED`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jmx.checkpoint.compressed_tensors.config import FILE
from jmx.checkpoint.model_configs.common_keys import check_model_sizes
from jmx.checkpoint.shards import CheckpointError, Tensor
from jmx.numerics.formats import Format
from jmx.util.typing import Float

PARTS = ("gate", "up", "down")
FLOATS = ("BF16", "F16", "F32")

# Names of the projections, by part in the order of `PARTS`; without a gate where experts have none.
_SPELLINGS = (
    {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    {"gate": "w1", "up": "w3", "down": "w2"},
    {"up": "up_proj", "down": "down_proj"},
)
_FUSED = ("gate_up_proj", "down_proj")

_APART = re.compile(r"((?:.*\.)?experts)\.(0|[1-9][0-9]{0,5})\.([^.]+)\.([^.]+)", re.DOTALL)
_LINEAR = re.compile(r"((?:.*\.)?block_sparse_moe)\.(input_linear|output_linear)\.weight", re.DOTALL)  # Granite's
_TOGETHER = re.compile(r"((?:.*\.)?experts)\.([^.0-9][^.]*)", re.DOTALL)


@dataclass(frozen=True)
class FusedLayout:
    """How tensors hold all experts, which files do not record.

    Args:
        transposed: whether a tensor is (E, in, out) instead of (E, out, in).
        interleaved: whether gate and up rows alternate. False: all gate rows come first.
        biased: whether other tensors hold biases.
    """

    transposed: bool
    interleaved: bool
    biased: bool


# By `model_type`. Those of gpt-oss, Qwen3-VL, Llama 4 and Granite are as they are published; transformers 5 writes the
# others with `save_pretrained(save_original_format=False)`.
_CONCATENATED = FusedLayout(transposed=False, interleaved=False, biased=False)
_TRANSPOSED = FusedLayout(transposed=True, interleaved=False, biased=False)
FUSED: dict[str, FusedLayout] = {
    "gpt_oss": FusedLayout(transposed=True, interleaved=True, biased=True),
    "qwen3_vl_moe": _TRANSPOSED,
    "llama4": _TRANSPOSED,
    "granitemoe": _CONCATENATED,
    "granitemoeshared": _CONCATENATED,
    "granitemoehybrid": _CONCATENATED,
    "deepseek_v2": _CONCATENATED,
    "deepseek_v3": _CONCATENATED,
    "glm4_moe": _CONCATENATED,
    "mixtral": _CONCATENATED,
    "olmoe": _CONCATENATED,
    "qwen2_moe": _CONCATENATED,
    "qwen3_moe": _CONCATENATED,
}


@dataclass(frozen=True)
class Matrix:
    """One projection of one expert.

    Args:
        module: its name in a file that holds projections separately, such as "model.layers.0.mlp.experts.3.up_proj".
        layer: name of the module that holds the layer's experts.
        part: one of `PARTS`.
        weight, bias: the tensors that hold it; `bias` may be None.
        expert: its index along the first axis of tensors that hold all experts, else None.
        layout: of these tensors.
    """

    module: str
    layer: str
    part: str
    weight: Tensor
    bias: Tensor | None = None
    expert: int | None = None
    layout: FusedLayout = _CONCATENATED

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), the contracted axis last."""
        if self.expert is None:
            return self.weight.shape[0], self.weight.shape[1]
        rows, columns = self.weight.shape[1:][:: -1 if self.layout.transposed else 1]
        return rows // (1 if self.part == "down" else 2), columns

    def read(self) -> Float[np.ndarray, "N K"]:
        """The weight, in the file's dtype."""
        whole = self.weight.view()
        if self.expert is None:
            return whole
        matrix = whole[self.expert]
        return np.ascontiguousarray((matrix.T if self.layout.transposed else matrix)[self.rows])

    def read_bias(self) -> Float[np.ndarray, " N"] | None:
        """The bias, or None."""
        if self.bias is None:
            return None
        whole = self.bias.view()
        return whole if self.expert is None else np.ascontiguousarray(whole[self.expert][self.rows])

    def tensors(self) -> list[Tensor]:
        """The tensors that hold it."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def rows(self) -> slice:
        """Its rows among those of a tensor of gate and up."""
        if self.part == "down":
            return slice(None)
        if self.layout.interleaved:
            return slice(0 if self.part == "gate" else 1, None, 2)
        half = self.shape[0]
        return slice(half) if self.part == "gate" else slice(half, None)


@dataclass(frozen=True)
class Layer:
    """The experts of a layer, all of which have the same shapes.

    Args:
        name: of the module that holds them.
        experts: of each expert its matrices, by part.
        fused: whether tensors hold all experts.
        format: what the experts are quantized to on reading; None: they are not.
    """

    name: str
    experts: tuple[Mapping[str, Matrix], ...]
    fused: bool
    format: Format | None = None

    @property
    def num_experts(self) -> int:
        return len(self.experts)

    @property
    def hidden_size(self) -> int:
        return self.experts[0]["up"].shape[1]

    @property
    def intermediate_size(self) -> int:
        return self.experts[0]["up"].shape[0]

    @property
    def roles(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The parts of "gate_up", and of "down"."""
        return tuple(part for part in PARTS[:2] if part in self.experts[0]), PARTS[2:]

    @property
    def gate_up_order(self) -> str | None:
        return "concatenated" if "gate" in self.experts[0] else None

    @property
    def has_bias(self) -> bool:
        return self.experts[0]["up"].bias is not None

    @property
    def dtype(self) -> str:
        """Of the weights, in safetensors' spelling."""
        return self.experts[0]["up"].weight.dtype

    def tensors(self) -> set[str]:
        """Names of the tensors that hold these experts."""
        return {tensor.name for its in self.experts for matrix in its.values() for tensor in matrix.tensors()}


def find_layers(directory: Path, found: Mapping[str, Tensor], config: Mapping[str, Any]) -> list[Layer]:
    """The layers of experts among the tensors of a checkpoint, in the order of the files.

    Args:
        directory: of the checkpoint, for errors.
        found: its tensors.
        config: the contents of config.json.

    Raises:
        CheckpointError: there are no experts; some are missing, differ in shape, are not floats, or are stored in an
            unknown order; or their number is not the config's.
    """
    apart: dict[str, dict[int, dict[str, dict[str, Tensor]]]] = {}
    together: dict[str, dict[str, Tensor]] = {}
    for name, tensor in found.items():
        if (match := _APART.fullmatch(name)) is not None:
            layer, expert, projection, last = match[1], int(match[2]), match[3], match[4]
            apart.setdefault(layer, {}).setdefault(expert, {}).setdefault(projection, {})[last] = tensor
        elif (match := _LINEAR.fullmatch(name)) is not None:
            projection = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}[match[2]]
            together.setdefault(f"{match[1]}.experts", {})[projection] = tensor
        elif (match := _TOGETHER.fullmatch(name)) is not None:
            together.setdefault(match[1], {})[match[2]] = tensor
    if both := apart.keys() & together.keys():
        raise CheckpointError(
            directory, f"experts of {min(both)!r} must be in separate tensors or in one, but are both"
        )
    layers = [
        *(_apart(directory, name, experts) for name, experts in apart.items()),
        *(_fused(name, tensors, config.get("model_type")) for name, tensors in together.items()),
    ]
    if not layers:
        raise CheckpointError(directory, "must hold tensors of experts, such as 'experts.0.up_proj.weight'")
    for layer in layers:
        sizes = {"num_experts": layer.num_experts, "hidden_size": layer.hidden_size}
        check_model_sizes(directory / FILE, config, layer.name, **sizes)
    return layers


def _apart(directory: Path, name: str, found: Mapping[int, Mapping[str, Mapping[str, Tensor]]]) -> Layer:
    projections = {projection for its in found.values() for projection in its}
    spelling = next((names for names in _SPELLINGS if set(names.values()) == projections), None)
    if spelling is None:
        known = " or ".join(str([*names.values()]) for names in _SPELLINGS)
        raise CheckpointError(directory, f"experts of {name!r} must be of {known}, but are of {sorted(projections)}")
    experts = []
    for expert in range(len(found)):
        matrices = {}
        for part, projection in spelling.items():
            tensors = found.get(expert, {}).get(projection, {})
            module = f"{name}.{expert}.{projection}"
            if "weight" not in tensors:
                raise CheckpointError(directory, f"tensor '{module}.weight' is missing, where experts are {len(found)}")
            for last, tensor in tensors.items():
                if last not in ("weight", "bias"):
                    raise CheckpointError(tensor.file, f"tensor {tensor.name!r} is not one of float experts")
            matrices[part] = Matrix(module, name, part, tensors["weight"], tensors.get("bias"))
        experts.append(matrices)
    layer = Layer(name, tuple(experts), fused=False)
    _check(layer)
    return layer


def fused_layout(tensor: Tensor, what: str, model_type: Any) -> FusedLayout:
    """The order in a model's tensors of all experts. CheckpointError if it is not known; `what` the tensor holds."""
    if not isinstance(model_type, str) or model_type not in FUSED:
        raise CheckpointError(
            tensor.file,
            f"tensor {tensor.name!r} holds {what}, in an order that files do not record; it is known for "
            f"`model_type` {', '.join(FUSED)}, and not for {model_type!r}",
        )
    return FUSED[model_type]


def _fused(name: str, tensors: Mapping[str, Tensor], model_type: Any) -> Layer:
    first = next(iter(tensors.values()))
    layout = fused_layout(first, "all experts", model_type)
    known = {*_FUSED, *(f"{projection}_bias" for projection in _FUSED if layout.biased)}
    for last, tensor in tensors.items():
        if last not in known:
            raise CheckpointError(tensor.file, f"tensor {tensor.name!r} is not one of float experts")
    for projection in _FUSED:
        if projection not in tensors:
            raise CheckpointError(first.file, f"tensor '{name}.{projection}' is missing")
        tensor, bias = tensors[projection], tensors.get(f"{projection}_bias")
        rows = 2 if layout.transposed else 1  # the axis
        halves = 2 if projection == "gate_up_proj" else 1
        if len(tensor.shape) != 3 or 0 in tensor.shape or tensor.shape[rows] % halves:
            form = "(E, in, out)" if layout.transposed else "(E, out, in)"
            whole = ", with gate and up rows" if halves == 2 else ""
            raise CheckpointError(tensor.file, f"tensor {tensor.name!r} (shape {tensor.shape}) must be {form}{whole}")
        if bias is not None and bias.shape != (tensor.shape[0], tensor.shape[rows]):
            expected = tensor.shape[0], tensor.shape[rows]
            raise CheckpointError(bias.file, f"tensor {bias.name!r} has shape {bias.shape}, but must have {expected}")
    counts = {tensors[projection].shape[0] for projection in _FUSED}
    if len(counts) > 1:
        raise CheckpointError(first.file, f"tensors of {name!r} must be of one number of experts, not {sorted(counts)}")

    def matrix(expert: int, part: str) -> Matrix:
        projection = "down_proj" if part == "down" else "gate_up_proj"
        weight, bias = tensors[projection], tensors.get(f"{projection}_bias")
        return Matrix(f"{name}.{expert}.{part}_proj", name, part, weight, bias, expert, layout)

    layer = Layer(name, tuple({part: matrix(e, part) for part in PARTS} for e in range(counts.pop())), fused=True)
    _check(layer)
    return layer


def _check(layer: Layer) -> None:
    """CheckpointError unless all are floats, gate, up and down agree in size and bias, and experts are alike."""
    for matrices in layer.experts:
        for matrix in matrices.values():
            its = matrix.weight
            for tensor in (its, matrix.bias):
                if tensor is not None and tensor.dtype not in FLOATS:
                    raise CheckpointError(
                        tensor.file, f"tensor {tensor.name!r} is {tensor.dtype}, but must be {' or '.join(FLOATS)}"
                    )
            if matrix.expert is None and (len(its.shape) != 2 or 0 in its.shape):
                raise CheckpointError(its.file, f"tensor {its.name!r} (shape {its.shape}) must have rows and columns")
            if matrix.expert is None and matrix.bias is not None and matrix.bias.shape != its.shape[:1]:
                raise CheckpointError(
                    its.file,
                    f"tensor {matrix.bias.name!r} has shape {matrix.bias.shape}, but must have {its.shape[:1]}",
                )
            first = layer.experts[0][matrix.part]
            if matrix.shape != first.shape or (matrix.bias is None) != (first.bias is None):
                raise CheckpointError(
                    its.file, f"tensor {its.name!r} must be as that of expert 0 of {layer.name!r}: {first.shape}"
                )
    having = [part for part, its in layer.experts[0].items() if its.bias is not None]
    if having and len(having) < len(layer.experts[0]):
        its = layer.experts[0][having[0]].weight
        rule = f"all of {[*layer.experts[0]]} must have a bias, or none, but {having} have one"
        raise CheckpointError(its.file, f"experts of {layer.name!r}: {rule}")
    up, down = (layer.experts[0][part] for part in PARTS[1:])
    gate = layer.experts[0].get("gate", up)
    if gate.shape != up.shape or down.shape != gate.shape[::-1]:
        what, shapes = ("gate and up", f"{gate.shape}, {up.shape}") if "gate" in layer.experts[0] else ("up", up.shape)
        raise CheckpointError(
            gate.weight.file,
            f"experts of {layer.name!r} must be {what} (I, H) and down (H, I), but are {shapes} and {down.shape}",
        )
