// Calls of kernels that several GPUs run at once: their numbers, flags and arrays' addresses in the regions of all
// ranks.
#pragma once

#ifdef __CUDACC__
#include "ptx.h"
#else
#include "emulated_gpu.h"  // that of a test on a CPU
#endif

#include "lines.h"
#include "region.h"

namespace {

using jmx::Arrays;
using jmx::kMaxBlocks;
using jmx::Ranks;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u64 kTimeout = 300ull * 1000 * 1000 * 1000;  // ns that a rank waits for another one

__device__ u32* Word(const Ranks& ranks, int owner, int row) {
  return reinterpret_cast<u32*>(ranks.region[owner]) + row * kMaxBlocks + blockIdx.x;
}

// A call, by its number. A second one at the same time, on the same region, would mix rows up, so that is an error. The
// word `kBusy` is read when the call begins but checked when it ends: rows need not wait for it.
struct Call {
  u32 number, busy;
  __device__ operator u32() const { return number; }
};

__device__ Call Begin(const Ranks& ranks) {
  const u32 busy = threadIdx.x == 0 ? atomicExch(Word(ranks, ranks.rank, jmx::kBusy), 1) : 0;
  return {*Word(ranks, ranks.rank, jmx::kCalls) + 1, busy};
}

__device__ void End(const Ranks& ranks, const Call& call) {
  __syncthreads();
  if (call.busy != 0) __trap();
  if (threadIdx.x == 0) {
    *Word(ranks, ranks.rank, jmx::kCalls) = call;
    atomicExch(Word(ranks, ranks.rank, jmx::kBusy), 0);
  }
}

// Signals the other ranks that what this CTA has sent so far has arrived. `flags`: the first row of flags.
__device__ void Signal(const Ranks& ranks, u32 call, int flags = 0) {
  __syncthreads();
  const int other = threadIdx.x;
  if (other < ranks.num_ranks && other != ranks.rank) {
    StoreRelease(Word(ranks, other, flags + ranks.rank), call);
  }
}

// Waits for a flag of this call.
__device__ void AwaitFlag(u32* flag, u32 call) {
  const u64 start = Nanoseconds();
  for (u32 seen = call - 1; static_cast<int>(seen - call) < 0;) {  // the other one may be a call ahead
    seen = LoadAcquire(flag);
    if (Nanoseconds() - start > kTimeout) __trap();
  }
}

// Waits until the same CTA of each rank has signaled this call.
__device__ void Await(const Ranks& ranks, u32 call, int flags = 0) {
  const int other = threadIdx.x;
  if (other < ranks.num_ranks && other != ranks.rank) AwaitFlag(Word(ranks, ranks.rank, flags + other), call);
  __syncthreads();
}

__device__ void Meet(const Ranks& ranks, u32 call) {
  Signal(ranks, call);
  Await(ranks, call);
}
// Lines in the memory of GPUs: words of 8 bytes, past the caches of one GPU.
struct SystemMemory {
  u64 start = 0;

  __device__ void Store(jmx::Line* to, const jmx::Line& line) {
    StorePair(to, line.halves);
  }
  __device__ jmx::Line Load(const jmx::Line* from) {
    jmx::Line line;
    LoadPair(from, line.halves);
    return line;
  }
  __device__ void Wait() {
    const u64 now = Nanoseconds();
    if (start == 0) start = now;
    if (now - start > kTimeout) __trap();
  }
};

// Sends the addresses of `count` arrays to the other ranks.
__device__ void SendAddresses(const Ranks& ranks, u32 call, const char* const* mine, int count) {
  const int other = threadIdx.x / jmx::kMaxArrays, k = threadIdx.x % jmx::kMaxArrays;
  if (other < ranks.num_ranks && other != ranks.rank && k < count) {
    SystemMemory memory;
    __threadfence_system();  // what earlier kernels wrote there comes before its address
    memory.Store(jmx::AddressLine(ranks, other, ranks.rank, blockIdx.x, k),
                 jmx::NumberLine(reinterpret_cast<u64>(mine[k]), call));
  }
}

// `theirs` [rank * kMaxArrays + k], shared, gets the addresses that the other ranks have sent.
__device__ void ReceiveAddresses(const Ranks& ranks, u32 call, int count, u64* theirs) {
  const int other = threadIdx.x / jmx::kMaxArrays, k = threadIdx.x % jmx::kMaxArrays;
  if (other < ranks.num_ranks && other != ranks.rank && k < count) {
    SystemMemory memory;
    theirs[threadIdx.x] = jmx::ReceiveNumber(memory, jmx::AddressLine(ranks, ranks.rank, other, blockIdx.x, k), call);
    __threadfence_system();
  }
  __syncthreads();
}

__device__ void SwapAddresses(const Ranks& ranks, u32 call, const char* const* mine, int count, u64* theirs) {
  SendAddresses(ranks, call, mine, count);
  ReceiveAddresses(ranks, call, count, theirs);
}

}  // namespace
