// FlashInfer's runner of the layer, with the functions of rows.cuh in place of its own.
#include "fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh"

#include "rows.cuh"
#include "tensorrt_llm/kernels/cutlass_kernels/cutlass_heuristic.h"

namespace jmx {

thread_local Call const* current_call = nullptr;

}  // namespace jmx

// What the runner refers to, but never calls here: adapters, AWQ, GEMMs for Ampere, and FlashInfer's own list of
// tiles. These definitions save compiling the sources that have them.
namespace tensorrt_llm {

[[noreturn]] static void NotCompiled(char const* what) { TLLM_THROW("%s: not part of this library", what); }

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
void apply_per_channel_scale_kernel_launcher<jmx::Accum, jmx::Activation>(
    jmx::Activation*, jmx::Accum const*, jmx::Accum const*, int, int, int64_t const*, cudaStream_t) {
  NotCompiled("AWQ");
}

namespace cutlass_kernels {

std::vector<jmx::extensions::CutlassGemmConfig> get_candidate_configs(
    int, int, jmx::extensions::CutlassGemmConfig::CandidateConfigTypeParam) {
  NotCompiled("FlashInfer's list of tiles");
}

template <>
void doActivation<jmx::Accum, jmx::Accum, jmx::Accum>(
    jmx::Accum*, jmx::Accum const*, float const*, jmx::Accum const*, bool, int64_t const*, int const*, int, int64_t,
    int64_t, ActivationParams, QuantParams const&, bool, jmx::TmaInput::ElementSF*, float*, float const*, bool,
    cudaStream_t) {
  NotCompiled("an adapter");
}

template <>
void finalizeMoeRoutingKernelLauncher<jmx::Accum, jmx::Activation, jmx::Accum>(
    jmx::Activation const*, jmx::Accum*, jmx::Accum const*, float const*, int const*, int const*, int const*,
    int64_t const*, int64_t, int64_t, int64_t, int64_t, int64_t, MOEParallelismConfig, bool, bool, cudaStream_t) {
  NotCompiled("a GEMM for Ampere");
}

template class CutlassMoeFCRunner<jmx::Activation, jmx::Weight, jmx::Accum, jmx::Activation>;

}  // namespace cutlass_kernels
}  // namespace kernels
}  // namespace tensorrt_llm
