// One piece of a grouped product, and what can compute it: a kernel for each instruction set.
#pragma once

#include <cstdint>

namespace jmx {

constexpr int kBlock = 32;  // weights that share a scale
constexpr int kStep = 4;    // weight rows, which are columns of the result, that a kernel works on together

// What x is; and, where all calls of one shape have few rows an expert, that.
enum Input { kFloat32 = 0, kBfloat16 = 1, kFewBfloat16 = 2 };

// out[m, n] = sum over k of x[m, k] * weight[n, k], plus bias[n]. Only `scratch` is aligned to more than its elements.
struct Piece {
  const char* x;          // (rows, k) float32 or bfloat16, without gaps
  const uint8_t* values;  // (columns, k / 2): e2m1 codes, the even element of k in the low nibble
  const uint8_t* scales;  // (columns, k / kBlock): e8m0 codes
  const float* bias;      // (columns), or null
  float* out;             // (rows, columns), its rows `out_stride` elements apart
  int64_t rows;
  int64_t columns;  // a multiple of kStep
  int64_t k;        // a multiple of kBlock
  int64_t out_stride;
  char* scratch;  // as many bytes as `Way::room` says, aligned to 64
};

// Sums are float32, and over k in an order that the instruction set alone decides: an element of the result has the same
// bits whatever piece it is computed in.
struct Way {
  int64_t (*room)(int64_t columns, int64_t k);  // bytes of scratch
  void (*run)(const Piece&);
};

struct Kernel {
  const char* name;
  bool (*runs_here)();
  Way ways[3];  // indexed by Input
};

// JMX_KERNELS lists those that were built, from the one that most machines run to the one that the fewest do.
extern const Kernel* const kPortable;
extern const Kernel* const kAvx2;
extern const Kernel* const kAvx512;
extern const Kernel* const kAvx512Bf16;

}  // namespace jmx
