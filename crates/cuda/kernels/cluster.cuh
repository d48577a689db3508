// Clusters of two blocks, and boxes of a tensor on their way back to memory (sm_90a).
#pragma once

#include "hopper.cuh"

#if HOPPER
#define CLUSTER_OF_TWO __cluster_dims__(2, 1, 1)

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Blocks of this cluster; 1 where the launch asked for none.
__device__ __forceinline__ int cluster_size() {
    uint32_t size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// Makes a block's barriers, which thread 0 has set up, known to the cluster. They have a fence of their own; .release would be one of the whole chip.
__device__ __forceinline__ void barriers_ready() {
    if (threadIdx.x == 0) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives at the barrier that lies at this address in block `rank`. Without .release.cluster, which would be a fence of the whole chip:
// only the copy engine and wgmma touch what the barriers guard.
__device__ __forceinline__ void barrier_arrive_in(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// As copy_box, to the same place in both blocks of the cluster; each block's own barrier counts the bytes.
__device__ __forceinline__ void copy_box_to_both(uint32_t to, const CUtensorMap* map, int x, int y, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(uint16_t(3))
        : "memory");
}

// A head's rows of a matrix, of which a map of five dimensions says in which order.
__device__ __forceinline__ void copy_head(uint32_t to, const CUtensorMap* map, int column, int head, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %3, %4}], [%5];" ::"r"(to), "l"(map),
        "r"(column), "r"(0), "r"(head), "r"(barrier)
        : "memory");
}

// A box from shared memory to the tensor; what lies outside of it is left out.
__device__ __forceinline__ void store_box(const CUtensorMap* map, int x, int y, uint32_t from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x), "r"(y), "r"(from) : "memory");
}

// The same, added to what is there. One box adds to an element once a launch, so the bits do not depend on an order.
__device__ __forceinline__ void add_box(const CUtensorMap* map, int x, int y, uint32_t from) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x), "r"(y), "r"(from)
                 : "memory");
}

__device__ __forceinline__ void boxes_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most PENDING groups of this thread's boxes have not been read.
template <int PENDING>
__device__ __forceinline__ void boxes_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Waits until all of this thread's boxes are written.
__device__ __forceinline__ void boxes_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders this thread's own writes to shared memory before copies and products that read them.
__device__ __forceinline__ void shared_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#else
#define CLUSTER_OF_TWO
#endif
