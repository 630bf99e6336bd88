// The XLA FFI handler that launches the kernels of terms.cu. Functions throw std::string, the reason of a failure.
#include <cstddef>
#include <cstdint>
#include <string>

#include "gpus.h"
#include "launching.h"
#include "region.h"
#include "terms_of.h"
#include "try.h"
#include "xla/ffi/api/ffi.h"

namespace jmx {
namespace {

namespace ffi = xla::ffi;

constexpr size_t kUnit = 16;  // bytes, of which rows are a multiple

struct SumCall : Call {
  Terms terms{};
};

// Arguments: rows (P, R, W) float32; (n T, k) int32, the row of each slot of all ranks' tokens; (n T, k) float32, their
// weights; and perhaps (n T,) uint32, the ranks that have a token's experts. Results: (T, H), H <= W; and, where sums
// go from array to array, memory (n T, H), into which all ranks write theirs.
SumCall CallOf(const Group& group, int64_t way, ffi::RemainingArgs args, ffi::RemainingRets results) {
  const Way how = static_cast<Way>(way);
  Rule(how == Way::kSlot || how == Way::kArrays, "wrong way");
  Rule(args.size() == 3 || args.size() == 4, "wrong number of arrays");
  Rule(results.size() == (how == Way::kArrays ? 2 : 1), "wrong number of results");
  const auto rows = args.get<ffi::AnyBuffer>(0), row_of = args.get<ffi::AnyBuffer>(1);
  const auto weights = args.get<ffi::AnyBuffer>(2);
  auto out = results.get<ffi::AnyBuffer>(0);
  Rule(rows.has_value() && row_of.has_value() && weights.has_value() && out.has_value(), "arrays are missing");
  const auto of_rows = rows->dimensions(), of_slots = row_of->dimensions(), of_result = (*out)->dimensions();
  Rule(of_rows.size() == 3 && of_slots.size() == 2 && of_result.size() == 2, "wrong shapes");
  const size_t tokens = of_result[0], columns = of_result[1], slots = of_slots[1], all = group.size() * tokens;
  Rule(tokens > 0 && columns > 0 && slots > 0 && rows->element_count() > 0, "empty arrays");
  const size_t row_bytes = of_rows[2] * sizeof(float), bytes = (*out)->size_bytes();
  Rule(rows->element_type() == ffi::F32 && row_bytes >= columns * sizeof(float), "wrong rows");
  Rule(row_of->element_type() == ffi::S32 && row_of->element_count() == all * slots, "wrong rows of slots");
  Rule(weights->element_type() == ffi::F32 && weights->element_count() == all * slots, "wrong weights");
  Rule(bytes / tokens % kUnit == 0 && group.size() * bytes / kUnit < size_t{1} << 32, "wrong sizes of results");
  Rule(row_bytes % kUnit == 0, "rows that are no whole units");
  SumCall call{{"terms.cu"}};
  call.function = std::string("reduce_") + NameOf((*out)->element_type()) + "_terms";
  call.arrays.count = 1;
  call.arrays.out[0] = static_cast<char*>((*out)->untyped_data());
  call.arrays.bytes[0] = bytes;
  if (how == Way::kArrays) {
    auto written = results.get<ffi::AnyBuffer>(1);
    Rule(written.has_value() && (*written)->size_bytes() == group.size() * bytes, "wrong memory of sums");
    call.arrays.out[1] = static_cast<char*>((*written)->untyped_data());
    call.function += "_arrays";
  }
  if (args.size() == 4) {
    const auto ranks = args.get<ffi::AnyBuffer>(3);
    Rule(ranks.has_value() && ranks->element_type() == ffi::U32, "wrong type of ranks");
    Rule(ranks->element_count() == all, "wrong ranks of tokens");
    call.terms.ranks = static_cast<const unsigned*>(ranks->untyped_data());
  }
  call.terms.rows = static_cast<const char*>(rows->untyped_data());
  call.terms.row_of = static_cast<const int*>(row_of->untyped_data());
  call.terms.weights = static_cast<const float*>(weights->untyped_data());
  call.terms.row_bytes = row_bytes;
  call.terms.part_bytes = of_rows[1] * row_bytes;
  call.terms.tokens = static_cast<unsigned>(tokens);
  call.terms.units = static_cast<unsigned>(bytes / tokens / kUnit);
  call.terms.parts = static_cast<int>(of_rows[0]);
  call.terms.slots = static_cast<int>(slots);
  call.blocks = BlocksOf(bytes, kUnit);
  const bool few = bytes <= size_t{kUnit} * kFewUnits * kWorkers * call.blocks;
  if (how == Way::kSlot && group.size() == 2 && call.terms.ranks == nullptr && few) call.function += "_few";
  call.GiveRegions(group, how == Way::kArrays ? 0 : bytes);
  return call;
}

// Before any launch, and outside of a capture as a CUDA graph: memory is allocated, the kernel loaded.
ffi::Error Initialize(int32_t ordinal, ffi::Span<const int64_t> devices, int64_t num_ranks, int64_t way,
                      ffi::RemainingArgs args, ffi::RemainingRets results) {
  return Try("jmx_peer", [&] {
    const Group group = GroupOf(ordinal, devices.begin(), devices.end(), num_ranks, kMaxRanks);
    CallOf(group, way, args, results).Find(ordinal);
  });
}

ffi::Error Execute(Stream stream, int32_t ordinal, ffi::Span<const int64_t> devices, int64_t num_ranks, int64_t way,
                   ffi::RemainingArgs args, ffi::RemainingRets results) {
  return Try("jmx_peer", [&] {
    const Group group = GroupOf(ordinal, devices.begin(), devices.end(), num_ranks, kMaxRanks);
    SumCall call = CallOf(group, way, args, results);
    call.Launch(stream, ordinal, call.terms);
  });
}

template <typename Binding>
auto BindCall(Binding&& binding) {
  return BindGroup(std::move(binding)).template Attr<int64_t>("way").RemainingArgs().RemainingRets();
}

}  // namespace
}  // namespace jmx

JMX_LAUNCHING_HANDLERS(jmx_peer_scatter_terms, jmx::Initialize, jmx::Execute);
