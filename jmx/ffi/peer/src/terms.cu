// The kernels that sum a token's rows, each of which an expert of this rank has computed, as they send them to the
// token's rank. jmx/ffi/peer/library.py compiles them where a program calls one.
#include "calls.h"
#include "region.h"
#include "terms_of.h"
#include "units.h"

namespace {

using jmx::Terms;

constexpr int kTerms = 4;  // that a thread reads before it adds any
constexpr int kMany = 4;   // units of a thread, above which links are busy for longer than flags take

// A unit of a token's sum, in float32 and in the order of its slots, rounded once.
template <typename Element>
__device__ uint4 SumOf(const Terms& terms, u32 token, u32 unit) {
  constexpr int kElements = sizeof(uint4) / sizeof(Element), kEach = sizeof(uint4) / sizeof(float),
                kLoads = kElements / kEach;
  using Floats = Lanes<uint4, Float32>;
  float sum[kElements] = {};
  for (int first = 0; first < terms.slots; first += kTerms) {
    const char* from[kTerms];
    float weights[kTerms];
    Floats found[kTerms][kLoads];
#pragma unroll
    for (int i = 0; i < kTerms; ++i) {
      const u32 slot = token * terms.slots + first + i;
      const int row = first + i < terms.slots ? __ldg(terms.row_of + slot) : -1;
      from[i] = row < 0 ? nullptr : terms.rows + row * terms.row_bytes + unit * u64{kElements * sizeof(float)};
      weights[i] = row < 0 ? 0 : __ldg(terms.weights + slot);
    }
#pragma unroll
    for (int i = 0; i < kTerms; ++i)
#pragma unroll
      for (int k = 0; k < kLoads; ++k)
        if (from[i] != nullptr) found[i][k].unit = Read<uint4>(from[i], k);
    for (int part = 1; part < terms.parts; ++part) {
#pragma unroll
      for (int i = 0; i < kTerms; ++i)
#pragma unroll
        for (int k = 0; k < kLoads; ++k) {
          if (from[i] == nullptr) continue;
          Floats more;
          more.unit = Read<uint4>(from[i] + part * terms.part_bytes, k);
#pragma unroll
          for (int e = 0; e < kEach; ++e) found[i][k].elements[e].value += more.elements[e].value;
        }
    }
#pragma unroll
    for (int i = 0; i < kTerms; ++i)
#pragma unroll
      for (int k = 0; k < kLoads; ++k)
#pragma unroll
        for (int e = 0; e < kEach; ++e)
          if (from[i] != nullptr) sum[kEach * k + e] += found[i][k].elements[e].value * weights[i];
  }
  Lanes<uint4, Element> result;
#pragma unroll
  for (int i = 0; i < kElements; ++i) result.elements[i] = Element::Round(sum[i]);
  return result.unit;
}

// The sum over all ranks, in float32 and in their order, of what each adds up for a token. They write these sums to the
// token's rank: `kSlots`: into its region; else into the second array of the call.
template <bool kSlots, typename Element>
__device__ void ReduceTerms(const Ranks& ranks, const Arrays& arrays, const Terms& terms) {
  __shared__ u64 to[jmx::kMaxRanks * jmx::kMaxArrays], in[jmx::kMaxRanks];
  const Call call = Begin(ranks);
  if constexpr (!kSlots) SwapAddresses(ranks, call, arrays.out + 1, 1, to);
  if (const u32 rank = threadIdx.x; rank < static_cast<u32>(ranks.num_ranks)) {
    const int its = static_cast<int>(rank);
    u64& theirs = to[rank * jmx::kMaxArrays];
    if constexpr (kSlots) {
      theirs = reinterpret_cast<u64>(jmx::SlotOf(ranks, its, call, ranks.rank));
      in[rank] = reinterpret_cast<u64>(jmx::SlotOf(ranks, ranks.rank, call, its));
    } else {
      const u64 mine = reinterpret_cast<u64>(arrays.out[1]);
      theirs = (its == ranks.rank ? mine : theirs) + ranks.rank * arrays.bytes[0];
      in[rank] = mine + rank * arrays.bytes[0];
    }
  }
  __syncthreads();
  const Share share(u64{terms.tokens} * terms.units);  // of a rank's results
  const auto row_of = [&](u64 at) { return static_cast<u32>(at) / terms.units; };
  const auto ranks_of = [&](int rank, u64 at) {
    return terms.ranks == nullptr ? (1u << ranks.num_ranks) - 1 : __ldg(terms.ranks + rank * terms.tokens + row_of(at));
  };
  const auto send = [&](u64 at, int rank) {
    if ((ranks_of(rank, at) >> ranks.rank & 1) == 0) return;
    reinterpret_cast<uint4*>(to[rank * jmx::kMaxArrays])[at] =
        SumOf<Element>(terms, rank * terms.tokens + row_of(at), static_cast<u32>(at) % terms.units);
  };
  // Of many rows this rank's own sums are computed while links are busy, of few while the flags are on their way.
  const bool many = share.Size() > kMany * jmx::kThreads;
  for (u64 at = share.begin + threadIdx.x; at < share.end; at += jmx::kThreads)
    for (int i = 1; i < ranks.num_ranks + many; ++i) send(at, (ranks.rank + i) % ranks.num_ranks);
  Signal(ranks, call);
  for (u64 at = share.begin + threadIdx.x; at < share.end && !many; at += jmx::kThreads) send(at, ranks.rank);
  Await(ranks, call);
  AddUpRanks<uint4, Element>(ranks, in, arrays.out[0], share.begin + threadIdx.x, share.end, jmx::kThreads,
                             [&](u64 at) { return ranks_of(ranks.rank, at); });
  End(ranks, call);
}

}  // namespace

#define TERMS(NAME, SLOTS, ELEMENT)                                                                     \
  extern "C" __global__ void __launch_bounds__(jmx::kThreads)                                           \
  reduce_##NAME(const __grid_constant__ Ranks ranks, const __grid_constant__ Arrays arrays,             \
                const __grid_constant__ Terms terms) {                                                  \
    ReduceTerms<SLOTS, ELEMENT>(ranks, arrays, terms);                                                  \
  }
TERMS(bf16_terms, true, BFloat16)
TERMS(f16_terms, true, Float16)
TERMS(f32_terms, true, Float32)
TERMS(bf16_terms_arrays, false, BFloat16)
TERMS(f16_terms_arrays, false, Float16)
TERMS(f32_terms_arrays, false, Float32)
