// The decode kernel's matrix-vector products (decode.cu): a vector waited for and split, and multiplied by panels from
// the ring.
//
// A tile is a panel's 8 rows over two lines, 2 KB. In the A operand of mma.m16n8k16 rows 0-7 and rows 8-15 are the panel's
// rows in two different places: of quants, the first and the second line; of fp16, words 0 and 2 and words 1 and 3 of 16
// bytes. B holds the vector's high and low fp16 parts for the first place in columns 0 and 1, for the second in columns 2
// and 3: their sum carries 22 bits. So sums 0 and 1 of the lanes with t = 0, and sums 2 and 3 of those with t = 1, are
// what counts. The warps of a block take the tiles of the slots
// in turns; their sums are added in warp order, so the bits never change.
//
// Quantised weights become subnormal fp16, exactly and without arithmetic: an integer q in the low bits of a half is
// q x 2^-24. A product of a block of 32 is scaled in fp32 afterwards; the offset of the integers (8, or 128) goes by the
// sum of the vector's block. The order of k within a block is free as long as the vector lies alike.
#pragma once

#include "decode_plan.cuh"

#if HOPPER

constexpr float QUANT_SCALE = 1.0f / 16777216.0f;
// SwiGLU products are stored times this, so that fp16 holds up to a million; other vectors by what they are.
constexpr float PRODUCT_SCALE = 1.0f / 16.0f;
constexpr int PIECES = 5;  // of 1,024 columns, that are waited for at once; hidden widths have no more

template <Type T>
struct Format {
    static constexpr int COLUMNS = LINE * Layout<T>::PER16 / 16;  // of a line
    static constexpr int BLOCKS = COLUMNS / 32;                   // of 32 columns
    // What a quant's value lacks, times the scale of its block.
    static constexpr float OFFSET = T == Q8_0 ? 128 : T == Q4_0 ? 8 : 1;
    // Tiles that a warp takes into registers while it waits for the vector.
    static constexpr int AHEAD = T == F16 ? 3 : 2;
    // Bytes from the high to the low parts of a vector, beyond its length: reads of both are free of bank conflicts.
    static constexpr int APART = T == F16 ? 16 : 64;
};

// What a consumer warp carries through the phases.
struct Consumer {
    Ring ring;
    int warp, lane;
    uint8_t* vector;          // the phase's input as fp16 parts
    float* block_sums;        // of the input, [columns / 32]
    float* sums;              // [CONSUMERS][sum_rows]
    int sum_rows;
    float* out;               // the slice to write next
    float* squares;           // [CONSUMERS]
    const float2* rotations;  // [64]
    volatile int* far;        // tells the producer that no exchange is near

    __device__ void sync() const { sync_named(1, CONSUMERS * 32); }

    // Waits until `arrivals` warps have posted their words, or very nearly so.
    __device__ void await(const uint32_t* counter, uint32_t arrivals) const {
        if (warp == CONSUMERS - 1) await_count(counter, arrivals);
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

    // Posts `outputs` values, 32 a warp; the other warps go on. They cannot overtake, since the next phase's input depends
    // on what is posted.
    template <class Value>
    __device__ void publish(int outputs, float* to, uint32_t tag, uint32_t* counter, Value value) const {
        if (outputs == 0) return;
        if (warp * 32 >= outputs) {
            arrive_named(2, CONSUMERS * 32);
            return;
        }
        sync_named(2, CONSUMERS * 32);
        int i = warp * 32 + lane;
        if (i < outputs) out[i] = tag_word(value(i), tag);
        fence_bulk();
        __syncwarp();
        if (lane == 0) {
            bulk_store(to + warp * 32, out + warp * 32, min(32, outputs - warp * 32) * 4);
            bulk_store_wait();
            count(counter);
        }
        __syncwarp();
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

// Stores columns 4 i to 4 i + 3 of a vector of `low` bytes between its parts. A warp's lanes hold consecutive `i`.
template <Type T>
__device__ __forceinline__ void store_input(const Consumer& c, int i, float4 v, int low) {
    uint32_t h0, h1, l0, l1, at = shared_address(c.vector);
    if constexpr (T != Q8_0) {
        // Of 4 bits, the second pair meets quants that are 16 times too large.
        constexpr float SECOND = T == F16 ? 1.0f : 0.0625f;
        constexpr int NEXT = T == F16 ? 16 : 8;
        split(v.x, v.y, h0, l0), split(v.z * SECOND, v.w * SECOND, h1, l1);
        at += T == F16 ? i / 4 * 32 + i / 2 % 2 * 8 + i % 2 * 4 : i / 2 * 16 + i % 2 * 4;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(h0) : "memory");
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + NEXT), "r"(h1) : "memory");
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + low), "r"(l0) : "memory");
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + low + NEXT), "r"(l1) : "memory");
    } else {
        split(v.x, v.y, h0, l0), split(v.z, v.w, h1, l1);
        at += i / 8 * 64 + i % 4 * 16 + i / 4 % 2 * 8;
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(h0), "r"(h1) : "memory");
        asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at + low), "r"(l0), "r"(l1) : "memory");
    }
    if constexpr (T != F16) {
        float s = (v.x + v.y) + (v.z + v.w);
#pragma unroll
        for (int m = 1; m < 8; m *= 2) s += __shfl_xor_sync(0xffffffffu, s, m);
        if (c.lane % 8 == 0) c.block_sums[i / 8] = s * (Format<T>::OFFSET * QUANT_SCALE);
    }
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

// Columns of a vector up to the end of a tile, and the bytes from its high to its low parts.
template <Type T>
__device__ __forceinline__ int padded_columns(int columns) {
    constexpr int TILE = 2 * Format<T>::COLUMNS;
    return (columns + TILE - 1) / TILE * TILE;
}
template <Type T>
__device__ __forceinline__ int input_apart(int columns) {
    return padded_columns<T>(columns) * 2 + Format<T>::APART;
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

// Waits for a vector of `columns`, splits it, times `scale` and the norm's weights if there are any, into c.vector, and
// then leaves its sum of squares in c.squares. Columns up to the end of a tile become zeros.
template <Type T>
__device__ __forceinline__ void prepare(const Consumer& c, const Source& from, const float* norm, float scale, int columns, int low) {
    const int count = columns / 4, padded = padded_columns<T>(columns) / 4;
    float4 weights[PIECES];
    if (norm) {
#pragma unroll
        for (int k = 0; k < PIECES; k++) {
            int i = threadIdx.x + k * CONSUMERS * 32;
            if (i < count) weights[k] = __ldg(reinterpret_cast<const float4*>(norm) + i);
        }
    }
    c.await(from.counter, from.arrivals);
    float squares = 0;
#pragma unroll 1
    for (int first = threadIdx.x; first < padded; first += PIECES * CONSUMERS * 32) {
        float4 x[PIECES];
#pragma unroll
        for (int k = 0; k < PIECES; k++) {
            int i = first + k * CONSUMERS * 32;
            x[k] = make_float4(0, 0, 0, 0);
            if (i < count) load_posted(x[k], from.posted + 4 * i);
        }
        Patience patience;
        for (;;) {
            bool again = false;
#pragma unroll
            for (int k = 0; k < PIECES; k++) {
                int i = first + k * CONSUMERS * 32;
                if (i < count && !tagged(x[k], from.tag)) {
                    load_posted(x[k], from.posted + 4 * i);
                    again = true;
                }
            }
            if (!again) break;
            patience.spend();
        }
        __syncwarp();
#pragma unroll
        for (int k = 0; k < PIECES; k++) {
            int i = first + k * CONSUMERS * 32;
            if (i >= padded) break;
            float4 v = x[k];
            float4 w = make_float4(1, 1, 1, 1);
            if (norm && i < count) {
                squares += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
                w = weights[k];
            }
            store_input<T>(c, i, make_float4(v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z, v.w * scale * w.w), low);
        }
    }
    if (norm) {
        squares = warp_sum(squares);
        if (c.lane == 0) c.squares[c.warp] = squares;
    }
    c.sync();
}

// ---- tiles

__device__ __forceinline__ void load_shared(uint32_t& a, uint32_t at) {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_shared(uint32_t* a, uint32_t at) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
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

// The lane's share of a tile: of rows lane / 4 in both lines. fp16: [line][half][4], where the half says which of 16-byte
// pieces 2 t and 2 t + 1; quants: [line][piece], the t-th word of each 16-byte piece.
template <Type T>
struct Tile {
    static constexpr int WORDS = T == F16 ? 1 : Scales<T>::WORDS;
    uint32_t w[16], scales[WORDS];

    // Tile `pair` of the slot.
    __device__ __forceinline__ void load(uint32_t slot, int pair, const Chunks& m, int lane) {
        const int g = lane / 4, t = lane % 4;
        uint32_t row = slot + pair * 2 * GROUP + g * LINE;
#pragma unroll
        for (int line = 0; line < 2; line++)
#pragma unroll
            for (int i = 0; i < (T == F16 ? 2 : 8); i++) {
                if constexpr (T == F16) load_shared(w + (line * 2 + i) * 4, row + line * GROUP + (((2 * t + i) ^ g) << 4));
                else load_shared(w[line * 8 + i], row + line * GROUP + ((i ^ g) << 4) + t * 4);
            }
        if constexpr (T != F16) {
            uint32_t at = slot + m.chunk * GROUP + (g * Scales<T>::pitch(m) + (2 * pair + (t & 1)) * WORDS) * 4;
            if constexpr (WORDS == 2)
                asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(scales[0]), "=r"(scales[1]) : "r"(at) : "memory");
            else
#pragma unroll
                for (int i = 0; i < WORDS; i += 4) load_shared(scales + i, at + i * 4);
        }
    }
};

// The lane's share of the vector for a tile: columns lane / 4 % 4 of B, and the sums of the blocks of line t % 2.
template <Type T>
struct Operand {
    static constexpr int WORDS = T == F16 ? 8 : 4 * Format<T>::BLOCKS, SUMS = T == F16 ? 1 : Format<T>::BLOCKS;
    uint32_t b[WORDS];
    float sums[SUMS];

    // For lines `line` and `line` + 1.
    __device__ __forceinline__ void load(const Consumer& c, int line, int low) {
        const int n = c.lane / 4, t = c.lane % 4;
        if (n < 4) {  // the other columns' sums are not used
            uint32_t at = shared_address(c.vector) + (n & 1) * low + line * Format<T>::COLUMNS * 2 +
                          n / 2 * (T == F16 ? 16 : Format<T>::COLUMNS * 2) + t * (T == F16 ? 32 : 16);
#pragma unroll
            for (int i = 0; i < WORDS / 4; i++) load_shared(b + 4 * i, at + i * (T == F16 ? LINE : 64));
        }
        if constexpr (T != F16) {
            const float4* at = reinterpret_cast<const float4*>(c.block_sums + (line + t % 2) * Format<T>::BLOCKS);
#pragma unroll
            for (int i = 0; i < SUMS; i += 4) {
                float4 v = at[i / 4];
                sums[i] = v.x, sums[i + 1] = v.y, sums[i + 2] = v.z, sums[i + 3] = v.w;
            }
        }
    }
};

// A panel's sums so far, of this warp's tiles.
template <Type T>
struct Sum {
    float d[2][4] = {}, q = 0;

    __device__ __forceinline__ void add(const Tile<T>& a, const Operand<T>& x, int t) {
        const uint32_t* w = a.w;
        if constexpr (T == F16) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                mma_next(d[i % 2], w[i * 4], w[i * 4 + 1], w[i * 4 + 2], w[i * 4 + 3], x.b[i * 2], x.b[i * 2 + 1]);
        } else {
#pragma unroll
            for (int block = 0; block < Format<T>::BLOCKS; block++) {
                float e[4];
                const uint32_t* b = x.b + block * 4;
                if constexpr (T == Q8_0) {
                    uint32_t u = w[block * 2], v = w[block * 2 + 8];
                    mma_first(e, low_bytes(u), low_bytes(v), high_bytes(u), high_bytes(v), b[0], b[1]);
                    u = w[block * 2 + 1], v = w[block * 2 + 9];
                    mma_next(e, low_bytes(u), low_bytes(v), high_bytes(u), high_bytes(v), b[2], b[3]);
                } else {
                    uint32_t u = w[block], v = w[block + 8], u8 = u >> 8, v8 = v >> 8;
                    mma_first(e, u & 0x000f000f, v & 0x000f000f, u8 & 0x000f000f, v8 & 0x000f000f, b[0], b[1]);
                    mma_next(e, u & 0x00f000f0, v & 0x00f000f0, u8 & 0x00f000f0, v8 & 0x00f000f0, b[2], b[3]);
                }
                float product = t & 1 ? e[2] + e[3] : e[0] + e[1];
                if constexpr (T == Q4_1) {
                    float2 s = __half22float2(halves(a.scales[block]));
                    q += s.x * product + s.y * x.sums[block];
                } else {
                    float2 s = __half22float2(halves(a.scales[block / 2]));
                    q += (block % 2 ? s.y : s.x) * (product - x.sums[block]);
                }
            }
        }
    }

    // Row lane / 4's, in the lanes with t < 2.
    __device__ __forceinline__ float take(int t) {
        float v = T == F16 ? (t & 1 ? (d[0][2] + d[0][3]) + (d[1][2] + d[1][3]) : (d[0][0] + d[0][1]) + (d[1][0] + d[1][1])) : q;
        *this = Sum();
        return v + __shfl_xor_sync(0xffffffffu, v, 1);
    }

    // Bytes 0 and 1, or 2 and 3, as halves.
    static __device__ __forceinline__ uint32_t low_bytes(uint32_t w) { return __byte_perm(w, 0, 0x4140); }
    static __device__ __forceinline__ uint32_t high_bytes(uint32_t w) { return __byte_perm(w, 0, 0x4342); }
};

// ---- products

// A warp's way through the slots of a product: which tile of each it takes.
struct Walk {
    int warp, chunk_groups, chunks;
    int whole, rest;  // tiles of a chunk, and of a panel's last one
    int slot = 0, chunk = 0, turn = 0;

    __device__ Walk(const Chunks& m, int warp)
        : warp(warp), chunk_groups(m.chunk), chunks(m.chunks), whole(m.chunk / 2),
          rest((m.groups - (m.chunks - 1) * m.chunk + 1) / 2) {}

    __device__ bool ends_panel() const { return chunk + 1 == chunks; }
    // Tiles of the slot.
    __device__ int pairs() const { return ends_panel() ? rest : whole; }
    // This warp's; none if there are no more than that.
    __device__ int pair() const { return (warp - turn) & (CONSUMERS - 1); }
    __device__ bool mine() const { return pair() < pairs(); }
    __device__ int line() const { return chunk * chunk_groups + 2 * pair(); }
    __device__ void next() {
        turn += pairs();
        slot++;
        if (++chunk == chunks) chunk = 0;
    }
};

// Multiplies `panels` panels by a vector; each warp's sums go to its rows of c.sums. Tiles that have already arrived are taken
// into registers before `ready` waits for the vector.
template <Type T, class Ready>
__device__ __forceinline__ void multiply(Consumer& c, const Chunks m, int panels, int low, Ready ready) {
    static_assert(CONSUMERS == 8);
    constexpr int AHEAD = Format<T>::AHEAD;
    const int slots = panels * m.chunks, t = c.lane % 4;
    auto release = [&] {
        __syncwarp();
        if (c.lane == 0) c.ring.release();
        c.ring.advance();
    };
    Tile<T> ahead[AHEAD];
    Walk front{m, c.warp};
    int taken = 0;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        if (taken < i) break;
        while (front.slot < slots && __all_sync(0xffffffffu, c.ring.is_full())) {
            bool mine = front.mine();
            if (mine) ahead[i].load(c.ring.data(), front.pair(), m, c.lane);
            release();
            front.next();
            if (mine) {
                taken++;
                break;
            }
        }
    }
    ready();

    Walk walk{m, c.warp};
    Sum<T> sum;
    Operand<T> x;
    if (c.lane / 4 >= 4)
#pragma unroll
        for (uint32_t& b : x.b) b = 0;
    int held = -1;  // the line for which `x` is
    uint32_t to = __shfl_sync(0xffffffffu, shared_address(c.sums + c.warp * c.sum_rows + c.lane / 4), c.lane);
    auto operand = [&] {
        if (held != walk.line()) x.load(c, held = walk.line(), low);
    };
    auto next = [&] {
        if (walk.ends_panel()) {
            float v = sum.take(t);
            if (t == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
            to += PANEL * 4;
        }
        walk.next();
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        if (i >= taken) break;
        for (; !walk.mine(); next()) {}
        operand();
        sum.add(ahead[i], x, t);
        next();
    }
    while (walk.slot < front.slot) next();  // what was passed after the last of those tiles
    const int last = slots - 3;             // from here on the next exchange is near
    if (c.warp == 0 && c.lane == 0 && walk.slot < last) *c.far = 1;
    for (; walk.slot < slots; next()) {
        if (c.warp == 0 && c.lane == 0 && walk.slot == last) *c.far = 0;
        const bool mine = walk.mine();
        if (mine) operand();
        Tile<T> tile;
        c.ring.wait_full();
        if (mine) tile.load(c.ring.data(), walk.pair(), m, c.lane);
        release();
        if (mine) sum.add(tile, x, t);
    }
}

#endif
