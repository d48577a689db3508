// The persistent decode kernel's attention: one KV head over a part of the context, and the merging of parts.

#pragma once

#include "hopper_decode_product.cuh"

namespace hopper {

// Where channel `d` of position `p` lies in a panel of keys or values, in elements.
__device__ __forceinline__ int in_panel(int p, int d) { return ((p / 8) * (HEAD / 8) + d / 8) * 64 + (p % 8) * 8 + d % 8; }

// One KV head's part of the attention: which blocks of the context, and whether the last of them takes the new
// position, whose key and value arrive in the posted q, k, v and are appended to `cache`.
struct Part {
    int head, first, units, position;
    bool tail;
    bf16* cache;  // the head's tile in the new position's block
};

// Norms, rotates and scales the queries, norms and rotates the new key, all into shared memory.
template <class S>
__device__ __forceinline__ void prepare_heads(const Consumer& c, const Part& part, const float* qkv, uint32_t tag, const float* q_norm,
                                              const float* k_norm, float4 rotation, bf16* queries, bf16* fresh) {
    constexpr int G = S::GROUP;
    for (int i = c.warp; i < G + 2; i += CONSUMERS) {
        const float* from = i < G ? qkv + (part.head * G + i) * HEAD : qkv + S::Q + ((i - G) * KV_HEADS + part.head) * HEAD;
        const float2* norm = reinterpret_cast<const float2*>(i < G ? q_norm : k_norm);
        float2 na = norm[c.lane], nb = norm[c.lane + 32], a, b;
        do load_posted(a, from + 2 * c.lane), load_posted(b, from + 64 + 2 * c.lane);
        while (!tagged(a, tag) || !tagged(b, tag));
        __syncwarp();
        if (i <= G) {
            float r = rsqrtf(warp_sum(a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y) / HEAD + EPSILON);
            a.x *= r * na.x, a.y *= r * na.y, b.x *= r * nb.x, b.y *= r * nb.y;
            float2 ra = make_float2(a.x * rotation.x - b.x * rotation.y, a.y * rotation.z - b.y * rotation.w);
            float2 rb = make_float2(b.x * rotation.x + a.x * rotation.y, b.y * rotation.z + a.y * rotation.w);
            a = ra, b = rb;
        }
        if (i < G) {
            constexpr float SCALE = 0.08838834764831845f * 1.4426950408889634f;  // exp(x / sqrt(128)) as a power of two
            auto* high = reinterpret_cast<uint32_t*>(queries + i * HEAD) + c.lane;
            auto* low = reinterpret_cast<uint32_t*>(queries + (G + i) * HEAD) + c.lane;
            split(a.x * SCALE, a.y * SCALE, high[0], low[0]);
            split(b.x * SCALE, b.y * SCALE, high[32], low[32]);
        } else {
            auto* to = reinterpret_cast<uint32_t*>(fresh + (i - G) * HEAD) + c.lane;
            to[0] = pack(a.x, a.y), to[32] = pack(b.x, b.y);
            if (part.tail) {
                bf16* cell = part.cache + (i - G) * BLOCK * HEAD + in_panel(part.position % BLOCK, 2 * c.lane);
                *reinterpret_cast<uint32_t*>(cell) = to[0];
                *reinterpret_cast<uint32_t*>(cell + 8 * 64) = to[32];
            }
        }
    }
}

// A warp takes half a KV block: 16 positions, of which `valid` exist, the last of them perhaps the new one.
constexpr int HALF = BLOCK / 2;

// Completes the half with the new position in shared memory: its key and value, and zeros for the values after it,
// which nobody may have written yet.
__device__ __forceinline__ void complete_half(const Consumer& c, uint32_t keys, uint32_t values, int valid, const bf16* fresh) {
#pragma unroll
    for (int j = 0; j < HALF * HEAD / 256; j++) {
        int cell = c.lane + 32 * j;  // 16 bytes: position cell / 128 * 8 + cell % 8
        if (cell / 128 * 8 + cell % 8 >= valid)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(values + cell * 16), "r"(0) : "memory");
    }
    uint4 v = reinterpret_cast<const uint4*>(fresh)[c.lane];  // the key's and the value's 16 cells
    uint32_t to = (c.lane < 16 ? keys : values) + in_panel(valid - 1, c.lane % 16 * 8) * 2;
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
    __syncwarp();
}

// A warp's running attention output: row l / 4 of a tile is a query head; its high and low parts are added at the end.
struct Running {
    float o[HEAD / 8][4] = {};
    float highest = -INFINITY, total = 0;  // of the lane's row, over the columns of its quad

    __device__ __forceinline__ void add_half(const Consumer& c, const uint32_t (&q)[HEAD / 16][4], uint32_t keys, uint32_t values, int valid) {
        float s[2][4] = {}, t[2][4] = {};
#pragma unroll
        for (int k = 0; k < HEAD / 32; k++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                uint32_t b[4];
                load_tiles(b, keys + (n * (HEAD / 8) + k * 4) * 128 + c.lane * 16);
                multiply(s[n], q[2 * k][0], q[2 * k][1], q[2 * k][2], q[2 * k][3], b[0], b[1]);
                multiply(t[n], q[2 * k + 1][0], q[2 * k + 1][1], q[2 * k + 1][2], q[2 * k + 1][3], b[2], b[3]);
            }
        float top = highest;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float v = (s[n][j] + s[n][j + 2]) + (t[n][j] + t[n][j + 2]);
                s[n][j] = n * 8 + (c.lane % 4) * 2 + j < valid ? v : -INFINITY;
                top = fmaxf(top, s[n][j]);
            }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        float rescale = exp2_fast(highest - top);
        highest = top;
        total *= rescale;
        uint32_t p[2][2];  // high and low parts
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float p0 = exp2_fast(s[n][0] - top), p1 = exp2_fast(s[n][1] - top);
            total += p0 + p1;
            split(p0, p1, p[n][0], p[n][1]);
        }
#pragma unroll
        for (int d = 0; d < HEAD / 8; d++)
            for (int j = 0; j < 4; j++) o[d][j] *= rescale;
        int m = c.lane / 8;
#pragma unroll
        for (int d = 0; d < HEAD / 16; d++) {
            uint32_t b[4];
            load_tiles_transposed(b, values + (m % 2 * (HEAD / 8) + 2 * d + m / 2) * 128 + c.lane % 8 * 16);
            multiply(o[2 * d], p[0][0], p[0][1], p[1][0], p[1][1], b[0], b[1]);
            multiply(o[2 * d + 1], p[0][0], p[0][1], p[1][0], p[1][1], b[2], b[3]);
        }
    }
};

// One part of a KV head's attention. Posts the head's output where the context has one part, else the part's
// unscaled outputs, maxima and sums, [query head][SPLITS][PARTIAL].
template <class S>
__device__ __forceinline__ void attend(Consumer& c, const Part& part, const float* qkv, uint32_t tag, const float* q_norm, const float* k_norm,
                                       float4 rotation, bool alone, float* attention, float* parts, uint32_t* counter) {
    constexpr int G = S::GROUP;
    float* outputs = c.vector;                                              // [CONSUMERS][G][PARTIAL]
    bf16* queries = reinterpret_cast<bf16*>(outputs + CONSUMERS * G * PARTIAL);  // [high, low][G][128]
    bf16* fresh = queries + 2 * G * HEAD;                                   // the new key and value
    c.sync();
    prepare_heads<S>(c, part, qkv, tag, q_norm, k_norm, rotation, queries, fresh);
    c.sync();

    // Query tiles: rows 0-7 the heads' high parts, rows 8-15 the low ones; unused rows repeat the heads.
    uint32_t q[HEAD / 16][4];
    int m = c.lane / 8;
    uint32_t at = shared_address(queries) + ((m % 2) * G + c.lane % 8 % G) * HEAD * 2 + (m / 2) * 16;
#pragma unroll
    for (int k = 0; k < HEAD / 16; k++) load_tiles(q[k], at + k * 32);

    Running running;
    for (int u = 0; u < part.units; u++, c.ring.advance()) {
        c.ring.wait_full();  // everybody: a warp that let a whole turn pass could not tell it from the next
        if (u % (CONSUMERS / 2) != c.warp / 2) continue;
        const int half = c.warp % 2;
        uint32_t keys = c.ring.data() + half * HALF * HEAD * 2, values = keys + KV_TILE / 2;
        int valid = min(HALF, part.position + 1 - (part.first + u) * BLOCK - half * HALF);
        if (valid > 0) {
            const bool newest = part.tail && (part.first + u) * BLOCK + half * HALF + valid == part.position + 1;
            if (newest) complete_half(c, keys, values, valid, fresh);
            running.add_half(c, q, keys, values, valid);
            if (newest) fence_bulk();  // the slot was written to: before the producer fills it again
        }
        __syncwarp();
        if (c.lane == 0) c.ring.release(CONSUMERS / 2);
    }

    float total = running.total;
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    int row = c.lane / 4;
    if (row < G) {
        float* mine = outputs + (c.warp * G + row) * PARTIAL;
#pragma unroll
        for (int d = 0; d < HEAD / 8; d++)
            *reinterpret_cast<float2*>(mine + d * 8 + (c.lane % 4) * 2) =
                make_float2(running.o[d][0] + running.o[d][2], running.o[d][1] + running.o[d][3]);
        if (c.lane % 4 == 0) mine[HEAD] = running.highest, mine[HEAD + 1] = total;
    }
    c.sync();

    // The warps' outputs together, in warp order.
    for (int i = threadIdx.x; i < G * HEAD; i += CONSUMERS * 32) {
        const float* column = outputs + (i / HEAD) * PARTIAL;
        float top = -INFINITY, sum = 0, value = 0;
#pragma unroll
        for (int w = 0; w < CONSUMERS; w++) top = fmaxf(top, column[w * G * PARTIAL + HEAD]);
#pragma unroll
        for (int w = 0; w < CONSUMERS; w++) {
            float scale = exp2_fast(column[w * G * PARTIAL + HEAD] - top);
            sum += scale * column[w * G * PARTIAL + HEAD + 1];
            value += scale * column[w * G * PARTIAL + i % HEAD];
        }
        if (alone) {
            c.out[i] = tag_word(__fdividef(value, sum), tag);
        } else {
            float* to = c.out + (i / HEAD) * PARTIAL;
            to[i % HEAD] = tag_word(value, tag);
            if (i % HEAD == 0) to[HEAD] = tag_word(top, tag), to[HEAD + 1] = tag_word(sum, tag);
        }
    }
    fence_bulk();
    c.sync();
    if (threadIdx.x == 0) {
        if (alone)
            bulk_store(attention + part.head * G * HEAD, c.out, G * HEAD * 4);
        else
            for (int g = 0; g < G; g++) bulk_store(parts + (part.head * G + g) * SPLITS * PARTIAL, c.out + g * PARTIAL, PARTIAL * 4);
        bulk_store_wait();
        count(counter);
    }
    __syncwarp();
}

// Merges the parts of one query head, [SPLITS][PARTIAL], and posts its output.
__device__ __forceinline__ void merge(const Consumer& c, const float* parts, int splits, float* to, uint32_t tag, uint32_t* counter) {
    int half = threadIdx.x / HEAD, d = threadIdx.x % HEAD;  // the thread adds every other part of one channel
    float value[SPLITS / 2];
    float2 scale[SPLITS];  // maximum, sum
    bool again;
    do {
        again = false;
#pragma unroll
        for (int s = 0; s < SPLITS; s++)
            if (s < splits) load_posted(scale[s], parts + s * PARTIAL + HEAD);
#pragma unroll
        for (int s = 0; s < SPLITS / 2; s++)
            if (2 * s + half < splits) load_posted(value[s], parts + (2 * s + half) * PARTIAL + d);
#pragma unroll
        for (int s = 0; s < SPLITS; s++) again |= s < splits && !tagged(scale[s], tag);
#pragma unroll
        for (int s = 0; s < SPLITS / 2; s++) again |= 2 * s + half < splits && !tagged(value[s], tag);
    } while (again);
    __syncwarp();
    float highest = -INFINITY, total = 0, result = 0;
#pragma unroll
    for (int s = 0; s < SPLITS; s++)
        if (s < splits) highest = fmaxf(highest, scale[s].x);
#pragma unroll
    for (int s = 0; s < SPLITS; s++)
        if (s < splits) {
            float f = exp2_fast(scale[s].x - highest);
            total += f * scale[s].y;
            if (s % 2 == half) result += f * value[s / 2];
        }
    c.sums[half * HEAD + d] = __fdividef(result, total);
    c.sync();
    if (c.warp != 0) return;
    for (int i = c.lane; i < HEAD; i += 32) c.out[i] = tag_word(c.sums[i] + c.sums[HEAD + i], tag);
    c.publish(to, HEAD * 4, counter);
}

}  // namespace hopper
