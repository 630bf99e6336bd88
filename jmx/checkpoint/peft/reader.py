"""Reading adapters of experts from PEFT's files."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jmx.checkpoint.peft.config import Config
from jmx.checkpoint.peft.names import CONFIG, PARAMETERS, PROJECTIONS, WEIGHTS, Place, parse
from jmx.checkpoint.shards import CheckpointError, Tensor, read_header
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
            another shape or dtype than that; an expert without the adapter that others have; a config with a feature
            that jmx does not have.
        ValueError, TypeError: other arguments.
    """
    directory = check_path("path", path)
    check_layers(experts)
    check_one_of("gate_up_order", gate_up_order, (*GATE_UP_ORDERS, None))
    if not directory.is_dir():
        raise CheckpointError(directory, f"must be a directory that holds {CONFIG} and {WEIGHTS}")
    config, file = Config.read(directory / CONFIG), directory / WEIGHTS
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
    read = {}
    for layer in sorted(names):
        its = experts[layer]
        if layer in fused:
            found = _fused(file, fused[layer], its, config, names[layer])
        else:
            found = _modules(file, modules[layer], its, config, names[layer])
        if "gate_up" in found and its.gate_up_order is not None:
            found["gate_up"] = _reordered(found["gate_up"], gate_up_order or its.gate_up_order, its.gate_up_order)
        read[layer] = Adapters(**found)
        read[layer].check(its)
    if not read:
        raise CheckpointError(file, "must have adapters of experts, but has none")
    return read


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


def _fused(file: Path, pairs: dict[str, _Pair], experts: Experts, config: Config, module: str) -> dict[str, Adapter]:
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
        rank = a.shape[0] // number
        matrix_a = a.view().reshape(number, rank, a.shape[1])
        matrix_b = np.ascontiguousarray(b.view().reshape(b.shape[0], rank, number).transpose(2, 0, 1))
        scale = config.scale(f"{module}.{PARAMETERS[target]}", rank)
        found[target] = Adapter(np.array(matrix_a), matrix_b, scale)
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
) -> dict[str, Adapter]:
    found = {}
    for projection, pairs in projections.items():
        target = PROJECTIONS[projection]
        outputs, inputs = sizes_of(target, experts)
        matrices, rank = [], None
        for expert in range(experts.num_experts):
            if expert not in pairs:
                name = f"{module}.{expert}.{projection}"
                raise CheckpointError(file, f"the adapter of {name!r} is missing, which other experts have")
            a, b = _pair(file, pairs[expert])
            rank = a.shape[0] if rank is None else rank
            for tensor, shape in ((a, (rank, inputs)), (b, (outputs, rank))):
                if tensor.shape != shape:
                    raise CheckpointError(
                        file, f"tensor {tensor.name!r} has shape {tensor.shape}, but must have {shape}"
                    )
            matrices.append((a.view(), b.view()))
        assert rank is not None
        scales = {config.scale(f"{module}.{e}.{projection}", rank) for e in range(experts.num_experts)}
        if len(scales) > 1:
            raise CheckpointError(
                file.with_name(CONFIG), f"`alpha_pattern` must be alike for all experts of {module!r}"
            )
        stacked_a, stacked_b = (np.stack(each) for each in zip(*matrices, strict=True))
        found[target] = Adapter(stacked_a, stacked_b, scales.pop())
    return found


def _reordered(adapter: Adapter, order: str, wanted: str) -> Adapter:
    """An adapter of the fused weight with its outputs in another order of gate and up."""
    if order == wanted:
        return adapter
    b: Float[np.ndarray, "E N r"] = adapter.b
    gate, up = split_gate_up(b.swapaxes(1, 2), order)
    return Adapter(adapter.a, np.asarray(join_gate_up(gate, up, wanted)).swapaxes(1, 2), adapter.scale)
