// What the kernel of kernel.cu is given: for the handler on the host, and for the GPU.
#pragma once

namespace jmx {

typedef unsigned short Bf16;  // its bits

constexpr int kWarps = 16;  // that multiply; one more copies weights
constexpr int kColumnGroups = 4, kRowGroups = kWarps / kColumnGroups;  // of warps, in a product
constexpr int kThreads = 32 * kWarps, kAllThreads = kThreads + 32;
constexpr int kVector = 8;  // elements in 16 bytes
constexpr int kPerThread = 4;  // vectors of a row, at most
constexpr int kMostColumns = 32 * kColumnGroups * kPerThread * kVector;  // of a matrix
constexpr int kMostRows = 64;  // of a matrix, for one CTA
constexpr int kMostSlots = 40;
constexpr int kDim = 64;  // of a head
constexpr int kMostGroup = 8;  // queries that share a key: as many columns as tensor cores have
constexpr int kMostKvHeads = 32;
constexpr int kMostSplits = 16;  // CTAs that share the keys of a head
constexpr int kPart = kDim + 2;  // float32 that one of them has for each query: sums, peak, total

// How far all CTAs of a launch are. Zeros before a launch, and after it.
struct Counters {
  unsigned heads[kMostKvHeads];  // rows of queries, keys and values of each key head
  unsigned splits[kMostKvHeads];
  unsigned attended, padding[31];  // key heads; the padding keeps CTAs that wait for one counter off the other's line
  unsigned summed, more_padding[31];  // CTAs
  unsigned ended;
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
  // Scratch memory, and what is kept between launches.
  Bf16* heads;  // as many as rows of heads_weights
  Bf16* attended;  // (kv_heads * group * kDim,)
  float* parts;  // (kv_heads, kMostSplits, group, kPart)
  Counters* counters;
  int hidden, kv_heads, group, experts;
  int page, num_pages;  // positions of a page, and pages of the row
  long long part_stride;  // elements between keys and values in `cache`
  int window;  // 0: none
  int slots;  // of rows, in shared memory
  float epsilon, router_epsilon;
};

// The shared memory of a CTA, before its slots.
struct alignas(128) Shared {
  float sums[kWarps][kMostGroup][kDim];  // attention: each warp's sums of values, and their softmax's peak and total
  float peaks[kWarps][kMostGroup], totals[kWarps][kMostGroup];
  float products[kColumnGroups][kMostRows];  // of each row, by columns
  float squares[kWarps], dots[kWarps];
  alignas(16) Bf16 heads[kMostGroup + 2][kDim];  // a key head's queries, key and value
  unsigned long long full[kMostSlots], empty[kMostSlots];
  unsigned last;
};

}  // namespace jmx
