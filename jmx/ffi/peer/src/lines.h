// Rows of few bytes as *lines*, which say themselves when they have arrived: 16 bytes, of which 12 are data, in two
// halves of 6 bytes, each beside the last 16 bits of the number of the call. A half is stored and loaded as one word of
// 8 bytes, so a reader that finds this call's number in a half has its data, too. There is no flag to wait for after
// the rows, and no fence before it: a row takes one way over the link instead of two, and a third more bytes.
//
// A line of call k must not be overwritten before its reader, rank B, has it. There are two slots for the lines of each
// rank, for calls of even and of odd numbers, so the next one to write that line is call k + 2 of the same rank, A:
//   1. A starts call k + 2 when its kernel of call k + 1 has ended: kernels on one region run one after the other.
//   2. That kernel has read all lines of call k + 1 that are for A, those of B among them.
//   3. B has written these in its kernel of call k + 1, so B's kernel of call k had ended before.
//   4. A kernel ends when all its threads have read their lines: B has read that of call k.
// Relaxed loads and stores suffice: (1) and (3) are ends of kernels, which order all accesses before with all after;
// and what (2) has read, (3) has written. All calls on a region have arrays of the same sizes and equally many CTAs, so
// that all of these count alike, and each call writes every line: one that has not arrived is that of call k - 2, or
// for an address of call k - 1, or zeros, where numbers begin at 1. So 16 bits of the number suffice.
//
// tests/check_lines.cc runs the same functions on threads of a CPU.
#pragma once

#include "region.h"

namespace jmx {

constexpr int kLineData = 12;  // bytes of data of a line
constexpr int kLineBytes = 16;
constexpr int kLineUnit = 4;  // bytes of which each array is a multiple
constexpr unsigned long long kMostLineData = 256 << 10;  // bytes of a call, above which the flag costs less
constexpr int kLinesInFlight = 4;  // that a thread reads before it writes any, or waits for at once

// The data of a line.
struct Words {
  unsigned int of[kLineData / kLineUnit];
};

struct Line {
  unsigned long long halves[2];  // each: data, and in its upper 2 bytes the number of the call
};

JMX_DEVICE inline Line LineOf(const Words& words, unsigned int call) {
  using Half = unsigned long long;
  const Half number = Half{call} << 48;
  return {
      {words.of[0] | Half{words.of[1] & 0xFFFF} << 32 | number, words.of[1] >> 16 | Half{words.of[2]} << 16 | number}};
}

JMX_DEVICE inline bool IsOf(const Line& line, unsigned int call) {
  return line.halves[0] >> 48 == (call & 0xFFFF) && line.halves[1] >> 48 == (call & 0xFFFF);
}

JMX_DEVICE inline Words WordsOf(const Line& line) {
  using Word = unsigned int;
  const auto [first, last] = line.halves;
  return {{static_cast<Word>(first), (static_cast<Word>(first >> 32) & 0xFFFF) | static_cast<Word>(last) << 16,
           static_cast<Word>(last >> 16)}};
}

// `store` (i, data) for those lines of this call, at `from` (i), with a bit in `missing`, as they arrive. `memory`
// loads, and waits between two attempts.
template <int kCount, typename Memory, typename From, typename Store>
JMX_DEVICE void Receive(Memory& memory, unsigned int call, unsigned int missing, From&& from, Store&& store) {
  for (;;) {
    Line lines[kCount];
JMX_UNROLL
    for (int i = 0; i < kCount; ++i)
      if (missing >> i & 1) lines[i] = memory.Load(from(i));
JMX_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if ((missing >> i & 1) == 0 || !IsOf(lines[i], call)) continue;
      store(i, WordsOf(lines[i]));
      missing &= ~(1u << i);
    }
    if (missing == 0) return;
    memory.Wait();
  }
}

// An address, or another number, as a line, and that of a line of this call.
JMX_DEVICE inline Line NumberLine(unsigned long long number, unsigned int call) {
  return LineOf({{static_cast<unsigned int>(number), static_cast<unsigned int>(number >> 32), 0}}, call);
}

template <typename Memory>
JMX_DEVICE unsigned long long ReceiveNumber(Memory& memory, const Line* from, unsigned int call) {
  unsigned long long number = 0;
  Receive<1>(
      memory, call, 1, [&](int) { return from; },
      [&](int, const Words& words) { number = words.of[0] | static_cast<unsigned long long>(words.of[1]) << 32; });
  return number;
}

JMX_DEVICE inline Line* LinesOf(const Ranks& ranks, int owner, unsigned int call, int from) {
  return reinterpret_cast<Line*>(SlotOf(ranks, owner, call, from));
}

// The line of a number, such as an address, that rank `from` gives `owner`: one a CTA and an array, which are
// overwritten in the next call. A call ends with flags that all have read theirs.
JMX_DEVICE inline Line* AddressLine(const Ranks& ranks, int owner, int from, int block, int array) {
  const int index = (from * kMaxBlocks + block) * kMaxArrays + array;
  return reinterpret_cast<Line*>(ranks.region[owner] + kAddresses) + index;
}

// Gives rank `other` a number and returns its own. Call it once a line and a call.
template <typename Memory>
JMX_DEVICE unsigned long long Swap(Memory& memory, const Ranks& ranks, unsigned int call, int other, int block,
                                   int array, unsigned long long mine) {
  memory.Store(AddressLine(ranks, other, ranks.rank, block, array), NumberLine(mine, call));
  return ReceiveNumber(memory, AddressLine(ranks, ranks.rank, other, block, array), call);
}

JMX_DEVICE inline unsigned long long NumLines(unsigned long long bytes) { return (bytes + kLineData - 1) / kLineData; }

// Line `at` of an array of so many bytes, and its storing; the last line may not be full.
JMX_DEVICE inline Words ReadWords(const char* array, unsigned long long bytes, unsigned long long at) {
  Words words{};
JMX_UNROLL
  for (int i = 0; i < kLineData / kLineUnit; ++i)
    if (const auto word = at * (kLineData / kLineUnit) + i; word < bytes / kLineUnit)
      words.of[i] = reinterpret_cast<const unsigned int*>(array)[word];
  return words;
}

JMX_DEVICE inline void WriteWords(char* array, unsigned long long bytes, unsigned long long at, const Words& words) {
JMX_UNROLL
  for (int i = 0; i < kLineData / kLineUnit; ++i)
    if (const auto word = at * (kLineData / kLineUnit) + i; word < bytes / kLineUnit)
      reinterpret_cast<unsigned int*>(array)[word] = words.of[i];
}

// Arrays of all ranks, one after the other in each result, for one of `threads` threads.
template <typename Memory>
JMX_DEVICE void GatherLines(Memory& memory, const Ranks& ranks, const Arrays& arrays, unsigned int call,
                            unsigned long long thread, unsigned long long threads) {
  using Count = unsigned long long;
  Count begin = 0;  // of an array in a slot
  for (int k = 0; k < arrays.count; ++k) {
    const Count bytes = arrays.bytes[k], lines = NumLines(bytes);
    for (Count first = thread; first < lines; first += kLinesInFlight * threads) {
      Words words[kLinesInFlight];
JMX_UNROLL
      for (int i = 0; i < kLinesInFlight; ++i)
        if (first + i * threads < lines) words[i] = ReadWords(arrays.in[k], bytes, first + i * threads);
JMX_UNROLL
      for (int i = 0; i < kLinesInFlight; ++i) {
        const Count at = first + i * threads;
        if (at >= lines) continue;
        for (int nth = 1; nth < ranks.num_ranks; ++nth) {
          const int other = (ranks.rank + nth) % ranks.num_ranks;
          memory.Store(LinesOf(ranks, other, call, ranks.rank) + begin + at, LineOf(words[i], call));
        }
        WriteWords(arrays.out[k] + ranks.rank * bytes, bytes, at, words[i]);
      }
    }
    begin += lines;
  }
  begin = 0;
  for (int k = 0; k < arrays.count; ++k) {
    const Count bytes = arrays.bytes[k], lines = NumLines(bytes), all = (ranks.num_ranks - 1) * lines;
    for (Count first = thread; first < all; first += kLinesInFlight * threads) {
      unsigned int missing = 0;
JMX_UNROLL
      for (int i = 0; i < kLinesInFlight; ++i)
        if (first + i * threads < all) missing |= 1u << i;
      const auto other_of = [&](int i) {
        return static_cast<int>((ranks.rank + 1 + (first + i * threads) / lines) % ranks.num_ranks);
      };
      const auto line_of = [&](int i) { return (first + i * threads) % lines; };
      Receive<kLinesInFlight>(
          memory, call, missing,
          [&](int i) { return LinesOf(ranks, ranks.rank, call, other_of(i)) + begin + line_of(i); },
          [&](int i, const Words& words) {
            WriteWords(arrays.out[k] + other_of(i) * bytes, bytes, line_of(i), words);
          });
    }
    begin += lines;
  }
}

// The sum over all of at most kRanks ranks, in float32 and in the order of the ranks, as `Reduce` of kernels.cu, for
// one thread.
template <int kRanks, typename Element, typename Memory>
JMX_DEVICE void ReduceLinesOf(Memory& memory, const Ranks& ranks, const Arrays& arrays, unsigned int call,
                              unsigned long long thread, unsigned long long threads) {
  using Count = unsigned long long;
  constexpr int kElements = kLineData / sizeof(Element);
  union Lanes {
    Words words;
    Element elements[kElements];
    JMX_DEVICE Lanes() {}
  };
  const Count bytes = arrays.bytes[0], lines = NumLines(bytes), stride = arrays.whole ? 0 : bytes;  // of ranks' rows
  for (Count at = thread; at < lines; at += threads) {
    for (int i = 1; i < ranks.num_ranks; ++i) {
      const int other = (ranks.rank + i) % ranks.num_ranks;
      const Words words = ReadWords(arrays.in[0] + other * stride, bytes, at);
      memory.Store(LinesOf(ranks, other, call, ranks.rank) + at, LineOf(words, call));
    }
  }
  for (Count at = thread; at < lines; at += threads) {
    const Words own = ReadWords(arrays.in[0] + ranks.rank * stride, bytes, at);
    Words theirs[kRanks];
    Receive<kRanks>(
        memory, call, ((1u << ranks.num_ranks) - 1) & ~(1u << ranks.rank),
        [&](int rank) { return LinesOf(ranks, ranks.rank, call, rank) + at; },
        [&](int rank, const Words& words) { theirs[rank] = words; });
    float sum[kElements] = {};
JMX_UNROLL
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank >= ranks.num_ranks) break;
      Lanes lanes;
      lanes.words = rank == ranks.rank ? own : theirs[rank];
JMX_UNROLL
      for (int i = 0; i < kElements; ++i) sum[i] += lanes.elements[i].Widen();
    }
    Lanes result;
JMX_UNROLL
    for (int i = 0; i < kElements; ++i) result.elements[i] = Element::Round(sum[i]);
    WriteWords(arrays.out[0], bytes, at, result.words);
  }
}

template <typename Element, typename Memory>
JMX_DEVICE void ReduceLines(Memory& memory, const Ranks& ranks, const Arrays& arrays, unsigned int call,
                            unsigned long long thread, unsigned long long threads) {
  if (ranks.num_ranks <= 2)
    ReduceLinesOf<2, Element>(memory, ranks, arrays, call, thread, threads);
  else if (ranks.num_ranks <= 4)
    ReduceLinesOf<4, Element>(memory, ranks, arrays, call, thread, threads);
  else
    ReduceLinesOf<kMaxRanks, Element>(memory, ranks, arrays, call, thread, threads);
}

}  // namespace jmx
