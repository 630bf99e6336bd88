// AMX, for calls with many bfloat16 rows per expert: one instruction multiplies 16 rows of the weight by 16 rows of x, 32
// columns of each, and adds to 256 sums.
//
// Each row of a weight tile holds 32 columns of one row of the weight, in order. Each row of an x tile holds one pair of
// columns of all 16 rows, so x is transposed first, once for all weights that it is multiplied by. kWeightTiles tiles of
// weights are decoded into a panel, which is multiplied by two tiles of x at a time, all sums in registers. The next panel
// is decoded between these instructions.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "lanes.h"
#include "product.h"

namespace {

class TileRegisters {
 public:
  TileRegisters() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
    _tile_loadconfig(&shapes);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// Transposes a matrix of 16 x 16 words, one vector per row.
inline void Transpose(__m512i (&rows)[16]) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i)  // b[4 * q + i]: columns i, i + 4, i + 8, i + 12 of rows 4 * q to 4 * q + 3
    for (int j = 0; j < 2; ++j) {
      const __m512i first = b[8 * j + i], second = b[8 * j + 4 + i];
      a[4 * i + j] = _mm512_shuffle_i32x4(first, second, 0x88);
      a[4 * i + 2 + j] = _mm512_shuffle_i32x4(first, second, 0xDD);
    }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(a[4 * i], a[4 * i + 1], 0x88);
    rows[8 + i] = _mm512_shuffle_i32x4(a[4 * i], a[4 * i + 1], 0xDD);
    rows[4 + i] = _mm512_shuffle_i32x4(a[4 * i + 2], a[4 * i + 3], 0x88);
    rows[12 + i] = _mm512_shuffle_i32x4(a[4 * i + 2], a[4 * i + 3], 0xDD);
  }
}

template <typename Format>
class Amx {
 public:
  static constexpr int64_t kTasksPerClaim = 16;  // many, since x is transposed once for all tasks of a claim

  static int64_t ScratchBytes(int64_t k) { return kSumBytes + 2 * PanelBytes(k) + MaxXTiles(k) * Steps(k) * kTileBytes; }

  static void RunGemm(const jmx::Gemm& gemm) {
    const TileRegisters configured;
    const int64_t tiles = (gemm.rows + kSide - 1) / kSide, parts = (tiles + MaxXTiles(gemm.k) - 1) / MaxXTiles(gemm.k);
    for (int64_t part = 0; part < parts; ++part)
      MultiplyRows(gemm, tiles * part / parts * kSide, std::min(gemm.rows, tiles * (part + 1) / parts * kSide));
  }

 private:
  static constexpr int kSide = 16;  // rows of a tile, and its columns of 4 bytes
  static constexpr int kTileBytes = 1024, kRowBytes = 64;
  static constexpr int kWeightTiles = 2, kXTiles = 2;  // their products' sums fill half of the registers
  static constexpr int kColumns = kWeightTiles * kSide;  // rows of the weight in a panel
  static constexpr int kSumBytes = kWeightTiles * kXTiles * kTileBytes;
  static constexpr int64_t kXCacheBytes = 1 << 20;  // x that all panels are multiplied by in turn: half of the L2 cache

  static int64_t Steps(int64_t k) { return jmx::Blocks(k); }
  static int64_t PanelBytes(int64_t k) { return Steps(k) * kWeightTiles * kTileBytes; }
  static int64_t MaxXTiles(int64_t k) { return std::max<int64_t>(kXTiles, kXCacheBytes / (kTileBytes * Steps(k))); }

  // A panel of the rows of the weight from `column` on, decoded a few vectors at a time: row by row within each step.
  class Panel {
   public:
    Panel(const jmx::Gemm& gemm, int64_t column, char* at)
        : format_(gemm, column), at_(at), steps_(Steps(gemm.k)), whole_(gemm.k / jmx::kBlock),
          columns_(static_cast<int>(std::clamp<int64_t>(gemm.columns - column, 0, kColumns))) {}

    const char* data() const { return at_; }
    int columns() const { return columns_; }
    int64_t left() const { return columns_ == 0 ? 0 : (steps_ - step_) * columns_ - row_; }
    float Factor(int row) const { return format_.Factor(row); }

    void Decode(int64_t count) {
      for (count = std::min(count, left()); count > 0;) {
        const int end = static_cast<int>(std::min<int64_t>(columns_, row_ + count));
        count -= end - row_;
        if (step_ < whole_) Decode<false>(end);
        else Decode<true>(end);
        if (row_ == columns_) row_ = 0, ++step_;
      }
    }

   private:
    static constexpr int kStepsOfALine = 64 / (jmx::kBlock / 2);

    template <bool tail>
    void Decode(int end) {
      char* const tile = at_ + step_ * kWeightTiles * kTileBytes;
      for (; row_ < end; ++row_) {
        // Prefetches what the next panel reads.
        if (step_ % kStepsOfALine == 0) __builtin_prefetch(format_.Values(row_ + columns_) + step_ * (jmx::kBlock / 2), 0, 2);
        if (step_ % (Format::kScalesEvery * jmx::kTileColumns) == 0)
          __builtin_prefetch(format_.ScaleAddress((row_ + columns_) * steps_ + step_), 0, 2);
        _mm512_store_si512(tile + row_ * kRowBytes, Bfloats::Decode<tail>(format_, row_, step_, 0));
      }
    }

    const Format format_;
    char* const at_;
    const int64_t steps_, whole_;
    const int columns_;
    int64_t step_ = 0;
    int row_ = 0;
  };

  // Multiplies rows begin..end of x by all columns of the GEMM.
  static void MultiplyRows(const jmx::Gemm& gemm, int64_t begin, int64_t end) {
    const int64_t steps = Steps(gemm.k), tile_bytes = steps * kTileBytes, panel_bytes = PanelBytes(gemm.k);
    char *const sums = gemm.scratch, *const panels = sums + kSumBytes, *const x = panels + 2 * panel_bytes;
    for (int64_t row = begin; row < end; row += kSide)
      PackX(gemm, row, std::min(row + kSide, end), x + (row - begin) / kSide * tile_bytes);
    const int64_t num_steps = (end - begin + kXTiles * kSide - 1) / (kXTiles * kSide) * steps;  // of all products with one panel
    std::optional<Panel> both_panels[2];
    both_panels[0].emplace(gemm, 0, panels);
    both_panels[0]->Decode(both_panels[0]->left());
    for (int64_t i = 0, column = 0; column < gemm.columns; ++i, column += kColumns) {
      const Panel& panel = *both_panels[i % 2];
      Panel& next = both_panels[(i + 1) % 2].emplace(gemm, column + kColumns, panels + (i + 1) % 2 * panel_bytes);
      const int64_t share = (next.left() + num_steps - 1) / num_steps;
      for (int64_t row = begin; row < end; row += kXTiles * kSide) {
        const int64_t rows = std::min<int64_t>(end - row, kXTiles * kSide);
        const char* const tiles = x + (row - begin) / kSide * tile_bytes;
        const auto multiply = [&]<int weights, int tokens>() {
          Multiply<weights, tokens>(panel.data(), tiles, steps, sums, [&] { next.Decode(share); });
        };
        if (panel.columns() > kSide) {
          if (rows > kSide) multiply.template operator()<2, 2>();
          else multiply.template operator()<2, 1>();
        } else {
          if (rows > kSide) multiply.template operator()<1, 2>();
          else multiply.template operator()<1, 1>();
        }
        for (int w = 0; w * kSide < panel.columns(); ++w)
          for (int t = 0; t * kSide < rows; ++t)
            StoreSums(gemm, panel, w, sums + (w * kXTiles + t) * kTileBytes, row + t * kSide, std::min<int64_t>(rows - t * kSide, kSide), column);
      }
    }
  }

  // Rows begin..end of x, at most 16, as consecutive tiles.
  static void PackX(const jmx::Gemm& gemm, int64_t begin, int64_t end, char* tile) {
    const uint16_t* const x = reinterpret_cast<const uint16_t*>(gemm.x) + begin * gemm.k;
    for (int64_t step = 0; step < Steps(gemm.k); ++step, tile += kTileBytes) {
      __m512i rows[kSide] = {};
      for (int64_t m = 0; m < end - begin; ++m) {
        const uint16_t* const row = x + m * gemm.k;
        rows[m] = (step + 1) * jmx::kBlock <= gemm.k ? Bfloats::LoadX<false>(row, step, 0, gemm.k) : Bfloats::LoadX<true>(row, step, 0, gemm.k);
      }
      Transpose(rows);
      for (int i = 0; i < kSide; ++i) _mm512_store_si512(tile + i * kRowBytes, rows[i]);
    }
  }

  // Multiplies tiles of a panel by tiles of x; `interleaved` is called after each step.
  template <int weights, int tokens, typename Interleaved>
  static void Multiply(const char* panel, const char* x, int64_t steps, char* sums, const Interleaved& interleaved) {
    constexpr bool kTwoWeights = weights > 1, kTwoTokens = tokens > 1;
    const char* const second = x + steps * kTileBytes;
    asm volatile("" ::: "memory");  // GCC's intrinsics do not declare the memory that they access
    _tile_zero(0);
    if constexpr (kTwoTokens) _tile_zero(1);
    if constexpr (kTwoWeights) _tile_zero(2);
    if constexpr (kTwoWeights && kTwoTokens) _tile_zero(3);
    for (int64_t step = 0; step < steps; ++step) {
      const char* const tiles = panel + step * kWeightTiles * kTileBytes;
      _tile_loadd(4, tiles, kRowBytes);
      _tile_loadd(6, x + step * kTileBytes, kRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kTwoTokens) {
        _tile_loadd(7, second + step * kTileBytes, kRowBytes);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (kTwoWeights) {
        _tile_loadd(5, tiles + kTileBytes, kRowBytes);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (kTwoTokens) _tile_dpbf16ps(3, 5, 7);
      }
      interleaved();
    }
    _tile_stored(0, sums, kRowBytes);
    if constexpr (kTwoTokens) _tile_stored(1, sums + kTileBytes, kRowBytes);
    if constexpr (kTwoWeights) _tile_stored(2, sums + kXTiles * kTileBytes, kRowBytes);
    if constexpr (kTwoWeights && kTwoTokens) _tile_stored(3, sums + (kXTiles + 1) * kTileBytes, kRowBytes);
    asm volatile("" ::: "memory");
  }

  // Stores the sums of tile `w` of a panel that begins at `column`, for `rows` rows of x from `row` on.
  static void StoreSums(const jmx::Gemm& gemm, const Panel& panel, int w, const char* sums, int64_t row, int64_t rows, int64_t column) {
    const int columns = std::min(kSide, panel.columns() - w * kSide);
    const __mmask16 here = static_cast<__mmask16>((1u << columns) - 1);
    alignas(64) float factors[kSide] = {};
    for (int n = 0; n < columns; ++n) factors[n] = panel.Factor(w * kSide + n);
    const __m512 factor = _mm512_load_ps(factors);
    column += w * kSide;
    const __m512 bias = gemm.bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(here, gemm.bias + column);
    __m512i totals[kSide];
    for (int n = 0; n < kSide; ++n) totals[n] = _mm512_load_si512(sums + n * kRowBytes);
    Transpose(totals);
    for (int m = 0; m < rows; ++m)
      _mm512_mask_storeu_ps(gemm.out + (row + m) * gemm.out_stride + column, here, _mm512_fmadd_ps((__m512)totals[m], factor, bias));
  }
};

}  // namespace
