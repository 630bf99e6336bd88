// jmx/ffi/peer/src/lines.h on threads of a CPU: ranks exchange rows, and addresses of arrays that they then read, many
// times, with delays, and each result is checked.
//
//     check_lines RANKS CALLS
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "lines.h"

namespace {

using jmx::Arrays;
using jmx::Line;
using jmx::Ranks;
using Data = unsigned long long;

constexpr int kThreads = 2;  // of a rank, which take every other line
constexpr int kRows[] = {40, 8, 16};  // bytes of the arrays that are gathered

// A line in memory that threads share: two words, of which each is stored and loaded whole, in any order.
struct SharedMemory {
  std::minstd_rand random;
  bool late;

  void Pause() {
    if (late && random() % 16 == 0) std::this_thread::yield();
  }
  void Store(Line* to, const Line& line) {
    const int first = random() & 1;
    std::atomic_ref(to->halves[first]).store(line.halves[first], std::memory_order_relaxed);
    Pause();
    std::atomic_ref(to->halves[1 - first]).store(line.halves[1 - first], std::memory_order_relaxed);
  }
  Line Load(const Line* from) {
    Line line;
    for (int i = 0; i < 2; ++i)
      line.halves[i] = std::atomic_ref(const_cast<Data&>(from->halves[i])).load(std::memory_order_relaxed);
    return line;
  }
  void Wait() { std::this_thread::yield(); }
};

struct Float32 {
  float value;
  float Widen() const { return value; }
  static Float32 Round(float value) { return {value}; }
};

// What a rank gives in a call, of which each element tells where it is from.
float Element(int rank, int call, int index) { return 1.0f + 0.37f * rank + 0.11f * (call % 97) + 1e-3f * index; }

std::atomic<int> failures = 0;

// A sum of elements that others have in arrays of their own, whose addresses are swapped. Ends when all have read
// theirs.
float SumOfArrays(SharedMemory& memory, const Ranks& ranks, int call, const float* mine, std::atomic<int>& read) {
  float sum = 0;
  for (int rank = 0; rank < ranks.num_ranks; ++rank) {
    const float* its = mine;
    if (rank != ranks.rank)
      its = reinterpret_cast<const float*>(jmx::Swap(memory, ranks, call, rank, 1, 2, reinterpret_cast<Data>(mine)));
    sum += its[ranks.rank];
  }
  ++read;
  while (read < call * ranks.num_ranks) std::this_thread::yield();
  return sum;
}

struct Rank {
  Ranks ranks{};
  std::vector<unsigned char> in[3], out[3];
  std::vector<float> rows, sums;
  float swapped;
};

void Fill(Rank& its, int call) {
  for (int k = 0; k < 3; ++k)
    for (size_t i = 0; i < its.in[k].size(); ++i)
      its.in[k][i] = static_cast<unsigned char>(its.ranks.rank * 31 + call * 7 + k * 3 + i);
  for (size_t i = 0; i < its.rows.size(); ++i) its.rows[i] = Element(its.ranks.rank, call, static_cast<int>(i));
  for (auto& out : its.out) std::memset(out.data(), 0xEE, out.size());
}

void Check(const Rank& its, int call) {
  for (int k = 0; k < 3; ++k)
    for (int rank = 0; rank < its.ranks.num_ranks; ++rank)
      for (int i = 0; i < kRows[k]; ++i)
        failures += its.out[k][rank * kRows[k] + i] != static_cast<unsigned char>(rank * 31 + call * 7 + k * 3 + i);
  for (size_t i = 0; i < its.sums.size(); ++i) {
    float sum = 0;
    for (int rank = 0; rank < its.ranks.num_ranks; ++rank)
      sum += Element(rank, call, static_cast<int>(its.ranks.rank * its.sums.size() + i));
    failures += sum != its.sums[i];
  }
  float sum = 0;
  for (int rank = 0; rank < its.ranks.num_ranks; ++rank) sum += Element(rank, call, its.ranks.rank);
  failures += sum != its.swapped;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int num_ranks = std::atoi(argv[1]), num_calls = std::atoi(argv[2]);
  constexpr int kSums = 7;  // elements of a rank
  const size_t slot_bytes = 256;
  std::atomic<int> read = 0;
  const std::vector<Data> region((jmx::kSlots + 2 * num_ranks * slot_bytes) / 8);
  std::vector<std::vector<Data>> regions(2 * num_ranks, region);
  std::vector<Rank> all(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    Rank& its = all[rank];
    its.ranks = {{}, slot_bytes, rank, num_ranks};
    for (int k = 0; k < 3; ++k) {
      its.in[k].resize(kRows[k]);
      its.out[k].resize(kRows[k] * num_ranks);
    }
    its.rows.resize(kSums * num_ranks);
    its.sums.resize(kSums);
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Rank& its = all[rank];
      std::minstd_rand random(rank + 1);
      Ranks gather = its.ranks, reduce = its.ranks;  // each kind of call has regions of its own
      for (int i = 0; i < num_ranks; ++i) {
        gather.region[i] = reinterpret_cast<char*>(regions[i].data());
        reduce.region[i] = reinterpret_cast<char*>(regions[num_ranks + i].data());
      }
      for (int call = 1; call <= num_calls; ++call) {
        Fill(its, call);
        // A rank is late in some calls, so that others are a call ahead of it.
        for (unsigned i = random() % 8 == 0 ? random() % 200 : 0; i > 0; --i) std::this_thread::yield();
        Arrays rows{};
        rows.count = 3;
        for (int k = 0; k < 3; ++k) {
          rows.in[k] = reinterpret_cast<const char*>(its.in[k].data());
          rows.out[k] = reinterpret_cast<char*>(its.out[k].data());
          rows.bytes[k] = kRows[k];
        }
        Arrays sum{};
        sum.count = 1;
        sum.in[0] = reinterpret_cast<const char*>(its.rows.data());
        sum.out[0] = reinterpret_cast<char*>(its.sums.data());
        sum.bytes[0] = kSums * sizeof(float);
        std::vector<std::thread> kernel;  // ends when all its threads end, as a kernel does
        const auto run = [&](int thread) {
          SharedMemory memory{std::minstd_rand(call * kThreads + thread + 1), call % 3 == 0};
          jmx::GatherLines(memory, gather, rows, call, thread, kThreads);
          jmx::ReduceLines<Float32>(memory, reduce, sum, call, thread, kThreads);
        };
        for (int thread = 1; thread < kThreads; ++thread) kernel.emplace_back(run, thread);
        run(0);
        for (auto& its : kernel) its.join();
        std::vector<float> array(its.rows);  // in other memory in each call
        SharedMemory memory{std::minstd_rand(call), call % 3 == 0};
        its.swapped = SumOfArrays(memory, gather, call, array.data(), read);
        Check(its, call);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  std::printf("%d ranks, %d calls: %d wrong\n", num_ranks, num_calls, failures.load());
  return failures != 0;
}
