"""OpenAI's triton_kernels as vLLM calls them on Hopper: swizzled layouts, fused activation, routing from logits."""
# pyright: reportMissingImports=false

from collections.abc import Callable

import torch
from torch.nn.functional import pad
from triton_kernels.matmul_ogs import FlexCtx, FnSpecs, FusedActivation, PrecisionConfig, matmul_ogs
from triton_kernels.matmul_ogs_details import opt_flags
from triton_kernels.numerics import InFlexData
from triton_kernels.routing import routing
from triton_kernels.swiglu import swiglu_fn
from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
from triton_kernels.tensor_details import layout

from benchmarks.peers import elementwise
from benchmarks.peers.problem import Case, Shape, Weights, round_up


def prepare(shape: Shape, weights: Weights) -> Callable[[Case], Callable[[], torch.Tensor]]:
    """Pads I to 64, as vLLM does. Routing is part of the call."""
    opt_flags.update_opt_flags_constraints({"split_k": 1})  # vLLM's choice on Hopper
    weights = weights.padded(shape.hidden_size, round_up(shape.intermediate_size, 64))
    gate_up, gate_up_config = _swizzled(weights.gate_up, weights.gate_up_scales)
    down, down_config = _swizzled(weights.down, weights.down_scales)
    gate_up_bias, down_bias = (
        None if bias is None else bias.float() for bias in (weights.gate_up_bias, weights.down_bias)
    )
    fused = None  # the fused activation always adds 1 to up
    if shape.beta == 1.0:
        fused = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), (shape.alpha, shape.limit), 2)

    def bind(case: Case) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            data, gather, scatter = routing(case.logits, shape.top_k)
            h = matmul_ogs(
                case.x,
                gate_up,
                gate_up_bias,
                data,
                gather_indx=gather,
                precision_config=gate_up_config,
                fused_activation=fused,
            )
            if fused is None:
                h = elementwise.swiglu(h, shape)
            return matmul_ogs(
                h,
                down,
                down_bias,
                data,
                scatter_indx=scatter,
                precision_config=down_config,
                gammas=data.gate_scal,
            )

        return call

    return bind


def _swizzled(values: torch.Tensor, scales: torch.Tensor) -> tuple[object, PrecisionConfig]:
    scales = pad(scales, (0, -scales.shape[-1] % 4))  # the scales' layout requires whole groups of four
    value_layout, value_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scale_layout, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    laid = convert_layout(wrap_torch_tensor(values.mT, dtype=FP4), value_layout, **value_options)
    laid_scales = convert_layout(wrap_torch_tensor(scales.mT), scale_layout, **scale_options)
    return laid, PrecisionConfig(weight_scale=laid_scales, flex_ctx=FlexCtx(rhs_data=InFlexData()))
