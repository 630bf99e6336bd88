"""Writing one quantized module: the tensors that hold given packed arrays, the inverse of `Module`."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from jmx.checkpoint.compressed_tensors import gptq_module, packing
from jmx.checkpoint.compressed_tensors.config import DEEPSEEK_FP4, MODELOPT, Scheme
from jmx.checkpoint.compressed_tensors.tensor_names import PACKED, is_packed
from jmx.numerics.formats import FORMATS, BlockScaled, Format
from jmx.util.typing import Shaped


def module_tensors(
    scheme: Scheme, weight: BlockScaled, kept: Mapping[str, Shaped[np.ndarray, "..."]]
) -> dict[str, Shaped[np.ndarray, "..."]]:
    """The tensors of a module, by the names that compressed-tensors gives them: the inverse of `Module`.

    Args:
        scheme: how the module is quantized.
        weight: its packed arrays, without leading axes.
        kept: tensors that are written unchanged: those in `KEPT`, a weight_scale that is a scalar, (N,) or e8m0 by
            its dtype, and of e4m3fnuz both weight and weight_scale. It must hold the inputs' static scale if there is
            one. Without `weight_global_scale` that tensor is the reciprocal of the global scale.

    Raises:
        ValueError: arrays that the scheme's files cannot hold, or a static scale that is missing.
    """
    format = FORMATS[scheme.weights]
    bits = format.element_bits
    rows, columns = weight.values.shape[0], weight.values.shape[1] * 8 // bits
    for name in format.arrays:
        if getattr(weight, name) is None:
            raise ValueError(f"`weight.{name}` (=None) must be there for {format.name}")
    if scheme.static_scale is not None and scheme.static_scale not in kept:
        raise ValueError(f"`kept` must hold {scheme.static_scale!r} for inputs of {scheme.inputs}")
    packed = np.asarray(weight.values)
    if scheme.storage in gptq_module.STORAGES:
        return gptq_module.gptq_tensors(scheme, weight, kept)
    found: dict[str, np.ndarray] = {}
    if "order" in format.arrays:
        order = np.asarray(weight.order)
        packed = packing.columns(packed, bits, np.argsort(order))
        found["weight_g_idx"] = np.empty(columns, np.int32)
        found["weight_g_idx"][order] = np.arange(columns, dtype=np.int32) // (columns // weight.scales.shape[-1])
    if scheme.storage == PACKED:
        found["weight_packed"] = packing.words_of_bytes(packed, bits, columns)
        found["weight_shape"] = np.array([rows, columns], np.int64)
    elif is_packed(scheme):
        found["weight_packed"] = packed.view(np.int8) if scheme.storage == DEEPSEEK_FP4 else packed
    elif format.element_dtype == ml_dtypes.float8_e4m3fn:
        found["weight"] = packed.view(ml_dtypes.float8_e4m3fn)
    else:
        found["weight"] = packing.elements_of_bytes(packed, bits, columns)
    if not {"weight", "weight_scale"} <= kept.keys():  # else they were e4m3fnuz, and rows have scales of their own
        found["weight_scale"] = _file_scales(format, np.asarray(weight.scales))
    if scheme.storage == DEEPSEEK_FP4:
        found["weight_scale"] = found["weight_scale"].view(ml_dtypes.float8_e8m0fnu)
    if "global_scales" in format.arrays and "weight_global_scale" not in kept:
        factors = np.asarray(weight.global_scales)
        _check_equal("global_scales", factors[:1], factors)
        found["weight_global_scale"] = factors[:1] if scheme.storage == MODELOPT else np.float32(1) / factors[:1]
    if "zero_points" in format.arrays:
        points = np.asarray(weight.zero_points)
        if scheme.storage == PACKED:
            points = np.ascontiguousarray(points.T)
            points = packing.words_of_bytes(packing.bytes_of_elements(points, bits), bits, rows).T
        found["weight_zero_point"] = np.ascontiguousarray(points)
    return found | dict(kept)


def _file_scales(format: Format, scales: Shaped[np.ndarray, "N b"]) -> Shaped[np.ndarray, "..."]:
    """Scales in the shape and dtype of files, which hold one that rows share only once."""
    if format.name == "nvfp4":
        return scales.view(ml_dtypes.float8_e4m3fn)
    if format.name == "fp8_tensor":
        _check_equal("scales", scales[:1], scales)
        return scales[0].copy()
    if format.block_rows > 1:
        firsts = scales[:: format.block_rows]
        _check_equal("scales", np.repeat(firsts, format.block_rows, axis=0)[: len(scales)], scales)
        return firsts
    return scales


def _check_equal(name: str, expected: Shaped[np.ndarray, "..."], array: Shaped[np.ndarray, "..."]) -> None:
    if (array != expected).any():
        raise ValueError(f"`weight.{name}` must be the same in all rows that share one in the file")
