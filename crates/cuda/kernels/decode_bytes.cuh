// Quantised weights in the decode kernel's products (decode_product.cuh): products of bytes, whose sums are exact.
//
// The vector is taken in fixed point: integers of 16 bits as two bytes with signs, x = (256 high + low) scale, with one scale for the
// columns that a warp reads at a time, 128 or 256. Weights are bytes as they lie, or nibbles one operation away from it. An operand is two
// units of 64 columns, four blocks of 32, whose sums must not meet before they are scaled: in the A operand of mma.m16n8k32 rows 0-7 and
// rows 8-15 are the panel's rows in a unit's two blocks; B holds the first unit's blocks in columns 0 to 3, high and low parts, and the
// second one's in columns 4 to 7, the rest being zero. So each lane ends with one block's sum: t / 2 says of which unit, t % 2 of which
// block of it.
#pragma once

#include "decode_halves.cuh"

#if HOPPER

constexpr float LARGEST = 127 * 256;  // of a vector's integers, so that neither byte overflows

// D = A B and D += A B, of unsigned weights and a vector with signs.
__device__ __forceinline__ void mma_bytes_first(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}
__device__ __forceinline__ void mma_bytes_next(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// D += A B, both with signs.
__device__ __forceinline__ void mma_signed(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The largest magnitude, as an integer, which puts what is no number on top.
__device__ __forceinline__ uint32_t magnitude(const float4& v) {
    auto bits = [](float x) { return __float_as_uint(fabsf(x)); };
    return max(max(bits(v.x), bits(v.y)), max(bits(v.z), bits(v.w)));
}

// Four floats times `by` as two bytes each: the integers and 128 more are the low bits of a float near 2^23, where its steps are 1.
__device__ __forceinline__ void fixed_point(const float4& v, float by, uint32_t& high, uint32_t& low) {
    auto integer = [&](float x) { return __float_as_uint(fmaf(x, by, 12582912.0f + 128)); };
    const uint32_t a = __byte_perm(integer(v.x), integer(v.y), 0x5140), b = __byte_perm(integer(v.z), integer(v.w), 0x5140);
    high = __byte_perm(a, b, 0x7632), low = __byte_perm(a, b, 0x5410) ^ 0x80808080;
}

// The lane's block's sum.
__device__ __forceinline__ int block_sum(const int (&e)[4], int t) {
    return (t & 1 ? e[2] : e[0]) * 256 + (t & 1 ? e[3] : e[1]);
}

// Two units of the vector. What a block's integers lack of the weights' is the lane's block's sum of x with their offset, 8 or 128: `lack`.
// Q4_1 has a minimum instead, which meets the sum of x itself, `sum`.
template <Type T>
struct Operand {
    static constexpr int UNITS = 2;
    uint32_t b[4];
    float scale, sum;
    int lack;
};

template <Type T, int K, bool PAIRS>
struct Vector {
    using C = Columns<T, K>;
    static constexpr bool NIBBLES = T != Q8_0;
    static constexpr int OPERANDS = (C::MINE + 1) / 2;
    static constexpr int UNITS = C::template padded_units<PAIRS>();
    static constexpr int SCALES = UNITS * UNIT * 2;         // bytes before the blocks' scales, with what they lack or their sums
    static constexpr int REGION = SCALES + UNITS * 2 * 8;
    static constexpr bool HELD = C::MINE <= 24;  // in registers
    Operand<T> operands[HELD ? OPERANDS : 1];
    uint32_t at;

    // Pieces `first` and on of ALL: four columns a lane of two of the warp's units, which share a scale.
    template <int ALL, int N>
    __device__ __forceinline__ void put(int lane, int first, const float4 (&v)[N]) const {
        uint32_t most[N];
#pragma unroll
        for (int i = 0; i < N; i++) most[i] = __reduce_max_sync(0xffffffffu, magnitude(v[i]));
#pragma unroll
        for (int i = 0; i < N && first + i < ALL; i++) {
            const int block = (first + i) * 4 + lane / 8;
            store_four(block, lane % 8, v[i], most[i]);
            if (lane % 8 == 0) store_scale(block, most[i]);
        }
    }

    // The same of four units, eight columns a lane.
    template <int ALL, int N>
    __device__ __forceinline__ void put(int lane, int first, const uint4 (&v)[N]) const {
        float4 p[N][2];
        uint32_t most[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            p[i][0] = four(v[i].x, v[i].y), p[i][1] = four(v[i].z, v[i].w);
            most[i] = __reduce_max_sync(0xffffffffu, max(magnitude(p[i][0]), magnitude(p[i][1])));
        }
#pragma unroll
        for (int i = 0; i < N && first + i < ALL; i++) {
            const int block = (first + i) * 8 + lane / 4;
#pragma unroll
            for (int k = 0; k < 2; k++) store_four(block, lane % 4 * 2 + k, p[i][k], most[i]);
            if (lane % 4 == 0) store_scale(block, most[i]);
        }
    }

    // Takes the warp's columns from shared memory to where `get` finds them.
    __device__ __forceinline__ void hold(const Consumer& c, int lane) {
        constexpr uint32_t OFFSETS = T == Q8_0 ? 0x80808080 : T == Q4_0 ? 0x08080808 : 0x01010101;
        const int t = lane % 4;
#pragma unroll
        for (int n = 0; n < OPERANDS; n++) {
            Operand<T> x;
            fetch(x, c, n);
            int e[4];
            mma_bytes_first(e, OFFSETS, OFFSETS, OFFSETS, OFFSETS, x.b[0], x.b[1]);
            mma_bytes_next(e, OFFSETS, OFFSETS, OFFSETS, OFFSETS, x.b[2], x.b[3]);
            const int lack = -block_sum(e, t);
            uint32_t scale;
            load_shared(scale, scales(n, t));
            x.scale = __uint_as_float(scale);
            x.lack = lack, x.sum = -x.scale * lack;
            if constexpr (HELD) operands[n] = x;
            else if (lane < 4) store_shared(scales(n, t) + 4, T == Q4_1 ? __float_as_uint(x.sum) : x.lack);
        }
        __syncwarp();
    }

    __device__ __forceinline__ Operand<T> get(const Consumer& c, int n, int t) const {
        if constexpr (HELD) return operands[n];
        Operand<T> x;
        fetch(x, c, n);
        uint32_t scale, second;
        load_shared(scale, second, scales(n, t));
        x.scale = __uint_as_float(scale), x.lack = second, x.sum = __uint_as_float(second);
        return x;
    }

private:
    __device__ __forceinline__ uint32_t scales(int n, int t) const { return at + SCALES + n * 32 + t * 8; }
    __device__ __forceinline__ void store_scale(int block, uint32_t most) const {
        store_shared(at + SCALES + block * 8, __float_as_uint(__uint_as_float(most) * (1 / LARGEST)));
    }

    // The four columns j of a block.
    __device__ __forceinline__ void store_four(int block, int j, const float4& v, uint32_t most) const {
        uint32_t high, low;
        fixed_point(v, __fdividef(LARGEST, __uint_as_float(most)), high, low);
        const uint32_t to = at + block * 64 + word(j);
        store_shared(to, high), store_shared(to + 32, low);
    }

    static __device__ __forceinline__ float4 four(uint32_t x, uint32_t y) {
        const float2 a = __half22float2(halves(x)), b = __half22float2(halves(y));
        return make_float4(a.x, a.y, b.x, b.y);
    }

    // Where four columns lie in a block's part: beside those that the same lane multiplies.
    static __device__ __forceinline__ int word(int j) { return (NIBBLES ? j : j % 4 * 2 + j / 4) * 4; }

    // A unit's lanes have its part of B, the others zeros, in the order in which the weights lie.
    __device__ __forceinline__ void fetch(Operand<T>& x, const Consumer& c, int n) const {
        const int lane = c.lane, second = lane / 16;
        uint32_t first, next;
        load_shared(first, next, at + n * 256 + second * 128 + lane / 4 % 4 * 32 + lane % 4 * 8);
        if constexpr (NIBBLES) {
            const uint32_t even = __byte_perm(first, next, 0x5140);
            next = __byte_perm(first, next, 0x7362), first = even;
        }
        x.b[0] = second ? 0 : first, x.b[1] = second ? 0 : next;
        x.b[2] = second ? first : 0, x.b[3] = second ? next : 0;
    }
};

// A warp's units of a chunk, as they lie.
template <Type T, int COUNT>
struct Tiles {
    static constexpr int WORDS = T == Q8_0 ? 8 : 4;
    uint32_t w[COUNT][WORDS], scales[COUNT];

    // The first `units` of them.
    template <class Place>
    __device__ __forceinline__ void load(uint32_t slot, const Place& place, int units) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (2 * i >= units) continue;
#pragma unroll
            for (int k = 0; k < WORDS / 4; k++)
                if (2 * i + k < units) ldmatrix(reinterpret_cast<uint32_t(&)[4]>(w[i][4 * k]), slot + place.quants + (2 * i + k) * Place::NEXT);
            load_scale(scales[i], slot + place.scales + i * (32 * Layout<T>::SCALES * 2));
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

template <Type T, bool PAIRS>
struct Sum {
    float q;

    __device__ __forceinline__ void clear() { q = 0; }

    // Operand i of the tiles, of which the second unit may be missing.
    template <int COUNT>
    __device__ __forceinline__ void add(const Tiles<T, COUNT>& tiles, int i, const Operand<T>& x, bool two, int t) {
        const auto& w = tiles.w[i];
        int e[4];
        if constexpr (T == Q8_0) {
            mma_bytes_first(e, w[0], w[2], w[1], w[3], x.b[0], x.b[1]);
            if (two) mma_bytes_next(e, w[4], w[6], w[5], w[7], x.b[2], x.b[3]);
        } else {
            mma_bytes_first(e, low(w[0]), low(w[1]), low(w[0] >> 4), low(w[1] >> 4), x.b[0], x.b[1]);
            if (two) mma_bytes_next(e, low(w[2]), low(w[3]), low(w[2] >> 4), low(w[3] >> 4), x.b[2], x.b[3]);
        }
        const float2 s = __half22float2(halves(two || t < 2 ? tiles.scales[i] : 0));
        q += s.x * (__int2float_rn(block_sum(e, t) + (T == Q4_1 ? 0 : x.lack)) * x.scale);
        if constexpr (T == Q4_1) q += s.y * x.sum;
    }

    // Row lane / 4's.
    __device__ __forceinline__ float take(int) const {
        const float v = q + __shfl_xor_sync(0xffffffffu, q, 1);
        return v + __shfl_xor_sync(0xffffffffu, v, 2);
    }

    static __device__ __forceinline__ uint32_t low(uint32_t nibbles) { return nibbles & 0x0f0f0f0f; }
};

#endif
