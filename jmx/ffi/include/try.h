// What XLA gets of a function that throws std::string, the reason of a failure.
#pragma once

#include <string>

#include "xla/ffi/api/ffi.h"

namespace jmx {

// `library`: the error's beginning.
template <typename Function>
xla::ffi::Error Try(const char* library, Function&& function) {
  try {
    function();
  } catch (const std::string& reason) {
    return xla::ffi::Error::Internal(std::string(library) + ": " + reason);
  }
  return xla::ffi::Error::Success();
}

}  // namespace jmx
