"""Names of a quantized module's tensors, in compressed-tensors' files and in other tools'.

The compressed-tensors package writes these (its compressors' `compression_param_names`), for a weight of N rows and K
columns:

    weight_packed       nvfp4, mxfp4: uint8 (N, K/2), the even element low; integers: int32 (N, ceil(K bits / 32))
                        in DeepSeek-V4's files int8, and the scales e8m0
    weight              fp8: float8_e4m3fn (N, K); integers that are not packed: int8 (N, K)
    weight_scale        (N, blocks), multiplies; fp8_tensor: a scalar; fp8_block: (ceil(N/128), ceil(K/128)), in
                        DeepSeek's files floats or e8m0; with one block a row, (N,) in other tools' files
    weight_global_scale nvfp4: float32, *divides*
    weight_shape        of packed integers: N, K
    weight_zero_point   of packed integers int32 (ceil(N bits / 32), blocks), packed along rows; of others int8
    weight_g_idx        int32 (K,): each column's group
    input_scale, input_global_scale  of static inputs; of inputs in an unknown format any, which are not read
    bias                (N,)
"""

from collections.abc import Collection, Mapping

from jmx.checkpoint.compressed_tensors.config import (
    AUTO_ROUND,
    AUTO_ROUND_V2,
    AWQ,
    DEEPSEEK_FP4,
    FP8,
    FP8_UE8M0,
    GLOBAL,
    GPTQ,
    GPTQ_V2,
    MODELOPT,
    QUARK,
    Scheme,
)

FLOATS = ("BF16", "F16", "F32")
PACKED = "pack-quantized"

# Tensors that cannot be written from the arrays bit for bit: reciprocals round, and a scalar has several shapes.
KEPT = ("weight_shape", "weight_global_scale", "input_scale", "input_global_scale", "bias")

_GPTQ = {
    "weight_packed": "qweight",
    "weight_scale": "scales",
    "weight_zero_point": "qzeros",
    "weight_g_idx": "g_idx",
}
_WITHOUT_ORDER = {ours: theirs for ours, theirs in _GPTQ.items() if ours != "weight_g_idx"}

# Other tools' names of the same tensors. ModelOpt's weight_scale_2 and input_scale are reciprocals: they multiply.
NAMES: dict[str, dict[str, str]] = {
    MODELOPT: {
        "weight_packed": "weight",
        "weight_global_scale": "weight_scale_2",
        GLOBAL: "input_scale",
    },
    QUARK: {"weight_packed": "weight"},
    FP8: {"weight_scale": "weight_scale_inv"},  # not an inverse
    FP8_UE8M0: {"weight_scale": "weight_scale_inv"},
    GPTQ: _GPTQ,
    GPTQ_V2: _GPTQ,
    AWQ: _WITHOUT_ORDER,
    AUTO_ROUND: _WITHOUT_ORDER,
    AUTO_ROUND_V2: _WITHOUT_ORDER,
    DEEPSEEK_FP4: {"weight_packed": "weight", "weight_scale": "scale"},
}

_OWN_SCALE = "scale"  # in the files of DeepSeek's own code, instead of weight_scale_inv


def names_of(storage: str, found: Collection[str]) -> Mapping[str, str]:
    """A tool's names of a module's tensors, by compressed-tensors'; `found`: those of the module."""
    if storage in (FP8, FP8_UE8M0) and _OWN_SCALE in found:
        return {"weight_scale": _OWN_SCALE}
    return NAMES.get(storage, {})


# Tensors that only quantized modules have, by any tool's names.
QUANTIZED = (
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "qweight",
    "qzeros",
    "input_scale",
    "input_global_scale",
)


def is_packed(scheme: Scheme) -> bool:
    """Whether the weights are packed, in `weight_packed`, rather than one per element, in `weight`."""
    return scheme.storage.endswith("pack-quantized") or "weight_packed" in NAMES.get(scheme.storage, {})
