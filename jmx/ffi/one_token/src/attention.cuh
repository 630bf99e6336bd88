// Attention of one token: a CTA has a key head, or a split of its keys, and all queries of that head. Splits are a
// cluster.
#pragma once

#include "primitives.cuh"

namespace jmx {

constexpr float kLowest = -1e30f;
constexpr float kLog2E = 1.4426950408889634f;

// Keys and values of a block, as tensor cores take them. Lane 4 g + t has, of keys g and 8 + g, channels 16 t to
// 16 t + 15; of values 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t, channels 8 g to 8 g + 7. Sums over channels have these in any
// order, and so have results of values: nothing is transposed.
struct Block {
  uint4 keys[2][2], values[4];
};

// A warp has a block in registers, and of several tokens up to kAhead further ones on their way to shared memory,
// behind `shared`: what is behind a lane's own copies there no other thread reads.
template <int kAhead>
class Attention {
 public:
  // The positions that are attended to, and the splits of their keys. `cta`: of those of this token.
  __device__ Attention(const Call& call, AttentionShared& shared, int cta, int position)
      : call_(call), shared_(shared) {
    position_ = min(position, call.page * call.num_pages - 1);
    begin_ = call.window > 0 ? max(0, position_ - call.window + 1) : 0;
    const int blocks = (position_ + 1 - begin_ + kKeys - 1) / kKeys, each = (blocks + call.splits - 1) / call.splits;
    head_ = cta / call.splits;
    split_ = cta - head_ * call.splits;
    first_ = min(blocks, split_ * each);
    last_ = min(blocks, first_ + each);
  }

  // Loads the first keys and values, and what else does not depend on the queries.
  __device__ void Begin() {
    number_ = first_ + threadIdx.x / 32;
    if (number_ < last_) Load(number_);
    for (int i = 0; i < kAhead; ++i) Ask(number_ + (i + 1) * kAttentionWarps, i);
    cos_ = LoadPair(call_.cos + Pair()), sin_ = LoadPair(call_.sin + Pair());
    if (call_.sinks != nullptr && threadIdx.x / 32 < static_cast<u32>(call_.group))
      sink_ = LoadEarly(call_.sinks + head_ * call_.group + threadIdx.x / 32) * kLog2E;
  }

  // Attends, once queries are there.
  __device__ void Run() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    Rotate();
    u32 q0[4] = {}, q2[4] = {};
    if (g < call_.group) {
      const uint4* query = reinterpret_cast<const uint4*>(&shared_.heads[g][t * 16]);
      q0[0] = query[0].x, q2[0] = query[0].y, q0[1] = query[0].z, q2[1] = query[0].w;
      q0[2] = query[1].x, q2[2] = query[1].y, q0[3] = query[1].z, q2[3] = query[1].w;
    }
    const float factor = rsqrtf((float)kDim) * kLog2E;
    float peak = kLowest, total = 0, sums[8][4] = {};
    for (int slot = 0; number_ < last_; number_ += kAttentionWarps) {
      const int key = begin_ + number_ * kKeys;
      if (key + kKeys > position_) TakeNew(key);
      float scores[2][4] = {};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        Multiply(scores[j], q0[0], 0, q2[0], 0, block_.keys[j][0].x, block_.keys[j][0].y);
        Multiply(scores[j], q0[1], 0, q2[1], 0, block_.keys[j][0].z, block_.keys[j][0].w);
        Multiply(scores[j], q0[2], 0, q2[2], 0, block_.keys[j][1].x, block_.keys[j][1].y);
        Multiply(scores[j], q0[3], 0, q2[3], 0, block_.keys[j][1].z, block_.keys[j][1].w);
#pragma unroll
        for (int i = 0; i < 2; ++i)
          scores[j][i] = key + j * 8 + t * 2 + i <= position_ ? scores[j][i] * factor : kLowest;
      }
      float top = fmaxf(fmaxf(scores[0][0], scores[0][1]), fmaxf(scores[1][0], scores[1][1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(peak, fmaxf(top, __shfl_xor_sync(~0u, top, 2)));
      const float rescale = Exp2(peak - top);
      peak = top;
      total *= rescale;
      float p[2][2];
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) p[j][i] = Exp2(scores[j][i] - peak), total += p[j][i];
      const u32 p0 = Pack(p[0][0], p[0][1]), p2 = Pack(p[1][0], p[1][1]);
      const u32(&values)[4][4] = reinterpret_cast<const u32(&)[4][4]>(block_.values);
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // channel 8 g + i
        const u32 half = i % 2 ? 0x7632 : 0x5410;
        sums[i][0] *= rescale, sums[i][1] *= rescale;
        Multiply(sums[i], p0, 0, p2, 0, __byte_perm(values[0][i / 2], values[1][i / 2], half),
                 __byte_perm(values[2][i / 2], values[3][i / 2], half));
      }
      if (number_ + kAttentionWarps >= last_) continue;
      if constexpr (kAhead == 0) {
        Load(number_ + kAttentionWarps);
      } else {
        AwaitGroups<kAhead - 1>();
        Take(slot);
        Ask(number_ + (kAhead + 1) * kAttentionWarps, slot);
        slot = slot + 1 == kAhead ? 0 : slot + 1;
      }
    }
    // All warps' sums of one peak, so that they need only be added up.
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (t == 0) shared_.peaks[g][warp] = peak;
    __syncthreads();
    float top = kLowest;
#pragma unroll
    for (int i = 0; i < kAttentionWarps; ++i) top = fmaxf(top, shared_.peaks[g][i]);
    const float share = Exp2(peak - top);
    if (t == 0) shared_.totals[g][warp] = total * share;
    float4* to = reinterpret_cast<float4*>(&shared_.sums[warp][g][t * 16]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // sums[c][h] is channel 16 t + 8 h + c
      const int c = i % 2 * 4, h = i / 2;
      to[i] = {sums[c][h] * share, sums[c + 1][h] * share, sums[c + 2][h] * share, sums[c + 3][h] * share};
    }
    __syncthreads();
    Finish();
  }

 private:
  __device__ const Bf16* Place(int key) const {
    const int page = key / call_.page;
    const long long number = call_.tables == nullptr ? page : __ldg(call_.tables + page);
    return call_.cache + ((number * call_.kv_heads + head_) * call_.page + (key - page * call_.page)) * kDim;
  }

  // A load past the L1 cache.
  __device__ static uint4 Load16(const Bf16* from) { return LoadEarly((const void*)from); }

  // The vectors of a block that this lane has, and where they are. Positions after the last one have its keys, which
  // TakeNew replaces.
  static constexpr int kVectors = 8;
  __device__ uint4& VectorOf(int i) { return i < 4 ? block_.keys[i / 2][i % 2] : block_.values[i - 4]; }
  __device__ const Bf16* PlaceOf(int number, int i) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, key = begin_ + number * kKeys;
    if (i < 4) return Place(min(key + i / 2 * 8 + g, position_)) + t * 16 + i % 2 * 8;
    return Place(min(key + (i - 4) / 2 * 8 + t * 2 + i % 2, position_)) + call_.part_stride + g * 8;
  }

  __device__ void Load(int number) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) VectorOf(i) = Load16(PlaceOf(number, i));
  }

  // The same by way of shared memory.
  __device__ uint4* Slot(int slot) const {
    static_assert(kVectors * 32 * sizeof(uint4) == kBlockBytes);
    const int of_lane = (slot * kAttentionWarps + threadIdx.x / 32) * kVectors * 32 + threadIdx.x % 32;
    return reinterpret_cast<uint4*>(&shared_ + 1) + of_lane;
  }
  __device__ void Ask(int number, int slot) {
    if (number < last_) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) CopyVector(Slot(slot) + i * 32, PlaceOf(number, i));
    }
    EndGroup();
  }
  __device__ void Take(int slot) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) VectorOf(i) = Slot(slot)[i * 32];
  }

  // The token's own key and value, which are not in the cache before this launch.
  __device__ void TakeNew(int key) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const Bf16(&rows)[kMostGroup + 2][kDim] = shared_.heads;
#pragma unroll
    for (int j = 0; j < 2; ++j)
      if (key + j * 8 + g >= position_) {
        const uint4* from = reinterpret_cast<const uint4*>(&rows[call_.group][t * 16]);
        block_.keys[j][0] = from[0], block_.keys[j][1] = from[1];
      }
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (key + j / 2 * 8 + t * 2 + j % 2 >= position_)
        block_.values[j] = *reinterpret_cast<const uint4*>(&rows[call_.group + 1][g * 8]);
  }

  // Two neighboring channels of the first half of a head, which this thread rotates with those of the other half.
  __device__ static int Pair() { return threadIdx.x % (kDim / 4) * 2; }

  // Rotates queries and the key to shared memory, in one pass; writes key and value to the cache.
  __device__ void Rotate() {
    static_assert(kAttentionThreads >= (kMostGroup + 2) * (kDim / 4));
    const int row = threadIdx.x / (kDim / 4), pair = Pair();
    if (row < call_.group + 2) {
      const Bf16* from = call_.heads + (head_ * (call_.group + 2) + row) * kDim + pair;
      u32 first = LoadPair(from), second = LoadPair(from + kDim / 2);
      if (row <= call_.group) {
        const float x0 = Low(first), x1 = High(first), y0 = Low(second), y1 = High(second);
        first = Pack(x0 * cos_.x - y0 * sin_.x, x1 * cos_.y - y1 * sin_.y);
        second = Pack(y0 * cos_.x + x0 * sin_.x, y1 * cos_.y + x1 * sin_.y);
      }
      StorePair(&shared_.heads[row][pair], first), StorePair(&shared_.heads[row][pair + kDim / 2], second);
      if (row >= call_.group && split_ == 0) {
        Bf16* to = const_cast<Bf16*>(Place(position_)) + (row - call_.group) * call_.part_stride + pair;
        StorePair(to, first), StorePair(to + kDim / 2, second);
      }
    }
    __syncthreads();
  }

  // Adds up what warps have, and then what splits have: of each query a warp, two channels a lane.
  __device__ void Finish() {
    const int query = threadIdx.x / 32, channel = threadIdx.x % 32 * 2;
    float peak = kLowest, total = 0, first = 0, second = 0;
    if (query < call_.group) {
      const int busy = max(0, min(kAttentionWarps, last_ - first_));  // others have zeros
#pragma unroll
      for (int i = 0; i < kAttentionWarps; ++i) {
        if (i >= busy) break;
        peak = fmaxf(peak, shared_.peaks[query][i]), total += shared_.totals[query][i];
        const float2 its = *reinterpret_cast<const float2*>(&shared_.sums[i][query][channel]);
        first += its.x, second += its.y;
      }
    }
    if (call_.splits == 1) {
      if (query < call_.group) Store(query, channel, peak, total, first, second);
      return;
    }
    float(&mine)[kDim + 2] = shared_.split[min(query, kMostGroup - 1)];
    if (query < call_.group) {
      mine[channel] = first, mine[channel + 1] = second;
      if (channel == 0) mine[kDim] = peak, mine[kDim + 1] = total;
    }
    SyncCluster();
    if (query < call_.group && query % call_.splits == split_) {
      float peaks[kMostSplits], totals[kMostSplits], firsts[kMostSplits], seconds[kMostSplits];
#pragma unroll
      for (int i = 0; i < kMostSplits; ++i) {
        const int cta = min(i, call_.splits - 1);
        peaks[i] = LoadOf(cta, &mine[kDim]), totals[i] = LoadOf(cta, &mine[kDim + 1]);
        firsts[i] = LoadOf(cta, &mine[channel]), seconds[i] = LoadOf(cta, &mine[channel + 1]);
      }
      peak = kLowest, total = first = second = 0;
#pragma unroll
      for (int i = 0; i < kMostSplits; ++i) peak = fmaxf(peak, peaks[i]);
#pragma unroll
      for (int i = 0; i < kMostSplits; ++i) {
        const float share = i < call_.splits ? Exp2(peaks[i] - peak) : 0;
        total += totals[i] * share, first += firsts[i] * share, second += seconds[i] * share;
      }
      Store(query, channel, peak, total, first, second);
    }
    SyncCluster();  // until then others read this CTA's shared memory
  }

  // A sink far above all scores leaves nothing of them.
  __device__ void Store(int query, int channel, float peak, float total, float first, float second) const {
    const float top = fmaxf(peak, sink_), share = Exp2(peak - top);
    const float rate = share / (total * share + Exp2(sink_ - top));
    u32* to = reinterpret_cast<u32*>(call_.attended + (head_ * call_.group + query) * kDim + channel);
    *to = Pack(first * rate, second * rate);
  }

  const Call& call_;
  AttentionShared& shared_;
  int position_, begin_, head_, split_, first_, last_, number_;
  float2 cos_, sin_;  // of this thread's channels
  float sink_ = kLowest;  // of the query that this thread finishes
  Block block_;
};

}  // namespace jmx
