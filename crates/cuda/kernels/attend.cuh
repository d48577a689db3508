// What attention over chunks of a sequence's KV has in common (attend_split.cu, attend_batch.cu): its work items, running softmax, and the
// merge of chunks.
//
// Chunks depend on the last position alone, so sums do not depend on batch mates. Partials: sums fp32 [partial][heads][128], then (maximum,
// total) fp32 [partial][heads][2]; in powers of two.
#pragma once

#include "cache.cuh"

// A work item, in the step buffer behind its header. Laid out by Step::attention in step.rs.
struct Work {
    int token;        // the first
    uint16_t count;   // tokens
    uint16_t fresh;   // positions up to the last token's that this call appends
    int begin, end;   // KV blocks of the sequence
    int last;         // position of the last token
    int partial;      // the first; -1: the only chunk
    uint16_t chunk, chunks;
    int table;        // where the sequence's block table begins
};

__device__ __forceinline__ Work work_of(const int* step, int index) {
    const int4* at = reinterpret_cast<const int4*>(step + HEADER) + index * 2;
    int4 a = at[0], b = at[1];
    return {a.x, uint16_t(a.y), uint16_t(a.y >> 16), a.z, a.w, b.x, b.y, uint16_t(b.z), uint16_t(b.z >> 16), b.w};
}

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

// Bytes of a tile of keys, or values; bytes and tiles of a warp's ring.
constexpr int RING = 16384;
template <Kv KIND>
constexpr int TILE_BYTES = BLOCK * HEAD * (KIND == KV_BF16 ? 2 : 1);
template <Kv KIND>
constexpr int SLOTS = RING / TILE_BYTES<KIND>;

// Two bytes of a word as a pair of fp16 whose bits they are; the one whose bits are 1 is 2^-24.
template <int PICK>
__device__ __forceinline__ uint32_t subnormal(uint32_t word) {
    return __byte_perm(word, 0, PICK);
}
constexpr float BITS = 16777216.0f;

// A warp's walk over every STRIDE-th KV block of an item, from `begin` on: 16 query rows of one KV head against keys and values that arrive in
// turns through a ring of its own. The order of d within a score is free as long as q agrees; values pass through the transposing
// ldmatrix. Bytes b become fp16 as they are read, b + 128 as the bits of a subnormal: an XOR and two permutations for four; what 128
// adds to a score, or a sum, is subtracted at its end.
template <Kv KIND, int STRIDE>
struct Walk {
    Cache keys, values;
    const int* table;
    uint8_t* ring;
    int kv, begin, end, last, tiles, staged = 0, filled = 0, ahead;  // `ahead`: the KV block whose keys or values are staged next
    uint4 low[4], high[4];  // rows g and g + 8: token r / group, query head r % group of the KV head
    int low_position = -1, high_position = -1;
    Share low_share, high_share;
    float sum[16][4] = {};

    __device__ __forceinline__ Walk(const Work& item, Cache keys_, Cache values_, const int* step, int kv_, int offset, uint8_t* ring_)
        : keys(keys_), values(values_), table(step + item.table), ring(ring_), kv(kv_), begin(item.begin + offset), end(item.end), last(item.last) {
        tiles = begin < end ? (end - begin + STRIDE - 1) / STRIDE * 2 : 0;
        ahead = begin < end ? table[begin] : 0;
    }

    __device__ __forceinline__ int block_of(int tile) const { return begin + tile / 2 * STRIDE; }

    // Asks for the next tile, if there is one.
    __device__ __forceinline__ void stage() {
        constexpr int BYTES = TILE_BYTES<KIND>, PIECES = BYTES / BLOCK / 16;
        if (staged < tiles) {
            int valid = last - block_of(staged) * BLOCK + 1;
            const uint8_t* from = (staged % 2 == 0 ? keys : values).values + cache_row(ahead, kv) * (BYTES / BLOCK);
            uint32_t to = shared_address(ring + staged % SLOTS<KIND> * BYTES);
#pragma unroll 4
            for (int i = threadIdx.x % 32; i < BLOCK * PIECES; i += 32) {
                int r = i / PIECES, c = i % PIECES;
                copy_async(to + (KIND == KV_BF16 ? tile_place(r, c) : byte_place(r, c)), from + i * 16, r < valid);
            }
            staged++;
            if (staged % 2 == 0 && staged < tiles) ahead = table[block_of(staged)];
        }
        copy_commit();
    }

    // Fills the ring with what lay in the cache before this call; then, after `depend`, with the rest.
    __device__ __forceinline__ void stage_old(const Work& item) {
        int fresh = (last + 1 - item.fresh) / BLOCK;
        for (; filled < SLOTS<KIND> && staged < tiles && block_of(staged) < fresh; filled++) stage();
    }
    __device__ __forceinline__ void stage_rest() {
        for (; filled < SLOTS<KIND>; filled++) stage();
    }

    __device__ __forceinline__ void load_queries(const Work& item, const __half* q, const int* positions, int heads) {
        int group = heads / KV_HEADS, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        auto row = [&](int r, uint4 (&to)[4], int& position) {
            int token = r / group;
            bool valid = token < item.count;
            const uint4* from = reinterpret_cast<const uint4*>(q + (size_t(item.token + token) * heads + kv * group + r % group) * HEAD);
#pragma unroll
            for (int slice = 0; slice < 4; slice++) to[slice] = valid ? from[slice * 4 + t] : make_uint4(0, 0, 0, 0);
            if (valid) position = positions[token];
        };
        row(g, low, low_position), row(g + 8, high, high_position);
    }

    // Leaves sums in the ring, fp32 [16][128], and (maximum, total) of the rows at `shares`, in powers of two.
    __device__ __forceinline__ void run(int rows, float2* shares) {
        constexpr int BYTES = TILE_BYTES<KIND>, SLOTS = ::SLOTS<KIND>;
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        // Of bytes: scales of key and value `lane` of the next KV block; what 128 adds to scores, and to sums.
        float key_scale = 0.0f, value_scale = 0.0f, low_offset = 0.0f, high_offset = 0.0f, low_weights = 0.0f, high_weights = 0.0f;
        auto fetch_scales = [&](int index) {
            size_t row = cache_row(table[index], kv) + lane;
            bool valid = index * BLOCK + lane <= last;
            key_scale = valid ? keys.scales[row] : 0.0f;
            value_scale = valid ? values.scales[row] : 0.0f;
        };
        if constexpr (KIND == KV_Q8_0) {
            if (begin < end) fetch_scales(begin);
            auto sum_of = [](const uint4& v) {
                float2 a = __half22float2(*reinterpret_cast<const __half2*>(&v.x)), b = __half22float2(*reinterpret_cast<const __half2*>(&v.y));
                float2 c = __half22float2(*reinterpret_cast<const __half2*>(&v.z)), d = __half22float2(*reinterpret_cast<const __half2*>(&v.w));
                return a.x + a.y + b.x + b.y + c.x + c.y + d.x + d.y;
            };
#pragma unroll
            for (int slice = 0; slice < 4; slice++) low_offset += sum_of(low[slice]), high_offset += sum_of(high[slice]);
#pragma unroll
            for (int mask = 1; mask < 4; mask *= 2) {
                low_offset += __shfl_xor_sync(0xffffffffu, low_offset, mask);
                high_offset += __shfl_xor_sync(0xffffffffu, high_offset, mask);
            }
            low_offset *= 128.0f, high_offset *= 128.0f;
        }

        int used = 0;
        for (int index = begin; index < end; index += STRIDE) {
            int first = index * BLOCK;
            float own_key_scale = key_scale, own_value_scale = value_scale;
            if constexpr (KIND == KV_Q8_0)
                if (index + STRIDE < end) fetch_scales(index + STRIDE);
            copy_wait<SLOTS - 1>();
            __syncwarp();

            // Scores of 32 keys; thread (g, t) reads key 8 j + g and, in slices of 32 of d, q and k at 8 t.
            const uint8_t* tile = ring + used++ % SLOTS * BYTES;
            float score[4][4] = {};
#pragma unroll
            for (int slice = 0; slice < 4; slice++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    uint4 k;
                    if constexpr (KIND == KV_BF16) {
                        k = *reinterpret_cast<const uint4*>(tile + tile_place(j * 8 + g, slice * 4 + t));
                    } else {
                        uint2 v = *reinterpret_cast<const uint2*>(tile + byte_place(j * 8 + g, slice * 2 + t / 2) + t % 2 * 8);
                        v.x ^= 0x80808080, v.y ^= 0x80808080;
                        k = make_uint4(subnormal<0x4140>(v.x), subnormal<0x4342>(v.x), subnormal<0x4140>(v.y), subnormal<0x4342>(v.y));
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
                    float factor = scale;
                    if constexpr (KIND == KV_Q8_0) {
                        factor *= __shfl_sync(0xffffffffu, own_key_scale, key);
                        score[j][c] = score[j][c] * BITS - low_offset;
                        score[j][2 + c] = score[j][2 + c] * BITS - high_offset;
                    }
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
            if (index > begin) {
#pragma unroll
                for (int n = 0; n < 16; n++)
                    sum[n][0] *= low_decay, sum[n][1] *= low_decay, sum[n][2] *= high_decay, sum[n][3] *= high_decay;
            }
            low_weights *= low_decay, high_weights *= high_decay;
            uint32_t p[4][2];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float e0 = exp2f(score[j][0] - low_share.base()), e1 = exp2f(score[j][1] - low_share.base());
                float e2 = exp2f(score[j][2] - high_share.base()), e3 = exp2f(score[j][3] - high_share.base());
                low_share.total += e0 + e1;  // of this thread's columns, until the end
                high_share.total += e2 + e3;
                if constexpr (KIND == KV_Q8_0) {
                    float v0 = __shfl_sync(0xffffffffu, own_value_scale, j * 8 + 2 * t), v1 = __shfl_sync(0xffffffffu, own_value_scale, j * 8 + 2 * t + 1);
                    e0 *= v0, e1 *= v1, e2 *= v0, e3 *= v1;
                }
                p[j][0] = pack(e0, e1);
                p[j][1] = pack(e2, e3);
                if constexpr (KIND == KV_Q8_0) {
                    float2 a = __half22float2(*reinterpret_cast<__half2*>(&p[j][0])), b = __half22float2(*reinterpret_cast<__half2*>(&p[j][1]));
                    low_weights += a.x + a.y, high_weights += b.x + b.y;
                }
            }

            copy_wait<SLOTS - 1>();
            __syncwarp();
            uint32_t at = shared_address(ring + used++ % SLOTS * BYTES);
#pragma unroll
            for (int k = 0; k < 2; k++) {  // 16 keys
#pragma unroll
                for (int n = 0; n < (KIND == KV_BF16 ? 8 : 4); n++) {  // two pieces of 16 bytes
                    uint32_t v[4];
                    int r = k * 16 + lane % 16, c = n * 2 + lane / 16;
                    ldmatrix_transposed(v, at + (KIND == KV_BF16 ? tile_place(r, c) : byte_place(r, c)));
                    if constexpr (KIND == KV_BF16) {
                        mma(sum[2 * n], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1], v[0], v[1]);
                        mma(sum[2 * n + 1], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1], v[2], v[3]);
                    } else {  // what looks like one element is two of d: sums of even ones, then of odd ones
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            uint32_t x = v[2 * i] ^ 0x80808080, y = v[2 * i + 1] ^ 0x80808080;
                            mma(sum[4 * n + 2 * i], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1], subnormal<0x4240>(x), subnormal<0x4240>(y));
                            mma(sum[4 * n + 2 * i + 1], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1], subnormal<0x4341>(x), subnormal<0x4341>(y));
                        }
                    }
                }
            }
            __syncwarp();
            stage();
        }

        copy_wait<0>();
        __syncwarp();  // this warp's tiles are read: its ring becomes its sums, fp32 [16][128]
        float* mine = reinterpret_cast<float*>(ring);
#pragma unroll
        for (int mask = 1; mask < 4; mask *= 2) {
            low_share.total += __shfl_xor_sync(0xffffffffu, low_share.total, mask);
            high_share.total += __shfl_xor_sync(0xffffffffu, high_share.total, mask);
            low_weights += __shfl_xor_sync(0xffffffffu, low_weights, mask);
            high_weights += __shfl_xor_sync(0xffffffffu, high_weights, mask);
        }
        if constexpr (KIND == KV_BF16) {
#pragma unroll
            for (int n = 0; n < 16; n++) {
                if (g < rows) *reinterpret_cast<float2*>(mine + g * HEAD + n * 8 + 2 * t) = make_float2(sum[n][0], sum[n][1]);
                if (g + 8 < rows) *reinterpret_cast<float2*>(mine + (g + 8) * HEAD + n * 8 + 2 * t) = make_float2(sum[n][2], sum[n][3]);
            }
        } else {
            low_weights *= 128.0f, high_weights *= 128.0f;
#pragma unroll
            for (int n = 0; n < 16; n += 2) {  // 16 of d: 4 t to 4 t + 3
                if (g < rows)
                    *reinterpret_cast<float4*>(mine + g * HEAD + n * 8 + 4 * t) =
                        make_float4(sum[n][0] * BITS - low_weights, sum[n + 1][0] * BITS - low_weights, sum[n][1] * BITS - low_weights,
                                    sum[n + 1][1] * BITS - low_weights);
                if (g + 8 < rows)
                    *reinterpret_cast<float4*>(mine + (g + 8) * HEAD + n * 8 + 4 * t) =
                        make_float4(sum[n][2] * BITS - high_weights, sum[n + 1][2] * BITS - high_weights, sum[n][3] * BITS - high_weights,
                                    sum[n + 1][3] * BITS - high_weights);
            }
        }
        if (t == 0) {
            shares[g] = make_float2(low_share.best, low_share.total);
            shares[g + 8] = make_float2(high_share.best, high_share.total);
        }
    }
};

// The chunks of an item's sequence and KV head meet in `arrivals`: true for the last of `shares` blocks to come.
__device__ __forceinline__ bool last_to_come(unsigned* counter, unsigned shares) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, 1) == shares - 1;
        if (last) *counter = 0;  // for the next launch
    }
    __syncthreads();
    if (last) __threadfence();
    return last;
}

// Element d of row r of a block's warps, whose sums lie in their rings and whose shares at `shares`.
template <int WARPS>
__device__ __forceinline__ float merge_warps(const float2 (&shares)[WARPS][16], const uint8_t* rings, int r, int d, Share& all) {
    float y = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) all.best = fmaxf(all.best, shares[w][r].x);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        float weight = exp2f(shares[w][r].x - all.base());
        all.total += weight * shares[w][r].y;
        y += weight * reinterpret_cast<const float*>(rings + w * RING)[r * HEAD + d];
    }
    return y;
}
