// Attention of a few new tokens of a sequence over its paged KV, split into chunks of 256 positions, the last of 128 to 383.
//
// Floor: the bytes of K and V over the memory's bandwidth. The query heads of one KV head, for up to 16 / group
// tokens, are the 16 rows of one mma tile, so K and V are read once for all of them. A block takes one chunk of one
// KV head; its four warps take every fourth KV block of it, each through a ring of its own of two tiles, keys and
// values in turns, that arrive asynchronously. The order of d within a score is free as long as q agrees; values pass
// through the transposing ldmatrix, those of 8 bits after they became fp16 in shared memory.
// Chunks depend on the last position alone, so sums do not depend on batch mates; warps merge in order. The last
// block of a sequence and KV head to end adds the chunks, in their order. A sequence of one chunk is finished at once.
// Partials: sums fp32 [partial][heads][128], then (maximum, total) fp32 [partial][heads][2]; in powers of two.
// Grid: (splits, 8), 128 threads, 4 x RING bytes of dynamic shared memory.
#include "cache.cuh"

constexpr int WARPS = 4;
constexpr int SLOTS = 2;

template <Kv KIND>
struct Tiles {
    static constexpr int BYTES = BLOCK * HEAD * (KIND == KV_BF16 ? 2 : 1);
    static constexpr int RING = SLOTS * BYTES + (KIND == KV_BF16 ? 0 : BLOCK * HEAD * 2);  // bytes of a warp
};

// Byte offset of 16-byte piece c (0..7) of row r of a tile of bytes.
__device__ __forceinline__ uint32_t byte_place(int r, int c) { return r * HEAD + ((c ^ (r & 7)) << 4); }

// Running softmax of a row, in powers of two.
struct Share {
    float best = -INFINITY, total = 0.0f;

    // The new maximum; says what sums so far are to be multiplied with.
    __device__ float raise(float to) {
        float base = fmaxf(best, to), decay = best == -INFINITY ? 0.0f : exp2f(best - base);
        best = base, total *= decay;
        return decay;
    }
    // What exponents are relative to.
    __device__ float base() const { return best == -INFINITY ? 0.0f : best; }
};

// Adds the chunks of one row's partial sums: a warp, four elements of d a lane.
__device__ __forceinline__ void merge(const float* sums, const float2* totals, size_t first, size_t stride, int chunks,
                                      __half* out) {
    constexpr int FLIGHT = 8;
    int lane = threadIdx.x % 32;
    Share all;
    float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int c = 0; c < chunks; c += FLIGHT) {
        float2 share[FLIGHT];
        float4 part[FLIGHT];
        float best = -INFINITY;
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) {
            size_t at = first + min(c + i, chunks - 1) * stride;
            share[i] = __ldcg(totals + at);
            part[i] = __ldcg(reinterpret_cast<const float4*>(sums + at * HEAD) + lane);
        }
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) best = fmaxf(best, share[i].x);
        float decay = all.raise(best);
        y = make_float4(y.x * decay, y.y * decay, y.z * decay, y.w * decay);
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) {
            float weight = c + i < chunks ? exp2f(share[i].x - all.best) : 0.0f;
            all.total += weight * share[i].y;
            y = make_float4(y.x + weight * part[i].x, y.y + weight * part[i].y, y.z + weight * part[i].z,
                            y.w + weight * part[i].w);
        }
    }
    float factor = 1.0f / all.total;
    reinterpret_cast<uint2*>(out)[lane] = make_uint2(pack(y.x * factor, y.y * factor), pack(y.z * factor, y.w * factor));
}

template <Kv KIND>
__device__ __forceinline__ void attend(const __half* q, Cache keys, Cache values, __half* out, float* sums,
                                       float2* totals, unsigned* arrivals, const int* step, int heads) {
    using Tile = Tiles<KIND>;
    extern __shared__ __align__(128) uint8_t rings[];
    __shared__ float2 shares[WARPS][16];
    release();
    // The step was there before this pass began.
    if (blockIdx.x >= step[SPLITS]) return;
    const int* item = step + step[SPLIT_AT] + blockIdx.x * 4;
    int token0 = item[0], count = item[1], chunk = item[2], partial0 = item[3];
    int group = heads / KV_HEADS, kv = blockIdx.y;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int* positions = step + step[POSITION_AT] + token0;
    const int* table = step + step[step[TABLE_AT] + token0];
    int last = positions[count - 1], begin = chunk * (CHUNK / BLOCK) + warp;  // position, KV block
    int chunks = max(1, (last + 1 + CHUNK / 2) / CHUNK);
    int end = chunk == chunks - 1 ? last / BLOCK + 1 : (chunk + 1) * (CHUNK / BLOCK);

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
    int ahead = begin < end ? table[begin] : 0;  // the KV block whose keys or values are staged next
    depend();

    uint8_t* ring = rings + warp * Tile::RING;
    int tiles = begin < end ? (end - begin + WARPS - 1) / WARPS * 2 : 0, staged = 0;
    auto stage = [&] {  // the next tile, if there is one
        if (staged < tiles) {
            int valid = last - (begin + staged / 2 * WARPS) * BLOCK + 1;
            const uint8_t* from = (staged % 2 == 0 ? keys : values).values + cache_row(ahead, kv) * (Tile::BYTES / BLOCK);
            uint32_t to = shared_address(ring + staged % SLOTS * Tile::BYTES);
            constexpr int PIECES = Tile::BYTES / BLOCK / 16;
#pragma unroll
            for (int i = lane; i < BLOCK * PIECES; i += 32) {
                int r = i / PIECES, c = i % PIECES;
                copy_async(to + (KIND == KV_BF16 ? tile_place(r, c) : byte_place(r, c)), from + i * 16, r < valid);
            }
            staged++;
            if (staged % 2 == 0 && staged < tiles) ahead = table[begin + staged / 2 * WARPS];
        }
        copy_commit();
    };
#pragma unroll
    for (int i = 0; i < SLOTS; i++) stage();

    uint4 low[4], high[4];
#pragma unroll
    for (int slice = 0; slice < 4; slice++) {
        uint4 zero = make_uint4(0, 0, 0, 0);
        low[slice] = low_q ? low_q[slice * 4 + t] : zero, high[slice] = high_q ? high_q[slice * 4 + t] : zero;
    }

    Share low_share, high_share;
    float sum[16][4] = {};
    int used = 0;
    for (int index = begin; index < end; index += WARPS) {
        size_t row = KIND == KV_Q8_0 ? cache_row(table[index], kv) : 0;
        int first = index * BLOCK;
        float key_scale[4][2], value_scale[4][2];
        if constexpr (KIND == KV_Q8_0) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    int key = j * 8 + 2 * t + c;
                    bool valid = first + key <= last;
                    key_scale[j][c] = valid ? keys.scales[row + key] : 0.0f;
                    value_scale[j][c] = valid ? values.scales[row + key] : 0.0f;
                }
            }
        }
        copy_wait<SLOTS - 1>();
        __syncwarp();

        // Scores of 32 keys; thread (g, t) reads key 8 j + g and, in slices of 32 of d, q and k at 8 t.
        const uint8_t* tile = ring + used++ % SLOTS * Tile::BYTES;
        float score[4][4] = {};
#pragma unroll
        for (int slice = 0; slice < 4; slice++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint4 k;
                if constexpr (KIND == KV_BF16) {
                    k = *reinterpret_cast<const uint4*>(tile + tile_place(j * 8 + g, slice * 4 + t));
                } else {
                    uint32_t at = byte_place(j * 8 + g, slice * 2 + t / 2) + t % 2 * 8;
                    uint2 v = *reinterpret_cast<const uint2*>(tile + at), x = widen(v.x), y = widen(v.y);
                    k = make_uint4(x.x, x.y, y.x, y.y);
                }
                mma(score[j], low[slice].x, high[slice].x, low[slice].y, high[slice].y, k.x, k.y);
                mma(score[j], low[slice].z, high[slice].z, low[slice].w, high[slice].w, k.z, k.w);
            }
        }
        __syncwarp();
        stage();

        // Columns of this thread: keys 8 j + 2 t and the next.
        const float scale = 0.08838834764831845f * 1.4426950408889634f;  // 1 / sqrt(128), in powers of two
        float low_best = -INFINITY, high_best = -INFINITY;
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int key = j * 8 + 2 * t + c;
                float factor = KIND == KV_Q8_0 ? scale * key_scale[j][c] : scale;
                score[j][c] = first + key <= low_position ? score[j][c] * factor : -INFINITY;
                score[j][2 + c] = first + key <= high_position ? score[j][2 + c] * factor : -INFINITY;
                low_best = fmaxf(low_best, score[j][c]);
                high_best = fmaxf(high_best, score[j][2 + c]);
            }
        }
#pragma unroll
        for (int mask = 1; mask < 4; mask *= 2) {
            low_best = fmaxf(low_best, __shfl_xor_sync(0xffffffffu, low_best, mask));
            high_best = fmaxf(high_best, __shfl_xor_sync(0xffffffffu, high_best, mask));
        }
        float low_decay = low_share.raise(low_best), high_decay = high_share.raise(high_best);
#pragma unroll
        for (int n = 0; n < 16; n++)
            sum[n][0] *= low_decay, sum[n][1] *= low_decay, sum[n][2] *= high_decay, sum[n][3] *= high_decay;
        uint32_t p[4][2];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float e0 = exp2f(score[j][0] - low_share.base()), e1 = exp2f(score[j][1] - low_share.base());
            float e2 = exp2f(score[j][2] - high_share.base()), e3 = exp2f(score[j][3] - high_share.base());
            low_share.total += e0 + e1;  // of this thread's columns, until the end
            high_share.total += e2 + e3;
            float v0 = KIND == KV_Q8_0 ? value_scale[j][0] : 1.0f, v1 = KIND == KV_Q8_0 ? value_scale[j][1] : 1.0f;
            p[j][0] = pack(e0 * v0, e1 * v1);
            p[j][1] = pack(e2 * v0, e3 * v1);
        }

        copy_wait<SLOTS - 1>();
        __syncwarp();
        tile = ring + used++ % SLOTS * Tile::BYTES;
        if constexpr (KIND == KV_Q8_0) {
            uint8_t* wide = ring + SLOTS * Tile::BYTES;
#pragma unroll
            for (int i = lane; i < BLOCK * 8; i += 32) {
                int r = i / 8, c = i % 8;
                uint4 v = *reinterpret_cast<const uint4*>(tile + byte_place(r, c));
                uint2 a = widen(v.x), b = widen(v.y), x = widen(v.z), y = widen(v.w);
                *reinterpret_cast<uint4*>(wide + tile_place(r, 2 * c)) = make_uint4(a.x, a.y, b.x, b.y);
                *reinterpret_cast<uint4*>(wide + tile_place(r, 2 * c + 1)) = make_uint4(x.x, x.y, y.x, y.y);
            }
            __syncwarp();
            tile = wide;
        }
        uint32_t at = shared_address(tile);
#pragma unroll
        for (int k = 0; k < 2; k++) {  // 16 keys
#pragma unroll
            for (int n = 0; n < 8; n++) {  // 16 of d
                uint32_t v[4];
                ldmatrix_transposed(v, at + tile_place(k * 16 + lane % 16, n * 2 + lane / 16));
                mma(sum[2 * n], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1], v[0], v[1]);
                mma(sum[2 * n + 1], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1], v[2], v[3]);
            }
        }
        __syncwarp();
        stage();
    }

    copy_wait<0>();
    __syncwarp();  // this warp's tiles are read: its ring becomes its sums, fp32 [16][128]
    float* mine = reinterpret_cast<float*>(ring);
#pragma unroll
    for (int n = 0; n < 16; n++) {
        *reinterpret_cast<float2*>(mine + g * HEAD + n * 8 + 2 * t) = make_float2(sum[n][0], sum[n][1]);
        *reinterpret_cast<float2*>(mine + (g + 8) * HEAD + n * 8 + 2 * t) = make_float2(sum[n][2], sum[n][3]);
    }
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
        low_share.total += __shfl_xor_sync(0xffffffffu, low_share.total, mask);
        high_share.total += __shfl_xor_sync(0xffffffffu, high_share.total, mask);
    }
    if (t == 0) {
        shares[warp][g] = make_float2(low_share.best, low_share.total);
        shares[warp][g + 8] = make_float2(high_share.best, high_share.total);
    }
    __syncthreads();
    int d = threadIdx.x;
    for (int r = 0; r < count * group; r++) {
        float best = fmaxf(fmaxf(shares[0][r].x, shares[1][r].x), fmaxf(shares[2][r].x, shares[3][r].x));
        float base = best == -INFINITY ? 0.0f : best, total = 0.0f, y = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float weight = exp2f(shares[w][r].x - base);
            total += weight * shares[w][r].y;
            y += weight * reinterpret_cast<const float*>(rings + w * Tile::RING)[r * HEAD + d];
        }
        int token = r / group, head = kv * group + r % group;
        if (partial0 < 0) {
            out[(size_t(token0 + token) * heads + head) * HEAD + d] = __float2half_rn(y / total);
        } else {
            size_t at = size_t(partial0 + chunk * count + token) * heads + head;
            __stcg(sums + at * HEAD + d, y);
            if (d == 0) __stcg(totals + at, make_float2(best, total));
        }
    }
    if (partial0 < 0) return;

    // The last of the sequence's chunks adds them.
    __shared__ bool ends;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned* counter = arrivals + token0 * KV_HEADS + kv;
        ends = atomicAdd(counter, 1) == chunks - 1;
        if (ends) *counter = 0;  // for the next launch
    }
    __syncthreads();
    if (!ends) return;
    __threadfence();
    for (int r = warp; r < count * group; r += WARPS) {
        int token = r / group, head = kv * group + r % group;
        size_t first = size_t(partial0 + token) * heads + head;
        merge(sums, totals, first, size_t(count) * heads, chunks, out + (size_t(token0 + token) * heads + head) * HEAD);
    }
}

#define KERNEL(kind)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, KV_##kind == KV_BF16 ? 3 : 2)                                                        \
        attend_split_##kind(const __half* q, Cache keys, Cache values, __half* out, float* sums, float2* totals,      \
                            unsigned* arrivals, const int* step, int heads) {                                         \
        attend<KV_##kind>(q, keys, values, out, sums, totals, arrivals, step, heads);                                 \
    }
KERNEL(BF16)
KERNEL(Q8_0)
