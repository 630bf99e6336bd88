"""Reading adapters of experts from PEFT's files."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jmx.checkpoint.peft.config import Config
from jmx.checkpoint.peft.names import CONFIG, MODULES, PARAMETERS, PROJECTIONS, WEIGHTS, Place, parse
from jmx.checkpoint.shards import DTYPES, CheckpointError, Tensor, read_header
from jmx.experts import Experts
from jmx.lora import Adapter, Adapters
from jmx.lora.adapters import sizes_of
from jmx.numerics.gate_up import GATE_UP_ORDERS, join_gate_up, split_gate_up
from jmx.util.checks import check_instance, check_int, check_one_of, check_path
from jmx.util.typing import Float

_DTYPES = ("F32", "BF16", "F16")
_Pair = dict[str, Tensor]  # by matrix, "a" or "b"


def load(
    path: str | os.PathLike[str], experts: Mapping[int, Experts], *, gate_up_order: str | None = None
) -> dict[int, Adapters]:
    """The adapters in a directory that PEFT, or `save`, wrote: by the number of the layer.

    Args:
        path: the directory.
        experts: those of each layer of the model, by its number; they may be abstract. Layers that the files do not
            name get no adapters.
        gate_up_order: the order of gate and up in the rows of the model's fused weight, as transformers has it; None:
            that of `experts`. Rows are put into theirs.

    Returns:
        Adapters with numpy arrays of the files' dtype, which fit `experts`. Fused weights have `gate_up` and `down`,
        experts that are modules `gate`, `up` and `down`.

    Raises:
        CheckpointError: a file is missing or broken; a tensor that is not of an adapter of these experts, or has
            another shape or dtype than that; an expert, or a layer that the config names, without the adapter that
            others have; a config with a feature that jmx does not have.
        ValueError, TypeError: other arguments.
    """
    reader = Reader(path, experts, gate_up_order=gate_up_order)
    return {layer: reader.adapters(layer) for layer in reader.layers}


class Reader:
    """The adapters of `load`, of which one layer is read at a time. All files are checked when it is made.

    Args and errors: those of `load`.

    Attributes:
        layers: numbers of the layers that have adapters, in ascending order.
    """

    def __init__(
        self, path: str | os.PathLike[str], experts: Mapping[int, Experts], *, gate_up_order: str | None = None
    ):
        directory = check_path("path", path)
        check_layers(experts)
        check_one_of("gate_up_order", gate_up_order, (*GATE_UP_ORDERS, None))
        if not directory.is_dir():
            raise CheckpointError(directory, f"must be a directory that holds {CONFIG} and {WEIGHTS}")
        config, file = Config.read(directory / CONFIG), directory / WEIGHTS
        self._experts, self._order = experts, gate_up_order
        fused: dict[int, dict[str, _Pair]] = {}
        modules: dict[int, dict[str, dict[int, _Pair]]] = {}
        names: dict[int, str] = {}
        for name, tensor in read_header(file).items():
            place = parse(name)
            if place is None:
                raise CheckpointError(file, f"tensor {name!r} must be of an adapter of experts: jmx has no others")
            _check(tensor, place, experts)
            if place.projection is None:
                names[place.layer] = place.module
                key = "wrapped" if place.wrapped else "outer"
                fused.setdefault(place.layer, {}).setdefault(key, {})[place.matrix] = tensor
            else:
                assert place.expert is not None
                names[place.layer] = place.module.rsplit(".", 2)[0]
                of_layer = modules.setdefault(place.layer, {}).setdefault(place.projection, {})
                of_layer.setdefault(place.expert, {})[place.matrix] = tensor
        if both := sorted(fused.keys() & modules.keys()):
            raise CheckpointError(file, f"layer {both[0]} must have adapters of fused weights or of modules, not both")
        self._found: dict[int, Mapping[str, _Fused | _Stacked]] = {}
        for layer in sorted(names):
            its = experts[layer]
            if layer in fused:
                self._found[layer] = _fused(file, fused[layer], its, config, names[layer])
            else:
                self._found[layer] = _modules(file, modules[layer], its, config, names[layer])
            self.shapes(layer).check(its)
        if not self._found:
            raise CheckpointError(file, "must have adapters of experts, but has none")
        self.layers = tuple(self._found)
        for layer in sorted(experts.keys() - self._found.keys()):
            _check_absent(file, config, layer, next(iter(names.items())), fused)

    def shapes(self, layer: int) -> Adapters:
        """The shapes and dtypes of a layer's adapters, of which nothing is read.

        Raises:
            TypeError, ValueError: a layer that is not one of `layers`.
        """
        self._check(layer)
        return Adapters(**{target: each.shapes() for target, each in self._found[layer].items()})

    def adapters(self, layer: int) -> Adapters:
        """A layer's adapters, as `load` has them.

        Raises:
            TypeError, ValueError: a layer that is not one of `layers`.
        """
        self._check(layer)
        its = self._experts[layer]
        read = {target: each.read() for target, each in self._found[layer].items()}
        if "gate_up" in read and its.gate_up_order is not None:
            read["gate_up"] = _reordered(read["gate_up"], self._order or its.gate_up_order, its.gate_up_order)
        return Adapters(**read)

    def _check(self, layer: int) -> None:
        if check_int("layer", layer) not in self._found:
            raise ValueError(f"`layer` (={layer}) must be one of {[*self._found]}, which have adapters")


@dataclass(frozen=True)
class _Fused:
    """An adapter of a fused weight: A (E r, K) and B (N, r E) of `rank` r."""

    a: Tensor
    b: Tensor
    rank: int
    scale: float

    def shapes(self) -> Adapter:
        number = self.a.shape[0] // self.rank
        a, b = (number, self.rank, self.a.shape[1]), (number, self.b.shape[0], self.rank)
        return Adapter(_shape(a, self.a), _shape(b, self.b), self.scale)

    def read(self) -> Adapter:
        a: Float[np.ndarray, "E r K"] = self.a.view().reshape(-1, self.rank, self.a.shape[1])
        b: Float[np.ndarray, "N r E"] = self.b.view().reshape(self.b.shape[0], self.rank, -1)
        return Adapter(np.array(a), np.ascontiguousarray(b.transpose(2, 0, 1)), self.scale)


@dataclass(frozen=True)
class _Stacked:
    """The adapters of one projection of all experts, each A (r, K) and B (N, r)."""

    a: list[Tensor]
    b: list[Tensor]
    scale: float

    def shapes(self) -> Adapter:
        a, b = (_shape((len(each), *each[0].shape), each[0]) for each in (self.a, self.b))
        return Adapter(a, b, self.scale)

    def read(self) -> Adapter:
        a, b = (np.stack([its.view() for its in each]) for each in (self.a, self.b))
        return Adapter(a, b, self.scale)


def _shape(shape: tuple[int, ...], like: Tensor) -> Any:
    return jax.ShapeDtypeStruct(shape, DTYPES[like.dtype])


def check_layers(experts: Any) -> None:
    """Raises ValueError or TypeError unless these are experts by the number of their layer."""
    check_instance("experts", experts, Mapping, "a mapping of layers' numbers to jmx.Experts")
    for layer, its in experts.items():
        check_int("experts", layer, least=0)
        check_instance(f"experts[{layer}]", its, Experts, "jmx.Experts")


def _check(tensor: Tensor, place: Place, experts: Mapping[int, Experts]) -> None:
    if tensor.dtype not in _DTYPES:
        raise CheckpointError(tensor.file, f"tensor {tensor.name!r} has dtype {tensor.dtype}, but must have {_DTYPES}")
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise CheckpointError(tensor.file, f"tensor {tensor.name!r} has shape {tensor.shape}, but must have two axes")
    if place.layer not in experts:
        known = sorted(experts)
        raise CheckpointError(tensor.file, f"tensor {tensor.name!r} must be of a layer with experts, one of {known}")
    number = experts[place.layer].num_experts
    if place.expert is not None and place.expert >= number:
        raise CheckpointError(tensor.file, f"tensor {tensor.name!r} must be of an expert below {number}")


def _pair(file: Path, pair: _Pair) -> tuple[Tensor, Tensor]:
    if len(pair) != 2:
        (only,) = pair.values()
        other = only.name.replace("lora_A", "lora_B") if "a" in pair else only.name.replace("lora_B", "lora_A")
        raise CheckpointError(file, f"tensor {other!r} is missing, beside {only.name!r}")
    return pair["a"], pair["b"]


def _check_absent(file: Path, config: Config, layer: int, other: tuple[int, str], fused: Mapping[int, Any]) -> None:
    """Raises CheckpointError if the config names experts of a layer without adapters, as those of the `other` one."""
    number, module = other
    module = re.sub(rf"(^|\.)layers\.{number}\.", rf"\g<1>layers.{layer}.", module)
    parts = PARAMETERS.values() if number in fused else (f"0.{name}" for name in (*MODULES.values(), *PROJECTIONS))
    for part in parts:
        if config.adapts(name := f"{module}.{part}", layer):
            rule = f"the adapter of {name!r} is missing, which {CONFIG} names"
            raise CheckpointError(file, f"{rule}: is it of a model with as many layers as this one?")


def _fused(file: Path, pairs: dict[str, _Pair], experts: Experts, config: Config, module: str) -> dict[str, _Fused]:
    found = {}
    number = experts.num_experts
    for pair in pairs.values():
        a, b = _pair(file, pair)
        target = _target_of(a, b, experts)
        if a.shape[0] % number or b.shape[1] != a.shape[0]:
            rule = f"must be (E r, K) and (N, r E) with E = {number}"
            raise CheckpointError(file, f"tensors {a.name!r} {a.shape} and {b.name!r} {b.shape} {rule}")
        if target in found:
            raise CheckpointError(file, f"tensor {a.name!r} must be of another weight than that which it wraps")
        name, rank = f"{module}.{PARAMETERS[target]}", a.shape[0] // number
        config.check_rank(name, rank)
        found[target] = _Fused(a, b, rank, config.scale(name, rank))
    return found


def _target_of(a: Tensor, b: Tensor, experts: Experts) -> str:
    """Of which weight a pair of matrices is, by the sizes of its inputs and outputs."""
    sizes = {target: sizes_of(target, experts) for target in PARAMETERS}
    for target, (outputs, inputs) in sizes.items():
        if (b.shape[0], a.shape[1]) == (outputs, inputs):
            return target
    rule = f"must have N and K of one of {sizes}"
    raise CheckpointError(a.file, f"tensors {a.name!r} {a.shape} and {b.name!r} {b.shape}, (., K) and (N, .), {rule}")


def _modules(
    file: Path, projections: dict[str, dict[int, _Pair]], experts: Experts, config: Config, module: str
) -> dict[str, _Stacked]:
    found = {}
    for projection, pairs in projections.items():
        target = PROJECTIONS[projection]
        outputs, inputs = sizes_of(target, experts)
        stacked, scales = [], set()
        for expert in range(experts.num_experts):
            name = f"{module}.{expert}.{projection}"
            if expert not in pairs:
                raise CheckpointError(file, f"the adapter of {name!r} is missing, which other experts have")
            a, b = _pair(file, pairs[expert])
            rank = (stacked[0][0] if stacked else a).shape[0]
            for tensor, shape in ((a, (rank, inputs)), (b, (outputs, rank))):
                if tensor.shape != shape:
                    raise CheckpointError(
                        file, f"tensor {tensor.name!r} has shape {tensor.shape}, but must have {shape}"
                    )
            config.check_rank(name, rank)
            stacked.append((a, b))
            scales.add(config.scale(name, rank))
        if len(scales) > 1:
            raise CheckpointError(config.file, f"`alpha_pattern` must be alike for all experts of {module!r}")
        if target in found:
            raise CheckpointError(file, f"{module!r} must have one name for its {target!r} projections")
        found[target] = _Stacked([a for a, _ in stacked], [b for _, b in stacked], scales.pop())
    return found


def _reordered(adapter: Adapter, order: str, wanted: str) -> Adapter:
    """An adapter of the fused weight with its outputs in another order of gate and up."""
    if order == wanted:
        return adapter
    b: Float[np.ndarray, "E N r"] = adapter.b
    gate, up = split_gate_up(b.swapaxes(1, 2), order)
    return Adapter(adapter.a, np.asarray(join_gate_up(gate, up, wanted)).swapaxes(1, 2), adapter.scale)
