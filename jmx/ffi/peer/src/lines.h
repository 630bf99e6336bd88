// Rows of few bytes as *lines*, which say themselves when they have arrived: 16 bytes, of which 8 are data, in two
// halves of 4 bytes, each beside the number of the call. A half is stored and loaded as one word of 8 bytes, so a reader
// that finds this call's number in a half has its data, too. There is no flag to wait for after the rows, and no fence
// before it: a row takes one way over the link instead of two, and twice the bytes.
//
// A line of call k must not be overwritten before its reader, rank B, has it. There are two slots for the lines of each
// rank, for calls of even and of odd numbers, so the next one to write that line is call k + 2 of the same rank, A:
//   1. A starts call k + 2 when its kernel of call k + 1 has ended: kernels on one region run one after the other.
//   2. That kernel has read all lines of call k + 1 that are for A, those of B among them.
//   3. B has written these in its kernel of call k + 1, so B's kernel of call k had ended before.
//   4. A kernel ends when all its threads have read their lines: B has read that of call k.
// Relaxed loads and stores suffice: (1) and (3) are ends of kernels, which order all accesses before with all after; and
// what (2) has read, (3) has written. A line that is left of another call has another number than k: slots begin as zeros
// and numbers at 1, and they repeat after 2^32 calls. All calls on a region have equally many CTAs, so that all of these
// count alike.
//
// tests/check_lines.cc runs the same functions on threads of a CPU.
#pragma once

#include "region.h"

namespace jmx {

constexpr int kLineData = 8;  // bytes of data of a line
constexpr int kLineBytes = 16;
constexpr unsigned long long kMostLineData = 256 << 10;  // bytes of a call, above which the flag costs less

struct Line {
  unsigned long long halves[2];  // each: data, and in its upper 4 bytes the number of the call
};

JMX_DEVICE inline Line LineOf(unsigned long long data, unsigned int call) {
  const unsigned long long number = static_cast<unsigned long long>(call) << 32;
  return {{(data & 0xFFFFFFFFull) | number, (data >> 32) | number}};
}

// The data of a line of this call. `memory` loads, and waits between two attempts.
template <typename Memory>
JMX_DEVICE unsigned long long Receive(Memory& memory, const Line* from, unsigned int call) {
  for (;;) {
    const Line line = memory.Load(from);
    if (line.halves[0] >> 32 == call && line.halves[1] >> 32 == call)
      return (line.halves[0] & 0xFFFFFFFFull) | line.halves[1] << 32;
    memory.Wait();
  }
}

JMX_DEVICE inline Line* LinesOf(const Ranks& ranks, int owner, unsigned int call, int from) {
  return reinterpret_cast<Line*>(SlotOf(ranks, owner, call, from));
}

// The line of a number, such as an address, that rank `from` gives `owner`: one a CTA and an array, which are overwritten in
// the next call. A call ends with flags that all have read theirs.
JMX_DEVICE inline Line* AddressLine(const Ranks& ranks, int owner, int from, int block, int array) {
  const int index = (from * kMaxBlocks + block) * kMaxArrays + array;
  return reinterpret_cast<Line*>(ranks.region[owner] + kAddresses) + index;
}

// Gives rank `other` a number and returns its own. Call it once a line and a call.
template <typename Memory>
JMX_DEVICE unsigned long long Swap(Memory& memory, const Ranks& ranks, unsigned int call, int other, int block, int array,
                                   unsigned long long mine) {
  memory.Store(AddressLine(ranks, other, ranks.rank, block, array), LineOf(mine, call));
  return Receive(memory, AddressLine(ranks, ranks.rank, other, block, array), call);
}

// Arrays of all ranks, one after the other in each result, for one of `threads` threads.
template <typename Memory>
JMX_DEVICE void GatherLines(Memory& memory, const Ranks& ranks, const Arrays& arrays, unsigned int call,
                            unsigned long long thread, unsigned long long threads) {
  using Data = unsigned long long;
  Data begin = 0;  // of an array in a slot
  for (int k = 0; k < arrays.count; ++k) {
    const Data lines = arrays.bytes[k] / kLineData;
    const Data* in = reinterpret_cast<const Data*>(arrays.in[k]);
    Data* out = reinterpret_cast<Data*>(arrays.out[k]);
    for (Data at = thread; at < lines; at += threads) {
      const Data data = in[at];
      for (int i = 1; i < ranks.num_ranks; ++i) {
        const int other = (ranks.rank + i) % ranks.num_ranks;
        memory.Store(LinesOf(ranks, other, call, ranks.rank) + begin + at, LineOf(data, call));
      }
      out[ranks.rank * lines + at] = data;
    }
    begin += lines;
  }
  begin = 0;
  for (int k = 0; k < arrays.count; ++k) {
    const Data lines = arrays.bytes[k] / kLineData;
    Data* out = reinterpret_cast<Data*>(arrays.out[k]);
    for (int i = 1; i < ranks.num_ranks; ++i) {
      const int other = (ranks.rank + i) % ranks.num_ranks;
      const Line* slot = LinesOf(ranks, ranks.rank, call, other) + begin;
      for (Data at = thread; at < lines; at += threads) out[other * lines + at] = Receive(memory, slot + at, call);
    }
    begin += lines;
  }
}

// The sum over all ranks, in float32 and in the order of the ranks, as `Reduce` of kernels.cu, for one thread.
template <typename Element, typename Memory>
JMX_DEVICE void ReduceLines(Memory& memory, const Ranks& ranks, const Arrays& arrays, unsigned int call,
                            unsigned long long thread, unsigned long long threads) {
  using Data = unsigned long long;
  constexpr int kElements = kLineData / sizeof(Element);
  union Lanes {
    Data data;
    Element elements[kElements];
    JMX_DEVICE Lanes() {}
  };
  const Data lines = arrays.bytes[0] / kLineData, stride = arrays.whole ? 0 : lines;  // of ranks' rows
  const Data* in = reinterpret_cast<const Data*>(arrays.in[0]);
  for (Data at = thread; at < lines; at += threads) {
    for (int i = 1; i < ranks.num_ranks; ++i) {
      const int other = (ranks.rank + i) % ranks.num_ranks;
      memory.Store(LinesOf(ranks, other, call, ranks.rank) + at, LineOf(in[other * stride + at], call));
    }
  }
  for (Data at = thread; at < lines; at += threads) {
    float sum[kElements] = {};
    for (int rank = 0; rank < ranks.num_ranks; ++rank) {
      Lanes lanes;
      lanes.data = rank == ranks.rank ? in[rank * stride + at]
                                      : Receive(memory, LinesOf(ranks, ranks.rank, call, rank) + at, call);
      for (int i = 0; i < kElements; ++i) sum[i] += lanes.elements[i].Widen();
    }
    Lanes result;
    for (int i = 0; i < kElements; ++i) result.elements[i] = Element::Round(sum[i]);
    reinterpret_cast<Data*>(arrays.out[0])[at] = result.data;
  }
}

}  // namespace jmx
