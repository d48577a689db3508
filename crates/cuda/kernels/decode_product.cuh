// The decode kernel's matrix-vector products (decode.cuh): a vector waited for and split, and multiplied by panels from
// the ring.
//
// A warp multiplies units of 64 columns of a panel's 8 rows, always the same columns of all panels of a phase, so that it
// holds its share of the vector in registers and prepares it by itself. The warps' sums are added in warp order, so the bits never
// change.
//
// In the A operand of mma.m16n8k16 rows 0-7 and rows 8-15 are the panel's rows in two different places: of quants, the unit's two
// blocks of 32; of fp16, pieces of 16 columns. B holds the vector's high and low fp16 parts for the first place in columns 0 and
// 1, for the second in columns 2 and 3: their sum carries 22 bits. So sums 0 and 1 of the lanes with t = 0, and sums 2 and 3
// of those with t = 1, are what counts.
//
// Quantised weights become subnormal fp16, exactly and without arithmetic: an integer q in the low bits of a half is
// q x 2^-24. A product of a block of 32 is scaled in fp32 afterwards; the offset of the integers (8, or 128) goes by the
// sum of the vector's block. The order of k within a block is free as long as the vector lies alike.
#pragma once

#include "decode_plan.cuh"

#if HOPPER

constexpr float QUANT_SCALE = 1.0f / 16777216.0f;
// SwiGLU products are posted times this, so that fp16 holds up to a million.
constexpr float PRODUCT_SCALE = 1.0f / 16.0f;
constexpr int AT_ONCE = 5;  // groups of four columns that a lane waits for together: as many as the widest hidden vector has

// What is computed from this is computed where it is used: kept in registers through all phases, as the compiler would,
// such addresses push out what the products hold there.
__device__ __forceinline__ int here(int lane) {
    asm volatile("" : "+r"(lane));
    return lane;
}

// What a consumer warp carries through the phases.
struct Consumer {
    Ring ring;
    int warp, lane;
    uint8_t* vector;          // the phase's input as fp16 parts, a region a warp
    float* sums;              // [CONSUMERS][sum_rows]
    int sum_rows;
    float* squares;           // [CONSUMERS]
    const float2* rotations;  // [64]
    uint32_t early;           // arrivals that nobody waits for

    __device__ void sync() const { sync_named(1, CONSUMERS * 32); }

    // Waits until `arrivals` warps have posted their words, or very nearly so.
    __device__ void await(const uint32_t* counter, uint32_t arrivals) const {
        if (warp == CONSUMERS - 1) await_count(counter, arrivals, early);
        sync();
    }

    // A row's sum over the warps.
    __device__ float row_sum(int row) const {
        float s = 0;
#pragma unroll
        for (int w = 0; w < CONSUMERS; w++) s += sums[w * sum_rows + row];
        return s;
    }

    // The sum of squares of the last vector that was normed.
    __device__ float sum_of_squares() const {
        float s = 0;
#pragma unroll
        for (int w = 0; w < CONSUMERS; w++) s += squares[w];
        return s;
    }

    // Adds the lanes' squares of the vector that was normed; nobody waits for the sum before the phase's end.
    __device__ void share_squares(float mine) const {
        mine = warp_sum(mine);
        if (lane == 0) squares[warp] = mine;
    }

    // Posts `outputs` values, 32 a warp, as floats or as PAIRS of fp16; the other warps go on. They cannot overtake, since
    // the next phase's input depends on what is posted.
    template <bool PAIRS = false, class Value>
    __device__ void publish(int outputs, float* to, uint32_t tag, uint32_t* counter, Value value) const {
        if (outputs == 0) return;
        if (warp * 32 >= outputs) {
            arrive_named(2, CONSUMERS * 32);
            return;
        }
        sync_named(2, CONSUMERS * 32);
        const int i = warp * 32 + lane;
        const float v = i < outputs ? value(i) : 0;
        if constexpr (PAIRS) {
            const float next = __shfl_down_sync(0xffffffffu, v, 1);
            if (i < outputs && lane % 2 == 0) post_pair(to + i / 2, v, next, tag);
        } else {
            if (i < outputs) post(to + i, v, tag);
        }
        __syncwarp();
        if (lane == 0) count(counter);
    }
};

// ---- the vector

// Two floats as fp16 pairs whose sum carries 22 bits.
__device__ __forceinline__ void split(float x, float y, uint32_t& high, uint32_t& low) {
    x = fminf(fmaxf(x, -65504.0f), 65504.0f), y = fminf(fmaxf(y, -65504.0f), 65504.0f);
    high = pack(x, y);
    float2 h = __half22float2(halves(high));
    low = pack(x - h.x, y - h.y);
}

__device__ __forceinline__ void load_shared(uint32_t& a, uint32_t at) {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_shared(uint32_t& a, uint32_t& b, uint32_t at) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_shared(uint32_t (&a)[4], uint32_t at) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}

// Where a phase's vector comes from.
struct Source {
    const float* posted;
    uint32_t tag;
    const uint32_t* counter;
    uint32_t arrivals;
};

// Columns 4 i to 4 i + 3 of a token's embedding.
template <Type H>
__device__ __forceinline__ float4 embedding(const Weights& table, int token, int hidden, int i) {
    const uint8_t* row = table.quants + token * row_bytes<H>(hidden);
    if constexpr (H == F16) {
        uint2 v = __ldg(reinterpret_cast<const uint2*>(row) + i);
        float2 a = __half22float2(halves(v.x)), b = __half22float2(halves(v.y));
        return make_float4(a.x, a.y, b.x, b.y);
    } else {
        static_assert(H == Q8_0, "the embedding is fp16 or bytes");
        uchar4 q = __ldg(reinterpret_cast<const uchar4*>(row) + i);
        float s = __half2float(__ldg(table.scales + size_t(token) * (hidden / 32) + i / 8));
        return make_float4((q.x - 128) * s, (q.y - 128) * s, (q.z - 128) * s, (q.w - 128) * s);
    }
}

// What sums are multiplied with, beside the scale of the vector.
template <Type T>
__device__ constexpr float sum_factor() {
    return T == F16 ? 1.0f : 1.0f / QUANT_SCALE;
}

// A power of two that brings a vector of this sum of squares to a mean of about 1/16: what follows it in the residual
// stream may be a million times as large before fp16 overflows, and the low parts keep their bits.
__device__ __forceinline__ float scale_of(float squares, int width) {
    return __uint_as_float(__float_as_uint(rsqrtf(__fdividef(squares, width) + EPSILON)) & 0x7f800000) * 0.0625f;
}

// Four floats as fp16 parts; of 4 bits, the second pair meets quants that are 16 times too large.
template <Type T>
__device__ __forceinline__ void split(float4 v, uint2& high, uint2& low) {
    constexpr float SECOND = T == Q4_0 || T == Q4_1 ? 0.0625f : 1.0f;
    split(v.x, v.y, high.x, low.x), split(v.z * SECOND, v.w * SECOND, high.y, low.y);
}

// D = A B, and D += A B, of one tensor instruction (common.cuh: mma).
__device__ __forceinline__ void mma_first(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}
__device__ __forceinline__ void mma_next(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A row's part of a product, in the lanes with t < 2. Of a vector of fp16 PAIRS, the columns of low parts hold nothing.
template <bool PAIRS>
__device__ __forceinline__ float row_product(const float (&e)[4], int t) {
    if constexpr (PAIRS) return t & 1 ? e[2] : e[0];
    else return t & 1 ? e[2] + e[3] : e[0] + e[1];
}

// What a quant's value lacks of the weight's, times the vector's block in the lane's place: the product with the integers' offset, or
// with ones, for Q4_1's minimum. Of 4 bits, the second and fourth pair of the vector meet quants that are 16 times too large.
template <Type T, bool PAIRS>
__device__ __forceinline__ float lacking(const uint32_t (&b)[4], int t) {
    constexpr uint32_t A = T == Q8_0 ? 0x80808080 : T == Q4_0 ? 0x80088008 : 0x00010001;
    constexpr uint32_t B = T == Q8_0 ? 0x80808080 : T == Q4_0 ? 0x80808080 : 0x00100010;
    float e[4];
    mma_first(e, A, A, A, A, b[0], b[1]);
    mma_next(e, B, B, B, B, b[2], b[3]);
    return row_product<PAIRS>(e, t);
}

// A phase's input, of which each warp holds the columns that it multiplies: unit n of a warp is unit 8 n + warp of the panel.
// It comes as floats that are split in two parts, or as PAIRS of fp16.
template <Type T, int K, bool PAIRS>
struct Input {
    using C = Columns<T, K>;
    static constexpr int PIECES = PAIRS ? (C::MINE + 3) / 4 : (C::MINE + 1) / 2;  // loads of 16 bytes a lane
    static constexpr int APART = C::MINE * UNIT * 2 + 16;   // bytes from the high parts to the low ones
    static constexpr int REGION = 2 * APART;
    static constexpr bool HELD = C::MINE <= (T == F16 ? 24 : 19);  // in registers
    uint32_t parts[HELD ? C::MINE : 1][4];
    float lack[HELD && T != F16 ? C::MINE : 1];
    uint32_t at;

    static __device__ __forceinline__ bool has(const Consumer& c, int n) { return n < C::MINE && (C::EVEN || 8 * n + c.warp < C::UNITS); }

    // Waits for the warp's columns of a posted vector of pairs.
    __device__ __forceinline__ void prepare(const Consumer& c, const Source& from) {
        static_assert(PAIRS);
        constexpr int TURN = PIECES < AT_ONCE ? PIECES : AT_ONCE;
        const int lane = here(c.lane), first_unit = lane / 8;
        const float* const posted = from.posted + (first_unit * 8 + c.warp) * (UNIT / 2) + lane % 8 * 4;
        c.await(from.counter, from.arrivals);
        at = shared_address(c.vector) + c.warp * REGION;
        const uint32_t to = at + lane * 16;
#pragma unroll
        for (int first = 0; first < PIECES; first += TURN) {
            uint4 x[TURN];
#pragma unroll
            for (int j = 0; j < TURN; j++)
                if (has(c, 4 * (first + j) + first_unit)) load_posted(x[j], posted + (first + j) * (32 * UNIT / 2));
            Patience patience;
            for (bool again = true; again;) {
                again = false;
#pragma unroll
                for (int j = 0; j < TURN; j++)
                    if (has(c, 4 * (first + j) + first_unit) && !tagged_pairs(x[j], from.tag)) {
                        load_posted(x[j], posted + (first + j) * (32 * UNIT / 2));
                        again = true;
                    }
                patience.spend();
            }
            __syncwarp();
#pragma unroll
            for (int j = 0; j < TURN; j++) {
                if (!has(c, 4 * (first + j) + first_unit)) continue;
                // Of 4 bits, every second pair meets quants that are 16 times too large.
                if constexpr (T == Q4_0 || T == Q4_1) {
                    const __half2 sixteenth = __float2half2_rn(0.0625f);
                    x[j].y = bits(__hmul2(halves(x[j].y), sixteenth)), x[j].w = bits(__hmul2(halves(x[j].w), sixteenth));
                }
                asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + (first + j) * 512), "r"(x[j].x), "r"(x[j].y),
                             "r"(x[j].z), "r"(x[j].w)
                             : "memory");
            }
        }
        __syncwarp();
        hold(lane);
    }

    // Waits for the warp's columns of a posted vector of floats, splits them, times `scale` and the norm's weights, and
    // returns the lane's share of the sum of squares.
    __device__ __forceinline__ float prepare(const Consumer& c, const Source& from, const float* norm, float scale) {
        static_assert(!PAIRS);
        constexpr int TURN = PIECES < AT_ONCE ? PIECES : AT_ONCE;
        const int lane = here(c.lane);
        const int column = c.warp * UNIT + lane % 16 * 4 + lane / 16 * (8 * UNIT);
        float4 weights[PIECES];
#pragma unroll
        for (int j = 0; j < PIECES; j++)
            if (has(c, 2 * j + lane / 16)) weights[j] = __ldg(reinterpret_cast<const float4*>(norm + column + j * 16 * UNIT));
        c.await(from.counter, from.arrivals);
        at = shared_address(c.vector) + c.warp * REGION;
        const uint32_t to = at + lane * 8;
        float squares = 0;
#pragma unroll
        for (int first = 0; first < PIECES; first += TURN) {
            float4 x[TURN];
#pragma unroll
            for (int j = 0; j < TURN; j++)
                if (has(c, 2 * (first + j) + lane / 16)) load_posted(x[j], from.posted + column + (first + j) * 16 * UNIT);
            Patience patience;
            for (bool again = true; again;) {
                again = false;
#pragma unroll
                for (int j = 0; j < TURN; j++)
                    if (has(c, 2 * (first + j) + lane / 16) && !tagged(x[j], from.tag)) {
                        load_posted(x[j], from.posted + column + (first + j) * 16 * UNIT);
                        again = true;
                    }
                patience.spend();
            }
            __syncwarp();
#pragma unroll
            for (int j = 0; j < TURN; j++) {
                const int piece = first + j;
                float4 v = x[j];
                const float4 w = weights[piece < PIECES ? piece : 0];
                if (has(c, 2 * piece + lane / 16)) squares += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
                v.x *= w.x, v.y *= w.y, v.z *= w.z, v.w *= w.w;
                v.x *= scale, v.y *= scale, v.z *= scale, v.w *= scale;
                uint2 high, low;
                split<T>(v, high, low);
                if (!has(c, 2 * piece + lane / 16)) continue;
                asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + piece * 256), "r"(high.x), "r"(high.y) : "memory");
                asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + piece * 256 + APART), "r"(low.x), "r"(low.y) : "memory");
            }
        }
        __syncwarp();
        hold(lane);
        return squares;
    }

    // Takes the warp's columns from shared memory to where `get` finds them. Columns of low parts repeat the high ones of pairs.
    __device__ __forceinline__ void hold(int lane) {
        constexpr int LOW = PAIRS ? 0 : APART;
        const int g = lane / 4, t = lane % 4;
        if constexpr (T == F16) {
            const int row = lane % 8, tile = lane / 8;
            at += (row & 1) * LOW + (row >> 1 & 1) * 32 + tile / 2 * 64 + tile % 2 * 16;
        } else {
            at += (g & 1) * LOW + (g >> 1 & 1) * 64 + t * (T == Q8_0 ? 8 : 16);
        }
        if constexpr (HELD)
#pragma unroll
            for (int n = 0; n < C::MINE; n++) {
                fetch(parts[n], at + n * (2 * UNIT));
                if constexpr (T != F16) lack[n] = lacking<T, PAIRS>(parts[n], t);
            }
    }

    static __device__ __forceinline__ void fetch(uint32_t (&b)[4], uint32_t from) {
        if constexpr (T == F16)
            ldmatrix(b, from);
        else if constexpr (T == Q8_0)
            load_shared(b[0], b[1], from), load_shared(b[2], b[3], from + 32);
        else {
            // In the order of the two products, each of which takes two registers side by side.
            uint32_t w[4];
            load_shared(w, from);
            b[0] = w[0], b[1] = w[2], b[2] = w[1], b[3] = w[3];
        }
    }

    // Unit n as B, and what quants lack.
    __device__ __forceinline__ float get(int n, uint32_t (&b)[4], int t) const {
        if constexpr (HELD) {
#pragma unroll
            for (int i = 0; i < 4; i++) b[i] = parts[n][i];
            return lack[T == F16 ? 0 : n];
        } else {
            fetch(b, at + n * (2 * UNIT));
            if constexpr (T == F16) return 0;
            else return lacking<T, PAIRS>(b, t);
        }
    }
};

// ---- tiles

// Where a lane finds its part of a warp's first unit in a chunk; the others are 8 units further each.
template <Type T>
struct Place {
    static constexpr int PIECES = UNIT / Layout<T>::PER16;                  // of 16 bytes, of a row of a unit
    static constexpr int NEXT = CONSUMERS * PIECES / 8 * GROUP;             // bytes to the warp's next unit
    uint32_t quants, scales;

    template <int PITCH, int BOX>
    static __device__ __forceinline__ Place of(const Consumer& c) {
        const int lane = here(c.lane), row = lane % 8, tile = lane / 8;  // that the lane addresses for ldmatrix
        Place p;
        // 4 bits: two pieces a unit, so the second pair of tiles is of the warp's next unit.
        const int piece = c.warp * PIECES + tile % (PIECES < 4 ? PIECES : 4);
        p.quants = piece / 8 * GROUP + row * LINE + ((piece % 8 ^ row) << 4) + (PIECES == 2 ? tile / 2 * NEXT : 0);
        p.scales = BOX * GROUP + lane / 4 * (PITCH * 4) + (2 * c.warp + lane % 2) * (Layout<T>::SCALES * 2);
        return p;
    }
};

// A warp's units of a chunk, as they lie.
template <Type T, int COUNT>
struct Tiles {
    static constexpr int WORDS = T == F16 ? 8 : T == Q8_0 ? 4 : 2;
    uint32_t w[COUNT + 1][WORDS];  // of 4 bits, units come in pairs
    uint32_t scales[T == F16 ? 1 : COUNT];

    // The first `count` of them.
    __device__ __forceinline__ void load(uint32_t slot, const Place<T>& place, int count) {
        const uint32_t at = slot + place.quants;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (i >= count) continue;
            uint32_t b[4];
            if (T == F16 || T == Q8_0 || i % 2 == 0) {
                ldmatrix(b, at + i * Place<T>::NEXT);
#pragma unroll
                for (int k = 0; k < 4; k++) w[i + k / WORDS][k % WORDS] = b[k];
            }
            if constexpr (T == F16) {
                ldmatrix(b, (at ^ 64) + i * Place<T>::NEXT);
#pragma unroll
                for (int k = 0; k < 4; k++) w[i][4 + k] = b[k];
            } else {
                load_scale(scales[i], slot + place.scales + i * (16 * Layout<T>::SCALES * 2));
            }
        }
    }

    static __device__ __forceinline__ void load_scale(uint32_t& s, uint32_t at) {
        if constexpr (T == Q4_1) {
            load_shared(s, at);
        } else {
            uint16_t h;
            asm volatile("ld.shared.u16 %0, [%1];" : "=h"(h) : "r"(at) : "memory");
            s = h;
        }
    }
};

// A panel's sums so far, of this warp's units.
template <Type T, bool PAIRS>
struct Sum {
    float d[2][4], q;

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4; i++) d[0][i] = d[1][i] = 0;
        q = 0;
    }

    __device__ __forceinline__ void add(const uint32_t* w, uint32_t scale, const uint32_t (&b)[4], float lack, int t) {
        if constexpr (T == F16) {
            // Tiles 0 and 1, 2 and 3 are the two places' columns.
            mma_next(d[0], w[0], w[2], w[1], w[3], b[0], b[1]);
            mma_next(d[1], w[4], w[6], w[5], w[7], b[2], b[3]);
        } else {
            float e[4];
            if constexpr (T == Q8_0) {
                mma_first(e, low_bytes(w[0]), low_bytes(w[2]), high_bytes(w[0]), high_bytes(w[2]), b[0], b[1]);
                mma_next(e, low_bytes(w[1]), low_bytes(w[3]), high_bytes(w[1]), high_bytes(w[3]), b[2], b[3]);
            } else {
                const uint32_t u = w[0], v = w[1], u8 = u >> 8, v8 = v >> 8;
                mma_first(e, u & 0x000f000f, v & 0x000f000f, u8 & 0x000f000f, v8 & 0x000f000f, b[0], b[1]);
                mma_next(e, u & 0x00f000f0, v & 0x00f000f0, u8 & 0x00f000f0, v8 & 0x00f000f0, b[2], b[3]);
            }
            const float product = row_product<PAIRS>(e, t);
            const float2 s = __half22float2(halves(scale));
            if constexpr (T == Q4_1) q += s.x * product + s.y * lack;
            else q += s.x * (product + lack);
        }
    }

    // Row lane / 4's, in the lanes with t < 2.
    __device__ __forceinline__ float take(int t) const {
        float v = q;
        if constexpr (T == F16) v = row_product<PAIRS>(d[0], t) + row_product<PAIRS>(d[1], t);
        return v + __shfl_xor_sync(0xffffffffu, v, 1);
    }

    // Bytes 0 and 1, or 2 and 3, as halves.
    static __device__ __forceinline__ uint32_t low_bytes(uint32_t w) { return __byte_perm(w, 0, 0x4140); }
    static __device__ __forceinline__ uint32_t high_bytes(uint32_t w) { return __byte_perm(w, 0, 0x4342); }
};

// ---- products

// Multiplies `panels` panels that come through the ring; each warp's sums go to its rows of c.sums. A panel's sums are
// stored while the next panel's tiles are on their way from shared memory. Panels of 4 bits, whose multiplication takes longer
// than their arrival, go in twos, so that one's latencies hide the other's.
template <Type T, int K, bool PAIRS>
__device__ __forceinline__ void multiply(Consumer& c, const Input<T, K, PAIRS>& input, int panels) {
    using C = Columns<T, K>;
    constexpr int TURN = (T == Q4_0 || T == Q4_1) && C::CHUNKS == 1 ? 2 : 1;
    constexpr int MOST = C::CHUNK_MINE;
    const auto place = Place<T>::template of<C::PITCH, C::BOX>(c);
    const int t = c.lane % 4;
    uint32_t to = shared_address(c.sums + c.warp * c.sum_rows + c.lane / 4);
    Sum<T, PAIRS> sum[TURN];
    auto store = [&](int turn) {
        const float v = sum[turn].take(t);
        if (t == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
        to += PANEL * 4;
    };
    auto load = [&](Tiles<T, MOST>& tiles, int chunk) {
        c.ring.wait_full();
        tiles.load(c.ring.data(), place, C::mine(chunk));
        __syncwarp();
        if (c.lane == 0) c.ring.release();
        c.ring.advance();
    };
    auto add = [&](Sum<T, PAIRS>& sum, const Tiles<T, MOST>& tiles, int chunk) {
#pragma unroll
        for (int i = 0; i < MOST; i++) {
            if (i >= C::mine(chunk) || (!C::EVEN && 8 * (chunk * MOST + i) + c.warp >= C::UNITS)) continue;
            uint32_t b[4];
            const float lack = input.get(chunk * MOST + i, b, t);
            sum.add(tiles.w[i], tiles.scales[T == F16 ? 0 : i], b, lack, t);
        }
    };
#pragma unroll 1
    for (int panel = 0; panel + TURN <= panels; panel += TURN)
#pragma unroll(Input<T, K, PAIRS>::HELD ? C::CHUNKS : 1)
        for (int chunk = 0; chunk < C::CHUNKS; chunk++) {
            Tiles<T, MOST> tiles[TURN];
#pragma unroll
            for (int turn = 0; turn < TURN; turn++) load(tiles[turn], chunk);
#pragma unroll
            for (int turn = 0; turn < TURN; turn++) {
                if (chunk == 0) {
                    if (panel > 0) store(turn);
                    sum[turn].clear();
                }
                add(sum[turn], tiles[turn], chunk);
            }
        }
    if (panels >= TURN)
#pragma unroll
        for (int turn = 0; turn < TURN; turn++) store(turn);
    if (TURN > 1 && panels % TURN) {
        Tiles<T, MOST> tiles;
        load(tiles, 0);
        sum[0].clear();
        add(sum[0], tiles, 0);
        store(0);
    }
}

#endif
