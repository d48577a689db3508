// Best token, largest logit and sum of exponentials of each part of a logits row.
//
// Floor: vocab x 4 bytes a row, from L2 where the head just wrote them. logits fp32 [rows][vocab];
// stats [rows][32]: largest, sum of exp(logit - largest), token of the largest, whether all are finite.
// Grid: (32, rows), 256 threads.
#include "sample.cuh"

extern "C" __global__ void __launch_bounds__(256)
    logits_stats(const float* logits, Stats* stats, const int* step, int vocab, int first) {
    __shared__ float scratch[8];
    __shared__ Best bests[8];
    release();
    depend();
    if (first + blockIdx.y >= step[ROWS]) return;
    const float* row = logits + size_t(blockIdx.y) * vocab;
    int begin = vocab / 4 * blockIdx.x / PARTS * 4;
    int end = blockIdx.x + 1 == PARTS ? vocab : vocab / 4 * (blockIdx.x + 1) / PARTS * 4;
    Best best = {-INFINITY, vocab};
    float odd = 0.0f;  // stays 0 while all are finite
    for (int i = begin + threadIdx.x; i < end; i += 256) {
        float v = row[i];
        odd += v - v;
        best = better(best, {v, i});
    }
    best = block_best(best, bests);
    float sum = 0.0f;
    for (int i = begin + threadIdx.x; i < end; i += 256) sum += __expf(row[i] - best.value);
    sum = block_sum(sum, scratch);
    odd = block_sum(odd, scratch);
    if (threadIdx.x == 0) stats[blockIdx.y * PARTS + blockIdx.x] = {best.value, sum, best.token, odd == 0.0f};
}
