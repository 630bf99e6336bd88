// The XLA FFI handlers that launch the kernels of kernels.cu, and the images of all. Functions throw std::string, the
// reason of a failure.
#include <algorithm>
#include <cstdint>
#include <string>

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

enum class Kind { kGather, kScatter, kSum };  // one after the other; each rank's rows of a sum; the whole sum

std::string FunctionName(Kind kind, ffi::DataType type, size_t unit, Way way) {
  const size_t size = type == ffi::F32 ? 4 : 2;
  const std::string what = kind == Kind::kGather ? "gather_" : std::string("reduce_") + NameOf(type) + "_";
  if (way == Way::kLines) return what + "lines";
  if (kind != Kind::kGather && unit != 16) unit = size;
  return what + (way == Way::kArrays ? "arrays_" : "") + std::to_string(unit);
}

// Throws where the arguments are not those of jmx/ffi/peer/collectives.py.
Call CallOf(Kind kind, int ordinal, ffi::Span<const int64_t> devices, int64_t num_ranks, int64_t way,
            ffi::RemainingArgs args, ffi::RemainingRets results) {
  const size_t most = kind == Kind::kGather ? kMaxArrays : 1;
  Rule(args.size() == results.size() && args.size() > 0 && args.size() <= most, "wrong number of arrays");
  const Group group = GroupOf(ordinal, devices.begin(), devices.end(), num_ranks, kMaxRanks);

  Call call{"kernels.cu"};
  size_t total = 0, unit = 16, lines = 0;
  ffi::DataType type = ffi::F32;
  for (size_t i = 0; i < args.size(); ++i) {
    auto in = args.get<ffi::AnyBuffer>(i);
    auto out = results.get<ffi::AnyBuffer>(i);
    Rule(in.has_value() && out.has_value(), "arrays are missing");
    const size_t bytes = std::min(in->size_bytes(), (*out)->size_bytes());  // of one rank
    const size_t received = bytes * (kind == Kind::kGather ? num_ranks : 1);
    const size_t given = bytes * (kind == Kind::kScatter ? num_ranks : 1);
    Rule(in->size_bytes() == given && (*out)->size_bytes() == received, "wrong sizes");
    type = in->element_type();
    call.arrays.in[i] = static_cast<const char*>(in->untyped_data());
    call.arrays.out[i] = static_cast<char*>((*out)->untyped_data());
    call.arrays.bytes[i] = bytes;
    while (bytes % unit != 0) unit /= 2;
    total += bytes;
    lines += NumLines(bytes);
  }
  call.arrays.count = static_cast<int>(args.size());
  call.arrays.whole = kind == Kind::kSum;
  const Way how = static_cast<Way>(way);
  Rule(how == Way::kSlot || how == Way::kLines || how == Way::kArrays, "wrong way");
  Rule(how != Way::kLines || (unit >= kLineUnit && total <= kMostLineData), "rows that cannot be lines");
  call.function = FunctionName(kind, type, unit, how);
  call.blocks = BlocksOf(total, how == Way::kLines ? kLineData : kThreadBytes);
  call.GiveRegions(group, how == Way::kArrays ? 0 : how == Way::kLines ? lines * kLineBytes : total);
  return call;
}

bool IsEmpty(const Call& call) {
  return std::all_of(call.arrays.bytes, call.arrays.bytes + call.arrays.count, [](size_t bytes) { return bytes == 0; });
}

// Before any launch, and outside of a capture as a CUDA graph: memory is allocated, the kernel loaded.
template <Kind kind>
ffi::Error Initialize(int32_t ordinal, ffi::Span<const int64_t> devices, int64_t num_ranks, int64_t way,
                      ffi::RemainingArgs args, ffi::RemainingRets results) {
  return Try("jmx_peer", [&] {
    CallOf(kind, ordinal, devices, num_ranks, way, args, results).Find(ordinal);
  });
}

template <Kind kind>
ffi::Error Execute(Stream stream, int32_t ordinal, ffi::Span<const int64_t> devices, int64_t num_ranks, int64_t way,
                   ffi::RemainingArgs args, ffi::RemainingRets results) {
  return Try("jmx_peer", [&] {
    Call call = CallOf(kind, ordinal, devices, num_ranks, way, args, results);
    if (!IsEmpty(call)) call.Launch(stream, ordinal);
  });
}

// What both handlers of a call take after their own contexts.
template <typename Binding>
auto BindCall(Binding&& binding) {
  return BindGroup(std::move(binding)).template Attr<int64_t>("way").RemainingArgs().RemainingRets();
}

}  // namespace
}  // namespace jmx

#define HANDLERS(NAME, KIND) \
  JMX_LAUNCHING_HANDLERS(NAME, jmx::Initialize<jmx::Kind::KIND>, jmx::Execute<jmx::Kind::KIND>)
HANDLERS(jmx_peer_gather, kGather);
HANDLERS(jmx_peer_scatter, kScatter);
HANDLERS(jmx_peer_sum, kSum);

// The compiled kernels of a source, for all calls. Returns 0.
extern "C" int jmx_peer_set_image(const char* source, const char* data, size_t size) {
  jmx::Resources::Get().KernelsOf(source).image.Set(data, size);
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
