// The XLA FFI handler of the grouped product: checks its arguments and splits the work into tasks for a thread pool.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <new>
#include <string>
#include <string_view>

#include "arguments.h"
#include "processor.h"
#include "product.h"
#include "row_blocks.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace jmx {

// The attributes of a call. `group`: weights that share a scale, or kWholeRow. `few`: calls of these shapes have few
// rows per expert. Their sums may have another order, which must not depend on the contents of the blocks.
struct Attributes {
  std::string_view instructions, format;
  int64_t group;
  bool few;
};

namespace {

namespace ffi = xla::ffi;

// Columns of the result per task: few, so that all threads finish at about the same time.
constexpr int64_t kTaskColumns = 64;
constexpr int64_t kMemoryBoundRows = 4;  // mean rows of a block up to which a call is bound by memory bandwidth
// Claimed at once, so that a thread's prefetches are of weights that it reads itself.
constexpr int64_t kMemoryBoundTasksPerClaim = 16;
// Multiplications below which starting another thread costs more than it saves.
constexpr int64_t kMinProductsPerThread = 1 << 18;

bool IsSupported(const InstructionSet& instructions) { return (instructions.needs & ~ProcessorFeatures()) == 0; }

const InstructionSet* FindInstructionSet(std::string_view name) {
  const InstructionSet* best = nullptr;
  for (const InstructionSet* instructions : {JMX_INSTRUCTION_SETS}) {
    if (!IsSupported(*instructions)) continue;
    if (name == instructions->name) return instructions;
    if (name == "best") best = instructions;
  }
  return best;
}

// Scratch memory of this thread, kept between calls.
char* ThreadScratch(size_t bytes) {
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

// The arrays of a call. Those that the weight format or the type of x does not use are empty.
struct Arrays {
  ffi::AnyBuffer x, x_scales, values, scales, zero_points, global_scales, bias;
  RowBlocks blocks;
  ffi::AnyBuffer out;
};

// The weight format in the call's attributes; `Resolve` adds the type of the scales.
struct WeightFormat {
  std::string_view name;
  int64_t group;

  bool IsInt4() const { return name == "int4"; }

  void Check(ArgumentChecker& check) const {
    if (name != "mxfp4" && name != "nvfp4" && !IsInt4())
      return check.InvalidArgument("`format` (=" + std::string(name) + ") must be mxfp4, nvfp4 or int4");
    const bool power = group >= kBlock && std::has_single_bit(static_cast<uint64_t>(group));
    if (IsInt4() ? group != kWholeRow && !power : group != (name == "mxfp4" ? kBlock : kBlock / 2))
      check.InvalidArgument("`group` (=" + std::to_string(group) + ") must be the number of weights of " +
                            std::string(name) + " that share a scale");
  }

  Format Resolve(ffi::DataType scale) const {
    if (!IsInt4()) return name == "mxfp4" ? kMxfp4 : kNvfp4;
    return scale == ffi::BF16 ? kInt4Bfloat16 : scale == ffi::F16 ? kInt4Float16 : kInt4Float32;
  }
};

struct Sizes {
  int64_t num_experts, columns, k, groups;

  // `values` is (E, N, K / 2), its three axes checked before.
  Sizes(ffi::AnyBuffer values, int64_t group)
      : num_experts(values.dimensions()[0]),
        columns(values.dimensions()[1]),
        k(2 * values.dimensions()[2]),
        groups(group == kWholeRow ? 1 : k / group) {}
};

void Check(ArgumentChecker& check, const Arrays& arrays, const WeightFormat& format) {
  format.Check(check);
  check.Require("values", arrays.values, {ffi::U8}, {kAnySize, kAnySize, kAnySize});
  if (check.failed()) return;
  const auto [num_experts, columns, k, groups] = Sizes(arrays.values, format.group);
  if (columns % kTileColumns != 0 || (format.group != kWholeRow && k % format.group != 0))
    return check.InvalidArgument(ArgumentChecker::Describe("values", arrays.values) +
                                 " must have rows of whole groups, and a multiple of " + std::to_string(kTileColumns) +
                                 " rows");
  if (format.IsInt4()) {
    check.Require("x", arrays.x, {ffi::F32, ffi::BF16, ffi::S8}, {kAnySize, k});
    check.Require("scales", arrays.scales, {ffi::BF16, ffi::F16, ffi::F32}, {num_experts, columns, groups});
    check.RequireOrEmpty("zero_points", arrays.zero_points, {ffi::S8}, {num_experts, columns, groups});
  } else {
    check.Require("x", arrays.x, {ffi::F32, ffi::BF16}, {kAnySize, k});
    check.Require("scales", arrays.scales, {ffi::U8}, {num_experts, columns, groups});
    check.RequireEmpty("zero_points", arrays.zero_points, {ffi::S8});
  }
  if (format.name == "nvfp4") check.Require("global_scales", arrays.global_scales, {ffi::F32}, {num_experts, columns});
  else check.RequireEmpty("global_scales", arrays.global_scales, {ffi::F32});
  check.Require("out", arrays.out, {ffi::F32}, {kAnySize, columns});
  arrays.blocks.RequireArrays(check);
  if (check.failed()) return;
  const int64_t rows = arrays.x.dimensions()[0];
  if (arrays.x.element_type() == ffi::S8) check.Require("x_scales", arrays.x_scales, {ffi::F32}, {rows, 1});
  else check.RequireEmpty("x_scales", arrays.x_scales, {ffi::F32});
  check.RequireOrEmpty("bias", arrays.bias, {ffi::F32}, {arrays.blocks.size(), columns});
  arrays.blocks.RequireWithin(check, num_experts, rows, arrays.out.dimensions()[0]);
}

// Columns begin..end of the result of one row block; `end` may be past the last column.
struct Task {
  int64_t block, begin, end;
};

void RunTask(const Arrays& arrays, const Microkernel& microkernel, const Sizes& sizes, int64_t group,
             const Task& task) {
  const RowBlock block = arrays.blocks.At(task.block);
  if (block.count <= 0) return;
  const auto [num_experts, columns, k, groups] = sizes;
  const int64_t row = block.expert * columns + task.begin;  // among the weight rows of all experts
  const auto is_given = [](const ffi::AnyBuffer& array) { return array.element_count() != 0; };
  Gemm gemm;
  gemm.x =
      static_cast<const char*>(arrays.x.untyped_data()) + block.x_row * k * ffi::ByteWidth(arrays.x.element_type());
  gemm.x_scales = is_given(arrays.x_scales) ? arrays.x_scales.typed_data<float>() + block.x_row : nullptr;
  gemm.values = arrays.values.typed_data<uint8_t>() + row * (k / 2);
  gemm.scales = static_cast<const char*>(arrays.scales.untyped_data()) +
                row * groups * ffi::ByteWidth(arrays.scales.element_type());
  gemm.zero_points = is_given(arrays.zero_points) ? arrays.zero_points.typed_data<int8_t>() + row * groups : nullptr;
  gemm.global_scales = is_given(arrays.global_scales) ? arrays.global_scales.typed_data<float>() + row : nullptr;
  gemm.bias = is_given(arrays.bias) ? arrays.bias.typed_data<float>() + task.block * columns + task.begin : nullptr;
  gemm.out = arrays.out.typed_data<float>() + block.out_row * columns + task.begin;
  gemm.rows = block.count;
  gemm.columns = std::min(task.end, columns) - task.begin;
  gemm.k = k;
  gemm.group = group;
  gemm.out_stride = columns;
  gemm.scratch = ThreadScratch(microkernel.scratch_bytes(k));
  microkernel.run(gemm);
}

void RunAllTasks(ffi::ThreadPool pool, const Arrays& arrays, const Microkernel& microkernel, int64_t group) {
  const Sizes sizes(arrays.values, group);
  const int64_t blocks = arrays.blocks.size();
  int64_t rows = 0, nonempty_blocks = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t count = arrays.blocks.At(b).count;
    rows += std::max<int64_t>(count, 0);
    nonempty_blocks += count > 0;
  }
  if (rows == 0 || sizes.columns == 0 || sizes.k == 0) return;
  const int64_t width = std::min(kTaskColumns, sizes.columns);
  const int64_t block_tasks = (sizes.columns + width - 1) / width;
  const auto work = [&](int64_t i, int64_t end) {
    for (int64_t n; i < end; i += n) {  // consecutive tasks of one block run as one
      n = std::min(end - i, block_tasks - i % block_tasks);
      const int64_t first = i % block_tasks;
      RunTask(arrays, microkernel, sizes, group, {i / block_tasks, first * width, (first + n) * width});
    }
  };
  const int64_t useful_threads = rows * sizes.columns * sizes.k / kMinProductsPerThread;
  const int64_t helpers = std::min({pool.num_threads() - 1, useful_threads, blocks * block_tasks - 1});
  ParallelFor(pool, helpers, blocks * block_tasks,
              rows <= kMemoryBoundRows * nonempty_blocks ? kMemoryBoundTasksPerClaim : microkernel.tasks_per_claim,
              work);
}

Input InputOf(const Arrays& arrays, bool few) {
  if (arrays.x.element_type() == ffi::S8) return kInt8;
  if (arrays.x.element_type() == ffi::F32) return kFloat32;
  if (!few) return kBfloat16;
  return arrays.out.dimensions()[0] <= arrays.values.dimensions()[0] ? kOneBfloat16 : kFewBfloat16;  // rows, experts
}

// For each block b and each m below counts[b], with e = experts[b]:
//   out[out_rows[b] + m] = x[x_rows[b] + m] @ dequantized(weight[e]).T + bias[b]
// Rows of `out` that no block covers are left as they are. XLA passes arrays by position; attributes have names.
ffi::Error GroupedProduct(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer x_scales, ffi::AnyBuffer values,
                          ffi::AnyBuffer scales, ffi::AnyBuffer zero_points, ffi::AnyBuffer global_scales,
                          ffi::AnyBuffer bias, ffi::AnyBuffer experts, ffi::AnyBuffer x_rows, ffi::AnyBuffer out_rows,
                          ffi::AnyBuffer counts, ffi::Result<ffi::AnyBuffer> out, const Attributes& attributes) {
  const Arrays arrays{
      x, x_scales, values, scales, zero_points, global_scales, bias, {experts, x_rows, out_rows, counts}, *out};
  const WeightFormat format{attributes.format, attributes.group};
  const InstructionSet* instructions = FindInstructionSet(attributes.instructions);
  ArgumentChecker check("jmx_cpu_grouped_product");
  if (instructions == nullptr)
    check.InvalidArgument("`instructions` (=" + std::string(attributes.instructions) +
                          ") must be an instruction set of this machine");
  Check(check, arrays, format);
  if (check.failed()) return check.error();
  const Microkernel& microkernel =
      instructions->Find(format.Resolve(scales.element_type()), InputOf(arrays, attributes.few));
  RunAllTasks(pool, arrays, microkernel, attributes.group);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jmx

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jmx::Attributes, xla::ffi::StructMember<std::string_view>("instructions"),
                                      xla::ffi::StructMember<std::string_view>("format"),
                                      xla::ffi::StructMember<int64_t>("group"), xla::ffi::StructMember<bool>("few"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jmx_cpu_grouped_product, jmx::GroupedProduct,
                              jmx::BindArguments<11>(xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>())
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attrs<jmx::Attributes>());

// Names of the instruction sets that this machine supports, the best one last: "portable avx2 ".
extern "C" const char* jmx_cpu_kernels() {
  static const std::string names = [] {
    using namespace jmx;
    std::string all;
    for (const InstructionSet* instructions : {JMX_INSTRUCTION_SETS})
      if (IsSupported(*instructions)) all.append(instructions->name).append(" ");
    return all;
  }();
  return names.c_str();
}

// One GEMM on this thread, without XLA: for tests of memory accesses and of exact results. `gemm.scratch` is ignored.
// Returns 0, or 1 if `instructions` is unknown.
extern "C" int jmx_cpu_product(const char* instructions, int format, int input, const jmx::Gemm* gemm) {
  const jmx::InstructionSet* found = jmx::FindInstructionSet(instructions);
  if (found == nullptr) return 1;
  const jmx::Microkernel& microkernel = found->Find(static_cast<jmx::Format>(format), static_cast<jmx::Input>(input));
  jmx::Gemm with_scratch = *gemm;
  with_scratch.scratch = jmx::ThreadScratch(microkernel.scratch_bytes(gemm->k));
  microkernel.run(with_scratch);
  return 0;
}
