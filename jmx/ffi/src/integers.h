// Tokens of int8 times integers of four bits: exact sums of products, which meet their weights' scales in float32.
//
// The instructions multiply bytes of which one has no sign. So x comes as x + 128, and of each weight 128 times is taken off
// again, by what sums start from. A step is as many blocks as fill a vector with bytes; a lane has eight neighbours of k, of
// which the even ones lie in one vector and the odd ones in another, as halves of bytes come apart. x is brought into
// that order first, once for all rows of the weight.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lanes.h"

namespace {

struct Integers {
  static constexpr int kLanes = kFloatLanes, kBytes = 4 * kLanes, kBlocks = kBytes / (jmx::kBlock / 2), kParts = 1;
  static constexpr int kTileRows = kLanes == 16 ? 4 : 2, kFewRows = kTileRows;
  static constexpr bool kArranged = true;
  static constexpr int kWeights = kBlocks * jmx::kBlock;  // of a step

  typedef typename Vector<int8_t, kBytes>::Type Bytes;
  typedef typename Vector<uint8_t, kBytes>::Type Codes;
  typedef typename Vector<int32_t, kLanes>::Type Ints;
  typedef typename Vector<float, kLanes>::Type Sum;
  struct X {
    Codes even, odd;  // plus 128
  };
  struct Part {
    Bytes even, odd;
    Ints start;
    Sum factors;
  };

  static int64_t Steps(int64_t k) { return (k + kWeights - 1) / kWeights; }

  // A row of x, its last step filled up with zeros.
  static void Arrange(const int8_t* x, int64_t k, X* row) {
    int64_t step = 0;
    for (; (step + 1) * kWeights <= k; ++step) row[step] = Arranged(x + step * kWeights);
    if (step * kWeights == k) return;
    int8_t some[kWeights] = {};
    std::copy(x + step * kWeights, x + k, some);
    row[step] = Arranged(some);
  }

  template <bool tail, typename Format>
  static Part Decode(const Format& format, int column, int64_t step, int) {
    const int64_t block = step * kBlocks;
    const int count = tail ? static_cast<int>(jmx::Blocks(format.k) - block) : kBlocks;
    const uint8_t* values = format.Values(column) + step * kBytes;
    const Codes codes = tail ? LoadSome<Codes>(values, format.k / 2 - step * kBytes) : Load<Codes>(values);
    const Bytes offset = format.template Offsets<kBytes>(column, block, count);
    Part part;
    part.even = (Bytes)((codes & 15) ^ 8) - offset;
    part.odd = (Bytes)((codes >> 4) ^ 8) - offset;
    part.start = -Dot(Ints{}, {Codes{} + 128, Codes{} + 128}, part);
    part.factors = (Sum)format.template Scales<kLanes>(column, block, count);
    return part;
  }

  template <bool>
  static const X& LoadX(const X* row, int64_t step, int, int64_t) {
    return row[step];
  }

  static Sum Add(Sum sum, const Part& weights, const X& x) {
    return sum + __builtin_convertvector(Dot(weights.start, x, weights), Sum) * weights.factors;
  }

 private:
  // Sums of 16 bits hold two products of 15 * 255 at most, of either vector: no instruction here saturates.
#if defined(__AVX512VNNI__)
  static Ints Dot(Ints start, const X& x, const Part& w) {
    return (Ints)_mm512_dpbusd_epi32(_mm512_dpbusd_epi32((__m512i)start, (__m512i)x.even, (__m512i)w.even), (__m512i)x.odd, (__m512i)w.odd);
  }
#elif defined(__AVX512BW__)
  static Ints Dot(Ints start, const X& x, const Part& w) {
    const __m512i even = _mm512_maddubs_epi16((__m512i)x.even, (__m512i)w.even), odd = _mm512_maddubs_epi16((__m512i)x.odd, (__m512i)w.odd);
    return start + (Ints)_mm512_madd_epi16(_mm512_add_epi16(even, odd), _mm512_set1_epi16(1));
  }
#elif defined(__AVXVNNI__)
  static Ints Dot(Ints start, const X& x, const Part& w) {
    return (Ints)_mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32((__m256i)start, (__m256i)x.even, (__m256i)w.even), (__m256i)x.odd, (__m256i)w.odd);
  }
#elif defined(__AVX2__)
  static Ints Dot(Ints start, const X& x, const Part& w) {
    const __m256i even = _mm256_maddubs_epi16((__m256i)x.even, (__m256i)w.even), odd = _mm256_maddubs_epi16((__m256i)x.odd, (__m256i)w.odd);
    return start + (Ints)_mm256_madd_epi16(_mm256_add_epi16(even, odd), _mm256_set1_epi16(1));
  }
#else
  static Ints Dot(Ints start, const X& x, const Part& w) {
    typedef typename Vector<int16_t, kBytes>::Type Products;
    typedef typename Vector<int32_t, 2 * kLanes>::Type Pairs;
    const Products products = __builtin_convertvector(x.even, Products) * __builtin_convertvector(w.even, Products) +
                              __builtin_convertvector(x.odd, Products) * __builtin_convertvector(w.odd, Products);
    const Pairs pairs = ((Pairs)products << 16 >> 16) + ((Pairs)products >> 16);
    return start + __builtin_shufflevector(pairs, pairs, 0, 2, 4, 6) + __builtin_shufflevector(pairs, pairs, 1, 3, 5, 7);
  }
#endif

  static X Arranged(const int8_t* x) {
#if defined(__AVX512BW__)
    const __m512i sign = _mm512_set1_epi8(-128);
    const __m512i first = _mm512_xor_si512(Load<__m512i>(x), sign), second = _mm512_xor_si512(Load<__m512i>(x + 64), sign);
    const auto join = [](__m512i a, __m512i b) __attribute__((always_inline)) {
      return (Codes)_mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(a)), _mm512_cvtepi16_epi8(b), 1);
    };
    return {join(first, second), join(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8))};
#else
    X arranged;
    for (int i = 0; i < kBytes; ++i) {
      arranged.even[i] = static_cast<uint8_t>(x[2 * i]) ^ 128;
      arranged.odd[i] = static_cast<uint8_t>(x[2 * i + 1]) ^ 128;
    }
    return arranged;
#endif
  }
};

}  // namespace
