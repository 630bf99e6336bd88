// Rows of weights and their products with a vector, by one CTA.
#pragma once

#include "primitives.cuh"

namespace jmx {

// Elements of the vector that a thread multiplies: of each kThreads vectors one.
struct Elements {
  float of[kMostSteps][kVector];
};

// A thread's part of the products of kGroupRows rows in shared memory, whose vectors are loaded side by side.
__device__ __forceinline__ void MultiplyRows(const unsigned char* rows, int columns, const Elements& x, float* sums) {
  const int vectors = columns / kVector;
  float even[kGroupRows] = {}, odd[kGroupRows] = {};
#pragma unroll
  for (int i = 0; i < kMostSteps; ++i) {
    if (i * kThreads >= vectors) break;
    uint4 of_rows[kGroupRows];
#pragma unroll
    for (int row = 0; row < kGroupRows; ++row) {
      const uint4* its = reinterpret_cast<const uint4*>(rows) + row * vectors;
      of_rows[row] = LoadShared(its + min(i * kThreads + (int)threadIdx.x, vectors - 1));
    }
#pragma unroll
    for (int row = 0; row < kGroupRows; ++row) {
      float w[kVector];
      Unpack(of_rows[row], w);
#pragma unroll
      for (int j = 0; j < kVector; j += 2) even[row] += w[j] * x.of[i][j], odd[row] += w[j + 1] * x.of[i][j + 1];
    }
  }
#pragma unroll
  for (int row = 0; row < kGroupRows; ++row) sums[row] = even[row] + odd[row];
}

// kOutRows of them, all in shared memory at once.
class Tile {
 public:
  __device__ Tile(const Bf16* weights, int columns) : weights_(weights), columns_(columns) {
    if (threadIdx.x == 0) {
      for (int row = 0; row < kOutRows; ++row) InitBarrier(Full(row), 1);
      FenceBarriers();
    }
    __syncthreads();
  }

  // Asks for the rows, some at a time. By one thread.
  __device__ void Ask() const {
    for (int row = 0; row < kOutRows; ++row) {
      if (row >= kOutAhead) Wait(Full(row - kOutAhead), 0);
      Copy(Slot(row), weights_ + (long long)(Row() + row) * columns_, columns_ * 2, Full(row));
    }
  }

  // The tile's first row.
  __device__ static int Row() { return blockIdx.x * kOutRows; }

  // A row's product in each of the first kOutRows threads; `squares` becomes the sum of all threads'.
  __device__ float Multiply(const Elements& x, float& squares) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sums[kOutRows];
#pragma unroll
    for (int first = 0; first < kOutRows; first += kGroupRows) {
#pragma unroll
      for (int i = 0; i < kGroupRows; ++i) Wait(Full(first + i), 0);
      MultiplyRows(Slot(first), columns_, x, sums + first);
    }
    float(&of_warps)[kWarps][kOutRows + 1] = *reinterpret_cast<float(*)[kWarps][kOutRows + 1]>(SharedMemory() + 128);
#pragma unroll
    for (int row = 0; row < kOutRows; ++row) sums[row] = WarpSum(sums[row]);
    squares = WarpSum(squares);
    if (lane == 0) {
#pragma unroll
      for (int row = 0; row < kOutRows; ++row) of_warps[warp][row] = sums[row];
      of_warps[warp][kOutRows] = squares;
    }
    Sync();
    float sum = 0;
    squares = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += of_warps[i][threadIdx.x % kOutRows], squares += of_warps[i][kOutRows];
    return sum;
  }

 private:
  __device__ static u64* Full(int row) { return reinterpret_cast<u64*>(SharedMemory()) + row; }
  __device__ unsigned char* Slot(int row) const { return SharedMemory() + kBeforeRows + row * columns_ * 2; }

  const Bf16* const weights_;
  const int columns_;
};

// Any number of rows, a multiple of kGroupRows, kRows in each copy. They pass through a ring of slots in shared memory,
// `before` bytes after its beginning, whose barriers are at the beginning. kReaders warps read a slot before it is
// free.
template <int kReaders, int kRows = kGroupRows>
class Slots {
 public:
  __device__ Slots(const Bf16* weights, int columns, int rows, int number, int before)
      : columns_(columns), bytes_(kRows * columns * 2), number_(number), before_(before) {
    const int groups = rows / kGroupRows, begin = (int)blockIdx.x * groups / (int)gridDim.x;
    row_ = begin * kGroupRows;
    groups_ = ((int)blockIdx.x + 1) * groups / (int)gridDim.x - begin;
    weights_ = weights + (long long)row_ * columns;
  }

  // The CTA's first row, and how many it has.
  __device__ int Row() const { return row_; }
  __device__ int Count() const { return groups_ * kGroupRows; }

  // By one thread, before all threads meet.
  __device__ void Begin() const {
    for (int i = 0; i < number_; ++i) InitBarrier(Full(i), 1), InitBarrier(Empty(i), kReaders);
    InitBarrier(Hurry(), 1);
    FenceBarriers();
  }

  // Asks for all rows, by each copy when its slot is free; at most `ahead` are on their way until `Hurry` has been
  // arrived at. By one thread, after all have met, as each copy takes it 0.3 us.
  __device__ void AskForAll(int ahead = 1 << 20) const {
    bool slowly = true;
    for (int n = 0; n < Count() / kRows; ++n) {
      const int slot = n % number_, last = n - ahead;
      if (n >= number_) Wait(Empty(slot), n / number_ % 2 ^ 1);
      while (slowly && last >= 0 && !Test(Full(last % number_), last / number_ % 2)) slowly = !Test(Hurry(), 0);
      Copy(Slot(slot), weights_ + (long long)n * kRows * columns_, bytes_, Full(slot));
    }
  }
  __device__ u64* Hurry() const { return Full(2 * number_); }

 protected:
  __device__ static u64* Full(int slot) { return reinterpret_cast<u64*>(SharedMemory()) + slot; }
  __device__ u64* Empty(int slot) const { return Full(number_ + slot); }
  __device__ unsigned char* Slot(int slot) const { return SharedMemory() + before_ + slot * bytes_; }

  const Bf16* weights_;
  const int columns_, bytes_;  // of a copy
  const int number_, before_;
  int row_, groups_;
};

// The product of one token.
class Ring : public Slots<kWarps> {
 public:
  __device__ Ring(const Bf16* weights, int columns, int rows) : Slots(weights, columns, rows, kSlots, kBeforeRing) {}

  // As Tile's: the product of the CTA's n-th row in its n-th thread.
  __device__ float Multiply(const Elements& x, float& squares) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float(&of_warps)[kWarps][kMostRows + 1] = *reinterpret_cast<float(*)[kWarps][kMostRows + 1]>(SharedMemory() + 128);
    squares = WarpSum(squares);
    if (lane == 0) of_warps[warp][kMostRows] = squares;
    for (int n = 0; n < groups_; ++n) {
      const int slot = n % kSlots;
      Wait(Full(slot), n / kSlots % 2);
      float sums[kGroupRows];
      MultiplyRows(Slot(slot), columns_, x, sums);
      __syncwarp();
      if (lane == 0) Arrive(Empty(slot));
#pragma unroll
      for (int row = 0; row < kGroupRows; ++row) {
        sums[row] = WarpSum(sums[row]);
        if (lane == 0) of_warps[warp][n * kGroupRows + row] = sums[row];
      }
    }
    Sync();
    float sum = 0;
    squares = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += of_warps[i][threadIdx.x % kMostRows], squares += of_warps[i][kMostRows];
    return sum;
  }
};

}  // namespace jmx
