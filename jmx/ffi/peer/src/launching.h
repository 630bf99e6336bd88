// The handlers that launch a kernel between ranks: what they take first, their calls, and their definitions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "gpus.h"
#include "region.h"
#include "resources.h"
#include "xla/ffi/api/ffi.h"

namespace jmx {

// What a handler takes of its GPU and of those that it exchanges with.
template <typename Binding>
auto BindGroup(Binding&& binding) {
  return std::move(binding)
      .template Ctx<xla::ffi::DeviceOrdinal>()
      .template Attr<xla::ffi::Span<const int64_t>>("devices")
      .template Attr<int64_t>("num_ranks");
}

inline void Rule(bool kept, const char* what) {
  if (!kept) throw std::string(what);
}

// "bf16", "f16" or "f32", for names of kernels that add up.
inline const char* NameOf(xla::ffi::DataType type) {
  Rule(type == xla::ffi::BF16 || type == xla::ffi::F16 || type == xla::ffi::F32, "wrong type");
  return type == xla::ffi::BF16 ? "bf16" : type == xla::ffi::F16 ? "f16" : "f32";
}

inline size_t RoundUp(size_t size, size_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// The CTAs of a call in which a thread has so many of the bytes.
inline int BlocksOf(size_t bytes, size_t thread_bytes) {
  const size_t of_cta = kThreads * thread_bytes;
  return static_cast<int>(std::clamp<size_t>((bytes + of_cta - 1) / of_cta, 1, kMaxBlocks));
}

// A call of a kernel between ranks, which takes the ranks, the arrays, and perhaps something of its own.
struct Call {
  const char* source = nullptr;  // that has the kernel
  std::string function{};
  int blocks = 0;
  Arrays arrays{};
  Ranks ranks{};

  // The regions of all ranks, of which each rank's arrays have so many bytes. There is one for each kind and size of
  // calls, made when the first rank asks: each CTA counts its calls, so all calls on a region have as many CTAs, and
  // they write the same lines.
  void GiveRegions(const Group& group, size_t slot_bytes) {
    ranks.rank = group.rank;
    ranks.num_ranks = group.size();
    ranks.slot_bytes = RoundUp(slot_bytes, 128);
    std::string key = function + " " + std::to_string(blocks) + (arrays.whole ? " whole" : "");
    for (int i = 0; i < arrays.count; ++i) key += " " + std::to_string(arrays.bytes[i]);
    const auto& regions = Resources::Get().FindRegions(key, group.ordinals, ranks.slot_bytes);
    for (size_t rank = 0; rank < regions.size(); ++rank) ranks.region[rank] = reinterpret_cast<char*>(regions[rank]);
  }

  Function Find(int ordinal) const { return Resources::Get().KernelsOf(source).Find(ordinal, function); }

  template <typename... Own>
  void Launch(Stream stream, int ordinal, Own&... own) {
    void* parameters[] = {&ranks, &arrays, &own...};
    Check(driver().launch(Find(ordinal), blocks, 1, 1, kThreads, 1, 1, 0, stream, parameters, nullptr),
          "cuLaunchKernel");
  }
};

}  // namespace jmx

// Both handlers of a call, for jmx::BindCall's arguments. Its launch can be a part of a CUDA graph.
#define JMX_LAUNCHING_HANDLERS(NAME, INITIALIZE, EXECUTE)                                                              \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(NAME##_initialize, INITIALIZE, jmx::BindCall(xla::ffi::Ffi::BindInitialize()));        \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(NAME, EXECUTE,                                                                         \
                                jmx::BindCall(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<jmx::Stream>>()),     \
                                {xla::ffi::Traits::kCmdBufferCompatible})
