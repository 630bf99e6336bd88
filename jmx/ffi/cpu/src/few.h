// AVX-512 BF16 where a call has few bfloat16 rows an expert: memory is the bound, if weights are decoded fast enough.
//
// What costs is vectors that are shuffled, so four blocks of a weight row, a step, are decoded side by side. Seen as words
// of 16 bits, their bytes hold four elements a word: shifted by none, 4, 8 and 12 bits, the low bits of all words find
// these in one table, which lies in a register. x is brought into the same order first, once for all rows of the weight.
// A step's products are added up from zero, and enter the sum times the blocks' scales, eight weights a lane. A zero
// point takes as many times the sum of those eight elements of x off.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "product.h"

namespace {

template <typename Format>
class Few {
 public:
  static int64_t Room(int64_t k) { return kMaxRows * Stride(k) * sizeof(__m512i); }

  static void Run(const jmx::Piece& piece) {
    const int64_t width = piece.rows <= kMaxRows ? piece.columns : kCached;
    for (int64_t column = 0; column < piece.columns; column += width)
      Rows<kMaxRows>(piece, 0, column, std::min(column + width, piece.columns));
  }

 private:
  typedef typename Vector<float, 16>::Type Sum;
  static constexpr int kMaxRows = 4;   // of a tile
  static constexpr int kTogether = 4;  // blocks of a step, and vectors that they are decoded to
  static constexpr int kWeights = kTogether * jmx::kBlock;
  static constexpr int kPair = 2;      // rows of the weight that are read side by side: hardware sees few streams
  static constexpr int kAhead = 6144;  // bytes between what is asked for and what is read
  static constexpr int kColumns = 32;  // whose scales are looked at before any is used; they are asked for so much ahead
  static constexpr int kCached = 64;   // columns that lie in a cache for the next rows of x

  // Whether scales come afterwards, with zero points, or those of all kinds are in the tables.
  enum Mode { kPlain, kWithZeros, kAnyScales };

  static constexpr int kVectors = kTogether + (Format::kMayHaveZeros ? 1 : 0);  // of a step of x: the last one has sums

  // Vectors of a row of x, whose last step is filled up with zeros.
  static int64_t Stride(int64_t k) { return (jmx::Blocks(k) + kTogether - 1) / kTogether * kVectors; }

  // 32 words in the order of the shifts that find them: lane q of the i-th block of a step is lane i of its q-th vector.
  static void Put(__m512i words, int i, __m512i* step) {
    __m128i* lanes = reinterpret_cast<__m128i*>(step) + i;
    _mm_store_si128(lanes, _mm512_castsi512_si128(words));
    _mm_store_si128(lanes + 4, _mm512_extracti32x4_epi32(words, 1));
    _mm_store_si128(lanes + 8, _mm512_extracti32x4_epi32(words, 2));
    _mm_store_si128(lanes + 12, _mm512_extracti32x4_epi32(words, 3));
  }

  static void Arrange(const uint16_t* x, int64_t k, __m512i* row) {
    const __m512i order = (__m512i)(typename Vector<uint16_t, 32>::Type){0, 4, 8,  12, 16, 20, 24, 28, 1, 5, 9,  13, 17, 21, 25, 29,
                                                                         2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31};
    const __m512i one = _mm512_set1_epi16(static_cast<int16_t>(Format::Elements()[1]));
    const int64_t blocks = jmx::Blocks(k);
    for (int64_t first = 0; first < blocks; first += kTogether, row += kVectors) {
      const int count = static_cast<int>(std::min<int64_t>(kTogether, blocks - first));
      if (count < kTogether) std::fill(row, row + kTogether, __m512i{});
      for (int i = 0; i < count; ++i) {
        const int64_t left = k - (first + i) * jmx::kBlock;
        const uint16_t* at = x + (first + i) * jmx::kBlock;
        const __m512i words = left >= jmx::kBlock ? Load<__m512i>(at) : LoadSome<__m512i>(at, 2 * left);
        Put(_mm512_permutexvar_epi16(order, words), i, row);
      }
      if constexpr (Format::kMayHaveZeros) {
        __m512 sums = _mm512_setzero_ps();
        for (int q = 0; q < kTogether; ++q) sums = _mm512_dpbf16_ps(sums, (__m512bh)one, (__m512bh)row[q]);
        row[kTogether] = (__m512i)sums;
      }
    }
  }

  // Elements: two copies, as of an index of five bits the fifth, whatever it is, finds one of them.
  static __m512i Elements() { return _mm512_maskz_broadcast_i64x4(0xFF, Load<__m256i>(Format::Elements())); }

  static __m512i Look(__m512i codes, __m512i table) { return _mm512_permutexvar_epi16(codes, table); }
  static __m512i Look(__m512i codes, Bfloats::Pair pair) {  // each lane has words of both halves of its block
    const __m512i halves = _mm512_set4_epi64(0x0010001000100010, 0, 0x0010001000100010, 0);
    return _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(codes, _mm512_set1_epi16(15), halves, 0xEA), pair.tables);  // a & b | c
  }

  // A step under any scales, to weights.
  static void Decode(const Format& format, int column, int64_t block, __m512i* step) {
    const __m512i shifts = _mm512_set_epi64(0x000C000C000C000C, 0x000C000C000C000C, 0x0008000800080008, 0x0008000800080008,
                                            0x0004000400040004, 0x0004000400040004, 0, 0);
    std::fill(step, step + kTogether, __m512i{});
    for (int i = 0; i < kTogether; ++i, ++block) {
      const int64_t left = (format.k - block * jmx::kBlock) / 2;
      if (left <= 0) return;
      const uint8_t* values = format.Values(column) + block * (jmx::kBlock / 2);
      const bool whole = left >= jmx::kBlock / 2;
      const __m512i words = _mm512_maskz_broadcast_i32x4(0xFFFF, whole ? Load<__m128i>(values) : LoadSome<__m128i>(values, left));
      const auto table = whole ? format.template Table<Bfloats, false>(column, block, 0) : format.template Table<Bfloats, true>(column, block, 0);
      Put(Look(_mm512_srlv_epi16(words, shifts), table), i, step);
    }
  }

  // Tiles of `most` rows, of which the last may have fewer.
  template <int most>
  static void Rows(const jmx::Piece& piece, int64_t row, int64_t begin, int64_t end) {
    if constexpr (most > 0) {
      __m512i* x = reinterpret_cast<__m512i*>(piece.scratch);
      for (; piece.rows - row >= most; row += most) {
        for (int m = 0; m < most; ++m)
          Arrange(reinterpret_cast<const uint16_t*>(piece.x) + (row + m) * piece.k, piece.k, x + m * Stride(piece.k));
        for (int64_t column = begin; column < end; column += kColumns) {
          const int64_t next = std::min(column + kColumns, end);
          if constexpr (Format::kMayHaveZeros) {
            if (piece.zero_points != nullptr) Tiles<most, kWithZeros>(piece, x, row, column, next);
            else Tiles<most, kPlain>(piece, x, row, column, next);
          } else {
            if (Format(piece, column).Plain(next - column)) Tiles<most, kPlain>(piece, x, row, column, next);
            else Tiles<most, kAnyScales>(piece, x, row, column, next);
          }
        }
      }
      Rows<most - 1>(piece, row, begin, end);
    }
  }

  template <int rows, Mode mode>
  static void Tiles(const jmx::Piece& piece, const __m512i* x, int64_t row, int64_t column, int64_t end) {
    for (; column < end; column += jmx::kStep) Tile<rows, mode>(piece, x, row, column);
  }

  template <int rows, Mode mode>
  static void Tile(const jmx::Piece& piece, const __m512i* x, int64_t row, int64_t column) {
    const Format format(piece, column);
    const int64_t k = piece.k, blocks = jmx::Blocks(k), stride = Stride(k);
    const __m512i table = Elements();
    Sum sums[rows][jmx::kStep];

    for (int first = 0; first < jmx::kStep; first += kPair) {
      Sum here[rows][kPair] = {};  // in registers
      const auto step = [&](int64_t block, int64_t count) __attribute__((always_inline)) {  // of weights
        for (int n = 0; n < kPair; ++n) {
          const uint8_t* at = format.Values(first + n) + block * (jmx::kBlock / 2);
          __m512i weights[kTogether];
          Sum factor, zeros;
          if constexpr (mode == kAnyScales) {
            Decode(format, first + n, block, weights);
          } else {
            const __m512i words = count == kWeights ? Load<__m512i>(at) : _mm512_maskz_loadu_epi8((1ull << count / 2) - 1, at);
            weights[0] = _mm512_permutexvar_epi16(words, table);
            weights[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
            weights[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table);
            weights[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table);
            factor = (Sum)format.Factors(first + n, block, count);
            if constexpr (mode == kWithZeros)
              zeros = (Sum)_mm512_cvtepi32_ps(format.Zeros(first + n, block, count));
          }
          for (int m = 0; m < rows; ++m) {
            const __m512i* these = x + m * stride + block / kTogether * kVectors;
            Sum products = {};
            for (int q = 0; q < kTogether; ++q)
              products = (Sum)_mm512_dpbf16_ps((__m512)products, (__m512bh)weights[q], (__m512bh)these[q]);
            if constexpr (mode == kWithZeros) products -= zeros * (Sum)these[kTogether];
            if constexpr (mode == kAnyScales) here[m][n] += products;
            else here[m][n] += products * factor;
          }
        }
      };
      const uint8_t* next = format.Values(first) + kAhead;
      int64_t block = 0;
      for (; block * jmx::kBlock + kWeights <= k; block += kTogether) {  // asks for as much as is read, in the order of memory
        for (int line = 0; line < kPair; ++line) __builtin_prefetch(next + (block * kPair / kTogether + line) * 64);
        if (block % (2 * Format::kScalesEvery) == 0)
          __builtin_prefetch(format.Ahead((kColumns + first) * blocks + block * kPair));
        step(block, kWeights);
      }
      if (block < blocks) step(block, k - block * jmx::kBlock);
      for (int m = 0; m < rows; ++m)
        for (int n = 0; n < kPair; ++n) sums[m][first + n] = here[m][n];
    }

    for (int m = 0; m < rows; ++m) {
      float totals[jmx::kStep];
      Totals<16>(sums[m], totals);
      float* out = piece.out + (row + m) * piece.out_stride + column;
      for (int n = 0; n < jmx::kStep; ++n) {
        const float over = mode == kAnyScales ? 1 : Format::kElementsOver;
        out[n] = Fused(totals[n] * over, format.Factor(n), piece.bias == nullptr ? 0 : piece.bias[column + n]);
      }
    }
  }
};

}  // namespace
