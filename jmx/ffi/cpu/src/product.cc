// The microkernels of one instruction set: this file is compiled once for each, under the name JMX_INSTRUCTION_SET.
//
// A register tile is some rows of x by kTileColumns rows of the weight, with all sums in registers. Where x has few
// rows, weights are decoded between load and product. Where it has many, kTileColumns rows of the weight are decoded
// once, into a panel that fits the L1 cache and is multiplied by all tiles of x. Both add in the same order. The format
// and the type of x are template parameters of one loop.
#include <algorithm>

#include "product.h"

#include "int4.h"
#include "integers.h"
#include "lanes.h"
#include "mxfp4.h"
#include "nvfp4.h"
#include "processor.h"
#if defined(__AVX512BF16__)
#include "few.h"
#endif
#if defined(__AMX_BF16__)
#include "amx.h"
#endif

namespace {

using jmx::kTileColumns;
using jmx::Gemm;

constexpr int64_t kXBytes = 512 << 10;  // x that all panels are multiplied by in turn: a part of the L2 cache
constexpr int kPrefetchBytes = 8192;  // how far prefetches are ahead of loads of weights: some hundred nanoseconds
constexpr int64_t kPanelPrefetchBytes = 64 << 10;  // the same for panels, which hardware prefetches, too

// The source of the weights of a tile: bytes, decoded when used; or a decoded panel (columns, steps).
template <typename Lanes, typename Format>
struct StreamedWeights {
  static constexpr bool kStreamed = true;
  const Format& format;
  template <bool tail>
  typename Lanes::Part At(int column, int64_t step, int part) const {
    return Lanes::template Decode<tail>(format, column, step, part);
  }
};

template <typename Lanes>
struct DecodedPanel {
  static constexpr bool kStreamed = false;
  const typename Lanes::Part* parts;
  int64_t steps;
  template <bool>
  const typename Lanes::Part& At(int column, int64_t step, int part) const {
    return parts[(column * steps + step) * Lanes::kParts + part];
  }
};

// Steps along k, of which the last may be partial.
template <typename Lanes>
int64_t Steps(int64_t k) {
  constexpr int kWeights = Lanes::kBlocks * jmx::kBlock;
  return (k + kWeights - 1) / kWeights;
}

// Elements of `Lanes::X` from one row of x to the next.
template <typename Lanes>
int64_t Stride(int64_t k) {
  if constexpr (Lanes::kPacksX) return Steps<Lanes>(k);
  else return k;
}

// Computes the tile at (`row`, `column`) of the result; `x` is its first row.
template <typename Lanes, int rows, typename Format, typename Weights>
inline void RunTile(const Gemm& gemm, const typename Lanes::X* x, const Format& format, const Weights& weights,
                    int64_t row, int64_t column) {
  // Read once: for the compiler, stores to `out` might change them.
  const int64_t k = gemm.k, stride = Stride<Lanes>(k);
  typename Lanes::Sum sums[rows][kTileColumns] = {};
  const auto add = [&]<bool tail>(int64_t step) __attribute__((always_inline)) {
    for (int part = 0; part < Lanes::kParts; ++part) {
      if constexpr (Lanes::kPacksX) {  // a part is several vectors, so one at a time is in registers
        for (int n = 0; n < kTileColumns; ++n) {
          const typename Lanes::Part w = weights.template At<tail>(n, step, part);
          for (int m = 0; m < rows; ++m)
            sums[m][n] = Lanes::Add(sums[m][n], w, Lanes::template LoadX<tail>(x + m * stride, step, part, k));
        }
        continue;
      }
      typename Lanes::Part w[kTileColumns];
      for (int n = 0; n < kTileColumns; ++n) w[n] = weights.template At<tail>(n, step, part);
      for (int m = 0; m < rows; ++m) {
        const auto a = Lanes::template LoadX<tail>(x + m * stride, step, part, k);
        for (int n = 0; n < kTileColumns; ++n) sums[m][n] = Lanes::Add(sums[m][n], w[n], a);
      }
    }
  };
  const int64_t whole = k / (Lanes::kBlocks * jmx::kBlock);
  for (int64_t step = 0; step < whole; ++step) {
    if constexpr (Weights::kStreamed) {  // prefetches as much as the kTileColumns rows read, in memory order
      constexpr int kBytes = Lanes::kBlocks * jmx::kBlock / 2;
      for (int n = 0; n < kTileColumns; n += 64 / kBytes < kTileColumns ? 64 / kBytes : kTileColumns)
        __builtin_prefetch(format.Values(0) + kPrefetchBytes + (step * kTileColumns + n) * kBytes);
      if (step * Lanes::kBlocks % Format::kScalesEvery == 0)
        __builtin_prefetch(
            format.ScaleAddress(kPrefetchBytes / (jmx::kBlock / 2) + step * Lanes::kBlocks * kTileColumns));
    }
    add.template operator()<false>(step);
  }
  if (whole < Steps<Lanes>(k)) add.template operator()<true>(whole);
  for (int m = 0; m < rows; ++m) {
    float totals[kTileColumns];
    HorizontalSums<Lanes::kLanes>(sums[m], totals);
    const float scale = gemm.x_scales == nullptr ? 1 : gemm.x_scales[row + m];
    float* out = gemm.out + (row + m) * gemm.out_stride + column;
    for (int n = 0; n < kTileColumns; ++n)
      out[n] = MultiplyAdd(totals[n] * format.Factor(n), scale, gemm.bias == nullptr ? 0 : gemm.bias[column + n]);
  }
}

// Tiles of `max_rows` rows, then one with the rows that are left.
template <typename Lanes, int max_rows, typename Format, typename Weights>
inline void RunTiles(const Gemm& gemm, const typename Lanes::X* x, int64_t rows, const Format& format,
                     const Weights& weights, int64_t row, int64_t column) {
  if constexpr (max_rows > 0) {
    for (; rows >= max_rows; rows -= max_rows, x += max_rows * Stride<Lanes>(gemm.k), row += max_rows)
      RunTile<Lanes, max_rows>(gemm, x, format, weights, row, column);
    if (rows > 0) RunTiles<Lanes, max_rows - 1>(gemm, x, rows, format, weights, row, column);
  }
}

// Rows of x that a panel is decoded for: as many as the L2 cache holds.
template <typename Lanes>
int64_t MaxPanelRows(int64_t k) {
  return std::max<int64_t>(
      Lanes::kTileRows,
      kXBytes / std::max<int64_t>(1, Stride<Lanes>(k) * static_cast<int64_t>(sizeof(typename Lanes::X))));
}

// Scratch bytes for packed rows of x. A decoded panel follows them.
template <typename Lanes>
int64_t PackedXBytes(int64_t k) {
  constexpr int64_t kLine = 64;
  return Lanes::kPacksX ? (MaxPanelRows<Lanes>(k) * Stride<Lanes>(k) * static_cast<int64_t>(sizeof(typename Lanes::X)) +
                           kLine - 1) /
                              kLine * kLine
                        : 0;
}

template <typename Lanes>
int64_t ScratchBytes(int64_t k) {
  return PackedXBytes<Lanes>(k) +
         kTileColumns * Steps<Lanes>(k) * Lanes::kParts * static_cast<int64_t>(sizeof(typename Lanes::Part));
}

// `count` rows of x from `row` on, packed if `Lanes` requires it.
template <typename Lanes>
const typename Lanes::X* PreparedX(const Gemm& gemm, int64_t row, int64_t count) {
  typedef typename Lanes::X X;
  if constexpr (Lanes::kPacksX) {
    X* packed = reinterpret_cast<X*>(gemm.scratch);
    for (int64_t m = 0; m < count; ++m)
      Lanes::PackX(reinterpret_cast<const int8_t*>(gemm.x) + (row + m) * gemm.k, gemm.k,
                   packed + m * Stride<Lanes>(gemm.k));
    return packed;
  } else {
    return reinterpret_cast<const X*>(gemm.x) + row * gemm.k;
  }
}

// Decodes kTileColumns rows of the weight.
template <typename Lanes, typename Format>
void DecodePanel(const Gemm& gemm, int64_t column, typename Lanes::Part* next) {
  const int64_t steps = Steps<Lanes>(gemm.k), whole = gemm.k / (Lanes::kBlocks * jmx::kBlock);
  for (int64_t n = column; n < column + kTileColumns; ++n) {
    const Format format(gemm, n);
    for (int64_t step = 0; step < steps; ++step)
      for (int part = 0; part < Lanes::kParts; ++part)
        *next++ = step < whole ? Lanes::template Decode<false>(format, 0, step, part)
                               : Lanes::template Decode<true>(format, 0, step, part);
  }
}

template <typename Lanes, typename Format>
void RunGemm(const Gemm& gemm) {
  typedef typename Lanes::Part Part;
  static_assert(Lanes::kFewRows <= Lanes::kTileRows);
  if (gemm.rows <= Lanes::kFewRows) {
    const typename Lanes::X* x = PreparedX<Lanes>(gemm, 0, gemm.rows);
    for (int64_t n = 0; n < gemm.columns; n += kTileColumns) {
      const Format format(gemm, n);
      RunTiles<Lanes, Lanes::kFewRows>(gemm, x, gemm.rows, format, StreamedWeights<Lanes, Format>{format}, 0, n);
    }
    return;
  }
  Part* const panel = reinterpret_cast<Part*>(gemm.scratch + PackedXBytes<Lanes>(gemm.k));
  const int64_t parts = (gemm.rows + MaxPanelRows<Lanes>(gemm.k) - 1) / MaxPanelRows<Lanes>(gemm.k);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = gemm.rows * part / parts, rows = gemm.rows * (part + 1) / parts - first;
    const typename Lanes::X* x = PreparedX<Lanes>(gemm, first, rows);
    const int64_t num_tiles = (rows + Lanes::kTileRows - 1) / Lanes::kTileRows;  // of about as many rows each
    // Prefetches bytes further ahead during products; those past this GEMM are probably the next one's.
    const int64_t bytes = gemm.columns * (gemm.k / 2), share = bytes / (num_tiles * (gemm.columns / kTileColumns)) + 1;
    const uint8_t *prefetch_at = gemm.values + std::min(bytes, kPanelPrefetchBytes), *const end = prefetch_at + bytes;
    for (int64_t n = 0; n < gemm.columns; n += kTileColumns) {
      DecodePanel<Lanes, Format>(gemm, n, panel);
      const Format format(gemm, n);
      for (int64_t tile = 0; tile < num_tiles; ++tile) {
        for (const uint8_t* stop = std::min(prefetch_at + share, end); prefetch_at < stop; prefetch_at += 64)
          __builtin_prefetch(prefetch_at);
        const int64_t m = rows * tile / num_tiles, count = rows * (tile + 1) / num_tiles - m;
        RunTiles<Lanes, Lanes::kTileRows>(gemm, x + m * Stride<Lanes>(gemm.k), count, format,
                                          DecodedPanel<Lanes>{panel, Steps<Lanes>(gemm.k)}, first + m, n);
      }
    }
  }
}

// Of the instruction set that this file's compiler options let it use.
#if defined(__AMX_BF16__)
constexpr jmx::InstructionSetInfo kInfo = {"amx_bf16", jmx::kAvx512Bf16Features | jmx::kHasAmxTile | jmx::kHasAmxBf16,
                                           &jmx::kAvx512Bf16};
#elif defined(__AVX512BF16__)
constexpr jmx::InstructionSetInfo kInfo = {"avx512_bf16", jmx::kAvx512Bf16Features};
#elif defined(__AVX512VNNI__)
constexpr jmx::InstructionSetInfo kInfo = {"avx512_vnni", jmx::kAvx512Features | jmx::kHasAvx512Vnni, &jmx::kAvx512};
#elif defined(__AVX512F__)
constexpr jmx::InstructionSetInfo kInfo = {"avx512", jmx::kAvx512Features};
#elif defined(__AVXVNNI__)
constexpr jmx::InstructionSetInfo kInfo = {"avx_vnni", jmx::kAvx2Features | jmx::kHasAvxVnni, &jmx::kAvx2};
#elif defined(__AVX2__)
constexpr jmx::InstructionSetInfo kInfo = {"avx2", jmx::kAvx2Features};
#else
constexpr jmx::InstructionSetInfo kInfo = {"portable", 0};
#endif

template <typename Lanes, typename Format>
constexpr jmx::Microkernel kMicrokernel = {ScratchBytes<Lanes>, RunGemm<Lanes, Format>};

template <typename Format>
void RunInt8(const Gemm& gemm) {
  if (gemm.zero_points != nullptr) RunGemm<Integers<true>, Format>(gemm);
  else RunGemm<Integers<false>, Format>(gemm);
}

// The microkernels of a format. A set with a fallback has only those that profit from its instructions.
template <typename Format, bool integers>
constexpr jmx::MicrokernelSet MicrokernelsFor() {
  jmx::MicrokernelSet set = {};
#if defined(__AMX_BF16__)
  set.by_input[jmx::kBfloat16] = {Amx<Format>::ScratchBytes, Amx<Format>::RunGemm, Amx<Format>::kTasksPerClaim};
  if constexpr (Format::kHasPowersOfTwo) set.by_input[jmx::kFewBfloat16] = set.by_input[jmx::kBfloat16];
#else
  // Of both kinds, the scratch bytes that suffice for either.
  if constexpr (integers) set.by_input[jmx::kInt8] = {ScratchBytes<Integers<true>>, RunInt8<Format>};
#if defined(__AVX512BF16__)
  set.by_input[jmx::kFloat32] = kMicrokernel<Floats<float>, Format>;
  set.by_input[jmx::kBfloat16] = kMicrokernel<Bfloats, Format>;
  set.by_input[jmx::kFewBfloat16] =
      set.by_input[jmx::kOneBfloat16] = {FewRows<Format>::ScratchBytes, FewRows<Format>::RunGemm};
#elif !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
  set.by_input[jmx::kFloat32] = kMicrokernel<Floats<float>, Format>;
  set.by_input[jmx::kBfloat16] = set.by_input[jmx::kFewBfloat16] = set.by_input[jmx::kOneBfloat16] =
      kMicrokernel<Floats<uint16_t>, Format>;
#endif
#endif
  return set;
}

constexpr jmx::InstructionSet kInstructionSet = {
    kInfo,
    {MicrokernelsFor<Mxfp4, false>(), MicrokernelsFor<Nvfp4, false>(), MicrokernelsFor<Int4<Bfloat16>, true>(),
     MicrokernelsFor<Int4<Float16>, true>(), MicrokernelsFor<Int4<Float32>, true>()}};

}  // namespace

namespace jmx {
const InstructionSet* const JMX_INSTRUCTION_SET = &kInstructionSet;
}
