// The handlers that launch a kernel between ranks: what they take first, how they launch, and their definitions.
#pragma once

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

inline void Launch(Stream stream, Function function, int blocks, void** parameters) {
  Check(driver().launch(function, blocks, 1, 1, kThreads, 1, 1, 0, stream, parameters, nullptr), "cuLaunchKernel");
}

}  // namespace jmx

// Both handlers of a call, for jmx::BindCall's arguments. Its launch can be a part of a CUDA graph.
#define JMX_LAUNCHING_HANDLERS(NAME, INITIALIZE, EXECUTE)                                                              \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(NAME##_initialize, INITIALIZE, jmx::BindCall(xla::ffi::Ffi::BindInitialize()));        \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(NAME, EXECUTE,                                                                         \
                                jmx::BindCall(xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<jmx::Stream>>()),     \
                                {xla::ffi::Traits::kCmdBufferCompatible})
