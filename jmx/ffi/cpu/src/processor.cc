// Reads the registers themselves, since `__builtin_cpu_supports` is a matter of the compiler's runtime: that of Clang
// as Zig has it reports no features at all. Compiled for every x86-64 processor, unlike the kernels.
#include "processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jmx {
namespace {

constexpr bool Bit(uint64_t word, int bit) { return (word >> bit & 1) != 0; }

ProcessorRegisters ReadRegisters() {
  ProcessorRegisters registers = {};
#if defined(__x86_64__)
  uint32_t eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return registers;
  registers.leaf1_ecx = ecx;
  if (Bit(ecx, 27)) {  // OSXSAVE: XGETBV is no illegal instruction
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    registers.xcr0 = static_cast<uint64_t>(high) << 32 | low;
  }
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return registers;
  registers.leaf7_ebx = ebx;
  registers.leaf7_ecx = ecx;
  registers.leaf7_edx = edx;
  if (eax >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) registers.leaf7_1_eax = eax;
#endif
  return registers;
}

// Whether Linux gives this process the tile registers: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
bool RequestTiles() {
#if defined(__x86_64__) && defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

}  // namespace

// Intel's Software Developer's Manual, volume 2, CPUID, and volume 1, 13.3 (states in XCR0).
uint32_t DecodeFeatures(const ProcessorRegisters& registers) {
  constexpr uint64_t kYmm = 0b110, kZmm = 0b11100110, kTiles = 0b11 << 17;
  const auto saves = [&](uint64_t states) { return (registers.xcr0 & states) == states; };
  uint32_t features = 0;
  const auto add = [&](bool present, Feature feature) {
    if (present) features |= feature;
  };
  if (saves(kYmm)) {
    add(Bit(registers.leaf1_ecx, 12), kHasFma);
    add(Bit(registers.leaf7_ebx, 5), kHasAvx2);
    add(Bit(registers.leaf7_1_eax, 4), kHasAvxVnni);
  }
  if (saves(kZmm)) {
    add(Bit(registers.leaf7_ebx, 16), kHasAvx512f);
    add(Bit(registers.leaf7_ebx, 30), kHasAvx512bw);
    add(Bit(registers.leaf7_ecx, 11), kHasAvx512Vnni);
    add(Bit(registers.leaf7_1_eax, 5), kHasAvx512Bf16);
  }
  if (saves(kTiles)) {
    add(Bit(registers.leaf7_edx, 24), kHasAmxTile);
    add(Bit(registers.leaf7_edx, 22), kHasAmxBf16);
  }
  return features;
}

uint32_t ProcessorFeatures() {
  static const uint32_t features = [] {
    const uint32_t found = DecodeFeatures(ReadRegisters());
    const bool tiles = (found & kHasAmxTile) != 0 && RequestTiles();
    return tiles ? found : found & ~(kHasAmxTile | kHasAmxBf16);
  }();
  return features;
}

}  // namespace jmx
