// RMSNorm of the residual stream, to fp16 for the tensor cores.
//
// Floor: hidden x 6 bytes a row; latency. `first` picks the tokens of the answer rows from there on; -1 takes all.
// x fp32 [tokens][hidden], weight fp32 [hidden], out fp16 [grid][hidden]. Grid: (tokens or rows), 256 threads.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    rms_norm(const float* x, const float* weight, __half* out, const int* step, int hidden, int first) {
    __shared__ float scratch[8];
    release();
    depend();
    int row = blockIdx.x;
    if (first < 0 ? row >= step[TOKENS] : first + row >= step[ROWS]) return;
    int token = first < 0 ? row : step[step[ROW_AT] + first + row];
    const float4* from = reinterpret_cast<const float4*>(x + size_t(token) * hidden);
    float4 v[5];  // hidden up to 5,120
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 5; i++) {
        int at = threadIdx.x + i * 256;
        v[i] = at < hidden / 4 ? from[at] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        squares += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    }
    float factor = rsqrtf(block_sum(squares, scratch) / hidden + EPSILON);
#pragma unroll
    for (int i = 0; i < 5; i++) {
        int at = threadIdx.x + i * 256;
        if (at < hidden / 4) {
            float4 w = reinterpret_cast<const float4*>(weight)[at];
            reinterpret_cast<uint2*>(out + size_t(row) * hidden)[at] =
                make_uint2(pack(v[i].x * factor * w.x, v[i].y * factor * w.y),
                           pack(v[i].z * factor * w.z, v[i].w * factor * w.w));
        }
    }
}
