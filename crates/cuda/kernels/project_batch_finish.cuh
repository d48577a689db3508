// What becomes of whole sums of project_batch.cuh: the residual stream, heads, SwiGLU, logits.
#pragma once

#include "project_batch_exchange.cuh"

#if HOPPER

// Whole sums go to the residual stream.
template <int WIDTH, int GROUPS>
__device__ __forceinline__ void finish_residual(const float (&sum)[WIDTH / 2], const Residual& r, int rows, int row0, int range, int units, int tokens,
                                                const float* powers, uint32_t mailbox, uint32_t arrived, float* parts, float* results) {
    constexpr int SPLITS = 4, TILES = (WIDTH / 8 + SPLITS - 1) / SPLITS, ROUNDED = TILES * SPLITS * 8;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, unit = threadIdx.x / 32, rank = cluster_rank();
    bool live = unit < units;
    int row = row0 + unit * UNIT + g;
    float weight[2] = {}, x[TILES][4], own[TILES * 4];
    if (live) {
        weight[0] = r.weight[row], weight[1] = r.weight[row + 8];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int token = min((i * SPLITS + rank) * 8 + 2 * t + c, tokens - 1);
                x[i][c] = r.x[token * rows + row], x[i][c + 2] = r.x[token * rows + row + 8];
            }
        }
    }
    int mine;
    if constexpr (ROUNDED == WIDTH) {
        mine = exchange<WIDTH, SPLITS>(sum, own, units, tokens, mailbox, arrived);
    } else {  // 16 tokens are two tiles for four blocks
        float padded[ROUNDED / 2] = {};
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) padded[i] = sum[i];
        mine = exchange<ROUNDED, SPLITS>(padded, own, units, tokens, mailbox, arrived);
    }
    if (mine == 0) return;
    float2 square[TILES];
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        float squares[2] = {};
        if (live && i < mine) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                int token = (i * SPLITS + rank) * 8 + 2 * t + c % 2, at = token * rows + row + c / 2 * 8;
                float v = x[i][c] + own[4 * i + c] * r.factor;
                squares[c % 2] += v * v;
                if (token < tokens) {
                    r.x[at] = v;
                    r.scaled[at] = as_half(v * weight[c / 2] * powers[token]);
                }
            }
        }
        square[i] = make_float2(across(squares[0], false), across(squares[1], false));
    }
    together<GROUPS * 4, TILES * 8>(square, live, mine, parts, results, [&](const float* of) {
        float total = 0.0f;
        for (int u = 0; u < units; u++) total += of[u * TILES * 8];
        return total;
    });
    for (int i = threadIdx.x; i < mine * 8; i += GROUPS * 128) {
        int token = (i / 8 * SPLITS + rank) * 8 + i % 8;
        if (token < tokens) r.squares[range * MOST_TOKENS + token] = results[i];
    }
}

// Whole sums of a head: warp w, lane g has element 8 w + g and its partner i + 64. `factors` makes X its norm.
template <int WIDTH>
__device__ __forceinline__ void finish_heads(const float (&sum)[WIDTH / 2], const Heads& h, int head, int tokens, const float* factors, const int* slots,
                                             uint32_t mailbox, uint32_t arrived, float* parts, float* results) {
    constexpr int SPLITS = 2, TILES = WIDTH / 8 / SPLITS;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, element = threadIdx.x / 32 * 8 + g, rank = cluster_rank();
    bool query = head < h.heads, value = head >= h.heads + KV_HEADS;
    float weight[2] = {1.0f, 1.0f}, own[TILES * 4];
    float2 turn[TILES][2], most[TILES];
    auto token_of = [&](int i, int c) { return (i * SPLITS + rank) * 8 + 2 * t + c; };
    if (!value) {
        const float* from = query ? h.q_norm : h.k_norm;
        weight[0] = from[element], weight[1] = from[element + 64];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int c = 0; c < 2; c++) turn[i][c] = h.rotations[min(token_of(i, c), tokens - 1) * (HEAD / 2) + element];
        }
    }
    int mine = exchange<WIDTH, SPLITS>(sum, own, HEAD / UNIT, tokens, mailbox, arrived);
    if (mine == 0) return;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++) own[4 * i + c] *= factors[token_of(i, c % 2)];
    }
    if (!value) {
        float2 square[TILES];
#pragma unroll
        for (int i = 0; i < TILES; i++)
            square[i] = make_float2(across(own[4 * i] * own[4 * i] + own[4 * i + 2] * own[4 * i + 2], false),
                                    across(own[4 * i + 1] * own[4 * i + 1] + own[4 * i + 3] * own[4 * i + 3], false));
        together<8, TILES * 8>(square, true, mine, parts, results, [](const float* of) {
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < 8; w++) total += of[w * TILES * 8];
            return rsqrtf(total / HEAD + EPSILON);
        });
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float f = results[i * 8 + 2 * t + c], a = own[4 * i + c] * f * weight[0], b = own[4 * i + 2 + c] * f * weight[1];
                own[4 * i + c] = a * turn[i][c].x - b * turn[i][c].y;
                own[4 * i + 2 + c] = b * turn[i][c].x + a * turn[i][c].y;
            }
        }
    }
    if (!query && h.kv == KV_Q8_0) {
#pragma unroll
        for (int i = 0; i < TILES; i++)
            most[i] = make_float2(across(fmaxf(fabsf(own[4 * i]), fabsf(own[4 * i + 2])), true),
                                  across(fmaxf(fabsf(own[4 * i + 1]), fabsf(own[4 * i + 3])), true));
        together<8, TILES * 8>(most, true, mine, parts, results, [](const float* of) {
            float all = 0.0f;
#pragma unroll
            for (int w = 0; w < 8; w++) all = fmaxf(all, of[w * TILES * 8]);
            return all;
        });
    }
    Cache cache = value ? h.values : h.keys;
    int kv_head = (head - h.heads) % KV_HEADS;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            int token = token_of(i, c);
            if (token >= tokens) break;
            float low = own[4 * i + c], high = own[4 * i + 2 + c];
            if (query) {
                __half* to = h.q + (size_t(token) * h.heads + head) * HEAD + element;
                to[0] = __float2half_rn(low), to[64] = __float2half_rn(high);
                continue;
            }
            int slot = slots[token];
            size_t row = cache_row(slot / BLOCK, kv_head) + slot % BLOCK;
            if (h.kv == KV_BF16) {
                __half* to = reinterpret_cast<__half*>(cache.values) + row * HEAD + element;
                to[0] = __float2half_rn(as_bf16(low)), to[64] = __float2half_rn(as_bf16(high));
            } else {
                float scale = results[i * 8 + 2 * t + c] / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
                char* to = reinterpret_cast<char*>(cache.values) + row * HEAD + element;
                to[0] = __float2int_rn(low * inverse), to[64] = __float2int_rn(high * inverse);
                if (element == 0) cache.scales[row] = scale;
            }
        }
    }
}

template <int WIDTH>
__device__ __forceinline__ void finish_swiglu(const float (&sum)[WIDTH / 2], __half* out, int rows, int row, int tokens, const float* factors) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    out += row / 2 + g;
#pragma unroll
    for (int j = 0; j < WIDTH / 8; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            int token = 8 * j + 2 * t + c;
            float f = factors[token];
            if (token < tokens) out[token * (rows / 2)] = __float2half_rn(swiglu(sum[4 * j + c] * f, sum[4 * j + 2 + c] * f));
        }
    }
}

template <int WIDTH>
__device__ __forceinline__ void finish_store(const float (&sum)[WIDTH / 2], float* out, int rows, int row, int tokens) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    asm volatile("" : "+r"(rows));  // places are not worth registers while the products run
    out += row + g;
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) {
        int token = i / 4 * 8 + 2 * t + i % 2;
        if (token < tokens) out[size_t(token) * rows + i / 2 % 2 * 8] = sum[i];
    }
}

#endif
