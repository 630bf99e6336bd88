// jmx/ffi/peer/src/needed.h for one lane, as a function of a shared library.
#include "needed.h"

#include <limits>

namespace {

struct OneLane {
  static constexpr int kCount = 1;
  static float Infinity() { return std::numeric_limits<float>::infinity(); }
  int Index() const { return 0; }
  template <typename Number>
  Number Load(const Number* from) const { return *from; }
  unsigned Or(unsigned bits) const { return bits; }
  int Sum(int number) const { return number; }
  float Max(float number) const { return number; }
};

}  // namespace

extern "C" void ranks_of(const char* routing, long tokens, int width, bool logits, const int* firsts, int num_ranks,
                         int each, int top_k, unsigned among, unsigned* found) {
  const jmx::Needed needed{firsts, nullptr, 0, 0, each, top_k, width, logits};
  for (long token = 0; token < tokens; ++token)
    found[token] = jmx::RanksOf(OneLane{}, needed, num_ranks, routing + token * width * 4, among);
}
