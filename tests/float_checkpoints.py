"""Checkpoints whose experts are floats, written for tests."""

import json
from pathlib import Path
from typing import Any

import numpy as np

import jmx
from jmx.checkpoint import shards
from jmx.numerics.formats import BlockScaled

TINY = Path(__file__).parents[1] / "tests" / "data" / "gpt_oss_tiny"


def write(path: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    path.mkdir()
    names = {dtype: name for name, dtype in shards.DTYPES.items()}
    outputs = [shards.Output(n, names[a.dtype], a.shape, lambda a=a: [a]) for n, a in tensors.items()]
    shards.write(path, outputs, 200_000)  # several files
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    return path


def float_gpt_oss(path: Path, num_layers: int = 4, source: Path = TINY) -> tuple[Path, dict[str, np.ndarray]]:
    """Layers of a checkpoint of 4 with experts expanded, as the Hugging Face form has them before quantization."""
    cut = tuple(f"model.layers.{layer}." for layer in range(num_layers, 4))
    tensors = {name: tensor.view() for name, tensor in shards.read_headers(source).items() if not name.startswith(cut)}
    for name in [name for name in tensors if name.endswith("_blocks")]:
        stem = name.removesuffix("_blocks")
        blocks, scales = tensors.pop(name), tensors.pop(f"{stem}_scales")
        packed = BlockScaled(blocks.reshape(*blocks.shape[:-2], -1), scales)
        tensors[stem] = np.asarray(jmx.dequantize(packed)).swapaxes(1, 2)
    config = json.loads((source / "config.json").read_text())
    config |= {"num_hidden_layers": num_layers, "layer_types": config["layer_types"][:num_layers]}
    del config["quantization_config"]
    return write(path, {n: np.ascontiguousarray(a) for n, a in tensors.items()}, config), tensors
