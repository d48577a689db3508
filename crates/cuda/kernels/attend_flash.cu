// Causal attention of many new tokens of a sequence over its paged KV (prefill).
//
// Floor: 4 x 128 operations a query head and visible (query, key) pair, over the tensor cores' rate through mma.sync.
// One block takes 64 queries of one head, a warp 16 of them: queries stay in registers, keys and values pass in tiles
// of 64 positions (two KV blocks) through two stages of shared memory, probabilities never leave registers. The tiles
// begin at fixed positions and run upwards, so a row's sums do not depend on its batch mates or its chunk of prefill.
// Grid: (heads, flashes); items come longest first. 128 threads.
#include "cache.cuh"

constexpr int KEYS = 64;
constexpr int OPERAND = KEYS * HEAD * 2;  // bytes of the keys, or values, of a tile

template <Kv KIND>
__device__ __forceinline__ void attend(const __half* q, Cache keys, Cache values, __half* out, const int* step,
                                       int heads) {
    extern __shared__ __align__(128) uint8_t tiles[];  // [2 stages][keys, values][64][128]
    __shared__ float scales[2][2][KEYS];               // of the same, for bytes
    release();
    depend();
    if (blockIdx.y >= step[FLASHES]) return;
    const int* item = step + step[FLASH_AT] + blockIdx.y * 2;
    int token0 = item[0], count = item[1];
    int head = blockIdx.x, kv = head / (heads / KV_HEADS);
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    int position0 = step[step[POSITION_AT] + token0];
    const int* table = step + step[step[TABLE_AT] + token0];
    int blocks = (position0 + count - 1) / BLOCK + 1, rounds = (blocks + 1) / 2;

    auto stage = [&](int round) {
        uint8_t* to = tiles + round % 2 * (2 * OPERAND);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int index = round * 2 + half, valid = position0 + count - index * BLOCK;
            size_t row = cache_row(table[min(index, blocks - 1)], kv);
            stage_rows<KIND, 128>(to, half * BLOCK, keys, row, valid, tid);
            stage_rows<KIND, 128>(to + OPERAND, half * BLOCK, values, row, valid, tid);
            if constexpr (KIND == KV_Q8_0) {
                int operand = tid / BLOCK, i = tid % BLOCK;
                if (operand < 2)
                    scales[round % 2][operand][half * BLOCK + i] =
                        i < valid ? (operand == 0 ? keys : values).scales[row + i] : 0.0f;
            }
        }
    };
    stage(0);
    copy_commit();

    // Queries as fragments: rows g and g + 8 of the warp's 16, in 8 steps of 16 of d.
    int low = warp * 16 + g, high = low + 8;
    uint32_t a[8][4];
    const uint32_t* low_q =
        reinterpret_cast<const uint32_t*>(q + (size_t(token0 + min(low, count - 1)) * heads + head) * HEAD);
    const uint32_t* high_q =
        reinterpret_cast<const uint32_t*>(q + (size_t(token0 + min(high, count - 1)) * heads + head) * HEAD);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        a[i][0] = low_q[i * 8 + t], a[i][1] = high_q[i * 8 + t];
        a[i][2] = low_q[i * 8 + 4 + t], a[i][3] = high_q[i * 8 + 4 + t];
    }

    const float scale = 0.08838834764831845f * 1.4426950408889634f;  // 1 / sqrt(128), in powers of two
    float low_max = -INFINITY, high_max = -INFINITY, low_total = 0.0f, high_total = 0.0f;
    float sum[16][4] = {};
    for (int round = 0; round < rounds; round++) {
        copy_wait<0>();
        __syncthreads();  // this round's tile is there, and everyone is done with the other one
        if (round + 1 < rounds) stage(round + 1);
        copy_commit();
        uint32_t tile = shared_address(tiles) + round % 2 * (2 * OPERAND);

        float score[8][4] = {};
#pragma unroll
        for (int i = 0; i < 8; i++) {      // 16 of d
#pragma unroll
            for (int n = 0; n < 4; n++) {  // 16 keys
                uint32_t k[4];
                ldmatrix(k, tile + tile_place(n * 16 + lane / 16 * 8 + lane % 8, i * 2 + lane / 8 % 2));
                mma(score[2 * n], a[i][0], a[i][1], a[i][2], a[i][3], k[0], k[1]);
                mma(score[2 * n + 1], a[i][0], a[i][1], a[i][2], a[i][3], k[2], k[3]);
            }
        }

        int first = round * KEYS;
        bool whole = first + KEYS - 1 <= position0 + warp * 16;  // every key visible to every row of the warp
        float low_best = low_max, high_best = high_max;
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int key = j * 8 + 2 * t + c;
                float factor = scale;
                if constexpr (KIND == KV_Q8_0) factor *= scales[round % 2][0][key];
                score[j][c] *= factor;
                score[j][2 + c] *= factor;
                if (!whole) {
                    if (first + key > position0 + low) score[j][c] = -INFINITY;
                    if (first + key > position0 + high) score[j][2 + c] = -INFINITY;
                }
                low_best = fmaxf(low_best, score[j][c]);
                high_best = fmaxf(high_best, score[j][2 + c]);
            }
        }
#pragma unroll
        for (int mask = 1; mask < 4; mask *= 2) {
            low_best = fmaxf(low_best, __shfl_xor_sync(0xffffffffu, low_best, mask));
            high_best = fmaxf(high_best, __shfl_xor_sync(0xffffffffu, high_best, mask));
        }
        // Key 0 is visible to every row, so the maxima are finite from the first round on.
        float low_decay = exp2f(low_max - low_best), high_decay = exp2f(high_max - high_best);
        low_max = low_best, high_max = high_best;
        low_total *= low_decay, high_total *= high_decay;
#pragma unroll
        for (int n = 0; n < 16; n++) {
            sum[n][0] *= low_decay, sum[n][1] *= low_decay;
            sum[n][2] *= high_decay, sum[n][3] *= high_decay;
        }
        uint32_t p[8][2];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float e[4];
#pragma unroll
            for (int c = 0; c < 4; c++) e[c] = exp2f(score[j][c] - (c < 2 ? low_max : high_max));
            low_total += e[0] + e[1];
            high_total += e[2] + e[3];
            if constexpr (KIND == KV_Q8_0) {
                float v0 = scales[round % 2][1][j * 8 + 2 * t], v1 = scales[round % 2][1][j * 8 + 2 * t + 1];
                e[0] *= v0, e[1] *= v1, e[2] *= v0, e[3] *= v1;
            }
            p[j][0] = pack(e[0], e[1]);
            p[j][1] = pack(e[2], e[3]);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {      // 16 keys
#pragma unroll
            for (int n = 0; n < 8; n++) {  // 16 of d
                uint32_t v[4];
                ldmatrix_transposed(v, tile + OPERAND + tile_place(k * 16 + lane % 16, n * 2 + lane / 16));
                mma(sum[2 * n], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1], v[0], v[1]);
                mma(sum[2 * n + 1], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1], v[2], v[3]);
            }
        }
    }

#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
        low_total += __shfl_xor_sync(0xffffffffu, low_total, mask);
        high_total += __shfl_xor_sync(0xffffffffu, high_total, mask);
    }
    float low_factor = 1.0f / low_total, high_factor = 1.0f / high_total;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        if (low < count)
            *reinterpret_cast<uint32_t*>(out + (size_t(token0 + low) * heads + head) * HEAD + n * 8 + 2 * t) =
                pack(sum[n][0] * low_factor, sum[n][1] * low_factor);
        if (high < count)
            *reinterpret_cast<uint32_t*>(out + (size_t(token0 + high) * heads + head) * HEAD + n * 8 + 2 * t) =
                pack(sum[n][2] * high_factor, sum[n][3] * high_factor);
    }
}

extern "C" __global__ void __launch_bounds__(128, 2)
    attend_flash_BF16(const __half* q, Cache keys, Cache values, __half* out, const int* step, int heads) {
    attend<KV_BF16>(q, keys, values, out, step, heads);
}

extern "C" __global__ void __launch_bounds__(128, 2)
    attend_flash_Q8_0(const __half* q, Cache keys, Cache values, __half* out, const int* step, int heads) {
    attend<KV_Q8_0>(q, keys, values, out, step, heads);
}
