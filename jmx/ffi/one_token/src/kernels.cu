// The part of a decoder's layer between two sums of experts, of one token: norm, queries, keys and values, their
// rotation, the cache, attention, the product of the result, the residual, norm and router.
//
// Four kernels that overlap: each asks for its weights, or keys, before it waits for the end of the one before. CTAs of
// the result's product start when those of the first one have freed their shared memory, so that weights come in the
// order in which they are needed, while attention runs, too.
#include "attention.cuh"
#include "few_tokens.cuh"
#include "tile.cuh"

namespace jmx {

// The token's elements of this thread; zeros after the last one.
__device__ __forceinline__ void LoadVectors(const Bf16* from, int columns, uint4 (&to)[kMostSteps]) {
#pragma unroll
  for (int i = 0; i < kMostSteps; ++i) {
    const int at = (i * kThreads + threadIdx.x) * kVector;
    to[i] = {0, 0, 0, 0};
    if (at < columns) to[i] = LoadEarly((const void*)(from + at));
  }
}

__device__ __forceinline__ void LoadScale(const float* from, int columns, Elements& to) {
#pragma unroll
  for (int i = 0; i < kMostSteps; ++i) {
    const int at = (i * kThreads + threadIdx.x) * kVector;
    uint4 a = {}, b = {};
    if (at < columns) a = LoadEarly((const void*)(from + at)), b = LoadEarly((const void*)(from + at + 4));
    to.of[i][0] = __uint_as_float(a.x), to.of[i][1] = __uint_as_float(a.y), to.of[i][2] = __uint_as_float(a.z);
    to.of[i][3] = __uint_as_float(a.w), to.of[i][4] = __uint_as_float(b.x), to.of[i][5] = __uint_as_float(b.y);
    to.of[i][6] = __uint_as_float(b.z), to.of[i][7] = __uint_as_float(b.w);
  }
}

// The scaled token, in place of the scale. Returns the sum of its squares before.
__device__ __forceinline__ float Scale(const uint4 (&x)[kMostSteps], Elements& scale) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kMostSteps; ++i) {
    float its[kVector];
    Unpack(x[i], its);
#pragma unroll
    for (int j = 0; j < kVector; ++j) squares += its[j] * its[j], scale.of[i][j] *= its[j];
  }
  return squares;
}

}  // namespace jmx

// Queries, keys and values, before their rotation.
extern "C" __global__ void __launch_bounds__(jmx::kThreads + 32)
    jmx_one_token_heads(const __grid_constant__ jmx::Call call) {
  using namespace jmx;
  BeginNext();
  const Ring ring(call.heads_weights, call.hidden, call.kv_heads * (call.group + 2) * kDim);
  if (threadIdx.x >= kThreads) {
    if (threadIdx.x == kThreads) ring.Begin();
    __syncthreads();
    if (threadIdx.x == kThreads) ring.Continue();
    return;
  }
  const bool finishes = (int)threadIdx.x < ring.Count();
  uint4 x[kMostSteps];
  LoadVectors(call.x, call.hidden, x);
  Elements scaled;
  LoadScale(call.scale, call.hidden, scaled);
  float bias = 0;
  if (finishes && call.heads_bias != nullptr) bias = Wide(LoadEarly(call.heads_bias + ring.Row() + threadIdx.x));
  __syncthreads();
  float squares = Scale(x, scaled);
  const float product = ring.Multiply(scaled, squares);
  if (finishes)
    call.heads[ring.Row() + threadIdx.x] = Narrow(product * rsqrtf(squares / call.hidden + call.epsilon) + bias);
}

extern "C" __global__ void __launch_bounds__(jmx::kAttentionThreads, 1)
    jmx_one_token_attention(const __grid_constant__ jmx::Call call) {
  using namespace jmx;
  BeginNext();
  AttentionShared& shared = *reinterpret_cast<AttentionShared*>(SharedMemory());
  Attention attention(call, shared, blockIdx.x, __ldg(call.position));
  attention.Begin();
  AwaitLast();
  attention.Run();
}

// The residual stream with attention's result.
extern "C" __global__ void __launch_bounds__(jmx::kThreads + 32)
    jmx_one_token_out(const __grid_constant__ jmx::Call call) {
  using namespace jmx;
  BeginNext();
  const int columns = call.kv_heads * call.group * kDim;
  Tile tile(call.out_weights, columns);
  if (threadIdx.x >= kThreads) {
    if (threadIdx.x == kThreads) tile.Ask();
    return;
  }
  const int row = tile.Row() + threadIdx.x % kOutRows;
  const float before = Wide(LoadEarly(call.x + row));
  const float bias = call.out_bias != nullptr ? Wide(LoadEarly(call.out_bias + row)) : 0;
  AwaitLast();
  uint4 loaded[kMostSteps];
  LoadVectors(call.attended, columns, loaded);
  Elements x;
#pragma unroll
  for (int i = 0; i < kMostSteps; ++i) Unpack(loaded[i], x.of[i]);
  float squares = 0;
  const float product = tile.Multiply(x, squares);
  if (threadIdx.x < kOutRows) call.x_out[row] = Narrow(before + Wide(Narrow(product + bias)));
}

// The router's logits, one a CTA, and the normed token, of which each CTA stores some vectors.
extern "C" __global__ void __launch_bounds__(jmx::kThreads)
    jmx_one_token_router(const __grid_constant__ jmx::Call call) {
  using namespace jmx;
  float(&of_warps)[kWarps][2] = *reinterpret_cast<float(*)[kWarps][2]>(SharedMemory());
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint4 weights[kMostSteps], x[kMostSteps];
  LoadVectors(call.router_weights + (long long)blockIdx.x * call.hidden, call.hidden, weights);
  Elements scaled;
  LoadScale(call.router_scale, call.hidden, scaled);
  const float bias = call.router_bias != nullptr ? Wide(LoadEarly(call.router_bias + blockIdx.x)) : 0;
  AwaitLast();
  LoadVectors(call.x_out, call.hidden, x);
  float squares = WarpSum(Scale(x, scaled)), dot = 0;
#pragma unroll
  for (int i = 0; i < kMostSteps; ++i) {
    float w[kVector];
    Unpack(weights[i], w);
#pragma unroll
    for (int j = 0; j < kVector; ++j) dot += w[j] * scaled.of[i][j];
  }
  dot = WarpSum(dot);
  if (lane == 0) of_warps[warp][0] = squares, of_warps[warp][1] = dot;
  __syncthreads();
  squares = dot = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) squares += of_warps[i][0], dot += of_warps[i][1];
  const float rate = rsqrtf(squares / call.hidden + call.router_epsilon);
  if (threadIdx.x == 0) call.logits[blockIdx.x] = dot * rate + bias;
#pragma unroll
  for (int i = 0; i < kMostSteps; ++i) {
    const int at = i * kThreads + threadIdx.x;
    if (at * kVector >= call.hidden || at % gridDim.x != blockIdx.x) continue;
    const float(&its)[kVector] = scaled.of[i];
    uint4 packed;
    packed.x = Pack(its[0] * rate, its[1] * rate), packed.y = Pack(its[2] * rate, its[3] * rate);
    packed.z = Pack(its[4] * rate, its[5] * rate), packed.w = Pack(its[6] * rate, its[7] * rate);
    reinterpret_cast<uint4*>(call.normed)[at] = packed;
  }
}

// The same for several tokens.

extern "C" __global__ void __launch_bounds__(jmx::kFewThreads + 32, 2)  // for its registers
    jmx_few_tokens_heads(const __grid_constant__ jmx::Call call) {
  using namespace jmx;
  BeginNext();
  auto& shared = *reinterpret_cast<FewShared<kMostRows>*>(SharedMemory());
  const int rows = call.kv_heads * (call.group + 2) * kDim;
  const FewRing ring(call.heads_weights, call.hidden, rows);
  if (threadIdx.x >= kFewThreads) {
    if (threadIdx.x == kFewThreads) ring.Begin();
    __syncthreads();
    if (threadIdx.x == kFewThreads) ring.Continue();
    return;
  }
  Tokens x;
  x.Load(call.x, call.tokens, call.hidden);
  CopyScale(call.scale, call.hidden, shared.scale);
  const int row = threadIdx.x % kMostRows;
  float bias = 0;
  if (row < ring.Count() && call.heads_bias != nullptr) bias = Wide(LoadEarly(call.heads_bias + ring.Row() + row));
  __syncthreads();
  x.Normalize(shared, call.hidden, call.epsilon);
  ring.Multiply(shared, x);
  if (row < ring.Count())
    for (int token = threadIdx.x / kMostRows; token < call.tokens; token += kFewThreads / kMostRows)
      call.heads[token * rows + ring.Row() + row] = Narrow(SumOfWarps(shared, token, row) + bias);
}

// An SM has registers for one of its CTAs beside one of the first product: 3 warps of 96 and 2 of 112 for each scheduler.
extern "C" __global__ void __maxnreg__(112)
    jmx_few_tokens_attention(const __grid_constant__ jmx::Call call) {
  using namespace jmx;
  BeginNext();
  AttentionShared& shared = *reinterpret_cast<AttentionShared*>(SharedMemory());
  const int ctas = call.kv_heads * call.splits, token = blockIdx.x / ctas;
  Call its = call;  // of this token
  its.heads += token * call.kv_heads * (call.group + 2) * kDim;
  its.attended += token * call.kv_heads * call.group * kDim;
  its.cos += token * (kDim / 2), its.sin += token * (kDim / 2);
  if (call.tables != nullptr) its.tables += token * call.num_pages;
  else its.cache += (long long)token * call.kv_heads * call.page * kDim;
  Attention attention(its, shared, blockIdx.x - token * ctas, __ldg(call.position + token));
  attention.Begin();
  AwaitLast();
  attention.Run();
}

extern "C" __global__ void __launch_bounds__(jmx::kFewThreads + 32, 2)
    jmx_few_tokens_out(const __grid_constant__ jmx::Call call) {
  using namespace jmx;
  BeginNext();
  auto& shared = *reinterpret_cast<FewOutShared*>(SharedMemory());
  const int columns = call.kv_heads * call.group * kDim, first = blockIdx.x * kFewOutRows;
  const int count = min(kFewOutRows, call.hidden - first);  // a multiple of kGroupRows
  unsigned char* const rows = SharedMemory() + kBeforeFewRows;
  if (threadIdx.x == 0) {
    for (int row = 0; row < count; ++row) InitBarrier(&shared.barriers[row], 1);
    FenceBarriers();
  }
  __syncthreads();
  if (threadIdx.x >= kFewThreads) {
    if (threadIdx.x > kFewThreads) return;
    for (int row = 0; row < count; ++row) {
      if (row >= kFewOutAhead) Wait(&shared.barriers[row - kFewOutAhead], 0);
      Copy(rows + row * columns * 2, call.out_weights + (long long)(first + row) * columns, columns * 2,
           &shared.barriers[row]);
    }
    return;
  }
  const int row = threadIdx.x % kFewOutRows, token = threadIdx.x / kFewOutRows;
  const bool finishes = row < count && token < call.tokens;
  const int at = token * call.hidden + first + row;
  float before = 0, bias = 0;
  if (finishes) before = Wide(LoadEarly(call.x + at));
  if (finishes && call.out_bias != nullptr) bias = Wide(LoadEarly(call.out_bias + first + row));
  AwaitLast();
  Tokens x;
  x.Load(call.attended, call.tokens, columns);
  for (int group = 0; group < count; group += kGroupRows) {
    for (int i = 0; i < kGroupRows; ++i) Wait(&shared.barriers[group + i], 0);
    Products products;
    products.AddRows(rows + group * columns * 2, columns, x);
    StoreSums(shared, group, products);
  }
  Sync<kFewThreads>();
  if (finishes) call.x_out[at] = Narrow(before + Wide(Narrow(SumOfWarps(shared, token, row) + bias)));
}

extern "C" __global__ void __launch_bounds__(jmx::kFewThreads, 2)
    jmx_few_tokens_router(const __grid_constant__ jmx::Call call) {
  using namespace jmx;
  auto& shared = *reinterpret_cast<FewShared<kFewRouterRows>*>(SharedMemory());
  const int first = blockIdx.x * kFewRouterRows, last = call.experts - 1;
  const Bf16* weights = call.router_weights + (long long)min(first + Products::RowOf(), last) * call.hidden;
  uint4 w[kMostPairs];
#pragma unroll
  for (int i = 0; i < kMostPairs; ++i)
    w[i] = LoadEarly((const void*)(weights + min(Products::VectorOf(i) * kVector, call.hidden - kVector)));
  CopyScale(call.router_scale, call.hidden, shared.scale);
  const int row = first + threadIdx.x % kFewRouterRows, token = threadIdx.x / kFewRouterRows;
  float bias = 0;
  if (row <= last && call.router_bias != nullptr) bias = Wide(LoadEarly(call.router_bias + row));
  AwaitLast();
  Tokens x;
  x.Load(call.x_out, call.tokens, call.hidden);
  x.Normalize(shared, call.hidden, call.router_epsilon);
  Products products;
#pragma unroll
  for (int i = 0; i < kMostPairs; ++i) products.Add(i, x, w[i]);
  StoreSums(shared, 0, products);
  Sync<kFewThreads>();
  if (row <= last && token < call.tokens)
    call.logits[token * call.experts + row] = SumOfWarps(shared, token, row - first) + bias;
#pragma unroll
  for (int i = 0; i < kMostPairs; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = Tokens::VectorOf(i, half) * kVector;
      if (Tokens::TokenOf() < call.tokens && at < call.hidden && Tokens::PairOf(i) % gridDim.x == blockIdx.x)
        *reinterpret_cast<uint4*>(call.normed + Tokens::TokenOf() * call.hidden + at) = x.of[i][half];
    }
}
