// The XLA FFI handlers that launch the kernels of kernels.cu. Functions throw std::string, the reason of a failure.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "gpus.h"
#include "launching.h"
#include "lines.h"
#include "region.h"
#include "resources.h"
#include "try.h"
#include "xla/ffi/api/ffi.h"

namespace jmx {
namespace {

namespace ffi = xla::ffi;

// The arrays of a call, and the ranks that exchange them with this GPU.
struct Call {
  std::string function;
  Arrays arrays{};
  Ranks ranks{};
  int num_blocks = 0;
  size_t bytes = 0;  // of one rank
};

size_t RoundUp(size_t size, size_t multiple) { return (size + multiple - 1) / multiple * multiple; }

enum class Kind { kGather, kScatter, kSum };  // one after the other; each rank's rows of a sum; the whole sum

std::string FunctionName(Kind kind, ffi::DataType type, size_t unit, Way way) {
  const auto [name, size] = type == ffi::BF16 ? std::pair("bf16", 2) : type == ffi::F16 ? std::pair("f16", 2) : std::pair("f32", 4);
  const std::string what = kind == Kind::kGather ? "gather_" : std::string("reduce_") + name + "_";
  if (way == Way::kLines) return what + "lines";
  if (kind != Kind::kGather && unit != 16) unit = size;
  return what + (way == Way::kArrays ? "arrays_" : "") + std::to_string(unit);
}

// Throws where the arguments are not those of jmx/ffi/peer/collectives.py.
Call CallOf(Kind kind, int ordinal, ffi::Span<const int64_t> devices, int64_t num_ranks, int64_t way,
            ffi::RemainingArgs args, ffi::RemainingRets results) {
  if (args.size() != results.size() || args.size() == 0 || args.size() > kMaxArrays || (kind != Kind::kGather && args.size() != 1))
    throw std::string("wrong number of arrays");
  const Group group = GroupOf(ordinal, devices.begin(), devices.end(), num_ranks, kMaxRanks);

  Call call;
  size_t total = 0, unit = 16, lines = 0;
  std::string sizes;
  ffi::DataType type = ffi::F32;
  for (size_t i = 0; i < args.size(); ++i) {
    auto in = args.get<ffi::AnyBuffer>(i);
    auto out = results.get<ffi::AnyBuffer>(i);
    if (!in.has_value() || !out.has_value()) throw std::string("arrays are missing");
    const size_t bytes = std::min(in->size_bytes(), (*out)->size_bytes());  // of one rank
    const size_t received = bytes * (kind == Kind::kGather ? num_ranks : 1);
    const size_t given = bytes * (kind == Kind::kScatter ? num_ranks : 1);
    if (in->size_bytes() != given || (*out)->size_bytes() != received) throw std::string("wrong sizes");
    type = in->element_type();
    call.arrays.in[i] = static_cast<const char*>(in->untyped_data());
    call.arrays.out[i] = static_cast<char*>((*out)->untyped_data());
    call.arrays.bytes[i] = bytes;
    while (bytes % unit != 0) unit /= 2;
    total += bytes;
    lines += NumLines(bytes);
    sizes += " " + std::to_string(bytes);
  }
  if (kind != Kind::kGather && type != ffi::BF16 && type != ffi::F16 && type != ffi::F32) throw std::string("wrong type");
  call.arrays.count = static_cast<int>(args.size());
  call.arrays.whole = kind == Kind::kSum;
  call.bytes = total;
  const Way how = static_cast<Way>(way);
  if (how != Way::kSlot && how != Way::kLines && how != Way::kArrays) throw std::string("wrong way");
  if (how == Way::kLines && (unit < kLineUnit || total > kMostLineData)) throw std::string("rows that cannot be lines");
  call.function = FunctionName(kind, type, unit, how);
  call.ranks.slot_bytes = how == Way::kArrays ? 0 : RoundUp(how == Way::kLines ? lines * kLineBytes : total, 128);
  call.ranks.rank = group.rank;
  call.ranks.num_ranks = static_cast<int>(num_ranks);
  const size_t thread_bytes = how == Way::kLines ? kLineData : kThreadBytes;
  call.num_blocks = static_cast<int>(std::clamp<size_t>(RoundUp(total, kThreads * thread_bytes) / (kThreads * thread_bytes), 1, kMaxBlocks));
  // Each CTA counts its calls, so all calls on a region have as many CTAs; and they write the same lines.
  const std::string key = call.function + " " + std::to_string(static_cast<int>(kind)) + " " + std::to_string(call.num_blocks) + sizes;
  const auto& regions = Resources::Get().FindRegions(key, group.ordinals, call.ranks.slot_bytes);
  for (size_t rank = 0; rank < regions.size(); ++rank)
    call.ranks.region[rank] = reinterpret_cast<char*>(regions[rank]);
  return call;
}

// Before any launch, and outside of a capture as a CUDA graph: memory is allocated, the kernel loaded.
template <Kind kind>
ffi::Error Initialize(int32_t ordinal, ffi::Span<const int64_t> devices, int64_t num_ranks, int64_t way,
                      ffi::RemainingArgs args, ffi::RemainingRets results) {
  return Try("jmx_peer", [&] {
    const Call call = CallOf(kind, ordinal, devices, num_ranks, way, args, results);
    Resources::Get().kernels.Find(ordinal, call.function);
  });
}

template <Kind kind>
ffi::Error Execute(Stream stream, int32_t ordinal, ffi::Span<const int64_t> devices, int64_t num_ranks, int64_t way,
                   ffi::RemainingArgs args, ffi::RemainingRets results) {
  return Try("jmx_peer", [&] {
    Call call = CallOf(kind, ordinal, devices, num_ranks, way, args, results);
    if (call.bytes == 0) return;
    void* parameters[] = {&call.ranks, &call.arrays};
    Launch(stream, Resources::Get().kernels.Find(ordinal, call.function), call.num_blocks, parameters);
  });
}

// What both handlers of a call take after their own contexts.
template <typename Binding>
auto BindCall(Binding&& binding) {
  return BindGroup(std::move(binding)).template Attr<int64_t>("way").RemainingArgs().RemainingRets();
}

}  // namespace
}  // namespace jmx

#define HANDLERS(NAME, KIND) JMX_LAUNCHING_HANDLERS(NAME, jmx::Initialize<jmx::Kind::KIND>, jmx::Execute<jmx::Kind::KIND>)
HANDLERS(jmx_peer_gather, kGather);
HANDLERS(jmx_peer_scatter, kScatter);
HANDLERS(jmx_peer_sum, kSum);

// The compiled kernels.cu, for all calls. Returns 0.
extern "C" int jmx_peer_set_image(const char* data, size_t size) {
  jmx::Resources::Get().kernels.image.Set(data, size);
  return 0;
}

// Why the first `num_devices` GPUs cannot access each other's memory; "" if they can. Valid until the next call.
extern "C" const char* jmx_peer_fault(int num_devices) {
  static std::string fault;
  fault.clear();
  try {
    for (int from = 0; from < num_devices; ++from)
      for (int to = 0; to < num_devices; ++to)
        if (from != to) jmx::CheckAccess(from, to);
  } catch (const std::string& reason) {
    fault = reason;
  }
  return fault.c_str();
}
