// The ring of project_batch.cuh: one thread asks for weights and activations, stage by stage.
#pragma once

#include "project_batch_plan.cuh"

#if HOPPER

// As copy_box_once, of five dimensions.
__device__ __forceinline__ void copy_head_once(uint32_t to, const CUtensorMap* map, int column, int head, uint32_t barrier) {
    const uint64_t evict_first = 0x12f0000000000000;
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %3, %3, %4}], "
        "[%5], %6;" ::"r"(to),
        "l"(map), "r"(column), "r"(0), "r"(head), "r"(barrier), "l"(evict_first)
        : "memory");
}

// One lane of a warp, which the compiler knows to be alone.
__device__ __forceinline__ bool elect() {
    uint32_t chosen;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
    return chosen != 0;
}

// Fetches a map ahead of the first copy by it.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

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
    prefetch_map(&maps.x);
    int ahead = 0;
    for (int i = first; i < s.ranges && ahead < s.stages; i += stride) {
        Item<P> item(s, i);
        for (int k = item.begin; k < item.end && ahead < s.stages; k++, ahead++) weights(item, k, ahead);
    }
    depend();  // the end of a grid orders its writes before these copies: a fence would be one of the whole chip
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

#endif
