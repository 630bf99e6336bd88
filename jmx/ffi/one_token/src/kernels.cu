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
  if (threadIdx.x == kThreads) ring.Begin();
  __syncthreads();
  if (threadIdx.x >= kThreads) {
    if (threadIdx.x == kThreads) ring.AskForAll();
    return;
  }
  const bool finishes = (int)threadIdx.x < ring.Count();
  uint4 x[kMostSteps];
  LoadVectors(call.x, call.hidden, x);
  Elements scaled;
  LoadScale(call.scale, call.hidden, scaled);
  float bias = 0;
  if (finishes && call.heads_bias != nullptr) bias = Wide(LoadEarly(call.heads_bias + ring.Row() + threadIdx.x));
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
  Attention<0> attention(call, shared, blockIdx.x, __ldg(call.position));
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

namespace jmx {

template <int kPairs>
__device__ __forceinline__ void FewHeads(const Call& call, FewHeadsShared& shared, const FewHeadsRing& ring) {
  const int row = threadIdx.x % kMostRows;
  float bias = 0;
  if (row < ring.Count() && call.heads_bias != nullptr) bias = Wide(LoadEarly(call.heads_bias + ring.Row() + row));
  Tokens<kPairs> x;
  x.Load(call.x, call.tokens, call.hidden);
  __syncthreads();
  x.Clear(call.tokens, call.hidden);
  x.Scale(shared, call.hidden);
  Sync<kFewThreads>();
  ring.Multiply(shared, x);
  if (row >= ring.Count()) return;
  const int rows = call.kv_heads * (call.group + 2) * kDim;
  for (int token = threadIdx.x / kMostRows; token < call.tokens; token += kFewThreads / kMostRows) {
    const float rate = RateOf(shared, token, call.hidden, call.epsilon);
    call.heads[token * rows + ring.Row() + row] = Narrow(SumOfWarps(shared, token, row) * rate + bias);
  }
}

template <int kPairs>
__device__ __forceinline__ void FewOut(const Call& call, FewOutShared& shared, const FewOutRing& ring) {
  static_assert(kFewThreads == kMostOutRows * kMostTokens);
  const int row = threadIdx.x % kMostOutRows, token = threadIdx.x / kMostOutRows;
  const int at = ring.Row() + row, columns = call.kv_heads * call.group * kDim;
  const bool finishes = row < ring.Count() && token < call.tokens;
  float before = 0, bias = 0;
  if (finishes) before = Wide(LoadEarly(call.x + token * call.hidden + at));
  if (finishes && call.out_bias != nullptr) bias = Wide(LoadEarly(call.out_bias + at));
  AwaitLast();
  Tokens<kPairs> x;
  x.Load(call.attended, call.tokens, columns);
  Sync<kFewThreads>();
  if (threadIdx.x == 0) Arrive(ring.Hurry());
  x.Clear(call.tokens, columns);
  ring.Multiply(shared, x);
  if (finishes)
    call.x_out[token * call.hidden + at] = Narrow(before + Wide(Narrow(SumOfWarps(shared, token, row) + bias)));
}

template <int kPairs>
__device__ __forceinline__ void FewRouter(const Call& call, FewRouterShared& shared) {
  const int first = blockIdx.x * kFewRouterRows, last = call.experts - 1;
  const Bf16* weights = call.router_weights + (long long)min(first + Products<kPairs>::RowOf(), last) * call.hidden;
  uint4 w[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
    w[i] = LoadEarly((const void*)(weights + min(Products<kPairs>::VectorOf(i) * kVector, call.hidden - kVector)));
  const int row = first + threadIdx.x % kFewRouterRows, token = threadIdx.x / kFewRouterRows;
  float bias = 0;
  if (row <= last && call.router_bias != nullptr) bias = Wide(LoadEarly(call.router_bias + row));
  AwaitLast();
  Tokens<kPairs> x;
  x.Load(call.x_out, call.tokens, call.hidden);
  x.Clear(call.tokens, call.hidden);
  x.Scale(shared, call.hidden);
  Products<kPairs> products;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) products.Add(i, x, w[i]);
  products.Store(shared, 0);
  Sync<kFewThreads>();
  if (row <= last && token < call.tokens) {
    const float rate = RateOf(shared, token, call.hidden, call.router_epsilon);
    call.logits[token * call.experts + row] = SumOfWarps(shared, token, row - first) * rate + bias;
  }
  // The normed tokens, of which each CTA stores some vectors.
  const int vectors = call.hidden / kVector;
  for (int n = blockIdx.x * kFewThreads + threadIdx.x; n < call.tokens * vectors; n += gridDim.x * kFewThreads) {
    const float rate = RateOf(shared, n / vectors, call.hidden, call.router_epsilon);
    float its[kVector];
    Unpack(LoadEarly((const void*)(call.x_out + n * kVector)), its);
    reinterpret_cast<uint4*>(call.normed)[n] = PackScaled(its, shared.scale + n % vectors * kVector, rate);
  }
}

}  // namespace jmx

extern "C" __global__ void __launch_bounds__(jmx::kFewThreads + 32, 2)  // for its registers
    jmx_few_tokens_heads(const __grid_constant__ jmx::Call call) {
  using namespace jmx;
  BeginNext();
  auto& shared = *reinterpret_cast<FewHeadsShared*>(SharedMemory());
  const int rows = call.kv_heads * (call.group + 2) * kDim;
  const FewHeadsRing ring(call.heads_weights, call.hidden, rows, kFewSlots, kBeforeFewHeads);
  if (threadIdx.x < kFewThreads) {
    call.hidden <= kFewColumns ? FewHeads<kFewPairs>(call, shared, ring) : FewHeads<kMostPairs>(call, shared, ring);
    return;
  }
  const bool copies = threadIdx.x == kFewThreads;
  if (copies) {
    InitBarrier(&shared.scaled, 1);
    ring.Begin();
    Copy(shared.scale, call.scale, call.hidden * sizeof(float), &shared.scaled);
  }
  __syncthreads();
  if (copies) ring.AskForAll();
}

// An SM has registers for one of its CTAs beside one of the first product: 3 warps of 96 and 2 of 112 for each
// scheduler.
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
  Attention<kFewAhead> attention(its, shared, blockIdx.x - token * ctas, __ldg(call.position + token));
  attention.Begin();
  AwaitLast();
  attention.Run();
}

extern "C" __global__ void __launch_bounds__(jmx::kFewThreads + 32, 2)
    jmx_few_tokens_out(const __grid_constant__ jmx::Call call) {
  using namespace jmx;
  BeginNext();
  auto& shared = *reinterpret_cast<FewOutShared*>(SharedMemory());
  const int columns = call.kv_heads * call.group * kDim;
  const FewOutRing ring(call.out_weights, columns, call.hidden, FewOutSlots(call), kBeforeFewOut);
  if (threadIdx.x == kFewThreads) ring.Begin();
  __syncthreads();
  if (threadIdx.x < kFewThreads)
    columns <= kFewColumns ? FewOut<kFewPairs>(call, shared, ring) : FewOut<kMostPairs>(call, shared, ring);
  else if (threadIdx.x == kFewThreads)
    ring.AskForAll(kFewOutAhead);
}

// Its registers fit beside those of a CTA of the result's product.
extern "C" __global__ void __maxnreg__(112)
    jmx_few_tokens_router(const __grid_constant__ jmx::Call call) {
  using namespace jmx;
  auto& shared = *reinterpret_cast<FewRouterShared*>(SharedMemory());
  if (threadIdx.x == 0) {
    InitBarrier(&shared.scaled, 1);
    FenceBarriers();
    Copy(shared.scale, call.router_scale, call.hidden * sizeof(float), &shared.scaled);
  }
  __syncthreads();
  call.hidden <= kFewColumns ? FewRouter<kFewPairs>(call, shared) : FewRouter<kMostPairs>(call, shared);
}
