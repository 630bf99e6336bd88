// Kernels around the two grouped GEMMs: dispatch (gather rows by expert), activation, and combine (sum per token).
//
// They take the caller's arrays (x without padding; biases of any float type, gate and up in either order; one expert
// in several slots of a token) and accumulate in float32, so nothing has to be copied or rounded first.
#pragma once

#include "common.h"

namespace jmx {

constexpr int kThreads = 128;
constexpr int kVectorSize = 8;  // elements that a thread processes at a time: 16 bytes if they have two each
constexpr int kCtasPerSm = 16;  // at most, for each range of columns

// Launches `kernel` on `stream`. With `overlap` (programmatic dependent launch) it may start before the previous kernel
// has ended, and waits for it in cudaGridDependencySynchronize.
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

// A grid of CTAs for `count` rows or tokens (x) by `columns` (y). In x there is one CTA for each row, or as many as are
// resident, but at least `min_ctas`.
inline dim3 Grid(int64_t count, int64_t columns, int64_t min_ctas = 1) {
  constexpr int64_t kCtaColumns = kThreads * kVectorSize;
  const int64_t resident = kCtasPerSm * current_call->num_sms;
  const int64_t row_ctas = std::max<int64_t>(1, std::min(count, std::max(resident, min_ctas)));
  return dim3(row_ctas, (columns + kCtaColumns - 1) / kCtaColumns);
}

// The first column of this thread.
__device__ inline int64_t Column() { return (int64_t(blockIdx.y) * kThreads + threadIdx.x) * kVectorSize; }

template <class X>
struct alignas(16) Vector {
  X at[kVectorSize];
};

// Loads 16 bytes at a time, to which arrays are aligned.
template <class X>
__device__ Vector<X> Load(X const* from) {
  Vector<X> vector;
#pragma unroll
  for (int i = 0; i < int(sizeof vector / sizeof(int4)); ++i)
    reinterpret_cast<int4*>(&vector)[i] = reinterpret_cast<int4 const*>(from)[i];
  return vector;
}

template <class To, class X>
__device__ Vector<To> Convert(Vector<X> const& from) {
  Vector<To> vector;
#pragma unroll
  for (int i = 0; i < kVectorSize; ++i) vector.at[i] = To(float(from.at[i]));
  return vector;
}

template <class X>
__device__ void Store(X* to, Vector<X> const& vector) {
#pragma unroll
  for (int i = 0; i < int(sizeof vector / sizeof(int4)); ++i)
    reinterpret_cast<int4*>(to)[i] = reinterpret_cast<int4 const*>(&vector)[i];
}

struct Bias {
  void const* data;  // null: none
  FloatType type;
  int64_t size;      // of one expert
  int64_t num_experts;
  int32_t const* layer;

  __device__ int64_t Start(int64_t expert) const {
    if (data == nullptr) return 0;
    return ((layer == nullptr ? 0 : *layer) * num_experts + expert) * size;
  }
  // kVectorSize elements from `index` on, a multiple of kVectorSize.
  __device__ Vector<float> At(int64_t index) const {
    if (data == nullptr) return {};
    switch (type) {
      case FloatType::kFloat32:
        return Load(static_cast<float const*>(data) + index);
      case FloatType::kBfloat16:
        return Convert<float>(Load(static_cast<__nv_bfloat16 const*>(data) + index));
      default:
        return Convert<float>(Load(static_cast<half const*>(data) + index));
    }
  }
};

// Of the current call, with `size` elements per expert.
inline Bias BiasOf(void const* data, int64_t size) {
  return {data, current_call->bias, size, current_call->num_experts, current_call->layer};
}

// Sorted row r is token `source[r] % num_tokens`, padded with zeros to the columns of weights.
template <class X>
__global__ void __launch_bounds__(kThreads)
    GatherRows(X const* x, Activation* rows, int const* source, int64_t const* num_rows, int64_t num_tokens,
               int64_t hidden_size, int64_t padded_size) {
  cudaGridDependencySynchronize();
  const int64_t column = Column(), count = *num_rows;
  if (column >= padded_size) return;
  for (int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    Vector<X> in{};
    if (column < hidden_size) in = Load(x + source[row] % num_tokens * hidden_size + column);
    const auto out = Convert<Activation>(in);
    // Streaming stores keep x in the cache, each row of which is read for several experts.
    __stcs(reinterpret_cast<int4*>(rows + row * padded_size + column), *reinterpret_cast<int4 const*>(&out));
  }
}

// Accurate to a few units in the last place of a float; its result is rounded to Activation.
__device__ inline float Sigmoid(float x) { return __fdividef(1, 1 + __expf(-x)); }
__device__ inline float Min(float a, float b) {  // NaN stays NaN
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}
__device__ inline float Max(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

// The activations of jmx/activations.py.
template <Function kFunction>
struct ActivationFunction {
  float alpha, beta, limit;

  __device__ float operator()(float gate) const {
    if constexpr (kFunction == Function::kGelu) {
      return 0.5f * gate * (1 + erff(gate * 0.70710678f));
    } else if constexpr (kFunction == Function::kGeluTanh) {
      return 0.5f * gate * (1 + tanhf(0.79788456f * (gate + 0.044715f * gate * gate * gate)));
    } else if constexpr (kFunction == Function::kRelu) {
      return Max(gate, 0);
    } else if constexpr (kFunction == Function::kRelu2) {
      return Max(gate, 0) * gate;
    } else {
      return gate * Sigmoid(gate);
    }
  }
  __device__ float operator()(float gate, float up) const {
    if constexpr (kFunction != Function::kSwiGlu) return (*this)(gate) * up;
    gate = Min(gate, limit);
    return (Max(Min(up, limit), -limit) + beta) * gate * Sigmoid(alpha * gate);
  }
};

// Row r of `h` is up and then gate of an expert, each padded, or one padded half without a gate. A CTA processes
// consecutive rows, mostly of one expert, so it loads a bias once for several rows.
template <bool kGated, Function kFunction>
__global__ void __launch_bounds__(kThreads)
    Activate(Accum const* h, Activation* rows, int64_t const* first_row, int num_experts, int64_t intermediate_size,
             int64_t padded_size, ActivationFunction<kFunction> activation, Bias bias, bool interleaved) {
  cudaGridDependencySynchronize();
  const int64_t num_rows = first_row[num_experts];
  const int64_t begin = num_rows * blockIdx.x / gridDim.x, end = num_rows * (blockIdx.x + 1) / gridDim.x;
  if (begin == end) return;
  int64_t expert = 0;  // of row `begin`: the number of experts whose rows end before it
  for (int from = 0; from < num_experts; from += kThreads) {
    const int i = from + threadIdx.x;
    expert += __syncthreads_count(i < num_experts && first_row[i + 1] <= begin);
  }
  const int64_t column = Column();
  if (column >= padded_size) return;
  Vector<float> biases[2];  // of gate and up
  for (int64_t row = begin, expert_end = begin; row < end; ++row) {
    if (column >= intermediate_size) {
      Store(rows + row * padded_size + column, Vector<Activation>{});
      continue;
    }
    Accum const* const here = h + row * (kGated ? 2 : 1) * padded_size + column;
    const auto first = Load(here);
    Vector<Accum> second;
    if constexpr (kGated) second = Load(here + padded_size);
    if (row == expert_end) {
      while ((expert_end = first_row[expert + 1]) <= row) ++expert;
      const int64_t start = bias.Start(expert);
      if (!kGated) {
        biases[0] = bias.At(start + column);
      } else if (interleaved) {
        const Vector<float> both[2] = {bias.At(start + 2 * column), bias.At(start + 2 * column + kVectorSize)};
        for (int i = 0; i < 2 * kVectorSize; ++i) biases[i % 2].at[i / 2] = both[i / kVectorSize].at[i % kVectorSize];
      } else {
        biases[0] = bias.At(start + column);
        biases[1] = bias.At(start + intermediate_size + column);
      }
    }
    Vector<Activation> out;
    for (int i = 0; i < kVectorSize; ++i) {
      if constexpr (kGated) {
        out.at[i] = Activation(activation(second.at[i] + biases[0].at[i], first.at[i] + biases[1].at[i]));
      } else {
        out.at[i] = Activation(activation(first.at[i] + biases[0].at[i]));
      }
    }
    Store(rows + row * padded_size + column, out);
  }
}

struct Slot {
  int64_t row, bias;  // offsets; the row is negative if the slot contributes nothing
  float weight;
};
constexpr int kMaxSlotsPerCta = 512;  // in shared memory, 12 KB; or those of one token, if it has more

// y of consecutive tokens: the sum over the slots of each, in order. An expert in several slots of a token was computed
// once, for the first of them.
template <class Y>
__global__ void __launch_bounds__(kThreads)
    Combine(Accum const* rows, Y* y, int const* row_of, int const* expert_ids, float const* weights,
            int64_t num_tokens, int top_k, int num_experts, int64_t hidden_size, int64_t padded_size, Bias bias) {
  extern __shared__ __align__(16) char shared[];
  Slot* slots = reinterpret_cast<Slot*>(shared);
  cudaGridDependencySynchronize();
  const int64_t begin = num_tokens * blockIdx.x / gridDim.x, end = num_tokens * (blockIdx.x + 1) / gridDim.x;
  for (int i = threadIdx.x; i < (end - begin) * top_k; i += kThreads) {
    const int64_t token = begin + i / top_k;
    int const* ids = expert_ids + token * top_k;
    const int slot = i % top_k, expert = ids[slot];
    if (expert < 0 || expert >= num_experts) {
      slots[i].row = -1;
      continue;
    }
    int first = 0;
    while (ids[first] != expert) ++first;
    slots[i] = {row_of[first * num_tokens + token] * padded_size, bias.Start(expert), weights[token * top_k + slot]};
  }
  __syncthreads();
  const int64_t column = Column();
  if (column >= hidden_size) return;
  for (int64_t token = begin; token < end; ++token, slots += top_k) {
    Vector<float> sum{};
#pragma unroll 4  // for several loads in flight
    for (int slot = 0; slot < top_k; ++slot) {
      const Slot one = slots[slot];
      if (one.row < 0) continue;
      const auto out = Load(rows + one.row + column), added = bias.At(one.bias + column);
      for (int i = 0; i < kVectorSize; ++i) sum.at[i] += one.weight * (out.at[i] + added.at[i]);
    }
    Store(y + token * hidden_size + column, Convert<Y>(sum));
  }
}

}  // namespace jmx

namespace tensorrt_llm::kernels::cutlass_kernels {

template <>
void expandInputRowsKernelLauncher<jmx::Activation, jmx::Activation>(
    jmx::Activation const* x, jmx::Activation* rows, float const*, float*, int const* source, int const*,
    int64_t num_tokens, int64_t padded_size, int top_k, int num_experts, QuantParams const&, bool, int64_t* first_row,
    jmx::TmaInput::ElementSF*, jmx::TmaInput::ElementSF const*, bool, void const*, float*, float const*, float const**,
    bool overlap, cudaStream_t stream) {
  const auto run = [&](auto* kernel, auto const* from) {
    jmx::Launch(kernel, jmx::Grid(num_tokens * top_k, padded_size), 0, overlap, stream, from, rows, source,
                first_row + num_experts, num_tokens, jmx::current_call->hidden_size, padded_size);
  };
  if (jmx::current_call->x == jmx::FloatType::kBfloat16) return run(jmx::GatherRows<__nv_bfloat16>, x);
  run(jmx::GatherRows<half>, reinterpret_cast<half const*>(x));
}

template <>
void doActivation<jmx::Activation, jmx::Accum, jmx::Accum>(
    jmx::Activation* rows, jmx::Accum const* h, float const*, jmx::Accum const*, bool, int64_t const* first_row,
    int const*, int num_experts, int64_t padded_size, int64_t num_rows, ActivationParams params, QuantParams const&,
    bool, jmx::TmaInput::ElementSF*, float*, float const*, bool overlap, cudaStream_t stream) {
  const jmx::Call& call = *jmx::current_call;
  const bool gated = isGatedActivation(params);
  const int64_t size = call.intermediate_size;
  const jmx::Bias bias = jmx::BiasOf(call.gate_up_bias, gated ? 2 * size : size);
  const auto run = [&](auto function) {
    constexpr jmx::Function kFunction = decltype(function)::value;
    const jmx::ActivationFunction<kFunction> activation{call.alpha, call.beta, call.limit};
    jmx::Launch(gated ? jmx::Activate<true, kFunction> : jmx::Activate<false, kFunction>,
                jmx::Grid(num_rows, padded_size), 0, overlap, stream, h, rows, first_row, num_experts, size,
                padded_size, activation, bias, call.interleaved);
  };
  switch (call.function) {
#define FUNCTION(NAME)       \
  case jmx::Function::NAME:  \
    return run(std::integral_constant<jmx::Function, jmx::Function::NAME>());
    FUNCTION(kSwiGlu)
    FUNCTION(kSilu)
    FUNCTION(kGelu)
    FUNCTION(kGeluTanh)
    FUNCTION(kRelu)
    FUNCTION(kRelu2)
#undef FUNCTION
  }
}

template <>
void finalizeMoeRoutingKernelLauncher<jmx::Accum, jmx::Accum, jmx::Accum>(
    jmx::Accum const* rows, jmx::Accum* y, jmx::Accum const*, float const* weights, int const* row_of, int const*,
    int const* expert_ids, int64_t const*, int64_t num_tokens, int64_t padded_size, int64_t hidden_size, int64_t top_k,
    int64_t num_experts, MOEParallelismConfig, bool, bool overlap, cudaStream_t stream) {
  const jmx::Call& call = *jmx::current_call;
  const int64_t cta_tokens = std::max<int64_t>(1, jmx::kMaxSlotsPerCta / top_k);  // at most
  const dim3 grid = jmx::Grid(num_tokens, hidden_size, (num_tokens + cta_tokens - 1) / cta_tokens);
  const size_t bytes = (num_tokens + grid.x - 1) / grid.x * top_k * sizeof(jmx::Slot);
  const auto run = [&](auto* kernel, auto* to) {
    jmx::Launch(kernel, grid, bytes, overlap, stream, rows, to, row_of, expert_ids, weights, num_tokens, top_k,
                num_experts, hidden_size, padded_size, jmx::BiasOf(call.down_bias, call.hidden_size));
  };
  switch (call.y) {
    case jmx::FloatType::kBfloat16:
      return run(jmx::Combine<__nv_bfloat16>, reinterpret_cast<__nv_bfloat16*>(y));
    case jmx::FloatType::kFloat16:
      return run(jmx::Combine<half>, reinterpret_cast<half*>(y));
    default:
      return run(jmx::Combine<float>, y);
  }
}

}  // namespace tensorrt_llm::kernels::cutlass_kernels
