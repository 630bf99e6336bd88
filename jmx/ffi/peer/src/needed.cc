// The XLA FFI handlers that launch the kernels which send rows to the ranks that need them only. Functions throw
// std::string, the reason of a failure.
#include "needed.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "gpus.h"
#include "launching.h"
#include "region.h"
#include "resources.h"
#include "try.h"
#include "xla/ffi/api/ffi.h"

namespace jmx {
namespace {

namespace ffi = xla::ffi;

constexpr size_t kUnit = 16;  // bytes, of which a row is a multiple

struct NeededCall : Call {
  Needed needed{};
};

const char* Data(const ffi::AnyBuffer& array) { return static_cast<const char*>(array.untyped_data()); }

// Rows and columns of an array, which has `size` bytes an element.
struct Sizes {
  int64_t rows, columns;
  size_t row_bytes;
  explicit Sizes(const ffi::AnyBuffer& array) {
    const auto dimensions = array.dimensions();
    rows = dimensions.size() == 0 ? 0 : dimensions[0];
    columns = dimensions.size() < 2 ? 1 : dimensions[1];
    Rule(dimensions.size() <= 2 && rows > 0 && columns > 0, "arrays that are not (T, n)");
    row_bytes = array.size_bytes() / rows;
  }
};

// Arguments: rows (T, m), the first t of which are sent; the tokens' routing, (T, E) float32 logits, or (T, k) int32
// ids and their (T, k) weights; (R,) int32, the first expert of each rank. Results: these of all ranks, (R t, m) and so
// on, and (R T,) uint32, the ranks that need each token.
NeededCall GatherOf(const Group& group, int64_t each, int64_t top_k, ffi::RemainingArgs args,
                    ffi::RemainingRets results) {
  const size_t count = args.size() - 1;  // of arrays that this rank has
  Rule(args.size() >= 3 && count < kMaxArrays && results.size() == args.size(), "wrong number of arrays");
  NeededCall call{{"needed.cu"}};
  call.function = "gather_needed";
  call.arrays.count = static_cast<int>(count) + 1;
  for (size_t i = 0; i < count; ++i) {
    const auto in = args.get<ffi::AnyBuffer>(i);
    auto out = results.get<ffi::AnyBuffer>(i);
    Rule(in.has_value() && out.has_value(), "arrays are missing");
    const size_t of_all = in->size_bytes() * group.size();
    Rule(i == 0 ? (*out)->size_bytes() <= of_all : (*out)->size_bytes() == of_all, "wrong sizes");
    call.arrays.in[i] = Data(*in);
    call.arrays.out[i] = static_cast<char*>((*out)->untyped_data());
    call.arrays.bytes[i] = (*out)->size_bytes() / group.size();
  }
  const auto rows = args.get<ffi::AnyBuffer>(0), routing = args.get<ffi::AnyBuffer>(1);
  const auto firsts = args.get<ffi::AnyBuffer>(count);
  auto ranks = results.get<ffi::AnyBuffer>(count);
  Rule(firsts.has_value() && ranks.has_value(), "arrays are missing");
  const Sizes of_rows(*rows), of_routing(*routing);
  for (size_t i = 1; i < count; ++i) {
    const Sizes its(*args.get<ffi::AnyBuffer>(i));
    Rule(its.rows == of_routing.rows && its.row_bytes % 4 == 0, "wrong sizes of the routing");
  }
  Rule(of_rows.rows == of_routing.rows && of_rows.row_bytes % kUnit == 0 &&
           call.arrays.bytes[0] % of_rows.row_bytes == 0,
       "wrong sizes of rows");
  const size_t size = group.size();
  Rule(firsts->element_type() == ffi::S32 && firsts->element_count() == size, "wrong first experts");
  Rule((*ranks)->element_type() == ffi::U32 && (*ranks)->element_count() == of_routing.rows * size,
       "wrong ranks of tokens");
  call.arrays.out[count] = static_cast<char*>((*ranks)->untyped_data());
  call.arrays.bytes[count] = of_routing.rows * sizeof(unsigned);
  call.needed.logits = count == 2;
  Rule(routing->element_type() == (call.needed.logits ? ffi::F32 : ffi::S32), "wrong type of the routing");
  Rule(!call.needed.logits || of_routing.columns <= kMostLogits, "too many logits");
  Rule(call.needed.logits || of_routing.columns == top_k, "wrong number of experts of a token");
  call.needed.firsts = reinterpret_cast<const int*>(Data(*firsts));
  call.needed.rows = call.arrays.bytes[0] / of_rows.row_bytes;
  call.needed.tokens = of_routing.rows;
  call.needed.each = static_cast<int>(each);
  call.needed.top_k = static_cast<int>(top_k);
  call.needed.width = static_cast<int>(of_routing.columns);
  return call;
}

// Arguments: rows (R t, H); (R T,) uint32, the ranks of all tokens, of which the last t of each rank have these rows.
// Results: (t, H); and memory like the rows, into which other ranks write theirs.
NeededCall ScatterOf(const Group& group, ffi::RemainingArgs args, ffi::RemainingRets results) {
  Rule(args.size() == 2 && results.size() == 2, "wrong number of arrays");
  const auto in = args.get<ffi::AnyBuffer>(0), ranks = args.get<ffi::AnyBuffer>(1);
  auto out = results.get<ffi::AnyBuffer>(0), written = results.get<ffi::AnyBuffer>(1);
  Rule(in.has_value() && ranks.has_value() && out.has_value() && written.has_value(), "arrays are missing");
  const Sizes its(**out);
  Rule(in->size_bytes() == (*written)->size_bytes() && in->size_bytes() == (*out)->size_bytes() * group.size() &&
           its.row_bytes % kUnit == 0,
       "wrong sizes of rows");
  const size_t tokens = ranks->element_count() / group.size();
  Rule(ranks->element_type() == ffi::U32 && tokens >= static_cast<size_t>(its.rows), "wrong ranks of tokens");
  NeededCall call{{"needed.cu"}};
  call.function = std::string("reduce_") + NameOf(in->element_type()) + "_needed";
  call.arrays.count = 1;
  call.arrays.in[0] = Data(*in);
  call.arrays.out[0] = static_cast<char*>((*out)->untyped_data());
  call.arrays.out[1] = static_cast<char*>((*written)->untyped_data());
  call.arrays.bytes[0] = (*out)->size_bytes();
  call.needed.ranks = static_cast<const unsigned*>(ranks->untyped_data());
  call.needed.rows = its.rows;
  call.needed.tokens = tokens;
  return call;
}

NeededCall CallOf(const Group& group, bool gather, int64_t each, int64_t top_k, ffi::RemainingArgs args,
                  ffi::RemainingRets results) {
  NeededCall call = gather ? GatherOf(group, each, top_k, args, results) : ScatterOf(group, args, results);
  call.blocks = static_cast<int>(std::min<size_t>(kMaxBlocks, call.needed.rows));
  call.GiveRegions(group, 0);
  return call;
}

// Before any launch, and outside of a capture as a CUDA graph: memory is allocated, the kernel loaded.
template <bool gather>
ffi::Error Initialize(int32_t ordinal, ffi::Span<const int64_t> devices, int64_t num_ranks, int64_t each, int64_t top_k,
                      ffi::RemainingArgs args, ffi::RemainingRets results) {
  return Try("jmx_peer", [&] {
    const Group group = GroupOf(ordinal, devices.begin(), devices.end(), num_ranks, kMaxRanks);
    CallOf(group, gather, each, top_k, args, results).Find(ordinal);
  });
}

template <bool gather>
ffi::Error Execute(Stream stream, int32_t ordinal, ffi::Span<const int64_t> devices, int64_t num_ranks, int64_t each,
                   int64_t top_k, ffi::RemainingArgs args, ffi::RemainingRets results) {
  return Try("jmx_peer", [&] {
    const Group group = GroupOf(ordinal, devices.begin(), devices.end(), num_ranks, kMaxRanks);
    NeededCall call = CallOf(group, gather, each, top_k, args, results);
    call.Launch(stream, ordinal, call.needed);
  });
}

// What both handlers of a call take after their own contexts. Experts of a rank, and of a token, are 0 for a scatter.
template <typename Binding>
auto BindCall(Binding&& binding) {
  return BindGroup(std::move(binding))
      .template Attr<int64_t>("each")
      .template Attr<int64_t>("top_k")
      .RemainingArgs()
      .RemainingRets();
}

}  // namespace
}  // namespace jmx

JMX_LAUNCHING_HANDLERS(jmx_peer_gather_needed, jmx::Initialize<true>, jmx::Execute<true>);
JMX_LAUNCHING_HANDLERS(jmx_peer_scatter_needed, jmx::Initialize<false>, jmx::Execute<false>);
