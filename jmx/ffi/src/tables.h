// What an e2m1 element is worth under each e8m0 scale: made of integers while compiling, so exact wherever the type can
// hold it, infinite above its range, and NaN for scale code 255. bfloat16 holds every value that float32 does.
#pragma once

#include <cstdint>

namespace jmx {

constexpr uint32_t FloatBits(int scale, int element) {
  constexpr uint32_t kDoubled[8] = {0, 1, 2, 3, 4, 6, 8, 12};  // twice the magnitudes 0, 0.5, 1 ... 6
  const uint32_t sign = element & 8 ? 0x80000000u : 0, doubled = kDoubled[element & 7];
  if (scale == 255) return 0x7FC00000;
  if (doubled == 0) return sign;
  int log2 = 0;
  while (doubled >> (log2 + 1)) ++log2;
  const int exponent = scale - 1 + log2;  // of doubled * 2^(scale - 128), biased
  if (exponent >= 255) return sign | 0x7F800000;
  if (exponent < 1) return sign | doubled << (scale + 21);  // subnormal: in units of 2^-149
  return sign | static_cast<uint32_t>(exponent) << 23 | (doubled << (23 - log2) & 0x7FFFFF);
}

template <typename T, int kShift>
struct Table {
  T bits[256][16];
  constexpr Table() : bits() {
    for (int scale = 0; scale < 256; ++scale)
      for (int element = 0; element < 16; ++element) bits[scale][element] = static_cast<T>(FloatBits(scale, element) >> kShift);
  }
};

alignas(64) inline constexpr Table<uint32_t, 0> kFloats;
alignas(64) inline constexpr Table<uint16_t, 16> kBfloats;

}  // namespace jmx
