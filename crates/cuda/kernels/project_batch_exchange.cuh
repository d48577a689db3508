// How the sums of project_batch.cuh meet: those of two teams, of a cluster's blocks, of a block's warps.
#pragma once

#include "project_batch_plan.cuh"

#if HOPPER

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

// The first team adds the second's sums to its own; the second is done. Through the ring, which both have read.
template <int WIDTH, int GROUPS, int TEAMS>
__device__ __forceinline__ bool meet(float (&sum)[WIDTH / 2], uint32_t ring) {
    if constexpr (TEAMS == 2) {
        constexpr int TEAM = GROUPS * 128;
        int tid = threadIdx.x % TEAM;
        asm volatile("bar.sync 1, %0;" ::"n"(2 * TEAM) : "memory");
        if (threadIdx.x >= TEAM) {
#pragma unroll
            for (int j = 0; j < WIDTH / 8; j++)
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(ring + (j * TEAM + tid) * 16), "f"(sum[4 * j]), "f"(sum[4 * j + 1]),
                             "f"(sum[4 * j + 2]), "f"(sum[4 * j + 3])
                             : "memory");
        }
        asm volatile("bar.sync 1, %0;" ::"n"(2 * TEAM) : "memory");
        if (threadIdx.x >= TEAM) return false;
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j++) {
            float4 other = load_shared_sums(ring + (j * TEAM + tid) * 16);
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

#endif
