// The products of project_batch.cuh: quants become fp16, and warpgroups add up stages.
#pragma once

#include "project_batch_plan.cuh"

#if HOPPER

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

// Nibbles are expanded to weights times 2^-NIBBLE_POWER, so that a scale fits fp16 times what makes a subnormal of them: one AND, and one
// multiplication with the addition of what is subtracted. Scales are below 2^NIBBLE_POWER / 4: src/weights.rs refuses others.
constexpr int NIBBLE_POWER = 4;

// This lane's part of a stage's quantised columns of a warp's 16 rows, as wgmma's A: rows g and, `apart` further, its partner.
template <Type T, int DEPTH>
struct Expander {
    static constexpr int ROW = DEPTH * 16 / Layout<T>::PER16;        // bytes of a row in a stage, with their swizzle
    static constexpr float DOWN = 1.0f / (1 << NIBBLE_POWER), UP = 262144.0f * DOWN;
    static constexpr int WORDS = DEPTH / 64 * (T == Q4_1 ? 2 : 1);  // of a row's scales of a stage
    static constexpr int AHEAD = DEPTH == 128 ? 8 : 4;               // stages whose scales are under way
    const uint32_t* scales;                                 // of row `lane`, for half of the lanes
    uint32_t ring, place;  // `place`: of row g among the quants of 16 rows
    uint32_t now[2][WORDS];

    __device__ __forceinline__ void start(uint32_t ring_, const __half* all, int cols, int row, int apart) {
        int lane = threadIdx.x % 32;
        ring = ring_;
        int g = lane / 4;
        place = g * ROW + ((ROW == 128 ? g : g >> 1 & 3) << 4);
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

    // Expands the 64 columns `half` of a stage; `from` is this lane's place in the first columns.
    __device__ __forceinline__ void expand(uint32_t from, int half, uint32_t (&a)[4][4]) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int b = 0; b < 2; b++) {  // blocks of 32 columns
                int block = half * 2 + b;
                __half2 both = halves(now[r][T == Q4_1 ? block : half]);
                if constexpr (T == Q8_0) {
                    const __half2 scale = b == 0 ? __low2half2(both) : __high2half2(both), offset = __float2half2_rn(1152.0f);
#pragma unroll
                    for (int i = 0; i < 2; i++) {  // 16 columns
                        uint4 v = load_shared((from ^ ((block * 2 + i) << 4)) + r * (8 * ROW));
                        uint32_t low = t & 2 ? v.y : v.x, high = t & 2 ? v.w : v.z, pick = t & 1 ? 0x4342 : 0x4140;
                        a[b * 2 + i][r] = bits(__hmul2(__hsub2(halves(__byte_perm(low, 0x64646464, pick)), offset), scale));
                        a[b * 2 + i][2 + r] = bits(__hmul2(__hsub2(halves(__byte_perm(high, 0x64646464, pick)), offset), scale));
                    }
                } else {
                    // Nibbles at bits 6 to 9 are the subnormal q x 2^-18.
                    __half2 factor = __hmul2(both, __float2half2_rn(UP)), summand = __hmul2(both, __float2half2_rn(T == Q4_1 ? DOWN : -8.0f * DOWN));
                    factor = T == Q4_1 || b == 0 ? __low2half2(factor) : __high2half2(factor);
                    summand = T == Q4_1 || b == 1 ? __high2half2(summand) : __low2half2(summand);
                    uint4 v = load_shared((from ^ (block << 4)) + r * (8 * ROW));
                    uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        __half2 q = halves(__funnelshift_l(word[i], word[i], 6 - 4 * t) & 0x03c003c0);
                        a[b * 2 + i / 2][i % 2 * 2 + r] = bits(__hfma2(q, factor, summand));
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
        constexpr int BUFFERS = P::TEAMS == 2 ? 1 : 2;  // the other team's warps work while one's wait
        uint32_t a[BUFFERS][4][4] = {};
        int index = 0;
        for (int k = first; k < item.end; k += P::TEAMS, index++, at.next(s.stages, P::TEAMS)) {
            expander.take(index);
            fetch(k + Scales::AHEAD * P::TEAMS, index);
            barrier_wait(full + at.stage * 8, at.parity);
            uint32_t stage = __shfl_sync(0xffffffffu, ring + at.stage * stage_bytes, 0);  // one for the warp
            uint32_t from = stage + P::X_BYTES + unit * UNIT * P::ROW + expander.place;
#pragma unroll
            for (int half = 0; half < P::DEPTH / 64; half++) {
                uint32_t (&now)[4][4] = a[half % BUFFERS];
                if (live) expander.expand(from, half, now);
                uint64_t b = operand(stage + half * (WIDTH * 128));
                wgmma_fence();
#pragma unroll
                for (int j = 0; j < 4; j++) wgmma<WIDTH>(sum, now[j], b + j * 2, 1);
                wgmma_commit();
                wgmma_wait<BUFFERS - 1>();  // the half before this one, at least: its registers, and its stage, are free
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
        if constexpr (T != Q8_0) {
#pragma unroll
            for (int i = 0; i < WIDTH / 2; i++) sum[i] *= 1 << NIBBLE_POWER;
        }
    }
}

#endif
