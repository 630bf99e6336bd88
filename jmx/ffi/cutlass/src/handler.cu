// The XLA FFI handler of a whole layer: checks its arguments, and hands them to FlashInfer's runner on XLA's stream.
#include <cuda_runtime.h>

#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "engine.h"
#include "tensorrt_llm/common/workspace.h"
#include "xla/ffi/api/ffi.h"

namespace jmx {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kBlock = 32;         // weights that share a scale
constexpr int64_t kPadded = 128;       // sizes are padded to a multiple of it
constexpr int kMultiprocessors = 144;  // of a whole GH100: no card has more, so that memory made for it fits any

// Sets `call` while it lives.
struct Scope {
  explicit Scope(Call const& of) { call = &of; }
  ~Scope() { call = nullptr; }
};

ffi::Error Wrong(const std::string& what) { return ffi::Error::InvalidArgument("jmx_cutlass_moe: " + what); }

std::string Shape(ffi::AnyBuffer::Dimensions dimensions) {
  std::string text = "(";
  for (const int64_t size : dimensions) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + ")";
}

bool Is(ffi::AnyBuffer::Dimensions dimensions, std::initializer_list<int64_t> shape) {
  return std::equal(dimensions.begin(), dimensions.end(), shape.begin(), shape.end());
}

std::optional<Element> ElementOf(ffi::DataType type) {
  if (type == ffi::F32) return Element::kFloat32;
  if (type == ffi::BF16) return Element::kBfloat16;
  if (type == ffi::F16) return Element::kFloat16;
  return std::nullopt;
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

struct Sizes {
  int64_t num_tokens, top_k, num_experts, hidden_size, intermediate_size;  // the last two are padded
  bool gated;

  engine::ActivationType Kind() const {
    return gated ? engine::ActivationType::Swiglu : engine::ActivationType::Relu;  // the runner asks no more
  }
  size_t RunnerBytes(Runner& runner) const {
    const size_t bytes =
        runner.getWorkspaceSize(num_tokens, hidden_size, intermediate_size, num_experts, top_k, Kind(), {},
                                /*use_lora=*/false, false, false, false, /*use_awq=*/false);
    return tensorrt_llm::common::alignSize(bytes, tensorrt_llm::common::kCudaMemAlign);
  }
  size_t Bytes(Runner& runner) const {  // with the row of every assignment behind what the runner itself uses
    return RunnerBytes(runner) + num_tokens * top_k * sizeof(int);
  }
};

ffi::Error Moe(cudaStream_t stream, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> expert_ids, ffi::Buffer<ffi::F32> weights,
               ffi::Buffer<ffi::U8> gate_up, ffi::Buffer<ffi::U8> gate_up_scales, ffi::AnyBuffer gate_up_bias,
               ffi::Buffer<ffi::U8> down, ffi::Buffer<ffi::U8> down_scales, ffi::AnyBuffer down_bias,
               ffi::Buffer<ffi::S32> layer, ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::Buffer<ffi::U8>> workspace,
               int64_t intermediate_size, bool gated, bool interleaved, std::string_view activation, float alpha,
               float beta, float limit, std::string_view gate_up_tile, std::string_view down_tile, bool overlap) {
  const auto x_shape = x.dimensions(), ids_shape = expert_ids.dimensions(), up_shape = gate_up.dimensions();
  if (x_shape.size() != 2 || ids_shape.size() != 2) return Wrong("`x` and `expert_ids` must have two axes");
  const bool stacked = layer.element_count() != 0;
  if (up_shape.size() != (stacked ? 4u : 3u))
    return Wrong("`gate_up` (shape " + Shape(up_shape) + ") must have three axes, and one more where `layer` is given");
  const int64_t num_layers = stacked ? up_shape[0] : 1, num_experts = up_shape[stacked];
  const int64_t rows = up_shape[stacked + 1];
  const Sizes sizes{x_shape[0], ids_shape[1], num_experts, 2 * up_shape[stacked + 2], rows / (gated ? 2 : 1), gated};
  const int64_t hidden_size = x_shape[1], hidden = sizes.hidden_size, intermediate = sizes.intermediate_size;

  if (hidden % kPadded != 0 || intermediate % kPadded != 0 || rows % (gated ? 2 : 1) != 0)
    return Wrong("`gate_up` (shape " + Shape(up_shape) + ") must be padded to multiples of " + std::to_string(kPadded));
  if (hidden_size > hidden || hidden_size % 8 != 0 || intermediate_size > intermediate || intermediate_size % 8 != 0)
    return Wrong("`x` (shape " + Shape(x_shape) + ") and `intermediate_size` (=" + std::to_string(intermediate_size) +
                 ") must be multiples of 8, and no larger than the weights");
  const int64_t experts = num_layers * num_experts;
  const auto down_shape = down.dimensions();
  if (!(stacked ? Is(down_shape, {num_layers, num_experts, hidden, intermediate / 2})
                : Is(down_shape, {num_experts, hidden, intermediate / 2})))
    return Wrong("`down` (shape " + Shape(down_shape) + ") must fit `gate_up` (shape " + Shape(up_shape) + ")");
  if (gate_up_scales.element_count() != static_cast<size_t>(experts * rows * hidden / kBlock) ||
      down_scales.element_count() != static_cast<size_t>(experts * hidden * intermediate / kBlock))
    return Wrong("there must be one scale for every " + std::to_string(kBlock) + " weights");
  if (!Is(ids_shape, {sizes.num_tokens, sizes.top_k}) || !Is(weights.dimensions(), {sizes.num_tokens, sizes.top_k}))
    return Wrong("`expert_ids` (shape " + Shape(ids_shape) + ") and `weights` (shape " + Shape(weights.dimensions()) +
                 ") must both be (T, k), with T of `x` (shape " + Shape(x_shape) + ")");
  if (!Is(y->dimensions(), {sizes.num_tokens, hidden_size}))
    return Wrong("`y` (shape " + Shape(y->dimensions()) + ") must have the shape of `x` (" + Shape(x_shape) + ")");
  const auto x_type = ElementOf(x.element_type()), y_type = ElementOf(y->element_type());
  if (!x_type || *x_type == Element::kFloat32 || !y_type)
    return Wrong("`x` must be bfloat16 or float16, and `y` one of these or float32");
  const size_t up_bias = gate_up_bias.element_count(), down_bias_count = down_bias.element_count();
  const auto bias_type = ElementOf(up_bias != 0 ? gate_up_bias.element_type() : down_bias.element_type());
  if (!bias_type || (up_bias != 0 && down_bias_count != 0 && gate_up_bias.element_type() != down_bias.element_type()))
    return Wrong("biases must be of one dtype: float32, bfloat16 or float16");
  if ((up_bias != 0 && up_bias != static_cast<size_t>(experts * intermediate_size * (gated ? 2 : 1))) ||
      (down_bias_count != 0 && down_bias_count != static_cast<size_t>(experts * hidden_size)))
    return Wrong("biases must have one element for every row of the weights, without padding");
  const auto function = FunctionOf(activation);
  if (!function || (*function == Function::kSwiGlu && !gated))
    return Wrong("`activation` (=" + std::string(activation) + ") must be a known one, and swiglu gated");
  Tile const *first = Find(gate_up_tile), *second = Find(down_tile);
  if (first == nullptr || second == nullptr)
    return Wrong("tile " + std::string(first == nullptr ? gate_up_tile : down_tile) + " is not compiled");
  if (rows % first->rows != 0 || hidden % first->columns != 0 || hidden % second->rows != 0 ||
      intermediate % second->columns != 0)
    return Wrong("tiles " + std::string(gate_up_tile) + " and " + std::string(down_tile) + " must divide the weights");

  try {
    int device = 0, major = 0, minor = 0;
    Call one;
    tensorrt_llm::common::check_cuda_error(cudaGetDevice(&device));
    tensorrt_llm::common::check_cuda_error(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    tensorrt_llm::common::check_cuda_error(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    tensorrt_llm::common::check_cuda_error(
        cudaDeviceGetAttribute(&one.multiprocessors, cudaDevAttrMultiProcessorCount, device));
    if (major != 9 || minor != 0)
      return Wrong("needs compute capability 9.0, not " + std::to_string(major) + "." + std::to_string(minor));
    if (sizes.num_tokens == 0 || sizes.top_k == 0) {
      tensorrt_llm::common::check_cuda_error(cudaMemsetAsync(y->untyped_data(), 0, y->size_bytes(), stream));
      return ffi::Error::Success();
    }
    one.num_experts = num_experts;
    one.hidden_size = hidden_size;
    one.intermediate_size = intermediate_size;
    one.x = *x_type;
    one.y = *y_type;
    one.bias = *bias_type;
    one.gate_up_bias = up_bias != 0 ? gate_up_bias.untyped_data() : nullptr;
    one.down_bias = down_bias_count != 0 ? down_bias.untyped_data() : nullptr;
    one.layer = stacked ? layer.typed_data() : nullptr;
    one.interleaved = interleaved;
    one.function = *function;
    one.alpha = alpha;
    one.beta = beta;
    one.limit = limit;
    const Scope scope(one);
    Runner runner;  // its own for every call, since it keeps pointers into the workspace
    runner.use_fused_finalize_ = false;
    runner.setTactic(first->config, second->config);
    const size_t runner_bytes = sizes.RunnerBytes(runner);
    if (workspace->element_count() < sizes.Bytes(runner))
      return Wrong("`workspace` (" + std::to_string(workspace->element_count()) + " bytes) must have " +
                   std::to_string(sizes.Bytes(runner)));
    char* memory = reinterpret_cast<char*>(workspace->typed_data());
    const auto quantised =
        engine::QuantParams::GroupWise(kBlock, gate_up_scales.typed_data(), down_scales.typed_data(), nullptr, nullptr,
                                       nullptr, nullptr, nullptr, nullptr);
    tensorrt_llm::kernels::LoraParams no_adapters{};
    engine::MoeMinLatencyParams unused{};
    runner.runMoe(x.untyped_data(), nullptr, false, expert_ids.typed_data(), weights.typed_data(),
                  gate_up.typed_data(), nullptr, engine::ActivationParams(sizes.Kind()), down.typed_data(), nullptr,
                  quantised, sizes.num_tokens, hidden, hidden_size, intermediate, num_experts, sizes.top_k, memory,
                  y->untyped_data(), reinterpret_cast<int*>(memory + runner_bytes), {}, false, false, no_adapters,
                  false, false, false, unused, overlap, stream);
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("jmx_cutlass_moe: ") + e.what());
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jmx

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmx_cutlass_moe, jmx::Moe,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::U8>>()
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
    jmx::Call one;
    one.multiprocessors = jmx::kMultiprocessors;
    const jmx::Scope scope(one);
    jmx::Runner runner;
    runner.use_fused_finalize_ = false;
    return jmx::Sizes{num_tokens, top_k, num_experts, hidden_size, intermediate_size, gated != 0}.Bytes(runner);
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
