// Blocks: rows of one expert that are worked on together, by four arrays of one element a block.
#pragma once

#include <cstdint>
#include <string>

#include "arguments.h"

namespace jmx {

// Rows from..from + count of x, and to..to + count of the result. Of a count that is not positive, no rows.
struct RowBlock {
  int64_t expert, from, to, count;
};

struct RowBlocks {
  xla::ffi::AnyBuffer experts, x_rows, out_rows, counts;

  void RequireArrays(Arguments& given) const {
    given.Require("experts", experts, {xla::ffi::S32}, {kAnySize});
    const int64_t blocks = experts.dimensions().size() == 1 ? size() : kAnySize;
    given.Require("x_rows", x_rows, {xla::ffi::S32}, {blocks});
    given.Require("out_rows", out_rows, {xla::ffi::S32}, {blocks});
    given.Require("counts", counts, {xla::ffi::S32}, {blocks});
  }

  void RequireWithin(Arguments& given, int64_t num_experts, int64_t rows, int64_t out_size) const {
    for (int64_t b = 0; b < size(); ++b) {
      const RowBlock block = At(b);
      if (block.count > 0 && (block.expert < 0 || block.expert >= num_experts || block.from < 0 ||
                              block.from + block.count > rows || block.to < 0 || block.to + block.count > out_size))
        return given.Fail("block " + std::to_string(b) + " (`experts` " + std::to_string(block.expert) + ", `x_rows` " +
                          std::to_string(block.from) + ", `out_rows` " + std::to_string(block.to) + ", `counts` " +
                          std::to_string(block.count) + ") lies outside of the arrays");
    }
  }

  int64_t size() const { return experts.dimensions()[0]; }

  RowBlock At(int64_t b) const {
    return {experts.typed_data<int32_t>()[b], x_rows.typed_data<int32_t>()[b], out_rows.typed_data<int32_t>()[b],
            counts.typed_data<int32_t>()[b]};
  }
};

}  // namespace jmx
