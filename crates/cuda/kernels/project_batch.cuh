// Projection of a batch on Hopper: Y = X W^T for 2 to 128 tokens, X fp16 [tokens][cols], W any type [rows][cols], and what
// stands between it and the next projection: the norm before, and after it the residual sum or the placing of heads.
//
// Floor: the weights' bytes over the memory's bandwidth; each is read once, for all tokens. Beside them a kernel's beginning
// and end count, hence five kernels a layer.
// The weights are the M side of wgmma, 64 rows a warpgroup, the tokens N, WIDTH at once. One thread streams both operands
// through a ring of stages by bulk tensor copies; the first weights are under way before the kernel before this one has ended.
// fp16 weights are read by wgmma where they land; quantised ones are expanded to fp16 in registers. Products of rows that a
// tile does not have are made of whatever lies there, and dropped. Where 64 rows or fewer are a block's, two teams of warps take
// every second stage each, since a chain of products is a chain of latencies.
//
// A norm is spread over its neighbours. RESIDUAL adds to x and leaves it times the next norm's weight, times a power of two that
// the vector before it suggests, in fp16, with sums of squares of its rows; HEADS and SWIGLU multiply their sums with what then
// makes it the norm. What they do takes whole sums of few rows: a cluster of blocks, four (RESIDUAL) or two (HEADS, whose range is a head),
// shares the columns, and parts meet in shared memory, each block ending every fourth or second tile of eight tokens. That
// also keeps low what a multiprocessor takes in, which is what counts from 64 tokens on: activations for as many rows as may be.
// Ranges and splits are a rule of the matrix alone (src/batch.rs): a token's result depends on neither its batch mates nor WIDTH.
// Grid: a cluster a range; SWIGLU a block a range, STORE one block a multiprocessor at most. 128 x (GROUPS x teams + 1) threads.
#pragma once

#include "cluster.cuh"
#include "epilogue.cuh"
#include "heads.cuh"
#include "normed.cuh"
#include "weights.cuh"

constexpr Epilogue HEADS = Epilogue(3);
constexpr int UNIT = 16;  // rows; ranges are whole units
constexpr int MOST_STAGES = 16;

struct Maps {
    CUtensorMap lower, upper;  // weights: the lower and the higher of the ranges, or heads
    CUtensorMap x;             // WIDTH tokens, 64 columns
};

struct Task {
    const int* count;      // tokens
    const __half* scales;  // of quantised weights
    int rows, cols;
    int ranges;
    int stages;   // of the ring
    int mailbox;  // bytes before it
    Normed normed;      // HEADS, SWIGLU: X as it is read
    Residual residual;  // RESIDUAL
    Heads heads;        // HEADS
    void* out;          // STORE: fp32 [tokens][rows]; SWIGLU: fp16 [tokens][rows / 2]
};

#if HOPPER

template <Type T, int WIDTH, int GROUPS, Epilogue E>
struct Plan {
    static constexpr int SPLITS = E == RESIDUAL ? 4 : E == HEADS ? 2 : 1;  // of the columns, over a cluster
    static constexpr int TEAMS = GROUPS == 1 && E != STORE ? 2 : 1;
    // Columns of a stage: 128 bytes of a row of weights, but for nibbles beside the activations of 128 tokens.
    static constexpr int DEPTH = T == F16 ? 64 : T == Q8_0 || WIDTH == 128 ? 128 : 256;
    static constexpr int X_BYTES = WIDTH * DEPTH * 2;
    static constexpr int ROW = DEPTH * 16 / Layout<T>::PER16;  // bytes of a row of weights in a stage
    static constexpr int CONSUMERS = GROUPS * TEAMS;
    static constexpr int SCALES = T == F16 ? 0 : T == Q4_1 ? 2048 : 1024;  // bytes of a warp's ring of scales
    // Registers that consumers have of what the fourth part of a warpgroup's does not need; 0 if there are enough.
    static constexpr int REGISTERS = WIDTH < 128 || CONSUMERS == 1 ? 0 : CONSUMERS == 2 ? 232 : 160;
};

// The address in block `rank` of the cluster of what lies at `address` here.
__device__ __forceinline__ uint32_t there(uint32_t address, uint32_t rank) {
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

// Asynchronously to another block's shared memory; its barrier counts the bytes.
__device__ __forceinline__ void send(uint32_t to, float4 v, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ float4 load_shared_sums(uint32_t at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// As copy_box_once, of five dimensions.
__device__ __forceinline__ void copy_head_once(uint32_t to, const CUtensorMap* map, int column, int head, uint32_t barrier) {
    const uint64_t evict_first = 0x12f0000000000000;
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %3, %3, %4}], "
        "[%5], %6;" ::"r"(to),
        "l"(map), "r"(column), "r"(0), "r"(head), "r"(barrier), "l"(evict_first)
        : "memory");
}

// What a block computes: a range of rows, and stages of columns.
template <class P>
struct Item {
    int row, rows, begin, end;
    __device__ __forceinline__ Item(const Task& s, int range) {
        int units = s.rows / UNIT, stages = s.cols / P::DEPTH;
        row = units * range / s.ranges * UNIT, rows = units * (range + 1) / s.ranges * UNIT - row;
        int rank = P::SPLITS > 1 ? cluster_rank() : 0;
        begin = stages * rank / P::SPLITS, end = stages * (rank + 1) / P::SPLITS;
    }
};

// Rows of the highest range; the others have as many or UNIT less.
__device__ __forceinline__ int most_rows(const Task& s) { return (s.rows / UNIT + s.ranges - 1) / s.ranges * UNIT; }

struct Place {  // in a ring, and the parity of the round
    int stage = 0, parity = 0;
    __device__ __forceinline__ void next(int stages, int by = 1) {
        stage += by;
        if (stage >= stages) stage -= stages, parity ^= 1;
    }
};

template <Type T, int WIDTH, int GROUPS, Epilogue E>
__device__ __forceinline__ void produce(const Maps& maps, const Task& s, uint32_t ring, uint32_t full, uint32_t empty) {
    using P = Plan<T, WIDTH, GROUPS, E>;
    const int most = most_rows(s), stage_bytes = P::X_BYTES + most * P::ROW;
    const int first = blockIdx.x / P::SPLITS, stride = gridDim.x / P::SPLITS;
    auto weights = [&](const Item<P>& item, int k, int stage) {
        uint32_t to = ring + stage * stage_bytes + P::X_BYTES;
        barrier_expect(full + stage * 8, P::X_BYTES + item.rows * P::ROW);
        int column = k * P::ROW / (T == F16 ? 2 : 1);
        if constexpr (E == HEADS) copy_head_once(to, &maps.upper, column, item.row / HEAD, full + stage * 8);
        else copy_box_once(to, item.rows == most ? &maps.upper : &maps.lower, column, item.row, full + stage * 8);
    };
    // The weights of the first stages do not wait for the activations.
    int ahead = 0;
    for (int i = first; i < s.ranges && ahead < s.stages; i += stride) {
        Item<P> item(s, i);
        for (int k = item.begin; k < item.end && ahead < s.stages; k++, ahead++) weights(item, k, ahead);
    }
    depend();
    asm volatile("fence.proxy.async;" ::: "memory");
    int step = 0;
    Place at;
    for (int i = first; i < s.ranges; i += stride) {
        Item<P> item(s, i);
        for (int k = item.begin; k < item.end; k++, step++, at.next(s.stages)) {
            if (step >= ahead) {
                barrier_wait(empty + at.stage * 8, at.parity ^ 1);
                weights(item, k, at.stage);
            }
#pragma unroll
            for (int half = 0; half < P::DEPTH / 64; half++)
                copy_box(ring + at.stage * stage_bytes + half * (WIDTH * 128), &maps.x, k * P::DEPTH + half * 64, 0, full + at.stage * 8);
        }
    }
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

// This lane's part of a stage's quantised columns of a warp's 16 rows, as wgmma's A: rows g and, `apart` further, its partner.
template <Type T, int DEPTH>
struct Expander {
    static constexpr int WORDS = DEPTH / 64 * (T == Q4_1 ? 2 : 1);  // of a row's scales of a stage
    static constexpr int AHEAD = DEPTH == 128 ? 8 : 4;               // stages whose scales are under way
    const uint32_t* scales;                                 // of row `lane`, for half of the lanes
    uint32_t ring;
    uint32_t now[2][WORDS];

    __device__ __forceinline__ void start(uint32_t ring_, const __half* all, int cols, int row, int apart) {
        int lane = threadIdx.x % 32;
        ring = ring_;
        scales = reinterpret_cast<const uint32_t*>(all) + size_t(row + lane % 8 + lane / 8 % 2 * apart) * (cols / DEPTH * WORDS) + lane / 16 * 4;
    }

    // Asks for those of stage k, which is the index-th of this warp.
    __device__ __forceinline__ void fetch(int k, int index) {
        int lane = threadIdx.x % 32;
        constexpr int BYTES = WORDS * 4 < 16 ? WORDS * 4 : 16;  // of a lane
        if (lane < (WORDS == 8 ? 32 : 16))
            asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(ring + (index % AHEAD * 16 + lane % 16) * (WORDS * 4) + lane / 16 * 16),
                         "l"(scales + k * WORDS), "n"(BYTES)
                         : "memory");
    }
    __device__ __forceinline__ void take(int index) {
        copy_wait<AHEAD - 1>();
        __syncwarp();
        int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int i = 0; i < WORDS; i += 2)
                asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                             : "=r"(now[r][i]), "=r"(now[r][i + 1])
                             : "r"(ring + ((index % AHEAD * 16 + r * 8 + g) * WORDS + i) * 4)
                             : "memory");
        }
        __syncwarp();  // the place is free
    }

    // Expands the 64 columns `half` of the stage in which this warp's rows begin at `from`.
    __device__ __forceinline__ void expand(uint32_t from, int half, uint32_t (&a)[4][4]) {
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = g + r * 8;
#pragma unroll
            for (int b = 0; b < 2; b++) {  // blocks of 32 columns
                int block = half * 2 + b;
                Scale scale;
                if constexpr (T == Q4_1) {
                    __half2 both = halves(now[r][block]);
                    scale = {__low2half2(both), __high2half2(both)};
                } else {
                    __half2 both = halves(now[r][block / 2]);
                    scale.scale = block % 2 == 0 ? __low2half2(both) : __high2half2(both);
                }
                if constexpr (T == Q8_0) {
                    const __half2 offset = __float2half2_rn(1152.0f);
#pragma unroll
                    for (int i = 0; i < 2; i++) {  // 16 columns
                        uint4 v = load_shared(from + row * 128 + (((block * 2 + i) ^ g) << 4));
                        uint32_t low = t & 2 ? v.y : v.x, high = t & 2 ? v.w : v.z, pick = t & 1 ? 0x4342 : 0x4140;
                        a[b * 2 + i][r] = bits(__hmul2(__hsub2(halves(__byte_perm(low, 0x64646464, pick)), offset), scale.scale));
                        a[b * 2 + i][2 + r] = bits(__hmul2(__hsub2(halves(__byte_perm(high, 0x64646464, pick)), offset), scale.scale));
                    }
                } else {
                    const __half2 offset = __float2half2_rn(T == Q4_0 ? 1032.0f : 1024.0f);
                    constexpr int ROW = DEPTH / 2;  // of 128 bytes, or of 64, with their swizzle
                    uint4 v = load_shared(from + row * ROW + ((block ^ (ROW == 128 ? g : row >> 1 & 3)) << 4));
                    uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        __half2 q = __hsub2(halves(((word[i] >> (4 * t)) & 0x000f000f) | 0x64006400), offset);
                        a[b * 2 + i / 2][i % 2 * 2 + r] = bits(T == Q4_0 ? __hmul2(q, scale.scale) : __hfma2(q, scale.scale, scale.minimum));
                    }
                }
            }
        }
    }
};

// The sums of a team over its stages: sum[4 j + c] of warp w, lane (g, t) is of row 16 w + g + 8 (c / 2) of the warpgroup's 64, token
// 8 j + 2 t + c % 2. A stage is free when a thread of each warpgroup says so, or a lane of each warp where warps read weights themselves.
template <Type T, int WIDTH, int GROUPS, Epilogue E>
__device__ __forceinline__ void multiply(float (&sum)[WIDTH / 2], const Task& s, const Item<Plan<T, WIDTH, GROUPS, E>>& item, Place& at, uint32_t ring,
                                         uint32_t full, uint32_t empty, uint32_t scales) {
    using P = Plan<T, WIDTH, GROUPS, E>;
    const int stage_bytes = P::X_BYTES + most_rows(s) * P::ROW;
    int group = threadIdx.x / 128 % GROUPS, team = threadIdx.x / 128 / GROUPS, before = 0;
    if (P::TEAMS == 2 && team == 1) at.next(s.stages);
    const int first = item.begin + team;
    if constexpr (T != F16) {  // whose stages are so wide that some may have none
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) sum[i] = 0.0f;
    }
    if constexpr (T == F16) {
        for (int k = first; k < item.end; k += P::TEAMS, at.next(s.stages, P::TEAMS)) {
            barrier_wait(full + at.stage * 8, at.parity);
            uint64_t b = operand(ring + at.stage * stage_bytes);
            uint64_t a = operand(ring + at.stage * stage_bytes + P::X_BYTES + group * (64 * P::DEPTH * 2));
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < P::DEPTH / 16; j++) wgmma<WIDTH>(sum, a + j * 2, b + j * 2, k > first || j > 0);
            wgmma_commit();
            // The stage before this one is read: its products are done when at most this one's are pending.
            wgmma_wait<1>();
            if (k > first && threadIdx.x % 128 == 0) barrier_arrive(empty + before * 8);
            before = at.stage;
        }
        wgmma_wait<0>();
        settled(sum);
        if (threadIdx.x % 128 == 0) barrier_arrive(empty + before * 8);
    } else {
        int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, unit = group * 4 + warp;
        bool live = unit * UNIT < item.rows;
        using Scales = Expander<T, P::DEPTH>;
        Scales expander;
        expander.start(scales, s.scales, s.cols, live ? item.row + unit * (E == HEADS ? 8 : UNIT) : 0, E == HEADS ? 64 : 8);
        auto fetch = [&](int k, int index) {
            if (k < item.end) expander.fetch(k, index);
            copy_commit();
        };
#pragma unroll
        for (int i = 0; i < Scales::AHEAD; i++) fetch(first + i * P::TEAMS, i);
        uint32_t a[2][4][4] = {};
        int index = 0;
        for (int k = first; k < item.end; k += P::TEAMS, index++, at.next(s.stages, P::TEAMS)) {
            expander.take(index);
            fetch(k + Scales::AHEAD * P::TEAMS, index);
            barrier_wait(full + at.stage * 8, at.parity);
            uint32_t stage = ring + at.stage * stage_bytes;
#pragma unroll
            for (int half = 0; half < P::DEPTH / 64; half++) {
                if (live) expander.expand(stage + P::X_BYTES + unit * UNIT * P::ROW, half, a[half % 2]);
                uint64_t b = operand(stage + half * (WIDTH * 128));
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; j++) wgmma<WIDTH>(sum, a[half % 2][j], b + j * 2, 1);
                wgmma_commit();
                wgmma_wait<1>();  // the half before this one: its registers, and its stage, are free
                if (half == 0 && k > first) {
                    __syncwarp();
                    if (lane == 0) barrier_arrive(empty + before * 8);
                }
            }
            before = at.stage;
        }
        wgmma_wait<0>();
        settled(sum);
        __syncwarp();
        if (lane == 0 && first < item.end) barrier_arrive(empty + before * 8);
    }
}

// The first team adds the second's sums to its own; the second is done. Through the ring, which both have read.
template <int WIDTH, int TEAMS>
__device__ __forceinline__ bool meet(float (&sum)[WIDTH / 2], uint32_t ring) {
    if constexpr (TEAMS == 2) {
        int tid = threadIdx.x % 128;
        asm volatile("bar.sync 1, 256;" ::: "memory");
        if (threadIdx.x >= 128) {
#pragma unroll
            for (int j = 0; j < WIDTH / 8; j++)
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(ring + (j * 128 + tid) * 16), "f"(sum[4 * j]), "f"(sum[4 * j + 1]),
                             "f"(sum[4 * j + 2]), "f"(sum[4 * j + 3])
                             : "memory");
        }
        asm volatile("bar.sync 1, 256;" ::: "memory");
        if (threadIdx.x >= 128) return false;
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j++) {
            float4 other = load_shared_sums(ring + (j * 128 + tid) * 16);
            sum[4 * j] += other.x, sum[4 * j + 1] += other.y, sum[4 * j + 2] += other.z, sum[4 * j + 3] += other.w;
        }
    }
    return true;
}

// The splits of the columns meet: block `rank` ends tiles rank, rank + SPLITS, ... of eight tokens, whose whole sums it gets. `mailbox`
// takes the other blocks' of its tiles, [block][tile][unit][lane] of 16 bytes, and `arrived` counts them. Says how many tiles are its own.
template <int WIDTH, int SPLITS>
__device__ __forceinline__ int exchange(const float (&sum)[WIDTH / 2], float (&own)[WIDTH / 2 / SPLITS], int units, int tokens, uint32_t mailbox,
                                        uint32_t arrived) {
    constexpr int TILES = WIDTH / 8 / SPLITS;  // of a block
    int lane = threadIdx.x % 32, unit = threadIdx.x / 32, tiles = (tokens + 7) / 8, rank = cluster_rank();
    bool live = unit < units;
    if (live) {
#pragma unroll
        for (int to = 0; to < SPLITS; to++) {
            int from = rank < to ? rank : rank - 1;
            uint32_t there_box = there(mailbox, to) + ((from * TILES * units + unit) * 32 + lane) * 16, there_arrived = there(arrived, to);
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                const float* a = sum + 4 * (i * SPLITS + to);
                if (to == rank) own[4 * i] = a[0], own[4 * i + 1] = a[1], own[4 * i + 2] = a[2], own[4 * i + 3] = a[3];
                else if (i * SPLITS + to < tiles) send(there_box + i * units * 512, make_float4(a[0], a[1], a[2], a[3]), there_arrived);
            }
        }
    }
    int mine = max(0, (tiles + SPLITS - 1 - rank) / SPLITS);
    if (mine == 0) return 0;
    barrier_wait(arrived, 0);
    if (live) {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            if (i >= mine) break;
            float4 total = make_float4(own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3]), all;
#pragma unroll
            for (int block = 0; block < SPLITS; block++) {  // in order, whoever adds
                float4 part = block == rank ? total : load_shared_sums(mailbox + (((block < rank ? block : block - 1) * TILES + i) * units * 32 + unit * 32 + lane) * 16);
                all = block == 0 ? part : make_float4(all.x + part.x, all.y + part.y, all.z + part.z, all.w + part.w);
            }
            own[4 * i] = all.x, own[4 * i + 1] = all.y, own[4 * i + 2] = all.z, own[4 * i + 3] = all.w;
        }
    }
    return mine;
}

// Of each token of a block's tiles, one number made of all warps': [warp][token] in `parts`, from lanes with g = 0; then `combine`
// makes results[token] of the warps'. All threads of WARPS warps take part.
template <int WARPS, int TOKENS, class F>
__device__ __forceinline__ void together(const float2 (&value)[TOKENS / 8], bool live, int mine, float* parts, float* results, F combine) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane < 4 && live) {
#pragma unroll
        for (int i = 0; i < TOKENS / 8; i++) *reinterpret_cast<float2*>(parts + warp * TOKENS + i * 8 + 2 * lane) = value[i];
    }
    asm volatile("bar.sync 2, %0;" ::"n"(WARPS * 32) : "memory");
    for (int token = threadIdx.x; token < mine * 8; token += WARPS * 32) results[token] = combine(parts + token);
    asm volatile("bar.sync 2, %0;" ::"n"(WARPS * 32) : "memory");
}

__device__ __forceinline__ float across(float v, bool most) {  // the lanes of one t
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {
        float other = __shfl_xor_sync(0xffffffffu, v, mask);
        v = most ? fmaxf(v, other) : v + other;
    }
    return v;
}

// Whole sums go to the residual stream.
template <int WIDTH, int GROUPS>
__device__ __forceinline__ void finish_residual(const float (&sum)[WIDTH / 2], const Residual& r, int rows, int row0, int range, int units, int tokens,
                                                const float* powers, uint32_t mailbox, uint32_t arrived, float* parts, float* results) {
    constexpr int SPLITS = 4, TILES = (WIDTH / 8 + SPLITS - 1) / SPLITS, ROUNDED = TILES * SPLITS * 8;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, unit = threadIdx.x / 32, rank = cluster_rank();
    bool live = unit < units;
    int row = row0 + unit * UNIT + g;
    float weight[2] = {}, x[TILES][4], own[TILES * 4];
    if (live) {
        weight[0] = r.weight[row], weight[1] = r.weight[row + 8];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int token = min((i * SPLITS + rank) * 8 + 2 * t + c, tokens - 1);
                x[i][c] = r.x[token * rows + row], x[i][c + 2] = r.x[token * rows + row + 8];
            }
        }
    }
    int mine;
    if constexpr (ROUNDED == WIDTH) {
        mine = exchange<WIDTH, SPLITS>(sum, own, units, tokens, mailbox, arrived);
    } else {  // 16 tokens are two tiles for four blocks
        float padded[ROUNDED / 2] = {};
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) padded[i] = sum[i];
        mine = exchange<ROUNDED, SPLITS>(padded, own, units, tokens, mailbox, arrived);
    }
    if (mine == 0) return;
    float2 square[TILES];
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        float squares[2] = {};
        if (live && i < mine) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                int token = (i * SPLITS + rank) * 8 + 2 * t + c % 2, at = token * rows + row + c / 2 * 8;
                float v = x[i][c] + own[4 * i + c] * r.factor;
                squares[c % 2] += v * v;
                if (token < tokens) {
                    r.x[at] = v;
                    r.scaled[at] = as_half(v * weight[c / 2] * powers[token]);
                }
            }
        }
        square[i] = make_float2(across(squares[0], false), across(squares[1], false));
    }
    together<GROUPS * 4, TILES * 8>(square, live, mine, parts, results, [&](const float* of) {
        float total = 0.0f;
        for (int u = 0; u < units; u++) total += of[u * TILES * 8];
        return total;
    });
    for (int i = threadIdx.x; i < mine * 8; i += GROUPS * 128) {
        int token = (i / 8 * SPLITS + rank) * 8 + i % 8;
        if (token < tokens) r.squares[range * MOST_TOKENS + token] = results[i];
    }
}

// Whole sums of a head: warp w, lane g has element 8 w + g and its partner i + 64. `factors` makes X its norm.
template <int WIDTH>
__device__ __forceinline__ void finish_heads(const float (&sum)[WIDTH / 2], const Heads& h, int head, int tokens, const float* factors, const int* slots,
                                             uint32_t mailbox, uint32_t arrived, float* parts, float* results) {
    constexpr int SPLITS = 2, TILES = WIDTH / 8 / SPLITS;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, element = threadIdx.x / 32 * 8 + g, rank = cluster_rank();
    bool query = head < h.heads, value = head >= h.heads + KV_HEADS;
    float weight[2] = {1.0f, 1.0f}, own[TILES * 4];
    float2 turn[TILES][2], most[TILES];
    auto token_of = [&](int i, int c) { return (i * SPLITS + rank) * 8 + 2 * t + c; };
    if (!value) {
        const float* from = query ? h.q_norm : h.k_norm;
        weight[0] = from[element], weight[1] = from[element + 64];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int c = 0; c < 2; c++) turn[i][c] = h.rotations[min(token_of(i, c), tokens - 1) * (HEAD / 2) + element];
        }
    }
    int mine = exchange<WIDTH, SPLITS>(sum, own, HEAD / UNIT, tokens, mailbox, arrived);
    if (mine == 0) return;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++) own[4 * i + c] *= factors[token_of(i, c % 2)];
    }
    if (!value) {
        float2 square[TILES];
#pragma unroll
        for (int i = 0; i < TILES; i++)
            square[i] = make_float2(across(own[4 * i] * own[4 * i] + own[4 * i + 2] * own[4 * i + 2], false),
                                    across(own[4 * i + 1] * own[4 * i + 1] + own[4 * i + 3] * own[4 * i + 3], false));
        together<8, TILES * 8>(square, true, mine, parts, results, [](const float* of) {
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < 8; w++) total += of[w * TILES * 8];
            return rsqrtf(total / HEAD + EPSILON);
        });
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float f = results[i * 8 + 2 * t + c], a = own[4 * i + c] * f * weight[0], b = own[4 * i + 2 + c] * f * weight[1];
                own[4 * i + c] = a * turn[i][c].x - b * turn[i][c].y;
                own[4 * i + 2 + c] = b * turn[i][c].x + a * turn[i][c].y;
            }
        }
    }
    if (!query && h.kv == KV_Q8_0) {
#pragma unroll
        for (int i = 0; i < TILES; i++)
            most[i] = make_float2(across(fmaxf(fabsf(own[4 * i]), fabsf(own[4 * i + 2])), true),
                                  across(fmaxf(fabsf(own[4 * i + 1]), fabsf(own[4 * i + 3])), true));
        together<8, TILES * 8>(most, true, mine, parts, results, [](const float* of) {
            float all = 0.0f;
#pragma unroll
            for (int w = 0; w < 8; w++) all = fmaxf(all, of[w * TILES * 8]);
            return all;
        });
    }
    Cache cache = value ? h.values : h.keys;
    int kv_head = (head - h.heads) % KV_HEADS;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            int token = token_of(i, c);
            if (token >= tokens) break;
            float low = own[4 * i + c], high = own[4 * i + 2 + c];
            if (query) {
                __half* to = h.q + (size_t(token) * h.heads + head) * HEAD + element;
                to[0] = __float2half_rn(low), to[64] = __float2half_rn(high);
                continue;
            }
            int slot = slots[token];
            size_t row = cache_row(slot / BLOCK, kv_head) + slot % BLOCK;
            if (h.kv == KV_BF16) {
                __half* to = reinterpret_cast<__half*>(cache.values) + row * HEAD + element;
                to[0] = __float2half_rn(as_bf16(low)), to[64] = __float2half_rn(as_bf16(high));
            } else {
                float scale = results[i * 8 + 2 * t + c] / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
                char* to = reinterpret_cast<char*>(cache.values) + row * HEAD + element;
                to[0] = __float2int_rn(low * inverse), to[64] = __float2int_rn(high * inverse);
                if (element == 0) cache.scales[row] = scale;
            }
        }
    }
}

template <int WIDTH>
__device__ __forceinline__ void finish_swiglu(const float (&sum)[WIDTH / 2], __half* out, int rows, int row, int tokens, const float* factors) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    out += row / 2 + g;
#pragma unroll
    for (int j = 0; j < WIDTH / 8; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            int token = 8 * j + 2 * t + c;
            float f = factors[token];
            if (token < tokens) out[token * (rows / 2)] = __float2half_rn(swiglu(sum[4 * j + c] * f, sum[4 * j + 2 + c] * f));
        }
    }
}

template <int WIDTH>
__device__ __forceinline__ void finish_store(const float (&sum)[WIDTH / 2], float* out, int rows, int row, int tokens) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    asm volatile("" : "+r"(rows));  // places are not worth registers while the products run
    out += row + g;
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) {
        int token = i / 4 * 8 + 2 * t + i % 2;
        if (token < tokens) out[size_t(token) * rows + i / 2 % 2 * 8] = sum[i];
    }
}

template <Type T, int WIDTH, int GROUPS, Epilogue E>
__device__ __forceinline__ void project(const Maps& maps, const Task& s) {
    using P = Plan<T, WIDTH, GROUPS, E>;
    extern __shared__ __align__(1024) uint8_t dynamic[];
    __shared__ __align__(8) uint64_t barriers[2 * MOST_STAGES + 2];
    __shared__ __align__(16) float factors[WIDTH];  // of tokens: the norm of X; RESIDUAL: the power of what is left
    __shared__ __align__(16) uint8_t scales[T == F16 ? 16 : P::CONSUMERS * 4 * P::SCALES];
    __shared__ int slots[E == HEADS ? WIDTH : 1];
    // Of this block's tokens, and of its warps.
    __shared__ __align__(16) float results[WIDTH < 32 ? 16 : WIDTH / 2], parts[P::SPLITS > 1 ? GROUPS * 4 * (WIDTH < 32 ? 16 : WIDTH / 2) : 1];
    uint32_t full = shared_address(barriers), empty = full + MOST_STAGES * 8, arrived = empty + MOST_STAGES * 8, ready = arrived + 8;
    uint32_t mailbox = shared_address(dynamic), ring = mailbox + s.mailbox;
    int tokens = min(*s.count, WIDTH), group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        for (int i = 0; i < s.stages; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, T == F16 ? GROUPS : GROUPS * 4);
        barrier_init(arrived, 1), barrier_init(ready, 3);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        if constexpr (P::SPLITS > 1) {
            Item<P> item(s, blockIdx.x / P::SPLITS);
            int tiles = ((tokens + 7) / 8 + P::SPLITS - 1 - cluster_rank()) / P::SPLITS;
            barrier_expect(arrived, tiles * (item.rows / UNIT) * 512 * (P::SPLITS - 1));
        }
    }
    __syncthreads();
    if constexpr (P::SPLITS > 1) cluster_arrive();
    release();

    if (group == P::CONSUMERS) {
        if constexpr (P::REGISTERS > 0) fewer_registers<P::CONSUMERS == 2 ? 40 : 32>();
        int helper = threadIdx.x / 32 - P::CONSUMERS * 4, lane = threadIdx.x % 32;
        if (helper == 0) {
            if (lane == 0) produce<T, WIDTH, GROUPS, E>(maps, s, ring, full, empty);
        } else if constexpr (E != STORE) {
            int thread = (helper - 1) * 32 + lane;
            if constexpr (E == HEADS)
                for (int token = thread; token < tokens; token += 96) slots[token] = cache_slot(s.heads.step, token);
            depend();
            if constexpr (E == RESIDUAL)
                for (int token = thread; token < tokens; token += 96) factors[token] = s.residual.powers[token];
            else norm_factors<P::REGISTERS == 0 ? 32 : 8>(s.normed, s.cols, tokens, thread, 96, factors, blockIdx.x == 0);
            __syncwarp();
            if (lane == 0) barrier_arrive(ready);
        }
        if constexpr (P::SPLITS > 1) __syncwarp(), cluster_wait();
        return;
    }

    if constexpr (P::REGISTERS > 0) more_registers<P::REGISTERS>();
    Place at;
    for (int i = blockIdx.x / P::SPLITS; i < s.ranges; i += gridDim.x / P::SPLITS) {
        Item<P> item(s, i);
        float sum[WIDTH / 2];
        multiply<T, WIDTH, GROUPS, E>(sum, s, item, at, ring, full, empty, shared_address(scales) + threadIdx.x / 32 * P::SCALES);
        if constexpr (P::SPLITS > 1) cluster_wait();  // the other blocks are there
        if (!meet<WIDTH, P::TEAMS>(sum, ring)) return;
        int row = threadIdx.x / 32 * UNIT;
        if constexpr (E != STORE) barrier_wait(ready, 0);
        if constexpr (E == HEADS) {
            finish_heads<WIDTH>(sum, s.heads, i, tokens, factors, slots, mailbox, arrived, parts, results);
        } else if constexpr (E == RESIDUAL) {
            depend();
            finish_residual<WIDTH, GROUPS>(sum, s.residual, s.rows, item.row, i, item.rows / UNIT, tokens, factors, mailbox, arrived, parts, results);
        } else if (row < item.rows) {
            if constexpr (E == SWIGLU) finish_swiglu<WIDTH>(sum, static_cast<__half*>(s.out), s.rows, item.row + row, tokens, factors);
            else finish_store<WIDTH>(sum, static_cast<float*>(s.out), s.rows, item.row + row, tokens);
        }
    }
}

#endif

#define KERNEL(type, width, groups, epilogue)                                                                                     \
    extern "C" __global__ void CLUSTER_##epilogue __launch_bounds__(128 * (groups * (groups == 1 && epilogue != STORE ? 2 : 1) + 1), 1) \
        project_batch_##type##_##width##_##groups##_##epilogue(const __grid_constant__ Maps maps, const __grid_constant__ Task s) {   \
        RUN(type, width, groups, epilogue)                                                                                            \
    }
#if HOPPER
#define RUN(type, width, groups, epilogue) project<type, width, groups, epilogue>(maps, s);
#else
#define RUN(type, width, groups, epilogue)
#endif
#if HOPPER
#define CLUSTER_HEADS __cluster_dims__(2, 1, 1)
#define CLUSTER_RESIDUAL __cluster_dims__(4, 1, 1)
#else
#define CLUSTER_HEADS
#define CLUSTER_RESIDUAL
#endif
#define CLUSTER_SWIGLU
#define CLUSTER_STORE
// No vocabulary of the family takes two warpgroups.
#define EPILOGUES(type, width, groups) KERNEL(type, width, groups, RESIDUAL) KERNEL(type, width, groups, SWIGLU)
#define EACH(type, width)                                                                               \
    KERNEL(type, width, 2, HEADS) EPILOGUES(type, width, 1) EPILOGUES(type, width, 2) EPILOGUES(type, width, 3) \
    KERNEL(type, width, 1, STORE) KERNEL(type, width, 3, STORE)
#define WIDTHS(type) EACH(type, 16) EACH(type, 32) EACH(type, 64) EACH(type, 128)
