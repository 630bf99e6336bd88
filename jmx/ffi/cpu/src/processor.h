// What this machine's processor and operating system support, of what kernels need.
#pragma once

#include <cstdint>

namespace jmx {

// Bits of a set of features. Names are those of /proc/cpuinfo.
enum Feature : uint32_t {
  kHasFma = 1 << 0,
  kHasAvx2 = 1 << 1,
  kHasAvxVnni = 1 << 2,
  kHasAvx512f = 1 << 3,
  kHasAvx512bw = 1 << 4,
  kHasAvx512Vnni = 1 << 5,
  kHasAvx512Bf16 = 1 << 6,
  kHasAmxTile = 1 << 7,
  kHasAmxBf16 = 1 << 8,
};

// What kernels need together.
constexpr uint32_t kAvx2Features = kHasFma | kHasAvx2;
constexpr uint32_t kAvx512Features = kAvx2Features | kHasAvx512f | kHasAvx512bw;
constexpr uint32_t kAvx512Bf16Features = kAvx512Features | kHasAvx512Vnni | kHasAvx512Bf16;

// Registers after CPUID and XGETBV. Those that a processor lacks are zero.
struct ProcessorRegisters {
  uint32_t leaf1_ecx;
  uint32_t leaf7_ebx, leaf7_ecx, leaf7_edx;
  uint32_t leaf7_1_eax;  // of subleaf 1
  uint64_t xcr0;         // the states that the operating system saves when it switches threads
};

// The features in these registers. Those whose state the operating system does not save are left out.
uint32_t DecodeFeatures(const ProcessorRegisters& registers);

// The features of this machine, read once. Linux gives a process AMX's tile registers on request: this makes it.
uint32_t ProcessorFeatures();

}  // namespace jmx
