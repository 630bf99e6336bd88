// int8 tokens times 4-bit integers: exact sums of products, multiplied by the weights' scales in float32.
//
// The instructions multiply unsigned by signed bytes. So weights are w + 8, and sums start at minus eight times the sum
// of x, and lower where there is a zero point. A step has as many blocks as fill a vector with bytes. A lane has eight
// consecutive elements of k, the even ones in one vector and the odd ones in another, as the halves of bytes are
// separated. x is permuted to that order first, once for all rows of the weight.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lanes.h"

namespace {

// The initial value of a lane's sum for x = 1, which is constant where there are no zero points.
template <bool zeros, typename Ints>
struct InitialSum {
  static constexpr int kPerUnit = -8;
};
template <typename Ints>
struct InitialSum<true, Ints> {
  static constexpr int kPerUnit = 1;
  Ints initial;
};

template <bool zeros>
struct Integers {
  static constexpr int kLanes = kFloatLanes, kBytes = 4 * kLanes, kBlocks = kBytes / (jmx::kBlock / 2), kParts = 1;
  static constexpr int kTileRows = kLanes == 16 ? 4 : 2, kFewRows = kTileRows;
  static constexpr bool kPacksX = true;

  typedef typename Vector<int8_t, kBytes>::Type Bytes;
  typedef typename Vector<uint8_t, kBytes>::Type Codes;
  typedef typename Vector<int32_t, kLanes>::Type Ints;
  typedef typename Vector<float, kLanes>::Type Sum;
  struct X {
    Bytes even, odd;
    Ints sums;  // of the lane's elements, times InitialSum::kPerUnit
  };
  struct Part : InitialSum<zeros, Ints> {
    Codes even, odd;  // weights plus 8
    Sum factors;
  };

  // A row of x, its last step padded with zeros.
  static void PackX(const int8_t* x, int64_t k, X* row) {
    int64_t step = 0;
    for (; (step + 1) * kWeights <= k; ++step) row[step] = PackStep(x + step * kWeights);
    if (step * kWeights == k) return;
    int8_t padded[kWeights] = {};
    std::copy(x + step * kWeights, x + k, padded);
    row[step] = PackStep(padded);
  }

  template <bool tail, typename Format>
  static Part Decode(const Format& format, int column, int64_t step, int) {
    const int64_t block = step * kBlocks, weights = tail ? format.k - step * kWeights : kWeights;
    const uint8_t* values = format.Values(column) + step * kBytes;
    const Codes codes = tail ? LoadPartial<Codes>(values, weights / 2) : Load<Codes>(values);
    Part part;
    part.even = (codes & 15) ^ 8;
    part.odd = (codes >> 4) ^ 8;
    part.factors = (Sum)format.Factors(column, block, weights);
    if constexpr (zeros) part.initial = -8 - (Ints)format.Zeros(column, block, weights);
    return part;
  }

  template <bool>
  static const X& LoadX(const X* row, int64_t step, int, int64_t) {
    return row[step];
  }

  static Sum Add(Sum sum, const Part& weights, const X& x) {
    Ints initial_sum = x.sums;
    if constexpr (zeros) initial_sum *= weights.initial;
    return sum + __builtin_convertvector(DotProducts(initial_sum, weights.even, x.even, weights.odd, x.odd), Sum) *
                     weights.factors;
  }

 private:
  static constexpr int kWeights = kBlocks * jmx::kBlock;  // weights of a step

  // Sums of the products of both pairs, four consecutive bytes each. 16 bits hold four products of at most 15 * 128, so
  // none saturates.
  static Ints DotProducts(Ints initial_sum, Codes a, Bytes b, Codes c, Bytes d) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32(_mm512_dpbusd_epi32((__m512i)initial_sum, (__m512i)a, (__m512i)b), (__m512i)c,
                                     (__m512i)d);
#elif defined(__AVX512BW__)
    const __m512i pairs =
        _mm512_add_epi16(_mm512_maddubs_epi16((__m512i)a, (__m512i)b), _mm512_maddubs_epi16((__m512i)c, (__m512i)d));
    return initial_sum + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32((__m256i)initial_sum, (__m256i)a, (__m256i)b),
                                         (__m256i)c, (__m256i)d);
#elif defined(__AVX2__)
    const __m256i pairs =
        _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)a, (__m256i)b), _mm256_maddubs_epi16((__m256i)c, (__m256i)d));
    return initial_sum + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    typedef typename Vector<int16_t, kBytes>::Type Products;
    typedef typename Vector<int32_t, 2 * kLanes>::Type Pairs;
    const Pairs pairs = (Pairs)(__builtin_convertvector(a, Products) * __builtin_convertvector(b, Products) +
                                __builtin_convertvector(c, Products) * __builtin_convertvector(d, Products));
    const Pairs sums = (pairs << 16 >> 16) + (pairs >> 16);
    return initial_sum + __builtin_shufflevector(sums, sums, 0, 2, 4, 6) +
           __builtin_shufflevector(sums, sums, 1, 3, 5, 7);
#endif
  }

  static X PackStep(const int8_t* x) {
    X packed;
#if defined(__AVX512BW__)
    const __m512i first = Load<__m512i>(x), second = Load<__m512i>(x + 64);
    const auto join = [](__m512i a, __m512i b) __attribute__((always_inline)) {
      return (Bytes)_mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(a)), _mm512_cvtepi16_epi8(b), 1);
    };
    packed.even = join(first, second);
    packed.odd = join(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
#else
    for (int i = 0; i < kBytes; ++i) {
      packed.even[i] = x[2 * i];
      packed.odd[i] = x[2 * i + 1];
    }
#endif
    const Codes one = Codes{} + 1;
    packed.sums = DotProducts(Ints{}, one, packed.even, one, packed.odd) * Part::kPerUnit;
    return packed;
  }
};

}  // namespace
