// What the kernels of jmx/ffi/peer use of CUDA, on threads of a CPU: a CTA is a thread of the system, and the CTA's
// threads take turns on it, each until it waits for others. Blocks run where they are launched by `RunCta`.
#pragma once

#include <ucontext.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__ static thread_local  // of the CTA, whose threads all run on one thread of the system
#define __launch_bounds__(threads)
#define __grid_constant__

struct Dimension {
  unsigned x;
};

struct uint2 {
  unsigned x, y;
};

struct uint4 {
  unsigned x, y, z, w;
};

namespace emulated {

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(32 << 10, 0x5A);  // no zeros where a value is missing
  bool done = false;
};

struct Warp {
  unsigned arrived = 0, generation = 0;
  std::uint64_t values[2][32];  // of calls of even and of odd numbers
};

struct Barrier {
  unsigned arrived = 0, generation = 0;
};

struct Cta {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  ucontext_t scheduler;
  Dimension block, blocks;
  unsigned current = 0;
  Barrier barriers[16];
  std::function<void()> kernel;
};

inline thread_local Cta* running = nullptr;

inline void Wait() { swapcontext(&running->threads[running->current].context, &running->scheduler); }

inline void Start() {
  running->kernel();
  running->threads[running->current].done = true;
  Wait();
}

// Runs one CTA of a grid.
inline void RunCta(unsigned block, unsigned blocks, unsigned threads, std::function<void()> kernel) {
  Cta cta{std::vector<Thread>(threads), std::vector<Warp>(threads / 32), {}, {block}, {blocks}, 0, {},
          std::move(kernel)};
  running = &cta;
  for (Thread& thread : cta.threads) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    makecontext(&thread.context, Start, 0);
  }
  for (unsigned left = threads; left > 0; std::this_thread::yield())
    for (cta.current = 0; cta.current < threads; ++cta.current)
      if (Thread& thread = cta.threads[cta.current]; !thread.done) {
        swapcontext(&cta.scheduler, &thread.context);
        left -= thread.done;
      }
  running = nullptr;  // the CTA ends with this call
}

// The values of all lanes of a warp, once all have come here.
inline const std::uint64_t* OfWarp(std::uint64_t value) {
  Warp& warp = running->warps[running->current / 32];
  const unsigned call = warp.generation;
  warp.values[call & 1][running->current % 32] = value;
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    ++warp.generation;
  }
  while (warp.generation == call) Wait();
  return warp.values[call & 1];
}

}  // namespace emulated

#define threadIdx (Dimension{emulated::running->current})
#define blockIdx (emulated::running->block)
#define blockDim (Dimension{static_cast<unsigned>(emulated::running->threads.size())})
#define gridDim (emulated::running->blocks)

// Returns the barrier's generation before.
inline unsigned ArriveAt(int index, unsigned threads) {
  emulated::Barrier& barrier = emulated::running->barriers[index];
  const unsigned call = barrier.generation;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  return call;
}

inline void WaitAt(int index, unsigned threads) {
  const unsigned call = ArriveAt(index, threads);
  while (emulated::running->barriers[index].generation == call) emulated::Wait();
}

inline void __syncthreads() { WaitAt(0, static_cast<unsigned>(emulated::running->threads.size())); }

inline unsigned __reduce_or_sync(unsigned, unsigned bits) {
  const std::uint64_t* all = emulated::OfWarp(bits);
  unsigned found = 0;
  for (int lane = 0; lane < 32; ++lane) found |= static_cast<unsigned>(all[lane]);
  return found;
}

inline int __reduce_add_sync(unsigned, int number) {
  const std::uint64_t* all = emulated::OfWarp(static_cast<std::uint32_t>(number));
  int sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += static_cast<int>(all[lane]);
  return sum;
}

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float __int_as_float(int bits) { return __uint_as_float(bits); }

inline float __shfl_xor_sync(unsigned, float value, int mask) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return __uint_as_float(static_cast<unsigned>(emulated::OfWarp(bits)[emulated::running->current % 32 ^ mask]));
}

template <typename T>
T __ldcg(const T* from) {
  return *from;
}

template <typename T>
T __ldg(const T* from) {
  return *from;
}

inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }

inline unsigned atomicExch(unsigned* word, unsigned value) { return std::atomic_ref(*word).exchange(value); }

inline void __trap() { std::abort(); }

// As jmx/ffi/peer/src/ptx.h. Words of a pair are stored in the order of the larger addresses, with others in between.

inline void StoreRelease(unsigned* to, unsigned flag) { std::atomic_ref(*to).store(flag, std::memory_order_release); }

inline unsigned LoadAcquire(unsigned* from) {
  emulated::Wait();
  return std::atomic_ref(*from).load(std::memory_order_acquire);
}

inline void StorePair(void* to, const unsigned long long (&words)[2]) {
  auto* const pair = static_cast<unsigned long long*>(to);
  std::atomic_ref(pair[1]).store(words[1], std::memory_order_relaxed);
  emulated::Wait();
  std::atomic_ref(pair[0]).store(words[0], std::memory_order_relaxed);
}

inline void LoadPair(const void* from, unsigned long long (&words)[2]) {
  emulated::Wait();
  auto* const pair = const_cast<unsigned long long*>(static_cast<const unsigned long long*>(from));
  for (int i = 0; i < 2; ++i) words[i] = std::atomic_ref(pair[i]).load(std::memory_order_relaxed);
}

inline unsigned long long Nanoseconds() { return 1; }

inline unsigned short RoundToBFloat16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return value != value ? 0x7FFF : static_cast<unsigned short>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline unsigned short RoundToFloat16(float) { std::abort(); }  // not emulated

inline float WidenFloat16(unsigned short) { std::abort(); }
