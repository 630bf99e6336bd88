// What the files of this library share: FlashInfer's types with the element types chosen, the compiled tiles, and the
// call that is under way on this thread.
//
// FlashInfer's runner sorts the assignments and multiplies; rows.cuh has what stands between the products.
#pragma once

#include <cstdint>

#include "moe_kernels.h"

namespace jmx {

namespace engine = tensorrt_llm::kernels::cutlass_kernels;
namespace gemm = tensorrt_llm::cutlass_extensions;

using Activation = __nv_bfloat16;  // what both products multiply
using Weight = engine::Fp4Type;    // by
using Sum = float;                 // into this, so that each product rounds nothing
using Runner = engine::CutlassMoeFCRunner<Activation, Weight, Sum, Activation>;
using Products = engine::MoeGemmRunner<Activation, Weight, Sum>;
using Input = engine::GroupedGemmInput<Activation, Weight, Sum, Sum>;
using Tensors = engine::TmaWarpSpecializedGroupedGemmInput;

// JMX_TILES is a list of TILE(weight rows, token rows, columns, schedule, cluster along weights, cluster along tokens).
#define JMX_LAUNCHER(M, N, K, SCHEDULE, CLUSTER_M, CLUSTER_N)                                          \
  sm90_generic_mixed_moe_gemm_kernelLauncher<                                                          \
      jmx::Activation, jmx::Weight, jmx::Sum, jmx::gemm::EpilogueOpDefault,                            \
      cute::Shape<cute::Int<M>, cute::Int<N>, cute::Int<K>>,                                           \
      cute::Shape<cute::Int<CLUSTER_M>, cute::Int<CLUSTER_N>, cute::_1>,                               \
      cutlass::gemm::KernelTmaWarpSpecialized##SCHEDULE, cutlass::epilogue::TmaWarpSpecializedCooperative, \
      cutlass::WeightOnlyQuantOp::FINEGRAINED_SCALE_ONLY>

enum class FloatType { kFloat32, kBfloat16, kFloat16 };

enum class Function { kSwiGlu, kSilu, kGelu, kGeluTanh, kRelu, kRelu2 };

// Sizes and arrays of one call that FlashInfer's runner does not get, or gets only padded.
struct Call {
  int num_sms = 0;
  int64_t num_experts = 0;
  int64_t hidden_size = 0;        // columns of x and y
  int64_t intermediate_size = 0;  // columns between the products
  FloatType x = FloatType::kBfloat16;
  FloatType y = FloatType::kBfloat16;
  FloatType bias = FloatType::kFloat32;
  void const* gate_up_bias = nullptr;  // (layers, experts, rows), or null
  void const* down_bias = nullptr;
  int32_t const* layer = nullptr;  // in device memory; null where there is one layer
  bool interleaved = false;        // gate and up alternate in `gate_up_bias`
  Function function = Function::kSwiGlu;
  float alpha = 1, beta = 0, limit = 0;  // of kSwiGlu
};

// The call that this thread's runner works on. Functions that replace FlashInfer's get at it through this alone.
extern thread_local Call const* call;

}  // namespace jmx
