// The XLA FFI handlers that prepare rows of x for a product: rounding to int8, and permuting columns.
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

constexpr int64_t kMinElementsPerThread = 1 << 15;  // below which starting another thread costs more than it saves

constexpr uint32_t kInfinity = 0x7F800000, kNan = 0x7FC00000;
constexpr float kLeastScale = 0x1p-126f, kLargest = 127;

float ToFloat(float x) { return x; }
float ToFloat(uint16_t bfloat) { return std::bit_cast<float>(static_cast<uint32_t>(bfloat) << 16); }

// Rounds a row to int8 and returns its scale, bit for bit as `jmx.numerics.input_formats.quantize` does.
template <typename X>
float Round(const X* x, int64_t k, int8_t* values) {
  uint32_t most = 0;
  for (int64_t i = 0; i < k; ++i) most = std::max(most, std::bit_cast<uint32_t>(ToFloat(x[i])) & 0x7FFFFFFF);
  if (most >= kInfinity) {
    std::memset(values, 0, k);
    return std::bit_cast<float>(kNan);
  }
  const float scale = std::max(std::bit_cast<float>(most) / kLargest, kLeastScale);
  constexpr float kOnes = 0x1.8p23f;  // a float whose last bit has the value one
  for (int64_t i = 0; i < k; ++i)
    // Rounds ties to even, as sums do.
    values[i] = static_cast<int8_t>(std::bit_cast<uint32_t>(ToFloat(x[i]) / scale + kOnes));
  return scale;
}

ffi::Error RoundRows(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                     ffi::Result<ffi::AnyBuffer> scales) {
  ArgumentChecker check("jmx_cpu_round_rows");
  check.Require("x", x, {ffi::F32, ffi::BF16}, {kAnySize, kAnySize});
  if (check.failed()) return check.error();
  const int64_t rows = x.dimensions()[0], k = x.dimensions()[1];
  check.Require("values", *values, {ffi::S8}, {rows, k});
  check.Require("scales", *scales, {ffi::F32}, {rows, 1});
  if (check.failed()) return check.error();
  const auto work = [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      int8_t* to = values->typed_data<int8_t>() + row * k;
      scales->typed_data<float>()[row] = x.element_type() == ffi::F32
                                             ? Round(static_cast<const float*>(x.untyped_data()) + row * k, k, to)
                                             : Round(static_cast<const uint16_t*>(x.untyped_data()) + row * k, k, to);
    }
  };
  if (rows > 0)
    ParallelFor(pool, std::min({pool.num_threads() - 1, rows * k / kMinElementsPerThread, rows - 1}), rows, 4, work);
  return ffi::Error::Success();
}

template <typename T>
void GatherColumns(const void* x, const int32_t* order, int64_t k, void* out) {
  for (int64_t i = 0; i < k; ++i) static_cast<T*>(out)[i] = static_cast<const T*>(x)[order[i]];
}

void CheckOrders(ArgumentChecker& check, ffi::AnyBuffer order, const RowBlocks& blocks) {
  const int64_t k = order.dimensions()[1];
  for (int64_t b = 0; b < blocks.size(); ++b) {
    const RowBlock block = blocks.At(b);
    const int32_t* first = order.typed_data<int32_t>() + block.expert * k;
    if (block.count > 0 && std::any_of(first, first + k, [k](int32_t column) { return column < 0 || column >= k; }))
      return check.InvalidArgument("`order` of expert " + std::to_string(block.expert) +
                                   " contains a column out of range");
  }
}

// For each block b and each m below counts[b]: out[out_rows[b] + m, i] = x[x_rows[b] + m, order[experts[b], i]].
ffi::Error OrderColumns(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer order, ffi::AnyBuffer experts,
                        ffi::AnyBuffer x_rows, ffi::AnyBuffer out_rows, ffi::AnyBuffer counts,
                        ffi::Result<ffi::AnyBuffer> out) {
  const RowBlocks blocks{experts, x_rows, out_rows, counts};
  ArgumentChecker check("jmx_cpu_order_columns");
  check.Require("x", x, {ffi::F32, ffi::BF16, ffi::S8}, {kAnySize, kAnySize});
  blocks.RequireArrays(check);
  if (check.failed()) return check.error();
  const int64_t k = x.dimensions()[1], bytes = ffi::ByteWidth(x.element_type());
  check.Require("order", order, {ffi::S32}, {kAnySize, k});
  check.Require("out", *out, {x.element_type()}, {kAnySize, k});
  if (check.failed()) return check.error();
  blocks.RequireWithin(check, order.dimensions()[0], x.dimensions()[0], out->dimensions()[0]);
  if (!check.failed()) CheckOrders(check, order, blocks);
  if (check.failed()) return check.error();

  int64_t rows = 0;
  for (int64_t b = 0; b < blocks.size(); ++b) rows += std::max<int64_t>(blocks.At(b).count, 0);
  const auto work = [&](int64_t b, int64_t) {  // max_chunk is 1
    const RowBlock block = blocks.At(b);
    const int32_t* columns = order.typed_data<int32_t>() + block.expert * k;
    for (int64_t m = 0; m < block.count; ++m) {
      const char* from = static_cast<const char*>(x.untyped_data()) + (block.x_row + m) * k * bytes;
      char* to = static_cast<char*>(out->untyped_data()) + (block.out_row + m) * k * bytes;
      if (bytes == 1) GatherColumns<uint8_t>(from, columns, k, to);
      else if (bytes == 2) GatherColumns<uint16_t>(from, columns, k, to);
      else GatherColumns<uint32_t>(from, columns, k, to);
    }
  };
  const int64_t helpers = std::min({pool.num_threads() - 1, rows * k / kMinElementsPerThread, blocks.size() - 1});
  if (blocks.size() > 0) ParallelFor(pool, helpers, blocks.size(), 1, work);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jmx

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmx_cpu_round_rows, jmx::RoundRows,
                              jmx::BindArguments<1>(xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>())
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmx_cpu_order_columns, jmx::OrderColumns,
                              jmx::BindArguments<6>(xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>())
                                  .Ret<xla::ffi::AnyBuffer>());
