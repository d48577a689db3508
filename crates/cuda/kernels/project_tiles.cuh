// Projection of many tokens on Hopper (prefill): Y = X W^T, X fp16 [tokens][cols], W any type [rows][cols].
//
// Floor: 2 tokens rows cols operations over the rate of wgmma.
// The weights are the M side, so that quantised ones can be its operand in registers. A cluster of two blocks computes 256 weight rows x
// WIDTH tokens: each block 128 rows of its own, two warpgroups 64 each, over tokens that both share. Tall tiles (HIGH = 2, fp16 only) have
// twice the rows, so that a multiprocessor takes in fewer bytes an operation, whose energy is what long runs are short of. One thread a
// block streams its weights, and half of the tokens to both blocks, through a ring of stages of 64 columns, across tiles. fp16 weights are
// read by wgmma where they land; quantised ones are expanded to fp16 in registers, one stage ahead of the products.
// Sums leave through shared memory as boxes of a tensor, asynchronously, and so does the addition to the residual stream, which
// the L2 cache performs: an element gets one addition a launch. Those of Q, K and V, of which a tile of rows is a head, go on to where
// attention looks for them (head_tiles.cuh). k runs upwards in steps of 16 for every width: a token's sum depends
// on nothing but its activations. Of tiles `group` wide in tokens and all rows high are taken at a time, tokens fastest.
// Grid: an even number of blocks, at most one a multiprocessor; 384 threads. rows % 128 = 0, cols % 256 = 0.
#pragma once

#include "cluster.cuh"
#include "epilogue.cuh"
#include "head_tiles.cuh"
#include "weights.cuh"

constexpr int TILE_ROWS = 128;  // weight rows of a block's tile, or of each of its halves if it is tall
constexpr int DEPTH = 64;       // columns of a stage
constexpr int PIECE = 32;       // tokens that leave at once, where sums are fp32

// What becomes of sums, beside what epilogue.cuh knows: RESIDUAL, SWIGLU, or the placing of heads.
constexpr Epilogue HEADS = STORE;

struct Shape {
    const __half* scales;
    float factor;
    int tokens, rows, cols;
    int group;  // tiles of tokens
};

struct Maps {
    CUtensorMap weights;  // quants in boxes of 128 rows, 64 columns; HEADS: of heads, pieces of eight rows followed by those 64 rows further
    CUtensorMap x;        // in boxes of WIDTH / 2 tokens, 64 columns
    CUtensorMap out;      // RESIDUAL: fp32, 32 tokens, 32 rows; SWIGLU: fp16, WIDTH tokens, 32 products
};

#if HOPPER

template <int HIGH, int WIDTH, Type T>
struct Ring {
    static constexpr int WEIGHT_ROW = DEPTH * 16 / Layout<T>::PER16;  // bytes
    static constexpr int HALF = TILE_ROWS * WEIGHT_ROW, WEIGHTS = HIGH * HALF;
    static constexpr int STAGE = WEIGHTS + WIDTH * DEPTH * 2;
    static constexpr int STAGING = (HIGH + 1) << 14;  // bytes of sums on their way out
    static constexpr int ROOM = (232448 - 2048 - STAGING) / STAGE;
    static constexpr int STAGES = ROOM < 8 ? ROOM : 8;
};

// The tiles of a cluster: those at work share weights, and activations.
template <int HIGH, int WIDTH>
struct Tiles {
    static constexpr int ROWS = HIGH * TILE_ROWS;
    int across, up, group, next;

    __device__ __forceinline__ Tiles(const Shape& s) {
        across = (s.tokens + WIDTH - 1) / WIDTH;
        up = (s.rows + 2 * ROWS - 1) / (2 * ROWS);
        group = s.group;
        next = blockIdx.x / 2;
    }

    // How many this cluster takes.
    __device__ __forceinline__ int count() const { return max(0, (up * across - next - 1) / int(gridDim.x / 2) + 1); }

    // First weight row of this block and first token of the tile.
    __device__ __forceinline__ bool take(int& row0, int& token0) {
        if (next >= up * across) return false;
        int first = next / (up * group) * group, wide = min(group, across - first), rest = next - first * up;
        row0 = (rest / wide * 2 + cluster_rank()) * ROWS;
        token0 = (first + rest % wide) * WIDTH;
        next += gridDim.x / 2;
        return true;
    }
};

template <int HIGH, int WIDTH, Type T, Epilogue E>
__device__ __forceinline__ void produce(const Maps& maps, const Shape& s, uint32_t ring, uint32_t full, uint32_t empty) {
    using R = Ring<HIGH, WIDTH, T>;
    uint32_t rank = cluster_rank();
    Tiles<HIGH, WIDTH> tiles(s);
    int row0, token0, stage = 0, steps = s.cols / DEPTH;
    uint32_t parity = 1;
    bool first = true;
    while (tiles.take(row0, token0)) {
        for (int k = 0; k < steps; k++) {
            uint32_t to = ring + stage * R::STAGE, barrier = full + stage * 8;
            barrier_wait(empty + stage * 8, parity);
            barrier_expect(barrier, R::STAGE);
            int column = k * R::WEIGHT_ROW / (T == F16 ? 2 : 1);
#pragma unroll
            for (int i = 0; i < HIGH; i++) {
                if constexpr (E == HEADS) copy_head(to + i * R::HALF, &maps.weights, column, row0 / HEAD + i, barrier);
                else copy_box(to + i * R::HALF, &maps.weights, column, row0 + i * TILE_ROWS, barrier);
            }
            if (first) depend(), first = false;  // the activations are another kernel's, whose end orders its writes before these copies
            copy_box_to_both(to + R::WEIGHTS + rank * (WIDTH / 2 * DEPTH * 2), &maps.x, k * DEPTH, token0 + rank * (WIDTH / 2), barrier);
            if (++stage == R::STAGES) stage = 0, parity ^= 1;
        }
    }
}

__device__ __forceinline__ uint32_t load_shared_half(uint32_t address) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
    return v;
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

// This thread's part of 64 quantised columns of a warpgroup's 64 rows, as wgmma's A: rows g and g + 8 of a warp's 16, which are rows
// APART rows apart.
template <Type T, int APART>
struct Expander {
    const uint32_t* scales;  // of row g, a word a step; two for Q4_1
    int below;               // words to row g + 8
    uint32_t next[2][T == Q4_1 ? 2 : 1];

    __device__ __forceinline__ void fetch(int step) {
        constexpr int WORDS = T == Q4_1 ? 2 : 1;
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int i = 0; i < WORDS; i++) next[r][i] = __ldg(scales + r * below + step * WORDS + i);
        }
    }

    __device__ __forceinline__ void start(const Shape& s, int row) {
        constexpr int WORDS = T == Q4_1 ? 2 : 1;
        int words = s.cols / DEPTH * WORDS;
        row = min(row, s.rows - TILE_ROWS + row % TILE_ROWS);  // the second block's tile may lie outside
        scales = reinterpret_cast<const uint32_t*>(s.scales) + size_t(row) * words;
        below = APART * words;
        fetch(0);
    }

    // Expands the stage whose weights of this warpgroup begin at `from`; fetches the scales of step `after`.
    __device__ __forceinline__ void expand(uint32_t from, int row, int t, int after, uint32_t (&a)[4][4]) {
        Scale scale[2][2];  // [row][block of 32]
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if constexpr (T == Q4_1) {
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    __half2 both = halves(next[r][b]);
                    scale[r][b] = {__low2half2(both), __high2half2(both)};
                }
            } else {
                __half2 both = halves(next[r][0]);
                scale[r][0].scale = __low2half2(both);
                scale[r][1].scale = __high2half2(both);
            }
        }
        fetch(after);
        if constexpr (T == Q8_0) {
            const __half2 offset = __float2half2_rn(1152.0f);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint32_t at = from + (row + r * 8) * 64 + 2 * t;
#pragma unroll
                for (int i = 0; i < 8; i++) {  // eight columns; pieces of 16 bytes lie swizzled
                    uint32_t pair = load_shared_half(at + ((i / 2 ^ (row >> 1 & 3)) << 4) + i % 2 * 8);
                    __half2 q = __hsub2(halves(__byte_perm(pair, 0x64646464, 0x4140)), offset);
                    a[i / 2][i % 2 * 2 + r] = bits(__hmul2(q, scale[r][i / 4].scale));
                }
            }
        } else {
            const __half2 offset = __float2half2_rn(T == Q4_0 ? 1032.0f : 1024.0f);
#pragma unroll
            for (int r = 0; r < 2; r++) {
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    uint4 v = load_shared(from + (row + r * 8) * 32 + b * 16);
                    uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        __half2 q = __hsub2(halves(((word[i] >> (4 * t)) & 0x000f000f) | 0x64006400), offset);
                        a[b * 2 + i / 2][i % 2 * 2 + r] =
                            bits(T == Q4_0 ? __hmul2(q, scale[r][b].scale) : __hfma2(q, scale[r][b].scale, scale[r][b].minimum));
                    }
                }
            }
        }
    }
};

// Lane (g, t) of warp w holds, as sum[4 j + c], row 16 w + g + 8 (c / 2) of its warpgroup's 64 and token 8 j + 2 t + c % 2.

// Hands a warpgroup's sums to the copy engine, by its buffers in turns, of which `next` is the first.
template <int WIDTH, Epilogue E, int STAGING>
__device__ __forceinline__ void finish_tile(const Maps& maps, const Shape& s, const float (&sum)[WIDTH / 2], uint32_t staging, int& next, int row0, int token0) {
    constexpr int BUFFER = E == SWIGLU ? WIDTH * 64 : PIECE * 256, BUFFERS = STAGING / 2 / BUFFER;
    int group = threadIdx.x / 128, tid = threadIdx.x % 128, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    staging += group * (STAGING / 2);
    auto take = [&] {  // a buffer whose boxes have been read
        uint32_t buffer = staging + next * BUFFER;
        next = next + 1 < BUFFERS ? next + 1 : 0;
        if (tid == 0) boxes_read<BUFFERS - 1>();
        return buffer;
    };
    auto meet = [&] { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); };
    if constexpr (E == SWIGLU) {
        // [token][32 products]: the piece of warp w is its eight products, of 64 bytes with their swizzle.
        uint32_t buffer = take();
        meet();
#pragma unroll
        for (int q = 0; q < WIDTH / 32; q++) {
            uint32_t y[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int at = (q * 4 + i) * 4;
                y[i] = pack(swiglu(sum[at], sum[at + 2]), swiglu(sum[at + 1], sum[at + 3]));
            }
            int token = q * 32 + lane;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                             buffer + token * 64 + ((warp ^ (token >> 1 & 3)) << 4)),
                         "r"(y[0]), "r"(y[1]), "r"(y[2]), "r"(y[3])
                         : "memory");
        }
        shared_written();
        meet();
        if (tid == 0) {
            store_box(&maps.out, (row0 + group * 64) / 2, token0, buffer);
            boxes_commit();
        }
    } else {
        // [2][32 tokens][32 rows], of 128 bytes with their swizzle.
#pragma unroll
        for (int p = 0; p < WIDTH / PIECE; p++) {
            if (token0 + p * PIECE >= s.tokens) break;
            uint32_t buffer = take();
            uint32_t in = buffer + warp / 2 * (BUFFER / 2) + 2 * t * 128 + (((warp % 2 * 4 + g / 4) ^ 2 * t) << 4) + g % 4 * 4;
            meet();
#pragma unroll
            for (int i = 0; i < PIECE / 2; i++) {  // token 8 (i / 4) + 2 t + i % 2, row + 8 (i / 2 % 2)
                asm volatile("st.shared.f32 [%0], %1;" ::"r"((in ^ (i % 4) % 2 << 4 ^ (i % 4) / 2 << 5) + (i / 4 * 8 + i % 2) * 128),
                             "f"(sum[p * (PIECE / 2) + i] * s.factor)
                             : "memory");
            }
            shared_written();
            meet();
            if (tid == 0) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int row = row0 + group * 64 + half * 32, token = token0 + p * PIECE;
                    uint32_t from = buffer + half * (BUFFER / 2);
                    add_box(&maps.out, row, token, from);
                }
                boxes_commit();
            }
        }
    }
}

template <int HIGH, int WIDTH, Type T, Epilogue E>
__device__ __forceinline__ void consume(const Maps& maps, const Shape& s, const Heads& h, uint32_t ring, uint8_t* staging, uint32_t full, uint32_t empty) {
    using R = Ring<HIGH, WIDTH, T>;
    int group = threadIdx.x / 128, tid = threadIdx.x % 128;
    int steps = s.cols / DEPTH, stage = 0, row0, token0;
    uint32_t parity = 0, own = group * (R::HALF / 2);
    Tiles<HIGH, WIDTH> tiles(s);
    // To both blocks, since both fill it, if they will: whoever has left is then arrived at no more.
    int refilled = tiles.count() * steps - R::STAGES;
    auto leave = [&](int stage) {
        if (refilled-- > 0 && tid < 2) barrier_arrive_in(empty + stage * 8, tid);
    };
    auto advance = [&] {
        if (++stage == R::STAGES) stage = 0, parity ^= 1;
    };
    float sum[HIGH][WIDTH / 2];
    int buffers = 0;
    depend();
    while (tiles.take(row0, token0)) {
        int before = 0, slots[2] = {};
        if (E == HEADS && row0 + (HIGH - 1) * HEAD >= h.heads * HEAD) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int token = token0 + (i * 4 + tid % 32 / 8) * PIECE_TOKENS + tid / 32 * 8 + tid % 8;
                slots[i] = cache_slot(h.step, min(token, s.tokens - 1));
            }
        }
        if constexpr (T == F16) {
            for (int k = 0; k < steps; k++) {
                barrier_wait(full + stage * 8, parity);
                uint64_t a = operand(ring + stage * R::STAGE + own), b = operand(ring + stage * R::STAGE + R::WEIGHTS);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < DEPTH / 16; i++) {
#pragma unroll
                    for (int j = 0; j < HIGH; j++) wgmma<WIDTH>(sum[j], a + j * (R::HALF >> 4) + i * 2, b + i * 2, k > 0 || i > 0);
                }
                wgmma_commit();
                // The stage before this one is read: its products are done when at most this one's are pending.
                wgmma_wait<1>();
                if (k > 0) leave(before);
                before = stage;
                advance();
            }
        } else {
            int warp = threadIdx.x / 32, g = tid % 32 / 4, row = warp % 4 * 16 + g, t = tid % 4;
            Expander<T, E == HEADS ? 64 : 8> expander;
            expander.start(s, row0 + warp * (E == HEADS ? 8 : 16) + g);
            uint32_t a[2][4][4];
            auto expand = [&](int k, uint32_t (&to)[4][4]) {
                barrier_wait(full + stage * 8, parity);
                expander.expand(ring + stage * R::STAGE + own, row, t, min(k + 1, steps - 1), to);
            };
            auto multiply = [&](int k, uint32_t (&from)[4][4]) {
                uint64_t b = operand(ring + stage * R::STAGE + R::WEIGHTS);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < DEPTH / 16; i++) wgmma<WIDTH>(sum[0], from[i], b + i * 2, k > 0 || i > 0);
                wgmma_commit();
                wgmma_wait<1>();  // the step before this one
                if (k > 0) leave(before);
                before = stage;
                advance();
            };
            expand(0, a[0]);
            for (int k = 0; k < steps; k += 2) {  // an even number: cols % 256 = 0
                multiply(k, a[0]);
                expand(k + 1, a[1]);
                multiply(k + 1, a[1]);
                if (k + 2 < steps) expand(k + 2, a[0]);
            }
        }
        wgmma_wait<0>();
#pragma unroll
        for (int j = 0; j < HIGH; j++) settled(sum[j]);
        leave(before);
#pragma unroll
        for (int j = 0; j < HIGH; j++) {
            if constexpr (E == HEADS) HeadTile<WIDTH>(h, sum[j], staging, row0 / HEAD + j, token0, s.tokens).finish(buffers, slots);
            else finish_tile<WIDTH, E, R::STAGING>(maps, s, sum[j], shared_address(staging), buffers, row0 + j * TILE_ROWS, token0);
        }
    }
    if (tid == 0) boxes_written();
}

template <int HIGH, int WIDTH, Type T, Epilogue E>
__device__ __forceinline__ void project(const Maps& maps, const Shape& s, const Heads& h) {
    using R = Ring<HIGH, WIDTH, T>;
    static_assert(E != HEADS || HeadTile<WIDTH>::BYTES <= R::STAGING);
    extern __shared__ uint8_t dynamic[];
    __shared__ __align__(8) uint64_t barriers[2 * R::STAGES];
    uint32_t padding = -shared_address(dynamic) & 1023, ring = shared_address(dynamic) + padding;
    uint8_t* staging = dynamic + padding + R::STAGES * R::STAGE;
    uint32_t full = shared_address(barriers), empty = full + R::STAGES * 8;
    if (threadIdx.x == 0) {
        // Free are stages that two warpgroups of two blocks have read.
        for (int i = 0; i < R::STAGES; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, 4);
    }
    barriers_ready();
    release();
    int group = threadIdx.x / 128;
    if (group == 2) {
        fewer_registers<40>();
        if (threadIdx.x == 256) produce<HIGH, WIDTH, T, E>(maps, s, ring, full, empty);
    } else {
        more_registers<232>();
        consume<HIGH, WIDTH, T, E>(maps, s, h, ring, staging, full, empty);
    }
}

#endif

#define KERNEL(name, high, type, width, epilogue)                                                                            \
    extern "C" __global__ void CLUSTER_OF_TWO __launch_bounds__(384, 1)                                                     \
        name##_##type##_##width##_##epilogue(const __grid_constant__ Maps maps, const __grid_constant__ Shape s,            \
                                             const __grid_constant__ Heads h) {                                             \
        RUN(high, type, width, epilogue)                                                                                    \
    }
#if HOPPER
#define RUN(high, type, width, epilogue) project<high, width, type, epilogue>(maps, s, h);
#else
#define RUN(high, type, width, epilogue)
#endif
#define EPILOGUES(type, width)                     \
    KERNEL(project_tiles, 1, type, width, HEADS)    \
    KERNEL(project_tiles, 1, type, width, RESIDUAL) \
    KERNEL(project_tiles, 1, type, width, SWIGLU)
#define WIDTHS(type) EPILOGUES(type, 96) EPILOGUES(type, 128) EPILOGUES(type, 160) EPILOGUES(type, 256)
#define TALL(type, width)                               \
    KERNEL(project_tall_tiles, 2, type, width, HEADS)    \
    KERNEL(project_tall_tiles, 2, type, width, RESIDUAL) \
    KERNEL(project_tall_tiles, 2, type, width, SWIGLU)
