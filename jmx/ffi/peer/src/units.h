// What a thread does with many units, those of copies and those of sums.
#pragma once

#include "calls.h"
#include "region.h"

namespace {

constexpr int kInFlight = 4;  // units that a thread reads before it writes them

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
  __device__ explicit Share(u64 count)
      : begin(count * blockIdx.x / gridDim.x), end(count * (blockIdx.x + 1) / gridDim.x) {}
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

struct BFloat16 {
  unsigned short bits;
  __device__ float Widen() const { return __uint_as_float(u32{bits} << 16); }
  __device__ static BFloat16 Round(float value) {
    return {RoundToBFloat16(value)};
  }
};

struct Float16 {
  unsigned short bits;
  __device__ float Widen() const {
    return WidenFloat16(bits);
  }
  __device__ static Float16 Round(float value) {
    return {RoundToFloat16(value)};
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

// The sums over ranks, in float32 and in their order, of units [begin, end) of this thread, of which each rank has
// those of `in`, an address in shared memory: those of the ranks with a bit in `of` (index of a unit). A thread asks
// all ranks for kUnits of its units before it adds any: if it asked one rank after the other, all GPUs would read from
// the same one.
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
        if (asked[i] >> rank & 1)
          lanes[i][rank].unit = Read<Unit>(reinterpret_cast<const char*>(in[rank]), begin + i * step);
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
__device__ void AddUpRanks(const Ranks& ranks, const u64* in, char* result, u64 begin, u64 end, u64 step,
                           RanksOfUnit&& of) {
  __syncthreads();
  Unit* out = reinterpret_cast<Unit*>(result);
  if (ranks.num_ranks <= 2)
    AddUp<2, 8, Unit, Element>(in, out, begin, end, step, of);
  else if (ranks.num_ranks <= 4)
    AddUp<4, 4, Unit, Element>(in, out, begin, end, step, of);
  else
    AddUp<8, 2, Unit, Element>(in, out, begin, end, step, of);
}

}  // namespace
