// AVX-512 BF16 where a call has few bfloat16 rows an expert: memory is the bound, if weights are decoded fast enough.
//
// What costs is vectors that are shuffled, so four blocks of a weight row, a step, are decoded side by side. Seen as words
// of 16 bits, their bytes hold four elements a word: shifted by none, 4, 8 and 12 bits, the low bits of all words find
// these in one table, which lies in a register. x is brought into the same order first, once for all rows of the weight.
// A step's products are added up from zero, and enter the sum times the blocks' scales: powers of two, which round nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "product.h"

namespace {

class Few {
 public:
  static int64_t Room(int64_t, int64_t k) { return kMaxRows * Stride(k) * sizeof(__m512i); }

  static void Run(const jmx::Piece& piece) {
    if (Plain(piece.scales, piece.columns * piece.k / jmx::kBlock))
      Rows<kMaxRows, true>(piece, 0);
    else
      Rows<kMaxRows, false>(piece, 0);
  }

 private:
  typedef typename Vector<float, 16>::Type Sum;
  static constexpr int kMaxRows = 4;   // of a tile
  static constexpr int kTogether = 4;  // blocks of a step, and vectors that they are decoded to
  static constexpr int kPair = 2;      // rows of the weight that are read side by side: hardware sees few streams
  static constexpr int kAhead = 4096;  // bytes between what is asked for and what is read

  // Scales outside of this range are rare, and take tables of their own. Within it, weights are normal numbers. The table
  // holds elements over 2^kShift, so that no x is too large for products without their scale, and a scale times 2^kShift
  // is a number.
  static constexpr int kLeast = 2, kMost = 246, kShift = 8;

  static bool Plain(const uint8_t* scales, int64_t count) {
    const __m512i least = _mm512_set1_epi8(kLeast);
    __m512i above = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += 64) {
      const __mmask64 here = count - i >= 64 ? ~0ull : (1ull << (count - i)) - 1;
      above = _mm512_max_epu8(above, _mm512_sub_epi8(_mm512_mask_loadu_epi8(least, here, scales + i), least));  // wraps below it
    }
    return _mm512_cmpgt_epu8_mask(above, _mm512_set1_epi8(static_cast<char>(kMost - kLeast))) == 0;
  }

  // Vectors of a row of x, whose last step is filled up with zeros.
  static int64_t Stride(int64_t k) { return (k / jmx::kBlock + kTogether - 1) / kTogether * kTogether; }

  // 32 words in the order of the shifts that find them: lane q of the i-th block of a step is lane i of its q-th vector.
  static void Put(__m512i words, int i, __m512i* step) {
    __m128i* lanes = reinterpret_cast<__m128i*>(step) + i;
    _mm_store_si128(lanes, _mm512_castsi512_si128(words));
    _mm_store_si128(lanes + 4, _mm512_extracti32x4_epi32(words, 1));
    _mm_store_si128(lanes + 8, _mm512_extracti32x4_epi32(words, 2));
    _mm_store_si128(lanes + 12, _mm512_extracti32x4_epi32(words, 3));
  }

  static void Arrange(const uint16_t* x, int64_t blocks, __m512i* row) {
    const __m512i order = (__m512i)(typename Vector<uint16_t, 32>::Type){0, 4, 8,  12, 16, 20, 24, 28, 1, 5, 9,  13, 17, 21, 25, 29,
                                                                         2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31};
    std::fill(row + blocks / kTogether * kTogether, row + Stride(blocks * jmx::kBlock), __m512i{});
    for (int64_t b = 0; b < blocks; ++b)
      Put(_mm512_permutexvar_epi16(order, Load<__m512i>(x + b * jmx::kBlock)), b % kTogether, row + b / kTogether * kTogether);
  }

  // Two copies: of an index of five bits the fifth, whatever it is, finds one of them.
  static __m512i Table(int scale) { return _mm512_maskz_broadcast_i64x4(0xFF, Load<__m256i>(jmx::kBfloats.bits[scale])); }

  // `count` blocks under any scales, to weights.
  static void Decode(const uint8_t* values, const uint8_t* scales, int count, __m512i* step) {
    const __m512i shifts = _mm512_set_epi64(0x000C000C000C000C, 0x000C000C000C000C, 0x0008000800080008, 0x0008000800080008,
                                            0x0004000400040004, 0x0004000400040004, 0, 0);
    std::fill(step, step + kTogether, __m512i{});
    for (int i = 0; i < count; ++i) {
      const __m512i words = _mm512_maskz_broadcast_i32x4(0xFFFF, Load<__m128i>(values + i * (jmx::kBlock / 2)));
      Put(_mm512_permutexvar_epi16(_mm512_srlv_epi16(words, shifts), Table(scales[i])), i, step);
    }
  }

  // Tiles of `most` rows, of which the last may have fewer.
  template <int most, bool plain>
  static void Rows(const jmx::Piece& piece, int64_t row) {
    if constexpr (most > 0) {
      const int64_t blocks = piece.k / jmx::kBlock;
      __m512i* x = reinterpret_cast<__m512i*>(piece.scratch);
      for (; piece.rows - row >= most; row += most) {
        for (int m = 0; m < most; ++m)
          Arrange(reinterpret_cast<const uint16_t*>(piece.x) + (row + m) * piece.k, blocks, x + m * Stride(piece.k));
        for (int64_t column = 0; column < piece.columns; column += jmx::kStep) Tile<most, plain>(piece, x, row, column);
      }
      Rows<most - 1, plain>(piece, row);
    }
  }

  template <int rows, bool plain>
  static void Tile(const jmx::Piece& piece, const __m512i* x, int64_t row, int64_t column) {
    const int64_t blocks = piece.k / jmx::kBlock, stride = Stride(piece.k);
    const uint8_t *values = piece.values + column * blocks * (jmx::kBlock / 2), *scales = piece.scales + column * blocks;
    const __m512i table = Table(127 - kShift);
    // Of four scales, the i-th becomes the exponents of lane i.
    const __m512i spread = _mm512_set_epi32(~252, ~252, ~252, ~252, ~253, ~253, ~253, ~253, ~254, ~254, ~254, ~254, ~255, ~255, ~255, ~255);
    Sum sums[rows][jmx::kStep];

    for (int first = 0; first < jmx::kStep; first += kPair) {
      Sum here[rows][kPair] = {};  // in registers
      const auto step = [&](int64_t block, int count) __attribute__((always_inline)) {
        for (int n = 0; n < kPair; ++n) {
          const int64_t weight = (first + n) * blocks + block;
          const uint8_t *at = values + weight * (jmx::kBlock / 2), *scale = scales + weight;
          __m512i weights[kTogether];
          Sum factor;
          if constexpr (plain) {
            const __m512i words = count == kTogether ? Load<__m512i>(at) : _mm512_maskz_loadu_epi8((1ull << 16 * count) - 1, at);
            uint32_t four = 0;
            std::memcpy(&four, scale, count);
            weights[0] = _mm512_permutexvar_epi16(words, table);
            weights[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
            weights[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table);
            weights[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table);
            factor = (Sum)_mm512_slli_epi32(_mm512_shuffle_epi8(_mm512_set1_epi32(four + kShift * 0x01010101), spread), 23);
          } else {
            Decode(at, scale, count, weights);
          }
          for (int m = 0; m < rows; ++m) {
            Sum products = {};
            for (int q = 0; q < kTogether; ++q)
              products = (Sum)_mm512_dpbf16_ps((__m512)products, (__m512bh)weights[q], (__m512bh)x[m * stride + block + q]);
            if constexpr (plain) here[m][n] += products * factor;
            else here[m][n] += products;
          }
        }
      };
      const uint8_t *next = values + first * blocks * (jmx::kBlock / 2) + kAhead, *next_scales = scales + first * blocks + kAhead / 16;
      int64_t block = 0;
      for (; block + kTogether <= blocks; block += kTogether) {  // asks for as much as is read, in the order of memory
        for (int line = 0; line < kPair; ++line) __builtin_prefetch(next + (block * kPair / kTogether + line) * 64);
        if (block % 32 == 0) __builtin_prefetch(next_scales + block * kPair);
        step(block, kTogether);
      }
      if (block < blocks) step(block, static_cast<int>(blocks - block));
      for (int m = 0; m < rows; ++m)
        for (int n = 0; n < kPair; ++n) sums[m][first + n] = here[m][n];
    }

    for (int m = 0; m < rows; ++m) {
      float totals[jmx::kStep];
      Totals<16>(sums[m], totals);
      float* out = piece.out + (row + m) * piece.out_stride + column;
      for (int n = 0; n < jmx::kStep; ++n) out[n] = totals[n] + (piece.bias == nullptr ? 0.0f : piece.bias[column + n]);
    }
  }
};

}  // namespace
