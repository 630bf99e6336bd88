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

// In the memory of `owner`: that the same CTA of rank `from` has sent a piece.
__device__ u32* Flag(const Ranks& ranks, int owner, int from, int piece) {
  return Word(ranks, owner, piece * jmx::kMaxRanks + from);
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

__device__ void AwaitFlag(u32* flag, u32 call) {
  const u64 start = Nanoseconds();
  for (u32 seen = call - 1; static_cast<int>(seen - call) < 0;) {  // the other one may be a call ahead
    seen = LoadAcquire(flag);
    if (Nanoseconds() - start > kTimeout) __trap();
  }
}

// Signals the other ranks that what this CTA has sent so far, up to a piece, has arrived.
__device__ void Signal(const Ranks& ranks, u32 call, int piece = 0) {
  __syncthreads();
  const int other = threadIdx.x;
  if (other < ranks.num_ranks && other != ranks.rank) StoreRelease(Flag(ranks, other, ranks.rank, piece), call);
}

// Waits until the same CTA of each rank has signaled this call.
__device__ void Await(const Ranks& ranks, u32 call, int piece = 0) {
  const int other = threadIdx.x;
  if (other < ranks.num_ranks && other != ranks.rank) AwaitFlag(Flag(ranks, ranks.rank, other, piece), call);
  __syncthreads();
}

__device__ void Meet(const Ranks& ranks, u32 call) {
  Signal(ranks, call);
  Await(ranks, call);
}

// What a CTA sends goes in pieces: some arrive, and are received, while others are on their way. A flag comes after a
// fence, which takes as long as the link; so a warp of its own has the flags, and the other threads go on meanwhile.
//
// `send` (piece) of all pieces, then `between` (), then `receive` (piece), by kWorkers threads.
template <typename Send, typename Between, typename Receive>
__device__ void InPieces(const Ranks& ranks, u32 call, int pieces, Send&& send, Between&& between, Receive&& receive) {
  constexpr int kSent = 1, kArrived = kSent + jmx::kMaxPieces;  // barriers; that of __syncthreads is 0
  if (const int other = static_cast<int>(threadIdx.x) - jmx::kWorkers; other >= 0) {
    const bool counts = other < ranks.num_ranks && other != ranks.rank;
    for (int piece = 0; piece < pieces; ++piece) {
      WaitAt(kSent + piece, jmx::kThreads);
      if (counts) StoreRelease(Flag(ranks, other, ranks.rank, piece), call);
    }
    for (int piece = 0; piece < pieces; ++piece) {
      if (counts) AwaitFlag(Flag(ranks, ranks.rank, other, piece), call);
      ArriveAt(kArrived + piece, jmx::kThreads);
    }
    return;
  }
  for (int piece = 0; piece < pieces; ++piece) {
    send(piece);
    ArriveAt(kSent + piece, jmx::kThreads);
  }
  between();
  for (int piece = 0; piece < pieces; ++piece) {
    WaitAt(kArrived + piece, jmx::kThreads);
    receive(piece);
  }
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
