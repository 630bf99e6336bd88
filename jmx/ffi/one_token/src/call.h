// What the kernels of kernels.cu are given: for the handler on the host, and for the GPU.
#pragma once

namespace jmx {

typedef unsigned short Bf16;  // its bits

constexpr int kVector = 8;  // elements in 16 bytes
constexpr int kThreads = 128, kWarps = kThreads / 32;  // of a CTA of products
// Of the first matrix: rows that are copied at once, such groups in shared memory, rows of a CTA, CTAs of an SM.
constexpr int kGroupRows = 4, kSlots = 3, kMostRows = 64, kHeadsCtas = 2;
constexpr int kOutRows = 8, kOutAhead = 1;  // of the result's, for one CTA, and on their way at a time
constexpr int kMostSteps = 4;  // vectors of a row, for one thread
constexpr int kMostColumns = kMostSteps * kThreads * kVector;
constexpr int kDim = 64;  // of a head
constexpr int kMostGroup = 8;  // queries that share a key: as many columns as tensor cores have
// Of several tokens' products: threads of a CTA, columns that a warp multiplies at a time; groups of the first matrix
// and rows of the result's in shared memory, rows of a CTA, and those on their way while attention runs; rows of the
// router.
constexpr int kMostTokens = 8;
constexpr int kFewThreads = 256, kFewWarps = kFewThreads / 32, kPair = 64;
constexpr int kMostPairs = kMostColumns / kPair / kFewWarps, kFewPairs = 6;  // of a warp, and of one with
constexpr int kFewColumns = kFewPairs * kPair * kFewWarps;  // at most so many columns
constexpr int kFewSlots = 5, kMostOutSlots = 24, kMostOutRows = 32, kFewOutAhead = 4, kFewRouterRows = kGroupRows;
constexpr int kAttentionWarps = 8, kAttentionThreads = 32 * kAttentionWarps;
constexpr int kKeys = 16;  // of a block, for one warp at a time
constexpr int kBlockBytes = kKeys * kDim * 2 * 2;  // of keys and values
constexpr int kFewAhead = 2;  // blocks that a warp has on their way, of several tokens
constexpr int kMostSplits = 8;  // CTAs of a cluster, which share the keys of a head
constexpr int kAttentionCtas = 132;  // at most, of several tokens with splits: one an SM
constexpr int kSplitKeys = kKeys * kAttentionWarps;  // with which the warps of a CTA have a block each

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
  Bf16* heads;  // (kv_heads * (group + 2) * kDim,): queries, keys and values before their rotation
  Bf16* attended;  // (kv_heads * group * kDim,)
  int tokens;  // T; of x, cos, sin, tables, position, x_out, logits, normed, heads and attended each has a row
  int hidden, kv_heads, group, experts;
  int page, num_pages;  // positions of a page, and pages of the row
  long long part_stride;  // elements between keys and values in `cache`
  int window;  // 0: none
  int splits;  // CTAs that share the keys of a head
  int processors;  // SMs
  float epsilon, router_epsilon;
};

// Shared memory of a CTA of attention.
struct alignas(16) AttentionShared {
  float sums[kAttentionWarps][kMostGroup][kDim];  // each warp's sums of values, and their softmax's peak and total
  float peaks[kMostGroup][kAttentionWarps + 1], totals[kMostGroup][kAttentionWarps + 1];
  float split[kMostGroup][kDim + 2];  // the CTA's sums of values, peak and total
  alignas(16) Bf16 heads[kMostGroup + 2][kDim];  // queries, the key, the value
};

// Rows are after this much of shared memory.
constexpr int kBeforeRows = 512, kBeforeRing = 1280;

// Shared memory of CTAs of several tokens' products; rows are behind it. Rows of sums are 4 further apart, so that
// stores of a warp have no bank conflict.
struct FewHeadsShared {
  unsigned long long barriers[15], scaled;  // of rows, and of the scale
  float squares[kFewWarps][kMostTokens];
  union {
    float scale[kMostColumns];  // of the norm, before there are sums
    float sums[kFewWarps][kMostTokens][kMostRows + 4];
  };
};
struct FewOutShared {
  unsigned long long barriers[2 * kMostOutSlots + 2];
  float sums[kFewWarps][kMostTokens][kMostOutRows + 4];
};
struct FewRouterShared {
  unsigned long long scaled;
  float squares[kFewWarps][kMostTokens];
  alignas(16) float scale[kMostColumns];
  float sums[kFewWarps][kMostTokens][kFewRouterRows];
};
constexpr auto kBeforeFewHeads = sizeof(FewHeadsShared), kBeforeFewOut = sizeof(FewOutShared);
static_assert(2 * kFewSlots < 15 && kBeforeFewHeads % 128 == 0 && kBeforeFewOut % 16 == 0);

// One of the kernels, in their order. Each but the first may begin before the one before it has ended.
struct Launch {
  int ctas, threads, shared_bytes;
  int cluster;  // CTAs of a cluster
};

constexpr int kNumKernels = 4;
constexpr const char* kKernels[2][kNumKernels] = {
    {"jmx_one_token_heads", "jmx_one_token_attention", "jmx_one_token_out", "jmx_one_token_router"},
    {"jmx_few_tokens_heads", "jmx_few_tokens_attention", "jmx_few_tokens_out", "jmx_few_tokens_router"}};

// Shared memory of a CTA of several tokens' attention: slots for as many blocks as warps may have.
constexpr int FewAttentionBytes(const Call& call) {
  const int positions = call.page * call.num_pages;
  const int seen = call.window > 0 && call.window < positions ? call.window : positions;
  const int blocks = (seen + kKeys - 1) / kKeys, of_cta = (blocks + call.splits - 1) / call.splits;
  const int later = (of_cta - 1) / kAttentionWarps;
  return sizeof(AttentionShared) + (later < kFewAhead ? later : kFewAhead) * kAttentionWarps * kBlockBytes;
}

// Rows of the result's product that fit on an SM beside that; of each CTA the SM takes 1 KB.
constexpr int FewOutSlots(const Call& call) {
  const int bytes = (226 << 10) - FewAttentionBytes(call) - int(kBeforeFewOut),
            columns = call.kv_heads * call.group * kDim;
  const int fit = bytes / (columns * 2) / kGroupRows * kGroupRows;
  return fit < kMostOutSlots ? fit : kMostOutSlots;
}

inline void Plan(const Call& call, Launch (&launches)[kNumKernels]) {
  const int columns = call.kv_heads * call.group * kDim, rows = call.kv_heads * (call.group + 2) * kDim;
  const auto ctas = [](int rows, int wanted, int most) {  // so many, unless each had too many rows
    const int fewest = (rows + most - kGroupRows - 1) / (most - kGroupRows);
    return wanted > fewest ? wanted : fewest;
  };
  const int slot_bytes = kGroupRows * call.hidden * 2;
  const int attention_ctas = call.tokens * call.kv_heads * call.splits;
  if (call.tokens > 1) {
    const int heads_bytes = int(kBeforeFewHeads) + kFewSlots * slot_bytes;
    const int out_bytes = int(kBeforeFewOut) + FewOutSlots(call) * columns * 2;
    const int router_ctas = (call.experts + kFewRouterRows - 1) / kFewRouterRows;
    launches[0] = {ctas(rows, call.processors, kMostRows), kFewThreads + 32, heads_bytes, 1};
    launches[1] = {attention_ctas, kAttentionThreads, FewAttentionBytes(call), call.splits};
    launches[2] = {ctas(call.hidden, call.processors, kMostOutRows), kFewThreads + 32, out_bytes, 1};
    launches[3] = {router_ctas, kFewThreads, sizeof(FewRouterShared), 1};
    return;
  }
  launches[0] = {ctas(rows, kHeadsCtas * call.processors, kMostRows), kThreads + 32, kBeforeRing + kSlots * slot_bytes,
                 1};
  launches[1] = {attention_ctas, kAttentionThreads, sizeof(AttentionShared), call.splits};
  launches[2] = {call.hidden / kOutRows, kThreads + 32, kBeforeRows + kOutRows * columns * 2, 1};
  launches[3] = {call.experts, kThreads, sizeof(float[kWarps][2]), 1};
}

}  // namespace jmx
