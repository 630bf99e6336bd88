"""Golden checkpoints of compressed-tensors and other tools under the names, types and configs that others give them."""

import json
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from test_checkpoint_compressed_tensors import LAYER, golden, reader

import jmx

Checkpoint = tuple[Mapping[str, np.ndarray], dict[str, Any]]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {"weight_block_size": [128, 128]}


def respelled() -> dict[str, Checkpoint]:
    """Tensors and config.json of each, by a name for it."""
    return {
        "deepseek_own_names": _own_names(),
        "deepseek_fp4": _deepseek_fp4(),
        "fp8_by_tensor_static": _with_config("fp8_tensor_static", FP8 | {"activation_scheme": "static"} | _ignored()),
        "fp8_by_tensor_dynamic": _with_config("fp8_tensor_dynamic", FP8 | _ignored()),
        "modelopt_mixed": _modelopt_mixed(),
        "gptq_v2": _gptq_v2(),
        "without_gate": _without_gate(),
        "e4m3fnuz": _fnuz(),
        "down_in_another_group": _down_in_another_group(),
        "an_expert_in_floats": _an_expert_in_floats(),
    }


def _ignored() -> dict[str, Any]:
    return {"ignored_layers": ["gate"]}


def _with_config(name: str, quantization: dict[str, Any]) -> Checkpoint:
    arrays, config = golden(name)
    return arrays, config | {"quantization_config": quantization}


def _own_names() -> Checkpoint:
    from test_checkpoint_spellings import own_spelling

    arrays, config = _with_config("fp8_block_groups", FP8 | BLOCKS)
    return {own_spelling(key): array for key, array in arrays.items()}, config


def _deepseek_fp4() -> Checkpoint:
    import jax
    from test_checkpoint_deepseek_fp4 import CONFIG, E, H, I, tensors_of

    experts = jmx.Experts.random(jax.random.key(7), E, H, I, gate_up_order="concatenated", bias=False)
    return tensors_of(experts), json.loads(json.dumps(CONFIG))


def _modelopt_mixed() -> Checkpoint:
    arrays, config = golden("modelopt_nvfp4")
    names = sorted({key.rpartition(".")[0] for key in arrays if key.endswith("_scale")})
    layers = {name: {"quant_algo": "NVFP4"} for name in names}
    said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return arrays, config | {"quantization_config": said}


def _gptq_v2() -> Checkpoint:
    arrays, config = golden("gptq_g32_asym_order")
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    return arrays, config


def _without_gate() -> Checkpoint:
    arrays, config = golden("w4a16_g32")
    return {key: array for key, array in arrays.items() if ".gate_proj." not in key}, config


def _fnuz() -> Checkpoint:
    arrays, config = golden("fp8_channel_dynamic")
    for key, array in arrays.items():
        if array.dtype == ml_dtypes.float8_e4m3fn:
            codes = array.view(np.uint8).copy()
            codes[codes == 0x80] = 0  # -0, which there is NaN
            arrays[key] = codes.view(ml_dtypes.float8_e4m3fnuz)
    return arrays, config


def _down_in_another_group() -> Checkpoint:
    """INT8 by row in `down`, INT4 in groups in the others."""
    (arrays, config), (others, other) = golden("w4a16_g32"), golden("w8a8_channel")
    down = {key: array for key, array in others.items() if key.startswith(LAYER) and ".down_proj." in key}
    arrays = {
        key: array for key, array in arrays.items() if not (key.startswith(LAYER) and ".down_proj." in key)
    } | down
    groups, theirs = (c["quantization_config"]["config_groups"] for c in (config, other))
    first, second = groups["group_0"], theirs["group_0"] | {"input_activations": None}
    first |= {"targets": ["re:.*(gate|up)_proj$"], "format": config["quantization_config"]["format"]}
    second |= {"targets": ["re:.*down_proj$"], "format": other["quantization_config"]["format"]}
    groups |= {"group_0": first, "group_1": second}
    config["quantization_config"]["format"] = "mixed-precision"
    return arrays, config


def _an_expert_in_floats() -> Checkpoint:
    arrays, config = golden("w4a16_g32")
    module = f"{LAYER}.1.up_proj"
    found = reader("w4a16_g32").layers[LAYER]
    weight = next(m for m in found.quantized if m.name == module).weight()
    arrays = {key: array for key, array in arrays.items() if not key.startswith(f"{module}.")}
    floats = np.asarray(jmx.dequantize(weight, np.float32, found.format)).astype(ml_dtypes.bfloat16)
    config["quantization_config"]["ignore"].append(module)
    return arrays | {f"{module}.weight": floats}, config
