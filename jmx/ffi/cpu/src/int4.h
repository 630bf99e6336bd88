// 4-bit integers in groups that share a scale of 16 or 32 bits and, optionally, a zero point: INT4, MXINT4.
//
// The scale of a whole row multiplies the row's sum; until then its weights are integers.
#pragma once

#include <bit>
#include <type_traits>

#include "packed.h"

namespace {

// Types of scales, and their conversion to float32.
struct Bfloat16 {
  typedef uint16_t Bits;
  static float ToFloat(Bits bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

struct Float16 {
  typedef uint16_t Bits;
  static float ToFloat(Bits bits) {
    const float magnitude = std::bit_cast<float>((bits & 0x7FFFu) << 13) * 0x1p112f;  // subnormal numbers included
    const uint32_t special = (bits & 0x7C00) == 0x7C00 ? 0x7F800000 : 0;  // infinite, or NaN
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | special | (bits & 0x8000u) << 16);
  }
};

struct Float32 {
  typedef float Bits;
  static float ToFloat(Bits number) { return number; }
};

template <typename Scale>
class Int4 : public PackedWeights {
 public:
  static constexpr int kScalesEvery = 16 / sizeof(typename Scale::Bits);

  Int4(const jmx::Gemm& gemm, int64_t column)
      : PackedWeights(gemm, column),
        shift_(gemm.group == jmx::kWholeRow ? kShiftToZero
                                            : std::countr_zero(static_cast<uint64_t>(gemm.group / jmx::kBlock))),
        groups_(gemm.group == jmx::kWholeRow ? 1 : gemm.k / gemm.group),
        scales_(gemm.scales + column * groups_ * sizeof(typename Scale::Bits)),
        zeros_(gemm.zero_points == nullptr ? nullptr : gemm.zero_points + column * groups_) {}

  template <typename Lanes, bool tail>
  auto Table(int64_t column, int64_t block, int) const {
    const float scale = ScaleOf(column, block);
    if (zeros_ == nullptr) return Lanes::MakeTable(AffineCode{0, scale});  // known sooner than with a loaded zero point
    return Lanes::MakeTable(AffineCode{static_cast<float>(Zero(column, block)), scale});
  }

  float Factor(int64_t column) const { return shift_ == kShiftToZero ? ToFloat(column) : 1; }

  const void* ScaleAddress(int64_t blocks) const { return scales_ + (blocks >> shift_) * sizeof(typename Scale::Bits); }

  // The scales of a step, or of the last `weights` weights of a row, one per lane. Lanes past these have any value.
#if defined(__AVX512BW__)
  __m512 Factors(int64_t column, int64_t block, int64_t weights) const {
    if (shift_ == kShiftToZero) return _mm512_set1_ps(1);
    const char* scales = scales_ + (column * groups_ + (block >> shift_)) * sizeof(typename Scale::Bits);
    if constexpr (sizeof(typename Scale::Bits) == 4) {
      return _mm512_permutexvar_ps(GroupOfLane(), _mm512_maskz_loadu_ps(GroupMask(weights), scales));
    } else {
      const __m512i few = _mm512_permutexvar_epi32(
          GroupOfLane(),
          _mm512_cvtepu16_epi32(_mm512_castsi512_si256(_mm512_maskz_loadu_epi16(GroupMask(weights), scales))));
      if constexpr (std::is_same_v<Scale, Bfloat16>) return (__m512)_mm512_slli_epi32(few, 16);
      else return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(few));
    }
  }

  // The zero points of the same lanes.
  __m512i Zeros(int64_t column, int64_t block, int64_t weights) const {
    if (shift_ == kShiftToZero) return _mm512_set1_epi32(zeros_[column]);
    const __m512i few = _mm512_maskz_loadu_epi8(GroupMask(weights), zeros_ + column * groups_ + (block >> shift_));
    return _mm512_permutexvar_epi32(GroupOfLane(), _mm512_cvtepi8_epi32(_mm512_castsi512_si128(few)));
  }
#else
  auto Factors(int64_t column, int64_t block, int64_t weights) const {
    typename Vector<float, kFloatLanes>::Type scales = {};
    for (int i = 0; i < kFloatLanes && i * 8 < weights; ++i) scales[i] = ScaleOf(column, block + i / 4);
    return scales;
  }
  auto Zeros(int64_t column, int64_t block, int64_t weights) const {
    typename Vector<int32_t, kFloatLanes>::Type zeros = {};
    for (int i = 0; i < kFloatLanes && i * 8 < weights; ++i) zeros[i] = Zero(column, block + i / 4);
    return zeros;
  }
#endif

#if defined(__AVX512BF16__)
  static constexpr bool kHasPowersOfTwo = false;
  static constexpr bool kMayHaveZeros = true;
  static const uint16_t* ElementTable() { return kIntegers; }
  // Elements are this much smaller, so that products without their scale do not overflow.
  static constexpr float kElementScale = 256;
#endif

 private:
  // The scale and zero point of a block of a row.
  float ScaleOf(int64_t column, int64_t block) const {
    return shift_ == kShiftToZero ? 1 : ToFloat(column * groups_ + (block >> shift_));
  }
  int8_t Zero(int64_t column, int64_t block) const {
    return zeros_ == nullptr ? 0 : zeros_[column * groups_ + (block >> shift_)];
  }

  static constexpr int kShiftToZero = 62;  // shifts every group index to 0

  float ToFloat(int64_t group) const {
    typename Scale::Bits bits;
    std::memcpy(&bits, scales_ + group * sizeof bits, sizeof bits);
    return Scale::ToFloat(bits);
  }

#if defined(__AVX512BW__)
  // A mask of the groups of `weights` weights.
  uint32_t GroupMask(int64_t weights) const { return (1u << (weights / jmx::kBlock >> shift_)) - 1; }

  // The index of each lane's group in its step.
  __m512i GroupOfLane() const {
    const __m512i blocks = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_srl_epi32(blocks, _mm_cvtsi32_si128(shift_));
  }
#endif
#if defined(__AVX512BF16__)
  // Each code's integer, divided by 256, in bfloat16.
  alignas(32) static constexpr uint16_t kIntegers[16] = {0x0000, 0x3B80, 0x3C00, 0x3C40, 0x3C80, 0x3CA0, 0x3CC0, 0x3CE0,
                                                        0xBD00, 0xBCE0, 0xBCC0, 0xBCA0, 0xBC80, 0xBC40, 0xBC00, 0xBB80};
#endif

  const int shift_;  // log2 of the blocks of a group
  const int64_t groups_;
  const char* const scales_;
  const int8_t* const zeros_;
};

}  // namespace
