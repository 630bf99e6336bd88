// The XLA FFI handlers of what rows of x go through before a product: rounding to int8, and an order of columns.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>

#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace jmx {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kElementsOfAThread = 1 << 15;  // below which another thread is not worth its start

constexpr uint32_t kInfinity = 0x7F800000, kNan = 0x7FC00000;
constexpr float kLeastScale = 0x1p-126f, kLargest = 127;

float Widened(float x) { return x; }
float Widened(uint16_t bfloat) { return std::bit_cast<float>(static_cast<uint32_t>(bfloat) << 16); }

// A row of int8 and what a one of them is worth: `jmx.inputs` says how, and has the same bits.
template <typename X>
float Round(const X* x, int64_t k, int8_t* values) {
  uint32_t most = 0;
  for (int64_t i = 0; i < k; ++i) most = std::max(most, std::bit_cast<uint32_t>(Widened(x[i])) & 0x7FFFFFFF);
  if (most >= kInfinity) {
    std::memset(values, 0, k);
    return std::bit_cast<float>(kNan);
  }
  const float scale = std::max(std::bit_cast<float>(most) / kLargest, kLeastScale);
  constexpr float kOnes = 0x1.8p23f;  // a float so large that its last bit is worth one
  for (int64_t i = 0; i < k; ++i)
    values[i] = static_cast<int8_t>(std::bit_cast<uint32_t>(Widened(x[i]) / scale + kOnes));  // ties to even, as sums do
  return scale;
}

ffi::Error RoundRows(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::Buffer<ffi::S8>> values,
                     ffi::Result<ffi::Buffer<ffi::F32>> scales) {
  const auto wrong = [](const char* what) { return ffi::Error::InvalidArgument(std::string("jmx_cpu_round_rows: ") + what); };
  if (x.element_type() != ffi::F32 && x.element_type() != ffi::BF16) return wrong("`x` must be float32 or bfloat16");
  if (x.dimensions().size() != 2) return wrong("`x` must have two axes");
  const int64_t rows = x.dimensions()[0], k = x.dimensions()[1];
  if (values->element_count() != x.element_count() || scales->element_count() != static_cast<size_t>(rows))
    return wrong("`values` and `scales` must fit `x`");
  const auto work = [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      int8_t* to = values->typed_data() + row * k;
      scales->typed_data()[row] = x.element_type() == ffi::F32 ? Round(static_cast<const float*>(x.untyped_data()) + row * k, k, to)
                                                              : Round(static_cast<const uint16_t*>(x.untyped_data()) + row * k, k, to);
    }
  };
  if (rows > 0) Share(pool, std::min({pool.num_threads() - 1, rows * k / kElementsOfAThread, rows - 1}), rows, 4, work);
  return ffi::Error::Success();
}

template <typename T>
void Reorder(const void* x, const int32_t* order, int64_t k, void* out) {
  for (int64_t i = 0; i < k; ++i) static_cast<T*>(out)[i] = static_cast<const T*>(x)[order[i]];
}

// For each block b and each m below counts[b]: out[out_rows[b] + m, i] = x[x_rows[b] + m, order[experts[b], i]].
ffi::Error OrderColumns(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> order, ffi::Buffer<ffi::S32> experts,
                        ffi::Buffer<ffi::S32> x_rows, ffi::Buffer<ffi::S32> out_rows, ffi::Buffer<ffi::S32> counts,
                        ffi::Result<ffi::AnyBuffer> out) {
  const auto wrong = [](const std::string& what) { return ffi::Error::InvalidArgument("jmx_cpu_order_columns: " + what); };
  if (x.dimensions().size() != 2 || order.dimensions().size() != 2 || out->dimensions().size() != 2)
    return wrong("`x`, `order` and `out` must have two axes");
  const int64_t k = x.dimensions()[1], bytes = ffi::ByteWidth(x.element_type());
  if (order.dimensions()[1] != k || out->dimensions()[1] != k || out->element_type() != x.element_type())
    return wrong("`order` and `out` must fit `x`");
  if (bytes != 1 && bytes != 2 && bytes != 4) return wrong("`x` must be of 8, 16 or 32 bits");
  const int64_t blocks = experts.element_count();
  for (const auto& rows : {x_rows, out_rows, counts})
    if (rows.element_count() != static_cast<size_t>(blocks)) return wrong("every block must have its rows");
  int64_t rows = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t count = counts.typed_data()[b];
    if (count <= 0) continue;
    const int64_t expert = experts.typed_data()[b], from = x_rows.typed_data()[b], to = out_rows.typed_data()[b];
    if (expert < 0 || expert >= order.dimensions()[0] || from < 0 || from + count > x.dimensions()[0] || to < 0 ||
        to + count > out->dimensions()[0])
      return wrong("block " + std::to_string(b) + " lies outside of the arrays");
    const int32_t* first = order.typed_data() + expert * k;
    if (std::any_of(first, first + k, [k](int32_t column) { return column < 0 || column >= k; }))
      return wrong("`order` of expert " + std::to_string(expert) + " names a column that is not there");
    rows += count;
  }
  const auto work = [&](int64_t b, int64_t) {  // one at a time
    const int32_t* columns = order.typed_data() + static_cast<int64_t>(experts.typed_data()[b]) * k;
    for (int64_t m = 0; m < counts.typed_data()[b]; ++m) {
      const char* from = static_cast<const char*>(x.untyped_data()) + (x_rows.typed_data()[b] + m) * k * bytes;
      char* to = static_cast<char*>(out->untyped_data()) + (out_rows.typed_data()[b] + m) * k * bytes;
      if (bytes == 1) Reorder<uint8_t>(from, columns, k, to);
      else if (bytes == 2) Reorder<uint16_t>(from, columns, k, to);
      else Reorder<uint32_t>(from, columns, k, to);
    }
  };
  if (blocks > 0) Share(pool, std::min({pool.num_threads() - 1, rows * k / kElementsOfAThread, blocks - 1}), blocks, 1, work);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jmx

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmx_cpu_round_rows, jmx::RoundRows,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::S8>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmx_cpu_order_columns, jmx::OrderColumns,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::AnyBuffer>());
