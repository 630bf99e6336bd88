// What stands around the two products: rows gathered by expert, the activation between them, and each token's sum.
//
// These take arrays as the caller has them (x without padding; biases of any float type, gate and up in either order;
// the same expert in several slots of a token) and add in float32: nothing has to be copied or rounded for them.
#pragma once

#include "engine.h"

namespace jmx {

constexpr int kThreads = 256;
constexpr int kVector = 4;  // elements that a thread takes at a time

// Runs `kernel` behind what `stream` has. With `overlap` its launch is under way before that has ended, and it waits
// for it by cudaGridDependencySynchronize.
template <class... Parameters, class... Arguments>
void Launch(void (*kernel)(Parameters...), dim3 grid, size_t shared_bytes, bool overlap, cudaStream_t stream,
            Arguments... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = overlap;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  tensorrt_llm::common::check_cuda_error(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

// A grid of as many blocks as may run at once, or as there are rows.
inline dim3 Rows(int64_t num_rows) {
  constexpr int kBlocksOfAMultiprocessor = 8;
  return dim3(std::max<int64_t>(1, std::min<int64_t>(num_rows, kBlocksOfAMultiprocessor * call->multiprocessors)));
}

template <class X>
struct alignas(sizeof(X) * kVector) Vector {
  X at[kVector];
};

struct Bias {
  void const* data;  // null: none
  Element type;
  int64_t size;  // of one expert
  int64_t num_experts;
  int32_t const* layer;

  __device__ int64_t Start(int64_t expert) const {
    if (data == nullptr) return 0;
    return ((layer == nullptr ? 0 : *layer) * num_experts + expert) * size;
  }
  // `kCount` elements from `index` on, both multiples of kVector.
  template <int kCount>
  __device__ void Load(int64_t index, float (&out)[kCount]) const {
    if (data == nullptr) {
      for (float& element : out) element = 0;
    } else if (type == Element::kFloat32) {
      LoadAs<float>(index, out);
    } else if (type == Element::kBfloat16) {
      LoadAs<__nv_bfloat16>(index, out);
    } else {
      LoadAs<half>(index, out);
    }
  }

 private:
  template <class X, int kCount>
  __device__ void LoadAs(int64_t index, float (&out)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // One load for kVector elements: the compiler sees that it is the same one.
      const auto part = reinterpret_cast<Vector<X> const*>(static_cast<X const*>(data) + index)[i / kVector];
      out[i] = part.at[i % kVector];
    }
  }
};

inline Bias GateUpBias(int64_t rows) {
  return {call->gate_up_bias, call->bias, rows, call->num_experts, call->layer};
}
inline Bias DownBias() { return {call->down_bias, call->bias, call->hidden_size, call->num_experts, call->layer}; }

// Sorted row r is token `source[r] % num_tokens`, with zeros behind it up to the columns that weights are padded to.
template <class X>
__global__ void __launch_bounds__(kThreads)
    GatherRows(X const* x, Activation* rows, int const* source, int64_t const* num_rows, int64_t num_tokens,
               int64_t hidden_size, int64_t padded_size) {
  cudaGridDependencySynchronize();
  for (int64_t row = blockIdx.x; row < *num_rows; row += gridDim.x) {
    X const* token = x + source[row] % num_tokens * hidden_size;
    for (int64_t column = threadIdx.x * kVector; column < padded_size; column += kThreads * kVector) {
      Vector<Activation> out{};
      if (column < hidden_size) {
        const auto in = *reinterpret_cast<Vector<X> const*>(token + column);
        for (int i = 0; i < kVector; ++i) out.at[i] = Activation(float(in.at[i]));
      }
      *reinterpret_cast<Vector<Activation>*>(rows + row * padded_size + column) = out;
    }
  }
}

__device__ inline float Sigmoid(float x) { return 1 / (1 + expf(-x)); }
__device__ inline float Clamp(float x, float low, float high) {  // NaN stays NaN
  return x < low ? low : x > high ? high : x;
}

// The activations of jmx/activations.py.
struct Between {
  Function function;
  float alpha, beta, limit;

  __device__ float operator()(float gate) const {
    switch (function) {
      case Function::kGelu:
        return 0.5f * gate * (1 + erff(gate * 0.70710678f));
      case Function::kGeluTanh:
        return 0.5f * gate * (1 + tanhf(0.79788456f * (gate + 0.044715f * gate * gate * gate)));
      case Function::kRelu:
        return gate < 0 ? 0 : gate;
      case Function::kRelu2:
        return gate < 0 ? 0 : gate * gate;
      default:
        return gate * Sigmoid(gate);
    }
  }
  __device__ float operator()(float gate, float up) const {
    if (function != Function::kSwiGlu) return (*this)(gate) * up;
    gate = Clamp(gate, -INFINITY, limit);
    return (Clamp(up, -limit, limit) + beta) * gate * Sigmoid(alpha * gate);
  }
};

// Row r of `h` is up and then gate of an expert, or its one half where there is no gate; both are padded.
template <bool kGated>
__global__ void __launch_bounds__(kThreads)
    Activate(Sum const* h, Activation* rows, int64_t const* first_row, int num_experts, int64_t intermediate_size,
             int64_t padded_size, Between between, Bias bias, bool interleaved) {
  cudaGridDependencySynchronize();
  for (int64_t row = blockIdx.x; row < first_row[num_experts]; row += gridDim.x) {
    int64_t expert = 0;  // how many experts' rows have ended
    for (int begin = 0; begin < num_experts; begin += kThreads) {
      const int i = begin + threadIdx.x;
      expert += __syncthreads_count(i < num_experts && first_row[i + 1] <= row);
    }
    const int64_t start = bias.Start(expert);
    Sum const* up = h + row * (kGated ? 2 : 1) * padded_size;
    Sum const* gate = kGated ? up + padded_size : up;
    for (int64_t column = threadIdx.x * kVector; column < padded_size; column += kThreads * kVector) {
      Vector<Activation> out{};
      if (column < intermediate_size) {
        const auto g = *reinterpret_cast<Vector<Sum> const*>(gate + column);
        if constexpr (kGated) {
          const auto u = *reinterpret_cast<Vector<Sum> const*>(up + column);
          float added[2][kVector];  // to gate and to up
          if (interleaved) {
            float both[2 * kVector];
            bias.Load(start + 2 * column, both);
            for (int i = 0; i < 2 * kVector; ++i) added[i % 2][i / 2] = both[i];
          } else {
            bias.Load(start + column, added[0]);
            bias.Load(start + intermediate_size + column, added[1]);
          }
          for (int i = 0; i < kVector; ++i)
            out.at[i] = Activation(between(g.at[i] + added[0][i], u.at[i] + added[1][i]));
        } else {
          float added[kVector];
          bias.Load(start + column, added);
          for (int i = 0; i < kVector; ++i) out.at[i] = Activation(between(g.at[i] + added[i]));
        }
      }
      *reinterpret_cast<Vector<Activation>*>(rows + row * padded_size + column) = out;
    }
  }
}

// y of token blockIdx.x, columns from blockIdx.y on: the sum over its slots, in their order. An expert in several slots
// was sorted, and multiplied, once, for the first of them.
template <class Y>
__global__ void __launch_bounds__(kThreads)
    Combine(Sum const* rows, Y* y, int const* row_of, int const* expert_ids, float const* weights, int64_t num_tokens,
            int top_k, int num_experts, int64_t hidden_size, int64_t padded_size, Bias bias) {
  struct Slot {
    int64_t row, bias;
    float weight;
  };
  extern __shared__ __align__(16) char shared[];
  Slot* slots = reinterpret_cast<Slot*>(shared);
  cudaGridDependencySynchronize();
  const int64_t token = blockIdx.x;
  int const* ids = expert_ids + token * top_k;
  for (int slot = threadIdx.x; slot < top_k; slot += kThreads) {
    const int expert = ids[slot];
    if (expert < 0 || expert >= num_experts) {
      slots[slot].row = -1;
      continue;
    }
    int first = 0;
    while (ids[first] != expert) ++first;
    slots[slot] = {row_of[first * num_tokens + token], bias.Start(expert), weights[token * top_k + slot]};
  }
  __syncthreads();
  const int64_t stride = int64_t(gridDim.y) * kThreads * kVector;
  for (int64_t column = (int64_t(blockIdx.y) * kThreads + threadIdx.x) * kVector; column < hidden_size;
       column += stride) {
    Vector<float> sum{};
#pragma unroll 4  // so that several slots are on their way at a time
    for (int slot = 0; slot < top_k; ++slot) {
      const Slot one = slots[slot];
      Vector<Sum> out{};
      float added[kVector] = {};
      if (one.row >= 0) {
        out = *reinterpret_cast<Vector<Sum> const*>(rows + one.row * padded_size + column);
        bias.Load(one.bias + column, added);
      }
      for (int i = 0; i < kVector; ++i)
        sum.at[i] = one.row < 0 ? sum.at[i] : sum.at[i] + one.weight * (out.at[i] + added[i]);
    }
    Vector<Y> result;
    for (int i = 0; i < kVector; ++i) result.at[i] = Y(sum.at[i]);
    *reinterpret_cast<Vector<Y>*>(y + token * hidden_size + column) = result;
  }
}

}  // namespace jmx

namespace tensorrt_llm::kernels::cutlass_kernels {

template <>
void expandInputRowsKernelLauncher<jmx::Activation, jmx::Activation>(
    jmx::Activation const* x, jmx::Activation* rows, float const*, float*, int const* source, int const*,
    int64_t num_tokens, int64_t padded_size, int top_k, int num_experts, QuantParams const&, bool, int64_t* first_row,
    jmx::Tensors::ElementSF*, jmx::Tensors::ElementSF const*, bool, void const*, float*, float const*, float const**,
    bool overlap, cudaStream_t stream) {
  const auto run = [&](auto* kernel, auto const* from) {
    jmx::Launch(kernel, jmx::Rows(num_tokens * top_k), 0, overlap, stream, from, rows, source, first_row + num_experts,
                num_tokens, jmx::call->hidden_size, padded_size);
  };
  if (jmx::call->x == jmx::Element::kBfloat16) return run(jmx::GatherRows<__nv_bfloat16>, x);
  run(jmx::GatherRows<half>, reinterpret_cast<half const*>(x));
}

template <>
void doActivation<jmx::Activation, jmx::Sum, jmx::Sum>(jmx::Activation* rows, jmx::Sum const* h, float const*,
                                                       jmx::Sum const*, bool, int64_t const* first_row, int const*,
                                                       int num_experts, int64_t padded_size, int64_t num_rows,
                                                       ActivationParams params, QuantParams const&, bool,
                                                       jmx::Tensors::ElementSF*, float*, float const*, bool overlap,
                                                       cudaStream_t stream) {
  const bool gated = isGatedActivation(params);
  const int64_t size = jmx::call->intermediate_size;
  const jmx::Between between{jmx::call->function, jmx::call->alpha, jmx::call->beta, jmx::call->limit};
  jmx::Launch(gated ? jmx::Activate<true> : jmx::Activate<false>, jmx::Rows(num_rows), 0, overlap, stream, h, rows,
              first_row, num_experts, size, padded_size, between, jmx::GateUpBias(gated ? 2 * size : size),
              jmx::call->interleaved);
}

template <>
void finalizeMoeRoutingKernelLauncher<jmx::Sum, jmx::Sum, jmx::Sum>(
    jmx::Sum const* rows, jmx::Sum* y, jmx::Sum const*, float const* weights, int const* row_of, int const*,
    int const* expert_ids, int64_t const*, int64_t num_tokens, int64_t padded_size, int64_t hidden_size, int64_t top_k,
    int64_t num_experts, MOEParallelismConfig, bool, bool overlap, cudaStream_t stream) {
  const int64_t pieces = (hidden_size + jmx::kThreads * jmx::kVector - 1) / (jmx::kThreads * jmx::kVector);
  const auto run = [&](auto* kernel, auto* to) {
    jmx::Launch(kernel, dim3(num_tokens, pieces), 24 * top_k, overlap, stream, rows, to, row_of, expert_ids, weights,
                num_tokens, top_k, num_experts, hidden_size, padded_size, jmx::DownBias());
  };
  switch (jmx::call->y) {
    case jmx::Element::kBfloat16:
      return run(jmx::Combine<__nv_bfloat16>, reinterpret_cast<__nv_bfloat16*>(y));
    case jmx::Element::kFloat16:
      return run(jmx::Combine<half>, reinterpret_cast<half*>(y));
    default:
      return run(jmx::Combine<float>, y);
  }
}

}  // namespace tensorrt_llm::kernels::cutlass_kernels
