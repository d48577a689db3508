// The persistent decode kernel's matrix-vector products: a vector waited for, split and multiplied by panels from the ring.

#pragma once

#include "hopper_decode_plan.cuh"

namespace hopper {

// What a consumer warp carries through the phases.
struct Consumer {
    Ring ring;
    int warp, lane;
    float* vector;   // the phase's input as bf16 parts, a region a warp
    float* sums;     // [CONSUMERS][high, low parts of the input][ROWS_AT_ONCE]
    float* out;      // the slice to write next
    float* squares;  // [CONSUMERS]

    __device__ void sync() const { sync_named(1, CONSUMERS * 32); }

    // Waits until `arrivals` blocks have posted their words, or very nearly so.
    __device__ void await(const uint32_t* counter, uint32_t arrivals) const {
        if (warp == 1) await_count(counter, arrivals);
        sync();
    }

    // Warp 0 writes the first `bytes` of `out` and counts the block in.
    __device__ void publish(float* to, uint32_t bytes, uint32_t* counter) const {
        fence_bulk();
        __syncwarp();
        if (lane == 0) {
            bulk_store(to, out, bytes);
            bulk_store_wait();
            count(counter);
        }
        __syncwarp();
    }
};

// The columns of a K-wide panel that a warp multiplies: 1 / CONSUMERS of each chunk.
template <int K>
struct Columns {
    static_assert(K % (CONSUMERS * 32) == 0);
    static constexpr int CHUNKS = (K + CHUNK - 1) / CHUNK;
    static constexpr int WARP = K / CONSUMERS;
    static constexpr bool IN_REGISTERS = WARP <= 512;

    static __device__ constexpr int width(int chunk) {
        return (chunk * CHUNK + CHUNK <= K ? CHUNK : K - chunk * CHUNK) / CONSUMERS;
    }
};

// A phase's input vector, held by each warp for its columns.
template <int K>
struct Input {
    using C = Columns<K>;
    float4 x[C::CHUNKS], norm[C::CHUNKS];
    uint32_t parts[C::IN_REGISTERS ? C::WARP / 32 : 1][4];
    uint32_t at;  // shared address of the warp's columns: the high parts, then the low ones
    float own_squares;

    // Calls `f(chunk, column)` for each four columns of the lane.
    template <class F>
    static __device__ __forceinline__ void each(const Consumer& c, F f) {
#pragma unroll
        for (int i = 0; i < C::CHUNKS; i++)
            if (c.lane * 4 < C::width(i)) f(i, i * CHUNK + c.warp * C::width(i) + c.lane * 4);
    }

    // The norm's weights depend on nothing and are fetched early.
    __device__ __forceinline__ void fetch_norm(const Consumer& c, const float* weight) {
        each(c, [&](int i, int column) { norm[i] = *reinterpret_cast<const float4*>(weight + column); });
    }

    // Waits for the warp's columns of a posted vector.
    __device__ __forceinline__ void await(const Consumer& c, const float* vector, uint32_t tag) {
        each(c, [&](int i, int column) { load_posted(x[i], vector + column); });
        bool again;
        do {
            again = false;
            each(c, [&](int i, int column) {
                if (!tagged(x[i], tag)) {
                    load_posted(x[i], vector + column);
                    again = true;
                }
            });
        } while (again);
        __syncwarp();
    }

    // Splits the columns into bf16 parts for `tile`, after scaling them with the norm's weights where `NORM`.
    template <bool NORM>
    __device__ __forceinline__ void prepare(const Consumer& c) {
        at = shared_address(c.vector) + c.warp * C::WARP * 4;
        float squares = 0;
        each(c, [&](int i, int) {
            float4 v = x[i];
            if (NORM) {
                squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
                v.x *= norm[i].x, v.y *= norm[i].y, v.z *= norm[i].z, v.w *= norm[i].w;
            }
            uint32_t h0, h1, l0, l1;
            split(v.x, v.y, h0, l0);
            split(v.z, v.w, h1, l1);
            uint32_t to = at + (i * (CHUNK / CONSUMERS) + c.lane * 4) * 2;
            asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(h0), "r"(h1) : "memory");
            asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + C::WARP * 2), "r"(l0), "r"(l1) : "memory");
        });
        __syncwarp();
        at += (c.lane % 2) * C::WARP * 2 + (c.lane / 8) * 16;  // row and tile that this lane addresses
        if constexpr (C::IN_REGISTERS)
#pragma unroll
            for (int q = 0; q < C::WARP / 32; q++) load_tiles(parts[q], at + q * 64);
        own_squares = squares;
    }

    // The warp's sum of squares, for inverse_norm. Nothing waits for it before a phase's end.
    __device__ __forceinline__ void share_squares(const Consumer& c) const {
        float squares = warp_sum(own_squares);
        if (c.lane == 0) c.squares[c.warp] = squares;
    }

    // 32 columns: even rows the high parts, odd rows the low ones.
    __device__ __forceinline__ void tile(int q, uint32_t (&r)[4]) const {
        if constexpr (C::IN_REGISTERS)
            for (int i = 0; i < 4; i++) r[i] = parts[q][i];
        else
            load_tiles(r, at + q * 64);
    }
};

// Multiplies `tiles` panels that come through the ring; each warp's sums go to its rows of c.sums. A panel's sums are
// stored while the next panel's tiles are on their way from shared memory.
template <int K>
__device__ __forceinline__ void multiply_panels(Consumer& c, const Input<K>& input, int tiles) {
    using C = Columns<K>;
    constexpr int MOST = CHUNK / CONSUMERS / 32;
    float sum[MOST][4] = {};
    float* to = c.sums + (c.warp * 2 + c.lane / 4) * ROWS_AT_ONCE + c.lane % 4 * 2;
    auto store = [&] {
        if (c.lane < 8)  // rows 0 and 1
            *reinterpret_cast<float2*>(to) = make_float2((sum[0][0] + sum[1][0]) + (sum[2][0] + sum[3][0]),
                                                         (sum[0][1] + sum[1][1]) + (sum[2][1] + sum[3][1]));
        to += 8;
    };
    for (int tile = 0; tile < tiles; tile++)
#pragma unroll
        for (int i = 0; i < C::CHUNKS; i++) {
            uint32_t w[MOST][4];
            uint32_t at = c.ring.data() + c.warp * C::width(i) * 16 + c.lane * 16;
            c.ring.wait_full();
#pragma unroll
            for (int q = 0; q < C::width(i) / 32; q++) load_tiles(w[q], at + q * 512);
            __syncwarp();
            if (c.lane == 0) c.ring.release(1);
            c.ring.advance();
            if (i == 0) {
                if (tile > 0) store();
                for (auto& s : sum) s[0] = s[1] = s[2] = s[3] = 0;
            }
#pragma unroll
            for (int q = 0; q < C::width(i) / 32; q++) {
                uint32_t x[4];
                input.tile(i * MOST + q, x);
                multiply(sum[q], x[0], 0, x[1], 0, w[q][0], w[q][1]);
                multiply(sum[q], x[2], 0, x[3], 0, w[q][2], w[q][3]);
            }
        }
    store();
}

// A row's sum over parts and warps.
__device__ __forceinline__ float row_sum(const Consumer& c, int row) {
    float s = 0;
#pragma unroll
    for (int w = 0; w < CONSUMERS; w++) s += c.sums[2 * w * ROWS_AT_ONCE + row] + c.sums[(2 * w + 1) * ROWS_AT_ONCE + row];
    return s;
}

// 1 / sqrt(mean square + epsilon) from the warps' sums.
__device__ __forceinline__ float inverse_norm(const Consumer& c, int width) {
    float s = 0;
#pragma unroll
    for (int w = 0; w < CONSUMERS; w++) s += c.squares[w];
    return rsqrtf(s / width + EPSILON);
}

// After multiply_panels: warp 0 goes on with everybody's sums, the others go to the next phase. They cannot overtake it,
// because the next phase's input depends on what it posts.
__device__ __forceinline__ bool last_part(const Consumer& c) {
    if (c.warp != 0) {
        arrive_named(2, CONSUMERS * 32);
        return false;
    }
    sync_named(2, CONSUMERS * 32);
    return true;
}

// W_qkv norm(x), the vector already in `input`.
template <int HIDDEN>
__device__ __forceinline__ void project_qkv(Consumer& c, Input<HIDDEN>& input, Share share, float* qkv, uint32_t tag, uint32_t* counter) {
    input.template prepare<true>(c);
    multiply_panels<HIDDEN>(c, input, share.count);
    input.share_squares(c);
    if (!last_part(c)) return;
    float scale = inverse_norm(c, HIDDEN);
#pragma unroll 1
    for (int row = c.lane; row < share.count * 8; row += 32) c.out[row] = tag_word(row_sum(c, row) * scale, tag);
    c.publish(qkv + share.first * 8, share.count * 32, counter);
}

// silu(W_gate norm(y)) * W_up norm(y).
template <int HIDDEN>
__device__ __forceinline__ void project_gate_up(Consumer& c, Input<HIDDEN>& input, Share share, float* h, uint32_t tag, uint32_t* counter) {
    input.template prepare<true>(c);
    multiply_panels<HIDDEN>(c, input, share.count);
    input.share_squares(c);
    if (!last_part(c)) return;
    float scale = inverse_norm(c, HIDDEN);
#pragma unroll 1
    for (int i = c.lane; i < share.count * 4; i += 32) {
        float gate = row_sum(c, 2 * i) * scale, up = row_sum(c, 2 * i + 1) * scale;
        c.out[i] = tag_word(__fdividef(gate, 1 + __expf(-gate)) * up, tag);
    }
    c.publish(h + share.first * 4, share.count * 16, counter);
}

// residual + W vector, the residual through `residual(row)`.
template <int K, class Residual>
__device__ __forceinline__ void project_back(Consumer& c, const float* vector, Residual residual, Share share, float* to, uint32_t tag,
                                             const uint32_t* ready, uint32_t arrivals, uint32_t* counter) {
    if (share.count == 0) return;
    Input<K> input;
    float before[2] = {};
    if (c.warp == 0)
        for (int i = 0; i < 2; i++)
            if (c.lane + 32 * i < share.count * 8) before[i] = residual(share.first * 8 + c.lane + 32 * i);
    c.await(ready, arrivals);
    input.await(c, vector, tag);
    input.template prepare<false>(c);
    multiply_panels<K>(c, input, share.count);
    if (!last_part(c)) return;
    for (int i = 0; i < 2; i++) {
        int row = c.lane + 32 * i;
        if (row < share.count * 8) c.out[row] = tag_word(before[i] + row_sum(c, row), tag);
    }
    c.publish(to + share.first * 8, share.count * 32, counter);
}

}  // namespace hopper
