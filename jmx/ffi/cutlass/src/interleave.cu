// FlashInfer's own interleaving of weights, with which a test compares jmx/ffi/cutlass/layout.py.
#include <cuda_runtime.h>

#include "arguments.h"
#include "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/moe_gemm_mixed_utils.h"
#include "xla/ffi/api/ffi.h"

namespace jmx {
namespace {

namespace ffi = xla::ffi;

ffi::Error Interleave(cudaStream_t stream, ffi::AnyBuffer values, ffi::Result<ffi::AnyBuffer> out) {
  ArgumentChecker check("jmx_cutlass_interleave");
  check.Require("values", values, {ffi::U8}, {kAnySize, kAnySize, kAnySize});
  if (check.failed()) return check.error();
  const auto shape = values.dimensions();
  if (shape[1] % 16 != 0 || shape[2] % 32 != 0)
    check.InvalidArgument(ArgumentChecker::Describe("values", values) + " must be (E, N, K / 2), N % 16 = K % 64 = 0");
  check.Require("out", *out, {ffi::U8}, {shape[0], shape[1], shape[2]});
  if (check.failed()) return check.error();
  for (int64_t expert = 0; expert < shape[0]; ++expert) {
    const int64_t offset = expert * shape[1] * shape[2];
    tensorrt_llm::kernels::cutlass_kernels::interleave_fp4_weights_for_sm90_mixed_gemm(
        values.typed_data<uint8_t>() + offset, out->typed_data<uint8_t>() + offset, shape[1], 2 * shape[2], stream);
  }
  const cudaError_t error = cudaPeekAtLastError();
  return error == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(error));
}

}  // namespace
}  // namespace jmx

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmx_cutlass_interleave, jmx::Interleave,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
