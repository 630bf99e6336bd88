// One piece of a grouped product, and what can compute it: a kernel for each instruction set.
#pragma once

#include <cstdint>

namespace jmx {

constexpr int kBlock = 32;  // weights that are decoded together; of most formats those that share a scale
constexpr int kStep = 4;    // weight rows, which are columns of the result, that a kernel works on together

// What x is; and, where all calls of one shape have few rows an expert, that.
enum Input { kFloat32, kBfloat16, kFewBfloat16, kInt8, kInputs };

// What weights are: elements and the type of their scales.
enum Format { kMxfp4, kNvfp4, kInt4Bfloat16, kInt4Float16, kInt4Float32, kFormats };

// out[m, n] = sum over k of x[m, k] * weight[n, k], plus bias[n]. Only `scratch` is aligned to more than its elements.
struct Piece {
  const char* x;               // (rows, k) float32, bfloat16 or int8, without gaps
  const float* x_scales;       // (rows), what a one of int8 is worth; else null
  const uint8_t* values;       // (columns, k / 2): codes, the even element of k in the low nibble
  const char* scales;          // (columns, groups)
  const int8_t* zero_points;   // (columns, groups), or null
  const float* global_scales;  // (columns), or null
  const float* bias;           // (columns), or null
  float* out;                  // (rows, columns), its rows `out_stride` elements apart
  int64_t rows;
  int64_t columns;  // a multiple of kStep
  int64_t k;        // a multiple of what shares a scale, and of two
  int64_t group;    // weights of a row that share a scale: a multiple of kBlock by a power of two, kBlock / 2, or kWholeRow
  int64_t out_stride;
  char* scratch;  // as many bytes as `Way::room` says, aligned to 64
};

constexpr int64_t kWholeRow = -1;

constexpr int64_t Blocks(int64_t k) { return (k + kBlock - 1) / kBlock; }

// Sums are float32, and over k in an order that the instruction set alone decides: an element of the result has the same
// bits whatever piece it is computed in.
struct Way {
  int64_t (*room)(int64_t k);  // bytes of scratch
  void (*run)(const Piece&);
  int64_t in_a_row = 4;  // pieces that a thread takes at once, as one, where products are what takes the time
};

// Indexed by Input. One that does not exist has no functions.
struct Ways {
  Way of[kInputs];
};

struct Kernel {
  const char* name;
  bool (*runs_here)();
  const Kernel* const* base;  // has the ways that this one lacks; or null
  Ways ways[kFormats];

  const Way& Find(Format format, Input input) const {
    const Way& own = ways[format].of[input];
    return own.run == nullptr && base != nullptr ? (*base)->Find(format, input) : own;
  }
};

// JMX_KERNELS lists those that were built, from the one that most machines run to the one that the fewest do.
extern const Kernel* const kPortable;
extern const Kernel* const kAvx2;
extern const Kernel* const kAvxVnni;
extern const Kernel* const kAvx512;
extern const Kernel* const kAvx512Vnni;
extern const Kernel* const kAvx512Bf16;
extern const Kernel* const kAmxBf16;

}  // namespace jmx
