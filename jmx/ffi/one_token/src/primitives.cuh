// Instructions of a Hopper GPU that have no name in C++, and arithmetic on bfloat16.
#pragma once

#include "call.h"

namespace jmx {

typedef unsigned u32;
typedef unsigned long long u64;

__device__ __forceinline__ unsigned char* SharedMemory() {
  extern __shared__ __align__(128) unsigned char memory[];
  return memory;
}

// Barriers in shared memory, which count arrivals and bytes, and copies to there

__device__ __forceinline__ u32 SharedAddress(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ void InitBarrier(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void FenceBarriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void Arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

__device__ __forceinline__ void Wait(u64* barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(SharedAddress(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}

// Whether `Wait` would not wait.
__device__ __forceinline__ bool Test(u64* barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(SharedAddress(barrier)), "r"(parity)
      : "memory");
  return done;
}

// Copies bytes, a multiple of 16; the barrier arrives once, when they have.
__device__ __forceinline__ void Copy(void* to, const void* from, u32 bytes, u64* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   SharedAddress(to)),
               "l"(from), "r"(bytes), "r"(SharedAddress(barrier))
               : "memory");
}

// Copies 16 bytes, past the L1 cache; and groups of such copies of this thread, which arrive in their order.
__device__ __forceinline__ void CopyVector(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(SharedAddress(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void EndGroup() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLater>  // that may still be on their way
__device__ __forceinline__ void AwaitGroups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

// Of the threads that multiply.
template <int kNumber = kThreads>
__device__ __forceinline__ void Sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(kNumber) : "memory");
}

// Kernels of one stream that overlap: the next one may begin, and the last one has ended.
__device__ __forceinline__ void BeginNext() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void AwaitLast() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Of all threads of a cluster.
__device__ __forceinline__ void SyncCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What another CTA of the cluster has where this one has `at`.
__device__ __forceinline__ float LoadOf(u32 cta, const float* at) {
  u32 its;
  float v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(its) : "r"(SharedAddress(at)), "r"(cta));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(its) : "memory");
  return v;
}

// Loads that stay where they are written: ptxas moves none over a barrier.
__device__ __forceinline__ uint4 LoadEarly(const void* from) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ uint4 LoadShared(const uint4* from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(SharedAddress(from))
               : "memory");
  return v;
}
__device__ __forceinline__ float LoadEarly(const float* from) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ float2 LoadPair(const float* from) {
  float2 v;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ u32 LoadPair(const Bf16* from) {
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ Bf16 LoadEarly(const Bf16* from) {
  Bf16 v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(from) : "memory");
  return v;
}

// Arithmetic

__device__ __forceinline__ float Wide(Bf16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ float Low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float High(u32 v) { return __uint_as_float(v & 0xffff0000u); }

__device__ __forceinline__ Bf16 Narrow(float v) {
  Bf16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}

__device__ __forceinline__ u32 Pack(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ __forceinline__ void StorePair(Bf16* to, u32 pair) { *reinterpret_cast<u32*>(to) = pair; }

__device__ __forceinline__ void Unpack(const uint4& from, float* to) {
  to[0] = Low(from.x), to[1] = High(from.x), to[2] = Low(from.y), to[3] = High(from.y);
  to[4] = Low(from.z), to[5] = High(from.z), to[6] = Low(from.w), to[7] = High(from.w);
}

__device__ __forceinline__ float Exp2(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

__device__ __forceinline__ float WarpSum(float v) {
#pragma unroll
  for (int i = 16; i; i >>= 1) v += __shfl_xor_sync(~0u, v, i);
  return v;
}

// c += A B on tensor cores, A (16, 16), B (16, 8), c (16, 8). Of A, lane 4 g + t has columns 2 t, 2 t + 1 of row g in
// a0 and of row g + 8 in a1, and columns 8 + 2 t, 9 + 2 t of these in a2, a3; of column g of B rows 2 t, 2 t + 1 in b0
// and 8 + 2 t, 9 + 2 t in b1; of c columns 2 t, 2 t + 1 of row g, then of row g + 8.
__device__ __forceinline__ void Multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace jmx
