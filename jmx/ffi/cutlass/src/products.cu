// FlashInfer's grouped GEMMs with the compiled tiles, on any layer of a stack of weights.
#include "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/moe_gemm_template_dispatch.h"

#include "common.h"

namespace jmx {
namespace {

// Weights of layers are consecutive, and the index of the layer is in device memory.
__global__ void MoveToLayer(void const** weights, TmaInput::INT4GroupwiseParams::SFA const** scales,
                            int32_t const* layer, int64_t weight_bytes, int64_t scale_bytes, int num_experts) {
  const int expert = blockIdx.x * blockDim.x + threadIdx.x;
  if (expert >= num_experts) return;
  weights[expert] = static_cast<char const*>(weights[expert]) + *layer * weight_bytes;
  scales[expert] = reinterpret_cast<TmaInput::INT4GroupwiseParams::SFA const*>(
      reinterpret_cast<char const*>(scales[expert]) + *layer * scale_bytes);
}

}  // namespace
}  // namespace jmx

namespace tensorrt_llm::kernels {

namespace cutlass_kernels_oss {

// Replaces FlashInfer's dispatch, whose tiles would all have to be compiled.
template <>
void sm90_dispatch_moe_mixed_dtype_gemm_to_cutlass<jmx::Activation, jmx::Weight, jmx::Accum,
                                                   jmx::extensions::EpilogueOpDefault, 1,
                                                   Sm90Wfp4Afp8ScaleMode::kDisabled>(
    jmx::GemmInput input, jmx::TmaInput tensors, int num_sms, size_t* workspace_size) {
  if (jmx::current_call != nullptr && jmx::current_call->layer != nullptr) {
    const int64_t elements = jmx::current_call->num_experts * input.n * input.k;
    const int threads = 128, blocks = (input.num_experts + threads - 1) / threads;
    jmx::MoveToLayer<<<blocks, threads, 0, input.stream>>>(
        tensors.ptr_weight, tensors.int4_groupwise_params.ptr_s_a, jmx::current_call->layer, elements / 2,
        elements / jmx::TmaInput::INT4GroupwiseParams::wfp4a16_group_size, input.num_experts);
    common::check_cuda_error(cudaPeekAtLastError());
  }
  const auto& config = input.gemm_config;
#define SCHEDULE_Pingpong tkc::MainloopScheduleType::PINGPONG
#define SCHEDULE_Cooperative tkc::MainloopScheduleType::COOPERATIVE
#define TILE(M, N, K, SCHEDULE, CLUSTER_M, CLUSTER_N)                                                  \
  if (config.tile_config_sm90 == tkc::CutlassTileConfigSM90::CtaShape##M##x##N##x##K##B &&              \
      config.mainloop_schedule == SCHEDULE_##SCHEDULE &&                                               \
      config.cluster_shape == tkc::ClusterShape::ClusterShape_##CLUSTER_M##x##CLUSTER_N##x1)            \
    return JMX_LAUNCHER(M, N, K, SCHEDULE, CLUSTER_M, CLUSTER_N)(input, tensors, num_sms, workspace_size);
  JMX_TILES
#undef TILE
  TLLM_THROW("this tile is not compiled");
}

// The maximum over the tiles.
template <>
size_t calcMaxWorkspaceSizeTmaWarpSpecializedMixedInput<jmx::Activation, jmx::Weight, jmx::Accum,
                                                        Sm90Wfp4Afp8ScaleMode::kDisabled>(int num_experts,
                                                                                          int num_sms) {
  jmx::GemmInput input{};
  input.num_experts = num_experts;
  size_t most = 0, size = 0;
#define TILE(...)                                                    \
  JMX_LAUNCHER(__VA_ARGS__)(input, jmx::TmaInput{}, num_sms, &size); \
  most = std::max(most, size);
  JMX_TILES
#undef TILE
  return most;
}

}  // namespace cutlass_kernels_oss

namespace cutlass_kernels {

// FlashInfer's constructor queries the device; workspace sizes are needed while tracing, possibly without one.
template <>
jmx::GemmRunner::MoeGemmRunner() : sm_(90), multi_processor_count_(jmx::current_call->num_sms) {}

template class MoeGemmRunner<jmx::Activation, jmx::Weight, jmx::Accum>;

}  // namespace cutlass_kernels
}  // namespace tensorrt_llm::kernels
