// FlashInfer's runner of a whole layer, with the functions of rows.cuh in the place of its own.
#include "fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh"

#include "rows.cuh"
#include "tensorrt_llm/kernels/cutlass_kernels/cutlass_heuristic.h"

namespace jmx {

thread_local Call const* call = nullptr;

}  // namespace jmx

// What the runner names and is never asked for here: adapters, AWQ, products for Ampere, and FlashInfer's own
// list of tiles. Defined so, the sources that have it need not be compiled.
namespace tensorrt_llm {

[[noreturn]] static void NotCompiled(char const* what) { TLLM_THROW("%s is no part of this library", what); }

namespace common {

cudaError_t cudaMemcpyAsyncSanitized(void*, void const*, size_t, cudaMemcpyKind, cudaStream_t) {
  return cudaErrorNotSupported;
}

}  // namespace common

namespace kernels {

int Lora_run(LoraImpl*, int64_t, int64_t, void const*, int32_t const*, void const* const*, int, void* const*, void*,
             cudaStream_t) {
  NotCompiled("an adapter");
}

template <>
void apply_per_channel_scale_kernel_launcher<jmx::Sum, jmx::Activation>(jmx::Activation*, jmx::Sum const*,
                                                                        jmx::Sum const*, int, int, int64_t const*,
                                                                        cudaStream_t) {
  NotCompiled("AWQ");
}

namespace cutlass_kernels {

std::vector<jmx::gemm::CutlassGemmConfig> get_candidate_configs(
    int, int, jmx::gemm::CutlassGemmConfig::CandidateConfigTypeParam) {
  NotCompiled("FlashInfer's list of tiles");
}

template <>
void doActivation<jmx::Sum, jmx::Sum, jmx::Sum>(jmx::Sum*, jmx::Sum const*, float const*, jmx::Sum const*, bool,
                                                int64_t const*, int const*, int, int64_t, int64_t, ActivationParams,
                                                QuantParams const&, bool, jmx::Tensors::ElementSF*, float*,
                                                float const*, bool, cudaStream_t) {
  NotCompiled("an adapter");
}

template <>
void finalizeMoeRoutingKernelLauncher<jmx::Sum, jmx::Activation, jmx::Sum>(
    jmx::Activation const*, jmx::Sum*, jmx::Sum const*, float const*, int const*, int const*, int const*,
    int64_t const*, int64_t, int64_t, int64_t, int64_t, int64_t, MOEParallelismConfig, bool, bool, cudaStream_t) {
  NotCompiled("a product for Ampere");
}

template class CutlassMoeFCRunner<jmx::Activation, jmx::Weight, jmx::Sum, jmx::Activation>;

}  // namespace cutlass_kernels
}  // namespace kernels
}  // namespace tensorrt_llm
