// The rows of weights that a CTA is to multiply, and their products with a vector.
#pragma once

#include "primitives.cuh"

namespace jmx {

// A CTA's share of rows of a matrix, in units of some rows: as many as any other's, or one less.
struct Rows {
  int first, count;
  __device__ static Rows Of(int number, int unit) {
    const int units = number / unit, first = blockIdx.x * units / gridDim.x;
    return {first * unit, ((int)((blockIdx.x + 1) * units / gridDim.x) - first) * unit};
  }
};

// The CTA's rows, in the order in which they are copied: of both large matrices, then of the router's.
struct Plan {
  Rows heads, out;
  int router;  // rows, each gridDim.x after the last one
  int slot_bytes;

  __device__ explicit Plan(const Call& call)
      : heads(Rows::Of(call.kv_heads * (call.group + 2) * kDim, 1)),
        out(Rows::Of(call.hidden, 2)),
        router(((int)blockIdx.x < call.experts) ? (call.experts - 1 - (int)blockIdx.x) / (int)gridDim.x + 1 : 0),
        slot_bytes(SlotBytes(call.hidden, call.kv_heads * call.group * kDim)) {}
};

// Where the n-th of the CTA's rows is in shared memory, and in which round of all slots.
struct Place {
  int slot;
  u32 parity;
  __device__ Place(const Call& call, int n) {
    const int round = n * call.inverse >> 16;
    slot = n - round * call.slots, parity = round & 1;
  }
};

__device__ __forceinline__ unsigned char* Slot(Shared& shared, const Plan& plan, int slot) {
  return reinterpret_cast<unsigned char*>(&shared + 1) + slot * plan.slot_bytes;
}

// Copies all rows, one after the other: a slot is free when the row before in it was multiplied. No row depends on what
// is computed, so that memory is never idle while CTAs wait for each other.
__device__ void CopyRows(const Call& call, const Plan& plan, Shared& shared) {
  const int heads = plan.heads.count, out = heads + plan.out.count, all = out + plan.router;
  const int attended = call.kv_heads * call.group * kDim;
  for (int n = 0; n < all; ++n) {
    if (n >= kInFlight) {
      const Place before(call, n - kInFlight);
      Wait(&shared.full[before.slot], before.parity);
    }
    const Place place(call, n);
    if (n >= call.slots) Wait(&shared.empty[place.slot], place.parity ^ 1);
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
    Copy(Slot(shared, plan, place.slot), from, 2 * columns, &shared.full[place.slot]);
  }
}

// Stores a thread's eight elements of a vector for MultiplyRows.
__device__ __forceinline__ void StoreVector(Shared& shared, int at, const float (&x)[kVector]) {
  u32 high[4], low[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    high[j] = Pack(x[2 * j], x[2 * j + 1]);
    low[j] = Pack(x[2 * j] - Low(high[j]), x[2 * j + 1] - High(high[j]));
  }
  *reinterpret_cast<uint4*>(&shared.vector[0][at]) = {high[0], high[1], high[2], high[3]};
  *reinterpret_cast<uint4*>(&shared.vector[1][at]) = {low[0], low[1], low[2], low[3]};
}

// Products of `count` rows, those copied from the `begin`-th on, with the vector in shared memory, for Product. Each warp
// has every kWarps-th 32 columns. In tensor cores' terms A is the vector, in rows 0 and, with `exact`, 1; B are rows of
// weights. Of 32 columns lane 4 g + t has 8 t to 8 t + 7, for both. No load depends on a condition, so that all are on
// their way together: those beyond the last column are of the last ones, times zero.
template <bool exact>
__device__ __forceinline__ void MultiplyRows(const Call& call, const Plan& plan, Shared& shared, int begin, int count,
                                             int columns) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int first = warp * kTileColumns + t * kVector, stride = kWarps * kTileColumns, last = columns - kVector;
  uint4 x[kMostSteps];
#pragma unroll
  for (int i = 0; i < kMostSteps; ++i) {
    x[i] = *reinterpret_cast<const uint4*>(&shared.vector[exact ? g & 1 : 0][min(first + i * stride, last)]);
    if (g > (exact ? 1 : 0) || first + i * stride > last) x[i] = {0, 0, 0, 0};
  }
  for (int base = 0; base < count; base += kTileRows) {
    const Place place(call, begin + min(base + g, count - 1));
    const unsigned char* row = Slot(shared, plan, place.slot);
    WaitEach(&shared.full[place.slot], place.parity);
    __syncwarp();
    float sums[2][4] = {};
#pragma unroll
    for (int part = 0; part < kMostSteps; part += kStepsAtOnce) {
      if (part * stride >= columns) break;
      uint4 weights[kStepsAtOnce];
#pragma unroll
      for (int i = 0; i < kStepsAtOnce; ++i)
        weights[i] = *reinterpret_cast<const uint4*>(row + 2 * min(first + (part + i) * stride, last));
#pragma unroll
      for (int i = 0; i < kStepsAtOnce; ++i) {
        Multiply(sums[0], x[part + i].x, 0, x[part + i].y, 0, weights[i].x, weights[i].y);
        Multiply(sums[1], x[part + i].z, 0, x[part + i].w, 0, weights[i].z, weights[i].w);
      }
    }
    __syncwarp();
    if (t == 0 && base + g < count) Arrive(&shared.empty[place.slot]);
    float even = sums[0][0] + sums[1][0], odd = sums[0][1] + sums[1][1];
    if (exact) even += __shfl_xor_sync(~0u, even, 4), odd += __shfl_xor_sync(~0u, odd, 4);
    if (g == 0) shared.products[warp][base + 2 * t] = even, shared.products[warp][base + 2 * t + 1] = odd;
  }
}

// The product of a row, after all warps have met.
__device__ __forceinline__ float Product(const Shared& shared, int row) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += shared.products[i][row];
  return sum;
}

}  // namespace jmx
