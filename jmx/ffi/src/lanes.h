// The abstraction over instruction sets: how a block of 32 weights becomes vectors, and how these multiply x.
//
// Arithmetic is on the compiler's own vector types (GCC's and Clang's), which every target has: NEON, too. Intrinsics
// stand only where those lack the operation: the look-up in a table that lies in a register, and bfloat16's products.
//
// A type of lanes has: `Part`, a vector of weights; kParts of them a block; `Sum`, float32 partial sums; kRows, how many
// rows of x meet a decoded part in registers; and the functions of `Floats`.
#pragma once

#include <cstdint>
#include <cstring>

#include "tables.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {  // this file is compiled for several targets: nothing may be shared between them

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

// The sums of four vectors' lanes, by halves.
template <int n>
inline void Totals(const typename Vector<float, n>::Type (&sums)[4], float (&out)[4]) {
  if constexpr (n == 1) {
    for (int i = 0; i < 4; ++i) out[i] = sums[i][0];
  } else if constexpr (n == 4) {
    typedef typename Vector<float, 4>::Type V;
    const V a = __builtin_shufflevector(sums[0], sums[1], 0, 4, 1, 5), b = __builtin_shufflevector(sums[0], sums[1], 2, 6, 3, 7);
    const V c = __builtin_shufflevector(sums[2], sums[3], 0, 4, 1, 5), d = __builtin_shufflevector(sums[2], sums[3], 2, 6, 3, 7);
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
    Totals<n / 2>(halves, out);
  }
}

// Weights as n floats a part, and x as float32 or, one exact step before that, bfloat16.
template <int n, typename X>
struct Floats {
  typedef typename Vector<float, n>::Type Part;
  typedef Part Sum;
  static constexpr int kLanes = n, kParts = jmx::kBlock / n;

  static Part Decode(const uint8_t* values, const uint8_t* scale, int part) {
    const uint32_t* table = jmx::kFloats.bits[*scale];
    values += part * n / 2;
#if defined(__AVX512F__)
    static_assert(n == 16);
    const __m512i bytes = _mm512_cvtepu8_epi64(_mm_cvtsi64_si128(Load<int64_t>(values)));
    const __m512i codes = _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));  // the low four bits of 32 count
    return (Part)_mm512_permutexvar_ps(codes, _mm512_load_ps(table));
#elif defined(__AVX2__)
    static_assert(n == 8);
    const __m256i bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(Load<int32_t>(values)));
    const __m256i codes = _mm256_or_si256(bytes, _mm256_slli_epi64(bytes, 28));
    const __m256 magnitudes = _mm256_permutevar8x32_ps(_mm256_load_ps(reinterpret_cast<const float*>(table)), codes);
    const __m256i signs = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(8)), 28);
    return (Part)_mm256_or_ps(magnitudes, _mm256_castsi256_ps(signs));
#else
    typename Vector<uint32_t, n>::Type bits;
    for (int i = 0; i < n; ++i) bits[i] = table[values[i / 2] >> 4 * (i % 2) & 15];
    return (Part)bits;
#endif
  }

  static Part LoadX(const X* x) {
    if constexpr (sizeof(X) == 4) {
      return Load<Part>(x);
    } else {
      typedef typename Vector<uint32_t, n>::Type Wide;
      return (Part)(__builtin_convertvector(Load<typename Vector<uint16_t, n>::Type>(x), Wide) << 16);
    }
  }

  static Sum Add(Sum sum, Part weights, Part x) { return sum + weights * x; }  // fused where the target can
};

#if defined(__AVX512BF16__)
// Weights as 32 bfloat16, whose neighbours' products the instruction adds to one float32.
struct Bfloats {
  typedef __m512i Part;
  typedef typename Vector<float, 16>::Type Sum;
  static constexpr int kLanes = 16, kParts = 1;

  static Part Decode(const uint8_t* values, const uint8_t* scale, int) {
    const __m256i table = _mm256_load_si256(reinterpret_cast<const __m256i*>(jmx::kBfloats.bits[*scale]));
    const __m512i bytes = _mm512_cvtepu8_epi32(Load<__m128i>(values));
    const __m512i codes = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));  // bit 4 of 16 finds the table's copy
    return _mm512_permutexvar_epi16(codes, _mm512_broadcast_i64x4(table));
  }

  static Part LoadX(const uint16_t* x) { return Load<Part>(x); }

  static Sum Add(Sum sum, Part weights, Part x) { return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)x); }
};
#endif

}  // namespace
