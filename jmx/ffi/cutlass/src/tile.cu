// Translation unit of one GEMM with one tile: compiled once for every entry of JMX_TILES, with JMX_TILE set to it, so that
// tiles compile in parallel. It has nothing but the explicit instantiation.
#include "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/launchers/moe_gemm_tma_ws_mixed_input_launcher.inl"

#include "engine.h"

namespace tensorrt_llm::kernels::cutlass_kernels_oss {

#define TILE(...) template void JMX_LAUNCHER(__VA_ARGS__)(jmx::Input, jmx::Tensors, int, size_t*);
JMX_TILE

}  // namespace tensorrt_llm::kernels::cutlass_kernels_oss
