"""The tensors of a quantized module: their names, in compressed-tensors' files and in other tools'.

Tensors are those that the compressed-tensors package writes (its compressors' `compression_param_names`), for a weight
of N rows and K columns:

    weight_packed       nvfp4, mxfp4: uint8 (N, K/2), the even element low; integers: int32 (N, ceil(K bits / 32))
    weight              fp8: float8_e4m3fn (N, K); integers that are not packed: int8 (N, K)
    weight_scale        (N, blocks), which multiplies; fp8_tensor: one; fp8_block: (ceil(N/128), ceil(K/128)), by
                        DeepSeek in floats or e8m0; of one block other tools' may be (N,)
    weight_global_scale nvfp4: float32, which *divides*
    weight_shape        of packed integers: N, K
    weight_zero_point   of packed integers int32 (ceil(N bits / 32), blocks), packed along rows; of others int8
    weight_g_idx        int32 (K,): each column's group
    input_scale, input_global_scale  of inputs that are static; of inputs of no format that is known any, unread
    bias                (N,)
"""

from jmx.checkpoint.compressed_tensors.config import FP8, FP8_UE8M0, GLOBAL, MODELOPT, QUARK, Scheme

FLOATS = ("BF16", "F16", "F32")
PACKED = "pack-quantized"

# Tensors whose bits the arrays do not give back: reciprocals round, and files shape a single number in several ways.
KEPT = ("weight_shape", "weight_global_scale", "input_scale", "input_global_scale", "bias")

# Other tools' names of the same. ModelOpt's weight_scale_2 and input_scale are reciprocals besides: they multiply.
NAMES: dict[str, dict[str, str]] = {
    MODELOPT: {
        "weight_packed": "weight",
        "weight_global_scale": "weight_scale_2",
        GLOBAL: "input_scale",
    },
    QUARK: {"weight_packed": "weight"},
    FP8: {"weight_scale": "weight_scale_inv"},  # which is no inverse
    FP8_UE8M0: {"weight_scale": "weight_scale_inv"},
}

# What no module has that is not quantized, by any tool's names.
QUANTIZED = (
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "input_scale",
    "input_global_scale",
)


def is_packed(scheme: Scheme) -> bool:
    """Whether the weights are in `weight_packed`, several of them in an element, rather than in `weight`."""
    return scheme.storage.endswith("pack-quantized") or "weight_packed" in NAMES.get(scheme.storage, {})
