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

// Tells the other ranks that this CTA's rows are in their slots, and waits for those of the same CTA of each.
__device__ void Meet(const Ranks& ranks, u32 call) {
  __syncthreads();
  const int other = threadIdx.x;
  if (other < ranks.num_ranks && other != ranks.rank) {
    u32* theirs = Word(ranks, other, ranks.rank);
    u32* mine = Word(ranks, ranks.rank, other);
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs), "r"(call) : "memory");
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

// Arrays of all ranks, one after the other in each result.
template <typename Unit>
__device__ void Gather(const Ranks& ranks, const Arrays& arrays) {
  const Call call = Begin(ranks);
  u64 begin = 0;  // of an array in a slot
  for (int k = 0; k < arrays.count; ++k) {
    const u64 units = arrays.bytes[k] / sizeof(Unit);
    ForEach<Unit>(
        units, [&](u64 at) { return reinterpret_cast<const Unit*>(arrays.in[k])[at]; },
        [&](u64 at, const Unit& unit) {
          for (int i = 1; i < ranks.num_ranks; ++i) {
            const int other = (ranks.rank + i) % ranks.num_ranks;
            reinterpret_cast<Unit*>(jmx::SlotOf(ranks, other, call, ranks.rank))[begin + at] = unit;
          }
          reinterpret_cast<Unit*>(arrays.out[k])[ranks.rank * units + at] = unit;
        });
    begin += units;
  }
  Meet(ranks, call);
  begin = 0;
  for (int k = 0; k < arrays.count; ++k) {
    const u64 units = arrays.bytes[k] / sizeof(Unit);
    for (int i = 1; i < ranks.num_ranks; ++i) {
      const int other = (ranks.rank + i) % ranks.num_ranks;
      const char* slot = jmx::SlotOf(ranks, ranks.rank, call, other);
      ForEach<Unit>(
          units, [&](u64 at) { return Read<Unit>(slot, begin + at); },
          [&](u64 at, const Unit& unit) { reinterpret_cast<Unit*>(arrays.out[k])[other * units + at] = unit; });
    }
    begin += units;
  }
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

// Sends the addresses of `count` arrays to the other ranks; `theirs` [rank * kMaxArrays + k], shared, gets theirs.
__device__ void SwapAddresses(const Ranks& ranks, u32 call, const char* const* mine, int count, u64* theirs) {
  const int other = threadIdx.x / jmx::kMaxArrays, k = threadIdx.x % jmx::kMaxArrays;
  if (other < ranks.num_ranks && other != ranks.rank && k < count) {
    SystemMemory memory;
    __threadfence_system();  // what earlier kernels wrote there comes before its address
    const u64 address = reinterpret_cast<u64>(mine[k]);
    theirs[threadIdx.x] = jmx::Swap(memory, ranks, call, other, blockIdx.x, k, address);
    __threadfence_system();
  }
  __syncthreads();
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

// The sum over all ranks, in float32 and in the order of the ranks: of each rank's rows, or of all rows on each rank.
template <typename Unit, typename Element>
__device__ void Reduce(const Ranks& ranks, const Arrays& arrays) {
  constexpr int kElements = sizeof(Unit) / sizeof(Element);
  const Call call = Begin(ranks);
  const u64 units = arrays.bytes[0] / sizeof(Unit), stride = arrays.whole ? 0 : units;  // of ranks' rows
  const Unit* in = reinterpret_cast<const Unit*>(arrays.in[0]);
  for (int i = 1; i < ranks.num_ranks; ++i) {
    const int other = (ranks.rank + i) % ranks.num_ranks;
    Unit* slot = reinterpret_cast<Unit*>(jmx::SlotOf(ranks, other, call, ranks.rank));
    ForEach<Unit>(
        units, [&](u64 at) { return in[other * stride + at]; }, [&](u64 at, const Unit& unit) { slot[at] = unit; });
  }
  Meet(ranks, call);
  const u64 step = gridDim.x * u64{blockDim.x};
  for (u64 at = blockIdx.x * u64{blockDim.x} + threadIdx.x; at < units; at += step) {
    float sum[kElements] = {};
    for (int rank = 0; rank < ranks.num_ranks; ++rank) {
      Lanes<Unit, Element> lanes;
      lanes.unit = rank == ranks.rank ? in[rank * stride + at] : Read<Unit>(jmx::SlotOf(ranks, ranks.rank, call, rank), at);
      for (int i = 0; i < kElements; ++i) sum[i] += lanes.elements[i].Widen();
    }
    Lanes<Unit, Element> result;
    for (int i = 0; i < kElements; ++i) result.elements[i] = Element::Round(sum[i]);
    reinterpret_cast<Unit*>(arrays.out[0])[at] = result.unit;
  }
  End(ranks, call);
}

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

// `AddUp` of units that begin at unit `first` of each rank's array, of which `theirs` are the others' addresses.
template <typename Unit, typename Element, typename RanksOfUnit>
__device__ void AddUpRanks(const Ranks& ranks, const Arrays& arrays, const u64* theirs, u64 first, u64 begin, u64 end, u64 step,
                           RanksOfUnit&& of) {
  __shared__ u64 in[jmx::kMaxRanks];
  if (threadIdx.x < ranks.num_ranks) {
    const bool own = threadIdx.x == ranks.rank;
    in[threadIdx.x] = (own ? reinterpret_cast<u64>(arrays.in[0]) : theirs[threadIdx.x * jmx::kMaxArrays]) + first * sizeof(Unit);
  }
  __syncthreads();
  Unit* out = reinterpret_cast<Unit*>(arrays.out[0]);
  if (ranks.num_ranks <= 2)
    AddUp<2, 8, Unit, Element>(in, out, begin, end, step, of);
  else if (ranks.num_ranks <= 4)
    AddUp<4, 4, Unit, Element>(in, out, begin, end, step, of);
  else
    AddUp<8, 2, Unit, Element>(in, out, begin, end, step, of);
}

// `Reduce`, of rows that are read where the others have them.
template <typename Unit, typename Element>
__device__ void ReduceArrays(const Ranks& ranks, const Arrays& arrays) {
  __shared__ u64 theirs[jmx::kMaxRanks * jmx::kMaxArrays];
  const Call call = Begin(ranks);
  SwapAddresses(ranks, call, arrays.in, 1, theirs);
  const u64 units = arrays.bytes[0] / sizeof(Unit), first = arrays.whole ? 0 : ranks.rank * units;
  const u32 everyone = (1u << ranks.num_ranks) - 1;
  AddUpRanks<Unit, Element>(ranks, arrays, theirs, first, blockIdx.x * u64{blockDim.x} + threadIdx.x, units,
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

// The part of `count` things that is this CTA's.
struct Share {
  u64 begin, end;
  __device__ explicit Share(u64 count) : begin(count * blockIdx.x / gridDim.x), end(count * (blockIdx.x + 1) / gridDim.x) {}
};

// Sends bytes [begin, end) of an array to all ranks' results, `Unit` by unit, for the threads of a CTA.
template <typename Unit>
__device__ void SendAll(const Ranks& ranks, const Arrays& arrays, const u64* results, int k, u64 begin, u64 end) {
  const Unit* in = reinterpret_cast<const Unit*>(arrays.in[k]);
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

__device__ void SendRouting(const Ranks& ranks, const Arrays& arrays, const Needed& needed, const u64* results, u64 begin, u64 end) {
  for (int k = 1; k < arrays.count; ++k) {
    const u64 bytes = arrays.bytes[k] / needed.tokens;
    if (bytes % sizeof(uint4) == 0)
      SendAll<uint4>(ranks, arrays, results, k, begin * bytes, end * bytes);
    else
      SendAll<u32>(ranks, arrays, results, k, begin * bytes, end * bytes);
  }
}

constexpr int kWarps = jmx::kThreads / Warp::kCount;

// `GatherArrays`, of rows that go to the ranks which need them only: in the results of others they are zeros.
__device__ void GatherNeeded(const Ranks& ranks, const Arrays& arrays, const Needed& needed) {
  __shared__ u64 results[jmx::kMaxRanks * jmx::kMaxArrays];
  __shared__ u32 ranks_of[kWarps];
  const Call call = Begin(ranks);
  SwapAddresses(ranks, call, arrays.out, arrays.count, results);
  const Warp warp;
  const int mine = threadIdx.x / Warp::kCount;
  const u32 units = arrays.bytes[0] / needed.rows / sizeof(uint4);  // of a row
  const u64 routing_bytes = arrays.bytes[1] / needed.tokens;
  const u32 everyone = (1u << ranks.num_ranks) - 1;
  const uint4* in = reinterpret_cast<const uint4*>(arrays.in[0]);
  const auto result = [&](int rank) {
    return reinterpret_cast<uint4*>(rank == ranks.rank ? reinterpret_cast<u64>(arrays.out[0]) : results[rank * jmx::kMaxArrays]);
  };
  // The rows of a CTA, whose routing it sends, too: that of the same CTA of another rank has both after it has met this one.
  const Share rows(needed.rows), others(needed.tokens - needed.rows);
  SendRouting(ranks, arrays, needed, results, rows.begin, rows.end);
  SendRouting(ranks, arrays, needed, results, needed.rows + others.begin, needed.rows + others.end);
  const auto ranks_that_need = [&](u64 token) {
    const u32 found = jmx::RanksOf(warp, needed, ranks.num_ranks, arrays.in[1] + token * routing_bytes, everyone);
    if (warp.Index() == 0) needed.ranks[token] = found;
    return found;
  };
  for (u64 token = needed.rows + others.begin + mine; token < needed.rows + others.end; token += kWarps) ranks_that_need(token);
  for (u64 first = rows.begin; first < rows.end; first += kWarps) {
    if (first + mine < rows.end) {
      const u32 found = ranks_that_need(first + mine);
      if (warp.Index() == 0) ranks_of[mine] = found;
    }
    __syncthreads();
    const u32 count = (rows.end - first < kWarps ? rows.end - first : kWarps) * units;
    for (u32 begin = threadIdx.x; begin < count; begin += kInFlight * jmx::kThreads) {
      uint4 found[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i)
        if (begin + i * jmx::kThreads < count) found[i] = in[first * units + begin + i * jmx::kThreads];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const u32 at = begin + i * jmx::kThreads;
        if (at >= count) break;
        const u32 its = ranks_of[at / units] | 1u << ranks.rank;
        for (int k = 0; k < ranks.num_ranks; ++k) {
          const int rank = (ranks.rank + k) % ranks.num_ranks;
          if (its >> rank & 1) result(rank)[(ranks.rank * needed.rows + first) * units + at] = found[i];
        }
      }
    }
    __syncthreads();  // before the next ones are in shared memory
  }
  Meet(ranks, call);
  for (int i = 1; i < ranks.num_ranks; ++i) {
    const int other = (ranks.rank + i) % ranks.num_ranks;
    for (u64 row = rows.begin + mine; row < rows.end; row += kWarps) {
      const char* routing = arrays.out[1] + (other * needed.tokens + row) * routing_bytes;
      if (jmx::RanksOf(warp, needed, ranks.num_ranks, routing, 1u << ranks.rank) != 0) continue;
      for (u32 at = warp.Index(); at < units; at += Warp::kCount) result(ranks.rank)[(other * needed.rows + row) * units + at] = {};
    }
  }
  End(ranks, call);
}

// `ReduceArrays`, of rows that are read on the ranks with a bit in `needed.ranks` only: on others they add nothing.
template <typename Element>
__device__ void ReduceNeeded(const Ranks& ranks, const Arrays& arrays, const Needed& needed) {
  __shared__ u64 theirs[jmx::kMaxRanks * jmx::kMaxArrays];
  const Call call = Begin(ranks);
  SwapAddresses(ranks, call, arrays.in, 1, theirs);
  const u32 units = arrays.bytes[0] / needed.rows / sizeof(uint4);  // of a row
  const Share rows(needed.rows);
  const u64 first = ranks.rank * needed.rows * units;
  AddUpRanks<uint4, Element>(ranks, arrays, theirs, first, rows.begin * units + threadIdx.x, rows.end * units, jmx::kThreads,
                             [&](u64 at) { return needed.ranks[static_cast<u32>(at) / units]; });
  Meet(ranks, call);
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
  extern "C" __global__ void gather_##BYTES(const __grid_constant__ Ranks ranks, const __grid_constant__ Arrays arrays) {           \
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
