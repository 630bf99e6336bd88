// AVX-512 BF16, for calls with few bfloat16 rows per expert: memory is the bound, if weights are decoded fast enough.
//
// A step decodes four blocks of a weight row side by side (four_blocks.h), without their scales. The products of a step
// are summed from zero, and the sum is multiplied by the blocks' scales, eight weights per lane. A zero point subtracts
// that multiple of the sum of the lane's eight elements of x.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "four_blocks.h"
#include "lanes.h"
#include "product.h"

namespace {

template <typename Format>
class FewRows {
 public:
  static int64_t ScratchBytes(int64_t k) { return kTileRows * Stride(k) * sizeof(__m512i); }

  static void RunGemm(const jmx::Gemm& gemm) {
    const int64_t width = gemm.rows <= kTileRows ? gemm.columns : kCachedColumns;
    for (int64_t column = 0; column < gemm.columns; column += width)
      RunTiles<kTileRows>(gemm, 0, column, std::min(column + width, gemm.columns));
  }

 private:
  typedef typename Vector<float, 16>::Type Sum;
  static constexpr int kTileRows = 4;   // rows of x in a register tile
  static constexpr int kStepBlocks = FourBlocks::kBlocks, kStepWeights = FourBlocks::kWeights;
  // Rows of the weight that are read side by side: hardware prefetchers follow few streams.
  static constexpr int kPairedRows = 2;
  static constexpr int kPrefetchBytes = 6144;  // how far prefetches are ahead of loads
  // Columns whose scales are checked together, and how far ahead scales are prefetched.
  static constexpr int kScaleColumns = 32;
  static constexpr int kCachedColumns = 64;   // columns whose weights stay in the cache for the next rows of x

  // Scales multiply sums of a step (with zero points or without), or, where some are unusual, are part of the tables.
  enum Mode { kOrdinaryScales, kZeroPoints, kAnyScales };

  // Of a step of x; for zero points, the last one contains sums.
  static constexpr int kVectors = kStepBlocks + (Format::kMayHaveZeros ? 1 : 0);

  // Vectors of a row of x, whose last step is padded with zeros.
  static int64_t Stride(int64_t k) { return (jmx::Blocks(k) + kStepBlocks - 1) / kStepBlocks * kVectors; }

  static void PackX(const uint16_t* x, int64_t k, __m512i* row) {
    const __m512i one = _mm512_set1_epi16(static_cast<int16_t>(Format::ElementTable()[1]));
    const int64_t blocks = jmx::Blocks(k);
    for (int64_t first = 0; first < blocks; first += kStepBlocks, row += kVectors) {
      FourBlocks::PackX(x + first * jmx::kBlock, k - first * jmx::kBlock, row);
      if constexpr (Format::kMayHaveZeros) {
        __m512 sums = _mm512_setzero_ps();
        for (int q = 0; q < kStepBlocks; ++q) sums = _mm512_dpbf16_ps(sums, (__m512bh)one, (__m512bh)row[q]);
        row[kStepBlocks] = (__m512i)sums;
      }
    }
  }

  // Tiles of `max_rows` rows, then one with the rows that are left.
  template <int max_rows>
  static void RunTiles(const jmx::Gemm& gemm, int64_t row, int64_t begin, int64_t end) {
    if constexpr (max_rows > 0) {
      __m512i* x = reinterpret_cast<__m512i*>(gemm.scratch);
      for (; gemm.rows - row >= max_rows; row += max_rows) {
        for (int m = 0; m < max_rows; ++m)
          PackX(reinterpret_cast<const uint16_t*>(gemm.x) + (row + m) * gemm.k, gemm.k, x + m * Stride(gemm.k));
        for (int64_t column = begin; column < end; column += kScaleColumns) {
          const int64_t next = std::min(column + kScaleColumns, end);
          if constexpr (Format::kMayHaveZeros) {
            if (gemm.zero_points != nullptr) RunColumns<max_rows, kZeroPoints>(gemm, x, row, column, next);
            else RunColumns<max_rows, kOrdinaryScales>(gemm, x, row, column, next);
          } else {
            if (Format(gemm, column).HasOrdinaryScales(next - column))
              RunColumns<max_rows, kOrdinaryScales>(gemm, x, row, column, next);
            else RunColumns<max_rows, kAnyScales>(gemm, x, row, column, next);
          }
        }
      }
      RunTiles<max_rows - 1>(gemm, row, begin, end);
    }
  }

  template <int rows, Mode mode>
  static void RunColumns(const jmx::Gemm& gemm, const __m512i* x, int64_t row, int64_t column, int64_t end) {
    for (; column < end; column += jmx::kTileColumns) RunTile<rows, mode>(gemm, x, row, column);
  }

  template <int rows, Mode mode>
  static void RunTile(const jmx::Gemm& gemm, const __m512i* x, int64_t row, int64_t column) {
    const Format format(gemm, column);
    const int64_t k = gemm.k, blocks = jmx::Blocks(k), stride = Stride(k);
    const __m512i table = FourBlocks::TableOf(Format::ElementTable());
    Sum sums[rows][jmx::kTileColumns];

    for (int first = 0; first < jmx::kTileColumns; first += kPairedRows) {
      Sum here[rows][kPairedRows] = {};  // stays in registers
      // `count`: weights of the step.
      const auto step = [&](int64_t block, int64_t count) __attribute__((always_inline)) {
        for (int n = 0; n < kPairedRows; ++n) {
          const uint8_t* at = format.Values(first + n) + block * (jmx::kBlock / 2);
          __m512i weights[kStepBlocks];
          Sum factor, zeros;
          if constexpr (mode == kAnyScales) {
            FourBlocks::Decode(format, first + n, block, weights);
          } else {
            const __m512i words =
                count == kStepWeights ? Load<__m512i>(at) : _mm512_maskz_loadu_epi8((1ull << count / 2) - 1, at);
            FourBlocks::Lookup(words, table, weights);
            factor = (Sum)format.Factors(first + n, block, count);
            if constexpr (mode == kZeroPoints)
              zeros = (Sum)_mm512_cvtepi32_ps(format.Zeros(first + n, block, count));
          }
          for (int m = 0; m < rows; ++m) {
            const __m512i* x_step = x + m * stride + block / kStepBlocks * kVectors;
            Sum products = {};
            for (int q = 0; q < kStepBlocks; ++q)
              products = (Sum)_mm512_dpbf16_ps((__m512)products, (__m512bh)weights[q], (__m512bh)x_step[q]);
            if constexpr (mode == kZeroPoints) products -= zeros * (Sum)x_step[kStepBlocks];
            if constexpr (mode == kAnyScales) here[m][n] += products;
            else here[m][n] += products * factor;
          }
        }
      };
      const uint8_t* next = format.Values(first) + kPrefetchBytes;
      int64_t block = 0;
      // Prefetches as much as it reads, in memory order.
      for (; block * jmx::kBlock + kStepWeights <= k; block += kStepBlocks) {
        for (int line = 0; line < kPairedRows; ++line)
          __builtin_prefetch(next + (block * kPairedRows / kStepBlocks + line) * 64);
        if (block % (2 * Format::kScalesEvery) == 0)
          __builtin_prefetch(format.ScaleAddress((kScaleColumns + first) * blocks + block * kPairedRows));
        step(block, kStepWeights);
      }
      if (block < blocks) step(block, k - block * jmx::kBlock);
      for (int m = 0; m < rows; ++m)
        for (int n = 0; n < kPairedRows; ++n) sums[m][first + n] = here[m][n];
    }

    for (int m = 0; m < rows; ++m) {
      float totals[jmx::kTileColumns];
      HorizontalSums<16>(sums[m], totals);
      float* out = gemm.out + (row + m) * gemm.out_stride + column;
      for (int n = 0; n < jmx::kTileColumns; ++n) {
        const float element_scale = mode == kAnyScales ? 1 : Format::kElementScale;
        out[n] =
            MultiplyAdd(totals[n] * element_scale, format.Factor(n), gemm.bias == nullptr ? 0 : gemm.bias[column + n]);
      }
    }
  }
};

}  // namespace
