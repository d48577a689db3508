// Projection of a batch on Hopper: Y = X W^T for 2 to 128 tokens, X fp16 [tokens][cols], W any type [rows][cols], and what
// stands between it and the next projection: the norm before, and after it the residual sum or the placing of heads.
//
// Floor: the weights' bytes over the memory's bandwidth; each is read once, for all tokens. Beside them a kernel's beginning
// and end count, hence five kernels a layer.
// The weights are the M side of wgmma, 64 rows a warpgroup, the tokens N, WIDTH at once. One thread streams both operands
// through a ring of stages by bulk tensor copies; the first weights are under way before the kernel before this one has ended.
// fp16 weights are read by wgmma where they land; quantised ones are expanded to fp16 in registers. Products of rows that a
// tile does not have are made of whatever lies there, and dropped. Where warps are few, or expand quants, two teams of them take
// every second stage each, since products, and what is expanded, are chains of latencies.
//
// A norm is spread over its neighbours. RESIDUAL adds to x and leaves it times the next norm's weight, times a power of two that
// the vector before it suggests, in fp16, with sums of squares of its rows; HEADS and SWIGLU multiply their sums with what then
// makes it the norm. What they do takes whole sums of few rows: a cluster of blocks, four (RESIDUAL) or two (HEADS, whose range is a head),
// shares the columns, and parts meet in shared memory, each block ending every fourth or second tile of eight tokens. That
// also keeps low what a multiprocessor takes in, which is what counts from 64 tokens on: activations for as many rows as may be.
// Ranges and splits are a rule of the matrix alone (src/batch.rs): a token's result depends on neither its batch mates nor WIDTH.
// Grid: a cluster a range; SWIGLU a block a range, STORE one block a multiprocessor at most. 128 x (GROUPS x teams + 1) threads.
#pragma once

#include "project_batch_finish.cuh"
#include "project_batch_products.cuh"
#include "project_batch_stream.cuh"

#if HOPPER

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
            if (elect()) produce<T, WIDTH, GROUPS, E>(maps, s, ring, full, empty);
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
        if (!meet<WIDTH, GROUPS, P::TEAMS>(sum, ring)) return;
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
    extern "C" __global__ void CLUSTER_##epilogue                                                                                  \
        __launch_bounds__(128 * (groups * teams(type, width, groups, epilogue) + 1), type == F16 && width <= 32 ? 2 : 1)              \
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
