// What handler.cc passes to the kernels.
#pragma once

#ifdef __CUDACC__
#define JMX_DEVICE __device__
#define JMX_UNROLL _Pragma("unroll")
#else
#define JMX_DEVICE
#define JMX_UNROLL
#endif

namespace jmx {

constexpr int kMaxRanks = 8;    // GPUs of one host
constexpr int kMaxArrays = 4;   // of one call
constexpr int kMaxBlocks = 128;  // CTAs of one call
constexpr int kThreads = 512;   // of a CTA
constexpr int kWorkers = kThreads - 32;  // of them, where a warp has the flags
constexpr int kFewUnits = 2;    // of a thread, up to which few results are summed at once
constexpr int kThreadBytes = 16;  // that decide the number of CTAs

// Rows of kMaxBlocks words at the beginning of a region, a word a CTA: a flag for each rank, and another one for what
// it sends first; the number of the last call; whether a call is running.
constexpr int kFirst = kMaxRanks, kCalls = 2 * kMaxRanks, kBusy = kCalls + 1;
// Then the addresses of arrays that each rank has sent: a line of 16 bytes an array, a CTA and a rank.
constexpr int kAddresses = (kBusy + 1) * kMaxBlocks * 4;  // where they begin, in bytes
constexpr int kSlots = kAddresses + kMaxRanks * kMaxBlocks * kMaxArrays * 16;  // where slots begin, in bytes

// How rows get to another rank: into a slot, with a flag; as lines in a slot; or between the arrays themselves.
enum class Way : long long { kSlot, kLines, kArrays };

struct Ranks {
  char* region[kMaxRanks];        // by rank
  unsigned long long slot_bytes;  // of one rank's arrays
  int rank, num_ranks;
};

// Where one rank's arrays of a call lie in the region of `owner`.
JMX_DEVICE inline char* SlotOf(const Ranks& ranks, int owner, unsigned int call, int from) {
  return ranks.region[owner] + kSlots + ((call & 1) * ranks.num_ranks + from) * ranks.slot_bytes;
}

struct Arrays {
  const char* in[kMaxArrays];
  char* out[kMaxArrays];
  unsigned long long bytes[kMaxArrays];  // of one rank
  int count;
  bool whole;  // of a sum: every rank gets all rows
};

}  // namespace jmx
