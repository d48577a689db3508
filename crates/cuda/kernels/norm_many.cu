// RMSNorm of the residual stream of many tokens, to fp16 for the tensor cores.
//
// Floor: hidden x 6 bytes a token. Small blocks with few registers, so that a multiprocessor has a hundred kilobytes of rows in flight.
// x fp32 [tokens][hidden], weight fp32 [hidden], out fp16 [tokens][hidden]. Grid: (tokens), 128 threads. hidden at most 5,120.
#include "common.cuh"

constexpr int THREADS = 128;
constexpr int QUADS = 10;  // of a thread, at most

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_many(const float* x, const float* weight, __half* out, int hidden) {
    __shared__ float scratch[32];
    release();
    depend();
    const float4* from = reinterpret_cast<const float4*>(x + size_t(blockIdx.x) * hidden);
    float4 v[QUADS];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        int at = threadIdx.x + i * THREADS;
        v[i] = at < hidden / 4 ? from[at] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < QUADS; i++) squares += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    float scale = rsqrtf(block_sum(squares, scratch) / hidden + EPSILON);
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        int at = threadIdx.x + i * THREADS;
        if (at >= hidden / 4) break;
        float4 w = __ldg(reinterpret_cast<const float4*>(weight) + at);
        reinterpret_cast<uint2*>(out + size_t(blockIdx.x) * hidden)[at] =
            make_uint2(pack(v[i].x * scale * w.x, v[i].y * scale * w.y), pack(v[i].z * scale * w.z, v[i].w * scale * w.w));
    }
}
