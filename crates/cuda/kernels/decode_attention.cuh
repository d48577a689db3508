// The decode kernel's attention (decode.cuh): one KV head over a part of the context, and the merging of parts.
//
// A warp takes half a KV block, 16 positions, at a time. The query heads of the KV head are rows 0-7 of the A operand as
// their high fp16 parts, rows 8-15 as the low ones; keys and values are B. A slot of the ring holds a block's keys, then its
// values, lines of 128 bytes swizzled as they came: [dims 0-63, 64-127][32 positions] of fp16, or [32 positions] of
// bytes and then the scales of keys and of values.
#pragma once

#include "decode_product.cuh"

#if HOPPER

constexpr int HALF = BLOCK / 2;
constexpr float QUANT_SCALE = 1.0f / 16777216.0f;

// One KV head's part of the attention: which blocks of the context, and whether the last of them takes the new position,
// whose key and value arrive in the posted q, k, v and are appended to the cache.
struct Part {
    int head, first, units, position;
    bool tail;
    Cache keys, values;  // of the layer
    size_t row;          // the new position's head row in both
};

// What attention keeps in shared memory, where the vectors of the products lie in other phases.
template <int MATES>  // query heads of a KV head
struct AttentionMemory {
    float outputs[CONSUMERS][MATES][PARTIAL];
    __align__(16) __half queries[2][MATES][HEAD + 8];  // high and low parts, fp16 or bytes, apart by other banks
    __align__(16) __half fresh[2][HEAD];               // the new key and value: fp16, or bytes
    float fresh_scale[2], query_scale[MATES];          // of bytes
};

// bf16 rounding, kept as fp16; what fp16 cannot hold saturates.
__device__ __forceinline__ float cached(float x) {
    return fminf(fmaxf(__bfloat162float(__float2bfloat16_rn(x)), -65504.0f), 65504.0f);
}

// Norms, rotates and scales the queries, norms and rotates the new key, all into shared memory; appends key and value.
template <Kv KIND, int MATES>
__device__ __forceinline__ void prepare_heads(const Consumer& c, const Part& part, const Source& qkv, const float* q_norm,
                                              const float* k_norm, bool alone, AttentionMemory<MATES>& m) {
    constexpr int group = MATES;
    const float4 rotation = reinterpret_cast<const float4*>(c.rotations)[c.lane];  // cos, sin of two pairs
    float2 na, nb;
    auto fetch_norm = [&](int i) {
        const float2* norm = reinterpret_cast<const float2*>(i < group ? q_norm : k_norm) + c.lane;
        na = __ldg(norm), nb = __ldg(norm + 32);
    };
    fetch_norm(c.warp);
    // Few blocks look at the words of a context of one part, so they need not be told when it is worth it; of the warps, all must have
    // left the memory that `m` lies in.
    if (alone) c.sync();
    else c.await(qkv.counter, qkv.arrivals);
#pragma unroll 1
    for (int i = c.warp; i < group + 2; i += CONSUMERS) {
        const float* from = qkv.posted + (i < group ? part.head * group + i : (MATES + i - group) * KV_HEADS + part.head) * HEAD;
        const uint32_t tag = qkv.tag;
        float2 a, b;
        if (i != c.warp) fetch_norm(i);
        Patience patience;
        for (;;) {
            load_posted(a, from + 2 * c.lane), load_posted(b, from + 64 + 2 * c.lane);
            if (tagged(a, tag) && tagged(b, tag)) break;
            patience.spend();
        }
        __syncwarp();
        if (i <= group) {
            float r = rsqrtf(warp_sum((a.x * a.x + a.y * a.y) + (b.x * b.x + b.y * b.y)) / HEAD + EPSILON);
            a.x *= r * na.x, a.y *= r * na.y, b.x *= r * nb.x, b.y *= r * nb.y;
            float2 ra = make_float2(a.x * rotation.x - b.x * rotation.y, a.y * rotation.z - b.y * rotation.w);
            float2 rb = make_float2(b.x * rotation.x + a.x * rotation.y, b.y * rotation.z + a.y * rotation.w);
            a = ra, b = rb;
        }
        if (i < group) {
            constexpr float SCALE = 0.08838834764831845f * 1.4426950408889634f;  // exp(x / sqrt(128)) as a power of two
            const float4 q = make_float4(a.x * SCALE, a.y * SCALE, b.x * SCALE, b.y * SCALE);
            if constexpr (KIND == KV_BF16) {
                auto* high = reinterpret_cast<uint32_t*>(m.queries[0][i]) + c.lane;
                auto* low = reinterpret_cast<uint32_t*>(m.queries[1][i]) + c.lane;
                split(q.x, q.y, high[0], low[0]), split(q.z, q.w, high[32], low[32]);
            } else {
                auto* high = reinterpret_cast<uint16_t*>(m.queries[0][i]) + c.lane;
                auto* low = reinterpret_cast<uint16_t*>(m.queries[1][i]) + c.lane;
                const float most = __uint_as_float(__reduce_max_sync(0xffffffffu, magnitude(q)));
                uint32_t h, l;
                fixed_point(q, __fdividef(LARGEST, most), h, l);
                high[0] = h, high[32] = h >> 16, low[0] = l, low[32] = l >> 16;
                if (c.lane == 0) m.query_scale[i] = most * (1 / LARGEST);
            }
            continue;
        }
        const int which = i - group;
        uint8_t* const values = which ? part.values.values : part.keys.values;
        if constexpr (KIND == KV_BF16) {
            auto* to = reinterpret_cast<uint32_t*>(m.fresh[which]) + c.lane;
            to[0] = pack(cached(a.x), cached(a.y)), to[32] = pack(cached(b.x), cached(b.y));
            if (part.tail) {
                auto* cell = reinterpret_cast<uint32_t*>(values) + part.row * (HEAD / 2) + c.lane;
                cell[0] = to[0], cell[32] = to[32];
            }
        } else {
            float most = warp_max(fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y))));
            float scale = most / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
            auto* to = reinterpret_cast<char2*>(m.fresh[which]) + c.lane;
            to[0] = make_char2(__float2int_rn(a.x * inverse), __float2int_rn(a.y * inverse));
            to[32] = make_char2(__float2int_rn(b.x * inverse), __float2int_rn(b.y * inverse));
            if (c.lane == 0) m.fresh_scale[which] = scale;
            if (part.tail) {
                auto* cell = reinterpret_cast<char2*>(values) + part.row * (HEAD / 2) + c.lane;
                cell[0] = to[0], cell[32] = to[32];
                if (c.lane == 0) (which ? part.values.scales : part.keys.scales)[part.row] = scale;
            }
        }
    }
}

// Shared address of a 16-byte piece of a position's keys or values.
template <Kv KIND>
__device__ __forceinline__ uint32_t piece_at(uint32_t rows, int position, int piece) {
    return rows + (KIND == KV_BF16 ? piece / 8 * (BLOCK * LINE) : 0) + position * LINE + (((piece ^ position) & 7) << 4);
}

// Completes a block in shared memory with the newest position: its key and value, and, for fp16, zeros for the values
// after it in its half, which nobody may have written yet.
template <Kv KIND, class Memory>
__device__ __forceinline__ void complete_half(const Consumer& c, uint32_t keys, int newest, const Memory& m) {
    constexpr int PIECES = KIND == KV_BF16 ? 16 : 8;
    const uint32_t values = keys + rows_bytes(KIND);
    if constexpr (KIND == KV_BF16)
#pragma unroll
        for (int i = 0; i < HALF; i += 32 / PIECES) {
            const int position = newest + 1 + c.lane / PIECES + i;
            if (position / HALF == newest / HALF)
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(piece_at<KIND>(values, position, c.lane % PIECES)), "r"(0)
                             : "memory");
        }
    if (c.lane < 2 * PIECES) {
        uint4 v = reinterpret_cast<const uint4*>(m.fresh[c.lane / PIECES])[c.lane % PIECES];
        uint32_t to = piece_at<KIND>(c.lane < PIECES ? keys : values, newest, c.lane % PIECES);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
    }
    if (KIND == KV_Q8_0 && c.lane < 2)
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(values + rows_bytes(KIND) + (c.lane * BLOCK + newest) * 4),
                     "f"(m.fresh_scale[c.lane])
                     : "memory");
    __syncwarp();
}

__device__ __forceinline__ float2 load_pair(uint32_t at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A warp's running attention output, of the heads in rows lane / 4; high and low parts are added at the end. fp16: tile d
// holds dims 8 d + 2 t and the next; bytes: tiles 2 d and 2 d + 1 hold dims 16 d + 4 t, + 2 and 16 d + 4 t + 1, + 3.
template <Kv KIND>
struct Running {
    float o[HEAD / 8][4] = {};
    float highest = -INFINITY, total = 0;  // over the columns of the lane's quad
    // Values of bytes come as subnormal fp16 of 128 more, which the weights so far tell how often.
    float weight = 0;
    static constexpr int QUERIES = KIND == KV_BF16 ? HEAD / 16 : HEAD / 32;  // operands

    // The queries as A operands of 32 bytes a row, whose other rows repeat the heads.
    template <int MATES>
    __device__ __forceinline__ void load_queries(uint32_t (&q)[QUERIES][4], const AttentionMemory<MATES>& m, int lane) {
        const uint32_t at = shared_address(m.queries[lane / 8 % 2][lane % 8 % MATES]) + lane / 16 * 16;
#pragma unroll
        for (int k = 0; k < QUERIES; k++) ldmatrix(q[k], at + k * 32);
    }

    // Adds positions `half` * 16 and on of a block, `valid` of them.
    __device__ __forceinline__ void add_half(const uint32_t (&q)[QUERIES][4], float query_scale, uint32_t keys, int half, int valid, int lane) {
        const uint32_t values = keys + rows_bytes(KIND), scales = values + rows_bytes(KIND);
        const int t = lane % 4;
        // A lane's first piece of the keys and of the values. Others differ by an exclusive or of the bits that are swizzled, and by
        // whole lines.
        const uint32_t key = piece_at<KIND>(keys, half * HALF + lane % 8, lane / 8);
        const uint32_t value = piece_at<KIND>(values, half * HALF + lane / 8 % 2 * 8 + lane % 8, lane / 16);
        float s[2][4] = {};
#pragma unroll
        for (int n = 0; n < 2; n++) {
            uint32_t b[4];
            if constexpr (KIND == KV_BF16) {
                float u[4] = {};
#pragma unroll
                for (int k = 0; k < HEAD / 32; k++) {
                    ldmatrix(b, (key ^ (k % 2 * 64)) + k / 2 * (BLOCK * LINE) + n * GROUP);
                    mma_next(s[n], q[2 * k][0], q[2 * k][1], q[2 * k][2], q[2 * k][3], b[0], b[1]);
                    mma_next(u, q[2 * k + 1][0], q[2 * k + 1][1], q[2 * k + 1][2], q[2 * k + 1][3], b[2], b[3]);
                }
#pragma unroll
                for (int j = 0; j < 2; j++) s[n][j] = (s[n][j] + s[n][j + 2]) + (u[j] + u[j + 2]);
            } else {
                int d[2][4] = {};
#pragma unroll
                for (int k = 0; k < HEAD / 64; k++) {
                    ldmatrix(b, (key ^ (k * 64)) + n * GROUP);
                    mma_signed(d[0], q[2 * k], b[0], b[1]), mma_signed(d[1], q[2 * k + 1], b[2], b[3]);
                }
#pragma unroll
                for (int j = 0; j < 2; j++) s[n][j] = __int2float_rn((d[0][j] + d[1][j]) * 256 + (d[0][j + 2] + d[1][j + 2]));
            }
        }
        float top = highest;
        float2 value_scale[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int column = n * 8 + t * 2;
            float2 key_scale = make_float2(1, 1);
            if constexpr (KIND == KV_Q8_0) {
                key_scale = load_pair(scales + (half * HALF + column) * 4);
                key_scale.x *= query_scale, key_scale.y *= query_scale;
                value_scale[n] = load_pair(scales + (BLOCK + half * HALF + column) * 4);
                // What lies after the newest position may be no number.
                if (column >= valid) value_scale[n].x = 0;
                if (column + 1 >= valid) value_scale[n].y = 0;
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float v = s[n][j] * (j ? key_scale.y : key_scale.x);
                s[n][j] = column + j < valid ? v : -INFINITY;
                top = fmaxf(top, s[n][j]);
            }
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        const float rescale = power_of_two(highest - top);
        highest = top;
        total *= rescale, weight *= rescale;
        uint32_t p[2][2];  // high and low parts
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float p0 = power_of_two(s[n][0] - top), p1 = power_of_two(s[n][1] - top);
            total += p0 + p1;
            if constexpr (KIND == KV_Q8_0) p0 *= value_scale[n].x, p1 *= value_scale[n].y;
            split(p0, p1, p[n][0], p[n][1]);
            if constexpr (KIND == KV_Q8_0) {  // what is multiplied, not what was rounded to it: 128 times the difference would stay
                const float2 high = __half22float2(halves(p[n][0])), low = __half22float2(halves(p[n][1]));
                weight += (high.x + low.x) + (high.y + low.y);
            }
        }
        if (__any_sync(0xffffffffu, rescale != 1.0f))
#pragma unroll
            for (int d = 0; d < HEAD / 8; d++)
#pragma unroll
                for (int j = 0; j < 4; j++) o[d][j] *= rescale;
#pragma unroll
        for (int d = 0; d < HEAD / 16; d++) {
            uint32_t b[4];
            if constexpr (KIND == KV_BF16) {
                ldmatrix_transposed(b, (value ^ (d % 4 * 32)) + d / 4 * (BLOCK * LINE));
                mma_next(o[2 * d], p[0][0], p[0][1], p[1][0], p[1][1], b[0], b[1]);
                mma_next(o[2 * d + 1], p[0][0], p[0][1], p[1][0], p[1][1], b[2], b[3]);
            } else if (d % 2 == 0) {
                // Halves of two dims each: positions 2 t, 2 t + 1 of dims 2 g, 2 g + 1 of pieces d and d + 1.
                ldmatrix_transposed(b, value ^ (d * 16));
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    uint32_t low = b[2 * i] ^ 0x80808080, high = b[2 * i + 1] ^ 0x80808080;
                    mma_next(o[2 * (d + i)], p[0][0], p[0][1], p[1][0], p[1][1], byte_pair(low, 0x4240), byte_pair(high, 0x4240));
                    mma_next(o[2 * (d + i) + 1], p[0][0], p[0][1], p[1][0], p[1][1], byte_pair(low, 0x4341), byte_pair(high, 0x4341));
                }
            }
        }
    }

    // Two bytes as subnormal fp16.
    static __device__ __forceinline__ uint32_t byte_pair(uint32_t word, uint32_t which) { return __byte_perm(word, 0, which); }

    // The warp's output for the rows that are heads.
    template <int MATES>
    __device__ __forceinline__ void store(float (&to)[MATES][PARTIAL], int lane) {
        const int g = lane / 4, t = lane % 4;
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        weight += __shfl_xor_sync(0xffffffffu, weight, 1);
        weight += __shfl_xor_sync(0xffffffffu, weight, 2);
        if (g >= MATES) return;
#pragma unroll
        for (int d = 0; d < HEAD / 16; d++) {
            float a0 = o[2 * d][0] + o[2 * d][2], a1 = o[2 * d][1] + o[2 * d][3];
            float b0 = o[2 * d + 1][0] + o[2 * d + 1][2], b1 = o[2 * d + 1][1] + o[2 * d + 1][3];
            if constexpr (KIND == KV_BF16) {
                *reinterpret_cast<float2*>(to[g] + d * 16 + t * 2) = make_float2(a0, a1);
                *reinterpret_cast<float2*>(to[g] + d * 16 + 8 + t * 2) = make_float2(b0, b1);
            } else {
                auto value = [&](float v) { return v * (1 / QUANT_SCALE) - 128 * weight; };
                *reinterpret_cast<float4*>(to[g] + d * 16 + t * 4) = make_float4(value(a0), value(b0), value(a1), value(b1));
            }
        }
        if (t == 0) to[g][HEAD] = highest, to[g][HEAD + 1] = total;
    }
};

// One part of a KV head's attention. Posts the head's output where the context has one part, else the part's unscaled
// outputs, maxima and sums, [query head][CONTEXT_PARTS][PARTIAL].
template <class M, Kv KIND>
__device__ __forceinline__ void attend(Consumer& c, const DecodeArgs& args, const Part& part, const Source& qkv, int split, bool alone,
                                       const float* q_norm, const float* k_norm, uint32_t* counter) {
    const uint32_t tag = qkv.tag;
    constexpr int group = M::MATES;
    const int shared_lane = c.lane;
    c.lane = here(c.lane);
    auto& m = *reinterpret_cast<AttentionMemory<group>*>(c.vector);
    prepare_heads<KIND>(c, part, qkv, q_norm, k_norm, alone, m);
    c.sync();
    Running<KIND> running;
    uint32_t q[running.QUERIES][4];
    running.load_queries(q, m, c.lane);
    const float query_scale = KIND == KV_BF16 ? 1 : m.query_scale[c.lane / 4 % group];

    // Each pair of warps takes one block of every TURN, and waits for the others too before it gives them back: a warp that let a
    // slot's whole turn pass could not tell it from the next.
    constexpr int TURN = CONSUMERS / 2;
    for (int first = 0; first < part.units; first += TURN) {
        const int count = min(TURN, part.units - first), mine = c.warp / 2, half = c.warp % 2;
        const Ring these = c.ring;
        uint32_t block = 0;
        for (int i = 0; i < count; i++, c.ring.advance(cache_slot(KIND)))
            if (const uint32_t data = c.ring.data(cache_slot(KIND)); i == mine) block = data;
        const int newest = part.position - (part.first + first + mine) * BLOCK, valid = min(HALF, newest + 1 - half * HALF);
        if (mine < count && valid > 0) {
            these.ahead(mine).wait_full();
            const bool fresh = part.tail && newest / HALF == half;
            if (fresh) complete_half<KIND>(c, block, newest, m);
            running.add_half(q, query_scale, block, half, valid, c.lane);
            if (fresh) fence_bulk();  // the slot was written to: before the producer fills it again
        }
        if (c.lane < count) these.ahead(c.lane).wait_full();
        __syncwarp();
        if (c.lane < count) these.ahead(c.lane).release();
    }
    running.store(m.outputs[c.warp], c.lane);
    c.sync();

    // The warps' outputs together, in warp order, two channels a thread.
#pragma unroll 1
    for (int i = 2 * threadIdx.x; i < group * HEAD; i += 2 * CONSUMERS * 32) {
        const int g = i / HEAD, channel = i % HEAD;
        float top = -INFINITY, sum = 0;
        float2 value = make_float2(0, 0);
#pragma unroll
        for (int w = 0; w < CONSUMERS; w++) top = fmaxf(top, m.outputs[w][g][HEAD]);
#pragma unroll
        for (int w = 0; w < CONSUMERS; w++) {
            const float scale = power_of_two(m.outputs[w][g][HEAD] - top);
            const float2 v = *reinterpret_cast<const float2*>(m.outputs[w][g] + channel);
            sum += scale * m.outputs[w][g][HEAD + 1];
            value.x += scale * v.x, value.y += scale * v.y;
        }
        if (alone) {
            post_pair(args.scratch + args.attention + (part.head * group * HEAD + i) / 2, __fdividef(value.x, sum),
                      __fdividef(value.y, sum), tag);
        } else {
            float* const to = args.scratch + args.parts + ((part.head * group + g) * CONTEXT_PARTS + split) * PARTIAL;
            post(to + channel, value.x, tag), post(to + channel + 1, value.y, tag);
            if (channel == 0) post(to + HEAD, top, tag), post(to + HEAD + 1, sum, tag);
        }
    }
    __syncwarp();
    if (c.lane == 0) count(counter);
    c.lane = shared_lane;
}

// Merges the parts of one query head and posts its output.
__device__ __forceinline__ void merge(const Consumer& c, const DecodeArgs& args, int head, int splits, uint32_t tag, uint32_t* counter) {
    const float* parts = args.scratch + args.parts + head * CONTEXT_PARTS * PARTIAL;
    const int half = threadIdx.x / HEAD, d = threadIdx.x % HEAD;  // the thread adds every other part of one channel
    float value[CONTEXT_PARTS / 2];
    float2 scale[CONTEXT_PARTS];  // maximum, sum
    Patience patience;
    for (bool again = true; again;) {
        again = false;
#pragma unroll
        for (int s = 0; s < CONTEXT_PARTS; s++)
            if (s < splits) load_posted(scale[s], parts + s * PARTIAL + HEAD);
#pragma unroll
        for (int s = 0; s < CONTEXT_PARTS / 2; s++)
            if (2 * s + half < splits) load_posted(value[s], parts + (2 * s + half) * PARTIAL + d);
#pragma unroll
        for (int s = 0; s < CONTEXT_PARTS; s++) again |= s < splits && !tagged(scale[s], tag);
#pragma unroll
        for (int s = 0; s < CONTEXT_PARTS / 2; s++) again |= 2 * s + half < splits && !tagged(value[s], tag);
        patience.spend();
    }
    __syncwarp();
    float highest = -INFINITY, total = 0, result = 0;
#pragma unroll
    for (int s = 0; s < CONTEXT_PARTS; s++)
        if (s < splits) highest = fmaxf(highest, scale[s].x);
#pragma unroll
    for (int s = 0; s < CONTEXT_PARTS; s++)
        if (s < splits) {
            float f = power_of_two(scale[s].x - highest);
            total += f * scale[s].y;
            if (s % 2 == half) result += f * value[s / 2];
        }
    c.sums[half * HEAD + d] = __fdividef(result, total);
    c.sync();
    c.publish<true>(HEAD, args.scratch + args.attention + head * HEAD / 2, tag, counter,
              [&](int i) { return c.sums[i] + c.sums[HEAD + i]; });
}

#endif
