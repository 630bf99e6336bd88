"""The sizes, formats and activation of a checkpoint's experts, for `jmx explain`."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jmx.activations import Activation

_SIZES = ("hidden_size", "intermediate_size", "num_experts", "top_k")
_GPT_OSS = "gpt_oss"


def read_fields(arguments: argparse.Namespace) -> tuple[dict[str, Any], str | None]:
    """Fields of `jmx.Problem`, and the dtype (in safetensors' spelling) of experts that are floats, or None.

    Args:
        arguments: of `jmx explain`: --checkpoint, --gate-up-order (which some files do not record), --format (which
            experts that are floats are rounded to), and --activation (which overrides the checkpoint's).

    Raises:
        CheckpointError: files that are wrong or broken, or that hold no experts.
        ValueError: an unknown activation.
    """
    directory, order = arguments.checkpoint, arguments.gate_up_order
    if not directory:
        raise ValueError(f"`--checkpoint` (={directory!r}) must name a directory")
    entries = _config_entries(directory)
    by_a_tool = _quantized_by_a_tool(directory, entries)
    model_type = entries.get("model_type")  # the original form of gpt-oss has none
    if model_type != _GPT_OSS and (by_a_tool or model_type is not None):
        model = _model_fields(entries, arguments.activation is not None)
        if by_a_tool:
            return _quantized_fields(directory, order) | model, None
        found, dtype = _float_fields(directory, entries, arguments.format)
        return found | model, dtype
    fields = _gpt_oss_fields(directory, any_method=by_a_tool)
    if by_a_tool:
        return fields | _quantized_fields(directory, "interleaved"), None
    if _gpt_oss_in_floats(directory, entries):
        found, dtype = _float_fields(directory, entries, arguments.format)
        return fields | found, dtype
    return fields, None


def _config_entries(directory: str) -> dict[str, Any]:
    """The contents of config.json; {} if it cannot be read: the loader that reads it next raises the error."""
    from jmx.checkpoint import CheckpointError, shards

    try:
        return shards.read_object(Path(directory) / "config.json")
    except CheckpointError:
        return {}


def _quantized_by_a_tool(directory: str, config: dict[str, Any]) -> bool:
    """Whether experts were quantized by a tool with its own config, unlike gpt-oss as published."""
    from jmx.checkpoint.compressed_tensors.modelopt_config import FILE
    from jmx.checkpoint.compressed_tensors.quantization_config import find_quantization

    given = find_quantization(Path(directory) / "config.json", config)
    if given is None:
        return os.path.lexists(Path(directory) / FILE)
    published = isinstance(given[1], dict) and given[1].get("quant_method") in (None, "mxfp4")
    return not (config.get("model_type") == _GPT_OSS and published)


def _quantized_fields(directory: str, gate_up_order: str | None) -> dict[str, Any]:
    """Fields of a checkpoint's first layer of quantized experts."""
    from jmx.checkpoint import compressed_tensors

    reader = compressed_tensors.Reader(directory, None if gate_up_order == "none" else gate_up_order)
    if not reader.layers:
        raise ValueError(f"`--checkpoint` (={directory!r}) holds no quantized experts")
    layer = next(iter(reader.layers.values()))
    found = {name: getattr(layer, name) for name in ("num_experts", "hidden_size", "intermediate_size")}
    found |= {"format": layer.format.name, "gate_up_order": layer.gate_up_order}
    found |= {"input_format": reader.declared_inputs(layer.name)}
    return found | {"bias": layer.has_bias}


def _gpt_oss_fields(directory: str, any_method: bool) -> dict[str, Any]:
    from jmx.activations import SwiGLU
    from jmx.checkpoint import gpt_oss

    config = gpt_oss.read_config(directory, **({"quant_methods": None} if any_method else {}))
    activation = SwiGLU(config.swiglu_alpha, config.swiglu_beta, config.swiglu_limit)
    sizes = {name: getattr(config, name) for name in _SIZES}
    return sizes | {"activation": activation, "gate_up_order": "interleaved", "bias": True}


def _gpt_oss_in_floats(directory: str, config: dict[str, Any]) -> bool:
    """Whether gpt-oss's tensors are present in the Hugging Face form, and none of them holds MXFP4 blocks."""
    from jmx.checkpoint import shards

    if config.get("model_type") != _GPT_OSS or not any(Path(directory).glob("*.safetensors")):
        return False
    return not any(name.endswith("_blocks") for name in shards.read_headers(Path(directory)))


def _float_fields(directory: str, config: dict[str, Any], format: str | None) -> tuple[dict[str, Any], str]:
    """Fields of a checkpoint's first layer of float experts, as `jmx convert --quantize` would write it."""
    from jmx.checkpoint import quantizing
    from jmx.numerics import formats
    from jmx.perf.shapes import split_formats

    layer = next(iter(quantizing.Reader(directory).layers.values()))
    found = {name: getattr(layer, name) for name in ("num_experts", "hidden_size", "intermediate_size")}
    found["bias"] = layer.has_bias
    rounded_to = formats.MXFP4.name if format is None else split_formats(format)[0]
    as_gpt_oss = config.get("model_type") == _GPT_OSS and rounded_to == formats.MXFP4.name
    found["gate_up_order"] = "interleaved" if as_gpt_oss else "concatenated"
    return found, layer.dtype


def _model_fields(config: dict[str, Any], activation_given: bool) -> dict[str, Any]:
    """Fields from the usual keys of a model's config; the activation only if none is given."""
    from jmx.checkpoint.model_configs import common_keys

    top_k, hidden_act = common_keys.top_k(config), common_keys.hidden_act(config)
    found: dict[str, Any] = {} if top_k is None else {"top_k": top_k}
    if hidden_act is None or activation_given:
        return found
    known = _activations()
    if hidden_act not in known:
        raise ValueError(f"`hidden_act` (={hidden_act!r}) of the checkpoint is not known: give --activation")
    return found | {"activation": known[hidden_act]}


def _activations() -> dict[str, "Activation"]:
    """Activations of gated experts, by transformers' names of the gate's function."""
    from jmx.activations import GELUAndMul, SiLUAndMul

    tanh = GELUAndMul(approximate=True)
    return {
        "silu": SiLUAndMul(),
        "swish": SiLUAndMul(),
        "gelu": GELUAndMul(approximate=False),
        "gelu_new": tanh,
        "gelu_pytorch_tanh": tanh,
    }
