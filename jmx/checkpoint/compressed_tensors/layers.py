"""The experts of a layer: found by tensor names, and stacked on reading, gate rows above up rows.

`PROJECTIONS` lists the names of projections. Files hold each expert separately ("experts.3.down_proj.weight"), or all
experts in tensors whose first axis is the expert ("experts.down_proj.weight"). ModelOpt stores gpt-oss as parameters
rather than modules ("experts.down_proj", "experts.down_proj_weight_scale"): then rows are the last axis, and a scalar
belongs to all experts.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jmx.checkpoint.compressed_tensors import common_format
from jmx.checkpoint.compressed_tensors.config import Quantization, Scheme
from jmx.checkpoint.compressed_tensors.gptq_module import module_of
from jmx.checkpoint.compressed_tensors.module import FloatModule, Module, Piece, Shape
from jmx.checkpoint.compressed_tensors.rounded import RoundedModule
from jmx.checkpoint.compressed_tensors.tensor_names import QUANTIZED
from jmx.checkpoint.host_arrays import stacked
from jmx.checkpoint.shards import DTYPES, CheckpointError, Tensor
from jmx.experts import ROLES
from jmx.numerics.formats import FORMATS, Format
from jmx.numerics.gate_up import GATE_UP_ORDERS
from jmx.util.typing import Float32, Shaped

# Names of the projections of each role, gate before up; up alone where experts have no gate.
PROJECTIONS: tuple[Mapping[str, tuple[str, ...]], ...] = (
    {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)},
    {"gate_up": ("w1", "w3"), "down": ("w2",)},
    {"gate_up": ("gate_up_proj",), "down": ("down_proj",)},
    {"gate_up": ("up_proj",), "down": ("down_proj",)},
)

WHOLE = "weight_shape"  # describes a whole tensor, also one that holds all experts
_REMEDY = "; `jmx convert IN OUT --quantize FORMAT` requantizes all to one"

# Names of tensors: a projection of one expert; one of all experts together; the same as a parameter, without a module.
_APART = re.compile(r"((?:.*\.)?experts)\.(0|[1-9][0-9]{0,5})\.([^.]+)\.([^.]+)", re.DOTALL)
_TOGETHER = re.compile(r"((?:.*\.)?experts)\.([^.0-9][^.]*)\.([^.]+)", re.DOTALL)
_PARAMETER = re.compile(rf"((?:.*\.)?experts)\.(gate_up_proj|down_proj)(?:_(bias|{'|'.join(QUANTIZED)}))?", re.DOTALL)


@dataclass(frozen=True)
class ExpertModules[M: Module | FloatModule]:
    """The modules of a layer's experts: E of them, of hidden size H and intermediate size I.

    Args:
        name: of the module that holds them, such as "model.layers.0.mlp.experts".
        modules: by role, for each expert the modules whose rows are concatenated.
        gate_up_order: as `jmx.Experts` has it; None without a gate.
    """

    name: str
    modules: Mapping[str, Sequence[tuple[M, ...]]]
    gate_up_order: str | None

    @property
    def _first(self) -> M:
        return self.modules["gate_up"][0][0]

    @property
    def num_experts(self) -> int:
        return len(self.modules["gate_up"])

    @property
    def hidden_size(self) -> int:
        return self._first.shape[1]

    @property
    def intermediate_size(self) -> int:
        return self.modules["down"][0][0].shape[1]

    @property
    def has_bias(self) -> bool:
        return "bias" in self._first.pieces

    def tensors(self) -> set[Tensor]:
        """The tensors that hold these experts."""
        return {piece.tensor for module in self._every() for piece in module.pieces.values()}

    def _every(self) -> Iterator[M]:
        return (module for role in ROLES for parts in self.modules[role] for module in parts)


@dataclass(frozen=True)
class Layer(ExpertModules[Module | RoundedModule]):
    """The experts of a layer, which `jmx.Experts` can hold: quantized, or rounded on reading where others are.

    Args:
        scheme: of all modules that are quantized in the files. Of several the weights are those of `common_format`;
            inputs that differ are described.
    """

    scheme: Scheme

    @property
    def format(self) -> Format:
        return FORMATS[self.scheme.weights]

    @property
    def schemes(self) -> list[Scheme]:
        """Those of the modules that are quantized in the files, each once."""
        return [*dict.fromkeys(module.scheme for module in self.quantized)]

    @property
    def quantized(self) -> list[Module]:
        """The modules that are quantized in the files."""
        return [module for module in self._every() if isinstance(module, Module)]

    @property
    def rounded(self) -> list[RoundedModule]:
        """The modules that are floats in the files."""
        return [module for module in self._every() if isinstance(module, RoundedModule)]

    def arrays(self) -> dict[str, "Stacked"]:
        """The layer's arrays, packed, by name as `jmx.Experts.arrays` names them."""
        names = [*self.format.arrays, *["bias"] * self.has_bias]
        return {f"{role}_{name}": Stacked(self.modules[role], name, self.format) for role in ROLES for name in names}

    def static_scales(self, role: str) -> Float32[np.ndarray, "E parts"] | None:
        """The static scales of a role's inputs, as factors, gate and up separately; None if there are none.

        Raises:
            CheckpointError: a scale is not finite and positive; or a module is floats in the files, and has none.
        """
        if self.scheme.static_scale is None:
            return None
        return np.array([[module.static_scale() for module in parts] for parts in self.modules[role]], np.float32)


class Stacked:
    """An array of all experts, (E, ...), in a format that all have in common, read from files when it is sliced.

    Indices are slices, as `jmx.checkpoint.placement.send` makes them: experts, rows, and the other axes.
    """

    def __init__(self, modules: Sequence[tuple[Module | RoundedModule, ...]], name: str, format: Format):
        self._modules, self._name, self._format = modules, name, format
        different = {(m.scheme, m.scale_dtype): m for parts in modules for m in parts}
        dtypes = {self._abstract(module)[1] for module in different.values()}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)  # of scales, which it holds exactly
        (shape, _), *others = map(self._abstract, modules[0])
        if name != "order":
            shape = (shape[0] + sum(other[0] for other, _ in others), *shape[1:])
        self.shape: Shape = (len(modules), *shape)
        self.ndim = len(self.shape)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: tuple[slice, ...]) -> Shaped[np.ndarray, "..."]:
        experts = range(len(self._modules))[index[0]]
        if not experts:
            return self._expert(0)[None, *index[1:]][:0]
        held = [tensor.view() for tensor in self._of_all()]
        found = stacked(experts, lambda expert: self._expert(expert)[index[1:]], self.dtype)
        del held
        return found

    def whole(self) -> Shaped[np.ndarray, "E ..."]:
        return self[(slice(None),) * self.ndim]

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that the array is made of, in the order of their use."""
        for modules in self._modules:
            for module in modules:
                yield from (piece.tensor for piece in self._sources(module))

    def _sources(self, module: Module | RoundedModule) -> list[Piece]:
        return module.sources(self._name) if self._name in (*module.format.arrays, "bias") else []

    def _of_all(self) -> set[Tensor]:
        """Those that hold all experts. They are used again for each expert, and so must be held until the last."""
        pieces = (piece for module in self._modules[0] for piece in self._sources(module))
        return {piece.tensor for piece in pieces if piece.expert is not None}

    def _abstract(self, module: Module | RoundedModule) -> tuple[Shape, np.dtype]:
        if isinstance(module, RoundedModule):
            return module.abstract(self._name)
        return common_format.abstract(module, self._name, self._format)

    def _array(self, module: Module | RoundedModule) -> Shaped[np.ndarray, "..."]:
        if isinstance(module, RoundedModule):
            return module.array(self._name)
        return common_format.array(module, self._name, self._format)

    def _expert(self, expert: int) -> Shaped[np.ndarray, "..."]:
        modules = self._modules[expert]
        parts = [self._array(module) for module in modules]
        parts = [part.astype(self.dtype, copy=False) for part in parts]
        if len(parts) == 1:
            return parts[0]
        if self._name == "order":
            for module, part in zip(modules[1:], parts[1:], strict=True):
                if not np.array_equal(part, parts[0]):
                    other, its = (modules[0], module) if "weight_g_idx" in module.pieces else (module, modules[0])
                    raise its.pieces["weight_g_idx"].error(
                        f"must group columns as {other.name!r} does, which has the same inputs"
                    )
            return parts[0]
        return np.concatenate(parts)


# Tensors of a layer's experts: by expert (None: all experts), by projection, by their name after the module's.
_Found = dict[int | None, dict[str, dict[str, Tensor]]]


def find_layers(found: Mapping[str, Tensor], quantization: Quantization, gate_up_order: str | None) -> dict[str, Layer]:
    """The layers of quantized experts among a checkpoint's tensors, by the name of the module that holds them.

    Args:
        found: the tensors.
        quantization: their schemes.
        gate_up_order: the order of rows in a tensor that holds gate and up, which files do not record.

    Raises:
        CheckpointError: as `find_modules`; experts of a layer have no format in common.
        ValueError: as `find_modules`.
    """
    layers = {}
    for name, its in find_modules(found, quantization, gate_up_order).items():
        scheme = _scheme(its)
        layers[name] = Layer(name, _in_one_format(its, FORMATS[scheme.weights]), its.gate_up_order, scheme)
    return layers


def find_modules(
    found: Mapping[str, Tensor], quantization: Quantization, gate_up_order: str | None
) -> dict[str, ExpertModules[Module | FloatModule]]:
    """The modules of experts of which some are quantized, which may differ in their schemes.

    Arguments are those of `find_layers`.

    Raises:
        CheckpointError: there are no experts; one is missing, or differs from the others in more than its numbers and
            scheme; a tensor belongs to no scheme; and the errors of `Module`.
        ValueError: `gate_up_order` is None, but files hold gate and up in one tensor.
    """
    layers: dict[str, _Found] = {}
    others: list[Tensor] = []
    for name, tensor in found.items():
        if (match := _APART.fullmatch(name)) is not None:
            layer, expert, projection, last = match[1], int(match[2]), match[3], match[4]
        elif (match := _TOGETHER.fullmatch(name)) is not None:
            layer, expert, projection, last = match[1], None, match[2], match[3]
        elif (match := _PARAMETER.fullmatch(name)) is not None:
            layer, expert, projection, last = match[1], None, match[2], match[3] or "weight"
        else:
            others.append(tensor)
            continue
        layers.setdefault(layer, {}).setdefault(expert, {}).setdefault(projection, {})[last] = tensor
    if not layers:
        rule = "must hold tensors of experts, such as 'experts.0.up_proj.weight'"
        quantized = next((tensor.name for tensor in others if tensor.name.rpartition(".")[2] in QUANTIZED), None)
        rule += "" if quantized is None else f", but is quantized in others, such as {quantized!r}"
        raise CheckpointError(quantization.file.parent, rule)
    built = {name: _layer(name, experts, quantization, gate_up_order) for name, experts in layers.items()}
    quantized = {name: layer for name, layer in built.items() if layer is not None}
    for tensor in others:
        if any(tensor.name.startswith(f"{name}.") for name in quantized):
            raise Piece(tensor).error("is a tensor of quantized experts, but of no projection")
    return quantized


def _layer(
    name: str, found: _Found, quantization: Quantization, gate_up_order: str | None
) -> ExpertModules[Module | FloatModule] | None:
    projections = {projection for its in found.values() for projection in its}
    file = next(tensor.file for its in found.values() for tensors in its.values() for tensor in tensors.values())
    spelling = next((s for s in PROJECTIONS if {p for names in s.values() for p in names} == projections), None)
    if spelling is None:
        known = " or ".join(str([p for names in s.values() for p in names]) for s in PROJECTIONS)
        raise CheckpointError(file, f"experts of {name!r} must be of {known}, but are of {sorted(projections)}")
    experts = [*_experts(file, name, found)]
    names = [f"{its_name}.{projection}" for its_name, _ in experts for projection in sorted(projections)]
    schemes = {its_name: quantization.scheme(its_name) for its_name in dict.fromkeys(names)}
    if None in schemes.values():
        _check_unquantized(name, found, schemes)
        if not any(schemes.values()):
            return None
    if len(spelling["gate_up"]) > 1:
        gate_up_order = "concatenated"  # here, from two tensors
    elif spelling["gate_up"] == ("up_proj",):
        gate_up_order = None
    elif gate_up_order is None:
        raise ValueError(
            f"`gate_up_order` (=None) must be one of {GATE_UP_ORDERS}: experts of {name!r} hold gate and up in one "
            "tensor, and files do not record the order of its rows"
        )

    def module(its_name: str, pieces: Mapping[str, Mapping[str, Piece]], projection: str) -> Module | FloatModule:
        full, scheme = f"{its_name}.{projection}", schemes[f"{its_name}.{projection}"]
        if projection not in pieces:
            raise CheckpointError(file, f"module {full!r} is missing, which other experts have")
        return FloatModule(full, pieces[projection]) if scheme is None else module_of(full, pieces[projection], scheme)

    modules = {role: [tuple(module(*expert, p) for p in spelling[role]) for expert in experts] for role in ROLES}
    _check_alike(file, name, modules, gate_up_order)
    return ExpertModules(name, modules, gate_up_order)


def _experts(file: Path, name: str, found: _Found) -> Iterator[tuple[str, dict[str, dict[str, Piece]]]]:
    """The name of each expert in order, and its tensors by projection."""
    if None not in found:
        for expert in range(len(found)):
            if expert not in found:
                raise CheckpointError(file, f"expert {expert} of {name!r} is missing, where there are {len(found)}")
            pieces = {p: {last: Piece(t) for last, t in its.items()} for p, its in found[expert].items()}
            yield f"{name}.{expert}", pieces
        return
    if len(found) > 1:
        raise CheckpointError(file, f"experts of {name!r} must be in separate tensors or in one, but are both")
    tensors = {(p, last): tensor for p, its in found[None].items() for last, tensor in its.items()}
    are_parameters, *others = {_PARAMETER.fullmatch(tensor.name) is not None for tensor in tensors.values()}
    if others:
        raise CheckpointError(file, f"tensors of {name!r} must be of modules or of parameters, but are both")
    shared = {key for key, t in tensors.items() if key[1] == WHOLE or (are_parameters and not t.shape)}
    counts = {t.shape[0] if t.shape else 0 for key, t in tensors.items() if key not in shared}
    if len(counts) != 1 or 0 in counts:
        raise CheckpointError(file, f"tensors of {name!r} must have one number of experts, but have {sorted(counts)}")
    for expert in range(counts.pop()):
        pieces: dict[str, dict[str, Piece]] = {projection: {} for projection in found[None]}
        for (projection, last), tensor in tensors.items():
            whose = None if (projection, last) in shared else expert
            pieces[projection][last] = Piece(tensor, whose, are_parameters)
        yield name, pieces


def _check_unquantized(name: str, found: _Found, schemes: Mapping[str, Scheme | None]) -> None:
    """CheckpointError if experts that are not quantized have tensors that only quantized ones have."""
    for expert, its in found.items():
        for projection, tensors in its.items():
            module = f"{name}.{projection}" if expert is None else f"{name}.{expert}.{projection}"
            for last, tensor in tensors.items() if schemes[module] is None else ():
                if last not in ("weight", "bias") or DTYPES[tensor.dtype].itemsize < 2:
                    raise Piece(tensor).error(f"({tensor.dtype}) is of a module that no target of the config selects")


def _check_alike(
    file: Path, name: str, modules: Mapping[str, Sequence[tuple[Module | FloatModule, ...]]], gate_up_order: str | None
) -> None:
    """CheckpointError unless the experts' modules can be stacked, and gate, up and down agree in size."""
    first, down = modules["gate_up"][0][0], modules["down"][0][0]
    biases = {last: piece.dtype for last, piece in first.pieces.items() if last == "bias"}
    dtypes: dict[Scheme | None, dict[str, str]] = {}
    for role, model in (("gate_up", first), ("down", down)):
        for module in (module for its in modules[role] for module in its):
            its_dtypes = {last: piece.dtype for last, piece in module.pieces.items()}
            its_biases = {last: dtype for last, dtype in its_dtypes.items() if last == "bias"}
            for what, its, wanted in (
                ("shape", module.shape, model.shape),
                ("tensors", its_dtypes, dtypes.setdefault(module.scheme, its_dtypes)),
                ("biases", its_biases, biases),
            ):
                if its != wanted:
                    raise CheckpointError(
                        module.file,
                        f"{what} of {module.name!r} (={its}) must be {wanted}, as other experts of {name!r}",
                    )
    rows = len(modules["gate_up"][0]) * first.shape[0]
    what, halves = ("up (I, H)", 1) if gate_up_order is None else ("gate and up (2 I, H)", 2)
    if down.shape[0] != first.shape[1] or rows != halves * down.shape[1]:
        raise CheckpointError(
            file,
            f"experts of {name!r} must be {what} and down (H, I), but are {(rows, first.shape[1])} and {down.shape}",
        )


def _in_one_format(
    its: ExpertModules[Module | FloatModule], format: Format
) -> Mapping[str, Sequence[tuple[Module | RoundedModule, ...]]]:
    """The modules, those of floats rounded to a format on reading."""

    def parts_of(parts: tuple[Module | FloatModule, ...]) -> tuple[Module | RoundedModule, ...]:
        sibling = next((module for module in parts if isinstance(module, Module)), None)
        return tuple(m if isinstance(m, Module) else RoundedModule(m, format, sibling) for m in parts)

    return {role: [parts_of(parts) for parts in modules] for role, modules in its.modules.items()}


def _scheme(its: ExpertModules[Module | FloatModule]) -> Scheme:
    """The scheme of a layer, in which the weights of all its quantized modules are the same numbers.

    Raises:
        CheckpointError: there is none.
    """
    found: dict[Scheme, Module] = {}
    for module in (module for modules in its.modules.values() for parts in modules for module in parts):
        if isinstance(module, Module):
            found.setdefault(module.scheme, module)
    if len(found) == 1:
        return next(iter(found))
    each = " and ".join(f"{module.name.removeprefix(f'{its.name}.')!r} ({scheme})" for scheme, module in found.items())
    format = common_format.common_format(module.format for module in found.values())
    first = next(iter(found))
    if format is None:
        raise CheckpointError(
            found[first].file,
            f"experts of {its.name!r} must be in one format, or in several that have one in common, but are of {each}"
            f"{_REMEDY}",
        )
    inputs = {scheme.inputs for scheme in found}
    return Scheme(format.name, inputs.pop() if len(inputs) == 1 else f"of {each}", first.storage)
