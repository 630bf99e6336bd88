// The XLA FFI handler of the grouped product: checks its arguments, cuts them into pieces and hands these to threads.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <new>
#include <string>
#include <string_view>

#include "arguments.h"
#include "row_blocks.h"
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

// The arrays of a call. Those that its format or its type of x lacks are empty.
struct Arrays {
  ffi::AnyBuffer x, x_scales, values, scales, zero_points, global_scales, bias;
  RowBlocks blocks;
  ffi::AnyBuffer out;
};

// What weights are by an attribute of the call; the type of their scales says the rest.
struct Scheme {
  std::string_view name;
  int64_t group;

  bool Integers() const { return name == "int4"; }

  void Check(Arguments& given) const {
    if (name != "mxfp4" && name != "nvfp4" && !Integers())
      return given.Fail("`format` (=" + std::string(name) + ") must be mxfp4, nvfp4 or int4");
    const bool power = group >= kBlock && std::has_single_bit(static_cast<uint64_t>(group));
    if (Integers() ? group != kWholeRow && !power : group != (name == "mxfp4" ? kBlock : kBlock / 2))
      given.Fail("`group` (=" + std::to_string(group) + ") must be how many weights of " + std::string(name) + " share a scale");
  }

  Format With(ffi::DataType scale) const {
    if (!Integers()) return name == "mxfp4" ? kMxfp4 : kNvfp4;
    return scale == ffi::BF16 ? kInt4Bfloat16 : scale == ffi::F16 ? kInt4Float16 : kInt4Float32;
  }
};

struct Sizes {
  int64_t num_experts, columns, k, groups;

  // Of values (E, N, K / 2), whose number of axes is known to be three.
  Sizes(ffi::AnyBuffer values, int64_t group)
      : num_experts(values.dimensions()[0]),
        columns(values.dimensions()[1]),
        k(2 * values.dimensions()[2]),
        groups(group == kWholeRow ? 1 : k / group) {}
};

void Check(Arguments& given, const Arrays& arrays, const Scheme& scheme) {
  scheme.Check(given);
  given.Require("values", arrays.values, {ffi::U8}, {kAnySize, kAnySize, kAnySize});
  if (given.failed()) return;
  const auto [num_experts, columns, k, groups] = Sizes(arrays.values, scheme.group);
  if (columns % kStep != 0 || (scheme.group != kWholeRow && k % scheme.group != 0))
    return given.Fail(Arguments::Named("values", arrays.values) + " must have rows of whole groups, by " + std::to_string(kStep));
  if (scheme.Integers()) {
    given.Require("x", arrays.x, {ffi::F32, ffi::BF16, ffi::S8}, {kAnySize, k});
    given.Require("scales", arrays.scales, {ffi::BF16, ffi::F16, ffi::F32}, {num_experts, columns, groups});
    given.RequireOrEmpty("zero_points", arrays.zero_points, {ffi::S8}, {num_experts, columns, groups});
  } else {
    given.Require("x", arrays.x, {ffi::F32, ffi::BF16}, {kAnySize, k});
    given.Require("scales", arrays.scales, {ffi::U8}, {num_experts, columns, groups});
    given.RequireEmpty("zero_points", arrays.zero_points, {ffi::S8});
  }
  if (scheme.name == "nvfp4") given.Require("global_scales", arrays.global_scales, {ffi::F32}, {num_experts, columns});
  else given.RequireEmpty("global_scales", arrays.global_scales, {ffi::F32});
  given.Require("out", arrays.out, {ffi::F32}, {kAnySize, columns});
  arrays.blocks.RequireArrays(given);
  if (given.failed()) return;
  const int64_t rows = arrays.x.dimensions()[0];
  if (arrays.x.element_type() == ffi::S8) given.Require("x_scales", arrays.x_scales, {ffi::F32}, {rows, 1});
  else given.RequireEmpty("x_scales", arrays.x_scales, {ffi::F32});
  given.RequireOrEmpty("bias", arrays.bias, {ffi::F32}, {arrays.blocks.size(), columns});
  arrays.blocks.RequireWithin(given, num_experts, rows, arrays.out.dimensions()[0]);
}

// Columns column..end of one block, where its weights have those.
void Run(const Arrays& arrays, const Way& way, const Sizes& sizes, int64_t group, int64_t b, int64_t column, int64_t end) {
  const RowBlock block = arrays.blocks.At(b);
  if (block.count <= 0) return;
  const auto [num_experts, columns, k, groups] = sizes;
  const int64_t row = block.expert * columns + column;  // among the weight rows of all experts
  const auto given = [](const ffi::AnyBuffer& array) { return array.element_count() != 0; };
  Piece piece;
  piece.x = static_cast<const char*>(arrays.x.untyped_data()) + block.from * k * ffi::ByteWidth(arrays.x.element_type());
  piece.x_scales = given(arrays.x_scales) ? arrays.x_scales.typed_data<float>() + block.from : nullptr;
  piece.values = arrays.values.typed_data<uint8_t>() + row * (k / 2);
  piece.scales = static_cast<const char*>(arrays.scales.untyped_data()) + row * groups * ffi::ByteWidth(arrays.scales.element_type());
  piece.zero_points = given(arrays.zero_points) ? arrays.zero_points.typed_data<int8_t>() + row * groups : nullptr;
  piece.global_scales = given(arrays.global_scales) ? arrays.global_scales.typed_data<float>() + row : nullptr;
  piece.bias = given(arrays.bias) ? arrays.bias.typed_data<float>() + b * columns + column : nullptr;
  piece.out = arrays.out.typed_data<float>() + block.to * columns + column;
  piece.rows = block.count;
  piece.columns = std::min(end, columns) - column;
  piece.k = k;
  piece.group = group;
  piece.out_stride = columns;
  piece.scratch = Scratch(way.room(k));
  way.run(piece);
}

void RunAll(ffi::ThreadPool pool, const Arrays& arrays, const Way& way, int64_t group) {
  const Sizes sizes(arrays.values, group);
  const int64_t blocks = arrays.blocks.size();
  int64_t rows = 0, busy = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t count = arrays.blocks.At(b).count;
    rows += std::max<int64_t>(count, 0);
    busy += count > 0;
  }
  if (rows == 0 || sizes.columns == 0 || sizes.k == 0) return;
  const int64_t width = std::min(kMaxColumns, sizes.columns);
  const int64_t pieces = (sizes.columns + width - 1) / width;
  const auto work = [&](int64_t i, int64_t end) {
    for (int64_t n; i < end; i += n) {  // those of one block are one
      n = std::min(end - i, pieces - i % pieces);
      Run(arrays, way, sizes, group, i / pieces, i % pieces * width, (i % pieces + n) * width);
    }
  };
  const int64_t worth = rows * sizes.columns * sizes.k / kWorkOfAThread;
  const int64_t helpers = std::min({pool.num_threads() - 1, worth, blocks * pieces - 1});
  Share(pool, helpers, blocks * pieces, rows <= kReadRows * busy ? kReadInARow : way.in_a_row, work);
}

// For each block b and each m below counts[b], with e = experts[b]:
//   out[out_rows[b] + m] = x[x_rows[b] + m] @ dequantised(weight[e]).T + bias[b]
// Rows of `out` that no block names are left as they are. `few` says that calls of these shapes have few rows an expert:
// their sums may have an order of their own, which must not depend on what the blocks are.
ffi::Error GroupedProduct(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer x_scales, ffi::AnyBuffer values,
                          ffi::AnyBuffer scales, ffi::AnyBuffer zero_points, ffi::AnyBuffer global_scales,
                          ffi::AnyBuffer bias, ffi::AnyBuffer experts, ffi::AnyBuffer x_rows, ffi::AnyBuffer out_rows,
                          ffi::AnyBuffer counts, ffi::Result<ffi::AnyBuffer> out, std::string_view instructions,
                          std::string_view format, int64_t group, bool few) {
  const Arrays arrays{x, x_scales, values, scales, zero_points, global_scales, bias, {experts, x_rows, out_rows, counts}, *out};
  const Scheme scheme{format, group};
  const Kernel* kernel = Find(instructions);
  Arguments given("jmx_cpu_grouped_product");
  if (kernel == nullptr) given.Fail("`instructions` (=" + std::string(instructions) + ") must be a set that this machine has");
  Check(given, arrays, scheme);
  if (given.failed()) return given.error();
  const ffi::DataType type = x.element_type();
  const Input input = type == ffi::S8 ? kInt8 : type == ffi::F32 ? kFloat32 : few ? kFewBfloat16 : kBfloat16;
  RunAll(pool, arrays, kernel->Find(scheme.With(scales.element_type()), input), group);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jmx

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmx_cpu_grouped_product, jmx::GroupedProduct,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
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
