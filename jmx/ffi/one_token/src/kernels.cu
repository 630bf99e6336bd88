// The part of a decoder's layer between two sums of experts, of one token, as one kernel: norm, queries, keys and values,
// their rotation, the cache, attention, the product of the result, the residual, norm and router.
//
// Each SM has one CTA, and all run at once. What one CTA computes and others need goes through the L2 cache, as words that
// have the number of the launch. Weights are copied to shared memory all the while.
#include "attention.cuh"

namespace jmx {

__device__ __forceinline__ void LoadFloats(const float* from, float (&to)[kVector]) {
  const float4 a = __ldg(reinterpret_cast<const float4*>(from)), b = __ldg(reinterpret_cast<const float4*>(from) + 1);
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// x times the norm's scale, and its squares, to shared memory.
__device__ __forceinline__ void LoadToken(const Call& call, Shared& shared) {
  const int warp = threadIdx.x / 32, at = threadIdx.x * kVector;
  float squares = 0;
  if (at < call.hidden) {
    float x[kVector], scale[kVector];
    const uint4 loaded = __ldcg(reinterpret_cast<const uint4*>(call.x + at));
    LoadFloats(call.scale + at, scale);
    Unpack(loaded, x);
#pragma unroll
    for (int j = 0; j < kVector; ++j) squares += x[j] * x[j], x[j] *= scale[j];
    StoreVector(shared, at, x);
  }
  squares = WarpSum(squares);
  if (threadIdx.x % 32 == 0) shared.squares[warp] = squares;
}

// Queries, keys and values. Each thread finishes a row.
__device__ __forceinline__ void ComputeHeads(const Call& call, const Plan& plan, Shared& shared, u32 launch) {
  const int row = plan.heads.first + threadIdx.x;
  const bool finishes = (int)threadIdx.x < plan.heads.count;
  const float bias = finishes && call.heads_bias != nullptr ? Wide(call.heads_bias[row]) : 0;
  MultiplyRows<true>(call, plan, shared, 0, plan.heads.count, call.hidden);
  Sync();
  if (!finishes) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += shared.squares[i];
  const float value = Product(shared, threadIdx.x) * rsqrtf(sum / call.hidden + call.epsilon) + bias;
  Send(call.kept->heads + row, __float_as_uint(Wide(Narrow(value))), launch);
}

// The residual stream with attention's result. Each thread finishes a row; two are a word.
__device__ __forceinline__ void ComputeOut(const Call& call, const Plan& plan, Shared& shared, u32 launch) {
  const int columns = call.kv_heads * call.group * kDim, row = plan.out.first + threadIdx.x;
  const bool finishes = (int)threadIdx.x < plan.out.count;
  float before = 0, bias = 0;
  if (finishes) {
    before = Wide(call.x[row]);
    if (call.out_bias != nullptr) bias = Wide(call.out_bias[row]);
  }
  // Some threads have two vectors, whose loads are on their way together.
  const int at = threadIdx.x * kVector, next = at + kThreads * kVector;
  const Word* words = call.kept->attended;
  uint4 first, second;
  if (next < columns) {
    bool all;
    do {
      all = Receive(words + at / 2, launch, first);
      all &= Receive(words + next / 2, launch, second);
    } while (!all);
    *reinterpret_cast<uint4*>(&shared.vector[0][next]) = second;
  } else if (at < columns) {
    while (!Receive(words + at / 2, launch, first)) {
    }
  }
  if (at < columns) *reinterpret_cast<uint4*>(&shared.vector[0][at]) = first;
  Sync();
  MultiplyRows<false>(call, plan, shared, plan.heads.count, plan.out.count, columns);
  Sync();
  if (threadIdx.x >= kMostRows) return;
  const float value = finishes ? before + Wide(Narrow(Product(shared, threadIdx.x) + bias)) : 0;
  const float other = __shfl_xor_sync(~0u, value, 1);
  if (!finishes) return;
  if (row % 2 == 0) Send(call.kept->x + row / 2, Pack(value, other), launch);
  call.x_out[row] = Narrow(value);
}

// The router's logits, and the normed token. Each thread has one vector of it.
__device__ __forceinline__ void ComputeRouter(const Call& call, const Plan& plan, Shared& shared, u32 launch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, at = threadIdx.x;
  const bool inside = at * kVector < call.hidden;
  float scale[kVector] = {}, xs[kVector] = {}, squares = 0, rate = 0, bias = 0;
  if ((int)threadIdx.x < plan.router && call.router_bias != nullptr)
    bias = Wide(call.router_bias[blockIdx.x + threadIdx.x * gridDim.x]);  // of the row that this thread finishes
  if (inside) {
    LoadFloats(call.router_scale + at * kVector, scale);
    uint4 loaded;
    while (!Receive(call.kept->x + at * kVector / 2, launch, loaded)) {
    }
    Unpack(loaded, xs);
#pragma unroll
    for (int j = 0; j < kVector; ++j) squares += xs[j] * xs[j], xs[j] *= scale[j];
  }
  squares = WarpSum(squares);
  for (int i = 0; i < max(1, plan.router); ++i) {
    float dot = 0;
    if (i < plan.router) {
      const Place place(call, plan.heads.count + plan.out.count + i);
      Wait(&shared.full[place.slot], place.parity);
      if (inside) {
        float w[kVector];
        Unpack(reinterpret_cast<const uint4*>(Slot(shared, plan, place.slot))[at], w);
#pragma unroll
        for (int j = 0; j < kVector; ++j) dot += w[j] * xs[j];
      }
      dot = WarpSum(dot);
    }
    if (i > 0) Sync();
    if (lane == 0) shared.squares[warp] = squares, shared.dots[warp] = dot;
    Sync();
    float sum = 0, product = 0;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) sum += shared.squares[k], product += shared.dots[k];
    rate = rsqrtf(sum / call.hidden + call.router_epsilon);
    if ((int)threadIdx.x == i && i < plan.router) call.logits[blockIdx.x + i * gridDim.x] = product * rate + bias;
  }
  if (inside && at % gridDim.x == blockIdx.x) {
    uint4 packed;
    packed.x = Pack(xs[0] * rate, xs[1] * rate), packed.y = Pack(xs[2] * rate, xs[3] * rate);
    packed.z = Pack(xs[4] * rate, xs[5] * rate), packed.w = Pack(xs[6] * rate, xs[7] * rate);
    reinterpret_cast<uint4*>(call.normed)[at] = packed;
  }
}

}  // namespace jmx

extern "C" __global__ void __launch_bounds__(jmx::kAllThreads, 1) jmx_one_token(const __grid_constant__ jmx::Call call) {
  using namespace jmx;
  Shared& shared = *reinterpret_cast<Shared*>(SharedMemory());
  const Plan plan(call);
  if (threadIdx.x >= kThreads) {
    if (threadIdx.x == kThreads) {
      for (int i = 0; i < call.slots; ++i) InitBarrier(&shared.full[i], 1), InitBarrier(&shared.empty[i], kWarps);
      FenceBarriers();
    }
    __syncwarp();
    ArriveAtStart();
    if (threadIdx.x == kThreads) CopyRows(call, plan, shared);
    return;
  }
  const int position = __ldg(call.position);
  const u32 launch = Launches(call.kept) + 1;
  LoadToken(call, shared);
  SyncStart();
  Attention attention(call, shared, launch, position);
  if (attention.Takes()) attention.Begin();
  ComputeHeads(call, plan, shared, launch);
  if (attention.Takes()) attention.Run();
  ComputeOut(call, plan, shared, launch);
  ComputeRouter(call, plan, shared, launch);
  // This CTA has words of all others, so that all know the number of this launch.
  if (blockIdx.x == 0 && threadIdx.x == 0) call.kept->launches = launch;
}
