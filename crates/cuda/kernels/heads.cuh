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

// Row `head` of QKV of N tokens from `token` on, those before `tokens`, side by side since each is a chain of steps; `turn` is the cos and
// sin of this lane's two pairs.
template <int N>
__device__ __forceinline__ void place_heads(const Heads& h, int head, int token, int tokens, const int (&slot)[N], int lane, float2 (&low)[N],
                                            float2 (&high)[N], const float2 (&weight)[2], const float4 (&turn)[N]) {
    if (head < h.heads + KV_HEADS) {
        float squares[N];
#pragma unroll
        for (int i = 0; i < N; i++) squares[i] = low[i].x * low[i].x + low[i].y * low[i].y + high[i].x * high[i].x + high[i].y * high[i].y;
#pragma unroll
        for (int mask = 16; mask > 0; mask >>= 1) {
#pragma unroll
            for (int i = 0; i < N; i++) squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], mask);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            float factor = rsqrtf(squares[i] / HEAD + EPSILON);
            float2 a = make_float2(low[i].x * factor * weight[0].x, low[i].y * factor * weight[0].y);
            float2 b = make_float2(high[i].x * factor * weight[1].x, high[i].y * factor * weight[1].y);
            low[i] = make_float2(a.x * turn[i].x - b.x * turn[i].y, a.y * turn[i].z - b.y * turn[i].w);
            high[i] = make_float2(b.x * turn[i].x + a.x * turn[i].y, b.y * turn[i].z + a.y * turn[i].w);
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (token + i >= tokens) break;
        if (head < h.heads) {
            uint32_t* to = reinterpret_cast<uint32_t*>(h.q + (size_t(token + i) * h.heads + head) * HEAD) + lane;
            to[0] = pack(low[i].x, low[i].y);
            to[32] = pack(high[i].x, high[i].y);
        } else {
            bool key = head < h.heads + KV_HEADS;
            append(h, key ? h.keys : h.values, slot[i], (head - h.heads) % KV_HEADS, lane, low[i], high[i]);
        }
    }
}
