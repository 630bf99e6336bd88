// For ThreadSanitizer, which Python and XLA would drown in reports: the sharing of work and the kernels, on a pool
// here.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "product.h"
#include "threads.h"

namespace {

// Starts each task on a thread of its own, some of them late.
class Pool {
 public:
  ~Pool() {
    for (std::thread& thread : threads_) thread.join();
  }
  void Schedule(std::function<void()> task) {
    const auto late = std::chrono::microseconds(threads_.size() % 3 * 500);
    threads_.emplace_back([task = std::move(task), late] {
      std::this_thread::sleep_for(late);
      task();
    });
  }

 private:
  std::vector<std::thread> threads_;
};

constexpr int64_t kRows = 9, kColumns = 64, kK = 256, kWidth = 8;

std::vector<float> Compute(const jmx::InstructionSet& kernel, int helpers, int max_chunk) {
  std::mt19937 random(0);
  std::vector<float> x(kRows * kK), bias(kColumns), out(kRows * kColumns);
  std::vector<uint8_t> values(kColumns * kK / 2), scales(kColumns * kK / jmx::kBlock);
  for (float& a : x) a = static_cast<float>(random() % 17) - 8;
  for (uint8_t& a : values) a = static_cast<uint8_t>(random());
  for (uint8_t& a : scales) a = static_cast<uint8_t>(120 + random() % 8);
  Pool pool;
  jmx::ParallelFor(pool, helpers, kColumns / kWidth, max_chunk, [&](int64_t i, int64_t end) {
    const std::align_val_t line{64};
    const jmx::Microkernel& microkernel = kernel.Find(jmx::kMxfp4, jmx::kFloat32);
    char* scratch = static_cast<char*>(::operator new(microkernel.scratch_bytes(kK), line));
    const int64_t n = i * kWidth, columns = (end - i) * kWidth;
    const char* of = reinterpret_cast<const char*>(&scales[n * kK / jmx::kBlock]);
    microkernel.run({reinterpret_cast<const char*>(x.data()), nullptr, &values[n * kK / 2], of, nullptr, nullptr,
                     &bias[n], &out[n], kRows, columns, kK, jmx::kBlock, kColumns, scratch});
    ::operator delete(scratch, line);
  });
  return out;  // before the pool's late ones are through
}

}  // namespace

int main() {
  const std::vector<float> alone = Compute(*jmx::kPortable, 0, 1);
  for (int i = 0; i < 100; ++i)
    if (Compute(*jmx::kPortable, i % 8, 1 + i % 3) != alone) {
      std::printf("%d helpers give other bits\n", i % 8);
      return 1;
    }
  std::printf("no races, and the same bits\n");
  return 0;
}
