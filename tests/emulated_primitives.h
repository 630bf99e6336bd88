// jmx/ffi/one_token/src/primitives.cuh for a CPU: each thread of a GPU is a fiber, and fibers take turns in random order
// whenever they wait. A copy to shared memory arrives some turns after it was asked for.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "call.h"

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)

using std::max;
using std::min;

struct Index {
  unsigned x;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline Index threadIdx, blockIdx, gridDim;

namespace emulated {

struct Meeting {  // of fibers, a given number at a time
  unsigned arrived = 0, round = 0;
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  unsigned cta, thread;
  bool done;
  std::deque<std::vector<std::function<void()>>> groups{1};  // of copies; the last one is not ended
};
struct Warp {
  Meeting meeting;
  unsigned values[32][6];
};
struct Cta {
  std::vector<unsigned char> memory;
  std::vector<Warp> warps;
  Meeting meeting, products;
};
struct Copying {
  void* to;
  const void* from;
  unsigned bytes;
  unsigned long long* barrier;
};

inline std::vector<Fiber> fibers;
inline std::vector<Cta> ctas;
inline std::vector<Copying> copying;
inline std::mt19937 generator;
inline Fiber* current;
inline unsigned num_threads;  // of a CTA
inline Meeting of_cluster;
inline ucontext_t scheduler;
inline std::function<void()> body;

inline void Yield() {
  swapcontext(&current->context, &scheduler);
}
inline void Meet(Meeting& meeting, unsigned number, bool wait = true) {
  const unsigned round = meeting.round;
  if (++meeting.arrived == number) meeting.arrived = 0, ++meeting.round;
  else if (wait) while (meeting.round == round) Yield();
}
inline Cta& ThisCta() { return ctas[current->cta]; }
inline Warp& ThisWarp() { return ThisCta().warps[current->thread / 32]; }
inline unsigned Lane() { return current->thread % 32; }
inline void MeetWarp() { Meet(ThisWarp().meeting, 32); }

// A barrier as 64 bits: arrivals that are missing, arrivals of a phase, parity, bytes that are missing.
struct Barrier {
  unsigned missing : 15, number : 15, parity : 1, : 1;
  int bytes;
  void Check() {
    if (missing == 0 && bytes == 0) parity ^= 1, missing = number;
  }
};
static_assert(sizeof(Barrier) == 8);

inline void Complete(const Copying& its) {
  memcpy(its.to, its.from, its.bytes);
  auto& barrier = *reinterpret_cast<Barrier*>(its.barrier);
  barrier.bytes -= its.bytes;
  barrier.Check();
}

// Runs `function` as a cluster of `num_ctas`, from CTA `first` on, with so much shared memory, which holds anything. False:
// it hangs.
inline bool Launch(unsigned first, unsigned num_ctas, unsigned threads, size_t shared_bytes, unsigned seed,
                   std::function<void()> function) {
  body = std::move(function);
  generator.seed(seed);
  num_threads = threads;
  of_cluster = {};
  ctas = std::vector<Cta>(num_ctas);
  for (auto& cta : ctas) cta.memory.assign(shared_bytes + 128, 0xff), cta.warps.resize(num_threads / 32);
  fibers.clear();
  fibers.resize(num_ctas * num_threads);
  for (size_t i = 0; i < fibers.size(); ++i) {
    Fiber& fiber = fibers[i];
    constexpr size_t kStack = 32 << 10;
    fiber.stack = std::make_unique<char[]>(kStack);
    fiber.cta = i / num_threads, fiber.thread = i % num_threads, fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    makecontext(&fiber.context, [] { body(); current->done = true; Yield(); }, 0);
  }
  std::vector<unsigned> order(fibers.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (int turn = 0; !order.empty(); ++turn) {
    if (turn == 10000) return false;
    std::shuffle(order.begin(), order.end(), generator);
    for (unsigned i : order) {
      current = &fibers[i];
      threadIdx.x = current->thread, blockIdx.x = first + current->cta;
      swapcontext(&scheduler, &current->context);
    }
    std::erase_if(order, [](unsigned i) { return fibers[i].done; });
    std::erase_if(copying, [](const Copying& its) {
      const bool now = generator() % 4 == 0;
      if (now) Complete(its);
      return now;
    });
  }
  return true;
}

}  // namespace emulated

inline float __uint_as_float(unsigned v) {
  float r;
  memcpy(&r, &v, 4);
  return r;
}
inline unsigned __float_as_uint(float v) {
  unsigned r;
  memcpy(&r, &v, 4);
  return r;
}
inline void __syncthreads() { emulated::Meet(emulated::ThisCta().meeting, emulated::num_threads); }
inline void __syncwarp() { emulated::MeetWarp(); }
inline void __threadfence() {}
inline float rsqrtf(float v) { return 1 / std::sqrt(v); }
template <typename T>
T __ldg(const T* at) {
  return *at;
}
template <typename T>
T __ldcg(const T* at) {
  if (reinterpret_cast<std::uintptr_t>(at) % alignof(T) != 0) abort();
  return *at;
}
inline float __shfl_xor_sync(unsigned, float v, int mask) {
  auto& warp = emulated::ThisWarp();
  warp.values[emulated::Lane()][0] = __float_as_uint(v);
  emulated::MeetWarp();
  const float found = __uint_as_float(warp.values[emulated::Lane() ^ mask][0]);
  emulated::MeetWarp();
  return found;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = a | static_cast<unsigned long long>(b) << 32;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) found |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return found;
}

namespace jmx {

typedef unsigned u32;
typedef unsigned long long u64;

inline unsigned char* SharedMemory(emulated::Cta& cta = emulated::ThisCta()) {
  auto address = reinterpret_cast<std::uintptr_t>(cta.memory.data());
  return reinterpret_cast<unsigned char*>((address + 127) / 128 * 128);
}
inline void InitBarrier(u64* at, u32 arrivals) { *reinterpret_cast<emulated::Barrier*>(at) = {arrivals, arrivals, 0, 0}; }
inline void FenceBarriers() {}
inline void Arrive(u64* at) {
  auto& barrier = *reinterpret_cast<emulated::Barrier*>(at);
  if (barrier.missing == 0) abort();
  --barrier.missing;
  barrier.Check();
}
inline void Wait(u64* at, u32 parity) {
  while (reinterpret_cast<emulated::Barrier*>(at)->parity == parity) emulated::Yield();
}
inline bool Test(u64* at, u32 parity) {
  emulated::Yield();
  return reinterpret_cast<emulated::Barrier*>(at)->parity != parity;
}
inline void Copy(void* to, const void* from, u32 bytes, u64* at) {
  if ((reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | bytes) % 16 != 0) abort();
  reinterpret_cast<emulated::Barrier*>(at)->bytes += bytes;
  Arrive(at);
  emulated::copying.push_back({to, from, bytes, at});
}
// Copies of a thread are made when it waits for them, as late as they may be.
inline void CopyVector(void* to, const void* from) {
  if ((reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from)) % 16 != 0) abort();
  emulated::current->groups.back().push_back([=] { memcpy(to, from, 16); });
}
inline void EndGroup() { emulated::current->groups.emplace_back(); }
template <int kLater>
void AwaitGroups() {
  for (auto& groups = emulated::current->groups; groups.size() > kLater + 1; groups.pop_front())
    for (auto& copy : groups.front()) copy();
}
template <int kNumber = kThreads>
void Sync() {
  emulated::Meet(emulated::ThisCta().products, kNumber);
}
inline void BeginNext() {}
inline void AwaitLast() {}
inline void SyncCluster() { emulated::Meet(emulated::of_cluster, emulated::ctas.size() * emulated::num_threads); }
inline float LoadOf(u32 cta, const float* at) {
  const auto offset = reinterpret_cast<const unsigned char*>(at) - SharedMemory();
  return *reinterpret_cast<const float*>(SharedMemory(emulated::ctas.at(cta)) + offset);
}
inline uint4 LoadEarly(const void* from) { return __ldcg(static_cast<const uint4*>(from)); }
inline uint4 LoadShared(const uint4* from) { return __ldcg(from); }
inline float LoadEarly(const float* from) { return *from; }
inline Bf16 LoadEarly(const Bf16* from) { return *from; }
inline float2 LoadPair(const float* from) { return {from[0], from[1]}; }
inline u32 LoadPair(const Bf16* from) { return from[0] | static_cast<u32>(from[1]) << 16; }
inline void StorePair(Bf16* to, u32 pair) { to[0] = static_cast<Bf16>(pair), to[1] = static_cast<Bf16>(pair >> 16); }
inline float Wide(Bf16 v) { return __uint_as_float(static_cast<u32>(v) << 16); }
inline float Low(u32 v) { return __uint_as_float(v << 16); }
inline float High(u32 v) { return __uint_as_float(v & 0xffff0000u); }
inline Bf16 Narrow(float v) {
  const u32 bits = __float_as_uint(v);
  return v != v ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 Pack(float low, float high) { return Narrow(low) | static_cast<u32>(Narrow(high)) << 16; }
inline void Unpack(const uint4& from, float* to) {
  const u32 parts[] = {from.x, from.y, from.z, from.w};
  for (int i = 0; i < 8; ++i) to[i] = i % 2 ? High(parts[i / 2]) : Low(parts[i / 2]);
}
inline float Exp2(float v) { return std::exp2(v); }
inline float WarpSum(float v) {
  for (int i = 16; i; i >>= 1) v += __shfl_xor_sync(~0u, v, i);
  return v;
}
inline void Multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  auto& warp = emulated::ThisWarp();
  const unsigned lane = emulated::Lane(), given[] = {a0, a1, a2, a3, b0, b1};
  memcpy(warp.values[lane], given, sizeof given);
  emulated::MeetWarp();
  for (unsigned i = 0; i < 4; ++i)
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned pair = k % 8 / 2, half = k / 8;
      const u32 a = warp.values[lane / 4 * 4 + pair][2 * half + i / 2];
      const u32 b = warp.values[(lane % 4 * 2 + i % 2) * 4 + pair][4 + half];
      c[i] += k % 2 ? High(a) * High(b) : Low(a) * Low(b);
    }
  emulated::MeetWarp();
}

}  // namespace jmx
