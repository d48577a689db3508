// The decode kernel's attention (decode.cuh): one KV head over a part of the context, and the merging of parts.
//
// The warps take a turn of KV blocks at a time, four of fp16 or eight of bytes. Each scores its part of the positions, and after they have
// agreed on the largest score, each adds the values of all positions for 16 channels, so that no warp's output must be added to
// another's. The query heads of the KV head are rows 0-7 of the A operand as their high fp16 parts, rows 8-15 as the low ones; keys and values are B. A slot of the ring holds a
// block's keys, then its values, lines of 128 bytes swizzled as they came: [dims 0-63, 64-127][32 positions] of fp16; or two blocks of
// [32 positions] of bytes and then the scales of keys and of values.
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

constexpr int TURN_SLOTS = 4;
constexpr int TURN_POSITIONS = TURN_SLOTS * slot_blocks(KV_Q8_0) * BLOCK;  // at most

// What attention keeps in shared memory, where the vectors of the products lie in other phases. Rows of fp16 are apart by other banks.
template <int MATES>  // query heads of a KV head
struct AttentionMemory {
    __align__(16) __half queries[2][MATES][HEAD + 8];          // high and low parts, fp16 or bytes
    __align__(16) __half weights[2][MATES][TURN_POSITIONS + 8];  // of the positions of a turn
    __align__(16) __half fresh[2][HEAD];                       // the newest key and value: fp16, or bytes
    // By warp: the largest score, and the sums of exponentials and of the values' weights.
    __align__(16) float tops[MATES][CONSUMERS], totals[MATES][CONSUMERS], sums[MATES][CONSUMERS];
    float fresh_scale[2], query_scale[MATES];                  // of bytes
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

// Over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
    return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}
__device__ __forceinline__ float quad_sum(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

// What the warps have stored of a row, together.
template <class Both>
__device__ __forceinline__ float over_warps(const float (&of)[CONSUMERS], Both both) {
    const float4 a = reinterpret_cast<const float4*>(of)[0], b = reinterpret_cast<const float4*>(of)[1];
    return both(both(both(a.x, a.y), both(a.z, a.w)), both(both(b.x, b.y), both(b.z, b.w)));
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

// The queries as A operands of 32 bytes a row, whose other rows repeat the heads.
template <Kv KIND, int MATES>
struct Queries {
    static constexpr int OPERANDS = KIND == KV_BF16 ? HEAD / 16 : HEAD / 32;
    uint32_t q[OPERANDS][4];

    __device__ __forceinline__ void load(const AttentionMemory<MATES>& m, int lane) {
        const uint32_t at = shared_address(m.queries[lane / 8 % 2][lane % 8 % MATES]) + lane / 16 * 16;
#pragma unroll
        for (int k = 0; k < OPERANDS; k++) ldmatrix(q[k], at + k * 32);
    }

    // The scores of 16 positions of a block, from `half` * 16, of the head in row lane / 4: s[n] of columns 8 n + 2 t and the next. The
    // key of column `newest` is `fresh`, and of those after it, which are as good as any other. Bytes have the scales of keys and queries to come.
    __device__ __forceinline__ void score(uint32_t keys, int half, uint32_t fresh, int newest, int lane, float2 (&s)[2]) const {
        // A lane's first piece. Others differ by an exclusive or of the bits that are swizzled, and by whole lines.
        const uint32_t key = piece_at<KIND>(keys, half * HALF + lane % 8, lane / 8);
        fresh += lane / 8 * 16;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const bool slot = n * 8 + lane % 8 < newest;
            uint32_t b[HEAD / 32][4];
            if constexpr (KIND == KV_BF16) {
                float d[2][4] = {};
#pragma unroll
                for (int k = 0; k < HEAD / 32; k++) ldmatrix(b[k], slot ? (key ^ (k % 2 * 64)) + k / 2 * (BLOCK * LINE) + n * GROUP : fresh + k * 64);
#pragma unroll
                for (int k = 0; k < HEAD / 32; k++) {
                    mma_next(d[0], q[2 * k][0], q[2 * k][1], q[2 * k][2], q[2 * k][3], b[k][0], b[k][1]);
                    mma_next(d[1], q[2 * k + 1][0], q[2 * k + 1][1], q[2 * k + 1][2], q[2 * k + 1][3], b[k][2], b[k][3]);
                }
                s[n] = make_float2((d[0][0] + d[0][2]) + (d[1][0] + d[1][2]), (d[0][1] + d[0][3]) + (d[1][1] + d[1][3]));
            } else {
                int d[2][4] = {};
#pragma unroll
                for (int k = 0; k < HEAD / 64; k++) {
                    ldmatrix(b[k], slot ? (key ^ (k * 64)) + n * GROUP : fresh + k * 64);
                    mma_signed(d[0], q[2 * k], b[k][0], b[k][1]), mma_signed(d[1], q[2 * k + 1], b[k][2], b[k][3]);
                }
                auto integer = [&](int j) { return (d[0][j] + d[1][j]) * 256 + (d[0][j + 2] + d[1][j + 2]); };
                s[n] = make_float2(__int2float_rn(integer(0)), __int2float_rn(integer(1)));
            }
        }
    }
};

// The blocks of a turn: where they lie in the ring.
template <Kv KIND>
struct Turn {
    static constexpr int EACH = slot_blocks(KIND), BLOCKS = TURN_SLOTS * EACH, SLOT = cache_slot(KIND);
    Ring first;
    int slots, fit;  // how many there are, and how many lie before the ring begins anew

    // Takes the slots of up to BLOCKS of the `left` that are to come.
    __device__ __forceinline__ void take(Ring& ring, int left) {
        first = ring, slots = (max(min(BLOCKS, left), 0) + EACH - 1) / EACH, fit = (ring.bytes - ring.at) / SLOT;
        if (slots > 0) ring.at = place(slots - 1) + SLOT;
        ring.passed += slots;
    }

    // A block's keys, which its values follow, and their scales.
    __device__ __forceinline__ uint32_t block(int i) const { return first.data_at + place(i / EACH) + i % EACH * (2 * rows_bytes(KIND)); }
    __device__ __forceinline__ uint32_t scales(int i) const {
        return first.data_at + place(i / EACH) + slot_scales(KIND) + i % EACH * (2 * BLOCK * 4);
    }

private:
    __device__ __forceinline__ int place(int slot) const { return slot < fit ? first.at + slot * SLOT : (slot - fit) * SLOT; }
};

// Adds the values of four blocks of a turn, from `first` on, times their weights, for the warp's 16 channels; high and low parts are added at the end. From position
// `newest` on, whose weights are zero after it, the value is `fresh`. fp16: tile n holds channels 8 n + 2 t and the next; bytes: channels
// 4 t and 4 t + 2 of tile 0, 4 t + 1 and 4 t + 3 of tile 1.
template <Kv KIND>
__device__ __forceinline__ void add_values(float (&o)[2][4], uint32_t weights, const Turn<KIND>& turn, int first, uint32_t fresh, int newest, int warp, int lane) {
    constexpr int STEPS = 4 * BLOCK / HALF;
    uint32_t p[STEPS][4], b[STEPS][4];
#pragma unroll
    for (int j = 0; j < STEPS; j++) ldmatrix(p[j], weights + j * (HALF * 2));
    if constexpr (KIND == KV_BF16) {
        const uint32_t value = piece_at<KIND>(rows_bytes(KIND), lane % 16, 2 * warp + lane / 16);
        fresh += (2 * warp + lane / 16) * 16;
#pragma unroll
        for (int j = 0; j < STEPS; j++)
            ldmatrix_transposed(b[j], j * HALF + lane % 16 < newest ? turn.block(first + j / 2) + value + j % 2 * (HALF * LINE) : fresh);
    } else {
        const uint32_t value = piece_at<KIND>(rows_bytes(KIND), lane, warp);
        fresh += warp * 16;
        // Halves of two channels each, of positions 2 t, 2 t + 1 and 8 more; bytes of 128 more as subnormal fp16.
#pragma unroll
        for (int j = 0; j < STEPS; j += 2) {
            uint32_t v[4];
            ldmatrix_transposed(v, j * HALF + lane < newest ? turn.block(first + j / 2) + value : fresh);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                v[i] ^= 0x80808080;
                b[j + i / 2][i % 2] = __byte_perm(v[i], 0, 0x4240), b[j + i / 2][2 + i % 2] = __byte_perm(v[i], 0, 0x4341);
            }
        }
    }
    float next[2][4] = {};  // a second chain, which halves the latency
#pragma unroll
    for (int j = 0; j < STEPS; j++)
#pragma unroll
        for (int n = 0; n < 2; n++) mma_next(j % 2 ? next[n] : o[n], p[j][0], p[j][1], p[j][2], p[j][3], b[j][2 * n], b[j][2 * n + 1]);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) o[n][j] += next[n][j];
}

// One part of a KV head's attention. Posts the head's output where the context has one part, else the part's unscaled
// outputs, maxima and sums, [query head][CONTEXT_PARTS][PARTIAL].
template <class M, Kv KIND>
__device__ __forceinline__ void attend(Consumer& c, const DecodeArgs& args, const Part& part, const Source& qkv, int index, bool alone,
                                       const float* q_norm, const float* k_norm, uint32_t* counter) {
    constexpr int MATES = M::MATES;
    const int shared_lane = c.lane;
    c.lane = here(c.lane);
    auto& m = *reinterpret_cast<AttentionMemory<MATES>*>(c.vector);
    Turn<KIND> turn;
    constexpr int TURN = turn.BLOCKS, HALVES = TURN * BLOCK / HALF / CONSUMERS;  // of blocks, that a warp scores
    turn.take(c.ring, part.units);
    prepare_heads<KIND>(c, part, qkv, q_norm, k_norm, alone, m);
    c.sync();
    Queries<KIND, MATES> queries;
    queries.load(m, c.lane);
    const int row = c.lane / 4, mate = row % MATES, t = c.lane % 4;
    const float query_scale = KIND == KV_BF16 ? 1 : m.query_scale[mate];
    const float2 fresh_scale = KIND == KV_BF16 ? make_float2(1, 1) : make_float2(m.fresh_scale[0], m.fresh_scale[1]);
    const uint32_t weights = shared_address(m.weights[c.lane / 8 % 2][c.lane % 8 % MATES]) + c.lane / 16 * 16;
    const uint32_t fresh[2] = {shared_address(m.fresh[0]), shared_address(m.fresh[1])};
    float o[2][4] = {}, highest = -INFINITY, total = 0;
    float sum = 0;  // of the weights of bytes, which come as 128 more

    for (int first = 0; first < part.units; first += TURN) {
        // Positions of the turn whose keys and values lie in the ring: all but the newest.
        const int cached = min(part.position - (part.first + first) * BLOCK, min(TURN, part.units - first) * BLOCK);
        const bool tail = part.tail && first + TURN >= part.units;
        const int there = cached + tail, start = c.warp * HALVES * HALF;  // the warp's positions begin
        float2 s[HALVES][2], value_scale[HALVES][2] = {};
        float top = -INFINITY;
        if (start < there) {
            const uint32_t keys = turn.block(start / BLOCK);
            turn.first.ahead(start / BLOCK / turn.EACH).wait_full();
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                const int half = HALVES == 1 ? c.warp % 2 : h, newest = cached - start - h * HALF, valid = there - start - h * HALF;
                queries.score(keys, half, fresh[0], newest, c.lane, s[h]);
                const uint32_t scales = turn.scales(start / BLOCK) + half * (HALF * 4);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const int column = n * 8 + t * 2;
                    if constexpr (KIND == KV_Q8_0) {
                        float2 key_scale = load_pair(scales + column * 4);
                        value_scale[h][n] = load_pair(scales + (BLOCK + column) * 4);
                        // From the newest position on.
                        if (column >= newest) key_scale.x = fresh_scale.x, value_scale[h][n].x = fresh_scale.y;
                        if (column + 1 >= newest) key_scale.y = fresh_scale.x, value_scale[h][n].y = fresh_scale.y;
                        s[h][n].x *= key_scale.x * query_scale, s[h][n].y *= key_scale.y * query_scale;
                    }
                    if (column >= valid) s[h][n].x = -INFINITY;
                    if (column + 1 >= valid) s[h][n].y = -INFINITY;
                    top = fmaxf(top, fmaxf(s[h][n].x, s[h][n].y));
                }
            }
        } else {
#pragma unroll
            for (int h = 0; h < HALVES; h++) s[h][0] = s[h][1] = make_float2(-INFINITY, -INFINITY);
        }
        top = quad_max(top);
        if (t == 0 && row < MATES) m.tops[row][c.warp] = top;
        c.sync();
        const float before = highest;
        highest = fmaxf(highest, over_warps(m.tops[mate], [](float a, float b) { return fmaxf(a, b); }));
        float exponentials = 0, weight = 0;
#pragma unroll
        for (int i = 0; i < HALVES * 2; i++) {
            const float2 score = s[i / 2][i % 2], scale = value_scale[i / 2][i % 2];
            float p0 = power_of_two(score.x - highest), p1 = power_of_two(score.y - highest);
            exponentials += p0 + p1;
            if constexpr (KIND == KV_Q8_0) p0 *= scale.x, p1 *= scale.y;
            uint32_t high, low;
            split(p0, p1, high, low);
            if constexpr (KIND == KV_Q8_0) {  // what is multiplied, not what was rounded to it: 128 times the difference would stay
                const float2 a = __half22float2(halves(high)), b = __half22float2(halves(low));
                weight += (a.x + b.x) + (a.y + b.y);
            }
            if (row < MATES) {
                const int column = start + i * 8 + t * 2;
                *reinterpret_cast<uint32_t*>(&m.weights[0][row][column]) = high;
                *reinterpret_cast<uint32_t*>(&m.weights[1][row][column]) = low;
            }
        }
        exponentials = quad_sum(exponentials);
        if constexpr (KIND == KV_Q8_0) weight = quad_sum(weight);
        if (t == 0 && row < MATES) {
            m.totals[row][c.warp] = exponentials;
            if constexpr (KIND == KV_Q8_0) m.sums[row][c.warp] = weight;
        }
        if (c.lane < turn.slots) turn.first.ahead(c.lane).wait_full();
        c.sync();
        const float rescale = power_of_two(before - highest);
        auto add = [](float a, float b) { return a + b; };
        total = total * rescale + over_warps(m.totals[mate], add);
        if constexpr (KIND == KV_Q8_0) sum = sum * rescale + over_warps(m.sums[mate], add);
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) o[n][j] *= rescale;
#pragma unroll
        for (int i = 0; i < TURN; i += 4)
            if (i * BLOCK < there) add_values(o, weights + i * (BLOCK * 2), turn, i, fresh[1], cached - i * BLOCK, c.warp, c.lane);
        __syncwarp();
        if (c.lane < turn.slots) turn.first.ahead(c.lane).release();
        turn.take(c.ring, part.units - first - TURN);
    }

    if (row < MATES) {
        const int head = part.head * MATES + row, channel = c.warp * 16 + (KIND == KV_BF16 ? 2 : 4) * t;
        const float factor = alone ? __fdividef(1.0f, total) : 1.0f;
        float v[2][2];  // by tile
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                v[n][j] = o[n][j] + o[n][j + 2];
                if constexpr (KIND == KV_Q8_0) v[n][j] = v[n][j] * (1 / QUANT_SCALE) - 128 * sum;
                v[n][j] *= factor;
            }
        // Two channels side by side, and the next two.
        const float2 pairs[2] = {KIND == KV_BF16 ? make_float2(v[0][0], v[0][1]) : make_float2(v[0][0], v[1][0]),
                                 KIND == KV_BF16 ? make_float2(v[1][0], v[1][1]) : make_float2(v[0][1], v[1][1])};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = channel + i * (KIND == KV_BF16 ? 8 : 2);
            if (alone) {
                post_pair(args.scratch + args.attention + (head * HEAD + at) / 2, pairs[i].x, pairs[i].y, qkv.tag);
            } else {
                float* const to = args.scratch + args.parts + (head * CONTEXT_PARTS + index) * PARTIAL;
                post(to + at, pairs[i].x, qkv.tag), post(to + at + 1, pairs[i].y, qkv.tag);
                if (i == 0 && c.warp == 0 && t == 0) post(to + HEAD, highest, qkv.tag), post(to + HEAD + 1, total, qkv.tag);
            }
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
