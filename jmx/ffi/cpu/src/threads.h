// Parallel loops over the thread that XLA calls a handler on and XLA's thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace jmx {

// The default floating-point environment: XLA's threads may flush subnormal numbers to zero.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

// Calls work(i, end) for ranges that cover 0..count, on this thread and on at most `helpers` threads of the pool.
//
// A free thread claims the next range, at most `max_chunk` long and shorter towards the end. The caller takes part, and
// waits only for ranges that other threads have begun, so a pool without a free thread, or whose thread is the caller,
// delays nothing. A thread that starts late finds no work and returns.
template <typename Pool, typename Work>
void ParallelFor(Pool& pool, int64_t helpers, int64_t count, int64_t max_chunk, const Work& work) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  const auto state = std::make_shared<State>();
  const auto take_part = [state, helpers, count, max_chunk, &work] {
    const DefaultFloatEnvironment plain;
    int64_t mine = 0;
    for (int64_t i = state->next.load(); i < count;) {
      const int64_t end = i + std::clamp<int64_t>((count - i) / (2 * (helpers + 1)), 1, max_chunk);
      if (!state->next.compare_exchange_weak(i, end)) continue;
      work(i, end);
      mine += end - i;
      i = state->next.load();
    }
    if (mine > 0 && state->done.fetch_add(mine) + mine == count) state->done.notify_all();
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(std::decay_t<decltype(take_part)>(take_part));
  take_part();
  for (int64_t done; (done = state->done.load()) < count;) state->done.wait(done);
}

}  // namespace jmx
