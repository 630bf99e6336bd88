// AMX's tiles in memory, for machines that lack them: put before a source, it takes the place of their intrinsics.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace emulated {

inline thread_local uint8_t tiles[8][16][64];

inline void Load(int tile, const void* from, int64_t stride) {
  for (int row = 0; row < 16; ++row) std::memcpy(tiles[tile][row], static_cast<const char*>(from) + row * stride, 64);
}

inline void Store(int tile, void* to, int64_t stride) {
  for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile][row], 64);
}

inline void Multiply(int sums, int a, int b) {  // Intel's Software Developer's Manual, TDPBF16PS
  for (int m = 0; m < 16; ++m) {
    __m512 sum = _mm512_loadu_ps(tiles[sums][m]);
    for (int k = 0; k < 16; ++k) {
      int32_t pair;
      std::memcpy(&pair, tiles[a][m] + 4 * k, sizeof pair);
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_loadu_si512(tiles[b][k]));
    }
    _mm512_storeu_ps(tiles[sums][m], sum);
  }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(shapes) static_cast<void>(shapes)
#define _tile_release() static_cast<void>(0)
#define _tile_loadd(tile, from, stride) emulated::Load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::Store(tile, to, stride)
#define _tile_zero(tile) std::memset(emulated::tiles[tile], 0, sizeof emulated::tiles[tile])
#define _tile_dpbf16ps(sums, a, b) emulated::Multiply(sums, a, b)
