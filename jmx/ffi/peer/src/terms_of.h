// What terms.cc passes to the kernels of terms.cu beside the arrays of a call.
#pragma once

namespace jmx {

// The terms of tokens' results. Tokens are those of all ranks, one rank's after the other.
struct Terms {
  const char* rows;           // float32 (parts, count, columns), whose sum over parts is a row
  const int* row_of;          // (tokens, slots): the row of each slot; -1: another rank has its expert
  const float* weights;       // (tokens, slots): of the rows
  const unsigned int* ranks;  // of each token a bit for each rank that has one of its experts; nullptr: all ranks send
  unsigned long long part_bytes;
  unsigned long long row_bytes;
  unsigned int tokens;        // of a rank
  unsigned int units;         // of a token's result
  int parts, slots;
};

}  // namespace jmx
