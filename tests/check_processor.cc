// The features in given registers: those of processors that this machine is not.
#include <cstdio>

#include "processor.h"

namespace {

using namespace jmx;

constexpr uint32_t kAvx2 = kAvx2Features, kAvx512 = kAvx512Features;
constexpr uint32_t kAll = kAvx512Bf16Features | kHasAvxVnni | kHasAmxTile | kHasAmxBf16;
constexpr uint32_t kFma = 1u << 12, kOsxsave = 1u << 27;                                // leaf 1, ecx
// Leaf 7, ebx: AVX2, AVX-512 F and BW.
constexpr uint32_t kBit5 = 1u << 5, k512f = 1u << 16, k512bw = 1u << 30;
constexpr uint32_t kVnni = 1u << 11, kBf16 = 1u << 5, kVexVnni = 1u << 4;               // leaf 7, ecx; subleaf 1, eax
constexpr uint32_t kTile = 1u << 24, kTileBf16 = 1u << 22;                              // leaf 7, edx
constexpr uint64_t kX87 = 0x1, kAvxState = 0x7, kAvx512State = 0xe7, kTileState = 0x600e7;  // XCR0

struct Machine {
  const char* name;
  ProcessorRegisters registers;
  uint32_t features;
};

constexpr ProcessorRegisters Everything(uint64_t xcr0) {
  return {kFma | kOsxsave, kBit5 | k512f | k512bw, kVnni, kTile | kTileBf16, kBf16 | kVexVnni, xcr0};
}

const Machine kMachines[] = {
    {"no processor", {}, 0},
    {"Haswell", {kFma | kOsxsave, kBit5, 0, 0, 0, kAvxState}, kAvx2},
    {"AVX2 without FMA", {kOsxsave, kBit5, 0, 0, 0, kAvxState}, kHasAvx2},
    {"Alder Lake", {kFma | kOsxsave, kBit5, 0, 0, kVexVnni, kAvxState}, kAvx2 | kHasAvxVnni},
    {"Knights Landing", {kFma | kOsxsave, kBit5 | k512f, 0, 0, 0, kAvx512State}, kAvx2 | kHasAvx512f},
    {"Skylake-X", {kFma | kOsxsave, kBit5 | k512f | k512bw, 0, 0, 0, kAvx512State}, kAvx512},
    {"Cascade Lake", {kFma | kOsxsave, kBit5 | k512f | k512bw, kVnni, 0, 0, kAvx512State}, kAvx512 | kHasAvx512Vnni},
    {"Zen 4", {kFma | kOsxsave, kBit5 | k512f | k512bw, kVnni, 0, kBf16, kAvx512State}, kAvx512Bf16Features},
    {"Sapphire Rapids", Everything(kTileState), kAll},
    {"... without tiles in the system", Everything(kAvx512State), kAll & ~(kHasAmxTile | kHasAmxBf16)},
    {"... with half of their state", Everything(kAvx512State | 1 << 17), kAll & ~(kHasAmxTile | kHasAmxBf16)},
    {"... without AVX-512 in the system", Everything(kAvxState), kAvx2 | kHasAvxVnni},
    {"... with part of AVX-512's state", Everything(kAvxState | 0x60), kAvx2 | kHasAvxVnni},
    {"... in a system that saves no vectors", Everything(kX87), 0},
};

}  // namespace

// Prints this machine's features as a number.
int main() {
  int faults = 0;
  for (const Machine& machine : kMachines) {
    const uint32_t found = DecodeFeatures(machine.registers);
    if (found == machine.features) continue;
    std::fprintf(stderr, "%s: features %#x instead of %#x\n", machine.name, found, machine.features);
    ++faults;
  }
  std::printf("%u\n", ProcessorFeatures());
  return faults;
}
