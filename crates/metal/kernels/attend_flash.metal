// Attention of many new tokens of a sequence: panels of 32 positions, softmax as it goes.
//
// Floor: operations. A threadgroup takes one query head and up to 64 neighbouring tokens, each of four simdgroups 16 of
// them, on its own. Sums are rescaled when a row's largest score grows, by a product with a diagonal matrix: how a matrix
// lies in the lanes' registers is not for programs to know.
// qkv fp32 [tokens][heads + 16][128] with room for whole tiles, attended fp32 [tokens][heads][128].
// Grid: (flashes, heads), 128 threads. Threadgroup memory: `Shared`.
#include "cache.h"

constexpr constant int ROWS_EACH = 16;  // of a simdgroup

struct Own {
    float scores[ROWS_EACH * BLOCK];  // then the weights, at last outputs
    float diagonal[2][64];
    float factor[ROWS_EACH];
    uint slice[BLOCK * SLICE / 2];
};
struct Shared {
    Own own[4];
};
static_assert(sizeof(Shared) == 18688, "what src/kernels.rs asks for");

kernel void attend_flash(device const float* qkv [[buffer(0)]], device const uchar* keys [[buffer(1)]],
                         device const float* key_scales [[buffer(2)]], device const uchar* values [[buffer(3)]],
                         device const float* value_scales [[buffer(4)]], device float* attended [[buffer(5)]],
                         device const int* step [[buffer(6)]], threadgroup Shared* shared [[threadgroup(0)]],
                         uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    device const int* item = step + step[FLASH_AT] + group.x * 2;
    int first = item[0] + simdgroup * ROWS_EACH;
    int tokens = min(ROWS_EACH, item[0] + item[1] - first);
    if (tokens <= 0) return;  // the simdgroups never wait for each other
    int head = group.y, kv_head = head / (HEADS / KV_HEADS);
    int start = step[step[POSITION_AT] + first], last = start + tokens - 1;
    device const int* table = step + step[step[TABLE_AT] + first];
    device const float* queries = qkv + ulong(first) * qkv_width() + head * HEAD;
    threadgroup Own& own = shared->own[simdgroup];

    simdgroup_float8x8 o[2][16];
    UNROLL
    for (int m = 0; m < 2; m++)
        UNROLL
        for (int d = 0; d < 16; d++) o[m][d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    // Lane r keeps the statistics of row r.
    float largest = -INFINITY, total = 0.0f;
    for (int i = lane; i < 128; i += 32) own.diagonal[i / 64][i % 64] = 0.0f;

    for (int block = 0; block <= last / BLOCK; block++) {
        ulong row = cache_row(table[block], kv_head);
        simdgroup_float8x8 s[2][4];
        UNROLL
        for (int m = 0; m < 2; m++)
            UNROLL
            for (int p = 0; p < 4; p++) s[m][p] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        UNROLL
        for (int d = 0; d < HEAD; d += 8) {
            if (KV == KV_Q8_0 && d % SLICE == 0) widen_slice(keys, row, d, own.slice, lane);
            simdgroup_float8x8 q[2];
            UNROLL
            for (int m = 0; m < 2; m++) simdgroup_load(q[m], queries + ulong(m) * 8 * qkv_width() + d, qkv_width());
            UNROLL
            for (int p = 0; p < 4; p++) {
                simdgroup_bfloat8x8 k = load_cache(keys, row, p * 8, d, own.slice, true);
                UNROLL
                for (int m = 0; m < 2; m++) simdgroup_multiply_accumulate(s[m][p], q[m], k, s[m][p]);
            }
        }
        UNROLL
        for (int m = 0; m < 2; m++)
            UNROLL
            for (int p = 0; p < 4; p++) simdgroup_store(s[m][p], own.scores + m * 8 * BLOCK + p * 8, BLOCK);
        simdgroup_barrier(mem_flags::mem_threadgroup);

        // A lane is a position.
        float scale = 0.08838834764831845f;  // 1 / sqrt(128)
        float value_scale = 1.0f;
        if (KV == KV_Q8_0) {
            scale *= key_scales[row + lane];
            value_scale = value_scales[row + lane];
        }
        float grown = 1.0f;  // by which this lane's row shrinks
        for (int r = 0; r < ROWS_EACH; r++) {
            bool visible = block * BLOCK + int(lane) <= min(start + r, last);
            float score = visible ? own.scores[r * BLOCK + lane] * scale : -INFINITY;
            float before = simd_shuffle(largest, r);
            float now = max(before, simd_max(score));
            float weight = visible ? exp(score - now) : 0.0f;
            float sum = simd_sum(weight);
            own.scores[r * BLOCK + lane] = weight * value_scale;
            if (int(lane) == r) {
                grown = exp(before - now);
                total = fma(total, grown, sum);
                largest = now;
            }
        }
        if (lane < ROWS_EACH) own.diagonal[lane / 8][lane % 8 * 9] = grown;
        simdgroup_barrier(mem_flags::mem_threadgroup);

        if (simd_any(grown != 1.0f)) {
            UNROLL
            for (int m = 0; m < 2; m++) {
                simdgroup_float8x8 diagonal;
                simdgroup_load(diagonal, own.diagonal[m], 8);
                UNROLL
                for (int d = 0; d < 16; d++) simdgroup_multiply(o[m][d], diagonal, o[m][d]);
            }
        }
        UNROLL
        for (int d = 0; d < HEAD; d += 8) {
            if (KV == KV_Q8_0 && d % SLICE == 0) widen_slice(values, row, d, own.slice, lane);
            UNROLL
            for (int p = 0; p < BLOCK; p += 8) {
                simdgroup_bfloat8x8 v = load_cache(values, row, p, d, own.slice, false);
                UNROLL
                for (int m = 0; m < 2; m++) {
                    simdgroup_float8x8 weights;
                    simdgroup_load(weights, own.scores + m * 8 * BLOCK + p, BLOCK);
                    simdgroup_multiply_accumulate(o[m][d / 8], weights, v, o[m][d / 8]);
                }
            }
        }
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }

    if (lane < ROWS_EACH) own.factor[lane] = 1.0f / total;
    UNROLL
    for (int quarter = 0; quarter < 4; quarter++) {
        simdgroup_barrier(mem_flags::mem_threadgroup);
        UNROLL
        for (int m = 0; m < 2; m++)
            UNROLL
            for (int d = 0; d < 4; d++)
                simdgroup_store(o[m][quarter * 4 + d], own.scores + m * 8 * BLOCK + d * 8, BLOCK);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (int r = 0; r < tokens; r++)
            attended[(ulong(first + r) * HEADS + head) * HEAD + quarter * 32 + lane] =
                own.scores[r * BLOCK + lane] * own.factor[r];
    }
}
