// What happens to a head between the QKV projection and attention: per-head RMSNorm of Q and K, rotary embedding, and the append of
// K and V to the cache. A warp holds a head's row, a lane elements 2 l, 2 l + 1 and their partners 64 further, so a rotation never
// leaves its lane.
#pragma once

#include "cache.cuh"

struct Heads {
    const float* q_norm;
    const float* k_norm;
    const float2* rotations;  // (cos, sin) [tokens][64]
    __half* q;                // [tokens][heads][128]
    Cache keys, values;
    const int* step;
    int heads, kv;  // query heads; an enum Kv
};

// Where a token's rows of the cache lie, as block x 32 + position in the block.
__device__ __forceinline__ int cache_slot(const int* step, int token) {
    int position = step[step[POSITION_AT] + token];
    return step[step[step[TABLE_AT] + token] + position / BLOCK] * BLOCK + position % BLOCK;
}

// bf16 rounding, kept as fp16; what fp16 cannot hold saturates, so that a cache never holds an infinity.
__device__ __forceinline__ float as_bf16(float x) {
    return fminf(fmaxf(__bfloat162float(__float2bfloat16_rn(x)), -65504.0f), 65504.0f);
}

__device__ __forceinline__ void append(const Heads& h, const Cache& cache, int slot, int head, int lane, float2 low, float2 high) {
    size_t row = cache_row(slot / BLOCK, head) + slot % BLOCK;
    if (h.kv == KV_BF16) {
        uint32_t* to = reinterpret_cast<uint32_t*>(cache.values) + row * (HEAD / 2) + lane;
        to[0] = pack(as_bf16(low.x), as_bf16(low.y));
        to[32] = pack(as_bf16(high.x), as_bf16(high.y));
    } else {
        float most = warp_max(fmaxf(fmaxf(fabsf(low.x), fabsf(low.y)), fmaxf(fabsf(high.x), fabsf(high.y))));
        float scale = most / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        char2* to = reinterpret_cast<char2*>(cache.values) + row * (HEAD / 2) + lane;
        to[0] = make_char2(__float2int_rn(low.x * inverse), __float2int_rn(low.y * inverse));
        to[32] = make_char2(__float2int_rn(high.x * inverse), __float2int_rn(high.y * inverse));
        if (lane == 0) cache.scales[row] = scale;
    }
}

// The norm weights of this lane's elements of row `head` of QKV.
__device__ __forceinline__ void head_norm(const Heads& h, int head, int lane, float2 (&weight)[2]) {
    const float2* from = reinterpret_cast<const float2*>(head < h.heads ? h.q_norm : h.k_norm);
    weight[0] = from[lane], weight[1] = from[lane + 32];
}

// Row `head` of QKV of a token; `turn` is the cos and sin of this lane's two pairs.
__device__ __forceinline__ void place_head(const Heads& h, int head, int token, int slot, int lane, float2 low, float2 high,
                                           const float2 (&weight)[2], float4 turn) {
    if (head < h.heads + KV_HEADS) {
        float squares = warp_sum(low.x * low.x + low.y * low.y + high.x * high.x + high.y * high.y);
        float factor = rsqrtf(squares / HEAD + EPSILON);
        float2 a = make_float2(low.x * factor * weight[0].x, low.y * factor * weight[0].y);
        float2 b = make_float2(high.x * factor * weight[1].x, high.y * factor * weight[1].y);
        low = make_float2(a.x * turn.x - b.x * turn.y, a.y * turn.z - b.y * turn.w);
        high = make_float2(b.x * turn.x + a.x * turn.y, b.y * turn.z + a.y * turn.w);
    }
    if (head < h.heads) {
        uint32_t* to = reinterpret_cast<uint32_t*>(h.q + (size_t(token) * h.heads + head) * HEAD) + lane;
        to[0] = pack(low.x, low.y);
        to[32] = pack(high.x, high.y);
    } else {
        bool key = head < h.heads + KV_HEADS;
        append(h, key ? h.keys : h.values, slot, (head - h.heads) % KV_HEADS, lane, low, high);
    }
}
