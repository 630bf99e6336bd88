// Row blocks: consecutive rows of one expert, described by four arrays with one element per block.
#pragma once

#include <cstdint>
#include <string>

#include "arguments.h"

namespace jmx {

// Rows x_row..x_row + count of x, and out_row..out_row + count of the result. A count <= 0 means no rows.
struct RowBlock {
  int64_t expert, x_row, out_row, count;
};

struct RowBlocks {
  xla::ffi::AnyBuffer experts, x_rows, out_rows, counts;

  void RequireArrays(ArgumentChecker& check) const {
    check.Require("experts", experts, {xla::ffi::S32}, {kAnySize});
    const int64_t blocks = experts.dimensions().size() == 1 ? size() : kAnySize;
    check.Require("x_rows", x_rows, {xla::ffi::S32}, {blocks});
    check.Require("out_rows", out_rows, {xla::ffi::S32}, {blocks});
    check.Require("counts", counts, {xla::ffi::S32}, {blocks});
  }

  void RequireWithin(ArgumentChecker& check, int64_t num_experts, int64_t rows, int64_t out_size) const {
    for (int64_t b = 0; b < size(); ++b) {
      const RowBlock block = At(b);
      if (block.count > 0 &&
          (block.expert < 0 || block.expert >= num_experts || block.x_row < 0 || block.x_row + block.count > rows ||
           block.out_row < 0 || block.out_row + block.count > out_size))
        return check.InvalidArgument("block " + std::to_string(b) + " (`experts` " + std::to_string(block.expert) +
                                     ", `x_rows` " + std::to_string(block.x_row) + ", `out_rows` " +
                                     std::to_string(block.out_row) + ", `counts` " + std::to_string(block.count) +
                                     ") is outside of the arrays");
    }
  }

  int64_t size() const { return experts.dimensions()[0]; }

  RowBlock At(int64_t b) const {
    return {experts.typed_data<int32_t>()[b], x_rows.typed_data<int32_t>()[b], out_rows.typed_data<int32_t>()[b],
            counts.typed_data<int32_t>()[b]};
  }
};

}  // namespace jmx
