// The kernels of jmx/ffi/one_token on a CPU, see emulated_primitives.h, for tests/test_one_token.py.
#include "kernels.cu"

// Runs all of them, one after the other, cluster by cluster. 0; 1: one hangs.
extern "C" int emulate(jmx::Call call, unsigned seed) {
  void (*const kernels[2][jmx::kNumKernels])(jmx::Call) = {
      {jmx_one_token_heads, jmx_one_token_attention, jmx_one_token_out, jmx_one_token_router},
      {jmx_few_tokens_heads, jmx_few_tokens_attention, jmx_few_tokens_out, jmx_few_tokens_router}};
  jmx::Launch launches[jmx::kNumKernels];
  jmx::Plan(call, launches);
  for (int i = 0; i < jmx::kNumKernels; ++i) {
    const auto& its = launches[i];
    gridDim.x = its.ctas;
    for (int first = 0; first < its.ctas; first += its.cluster) {
      const auto run = [&] { kernels[call.tokens > 1][i](call); };
      if (!emulated::Launch(first, its.cluster, its.threads, its.shared_bytes, seed++, run)) return 1;
    }
  }
  return 0;
}
