// What a call of the whole layer takes: its arrays as XLA hands them over, and what is required of them.
//
// Nothing here needs CUDA: tests compile it for any machine.
#pragma once

#include <climits>
#include <cstdint>
#include <vector>

#include "arguments.h"

namespace jmx {

constexpr int64_t kBlock = 32;    // weights that share a scale
constexpr int64_t kPadded = 128;  // sizes are padded to a multiple of it

struct Arrays {
  xla::ffi::AnyBuffer x, expert_ids, weights, gate_up, gate_up_scales, gate_up_bias, down, down_scales, down_bias, layer,
      y, workspace;
};

struct Sizes {
  int64_t num_tokens = 0, top_k = 0, num_layers = 1, num_experts = 0;
  int64_t hidden_size = 0, intermediate_size = 0;              // of x, and between the products
  int64_t padded_hidden_size = 0, padded_intermediate_size = 0;  // of the weights
  bool stacked = false, gated = false;

  int64_t halves() const { return gated ? 2 : 1; }  // of the rows of gate_up

  // The shape of an array of all experts, of a stack of layers or of one.
  std::vector<int64_t> OfExperts(std::vector<int64_t> shape) const {
    shape.insert(shape.begin(), num_experts);
    if (stacked) shape.insert(shape.begin(), num_layers);
    return shape;
  }
  // Scales of a padded weight lie by 64 rows and 128 columns.
  std::vector<int64_t> OfScales(int64_t rows, int64_t columns) const {
    return OfExperts({rows / 64, columns / kPadded, 16, kPadded / kBlock * 4});
  }
};

// The sizes of a call's arrays; of no meaning where these failed.
inline Sizes Check(ArgumentChecker& check, const Arrays& arrays, int64_t intermediate_size, bool gated) {
  namespace ffi = xla::ffi;
  Sizes sizes;
  sizes.gated = gated;
  sizes.intermediate_size = intermediate_size;
  sizes.stacked = arrays.layer.element_count() != 0;
  check.RequireOrEmpty("layer", arrays.layer, {ffi::S32}, {1});
  check.Require("x", arrays.x, {ffi::BF16, ffi::F16}, {kAnySize, kAnySize});
  check.Require("expert_ids", arrays.expert_ids, {ffi::S32}, {kAnySize, kAnySize});
  check.Require("gate_up", arrays.gate_up, {ffi::U8}, std::vector<int64_t>(sizes.stacked ? 4 : 3, kAnySize));
  if (check.failed()) return sizes;

  const auto weight = arrays.gate_up.dimensions();
  const int64_t rows = weight[sizes.stacked + 1];
  sizes.num_tokens = arrays.x.dimensions()[0];
  sizes.top_k = arrays.expert_ids.dimensions()[1];
  sizes.num_layers = sizes.stacked ? weight[0] : 1;
  sizes.num_experts = weight[sizes.stacked];
  sizes.hidden_size = arrays.x.dimensions()[1];
  sizes.padded_hidden_size = 2 * weight[sizes.stacked + 2];
  sizes.padded_intermediate_size = rows / sizes.halves();
  if (arrays.gate_up.element_count() == 0 || sizes.padded_hidden_size % kPadded != 0 || rows % (sizes.halves() * kPadded) != 0)
    check.InvalidArgument(ArgumentChecker::Describe("gate_up", arrays.gate_up) + " must be padded to multiples of " + std::to_string(kPadded));
  if (sizes.hidden_size <= 0 || sizes.hidden_size > sizes.padded_hidden_size || sizes.hidden_size % 8 != 0)
    check.InvalidArgument(ArgumentChecker::Describe("x", arrays.x) + " must have columns by 8, no more than " + std::to_string(sizes.padded_hidden_size));
  if (intermediate_size <= 0 || intermediate_size > sizes.padded_intermediate_size || intermediate_size % 8 != 0)
    check.InvalidArgument("`intermediate_size` (=" + std::to_string(intermediate_size) + ") must be a multiple of 8, of 8 to " +
               std::to_string(sizes.padded_intermediate_size));
  if (sizes.num_tokens > INT_MAX / (sizes.num_experts + 1) || sizes.top_k > INT_MAX / (sizes.num_tokens + 1))
    check.InvalidArgument(ArgumentChecker::Describe("expert_ids", arrays.expert_ids) + " must have tokens times experts, and times top_k, of 32 bits");
  if (check.failed()) return sizes;

  const int64_t hidden = sizes.padded_hidden_size, intermediate = sizes.padded_intermediate_size;
  const std::vector<int64_t> slots = {sizes.num_tokens, sizes.top_k};
  check.Require("expert_ids", arrays.expert_ids, {ffi::S32}, slots);
  check.Require("weights", arrays.weights, {ffi::F32}, slots);
  check.Require("gate_up_scales", arrays.gate_up_scales, {ffi::U8}, sizes.OfScales(rows, hidden));
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
