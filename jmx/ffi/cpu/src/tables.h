// The value of each e2m1 element with each 8-bit scale, computed at compile time: exact wherever the type can represent
// it. bfloat16 represents every float32 value that occurs here.
#pragma once

#include <bit>
#include <cstdint>

namespace jmx {

constexpr uint32_t kNan = 0x7FC00000;

// With an e8m0 scale. Computed in integers, since values may be infinite or subnormal. NaN for code 255.
constexpr uint32_t E8m0Bits(int scale, int element) {
  constexpr uint32_t kDoubled[8] = {0, 1, 2, 3, 4, 6, 8, 12};  // twice the magnitudes 0, 0.5, 1 ... 6
  const uint32_t sign = element & 8 ? 0x80000000u : 0, doubled = kDoubled[element & 7];
  if (scale == 255) return kNan;
  if (doubled == 0) return sign;
  int log2 = 0;
  while (doubled >> (log2 + 1)) ++log2;
  const int exponent = scale - 1 + log2;  // of doubled * 2^(scale - 128), biased
  if (exponent >= 255) return sign | 0x7F800000;
  if (exponent < 1) return sign | doubled << (scale + 21);  // subnormal: in units of 2^-149
  return sign | static_cast<uint32_t>(exponent) << 23 | (doubled << (23 - log2) & 0x7FFFFF);
}

// With an e4m3 scale, of either sign: products have six significant bits and are far within the range. NaN for 127 and
// 255.
constexpr uint32_t E4m3Bits(int scale, int element) {
  constexpr float kMagnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  if ((scale & 127) == 127) return kNan;
  const int field = scale >> 3 & 15, mantissa = scale & 7;
  float magnitude = static_cast<float>(field == 0 ? mantissa : 8 + mantissa) / 512;  // in units of the least one, 2^-9
  for (int i = 1; i < field; ++i) magnitude *= 2;
  const uint32_t sign = static_cast<uint32_t>((scale >> 4 ^ element) & 8) << 28;
  return sign | std::bit_cast<uint32_t>(magnitude * kMagnitudes[element & 7]);
}

// `Entry`: uint32_t, float32's bits; or uint16_t, their upper half, which is a bfloat16.
template <typename TableEntry, uint32_t (*bits_of)(int scale, int element)>
struct Table {
  TableEntry bits[256][16];
  constexpr Table() : bits() {
    for (int scale = 0; scale < 256; ++scale)
      for (int element = 0; element < 16; ++element)
        bits[scale][element] = static_cast<TableEntry>(bits_of(scale, element) >> (32 - 8 * sizeof(TableEntry)));
  }
};

template <typename TableEntry>
alignas(64) inline constexpr Table<TableEntry, E8m0Bits> kE8m0Tables;
template <typename TableEntry>
alignas(64) inline constexpr Table<TableEntry, E4m3Bits> kE4m3Tables;

}  // namespace jmx
