// What a device can do at most, to hold kernels against: reading memory, and products of its tensor cores.
#include "hopper.cuh"

// Reads `count` x 16 bytes `passes` times. Grid: a block a multiprocessor, 512 threads, eight loads of a thread in flight.
extern "C" __global__ void __launch_bounds__(512) peak_read(const uint4* from, unsigned long long count, int passes, unsigned* out) {
    constexpr int LOADS = 8;
    size_t stride = size_t(gridDim.x) * blockDim.x;
    unsigned seen = 0;
    for (int pass = 0; pass < passes; pass++) {
        for (size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x; at + (LOADS - 1) * stride < count; at += LOADS * stride) {
            uint4 v[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; i++) v[i] = load_once(from + at + i * stride);
#pragma unroll
            for (int i = 0; i < LOADS; i++) seen |= v[i].x | v[i].y | v[i].z | v[i].w;
        }
    }
    if (seen == 1) *out = seen;  // the buffer is zeros: never, but the loads are needed for that
}

// Numbers between 0.5 and 1, and their negatives, with random digits: what tensor cores consume depends on them.
__device__ __forceinline__ unsigned digits(unsigned i) {
    i = (i ^ i >> 16) * 0x7feb352d;
    i = (i ^ i >> 15) * 0x846ca68b;
    return ((i ^ i >> 16) & 0x83ff83ff) | 0x38003800;
}

// Each of a block's eight warps does `rounds` x 524,288 operations on fp16. Grid: a block a multiprocessor, 256 threads, 49 KB of shared memory.
extern "C" __global__ void __launch_bounds__(256, 1) peak_products(int rounds, float* out) {
    float total = 0.0f;
#if HOPPER
    extern __shared__ uint8_t dynamic[];  // two tiles of 64 x 64, one of 256 x 64
    unsigned padding = -shared_address(dynamic) & 1023, base = shared_address(dynamic) + padding;
    for (int i = threadIdx.x; i < 48 * 256; i += blockDim.x) reinterpret_cast<unsigned*>(dynamic + padding)[i] = digits(i + blockIdx.x * 12289);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    uint64_t a = operand(base + threadIdx.x / 128 * 8192), b = operand(base + 16384);
    float sum[128] = {};
    for (int round = 0; round < rounds; round++) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) wgmma<256>(sum, a + i * 2, b + i * 2, 1);
        wgmma_commit();
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    settled(sum);
#pragma unroll
    for (int i = 0; i < 128; i++) total += sum[i];
#else
    unsigned a[4], b[2];
    for (int i = 0; i < 4; i++) a[i] = digits(threadIdx.x * 6 + i);
    for (int i = 0; i < 2; i++) b[i] = digits(threadIdx.x * 6 + 4 + i);
    float sum[16][4] = {};
    for (int round = 0; round < rounds * 8; round++) {
#pragma unroll
        for (int i = 0; i < 16; i++) mma(sum[i], a[0], a[1], a[2], a[3], b[0], b[1]);
    }
    for (int i = 0; i < 16; i++) total += sum[i][0] + sum[i][1] + sum[i][2] + sum[i][3];
#endif
    if (total == 0.5f) *out = total;  // seldom, but the products are needed for that
}
