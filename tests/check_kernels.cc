// The kernels of jmx/ffi/peer/src on an emulated GPU: ranks gather and add up arrays many times, by slots, from array
// to array, of rows that are needed, and of rows that are a token's terms, and each result is checked. Memory of
// results begins as NaN.
//
//     check_kernels RANKS CALLS
#include "kernels.cu"
#include "needed.cu"
#include "terms.cu"

#include <algorithm>
#include <random>
#include <utility>

namespace {

constexpr int kTokens = 11, kRows = 7, kWidth = 12, kTopK = 3, kEach = 4;  // of a rank; of a row; of a token; of a rank
constexpr int kBlocks = 2;
constexpr std::size_t kSlotBytes = 4096, kManyBytes = 1400 * 96;

std::mt19937 random_bits(1);
int failures = 0;

using jmx::Way;

template <typename T>
using OfRanks = std::vector<std::vector<T>>;
using Floats = OfRanks<uint4>;  // in units, which are aligned

float Draw() { return std::uniform_real_distribution<float>(-1, 1)(random_bits); }

Floats Empty(int num_ranks, std::size_t floats) {
  Floats made(num_ranks, std::vector<uint4>((floats + 3) / 4));
  for (auto& its : made) std::memset(its.data(), 0xFF, its.size() * sizeof(uint4));
  return made;
}

float* Of(Floats& arrays, int rank) { return reinterpret_cast<float*>(arrays[rank].data()); }
char* Bytes(Floats& arrays, int rank) { return reinterpret_cast<char*>(arrays[rank].data()); }

Floats Drawn(int num_ranks, std::size_t floats) {
  Floats made = Empty(num_ranks, floats);
  for (int rank = 0; rank < num_ranks; ++rank) std::generate_n(Of(made, rank), floats, Draw);
  return made;
}

// Regions of one kind of calls.
struct Regions {
  OfRanks<unsigned long long> memory;
  std::size_t slot_bytes;
  Regions(int num_ranks, std::size_t slot_bytes)
      : memory(num_ranks, std::vector<unsigned long long>((jmx::kSlots + 2 * num_ranks * slot_bytes) / 8 + 1)),
        slot_bytes(slot_bytes) {}
  Ranks Of(int rank) {
    Ranks ranks{{}, slot_bytes, rank, static_cast<int>(memory.size())};
    for (std::size_t i = 0; i < memory.size(); ++i) ranks.region[i] = reinterpret_cast<char*>(memory[i].data());
    return ranks;
  }
};

// Runs a kernel on all ranks, some of whose CTAs are late.
void Run(int num_ranks, const std::function<void(int)>& kernel) {
  std::vector<std::thread> ctas;
  for (int rank = 0; rank < num_ranks; ++rank)
    for (int block = 0; block < kBlocks; ++block)
      ctas.emplace_back([&, rank, block, late = random_bits() % 64] {
        for (unsigned i = 0; i < late; ++i) std::this_thread::yield();
        emulated::RunCta(block, kBlocks, jmx::kThreads, [&] { kernel(rank); });
      });
  for (auto& cta : ctas) cta.join();
}

void Expect(bool right) { failures += !right; }

// The routing of all ranks' tokens: logits, or ids, of which some are of no rank.
struct Routings {
  Floats arrays;
  int num_ranks, width;
  bool logits;

  Routings(int num_ranks, bool logits)
      : arrays(Drawn(num_ranks, kTokens * (logits ? num_ranks * kEach : kTopK))),
        num_ranks(num_ranks),
        width(logits ? num_ranks * kEach : kTopK),
        logits(logits) {
    for (int rank = 0; rank < num_ranks && !logits; ++rank)
      for (int i = 0; i < kTokens * kTopK; ++i)
        reinterpret_cast<int*>(Of(arrays, rank))[i] = static_cast<int>(random_bits() % (num_ranks * kEach + 1)) - 1;
  }

  // The ranks that have an expert of a rank's token.
  unsigned Needed(int rank, int token) {
    const float* row = Of(arrays, rank) + token * width;
    unsigned found = 0;
    for (int slot = 0; slot < kTopK; ++slot) {
      int expert = logits ? Nth(row, slot) : reinterpret_cast<const int*>(row)[slot];
      if (expert >= 0) found |= 1u << expert / kEach;
    }
    return found;
  }

 private:
  int Nth(const float* row, int nth) const {
    std::vector<std::pair<float, int>> order;
    for (int expert = 0; expert < width; ++expert) order.emplace_back(-row[expert], expert);
    std::sort(order.begin(), order.end());
    return order[nth].second;
  }
};

void CheckNeeded(int num_ranks, Regions& gathers, Regions& sums, bool logits) {
  Routings routing(num_ranks, logits);
  const int width = routing.width, row_bytes = kWidth * 4;
  Floats x = Drawn(num_ranks, kTokens * kWidth), weights = Drawn(num_ranks, kTokens * kTopK);
  Floats rows = Empty(num_ranks, num_ranks * kRows * kWidth), routings = Empty(num_ranks, num_ranks * kTokens * width);
  Floats all_weights = Empty(num_ranks, num_ranks * kTokens * kTopK), bits = Empty(num_ranks, num_ranks * kTokens);
  std::vector<int> firsts(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) firsts[rank] = rank * kEach;
  const auto bits_of = [&](int rank, int other, int token) {
    return reinterpret_cast<const unsigned*>(Of(bits, rank))[other * kTokens + token];
  };
  Run(num_ranks, [&](int rank) {
    Arrays arrays{};
    const auto add = [&](char* in, char* out, unsigned long long bytes) {
      arrays.in[arrays.count] = in;
      arrays.out[arrays.count] = out;
      arrays.bytes[arrays.count++] = bytes;
    };
    add(Bytes(x, rank), Bytes(rows, rank), kRows * row_bytes);
    add(Bytes(routing.arrays, rank), Bytes(routings, rank), kTokens * width * 4);
    if (!logits) add(Bytes(weights, rank), Bytes(all_weights, rank), kTokens * kTopK * 4);
    add(nullptr, Bytes(bits, rank), kTokens * 4);
    gather_needed(gathers.Of(rank), arrays, {firsts.data(), nullptr, kRows, kTokens, kEach, kTopK, width, logits});
  });
  Floats returned = Empty(num_ranks, num_ranks * kRows * kWidth);  // NaN where nothing is needed
  for (int rank = 0; rank < num_ranks; ++rank)
    for (int other = 0; other < num_ranks; ++other) {
      for (int token = 0; token < kTokens; ++token) {
        Expect(bits_of(rank, other, token) == routing.Needed(other, token));
        const auto same = [&](Floats& got, Floats& given, int size) {
          return std::memcmp(Of(got, rank) + (other * kTokens + token) * size, Of(given, other) + token * size,
                             size * 4) == 0;
        };
        Expect(same(routings, routing.arrays, width) && (logits || same(all_weights, weights, kTopK)));
      }
      for (int row = 0; row < kRows; ++row)
        for (int i = 0; i < kWidth; ++i) {
          const bool sent = rank == other || routing.Needed(other, row) >> rank & 1;
          Expect(Of(rows, rank)[(other * kRows + row) * kWidth + i] == (sent ? Of(x, other)[row * kWidth + i] : 0));
          if (routing.Needed(other, kTokens - kRows + row) >> rank & 1)
            Of(returned, rank)[(other * kRows + row) * kWidth + i] = Draw();
        }
    }
  Floats total = Empty(num_ranks, kRows * kWidth), written = Empty(num_ranks, num_ranks * kRows * kWidth);
  Run(num_ranks, [&](int rank) {
    Arrays arrays{{Bytes(returned, rank)}, {Bytes(total, rank), Bytes(written, rank)}, {kRows * kWidth * 4}, 1, false};
    const auto* ranks = reinterpret_cast<const unsigned*>(Of(bits, rank));
    reduce_f32_needed(sums.Of(rank), arrays, {nullptr, ranks, kRows, kTokens, 0, 0, 0, false});
  });
  for (int rank = 0; rank < num_ranks; ++rank)
    for (int i = 0; i < kRows * kWidth; ++i) {
      float sum = 0;
      for (int other = 0; other < num_ranks; ++other)
        if (routing.Needed(rank, kTokens - kRows + i / kWidth) >> other & 1)
          sum += Of(returned, other)[rank * kRows * kWidth + i];
      Expect(Of(total, rank)[i] == sum);
    }
}

// `by_slots`: else from array to array; `whole`: every rank gets all rows of a sum.
void CheckAll(int num_ranks, Regions& gathers, Regions& sums, bool by_slots, bool whole) {
  const int size = kTokens * kWidth, other_size = kTokens * kTopK, parts = whole ? 1 : num_ranks;
  Floats x = Drawn(num_ranks, size), ids = Drawn(num_ranks, other_size), y = Drawn(num_ranks, parts * size);
  Floats rows = Empty(num_ranks, num_ranks * size), all_ids = Empty(num_ranks, num_ranks * other_size);
  Floats total = Empty(num_ranks, size);
  Run(num_ranks, [&](int rank) {
    Arrays arrays{{Bytes(x, rank), Bytes(ids, rank)}, {Bytes(rows, rank), Bytes(all_ids, rank)}, {}, 2, false};
    arrays.bytes[0] = size * 4;
    arrays.bytes[1] = other_size * 4;
    (by_slots ? gather_4 : gather_arrays_4)(gathers.Of(rank), arrays);
  });
  Run(num_ranks, [&](int rank) {
    Arrays arrays{{Bytes(y, rank)}, {Bytes(total, rank)}, {kTokens * kWidth * 4}, 1, whole};
    (by_slots ? reduce_f32_16 : reduce_f32_arrays_16)(sums.Of(rank), arrays);
  });
  for (int rank = 0; rank < num_ranks; ++rank) {
    for (int other = 0; other < num_ranks; ++other) {
      Expect(std::memcmp(Of(rows, rank) + other * size, Of(x, other), size * 4) == 0);
      Expect(std::memcmp(Of(all_ids, rank) + other * other_size, Of(ids, other), other_size * 4) == 0);
    }
    for (int i = 0; i < size; ++i) {
      float sum = 0;
      for (int other = 0; other < num_ranks; ++other) sum += Of(y, other)[(whole ? 0 : rank * size) + i];
      Expect(Of(total, rank)[i] == sum);
    }
  }
}

// Sums of terms, some of which no rank has, of `tokens` a rank. `needed`: ranks without a term of a token have no bit,
// perhaps. `few`: by the kernel of few results of two ranks.
template <typename Element>
void CheckTerms(int num_ranks, Regions& sums, Way way, bool needed, int tokens, bool few = false) {
  constexpr int width = 24;  // of a row: whole units of both types
  const int all = num_ranks * tokens, slots = 6, parts = 1 + random_bits() % 2, stride = width + 4;
  const unsigned bytes = width * sizeof(Element);
  const std::size_t count = 9;  // of terms
  Floats rows = Drawn(num_ranks, parts * count * stride), weights = Drawn(num_ranks, all * slots);
  Floats total = Empty(num_ranks, tokens * width), written = Empty(num_ranks, all * width);
  OfRanks<int> row_of(num_ranks, std::vector<int>(all * slots));
  std::vector<unsigned> bits(all);
  for (int i = 0; i < all * slots; ++i) {
    const int mine = static_cast<int>(random_bits() % (num_ranks + 1)), token = i / slots;
    for (int rank = 0; rank < num_ranks; ++rank)
      row_of[rank][i] = rank == mine ? static_cast<int>(random_bits() % count) : -1;
    unsigned& its = bits[token];
    if (mine < num_ranks) its |= 1u << mine;
    if (i % 5 == 0) its |= 1;
  }
  Run(num_ranks, [&](int rank) {
    Arrays arrays{{}, {Bytes(total, rank), way == Way::kArrays ? Bytes(written, rank) : nullptr}, {}, 1, false};
    arrays.bytes[0] = static_cast<unsigned long long>(tokens) * bytes;
    const auto each = static_cast<unsigned>(tokens);
    const Terms terms{Bytes(rows, rank), row_of[rank].data(), Of(weights, rank), needed ? bits.data() : nullptr,
                      count * stride * 4, stride * 4u, each, bytes / 16, parts, slots};
    constexpr bool kFloats = sizeof(Element) == 4;
    if (few) return (kFloats ? reduce_f32_terms_few : reduce_bf16_terms_few)(sums.Of(rank), arrays, terms);
    if (way == Way::kSlot) return (kFloats ? reduce_f32_terms : reduce_bf16_terms)(sums.Of(rank), arrays, terms);
    (kFloats ? reduce_f32_terms_arrays : reduce_bf16_terms_arrays)(sums.Of(rank), arrays, terms);
  });
  for (int rank = 0; rank < num_ranks; ++rank)
    for (int i = 0; i < tokens * width; ++i) {
      float sum = 0;
      for (int other = 0; other < num_ranks; ++other) {
        float of_rank = 0;
        for (int slot = 0; slot < slots; ++slot) {
          const int at = (rank * tokens + i / width) * slots + slot, row = row_of[other][at];
          if (row < 0) continue;
          float term = Of(rows, other)[row * stride + i % width];
          if (parts == 2) term += Of(rows, other)[(count + row) * stride + i % width];
          of_rank += term * Of(weights, other)[at];
        }
        sum += Element::Round(of_rank).Widen();
      }
      Expect(reinterpret_cast<Element*>(Bytes(total, rank))[i].Widen() == Element::Round(sum).Widen());
    }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int num_ranks = std::atoi(argv[1]), num_calls = std::atoi(argv[2]);
  std::vector<Regions> regions;
  for (int kind = 0; kind < 12; ++kind)
    regions.emplace_back(num_ranks, kind < 2 ? kSlotBytes : kind > 7 ? kManyBytes : 0);
  for (int call = 0; call < num_calls; ++call) {
    CheckAll(num_ranks, regions[0], regions[1], true, call % 2 == 1);
    CheckAll(num_ranks, regions[2], regions[3], false, call % 2 == 1);
    CheckNeeded(num_ranks, regions[4], regions[5], call % 2 == 1);
    const bool needed = call % 2 == 1;
    const int rows = call / 2 % 2 == 1 ? 1400 : kRows;  // these are so many that a rank's own sums are not the last
    CheckTerms<BFloat16>(num_ranks, regions[6], Way::kArrays, needed, rows);
    CheckTerms<Float32>(num_ranks, regions[7], Way::kArrays, needed, rows);
    CheckTerms<BFloat16>(num_ranks, regions[8], Way::kSlot, needed, rows);
    CheckTerms<Float32>(num_ranks, regions[9], Way::kSlot, needed, rows);
    if (num_ranks != 2) continue;
    const int few = call / 2 % 2 == 1 ? 310 : kRows;  // of these some threads have two units
    CheckTerms<BFloat16>(num_ranks, regions[10], Way::kSlot, false, few, true);
    CheckTerms<Float32>(num_ranks, regions[11], Way::kSlot, false, few, true);
  }
  std::printf("%d ranks, %d calls: %d wrong\n", num_ranks, num_calls, failures);
  return failures != 0;
}
