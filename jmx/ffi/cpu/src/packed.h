// What all formats share: rows of weights as bytes of two codes each.
//
// A format is a class that is made of a piece and the first of its rows that matter, and says what these are worth:
// `Table`, what the codes of a part stand for; `Factor`, what multiplies a row's sum; and `Ahead`, where the scales lie that
// are read when a given block's neighbours are. For products whose scales come afterwards it has the elements themselves,
// and their scales a step, eight weights a lane: `Elements`, `Factors`, `Zeros`.
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
// Whether every byte lies between `least` and `most`.
inline bool AllWithin(const uint8_t* bytes, int64_t count, int least, int most) {
  const __m512i low = _mm512_set1_epi8(static_cast<char>(least));
  __m512i above = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 64) {
    const __mmask64 here = count - i >= 64 ? ~0ull : (1ull << (count - i)) - 1;
    above = _mm512_max_epu8(above, _mm512_sub_epi8(_mm512_mask_loadu_epi8(low, here, bytes + i), low));  // wraps below it
  }
  return _mm512_cmpgt_epu8_mask(above, _mm512_set1_epi8(static_cast<char>(most - least))) == 0;
}
#endif

}  // namespace
