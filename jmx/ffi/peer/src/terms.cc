// The XLA FFI handler that launches the kernels of terms.h. Functions throw std::string, the reason of a failure.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "gpus.h"
#include "launching.h"
#include "region.h"
#include "resources.h"
#include "terms_of.h"
#include "try.h"
#include "xla/ffi/api/ffi.h"

namespace jmx {
namespace {

namespace ffi = xla::ffi;

constexpr size_t kUnit = 16;  // bytes, of which rows are a multiple

struct Call {
  std::string function;
  int blocks = 0;
  Ranks ranks{};
  Arrays arrays{};
  Terms terms{};
};

void Rule(bool kept, const char* what) {
  if (!kept) throw std::string(what);
}

// Arguments: rows (P, R, W) float32; (n T, k) int32, the row of each slot of all ranks' tokens; (n T, k) float32, their
// weights; and perhaps (n S,) uint32, the ranks that have a token's experts, of S >= T tokens, the last T of which are these.
// Results: (T, H), H <= W; and, where sums go
// from array to array, memory (n T, H), into which all ranks write theirs.
Call CallOf(const Group& group, int64_t way, ffi::RemainingArgs args, ffi::RemainingRets results) {
  const Way how = static_cast<Way>(way);
  Rule(how == Way::kSlot || how == Way::kArrays, "wrong way");
  Rule(args.size() == 3 || args.size() == 4, "wrong number of arrays");
  Rule(results.size() == (how == Way::kArrays ? 2 : 1), "wrong number of results");
  const auto rows = args.get<ffi::AnyBuffer>(0), row_of = args.get<ffi::AnyBuffer>(1), weights = args.get<ffi::AnyBuffer>(2);
  auto out = results.get<ffi::AnyBuffer>(0);
  Rule(rows.has_value() && row_of.has_value() && weights.has_value() && out.has_value(), "arrays are missing");
  Rule(rows->dimensions().size() == 3 && row_of->dimensions().size() == 2 && (*out)->dimensions().size() == 2, "wrong shapes");
  const size_t tokens = (*out)->dimensions()[0], columns = (*out)->dimensions()[1], slots = row_of->dimensions()[1];
  Rule(tokens > 0 && columns > 0 && slots > 0 && rows->element_count() > 0, "empty arrays");
  const size_t row_bytes = rows->dimensions()[2] * sizeof(float), bytes = (*out)->size_bytes();
  Rule(rows->element_type() == ffi::F32 && row_bytes >= columns * sizeof(float), "wrong rows");
  Rule(row_of->element_type() == ffi::S32 && row_of->element_count() == group.size() * tokens * slots, "wrong rows of slots");
  Rule(weights->element_type() == ffi::F32 && weights->element_count() == row_of->element_count(), "wrong weights");
  const auto type = (*out)->element_type();
  Rule(type == ffi::BF16 || type == ffi::F16 || type == ffi::F32, "wrong type");
  Call call;
  Rule(bytes / tokens % kUnit == 0 && group.size() * bytes / kUnit < size_t{1} << 32, "wrong sizes of results");
  Rule(row_bytes % kUnit == 0, "rows that are no whole units");
  call.function = std::string("reduce_") + (type == ffi::BF16 ? "bf16" : type == ffi::F16 ? "f16" : "f32") + "_terms";
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
    const size_t all = ranks->element_count() / group.size();
    Rule(all >= tokens && ranks->element_count() == group.size() * all, "wrong ranks of tokens");
    call.terms.ranks = static_cast<const unsigned*>(ranks->untyped_data()) + (all - tokens);
    call.terms.ranks_stride = static_cast<unsigned>(all);
  }
  call.terms.rows = static_cast<const char*>(rows->untyped_data());
  call.terms.row_of = static_cast<const int*>(row_of->untyped_data());
  call.terms.weights = static_cast<const float*>(weights->untyped_data());
  call.terms.row_bytes = row_bytes;
  call.terms.part_bytes = rows->dimensions()[1] * row_bytes;
  call.terms.tokens = static_cast<unsigned>(tokens);
  call.terms.units = static_cast<unsigned>(bytes / tokens / kUnit);
  call.terms.parts = static_cast<int>(rows->dimensions()[0]);
  call.terms.slots = static_cast<int>(slots);
  return call;
}

// Gives a call the ranks' regions, one for each kind and size of calls, which are made when the first rank asks.
void GiveRegions(const Group& group, Call& call) {
  const size_t bytes = call.arrays.bytes[0], of_cta = kThreads * kUnit;
  call.blocks = static_cast<int>(std::clamp<size_t>((bytes + of_cta - 1) / of_cta, 1, kMaxBlocks));
  call.ranks.slot_bytes = call.arrays.out[1] != nullptr ? 0 : (bytes + 127) / 128 * 128;
  call.ranks.rank = group.rank;
  call.ranks.num_ranks = group.size();
  const std::string key = call.function + " " + std::to_string(call.blocks) + " " + std::to_string(bytes);
  const auto& regions = Resources::Get().FindRegions(key, group.ordinals, call.ranks.slot_bytes);
  for (size_t rank = 0; rank < regions.size(); ++rank) call.ranks.region[rank] = reinterpret_cast<char*>(regions[rank]);
}

// Before any launch, and outside of a capture as a CUDA graph: memory is allocated, the kernel loaded.
ffi::Error Initialize(int32_t ordinal, ffi::Span<const int64_t> devices, int64_t num_ranks, int64_t way,
                      ffi::RemainingArgs args, ffi::RemainingRets results) {
  return Try("jmx_peer", [&] {
    const Group group = GroupOf(ordinal, devices.begin(), devices.end(), num_ranks, kMaxRanks);
    Call call = CallOf(group, way, args, results);
    GiveRegions(group, call);
    Resources::Get().kernels.Find(ordinal, call.function);
  });
}

ffi::Error Execute(Stream stream, int32_t ordinal, ffi::Span<const int64_t> devices, int64_t num_ranks, int64_t way,
                      ffi::RemainingArgs args, ffi::RemainingRets results) {
  return Try("jmx_peer", [&] {
    const Group group = GroupOf(ordinal, devices.begin(), devices.end(), num_ranks, kMaxRanks);
    Call call = CallOf(group, way, args, results);
    GiveRegions(group, call);
    void* parameters[] = {&call.ranks, &call.arrays, &call.terms};
    Launch(stream, Resources::Get().kernels.Find(ordinal, call.function), call.blocks, parameters);
  });
}

template <typename Binding>
auto BindCall(Binding&& binding) {
  return BindGroup(std::move(binding)).template Attr<int64_t>("way").RemainingArgs().RemainingRets();
}

}  // namespace
}  // namespace jmx

JMX_LAUNCHING_HANDLERS(jmx_peer_scatter_terms, jmx::Initialize, jmx::Execute);
