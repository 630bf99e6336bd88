// The XLA FFI handler of the layer: checks its arguments, and runs FlashInfer's runner on XLA's stream.
#include <cuda_runtime.h>

#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checks.h"
#include "common.h"
#include "tensorrt_llm/common/workspace.h"
#include "xla/ffi/api/ffi.h"

namespace jmx {

// As jmx/ffi/cutlass/backend.py passes them.
struct Attributes {
  int64_t intermediate_size;
  bool gated, interleaved;
  std::string_view activation;
  float alpha, beta, limit;
  std::string_view gate_up_tile, down_tile;
  bool overlap;
};

namespace {

namespace ffi = xla::ffi;

constexpr int kMaxSms = 144;  // of a full GH100; no GPU has more, so a workspace of that size fits any

FloatType FloatTypeOf(ffi::DataType type) {
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
  extensions::CutlassGemmConfig config;
};

#define TILE(M, N, K, SCHEDULE, CLUSTER_M, CLUSTER_N)                                                    \
  Tile{#M "x" #N "x" #K "-" #SCHEDULE "-" #CLUSTER_M "x" #CLUSTER_N, M, K,                               \
       {extensions::CutlassTileConfigSM90::CtaShape##M##x##N##x##K##B, SCHEDULE_##SCHEDULE,              \
        extensions::EpilogueScheduleType::AUTO, extensions::ClusterShape::ClusterShape_##CLUSTER_M##x##CLUSTER_N##x1}},
#define SCHEDULE_Pingpong extensions::MainloopScheduleType::PINGPONG
#define SCHEDULE_Cooperative extensions::MainloopScheduleType::COOPERATIVE

Tile const* FindTile(std::string_view name) {
  static const auto tiles = [] {
    std::vector<Tile> all = {JMX_TILES};
    for (Tile& tile : all) tile.config.swap_ab = true;  // weights are the left operand
    return all;
  }();
  for (Tile const& tile : tiles)
    if (tile.name == name) return &tile;
  return nullptr;
}

// The runner only needs to know whether there is a gate.
trtllm::ActivationType ActivationTypeOf(const Sizes& sizes) {
  return sizes.gated ? trtllm::ActivationType::Swiglu : trtllm::ActivationType::Relu;
}

size_t RunnerBytes(Runner& runner, const Sizes& sizes) {
  const size_t bytes = runner.getWorkspaceSize(
      sizes.num_tokens, sizes.padded_hidden_size, sizes.padded_intermediate_size, sizes.num_experts, sizes.top_k,
      ActivationTypeOf(sizes), /*parallelism_config=*/{}, /*use_lora=*/false, /*use_deepseek_fp8_block_scale=*/false,
      /*use_mxfp8_act_scaling=*/false, /*min_latency_mode=*/false, /*use_awq=*/false);
  return tensorrt_llm::common::alignSize(bytes, tensorrt_llm::common::kCudaMemAlign);
}

// The runner's own workspace, and the row of each assignment after it.
size_t WorkspaceBytes(Runner& runner, const Sizes& sizes) {
  return RunnerBytes(runner, sizes) + sizes.num_tokens * sizes.top_k * sizeof(int);
}

// The tile of one GEMM of a weight (rows, columns), or null with an error.
Tile const* CheckTile(ArgumentChecker& check, const char* attribute, std::string_view name, int64_t rows,
                      int64_t columns) {
  Tile const* tile = FindTile(name);
  if (tile == nullptr || rows % tile->rows != 0 || columns % tile->columns != 0)
    check.InvalidArgument("`" + std::string(attribute) + "` (=" + std::string(name) +
                          ") must be a compiled tile that divides " + std::to_string(rows) + " rows and " +
                          std::to_string(columns) + " columns");
  return tile;
}

// The SMs of this thread's device, which must be a Hopper GPU.
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

// Runs the layer on checked arrays, with the tiles that were set on `runner`.
void Launch(ArgumentChecker& check, cudaStream_t stream, Runner& runner, const Arrays& arrays, const Sizes& sizes,
            bool overlap) {
  const size_t runner_bytes = RunnerBytes(runner, sizes), needed = WorkspaceBytes(runner, sizes);
  if (arrays.workspace.element_count() < needed)
    return check.InvalidArgument(ArgumentChecker::Describe("workspace", arrays.workspace) + " must have " +
                                 std::to_string(needed) + " bytes");
  char* workspace = static_cast<char*>(arrays.workspace.untyped_data());
  const auto quantization = trtllm::QuantParams::GroupWise(
      kBlock, arrays.gate_up_scales.typed_data<uint8_t>(), arrays.down_scales.typed_data<uint8_t>(), nullptr, nullptr,
      nullptr, nullptr, nullptr, nullptr);
  tensorrt_llm::kernels::LoraParams no_adapters{};
  trtllm::MoeMinLatencyParams unused{};
  runner.runMoe(arrays.x.untyped_data(), nullptr, false, arrays.expert_ids.typed_data<int32_t>(),
                arrays.weights.typed_data<float>(), arrays.gate_up.typed_data<uint8_t>(), nullptr,
                trtllm::ActivationParams(ActivationTypeOf(sizes)), arrays.down.typed_data<uint8_t>(), nullptr,
                quantization, sizes.num_tokens, sizes.padded_hidden_size, sizes.hidden_size,
                sizes.padded_intermediate_size, sizes.num_experts, sizes.top_k, workspace, arrays.y.untyped_data(),
                reinterpret_cast<int*>(workspace + runner_bytes), {}, false, false, no_adapters, false, false, false,
                unused, overlap, stream);
}

// What rows.cuh gets of a call.
Call CallOf(const Arrays& arrays, const Attributes& attributes, const Sizes& sizes, Function function, int num_sms) {
  const auto data = [](ffi::AnyBuffer array) { return array.element_count() != 0 ? array.untyped_data() : nullptr; };
  return Call{
      .num_sms = num_sms,
      .num_experts = sizes.num_experts,
      .hidden_size = sizes.hidden_size,
      .intermediate_size = sizes.intermediate_size,
      .x = FloatTypeOf(arrays.x.element_type()),
      .y = FloatTypeOf(arrays.y.element_type()),
      .bias = FloatTypeOf(arrays.gate_up_bias.element_type()),
      .gate_up_bias = data(arrays.gate_up_bias),
      .down_bias = data(arrays.down_bias),
      .layer = sizes.stacked ? arrays.layer.typed_data<int32_t>() : nullptr,
      .interleaved = attributes.interleaved,
      .function = function,
      .alpha = attributes.alpha,
      .beta = attributes.beta,
      .limit = attributes.limit,
  };
}

ffi::Error RunLayer(cudaStream_t stream, const Attributes& attributes, const Arrays& arrays) {
  ArgumentChecker check("jmx_cutlass_moe");
  const Sizes sizes = Check(check, arrays, attributes.intermediate_size, attributes.gated);
  const auto function = FunctionOf(attributes.activation);
  if (!function || (*function == Function::kSwiGlu && !attributes.gated))
    check.InvalidArgument("`activation` (=" + std::string(attributes.activation) +
                          ") must be a known one, and swiglu needs a gate");
  if (check.failed()) return check.error();
  const int64_t hidden = sizes.padded_hidden_size, intermediate = sizes.padded_intermediate_size;
  Tile const* gate_up_tile =
      CheckTile(check, "gate_up_tile", attributes.gate_up_tile, sizes.halves() * intermediate, hidden);
  Tile const* down_tile = CheckTile(check, "down_tile", attributes.down_tile, hidden, intermediate);
  if (check.failed()) return check.error();

  try {
    const int num_sms = CountSms(check);
    if (check.failed()) return check.error();
    if (sizes.num_tokens == 0 || sizes.top_k == 0) {
      tensorrt_llm::common::check_cuda_error(
          cudaMemsetAsync(arrays.y.untyped_data(), 0, arrays.y.size_bytes(), stream));
      return ffi::Error::Success();
    }
    const Call call = CallOf(arrays, attributes, sizes, *function, num_sms);
    const CallScope scope(call);
    Runner runner;  // one per call, because it keeps pointers into the workspace
    runner.use_fused_finalize_ = false;
    runner.setTactic(gate_up_tile->config, down_tile->config);
    Launch(check, stream, runner, arrays, sizes, attributes.overlap);
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("jmx_cutlass_moe: ") + e.what());
  }
  return check.error();
}

constexpr auto kRunLayer = [](cudaStream_t stream, const Attributes& attributes, auto... arrays) {
  return RunLayer(stream, attributes, MakeArrays(arrays...));
};

}  // namespace
}  // namespace jmx

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jmx::Attributes, xla::ffi::StructMember<int64_t>("intermediate_size"), xla::ffi::StructMember<bool>("gated"),
    xla::ffi::StructMember<bool>("interleaved"), xla::ffi::StructMember<std::string_view>("activation"),
    xla::ffi::StructMember<float>("alpha"), xla::ffi::StructMember<float>("beta"),
    xla::ffi::StructMember<float>("limit"), xla::ffi::StructMember<std::string_view>("gate_up_tile"),
    xla::ffi::StructMember<std::string_view>("down_tile"), xla::ffi::StructMember<bool>("overlap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jmx_cutlass_moe, jmx::kRunLayer,
    jmx::BindArrays(
        xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<cudaStream_t>>().Attrs<jmx::Attributes>()),
    {xla::ffi::Traits::kCmdBufferCompatible});

// Bytes of workspace that a call needs on any Hopper GPU, or -1. `hidden_size` and `intermediate_size` are padded.
extern "C" int64_t jmx_cutlass_workspace_bytes(int64_t num_tokens, int64_t top_k, int64_t num_experts,
                                               int64_t hidden_size, int64_t intermediate_size, int gated) {
  try {
    const jmx::Call call{.num_sms = jmx::kMaxSms};
    const jmx::CallScope scope(call);
    jmx::Runner runner;
    runner.use_fused_finalize_ = false;
    const jmx::Sizes sizes{
        .num_tokens = num_tokens,
        .top_k = top_k,
        .num_experts = num_experts,
        .padded_hidden_size = hidden_size,
        .padded_intermediate_size = intermediate_size,
        .gated = gated != 0,
    };
    return jmx::WorkspaceBytes(runner, sizes);
  } catch (const std::exception&) {
    return -1;
  }
}

// The key of the sources that the library was compiled from: see jmx/ffi/cutlass/source.py.
extern "C" const char* jmx_cutlass_key() { return JMX_KEY; }

// Names of the compiled tiles, each followed by a space: "64x16x128-Pingpong-1x1 ".
extern "C" const char* jmx_cutlass_tiles() {
#undef TILE
#define TILE(M, N, K, SCHEDULE, CLUSTER_M, CLUSTER_N) #M "x" #N "x" #K "-" #SCHEDULE "-" #CLUSTER_M "x" #CLUSTER_N " "
  return JMX_TILES;
}
