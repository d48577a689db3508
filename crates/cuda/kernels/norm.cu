// RMSNorm of the residual stream, to fp16 for the tensor cores. Batches on Hopper have none but the last: theirs are spread over the
// projections (normed.cuh).
//
// Floor: hidden x 6 bytes a row; latency, so that all of a thread's loads are in flight at once.
// `first` picks the tokens of the answer rows from there on; -1 takes all.
// x fp32 [tokens][hidden], weight fp32 [hidden], out fp16 [grid][hidden]. Grid: (tokens or rows), a thread for every
// four elements, or for every eight past 2,560.
#include "common.cuh"

constexpr int QUADS = 2;  // of a thread

extern "C" __global__ void __launch_bounds__(640)
    rms_norm(const float* x, const float* weight, __half* out, const int* step, int hidden, int first) {
    __shared__ float scratch[32];
    release();
    // The step and the weights were there before this pass began.
    int row = blockIdx.x;
    bool live = first < 0 ? row < step[TOKENS] : first + row < step[ROWS];
    int token = live && first >= 0 ? step[step[ROW_AT] + first + row] : row;
    float4 w[QUADS], v[QUADS];
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        int at = threadIdx.x + i * blockDim.x;
        if (at < hidden / 4) w[i] = reinterpret_cast<const float4*>(weight)[at];
    }
    depend();
    if (!live) return;

    const float4* from = reinterpret_cast<const float4*>(x + size_t(token) * hidden);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        int at = threadIdx.x + i * blockDim.x;
        if (at >= hidden / 4) break;
        v[i] = from[at];
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
