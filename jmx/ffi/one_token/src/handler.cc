// The XLA FFI handler that launches the kernels of kernels.cu.
#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "call.h"
#include "driver.h"
#include "image.h"
#include "try.h"
#include "xla/ffi/api/ffi.h"

namespace jmx {
namespace {

namespace ffi = xla::ffi;

// CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
constexpr int kMostShared = 8, kCarveout = 9;
// CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
constexpr int kCluster = 4, kOverlap = 6;
constexpr int kSharedBytes = 227 << 10;  // that a CTA of a Hopper GPU may have

constexpr int kNumProcessors = 16;  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

struct OfGpu {
  Function functions[2][kNumKernels] = {};  // of one token, and of several
  int processors = 0;
};

class Resources {
 public:
  static Resources& Get() {
    static auto* resources = new Resources;  // not destroyed while other threads may still run
    return *resources;
  }

  Image image;

  const OfGpu& Find(int ordinal) {
    std::lock_guard lock(mutex_);
    OfGpu& found = gpus_[ordinal];
    if (found.functions[0][0] != nullptr) return found;
    const Module module = image.ModuleOf(ordinal);
    const Current current(ordinal);
    OfGpu loaded;
    Check(driver().attribute(&loaded.processors, kNumProcessors, DeviceOf(ordinal)), "cuDeviceGetAttribute");
    for (int several = 0; several < 2; ++several)
      for (int i = 0; i < kNumKernels; ++i) {
        Function& function = loaded.functions[several][i];
        Check(driver().function(&function, module, kKernels[several][i]), "cuModuleGetFunction");
        // All with the same share of an SM's memory, so that they run on it at the same time.
        Check(driver().set_attribute(function, kCarveout, 100), "cuFuncSetAttribute");
        Check(driver().set_attribute(function, kMostShared, kSharedBytes), "cuFuncSetAttribute");
      }
    return found = loaded;
  }

 private:
  std::mutex mutex_;
  std::map<int, OfGpu> gpus_;
};

// Arguments in the order of jmx/models/one_token/call.py; `present` has a bit for each that may be left out.
class Arguments {
 public:
  Arguments(ffi::RemainingArgs args, int64_t present) : args_(args), present_(present) {}

  ffi::AnyBuffer Next(int rank, ffi::DataType type) {
    auto found = args_.get<ffi::AnyBuffer>(at_++);
    if (!found.has_value()) throw std::string("arrays are missing");
    if (found->element_type() != type || static_cast<int>(found->dimensions().size()) != rank)
      throw "array " + std::to_string(at_ - 1) + " has another type or rank";
    last_ = *found;
    return *found;
  }

  template <typename T>
  T* Address(int rank, ffi::DataType type) {
    return static_cast<T*>(Next(rank, type).untyped_data());
  }

  template <typename T>
  T* Optional(int rank, ffi::DataType type) {
    const bool is = present_ >> option_++ & 1;
    return is ? Address<T>(rank, type) : nullptr;
  }

  int64_t last(int axis) const { return last_->dimensions()[axis]; }
  size_t count() const { return at_; }

 private:
  ffi::RemainingArgs args_;
  int64_t present_;
  std::optional<ffi::AnyBuffer> last_;
  int option_ = 0;
  size_t at_ = 0;
};

template <typename T>
T* ResultOf(ffi::RemainingRets results, size_t number) {
  auto found = results.get<ffi::AnyBuffer>(number);
  if (!found.has_value()) throw std::string("results are missing");
  return static_cast<T*>((*found)->untyped_data());
}

// Throws where the arguments are not those of jmx/models/one_token/call.py.
Call CallOf(int64_t present, int64_t window, float epsilon, float router_epsilon, ffi::RemainingArgs args,
            ffi::RemainingRets results) {
  Call call{};
  Arguments its(args, present);
  call.x = its.Address<Bf16>(2, ffi::BF16);
  call.tokens = its.last(0);
  call.hidden = its.last(1);
  call.scale = its.Address<float>(1, ffi::F32);
  call.heads_weights = its.Address<Bf16>(2, ffi::BF16);
  const int64_t rows = its.last(0);
  call.heads_bias = its.Optional<Bf16>(1, ffi::BF16);
  call.cos = its.Address<float>(2, ffi::F32);
  call.sin = its.Address<float>(2, ffi::F32);
  call.cache = its.Address<Bf16>(5, ffi::BF16);
  call.kv_heads = its.last(2);
  call.page = its.last(3);
  call.part_stride = its.last(1) * its.last(2) * its.last(3) * its.last(4);
  if (its.last(4) != kDim) throw std::string("heads of another size");
  call.tables = its.Optional<int>(2, ffi::S32);
  call.num_pages = call.tables == nullptr ? 1 : its.last(1);
  call.position = its.Address<int>(1, ffi::S32);
  call.sinks = its.Optional<float>(1, ffi::F32);
  call.out_weights = its.Address<Bf16>(2, ffi::BF16);
  call.group = its.last(1) / kDim / call.kv_heads;
  call.out_bias = its.Optional<Bf16>(1, ffi::BF16);
  call.router_scale = its.Address<float>(1, ffi::F32);
  call.router_weights = its.Address<Bf16>(2, ffi::BF16);
  call.experts = its.last(0);
  call.router_bias = its.Optional<Bf16>(1, ffi::BF16);
  if (args.size() != its.count() || results.size() != 6) throw std::string("wrong number of arrays");
  if (call.tokens < 1 || call.tokens > kMostTokens) throw std::string("wrong number of tokens");
  if (call.group > kMostGroup || rows != call.kv_heads * (call.group + 2) * kDim) throw std::string("wrong heads");

  call.x_out = ResultOf<Bf16>(results, 0);
  if (ResultOf<Bf16>(results, 1) != call.cache) throw std::string("the cache is not written in place");
  call.logits = ResultOf<float>(results, 2);
  call.normed = ResultOf<Bf16>(results, 3);
  call.heads = ResultOf<Bf16>(results, 4);
  call.attended = ResultOf<Bf16>(results, 5);
  call.window = static_cast<int>(window);
  call.epsilon = epsilon;
  call.router_epsilon = router_epsilon;
  const int positions = call.page * call.num_pages;
  const int seen = window > 0 ? std::min<int64_t>(window, positions) : positions;
  const int most = std::clamp(kAttentionCtas / (call.tokens * call.kv_heads), 1, kMostSplits);
  call.splits = std::clamp((seen + kSplitKeys - 1) / kSplitKeys, 1, call.tokens == 1 ? kMostSplits : most);
  return call;
}

// Before any launch, and outside of a capture as a CUDA graph: the kernels are loaded.
ffi::Error Initialize(int32_t ordinal) {
  return Try("jmx_one_token", [&] { Resources::Get().Find(ordinal); });
}

ffi::Error Execute(Stream stream, int32_t ordinal, int64_t present, int64_t window, float epsilon, float router_epsilon,
                   ffi::RemainingArgs args, ffi::RemainingRets results) {
  return Try("jmx_one_token", [&] {
    const OfGpu& gpu = Resources::Get().Find(ordinal);
    Call call = CallOf(present, window, epsilon, router_epsilon, args, results);
    call.processors = gpu.processors;
    void* parameters[] = {&call};
    Launch launches[kNumKernels];
    Plan(call, launches);
    for (int i = 0; i < kNumKernels; ++i) {
      const auto& [ctas, threads, shared_bytes, cluster] = launches[i];
      LaunchAttribute attributes[2];
      unsigned number = 0;
      if (cluster > 1) attributes[number++] = {kCluster, 0, {cluster, 1, 1}};
      if (i > 0) attributes[number++] = {kOverlap, 0, {1}};
      const LaunchConfig config{
          {unsigned(ctas), 1, 1}, {unsigned(threads), 1, 1}, unsigned(shared_bytes), stream, attributes, number};
      Check(driver().launch_extended(&config, gpu.functions[call.tokens > 1][i], parameters, nullptr),
            "cuLaunchKernelEx");
    }
  });
}

}  // namespace
}  // namespace jmx

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmx_one_token_initialize, jmx::Initialize,
                              xla::ffi::Ffi::BindInitialize().Ctx<xla::ffi::DeviceOrdinal>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jmx_one_token, jmx::Execute,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<jmx::Stream>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Attr<int64_t>("present")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("router_epsilon")
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {xla::ffi::Traits::kCmdBufferCompatible});

// The compiled kernels.cu. Returns 0.
extern "C" int jmx_one_token_set_image(const char* data, size_t size) {
  jmx::Resources::Get().image.Set(data, size);
  return 0;
}
