// Base of all formats: rows of weights as bytes of two codes each.
//
// A format is constructed from a GEMM and a first row of its weight. It provides the table of the values of a part's
// codes
// (`Table`), the factor of a row's sum (`Factor`), and the address of the scales of a block, for prefetches
// (`ScaleAddress`). For kernels that apply scales to sums, it also provides the values of elements (`ElementTable`),
// and the scales and zero points of a step, eight weights per lane (`Factors`, `Zeros`).
#pragma once

#include <cstdint>

#include "lanes.h"

namespace {

class PackedWeights {
 public:
  PackedWeights(const jmx::Gemm& gemm, int64_t column) : k(gemm.k), values_(gemm.values + column * (gemm.k / 2)) {}

  const uint8_t* Values(int64_t column) const { return values_ + column * (k / 2); }

  const int64_t k;

 private:
  const uint8_t* const values_;
};

#if defined(__AVX512BW__)
// Whether every byte is in least..most.
inline bool AllWithin(const uint8_t* bytes, int64_t count, int least, int most) {
  const __m512i low = _mm512_set1_epi8(static_cast<char>(least));
  __m512i above = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 64) {
    const __mmask64 here = count - i >= 64 ? ~0ull : (1ull << (count - i)) - 1;
    // Bytes below wrap.
    above = _mm512_max_epu8(above, _mm512_sub_epi8(_mm512_mask_loadu_epi8(low, here, bytes + i), low));
  }
  return _mm512_cmpgt_epu8_mask(above, _mm512_set1_epi8(static_cast<char>(most - least))) == 0;
}
#endif

}  // namespace
