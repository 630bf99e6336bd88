// A GEMM over packed weights, one tile of a grouped product, and the microkernels of each instruction set that compute
// it.
#pragma once

#include <cstdint>

namespace jmx {

constexpr int kBlock = 32;  // weights decoded together; in most formats they share a scale
constexpr int kTileColumns = 4;  // columns of the result, which are rows of the weight, in a register tile

// The type of x. kFewBfloat16: bfloat16 where all calls of one shape have few rows per expert; kOneBfloat16: one at
// most. Both count the experts of the weight, used or not.
enum Input { kFloat32, kBfloat16, kFewBfloat16, kOneBfloat16, kInt8, kInputs };

// Elements of the weights and the type of their scales.
enum Format { kMxfp4, kNvfp4, kInt4Bfloat16, kInt4Float16, kInt4Float32, kFormats };

// out[m, n] = sum over k of x[m, k] * weight[n, k], plus bias[n]. Pointers are aligned to their elements, `scratch`
// to 64.
struct Gemm {
  const char* x;               // (rows, k) float32, bfloat16 or int8, contiguous
  const float* x_scales;       // (rows), where x is int8; else null
  const uint8_t* values;       // (columns, k / 2): codes, the even element of k in the low nibble
  const char* scales;          // (columns, groups)
  const int8_t* zero_points;   // (columns, groups), or null
  const float* global_scales;  // (columns), or null
  const float* bias;           // (columns), or null
  float* out;                  // (rows, columns), rows `out_stride` elements apart
  int64_t rows;
  int64_t columns;  // a multiple of kTileColumns
  int64_t k;        // a multiple of `group` and of two
  // Weights of a row that share a scale: a multiple of kBlock by a power of two, kBlock / 2, or kWholeRow.
  int64_t group;
  int64_t out_stride;
  char* scratch;  // `Microkernel::scratch_bytes(k)` bytes, aligned to 64
};

constexpr int64_t kWholeRow = -1;

constexpr int64_t Blocks(int64_t k) { return (k + kBlock - 1) / kBlock; }

// Computes a GEMM. Sums are float32, added over k in an order that depends on the instruction set alone: an element of
// the result has the same bits whichever GEMM it is part of.
struct Microkernel {
  int64_t (*scratch_bytes)(int64_t k);
  void (*run)(const Gemm&);
  int64_t tasks_per_claim = 4;  // tasks that a thread claims at once where a call is compute bound
};

// Indexed by Input. Functions are null where there is none.
struct MicrokernelSet {
  Microkernel by_input[kInputs];
};

struct InstructionSet;

struct InstructionSetInfo {
  const char* name;
  // Features of processor.h: data, since a function here may be compiled to instructions that are missing.
  uint32_t needs;
  const InstructionSet* const* fallback = nullptr;  // searched for microkernels that this set lacks; or null
};

struct InstructionSet : InstructionSetInfo {
  MicrokernelSet microkernels[kFormats];

  const Microkernel& Find(Format format, Input input) const {
    const Microkernel& own = microkernels[format].by_input[input];
    return own.run == nullptr && fallback != nullptr ? (*fallback)->Find(format, input) : own;
  }
};

// JMX_INSTRUCTION_SETS lists those that were built, the most widely supported first and the best last.
extern const InstructionSet* const kPortable;
extern const InstructionSet* const kAvx2;
extern const InstructionSet* const kAvxVnni;
extern const InstructionSet* const kAvx512;
extern const InstructionSet* const kAvx512Vnni;
extern const InstructionSet* const kAvx512Bf16;
extern const InstructionSet* const kAmxBf16;

}  // namespace jmx
