"""Names of vLLM's backends, and what runs in the place of each: for the error about an unknown backend.

docs/coming_from_vllm.md has the reasons. The names are the values of `moe_backend`, and those of `Mxfp4MoeBackend` in
vllm/model_executor/layers/fused_moe/oracle/mxfp4.py, in lower case.
"""

from collections.abc import Collection

from jmx.util.checks import nearest

# vLLM's name -> the backend's name here, and what is to be added to it. "triton" and "cpu" are names here, too.
EQUIVALENTS: dict[str, tuple[str, str]] = {
    "marlin": ("mosaic", "on Hopper, and 'triton' on Ampere and Ada"),
    "batched_marlin": ("mosaic", "on Hopper, and 'triton' on Ampere and Ada"),
    "triton_unfused": ("mosaic", "on Hopper, and 'triton' on Ampere and Ada"),
    "humming": ("mosaic", "and with 8-bit inputs 'mosaic_fp8'"),
    "deep_gemm": ("mosaic_fp8", "with input_format='fp8_block'"),
    "deepgemm": ("mosaic_fp8", "with input_format='fp8_block'"),
    "deepgemm_mxfp4": ("mosaic_fp8", "with input_format='fp8_block'"),
    "flashinfer_cutlass": ("cutlass", "which has to be built: jmx build cutlass"),
    "flashinfer_cutlass_mxfp4_bf16": ("cutlass", "which has to be built: jmx build cutlass"),
    "flashinfer_cutlass_afp8": ("xla", "with input_format='mxfp8'"),
    "flashinfer_cutlass_mxfp4_mxfp8": ("xla", "with input_format='mxfp8'"),
    "flashinfer_trtllm": ("xla", "as jmx has no kernel for Blackwell"),
    "flashinfer_trtllm_mxfp4_bf16": ("xla", "as jmx has no kernel for Blackwell"),
    "flashinfer_trtllm_afp8": ("xla", "with input_format='mxfp8', as jmx has no kernel for Blackwell"),
    "flashinfer_trtllm_mxfp4_mxfp8": ("xla", "with input_format='mxfp8', as jmx has no kernel for Blackwell"),
    "aiter": ("xla", "as jmx has no kernel for AMD GPUs"),
    "aiter_mxfp4_bf16": ("xla", "as jmx has no kernel for AMD GPUs"),
    "aiter_mxfp4_fp8": ("xla", "with input_format='fp8_static', as jmx has no kernel for AMD GPUs"),
    "aiter_mxfp4_mxfp4": ("xla", "with input_format='mxfp4', as jmx has no kernel for AMD GPUs"),
    "xpu": ("xla", "as jmx has no kernel for Intel GPUs"),
    "emulation": ("xla", "the reference, which runs every format"),
}
# Of the choice among them.
AUTOMATIC = ("auto", "none")


def meant(name: str, known: Collection[str]) -> str:
    """The end of the message about an unknown backend `name`: what it is in jmx if it is vLLM's, else a similar name.

    Only backends `known` are named. Case does not matter, and "-" is "_".
    """
    theirs = name.lower().replace("-", "_")
    if theirs in AUTOMATIC:
        return f"; for vLLM's {name!r} leave it out"
    ours, more = EQUIVALENTS.get(theirs, ("", ""))
    return f"; vLLM's {name!r} is {ours!r} in jmx, {more}" if ours in known else nearest(name, known)
