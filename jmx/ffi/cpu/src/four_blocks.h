// Steps of four blocks of a weight row, which are decoded side by side, since shuffles cost the most: each 16-bit word
// of their bytes contains four elements. Shifted right by 0, 4, 8 and 12 bits, the low bits of the words index one
// table, which is in a register. Vector q of a step contains the elements of shift q, block i of the step in its
// quarter i; x is permuted to the same order first, once for all rows of the weight.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lanes.h"
#include "product.h"

namespace {

class FourBlocks {
 public:
  static constexpr int kBlocks = 4;  // of a step, and the vectors that they are decoded to
  static constexpr int kWeights = kBlocks * jmx::kBlock;

  // The first `count` elements at x, at most kWeights, as the vectors of a step; further ones are zero.
  static void PackX(const uint16_t* x, int64_t count, __m512i* step) {
    const __m512i order =
        (__m512i)(typename Vector<uint16_t, 32>::Type){0, 4, 8,  12, 16, 20, 24, 28, 1, 5, 9,  13, 17, 21, 25, 29,
                                                       2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31};
    if (count < kWeights) std::fill(step, step + kBlocks, __m512i{});
    for (int i = 0; i * jmx::kBlock < std::min<int64_t>(count, kWeights); ++i, x += jmx::kBlock) {
      const int64_t left = count - i * jmx::kBlock;
      const __m512i words = left >= jmx::kBlock ? Load<__m512i>(x) : LoadPartial<__m512i>(x, 2 * left);
      Store(_mm512_permutexvar_epi16(order, words), i, step);
    }
  }

  // The values of a step's words, by a table of elements, twice: indices have a fifth bit of any value.
  static void Lookup(__m512i words, __m512i table, __m512i* step) {
    step[0] = _mm512_permutexvar_epi16(words, table);
    step[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table);
    step[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table);
    step[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table);
  }

  static __m512i TableOf(const uint16_t* elements) {
    return _mm512_maskz_broadcast_i64x4(0xFF, Load<__m256i>(elements));
  }

  // Decodes a step to weights, with any scales.
  template <typename Format>
  static void Decode(const Format& format, int column, int64_t block, __m512i* step) {
    const __m512i shifts = _mm512_set_epi64(0x000C000C000C000C, 0x000C000C000C000C, 0x0008000800080008,
                                            0x0008000800080008, 0x0004000400040004, 0x0004000400040004, 0, 0);
    std::fill(step, step + kBlocks, __m512i{});
    for (int i = 0; i < kBlocks; ++i, ++block) {
      const int64_t left = (format.k - block * jmx::kBlock) / 2;
      if (left <= 0) return;
      const uint8_t* values = format.Values(column) + block * (jmx::kBlock / 2);
      const bool whole = left >= jmx::kBlock / 2;
      const __m512i words =
          _mm512_maskz_broadcast_i32x4(0xFFFF, whole ? Load<__m128i>(values) : LoadPartial<__m128i>(values, left));
      const auto table = whole ? format.template Table<Bfloats, false>(column, block, 0)
                               : format.template Table<Bfloats, true>(column, block, 0);
      Store(Lookup(_mm512_srlv_epi16(words, shifts), table), i, step);
    }
  }

 private:
  // Stores the 32 words of block i of a step, in the order of the shifts: quarter q becomes quarter i of vector q.
  static void Store(__m512i words, int i, __m512i* step) {
    __m128i* lanes = reinterpret_cast<__m128i*>(step) + i;
    _mm_store_si128(lanes, _mm512_castsi512_si128(words));
    _mm_store_si128(lanes + 4, _mm512_extracti32x4_epi32(words, 1));
    _mm_store_si128(lanes + 8, _mm512_extracti32x4_epi32(words, 2));
    _mm_store_si128(lanes + 12, _mm512_extracti32x4_epi32(words, 3));
  }

  static __m512i Lookup(__m512i codes, __m512i table) { return _mm512_permutexvar_epi16(codes, table); }
  static __m512i Lookup(__m512i codes, Bfloats::Pair pair) {  // each lane contains words of both halves of its block
    const __m512i halves = _mm512_set4_epi64(0x0010001000100010, 0, 0x0010001000100010, 0);
    // a & b | c.
    return _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(codes, _mm512_set1_epi16(15), halves, 0xEA), pair.tables);
  }
};

}  // namespace
