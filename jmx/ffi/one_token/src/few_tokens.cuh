// Products of several tokens by tensor cores, with tokens as A: their columns are in registers, rows of weights come from
// shared memory. A warp multiplies every kFewWarps-th kPair columns, which are two halves.
#pragma once

#include "tile.cuh"

namespace jmx {

// Vectors of the tokens that this lane, 4 g + t, gives to tensor cores: of token g, of each half of a pair the t-th. Sums
// over columns have these in any order.
struct Tokens {
  uint4 of[kMostPairs][2];

  __device__ static int PairOf(int i) { return i * kFewWarps + (int)threadIdx.x / 32; }
  __device__ static int TokenOf() { return threadIdx.x % 32 / 4; }
  __device__ static int VectorOf(int i, int half) { return PairOf(i) * (kPair / kVector) + half * 4 + threadIdx.x % 4; }

  // Zeros after the last column, and for tokens that there are not. Loads have no conditions, so that all are on their way
  // at once.
  __device__ __forceinline__ void Load(const Bf16* from, int tokens, int columns) {
#pragma unroll
    for (int i = 0; i < kMostPairs; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = min(TokenOf(), tokens - 1), at = min(VectorOf(i, half) * kVector, columns - kVector);
        of[i][half] = LoadEarly((const void*)(from + token * columns + at));
      }
#pragma unroll
    for (int i = 0; i < kMostPairs; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (TokenOf() >= tokens || VectorOf(i, half) * kVector >= columns) of[i][half] = {0, 0, 0, 0};
  }

  // norm(x), whose scale is in shared memory, and which nobody else reads after it.
  template <typename Shared>
  __device__ __forceinline__ void Normalize(Shared& shared, int columns, float epsilon) {
    const int warp = threadIdx.x / 32, token = TokenOf();
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kMostPairs; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float its[kVector];
        Unpack(of[i][half], its);
#pragma unroll
        for (int j = 0; j < kVector; ++j) squares += its[j] * its[j];
      }
    squares += __shfl_xor_sync(~0u, squares, 1);
    squares += __shfl_xor_sync(~0u, squares, 2);
    if (threadIdx.x % 4 == 0) shared.squares[warp][token] = squares;
    Sync<kFewThreads>();
    squares = 0;
#pragma unroll
    for (int i = 0; i < kFewWarps; ++i) squares += shared.squares[i][token];
    const float rate = rsqrtf(squares / columns + epsilon);
#pragma unroll
    for (int i = 0; i < kMostPairs; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = VectorOf(i, half) * kVector;
        if (at >= columns) continue;
        const float4 a = *reinterpret_cast<const float4*>(shared.scale + at);
        const float4 b = *reinterpret_cast<const float4*>(shared.scale + at + 4);
        uint4& v = of[i][half];
        // Else what was unpacked before would be kept, twice as many registers.
        asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
        float its[kVector];
        Unpack(v, its);
        of[i][half].x = Pack(its[0] * a.x * rate, its[1] * a.y * rate);
        of[i][half].y = Pack(its[2] * a.z * rate, its[3] * a.w * rate);
        of[i][half].z = Pack(its[4] * b.x * rate, its[5] * b.y * rate);
        of[i][half].w = Pack(its[6] * b.z * rate, its[7] * b.w * rate);
      }
    Sync<kFewThreads>();
  }
};

// Copies a norm's scale to shared memory.
__device__ __forceinline__ void CopyScale(const float* from, int columns, float* to) {
#pragma unroll
  for (int at = threadIdx.x * 4; at < columns; at += kFewThreads * 4)
    *reinterpret_cast<uint4*>(to + at) = LoadEarly((const void*)(from + at));
}

// A warp's part of the products with kGroupRows rows. B has of row r the first half of a pair as column 2 r, the second
// as 2 r + 1; and A the tokens' first halves as rows, and then their second ones. So lane 4 g + t has of token g and row t
// one half in sums[.][0] and the other in sums[.][3]; what else is there means nothing.
class Products {
 public:
  __device__ __forceinline__ void Add(int i, const Tokens& x, const uint4& w) {
    const uint4 &a = x.of[i][0], &b = x.of[i][1];
    Multiply(sums_[0], a.x, b.x, a.y, b.y, w.x, w.y);
    Multiply(sums_[1], a.z, b.z, a.w, b.w, w.z, w.w);
  }

  // Of a row for this lane, which is the vector's of a weight.
  __device__ static int RowOf() { return threadIdx.x % 32 / 8; }
  __device__ static int VectorOf(int i) { return Tokens::VectorOf(i, threadIdx.x / 4 % 2); }

  // All of rows in shared memory.
  __device__ __forceinline__ void AddRows(const unsigned char* rows, int columns, const Tokens& x) {
    const int vectors = columns / kVector;
    const uint4* row = reinterpret_cast<const uint4*>(rows + RowOf() * columns * 2);
#pragma unroll
    for (int i = 0; i < kMostPairs; ++i) {
      if (Tokens::PairOf(i) * kPair >= columns) break;
      Add(i, x, row[min(VectorOf(i), vectors - 1)]);
    }
  }

  __device__ float Sum() const { return sums_[0][0] + sums_[0][3] + sums_[1][0] + sums_[1][3]; }

 private:
  float sums_[2][4] = {};
};

// Stores a warp's sums of kGroupRows rows, the first of which is `row`.
template <typename Shared>
__device__ __forceinline__ void StoreSums(Shared& shared, int row, const Products& products) {
  shared.sums[threadIdx.x / 32][Tokens::TokenOf()][row + threadIdx.x % 4] = products.Sum();
}

template <typename Shared>
__device__ __forceinline__ float SumOfWarps(const Shared& shared, int token, int row) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kFewWarps; ++i) sum += shared.sums[i][token][row];
  return sum;
}

class FewRing : public Slots<kFewWarps, kFewSlots, kBeforeFewRing> {
 public:
  using Slots::Slots;

  // Leaves the sums of all warps in shared memory.
  __device__ __forceinline__ void Multiply(FewShared<kMostRows>& shared, const Tokens& x) const {
    for (int n = 0; n < groups_; ++n) {
      const int slot = n % kFewSlots;
      Wait(Full(slot), n / kFewSlots % 2);
      Products products;
      products.AddRows(Slot(slot), columns_, x);
      __syncwarp();
      if (threadIdx.x % 32 == 0) Arrive(Empty(slot));
      StoreSums(shared, n * kGroupRows, products);
    }
    Sync<kFewThreads>();
  }
};

}  // namespace jmx
