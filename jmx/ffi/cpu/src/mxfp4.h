// MXFP4: groups of 32 e2m1 elements with an e8m0 scale.
#pragma once

#include "packed.h"
#include "tables.h"

namespace {

// Bits of bfloat16 elements with the scale code `scale`, negative zero as zero.
template <int scale>
struct PositiveZeros {
  alignas(32) uint16_t bits[16];
  constexpr PositiveZeros() : bits() {
    for (int element = 0; element < 16; ++element)
      bits[element] = element == 8 ? 0 : static_cast<uint16_t>(jmx::E8m0Bits(scale, element) >> 16);
  }
};

template <int scale>
inline constexpr PositiveZeros<scale> kPositiveZeros;

class Mxfp4 : public PackedWeights {
 public:
  static constexpr int kScalesEvery = 16;  // blocks of kTileColumns rows whose scales fill a line of the cache

  Mxfp4(const jmx::Gemm& gemm, int64_t column)
      : PackedWeights(gemm, column),
        scales_(reinterpret_cast<const uint8_t*>(gemm.scales) + column * (gemm.k / jmx::kBlock)) {}

  template <typename Lanes, bool tail>
  auto Table(int64_t column, int64_t block, int) const {
    return Lanes::MakeTable(jmx::kE8m0Tables<typename Lanes::TableEntry>.bits[*Scale(column, block)]);
  }

  float Factor(int64_t) const { return 1; }

  const void* ScaleAddress(int64_t blocks) const { return scales_ + blocks; }

#if defined(__AVX512BF16__)
  // Elements without scales, divided by 2^kShift so that their products do not overflow; factors are scales times
  // 2^kShift.
  static constexpr int kShift = 8;
  static constexpr bool kMayHaveZeros = false;
  static const uint16_t* ElementTable() { return jmx::kE8m0Tables<uint16_t>.bits[127 - kShift]; }
  static constexpr float kElementScale = 1;  // what sums are to be multiplied by

  static constexpr uint32_t kMostOrdinary = 246;

  // Scales outside of this range are rare, and use the tables of weights. Within it, weights are normal numbers.
  bool HasOrdinaryScales(int64_t columns) const {
    return AllWithin(scales_, columns * (k / jmx::kBlock), 2, kMostOrdinary);
  }

  // The values of elements with the largest ordinary scale. Those of a smaller one are less by units of the exponent,
  // which saturating subtraction does not take from zeros; negative zero is zero here.
  static constexpr bool kHasPowersOfTwo = true;
  static const uint16_t* LargestTable() { return kPositiveZeros<kMostOrdinary>.bits; }

  // By how much the four blocks of a step, whose scales begin at `scales`, are less, eight words each.
  static __m512i BelowLargest(const uint8_t* scales, int64_t weights) {
    // Selects zero for the low byte of each word, and the first byte for the high one.
    constexpr int kHigh = 0x00800080;
    const __m512i places = (__m512i)(typename Vector<uint32_t, 16>::Type){
        kHigh, kHigh, kHigh, kHigh,
        kHigh | 0x01000100, kHigh | 0x01000100, kHigh | 0x01000100, kHigh | 0x01000100,
        kHigh | 0x02000200, kHigh | 0x02000200, kHigh | 0x02000200, kHigh | 0x02000200,
        kHigh | 0x03000300, kHigh | 0x03000300, kHigh | 0x03000300, kHigh | 0x03000300};
    uint32_t four = 0;
    std::memcpy(&four, scales, weights / jmx::kBlock);
    const __m512i below = _mm512_set1_epi32(kMostOrdinary * 0x01010101u - four);  // of bytes: none borrows
    return _mm512_srli_epi16(_mm512_shuffle_epi8(below, places), 1);
  }

  // The i-th of four scales becomes the exponents of lane i.
  __m512 Factors(int64_t column, int64_t block, int64_t weights) const {
    const __m512i spread = _mm512_set_epi32(~252, ~252, ~252, ~252, ~253, ~253, ~253, ~253, ~254, ~254, ~254, ~254,
                                            ~255, ~255, ~255, ~255);
    uint32_t four = 0;
    std::memcpy(&four, Scale(column, block), weights / jmx::kBlock);
    return (__m512)_mm512_slli_epi32(_mm512_shuffle_epi8(_mm512_set1_epi32(four + kShift * 0x01010101), spread), 23);
  }
#endif

 private:
  const uint8_t* Scale(int64_t column, int64_t block) const { return scales_ + column * (k / jmx::kBlock) + block; }

  const uint8_t* const scales_;
};

}  // namespace
