// What the kernel of kernels.cu is given: for the handler on the host, and for the GPU.
#pragma once

namespace jmx {

typedef unsigned short Bf16;  // its bits

constexpr int kWarps = 15;  // that multiply; one more copies weights. With 16 warps a thread has 128 registers
constexpr int kThreads = 32 * kWarps, kAllThreads = kThreads + 32;
constexpr int kVector = 8;  // elements in 16 bytes
constexpr int kTileRows = 8, kTileColumns = 32;  // of a matrix, in a warp's registers at a time
constexpr int kMostSteps = 9;  // tiles of a row, for one warp
constexpr int kStepsAtOnce = 3;  // that are loaded before the first of them is multiplied
constexpr int kMostHidden = kThreads * kVector;  // columns: each thread has a vector of the router's
constexpr int kMostColumns = kMostSteps * kWarps * kTileColumns;  // of the result's matrix
constexpr int kMostRows = 64;  // of a matrix, for one CTA
constexpr int kMostProcessors = 160;
constexpr int kMostSlots = 40;  // of rows in shared memory
constexpr int kInFlight = 6;  // rows that are on their way at a time: with more, all other loads wait behind them
constexpr int kDim = 64;  // of a head
constexpr int kMostGroup = 8;  // queries that share a key: as many columns as tensor cores have
constexpr int kMostSplits = 16;  // CTAs that share the keys of a head
constexpr int kPart = kDim + 2;  // float32 that one of them has for each query: sums, peak, total

// 32 bits with the number of the launch that wrote them, in the upper 32: who waits for them loads until it finds that.
typedef unsigned long long Word;

// What a GPU keeps between launches, zeros at first. Each launch writes all words that it reads.
struct Kept {
  unsigned launches, padding[31];
  Word heads[kMostRows * kMostProcessors];  // queries, keys and values: a float32 each
  Word attended[kMostColumns / 2];  // two bfloat16 each
  Word x[kMostHidden / 2];
  Word parts[kMostColumns / kDim * kMostSplits * kPart];  // float32 of splits, see kPart
};

// Addresses and sizes. Of what may be null: no bias, no sinks; no tables: `cache` has one row.
struct Call {
  const Bf16* x;  // (hidden,)
  const float* scale;  // (hidden,), of the norm before attention
  const Bf16* heads_weights;  // (kv_heads * (group + 2) * kDim, hidden)
  const Bf16* heads_bias;
  const float* cos;  // (kDim / 2,)
  const float* sin;
  Bf16* cache;  // (2, pages, kv_heads, page, kDim)
  const int* tables;  // (pages of the row,)
  const int* position;  // (1,)
  const float* sinks;  // (kv_heads * group,)
  const Bf16* out_weights;  // (hidden, kv_heads * group * kDim)
  const Bf16* out_bias;
  const float* router_scale;  // (hidden,), of the norm before the router
  const Bf16* router_weights;  // (experts, hidden)
  const Bf16* router_bias;
  Bf16* x_out;  // (hidden,)
  float* logits;  // (experts,)
  Bf16* normed;  // (hidden,)
  Kept* kept;
  int hidden, kv_heads, group, experts;
  int page, num_pages;  // positions of a page, and pages of the row
  long long part_stride;  // elements between keys and values in `cache`
  int window;  // 0: none
  int slots;  // of rows in shared memory, a tile of them at least
  int inverse;  // of `slots`, times 2^16 and rounded up
  float epsilon, router_epsilon;
};

// The shared memory of a CTA, before its slots.
struct alignas(128) Shared {
  union {
    float sums[kWarps][kMostGroup][kDim];  // attention: each warp's sums of values, and their softmax's peak and total
    Bf16 vector[2][kMostColumns];  // what rows are multiplied with, and what bfloat16 leaves of that
  };
  float peaks[kMostGroup][kWarps + 1], totals[kMostGroup][kWarps + 1];
  float products[kWarps][kMostRows];  // of each row, by columns
  float squares[kWarps], dots[kWarps];
  alignas(16) Bf16 heads[kMostGroup + 2][kDim];  // a key head's queries, key and value
  unsigned long long full[kMostSlots], empty[kMostSlots];
};

// Bytes of a slot, for rows of the longer matrix. A tile is read by two rows at a time, whose banks are then not the same.
constexpr int SlotBytes(int hidden, int attended) {
  return ((hidden > attended ? hidden : attended) * 2 + 127) / 128 * 128 + 64;
}

}  // namespace jmx
