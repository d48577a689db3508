// The decode kernel's matrix-vector products (decode.cuh): a vector waited for and taken apart, and multiplied by panels from
// the ring.
//
// A warp multiplies units of 64 columns of a panel's 8 rows, always the same columns of all panels of a phase, so that it
// holds its share of the vector in registers and prepares it by itself. The warps' sums are added in warp order, so the bits never
// change. fp16 weights are multiplied as decode_halves.cuh says, quantised ones as decode_bytes.cuh does; the order of columns within
// a unit is free as long as the vector lies alike.
#pragma once

#include "decode_bytes.cuh"

#if HOPPER

// ---- the vector

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

// A power of two that brings a vector of this sum of squares to a mean of about 1/16: what follows it in the residual
// stream may be a million times as large before fp16 overflows, and the low parts keep their bits.
__device__ __forceinline__ float scale_of(float squares, int width) {
    return __uint_as_float(__float_as_uint(rsqrtf(__fdividef(squares, width) + EPSILON)) & 0x7f800000) * 0.0625f;
}

// A phase's input, of which each warp holds the columns that it multiplies: unit n of a warp is unit 8 n + warp of the panel.
// It comes as floats, or as PAIRS of fp16.
template <Type T, int K, bool PAIRS>
struct Input {
    using C = Columns<T, K>;
    static constexpr int EACH = PAIRS ? 4 : 2;                       // units that a load of 16 bytes a lane brings
    static constexpr int PIECES = (C::MINE + EACH - 1) / EACH;       // such loads
    static constexpr int TURN = PIECES < AT_ONCE ? PIECES : AT_ONCE;
    Vector<T, K, PAIRS> vector;

    // Waits for the warp's columns of a posted vector of pairs.
    __device__ __forceinline__ void prepare(const Consumer& c, const Source& from) {
        static_assert(PAIRS);
        const int lane = here(c.lane), unit = lane / 8;
        const float* const posted = from.posted + (unit * 8 + c.warp) * (UNIT / 2) + lane % 8 * 4;
        c.await(from.counter, from.arrivals);
        vector.at = shared_address(c.vector) + c.warp * vector.REGION;
#pragma unroll
        for (int first = 0; first < PIECES; first += TURN) {
            uint4 x[TURN];
            await_pieces(c, first, unit, posted, x, [&](const uint4& v) { return tagged_pairs(v, from.tag); });
            vector.template put<PIECES>(lane, first, x);
        }
        __syncwarp();
        vector.hold(c, lane);
    }

    // Waits for the warp's columns of a posted vector of floats, takes them times `scale` and the norm's weights, and
    // returns the lane's share of the sum of squares.
    __device__ __forceinline__ float prepare(const Consumer& c, const Source& from, const float* norm, float scale) {
        static_assert(!PAIRS);
        const int lane = here(c.lane), unit = lane / 16;
        const int column = c.warp * UNIT + lane % 16 * 4 + unit * (8 * UNIT);
        float4 weights[PIECES];
#pragma unroll
        for (int j = 0; j < PIECES; j++) {
            weights[j] = make_float4(0, 0, 0, 0);
            if (C::has(c.warp, EACH * j + unit)) weights[j] = __ldg(reinterpret_cast<const float4*>(norm + column + j * 16 * UNIT));
        }
        c.await(from.counter, from.arrivals);
        vector.at = shared_address(c.vector) + c.warp * vector.REGION;
        float squares = 0;
#pragma unroll
        for (int first = 0; first < PIECES; first += TURN) {
            float4 x[TURN];
            await_pieces(c, first, unit, from.posted + column, x, [&](const float4& v) { return tagged(v, from.tag); });
#pragma unroll
            for (int j = 0; j < TURN; j++) {
                float4& v = x[j];
                const float4 w = weights[first + j < PIECES ? first + j : 0];
                squares += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
                v.x *= w.x, v.y *= w.y, v.z *= w.z, v.w *= w.w;
                v.x *= scale, v.y *= scale, v.z *= scale, v.w *= scale;
            }
            vector.template put<PIECES>(lane, first, x);
        }
        __syncwarp();
        vector.hold(c, lane);
        return squares;
    }

    // Pieces `first` and on of the vector, read until they are what is awaited; zeros where the warp has none. A piece of four words is
    // 8 x EACH units further.
    template <class Piece, class Awaited>
    static __device__ __forceinline__ void await_pieces(const Consumer& c, int first, int unit, const float* posted, Piece (&x)[TURN], Awaited awaited) {
        constexpr int APART = 8 * EACH * UNIT / (PAIRS ? 2 : 1);
        bool missing[TURN];
#pragma unroll
        for (int j = 0; j < TURN; j++) x[j] = Piece{}, missing[j] = C::has(c.warp, EACH * (first + j) + unit);
        Patience patience;
        for (bool again = true; again;) {
            again = false;
#pragma unroll
            for (int j = 0; j < TURN; j++) load_posted_if(missing[j], x[j], posted + (first + j) * APART);
#pragma unroll
            for (int j = 0; j < TURN; j++) {
                missing[j] &= !awaited(x[j]);
                again |= missing[j];
            }
            patience.spend();
        }
        __syncwarp();
    }
};

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
        const int block = 2 * (c.warp + lane % 4 / 2 * CONSUMERS) + lane % 2;  // whose sum the lane ends with
        p.scales = BOX * GROUP + lane / 4 * (PITCH * 4) + block * (Layout<T>::SCALES * 2);
        return p;
    }
};

// Multiplies `panels` panels that come through the ring; each warp's sums go to its rows of c.sums. Panels of one chunk go in twos, narrow
// ones in fours, so that one's latencies hide the other's.
template <Type T, int K, bool PAIRS>
__device__ __forceinline__ void multiply(Consumer& c, const Input<T, K, PAIRS>& input, int panels) {
    using C = Columns<T, K>;
    constexpr int EACH = Operand<T>::UNITS, MOST = (C::CHUNK_MINE + EACH - 1) / EACH;  // operands of a chunk
    const auto place = Place<T>::template of<C::PITCH, C::BOX>(c);
    const int t = c.lane % 4;
    uint32_t to = shared_address(c.sums + c.warp * c.sum_rows + c.lane / 4);
    auto load = [&](Tiles<T, MOST>& tiles, int chunk) {
        c.ring.wait_full();
        tiles.load(c.ring.data(C::SLOT), place, C::mine(chunk));
        __syncwarp();
        if (c.lane == 0) c.ring.release();
        c.ring.advance(C::SLOT);
    };
    auto add = [&](Sum<T, PAIRS>& sum, const Tiles<T, MOST>& tiles, int chunk) {
#pragma unroll
        for (int i = 0; i < MOST; i++) {
            const int n = chunk * MOST + i;
            if (EACH * i >= C::mine(chunk) || !C::has(c.warp, EACH * n)) continue;
            sum.add(tiles, i, input.vector.get(c, n, t), C::has(c.warp, EACH * n + 1), t);
        }
    };
    // As many panels at once as `sums` has.
    auto turn = [&](auto& sums) {
        constexpr int PANELS = sizeof(sums) / sizeof(sums[0]);
        static_assert(PANELS == 1 || C::CHUNKS == 1);  // a panel's chunks come one after the other
#pragma unroll
        for (int i = 0; i < PANELS; i++) sums[i].clear();
#pragma unroll(Vector<T, K, PAIRS>::HELD ? C::CHUNKS : 1)
        for (int chunk = 0; chunk < C::CHUNKS; chunk++) {
            Tiles<T, MOST> tiles[PANELS];
#pragma unroll
            for (int i = 0; i < PANELS; i++) load(tiles[i], chunk);
#pragma unroll
            for (int i = 0; i < PANELS; i++) add(sums[i], tiles[i], chunk);
        }
#pragma unroll
        for (int i = 0; i < PANELS; i++) {
            const float v = sums[i].take(t);
            if (t == 0) store_shared(to, __float_as_uint(v));
            to += PANEL * 4;
        }
        panels -= PANELS;
    };
    constexpr int MANY = C::CHUNKS > 1 ? 1 : C::MINE <= 2 ? 4 : 2;
#pragma unroll 1
    while (panels >= MANY) {
        Sum<T, PAIRS> sums[MANY];
        turn(sums);
    }
    if constexpr (MANY > 2)
        if (panels >= 2) {
            Sum<T, PAIRS> sums[2];
            turn(sums);
        }
    if (panels > 0) {
        Sum<T, PAIRS> sums[1];
        turn(sums);
    }
}

#endif
