// FlashInfer's grouped products, cut down to the tiles that are compiled, on any layer of a stack of weights.
#include "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/moe_gemm_template_dispatch.h"

#include "engine.h"

namespace jmx {
namespace {

// Weights of all layers lie one after the other, and which layer is meant is known on the device alone.
__global__ void MoveToLayer(void const** weights, Tensors::INT4GroupwiseParams::SFA const** scales,
                            int32_t const* layer, int64_t weight_bytes, int64_t scale_bytes, int num_experts) {
  const int expert = blockIdx.x * blockDim.x + threadIdx.x;
  if (expert >= num_experts) return;
  weights[expert] = static_cast<char const*>(weights[expert]) + *layer * weight_bytes;
  scales[expert] = reinterpret_cast<Tensors::INT4GroupwiseParams::SFA const*>(
      reinterpret_cast<char const*>(scales[expert]) + *layer * scale_bytes);
}

}  // namespace
}  // namespace jmx

namespace tensorrt_llm::kernels {

namespace cutlass_kernels_oss {

// In the place of FlashInfer's own list of tiles, of which each would have to be compiled.
template <>
void sm90_dispatch_moe_mixed_dtype_gemm_to_cutlass<jmx::Activation, jmx::Weight, jmx::Sum, jmx::gemm::EpilogueOpDefault,
                                                   1, Sm90Wfp4Afp8ScaleMode::kDisabled>(jmx::Input input,
                                                                                        jmx::Tensors tensors,
                                                                                        int num_sms,
                                                                                        size_t* workspace_size) {
  if (jmx::call != nullptr && jmx::call->layer != nullptr) {
    const int64_t elements = jmx::call->num_experts * input.n * input.k;
    const int threads = 128, blocks = (input.num_experts + threads - 1) / threads;
    jmx::MoveToLayer<<<blocks, threads, 0, input.stream>>>(
        tensors.ptr_weight, tensors.int4_groupwise_params.ptr_s_a, jmx::call->layer, elements / 2,
        elements / jmx::Tensors::INT4GroupwiseParams::wfp4a16_group_size, input.num_experts);
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
  TLLM_THROW("no such tile is compiled");
}

// The most that any of the tiles needs.
template <>
size_t calcMaxWorkspaceSizeTmaWarpSpecializedMixedInput<jmx::Activation, jmx::Weight, jmx::Sum,
                                                        Sm90Wfp4Afp8ScaleMode::kDisabled>(int num_experts,
                                                                                          int num_sms) {
  jmx::Input input{};
  input.num_experts = num_experts;
  size_t most = 0, size = 0;
#define TILE(...)                                                                \
  JMX_LAUNCHER(__VA_ARGS__)(input, jmx::Tensors{}, num_sms, &size);       \
  most = std::max(most, size);
  JMX_TILES
#undef TILE
  return most;
}

}  // namespace cutlass_kernels_oss

namespace cutlass_kernels {

// Asks no device: sizes of memory are wanted while tracing, on machines that may have none.
template <>
jmx::Products::MoeGemmRunner() : sm_(90), multi_processor_count_(jmx::call->num_sms) {}

template class MoeGemmRunner<jmx::Activation, jmx::Weight, jmx::Sum>;

}  // namespace cutlass_kernels
}  // namespace tensorrt_llm::kernels
