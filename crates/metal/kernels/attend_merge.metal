// Adds the chunks of split attention in their order.
//
// Floor: the partials' bytes. See attend_split for the shapes. Grid: (merges, heads), 128 threads, one an element.
#include "common.h"

kernel void attend_merge(device const float* sums [[buffer(0)]], device const float* totals [[buffer(1)]],
                         device float* attended [[buffer(2)]], device const int* step [[buffer(3)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         uint thread_index [[thread_index_in_threadgroup]]) {
    device const int* item = step + step[MERGE_AT] + group.x * 4;
    int token = item[0], first = item[1], stride = item[2], chunks = item[3];
    int head = group.y;
    float best = -INFINITY;
    for (int c = 0; c < chunks; c++) best = max(best, totals[(ulong(first + c * stride) * HEADS + head) * 2]);
    float total = 0.0f, y = 0.0f;
    for (int c = 0; c < chunks; c++) {
        ulong at = ulong(first + c * stride) * HEADS + head;
        float share = exp(totals[at * 2] - best);
        total = fma(share, totals[at * 2 + 1], total);
        y = fma(share, sums[at * HEAD + thread_index], y);
    }
    attended[(ulong(token) * HEADS + head) * HEAD + thread_index] = y / total;
}
