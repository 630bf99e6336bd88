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
#include "calls.h"
#include "lines.h"
#include "region.h"
#include "units.h"

namespace {

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

// The sum over all ranks, in float32 and in the order of the ranks: of each rank's rows, or of all rows on each rank.
template <typename Unit, typename Element>
__device__ void Reduce(const Ranks& ranks, const Arrays& arrays) {
  __shared__ u64 in[jmx::kMaxRanks];
  const Call call = Begin(ranks);
  const u64 units = arrays.bytes[0] / sizeof(Unit), stride = arrays.whole ? 0 : units;  // of ranks' rows
  const Unit* given = reinterpret_cast<const Unit*>(arrays.in[0]);
  const Share share(units);
  const auto other_of = [&](u32 nth) { return (ranks.rank + 1 + nth / share.Size()) % ranks.num_ranks; };
  ForEachOfCta<Unit>((ranks.num_ranks - 1) * share.Size(),
                     [&](u32 nth) { return given[other_of(nth) * stride + share.begin + nth % share.Size()]; },
                     [&](u32 nth, const Unit& unit) {
                       reinterpret_cast<Unit*>(jmx::SlotOf(ranks, other_of(nth), call,
                                                           ranks.rank))[share.begin + nth % share.Size()] = unit;
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
    in[rank] = (rank == ranks.rank ? reinterpret_cast<u64>(arrays.in[0]) : theirs[rank * jmx::kMaxArrays]) +
               first * sizeof(Unit);
  AddUpRanks<Unit, Element>(ranks, in, arrays.out[0], blockIdx.x * u64{blockDim.x} + threadIdx.x, units,
                            gridDim.x * u64{blockDim.x}, [&](u64) { return everyone; });
  Meet(ranks, call);
  End(ranks, call);
}

}  // namespace

#define LINES(NAME, CALL)                                                                                       \
  extern "C" __global__ void __launch_bounds__(jmx::kThreads)                                                   \
      NAME(const __grid_constant__ Ranks ranks, const __grid_constant__ Arrays arrays) {                        \
    const Call call = Begin(ranks);                                                                             \
    SystemMemory memory;                                                                                        \
    CALL(memory, ranks, arrays, call, blockIdx.x * u64{blockDim.x} + threadIdx.x, gridDim.x * u64{blockDim.x}); \
    End(ranks, call);                                                                                           \
  }
LINES(gather_lines, jmx::GatherLines)
LINES(reduce_bf16_lines, jmx::ReduceLines<BFloat16>)
LINES(reduce_f16_lines, jmx::ReduceLines<Float16>)
LINES(reduce_f32_lines, jmx::ReduceLines<Float32>)

#define GATHER(BYTES, UNIT)                                                                        \
  extern "C" __global__ void __launch_bounds__(jmx::kThreads)                                      \
      gather_##BYTES(const __grid_constant__ Ranks ranks, const __grid_constant__ Arrays arrays) { \
    Gather<UNIT>(ranks, arrays);                                                                   \
  }                                                                                                \
  extern "C" __global__ void gather_arrays_##BYTES(const __grid_constant__ Ranks ranks,            \
                                                   const __grid_constant__ Arrays arrays) {        \
    GatherArrays<UNIT>(ranks, arrays);                                                             \
  }
GATHER(16, uint4)
GATHER(8, uint2)
GATHER(4, unsigned int)
GATHER(2, unsigned short)
GATHER(1, unsigned char)

#define REDUCE(NAME, SIZE, UNIT, ELEMENT)                                                                         \
  extern "C" __global__ void __launch_bounds__(jmx::kThreads)                                                     \
      reduce_##NAME##_##SIZE(const __grid_constant__ Ranks ranks, const __grid_constant__ Arrays arrays) {        \
    Reduce<UNIT, ELEMENT>(ranks, arrays);                                                                         \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(jmx::kThreads)                                                     \
      reduce_##NAME##_arrays_##SIZE(const __grid_constant__ Ranks ranks, const __grid_constant__ Arrays arrays) { \
    ReduceArrays<UNIT, ELEMENT>(ranks, arrays);                                                                   \
  }
REDUCE(bf16, 16, uint4, BFloat16)
REDUCE(bf16, 2, unsigned short, BFloat16)
REDUCE(f16, 16, uint4, Float16)
REDUCE(f16, 2, unsigned short, Float16)
REDUCE(f32, 16, uint4, Float32)
REDUCE(f32, 4, unsigned int, Float32)
