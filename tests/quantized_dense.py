"""Checkpoints whose weights outside experts are quantized too, written for tests."""

import json
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

import jmx
from jmx.checkpoint import quantizing, shards
from jmx.checkpoint.compressed_tensors import config_writer
from jmx.checkpoint.compressed_tensors.config import Scheme
from jmx.checkpoint.compressed_tensors.module_writer import module_tensors
from jmx.checkpoint.quantizing.output_forms import WRITABLE

EXPERTS = "fp8_channel"  # the format of experts


def write(folder: Path, source: Path, formats: Mapping[str, str]) -> Path:
    """Writes a checkpoint and, in the folder `floats` in it, the same one with the modules' weights as floats.

    Args:
        folder: is made.
        source: a checkpoint of float experts in one file.
        formats: of modules outside the experts, such as "model.layers.0.self_attn.q_proj"; the others stay floats.
    """
    quantizing.convert(source, folder, EXPERTS)
    tensors = {name: np.array(tensor.view()) for name, tensor in shards.read_headers(folder).items()}
    floats = dict(tensors)
    experts = Scheme(EXPERTS, None, WRITABLE[EXPERTS])
    groups: dict[str, tuple[list[str], Scheme]] = {"experts": ([r"re:.*experts\.[0-9]+\..*"], experts)}
    for module, name in formats.items():
        scheme, format = Scheme(name, None, WRITABLE[name]), jmx.FORMATS[name]
        packed = jmx.pack(jmx.quantize(tensors.pop(f"{module}.weight").astype(np.float32), format=format))
        floats[f"{module}.weight"] = np.asarray(jmx.dequantize(packed, np.float32, format))
        parts = module_tensors(scheme, jax.tree.map(np.asarray, packed), {})
        tensors |= {f"{module}.{part}": array for part, array in parts.items()}
        groups.setdefault(name, ([], scheme))[0].append(module)
    config = json.loads((folder / "config.json").read_text())
    (folder / "floats").mkdir()
    for place, its, used in ((folder, tensors, groups), (folder / "floats", floats, {"experts": groups["experts"]})):
        save_file({name: np.ascontiguousarray(array) for name, array in its.items()}, place / "model.safetensors")
        entries = config | {"quantization_config": config_writer.entries(used)}
        (place / "config.json").write_text(json.dumps(entries))
    return folder
