// The checks of the handler `jmx_cutlass_moe`, behind a handler for CPUs that computes nothing.
#include "checks.h"

namespace jmx {

using Array = xla::ffi::AnyBuffer;
using Result = xla::ffi::Result<Array>;

xla::ffi::Error CheckAlone(Array x, Array expert_ids, Array weights, Array gate_up, Array gate_up_scales,
                           Array gate_up_bias, Array down, Array down_scales, Array down_bias, Array layer, Result y,
                           Result workspace, int64_t intermediate_size, bool gated) {
  ArgumentChecker check("jmx_cutlass_moe");
  Check(check,
        {x, expert_ids, weights, gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias, layer, *y, *workspace},
        intermediate_size, gated);
  return check.error();
}

}  // namespace jmx

XLA_FFI_DEFINE_HANDLER_SYMBOL(check_cutlass, jmx::CheckAlone,
                              xla::ffi::Ffi::Bind()
                                  .Arg<jmx::Array>()
                                  .Arg<jmx::Array>()
                                  .Arg<jmx::Array>()
                                  .Arg<jmx::Array>()
                                  .Arg<jmx::Array>()
                                  .Arg<jmx::Array>()
                                  .Arg<jmx::Array>()
                                  .Arg<jmx::Array>()
                                  .Arg<jmx::Array>()
                                  .Arg<jmx::Array>()
                                  .Ret<jmx::Array>()
                                  .Ret<jmx::Array>()
                                  .Attr<int64_t>("intermediate_size")
                                  .Attr<bool>("gated"));
