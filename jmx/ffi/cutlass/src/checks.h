// The arrays of one call of the layer, as XLA passes them, and what is required of them.
//
// This header does not need CUDA, so tests compile it on any machine.
#pragma once

#include <climits>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"

namespace jmx {

constexpr int64_t kBlock = 32;     // weights that share a scale
constexpr int64_t kPadding = 128;  // sizes of weights are padded to a multiple of it

// In the order in which XLA passes them: the only place where that order is written.
struct Arrays {
  xla::ffi::AnyBuffer x, expert_ids, weights;
  xla::ffi::AnyBuffer gate_up, gate_up_scales, gate_up_bias;
  xla::ffi::AnyBuffer down, down_scales, down_bias;
  xla::ffi::AnyBuffer layer;
  xla::ffi::AnyBuffer y, workspace;  // results
};

// Binds `Arrays` as the last arguments of a handler, which makes them by `MakeArrays`.
template <typename Binding>
auto BindArrays(Binding&& binding) {
  return BindArguments<10>(std::move(binding)).template Ret<xla::ffi::AnyBuffer>().template Ret<xla::ffi::AnyBuffer>();
}

inline xla::ffi::AnyBuffer AsBuffer(xla::ffi::AnyBuffer argument) { return argument; }
inline xla::ffi::AnyBuffer AsBuffer(xla::ffi::Result<xla::ffi::AnyBuffer> result) { return *result; }

template <typename... Buffers>
Arrays MakeArrays(Buffers... buffers) {
  return Arrays{AsBuffer(buffers)...};
}

struct Sizes {
  int64_t num_tokens = 0, top_k = 0, num_layers = 1, num_experts = 0;
  int64_t hidden_size = 0, intermediate_size = 0;                // of activations
  int64_t padded_hidden_size = 0, padded_intermediate_size = 0;  // of weights
  bool stacked = false, gated = false;

  int64_t halves() const { return gated ? 2 : 1; }  // of the rows of gate_up

  // The shape of an array of all experts, of one layer or of a stack.
  std::vector<int64_t> OfExperts(std::vector<int64_t> shape) const {
    shape.insert(shape.begin(), num_experts);
    if (stacked) shape.insert(shape.begin(), num_layers);
    return shape;
  }
  // Scales of a padded weight are in blocks of 64 rows by 128 columns.
  std::vector<int64_t> OfScales(int64_t rows, int64_t columns) const {
    return OfExperts({rows / 64, columns / kPadding, 16, kPadding / kBlock * 4});
  }
};

// The sizes of arrays whose number of axes was checked.
inline Sizes SizesOf(const Arrays& arrays, int64_t intermediate_size, bool gated) {
  Sizes sizes;
  sizes.gated = gated;
  sizes.stacked = arrays.layer.element_count() != 0;
  const auto weight = arrays.gate_up.dimensions();
  sizes.num_tokens = arrays.x.dimensions()[0];
  sizes.top_k = arrays.expert_ids.dimensions()[1];
  sizes.num_layers = sizes.stacked ? weight[0] : 1;
  sizes.num_experts = weight[sizes.stacked];
  sizes.hidden_size = arrays.x.dimensions()[1];
  sizes.intermediate_size = intermediate_size;
  sizes.padded_hidden_size = 2 * weight[sizes.stacked + 2];
  sizes.padded_intermediate_size = weight[sizes.stacked + 1] / sizes.halves();
  return sizes;
}

// The sizes must be such that the kernels' integers hold them, and weights padded.
inline void CheckSizes(ArgumentChecker& check, const Arrays& arrays, const Sizes& sizes) {
  const auto describe = ArgumentChecker::Describe;
  const int64_t rows = arrays.gate_up.dimensions()[sizes.stacked + 1];
  if (arrays.gate_up.element_count() == 0 || sizes.padded_hidden_size % kPadding != 0 ||
      rows % (sizes.halves() * kPadding) != 0)
    check.InvalidArgument(describe("gate_up", arrays.gate_up) + " must be padded to multiples of " +
                          std::to_string(kPadding));
  if (sizes.hidden_size <= 0 || sizes.hidden_size > sizes.padded_hidden_size || sizes.hidden_size % 8 != 0)
    check.InvalidArgument(describe("x", arrays.x) + " must have a multiple of 8 columns, at most " +
                          std::to_string(sizes.padded_hidden_size));
  if (sizes.intermediate_size <= 0 || sizes.intermediate_size > sizes.padded_intermediate_size ||
      sizes.intermediate_size % 8 != 0)
    check.InvalidArgument("`intermediate_size` (=" + std::to_string(sizes.intermediate_size) +
                          ") must be a multiple of 8 in 8.." + std::to_string(sizes.padded_intermediate_size));
  if (sizes.num_tokens > INT_MAX / (sizes.num_experts + 1) || sizes.top_k > INT_MAX / (sizes.num_tokens + 1))
    check.InvalidArgument(describe("expert_ids", arrays.expert_ids) +
                          " must have fewer than 2^31 tokens times experts, and tokens times top_k");
}

// Checks the arrays of a call; the sizes that it returns are valid unless it failed.
inline Sizes Check(ArgumentChecker& check, const Arrays& arrays, int64_t intermediate_size, bool gated) {
  namespace ffi = xla::ffi;
  const bool stacked = arrays.layer.element_count() != 0;
  check.RequireOrEmpty("layer", arrays.layer, {ffi::S32}, {1});
  check.Require("x", arrays.x, {ffi::BF16, ffi::F16}, {kAnySize, kAnySize});
  check.Require("expert_ids", arrays.expert_ids, {ffi::S32}, {kAnySize, kAnySize});
  check.Require("gate_up", arrays.gate_up, {ffi::U8}, std::vector<int64_t>(stacked ? 4 : 3, kAnySize));
  if (check.failed()) return {};
  const Sizes sizes = SizesOf(arrays, intermediate_size, gated);
  CheckSizes(check, arrays, sizes);
  if (check.failed()) return sizes;

  const int64_t hidden = sizes.padded_hidden_size, intermediate = sizes.padded_intermediate_size;
  const std::vector<int64_t> slots = {sizes.num_tokens, sizes.top_k};
  check.Require("expert_ids", arrays.expert_ids, {ffi::S32}, slots);
  check.Require("weights", arrays.weights, {ffi::F32}, slots);
  check.Require("gate_up_scales", arrays.gate_up_scales, {ffi::U8},
                sizes.OfScales(sizes.halves() * intermediate, hidden));
  check.Require("down", arrays.down, {ffi::U8}, sizes.OfExperts({hidden, intermediate / 2}));
  check.Require("down_scales", arrays.down_scales, {ffi::U8}, sizes.OfScales(hidden, intermediate));
  check.RequireOrEmpty("gate_up_bias", arrays.gate_up_bias, {ffi::F32, ffi::BF16, ffi::F16},
                       sizes.OfExperts({sizes.halves() * intermediate_size}));
  check.RequireOrEmpty("down_bias", arrays.down_bias, {arrays.gate_up_bias.element_type()},
                       sizes.OfExperts({sizes.hidden_size}));
  check.Require("y", arrays.y, {ffi::F32, ffi::BF16, ffi::F16}, {sizes.num_tokens, sizes.hidden_size});
  check.Require("workspace", arrays.workspace, {ffi::U8}, {kAnySize});
  return sizes;
}

}  // namespace jmx
