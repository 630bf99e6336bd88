"""Checkpoints whose weights outside experts are quantized too, written for tests."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jmx.checkpoint import shards
from jmx.checkpoint.compressed_tensors import config_writer
from jmx.checkpoint.compressed_tensors.config import Scheme

_EXPERT = re.compile(r".*\.experts\.[0-9]+\..*")
_EXPERTS = "fp8_channel"  # the format of experts
_BLOCK = 128
# By a format's kind: the largest element, the dtype of elements, and how compressed-tensors stores them.
_KINDS = {"fp8": (448.0, ml_dtypes.float8_e4m3fn, "float-quantized"), "int8": (127.0, np.int8, "int-quantized")}


def write(folder: Path, source: Path, formats: Mapping[str, str]) -> Path:
    """Writes a checkpoint and, in the folder `floats` in it, the same one with the modules' weights as floats.

    Args:
        folder: is made.
        source: a checkpoint of float experts, each apart.
        formats: of modules outside the experts, such as "model.layers.0.self_attn.q_proj", fp8_tensor, fp8_channel,
            fp8_block or int8_channel; the others stay floats.
    """
    tensors = {name: np.array(tensor.view()) for name, tensor in shards.read_headers(source).items()}
    experts = [name.removesuffix(".weight") for name in tensors if _EXPERT.fullmatch(name)]
    groups: dict[str, tuple[list[str], Scheme]] = {"experts": ([f"re:{_EXPERT.pattern}"], _scheme(_EXPERTS))}
    floats = {}
    for module in (*formats, *experts):
        name = formats.get(module, _EXPERTS)
        parts, dequantized = _quantized(tensors.pop(f"{module}.weight").astype(np.float32), name)
        tensors |= {f"{module}.{part}": array for part, array in parts.items()}
        if module in formats:
            floats[f"{module}.weight"] = dequantized
            groups.setdefault(name, ([], _scheme(name)))[0].append(module)
    left = {name: array for name, array in tensors.items() if name.rpartition(".")[0] not in formats}
    biases = {name: array for name, array in tensors.items() if name.endswith(".bias")}
    config = json.loads((source / "config.json").read_text())
    (folder / "floats").mkdir(parents=True)
    for place, its, used in (
        (folder, tensors, groups),
        (folder / "floats", left | biases | floats, {"experts": groups["experts"]}),
    ):
        save_file({name: np.ascontiguousarray(array) for name, array in its.items()}, place / "model.safetensors")
        entries = config | {"quantization_config": config_writer.entries(used)}
        (place / "config.json").write_text(json.dumps(entries))
    return folder


def _scheme(format: str) -> Scheme:
    return Scheme(format, None, _KINDS[format.partition("_")[0]][2])


def _quantized(matrix: np.ndarray, format: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of a module in a format, and its weight in float32 as they give it."""
    kind, _, groups = format.partition("_")
    largest, dtype, _ = _KINDS[kind]
    rows, columns = matrix.shape
    height, width = {"tensor": (rows, columns), "channel": (1, columns), "block": (_BLOCK, _BLOCK)}[groups]
    starts = np.arange(0, rows, height), np.arange(0, columns, width)
    largest_of = np.maximum.reduceat(np.maximum.reduceat(np.abs(matrix), starts[0], axis=0), starts[1], axis=1)
    scales = (largest_of / largest).astype(np.float32)
    whole = scales.repeat(height, axis=0).repeat(width, axis=1)[:rows, :columns]
    elements = (matrix / whole if kind == "fp8" else np.rint(matrix / whole)).astype(dtype)
    stored = scales.reshape(-1) if groups == "tensor" else scales
    return {"weight": elements, "weight_scale": stored}, elements.astype(np.float32) * whole
