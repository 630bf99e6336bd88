// The kernels that send rows to the ranks which need them only, from the arrays of one rank to those of another.
// jmx/ffi/peer/library.py compiles them where a program calls one.
#include "calls.h"
#include "needed.h"
#include "region.h"
#include "units.h"

namespace {

using jmx::Needed;

// The lanes of a warp, which read what other GPUs may have written.
struct Warp {
  static constexpr int kCount = 32;
  __device__ static float Infinity() { return __int_as_float(0x7F800000); }
  __device__ int Index() const { return threadIdx.x % kCount; }
  template <typename Number>
  __device__ Number Load(const Number* from) const {
    return __ldcg(from);
  }
  __device__ unsigned Or(unsigned bits) const { return __reduce_or_sync(~0u, bits); }
  __device__ int Sum(int number) const { return __reduce_add_sync(~0u, number); }
  __device__ float Max(float number) const {
    for (int lanes = kCount / 2; lanes > 0; lanes /= 2) number = fmaxf(number, __shfl_xor_sync(~0u, number, lanes));
    return number;
  }
};

// Sends bytes [begin, end) of this rank's array k to all ranks' results, `Unit` by unit, for the threads of a CTA.
template <typename Unit>
__device__ void SendAll(const Ranks& ranks, const Arrays& arrays, const char* array, const u64* results, int k,
                        u64 begin, u64 end) {
  const Unit* in = reinterpret_cast<const Unit*>(array);
  const u64 units = arrays.bytes[k] / sizeof(Unit);
  for (u64 at = begin / sizeof(Unit) + threadIdx.x; at < end / sizeof(Unit); at += blockDim.x) {
    const Unit unit = in[at];
    for (int i = 1; i < ranks.num_ranks; ++i) {
      const int other = (ranks.rank + i) % ranks.num_ranks;
      reinterpret_cast<Unit*>(results[other * jmx::kMaxArrays + k])[ranks.rank * units + at] = unit;
    }
    reinterpret_cast<Unit*>(arrays.out[k])[ranks.rank * units + at] = unit;
  }
}

// The routing of tokens [begin, end), and the ranks that need them, which are `own` for all tokens of this rank.
__device__ void SendRouting(const Ranks& ranks, const Arrays& arrays, const Needed& needed, const u32* own,
                            const u64* results, u64 begin, u64 end) {
  for (int k = 1; k < arrays.count; ++k) {
    const u64 bytes = arrays.bytes[k] / needed.tokens;
    const char* array = k == arrays.count - 1 ? reinterpret_cast<const char*>(own) : arrays.in[k];
    if (bytes % sizeof(uint4) == 0)
      SendAll<uint4>(ranks, arrays, array, results, k, begin * bytes, end * bytes);
    else
      SendAll<u32>(ranks, arrays, array, results, k, begin * bytes, end * bytes);
  }
}

constexpr int kWarps = jmx::kThreads / Warp::kCount;

// `GatherArrays`, of rows that go to the ranks which need them only: in the results of others they are zeros. The last
// array has the ranks, which this rank finds for its own tokens, and the others for theirs.
__device__ void GatherNeeded(const Ranks& ranks, const Arrays& arrays, const Needed& needed) {
  __shared__ u64 results[jmx::kMaxRanks * jmx::kMaxArrays];
  const Call call = Begin(ranks);
  SendAddresses(ranks, call, arrays.out, arrays.count);
  const Warp warp;
  const int mine = threadIdx.x / Warp::kCount, last = arrays.count - 1;
  const u32 units = arrays.bytes[0] / needed.rows / sizeof(uint4);  // of a row
  const u64 routing_bytes = arrays.bytes[1] / needed.tokens;
  const u32 everyone = (1u << ranks.num_ranks) - 1;
  u32* const ranks_of = reinterpret_cast<u32*>(arrays.out[last]);  // of all ranks' tokens
  u32* const own = ranks_of + ranks.rank * needed.tokens;
  // The rows of a CTA, whose routing it sends, too, so that the same CTA of another rank knows which of them it needs.
  const Share rows(needed.rows), others(needed.tokens - needed.rows);
  const auto find = [&](u64 begin, u64 end) {
    for (u64 token = begin + mine; token < end; token += kWarps) {
      const u32 found = jmx::RanksOf(warp, needed, ranks.num_ranks, arrays.in[1] + token * routing_bytes, everyone);
      if (warp.Index() == 0) own[token] = found;
    }
  };
  find(rows.begin, rows.end);
  find(needed.rows + others.begin, needed.rows + others.end);
  ReceiveAddresses(ranks, call, arrays.count, results);  // and all warps have found theirs
  SendRouting(ranks, arrays, needed, own, results, rows.begin, rows.end);
  SendRouting(ranks, arrays, needed, own, results, needed.rows + others.begin, needed.rows + others.end);
  Signal(ranks, call, jmx::kFirst);
  const auto result = [&](int rank) {
    return reinterpret_cast<uint4*>(rank == ranks.rank ? reinterpret_cast<u64>(arrays.out[0])
                                                       : results[rank * jmx::kMaxArrays]);
  };
  const uint4* in = reinterpret_cast<const uint4*>(arrays.in[0]);
  for (u32 begin = rows.begin * units + threadIdx.x; begin < rows.end * units; begin += kInFlight * jmx::kThreads) {
    uint4 found[kInFlight];
    u32 its[kInFlight] = {};
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const u32 at = begin + i * jmx::kThreads;
      if (at >= rows.end * units) break;
      found[i] = in[at];
      its[i] = __ldcg(own + at / units) | 1u << ranks.rank;
    }
    for (int k = 0; k < ranks.num_ranks; ++k) {
      const int rank = (ranks.rank + k) % ranks.num_ranks;
      uint4* const to = result(rank) + ranks.rank * needed.rows * units;
#pragma unroll
      for (int i = 0; i < kInFlight; ++i)
        if (its[i] >> rank & 1) to[begin + i * jmx::kThreads] = found[i];
    }
  }
  Await(ranks, call, jmx::kFirst);
  for (int i = 1; i < ranks.num_ranks; ++i) {
    const int other = (ranks.rank + i) % ranks.num_ranks;
    for (u64 row = rows.begin + mine; row < rows.end; row += kWarps) {
      if (__ldcg(ranks_of + other * needed.tokens + row) >> ranks.rank & 1) continue;
      for (u32 at = warp.Index(); at < units; at += Warp::kCount)
        result(ranks.rank)[(other * needed.rows + row) * units + at] = {};
    }
  }
  Meet(ranks, call);
  End(ranks, call);
}

// The sum over the ranks that have an expert of a row's token, in float32 and in the order of the ranks. They write
// these rows into the second array of the rank whose token it is, one rank's after the other. Rows are those of the
// last tokens.
template <typename Element>
__device__ void ReduceNeeded(const Ranks& ranks, const Arrays& arrays, const Needed& needed) {
  __shared__ u64 theirs[jmx::kMaxRanks * jmx::kMaxArrays], in[jmx::kMaxRanks];
  const Call call = Begin(ranks);
  SwapAddresses(ranks, call, arrays.out, 2, theirs);
  const u32 units = arrays.bytes[0] / needed.rows / sizeof(uint4);  // of a row
  const u32* const ranks_of = needed.ranks + (needed.tokens - needed.rows);  // of rank 0's rows
  const Share rows(needed.rows);
  const u32 count = (rows.end - rows.begin) * units;  // of a rank
  const uint4* given = reinterpret_cast<const uint4*>(arrays.in[0]);
  for (u32 begin = threadIdx.x; begin < (ranks.num_ranks - 1) * count; begin += kInFlight * jmx::kThreads) {
    uint4 found[kInFlight];
    uint4* to[kInFlight] = {};
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const u32 nth = begin + i * jmx::kThreads;
      if (nth >= (ranks.num_ranks - 1) * count) break;
      const int other = (ranks.rank + 1 + nth / count) % ranks.num_ranks;
      const u32 at = rows.begin * units + nth % count;
      if ((__ldg(ranks_of + other * needed.tokens + at / units) >> ranks.rank & 1) == 0) continue;
      found[i] = given[other * needed.rows * units + at];
      to[i] = reinterpret_cast<uint4*>(theirs[other * jmx::kMaxArrays + 1]) + ranks.rank * needed.rows * units + at;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (to[i] != nullptr) *to[i] = found[i];
  }
  Meet(ranks, call);
  if (const int rank = threadIdx.x; rank < ranks.num_ranks) {
    const char* from = rank == ranks.rank ? arrays.in[0] : arrays.out[1];
    in[rank] = reinterpret_cast<u64>(from) + rank * arrays.bytes[0];
  }
  AddUpRanks<uint4, Element>(
      ranks, in, arrays.out[0], rows.begin * units + threadIdx.x, rows.end * units, jmx::kThreads,
      [&](u64 at) { return __ldg(ranks_of + ranks.rank * needed.tokens + static_cast<u32>(at) / units); });
  End(ranks, call);
}

}  // namespace

#define NEEDED(NAME, CALL)                                                                              \
  extern "C" __global__ void __launch_bounds__(jmx::kThreads)                                           \
  NAME(const __grid_constant__ Ranks ranks, const __grid_constant__ Arrays arrays,                      \
       const __grid_constant__ Needed needed) {                                                         \
    CALL(ranks, arrays, needed);                                                                        \
  }
NEEDED(gather_needed, GatherNeeded)
NEEDED(reduce_bf16_needed, ReduceNeeded<BFloat16>)
NEEDED(reduce_f16_needed, ReduceNeeded<Float16>)
NEEDED(reduce_f32_needed, ReduceNeeded<Float32>)
