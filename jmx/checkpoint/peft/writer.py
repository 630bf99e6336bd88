"""Writing adapters of experts as PEFT's files."""

import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmx.checkpoint.peft.config import entries_of
from jmx.checkpoint.peft.names import CONFIG, MODULES, PARAMETERS, PREFIX, WEIGHTS
from jmx.checkpoint.peft.reader import check_layers
from jmx.checkpoint.shards import Output, write_file
from jmx.experts import Experts
from jmx.lora import Adapter, Adapters
from jmx.lora.forms import fused, in_halves
from jmx.util.atomic_files import new_path, write_json
from jmx.util.checks import check_instance, check_one_of, check_path, check_str
from jmx.util.typing import AnyArray, Float

FORMS = ("parameters", "modules")
_MODULE = re.compile(r"[^{}]*\{layer\}\.[^{}]+")
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def save(
    path: str | os.PathLike[str],
    adapters: Mapping[int, Adapters],
    experts: Mapping[int, Experts],
    *,
    base_model: str | None = None,
    module: str = "model.layers.{layer}.mlp.experts",
    form: str = "parameters",
) -> None:
    """Writes adapters as PEFT does: a new directory, which appears whole or not at all.

    Matrices that experts share are written for each of them.

    Args:
        path: of the new directory, in one that exists.
        adapters: of each layer that has some, by its number; all with the same products and ranks.
        experts: of all layers of the model that have some, whose order of gate and up the written rows keep; they may
            be abstract. If some of them have no adapters, the config names the layers that have.
        base_model: the name or path of the model, for `base_model_name_or_path`.
        module: the name of the experts in the model, with `{layer}` once, for the number of the layer.
        form: "parameters": for models with fused weights (E, ., .), as transformers 5 has them; `gate` and `up`
            become one adapter of the sum of their ranks. "modules": for models whose experts are modules.

    Raises:
        FileExistsError, FileNotFoundError: `path` exists, or its directory does not.
        OSError: as of a full disk; names the file, and nothing is left.
        ValueError, TypeError: adapters that do not fit, or differ between layers; other arguments.
    """
    directory = check_path("path", path)
    check_one_of("form", form, FORMS)
    if base_model is not None:
        check_str("base_model", base_model)
    if not _MODULE.fullmatch(check_str("module", module)):
        raise ValueError(f"`module` (={module!r}) must have '{{layer}}.' for the number of a layer, and no other brace")
    check_instance("adapters", adapters, Mapping, "a mapping of layers' numbers to jmx.lora.Adapters")
    check_layers(experts)
    if not adapters:
        raise ValueError(f"`adapters` (={adapters}) must have those of a layer")
    outputs: list[Output] = []
    forms: dict[int, dict[str, tuple[int, float]]] = {}
    for layer, its in sorted(adapters.items()):
        check_instance(f"adapters[{layer}]", its, Adapters, "jmx.lora.Adapters")
        if layer not in experts:
            raise ValueError(f"`experts` (of layers {sorted(experts)}) must have layer {layer}, as `adapters` have")
        its.check(experts[layer])
        turned = (fused if form == "parameters" else in_halves)(its, experts[layer]).by_target()
        forms[layer] = {target: (each.rank, each.scale * each.rank) for target, each in turned.items()}
        name = PREFIX + module.format(layer=layer)
        outputs += (_parameters if form == "parameters" else _modules)(name, turned, experts[layer].num_experts)
        if forms[layer] != (first := next(iter(forms.values()))):
            raise ValueError(f"`adapters[{layer}]` (ranks and alphas {forms[layer]}) must be as those before: {first}")
    partial = sorted(adapters) if experts.keys() - adapters.keys() else None
    config = entries_of(base_model, *_targets(form, module, next(iter(forms.values())), partial))
    with new_path(directory) as new:
        new.mkdir()
        write_file(new / WEIGHTS, outputs)
        write_json(new / CONFIG, config)


def _targets(
    form: str, module: str, its: dict[str, tuple[int, float]], layers: list[int] | None
) -> tuple[dict[str, Any], dict[str, int], dict[str, float]]:
    """What the config says about targets: their lists, and the rank and alpha of each by a pattern of its name.

    `layers`: numbers of those that have adapters, if not all.
    """
    stem = module.rpartition("{layer}.")[2]
    if form == "parameters":
        names = {target: f"{stem}.{PARAMETERS[target]}" for target in its}
        whole = [module.format(layer=layer) + f".{PARAMETERS[target]}" for layer in layers or () for target in its]
        lists = {"target_modules": [], "target_parameters": whole or [*names.values()]}
    else:
        names = {target: MODULES[target] for target in its}
        lists = {"target_modules": [*names.values()], "target_parameters": None, "layers_to_transform": layers}
    ranks = {names[target]: rank for target, (rank, _) in its.items()}
    return lists, ranks, {names[target]: alpha for target, (_, alpha) in its.items()}


def _parameters(module: str, adapters: Mapping[str, Adapter], num_experts: int) -> list[Output]:
    """Tensors of fused weights: PEFT wraps the first weight, then the second one around it."""
    outputs = []
    for target, adapter in adapters.items():
        inner = ".base_layer" if target == "gate_up" and "down" in adapters else ""
        a, b = _of_all(adapter.a, num_experts), _of_all(adapter.b, num_experts)
        outputs.append(_output(f"{module}{inner}.lora_A.weight", a.reshape(-1, a.shape[-1])))
        turned = b.transpose(1, 2, 0)
        outputs.append(_output(f"{module}{inner}.lora_B.weight", turned.reshape(turned.shape[0], -1)))
    return outputs


def _modules(module: str, adapters: Mapping[str, Adapter], num_experts: int) -> list[Output]:
    outputs = []
    for target, adapter in adapters.items():
        a, b = _of_all(adapter.a, num_experts), _of_all(adapter.b, num_experts)
        for expert in range(num_experts):
            stem = f"{module}.{expert}.{MODULES[target]}"
            outputs.append(_output(f"{stem}.lora_A.weight", a[expert]))
            outputs.append(_output(f"{stem}.lora_B.weight", b[expert]))
    return outputs


def _of_all(matrix: Float[AnyArray, "*lead N K"], num_experts: int) -> Float[np.ndarray, "E N K"]:
    """A matrix of each expert, on the host."""
    host = np.asarray(jax.device_get(matrix))
    return np.broadcast_to(host, (num_experts, *host.shape[-2:]))


def _output(name: str, matrix: Float[np.ndarray, "N K"]) -> Output:
    if (dtype := jnp.dtype(matrix.dtype).name) not in _DTYPES:
        raise TypeError(f"`adapters` ({name!r} of dtype {dtype}) must be one of {[*_DTYPES]}")
    return Output(name, _DTYPES[dtype], matrix.shape, lambda: [matrix])
