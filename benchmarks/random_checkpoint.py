"""Writes checkpoints of published models' sizes with random bytes, for benchmarks of loading.

Bytes are slices of one random pool, so that writing is as fast as the disk. They are valid: scales are positive and not
NaN, floats are finite. A model of such weights runs, but its numbers mean nothing.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jmx.checkpoint import shards
from jmx.checkpoint.compressed_tensors import config_writer, packing
from jmx.checkpoint.compressed_tensors.config import Scheme
from jmx.checkpoint.gpt_oss import tensor_names
from jmx.checkpoint.model_configs import gpt_oss, qwen3_moe
from jmx.checkpoint.shards import Output
from jmx.models.families.qwen3_moe import FAMILY as QWEN3_MOE
from jmx.util.atomic_files import write_json

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_experts": 8,
    "top_k": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
}
MODELS = (*gpt_oss.PUBLISHED, *qwen3_moe.PUBLISHED)
_GROUP = 128  # columns that share a scale of int4
_POOL = 1 << 26  # bytes


class _Pool:
    """Random bytes by kind. Each tensor gets the first ones, repeated if it is larger."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        floats = (rng.standard_normal(_POOL // 2, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
        self._of = {
            "codes": np.frombuffer(rng.bytes(_POOL), np.uint8),
            "exponents": rng.integers(116, 122, _POOL, np.uint8),  # of MXFP4's scales
            "floats": floats.view(np.uint8),
            "scales": (np.abs(floats) + ml_dtypes.bfloat16(1e-3)).astype(ml_dtypes.bfloat16).view(np.uint8),
        }

    def parts(self, kind: str, nbytes: int) -> Iterator[np.ndarray]:
        pool = self._of[kind]
        for at in range(0, nbytes, _POOL):
            yield pool[: min(_POOL, nbytes - at)]


def write(directory: Path, model: str, *, shard_bytes: int, layers: int | None = None, small: bool = False) -> int:
    """Writes a checkpoint into a new directory, and returns the bytes of its tensors.

    Args:
        directory: must not exist.
        model: one of `MODELS`. gpt-oss has MXFP4 experts in the Hugging Face form; Qwen3-MoE has int4 experts in
            groups of 128, one module each, as compressed-tensors writes them.
        shard_bytes: of a shard, at most.
        layers: instead of the model's number.
        small: whether widths are `SMALL` instead of the model's.
    """
    is_gpt_oss = model in gpt_oss.PUBLISHED
    config: Any = (gpt_oss if is_gpt_oss else qwen3_moe).PUBLISHED[model]
    if small:
        sizes = SMALL if is_gpt_oss else SMALL | {"moe_intermediate_size": 128}
        config = dataclasses.replace(config, **sizes)
    if layers is not None:
        config = dataclasses.replace(config, num_hidden_layers=layers)
        config = dataclasses.replace(config, layer_types=config.layer_types[:layers]) if is_gpt_oss else config
    outputs = [*(_gpt_oss if is_gpt_oss else _qwen3_moe)(config, _Pool(0))]
    directory.mkdir()
    write_json(directory / "config.json", gpt_oss.entries(config, "hf") if is_gpt_oss else _qwen3_moe_config(config))
    shards.write(directory, outputs, shard_bytes)
    return sum(output.nbytes for output in outputs)


def _gpt_oss(config: gpt_oss.Config, pool: _Pool) -> Iterator[Output]:
    for tensor in tensor_names.file_tensors(tensor_names.HF, config):
        kind = "exponents" if tensor.name.endswith("_scales") else "codes"
        yield _output(pool, kind if tensor.dtypes[0] == "U8" else "floats", tensor.name, tensor.dtypes[0], tensor.shape)


def _qwen3_moe(config: qwen3_moe.Config, pool: _Pool) -> Iterator[Output]:
    """Tensors outside experts, and after those of each layer its experts."""
    dense: dict[str, list[str]] = {}
    shapes = QWEN3_MOE.shapes(config)
    for name in shapes:
        dense.setdefault(name.rpartition(".")[0], []).append(name)
    experts = {f"layers.{layer}": module for layer, module in QWEN3_MOE.experts(config).items()}
    hidden, middle = config.hidden_size, config.moe_intermediate_size
    for prefix, names in dense.items():
        for name in names:
            yield _output(pool, "floats", QWEN3_MOE.file_name(name), "BF16", shapes[name])
        for expert in range(config.num_experts if prefix in experts else 0):
            for projection, (rows, columns) in _projections(hidden, middle).items():
                yield from _int4(pool, f"{experts[prefix]}.{expert}.{projection}", rows, columns)


def _projections(hidden: int, middle: int) -> Mapping[str, tuple[int, int]]:
    return {"gate_proj": (middle, hidden), "up_proj": (middle, hidden), "down_proj": (hidden, middle)}


def _int4(pool: _Pool, module: str, rows: int, columns: int) -> Iterator[Output]:
    yield _output(pool, "codes", f"{module}.weight_packed", "I32", (rows, packing.num_words(columns, 4)))
    yield _output(pool, "scales", f"{module}.weight_scale", "BF16", (rows, columns // _GROUP))
    yield Output(f"{module}.weight_shape", "I64", (2,), lambda: [np.array([rows, columns], np.int64)])


def _output(pool: _Pool, kind: str, name: str, dtype: str, shape: tuple[int, ...]) -> Output:
    output = Output(name, dtype, shape, list)
    return dataclasses.replace(output, parts=partial(pool.parts, kind, output.nbytes))


def _qwen3_moe_config(config: qwen3_moe.Config) -> dict[str, Any]:
    scheme = Scheme(f"int4_g{_GROUP}", None, "pack-quantized")
    entries = dataclasses.asdict(config)
    entries |= {"num_experts_per_tok": entries.pop("top_k"), "eos_token_id": [*entries.pop("eos_token_ids")]}
    del entries["dense_layers"]
    ignore = ["lm_head", "re:.*self_attn.*", r"re:.*mlp\.gate"]
    entries["quantization_config"] = config_writer.entries({"group_0": (["Linear"], scheme)}, ignore)
    entries |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    return json.loads(json.dumps(entries))
