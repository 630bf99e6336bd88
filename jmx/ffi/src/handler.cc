// The XLA FFI handler of the grouped product: checks its arguments, cuts them into pieces and hands these to threads.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <new>
#include <string>
#include <string_view>

#include "product.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace jmx {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kMaxColumns = 64;          // a piece is no larger, so that threads end together
constexpr int64_t kReadRows = 4;             // of a block, in the mean, up to which reading weights is what takes the time
constexpr int64_t kReadInARow = 16;          // pieces that a thread then takes at once: what it asks for ahead is its own
constexpr int64_t kWorkOfAThread = 1 << 18;  // products below which another thread is not worth its start

const Kernel* Find(std::string_view name) {
  const Kernel* best = nullptr;
  for (const Kernel* kernel : {JMX_KERNELS}) {
    if (!kernel->runs_here()) continue;
    if (name == kernel->name) return kernel;
    if (name == "best") best = kernel;
  }
  return best;
}

// Memory of this thread's own, which it keeps.
char* Scratch(size_t bytes) {
  struct Buffer {
    char* data = nullptr;
    size_t size = 0;
    ~Buffer() { Free(); }
    void Free() {
      if (data != nullptr) ::operator delete(data, std::align_val_t(64));
    }
  };
  static thread_local Buffer buffer;
  if (buffer.size < bytes) {
    buffer.Free();
    buffer.size = 0;
    buffer.data = static_cast<char*>(::operator new(bytes, std::align_val_t(64)));
    buffer.size = bytes;
  }
  return buffer.data;
}

ffi::Error Wrong(const std::string& what) { return ffi::Error::InvalidArgument("jmx_cpu_grouped_product: " + what); }

// kFormats where there is none.
Format FormatOf(std::string_view name, ffi::DataType scale) {
  if (name == "mxfp4" && scale == ffi::U8) return kMxfp4;
  if (name == "nvfp4" && scale == ffi::U8) return kNvfp4;
  if (name == "int4" && scale == ffi::BF16) return kInt4Bfloat16;
  if (name == "int4" && scale == ffi::F16) return kInt4Float16;
  if (name == "int4" && scale == ffi::F32) return kInt4Float32;
  return kFormats;
}

bool MayShareAScale(Format format, int64_t group) {
  if (format == kMxfp4) return group == kBlock;
  if (format == kNvfp4) return group == kBlock / 2;
  return group == kWholeRow || (group >= kBlock && std::has_single_bit(static_cast<uint64_t>(group)));
}

// For each block b and each m below counts[b], with e = experts[b]:
//   out[out_rows[b] + m] = x[x_rows[b] + m] @ dequantised(weight[e]).T + bias[b]
// Rows of `out` that no block names are left as they are. `few` says that calls of these shapes have few rows an expert:
// their sums may have an order of their own, which must not depend on what the blocks are. Arrays that a format or a type
// of x lacks are empty.
ffi::Error GroupedProduct(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> x_scales, ffi::Buffer<ffi::U8> values,
                          ffi::AnyBuffer scales, ffi::Buffer<ffi::S8> zero_points, ffi::Buffer<ffi::F32> global_scales,
                          ffi::Buffer<ffi::F32> bias, ffi::Buffer<ffi::S32> experts, ffi::Buffer<ffi::S32> x_rows,
                          ffi::Buffer<ffi::S32> out_rows, ffi::Buffer<ffi::S32> counts, ffi::Result<ffi::Buffer<ffi::F32>> out,
                          std::string_view instructions, std::string_view format_name, int64_t group, bool few) {
  const Kernel* kernel = Find(instructions);
  if (kernel == nullptr) return Wrong("`instructions` (=" + std::string(instructions) + ") are not this machine's");
  const Format format = FormatOf(format_name, scales.element_type());
  if (format == kFormats || !MayShareAScale(format, group))
    return Wrong("`format` (=" + std::string(format_name) + "), `group` (=" + std::to_string(group) + ") and scales are of no format here");
  const ffi::DataType type = x.element_type();
  if (type != ffi::F32 && type != ffi::BF16 && type != ffi::S8) return Wrong("`x` must be float32, bfloat16 or int8");
  const Input input = type == ffi::S8 ? kInt8 : type == ffi::F32 ? kFloat32 : few ? kFewBfloat16 : kBfloat16;
  const Way& way = kernel->Find(format, input);
  if (way.run == nullptr) return Wrong("`x` (int8) must meet int4");

  const auto weight = values.dimensions();
  if (x.dimensions().size() != 2 || weight.size() != 3 || scales.dimensions().size() != 3 ||
      out->dimensions().size() != 2 || experts.dimensions().size() != 1)
    return Wrong("`x`, `out` must have two axes, `values`, `scales` three, `experts` one");
  const int64_t num_experts = weight[0], columns = weight[1], k = 2 * weight[2], blocks = experts.dimensions()[0];
  const int64_t shared = group == kWholeRow ? k : group, groups = scales.dimensions()[2];
  if ((shared != 0 && k % shared != 0) || columns % kStep != 0) return Wrong("sizes of the weight must be multiples of the block");
  if (scales.dimensions()[0] != num_experts || scales.dimensions()[1] != columns || (k != 0 && groups * shared != k) ||
      x.dimensions()[1] != k || out->dimensions()[1] != columns)
    return Wrong("`scales`, `x` and `out` must fit `values`");
  const auto fits = [](size_t count, int64_t wanted, bool needed) {
    return count == static_cast<size_t>(wanted) || (count == 0 && !needed);
  };
  if (!fits(zero_points.element_count(), num_experts * columns * groups, false) ||
      !fits(global_scales.element_count(), num_experts * columns, format == kNvfp4))
    return Wrong("`zero_points` and `global_scales` must fit `values`");
  if (!fits(x_scales.element_count(), x.dimensions()[0], input == kInt8)) return Wrong("`x_scales` must be one a row of `x`");
  for (const auto& rows : {x_rows, out_rows, counts})
    if (rows.element_count() != static_cast<size_t>(blocks)) return Wrong("every block must have its rows");
  const bool biased = bias.element_count() != 0;
  if (biased && bias.element_count() != static_cast<size_t>(blocks * columns)) return Wrong("`bias` must fit `out`");

  int64_t rows = 0, busy = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t count = counts.typed_data()[b];
    if (count <= 0) continue;
    const int64_t expert = experts.typed_data()[b], from = x_rows.typed_data()[b], to = out_rows.typed_data()[b];
    if (expert < 0 || expert >= num_experts || from < 0 || from + count > x.dimensions()[0] || to < 0 ||
        to + count > out->dimensions()[0])
      return Wrong("block " + std::to_string(b) + " lies outside of the arrays");
    rows += count;
    ++busy;
  }
  if (rows == 0 || columns == 0 || k == 0) return ffi::Error::Success();

  const int64_t width = std::min(kMaxColumns, columns), room = way.room(k);
  const int64_t row_bytes = k * ffi::ByteWidth(type);
  const int64_t pieces = (columns + width - 1) / width;
  const auto run = [&](int64_t b, int64_t column, int64_t end) {
    const int64_t count = counts.typed_data()[b];
    if (count <= 0) return;
    const int64_t row = experts.typed_data()[b] * columns + column;  // among the weight rows of all experts
    const int64_t from = x_rows.typed_data()[b];
    Piece piece;
    piece.x = static_cast<const char*>(x.untyped_data()) + from * row_bytes;
    piece.x_scales = input == kInt8 ? x_scales.typed_data() + from : nullptr;
    piece.values = values.typed_data() + row * (k / 2);
    piece.scales = static_cast<const char*>(scales.untyped_data()) + row * groups * ffi::ByteWidth(scales.element_type());
    piece.zero_points = zero_points.element_count() != 0 ? zero_points.typed_data() + row * groups : nullptr;
    piece.global_scales = global_scales.element_count() != 0 ? global_scales.typed_data() + row : nullptr;
    piece.bias = biased ? bias.typed_data() + b * columns + column : nullptr;
    piece.out = out->typed_data() + out_rows.typed_data()[b] * columns + column;
    piece.rows = count;
    piece.columns = std::min(end, columns) - column;
    piece.k = k;
    piece.group = group;
    piece.out_stride = columns;
    piece.scratch = Scratch(room);
    way.run(piece);
  };
  const auto work = [&](int64_t i, int64_t end) {
    for (int64_t n; i < end; i += n) {  // those of one block are one
      n = std::min(end - i, pieces - i % pieces);
      run(i / pieces, i % pieces * width, (i % pieces + n) * width);
    }
  };
  const int64_t worth = rows * columns * k / kWorkOfAThread;
  const int64_t helpers = std::min({pool.num_threads() - 1, worth, blocks * pieces - 1});
  Share(pool, helpers, blocks * pieces, rows <= kReadRows * busy ? kReadInARow : way.in_a_row, work);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jmx

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmx_cpu_grouped_product, jmx::GroupedProduct,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S8>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<std::string_view>("instructions")
                                  .Attr<std::string_view>("format")
                                  .Attr<int64_t>("group")
                                  .Attr<bool>("few"));

// Names of the kernels that this machine runs, the best one last: "portable avx2 ".
extern "C" const char* jmx_cpu_kernels() {
  static const std::string names = [] {
    using namespace jmx;
    std::string all;
    for (const Kernel* kernel : {JMX_KERNELS})
      if (kernel->runs_here()) all.append(kernel->name).append(" ");
    return all;
  }();
  return names.c_str();
}

// One piece on this thread, without XLA: what tests hold to its memory and to its bits. 0, or 1 for a name not known.
extern "C" int jmx_cpu_product(const char* instructions, int format, int input, const char* x, const float* x_scales,
                               const uint8_t* values, const char* scales, const int8_t* zero_points, const float* global_scales,
                               const float* bias, float* out, int64_t rows, int64_t columns, int64_t k, int64_t group) {
  const jmx::Kernel* kernel = jmx::Find(instructions);
  if (kernel == nullptr) return 1;
  const jmx::Way& way = kernel->Find(static_cast<jmx::Format>(format), static_cast<jmx::Input>(input));
  way.run({x, x_scales, values, scales, zero_points, global_scales, bias, out, rows, columns, k, group, columns,
           jmx::Scratch(way.room(k))});
  return 0;
}
