// Best token, largest logit and sum of exponentials of each part of a logits row.
//
// Floor: vocab x 4 bytes a row, read twice, the second time from the cache. logits fp32 [rows][vocab]; stats [rows][32].
// Grid: (32, rows), 128 threads. Threadgroup memory: `Shared`.
#include "sample.h"

struct Shared {
    float values[4];
    int tokens[4];
};

kernel void logits_stats(device const float* logits [[buffer(0)]], device Stats* stats [[buffer(1)]],
                         threadgroup Shared* shared [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                         uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    device const float* row = logits + ulong(group.y) * VOCAB;
    int part = group.x, size = (VOCAB + PARTS - 1) / PARTS;
    int begin = part * size, end = min(begin + size, VOCAB);
    Best best = {-INFINITY, NOBODY};
    float odd = 0.0f;  // numbers that are not finite
    for (int i = begin + thread_index; i < end; i += 128) {
        float v = row[i];
        if (!isfinite(v)) odd += 1.0f;
        Best here = {v, i};
        best = better(best, here);
    }
    best = group_best(best, shared->values, shared->tokens, lane, simdgroup, 4);
    float sum = 0.0f;
    for (int i = begin + thread_index; i < end; i += 128) sum += exp(row[i] - best.value);
    sum = group_sum(sum, shared->values, lane, simdgroup, 4);
    odd = group_sum(odd, shared->values, lane, simdgroup, 4);
    if (thread_index == 0) {
        device Stats& to = stats[group.y * PARTS + part];
        to.largest = best.value, to.sum = sum, to.token = best.token, to.finite = odd == 0.0f;
    }
}
