// Products of several tokens by tensor cores, with tokens as A: their columns are in registers, rows of weights come
// from shared memory. A warp multiplies every kFewWarps-th kPair columns, which are two halves.
#pragma once

#include "tile.cuh"

namespace jmx {

__device__ __forceinline__ int TokenOf() { return threadIdx.x % 32 / 4; }

// A vector times a norm's scale, in shared memory, and its rate.
__device__ __forceinline__ uint4 PackScaled(const float (&its)[kVector], const float* scale, float rate) {
  const float4 a = *reinterpret_cast<const float4*>(scale), b = *reinterpret_cast<const float4*>(scale + 4);
  uint4 v;
  v.x = Pack(its[0] * a.x * rate, its[1] * a.y * rate), v.y = Pack(its[2] * a.z * rate, its[3] * a.w * rate);
  v.z = Pack(its[4] * b.x * rate, its[5] * b.y * rate), v.w = Pack(its[6] * b.z * rate, its[7] * b.w * rate);
  return v;
}

// Vectors of the tokens that this lane, 4 g + t, gives to tensor cores: of token g, of each half of a pair the t-th.
// Sums over columns have these in any order. What is after the last column is zero, and what is of tokens that there
// are not; nothing here has a condition, so that all loads are on their way at once.
template <int kPairs>
struct Tokens {
  uint4 of[kPairs][2];

  __device__ static int VectorOf(int i, int half) { return PairOf(i) * (kPair / kVector) + half * 4 + threadIdx.x % 4; }
  __device__ static int PairOf(int i) { return i * kFewWarps + (int)threadIdx.x / 32; }

  // Before another thread asks for much more: what is loaded comes after what was asked for before.
  __device__ __forceinline__ void Load(const Bf16* from, int tokens, int columns) {
    const Bf16* its = from + min(TokenOf(), tokens - 1) * columns;
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        of[i][half] = LoadEarly((const void*)(its + min(VectorOf(i, half) * kVector, columns - kVector)));
  }

  // Waits for what was loaded.
  __device__ __forceinline__ void Clear(int tokens, int columns) {
    const int vectors = TokenOf() < tokens ? columns / kVector : 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (VectorOf(i, half) >= vectors) of[i][half] = {0, 0, 0, 0};
  }

  // x times the norm's scale, which is copied to shared memory. Leaves the warp's sums of squares there, from which
  // `RateOf` has the other factor of the norm: products do not wait for it.
  template <typename Shared>
  __device__ __forceinline__ void Scale(Shared& shared, int columns) {
    float squares = 0;
    Wait(&shared.scaled, 0);
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4& v = of[i][half];
        float its[kVector];
        Unpack(v, its);
#pragma unroll
        for (int j = 0; j < kVector; ++j) squares += its[j] * its[j];
        v = PackScaled(its, shared.scale + min(VectorOf(i, half) * kVector, columns - kVector), 1);
      }
    squares += __shfl_xor_sync(~0u, squares, 1);
    squares += __shfl_xor_sync(~0u, squares, 2);
    if (threadIdx.x % 4 == 0) shared.squares[threadIdx.x / 32][TokenOf()] = squares;
  }
};

// Of a token, once all warps' sums of squares are there.
template <typename Shared>
__device__ __forceinline__ float RateOf(const Shared& shared, int token, int columns, float epsilon) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kFewWarps; ++i) squares += shared.squares[i][token];
  return rsqrtf(squares / columns + epsilon);
}

// A warp's part of the products with kGroupRows rows. B has of row r the first half of a pair as column 2 r, the second
// as 2 r + 1; and A the tokens' first halves as rows, and then their second ones. So lane 4 g + t has of token g and
// row t one half in sums[.][0] and the other in sums[.][3]; what else is there means nothing.
template <int kPairs>
class Products {
 public:
  __device__ __forceinline__ void Add(int i, const Tokens<kPairs>& x, const uint4& w) {
    const uint4 &a = x.of[i][0], &b = x.of[i][1];
    Multiply(sums_[0], a.x, b.x, a.y, b.y, w.x, w.y);
    Multiply(sums_[1], a.z, b.z, a.w, b.w, w.z, w.w);
  }

  // Of a row for this lane, which is the vector's of a weight.
  __device__ static int RowOf() { return threadIdx.x % 32 / 8; }
  __device__ static int VectorOf(int i) { return Tokens<kPairs>::VectorOf(i, threadIdx.x / 4 % 2); }

  // All of rows in shared memory, half of them loaded at a time.
  __device__ __forceinline__ void AddRows(const unsigned char* rows, int columns, const Tokens<kPairs>& x) {
    const uint4* row = reinterpret_cast<const uint4*>(rows + RowOf() * columns * 2);
    const int last = columns / kVector - 1;
    constexpr int kAtOnce = kPairs / 2;
    static_assert(kPairs % 2 == 0);
#pragma unroll
    for (int i = 0; i < kPairs; i += kAtOnce) {
      uint4 w[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) w[j] = LoadShared(row + min(VectorOf(i + j), last));
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) Add(i + j, x, w[j]);
    }
  }

  // Stores the warp's sums of rows, the first of which is `row`.
  template <typename Shared>
  __device__ __forceinline__ void Store(Shared& shared, int row) const {
    const float sum = sums_[0][0] + sums_[0][3] + sums_[1][0] + sums_[1][3];
    shared.sums[threadIdx.x / 32][TokenOf()][row + threadIdx.x % 4] = sum;
  }

 private:
  float sums_[2][4] = {};
};

template <typename Shared>
__device__ __forceinline__ float SumOfWarps(const Shared& shared, int token, int row) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kFewWarps; ++i) sum += shared.sums[i][token][row];
  return sum;
}

template <int kRows>
class FewRing : public Slots<kFewWarps, kRows> {
  using Base = Slots<kFewWarps, kRows>;

 public:
  using Base::Base;

  // Leaves the sums of all warps in shared memory. The number of slots is a multiple of copies of a group.
  template <typename Shared, int kPairs>
  __device__ __forceinline__ void Multiply(Shared& shared, const Tokens<kPairs>& x) const {
    constexpr int kCopies = kGroupRows / kRows;  // of a group
    int slot = 0, parity = 0;
    for (int n = 0; n < this->groups_; ++n) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) Wait(Base::Full(slot + i), parity);
      Products<kPairs> products;
      products.AddRows(this->Slot(slot), this->columns_, x);
      products.Store(shared, n * kGroupRows);  // after which rows have been read
      __syncwarp();
      if (const int lane = threadIdx.x % 32; lane < kCopies) Arrive(this->Empty(slot + lane));
      slot += kCopies;
      if (slot == this->number_) slot = 0, parity ^= 1;
    }
    Sync<kFewThreads>();
  }
};

using FewHeadsRing = FewRing<kGroupRows>;
using FewOutRing = FewRing<1>;

}  // namespace jmx
