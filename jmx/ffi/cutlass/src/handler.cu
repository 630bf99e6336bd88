// The XLA FFI handler of a whole layer: checks its arguments, and hands them to FlashInfer's runner on XLA's stream.
#include <cuda_runtime.h>

#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "checks.h"
#include "engine.h"
#include "tensorrt_llm/common/workspace.h"
#include "xla/ffi/api/ffi.h"

namespace jmx {
namespace {

namespace ffi = xla::ffi;

constexpr int kMaxSms = 144;  // of a whole GH100: no card has more, so that memory made for it fits any

// Sets `call` for its lifetime.
struct CallScope {
  explicit CallScope(Call const& of) { call = &of; }
  ~CallScope() { call = nullptr; }
};

// Of a type that was checked.
FloatType ElementOf(ffi::DataType type) {
  return type == ffi::F32 ? FloatType::kFloat32 : type == ffi::BF16 ? FloatType::kBfloat16 : FloatType::kFloat16;
}

std::optional<Function> FunctionOf(std::string_view name) {
  constexpr std::pair<std::string_view, Function> kNames[] = {
      {"swiglu", Function::kSwiGlu},      {"silu", Function::kSilu}, {"gelu", Function::kGelu},
      {"gelu_tanh", Function::kGeluTanh}, {"relu", Function::kRelu}, {"relu2", Function::kRelu2},
  };
  for (const auto& [known, function] : kNames)
    if (known == name) return function;
  return std::nullopt;
}

struct Tile {
  std::string_view name;
  int64_t rows, columns;  // of weights
  gemm::CutlassGemmConfig config;
};

#define TILE(M, N, K, SCHEDULE, CLUSTER_M, CLUSTER_N)                                                    \
  Tile{#M "x" #N "x" #K "-" #SCHEDULE "-" #CLUSTER_M "x" #CLUSTER_N, M, K,                                \
       {gemm::CutlassTileConfigSM90::CtaShape##M##x##N##x##K##B, SCHEDULE_##SCHEDULE,                     \
        gemm::EpilogueScheduleType::AUTO, gemm::ClusterShape::ClusterShape_##CLUSTER_M##x##CLUSTER_N##x1}},
#define SCHEDULE_Pingpong gemm::MainloopScheduleType::PINGPONG
#define SCHEDULE_Cooperative gemm::MainloopScheduleType::COOPERATIVE

Tile const* Find(std::string_view name) {
  static const auto tiles = [] {
    std::vector<Tile> all = {JMX_TILES};
    for (Tile& tile : all) tile.config.swap_ab = true;  // weights are the left operand
    return all;
  }();
  for (Tile const& tile : tiles)
    if (tile.name == name) return &tile;
  return nullptr;
}

engine::ActivationType ActivationTypeOf(const Sizes& sizes) {
  return sizes.gated ? engine::ActivationType::Swiglu : engine::ActivationType::Relu;  // the runner asks no more
}

size_t RunnerBytes(Runner& runner, const Sizes& sizes) {
  const size_t bytes = runner.getWorkspaceSize(sizes.num_tokens, sizes.padded_hidden_size, sizes.padded_intermediate_size,
                                               sizes.num_experts, sizes.top_k, ActivationTypeOf(sizes), {},
                                               /*use_lora=*/false, false, false, false, /*use_awq=*/false);
  return tensorrt_llm::common::alignSize(bytes, tensorrt_llm::common::kCudaMemAlign);
}

// With the row of every assignment behind what the runner itself uses.
size_t WorkspaceBytes(Runner& runner, const Sizes& sizes) {
  return RunnerBytes(runner, sizes) + sizes.num_tokens * sizes.top_k * sizeof(int);
}

// The tiles of both products, or null with an error.
std::pair<Tile const*, Tile const*> FindTiles(ArgumentChecker& check, const Sizes& sizes, std::string_view gate_up_tile,
                                             std::string_view down_tile) {
  const auto find = [&](const char* name, std::string_view tile, int64_t rows, int64_t columns) {
    Tile const* found = Find(tile);
    if (found == nullptr || rows % found->rows != 0 || columns % found->columns != 0)
      check.InvalidArgument("`" + std::string(name) + "` (=" + std::string(tile) + ") must be a tile that is compiled, and divide " +
                 std::to_string(rows) + " rows by " + std::to_string(columns) + " columns");
    return found;
  };
  return {find("gate_up_tile", gate_up_tile, sizes.halves() * sizes.padded_intermediate_size, sizes.padded_hidden_size),
          find("down_tile", down_tile, sizes.padded_hidden_size, sizes.padded_intermediate_size)};
}

// Of this thread's device, which must be a Hopper GPU.
int CountSms(ArgumentChecker& check) {
  int device = 0, major = 0, minor = 0, count = 0;
  tensorrt_llm::common::check_cuda_error(cudaGetDevice(&device));
  tensorrt_llm::common::check_cuda_error(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  tensorrt_llm::common::check_cuda_error(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  tensorrt_llm::common::check_cuda_error(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  if (major != 9 || minor != 0)
    check.InvalidArgument("needs compute capability 9.0, not " + std::to_string(major) + "." + std::to_string(minor));
  return count;
}

// Runs the layer on checked arrays, on XLA's stream, with the tiles that were set on `runner`.
void Launch(ArgumentChecker& check, cudaStream_t stream, Runner& runner, const Arrays& arrays, const Sizes& sizes, bool overlap) {
  const size_t runner_bytes = RunnerBytes(runner, sizes), needed = WorkspaceBytes(runner, sizes);
  if (arrays.workspace.element_count() < needed)
    return check.InvalidArgument(ArgumentChecker::Describe("workspace", arrays.workspace) + " must have " + std::to_string(needed) + " bytes");
  char* memory = static_cast<char*>(arrays.workspace.untyped_data());
  const auto quantization =
      engine::QuantParams::GroupWise(kBlock, arrays.gate_up_scales.typed_data<uint8_t>(), arrays.down_scales.typed_data<uint8_t>(),
                                     nullptr, nullptr, nullptr, nullptr, nullptr, nullptr);
  tensorrt_llm::kernels::LoraParams no_adapters{};
  engine::MoeMinLatencyParams unused{};
  runner.runMoe(arrays.x.untyped_data(), nullptr, false, arrays.expert_ids.typed_data<int32_t>(),
                arrays.weights.typed_data<float>(), arrays.gate_up.typed_data<uint8_t>(), nullptr,
                engine::ActivationParams(ActivationTypeOf(sizes)), arrays.down.typed_data<uint8_t>(), nullptr, quantization,
                sizes.num_tokens, sizes.padded_hidden_size, sizes.hidden_size, sizes.padded_intermediate_size,
                sizes.num_experts, sizes.top_k, memory, arrays.y.untyped_data(),
                reinterpret_cast<int*>(memory + runner_bytes), {}, false, false, no_adapters, false, false, false, unused,
                overlap, stream);
}

ffi::Error Moe(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer expert_ids, ffi::AnyBuffer weights,
               ffi::AnyBuffer gate_up, ffi::AnyBuffer gate_up_scales, ffi::AnyBuffer gate_up_bias, ffi::AnyBuffer down,
               ffi::AnyBuffer down_scales, ffi::AnyBuffer down_bias, ffi::AnyBuffer layer, ffi::Result<ffi::AnyBuffer> y,
               ffi::Result<ffi::AnyBuffer> workspace, int64_t intermediate_size, bool gated, bool interleaved,
               std::string_view activation, float alpha, float beta, float limit, std::string_view gate_up_tile,
               std::string_view down_tile, bool overlap) {
  const Arrays arrays{x,           expert_ids, weights, gate_up, gate_up_scales, gate_up_bias, down,
                      down_scales, down_bias,  layer,   *y,      *workspace};
  ArgumentChecker check("jmx_cutlass_moe");
  const Sizes sizes = Check(check, arrays, intermediate_size, gated);
  const auto function = FunctionOf(activation);
  if (!function || (*function == Function::kSwiGlu && !gated))
    check.InvalidArgument("`activation` (=" + std::string(activation) + ") must be a known one, and swiglu gated");
  if (check.failed()) return check.error();
  const auto [first, second] = FindTiles(check, sizes, gate_up_tile, down_tile);
  if (check.failed()) return check.error();

  try {
    Call call_parameters;
    call_parameters.num_sms = CountSms(check);
    if (check.failed()) return check.error();
    if (sizes.num_tokens == 0 || sizes.top_k == 0) {
      tensorrt_llm::common::check_cuda_error(cudaMemsetAsync(y->untyped_data(), 0, y->size_bytes(), stream));
      return ffi::Error::Success();
    }
    call_parameters.num_experts = sizes.num_experts;
    call_parameters.hidden_size = sizes.hidden_size;
    call_parameters.intermediate_size = intermediate_size;
    call_parameters.x = ElementOf(x.element_type());
    call_parameters.y = ElementOf(y->element_type());
    call_parameters.bias = ElementOf(gate_up_bias.element_type());
    call_parameters.gate_up_bias = gate_up_bias.element_count() != 0 ? gate_up_bias.untyped_data() : nullptr;
    call_parameters.down_bias = down_bias.element_count() != 0 ? down_bias.untyped_data() : nullptr;
    call_parameters.layer = sizes.stacked ? layer.typed_data<int32_t>() : nullptr;
    call_parameters.interleaved = interleaved;
    call_parameters.function = *function;
    call_parameters.alpha = alpha;
    call_parameters.beta = beta;
    call_parameters.limit = limit;
    const CallScope scope(call_parameters);
    Runner runner;  // its own for every call, since it keeps pointers into the workspace
    runner.use_fused_finalize_ = false;
    runner.setTactic(first->config, second->config);
    Launch(check, stream, runner, arrays, sizes, overlap);
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("jmx_cutlass_moe: ") + e.what());
  }
  return check.error();
}

}  // namespace
}  // namespace jmx

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmx_cutlass_moe, jmx::Moe,
                              jmx::BindArguments<10>(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<cudaStream_t>>())
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("intermediate_size")
                                  .Attr<bool>("gated")
                                  .Attr<bool>("interleaved")
                                  .Attr<std::string_view>("activation")
                                  .Attr<float>("alpha")
                                  .Attr<float>("beta")
                                  .Attr<float>("limit")
                                  .Attr<std::string_view>("gate_up_tile")
                                  .Attr<std::string_view>("down_tile")
                                  .Attr<bool>("overlap"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

// Bytes of workspace that a call needs on any card, or -1. `hidden_size` and `intermediate_size` are the padded ones.
extern "C" int64_t jmx_cutlass_workspace_bytes(int64_t num_tokens, int64_t top_k, int64_t num_experts,
                                               int64_t hidden_size, int64_t intermediate_size, int gated) {
  try {
    jmx::Call call_parameters;
    call_parameters.num_sms = jmx::kMaxSms;
    const jmx::CallScope scope(call_parameters);
    jmx::Runner runner;
    runner.use_fused_finalize_ = false;
    jmx::Sizes sizes;
    sizes.num_tokens = num_tokens;
    sizes.top_k = top_k;
    sizes.num_experts = num_experts;
    sizes.padded_hidden_size = hidden_size;
    sizes.padded_intermediate_size = intermediate_size;
    sizes.gated = gated != 0;
    return jmx::WorkspaceBytes(runner, sizes);
  } catch (const std::exception&) {
    return -1;
  }
}

// What the library was compiled from: see jmx/ffi/cutlass/source.py.
extern "C" const char* jmx_cutlass_key() { return JMX_KEY; }

// Names of the tiles that are compiled: "64x16x128-Pingpong-1x1 ".
extern "C" const char* jmx_cutlass_tiles() {
#undef TILE
#define TILE(M, N, K, SCHEDULE, CLUSTER_M, CLUSTER_N) #M "x" #N "x" #K "-" #SCHEDULE "-" #CLUSTER_M "x" #CLUSTER_N " "
  return JMX_TILES;
}
