// Adds the chunks of split attention in their order.
//
// Floor: the partials' bytes, about 3 % of what attend_split read. Grid: (merges, heads), 128 threads, one an element.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128)
    attend_merge(const float* sums, const float2* totals, __half* out, const int* step, int heads) {
    release();
    depend();
    if (blockIdx.x >= step[MERGES]) return;
    const int* item = step + step[MERGE_AT] + blockIdx.x * 4;
    int token = item[0], first = item[1], stride = item[2], chunks = item[3];
    int head = blockIdx.y, d = threadIdx.x;
    float best = -INFINITY;
    for (int c = 0; c < chunks; c++) best = fmaxf(best, totals[size_t(first + c * stride) * heads + head].x);
    float total = 0.0f, y = 0.0f;
#pragma unroll 4
    for (int c = 0; c < chunks; c++) {
        size_t at = size_t(first + c * stride) * heads + head;
        float2 share = totals[at];
        float weight = exp2f(share.x - best);
        total += weight * share.y;
        y += weight * sums[at * HEAD + d];
    }
    out[(size_t(token) * heads + head) * HEAD + d] = __float2half_rn(y / total);
}
