// Attention of one token: a CTA has a key head, or a split of its keys, and all queries of that head.
#pragma once

#include "rows.cuh"

namespace jmx {

constexpr int kKeys = 16;  // of a block, for one warp at a time
constexpr int kSplitKeys = kKeys * kWarps;  // with which the warps of a CTA have a block each
constexpr float kLowest = -1e30f;
constexpr float kLog2E = 1.4426950408889634f;

// Keys and values of a block, as tensor cores take them. Lane 4 g + t has, of keys g and 8 + g, channels 16 t to
// 16 t + 15; of values 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t, channels 8 g to 8 g + 7. Sums over channels have these in any
// order, and so have results of values: nothing is transposed.
struct Block {
  uint4 keys[2][2], values[4];
};

class Attention {
 public:
  // The positions that are attended to, and the splits of their keys.
  __device__ Attention(const Call& call, Shared& shared, u32 launch) : call_(call), shared_(shared), launch_(launch) {
    position_ = min(*call.position, call.page * call.num_pages - 1);
    begin_ = call.window > 0 ? max(0, position_ - call.window + 1) : 0;
    const int number = position_ + 1 - begin_, blocks = (number + kKeys - 1) / kKeys;
    const int most = min(kMostSplits, max(1, (int)gridDim.x / call.kv_heads));
    splits_ = min(most, (number + kSplitKeys - 1) / kSplitKeys);
    const int each = (blocks + splits_ - 1) / splits_;
    head_ = blockIdx.x / splits_;
    split_ = blockIdx.x - head_ * splits_;
    first_ = split_ * each;
    last_ = min(blocks, first_ + each);
  }

  // Whether this CTA has a part in it.
  __device__ bool Takes() const { return head_ < call_.kv_heads; }

  // Loads the first keys and values.
  __device__ void Begin() {
    number_ = first_ + threadIdx.x / 32;
    if (number_ < last_) Load(number_);
  }

  // Waits for the queries, and attends.
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
    for (; number_ < last_; number_ += kWarps) {
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
      if (number_ + kWarps < last_) Load(number_ + kWarps);
    }
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (t == 0) shared_.peaks[warp][g] = peak, shared_.totals[warp][g] = total;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      shared_.sums[warp][g][t * 16 + i] = sums[i][0], shared_.sums[warp][g][t * 16 + 8 + i] = sums[i][1];
    Sync();
    Finish();
  }

 private:
  __device__ const Bf16* Place(int key) const {
    const int page = key / call_.page;
    const long long number = call_.tables == nullptr ? page : __ldg(call_.tables + page);
    return call_.cache + ((number * call_.kv_heads + head_) * call_.page + (key - page * call_.page)) * kDim;
  }

  // Positions after the last one have its keys, which TakeNew replaces.
  __device__ void Load(int number) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int key = begin_ + number * kKeys;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const Bf16* from = Place(min(key + j * 8 + g, position_)) + t * 16;
      block_.keys[j][0] = Load16Bytes(from), block_.keys[j][1] = Load16Bytes(from + 8);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
      block_.values[j] = Load16Bytes(Place(min(key + j / 2 * 8 + t * 2 + j % 2, position_)) + call_.part_stride + g * 8);
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

  // Rotates queries and the key to shared memory; writes key and value to the cache.
  __device__ void Rotate() {
    constexpr int kPairs = kDim / 2;
    const int row = threadIdx.x / kPairs, pair = threadIdx.x % kPairs;
    float cos = 1, sin = 0;
    if (row <= call_.group) cos = __ldg(call_.cos + pair), sin = __ldg(call_.sin + pair);
    if (row < call_.group + 2) {
      const Word* from = call_.kept->heads + (head_ * (call_.group + 2) + row) * kDim + pair;
      float x, y;
      while (!Receive(from, launch_, x)) {
      }
      while (!Receive(from + kPairs, launch_, y)) {
      }
      const Bf16 first = Narrow(x * cos - y * sin), second = Narrow(y * cos + x * sin);
      shared_.heads[row][pair] = first, shared_.heads[row][pair + kPairs] = second;
      if (row >= call_.group && split_ == 0) {
        Bf16* to = const_cast<Bf16*>(Place(position_)) + (row - call_.group) * call_.part_stride + pair;
        to[0] = first, to[kPairs] = second;
      }
    }
    Sync();
  }

  // Adds up what warps have, and then what splits have.
  __device__ void Finish() {
    const int busy = max(1, min(kWarps, last_ - first_));
    const bool whole = splits_ == 1;
    for (int at = threadIdx.x; at < call_.group * kDim; at += kThreads) {
      const int query = at / kDim, channel = at % kDim;
      float peak = kLowest;
      for (int i = 0; i < busy; ++i) peak = fmaxf(peak, shared_.peaks[i][query]);
      const float sink = Sink(query);
      if (whole) peak = fmaxf(peak, sink);
      float total = whole ? Exp2(sink - peak) : 0, value = 0;
      for (int i = 0; i < busy; ++i) {
        const float share = Exp2(shared_.peaks[i][query] - peak);
        total += shared_.totals[i][query] * share, value += shared_.sums[i][query][channel] * share;
      }
      if (whole) {
        SendResult(query, channel, value / total);
      } else {
        Word* to = Part(split_, query);
        Send(to + channel, __float_as_uint(value), launch_);
        if (channel == 0) Send(to + kDim, __float_as_uint(peak), launch_);
        if (channel == 1) Send(to + kDim + 1, __float_as_uint(total), launch_);
      }
    }
    if (!whole && split_ == 0) SumSplits();
  }

  __device__ void SumSplits() {
    constexpr int kAtOnce = 4;  // splits whose loads are on their way together
    for (int at = threadIdx.x; at < call_.group * kDim; at += kThreads) {
      const int query = at / kDim, channel = at % kDim;
      float peak = Sink(query), total = 1, value = 0;
      for (int base = 0; base < splits_; base += kAtOnce) {
        float values[kAtOnce], peaks[kAtOnce], totals[kAtOnce];
        bool all;
        do {
          all = true;
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const Word* from = Part(min(base + i, splits_ - 1), query);
            all &= Receive(from + channel, launch_, values[i]);
            all &= Receive(from + kDim, launch_, peaks[i]);
            all &= Receive(from + kDim + 1, launch_, totals[i]);
          }
        } while (!all);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (base + i >= splits_) break;
          const float top = fmaxf(peak, peaks[i]), before = Exp2(peak - top), share = Exp2(peaks[i] - top);
          total = total * before + totals[i] * share, value = value * before + values[i] * share, peak = top;
        }
      }
      SendResult(query, channel, value / total);
    }
  }

  // Two channels of two lanes are a word.
  __device__ void SendResult(int query, int channel, float value) const {
    const float next = __shfl_xor_sync(~0u, value, 1);
    Word* to = call_.kept->attended + ((head_ * call_.group + query) * kDim + channel) / 2;
    if (channel % 2 == 0) Send(to, Pack(value, next), launch_);
  }

  __device__ Word* Part(int split, int query) const {
    return call_.kept->parts + ((head_ * kMostSplits + split) * call_.group + query) * kPart;
  }

  __device__ float Sink(int query) const {
    return call_.sinks == nullptr ? kLowest : __ldg(call_.sinks + head_ * call_.group + query) * kLog2E;
  }

  const Call& call_;
  Shared& shared_;
  const u32 launch_;
  int position_, begin_, splits_, head_, split_, first_, last_, number_;
  Block block_;
};

}  // namespace jmx
