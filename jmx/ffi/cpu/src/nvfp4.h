// NVFP4: groups of 16 e2m1 elements with an e4m3 scale, and a float32 scale for each row.
#pragma once

#include "packed.h"
#include "tables.h"

namespace {

class Nvfp4 : public PackedWeights {
 public:
  static constexpr int kScalesEvery = 8;

  Nvfp4(const jmx::Gemm& gemm, int64_t column)
      : PackedWeights(gemm, column),
        scales_(reinterpret_cast<const uint8_t*>(gemm.scales) + column * (gemm.k / kGroup)),
        factors_(gemm.global_scales + column) {}

  template <typename Lanes, bool tail>
  auto Table(int64_t column, int64_t block, int part) const {
    const auto of = [](int scale) { return jmx::kE4m3Tables<typename Lanes::TableEntry>.bits[scale]; };
    const uint8_t* two = Scale(column, block);
    const bool alone = tail && k % jmx::kBlock <= kGroup;  // the second half has no weights
    if constexpr (Lanes::kParts == 1) return Lanes::MakeTable(of(two[0]), of(two[alone ? 0 : 1]));
    else return Lanes::MakeTable(of(two[alone ? 0 : part * 2 / Lanes::kParts]));
  }

  float Factor(int64_t column) const { return factors_[column]; }

  const void* ScaleAddress(int64_t blocks) const { return scales_ + 2 * blocks; }

#if defined(__AVX512BF16__)
  static constexpr int kShift = 8;  // as in Mxfp4
  static constexpr bool kHasPowersOfTwo = false;
  static constexpr bool kMayHaveZeros = false;
  static const uint16_t* ElementTable() { return jmx::kE8m0Tables<uint16_t>.bits[127 - kShift]; }
  static constexpr float kElementScale = 1;

  // Positive normal numbers.
  bool HasOrdinaryScales(int64_t columns) const { return AllWithin(scales_, columns * (k / kGroup), 8, 126); }

  // The i-th of eight scales, for two lanes: its seven bits, in the place of a float32's exponent and mantissa.
  __m512 Factors(int64_t column, int64_t block, int64_t weights) const {
    constexpr uint32_t kOnly = 0x80008080;  // selects one byte, and zeros
    const __m512i spread = (__m512i)(typename Vector<uint32_t, 16>::Type){
        kOnly,           kOnly,           kOnly | 1 << 16, kOnly | 1 << 16, kOnly | 2 << 16, kOnly | 2 << 16,
        kOnly | 3 << 16, kOnly | 3 << 16, kOnly | 4 << 16, kOnly | 4 << 16, kOnly | 5 << 16, kOnly | 5 << 16,
        kOnly | 6 << 16, kOnly | 6 << 16, kOnly | 7 << 16, kOnly | 7 << 16};
    uint64_t eight = 0;
    std::memcpy(&eight, Scale(column, block), weights / kGroup);
    const __m512i bits = _mm512_slli_epi32(_mm512_shuffle_epi8(_mm512_set1_epi64(eight), spread), 4);
    return (__m512)_mm512_add_epi32(bits, _mm512_set1_epi32((127 - 7 + kShift) << 23));
  }
#endif

 private:
  static constexpr int kGroup = 16;

  const uint8_t* Scale(int64_t column, int64_t block) const { return scales_ + column * (k / kGroup) + 2 * block; }

  const uint8_t* const scales_;
  const float* const factors_;
};

}  // namespace
