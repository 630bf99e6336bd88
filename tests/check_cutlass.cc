// The checks of the handler `jmx_cutlass_moe`, behind a handler for CPUs that computes nothing.
#include "checks.h"

namespace jmx {

constexpr auto kCheckAlone = [](int64_t intermediate_size, bool gated, auto... arrays) {
  ArgumentChecker check("jmx_cutlass_moe");
  Check(check, MakeArrays(arrays...), intermediate_size, gated);
  return check.error();
};

}  // namespace jmx

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    check_cutlass, jmx::kCheckAlone,
    jmx::BindArrays(xla::ffi::Ffi::Bind().Attr<int64_t>("intermediate_size").Attr<bool>("gated")));
