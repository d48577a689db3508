// RMSNorm of the residual stream.
//
// Floor: hidden x 8 bytes a row; latency. `first` picks the tokens of the answer rows from there on; -1 takes all.
// x fp32 [tokens][hidden], weight fp32 [hidden], out fp32 [grid][hidden]. Grid: (tokens or rows), 128 threads.
// Threadgroup memory: 4 floats.
#include "common.h"

kernel void norm(device const float* x [[buffer(0)]], device const float* weight [[buffer(1)]],
                 device float* out [[buffer(2)]], device const int* step [[buffer(3)]],
                 constant int& first [[buffer(4)]], threadgroup float* scratch [[threadgroup(0)]],
                 uint3 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                 uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    int row = group.x;
    int token = first < 0 ? row : step[step[ROW_AT] + first + row];
    device const float4* from = (device const float4*)(x + ulong(token) * HIDDEN);
    device const float4* w = (device const float4*)weight;
    device float4* to = (device float4*)(out + ulong(row) * HIDDEN);
    float squares = 0.0f;
    for (int i = thread_index; i < HIDDEN / 4; i += 128) squares += dot(from[i], from[i]);
    float factor = rsqrt(group_sum(squares, scratch, lane, simdgroup, 4) / HIDDEN + EPSILON);
    for (int i = thread_index; i < HIDDEN / 4; i += 128) to[i] = from[i] * factor * w[i];
}
