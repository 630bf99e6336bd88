// A tile of rows of weights and their products with a vector, by one CTA.
#pragma once

#include "primitives.cuh"

namespace jmx {

// Elements of the vector that a thread multiplies: of each kThreads vectors one.
struct Elements {
  float of[kMostSteps][kVector];
};

// `rows` of them, copied in `parts`.
template <int rows, int parts>
class Tile {
 public:
  __device__ Tile(const Bf16* weights, int columns) : weights_(weights), columns_(columns) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < parts; ++i) InitBarrier(Full() + i, 1);
      FenceBarriers();
    }
    __syncthreads();
  }

  // Asks for all rows, which are copied to shared memory; each warp for every kWarps-th part, as a copy takes 0.3 us of
  // the thread that asks for it.
  __device__ void Ask() const {
    if (threadIdx.x % 32 == 0)
      for (int i = threadIdx.x / 32; i < parts; i += kWarps) Ask(i);
  }

  // The same by one thread, with so many parts on their way at a time.
  __device__ void AskInTurn(int most) const {
    for (int i = 0; i < parts; ++i) {
      if (i >= most) Wait(Full() + i - most, 0);
      Ask(i);
    }
  }

  // The tile's first row.
  __device__ static int Row() { return blockIdx.x * rows; }

  // A row's product in each of the first `rows` threads; `squares` becomes the sum of all threads'.
  __device__ float Multiply(const Elements& x, float& squares) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, vectors = columns_ / kVector;
    float sums[rows];
#pragma unroll
    for (int row = 0; row < rows; ++row) {
      const uint4* from = reinterpret_cast<const uint4*>(SharedMemory() + kBeforeRows + row * columns_ * 2);
      if (row % (rows / parts) == 0) Wait(Full() + row / (rows / parts), 0);
      float even = 0, odd = 0;
#pragma unroll
      for (int i = 0; i < kMostSteps; ++i) {
        if (i * kThreads >= vectors) break;
        float w[kVector];
        Unpack(from[min(i * kThreads + (int)threadIdx.x, vectors - 1)], w);
#pragma unroll
        for (int j = 0; j < kVector; j += 2) even += w[j] * x.of[i][j], odd += w[j + 1] * x.of[i][j + 1];
      }
      sums[row] = even + odd;
    }
    float(&of_warps)[kWarps][rows + 1] = *reinterpret_cast<float(*)[kWarps][rows + 1]>(SharedMemory() + 128);
#pragma unroll
    for (int row = 0; row < rows; ++row) sums[row] = WarpSum(sums[row]);
    squares = WarpSum(squares);
    if (lane == 0) {
#pragma unroll
      for (int row = 0; row < rows; ++row) of_warps[warp][row] = sums[row];
      of_warps[warp][rows] = squares;
    }
    Sync();
    float sum = 0;
    squares = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += of_warps[i][threadIdx.x % rows], squares += of_warps[i][rows];
    return sum;
  }

 private:
  __device__ static u64* Full() { return reinterpret_cast<u64*>(SharedMemory()); }

  __device__ void Ask(int part) const {
    const int bytes = rows / parts * columns_ * 2;
    Copy(SharedMemory() + kBeforeRows + part * bytes, weights_ + (long long)Row() * columns_ + part * (bytes / 2), bytes,
         Full() + part);
  }

  const Bf16* const weights_;
  const int columns_;
};

}  // namespace jmx
