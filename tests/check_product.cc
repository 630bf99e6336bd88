// For what this machine only emulates, one kernel against sums in double: JMX_CHECKED names it.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "product.h"

namespace {

constexpr int64_t kColumns = 52, kK = 224;

struct Case {
  jmx::Format format;
  int64_t group;
  bool zeros;
};

double Scale(jmx::Format format, const char* scales, int64_t i) {
  const uint8_t byte = static_cast<uint8_t>(scales[i]);
  if (format == jmx::kMxfp4) return std::ldexp(1.0, byte - 127);
  if (format == jmx::kNvfp4) return std::ldexp(8 + byte % 8, byte / 8 - 10);  // of normal positive ones
  float scale;
  std::memcpy(&scale, scales + 4 * i, sizeof scale);
  return scale;
}

double Element(jmx::Format format, uint8_t code) {
  constexpr double kMagnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  if (format != jmx::kMxfp4 && format != jmx::kNvfp4) return code < 8 ? code : code - 16;
  return code & 8 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}

bool Agrees(const Case& of, jmx::Input input, int64_t rows) {
  const jmx::Microkernel& microkernel = jmx::JMX_CHECKED->Find(of.format, input);
  if (microkernel.run == nullptr) return true;
  std::mt19937 random(rows);
  const int64_t group = of.group == jmx::kWholeRow ? kK : of.group, groups = kColumns * kK / group;
  std::vector<float> x(rows * kK), x_scales(rows, 0.5f), global_scales(kColumns, 0.75f), bias(kColumns),
      out(rows * kColumns);
  std::vector<uint16_t> halves(rows * kK);
  std::vector<int8_t> bytes(rows * kK), zeros(groups);
  std::vector<uint8_t> values(kColumns * kK / 2);
  std::vector<char> scales(groups * 4);
  for (size_t i = 0; i < x.size(); ++i) {
    bytes[i] = static_cast<int8_t>(random() % 255 - 127);
    x[i] = static_cast<float>(bytes[i]) / 2;  // what bfloat16 holds, too
    uint32_t bits;
    std::memcpy(&bits, &x[i], sizeof bits);
    halves[i] = static_cast<uint16_t>(bits >> 16);
  }
  for (float& b : bias) b = static_cast<float>(random() % 100);
  for (uint8_t& v : values) v = static_cast<uint8_t>(random());
  for (int8_t& z : zeros) z = of.zeros ? static_cast<int8_t>(random() % 16 - 8) : 0;
  for (int64_t i = 0; i < groups; ++i) {
    const float scale = static_cast<float>(1 + random() % 100) / 64;
    if (of.format == jmx::kInt4Float32) std::memcpy(&scales[4 * i], &scale, sizeof scale);
    else scales[i] = static_cast<char>(of.format == jmx::kMxfp4 ? 118 + random() % 12 : 8 + random() % 100);
  }
  std::vector<char> scratch(microkernel.scratch_bytes(kK) + 64);
  char* aligned = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64);
  const void* given = input == jmx::kInt8      ? static_cast<const void*>(bytes.data())
                      : input == jmx::kFloat32 ? static_cast<const void*>(x.data())
                                               : halves.data();
  const bool global = of.format == jmx::kNvfp4;
#if defined(JMX_ROUNDS_WEIGHTS)
  const bool rounded = of.format == jmx::kInt4Float32 && input == jmx::kBfloat16;  // weights, to bfloat16
#else
  const bool rounded = false;
#endif
  microkernel.run({static_cast<const char*>(given), input == jmx::kInt8 ? x_scales.data() : nullptr, values.data(),
                   scales.data(), of.zeros ? zeros.data() : nullptr, global ? global_scales.data() : nullptr,
                   bias.data(), out.data(), rows, kColumns, kK, of.group, kColumns, aligned});
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < kColumns; ++n) {
      double sum = bias[n], bound = bias[n];
      for (int64_t k = 0; k < kK; ++k) {
        const int64_t i = (n * kK + k) / group;
        const double scale = Scale(of.format, scales.data(), i) * (global ? 0.75 : 1),
                     element = Element(of.format, values[(n * kK + k) / 2] >> 4 * (k % 2) & 15);
        sum += x[m * kK + k] * (element - zeros[i]) * scale;
        bound += std::abs(x[m * kK + k]) * (std::abs(element) + std::abs(zeros[i])) * scale;
      }
      if (!(std::abs(out[m * kColumns + n] - sum) <= (rounded ? 0x1p-8 : 1e-6) * bound)) return false;
    }
  return true;
}

}  // namespace

int main() {
  const Case cases[] = {{jmx::kMxfp4, 32, false},       {jmx::kNvfp4, 16, false},      {jmx::kInt4Float32, 32, false},
                        {jmx::kInt4Float32, 32, true},  {jmx::kInt4Float32, jmx::kWholeRow, true}};
  for (const Case& of : cases)
    for (const jmx::Input input : {jmx::kFloat32, jmx::kBfloat16, jmx::kFewBfloat16, jmx::kInt8})
      for (const int64_t rows : {1, 3, 4, 7, 13, 33, 300})
        if (!Agrees(of, input, rows)) {
          std::printf("%d rows of input %d are wrong in format %d\n", static_cast<int>(rows), input, of.format);
          return 1;
        }
  std::printf("all agree\n");
  return 0;
}
