// The kernel, for the instruction set that this file is compiled for: once for each, under the name JMX_KERNEL.
//
// A tile is some rows of x by kStep rows of the weight, all sums in registers. Where x has few rows, weights are decoded
// between the load and the product. Where it has many, a panel of weights is decoded once, into what the second-level
// cache holds, and tiles run over it. Both add up in one order.
#include "product.h"

#include "lanes.h"
#if defined(__AVX512BF16__)
#include "few.h"
#endif

namespace {

using jmx::kBlock;
using jmx::kStep;
using jmx::Piece;

#if defined(__AVX512F__)
constexpr int kLanes = 16, kTileRows = 6, kFewRows = 4;  // 32 registers
#elif defined(__AVX2__)
constexpr int kLanes = 8, kTileRows = 3, kFewRows = 2;  // 16 registers
#else
constexpr int kLanes = 4, kTileRows = 4, kFewRows = 4;
#endif

constexpr int kAhead = 8192;  // bytes of weights between what is asked for and what is read: some hundred nanoseconds

// Where the weights of a tile come from: bytes, or a decoded panel (columns, k).
template <typename L>
struct Packed {
  static constexpr bool kStreamed = true;
  const uint8_t *values, *scales;
  int64_t blocks;
  typename L::Part operator()(int column, int64_t block, int part) const {
    const int64_t at = column * blocks + block;
    return L::Decode(values + at * (kBlock / 2), scales + at, part);
  }
};

template <typename L>
struct Decoded {
  static constexpr bool kStreamed = false;
  const typename L::Part* parts;
  int64_t blocks;
  const typename L::Part& operator()(int column, int64_t block, int part) const {
    return parts[(column * blocks + block) * L::kParts + part];
  }
};

template <typename L, typename X, int rows, typename Weights>
inline void Tile(const X* x, const Weights weights, const float* bias, const Piece& piece, float* out) {
  const int64_t k = piece.k;  // which stores to `out` could change, for all that the compiler knows
  typename L::Sum sums[rows][kStep] = {};
  for (int64_t block = 0; block < k / kBlock; ++block) {
    if constexpr (Weights::kStreamed) {  // a tile reads kStep rows side by side: ask for as much, in the order of memory
      __builtin_prefetch(weights.values + kAhead + block * (kStep * kBlock / 2));
      if (block % 16 == 0) __builtin_prefetch(weights.scales + kAhead / 16 + block * kStep);
    }
    for (int part = 0; part < L::kParts; ++part) {
      typename L::Part w[kStep];
      for (int n = 0; n < kStep; ++n) w[n] = weights(n, block, part);
      for (int m = 0; m < rows; ++m) {
        const typename L::Part a = L::LoadX(x + m * k + block * kBlock + part * (kBlock / L::kParts));
        for (int n = 0; n < kStep; ++n) sums[m][n] = L::Add(sums[m][n], w[n], a);
      }
    }
  }
  for (int m = 0; m < rows; ++m) {
    float totals[kStep];
    Totals<L::kLanes>(sums[m], totals);
    for (int n = 0; n < kStep; ++n) out[m * piece.out_stride + n] = totals[n] + (bias == nullptr ? 0.0f : bias[n]);
  }
}

// One tile of each number of rows up to `most`, of which the last may be fewer.
template <typename L, typename X, int most, typename Weights>
inline void Rows(int64_t rows, const X* x, const Weights& weights, const float* bias, const Piece& piece, float* out) {
  if constexpr (most > 0) {
    for (; rows >= most; rows -= most, x += most * piece.k, out += most * piece.out_stride)
      Tile<L, X, most>(x, weights, bias, piece, out);
    if (rows > 0) Rows<L, X, most - 1>(rows, x, weights, bias, piece, out);
  }
}

template <typename L, typename X>
void Run(const Piece& piece) {
  const X* x = reinterpret_cast<const X*>(piece.x);
  typedef typename L::Part Part;
  const int64_t blocks = piece.k / kBlock;
  if (piece.rows > kFewRows) {
    Part* panel = reinterpret_cast<Part*>(piece.scratch);
    for (int64_t n = 0; n < piece.columns; ++n) {
      const Packed<L> packed{piece.values + n * (piece.k / 2), piece.scales + n * blocks, blocks};
      for (int64_t block = 0; block < blocks; ++block)
        for (int part = 0; part < L::kParts; ++part) *panel++ = packed(0, block, part);
    }
  }
  // Rows outside, so that a tile's rows stay in the first-level cache while the panel goes by.
  if (piece.rows <= kFewRows) {
    for (int64_t n = 0; n < piece.columns; n += kStep) {
      const Packed<L> packed{piece.values + n * (piece.k / 2), piece.scales + n * blocks, blocks};
      Rows<L, X, kFewRows>(piece.rows, x, packed, piece.bias == nullptr ? nullptr : piece.bias + n, piece, piece.out + n);
    }
    return;
  }
  const Part* panel = reinterpret_cast<const Part*>(piece.scratch);
  for (int64_t m = 0; m < piece.rows; m += kTileRows) {
    const int64_t rows = piece.rows - m < kTileRows ? piece.rows - m : kTileRows;
    for (int64_t n = 0; n < piece.columns; n += kStep) {
      const Decoded<L> decoded{panel + n * blocks * L::kParts, blocks};
      const float* bias = piece.bias == nullptr ? nullptr : piece.bias + n;
      Rows<L, X, kTileRows>(rows, x + m * piece.k, decoded, bias, piece, piece.out + m * piece.out_stride + n);
    }
  }
}

#if defined(__AVX512BF16__)
constexpr char kName[] = "avx512_bf16";
bool RunsHere() { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw"); }
#elif defined(__AVX512F__)
constexpr char kName[] = "avx512";
bool RunsHere() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"); }
#elif defined(__AVX2__)
constexpr char kName[] = "avx2";
bool RunsHere() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
constexpr char kName[] = "portable";
bool RunsHere() { return true; }
#endif

// Bytes of a decoded panel.
template <typename L>
int64_t Room(int64_t columns, int64_t k) {
  return columns * (k / kBlock) * L::kParts * sizeof(typename L::Part);
}

template <typename L, typename X>
constexpr jmx::Way kWay = {Room<L>, Run<L, X>};

#if defined(__AVX512BF16__)
constexpr jmx::Way kBfloats = kWay<Bfloats, uint16_t>, kFewBfloats = {Few::Room, Few::Run};
#else
constexpr jmx::Way kBfloats = kWay<Floats<kLanes, uint16_t>, uint16_t>, kFewBfloats = kBfloats;
#endif

const jmx::Kernel kKernel = {kName, RunsHere, {kWay<Floats<kLanes, float>, float>, kBfloats, kFewBfloats}};

}  // namespace

namespace jmx {
const Kernel* const JMX_KERNEL = &kKernel;
}
