// The kernel, for the instruction set that this file is compiled for: once for each, under the name JMX_KERNEL.
//
// A tile is some rows of x by kStep rows of the weight, all sums in registers. Where x has few rows, weights are decoded
// between the load and the product. Where it has many, kStep rows of the weight are decoded once, into a panel that the
// first-level cache holds, and tiles of x run over it. Both add up in one order. Formats and types of x are parameters of
// one loop.
#include <algorithm>

#include "product.h"

#include "int4.h"
#include "integers.h"
#include "lanes.h"
#include "mxfp4.h"
#include "nvfp4.h"
#if defined(__AVX512BF16__)
#include "few.h"
#endif
#if defined(__AMX_BF16__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "amx.h"
#endif

namespace {

using jmx::kStep;
using jmx::Piece;

constexpr int64_t kRowBytes = 512 << 10;  // of x, which one panel after another meets: a part of the second-level cache
constexpr int kAhead = 8192;  // bytes of weights between what is asked for and what is read: some hundred nanoseconds
constexpr int64_t kAheadOfMany = 64 << 10;  // the same where a panel of them meets many rows, and hardware fetches what follows

// Where the weights of a tile come from: bytes, or a decoded panel (columns, steps).
template <typename L, typename Format>
struct Streamed {
  static constexpr bool kStreamed = true;
  const Format& format;
  template <bool tail>
  typename L::Part At(int column, int64_t step, int part) const {
    return L::template Decode<tail>(format, column, step, part);
  }
};

template <typename L>
struct Decoded {
  static constexpr bool kStreamed = false;
  const typename L::Part* parts;
  int64_t steps;
  template <bool>
  const typename L::Part& At(int column, int64_t step, int part) const {
    return parts[(column * steps + step) * L::kParts + part];
  }
};

// Steps through k, of which the last may be cut short.
template <typename L>
int64_t Steps(int64_t k) {
  constexpr int kWeights = L::kBlocks * jmx::kBlock;
  return (k + kWeights - 1) / kWeights;
}

// Elements from one row of x to the next, as `L` reads them.
template <typename L>
int64_t Stride(int64_t k) {
  if constexpr (L::kArranged) return Steps<L>(k);
  else return k;
}

// The tile of rows from `row` and columns from `column` of a piece, given x from its first row on.
template <typename L, int rows, typename Format, typename Weights>
inline void Tile(const Piece& piece, const typename L::X* x, const Format& format, const Weights& weights, int64_t row, int64_t column) {
  const int64_t k = piece.k, stride = Stride<L>(k);  // which stores to `out` could change, for all that the compiler knows
  typename L::Sum sums[rows][kStep] = {};
  const auto add = [&]<bool tail>(int64_t step) __attribute__((always_inline)) {
    for (int part = 0; part < L::kParts; ++part) {
      if constexpr (L::kArranged) {  // a part is several vectors: one at a time
        for (int n = 0; n < kStep; ++n) {
          const typename L::Part w = weights.template At<tail>(n, step, part);
          for (int m = 0; m < rows; ++m) sums[m][n] = L::Add(sums[m][n], w, L::template LoadX<tail>(x + m * stride, step, part, k));
        }
        continue;
      }
      typename L::Part w[kStep];
      for (int n = 0; n < kStep; ++n) w[n] = weights.template At<tail>(n, step, part);
      for (int m = 0; m < rows; ++m) {
        const auto a = L::template LoadX<tail>(x + m * stride, step, part, k);
        for (int n = 0; n < kStep; ++n) sums[m][n] = L::Add(sums[m][n], w[n], a);
      }
    }
  };
  const int64_t whole = k / (L::kBlocks * jmx::kBlock);
  for (int64_t step = 0; step < whole; ++step) {
    if constexpr (Weights::kStreamed) {  // a tile reads kStep rows side by side: ask for as much, in the order of memory
      constexpr int kBytes = L::kBlocks * jmx::kBlock / 2;
      for (int n = 0; n < kStep; n += 64 / kBytes < kStep ? 64 / kBytes : kStep)
        __builtin_prefetch(format.Values(0) + kAhead + (step * kStep + n) * kBytes);
      if (step * L::kBlocks % Format::kScalesEvery == 0)
        __builtin_prefetch(format.Ahead(kAhead / (jmx::kBlock / 2) + step * L::kBlocks * kStep));
    }
    add.template operator()<false>(step);
  }
  if (whole < Steps<L>(k)) add.template operator()<true>(whole);
  for (int m = 0; m < rows; ++m) {
    float totals[kStep];
    Totals<L::kLanes>(sums[m], totals);
    const float scale = piece.x_scales == nullptr ? 1 : piece.x_scales[row + m];
    float* out = piece.out + (row + m) * piece.out_stride + column;
    for (int n = 0; n < kStep; ++n)
      out[n] = Fused(totals[n] * format.Factor(n), scale, piece.bias == nullptr ? 0 : piece.bias[column + n]);
  }
}

// One tile of each number of rows up to `most`, of which the last may be fewer.
template <typename L, int most, typename Format, typename Weights>
inline void Rows(const Piece& piece, const typename L::X* x, int64_t rows, const Format& format, const Weights& weights, int64_t row, int64_t column) {
  if constexpr (most > 0) {
    for (; rows >= most; rows -= most, x += most * Stride<L>(piece.k), row += most)
      Tile<L, most>(piece, x, format, weights, row, column);
    if (rows > 0) Rows<L, most - 1>(piece, x, rows, format, weights, row, column);
  }
}

// How many rows of x panels are decoded for: as many as the second-level cache holds.
template <typename L>
int64_t MostRows(int64_t k) {
  return std::max<int64_t>(L::kTileRows, kRowBytes / std::max<int64_t>(1, Stride<L>(k) * static_cast<int64_t>(sizeof(typename L::X))));
}

// Bytes of rows of x in the order of `L`, and of a decoded panel behind them.
template <typename L>
int64_t ArrangedBytes(int64_t k) {
  constexpr int64_t kLine = 64;
  return L::kArranged ? (MostRows<L>(k) * Stride<L>(k) * static_cast<int64_t>(sizeof(typename L::X)) + kLine - 1) / kLine * kLine : 0;
}

template <typename L>
int64_t Room(int64_t k) {
  return ArrangedBytes<L>(k) + kStep * Steps<L>(k) * L::kParts * static_cast<int64_t>(sizeof(typename L::Part));
}

// `count` rows of x from `row` on, as `L` reads them.
template <typename L>
const typename L::X* Given(const Piece& piece, int64_t row, int64_t count) {
  typedef typename L::X X;
  if constexpr (L::kArranged) {
    X* arranged = reinterpret_cast<X*>(piece.scratch);
    for (int64_t m = 0; m < count; ++m)
      L::Arrange(reinterpret_cast<const int8_t*>(piece.x) + (row + m) * piece.k, piece.k, arranged + m * Stride<L>(piece.k));
    return arranged;
  } else {
    return reinterpret_cast<const X*>(piece.x) + row * piece.k;
  }
}

// kStep rows of the weight, decoded.
template <typename L, typename Format>
void Decode(const Piece& piece, int64_t column, typename L::Part* next) {
  const int64_t steps = Steps<L>(piece.k), whole = piece.k / (L::kBlocks * jmx::kBlock);
  for (int64_t n = column; n < column + kStep; ++n) {
    const Format format(piece, n);
    for (int64_t step = 0; step < steps; ++step)
      for (int part = 0; part < L::kParts; ++part)
        *next++ = step < whole ? L::template Decode<false>(format, 0, step, part) : L::template Decode<true>(format, 0, step, part);
  }
}

template <typename L, typename Format>
void Run(const Piece& piece) {
  typedef typename L::Part Part;
  static_assert(L::kFewRows <= L::kTileRows);
  if (piece.rows <= L::kFewRows) {
    const typename L::X* x = Given<L>(piece, 0, piece.rows);
    for (int64_t n = 0; n < piece.columns; n += kStep) {
      const Format format(piece, n);
      Rows<L, L::kFewRows>(piece, x, piece.rows, format, Streamed<L, Format>{format}, 0, n);
    }
    return;
  }
  Part* const panel = reinterpret_cast<Part*>(piece.scratch + ArrangedBytes<L>(piece.k));
  const int64_t parts = (piece.rows + MostRows<L>(piece.k) - 1) / MostRows<L>(piece.k);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = piece.rows * part / parts, rows = piece.rows * (part + 1) / parts - first;
    const typename L::X* x = Given<L>(piece, first, rows);
    const int64_t tiles = (rows + L::kTileRows - 1) / L::kTileRows;  // of as many rows each
    // Bytes further behind are asked for while these are multiplied: those behind the piece are likely the next one's.
    const int64_t bytes = piece.columns * (piece.k / 2), share = bytes / (tiles * (piece.columns / kStep)) + 1;
    const uint8_t *behind = piece.values + std::min(bytes, kAheadOfMany), *const end = behind + bytes;
    for (int64_t n = 0; n < piece.columns; n += kStep) {
      Decode<L, Format>(piece, n, panel);
      const Format format(piece, n);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        for (const uint8_t* stop = std::min(behind + share, end); behind < stop; behind += 64) __builtin_prefetch(behind);
        const int64_t m = rows * tile / tiles, count = rows * (tile + 1) / tiles - m;
        Rows<L, L::kTileRows>(piece, x + m * Stride<L>(piece.k), count, format, Decoded<L>{panel, Steps<L>(piece.k)}, first + m, n);
      }
    }
  }
}

#if defined(__AMX_BF16__)
constexpr char kName[] = "amx_bf16";
constexpr const jmx::Kernel* const* kBase = &jmx::kAvx512Bf16;
bool RunsHere() {
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;  // of edx
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16) == 0 || (d & kTiles) == 0) return false;
  // Linux gives a process the registers on request: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#elif defined(__AVX512BF16__)
constexpr char kName[] = "avx512_bf16";
constexpr const jmx::Kernel* const* kBase = nullptr;
bool RunsHere() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni");
}
#elif defined(__AVX512VNNI__)
constexpr char kName[] = "avx512_vnni";
constexpr const jmx::Kernel* const* kBase = &jmx::kAvx512;
bool RunsHere() { return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw"); }
#elif defined(__AVX512F__)
constexpr char kName[] = "avx512";
constexpr const jmx::Kernel* const* kBase = nullptr;
bool RunsHere() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"); }
#elif defined(__AVXVNNI__)
constexpr char kName[] = "avx_vnni";
constexpr const jmx::Kernel* const* kBase = &jmx::kAvx2;
bool RunsHere() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("avxvnni"); }
#elif defined(__AVX2__)
constexpr char kName[] = "avx2";
constexpr const jmx::Kernel* const* kBase = nullptr;
bool RunsHere() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
constexpr char kName[] = "portable";
constexpr const jmx::Kernel* const* kBase = nullptr;
bool RunsHere() { return true; }
#endif

template <typename L, typename Format>
constexpr jmx::Way kWay = {Room<L>, Run<L, Format>};

template <typename Format>
void RunIntegers(const Piece& piece) {
  if (piece.zero_points != nullptr) Run<Integers<true>, Format>(piece);
  else Run<Integers<false>, Format>(piece);
}

// The ways of a format. A kernel with a base has those alone that it has the better instructions for.
template <typename Format, bool integers>
constexpr jmx::Ways WaysOf() {
  jmx::Ways ways = {};
#if defined(__AMX_BF16__)
  ways.of[jmx::kBfloat16] = {Amx<Format>::Room, Amx<Format>::Run, Amx<Format>::kInARow};
#else
  if constexpr (integers) ways.of[jmx::kInt8] = {Room<Integers<true>>, RunIntegers<Format>};  // the one that needs more
#if defined(__AVX512BF16__)
  ways.of[jmx::kFloat32] = kWay<Floats<float>, Format>;
  ways.of[jmx::kBfloat16] = kWay<Bfloats, Format>;
  ways.of[jmx::kFewBfloat16] = {Few<Format>::Room, Few<Format>::Run};
#elif !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
  ways.of[jmx::kFloat32] = kWay<Floats<float>, Format>;
  ways.of[jmx::kBfloat16] = ways.of[jmx::kFewBfloat16] = kWay<Floats<uint16_t>, Format>;
#endif
#endif
  return ways;
}

constexpr jmx::Kernel kKernel = {
    kName, RunsHere, kBase,
    {WaysOf<Mxfp4, false>(), WaysOf<Nvfp4, false>(), WaysOf<Int4<Bfloat16>, true>(), WaysOf<Int4<Float16>, true>(), WaysOf<Int4<Float32>, true>()}};

}  // namespace

namespace jmx {
const Kernel* const JMX_KERNEL = &kKernel;
}
