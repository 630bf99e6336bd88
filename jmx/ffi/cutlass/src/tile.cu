// The explicit instantiation of the GEMM with one tile: compiled once for each entry of JMX_TILES, as JMX_TILE, so that
// tiles compile in parallel.
#include "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/launchers/moe_gemm_tma_ws_mixed_input_launcher.inl"

#include "common.h"

namespace tensorrt_llm::kernels::cutlass_kernels_oss {

#define TILE(...) template void JMX_LAUNCHER(__VA_ARGS__)(jmx::GemmInput, jmx::TmaInput, int, size_t*);
JMX_TILE

}  // namespace tensorrt_llm::kernels::cutlass_kernels_oss
