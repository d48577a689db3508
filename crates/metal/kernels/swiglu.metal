// silu(gate) x up, between the two projections of the feed-forward.
//
// Floor: ffn x 12 bytes a token. gate_up fp32 [tokens][2 ffn], products fp32 [tokens][ffn]. Grid: (ffn / 256, tokens),
// 256 threads.
#include "common.h"

kernel void swiglu(device const float* gate_up [[buffer(0)]], device float* products [[buffer(1)]],
                   uint3 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
    int i = group.x * 256 + thread_index;
    if (i >= FFN) return;
    device const float* from = gate_up + ulong(group.y) * 2 * FFN + i;
    float gate = from[0];
    products[ulong(group.y) * FFN + i] = gate / (1.0f + exp(-gate)) * from[FFN];
}
