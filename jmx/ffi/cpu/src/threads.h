// Parallel loops over the thread that XLA calls a handler on and XLA's thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace jmx {

// Floating point as the language has it: XLA's threads may flush subnormal numbers to zero.
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

// Calls work(i, end) for ranges that make up 0..count, on this thread and at most `helpers` of the pool's.
//
// A free thread claims the next ones, at most `max_chunk` at once and fewer towards the end. The caller takes part, and
// waits only for what another thread has begun: a pool that has no thread free, or is this very thread's, delays nothing.
// A thread that starts late finds no work and returns.
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
