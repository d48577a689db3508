// fp16 weights in the decode kernel's products (decode_product.cuh).
//
// In the A operand of mma.m16n8k16 rows 0-7 and rows 8-15 are the panel's rows in two different places, pieces of 16 columns. B
// holds the vector's high and low fp16 parts for the first place in columns 0 and 1, for the second in columns 2 and 3: their sum
// carries 22 bits. So sums 0 and 1 of the lanes with t = 0, and sums 2 and 3 of those with t = 1, are what counts.
#pragma once

#include "decode_consumer.cuh"

#if HOPPER

// Two floats as fp16 pairs whose sum carries 22 bits.
__device__ __forceinline__ void split(float x, float y, uint32_t& high, uint32_t& low) {
    x = fminf(fmaxf(x, -65504.0f), 65504.0f), y = fminf(fmaxf(y, -65504.0f), 65504.0f);
    high = pack(x, y);
    float2 h = __half22float2(halves(high));
    low = pack(x - h.x, y - h.y);
}

// D += A B, of one tensor instruction.
__device__ __forceinline__ void mma_next(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// What of a vector a warp multiplies in one go (Operand), how it holds its columns of a vector (Vector), a panel's tiles (Tiles) and their sums (Sum).
template <Type T>
struct Operand;
template <Type T, int K, bool PAIRS>
struct Vector;
template <Type T, int COUNT>
struct Tiles;
template <Type T, bool PAIRS>
struct Sum;

template <>
struct Operand<F16> {
    static constexpr int UNITS = 1;
    uint32_t b[4];
};

// Of a vector of PAIRS, the columns of low parts repeat the high ones.
template <int K, bool PAIRS>
struct Vector<F16, K, PAIRS> {
    using C = Columns<F16, K>;
    static constexpr int APART = C::template padded_units<PAIRS>() * UNIT * 2 + 16;  // bytes from the high parts to the low ones
    static constexpr int REGION = 2 * APART;
    static constexpr bool HELD = C::MINE <= 24;  // in registers
    Operand<F16> operands[HELD ? C::MINE : 1];
    uint32_t at;

    // Pieces `first` and on of ALL: four columns a lane of two of the warp's units.
    template <int ALL, int N>
    __device__ __forceinline__ void put(int lane, int first, const float4 (&v)[N]) const {
#pragma unroll
        for (int i = 0; i < N && first + i < ALL; i++) {
            uint2 high, low;
            split(v[i].x, v[i].y, high.x, low.x), split(v[i].z, v[i].w, high.y, low.y);
            const uint32_t to = at + lane * 8 + (first + i) * 256;
            store_shared(to, high.x, high.y), store_shared(to + APART, low.x, low.y);
        }
    }

    // The same of four units, eight columns a lane.
    template <int ALL, int N>
    __device__ __forceinline__ void put(int lane, int first, const uint4 (&v)[N]) const {
#pragma unroll
        for (int i = 0; i < N && first + i < ALL; i++)
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at + lane * 16 + (first + i) * 512), "r"(v[i].x), "r"(v[i].y),
                         "r"(v[i].z), "r"(v[i].w)
                         : "memory");
    }

    // Takes the warp's columns from shared memory to where `get` finds them.
    __device__ __forceinline__ void hold(const Consumer&, int lane) {
        const int row = lane % 8, tile = lane / 8;
        at += (PAIRS ? 0 : (row & 1) * APART) + (row >> 1 & 1) * 32 + tile / 2 * 64 + tile % 2 * 16;
        if constexpr (HELD)
#pragma unroll
            for (int n = 0; n < C::MINE; n++) ldmatrix(operands[n].b, at + n * (2 * UNIT));
    }

    __device__ __forceinline__ Operand<F16> get(const Consumer&, int n, int) const {
        if constexpr (HELD) return operands[n];
        Operand<F16> x;
        ldmatrix(x.b, at + n * (2 * UNIT));
        return x;
    }
};

// A warp's units of a chunk, as they lie.
template <int COUNT>
struct Tiles<F16, COUNT> {
    uint32_t w[COUNT][8];

    // The first `units` of them.
    template <class Place>
    __device__ __forceinline__ void load(uint32_t slot, const Place& place, int units) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (i >= units) continue;
            uint32_t(&first)[4] = reinterpret_cast<uint32_t(&)[4]>(w[i][0]), (&second)[4] = reinterpret_cast<uint32_t(&)[4]>(w[i][4]);
            ldmatrix(first, slot + place.quants + i * Place::NEXT), ldmatrix(second, (slot + place.quants ^ 64) + i * Place::NEXT);
        }
    }
};

template <bool PAIRS>
struct Sum<F16, PAIRS> {
    float d[2][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 4; i++) d[0][i] = d[1][i] = 0;
    }

    // Tiles 0 and 1, 2 and 3 are the two places' columns.
    template <int COUNT>
    __device__ __forceinline__ void add(const Tiles<F16, COUNT>& tiles, int i, const Operand<F16>& x, bool, int) {
        const uint32_t(&w)[8] = tiles.w[i];
        mma_next(d[0], w[0], w[2], w[1], w[3], x.b[0], x.b[1]);
        mma_next(d[1], w[4], w[6], w[5], w[7], x.b[2], x.b[3]);
    }

    // Row lane / 4's.
    __device__ __forceinline__ float take(int t) const {
        float v = part(d[0], t) + part(d[1], t);
        return v + __shfl_xor_sync(0xffffffffu, v, 1);
    }

    static __device__ __forceinline__ float part(const float (&e)[4], int t) {
        if constexpr (PAIRS) return t & 1 ? e[2] : e[0];
        else return t & 1 ? e[2] + e[3] : e[0] + e[1];
    }
};

#endif
