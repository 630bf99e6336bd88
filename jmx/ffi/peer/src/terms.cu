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

// Some units of all tokens' sums.
template <int kUnits>
struct Wanted {
  u32 tokens[kUnits], units[kUnits];  // of a unit: its token, and which one it is of the token's
  bool asked[kUnits];

  // Those of a rank's tokens from `at` on, `step` apart, up to `end`.
  __device__ Wanted(const Terms& terms, int rank, u64 at, u64 step, u64 end) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u, at += step) {
      asked[u] = at < end;
      tokens[u] = rank * terms.tokens + static_cast<u32>(at) / terms.units;
      units[u] = static_cast<u32>(at) % terms.units;
    }
  }
};

// `sums`, in float32 and in the order of a token's slots, each rounded once. The terms of all units are asked for at
// once.
template <int kUnits, typename Element>
__device__ void SumsOf(const Terms& terms, const Wanted<kUnits>& wanted, uint4 (&sums)[kUnits]) {
  constexpr int kElements = sizeof(uint4) / sizeof(Element), kEach = sizeof(uint4) / sizeof(float),
                kLoads = kElements / kEach;
  using Floats = Lanes<uint4, Float32>;
  float sum[kUnits][kElements] = {};
  for (int first = 0; first < terms.slots; first += kTerms) {
    int rows[kUnits][kTerms];
    float weights[kUnits][kTerms];
    Floats found[kUnits][kTerms][kLoads];
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
      for (int i = 0; i < kTerms; ++i) {
        const u32 slot = wanted.tokens[u] * terms.slots + first + i;
        rows[u][i] = wanted.asked[u] && first + i < terms.slots ? __ldg(terms.row_of + slot) : -1;
        weights[u][i] = rows[u][i] < 0 ? 0 : __ldg(terms.weights + slot);
      }
    const auto from = [&](int u, int i, int part) {
      const u64 start = wanted.units[u] * u64{kElements * sizeof(float)};
      return terms.rows + part * terms.part_bytes + rows[u][i] * terms.row_bytes + start;
    };
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
      for (int i = 0; i < kTerms; ++i)
#pragma unroll
        for (int k = 0; k < kLoads; ++k)
          if (rows[u][i] >= 0) found[u][i][k].unit = Read<uint4>(from(u, i, 0), k);
    for (int part = 1; part < terms.parts; ++part) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
#pragma unroll
        for (int i = 0; i < kTerms; ++i)
#pragma unroll
          for (int k = 0; k < kLoads; ++k) {
            if (rows[u][i] < 0) continue;
            Floats more;
            more.unit = Read<uint4>(from(u, i, part), k);
#pragma unroll
            for (int e = 0; e < kEach; ++e) found[u][i][k].elements[e].value += more.elements[e].value;
          }
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
      for (int i = 0; i < kTerms; ++i)
#pragma unroll
        for (int k = 0; k < kLoads; ++k)
#pragma unroll
          for (int e = 0; e < kEach; ++e)
            if (rows[u][i] >= 0) sum[u][kEach * k + e] += found[u][i][k].elements[e].value * weights[u][i];
  }
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    Lanes<uint4, Element> result;
#pragma unroll
    for (int i = 0; i < kElements; ++i) result.elements[i] = Element::Round(sum[u][i]);
    sums[u] = result.unit;
  }
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
    uint4 sums[1];
    SumsOf<1, Element>(terms, {terms, rank, at, 0, at + 1}, sums);
    reinterpret_cast<uint4*>(to[rank * jmx::kMaxArrays])[at] = sums[0];
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

// `ReduceTerms` by slots, of two ranks, for so few results that a thread has at most `jmx::kFewUnits` of a rank's. It
// asks for the terms of all at once, and keeps its own sums until the other rank's are there. A flag comes after a
// fence, which takes as long as the link; so a warp of its own has the flags, and the others go on meanwhile.
template <typename Element>
__device__ void ReduceFewTerms(const Ranks& ranks, const Arrays& arrays, const Terms& terms) {
  constexpr int kSent = 1, kArrived = 2;  // barriers; that of __syncthreads is 0
  constexpr int kUnits = jmx::kFewUnits, kElements = sizeof(uint4) / sizeof(Element);
  const Call call = Begin(ranks);
  const int other = 1 - ranks.rank;
  if (threadIdx.x >= jmx::kWorkers) {
    WaitAt(kSent, jmx::kThreads);
    if (threadIdx.x == jmx::kWorkers) {
      StoreRelease(Word(ranks, other, ranks.rank), call);
      AwaitFlag(Word(ranks, ranks.rank, other), call);
    }
    ArriveAt(kArrived, jmx::kThreads);
    return End(ranks, call);
  }
  const Share share(u64{terms.tokens} * terms.units);  // of a rank's results
  const u64 first = share.begin + threadIdx.x;
  const auto for_each = [&](auto&& what) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
      if (first + u * jmx::kWorkers < share.end) what(u, first + u * jmx::kWorkers);
  };
  uint4 sums[kUnits];
  SumsOf<kUnits, Element>(terms, {terms, other, first, jmx::kWorkers, share.end}, sums);
  auto* to = reinterpret_cast<uint4*>(jmx::SlotOf(ranks, other, call, ranks.rank));
  for_each([&](int u, u64 at) { to[at] = sums[u]; });
  ArriveAt(kSent, jmx::kThreads);
  SumsOf<kUnits, Element>(terms, {terms, ranks.rank, first, jmx::kWorkers, share.end}, sums);
  WaitAt(kArrived, jmx::kThreads);
  Lanes<uint4, Element> theirs[kUnits];
  for_each([&](int u, u64 at) {
    theirs[u].unit = Read<uint4>(jmx::SlotOf(ranks, ranks.rank, call, other), at);
  });
  for_each([&](int u, u64 at) {
    Lanes<uint4, Element> own, result;
    own.unit = sums[u];
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      const float mine = own.elements[k].Widen(), its = theirs[u].elements[k].Widen();
      result.elements[k] = Element::Round(ranks.rank == 0 ? 0 + mine + its : 0 + its + mine);
    }
    reinterpret_cast<uint4*>(arrays.out[0])[at] = result.unit;
  });
  End(ranks, call);
}

}  // namespace

#define TERMS(NAME, SLOTS, ELEMENT)                                                                     \
  extern "C" __global__ void __launch_bounds__(jmx::kThreads)                                           \
  reduce_##NAME(const __grid_constant__ Ranks ranks, const __grid_constant__ Arrays arrays,             \
                const __grid_constant__ Terms terms) {                                                  \
    ReduceTerms<SLOTS, ELEMENT>(ranks, arrays, terms);                                                  \
  }
#define FEW_TERMS(NAME, ELEMENT)                                                            \
  extern "C" __global__ void __launch_bounds__(jmx::kThreads)                               \
  reduce_##NAME(const __grid_constant__ Ranks ranks, const __grid_constant__ Arrays arrays, \
                const __grid_constant__ Terms terms) {                                      \
    ReduceFewTerms<ELEMENT>(ranks, arrays, terms);                                          \
  }
TERMS(bf16_terms, true, BFloat16)
TERMS(f16_terms, true, Float16)
TERMS(f32_terms, true, Float32)
TERMS(bf16_terms_arrays, false, BFloat16)
TERMS(f16_terms_arrays, false, Float16)
TERMS(f32_terms_arrays, false, Float32)
FEW_TERMS(bf16_terms_few, BFloat16)
FEW_TERMS(f16_terms_few, Float16)
FEW_TERMS(f32_terms_few, Float32)
