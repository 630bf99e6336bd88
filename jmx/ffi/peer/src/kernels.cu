// Exchanges between the GPUs of one process: each writes rows into memory of the others, sets a flag there, and waits
// for the others' flags. jmx/ffi/peer/library.py compiles it with NVRTC; handler.cc launches it, once on each GPU.
//
// A region is memory of one rank that all ranks write. Calls have numbers, which every rank counts alike, in its own
// region: a program that is launched again, as a CUDA graph is, needs no new arguments. There are two slots for the
// rows of each rank, for calls of even and of odd numbers: a rank sends rows of call n + 2 only after it has received
// those of n + 1, which the others send after they have read those of n.
//
// Many rows go between the arrays themselves, with no slot and no copy of it: a call begins with the addresses of the
// arrays, which ranks send each other, and ends with flags: no array of a rank is freed or written during the call.
#include "lines.h"
#include "needed.h"
#include "region.h"

namespace {

using jmx::Arrays;
using jmx::kMaxBlocks;
using jmx::Needed;
using jmx::Ranks;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int kInFlight = 4;  // units that a thread reads before it writes them
constexpr u64 kTimeout = 300ull * 1000 * 1000 * 1000;  // ns that a rank waits for another one

__device__ u32* Word(const Ranks& ranks, int owner, int row) {
  return reinterpret_cast<u32*>(ranks.region[owner]) + row * kMaxBlocks + blockIdx.x;
}

// A call, by its number. A second one at the same time, on the same region, would mix rows up, so that is an error. The
// word `kBusy` is read when the call begins but checked when it ends: rows need not wait for it.
struct Call {
  u32 number, busy;
  __device__ operator u32() const { return number; }
};

__device__ Call Begin(const Ranks& ranks) {
  const u32 busy = threadIdx.x == 0 ? atomicExch(Word(ranks, ranks.rank, jmx::kBusy), 1) : 0;
  return {*Word(ranks, ranks.rank, jmx::kCalls) + 1, busy};
}

__device__ void End(const Ranks& ranks, const Call& call) {
  __syncthreads();
  if (call.busy != 0) __trap();
  if (threadIdx.x == 0) {
    *Word(ranks, ranks.rank, jmx::kCalls) = call;
    atomicExch(Word(ranks, ranks.rank, jmx::kBusy), 0);
  }
}

// Tells the other ranks that what this CTA has sent so far has arrived. `flags`: the first row of flags.
__device__ void Tell(const Ranks& ranks, u32 call, int flags = 0) {
  __syncthreads();
  const int other = threadIdx.x;
  if (other < ranks.num_ranks && other != ranks.rank) {
    u32* theirs = Word(ranks, other, flags + ranks.rank);
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs), "r"(call) : "memory");
  }
}

// Waits until the same CTA of each rank has told so.
__device__ void Await(const Ranks& ranks, u32 call, int flags = 0) {
  const int other = threadIdx.x;
  if (other < ranks.num_ranks && other != ranks.rank) {
    u32* mine = Word(ranks, ranks.rank, flags + other);
    u64 start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    for (u32 seen = call - 1; static_cast<int>(seen - call) < 0;) {  // the other one may be a call ahead
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine) : "memory");
      asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
      if (now - start > kTimeout) __trap();
    }
  }
  __syncthreads();
}

__device__ void Meet(const Ranks& ranks, u32 call) {
  Tell(ranks, call);
  Await(ranks, call);
}

template <typename Unit>
__device__ Unit Read(const char* data, u64 index) {  // past L1, which other GPUs do not write to
  Unit unit = __ldcg(reinterpret_cast<const Unit*>(data) + index);
  return unit;
}

// `store` (index, unit) of units that `read` (index) returns: several of a thread are on their way at once.
template <typename Unit, typename Load, typename Store>
__device__ void ForEach(u64 num_units, Load&& load, Store&& store) {
  const u64 step = gridDim.x * u64{blockDim.x};
  for (u64 first = blockIdx.x * u64{blockDim.x} + threadIdx.x; first < num_units; first += kInFlight * step) {
    Unit units[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + i * step < num_units) units[i] = load(first + i * step);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + i * step < num_units) store(first + i * step, units[i]);
  }
}

// The part of `count` things that is this CTA's. What it sends is what the same CTA of another rank waits for.
struct Share {
  u64 begin, end;
  __device__ explicit Share(u64 count) : begin(count * blockIdx.x / gridDim.x), end(count * (blockIdx.x + 1) / gridDim.x) {}
  __device__ u32 Size() const { return end - begin; }
};

// `ForEach`, of units that are all of this CTA.
template <typename Unit, typename Load, typename Store>
__device__ void ForEachOfCta(u32 count, Load&& load, Store&& store) {
  for (u32 first = threadIdx.x; first < count; first += kInFlight * jmx::kThreads) {
    Unit units[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + i * jmx::kThreads < count) units[i] = load(first + i * jmx::kThreads);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + i * jmx::kThreads < count) store(first + i * jmx::kThreads, units[i]);
  }
}

// A unit of a slot: that of an array, which has so many.
template <typename Unit>
struct Place {
  int array = 0;
  u64 at, units;
  __device__ Place(const Arrays& arrays, u64 of_slot) : at(of_slot) {
    for (;; ++array) {
      units = arrays.bytes[array] / sizeof(Unit);
      if (at < units) return;
      at -= units;
    }
  }
};

// Arrays of all ranks, one after the other in each result.
template <typename Unit>
__device__ void Gather(const Ranks& ranks, const Arrays& arrays) {
  const Call call = Begin(ranks);
  u64 units = 0;  // of a slot
  for (int k = 0; k < arrays.count; ++k) units += arrays.bytes[k] / sizeof(Unit);
  const Share share(units);
  ForEachOfCta<Unit>(
      share.Size(),
      [&](u32 nth) {
        const Place<Unit> place(arrays, share.begin + nth);
        return reinterpret_cast<const Unit*>(arrays.in[place.array])[place.at];
      },
      [&](u32 nth, const Unit& unit) {
        for (int i = 1; i < ranks.num_ranks; ++i) {
          const int other = (ranks.rank + i) % ranks.num_ranks;
          reinterpret_cast<Unit*>(jmx::SlotOf(ranks, other, call, ranks.rank))[share.begin + nth] = unit;
        }
        const Place<Unit> place(arrays, share.begin + nth);
        reinterpret_cast<Unit*>(arrays.out[place.array])[ranks.rank * place.units + place.at] = unit;
      });
  Meet(ranks, call);
  const auto other_of = [&](u32 nth) { return (ranks.rank + 1 + nth / share.Size()) % ranks.num_ranks; };
  ForEachOfCta<Unit>(
      (ranks.num_ranks - 1) * share.Size(),
      [&](u32 nth) {
        return Read<Unit>(jmx::SlotOf(ranks, ranks.rank, call, other_of(nth)), share.begin + nth % share.Size());
      },
      [&](u32 nth, const Unit& unit) {
        const Place<Unit> place(arrays, share.begin + nth % share.Size());
        reinterpret_cast<Unit*>(arrays.out[place.array])[other_of(nth) * place.units + place.at] = unit;
      });
  End(ranks, call);
}

// Lines in the memory of GPUs: words of 8 bytes, past the caches of one GPU.
struct SystemMemory {
  u64 start = 0;

  __device__ void Store(jmx::Line* to, const jmx::Line& line) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(line.halves[0]), "l"(line.halves[1]) : "memory");
  }
  __device__ jmx::Line Load(const jmx::Line* from) {
    jmx::Line line;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(line.halves[0]), "=l"(line.halves[1]) : "l"(from) : "memory");
    return line;
  }
  __device__ void Wait() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (start == 0) start = now;
    if (now - start > kTimeout) __trap();
  }
};

// Sends the addresses of `count` arrays to the other ranks.
__device__ void SendAddresses(const Ranks& ranks, u32 call, const char* const* mine, int count) {
  const int other = threadIdx.x / jmx::kMaxArrays, k = threadIdx.x % jmx::kMaxArrays;
  if (other < ranks.num_ranks && other != ranks.rank && k < count) {
    SystemMemory memory;
    __threadfence_system();  // what earlier kernels wrote there comes before its address
    memory.Store(jmx::AddressLine(ranks, other, ranks.rank, blockIdx.x, k), jmx::LineOf(reinterpret_cast<u64>(mine[k]), call));
  }
}

// `theirs` [rank * kMaxArrays + k], shared, gets the addresses that the other ranks have sent.
__device__ void ReceiveAddresses(const Ranks& ranks, u32 call, int count, u64* theirs) {
  const int other = threadIdx.x / jmx::kMaxArrays, k = threadIdx.x % jmx::kMaxArrays;
  if (other < ranks.num_ranks && other != ranks.rank && k < count) {
    SystemMemory memory;
    theirs[threadIdx.x] = jmx::Receive(memory, jmx::AddressLine(ranks, ranks.rank, other, blockIdx.x, k), call);
    __threadfence_system();
  }
  __syncthreads();
}

__device__ void SwapAddresses(const Ranks& ranks, u32 call, const char* const* mine, int count, u64* theirs) {
  SendAddresses(ranks, call, mine, count);
  ReceiveAddresses(ranks, call, count, theirs);
}

// `Gather`, written into the others' results.
template <typename Unit>
__device__ void GatherArrays(const Ranks& ranks, const Arrays& arrays) {
  __shared__ u64 results[jmx::kMaxRanks * jmx::kMaxArrays];
  const Call call = Begin(ranks);
  SwapAddresses(ranks, call, arrays.out, arrays.count, results);
  for (int k = 0; k < arrays.count; ++k) {
    const u64 units = arrays.bytes[k] / sizeof(Unit);
    ForEach<Unit>(
        units, [&](u64 at) { return reinterpret_cast<const Unit*>(arrays.in[k])[at]; },
        [&](u64 at, const Unit& unit) {
          for (int i = 1; i < ranks.num_ranks; ++i) {
            const int other = (ranks.rank + i) % ranks.num_ranks;
            reinterpret_cast<Unit*>(results[other * jmx::kMaxArrays + k])[ranks.rank * units + at] = unit;
          }
          reinterpret_cast<Unit*>(arrays.out[k])[ranks.rank * units + at] = unit;
        });
  }
  Meet(ranks, call);
  End(ranks, call);
}

struct BFloat16 {
  unsigned short bits;
  __device__ float Widen() const { return __uint_as_float(u32{bits} << 16); }
  __device__ static BFloat16 Round(float value) {
    BFloat16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
  }
};

struct Float16 {
  unsigned short bits;
  __device__ float Widen() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  __device__ static Float16 Round(float value) {
    Float16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
  }
};

struct Float32 {
  float value;
  __device__ float Widen() const { return value; }
  __device__ static Float32 Round(float value) { return {value}; }
};

// A unit, as it is copied, and its elements, as they are added.
template <typename Unit, typename Element>
union Lanes {
  Unit unit;
  Element elements[sizeof(Unit) / sizeof(Element)];
  __device__ Lanes() {}
};

// The sums over ranks, in float32 and in their order, of units [begin, end) of this thread, of which each rank has those
// of `in`, an address in shared memory: those of the ranks with a bit in `of` (index of a unit). A thread asks all ranks
// for kUnits of its units before it adds any: if it asked one rank after the other, all GPUs would read from the same one.
template <int kRanks, int kUnits, typename Unit, typename Element, typename RanksOfUnit>
__device__ void AddUp(const u64* in, Unit* out, u64 begin, u64 end, u64 step, RanksOfUnit&& of) {
  constexpr int kElements = sizeof(Unit) / sizeof(Element);
  for (; begin < end; begin += kUnits * step) {
    Lanes<Unit, Element> lanes[kUnits][kRanks];
    u32 asked[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) asked[i] = begin + i * step < end ? of(begin + i * step) : 0;
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i)
        if (asked[i] >> rank & 1) lanes[i][rank].unit = Read<Unit>(reinterpret_cast<const char*>(in[rank]), begin + i * step);
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      float sum[kElements] = {};
#pragma unroll
      for (int rank = 0; rank < kRanks; ++rank)
        if (asked[i] >> rank & 1)
          for (int k = 0; k < kElements; ++k) sum[k] += lanes[i][rank].elements[k].Widen();
      Lanes<Unit, Element> result;
      for (int k = 0; k < kElements; ++k) result.elements[k] = Element::Round(sum[k]);
      if (begin + i * step < end) out[begin + i * step] = result.unit;
    }
  }
}

// `AddUp` for the number of ranks. `in`: shared, and complete when all threads have come here.
template <typename Unit, typename Element, typename RanksOfUnit>
__device__ void AddUpRanks(const Ranks& ranks, const u64* in, char* result, u64 begin, u64 end, u64 step, RanksOfUnit&& of) {
  __syncthreads();
  Unit* out = reinterpret_cast<Unit*>(result);
  if (ranks.num_ranks <= 2)
    AddUp<2, 8, Unit, Element>(in, out, begin, end, step, of);
  else if (ranks.num_ranks <= 4)
    AddUp<4, 4, Unit, Element>(in, out, begin, end, step, of);
  else
    AddUp<8, 2, Unit, Element>(in, out, begin, end, step, of);
}

// The sum over all ranks, in float32 and in the order of the ranks: of each rank's rows, or of all rows on each rank.
template <typename Unit, typename Element>
__device__ void Reduce(const Ranks& ranks, const Arrays& arrays) {
  __shared__ u64 in[jmx::kMaxRanks];
  const Call call = Begin(ranks);
  const u64 units = arrays.bytes[0] / sizeof(Unit), stride = arrays.whole ? 0 : units;  // of ranks' rows
  const Unit* given = reinterpret_cast<const Unit*>(arrays.in[0]);
  const Share share(units);
  const auto other_of = [&](u32 nth) { return (ranks.rank + 1 + nth / share.Size()) % ranks.num_ranks; };
  ForEachOfCta<Unit>(
      (ranks.num_ranks - 1) * share.Size(),
      [&](u32 nth) { return given[other_of(nth) * stride + share.begin + nth % share.Size()]; },
      [&](u32 nth, const Unit& unit) {
        reinterpret_cast<Unit*>(jmx::SlotOf(ranks, other_of(nth), call, ranks.rank))[share.begin + nth % share.Size()] = unit;
      });
  Meet(ranks, call);
  if (const int rank = threadIdx.x; rank < ranks.num_ranks)
    in[rank] = reinterpret_cast<u64>(rank == ranks.rank ? reinterpret_cast<const char*>(given + rank * stride)
                                                        : jmx::SlotOf(ranks, ranks.rank, call, rank));
  const u32 everyone = (1u << ranks.num_ranks) - 1;
  AddUpRanks<Unit, Element>(ranks, in, arrays.out[0], share.begin + threadIdx.x, share.end, jmx::kThreads,
                            [&](u64) { return everyone; });
  End(ranks, call);
}

// `Reduce`, of rows that are read where the others have them.
template <typename Unit, typename Element>
__device__ void ReduceArrays(const Ranks& ranks, const Arrays& arrays) {
  __shared__ u64 theirs[jmx::kMaxRanks * jmx::kMaxArrays];
  const Call call = Begin(ranks);
  SwapAddresses(ranks, call, arrays.in, 1, theirs);
  const u64 units = arrays.bytes[0] / sizeof(Unit), first = arrays.whole ? 0 : ranks.rank * units;
  const u32 everyone = (1u << ranks.num_ranks) - 1;
  __shared__ u64 in[jmx::kMaxRanks];
  if (const int rank = threadIdx.x; rank < ranks.num_ranks)
    in[rank] = (rank == ranks.rank ? reinterpret_cast<u64>(arrays.in[0]) : theirs[rank * jmx::kMaxArrays]) + first * sizeof(Unit);
  AddUpRanks<Unit, Element>(ranks, in, arrays.out[0], blockIdx.x * u64{blockDim.x} + threadIdx.x, units,
                            gridDim.x * u64{blockDim.x}, [&](u64) { return everyone; });
  Meet(ranks, call);
  End(ranks, call);
}

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
__device__ void SendAll(const Ranks& ranks, const Arrays& arrays, const char* array, const u64* results, int k, u64 begin, u64 end) {
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
__device__ void SendRouting(const Ranks& ranks, const Arrays& arrays, const Needed& needed, const u32* own, const u64* results,
                            u64 begin, u64 end) {
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
  Tell(ranks, call, jmx::kFirst);
  const auto result = [&](int rank) {
    return reinterpret_cast<uint4*>(rank == ranks.rank ? reinterpret_cast<u64>(arrays.out[0]) : results[rank * jmx::kMaxArrays]);
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
      for (u32 at = warp.Index(); at < units; at += Warp::kCount) result(ranks.rank)[(other * needed.rows + row) * units + at] = {};
    }
  }
  Meet(ranks, call);
  End(ranks, call);
}

// The sum over the ranks that have an expert of a row's token, in float32 and in the order of the ranks. They write these
// rows into the second array of the rank whose token it is, one rank's after the other. Rows are those of the last tokens.
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
    uint4* to[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const u32 nth = begin + i * jmx::kThreads;
      to[i] = nullptr;
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
  AddUpRanks<uint4, Element>(ranks, in, arrays.out[0], rows.begin * units + threadIdx.x, rows.end * units, jmx::kThreads,
                             [&](u64 at) { return __ldg(ranks_of + ranks.rank * needed.tokens + static_cast<u32>(at) / units); });
  End(ranks, call);
}

}  // namespace

#define LINES(NAME, CALL)                                                                                                     \
  extern "C" __global__ void NAME(const __grid_constant__ Ranks ranks, const __grid_constant__ Arrays arrays) {               \
    const Call call = Begin(ranks);                                                                                           \
    SystemMemory memory;                                                                                                      \
    CALL(memory, ranks, arrays, call, blockIdx.x * u64{blockDim.x} + threadIdx.x, gridDim.x * u64{blockDim.x});               \
    End(ranks, call);                                                                                                         \
  }
LINES(gather_lines, jmx::GatherLines)
LINES(reduce_bf16_lines, jmx::ReduceLines<BFloat16>)
LINES(reduce_f16_lines, jmx::ReduceLines<Float16>)
LINES(reduce_f32_lines, jmx::ReduceLines<Float32>)

#define GATHER(BYTES, UNIT)                                                                                                          \
  extern "C" __global__ void __launch_bounds__(jmx::kThreads) gather_##BYTES(const __grid_constant__ Ranks ranks, const __grid_constant__ Arrays arrays) {           \
    Gather<UNIT>(ranks, arrays);                                                                                                     \
  }                                                                                                                                  \
  extern "C" __global__ void gather_arrays_##BYTES(const __grid_constant__ Ranks ranks, const __grid_constant__ Arrays arrays) {    \
    GatherArrays<UNIT>(ranks, arrays);                                                                                               \
  }
GATHER(16, uint4)
GATHER(8, uint2)
GATHER(4, unsigned int)
GATHER(2, unsigned short)
GATHER(1, unsigned char)

#define REDUCE(NAME, SIZE, UNIT, ELEMENT)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(jmx::kThreads) reduce_##NAME##_##SIZE(const __grid_constant__ Ranks ranks, const __grid_constant__ Arrays arrays) {           \
    Reduce<UNIT, ELEMENT>(ranks, arrays);                                                                                                    \
  }                                                                                                                                          \
  extern "C" __global__ void __launch_bounds__(jmx::kThreads) reduce_##NAME##_arrays_##SIZE(const __grid_constant__ Ranks ranks, const __grid_constant__ Arrays arrays) {    \
    ReduceArrays<UNIT, ELEMENT>(ranks, arrays);                                                                                              \
  }
REDUCE(bf16, 16, uint4, BFloat16)
REDUCE(bf16, 2, unsigned short, BFloat16)
REDUCE(f16, 16, uint4, Float16)
REDUCE(f16, 2, unsigned short, Float16)
REDUCE(f32, 16, uint4, Float32)
REDUCE(f32, 4, unsigned int, Float32)

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
