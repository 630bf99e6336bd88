// Shared by the sources of this library: FlashInfer's types for the element types used here, the launchers of compiled
// tiles, and the call that runs on this thread.
//
// FlashInfer's runner sorts the assignments and runs both grouped GEMMs; rows.cuh has the kernels around them.
#pragma once

#include <cstdint>

#include "moe_kernels.h"

namespace jmx {

namespace trtllm = tensorrt_llm::kernels::cutlass_kernels;
namespace extensions = tensorrt_llm::cutlass_extensions;

using Activation = __nv_bfloat16;  // operand of both GEMMs
using Weight = trtllm::Fp4Type;
using Accum = float;               // also what the GEMMs write, so that nothing is rounded between GEMM and epilogue
using Runner = trtllm::CutlassMoeFCRunner<Activation, Weight, Accum, Activation>;
using GemmRunner = trtllm::MoeGemmRunner<Activation, Weight, Accum>;
using GemmInput = trtllm::GroupedGemmInput<Activation, Weight, Accum, Accum>;
using TmaInput = trtllm::TmaWarpSpecializedGroupedGemmInput;

// JMX_TILES is a list of TILE(weight rows, token rows, columns, schedule, cluster along weights, cluster along tokens).
#define JMX_LAUNCHER(M, N, K, SCHEDULE, CLUSTER_M, CLUSTER_N)                                              \
  sm90_generic_mixed_moe_gemm_kernelLauncher<                                                              \
      jmx::Activation, jmx::Weight, jmx::Accum, jmx::extensions::EpilogueOpDefault,                        \
      cute::Shape<cute::Int<M>, cute::Int<N>, cute::Int<K>>,                                               \
      cute::Shape<cute::Int<CLUSTER_M>, cute::Int<CLUSTER_N>, cute::_1>,                                   \
      cutlass::gemm::KernelTmaWarpSpecialized##SCHEDULE, cutlass::epilogue::TmaWarpSpecializedCooperative, \
      cutlass::WeightOnlyQuantOp::FINEGRAINED_SCALE_ONLY>

enum class FloatType { kFloat32, kBfloat16, kFloat16 };

enum class Function { kSwiGlu, kSilu, kGelu, kGeluTanh, kRelu, kRelu2 };

// Parameters of one call that FlashInfer's runner does not pass on, or only padded.
struct Call {
  int num_sms = 0;
  int64_t num_experts = 0;
  int64_t hidden_size = 0;        // columns of x and y
  int64_t intermediate_size = 0;  // columns between the GEMMs
  FloatType x = FloatType::kBfloat16;
  FloatType y = FloatType::kBfloat16;
  FloatType bias = FloatType::kFloat32;
  void const* gate_up_bias = nullptr;  // (layers, experts, rows), or null
  void const* down_bias = nullptr;
  int32_t const* layer = nullptr;  // in device memory; null for weights of one layer
  bool interleaved = false;        // gate and up alternate in `gate_up_bias`
  Function function = Function::kSwiGlu;
  float alpha = 1, beta = 0, limit = 0;  // of kSwiGlu
};

// The call that this thread's runner executes. It is a global because FlashInfer's functions, which those here replace,
// have no parameter for it.
extern thread_local Call const* current_call;

// Sets `current_call` for its lifetime.
class CallScope {
 public:
  explicit CallScope(Call const& call) { current_call = &call; }
  ~CallScope() { current_call = nullptr; }
  CallScope(CallScope const&) = delete;
};

}  // namespace jmx
