// Which ranks need a token's row: those with at least one of its experts. The functions are those of a group of lanes,
// a warp or, in a test on a CPU, a single one.
#pragma once

#include "region.h"

namespace jmx {

constexpr int kMostLogits = 512;  // of a token

// Beside the arrays of a call, of which the first one has the rows, and the others the tokens' routing.
struct Needed {
  const int* firsts;        // by rank: its first expert
  const unsigned int* ranks;  // of a sum: for each token of all ranks a bit for each rank that has one of its experts
  unsigned long long rows;    // of a rank: those of its first tokens, or in a sum of its last ones
  unsigned long long tokens;  // of a rank
  int each;    // experts of a rank
  int top_k;   // experts of a token
  int width;   // elements of a token's routing in the first array that has it
  bool logits;  // whether these are logits, all of them, of which the largest are a token's experts; else its experts'
                // ids
};

// The ranks that have one of the experts `ids` (top_k), as bits. Ids are those of all ranks' experts, or of none.
template <typename Lanes>
JMX_DEVICE unsigned int RanksOfIds(const Lanes& lanes, const Needed& needed, int num_ranks, const int* ids) {
  unsigned int found = 0;
  for (int slot = lanes.Index(); slot < needed.top_k; slot += Lanes::kCount) {
    const int id = lanes.Load(ids + slot);
    for (int rank = 0; rank < num_ranks; ++rank) {
      const int its = id - lanes.Load(needed.firsts + rank);
      if (its >= 0 && its < needed.each) found |= 1u << rank;
    }
  }
  return lanes.Or(found);
}

// The ranks that may have one of the top_k largest logits: no more than top_k - 1 logits are larger than the largest
// one of the rank. Of equal logits those of a higher number are not chosen, perhaps, but their ranks are among these.
// Of ranks without a bit in `among` nothing is found.
template <typename Lanes>
JMX_DEVICE unsigned int RanksOfLogits(const Lanes& lanes, const Needed& needed, int num_ranks, const float* logits,
                                      unsigned int among) {
  constexpr int kEach = kMostLogits / Lanes::kCount;
  constexpr float kLargest = 3.4028234663852886e38f;
  const float kNone = -Lanes::Infinity();
  float keys[kEach];
JMX_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const int expert = i * Lanes::kCount + lanes.Index();
    const float logit = expert < needed.width ? lanes.Load(logits + expert) : kNone;
    keys[i] = logit > kNone ? (logit < kLargest ? logit : kLargest) : kNone;  // NaN is never chosen
  }
  unsigned int found = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    if ((among >> rank & 1) == 0) continue;
    const int first = lanes.Load(needed.firsts + rank);
    float best = kNone;
JMX_UNROLL
    for (int i = 0; i < kEach; ++i) {
      const int its = i * Lanes::kCount + lanes.Index() - first;
      if (its >= 0 && its < needed.each && keys[i] > best) best = keys[i];
    }
    best = lanes.Max(best);
    int larger = 0;
JMX_UNROLL
    for (int i = 0; i < kEach; ++i) larger += keys[i] > best;
    if (best > kNone && lanes.Sum(larger) < needed.top_k) found |= 1u << rank;
  }
  return found;
}

// The ranks among those with a bit in `among` that need the token with this routing.
template <typename Lanes>
JMX_DEVICE unsigned int RanksOf(const Lanes& lanes, const Needed& needed, int num_ranks, const char* routing,
                                unsigned int among) {
  if (needed.logits) return RanksOfLogits(lanes, needed, num_ranks, reinterpret_cast<const float*>(routing), among);
  return RanksOfIds(lanes, needed, num_ranks, reinterpret_cast<const int*>(routing)) & among;
}

}  // namespace jmx
