// Attention of few new tokens over one chunk of 128 positions.
//
// Floor: the cache's bytes. A threadgroup takes one key/value head and a tile of up to 16 query rows (tokens x query heads
// that share it). Each of four simdgroups makes the scores of one block of 32 positions, all together the softmax of the
// chunk, and then each a quarter of the 128 outputs over all four blocks. A sequence of one chunk is done after that;
// otherwise sums and totals go to attend_merge.
// qkv fp32 [tokens][heads + 16][128], attended fp32 [tokens][heads][128], sums fp32 [partials][heads][128],
// totals fp32 [partials][heads][2]: largest score, sum of exp(score - largest).
// Grid: (splits, 8), 128 threads. Threadgroup memory: `Shared`.
#include "cache.h"

constexpr constant int ROWS_MOST = 16;

struct Shared {
    float queries[ROWS_MOST * HEAD];     // then the outputs
    float scores[ROWS_MOST * CHUNK];     // then the weights
    uint slices[4][BLOCK * SLICE / 2];   // a simdgroup's widened bytes
    float key_scales[CHUNK];
    float value_scales[CHUNK];
    float largest[ROWS_MOST];
    float total[ROWS_MOST];
};
static_assert(sizeof(Shared) == 25728, "what src/kernels.rs asks for");

kernel void attend_split(device const float* qkv [[buffer(0)]], device const uchar* keys [[buffer(1)]],
                         device const float* key_scales [[buffer(2)]], device const uchar* values [[buffer(3)]],
                         device const float* value_scales [[buffer(4)]], device float* attended [[buffer(5)]],
                         device float* sums [[buffer(6)]], device float* totals [[buffer(7)]],
                         device const int* step [[buffer(8)]], threadgroup Shared* shared [[threadgroup(0)]],
                         uint3 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    device const int* item = step + step[SPLIT_AT] + group.x * 4;
    int first = item[0], tokens = item[1], chunk = item[2], partial = item[3];
    int kv_head = group.y, share = HEADS / KV_HEADS;
    int rows = tokens * share;              // row r: token r / share, head kv_head * share + r % share
    int matrices = (rows + 7) / 8;          // of query rows
    int start = step[step[POSITION_AT] + first];
    int last = start + tokens - 1;
    int blocks = min(4, (last - chunk * CHUNK) / BLOCK + 1);
    device const int* table = step + step[step[TABLE_AT] + first] + chunk * 4;

    for (int i = thread_index; i < matrices * 8 * HEAD; i += 128) {
        int r = i / HEAD, d = i % HEAD;
        float q = 0.0f;
        if (r < rows) q = qkv[ulong(first + r / share) * qkv_width() + (kv_head * share + r % share) * HEAD + d];
        shared->queries[i] = q * 0.08838834764831845f;  // 1 / sqrt(128)
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    threadgroup uint* slice = shared->slices[simdgroup];
    if (int(simdgroup) < blocks) {
        ulong row = cache_row(table[simdgroup], kv_head);
        simdgroup_float8x8 s[2][4];
        UNROLL
        for (int m = 0; m < 2; m++)
            UNROLL
            for (int p = 0; p < 4; p++) s[m][p] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        UNROLL
        for (int d = 0; d < HEAD; d += 8) {
            if (KV == KV_Q8_0 && d % SLICE == 0) widen_slice(keys, row, d, slice, lane);
            simdgroup_float8x8 q[2];
            UNROLL
            for (int m = 0; m < 2; m++)
                if (m < matrices) simdgroup_load(q[m], shared->queries + m * 8 * HEAD + d, HEAD);
            UNROLL
            for (int p = 0; p < 4; p++) {
                simdgroup_bfloat8x8 k = load_cache(keys, row, p * 8, d, slice, true);
                UNROLL
                for (int m = 0; m < 2; m++)
                    if (m < matrices) simdgroup_multiply_accumulate(s[m][p], q[m], k, s[m][p]);
            }
        }
        UNROLL
        for (int m = 0; m < 2; m++)
            UNROLL
            for (int p = 0; p < 4; p++)
                if (m < matrices)
                    simdgroup_store(s[m][p], shared->scores + m * 8 * CHUNK + simdgroup * BLOCK + p * 8, CHUNK);
        if (KV == KV_Q8_0) {
            shared->key_scales[thread_index] = key_scales[row + lane];
            shared->value_scales[thread_index] = value_scales[row + lane];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // A lane holds positions lane, lane + 32, ... of a row.
    for (int r = simdgroup; r < matrices * 8; r += 4) {
        int visible = min(start + r / share, last) - chunk * CHUNK;  // positions of the chunk up to this one
        float score[4], largest = -INFINITY;
        for (int i = 0; i < 4; i++) {
            int p = i * 32 + lane;
            score[i] = -INFINITY;
            if (p <= visible) {
                score[i] = shared->scores[r * CHUNK + p];
                if (KV == KV_Q8_0) score[i] *= shared->key_scales[p];
            }
            largest = max(largest, score[i]);
        }
        largest = simd_max(largest);
        float total = 0.0f;
        for (int i = 0; i < 4; i++) {
            int p = i * 32 + lane;
            // A row may see nothing of the chunk: then all is zero.
            float weight = p <= visible ? exp(score[i] - largest) : 0.0f;
            total += weight;
            if (KV == KV_Q8_0 && p <= visible) weight *= shared->value_scales[p];
            shared->scores[r * CHUNK + p] = weight;
        }
        total = simd_sum(total);
        if (lane == 0) shared->largest[r] = largest, shared->total[r] = total;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    simdgroup_float8x8 o[2][4];
    UNROLL
    for (int m = 0; m < 2; m++)
        UNROLL
        for (int d = 0; d < 4; d++) o[m][d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    int part = simdgroup * SLICE;  // elements of a value that this simdgroup sums
    for (int block = 0; block < blocks; block++) {
        ulong row = cache_row(table[block], kv_head);
        if (KV == KV_Q8_0) widen_slice(values, row, part, slice, lane);
        UNROLL
        for (int p = 0; p < BLOCK; p += 8) {
            simdgroup_float8x8 weights[2];
            UNROLL
            for (int m = 0; m < 2; m++)
                if (m < matrices)
                    simdgroup_load(weights[m], shared->scores + m * 8 * CHUNK + block * BLOCK + p, CHUNK);
            UNROLL
            for (int d = 0; d < 4; d++) {
                simdgroup_bfloat8x8 v = load_cache(values, row, p, part + d * 8, slice, false);
                UNROLL
                for (int m = 0; m < 2; m++)
                    if (m < matrices) simdgroup_multiply_accumulate(o[m][d], weights[m], v, o[m][d]);
            }
        }
    }
    UNROLL
    for (int m = 0; m < 2; m++)
        UNROLL
        for (int d = 0; d < 4; d++)
            if (m < matrices) simdgroup_store(o[m][d], shared->queries + m * 8 * HEAD + part + d * 8, HEAD);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (int i = thread_index; i < rows * HEAD; i += 128) {
        int r = i / HEAD, d = i % HEAD, token = r / share, head = kv_head * share + r % share;
        float y = shared->queries[i], total = shared->total[r];
        if (partial < 0) {
            attended[(ulong(first + token) * HEADS + head) * HEAD + d] = y / total;
            continue;
        }
        ulong at = ulong(partial + chunk * tokens + token) * HEADS + head;
        sums[at * HEAD + d] = y;
        if (d == 0) totals[at * 2] = shared->largest[r], totals[at * 2 + 1] = total;
    }
}
