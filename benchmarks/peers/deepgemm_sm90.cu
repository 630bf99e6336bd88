// DeepGEMM's grouped FP8 product for Hopper (sm90_fp8_gemm_1d2d: inputs and weights with scales of 128 columns), at the
// sizes and with the rows of a layer, for comparison with jmx's in docs/internals/mosaic_sm90_fp8.md. Only the
// products: no activation, and x and h are rounded before.
//
//   git clone https://github.com/deepseek-ai/DeepGEMM; git clone https://github.com/NVIDIA/cutlass
//   nvcc -O3 -std=c++20 -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr --expt-extended-lambda \
//       -IDeepGEMM/deep_gemm/include -Icutlass/include benchmarks/peers/deepgemm_sm90.cu -o deepgemm && ./deepgemm
//
// Rows are those of random routing. DeepGEMM wants each expert's padded to whole blocks of 128, of which it skips
// halves without rows; TFLOP/s count real rows. Of its blocks and clusters, which it chooses by a model, the fastest is
// taken.

#include <cuda.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>

using namespace deep_gemm;

constexpr int kBlockM = 128, kBlockK = 128, kProcessors = 132, kSharedMemory = 232448, kChecked = 4096;

template <class Result> void check(Result result, int line) {
    if (static_cast<int>(result) != 0) {
        std::printf("error %d in line %d\n", static_cast<int>(result), line);
        std::exit(1);
    }
}
#define CHECK(call) check(call, __LINE__)

template <class T> T* device(size_t count) {
    T* made;
    CHECK(cudaMalloc(&made, count * sizeof(T)));
    return made;
}

// E4M3 about as normal numbers have them: each exponent below the largest half as often.
__global__ void draw(uint8_t* values, size_t count, uint32_t seed) {
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
        uint32_t bits = uint32_t(i) * 2654435761u ^ seed;
        bits = (bits ^ bits >> 15) * 2246822519u;
        bits = (bits ^ bits >> 13) * 3266489917u;
        bits ^= bits >> 16;
        values[i] = (bits >> 16 & 0x87) | (10 - min(max(__ffs(bits & 0xffff) - 1, 0), 6)) << 3;
    }
}

__global__ void draw_scales(float* scales, size_t count) {
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        scales[i] = 1e-2f * (1 + i % 7);
}

// Arrays of one product: out (M, N) = x (M, K) times the transposed weight (E, N, K) of each row's expert.
struct Product {
    int m, n, k, experts, real;
    uint8_t *x, *weight;
    float *x_scales, *weight_scales;  // (K / 128, M), (E, N / 128, K / 128)
    __nv_bfloat16* out;
    int* expert_of_row;  // -1 for padding
};

// Squares of errors and of results, of some elements: a warp each.
__global__ void compare(Product p, float* squares) {
    const int row = blockIdx.x * 7919u % p.m, column = blockIdx.x * 104729u % p.n, expert = p.expert_of_row[row];
    if (expert < 0) return;
    float sum = 0;
    for (int k = threadIdx.x; k < p.k; k += 32) {
        const auto value = [](const uint8_t* at) { return float(*reinterpret_cast<const __nv_fp8_e4m3*>(at)); };
        const float scale = p.weight_scales[(size_t(expert) * (p.n / 128) + column / 128) * (p.k / 128) + k / 128];
        sum += value(p.x + size_t(row) * p.k + k) * value(p.weight + (size_t(expert) * p.n + column) * p.k + k) *
               p.x_scales[size_t(k / 128) * p.m + row] * scale;
    }
    for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (threadIdx.x == 0) {
        const float error = float(p.out[size_t(row) * p.n + column]) - sum;
        atomicAdd(squares, error * error);
        atomicAdd(squares + 1, sum * sum);
    }
}

CUtensorMap map_of(void* array, CUtensorMapDataType type, int size, uint64_t columns, uint64_t rows, int box_columns,
                   int box_rows, int swizzle) {
    static const auto encode = [] {
        cudaDriverEntryPointQueryResult found;
        void* function;
        CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    const cuuint64_t sizes[] = {columns, rows}, strides[] = {columns * size};
    const cuuint32_t box[] = {cuuint32_t(swizzle ? swizzle / size : box_columns), cuuint32_t(box_rows)};
    const cuuint32_t steps[] = {1, 1};
    const auto kind = swizzle == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                      : swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                      : swizzle == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                      : CU_TENSOR_MAP_SWIZZLE_NONE;
    CUtensorMap made;
    CHECK(encode(&made, type, 2, array, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, kind,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return made;
}

// Median microseconds of ten calls with blocks of 128 x kBlockN, in clusters that share x or the weight.
template <int N, int K, int E, int kBlockN, int kCluster, bool kShareX> float time(const Product& p) {
    constexpr int kSwizzle = kBlockN % 64 == 0 ? 128 : kBlockN % 32 == 0 ? 64 : 32;
    constexpr int kStage = (kBlockM + kBlockN) * kBlockK + kBlockM * 4;
    constexpr int kResults = (kBlockM * kBlockN * 2 + 1023) / 1024 * 1024;
    constexpr int kOthers = kResults + 256 + K / 128 * 4 * (128 % kBlockN ? 2 : 1) + 8;
    constexpr int kStages = std::min(16, (kSharedMemory - kOthers) / kStage);
    constexpr auto kernel =
        sm90_fp8_gemm_1d2d_impl<cute::UMMA::Major::K, 0, N, K, E, kBlockM, kBlockN, kBlockK, 128, 128, kSwizzle,
                                kStages, 128, 256, kCluster, kShareX, kProcessors, GemmType::MGroupedContiguous,
                                cutlass::bfloat16_t, epilogue::transform::EpilogueIdentity>;
    const int shared = kOthers + kStages * kStage;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    const auto x = map_of(p.x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, K, p.m, kBlockK, kBlockM, 128);
    const auto weight = map_of(p.weight, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, K, uint64_t(E) * N, kBlockK, kBlockN, 128);
    const auto out = map_of(p.out, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, N, p.m, kBlockN, kBlockM, kSwizzle);
    const auto scales = map_of(p.x_scales, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, p.m, K / 128, kBlockM, 1, 0);
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kCluster, 1, 1};
    cudaLaunchConfig_t launch{};
    launch.gridDim = kProcessors;
    launch.blockDim = 384;
    launch.dynamicSmemBytes = shared;
    launch.attrs = &cluster;
    launch.numAttrs = 1;

    CHECK(cudaMemset(p.out, 0xff, size_t(p.m) * N * 2));  // NaN
    cudaEvent_t start, end;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    std::vector<float> samples;
    for (int i = 0; i < 13; i++) {
        float milliseconds;
        CHECK(cudaEventRecord(start));
        CHECK(cudaLaunchKernelEx(&launch, kernel, p.weight_scales, p.expert_of_row, uint32_t(p.m), uint32_t(N),
                                 uint32_t(K), x, weight, out, scales));
        CHECK(cudaEventRecord(end));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaEventElapsedTime(&milliseconds, start, end));
        if (i >= 3) samples.push_back(1e3f * milliseconds);
    }
    std::sort(samples.begin(), samples.end());

    float squares[2], *found = device<float>(2);
    CHECK(cudaMemset(found, 0, sizeof squares));
    compare<<<kChecked, 32>>>(p, found);
    CHECK(cudaMemcpy(squares, found, sizeof squares, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(found));
    const float us = samples[samples.size() / 2], error = std::sqrt(squares[0] / squares[1]);
    std::printf("  128 x %d, cluster %d%s, %d stages: %.1f us, error %.1e\n", kBlockN, kCluster,
                kCluster == 1 ? "" : kShareX ? " of x" : " of the weight", kStages, us, error);
    return error < 1e-2f ? us : INFINITY;
}

template <int N, int K, int E> void product(const char* name, const std::vector<int>& expert_of_row, int real) {
    Product p{int(expert_of_row.size()), N, K, E, real};
    const size_t x = size_t(p.m) * K, weight = size_t(E) * N * K;
    p.x = device<uint8_t>(x), p.weight = device<uint8_t>(weight), p.out = device<__nv_bfloat16>(size_t(p.m) * N);
    p.x_scales = device<float>(x / 128), p.weight_scales = device<float>(weight / 128 / 128);
    p.expert_of_row = device<int>(p.m);
    draw<<<1024, 256>>>(p.x, x, 1), draw<<<1024, 256>>>(p.weight, weight, 2);
    draw_scales<<<1024, 256>>>(p.x_scales, x / 128), draw_scales<<<1024, 256>>>(p.weight_scales, weight / 128 / 128);
    CHECK(cudaMemcpy(p.expert_of_row, expert_of_row.data(), p.m * sizeof(int), cudaMemcpyHostToDevice));
    const float best = std::min({time<N, K, E, 128, 1, false>(p), time<N, K, E, 128, 2, true>(p),
                                 time<N, K, E, 128, 2, false>(p), time<N, K, E, 192, 1, false>(p),
                                 time<N, K, E, 192, 2, true>(p), time<N, K, E, 192, 2, false>(p),
                                 time<N, K, E, 160, 2, true>(p), time<N, K, E, 112, 2, true>(p)});
    std::printf("%s: %.1f us, %.0f TFLOP/s\n", name, best, 2e-6 * real * N * K / best);
    for (void* array : {(void*)p.x, (void*)p.weight, (void*)p.out, (void*)p.x_scales, (void*)p.weight_scales,
                        (void*)p.expert_of_row})
        CHECK(cudaFree(array));
}

template <int H, int I, int E, int kTopK> void layer(int tokens, bool whole) {
    std::mt19937 random(7);
    std::vector<int> ids(E), counts(E, whole ? tokens * kTopK / E : 0), expert_of_row;
    for (int i = 0; i < E; i++) ids[i] = i;
    for (int token = 0; token < tokens && !whole; token++)
        for (int k = 0; k < kTopK; k++) {
            std::swap(ids[k], ids[k + random() % (E - k)]);
            counts[ids[k]]++;
        }
    for (int e = 0; e < E; e++)
        for (int row = 0; row < (counts[e] + kBlockM - 1) / kBlockM * kBlockM; row++)
            expert_of_row.push_back(row < counts[e] ? e : -1);
    const int real = tokens * kTopK;
    std::printf("H = %d, I = %d, E = %d, top %d, %d tokens, %s: %d rows, %zu with padding\n", H, I, E, kTopK, tokens,
                whole ? "an equal number an expert" : "random routing", real, expert_of_row.size());
    product<2 * I, H, E>("gate_up", expert_of_row, real);
    product<H, I, E>("down", expert_of_row, real);
}

int main() {
    CHECK(cudaFree(nullptr));
    layer<7168, 2048, 64, 8>(8192, false);
    layer<7168, 2048, 64, 8>(8192, true);
    layer<2048, 768, 128, 8>(8192, false);
}
