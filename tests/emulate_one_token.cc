// The kernel of jmx/ffi/one_token on a CPU, see emulated_primitives.h, for tests/test_one_token.py.
#include "kernels.cu"

// Runs launches of `num_ctas` with `call.slots` slots, one after the other with the same results. 0; 1: one hangs.
extern "C" int emulate(jmx::Call call, int num_ctas, int num_launches, unsigned seed) {
  const auto kept = std::make_unique<jmx::Kept>();
  call.kept = kept.get();
  const size_t slot = jmx::SlotBytes(call.hidden, call.kv_heads * call.group * jmx::kDim);
  for (int i = 0; i < num_launches; ++i) {
    const auto run = [&] { jmx_one_token(call); };
    if (!emulated::Launch(num_ctas, jmx::kAllThreads, sizeof(jmx::Shared) + call.slots * slot, seed + i, run)) return 1;
  }
  return 0;
}
