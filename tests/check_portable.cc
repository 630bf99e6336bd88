// For targets that Python is not at hand for, under an emulator: the portable kernel against sums in double.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "product.h"

namespace {

constexpr int64_t kColumns = 20, kK = 224;

double Weight(uint8_t code, uint8_t scale) {
  constexpr double kMagnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return std::ldexp(code & 8 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7], scale - 127);
}

bool Agrees(const jmx::Way& way, jmx::Input input, int64_t rows) {
  std::mt19937 random(rows);
  std::vector<float> x(rows * kK), bias(kColumns), out(rows * kColumns);
  std::vector<uint16_t> halves(rows * kK);
  std::vector<uint8_t> values(kColumns * kK / 2), scales(kColumns * kK / jmx::kBlock);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(random() % 129) / 32 - 2;  // what bfloat16 holds
    uint32_t bits;
    std::memcpy(&bits, &x[i], sizeof bits);
    halves[i] = static_cast<uint16_t>(bits >> 16);
  }
  for (float& b : bias) b = static_cast<float>(random() % 100);
  for (uint8_t& v : values) v = static_cast<uint8_t>(random());
  for (uint8_t& s : scales) s = static_cast<uint8_t>(118 + random() % 12);
  std::vector<char> scratch(way.room(kColumns, kK) + 64);
  char* aligned = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64);
  const void* given = input == jmx::kFloat32 ? static_cast<const void*>(x.data()) : halves.data();
  way.run({static_cast<const char*>(given), values.data(), scales.data(), bias.data(), out.data(), rows, kColumns, kK, kColumns, aligned});
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < kColumns; ++n) {
      double sum = bias[n], bound = bias[n];
      for (int64_t k = 0; k < kK; ++k) {
        const double term = x[m * kK + k] * Weight(values[(n * kK + k) / 2] >> 4 * (k % 2) & 15, scales[(n * kK + k) / jmx::kBlock]);
        sum += term;
        bound += std::abs(term);
      }
      if (!(std::abs(out[m * kColumns + n] - sum) <= 1e-6 * bound)) return false;
    }
  return true;
}

}  // namespace

int main() {
  for (const jmx::Input input : {jmx::kFloat32, jmx::kBfloat16, jmx::kFewBfloat16})
    for (const int64_t rows : {1, 3, 4, 7, 13})
      if (!Agrees(jmx::kPortable->ways[input], input, rows)) {
        std::printf("%d rows of input %d are wrong\n", static_cast<int>(rows), input);
        return 1;
      }
  std::printf("all agree\n");
  return 0;
}
