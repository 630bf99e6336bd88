// AMX, for bfloat16 rows: one instruction multiplies 16 rows of the weight by 16 rows of x, 32 columns of each, and
// adds to 256 sums.
//
// Each row of a weight tile holds 32 columns of one row of the weight: in order, or, where scales are powers of two,
// those of a vector of a step of four blocks (four_blocks.h), whose exponents the scales change. Each row of an x tile
// holds one pair of columns of all 16 rows, so x is transposed first, once for all weights that it is multiplied by.
// kWeightTiles tiles of weights are decoded into a panel, which is multiplied by two tiles of x at a time, all sums in
// registers. The next panel is decoded between these instructions. Where two tiles of x are all, a panel is never read
// again: its steps share a ring of a few, which stays in the L1 cache, and are decoded just before they are multiplied.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "four_blocks.h"
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

  static int64_t ScratchBytes(int64_t k) {
    return kSumBytes + 2 * PanelBytes(k) + MaxXTiles(k) * Steps(k) * kTileBytes;
  }

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
  static constexpr int kLocality = 2;  // of prefetches: to the L2 cache
  static constexpr int64_t kXCacheBytes = 1 << 20;  // x that all panels are multiplied by in turn: half of the L2 cache

  // Blocks of a row decoded at once.
  static constexpr int kSideBySide = Format::kHasPowersOfTwo ? FourBlocks::kBlocks : 1;

  static constexpr int64_t kStepBytes = kWeightTiles * kTileBytes;
  static constexpr int64_t kRingSteps = 8, kStepsAhead = 4;  // of a ring, and how far decoding is ahead of multiplying

  static int64_t Steps(int64_t k) { return (jmx::Blocks(k) + kSideBySide - 1) / kSideBySide * kSideBySide; }
  static int64_t PanelBytes(int64_t k) { return std::max(Steps(k), kRingSteps) * kStepBytes; }
  static int64_t MaxXTiles(int64_t k) { return std::max<int64_t>(kXTiles, kXCacheBytes / (kTileBytes * Steps(k))); }

  // Where a panel has its steps: one after the other, or in a ring.
  struct Place {
    char* at;
    int64_t first = 0, mask = ~int64_t{0};  // slot of the first step, and of all slots

    char* Step(int64_t step) const { return at + ((first + step) & mask) * kStepBytes; }
  };

  // A panel of the rows of the weight from `column` on, decoded a few vectors at a time: row by row within each step.
  class Panel {
   public:
    Panel(const jmx::Gemm& gemm, int64_t column, Place place)
        : format_(gemm, column),
          place_(place),
          steps_(Steps(gemm.k)),
          columns_(static_cast<int>(std::clamp<int64_t>(gemm.columns - column, 0, kColumns))),
          prefetch_(format_.Values(columns_)) {
      if constexpr (Format::kHasPowersOfTwo) has_ordinary_scales_ = columns_ > 0 && format_.HasOrdinaryScales(columns_);
    }

    const Place& place() const { return place_; }
    int columns() const { return columns_; }
    int64_t left() const { return columns_ == 0 ? 0 : (steps_ - step_) * columns_ - row_ * kSideBySide; }
    float Factor(int row) const { return format_.Factor(row); }

    // At least `count` vectors, if as many are left.
    void Decode(int64_t count) {
      for (count = std::min(count, left()); count > 0;) {
        const int end = static_cast<int>(std::min<int64_t>(columns_, row_ + (count + kSideBySide - 1) / kSideBySide));
        count -= (end - row_) * kSideBySide;
        if ((step_ + kSideBySide) * jmx::kBlock <= format_.k) Decode<false>(end);
        else Decode<true>(end);
        if (row_ == columns_) row_ = 0, step_ += kSideBySide;
      }
    }

   private:
    // Decodes the step's blocks of rows up to `end`.
    template <bool tail>
    void Decode(int end) {
      Prefetch(end);
      if constexpr (Format::kHasPowersOfTwo) {
        if (has_ordinary_scales_) return DecodeOrdinary<tail>(end);
      }
      for (char* at = place_.Step(step_) + row_ * kRowBytes; row_ < end; ++row_, at += kRowBytes) {
        __m512i weights[kSideBySide];
        if constexpr (Format::kHasPowersOfTwo) FourBlocks::Decode(format_, row_, step_, weights);
        else weights[0] = Bfloats::Decode<tail>(format_, row_, step_, 0);
        Store(weights, at);
      }
    }

    // As much as is decoded now of what the next panel reads, in the order of memory, which the hardware follows.
    void Prefetch(int end) {
      const uint8_t* stop = prefetch_ + (end - row_) * kSideBySide * (jmx::kBlock / 2);
      for (; prefetch_ < stop; prefetch_ += 64) __builtin_prefetch(prefetch_, 0, kLocality);
      if (step_ % (Format::kScalesEvery * jmx::kTileColumns) == 0)
        for (int row = row_; row < end; ++row)
          __builtin_prefetch(format_.ScaleAddress((row + columns_) * jmx::Blocks(format_.k) + step_), 0, kLocality);
    }

    template <bool tail>
    void DecodeOrdinary(int end) {
      const int64_t row_bytes = format_.k / 2, row_blocks = jmx::Blocks(format_.k);
      const int64_t count = tail ? format_.k - step_ * jmx::kBlock : FourBlocks::kWeights;
      const __m512i table = FourBlocks::TableOf(Format::LargestTable());
      const uint8_t* values = format_.Values(row_) + step_ * (jmx::kBlock / 2);
      const auto* scales = static_cast<const uint8_t*>(format_.ScaleAddress(row_ * row_blocks + step_));
      char* at = place_.Step(step_) + row_ * kRowBytes;
      for (; row_ < end; ++row_, values += row_bytes, scales += row_blocks, at += kRowBytes) {
        const __m512i words = tail ? _mm512_maskz_loadu_epi8((1ull << count / 2) - 1, values) : Load<__m512i>(values);
        __m512i weights[kSideBySide];
        FourBlocks::Lookup(words, table, weights);
        const __m512i below = Format::BelowLargest(scales, count);
        for (__m512i& vector : weights) vector = _mm512_subs_epu16(vector, below);  // zeros stay
        Store(weights, at);
      }
    }

    static void Store(const __m512i (&weights)[kSideBySide], char* at) {
      for (int i = 0; i < kSideBySide; ++i) _mm512_store_si512(at + i * kStepBytes, weights[i]);
    }

    const Format format_;
    const Place place_;
    const int64_t steps_;
    const int columns_;
    bool has_ordinary_scales_ = false;
    const uint8_t* prefetch_;
    int64_t step_ = 0;
    int row_ = 0;
  };

  // Multiplies rows begin..end of x by all columns of the GEMM.
  static void MultiplyRows(const jmx::Gemm& gemm, int64_t begin, int64_t end) {
    const int64_t steps = Steps(gemm.k), tile_bytes = steps * kTileBytes, panel_bytes = PanelBytes(gemm.k);
    char *const sums = gemm.scratch, *const panels = sums + kSumBytes, *const x = panels + 2 * panel_bytes;
    for (int64_t row = begin; row < end; row += kSide)
      PackX(gemm, row, std::min(row + kSide, end), x + (row - begin) / kSide * tile_bytes);
    if (end - begin <= kXTiles * kSide) return MultiplyOnce(gemm, begin, end, x, sums, panels);
    // Of all products with one panel.
    const int64_t num_steps = (end - begin + kXTiles * kSide - 1) / (kXTiles * kSide) * steps;
    std::optional<Panel> both_panels[2];
    both_panels[0].emplace(gemm, 0, Place{panels});
    both_panels[0]->Decode(both_panels[0]->left());
    for (int64_t i = 0, column = 0; column < gemm.columns; ++i, column += kColumns) {
      const Panel& panel = *both_panels[i % 2];
      Panel& next =
          both_panels[(i + 1) % 2].emplace(gemm, column + kColumns, Place{panels + (i + 1) % 2 * panel_bytes});
      const int64_t share = (next.left() + num_steps - 1) / num_steps;
      for (int64_t row = begin; row < end; row += kXTiles * kSide) {
        const char* const tiles = x + (row - begin) / kSide * tile_bytes;
        MultiplyPanel(gemm, panel, tiles, row, std::min<int64_t>(end - row, kXTiles * kSide), column, sums,
                      [&] { next.Decode(share); });
      }
    }
  }

  // The same of rows that are multiplied at once: decoding goes around a ring, a few steps ahead, from panel to panel.
  static void MultiplyOnce(const jmx::Gemm& gemm, int64_t begin, int64_t end, const char* x, char* sums, char* ring) {
    const auto place = [&](int64_t panel) { return Place{ring, panel * Steps(gemm.k), kRingSteps - 1}; };
    std::optional<Panel> both_panels[2];
    both_panels[0].emplace(gemm, 0, place(0));
    both_panels[0]->Decode(kStepsAhead * both_panels[0]->columns());
    for (int64_t i = 0, column = 0; column < gemm.columns; ++i, column += kColumns) {
      Panel& panel = *both_panels[i % 2];
      Panel& next = both_panels[(i + 1) % 2].emplace(gemm, column + kColumns, place(i + 1));
      MultiplyPanel(gemm, panel, x, begin, end - begin, column, sums, [&] {
        Panel& decoded = panel.left() > 0 ? panel : next;
        decoded.Decode(decoded.columns());  // a step, as is multiplied
      });
    }
  }

  // Multiplies a panel, which begins at `column`, by `rows` rows of x from `row` on; `interleaved` is called after each
  // step.
  template <typename Interleaved>
  static void MultiplyPanel(const jmx::Gemm& gemm, const Panel& panel, const char* x, int64_t row, int64_t rows,
                            int64_t column, char* sums, const Interleaved& interleaved) {
    const auto multiply = [&]<int weights, int tokens>() {
      Multiply<weights, tokens>(panel.place(), x, Steps(gemm.k), sums, interleaved);
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
        StoreSums(gemm, panel, w, sums + (w * kXTiles + t) * kTileBytes, row + t * kSide,
                  std::min<int64_t>(rows - t * kSide, kSide), column);
  }

  // Rows begin..end of x, at most 16, as consecutive tiles.
  static void PackX(const jmx::Gemm& gemm, int64_t begin, int64_t end, char* tile) {
    const uint16_t* const x = reinterpret_cast<const uint16_t*>(gemm.x) + begin * gemm.k;
    for (int64_t step = 0; step < Steps(gemm.k); step += kSideBySide) {
      __m512i rows[kSideBySide][kSide] = {};
      for (int64_t m = 0; m < end - begin; ++m) {
        const uint16_t* const row = x + m * gemm.k;
        if constexpr (kSideBySide == 1) {
          rows[0][m] = (step + 1) * jmx::kBlock <= gemm.k ? Bfloats::LoadX<false>(row, step, 0, gemm.k)
                                                          : Bfloats::LoadX<true>(row, step, 0, gemm.k);
        } else {
          __m512i vectors[kSideBySide];
          FourBlocks::PackX(row + step * jmx::kBlock, gemm.k - step * jmx::kBlock, vectors);
          for (int i = 0; i < kSideBySide; ++i) rows[i][m] = vectors[i];
        }
      }
      for (int i = 0; i < kSideBySide; ++i, tile += kTileBytes) {
        Transpose(rows[i]);
        for (int j = 0; j < kSide; ++j) _mm512_store_si512(tile + j * kRowBytes, rows[i][j]);
      }
    }
  }

  // Multiplies tiles of a panel by tiles of x; `interleaved` is called after each step.
  template <int weights, int tokens, typename Interleaved>
  static void Multiply(const Place& panel, const char* x, int64_t steps, char* sums, const Interleaved& interleaved) {
    constexpr bool kTwoWeights = weights > 1, kTwoTokens = tokens > 1;
    const char* const second = x + steps * kTileBytes;
    asm volatile("" ::: "memory");  // GCC's intrinsics do not declare the memory that they access
    _tile_zero(0);
    if constexpr (kTwoTokens) _tile_zero(1);
    if constexpr (kTwoWeights) _tile_zero(2);
    if constexpr (kTwoWeights && kTwoTokens) _tile_zero(3);
    for (int64_t step = 0; step < steps; ++step) {
      const char* const tiles = panel.Step(step);
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
  static void StoreSums(const jmx::Gemm& gemm, const Panel& panel, int w, const char* sums, int64_t row, int64_t rows,
                        int64_t column) {
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
      _mm512_mask_storeu_ps(gemm.out + (row + m) * gemm.out_stride + column, here,
                            _mm512_fmadd_ps((__m512)totals[m], factor, bias));
  }
};

}  // namespace
