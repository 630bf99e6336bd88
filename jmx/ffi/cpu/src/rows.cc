// The XLA FFI handlers of what rows of x go through before a product: rounding to int8, and an order of columns.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>

#include "arguments.h"
#include "row_blocks.h"
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

ffi::Error RoundRows(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                     ffi::Result<ffi::AnyBuffer> scales) {
  Arguments given("jmx_cpu_round_rows");
  given.Require("x", x, {ffi::F32, ffi::BF16}, {kAnySize, kAnySize});
  if (given.failed()) return given.error();
  const int64_t rows = x.dimensions()[0], k = x.dimensions()[1];
  given.Require("values", *values, {ffi::S8}, {rows, k});
  given.Require("scales", *scales, {ffi::F32}, {rows, 1});
  if (given.failed()) return given.error();
  const auto work = [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      int8_t* to = values->typed_data<int8_t>() + row * k;
      scales->typed_data<float>()[row] = x.element_type() == ffi::F32
                                             ? Round(static_cast<const float*>(x.untyped_data()) + row * k, k, to)
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

void CheckOrders(Arguments& given, ffi::AnyBuffer order, const RowBlocks& blocks) {
  const int64_t k = order.dimensions()[1];
  for (int64_t b = 0; b < blocks.size(); ++b) {
    const RowBlock block = blocks.At(b);
    const int32_t* first = order.typed_data<int32_t>() + block.expert * k;
    if (block.count > 0 && std::any_of(first, first + k, [k](int32_t column) { return column < 0 || column >= k; }))
      return given.Fail("`order` of expert " + std::to_string(block.expert) + " names a column that is not there");
  }
}

// For each block b and each m below counts[b]: out[out_rows[b] + m, i] = x[x_rows[b] + m, order[experts[b], i]].
ffi::Error OrderColumns(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer order, ffi::AnyBuffer experts,
                        ffi::AnyBuffer x_rows, ffi::AnyBuffer out_rows, ffi::AnyBuffer counts,
                        ffi::Result<ffi::AnyBuffer> out) {
  const RowBlocks blocks{experts, x_rows, out_rows, counts};
  Arguments given("jmx_cpu_order_columns");
  given.Require("x", x, {ffi::F32, ffi::BF16, ffi::S8}, {kAnySize, kAnySize});
  blocks.RequireArrays(given);
  if (given.failed()) return given.error();
  const int64_t k = x.dimensions()[1], bytes = ffi::ByteWidth(x.element_type());
  given.Require("order", order, {ffi::S32}, {kAnySize, k});
  given.Require("out", *out, {x.element_type()}, {kAnySize, k});
  if (given.failed()) return given.error();
  blocks.RequireWithin(given, order.dimensions()[0], x.dimensions()[0], out->dimensions()[0]);
  if (!given.failed()) CheckOrders(given, order, blocks);
  if (given.failed()) return given.error();

  int64_t rows = 0;
  for (int64_t b = 0; b < blocks.size(); ++b) rows += std::max<int64_t>(blocks.At(b).count, 0);
  const auto work = [&](int64_t b, int64_t) {  // one at a time
    const RowBlock block = blocks.At(b);
    const int32_t* columns = order.typed_data<int32_t>() + block.expert * k;
    for (int64_t m = 0; m < block.count; ++m) {
      const char* from = static_cast<const char*>(x.untyped_data()) + (block.from + m) * k * bytes;
      char* to = static_cast<char*>(out->untyped_data()) + (block.to + m) * k * bytes;
      if (bytes == 1) Reorder<uint8_t>(from, columns, k, to);
      else if (bytes == 2) Reorder<uint16_t>(from, columns, k, to);
      else Reorder<uint32_t>(from, columns, k, to);
    }
  };
  const int64_t helpers = std::min({pool.num_threads() - 1, rows * k / kElementsOfAThread, blocks.size() - 1});
  if (blocks.size() > 0) Share(pool, helpers, blocks.size(), 1, work);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jmx

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmx_cpu_round_rows, jmx::RoundRows,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmx_cpu_order_columns, jmx::OrderColumns,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
