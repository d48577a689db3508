// A tile of Q, K or V of many tokens on its way to where attention looks for it: the norm and rotation of its head, and the append of keys and
// values (sm_90a). The tile is one head's 128 rows x WIDTH tokens in the sums of two warpgroups: warp w of the eight holds elements 8 w + g in its rows g
// and their partners, 64 further, in its rows g + 8, so that a rotation never leaves its thread. Only what is said of a whole head, the
// sum of squares and the largest byte's scale, crosses the block.
#pragma once

#include "cluster.cuh"
#include "heads.cuh"

#if HOPPER

constexpr int PIECE_TOKENS = 32;  // that leave at once

template <int WIDTH>
struct HeadTile {
    static constexpr int PIECES = WIDTH / PIECE_TOKENS;
    static constexpr int PARTS = WIDTH + PIECES * 8;  // words of a warp's parts, without bank conflicts
    // Bytes of shared memory: two buffers of [2 halves of the head][32 tokens][32 elements] a warpgroup, then every warp's parts, then what they are together.
    static constexpr int BUFFER = 2 * PIECE_TOKENS * 64, PARTS_AT = 4 * BUFFER, TOTALS_AT = PARTS_AT + 8 * PARTS * 4, BYTES = TOTALS_AT + WIDTH * 4;

    const Heads& h;
    float (&sum)[WIDTH / 2];
    uint8_t* shared;
    int head, token0, tokens, lane, warp, group;

    __device__ __forceinline__ HeadTile(const Heads& h, float (&sum)[WIDTH / 2], uint8_t* shared, int head, int token0, int tokens)
        : h(h), sum(sum), shared(shared), head(head), token0(token0), tokens(tokens), lane(threadIdx.x % 32), warp(threadIdx.x / 32), group(threadIdx.x / 128) {}

    // The sum of the thread's token v, of those 8 (v / 2) + 2 t + v % 2, in its row g (0) or g + 8 (1).
    __device__ __forceinline__ float& at(int v, int row) { return sum[v / 2 * 4 + row * 2 + v % 2]; }
    __device__ __forceinline__ int token_of(int v) const { return v / 2 * 8 + lane % 4 * 2 + v % 2; }
    __device__ __forceinline__ int place(int token) const { return token + token / PIECE_TOKENS * 8; }
    __device__ __forceinline__ const float* totals() const { return reinterpret_cast<const float*>(shared + TOTALS_AT); }

    // Of 2 N values of this lane and of the one that differs in `MASK`, one keeps the first N sums, the other the rest.
    template <int N, int MASK, class Add>
    __device__ __forceinline__ void halve(float (&part)[8], Add add) {
        bool upper = lane & MASK;
#pragma unroll
        for (int v = 0; v < N; v++) {
            float given = upper ? part[v] : part[v + N], kept = upper ? part[v + N] : part[v];
            part[v] = add(kept, __shfl_xor_sync(0xffffffffu, given, MASK));
        }
    }

    // Puts together what all rows of the head say of each token, `of` the two elements of a thread, and leaves what `then` makes of it in `totals`.
    template <class Of, class Add, class Then>
    __device__ __forceinline__ void together(Of of, Add add, Then then) {
        float* parts = reinterpret_cast<float*>(shared + PARTS_AT);
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            float part[8];
#pragma unroll
            for (int v = 0; v < 8; v++) part[v] = of(at(piece * 8 + v, 0), at(piece * 8 + v, 1));
            // Over the lanes of one t, each of which keeps one of the tokens.
            halve<4, 16>(part, add);
            halve<2, 8>(part, add);
            halve<1, 4>(part, add);
            parts[warp * PARTS + place(token_of(piece * 8 + lane / 4))] = part[0];
        }
        asm volatile("bar.sync 1, 256;" ::: "memory");
        int token = threadIdx.x;
        if (token < WIDTH) {
            float total = parts[place(token)];
#pragma unroll
            for (int w = 1; w < 8; w++) total = add(total, parts[w * PARTS + place(token)]);
            reinterpret_cast<float*>(shared + TOTALS_AT)[token] = then(token, total);
        }
        asm volatile("bar.sync 1, 256;" ::: "memory");
    }

    __device__ __forceinline__ void rotate() {
        int element = warp * 8 + lane / 4;
        const float* norm = head < h.heads ? h.q_norm : h.k_norm;
        float weight[2] = {norm[element], norm[element + HEAD / 2]};
        float2 turn[2][8];
        auto fetch = [&](int piece) {
#pragma unroll
            for (int v = 0; v < 8; v++) {
                int token = min(token0 + token_of(piece * 8 + v), tokens - 1);
                turn[piece % 2][v] = h.rotations[size_t(token) * (HEAD / 2) + element];
            }
        };
        fetch(0);
        together([](float a, float b) { return a * a + b * b; }, [](float a, float b) { return a + b; },
                 [](int, float squares) { return rsqrtf(squares / HEAD + EPSILON); });
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            if (piece + 1 < PIECES) fetch(piece + 1);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                int v = piece * 8 + i;
                float factor = totals()[token_of(v)];
                float2 by = turn[piece % 2][i];
                float a = at(v, 0) * factor * weight[0], b = at(v, 1) * factor * weight[1];
                at(v, 0) = a * by.x - b * by.y;
                at(v, 1) = b * by.x + a * by.y;
            }
        }
    }

    // Elements as fp16, `as` what they are rounded to before; `to` is where a token's head goes. `buffers` takes turns, so that a
    // barrier a piece is enough: who writes a buffer has passed the barrier of the piece after the one that was in it.
    template <class As, class To>
    __device__ __forceinline__ void leave(int& buffers, As as, To to) {
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            if (token0 + piece * PIECE_TOKENS >= tokens) break;
            uint8_t* buffer = shared + (group * 2 + buffers) * BUFFER;
            buffers ^= 1;
#pragma unroll
            for (int row = 0; row < 2; row++) {
                uint32_t y[4];
#pragma unroll
                for (int i = 0; i < 4; i++) y[i] = pack(as(at(piece * 8 + 2 * i, row)), as(at(piece * 8 + 2 * i + 1, row)));
                uint32_t in = shared_address(buffer) + row * (BUFFER / 2) + lane * 64 + ((warp % 4 ^ (lane >> 1 & 3)) << 4);
                asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(in), "r"(y[0]), "r"(y[1]), "r"(y[2]), "r"(y[3])
                             : "memory");
            }
            asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
            int own = threadIdx.x % 128 / 4, part = threadIdx.x % 4;
            uint8_t* there = to(piece);
            if (token0 + piece * PIECE_TOKENS + own >= tokens) continue;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint8_t* from = buffer + half * (BUFFER / 2) + own * 64 + ((part ^ (own >> 1 & 3)) << 4);
                *reinterpret_cast<uint4*>(there + half * HEAD + group * 64 + part * 16) = *reinterpret_cast<const uint4*>(from);
            }
        }
    }

    // As bytes, whose scales are known.
    template <class To>
    __device__ __forceinline__ void leave_bytes(int& buffers, To to) {
        int g = lane / 4, odd = g % 2;
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++) {
            if (token0 + piece * PIECE_TOKENS >= tokens) break;
            uint8_t* buffer = shared + (group * 2 + buffers) * BUFFER;
            buffers ^= 1;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                int v = piece * 8 + i;
                float inverse = totals()[token_of(v)];
                int low = __float2int_rn(at(v, 0) * inverse), high = __float2int_rn(at(v, 1) * inverse);
                // Of two neighbours one takes both low elements, the other both high ones.
                int other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 4);
                uint32_t pair = odd ? (other & 255) | high << 8 : (low & 255) | other << 8;
                int token = token_of(v) - piece * PIECE_TOKENS;
                *reinterpret_cast<uint16_t*>(buffer + odd * (PIECE_TOKENS * 32) + token * 32 + warp % 4 * 8 + g - odd) = uint16_t(pair);
            }
            asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
            int own = threadIdx.x % 128 / 4, part = threadIdx.x % 4, half = part / 2;
            uint8_t* there = to(piece);
            if (token0 + piece * PIECE_TOKENS + own >= tokens) continue;
            const uint8_t* from = buffer + half * (PIECE_TOKENS * 32) + own * 32 + part % 2 * 16;
            *reinterpret_cast<uint4*>(there + half * (HEAD / 2) + group * 32 + part % 2 * 16) = *reinterpret_cast<const uint4*>(from);
        }
    }

    // The whole way. `slots` are those of the tokens that this thread's warp places in a warpgroup's pieces: lane l's of token 8 w + l % 8 of
    // piece l / 8, and of the piece four further; unused for queries.
    __device__ __forceinline__ void finish(int& buffers, const int (&slots)[2]) {
        bool query = head < h.heads, value = head >= h.heads + KV_HEADS;
        if (!value) rotate();
        if (query) {
            uint8_t* q = reinterpret_cast<uint8_t*>(h.q + (size_t(token0 + threadIdx.x % 128 / 4) * h.heads + head) * HEAD);
            return leave(buffers, [](float x) { return x; }, [&](int piece) { return q + size_t(piece) * PIECE_TOKENS * h.heads * (HEAD * 2); });
        }
        const Cache& cache = value ? h.values : h.keys;
        int kv_head = (head - h.heads) % KV_HEADS;
        auto row = [&](int slot) { return cache_row(slot / BLOCK, kv_head) + slot % BLOCK; };
        auto there = [&](int piece, int bytes) {
            return cache.values + row(__shfl_sync(0xffffffffu, slots[piece / 4], piece % 4 * 8 + lane / 4)) * bytes;
        };
        if (h.kv == KV_BF16) return leave(buffers, as_bf16, [&](int piece) { return there(piece, HEAD * 2); });
        together([](float a, float b) { return fmaxf(fabsf(a), fabsf(b)); }, [](float a, float b) { return fmaxf(a, b); },
                 [&](int token, float most) {
                     float scale = most / 127.0f;
                     if (token0 + token < tokens) cache.scales[row(cache_slot(h.step, token0 + token))] = scale;
                     return scale > 0.0f ? 1.0f / scale : 0.0f;
                 });
        leave_bytes(buffers, [&](int piece) { return there(piece, HEAD); });
    }
};

#endif
