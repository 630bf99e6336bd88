// The part of a decoder's layer between two sums of experts, of one token, as one kernel: norm, queries, keys and values,
// their rotation, the cache, attention, the product of the result, the residual, norm and router.
//
// Each SM has one CTA, and all run at once. What one CTA computes and others need goes through the L2 cache, with counters
// by which CTAs wait. Weights are copied to shared memory all the while.
#include "attention.cuh"

namespace jmx {

// This thread's elements of a vector of `columns`, as MultiplyRows has them.
template <typename Take>
__device__ __forceinline__ void ForVectors(int columns, Take&& take) {
  const int first = threadIdx.x / 32 % kColumnGroups * 32 + threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int at = first + k * 32 * kColumnGroups;
    if (at * kVector < columns) take(k, at);
  }
}

__device__ __forceinline__ void LoadFloats(const float* from, float (&to)[kVector]) {
  const float4 a = __ldg(reinterpret_cast<const float4*>(from)), b = __ldg(reinterpret_cast<const float4*>(from) + 1);
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// Queries, keys and values, to global memory.
__device__ void ComputeHeads(const Call& call, const Plan& plan, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float xs[kPerThread][kVector] = {}, squares = 0;
  ForVectors(call.hidden, [&](int k, int at) {
    float scale[kVector];
    LoadFloats(call.scale + at * kVector, scale);
    Unpack(Load16Bytes(call.x + at * kVector), xs[k]);
#pragma unroll
    for (int j = 0; j < kVector; ++j) squares += xs[k][j] * xs[k][j], xs[k][j] *= scale[j];
  });
  squares = WarpSum(squares);
  if (lane == 0) shared.squares[warp] = squares;  // those of the first kColumnGroups warps are of all columns
  SyncStart();
  MultiplyRows(call, plan, shared, 0, plan.heads.count, call.hidden, xs);
  Sync();
  if (warp > 0) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kColumnGroups; ++i) sum += shared.squares[i];
  const float rate = rsqrtf(sum / call.hidden + call.epsilon);
  for (int n = lane; n < plan.heads.count; n += 32) {
    const int row = plan.heads.first + n;
    const float bias = call.heads_bias == nullptr ? 0 : Wide(call.heads_bias[row]);
    call.heads[row] = Narrow(Product(shared, n) * rate + bias);
  }
  __syncwarp();
  const int each = (call.group + 2) * kDim, end = plan.heads.first + plan.heads.count;
  if (lane > 0) return;
  __threadfence();
  for (int row = plan.heads.first; row < end;) {
    const int head = row / each, next = min(end, (head + 1) * each);
    AddRelease(&call.counters->heads[head], next - row);
    row = next;
  }
}

// The residual stream with attention's result, to global memory.
__device__ void ComputeOut(const Call& call, const Plan& plan, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, columns = call.kv_heads * call.group * kDim;
  constexpr int kEach = kMostRows / 32;
  float before[kEach] = {}, bias[kEach] = {};
  if (warp == 0) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int n = lane + 32 * i, row = plan.out.first + n;
      if (n >= plan.out.count) continue;
      before[i] = Wide(call.x[row]);
      if (call.out_bias != nullptr) bias[i] = Wide(call.out_bias[row]);
    }
  }
  if (threadIdx.x == 0) WaitFor(&call.counters->attended, call.kv_heads);
  Sync();
  float xs[kPerThread][kVector] = {};
  ForVectors(columns, [&](int k, int at) { Unpack(Load16Bytes(call.attended + at * kVector), xs[k]); });
  MultiplyRows(call, plan, shared, plan.heads.count, plan.out.count, columns, xs);
  Sync();
  if (warp > 0) return;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int n = lane + 32 * i;
    if (n >= plan.out.count) continue;
    call.x_out[plan.out.first + n] = Narrow(before[i] + Wide(Narrow(Product(shared, n) + bias[i])));
  }
  __syncwarp();
  if (lane > 0) return;
  __threadfence();
  AddRelease(&call.counters->summed, 1);
}

// The router's logits, and the normed token. Each thread has one vector of it.
__device__ void ComputeRouter(const Call& call, const Plan& plan, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, at = threadIdx.x;
  const bool inside = at * kVector < call.hidden;
  float scale[kVector] = {}, xs[kVector] = {}, squares = 0, rate = 0;
  if (inside) LoadFloats(call.router_scale + at * kVector, scale);
  if (threadIdx.x == 0) WaitFor(&call.counters->summed, gridDim.x);
  Sync();
  if (inside) {
    Unpack(Load16Bytes(call.x_out + at * kVector), xs);
#pragma unroll
    for (int j = 0; j < kVector; ++j) squares += xs[j] * xs[j], xs[j] *= scale[j];
  }
  squares = WarpSum(squares);
  for (int i = 0; i < max(1, plan.router); ++i) {
    float dot = 0;
    if (i < plan.router) {
      const int n = plan.heads.count + plan.out.count + i, round = n / call.slots, slot = n - round * call.slots;
      Wait(&shared.full[slot], round & 1);
      if (inside) {
        float w[kVector];
        Unpack(reinterpret_cast<const uint4*>(Slot(shared, plan, slot))[at], w);
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
    if (threadIdx.x == 0 && i < plan.router) {
      const int row = blockIdx.x + i * gridDim.x;
      call.logits[row] = product * rate + (call.router_bias == nullptr ? 0 : Wide(call.router_bias[row]));
    }
  }
  if (inside && at % gridDim.x == blockIdx.x) {
    uint4 packed;
    packed.x = Pack(xs[0] * rate, xs[1] * rate), packed.y = Pack(xs[2] * rate, xs[3] * rate);
    packed.z = Pack(xs[4] * rate, xs[5] * rate), packed.w = Pack(xs[6] * rate, xs[7] * rate);
    reinterpret_cast<uint4*>(call.normed)[at] = packed;
  }
}

// The last CTA, for which none waits any more, sets all counters to zero.
__device__ void End(const Call& call) {
  if (threadIdx.x > 0 || AddAcquireRelease(&call.counters->ended, 1) != gridDim.x - 1) return;
  for (int i = 0; i < call.kv_heads; ++i) call.counters->heads[i] = 0, call.counters->splits[i] = 0;
  call.counters->attended = 0, call.counters->summed = 0, call.counters->ended = 0;
}

}  // namespace jmx

extern "C" __global__ void __launch_bounds__(jmx::kAllThreads, 1) jmx_one_token(const __grid_constant__ jmx::Call call) {
  using namespace jmx;
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Plan plan(call);
  if (threadIdx.x >= kThreads) {
    if (threadIdx.x == kThreads) {
      for (int i = 0; i < call.slots; ++i) InitBarrier(&shared.full[i], 1), InitBarrier(&shared.empty[i], kColumnGroups);
      FenceBarriers();
    }
    __syncwarp();
    ArriveAtStart();
    if (threadIdx.x == kThreads) CopyRows(call, plan, shared);
    return;
  }
  ComputeHeads(call, plan, shared);
  Attention attention(call, shared);
  if (attention.Takes()) attention.Run();
  ComputeOut(call, plan, shared);
  ComputeRouter(call, plan, shared);
  End(call);
}
