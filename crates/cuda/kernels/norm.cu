// RMSNorm of the residual stream, to fp16 for the tensor cores, after what the projection before it left to be added:
// x += factor x the parts in their order.
//
// Floor: hidden x (6 + 4 parts) bytes a row; latency, so that all of a thread's loads are in flight at once.
// `first` picks the tokens of the answer rows from there on; -1 takes all.
// x fp32 [tokens][hidden], weight fp32 [hidden], out fp16 [grid][hidden]. Grid: (tokens or rows), a thread for every
// four elements, or for every eight past 2,560.
#include "common.cuh"

constexpr int QUADS = 2;  // of a thread
constexpr int FLIGHT = 8;

__device__ __forceinline__ float4 add(float4 a, float4 b, float factor) {
    return make_float4(a.x + b.x * factor, a.y + b.y * factor, a.z + b.z * factor, a.w + b.w * factor);
}

extern "C" __global__ void __launch_bounds__(640)
    rms_norm(float* x, Parts parts, float factor, const float* weight, __half* out, const int* step, int hidden, int first) {
    __shared__ float scratch[32];
    release();
    // The step and the weights were there before this pass began.
    int row = blockIdx.x;
    bool live = first < 0 ? row < step[TOKENS] : first + row < step[ROWS];
    int token = live && first >= 0 ? step[step[ROW_AT] + first + row] : row;
    float4 w[QUADS], v[QUADS], y[QUADS];
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        int at = threadIdx.x + i * blockDim.x;
        if (at < hidden / 4) w[i] = reinterpret_cast<const float4*>(weight)[at];
    }
    depend();
    if (!live) return;

    float4* from = reinterpret_cast<float4*>(x + size_t(token) * hidden);
    const float4* part = reinterpret_cast<const float4*>(parts.at + size_t(token) * hidden);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        int at = threadIdx.x + i * blockDim.x;
        if (at >= hidden / 4) break;
        v[i] = from[at];
        y[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int k = 0; k < parts.count; k += FLIGHT) {
            float4 p[FLIGHT];
#pragma unroll
            for (int j = 0; j < FLIGHT; j++)
                if (k + j < parts.count) p[j] = part[size_t(k + j) * (parts.plane / 4) + at];
#pragma unroll
            for (int j = 0; j < FLIGHT; j++)
                if (k + j < parts.count) y[i] = add(y[i], p[j], 1.0f);
        }
        if (parts.count > 0) {
            v[i] = add(v[i], y[i], factor);
            if (first < 0) from[at] = v[i];
        }
        squares += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    }
    float scale = rsqrtf(block_sum(squares, scratch) / hidden + EPSILON);
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        int at = threadIdx.x + i * blockDim.x;
        if (at >= hidden / 4) break;
        reinterpret_cast<uint2*>(out + size_t(row) * hidden)[at] =
            make_uint2(pack(v[i].x * scale * w[i].x, v[i].y * scale * w[i].y),
                       pack(v[i].z * scale * w[i].z, v[i].w * scale * w[i].w));
    }
}
