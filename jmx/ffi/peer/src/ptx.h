// Instructions that CUDA C++ has no function for.
#pragma once

namespace {

// What was written before, also on other GPUs, is seen before the flag.
__device__ void StoreRelease(unsigned int* to, unsigned int flag) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(flag) : "memory");
}

__device__ unsigned int LoadAcquire(const unsigned int* from) {
  unsigned int flag;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(flag) : "l"(from) : "memory");
  return flag;
}

// Barriers of so many threads of a CTA, whole warps. `ArriveAt` does not wait for the others, `WaitAt` does.
__device__ void ArriveAt(int barrier, int threads) {
  __syncwarp();
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ void WaitAt(int barrier, int threads) {
  __syncwarp();
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Two words, each whole, past the caches of one GPU.
__device__ void StorePair(void* to, const unsigned long long (&words)[2]) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(words[0]), "l"(words[1]) : "memory");
}

__device__ void LoadPair(const void* from, unsigned long long (&words)[2]) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(words[0]), "=l"(words[1]) : "l"(from) : "memory");
}

__device__ unsigned long long Nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ unsigned short RoundToBFloat16(float value) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ unsigned short RoundToFloat16(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ float WidenFloat16(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

}  // namespace
