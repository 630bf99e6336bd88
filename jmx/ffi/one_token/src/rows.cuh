// The rows of weights that a CTA is to multiply, and their products.
#pragma once

#include "primitives.cuh"

namespace jmx {

// A CTA's share of rows of a matrix: as many as any other's, or one less.
struct Rows {
  int first, count;
  __device__ static Rows Of(int number) {
    const int first = blockIdx.x * number / gridDim.x;
    return {first, (int)(((blockIdx.x + 1) * number) / gridDim.x) - first};
  }
};

// The CTA's rows, in the order in which they are copied: of both large matrices, then of the router's.
struct Plan {
  Rows heads, out;
  int router;  // rows, each gridDim.x after the last one
  int slot_bytes;

  __device__ explicit Plan(const Call& call)
      : heads(Rows::Of(call.kv_heads * (call.group + 2) * kDim)),
        out(Rows::Of(call.hidden)),
        router(((int)blockIdx.x < call.experts) ? (call.experts - 1 - (int)blockIdx.x) / (int)gridDim.x + 1 : 0),
        slot_bytes(2 * max(call.hidden, call.kv_heads * call.group * kDim)) {}
};

// Where a row is in shared memory.
__device__ __forceinline__ unsigned char* Slot(Shared& shared, const Plan& plan, int slot) {
  return reinterpret_cast<unsigned char*>(&shared + 1) + slot * plan.slot_bytes;
}

// Copies all rows, one after the other: a slot is free when the row before in it was multiplied. No row depends on what
// is computed, so that memory is never idle while CTAs wait for each other.
__device__ void CopyRows(const Call& call, const Plan& plan, Shared& shared) {
  const int heads = plan.heads.count, out = heads + plan.out.count, all = out + plan.router;
  const int attended = call.kv_heads * call.group * kDim;
  int slot = 0;
  u32 round = 0;
  for (int n = 0; n < all; ++n) {
    if (round > 0) Wait(&shared.empty[slot], (round - 1) & 1);
    const Bf16* from;
    int columns = call.hidden;
    if (n < heads) {
      from = call.heads_weights + (long long)(plan.heads.first + n) * columns;
    } else if (n < out) {
      columns = attended;
      from = call.out_weights + (long long)(plan.out.first + n - heads) * columns;
    } else {
      from = call.router_weights + (long long)(blockIdx.x + (n - out) * gridDim.x) * columns;
    }
    Copy(Slot(shared, plan, slot), from, 2 * columns, &shared.full[slot]);
    if (++slot == call.slots) slot = 0, ++round;
  }
}

// Products of `count` rows, those copied from the `begin`-th on, with a vector: `xs` are this thread's elements of it.
// Each warp has the columns of its group and every kRowGroups-th row.
__device__ __forceinline__ void MultiplyRows(const Call& call, const Plan& plan, Shared& shared, int begin, int count,
                                             int columns, const float (&xs)[kPerThread][kVector]) {
  constexpr int kRows = 5;  // at a time, whose sums over a warp are computed side by side
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp % kColumnGroups;
  const int vectors = columns / kVector, first = group * 32 + lane;
  for (int base = warp / kColumnGroups; base < count; base += kRows * kRowGroups) {
    float sums[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sums[i] = 0;
      const int row = base + i * kRowGroups;
      if (row >= count) continue;
      const int round = (begin + row) / call.slots, slot = begin + row - round * call.slots;
      const uint4* weights = reinterpret_cast<const uint4*>(Slot(shared, plan, slot));
      Wait(&shared.full[slot], round & 1);
      float more = 0;
#pragma unroll
      for (int k = 0; k < kPerThread; ++k) {
        const int at = first + k * 32 * kColumnGroups;
        if (at >= vectors) break;
        float w[kVector];
        Unpack(weights[at], w);
#pragma unroll
        for (int j = 0; j < kVector; j += 2) sums[i] += w[j] * xs[k][j], more += w[j + 1] * xs[k][j + 1];
      }
      sums[i] += more;
      __syncwarp();
      if (lane == 0) Arrive(&shared.empty[slot]);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) sums[i] = WarpSum(sums[i]);
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        if (base + i * kRowGroups < count) shared.products[group][base + i * kRowGroups] = sums[i];
    }
  }
}

// The product of a row, after all warps have met.
__device__ __forceinline__ float Product(const Shared& shared, int row) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kColumnGroups; ++i) sum += shared.products[i][row];
  return sum;
}

}  // namespace jmx
