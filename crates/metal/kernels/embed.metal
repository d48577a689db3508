// The start of a step: embedding rows to the residual stream.
//
// Floor: hidden x 4 bytes written a token; latency. A token is an id, or a row that the last batch drew, whose id never
// left the device. x fp32 [tokens][hidden]. Grid: (tokens), 128 threads.
#include "weights.h"

template <int T>
inline void embed_row(device const uchar* table, ulong id, device float* to, uint thread_index) {
    for (int k = thread_index * 8; k < HIDDEN; k += 128 * 8) {
        float values[8];
        expand8<T>(table + id * row_bytes<T>(HIDDEN), k, values);
        for (int i = 0; i < 8; i++) to[k + i] = values[i];
    }
}

kernel void embed(device const uchar* table [[buffer(0)]], device const int* step [[buffer(1)]],
                  device const int* drawn [[buffer(2)]], device float* x [[buffer(3)]],
                  uint3 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
    int token = group.x;
    int id = step[step[TOKEN_AT] + token];
    if (id < 0) id = drawn[-1 - id];
    device float* to = x + ulong(token) * HIDDEN;
    WITH_TYPE(embed_row, table, id, to, thread_index)
}
