// Attention of a few new tokens of a sequence over its paged KV, split into chunks of 128 positions.
//
// Floor: the bytes of K and V over the memory's bandwidth. The query heads of one KV head, for up to 16 / group
// tokens, are the 16 rows of one mma tile, so K and V are read once for all of them. A block takes one chunk of one
// KV head, each of its four warps one KV block: keys go from global memory straight to fragments (the order of d
// is free as long as q agrees), values through shared memory for the transposing ldmatrix. Chunks begin at fixed
// positions, so a row's partial sums do not depend on its batch mates; warps merge in order, and chunks in
// attend_merge in order. A sequence of one chunk is finished here.
// Partials: sums fp32 [partial][heads][128], then (maximum, total) fp32 [partial][heads][2]; in powers of two.
// Grid: (splits, 8), 128 threads.
#include "cache.cuh"

template <Kv KIND>
__device__ __forceinline__ void attend(const __half* q, Cache keys, Cache values, __half* out, float* sums,
                                       float2* totals, const int* step, int heads) {
    __shared__ __align__(128) uint8_t tiles[4][BLOCK * HEAD * 2];
    __shared__ float2 shares[4][16];
    release();
    depend();
    if (blockIdx.x >= step[SPLITS]) return;
    const int* item = step + step[SPLIT_AT] + blockIdx.x * 4;
    int token0 = item[0], count = item[1], chunk = item[2], partial0 = item[3];
    int group = heads / KV_HEADS, kv = blockIdx.y;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int* positions = step + step[POSITION_AT] + token0;
    int first = chunk * CHUNK + warp * BLOCK, last = positions[count - 1];
    bool live = first <= last;

    // Rows g and g + 8 of the tile: token r / group, query head r % group of this KV head.
    int low_token = g / group, high_token = (g + 8) / group;
    const uint4* low_q = nullptr;
    const uint4* high_q = nullptr;
    int low_position = -1, high_position = -1;
    if (low_token < count) {
        low_q = reinterpret_cast<const uint4*>(q + (size_t(token0 + low_token) * heads + kv * group + g % group) * HEAD);
        low_position = positions[low_token];
    }
    if (high_token < count) {
        high_q = reinterpret_cast<const uint4*>(
            q + (size_t(token0 + high_token) * heads + kv * group + (g + 8) % group) * HEAD);
        high_position = positions[high_token];
    }

    float low_max = -INFINITY, high_max = -INFINITY, low_total = 0.0f, high_total = 0.0f;
    float sum[16][4] = {};
    if (live) {
        int block = step[step[step[TABLE_AT] + token0] + chunk * 4 + warp];
        size_t row = cache_row(block, kv);
        stage_rows<KIND, 32>(tiles[warp], 0, values, row, last - first + 1, lane);
        copy_commit();

        // Scores of 32 keys; thread (g, t) reads key 8 j + g and, in slices of 32 of d, q and k at 8 t.
        float score[4][4] = {};
#pragma unroll
        for (int slice = 0; slice < 4; slice++) {
            uint4 zero = make_uint4(0, 0, 0, 0);
            uint4 a = low_q ? low_q[slice * 4 + t] : zero, b = high_q ? high_q[slice * 4 + t] : zero;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint4 k;
                size_t at = (row + j * 8 + g) * HEAD + slice * 32 + t * 8;
                if constexpr (KIND == KV_BF16) {
                    k = load_once(keys.values + at * 2);
                } else {
                    uint2 v = *reinterpret_cast<const uint2*>(keys.values + at);
                    uint2 x = widen(v.x), y = widen(v.y);
                    k = make_uint4(x.x, x.y, y.x, y.y);
                }
                mma(score[j], a.x, b.x, a.y, b.y, k.x, k.y);
                mma(score[j], a.z, b.z, a.w, b.w, k.z, k.w);
            }
        }
        // Columns of this thread: keys 8 j + 2 t and the next.
        const float scale = 0.08838834764831845f * 1.4426950408889634f;  // 1 / sqrt(128), in powers of two
        float value_scale[4][2];
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int key = j * 8 + 2 * t + c;
                float factor = scale;
                value_scale[j][c] = 1.0f;
                if constexpr (KIND == KV_Q8_0) {
                    factor *= keys.scales[row + key];
                    if (first + key <= last) value_scale[j][c] = values.scales[row + key];
                }
                score[j][c] = first + key <= low_position ? score[j][c] * factor : -INFINITY;
                score[j][2 + c] = first + key <= high_position ? score[j][2 + c] * factor : -INFINITY;
                low_max = fmaxf(low_max, score[j][c]);
                high_max = fmaxf(high_max, score[j][2 + c]);
            }
        }
#pragma unroll
        for (int mask = 1; mask < 4; mask *= 2) {
            low_max = fmaxf(low_max, __shfl_xor_sync(0xffffffffu, low_max, mask));
            high_max = fmaxf(high_max, __shfl_xor_sync(0xffffffffu, high_max, mask));
        }
        float low_base = low_max == -INFINITY ? 0.0f : low_max, high_base = high_max == -INFINITY ? 0.0f : high_max;
        uint32_t p[4][2];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float e0 = exp2f(score[j][0] - low_base), e1 = exp2f(score[j][1] - low_base);
            float e2 = exp2f(score[j][2] - high_base), e3 = exp2f(score[j][3] - high_base);
            low_total += e0 + e1;
            high_total += e2 + e3;
            p[j][0] = pack(e0 * value_scale[j][0], e1 * value_scale[j][1]);
            p[j][1] = pack(e2 * value_scale[j][0], e3 * value_scale[j][1]);
        }
#pragma unroll
        for (int mask = 1; mask < 4; mask *= 2) {
            low_total += __shfl_xor_sync(0xffffffffu, low_total, mask);
            high_total += __shfl_xor_sync(0xffffffffu, high_total, mask);
        }

        copy_wait<0>();
        __syncwarp();
        uint32_t tile = shared_address(tiles[warp]);
#pragma unroll
        for (int k = 0; k < 2; k++) {  // 16 keys
#pragma unroll
            for (int n = 0; n < 8; n++) {  // 16 of d
                uint32_t v[4];
                ldmatrix_transposed(v, tile + tile_place(k * 16 + lane % 16, n * 2 + lane / 16));
                mma(sum[2 * n], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1], v[0], v[1]);
                mma(sum[2 * n + 1], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1], v[2], v[3]);
            }
        }
    }

    __syncwarp();  // this warp's values are read: its tile becomes its sums, fp32 [16][128]
    float* mine = reinterpret_cast<float*>(tiles[warp]);
#pragma unroll
    for (int n = 0; n < 16; n++) {
        *reinterpret_cast<float2*>(mine + g * HEAD + n * 8 + 2 * t) = make_float2(sum[n][0], sum[n][1]);
        *reinterpret_cast<float2*>(mine + (g + 8) * HEAD + n * 8 + 2 * t) = make_float2(sum[n][2], sum[n][3]);
    }
    if (t == 0) {
        shares[warp][g] = make_float2(low_max, low_total);
        shares[warp][g + 8] = make_float2(high_max, high_total);
    }
    __syncthreads();
    int d = threadIdx.x;
    for (int r = 0; r < count * group; r++) {
        float best = fmaxf(fmaxf(shares[0][r].x, shares[1][r].x), fmaxf(shares[2][r].x, shares[3][r].x));
        float base = best == -INFINITY ? 0.0f : best, total = 0.0f, y = 0.0f;
#pragma unroll
        for (int w = 0; w < 4; w++) {
            float weight = exp2f(shares[w][r].x - base);
            total += weight * shares[w][r].y;
            y += weight * reinterpret_cast<const float*>(tiles[w])[r * HEAD + d];
        }
        int token = r / group, head = kv * group + r % group;
        if (partial0 < 0) {
            out[(size_t(token0 + token) * heads + head) * HEAD + d] = __float2half_rn(y / total);
        } else {
            size_t at = size_t(partial0 + chunk * count + token) * heads + head;
            sums[at * HEAD + d] = y;
            if (d == 0) totals[at] = make_float2(best, total);
        }
    }
}

extern "C" __global__ void __launch_bounds__(128)
    attend_split_BF16(const __half* q, Cache keys, Cache values, __half* out, float* sums, float2* totals,
                      const int* step, int heads) {
    attend<KV_BF16>(q, keys, values, out, sums, totals, step, heads);
}

extern "C" __global__ void __launch_bounds__(128)
    attend_split_Q8_0(const __half* q, Cache keys, Cache values, __half* out, float* sums, float2* totals,
                      const int* step, int heads) {
    attend<KV_Q8_0>(q, keys, values, out, sums, totals, step, heads);
}
