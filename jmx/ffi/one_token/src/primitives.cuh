// Instructions of a Hopper GPU that have no name in C++, and arithmetic on bfloat16.
#pragma once

#include "call.h"

namespace jmx {

typedef unsigned u32;
typedef unsigned long long u64;

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

// Copies bytes, a multiple of 16; the barrier arrives once, when they have.
__device__ __forceinline__ void Copy(void* to, const void* from, u32 bytes, u64* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   SharedAddress(to)),
               "l"(from), "r"(bytes), "r"(SharedAddress(barrier))
               : "memory");
}

// Of the warps that multiply.
__device__ __forceinline__ void Sync() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

// Of all warps; the one that copies does not wait.
__device__ __forceinline__ void SyncStart() { asm volatile("bar.sync 2, %0;" ::"n"(kAllThreads) : "memory"); }
__device__ __forceinline__ void ArriveAtStart() { asm volatile("bar.arrive 2, %0;" ::"n"(kAllThreads) : "memory"); }

// Counters in global memory, by which CTAs wait for each other

__device__ __forceinline__ void AddRelease(u32* counter, u32 number) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(number) : "memory");
}

__device__ __forceinline__ u32 AddAcquireRelease(u32* counter, u32 number) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(number) : "memory");
  return before;
}

__device__ __forceinline__ void WaitFor(const u32* counter, u32 number) {
  u32 found;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
  } while (found < number);
}

// Loads past the L1 cache, of what other SMs have written in this launch

__device__ __forceinline__ uint4 Load16Bytes(const void* at) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

__device__ __forceinline__ float LoadBf16(const Bf16* at) {
  Bf16 v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(at) : "memory");
  return __uint_as_float((u32)v << 16);
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

// c += A B on tensor cores, A (16, 16) with zeros in its rows from 8 on, B (16, 8), c (16, 8).
__device__ __forceinline__ void Multiply(float (&c)[4], u32 a0, u32 a2, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
}

}  // namespace jmx
