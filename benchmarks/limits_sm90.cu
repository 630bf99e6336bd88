// What a Hopper GPU can do of what the kernel in jmx/pallas/mosaic_sm90/kernel.py does: tensor cores with A in
// registers, dequantization, both at once, and reading. Nothing is computed that means anything.
//
//   nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a benchmarks/limits_sm90.cu -o limits && ./limits
//
// Clocks are those of an SM, per tile of 64 x 64 weights of one warpgroup.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

constexpr int kTiles = 2000;

// The 8 codes of a word, times the multipliers of its two rows: 16 instructions, as in
// jmx/pallas/mosaic_sm90/elements.py.
__device__ __forceinline__ void dequantize(uint32_t w, uint32_t m0, uint32_t m1, uint32_t* out) {
    uint32_t t[4] = {w & 0x81C081C0, (w << 3) & 0x81C081C0, ((w << 6) & 0x01C001C0) | ((w << 1) & 0x80008000),
                     ((w >> 3) & 0x01C001C0) | ((w << 2) & 0x80008000)};
    for (int p = 0; p < 4; p++) asm("mul.bf16x2 %0, %1, %2;" : "=r"(out[p]) : "r"(t[p]), "r"(p % 2 ? m1 : m0));
}

// One tile's words, from shared memory, to the registers of A.
__device__ __forceinline__ void tile(const uint4* values, const uint32_t* scales, uint32_t exponent, uint32_t* a) {
    uint4 words = values[threadIdx.x % 128];
    uint32_t codes = scales[threadIdx.x % 128 / 4], m[4];
    for (int i = 0; i < 4; i++) m[i] = __byte_perm(codes, 0, 0x4040 + 0x101 * i) * 0x80 + exponent;
    dequantize(words.x, m[0], m[2], a);
    dequantize(words.y, m[0], m[2], a + 4);
    dequantize(words.z, m[1], m[3], a + 8);
    dequantize(words.w, m[1], m[3], a + 12);
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define A4 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
#define WGMMA(N, REGS, A, B, ...)                                                                                  \
    template <> __device__ __forceinline__ void wgmma<N>(float* d, const uint32_t* a, uint64_t b) {                \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "                                   \
                     "{" REGS "}, {" A "}, " B ", 1, 1, 1, 0;"                                                     \
                     : __VA_ARGS__ : A4);                                                                          \
    }
template <int N> __device__ void wgmma(float* d, const uint32_t* a, uint64_t b);
WGMMA(8, "%0,%1,%2,%3", "%4,%5,%6,%7", "%8", D4(0))
WGMMA(16, "%0,%1,%2,%3,%4,%5,%6,%7", "%8,%9,%10,%11", "%12", D4(0), D4(4))
WGMMA(40, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19", "%20,%21,%22,%23", "%24",
      D4(0), D4(4), D4(8), D4(12), D4(16))
WGMMA(64, "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"
      "%29,%30,%31", "%32,%33,%34,%35", "%36", D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28))

// mode: 1 tensor cores, 2 dequantization, 3 both, 4 both and one tile ahead, as the kernel does.
template <int N, int mode> __global__ void __launch_bounds__(640) run_wgmma(float* out, long long* clocks) {
    extern __shared__ __align__(1024) char shared[];
    for (int i = threadIdx.x; i < 8192; i += blockDim.x) ((uint32_t*)shared)[i] = i * 2654435761u;
    asm volatile("fence.proxy.async.shared::cta;");
    __syncthreads();
    uint32_t address = __cvta_generic_to_shared(shared + 16384);
    uint64_t b = ((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
    const uint4* values = (const uint4*)shared;
    const uint32_t* scales = (const uint32_t*)(shared + 8192);
    float d[N / 2] = {};
    uint32_t a[2][16];
    tile(values, scales, 0x3F003F00, a[0]);
    long long start = clock64();
    for (int t = 0; t < kTiles; t += 2) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (mode == 2 || mode == 3) tile(values + (t + i) % 4 * 128, scales, 0x3F003F00 + t, a[i]);
            if (mode != 2) {
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                for (int k = 0; k < 4; k++) wgmma<N>(d, a[mode == 1 ? 0 : i] + 4 * k, b + 2 * k);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            }
            if (mode == 4) tile(values + (t + i) % 4 * 128, scales, 0x3F003F00 + t, a[1 - i]);
            if (mode != 2) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (mode == 2) for (int k = 0; k < 16; k++) asm volatile("" ::"r"(a[i][k]));
        }
    }
    long long stop = clock64();
    float sum = 0;
    for (float value : d) sum += value;
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
    if (threadIdx.x == 0) clocks[blockIdx.x] = stop - start;
}

template <int N, int mode> __global__ void __launch_bounds__(640) run_mma(float* out, long long* clocks) {
    extern __shared__ __align__(1024) char shared[];
    for (int i = threadIdx.x; i < 8192; i += blockDim.x) ((uint32_t*)shared)[i] = i * 2654435761u;
    __syncthreads();
    const uint4* values = (const uint4*)shared;
    const uint32_t* scales = (const uint32_t*)(shared + 8192);
    uint32_t lane = threadIdx.x % 32, row = lane % 8, chunk = lane / 8;
    uint32_t x = __cvta_generic_to_shared(shared + 16384);
    float d[N / 8][4] = {};
    uint32_t a[16] = {};
    long long start = clock64();
    for (int t = 0; t < kTiles; t++) {
        if (mode != 1) tile(values + t % 4 * 128, scales, 0x3F003F00 + t, a);
        if (mode == 2) for (int k = 0; k < 16; k++) asm volatile("" ::"r"(a[k]));
        if (mode == 2) continue;
        for (int n = 0; n < N / 8; n++) {
            uint32_t b[8];
            for (int h = 0; h < 2; h++)
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                             : "=r"(b[4 * h]), "=r"(b[4 * h + 1]), "=r"(b[4 * h + 2]), "=r"(b[4 * h + 3])
                             : "r"(x + n * 1024 + row * 128 + (((chunk + 4 * h) ^ row) << 4)));
            for (int k = 0; k < 4; k++)
                asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                             "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                             : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
                             : "r"(a[4 * k]), "r"(a[4 * k + 1]), "r"(a[4 * k + 2]), "r"(a[4 * k + 3]), "r"(b[2 * k]),
                               "r"(b[2 * k + 1]));
        }
    }
    long long stop = clock64();
    float sum = 0;
    for (auto& four : d) for (float value : four) sum += value;
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
    if (threadIdx.x == 0) clocks[blockIdx.x] = stop - start;
}

// Block b of n reads pieces b, b + n, ... of `bytes` each, `stages` of them at a time.
__global__ void read(const char* data, size_t pieces, int bytes, int stages) {
    extern __shared__ __align__(1024) char shared[];
    uint32_t barrier = __cvta_generic_to_shared(shared), buffer = barrier + 1024;
    if (threadIdx.x) return;
    auto fetch = [&](int slot, size_t piece) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier + 8 * slot), "r"(bytes));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         buffer + slot * bytes),
                     "l"(data + piece * bytes), "r"(bytes), "r"(barrier + 8 * slot)
                     : "memory");
    };
    for (int i = 0; i < stages; i++) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier + 8 * i));
    asm volatile("fence.proxy.async.shared::cta;");
    size_t mine = (pieces - blockIdx.x + gridDim.x - 1) / gridDim.x;
    for (size_t i = 0; i < mine + stages; i++) {
        if (i >= stages) {
            uint32_t slot = (i - stages) % stages, parity = (i - stages) / stages % 2, done = 0;
            while (!done)
                asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                             : "=r"(done) : "r"(barrier + 8 * slot), "r"(parity));
        }
        if (i < mine) fetch(i % stages, blockIdx.x + i * gridDim.x);
    }
}

int main() {
    int cores, clock_khz;
    cudaDeviceGetAttribute(&cores, cudaDevAttrMultiProcessorCount, 0);
    cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, 0);
    printf("%d SMs, at most %d MHz\n", cores, clock_khz / 1000);
    float* out;
    long long* clocks;
    cudaMalloc(&out, cores * 640 * sizeof(float));
    cudaMalloc(&clocks, cores * sizeof(long long));
    auto report = [&](const char* name, auto kernel) {
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
        printf("%-44s", name);
        for (int warpgroups : {1, 2, 3, 4, 5}) {
            for (int repeat = 0; repeat < 2; repeat++) kernel<<<cores, 128 * warpgroups, 65536>>>(out, clocks);
            long long first;
            cudaMemcpy(&first, clocks, sizeof(first), cudaMemcpyDeviceToHost);
            printf(" %7.1f", double(first) / kTiles / warpgroups);
        }
        printf("  %s\n", cudaGetErrorString(cudaGetLastError()));
    };
    printf("clocks a tile with 1 to 5 warpgroups\n");
    report("dequantization", run_wgmma<8, 2>);
    report("wgmma n=8", run_wgmma<8, 1>);
    report("wgmma n=8, dequantized before", run_wgmma<8, 3>);
    report("wgmma n=8, dequantized during it", run_wgmma<8, 4>);
    report("wgmma n=16", run_wgmma<16, 1>);
    report("wgmma n=16, dequantized during it", run_wgmma<16, 4>);
    report("wgmma n=40", run_wgmma<40, 1>);
    report("wgmma n=40, dequantized before", run_wgmma<40, 3>);
    report("wgmma n=40, dequantized during it", run_wgmma<40, 4>);
    report("wgmma n=64", run_wgmma<64, 1>);
    report("wgmma n=64, dequantized during it", run_wgmma<64, 4>);
    report("mma n=8", run_mma<8, 1>);
    report("mma n=8, dequantized", run_mma<8, 3>);
    report("mma n=16, dequantized", run_mma<16, 3>);
    report("mma n=24, dequantized", run_mma<24, 3>);
    report("mma n=40", run_mma<40, 1>);
    report("mma n=40, dequantized", run_mma<40, 3>);

    size_t most = size_t(1690000000) / 147456 * 147456;
    char* data;
    cudaMalloc(&data, most);
    cudaMemset(data, 1, most);
    cudaFuncSetAttribute(read, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024);
    cudaEvent_t start, stop;
    cudaEventCreate(&start);
    cudaEventCreate(&stop);
    for (size_t total : {size_t(147456) * 240, size_t(147456) * 960, most})
        for (int bytes : {4096, 8192, 36864}) {
            std::vector<float> times;
            for (int repeat = 0; repeat < 8; repeat++) {
                size_t offset = (most - total) / 7 * repeat / 147456 * 147456;  // not what L2 still holds
                cudaEventRecord(start);
                read<<<cores, 32, 192 * 1024 + 1024>>>(data + offset, total / bytes, bytes,
                                                       std::min(32, 196608 / bytes));
                cudaEventRecord(stop);
                cudaEventSynchronize(stop);
                float ms;
                cudaEventElapsedTime(&ms, start, stop);
                times.push_back(ms);
            }
            std::sort(times.begin(), times.end());
            printf("read %7.1f MB by %5d bytes: %6.1f us, %.2f TB/s  %s\n", total / 1e6, bytes, times[4] * 1e3,
                   total / times[4] / 1e9, cudaGetErrorString(cudaGetLastError()));
        }
}
