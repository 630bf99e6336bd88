// The abstraction over instruction sets: decoding 32 weights into vectors, and multiplying x by them.
//
// Arithmetic uses the vector types of GCC and Clang, which every target has, NEON included. Intrinsics are used only
// where these types lack the operation: looking up a table that is in a register, and products of narrow types.
//
// A type of lanes defines: `X`, the type of x; `Part`, some weights in vectors, with kParts parts per step of kBlocks
// blocks; `Sum`, float32 partial sums in kLanes lanes; kTileRows and kFewRows, the rows of x in a register tile where
// weights come from a panel and where they are decoded between load and product; and the functions of `Floats`. Formats
// provide the tables (mxfp4.h, nvfp4.h, int4.h).
#pragma once

#include <cstdint>
#include <cstring>

#include "product.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {  // unnamed, since this file is compiled for several targets, which must not share functions

template <typename T, int n>
struct Vector {
  typedef T Type __attribute__((vector_size(n * sizeof(T))));
};

template <typename V>
inline V Load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// The first `bytes` of a vector, the others zero and not read.
template <typename V>
inline V LoadPartial(const void* from, int64_t bytes) {
  V v = {};
  std::memcpy(&v, from, bytes < 0 ? 0 : bytes < static_cast<int64_t>(sizeof v) ? bytes : sizeof v);
  return v;
}

// The sum of each of four vectors' lanes, by halving.
template <int n>
inline void HorizontalSums(const typename Vector<float, n>::Type (&sums)[4], float (&out)[4]) {
  if constexpr (n == 1) {
    for (int i = 0; i < 4; ++i) out[i] = sums[i][0];
  } else if constexpr (n == 4) {
    typedef typename Vector<float, 4>::Type V;
    const V a = __builtin_shufflevector(sums[0], sums[1], 0, 4, 1, 5),
            b = __builtin_shufflevector(sums[0], sums[1], 2, 6, 3, 7);
    const V c = __builtin_shufflevector(sums[2], sums[3], 0, 4, 1, 5),
            d = __builtin_shufflevector(sums[2], sums[3], 2, 6, 3, 7);
    const V low = a + b, high = c + d;  // (0 1 0 1) and (2 3 2 3), each half of a sum
    const V total = __builtin_shufflevector(low, high, 0, 1, 4, 5) + __builtin_shufflevector(low, high, 2, 3, 6, 7);
    std::memcpy(out, &total, sizeof out);
  } else {
    typedef typename Vector<float, n / 2>::Type Half;
    Half halves[4];
    for (int i = 0; i < 4; ++i) {
      Half both[2];
      std::memcpy(both, &sums[i], sizeof both);
      halves[i] = both[0] + both[1];
    }
    HorizontalSums<n / 2>(halves, out);
  }
}

// a * b + c, fused wherever the target can, so that the compiler does not decide case by case.
inline float MultiplyAdd(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// The value of a 4-bit integer in two's complement: (code - zero) * scale.
struct AffineCode {
  float zero, scale;
};

#if defined(__AVX512F__)
constexpr int kFloatLanes = 16;
#elif defined(__AVX2__)
constexpr int kFloatLanes = 8;
#else
constexpr int kFloatLanes = 4;
#endif

// Parts of n float32 weights. x is float32, or bfloat16, which is exactly converted to it.
template <typename Input>
struct Floats {
  static constexpr int n = kFloatLanes;
  typedef Input X;
  typedef uint32_t TableEntry;
  typedef typename Vector<float, n>::Type Part;
  typedef Part Sum;
  static constexpr int kLanes = n, kBlocks = 1, kParts = jmx::kBlock / n;
  static constexpr int kTileRows = n == 16 ? 6 : n == 8 ? 3 : 4, kFewRows = n == 8 ? 2 : 4;  // 32 registers, or 16
  static constexpr bool kPacksX = false;

  // Tables of sixteen weights, the argument of `Decode`.
#if defined(__AVX512F__)
  static __m512 MakeTable(const uint32_t* weights) { return _mm512_load_ps(weights); }
  static __m512 MakeTable(AffineCode line) {
    const __m512 integers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    return _mm512_mul_ps(_mm512_sub_ps(integers, _mm512_set1_ps(line.zero)), _mm512_set1_ps(line.scale));
  }
#else
  static const uint32_t* MakeTable(const uint32_t* weights) { return weights; }
  static AffineCode MakeTable(AffineCode line) { return line; }
#endif

#if defined(__AVX512F__)
  static Part Decode(const uint8_t* values, __m512 table) {
    const __m512i bytes = _mm512_cvtepu8_epi64(_mm_cvtsi64_si128(Load<int64_t>(values)));
    // The low four bits of each 32 are used.
    const __m512i codes = _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));
    return (Part)_mm512_permutexvar_ps(codes, table);
  }
#elif defined(__AVX2__)
  static __m256i Codes(const uint8_t* values) {  // in the low four bits of each 32
    const __m256i bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(Load<int32_t>(values)));
    return _mm256_or_si256(bytes, _mm256_slli_epi64(bytes, 28));
  }
  static Part Decode(const uint8_t* values, const uint32_t* table) {
    const __m256i codes = Codes(values);
    const __m256 first = _mm256_permutevar8x32_ps(_mm256_load_ps(reinterpret_cast<const float*>(table)), codes);
    const __m256i signs = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(8)), 28);
    return (Part)_mm256_xor_ps(first, _mm256_castsi256_ps(signs));  // the second half of a table is the first, negated
  }
  static Part Decode(const uint8_t* values, AffineCode line) {
    const __m256i integers = _mm256_srai_epi32(_mm256_slli_epi32(Codes(values), 28), 28);
    return ((Part)_mm256_cvtepi32_ps(integers) - line.zero) * line.scale;
  }
#else
  static Part Decode(const uint8_t* values, const uint32_t* table) {
    typename Vector<uint32_t, n>::Type bits;
    for (int i = 0; i < n; ++i) bits[i] = table[values[i / 2] >> 4 * (i % 2) & 15];
    return (Part)bits;
  }
  static Part Decode(const uint8_t* values, AffineCode line) {
    typename Vector<int32_t, n>::Type integers;
    for (int i = 0; i < n; ++i) integers[i] = ((values[i / 2] >> 4 * (i % 2) & 15) ^ 8) - 8;
    return (__builtin_convertvector(integers, Part) - line.zero) * line.scale;
  }
#endif

  // A part of the weights of row `column`. In a tail, k ends within the block, and nothing past it is read.
  template <bool tail, typename Format>
  static Part Decode(const Format& format, int column, int64_t block, int part) {
    const int64_t first = block * jmx::kBlock + part * n;
    const uint8_t* values = format.Values(column) + first / 2;
    uint8_t some[n / 2] = {};
    if constexpr (tail) {
      const int64_t left = (format.k - first) / 2;
      for (int i = 0; i < n / 2 && i < left; ++i) some[i] = values[i];
      values = some;
    }
    return Decode(values, format.template Table<Floats, tail>(column, block, part));
  }

  // A part of a row of x.
  template <bool tail>
  static Part LoadX(const X* row, int64_t block, int part, int64_t k) {
    const int64_t first = block * jmx::kBlock + part * n;
    typedef typename Vector<X, n>::Type Given;
    const Given x =
        tail ? LoadPartial<Given>(row + (first < k ? first : k), (k - first) * static_cast<int64_t>(sizeof(X)))
             : Load<Given>(row + first);
    if constexpr (sizeof(X) == 4) return x;
    else return (Part)(__builtin_convertvector(x, typename Vector<uint32_t, n>::Type) << 16);
  }

  static Sum Add(Sum sum, Part weights, Part x) { return sum + weights * x; }  // fused where the target can
};

#if defined(__AVX512BF16__)
// Parts of 32 bfloat16 weights. The instruction adds the products of two consecutive ones to one float32.
struct Bfloats {
  typedef uint16_t X;
  typedef uint16_t TableEntry;
  typedef __m512i Part;
  typedef typename Vector<float, 16>::Type Sum;
  static constexpr int kLanes = 16, kBlocks = 1, kParts = 1, kTileRows = 6, kFewRows = 4;
  static constexpr bool kPacksX = false;

  struct Pair {  // one table for each half of a block
    __m512i tables;
  };

  static __m256i Half(const uint16_t* weights) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(weights)); }
  static __m512i MakeTable(const uint16_t* weights) { return _mm512_broadcast_i64x4(Half(weights)); }
  static Pair MakeTable(const uint16_t* first, const uint16_t* second) {
    return {_mm512_inserti64x4(_mm512_castsi256_si512(Half(first)), Half(second), 1)};
  }
  static __m512i MakeTable(AffineCode line) {  // weights are rounded once
    return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(Floats<float>::MakeTable(line)));
  }

  static __m512i Codes(__m128i values) {
    const __m512i bytes = _mm512_cvtepu8_epi32(values);
    return _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));  // in the low four bits of each 16
  }
  // Ignores the fifth bit.
  static Part Decode(__m128i values, __m512i table) { return _mm512_permutexvar_epi16(Codes(values), table); }
  static Part Decode(__m128i values, Pair pair) {
    const __m512i half = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const __m512i codes = _mm512_ternarylogic_epi32(Codes(values), _mm512_set1_epi16(15), half, 0xEA);  // a & b | c
    return _mm512_permutexvar_epi16(codes, pair.tables);
  }

  template <bool tail, typename Format>
  static Part Decode(const Format& format, int column, int64_t block, int) {
    const uint8_t* values = format.Values(column) + block * (jmx::kBlock / 2);
    const __m128i some =
        tail ? LoadPartial<__m128i>(values, format.k / 2 - block * (jmx::kBlock / 2)) : Load<__m128i>(values);
    return Decode(some, format.template Table<Bfloats, tail>(column, block, 0));
  }

  template <bool tail>
  static Part LoadX(const X* row, int64_t block, int, int64_t k) {
    const X* x = row + block * jmx::kBlock;
    return tail ? LoadPartial<Part>(x, (k - block * jmx::kBlock) * static_cast<int64_t>(sizeof(X))) : Load<Part>(x);
  }

  static Sum Add(Sum sum, Part weights, Part x) {
    return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)x);
  }
};
#endif

}  // namespace
