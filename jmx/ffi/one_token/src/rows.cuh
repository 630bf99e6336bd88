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
  __device__ Place(const Call& call, int n) : slot(n % call.slots), parity(n / call.slots & 1) {}
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

// A vector as tensor cores take it: of every kWarps-th 32 elements those of lane 4 g + t from 8 t on, in column g = 0, and
// in column 1 what bfloat16 leaves of them. Other columns are zero.
struct Vector {
  u32 pairs[kMostSteps][4] = {};

  // Calls take(step, first element) for this thread's eights.
  template <typename Take>
  __device__ __forceinline__ static void ForSteps(int columns, Take&& take) {
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kMostSteps; ++i) {
      const int at = (warp + i * kWarps) * kTileColumns + t * kVector;
      if (at < columns) take(i, at);
    }
  }

  __device__ __forceinline__ void Set(int step, const float (&x)[kVector]) {
    const int column = threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u32 high = Pack(x[2 * j], x[2 * j + 1]);
      const u32 low = Pack(x[2 * j] - Low(high), x[2 * j + 1] - High(high));
      pairs[step][j] = column == 0 ? high : column == 1 ? low : 0;
    }
  }
};

// Products of `count` rows, those copied from the `begin`-th on, with a vector, for Product. Each warp has its columns.
__device__ __forceinline__ void MultiplyRows(const Call& call, const Plan& plan, Shared& shared, int begin, int count,
                                             int columns, const Vector& vector) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  for (int base = 0; base < count; base += kTileRows) {
    const int left = count - base;
    const Place mine(call, begin + base + min(lane, left - 1));
    if (lane < min(kTileRows, left)) Wait(&shared.full[mine.slot], mine.parity);
    __syncwarp();
    const bool first = g < left, second = g + 8 < left;
    const Place places[2] = {{call, begin + base + (first ? g : 0)}, {call, begin + base + (second ? g + 8 : 0)}};
    const unsigned char *row = Slot(shared, plan, places[0].slot), *other = Slot(shared, plan, places[1].slot);
    float sums[2][4] = {};
#pragma unroll
    for (int i = 0; i < kMostSteps; ++i) {
      const int step = (warp + i * kWarps) * kTileColumns, at = step + t * kVector;
      if (step >= columns) break;
      uint4 a = {}, b = {};
      if (first && at < columns) a = *reinterpret_cast<const uint4*>(row + 2 * at);
      if (second && at < columns) b = *reinterpret_cast<const uint4*>(other + 2 * at);
      Multiply(sums[0], a.x, b.x, a.y, b.y, vector.pairs[i][0], vector.pairs[i][1]);
      Multiply(sums[1], a.z, b.z, a.w, b.w, vector.pairs[i][2], vector.pairs[i][3]);
    }
    __syncwarp();
    if (lane < min(kTileRows, left)) Arrive(&shared.empty[mine.slot]);
    if (t == 0) {
      if (first) shared.products[warp][base + g] = sums[0][0] + sums[0][1] + sums[1][0] + sums[1][1];
      if (second) shared.products[warp][base + g + 8] = sums[0][2] + sums[0][3] + sums[1][2] + sums[1][3];
    }
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
